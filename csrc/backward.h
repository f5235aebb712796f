// Backward: the forward's walk again, tile by tile. With P the weights and Delta = dO . O,
//   dS = P (dO V^T - Delta) on kept keys,  dV += P^T dO,  dQ += scale dS K,  dK += scale dS^T Q,  dg = sum dS (c - 1).
// With a surrogate of width w and y = sigmoid((s - threshold) / w), every key that the row sees, kept or not, also has
//   dS += P y (1 - y) / w (dO V^T - Delta),  and minus the sum of these is the threshold's gradient,
// where P of a removed key is what it would weigh if it were kept: the choice is differentiated as if it were soft.
// A row stops where the forward stopped (reach). One task owns its dK and dV, so sums have one order and need no locks.
// Included inside an unnamed namespace of each per-ISA translation unit.

// What one thread works in.
struct BackwardSpace {
  Lanes lanes;
  float *q_rows, *q_panels, *q_scaled;  // as read; transposed, times scale log2(e); times scale, non-finite rows zeroed
  float *do_rows, *do_panels, *dq;
  float *weights, *ds;  // [panel][key][lane]
  float *keys, *values, *clean, *clean_values;

  // Places the arrays in memory; returns the floats that they take.
  size_t place(float* memory, int D) {
    Layout layout{memory};
    for (float** x : {&q_rows, &q_panels, &q_scaled, &do_rows, &do_panels, &dq}) *x = layout.take((size_t)ROWS * D);
    for (float** x : {&weights, &ds}) *x = layout.take((size_t)ROWS * KEY_BLOCK);
    for (float** x : {&keys, &values, &clean, &clean_values}) *x = layout.take((size_t)KEY_BLOCK * D);
    return layout.used;
  }
};

typedef double wide __attribute__((vector_size(PART * 8)));  // a part in fp64

// Rows [begin, end) of every query head of one key head, and where their dK and dV go.
struct BackwardTask {
  int64_t batch, key_head, begin, end, work;
  float *dk, *dv;  // row of key `base`
  int64_t dk_stride, dv_stride, base, keys;
  bool slab;
};

// In: scores (in `weights`) and dO V^T (in `ds`). Out: the weights that multiplied V, and dS. steepness: 1 / surrogate width
template <bool DROPOUT, bool SURROGATE>
NOINLINE void differentiate_tile(Lanes& s, int lane0, float* weights, float* ds, int j0, int n, uint32_t cut, float survivor,
                                 float steepness) {
  vf t[PANEL_VECTORS], g[PANEL_VECTORS], count[PANEL_VECTORS], lse[PANEL_VECTORS], delta[PANEL_VECTORS], grad[PANEL_VECTORS],
      grad_threshold[PANEL_VECTORS];
  vu row_key[PANEL_VECTORS];
  for (int i = 0; i < PANEL_VECTORS; i++) {
    int at = lane0 + i * LANES;
    t[i] = load(s.threshold + at);
    g[i] = load(s.decay + at);
    count[i] = load(s.count + at);
    lse[i] = load(s.lse + at);
    delta[i] = load(s.delta + at);
    grad[i] = grad_threshold[i] = vf{};
    if (DROPOUT) row_key[i] = load_as<vu>(s.dropout_key + at);
  }
  for (int j = n - 1; j >= 0; j--) {
#pragma GCC unroll 2
    for (int i = 0; i < PANEL_VECTORS; i++) {
      int at = j * PANEL_ROWS + i * LANES;
      vf score = load(weights + at), dp = load(ds + at);
      vi keep = score > t[i];
      vf logit = score + g[i] * count[i] - lse[i];
      if (SURROGATE) logit = vmin(logit, splat(1.f));  // what it is anyhow, but in rows that are not finite
      vf if_kept = exp2_vec(logit), weight = masked(keep, if_kept);
      vf used = weight;
      if (DROPOUT) {
        vi alive = survives(row_key[i], j0 + j, cut);
        used = masked(alive, weight * survivor);
        dp = masked(alive, dp * survivor);
      }
      vf d = masked(keep, weight * (dp - delta[i]));
      grad[i] += d * count[i];
      if (SURROGATE) {
        vf odds = exp2_vec(vmin((score - t[i]) * steepness, splat(60.f)));  // y / (1 - y)
        vf slope = odds * steepness / ((1.f + odds) * (1.f + odds));
        vf soft = masked((vi)(score > splat(-INF)), if_kept * (dp - delta[i]) * slope);
        grad_threshold[i] -= soft;
        d += soft;
      }
      count[i] += masked(keep, splat(1.f));
      store(weights + at, used);
      store(ds + at, d);
    }
  }
  for (int i = 0; i < PANEL_VECTORS; i++) {
    int at = lane0 + i * LANES;
    store(s.count + at, count[i]);
    store(s.grad_decay + at, load(s.grad_decay + at) + grad[i]);
    if (SURROGATE) store(s.grad_threshold + at, load(s.grad_threshold + at) + grad_threshold[i]);
  }
}

