// Forward: each row block walks the key blocks from its diagonal to the left, one lane per query row, so the running count of
// kept keys is a plain vector add. Rows that are settled leave; the rest close ranks into fewer panels.
// Included inside an unnamed namespace of each per-ISA translation unit.

// What one thread works in.
struct ForwardSpace {
  Lanes lanes;
  float *q_rows, *q_panels, *out, *tile, *keys, *values, *clean;

  // Places the arrays in memory; returns the floats that they take.
  size_t place(float* memory, int D) {
    Layout layout{memory};
    for (float** x : {&q_rows, &q_panels, &out}) *x = layout.take((size_t)ROWS * D);
    tile = layout.take(KEY_BLOCK * PANEL_ROWS);
    for (float** x : {&keys, &values, &clean}) *x = layout.take((size_t)KEY_BLOCK * D);
    return layout.used;
  }
};

// The weights of one tile: scores in, weights out (in place), counts and sums carried. A row's weight of a key is
// 2^(score + decay * kept keys to its right), exactly 0 where the key is not kept and never 0 where it is.
template <bool DROPOUT>
NOINLINE void weigh_tile(Lanes& s, int lane0, float* tile, int j0, int n, uint32_t cut) {
  vf t[PANEL_VECTORS], g[PANEL_VECTORS], count[PANEL_VECTORS], sum[PANEL_VECTORS];
  vu row_key[PANEL_VECTORS];
  for (int i = 0; i < PANEL_VECTORS; i++) {
    t[i] = load(s.threshold + lane0 + i * LANES);
    g[i] = load(s.decay + lane0 + i * LANES);
    count[i] = load(s.count + lane0 + i * LANES);
    sum[i] = vf{};
    if (DROPOUT) row_key[i] = load_as<vu>(s.dropout_key + lane0 + i * LANES);
  }
  for (int j = n - 1; j >= 0; j--) {
#pragma GCC unroll 2
    for (int i = 0; i < PANEL_VECTORS; i++) {
      float* x = tile + j * PANEL_ROWS + i * LANES;
      vf score = load(x);
      vi keep = score > t[i];
      vf weight = masked(keep, exp2_vec(score + g[i] * count[i]));
      count[i] += masked(keep, splat(1.f));
      sum[i] += weight;
      if (DROPOUT) weight = masked(survives(row_key[i], j0 + j, cut), weight);
      store(x, weight);
    }
  }
  for (int i = 0; i < PANEL_VECTORS; i++) {
    store(s.count + lane0 + i * LANES, count[i]);
    store(s.sum + lane0 + i * LANES, load(s.sum + lane0 + i * LANES) + sum[i]);
  }
}

// The same relative to a running maximum, for scores so large that a plain sum could overflow.
NOINLINE void weigh_tile_shifted(Lanes& s, int lane0, float* tile, int j0, int n, bool dropout, uint32_t cut, float* out, int D) {
  for (int i = 0; i < PANEL_VECTORS; i++) {
    int at = lane0 + i * LANES;
    vf t = load(s.threshold + at), g = load(s.decay + at), count = load(s.count + at), shift = load(s.shift + at);
    vf top = shift;
    for (int j = n - 1; j >= 0; j--) {
      float* x = tile + j * PANEL_ROWS + i * LANES;
      vf score = load(x);
      vi keep = score > t;
      vf logit = score + g * count;
      logit = keep ? logit : splat(-INF);
      count += masked(keep, splat(1.f));
      top = vmax(logit, top);
      store(x, logit);
    }
    vf rescale = exp2_vec(shift - top);
    vf sum = load(s.sum + at) * rescale, part = {};
    vu row_key = load_as<vu>(s.dropout_key + at);
    for (int j = n - 1; j >= 0; j--) {
      float* x = tile + j * PANEL_ROWS + i * LANES;
      vf logit = load(x);
      vf weight = masked((vi)(logit > splat(-INF)), exp2_vec(logit - top));
      part += weight;
      if (dropout) weight = masked(survives(row_key, j0 + j, cut), weight);
      store(x, weight);
    }
    store(s.sum + at, sum + part);
    store(s.count + at, count);
    store(s.shift + at, top);
    for (int l = 0; l < LANES && at + l < s.n; l++)
      if (rescale[l] != 1.f)
        for (int d = 0; d < D; d++) out[(int64_t)(at + l) * D + d] *= rescale[l];
  }
}

