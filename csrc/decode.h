// Decode: few queries against a long cache. Each query walks its keys nearest first, a chunk at a time, and only touches the
// values of keys it keeps. With a key index, chunks that no kept key can lie in are passed over unread.
// Included inside an unnamed namespace of each per-ISA translation unit.

constexpr int DECODE_QUERIES = 8;  // up to this many queries per call take this path
constexpr int FIRST_KEYS = 256;    // read before any other thread is woken: rows that decay are settled by then
constexpr int FIRST_QUERIES = 64;  // unless there are more rows than this
constexpr int NEAR_KEYS = 2048;    // read by one thread before the rest is shared out
constexpr int RANGE_KEYS = 4096;   // least length of a shared-out range
constexpr int CACHE_LINE = 16;     // floats
// Sums of squares outside these bounds may have lost what underflowed, or come near to overflow.
constexpr float LEAST_SQUARES = 1e-24f, MOST_SQUARES = 1e36f;

// The part of a row's sum that one range of keys gives: weights 2^(score + decay * kept keys to the right in this range),
// relative to 2^shift.
struct Partial {
  float sum, shift, count;
  int32_t reach;  // leftmost key walked over
  uint8_t poisoned, settled;
  float out[256];
};

struct DecodeSpace {
  alignas(64) float scores[KEY_BLOCK + LANES], logits[KEY_BLOCK + LANES];
  int32_t kept[KEY_BLOCK + LANES];
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

// A vector folded into a part: the upper half added to the lower where it is longer.
INLINE part fold(part x) { return x; }
#if TRA_LANES > 8
INLINE part fold(vf x) {
#if defined(__AVX512F__)
  return (part)_mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, (__m512)x, 0), _mm512_maskz_extractf32x8_ps(0xff, (__m512)x, 1));
#else
  part low, high;
  __builtin_memcpy(&low, &x, sizeof low);
  __builtin_memcpy(&high, (const char*)&x + sizeof low, sizeof high);
  return low + high;
#endif
}
#endif

// out[i] = sum of the lanes of acc[i]
INLINE void sum_lanes(const part (&acc)[4], float* out) {
#if defined(__AVX__) && TRA_LANES >= 8
  __m256 ab = _mm256_hadd_ps((__m256)acc[0], (__m256)acc[1]), cd = _mm256_hadd_ps((__m256)acc[2], (__m256)acc[3]);
  __m256 all = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  for (int i = 0; i < 4; i++) out[i] = total(acc[i]);
#endif
}

// scores[j] = q . key j for n keys, taken V at a time; returns the sum of all squares of the keys where SQUARES asks for it.
template <class V, bool SQUARES>
NOINLINE float dot_rows(const float* q, const float* keys, int64_t stride, int n, int D, float* scores) {
  constexpr int WIDTH = sizeof(V) / sizeof(float);
  V squares[4] = {};
  int j = 0;
  for (; j + 4 <= n; j += 4) {
    V acc[4] = {};
    const float* row = keys + j * stride;
    for (int i = 0; i < 4; i++)  // the block to the left is next, and hardware does not foresee that
      for (int e = 0; e < D; e += CACHE_LINE) __builtin_prefetch(row + (i - KEY_BLOCK) * stride + e);
    for (int e = 0; e < D; e += WIDTH) {
      V x = load_as<V>(q + e);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        V k = load_as<V>(row + i * stride + e);
        acc[i] += x * k;
        if (SQUARES) squares[i] += k * k;
      }
    }
    const part folded[4] = {fold(acc[0]), fold(acc[1]), fold(acc[2]), fold(acc[3])};
    sum_lanes(folded, scores + j);
  }
  for (; j < n; j++) {
    V acc = {};
    for (int e = 0; e < D; e += WIDTH) {
      V k = load_as<V>(keys + j * stride + e);
      acc += load_as<V>(q + e) * k;
      if (SQUARES) squares[0] += k * k;
    }
    scores[j] = total(fold(acc));
  }
  return total(fold((squares[0] + squares[1]) + (squares[2] + squares[3])));
}