// dP = dO V^T of a tile
NOINLINE void value_tile(const float* do_panel, const float* values, int64_t stride, int n, float* tile, int D) {
  for (int j = 0, step; j < n; j += step) {
    step = chunk(n - j);
    with_rows(
        step, [&](auto rows) __attribute__((always_inline)) {
          constexpr int M = decltype(rows)::value;
          vf acc[M][PANEL_VECTORS];
          clear(acc);
          multiply<M, PANEL_VECTORS>(acc, values + j * stride, stride, 1, do_panel, PANEL_ROWS, D);
#pragma GCC unroll 16
          for (int m = 0; m < M; m++)
#pragma GCC unroll 16
            for (int i = 0; i < PANEL_VECTORS; i++) store(tile + (j + m) * PANEL_ROWS + i * LANES, acc[m][i]);
        });
  }
}

// Pairs of a tile whose gradient is not finite, one bit per key for each lane, read from the scores before they are overwritten.
struct Unknown {
  uint64_t weights[PANEL_ROWS], ds[PANEL_ROWS];
};

// A row that is not finite: what it keeps, and what it sees where the choice has a gradient. Any other row: with a surrogate, what
// it removes although its value is not finite. values: those of a block that is flagged, else null
NOINLINE void find_unknown(const Lanes& s, int lane0, const float* scores, const float* values, int64_t stride, int n, int D,
                           bool surrogate, Unknown& unknown) {
  static_assert(KEY_BLOCK <= 64, "one bit per key");
  for (int i = 0; i < PANEL_ROWS; i++) unknown.weights[i] = unknown.ds[i] = 0;
  for (int j = 0; j < n; j++) {
    bool bad = false;
    for (int d = 0; values && d < D; d++) bad |= !finite(values[j * stride + d]);
    for (int i = 0; i < PANEL_ROWS && lane0 + i < s.n; i++) {
      const float score = scores[j * PANEL_ROWS + i];
      const bool keep = score > s.threshold[lane0 + i], seen = score > -INF, row = s.poisoned[lane0 + i];
      unknown.weights[i] |= (uint64_t)(row && keep) << j;
      unknown.ds[i] |= (uint64_t)(row ? (surrogate ? seen : keep) : surrogate && bad && seen && !keep) << j;
    }
  }
}

NOINLINE void poison_gradients(Lanes& s, int lane0, float* weights, float* ds, int n, const Unknown& unknown) {
  for (int i = 0; i < PANEL_ROWS && lane0 + i < s.n; i++) {
    for (int j = 0; j < n; j++) {
      if (unknown.weights[i] >> j & 1) weights[j * PANEL_ROWS + i] = NOT_A_NUMBER;
      if (unknown.ds[i] >> j & 1) ds[j * PANEL_ROWS + i] = NOT_A_NUMBER;
    }
    if (s.poisoned[lane0 + i]) s.grad_decay[lane0 + i] = NOT_A_NUMBER;
    if (s.poisoned[lane0 + i] || unknown.ds[i]) s.grad_threshold[lane0 + i] = NOT_A_NUMBER;
  }
}

