// What forward, backward and decode share: element types, per-call facts, per-thread workspace, the matrix micro-kernel,
// packing of query panels, and the canonical keep decision.
// Included inside an unnamed namespace of each per-ISA translation unit.

constexpr int PANEL_VECTORS = 2;                   // vectors per panel
constexpr int PANEL_ROWS = PANEL_VECTORS * LANES;  // query rows (lanes) per panel
constexpr int KEY_BLOCK = 64;                      // keys per block
constexpr int ROWS = 256;                          // most rows a row block may hold
constexpr int PANELS = ROWS / PANEL_ROWS;
constexpr int TILE_ROWS = TRA_REGISTERS >= 32 ? 8 : 6;  // rows of accumulators in the micro-kernel
constexpr int ROWS_AHEAD = 8;                           // rows asked for ahead of the one being set up
constexpr float LOG2E = 1.44269504088896340736f;
constexpr double LN2 = 0.69314718055994530942;
// Scores this near to the threshold are rechecked whatever the norms: 256 sums may each have flushed up to 2^-126.
constexpr float LEAST_BAND = 0x1p-118f;
constexpr float LEAST_NORM = 0x1p-50f;  // in place of a smaller |q| scale or |k|, whose channels may all be read as 0
constexpr float INF = __builtin_inff();
constexpr float NOT_A_NUMBER = __builtin_nanf("");

template <class T>
INLINE T least(T a, T b) {
  return a < b ? a : b;
}
template <class T>
INLINE T most(T a, T b) {
  return a > b ? a : b;
}
INLINE bool finite(float x) { return __builtin_fabsf(x) < INF; }

// ---- element types -------------------------------------------------------------------------------------------------

INLINE float bits_to_float(uint32_t x) {
  float r;
  __builtin_memcpy(&r, &x, 4);
  return r;
}
INLINE uint32_t float_to_bits(float x) {
  uint32_t r;
  __builtin_memcpy(&r, &x, 4);
  return r;
}

INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
  uint32_t bits = (rest << 13) + (112u << 23);  // the exponents' biases differ by 112
  uint32_t subnormal = float_to_bits((float)(int32_t)rest * 0x1p-24f);
  bits = rest < 0x400u ? subnormal : bits;             // normal as fp32: not flushed
  bits = rest >= 0x7c00u ? bits | 0x7f800000u : bits;  // inf and NaN
  return bits_to_float(bits | sign);
}

