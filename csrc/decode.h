// Decode: few queries against a long cache. Each query walks its keys nearest first, a chunk at a time, and only touches the
// values of keys it keeps. With a key index, chunks that no kept key can lie in are passed over unread.
// Included inside an unnamed namespace of each per-ISA translation unit.

constexpr int DECODE_QUERIES = 8;  // up to this many queries per call take this path
constexpr int FIRST_KEYS = 256;    // read before any other thread is woken: rows that decay are settled by then
constexpr int FIRST_QUERIES = 64;  // unless there are more rows than this
constexpr int NEAR_KEYS = 2048;    // read by one thread before the rest is shared out
constexpr int RANGE_KEYS = 4096;   // least length of a shared-out range

// The part of a row's sum that one range of keys gives: weights 2^(score + decay * kept keys to the right in this range),
// relative to 2^shift.
struct Partial {
  float sum, shift, count;
  int32_t reach;  // leftmost key walked over
  uint8_t poisoned, settled;
  float out[256];
};

struct DecodeSpace {
  alignas(64) float scores[KEY_BLOCK + 16], logits[KEY_BLOCK + 16];
  int32_t kept[KEY_BLOCK + 1];
  float q[256], scaled[256], row[256];
  float keys[KEY_BLOCK * 256];
};

// One query: what the walk needs to know of it.
struct Query {
  int64_t b, h, hk, t;
  float decay, threshold, band, norm, inverse, upper;
  double threshold64;
  int32_t last, first;
  uint32_t dropout_key;
  bool decay_bad;
};

// out[i] = sum of the lanes of acc[i]
INLINE void sum_lanes(const part (&acc)[4], float* out) {
#if defined(__AVX__) && TRA_LANES >= 8
  __m256 ab = _mm256_hadd_ps((__m256)acc[0], (__m256)acc[1]), cd = _mm256_hadd_ps((__m256)acc[2], (__m256)acc[3]);
  __m256 all = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  for (int i = 0; i < 4; i++) {
    float s = 0;
    for (int l = 0; l < PART; l++) s += acc[i][l];
    out[i] = s;
  }
#endif
}

NOINLINE void dot_rows(const float* q, const float* keys, int64_t stride, int n, int D, float* scores) {
  int j = 0;
  for (; j + 4 <= n; j += 4) {
    part acc[4] = {};
    for (int i = 0; i < 4; i++)  // the block to the left is next, and hardware does not foresee that
      for (int e = 0; e < D; e += 16) __builtin_prefetch(keys + (j + i - KEY_BLOCK) * stride + e);
    for (int e = 0; e < D; e += PART) {
      part x = load_as<part>(q + e);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) acc[i] += x * load_as<part>(keys + (j + i) * stride + e);
    }
    sum_lanes(acc, scores + j);
  }
  for (; j < n; j++) {
    part acc = {};
    for (int e = 0; e < D; e += PART) acc += load_as<part>(q + e) * load_as<part>(keys + j * stride + e);
    float s = 0;
    for (int l = 0; l < PART; l++) s += acc[l];
    scores[j] = s;
  }
}

// out[d] += sum over i of weights[i] * (row i of the kept values)[d]; rows are given by their distance from `base`
NOINLINE void add_values(const float* weights, const int32_t* rows, int n, const float* base, int64_t stride, float* out, int D) {
  int d = 0;
  for (; d + 4 * PART <= D; d += 4 * PART) {
    part acc[4] = {};
    for (int i = 0; i < n; i++) {
      part x = weights[i] - part{};
      const float* v = base + rows[i] * stride + d;
      if (d == 0 && i + 8 < n)
        for (int e = 0; e < D; e += 16) __builtin_prefetch(base + rows[i + 8] * stride + e);
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) acc[k] += x * load_as<part>(v + k * PART);
    }
    for (int k = 0; k < 4; k++) {
      part sum = load_as<part>(out + d + k * PART) + acc[k];
      __builtin_memcpy(out + d + k * PART, &sum, sizeof sum);
    }
  }
  for (; d < D; d += PART) {
    part acc = {};
    for (int i = 0; i < n; i++) acc += weights[i] * load_as<part>(base + rows[i] * stride + d);
    part sum = load_as<part>(out + d) + acc;
    __builtin_memcpy(out + d, &sum, sizeof sum);
  }
}