// c[key][channel] += sum over lanes of panels[key][lane] * x[lane][channel], over the panels in use; keys < n
static void add_rows_over_lanes(const Lanes& s, const float* panels, const int* counts, int n, const float* x, float* c,
                                int64_t ldc, int D) {
  auto tile = [&](auto rows, auto vectors, int j, int d) __attribute__((always_inline)) {
    constexpr int M = decltype(rows)::value, N = decltype(vectors)::value;
    vf acc[M][N];
    clear(acc);
    bool used = false;
    for (int g = 0; g < s.panels; g++) {
      if (counts[g] <= j) continue;  // the panel's rows do not see these keys
      used = true;
      multiply<M, N>(acc, panels + ((int64_t)g * KEY_BLOCK + j) * PANEL_ROWS, PANEL_ROWS, 1, x + (int64_t)g * PANEL_ROWS * D + d, D,
                     least(PANEL_ROWS, s.n - g * PANEL_ROWS));
    }
    if (used) add_to(acc, c + j * ldc + d, ldc);
  };
  int d = 0;
  for (; d + 2 * LANES <= D; d += 2 * LANES)
    for (int j = 0, step; j < n; j += step) {
      step = chunk(n - j);
      with_rows(step, [&](auto rows) __attribute__((always_inline)) { tile(rows, Rows<2>{}, j, d); });
    }
  for (; d + LANES <= D; d += LANES)
    for (int j = 0, step; j < n; j += step) {
      step = chunk(n - j);
      with_rows(step, [&](auto rows) __attribute__((always_inline)) { tile(rows, Rows<1>{}, j, d); });
    }
  for (; d < D; d++)
    for (int g = 0; g < s.panels; g++)
      for (int j = 0; j < least(n, counts[g]); j++) {
        float sum = 0;
        for (int i = 0; i < least(PANEL_ROWS, s.n - g * PANEL_ROWS); i++)
          sum += panels[((int64_t)g * KEY_BLOCK + j) * PANEL_ROWS + i] * x[(int64_t)(g * PANEL_ROWS + i) * D + d];
        c[j * ldc + d] += sum;
      }
}

static void transpose_lanes(const Call& c, BackwardSpace& w, float q_factor) {
  for (int g = 0; g < w.lanes.panels; g++) {
    int64_t at = (int64_t)g * PANEL_ROWS * c.D;
    int n = least(PANEL_ROWS, w.lanes.n - g * PANEL_ROWS);
    transpose_panel(w.q_rows + at, n, c.D, q_factor, w.q_panels + at);
    transpose_panel(w.do_rows + at, n, c.D, 1.f, w.do_panels + at);
  }
}

// A block of keys as one tile's products read it. clean_*: 0 where the entries are not finite.
struct BackwardBlock {
  int j0, n;
  const float *keys, *values, *clean_keys, *clean_values;
  int64_t key_stride, value_stride, clean_key_stride, clean_value_stride;
  float norm;
  bool keys_bad, values_bad, padded;
};

// Rows of one query head on their way from the diagonal to the left.
struct BackwardWalk {
  const Call& c;
  BackwardSpace& w;
  const PackedHead& packed;
  const BackwardTask& task;
  const int64_t head;
  const TraProblem& p = *c.p;
  const int D = c.D;
  const int64_t batch = task.batch;
  const KeyFacts facts = c.key_facts(batch, task.key_head);
  const uint8_t* padding = p.key_padding ? p.key_padding + batch * p.keys : nullptr;
  const float q_factor = (float)(p.scale * (double)LOG2E);
  const bool surrogate = p.surrogate_width > 0;
  const float steepness = surrogate ? (float)(1 / p.surrogate_width) : 0.f;
  Lanes& s = w.lanes;
  bool any_poisoned = false;
  bool overflow = false;  // scores may be infinite although queries and keys are not

  int64_t flat(int64_t t) const { return (batch * p.query_heads + head) * p.queries + t; }
  int64_t offset(const TraTensor& x, int64_t t) const { return batch * x.stride_b + head * x.stride_h + t * x.stride_t; }