// Rows whose remaining keys, all of [first, j0), together weigh at most `tolerance` of what they have: see docs/kernel.md.
static int settled(const Call& c, const Lanes& s, int j0, float norm, float bound, uint8_t* done) {
  const TraProblem& p = *c.p;
  const float tolerance = (float)p.tolerance * 0.9999f;
  const float surrogate = p.surrogate_width > 0 ? (float)(0.25001 / p.surrogate_width) : 0.f;  // steepest slope of the sigmoid
  int alive = 0;
  for (int at = 0; at < s.panels * PANEL_ROWS; at += LANES) {
    vi first = load(s.first + at);
    vi left = splat((int32_t)j0) - first;  // keys that remain
    vi stop = left <= splat((int32_t)0);
    if (tolerance > 0) {
      vf n;
      for (int i = 0; i < LANES; i++) n[i] = (float)left[i];
      vf upper = vmin(load(s.reach_norm + at) * norm, splat(bound));
      vf count = load(s.count + at), inverse = load(s.inverse + at);
      vf most_weight = exp2_vec(vmin(upper + load(s.decay + at) * count - load(s.shift + at), splat(127.f)));
      vf factor = p.needs_grad ? vmin((count + inverse) * inverse, n * (count + n)) : vmin(inverse, n);
      vf tail = most_weight * factor;
      if (surrogate > 0) {  // removed keys count too: up to n of them, but their scores are not above the threshold
        vf removed = vmin(load(s.threshold + at), upper) + load(s.decay + at) * count - load(s.shift + at);
        tail += surrogate * (most_weight * vmin(inverse, n) + n * exp2_vec(vmin(removed, splat(127.f))));
      }
      stop |= (vi)(tail <= load(s.sum + at) * tolerance);
    }
    for (int i = 0; i < LANES; i++) {
      done[at + i] = at + i >= s.n || stop[i];
      alive += !done[at + i];
    }
  }
  return alive;
}

static void write_row(const Call& c, const Lanes& s, int lane, const float* out, int64_t b, int64_t h, int reach) {
  const TraProblem& p = *c.p;
  int64_t t = s.row[lane], flat = (b * p.query_heads + h) * p.queries + t;
  int64_t offset = b * p.out.stride_b + h * p.out.stride_h + t * p.out.stride_t;
  int kept = (int)s.count[lane];
  float normaliser;
  if (s.poisoned[lane] || (kept > 0 && s.decay_bad[lane])) {
    fill_row(p.dtype, p.out.data, offset, c.D, NOT_A_NUMBER);
    normaliser = NOT_A_NUMBER;
  } else if (kept == 0) {
    fill_row(p.dtype, p.out.data, offset, c.D, 0.f);
    normaliser = INF;
  } else {
    store_row(p.dtype, p.out.data, offset, c.D, out + (int64_t)lane * c.D, (c.dropout ? p.dropout_scale : 1.f) / s.sum[lane]);
    normaliser = (float)(((double)__builtin_log2f(s.sum[lane]) + s.shift[lane]) * LN2);
  }
  if (!p.normaliser) return;
  p.normaliser[flat] = normaliser;
  reach = most(reach, s.first[lane]);
  p.reach[flat] = reach <= s.last[lane] ? reach : (int32_t)(p.query_start + t) + 1;
  p.kept[flat] = kept;
}

// What is the same for all rows of a row block and all key blocks that they walk.
struct RowBlock {
  int64_t b, h, hk;        // batch, query head, key head
  KeyFacts facts;          // of the key head
  const uint8_t* padding;  // [Tk] of the batch, or null
  float bound;             // the caller's bound of the scores, in base 2
  bool overflow;           // some product may be non-finite
  bool shifted;            // weights need a running maximum
};

static void transpose_queries(ForwardSpace& w, double scale, int D) {
  const Lanes& s = w.lanes;
  for (int g = 0; g < s.panels; g++)
    transpose_panel(w.q_rows + (int64_t)g * PANEL_ROWS * D, least(PANEL_ROWS, s.n - g * PANEL_ROWS), D,
                    (float)(scale * (double)LOG2E), w.q_panels + (int64_t)g * PANEL_ROWS * D);
}