// No key of the block can score above the threshold: per channel the better end of [low, high], summed. Comparisons with NaN
// are false, so a block that holds a non-finite key is always read.
INLINE bool block_is_below(const Call& c, const Query& q, const float* scaled, int block) {
  const TraProblem& p = *c.p;
  int64_t head = q.b * p.key_heads + q.hk;
  const float* low = p.index_low + (head * p.index_stride + block) * c.D;
  const float* high = p.index_high + (head * p.index_stride + block) * c.D;
  part sum = {};
  for (int e = 0; e < c.D; e += PART) {
    part x = load_as<part>(scaled + e), a = x * load_as<part>(low + e), b = x * load_as<part>(high + e);
    sum += a > b ? a : b;
  }
  float best = 0;
  for (int l = 0; l < PART; l++) best += sum[l];
  // Rounding: each product is at most |q| times the largest |k|, so the sum errs by less than 16 recheck bands (D <= 256).
  float margin = 16.f * (q.band * most(p.index_norm[head * (1 + p.index_stride) + 1 + block], LEAST_NORM) + LEAST_BAND);
  return best + margin <= q.threshold;
}

INLINE void start(Partial& r, int high, int D) {
  r.sum = r.count = 0;
  r.shift = -1e30f;
  r.poisoned = r.settled = 0;
  r.reach = high;
  for (int d = 0; d < D; d++) r.out[d] = 0;
}