  // Puts row t into the next lane, unless it kept nothing: then it has no gradient.
  void take_row(int64_t t) {
    const int lane = s.n;
    const float lse = p.normaliser[flat(t)];
    if (lse == INF || p.reach[flat(t)] > p.query_start + t) {
      fill_row(p.dtype, p.grad_q.data, offset(p.grad_q, t), D, 0.f);
      p.grad_log_decay[flat(t)] = 0;
      if (p.grad_threshold) p.grad_threshold[flat(t)] = 0;
      return;
    }
    float *q = w.q_rows + (int64_t)lane * D, *grad = w.do_rows + (int64_t)lane * D, *scaled = w.q_scaled + (int64_t)lane * D;
    float* out = w.dq + (int64_t)lane * D;  // borrowed until cleared below
    load_row(p.dtype, p.q.data, offset(p.q, t), D, q);
    load_row(p.dtype, p.grad_out.data, offset(p.grad_out, t), D, grad);
    load_row(p.dtype, p.out.data, offset(p.out, t), D, out);
    fill_lane(c, s, lane, batch, head, t, q);
    wide deltas = {};
    part checks = {};
    for (int e = 0; e < D; e += PART) {
      part x = load_as<part>(grad + e), y = load_as<part>(out + e), z = load_as<part>(q + e);
      deltas += __builtin_convertvector(x, wide) * __builtin_convertvector(y, wide);
      checks += (x + y + z) * 0.f;
      z *= (float)p.scale;
      __builtin_memcpy(scaled + e, &z, sizeof z);
      y = part{};
      __builtin_memcpy(out + e, &y, sizeof y);
    }
    double delta = 0;
    for (int e = 0; e < PART; e++) delta += deltas[e];
    const float check = lse * 0.f + total(checks);
    s.lse[lane] = (float)((double)lse / LN2);
    s.delta[lane] = (float)delta;
    s.grad_decay[lane] = s.grad_threshold[lane] = 0;
    s.first[lane] = most(s.first[lane], p.reach[flat(t)]);
    if (check != 0 || s.decay_bad[lane]) {
      s.poisoned[lane] = 1;
      s.lse[lane] = s.delta[lane] = 0;
      for (int d = 0; d < D; d++) scaled[d] = grad[d] = 0;
    }
    s.n++;
  }

  // Puts rows t0 ... t0 + rows - 1 into lanes.
  void take_rows(int64_t t0, int rows) {
    s.n = 0;
    for (int i = 0; i < rows; i++) {
      if (i + ROWS_AHEAD < rows)
        for (const TraTensor* x : {&p.q, &p.grad_out, &p.out}) prefetch_rows(p.dtype, *x, batch, head, t0 + i + ROWS_AHEAD, 1, D);
      take_row(t0 + i);
    }
    if (s.n == 0) return;
    float largest = 0;
    for (int i = 0; i < s.n; i++) {
      any_poisoned |= s.poisoned[i] != 0;
      overflow |= !(s.reach_norm[i] < 1e18f);
      largest = most(largest, s.reach_norm[i]);
    }
    overflow |= !(largest * facts.norm_so_far[most(0, s.last[s.n - 1]) / KEY_BLOCK] < 1e36f);
    s.pad();
    transpose_lanes(c, w, q_factor);
  }

  // Keys j0 ... j1 - 1, in float32 and side by side.
  BackwardBlock open_block(int j0, int j1) {
    BackwardBlock block;
    const int n = block.n = j1 - j0, number = j0 / KEY_BLOCK;
    block.j0 = j0;
    block.keys = block_f32(c, p.k, packed.keys, batch, task.key_head, j0, n, w.keys, &block.key_stride);
    block.values = block_f32(c, p.v, packed.values, batch, task.key_head, j0, n, w.values, &block.value_stride);
    block.norm = facts.norm[number];
    block.keys_bad = facts.flags[number] & KEY_NOT_FINITE;
    block.values_bad = facts.flags[number] & VALUE_NOT_FINITE;
    block.clean_key_stride = block.key_stride;
    if (__builtin_expect(block.keys_bad, 0))
      block.clean_keys = cleaned(block.keys, &block.clean_key_stride, n, D, w.clean);
    else
      block.clean_keys = side_by_side(block.keys, &block.clean_key_stride, n, D, w.keys);
    block.clean_values = block.values;
    block.clean_value_stride = block.value_stride;
    if (__builtin_expect(block.values_bad && surrogate, 0))
      block.clean_values = cleaned(block.values, &block.clean_value_stride, n, D, w.clean_values);
    block.padded = padding && __builtin_memchr(padding + j0, 0, n);
    return block;
  }