// out[d] += sum over i of weights[i] * (row i of the kept values)[d] for d in whole groups of four V from `d` on; rows are given by
// their distance from `base`. Returns the first channel that is left.
template <class V>
NOINLINE int add_values(const float* weights, const int32_t* rows, int n, const float* base, int64_t stride, float* out, int d,
                        int D) {
  constexpr int WIDTH = sizeof(V) / sizeof(float);
  for (; d + 4 * WIDTH <= D; d += 4 * WIDTH) {
    V even[4] = {}, odd[4] = {};  // two rows at a time: sums that do not wait for one another
    int i = 0;
    for (; i + 2 <= n; i += 2) {
      const float *v0 = base + rows[i] * stride + d, *v1 = base + rows[i + 1] * stride + d;
      const V w0 = weights[i] - V{}, w1 = weights[i + 1] - V{};
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        even[k] += w0 * load_as<V>(v0 + k * WIDTH);
        odd[k] += w1 * load_as<V>(v1 + k * WIDTH);
      }
    }
    if (i < n)
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) even[k] += weights[i] * load_as<V>(base + rows[i] * stride + d + k * WIDTH);
    for (int k = 0; k < 4; k++) {
      const V sum = load_as<V>(out + d + k * WIDTH) + (even[k] + odd[k]);
      __builtin_memcpy(out + d + k * WIDTH, &sum, sizeof sum);
    }
  }
  return d;
}

// The same for every channel.
INLINE void add_all_values(const float* weights, const int32_t* rows, int n, const float* base, int64_t stride, float* out, int D) {
  int d = add_values<vf>(weights, rows, n, base, stride, out, 0, D);
  if (LANES > PART) d = add_values<part>(weights, rows, n, base, stride, out, d, D);
  for (; d < D; d += PART) {
    part acc = {};
    for (int i = 0; i < n; i++) acc += weights[i] * load_as<part>(base + rows[i] * stride + d);
    acc += load_as<part>(out + d);  // last: what one block adds would be lost in a large sum, key by key
    __builtin_memcpy(out + d, &acc, sizeof acc);
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

// The scores of keys j0 .. j0 + n into w.scores, on the canonical side of the threshold; -inf where the row may not see a key, and up
// to a whole number of vectors. Returns whether a visible score was not finite: it counts as kept.
static bool score_keys(const Call& c, DecodeSpace& w, const Query& q, int block, int j0, int n) {
  const TraProblem& p = *c.p;
  const int D = c.D;
  const uint8_t* padding = p.key_padding ? p.key_padding + q.b * p.keys : nullptr;
  int64_t stride;
  const float* keys = rows_f32(p.dtype, p.k, q.b, q.hk, j0, n, D, w.keys, &stride);
  const bool whole = D % LANES == 0;
  float norm;
  if (p.index_block) {
    (whole ? dot_rows<vf, false> : dot_rows<part, false>)(w.scaled, keys, stride, n, D, w.scores);
    norm = p.index_norm[(q.b * p.key_heads + q.hk) * (1 + p.index_stride) + 1 + block];
  } else {
    const float squares = (whole ? dot_rows<vf, true> : dot_rows<part, true>)(w.scaled, keys, stride, n, D, w.scores);
    // The norm of all keys together bounds that of each. Where squares over- or underflow nothing is known.
    norm = squares >= LEAST_SQUARES && squares < MOST_SQUARES ? __builtin_sqrtf(squares) * 1.0001f : INF;
  }
  const int from = most(q.first - j0, 0), to = least(n, q.last + 1 - j0);  // keys the row sees, padding apart
  const int end = (n + LANES - 1) / LANES * LANES;
  for (int j = n; j < end; j++) w.scores[j] = -INF;
  const vf band = splat(q.band * most(norm, LEAST_NORM) + LEAST_BAND);
  vi near = {};
  for (int j = 0; j < end; j += LANES) near |= ~(vi)(vabs(load(w.scores + j) - q.threshold) > band);  // also where it is NaN
  bool poisoned = false;
  if (__builtin_expect(any(near), 0))
    for (int j = from; j < to; j++) {
      const float s = w.scores[j];
      if (finite(s) && __builtin_fabsf(s - q.threshold) > band[0]) continue;
      if (padding && !padding[j0 + j]) continue;
      if (!finite(s)) {  // counts as kept, and makes the row NaN
        poisoned = true;
        w.scores[j] = most(q.threshold, 0.f) + 1.f;
        continue;
      }
      const float* key = keys + j * stride;
      if (__builtin_fabsf(s - q.threshold) > q.band * most(norm_above(key, D), LEAST_NORM) + LEAST_BAND) continue;
      if (exact_dot(w.q, key, D) * p.scale > q.threshold64)
        w.scores[j] = most(s, q.threshold + most(__builtin_fabsf(q.threshold) * 0x1p-22f, 1e-36f));
      else
        w.scores[j] = least(s, q.threshold);
    }
  for (int j = 0; j < least(from, n); j++) w.scores[j] = -INF;
  for (int j = most(to, 0); j < n; j++) w.scores[j] = -INF;
  if (__builtin_expect(padding != nullptr, 0))
    for (int j = from; j < to; j++)
      if (!padding[j0 + j]) w.scores[j] = -INF;
  return poisoned;
}

// The keys of a block that are kept, left to right: their scores into w.logits, which of the block they are into w.kept. Returns how many.
INLINE int compact(DecodeSpace& w, int n, float threshold) {
  int m = 0;
#if defined(__AVX512F__)
  __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int j = 0; j < n; j += LANES) {
    __m512 x = _mm512_loadu_ps(w.scores + j);
    __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(threshold), _CMP_GT_OQ);
    _mm512_storeu_ps(w.logits + m, _mm512_maskz_compress_ps(keep, x));
    _mm512_storeu_si512(w.kept + m, _mm512_maskz_compress_epi32(keep, at));
    m += __builtin_popcount(keep);
    at = _mm512_add_epi32(at, _mm512_set1_epi32(LANES));
  }
#else
  for (int j = 0; j < n; j++) {  // without a branch: which keys are kept is as good as random
    w.kept[m] = j;
    w.logits[m] = w.scores[j];
    m += w.scores[j] > threshold;
  }
#endif
  return m;
}