// Walks on from r.reach to `low`, right to left. `before` kept keys and a total of `weight` (at shift 0) are known to lie further right.
static void walk(const Call& c, DecodeSpace& w, const Query& q, int low, float before, float weight, bool adjacent, Partial& r) {
  const TraProblem& p = *c.p;
  const int D = c.D;
  const uint8_t* padding = p.key_padding ? p.key_padding + q.b * p.keys : nullptr;
  const float tolerance = (float)p.tolerance * 0.9999f;
  for (int j1 = r.reach; j1 > low;) {
    const int block = (j1 - 1) / KEY_BLOCK, j0 = most(block * KEY_BLOCK, low), n = j1 - j0;
    j1 = j0;
    r.reach = j0;
    if (p.index_block && block_is_below(c, q, w.scaled, block)) continue;
    int64_t stride;
    const float* keys = rows_f32(p.dtype, p.k, q.b, q.hk, j0, n, D, w.keys, &stride);
    dot_rows(w.scaled, keys, stride, n, D, w.scores);
    float norm = 0;
    if (p.index_block)
      norm = most(p.index_norm[(q.b * p.key_heads + q.hk) * (1 + p.index_stride) + 1 + block], LEAST_NORM);
    else
      for (int j = 0; j < n; j++) norm = most(norm, norm_above(keys + j * stride, D));
    const float band = q.band * norm + LEAST_BAND;
    const int from = most(q.first - j0, 0), to = least(n, q.last + 1 - j0);  // keys the row sees, padding apart
    for (int j = from; j < to; j++) {
      const float s = w.scores[j];
      if (__builtin_expect(__builtin_fabsf(s - q.threshold) > band && finite(s), 1)) continue;
      if (padding && !padding[j0 + j]) continue;
      if (!finite(s)) {  // counts as kept, and makes the row NaN
        r.poisoned = 1;
        w.scores[j] = most(q.threshold, 0.f) + 1.f;
        continue;
      }
      if (exact_dot(w.q, keys + j * stride, D) * p.scale > q.threshold64)
        w.scores[j] = most(s, q.threshold + most(__builtin_fabsf(q.threshold) * 0x1p-22f, 1e-36f));
      else
        w.scores[j] = least(s, q.threshold);
    }
    if (__builtin_expect(padding != nullptr, 0))
      for (int j = from; j < to; j++)
        if (!padding[j0 + j]) w.scores[j] = -INF;
    int m = 0;
    for (int j = to - 1; j >= from; j--) {  // without a branch: which keys are kept is as good as random
      w.kept[m] = j;
      w.logits[m] = w.scores[j];
      m += w.scores[j] > q.threshold;
    }
    for (int i = 0; i < m; i++) w.logits[i] += q.decay * (r.count + (float)i);
    if (m) {
      float top = r.shift;
      for (int i = 0; i < m; i++) top = most(top, w.logits[i]);
      if (top > r.shift) {
        float factor = __builtin_exp2f(r.shift - top);
        r.sum *= factor;
        for (int d = 0; d < D; d++) r.out[d] *= factor;
        r.shift = top;
      }
      for (int i = m; i < (m + LANES - 1) / LANES * LANES; i++) w.logits[i] = -INF;
      for (int i = 0; i < m; i += LANES) store(w.logits + i, exp2_vec(load(w.logits + i) - top));
      float sum = 0;
      for (int i = 0; i < m; i++) sum += w.logits[i];
      r.sum += sum;
      r.count += (float)m;
      if (c.dropout)
        for (int i = 0; i < m; i++)
          if (!survives(q.dropout_key, j0 + w.kept[i], p.dropout_cut)) w.logits[i] = 0;
      const float* values = p.dtype == TRA_FLOAT32 ? row_f32(p.v, q.b, q.hk, j0) : nullptr;
      int64_t v_stride = p.v.stride_t;
      if (p.dtype != TRA_FLOAT32) {  // convert the kept rows only
        for (int i = 0; i < m; i++) {
          rows_f32(p.dtype, p.v, q.b, q.hk, j0 + w.kept[i], 1, D, w.keys + (int64_t)i * D, &v_stride);
          w.kept[i] = i;
        }
        values = w.keys;
      }
      add_values(w.logits, w.kept, m, values, v_stride, r.out, D);
    }
    const int left = j0 - q.first;
    if (left <= 0) break;
    if (tolerance > 0) {
      const float count = before + r.count, rest = (float)left;
      const float exponent = q.upper + q.decay * count;
      const float factor = p.needs_grad ? least((count + q.inverse) * q.inverse, rest * (count + rest)) : least(q.inverse, rest);
      float have = weight;
      float tail = exponent;  // compare at shift 0, or at this range's shift where it is the rightmost
      if (adjacent) {
        have = r.sum;
        tail -= r.shift;
      }
      if (tail < 120.f && __builtin_exp2f(tail) * factor <= have * tolerance) {
        r.settled = 1;
        break;
      }
    }
  }
}

static void describe_query(const Call& c, int64_t i, const float* key_norms, Query& q, DecodeSpace& w) {
  const TraProblem& p = *c.p;
  q.t = i % p.queries;
  q.h = i / p.queries % p.query_heads;
  q.b = i / p.queries / p.query_heads;
  q.hk = q.h / c.group;
  load_row(p.dtype, p.q.data, q.b * p.q.stride_b + q.h * p.q.stride_h + q.t * p.q.stride_t, c.D, w.q);
  const float factor = (float)(p.scale * (double)LOG2E);
  for (int e = 0; e < c.D; e++) w.scaled[e] = w.q[e] * factor;
  float g = p.log_decay[i];
  q.decay_bad = !finite(g);
  if (q.decay_bad) g = 0;
  q.decay = g * LOG2E;
  q.inverse = g < 0 ? 1.00001f / -__builtin_expm1f(g) : INF;
  q.threshold64 = p.threshold ? p.threshold[i] : p.threshold_value;
  q.threshold = (float)(q.threshold64 * LOG2E);
  q.norm = most(norm_above(w.q, c.D) * (float)(p.scale * LOG2E * 1.00001), LEAST_NORM);
  q.band = q.norm * (float)(c.D * 0x1p-22);
  const int64_t head = q.b * p.key_heads + q.hk;
  q.upper = INF;
  if (p.index_block)
    q.upper = q.norm * p.index_norm[head * (1 + p.index_stride)];
  else if (key_norms)
    q.upper = q.norm * key_norms[head];
  if (!(q.upper < INF)) q.upper = INF;
  if (p.score_bound) q.upper = least(q.upper, p.score_bound[q.h] * LOG2E);
  const int64_t position = p.query_start + q.t;
  q.last = (int32_t)(position - (p.exclude_self && p.exclude_self[q.h] ? 1 : 0));
  q.first = p.first_key ? p.first_key[q.t] : 0;
  q.dropout_key = c.dropout ? mix(mix(c.seed_key ^ (uint32_t)(q.b * p.query_heads + q.h)) ^ (uint32_t)position) : 0;
}