// Fills the lanes with queries t0 .. t0 + n - 1 of the head and decides how their walk is done.
static RowBlock start_rows(const Call& c, ForwardSpace& w, int64_t b, int64_t h, int64_t t0, int n) {
  const TraProblem& p = *c.p;
  const int D = c.D;
  const int64_t hk = h / c.group;
  const uint8_t* padding = p.key_padding ? p.key_padding + b * p.keys : nullptr;
  RowBlock r{b, h, hk, c.key_facts(b, hk), padding, p.score_bound ? p.score_bound[h] * LOG2E : INF, false, false};
  Lanes& s = w.lanes;
  s.n = n;
  bool queries_bad = false;
  float largest = 0, lowest_threshold = 0;
  for (int i = 0; i < n; i++) {
    if (i + ROWS_AHEAD < n) prefetch_rows(p.dtype, p.q, b, h, t0 + i + ROWS_AHEAD, 1, D);
    float* q = w.q_rows + (int64_t)i * D;
    load_row(p.dtype, p.q.data, b * p.q.stride_b + h * p.q.stride_h + (t0 + i) * p.q.stride_t, D, q);
    fill_lane(c, s, i, b, h, t0 + i, q);
    if (!(s.reach_norm[i] < 1e18f)) queries_bad = true;
    largest = most(largest, s.reach_norm[i]);
    lowest_threshold = least(lowest_threshold, s.threshold[i]);
  }
  s.pad();
  transpose_queries(w, p.scale, D);
  __builtin_memset(w.out, 0, (size_t)n * D * sizeof(float));

  const int end = s.last[n - 1] + 1;  // keys [.., end) are seen by some row
  const int last_block = end > 0 ? (end - 1) / KEY_BLOCK : 0;
  const float norm = largest * r.facts.norm_so_far[last_block], upper = least(norm, r.bound);
  const float room = upper + __builtin_log2f(most(1.f, (float)end)) + __builtin_log2f(1.f + r.facts.value_so_far[last_block]);
  r.shifted = !(room <= 85.f * LOG2E) || lowest_threshold < -40.f;
  r.overflow = queries_bad || !(norm < 1e36f);
  if (r.shifted)
    for (int i = 0; i < s.panels * PANEL_ROWS; i++) s.shift[i] = -1e30f;
  return r;
}

// One key block as the walk reads it.
struct KeyTile {
  const float *keys, *values, *raw_values;  // values: side by side, 0 in place of what is not finite
  int64_t k_stride, v_stride, raw_stride;
  float norm;
  bool keys_bad, values_bad, padded;
};

static KeyTile read_keys(const Call& c, ForwardSpace& w, const PackedHead& packed, const RowBlock& r, int j0, int j1) {
  const TraProblem& p = *c.p;
  const int block = j0 / KEY_BLOCK, n = j1 - j0;
  KeyTile k;
  k.keys = block_f32(c, p.k, packed.keys, r.b, r.hk, j0, n, w.keys, &k.k_stride);
  k.values = k.raw_values = block_f32(c, p.v, packed.values, r.b, r.hk, j0, n, w.values, &k.v_stride);
  k.raw_stride = k.v_stride;
  k.norm = r.facts.norm[block];
  k.keys_bad = r.facts.flags[block] & KEY_NOT_FINITE;
  k.values_bad = r.facts.flags[block] & VALUE_NOT_FINITE;
  if (__builtin_expect(k.values_bad, 0))
    k.values = cleaned(k.values, &k.v_stride, n, c.D, w.clean);
  else
    k.values = side_by_side(k.values, &k.v_stride, n, c.D, w.values);
  k.padded = r.padding && __builtin_memchr(r.padding + j0, 0, n);
  return k;
}

// Scores, weights and output of one panel of rows against the keys [j0, j1).
static void forward_panel(const Call& c, ForwardSpace& w, const RowBlock& r, const KeyTile& k, int lane0, int j0, int j1) {
  const TraProblem& p = *c.p;
  const int D = c.D;
  Lanes& s = w.lanes;
  const int lanes = least(PANEL_ROWS, s.n - lane0);
  const int stop = least(j1, s.last[lane0 + lanes - 1] + 1), count = stop - j0;
  if (count <= 0) return;
  int leftmost = 0;
  if (p.first_key)
    for (int i = 0; i < lanes; i++) leftmost = most(leftmost, s.first[lane0 + i]);
  bool kept =
      score_tile(s, lane0, w.q_rows, w.q_panels + (int64_t)lane0 * D, k.keys, k.k_stride, count, k.norm, w.tile, D, p.scale);
  bool hide = k.padded || stop - 1 > s.last[lane0] || leftmost > j0;
  if (__builtin_expect(k.keys_bad || r.overflow, 0)) {
    if (poison_tile(s, lane0, w.tile, j0, count, r.padding)) kept = true;
    hide = true;
  }
  if (!kept) return;
  if (hide) mask_tile(s, lane0, w.tile, j0, count, r.padding);
  if (__builtin_expect(k.values_bad, 0)) poison_by_values(s, lane0, w.tile, k.raw_values, k.raw_stride, count, D);
  if (__builtin_expect(r.shifted, 0))
    weigh_tile_shifted(s, lane0, w.tile, j0, count, c.dropout, p.dropout_cut, w.out, D);
  else if (c.dropout)
    weigh_tile<true>(s, lane0, w.tile, j0, count, p.dropout_cut);
  else
    weigh_tile<false>(s, lane0, w.tile, j0, count, 0);
  add_panel_times_rows(w.tile, lanes, count, k.values, k.v_stride, w.out + (int64_t)lane0 * D, D, D);
}