// Scores of the m kept keys to weights relative to 2^r.shift, in place; sums, counts and the shift are carried in r.
static void weigh_kept(DecodeSpace& w, int m, float decay, int D, Partial& r) {
  const int end = (m + LANES - 1) / LANES * LANES;
  for (int i = m; i < end; i++) w.logits[i] = -INF;
  vf left;  // kept keys to the right of each
  for (int l = 0; l < LANES; l++) left[l] = r.count + (float)(m - 1 - l);
  vf highest = splat(r.shift);
  for (int i = 0; i < end; i += LANES) {
    const vf logit = load(w.logits + i) + decay * left;
    left -= (float)LANES;
    highest = vmax(logit, highest);
    store(w.logits + i, logit);
  }
  float top = highest[0];
  for (int l = 1; l < LANES; l++) top = most(top, highest[l]);
  if (top > r.shift) {
    const float factor = __builtin_exp2f(r.shift - top);
    r.sum *= factor;
    for (int d = 0; d < D; d++) r.out[d] *= factor;
    r.shift = top;
  }
  vf sum = {};
  for (int i = 0; i < end; i += LANES) {
    const vf logit = load(w.logits + i);
    const vf weight = masked((vi)(logit > splat(-INF)), exp2_vec(logit - top));
    sum += weight;
    store(w.logits + i, weight);
  }
  r.sum += total(fold(sum));
  r.count += (float)m;
}

// Adds the values of keys j0 + w.kept[..m) with the weights in w.logits. Half precision: only these rows are converted.
static void add_kept_values(const Call& c, DecodeSpace& w, const Query& q, int j0, int m, float* out) {
  const TraProblem& p = *c.p;
  const float* values = w.keys;
  int64_t stride = p.v.stride_t;
  if (p.dtype == TRA_FLOAT32) {
    values = row_f32(p.v, q.b, q.hk, j0);
  } else {
    for (int i = 0; i < m; i++) {
      rows_f32(p.dtype, p.v, q.b, q.hk, j0 + w.kept[i], 1, c.D, w.keys + (int64_t)i * c.D, &stride);
      w.kept[i] = i;
    }
  }
  add_all_values(w.logits, w.kept, m, values, stride, out, c.D);
}

// What is known of the keys to the right of a range: how many are kept and, at shift 0, what they weigh together.
struct Before {
  float count, weight;
  bool adjacent;  // the range is the row's rightmost: nothing is to its right
};

// Whether the `rest` keys that remain together weigh at most `tolerance` of what the row has: see docs/kernel.md.
INLINE bool rest_is_negligible(const TraProblem& p, const Query& q, const Before& before, const Partial& r, float rest) {
  const float tolerance = (float)p.tolerance * 0.9999f;
  if (!(tolerance > 0)) return false;
  const float count = before.count + r.count;
  const float factor = p.needs_grad ? least((count + q.inverse) * q.inverse, rest * (count + rest)) : least(q.inverse, rest);
  // compared at shift 0, or at this range's shift where it is the rightmost
  const float tail = q.upper + q.decay * count - (before.adjacent ? r.shift : 0.f);
  return tail < 120.f && __builtin_exp2f(tail) * factor <= (before.adjacent ? r.sum : before.weight) * tolerance;
}