INLINE uint16_t float_to_half(float f) {
  uint32_t x = float_to_bits(f), sign = (x >> 16) & 0x8000u;
  x &= 0x7fffffffu;
  if (x >= 0x7f800000u) return (uint16_t)(sign | 0x7c00u | (x > 0x7f800000u ? 0x200u : 0));
  if (x >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // rounds beyond 65504
  if (x < 0x38800000u) {                                    // subnormal: let the fp32 adder round
    float r = bits_to_float(x) + 0.5f;
    return (uint16_t)(sign | (float_to_bits(r) - 0x3f000000u));
  }
  x += 0xc8000fffu + ((x >> 13) & 1);  // rebias, round to nearest even
  return (uint16_t)(sign | (x >> 13));
}

INLINE uint16_t float_to_bfloat(float f) {
  uint32_t x = float_to_bits(f);
  if ((x & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((x >> 16) | 0x40u);
  return (uint16_t)((x + 0x7fffu + ((x >> 16) & 1)) >> 16);
}

constexpr int PART = LANES < 8 ? LANES : 8;  // floats of a row taken together: head sizes are multiples of 8
typedef float part __attribute__((vector_size(PART * 4)));

// A row of D floats. (memcpy of a length that is not known when compiling is a call, which takes longer than the row.)
INLINE void copy_row(const float* from, int D, float* to) {
  int e = 0;
  for (; e + LANES <= D; e += LANES) store(to + e, load(from + e));
  for (; e < D; e += PART) {
    part x = load_as<part>(from + e);
    __builtin_memcpy(to + e, &x, sizeof x);
  }
}

// dst[0..d) = element `offset`.. of a tensor of this type
INLINE void load_row(int dtype, const void* base, int64_t offset, int d, float* dst) {
  if (dtype == TRA_FLOAT32) {
    copy_row((const float*)base + offset, d, dst);
  } else if (dtype == TRA_BFLOAT16) {
    const uint16_t* p = (const uint16_t*)base + offset;
    for (int e = 0; e < d; e++) dst[e] = bits_to_float((uint32_t)p[e] << 16);
  } else {
    const uint16_t* p = (const uint16_t*)base + offset;
    for (int e = 0; e < d; e++) dst[e] = half_to_float(p[e]);
  }
}

INLINE void store_row(int dtype, void* base, int64_t offset, int d, const float* src, float factor) {
  if (dtype == TRA_FLOAT32) {
    float* p = (float*)base + offset;
    for (int e = 0; e < d; e++) p[e] = src[e] * factor;
  } else if (dtype == TRA_BFLOAT16) {
    uint16_t* p = (uint16_t*)base + offset;
    for (int e = 0; e < d; e++) p[e] = float_to_bfloat(src[e] * factor);
  } else {
    uint16_t* p = (uint16_t*)base + offset;
    for (int e = 0; e < d; e++) p[e] = float_to_half(src[e] * factor);
  }
}

INLINE void fill_row(int dtype, void* base, int64_t offset, int d, float value) {
  if (dtype == TRA_FLOAT32) {
    for (int e = 0; e < d; e++) ((float*)base)[offset + e] = value;
  } else {
    uint16_t x = dtype == TRA_BFLOAT16 ? float_to_bfloat(value) : float_to_half(value);
    for (int e = 0; e < d; e++) ((uint16_t*)base)[offset + e] = x;
  }
}

// ---- per-call facts ------------------------------------------------------------------------------------------------

enum { KEY_NOT_FINITE = 1, VALUE_NOT_FINITE = 2 };

// What one pass over the visible keys and values tells, per block of KEY_BLOCK keys of one (batch, key head).
struct KeyFacts {
  float* norm;          // largest |k| of the block (real keys only); inf where it overflows
  float* norm_so_far;   // the same over this block and all to its left
  float* value_so_far;  // largest |v| element over this block and all to its left
  uint8_t* flags;
};

struct Call {
  const TraProblem* p;
  int D, group, rows;  // rows: size of a row block
  int64_t visible;     // keys before the last query's end; nothing at or after it is read
  int blocks;          // of KEY_BLOCK keys
  float* facts;        // [B * Hkv][3][blocks] then flags
  uint8_t* flags;
  bool pack;      // keys and values are laid side by side, in fp32, before the walks
  float* packed;  // [B * Hkv][keys then values][visible][D] where threads share heads; else each thread has its own
  bool dropout;
  uint32_t seed_key;

  KeyFacts key_facts(int64_t b, int64_t hk) const {
    int64_t i = b * p->key_heads + hk;
    float* f = facts + i * 3 * blocks;
    return {f, f + blocks, f + 2 * blocks, flags + i * blocks};
  }
};

INLINE const float* row_f32(const TraTensor& t, int64_t b, int64_t h, int64_t i) {
  return (const float*)t.data + b * t.stride_b + h * t.stride_h + i * t.stride_t;
}

// The keys and values of one key head as fp32 rows D apart, or null where they are read where they lie.
struct PackedHead {
  float *keys, *values;
};

// ---- per-thread workspace ------------------------------------------------------------------------------------------

// Grown to the largest size asked of this thread and kept for the next call; freed with the thread.
struct Workspace {
  float* data = nullptr;
  size_t size = 0;
  float* take(size_t floats) {
    if (floats > size) {
      ::free(data);
      size_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
      data = (float*)::aligned_alloc(64, bytes);
      size = data ? floats : 0;
    }
    return data;
  }
  ~Workspace() { ::free(data); }
};

// Cuts memory into arrays that each begin on a cache line. Without memory it only measures how much they take.
struct Layout {
  float* memory;
  size_t used = 0;
  float* take(size_t floats) {
    float* at = memory ? memory + used : nullptr;
    used += (floats + 15) / 16 * 16;
    return at;
  }
};

// ---- the micro-kernel ----------------------------------------------------------------------------------------------

// acc[m][n] += sum over k < depth of a[m * am + k * ak] * b[k * ldb + n * LANES ..]. Every product of the kernel is this one:
//   scores    a = keys    (am = key stride, ak = 1)  b = transposed query panel   -> panel [key][lane]
//   output    a = weights (am = 1, ak = PANEL_ROWS)           b = values                   -> rows  [lane][channel]
//   gradients likewise, with the roles of queries and keys exchanged.
template <int M, int N>
INLINE void multiply(vf (&acc)[M][N], const float* a, int64_t am, int64_t ak, const float* b, int64_t ldb, int depth) {
#pragma GCC unroll 2
  for (int k = 0; k < depth; k++) {
    vf right[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) right[n] = load(b + n * LANES);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      vf left = splat(a[m * am]);
#pragma GCC unroll 16
      for (int n = 0; n < N; n++) acc[m][n] += left * right[n];
    }
    a += ak;
    b += ldb;
  }
}

template <int M, int N>
INLINE void clear(vf (&acc)[M][N]) {
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) acc[m][n] = vf{};
}

template <int M, int N>
INLINE void add_to(vf (&acc)[M][N], float* c, int64_t ldc) {
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) store(c + m * ldc + n * LANES, load(c + m * ldc + n * LANES) + acc[m][n]);
}