  // Weights and dS of one panel's rows against a block, and what they add to dQ. Returns how many of the keys the panel sees.
  int differentiate_panel(const BackwardBlock& block, int lane0) {
    const int j0 = block.j0, lanes = least(PANEL_ROWS, s.n - lane0);
    const int n = least(j0 + block.n, s.last[lane0 + lanes - 1] + 1) - j0;
    if (n <= 0) return 0;
    float *weights = w.weights + (int64_t)lane0 * KEY_BLOCK, *ds = w.ds + (int64_t)lane0 * KEY_BLOCK;
    int leftmost = 0;
    for (int i = 0; i < lanes; i++) leftmost = most(leftmost, s.first[lane0 + i]);
    bool kept = score_tile(s, lane0, w.q_rows, w.q_panels + (int64_t)lane0 * D, block.keys, block.key_stride, n, block.norm,
                           weights, D, p.scale);
    bool hide = block.padded || j0 + n - 1 > s.last[lane0] || leftmost > j0;
    if (__builtin_expect(block.keys_bad || overflow, 0)) {
      if (poison_tile(s, lane0, weights, j0, n, padding)) kept = any_poisoned = true;
      hide = true;
    }
    if (!kept && !surrogate) return 0;
    if (hide) mask_tile(s, lane0, weights, j0, n, padding);
    if (__builtin_expect(block.values_bad, 0)) {
      poison_by_values(s, lane0, weights, block.values, block.value_stride, n, D);
      any_poisoned = true;
    }
    value_tile(w.do_panels + (int64_t)lane0 * D, block.clean_values, block.clean_value_stride, n, ds, D);
    auto differentiate = c.dropout ? (surrogate ? differentiate_tile<true, true> : differentiate_tile<true, false>)
                                   : (surrogate ? differentiate_tile<false, true> : differentiate_tile<false, false>);
    Unknown unknown;
    if (__builtin_expect(any_poisoned, 0))
      find_unknown(s, lane0, weights, block.values_bad ? block.values : nullptr, block.value_stride, n, D, surrogate, unknown);
    differentiate(s, lane0, weights, ds, j0, n, p.dropout_cut, p.dropout_scale, steepness);
    if (__builtin_expect(any_poisoned, 0)) poison_gradients(s, lane0, weights, ds, n, unknown);
    add_panel_times_rows(ds, lanes, n, block.clean_keys, block.clean_key_stride, w.dq + (int64_t)lane0 * D, D, D);
    // The products over lanes take keys in groups: those that this panel does not see weigh nothing.
    for (float* x : {weights, ds}) __builtin_memset(x + n * PANEL_ROWS, 0, (size_t)(block.n - n) * PANEL_ROWS * sizeof(float));
    return n;
  }

  // All panels against keys j0 ... j1 - 1, and what they add to dK and dV.
  void visit_block(int j0, int j1) {
    const BackwardBlock block = open_block(j0, j1);
    int counts[PANELS], used = 0;
    for (int g = 0; g < s.panels; g++) used = most(used, counts[g] = differentiate_panel(block, g * PANEL_ROWS));
    if (!used) return;
    const int64_t row = j0 - task.base;
    add_rows_over_lanes(s, w.weights, counts, used, w.do_rows, task.dv + row * task.dv_stride, task.dv_stride, D);
    add_rows_over_lanes(s, w.ds, counts, used, w.q_scaled, task.dk + row * task.dk_stride, task.dk_stride, D);
  }

  void finish_row(int lane) {
    const int64_t t = s.row[lane];
    store_row(p.dtype, p.grad_q.data, offset(p.grad_q, t), D, w.dq + (int64_t)lane * D, (float)p.scale);
    p.grad_log_decay[flat(t)] = s.grad_decay[lane];
    if (p.grad_threshold) p.grad_threshold[flat(t)] = s.grad_threshold[lane];
  }

  // Writes the rows that need no key left of j0, once a panel can be given up for them, and closes the gaps.
  void retire_rows(int j0) {
    auto done = [&](int lane) { return j0 <= s.first[lane] || j0 <= 0; };
    int alive = 0;
    for (int i = 0; i < s.n; i++) alive += !done(i);
    if (alive > 0 && (alive + PANEL_ROWS - 1) / PANEL_ROWS == s.panels) return;
    int to = 0;
    for (int i = 0; i < s.n; i++) {
      if (done(i)) {
        finish_row(i);
        continue;
      }
      if (to != i) {
        s.move(to, i);
        for (float* x : {w.q_rows, w.q_scaled, w.do_rows, w.dq}) copy_row(x + (int64_t)i * D, D, x + (int64_t)to * D);
      }
      to++;
    }
    s.n = to;
    s.pad();
    transpose_lanes(c, w, q_factor);
  }
};

static void backward_rows(const Call& c, BackwardSpace& w, const PackedHead& packed, const BackwardTask& task, int64_t head,
                          int64_t t0, int rows) {
  BackwardWalk walk{c, w, packed, task, head};
  walk.take_rows(t0, rows);
  for (int j1 = walk.s.n ? walk.s.last[walk.s.n - 1] + 1 : 0; walk.s.n > 0;) {
    const int j0 = most(0, j1 - 1) / KEY_BLOCK * KEY_BLOCK;
    if (j1 > 0) walk.visit_block(j0, j1);
    walk.retire_rows(j0);
    j1 = j0;
  }
}