// Joins the parts of a row, rightmost first, and writes its outputs.
static void finish_query(const Call& c, const Query& q, int64_t flat, const Partial* parts, int n) {
  const TraProblem& p = *c.p;
  float shift = -1e30f, count = 0;
  int32_t reach = q.last + 1;
  bool poisoned = false;
  for (int i = 0; i < n; i++) {
    if (parts[i].count > 0) shift = most(shift, parts[i].shift + q.decay * count);
    count += parts[i].count;
    reach = least(reach, parts[i].reach);
    poisoned |= parts[i].poisoned;
  }
  float out[256], sum = 0, before = 0;
  for (int d = 0; d < c.D; d++) out[d] = 0;
  for (int i = 0; i < n; i++) {
    if (parts[i].count > 0) {
      float factor = __builtin_exp2f(parts[i].shift + q.decay * before - shift);
      sum += factor * parts[i].sum;
      for (int d = 0; d < c.D; d++) out[d] += factor * parts[i].out[d];
    }
    before += parts[i].count;
  }
  for (int d = 0; d < c.D; d++) poisoned |= !finite(out[d]);  // a kept value was not finite
  poisoned |= count > 0 && q.decay_bad;
  const int64_t offset = q.b * p.out.stride_b + q.h * p.out.stride_h + q.t * p.out.stride_t;
  if (poisoned) {
    fill_row(p.dtype, p.out.data, offset, c.D, NOT_A_NUMBER);
    p.normaliser[flat] = NOT_A_NUMBER;
  } else if (count == 0) {
    fill_row(p.dtype, p.out.data, offset, c.D, 0.f);
    p.normaliser[flat] = INF;
  } else {
    store_row(p.dtype, p.out.data, offset, c.D, out, (c.dropout ? p.dropout_scale : 1.f) / sum);
    p.normaliser[flat] = (float)(((double)__builtin_log2f(sum) + shift) * LN2);
  }
  p.kept[flat] = (int32_t)count;
  reach = most(reach, q.first);
  p.reach[flat] = reach <= q.last ? reach : (int32_t)(p.query_start + q.t) + 1;
}