// Calls f with n <= TILE_ROWS, which is only known at run time, as a constant.
template <int M>
struct Rows {
  static constexpr int value = M;
};
template <int M = TILE_ROWS, class F>
INLINE void with_rows(int n, F&& f) {
  if constexpr (M == 1)
    f(Rows<1>{});
  else if (n == M)
    f(Rows<M>{});
  else
    with_rows<M - 1>(n, f);
}
// Splits n rows into nearly equal chunks of at most TILE_ROWS: 16 -> 6 + 5 + 5, which keeps every chunk long enough to hide latency.
INLINE int chunk(int n) {
  int parts = (n + TILE_ROWS - 1) / TILE_ROWS;
  return (n + parts - 1) / parts;
}

// c[lane][channel] += sum over keys of panel[key][lane] * x[key][channel], lanes < n, keys < depth
static void add_panel_times_rows(const float* panel, int n, int depth, const float* x, int64_t ldx, float* c, int64_t ldc, int D) {
  int d = 0;
  for (; d + 2 * LANES <= D; d += 2 * LANES)
    for (int r = 0, step; r < n; r += step) {
      step = chunk(n - r);
      with_rows(step, [&](auto rows) {
        constexpr int M = decltype(rows)::value;
        vf acc[M][2];
        clear(acc);
        multiply<M, 2>(acc, panel + r, 1, PANEL_ROWS, x + d, ldx, depth);
        add_to(acc, c + r * ldc + d, ldc);
      });
    }
  for (; d + LANES <= D; d += LANES)
    for (int r = 0, step; r < n; r += step) {
      step = chunk(n - r);
      with_rows(step, [&](auto rows) {
        constexpr int M = decltype(rows)::value;
        vf acc[M][1];
        clear(acc);
        multiply<M, 1>(acc, panel + r, 1, PANEL_ROWS, x + d, ldx, depth);
        add_to(acc, c + r * ldc + d, ldc);
      });
    }
  for (; d < D; d++)  // head sizes below the vector width
    for (int r = 0; r < n; r++) {
      float sum = 0;
      for (int k = 0; k < depth; k++) sum += panel[k * PANEL_ROWS + r] * x[k * ldx + d];
      c[r * ldc + d] += sum;
    }
}

// A copy of n rows in which those that hold NaN or inf are zero: the products may then pass over them without harm, and every
// row that may not see them gets the same bits as if they had been finite.
NOINLINE const float* cleaned(const float* x, int64_t* stride, int n, int D, float* scratch) {
  for (int j = 0; j < n; j++) {
    float check = 0, *row = scratch + (int64_t)j * D;
    __builtin_memmove(row, x + j * *stride, D * sizeof(float));
    for (int d = 0; d < D; d++) check += row[d] * 0.f;
    if (check != 0) __builtin_memset(row, 0, D * sizeof(float));
  }
  *stride = D;
  return scratch;
}

// The same rows side by side. Rows a power of two apart, as in [B, T, H, D], fall into few cache sets; a product that takes one
// vector from each would miss the first-level cache at every step. One copy serves all the panels of a row block.
INLINE const float* side_by_side(const float* x, int64_t* stride, int n, int D, float* scratch) {
  if (*stride == D) return x;
  for (int j = 0; j < n; j++) copy_row(x + j * *stride, D, scratch + (int64_t)j * D);
  *stride = D;
  return scratch;
}