// Keys that the rows of a query block read: what a share of the work is measured in.
static int64_t row_work(const Call& c, int64_t b, int64_t hk, int64_t begin, int64_t end) {
  const TraProblem& p = *c.p;
  int64_t sum = 0;
  for (int64_t h = hk * c.group; h < (hk + 1) * c.group; h++)
    for (int64_t t = begin; t < end; t++) {
      int64_t keys = p.query_start + t + 1 - p.reach[(b * p.query_heads + h) * p.queries + t];
      sum += 16 + most<int64_t>(0, keys);
    }
  return sum;
}

// The time a greedy schedule of these tasks takes, in units of work.
static int64_t makespan(const BackwardTask* tasks, int64_t n, int threads) {
  int64_t load[TRA_MOST_THREADS] = {};
  int64_t longest = 0;
  for (int64_t i = 0; i < n; i++) {
    int at = 0;
    for (int k = 1; k < threads; k++)
      if (load[k] < load[at]) at = k;
    load[at] += tasks[i].work;
    longest = most(longest, load[at]);
  }
  return longest;
}

// Splits every key head's rows into `parts` runs of about equal work. Tasks stand in a fixed order.
static void split_rows(const Call& c, BackwardTask* tasks, int parts) {
  const TraProblem& p = *c.p;
  int64_t i = 0;
  for (int64_t b = 0; b < p.batch; b++)
    for (int64_t hk = 0; hk < p.key_heads; hk++) {
      int64_t total = row_work(c, b, hk, 0, p.queries), begin = 0, passed = 0;
      for (int part = 0; part < parts; part++) {
        int64_t end = begin, work = 0;
        while (end < p.queries && (part + 1 == parts || (passed + work) * parts < total * (part + 1))) {
          int64_t next = least(p.queries, end + c.rows);
          work += row_work(c, b, hk, end, next);
          end = next;
        }
        tasks[i++] = {b, hk, begin, end, work, nullptr, nullptr, 0, 0, 0, 0, false};
        passed += work;
        begin = end;
      }
    }
}

// Splits the rows where whole heads would leave threads idle; returns the number of runs of each head.
static int share_rows(const Call& c, BackwardTask* tasks, int64_t heads) {
  const int threads = c.p->threads;
  split_rows(c, tasks, 1);
  if (threads == 1 || heads >= 8 * threads) return 1;
  int64_t total = 0;
  for (int64_t i = 0; i < heads; i++) total += tasks[i].work;
  if (makespan(tasks, heads, threads) * threads <= total + total / 5) return 1;
  const int parts = most(2, heads < threads ? (int)((threads + heads - 1) / heads) : 2);
  split_rows(c, tasks, parts);
  return parts;
}

// Says where the tasks' dK and dV go: the first of a head writes to the outputs, the others to slabs, which are returned
// (null: none is needed, or there is no memory, and then *failed is set).
static float* place_gradients(const Call& c, BackwardTask* tasks, int64_t count, int parts, int* failed) {
  const TraProblem& p = *c.p;
  size_t slab_floats = 0;
  for (int64_t i = 0; i < count; i++) {
    BackwardTask& t = tasks[i];
    int64_t lowest = p.query_start + t.end;
    for (int64_t h = t.key_head * c.group; h < (t.key_head + 1) * c.group; h++)
      for (int64_t r = t.begin; r < t.end; r++)
        lowest = least<int64_t>(lowest, p.reach[(t.batch * p.query_heads + h) * p.queries + r]);
    t.slab = i % parts != 0;
    t.base = t.slab ? lowest / KEY_BLOCK * KEY_BLOCK : 0;
    t.keys = p.query_start + t.end - t.base;
    if (t.slab) slab_floats += (size_t)t.keys * c.D * 2;
  }
  float* slabs = slab_floats ? (float*)::calloc(slab_floats, sizeof(float)) : nullptr;
  if (slab_floats && !slabs) {
    *failed = 1;
    return nullptr;
  }
  float* at = slabs;
  for (int64_t i = 0; i < count; i++) {
    BackwardTask& t = tasks[i];
    if (t.slab) {
      t.dk = at;
      t.dv = at + t.keys * c.D;
      t.dk_stride = t.dv_stride = c.D;
      at += t.keys * c.D * 2;
    } else {
      t.dk = (float*)row_f32(p.grad_k, t.batch, t.key_head, 0);
      t.dv = (float*)row_f32(p.grad_v, t.batch, t.key_head, 0);
      t.dk_stride = p.grad_k.stride_t;
      t.dv_stride = p.grad_v.stride_t;
    }
  }
  return slabs;
}