// Walks on from r.reach to `low`, right to left, or until the row is settled.
static void walk(const Call& c, DecodeSpace& w, const Query& q, int low, const Before& before, Partial& r) {
  const TraProblem& p = *c.p;
  while (r.reach > low) {
    const int block = (r.reach - 1) / KEY_BLOCK, j0 = most(block * KEY_BLOCK, low), n = r.reach - j0;
    r.reach = j0;
    if (p.index_block && block_is_below(c, q, w.scaled, block)) continue;
    r.poisoned |= score_keys(c, w, q, block, j0, n);
    const int m = compact(w, n, q.threshold);
    if (m) {
      if (p.dtype == TRA_FLOAT32)
        for (int i = 0; i < m; i++) prefetch_rows(p.dtype, p.v, q.b, q.hk, j0 + w.kept[i], 1, c.D);
      weigh_kept(w, m, q.decay, c.D, r);
      if (c.dropout)
        for (int i = 0; i < m; i++)
          if (!survives(q.dropout_key, j0 + w.kept[i], p.dropout_cut)) w.logits[i] = 0;
      add_kept_values(c, w, q, j0, m, r.out);
    }
    if (j0 <= q.first) break;
    if (rest_is_negligible(p, q, before, r, (float)(j0 - q.first))) {
      r.settled = 1;
      break;
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
  float normaliser;
  if (poisoned) {
    fill_row(p.dtype, p.out.data, offset, c.D, NOT_A_NUMBER);
    normaliser = NOT_A_NUMBER;
  } else if (count == 0) {
    fill_row(p.dtype, p.out.data, offset, c.D, 0.f);
    normaliser = INF;
  } else {
    store_row(p.dtype, p.out.data, offset, c.D, out, (c.dropout ? p.dropout_scale : 1.f) / sum);
    normaliser = (float)(((double)__builtin_log2f(sum) + shift) * LN2);
  }
  if (!p.normaliser) return;
  p.normaliser[flat] = normaliser;
  p.kept[flat] = (int32_t)count;
  reach = most(reach, q.first);
  p.reach[flat] = reach <= q.last ? reach : (int32_t)(p.query_start + q.t) + 1;
}

// One call of decode: what every thread of it reads.
struct DecodePlan {
  int64_t queries, heads;
  int ranges, parts;  // the rest of a row's keys is cut into so many ranges; with the nearest keys, so many parts
  bool need_norms;    // neither an index nor a bound: the bound takes one pass over the keys
  bool alone_first;   // few rows: the caller's thread looks at the nearest keys before any other is woken
  Query* described;   // [queries]
  Partial* partials;  // [queries][parts]
  float* key_norms;   // [heads]

  explicit DecodePlan(const Call& c) {
    const TraProblem& p = *c.p;
    queries = p.batch * p.query_heads * p.queries;
    heads = p.batch * p.key_heads;
    // Few long rows: each reads its nearest keys, then the rest of those not settled is cut into ranges.
    const bool share = p.threads > 1 && queries < 2 * p.threads && !p.needs_grad && c.visible > NEAR_KEYS + RANGE_KEYS;
    const int64_t rest = most<int64_t>(0, c.visible - NEAR_KEYS);
    ranges = share ? (int)least<int64_t>(most<int64_t>(1, rest / RANGE_KEYS), 4 * p.threads) : 0;
    parts = 1 + ranges;
    need_norms = !p.index_block && !p.score_bound && p.tolerance > 0;
    alone_first = !need_norms && queries <= FIRST_QUERIES;
  }

  size_t bytes() const { return sizeof(Partial) * queries * parts + sizeof(Query) * queries + sizeof(float) * heads; }

  void place(char* memory) {
    described = (Query*)memory;  // first: it has the strictest alignment
    partials = (Partial*)(described + queries);
    key_norms = (float*)(partials + queries * parts);
  }

  const float* norms() const { return need_norms ? key_norms : nullptr; }
};

// The largest norm of a head's keys.
static float key_norm(const Call& c, int64_t head, float* scratch) {
  const TraProblem& p = *c.p;
  const int64_t b = head / p.key_heads, hk = head % p.key_heads;
  const uint8_t* padding = p.key_padding ? p.key_padding + b * p.keys : nullptr;
  float norm = 0;
  int64_t stride;
  for (int64_t j = 0; j < c.visible; j++)
    if (!padding || padding[j]) norm = most(norm, norm_above(rows_f32(p.dtype, p.k, b, hk, (int)j, 1, c.D, scratch, &stride), c.D));
  return norm;
}

// Walks row i over its nearest `keys` keys (all of them: 0), on from where it is if it has begun. True: the row is settled.
static bool walk_near(const Call& c, DecodeSpace& w, const DecodePlan& plan, int64_t i, int keys, bool begun) {
  Query& q = plan.described[i];
  Partial* parts = plan.partials + i * plan.parts;
  Partial& near = parts[0];
  describe_query(c, i, plan.norms(), q, w);
  const int begin = most(0, q.first), end = most(begin, q.last + 1);
  if (!begun) start(near, end, c.D);
  walk(c, w, q, keys ? most(begin, (end - keys) / KEY_BLOCK * KEY_BLOCK) : begin, {0, 0, true}, near);
  near.settled |= near.reach <= begin;
  for (int range = 1; range < plan.parts; range++) start(parts[range], near.reach, c.D);
  return near.settled;
}

// Walks one of the ranges into which the rest of row i is cut.
static void walk_range(const Call& c, DecodeSpace& w, const DecodePlan& plan, int64_t i, int range) {
  const Partial& near = plan.partials[i * plan.parts];
  if (near.settled) return;
  Query q;
  describe_query(c, i, plan.norms(), q, w);
  const int begin = most(0, q.first), end = near.reach;
  const int64_t blocks = (end - begin + KEY_BLOCK - 1) / KEY_BLOCK;
  const int high = (int)(end - blocks * range / plan.ranges * KEY_BLOCK);
  const int low = (int)most<int64_t>(begin, end - blocks * (range + 1) / plan.ranges * KEY_BLOCK);
  if (low >= high) return;
  const float weight = near.count > 0 && near.shift < 120.f ? near.sum * __builtin_exp2f(near.shift) : 0.f;
  Partial& r = plan.partials[i * plan.parts + 1 + range];
  r.reach = high;
  walk(c, w, q, low, {near.count, weight, false}, r);
}

// The nearest keys of all rows in the caller's thread. Returns the rows that need more, -1: no memory.
static int64_t decode_alone(const Call& c, const DecodePlan& plan) {
  DenormalMode flush(true);
  DecodeSpace* w = (DecodeSpace*)workspace.take(sizeof(DecodeSpace) / sizeof(float));
  if (!w) return -1;
  int64_t unsettled = 0;
  for (int64_t i = 0; i < plan.queries; i++) {
    if (walk_near(c, *w, plan, i, FIRST_KEYS, false))
      finish_query(c, plan.described[i], i, plan.partials + i * plan.parts, 1);
    else
      unsettled++;
  }
  return unsettled;
}

// What one thread does of the rows that are not settled. Every thread of the team calls it.
static void decode_shared(const Call& c, DecodeSpace& w, const DecodePlan& plan) {
  if (plan.need_norms) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.heads; i++) plan.key_norms[i] = key_norm(c, i, w.row);
  }
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < plan.queries; i++) {
    Partial* parts = plan.partials + i * plan.parts;
    if (plan.alone_first && parts->settled) continue;
    if (walk_near(c, w, plan, i, plan.ranges ? NEAR_KEYS : 0, plan.alone_first) || !plan.ranges) {
      parts->settled = 1;
      finish_query(c, plan.described[i], i, parts, 1);
    }
  }
  if (plan.ranges) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t k = 0; k < plan.queries * plan.ranges; k++) walk_range(c, w, plan, k % plan.queries, (int)(k / plan.queries));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < plan.queries; i++) {
      const Partial* parts = plan.partials + i * plan.parts;
      if (!parts->settled) finish_query(c, plan.described[i], i, parts, plan.parts);
    }
  }
}

static int decode(Call& c) {
  DecodePlan plan(c);
  char* memory = (char*)::malloc(plan.bytes());
  if (!memory) return TRA_OUT_OF_MEMORY;
  plan.place(memory);
  const int64_t unsettled = plan.alone_first ? decode_alone(c, plan) : plan.queries;
  int failed = unsettled < 0;
  if (unsettled > 0) {
#pragma omp parallel num_threads(c.p->threads) if (c.visible * plan.queries > 512)
    {
      DenormalMode flush(true);
      DecodeSpace* w = (DecodeSpace*)workspace.take(sizeof(DecodeSpace) / sizeof(float));
      if (w) {
        decode_shared(c, *w, plan);
      } else {
#pragma omp atomic write
        failed = 1;
      }
    }
  }
  ::free(memory);
  return failed ? TRA_OUT_OF_MEMORY : TRA_OK;
}