// ---- query panels --------------------------------------------------------------------------------------------------

#if defined(__AVX__)
// 8 rows of 8 channels, transposed
INLINE void transpose_8x8(const float* from, int64_t stride, __m256 factor, float* to) {
  __m256 r[8], u[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_mul_ps(_mm256_loadu_ps(from + i * stride), factor);
  for (int i = 0; i < 8; i += 4) {
    __m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    __m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    u[i] = _mm256_shuffle_ps(a, c, 0x44);
    u[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    u[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    u[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * PANEL_ROWS, _mm256_permute2f128_ps(u[i], u[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * PANEL_ROWS, _mm256_permute2f128_ps(u[i], u[i + 4], 0x31));
  }
}
#endif

// panel[e][lane] = rows[lane][e] * factor for one panel of PANEL_ROWS lanes, zero beyond n
static void transpose_panel(const float* rows, int n, int D, float factor, float* panel) {
  int lane = 0;
#if defined(__AVX__)
  for (; lane + 8 <= n; lane += 8)
    for (int e = 0; e < D; e += 8)
      transpose_8x8(rows + (int64_t)lane * D + e, D, _mm256_set1_ps(factor), panel + e * PANEL_ROWS + lane);
#endif
  for (; lane < n; lane++)
    for (int e = 0; e < D; e++) panel[e * PANEL_ROWS + lane] = rows[lane * D + e] * factor;
  if (n < PANEL_ROWS)
    for (int e = 0; e < D; e++)
      for (int i = n; i < PANEL_ROWS; i++) panel[e * PANEL_ROWS + i] = 0;
}

// ---- the rows of a block -------------------------------------------------------------------------------------------

// What is known of a row being walked: type, name, and the value in a lane that holds no row, which then keeps nothing.
// Scores and decays are in base 2.
#define TRA_LANE_FIELDS(field)                                                                                              \
  field(float, decay, 0)           /* log_decay * log2(e) */                                                                \
      field(float, threshold, INF) /* threshold * log2(e) */                                                                \
      field(float, band, 0)        /* D 2^-22 |q| scale log2(e): times |k| it is the width of the recheck */                \
      field(float, count, 0)       /* kept keys so far */                                                                   \
      field(float, sum, 1)         /* normaliser so far, relative to 2^shift */                                             \
      field(float, shift, 0)       /* 0, or the running maximum */                                                          \
      field(float, reach_norm, 0)  /* |q| scale log2(e) */                                                                  \
      field(float, inverse, 0)     /* 1 / (1 - e^g) */                                                                      \
      field(float, delta, 0)       /* backward: dO . O */                                                                   \
      field(float, lse, 0)         /* backward: normaliser in base 2 */                                                     \
      field(float, grad_decay, 0) field(float, grad_threshold, 0) field(int32_t, last, -1) /* rightmost key the row sees */ \
      field(int32_t, first, 0)                                                             /* leftmost */                   \
      field(uint32_t, dropout_key, 0) field(double, threshold64, INF) field(int32_t, row, -1)                               \
          field(uint8_t, poisoned, 0) /* a non-finite score was seen, or an input of the row is not finite */               \
      field(uint8_t, decay_bad, 0)

// The rows being walked, one lane per row, in ascending order of position.
struct Lanes {
#define TRA_DECLARE(type, name, empty) alignas(64) type name[ROWS];
  TRA_LANE_FIELDS(TRA_DECLARE)
#undef TRA_DECLARE
  int n, panels;

  void move(int to, int from) {
#define TRA_MOVE(type, name, empty) name[to] = name[from];
    TRA_LANE_FIELDS(TRA_MOVE)
#undef TRA_MOVE
  }
  // Fills the last panel up with lanes that hold no row.
  void pad() {
    panels = (n + PANEL_ROWS - 1) / PANEL_ROWS;
    for (int i = n; i < panels * PANEL_ROWS; i++) {
#define TRA_CLEAR(type, name, empty) name[i] = empty;
      TRA_LANE_FIELDS(TRA_CLEAR)
#undef TRA_CLEAR
    }
  }
};

// The sum of a part's floats, in pairs, which takes half as long as one after the other.
INLINE float total(part x) {
  typedef float quad __attribute__((vector_size(16)));
  quad sum, high;
  __builtin_memcpy(&sum, &x, 16);
  if (PART == 8) {
    __builtin_memcpy(&high, (const char*)&x + sizeof x - 16, 16);
    sum += high;
  }
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// An upper bound of the norm of a row, inf where it is not finite or a product with it may overflow, never 0.
INLINE float norm_above(const float* x, int D) {
  part sums = {};
  for (int e = 0; e < D; e += PART) {
    part y = load_as<part>(x + e);
    sums += y * y;
  }
  float norm2 = total(sums);
  if (!(norm2 < 1e36f)) return INF;
  if (norm2 < 1e-24f) {  // squares may have underflowed
    float top = 1e-18f;
    for (int e = 0; e < D; e++) top = most(top, __builtin_fabsf(x[e]));
    return top * 16.f;  // at most 256 channels
  }
  return __builtin_sqrtf(norm2) * 1.00001f;
}

static void fill_lane(const Call& c, Lanes& s, int lane, int64_t b, int64_t h, int64_t t, const float* q) {
  const TraProblem& p = *c.p;
  int64_t flat = (b * p.query_heads + h) * p.queries + t;
  float norm = most(norm_above(q, c.D) * (float)(p.scale * LOG2E * 1.00001), LEAST_NORM);
  float g = p.log_decay[flat];
  s.decay_bad[lane] = !finite(g);
  if (s.decay_bad[lane]) g = 0;
  double th = p.threshold ? p.threshold[flat] : p.threshold_value;
  int64_t position = p.query_start + t;
  s.row[lane] = (int32_t)t;
  s.decay[lane] = g * LOG2E;
  s.inverse[lane] = g < 0 ? 1.00001f / -__builtin_expm1f(g) : INF;
  s.threshold64[lane] = th;
  s.threshold[lane] = (float)(th * LOG2E);
  s.reach_norm[lane] = norm;
  s.band[lane] = norm * (float)(c.D * 0x1p-22);
  s.count[lane] = 0;
  s.sum[lane] = 0;
  s.shift[lane] = 0;
  s.last[lane] = (int32_t)(position - (p.exclude_self && p.exclude_self[h] ? 1 : 0));
  s.first[lane] = p.first_key ? p.first_key[t] : 0;
  s.poisoned[lane] = 0;
  s.dropout_key[lane] = c.dropout ? mix(mix(c.seed_key ^ (uint32_t)(b * p.query_heads + h)) ^ (uint32_t)position) : 0;
}

// ---- scores of a tile ----------------------------------------------------------------------------------------------

// q . k in fp64 and in channel order, denormal channels included
NOINLINE double exact_dot(const float* q, const float* k, int D) {
  DenormalMode keep(false);
  double dot = 0;
  for (int e = 0; e < D; e++) dot += (double)q[e] * (double)k[e];
  return dot;
}

// The decision made canonical: recompute in fp64, in order, and move the score to the side of the threshold it belongs to.
NOINLINE void recheck(const Lanes& s, int lane0, const float* q_rows, const float* keys, int64_t stride, int n, float* tile,
                      float norm, int D, double scale) {
  for (int j = 0; j < n; j++)
    for (int i = 0; i < PANEL_ROWS; i++) {
      int lane = lane0 + i;
      float x = tile[j * PANEL_ROWS + i], t = s.threshold[lane];
      if (lane >= s.n || !(__builtin_fabsf(x - t) <= s.band[lane] * norm + LEAST_BAND)) continue;
      if (exact_dot(q_rows + (int64_t)lane * D, keys + j * stride, D) * scale > s.threshold64[lane]) {
        if (!(x > t)) tile[j * PANEL_ROWS + i] = t + most(__builtin_fabsf(t) * 0x1p-22f, 1e-36f);
      } else if (x > t) {
        tile[j * PANEL_ROWS + i] = t;
      }
    }
}

// tile[key][lane] = score in base 2 with the canonical side of the threshold. Returns whether any key may be kept.
NOINLINE bool score_tile(const Lanes& s, int lane0, const float* q_rows, const float* q_panel, const float* keys, int64_t stride,
                         int n, float norm, float* tile, int D, double scale) {
  vf t[PANEL_VECTORS], band[PANEL_VECTORS];
  for (int i = 0; i < PANEL_VECTORS; i++) {
    t[i] = load(s.threshold + lane0 + i * LANES);
    band[i] = load(s.band + lane0 + i * LANES) * norm + LEAST_BAND;
  }
  vi below = splat((int32_t)-1);  // sign bit: every difference so far is negative
  for (int j = 0, step; j < n; j += step) {
    step = chunk(n - j);
    with_rows(
        step, [&](auto rows) __attribute__((always_inline)) {
          constexpr int M = decltype(rows)::value;
          vf acc[M][PANEL_VECTORS];
          clear(acc);
          multiply<M, PANEL_VECTORS>(acc, keys + j * stride, stride, 1, q_panel, PANEL_ROWS, D);
          vf closest[PANEL_VECTORS];
#pragma GCC unroll 16
          for (int m = 0; m < M; m++)
#pragma GCC unroll 16
            for (int i = 0; i < PANEL_VECTORS; i++) {
              store(tile + (j + m) * PANEL_ROWS + i * LANES, acc[m][i]);
              vf difference = acc[m][i] - t[i];
              closest[i] = m ? vmin(vabs(difference), closest[i]) : vabs(difference);
              below &= (vi)difference;
            }
          vi near = {};
#pragma GCC unroll 16
          for (int i = 0; i < PANEL_VECTORS; i++) near |= ~(vi)(closest[i] > band[i]);  // also where a NaN hides the others
          if (__builtin_expect(any(near), 0)) {
            recheck(s, lane0, q_rows, keys + j * stride, stride, M, tile + j * PANEL_ROWS, norm, D, scale);
            below = vi{};
          }
        });
  }
  return any(~below & splat((int32_t)0x80000000));
}

// A non-finite score counts as kept and poisons its row; one that the row may not see is left for the mask.
NOINLINE bool poison_tile(Lanes& s, int lane0, float* tile, int j0, int n, const uint8_t* padding) {
  bool kept = false;
  for (int j = 0; j < n; j++)
    for (int i = 0; i < PANEL_ROWS && lane0 + i < s.n; i++) {
      int lane = lane0 + i;
      if (finite(tile[j * PANEL_ROWS + i])) continue;
      if (j0 + j > s.last[lane] || j0 + j < s.first[lane] || (padding && !padding[j0 + j])) continue;
      s.poisoned[lane] = 1;
      tile[j * PANEL_ROWS + i] = most(s.threshold[lane], 0.f) + 1.f;
      kept = true;
    }
  return kept;
}

// A kept key whose value is not finite poisons the row too, also where dropout or underflow takes its weight away.
NOINLINE void poison_by_values(Lanes& s, int lane0, const float* tile, const float* values, int64_t stride, int n, int D) {
  for (int j = 0; j < n; j++) {
    bool bad = false;
    for (int d = 0; d < D; d++) bad |= !finite(values[j * stride + d]);
    if (!bad) continue;
    for (int i = 0; i < PANEL_ROWS && lane0 + i < s.n; i++)
      if (tile[j * PANEL_ROWS + i] > s.threshold[lane0 + i]) s.poisoned[lane0 + i] = 1;
  }
}

// What a row may not see becomes -inf: later keys, its own if excluded, other segments, padding.
static void mask_tile(const Lanes& s, int lane0, float* tile, int j0, int n, const uint8_t* padding) {
  vi last[PANEL_VECTORS], first[PANEL_VECTORS];
  for (int i = 0; i < PANEL_VECTORS; i++) {
    last[i] = load(s.last + lane0 + i * LANES);
    first[i] = load(s.first + lane0 + i * LANES);
  }
  for (int j = 0; j < n; j++) {
    vi key = splat((int32_t)(j0 + j));
    bool real = !padding || padding[j0 + j];
    for (int i = 0; i < PANEL_VECTORS; i++) {
      float* x = tile + j * PANEL_ROWS + i * LANES;
      vi seen = (last[i] >= key) & (first[i] <= key);
      store(x, real ? (seen ? load(x) : splat(-INF)) : splat(-INF));
    }
  }
}

// Keys or values j0 .. j0 + n as fp32 rows, for a product that broadcasts from them: moved only where rows lie so far apart that
// a block's fall into an eighth of the cache's sets.
INLINE const float* rows_f32(int dtype, const TraTensor& x, int64_t b, int64_t h, int j0, int n, int D, float* scratch,
                             int64_t* stride);
INLINE const float* block_f32(const Call& c, const TraTensor& x, const float* packed, int64_t b, int64_t h, int j0, int n,
                              float* scratch, int64_t* stride) {
  if (packed) {
    *stride = c.D;
    return packed + (int64_t)j0 * c.D;
  }
  const float* rows = rows_f32(c.p->dtype, x, b, h, j0, n, c.D, scratch, stride);
  return *stride * (int64_t)sizeof(float) % 2048 == 0 ? side_by_side(rows, stride, n, c.D, scratch) : rows;
}

// The same, in place wherever they are fp32 already.
INLINE const float* rows_f32(int dtype, const TraTensor& x, int64_t b, int64_t h, int j0, int n, int D, float* scratch,
                             int64_t* stride) {
  if (dtype == TRA_FLOAT32) {
    *stride = x.stride_t;
    return row_f32(x, b, h, j0);
  }
  *stride = D;
  int64_t offset = b * x.stride_b + h * x.stride_h + (int64_t)j0 * x.stride_t;
  for (int j = 0; j < n; j++) load_row(dtype, x.data, offset + j * x.stride_t, D, scratch + (int64_t)j * D);
  return scratch;
}

// Asks for rows i0 .. i0 + n of a tensor ahead of their use: rows that lie far apart are not foreseen by the hardware.
INLINE void prefetch_rows(int dtype, const TraTensor& x, int64_t b, int64_t h, int64_t i0, int n, int D) {
  const int size = dtype == TRA_FLOAT32 ? 4 : 2;
  const char* row = (const char*)x.data + (b * x.stride_b + h * x.stride_h + i0 * x.stride_t) * size;
  for (int i = 0; i < n; i++, row += x.stride_t * size)
    for (int at = 0; at < D * size; at += 64) __builtin_prefetch(row + at, 0, 3);
}

// ---- preparation ---------------------------------------------------------------------------------------------------

// Row j in fp32, copied to its place among the packed rows if these are wanted.
INLINE const float* one_row(const Call& c, const TraTensor& x, int64_t b, int64_t hk, int j, float* scratch, float* packed) {
  int64_t stride;
  if (!packed) return rows_f32(c.p->dtype, x, b, hk, j, 1, c.D, scratch, &stride);
  float* row = packed + (int64_t)j * c.D;
  load_row(c.p->dtype, x.data, b * x.stride_b + hk * x.stride_h + j * x.stride_t, c.D, row);
  return row;
}

static void describe_keys(const Call& c, int64_t b, int64_t hk, int block, PackedHead packed) {
  alignas(64) float scratch[256];
  const TraProblem& p = *c.p;
  KeyFacts f = c.key_facts(b, hk);
  int j0 = block * KEY_BLOCK, n = (int)least<int64_t>(KEY_BLOCK, c.visible - j0);
  const uint8_t* padding = p.key_padding ? p.key_padding + b * p.keys : nullptr;
  float largest = 0, largest_value = 0;
  uint8_t flags = 0;
  part top = {}, check = {}, check_hidden = {};  // check: 0 as long as all values are finite
  for (int j = j0; j < j0 + n; j++) {
    if (j + ROWS_AHEAD < c.visible)
      for (const TraTensor* x : {&p.k, &p.v}) prefetch_rows(p.dtype, *x, b, hk, j + ROWS_AHEAD, 1, c.D);
    const bool hidden = padding && !padding[j];
    float norm = norm_above(one_row(c, p.k, b, hk, j, scratch, packed.keys), c.D);
    if (norm == INF) flags |= KEY_NOT_FINITE;  // NaN, inf, or so large that a product may overflow
    const float* v = one_row(c, p.v, b, hk, j, scratch, packed.values);
    if (__builtin_expect(hidden, 0)) {
      for (int e = 0; e < c.D; e += PART) check_hidden += load_as<part>(v + e) * 0.f;
      continue;
    }
    largest = most(largest, norm);
    for (int e = 0; e < c.D; e += PART) {
      part x = load_as<part>(v + e);
      check += x * 0.f;
      x = x < -x ? -x : x;
      top = x > top ? x : top;
    }
  }
  for (int i = 0; i < PART; i++) {
    if (check[i] != 0 || check_hidden[i] != 0) flags |= VALUE_NOT_FINITE;
    largest_value = check[i] != 0 ? INF : most(largest_value, top[i]);
    if (check[i] != 0) break;
  }
  f.norm[block] = largest;
  f.norm_so_far[block] = f.norm[block];
  f.value_so_far[block] = largest_value;
  f.flags[block] = flags;
}

static void prepare(Call& c, const TraProblem* p) {
  c.p = p;
  c.D = (int)p->head_size;
  c.group = (int)(p->query_heads / p->key_heads);
  c.visible = p->query_start + p->queries;
  c.blocks = (int)((c.visible + KEY_BLOCK - 1) / KEY_BLOCK);
  c.dropout = p->dropout_cut != 0;
  c.seed_key = mix(mix((uint32_t)p->dropout_seed) ^ (uint32_t)(p->dropout_seed >> 32));
  c.facts = c.packed = nullptr;
  c.pack = false;
}

// Memory for what is known of the keys. whole_heads: one thread takes a head at a time and packs it into its own memory.
static bool allocate_facts(Call& c, bool whole_heads) {
  const TraProblem& p = *c.p;
  int64_t heads = p.batch * p.key_heads;
  size_t floats = (size_t)heads * 3 * c.blocks;
  c.facts = (float*)::malloc(floats * 4 + (size_t)heads * c.blocks + 1);
  c.flags = (uint8_t*)(c.facts + floats);
  // Rows that lie side by side are read in place. Others, as in [B, T, H, D], fall into few sets of every cache, and each row block
  // would fetch them anew from far away: worth a copy if more than one reads them.
  const bool in_place = p.dtype == TRA_FLOAT32 && p.k.stride_t == c.D && p.v.stride_t == c.D;
  c.pack = !in_place && p.queries * c.group > c.rows;
  if (c.facts && c.pack && !whole_heads) {
    c.packed = (float*)::aligned_alloc(64, ((size_t)heads * 2 * c.visible * c.D * sizeof(float) + 63) / 64 * 64);
    c.pack = c.packed != nullptr;
  }
  return c.facts != nullptr;
}

static void free_facts(Call& c) {
  ::free(c.facts);
  ::free(c.packed);
}

// Where one head's packed rows are in memory that holds `heads` of them.
INLINE PackedHead packed_head(const Call& c, float* memory, int64_t head) {
  if (!memory) return {nullptr, nullptr};
  float* keys = memory + head * 2 * c.visible * c.D;
  return {keys, keys + c.visible * c.D};
}

static void accumulate_facts(const Call& c, int64_t b, int64_t hk) {
  KeyFacts f = c.key_facts(b, hk);
  for (int i = 1; i < c.blocks; i++) {
    f.norm_so_far[i] = most(f.norm_so_far[i], f.norm_so_far[i - 1]);
    f.value_so_far[i] = most(f.value_so_far[i], f.value_so_far[i - 1]);
  }
}

// The facts of one key head, by one thread, which then finds the keys in its cache. memory: this thread's, for the packed rows
static PackedHead describe_head(const Call& c, int64_t b, int64_t hk, float* memory) {
  PackedHead packed = packed_head(c, c.pack ? memory : nullptr, 0);
  for (int i = 0; i < c.blocks; i++) describe_keys(c, b, hk, i, packed);
  accumulate_facts(c, b, hk);
  return packed;
}

// The facts of all key heads, by all threads.
static void describe_all_keys(const Call& c) {
  const TraProblem* p = c.p;
  const int64_t heads = p->batch * p->key_heads, total = heads * c.blocks;
#pragma omp parallel num_threads(p->threads)
  {
    DenormalMode flush(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < total; i++) {
      int64_t head = i / c.blocks;
      describe_keys(c, head / p->key_heads, head % p->key_heads, (int)(i % c.blocks), packed_head(c, c.packed, head));
    }
  }
  for (int64_t head = 0; head < heads; head++) accumulate_facts(c, head / p->key_heads, head % p->key_heads);
}