// Writes the rows that are done, which read the keys from j0 on, and moves the others into as few panels as hold them.
static void close_ranks(const Call& c, ForwardSpace& w, const RowBlock& r, const uint8_t* done, int j0) {
  const int D = c.D;
  Lanes& s = w.lanes;
  int to = 0;
  for (int i = 0; i < s.n; i++) {
    if (done[i]) {
      write_row(c, s, i, w.out, r.b, r.h, j0);
      continue;
    }
    if (to != i) {
      s.move(to, i);
      for (float* x : {w.out, w.q_rows}) copy_row(x + (int64_t)i * D, D, x + (int64_t)to * D);
    }
    to++;
  }
  s.n = to;
  s.pad();
  transpose_queries(w, c.p->scale, D);
}

// Queries t0 .. t0 + n - 1 of one head: the walk from their diagonal to the left.
static void forward_rows(const Call& c, ForwardSpace& w, const PackedHead& packed, int64_t b, int64_t h, int64_t t0, int n) {
  const RowBlock r = start_rows(c, w, b, h, t0, n);
  Lanes& s = w.lanes;
  uint8_t done[ROWS];
  int j1 = s.last[n - 1] + 1;
  while (s.n > 0) {
    int alive = 0, j0 = 0;
    if (j1 <= 0) {
      for (int i = 0; i < s.n; i++) done[i] = 1;
    } else {
      const int block = (j1 - 1) / KEY_BLOCK;
      j0 = block * KEY_BLOCK;
      const KeyTile k = read_keys(c, w, packed, r, j0, j1);
      for (int g = 0; g < s.panels; g++) forward_panel(c, w, r, k, g * PANEL_ROWS, j0, j1);
      alive = settled(c, s, j0, j0 > 0 ? r.facts.norm_so_far[block - 1] : 0.f, r.bound, done);
      j1 = j0;
    }
    if (alive == 0 || (alive + PANEL_ROWS - 1) / PANEL_ROWS < s.panels) close_ranks(c, w, r, done, j0);
  }
}

static int forward_blocks(Call& c) {
  const TraProblem& p = *c.p;
  const int64_t heads = p.batch * p.query_heads, key_heads = p.batch * p.key_heads, blocks = (p.queries + c.rows - 1) / c.rows;
  // With many heads a thread takes a key head whole and meets its keys again while they are in its cache; with few, a row block.
  const bool whole_heads = key_heads >= 8 * p.threads;
  if (!allocate_facts(c, whole_heads)) return TRA_OUT_OF_MEMORY;
  if (!whole_heads) describe_all_keys(c);
  int failed = 0;
#pragma omp parallel num_threads(p.threads)
  {
    DenormalMode flush(true);
    ForwardSpace w;
    float* memory = workspace.take(w.place(nullptr, c.D));
    float* rows = whole_heads && c.pack ? packed_rows.take((size_t)c.visible * c.D * 2) : nullptr;
    auto run = [&](const PackedHead& packed, int64_t head, int64_t block) {
      int64_t t0 = block * c.rows;
      forward_rows(c, w, packed, head / p.query_heads, head % p.query_heads, t0, (int)least<int64_t>(c.rows, p.queries - t0));
    };
    if (!memory || (whole_heads && c.pack && !rows)) {
#pragma omp atomic write
      failed = 1;
    } else {
      w.place(memory, c.D);
      if (whole_heads) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < key_heads; i++) {
          const PackedHead packed = describe_head(c, i / p.key_heads, i % p.key_heads, rows);
          for (int64_t head = i * c.group; head < (i + 1) * c.group; head++)
            for (int64_t block = 0; block < blocks; block++) run(packed, head, block);
        }
      } else {
        // The longest walks first: the late ones then fill the gaps between threads.
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < heads * blocks; i++)
          run(packed_head(c, c.packed, i % heads / c.group), i % heads, blocks - 1 - i / heads);
      }
    }
  }
  free_facts(c);
  return failed ? TRA_OUT_OF_MEMORY : TRA_OK;
}