// One task. rows: room for a head's keys, values, dK and dV side by side, or null
static void backward_task(Call& c, BackwardSpace& w, const BackwardTask& task, PackedHead packed, bool whole_head, float* rows) {
  const size_t head_floats = (size_t)c.visible * c.D;
  BackwardTask t = task;
  if (whole_head) packed = describe_head(c, t.batch, t.key_head, rows);
  if (rows) {  // the sums too are side by side until they are complete
    t.dk = rows + head_floats * 2;
    t.dv = rows + head_floats * 3;
    t.dk_stride = t.dv_stride = c.D;
    __builtin_memset(t.dk, 0, head_floats * 2 * sizeof(float));
  }
  for (int64_t h = t.key_head * c.group; h < (t.key_head + 1) * c.group; h++)
    for (int64_t t0 = t.begin; t0 < t.end; t0 += c.rows)
      backward_rows(c, w, packed, t, h, t0, (int)least<int64_t>(c.rows, t.end - t0));
  if (rows)
    for (int64_t j = 0; j < c.visible; j++) {
      copy_row(t.dk + j * c.D, c.D, task.dk + j * task.dk_stride);
      copy_row(t.dv + j * c.D, c.D, task.dv + j * task.dv_stride);
    }
}

// Adds the slabs to the outputs, in the order of their rows.
static void add_slabs(const Call& c, const BackwardTask* tasks, int64_t heads, int parts) {
#pragma omp parallel num_threads(c.p->threads)
  {
    DenormalMode flush(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < heads * c.blocks; i++) {
      const int64_t head = i / c.blocks, j0 = i % c.blocks * KEY_BLOCK, j1 = least<int64_t>(c.visible, j0 + KEY_BLOCK);
      const BackwardTask& own = tasks[head * parts];
      for (int part = 1; part < parts; part++) {
        const BackwardTask& t = tasks[head * parts + part];
        for (int64_t j = most(j0, t.base); j < least(j1, t.base + t.keys); j++)
          for (int d = 0; d < c.D; d++) {
            own.dk[j * own.dk_stride + d] += t.dk[(j - t.base) * c.D + d];
            own.dv[j * own.dv_stride + d] += t.dv[(j - t.base) * c.D + d];
          }
      }
    }
  }
}

static int backward_blocks(Call& c) {
  const TraProblem& p = *c.p;
  const int64_t heads = p.batch * p.key_heads;
  BackwardTask* tasks = (BackwardTask*)::calloc(heads * most(2, p.threads), sizeof(BackwardTask));
  if (!tasks) return TRA_OUT_OF_MEMORY;
  const int parts = share_rows(c, tasks, heads);
  const int64_t count = heads * parts;
  const bool whole_heads = parts == 1;
  if (!allocate_facts(c, whole_heads)) {
    ::free(tasks);
    return TRA_OUT_OF_MEMORY;
  }
  if (!whole_heads) describe_all_keys(c);
  int failed = 0;
  float* slabs = place_gradients(c, tasks, count, parts, &failed);
  if (!failed) {
#pragma omp parallel num_threads(p.threads)
    {
      DenormalMode flush(true);
      BackwardSpace w;
      float* memory = workspace.take(w.place(nullptr, c.D));
      const bool pack = whole_heads && c.pack;
      float* rows = pack ? packed_rows.take((size_t)c.visible * c.D * 4) : nullptr;
      if (!memory || (pack && !rows)) {
#pragma omp atomic write
        failed = 1;
      } else {
        w.place(memory, c.D);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++) backward_task(c, w, tasks[i], packed_head(c, c.packed, i / parts), whole_heads, rows);
      }
    }
  }
  if (!failed && slabs) add_slabs(c, tasks, heads, parts);
  ::free(slabs);
  ::free(tasks);
  free_facts(c);
  return failed ? TRA_OUT_OF_MEMORY : TRA_OK;
}