static int decode(Call& c) {
  const TraProblem& p = *c.p;
  const int64_t queries = p.batch * p.query_heads * p.queries, heads = p.batch * p.key_heads;
  // Few long rows: each reads its nearest keys, then the rest of those not settled is cut into ranges.
  const bool share = p.threads > 1 && queries < 2 * p.threads && !p.needs_grad && c.visible > NEAR_KEYS + RANGE_KEYS;
  const int64_t rest = most<int64_t>(0, c.visible - NEAR_KEYS);
  const int ranges = share ? (int)least<int64_t>(most<int64_t>(1, rest / RANGE_KEYS), 4 * p.threads) : 0;
  const int parts = 1 + ranges;
  size_t bytes = sizeof(Partial) * queries * parts + sizeof(Query) * queries + sizeof(float) * heads;
  char* memory = (char*)::malloc(bytes);
  if (!memory) return TRA_OUT_OF_MEMORY;
  Query* described = (Query*)memory;  // first: it has the strictest alignment
  Partial* partials = (Partial*)(described + queries);
  float* key_norms = (float*)(partials + queries * parts);
  int failed = 0, unsettled = 1;
  // Without an index or a bound from the caller, the bound takes one pass over the keys.
  const bool need_norms = !p.index_block && !p.score_bound && p.tolerance > 0;
  const bool alone_first = !need_norms && queries <= FIRST_QUERIES;
  if (alone_first) {
    DenormalMode flush(true);
    DecodeSpace* w = (DecodeSpace*)workspace.take(sizeof(DecodeSpace) / sizeof(float));
    unsettled = 0;
    if (!w) failed = 1;
    for (int64_t i = 0; i < queries && !failed; i++) {
      Query& q = described[i];
      describe_query(c, i, nullptr, q, *w);
      Partial& r = partials[i * parts];
      const int begin = most(0, q.first), end = most(begin, q.last + 1),
                low = most(begin, (end - FIRST_KEYS) / KEY_BLOCK * KEY_BLOCK);
      start(r, end, c.D);
      walk(c, *w, q, low, 0, 0, true, r);
      r.settled |= r.reach <= begin;
      unsettled += !r.settled;
      for (int range = 1; range < parts; range++) start(partials[i * parts + range], r.reach, c.D);
      if (r.settled) finish_query(c, q, i, &r, 1);
    }
  }
  if (unsettled && !failed) {
#pragma omp parallel num_threads(p.threads) if (c.visible * queries > 512)
    {
      DenormalMode flush(true);
      DecodeSpace* w = (DecodeSpace*)workspace.take(sizeof(DecodeSpace) / sizeof(float));
      if (!w) {
#pragma omp atomic write
        failed = 1;
      } else {
        if (need_norms) {
#pragma omp for schedule(dynamic, 1)
          for (int64_t i = 0; i < heads; i++) {
            const uint8_t* padding = p.key_padding ? p.key_padding + i / p.key_heads * p.keys : nullptr;
            float norm = 0;
            int64_t stride;
            for (int64_t j = 0; j < c.visible; j++)
              if (!padding || padding[j])
                norm = most(
                    norm,
                    norm_above(rows_f32(p.dtype, p.k, i / p.key_heads, i % p.key_heads, (int)j, 1, c.D, w->row, &stride), c.D));
            key_norms[i] = norm;
          }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < queries; i++) {
          Query& q = described[i];
          Partial& r = partials[i * parts];
          if (alone_first && r.settled) continue;
          describe_query(c, i, need_norms ? key_norms : nullptr, q, *w);
          const int begin = most(0, q.first), end = most(begin, q.last + 1);
          const int low = share ? most(begin, (end - NEAR_KEYS) / KEY_BLOCK * KEY_BLOCK) : begin;
          if (!alone_first) start(r, end, c.D);
          walk(c, *w, q, low, 0, 0, true, r);
          r.settled |= r.reach <= begin;
          for (int range = 1; range < parts; range++) start(partials[i * parts + range], r.reach, c.D);
          if (r.settled || !ranges) {
            r.settled = 1;
            finish_query(c, q, i, &r, 1);
          }
        }
        if (ranges) {
#pragma omp for schedule(dynamic, 1)
          for (int64_t k = 0; k < queries * ranges; k++) {
            const int64_t i = k % queries;
            const int range = (int)(k / queries);
            const Partial& near = partials[i * parts];
            if (near.settled) continue;
            Query q;
            describe_query(c, i, need_norms ? key_norms : nullptr, q, *w);
            const int begin = most(0, q.first), end = near.reach;
            const int64_t blocks = (end - begin + KEY_BLOCK - 1) / KEY_BLOCK;
            const int high = (int)(end - blocks * range / ranges * KEY_BLOCK);
            const int low = (int)most<int64_t>(begin, end - blocks * (range + 1) / ranges * KEY_BLOCK);
            if (low >= high) continue;
            const float weight = near.count > 0 && near.shift < 120.f ? near.sum * __builtin_exp2f(near.shift) : 0.f;
            Partial& r = partials[i * parts + 1 + range];
            r.reach = high;
            walk(c, *w, q, low, near.count, weight, false, r);
          }
#pragma omp for schedule(static)
          for (int64_t i = 0; i < queries; i++)
            if (!partials[i * parts].settled) finish_query(c, described[i], i, partials + i * parts, parts);
        }
      }
    }
  }
  ::free(memory);
  return failed ? TRA_OUT_OF_MEMORY : TRA_OK;
}
