// A thin vector of TRA_LANES floats on the compiler's vector extensions, with what they lack written per instruction set.
// Included inside an unnamed namespace of each per-ISA translation unit, so nothing here can be merged across them.

constexpr int LANES = TRA_LANES;
typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

template <class V>
INLINE V load_as(const void* p) {
  V r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
INLINE vf load(const float* p) { return load_as<vf>(p); }
INLINE vi load(const int32_t* p) { return load_as<vi>(p); }
INLINE void store(float* p, vf x) { __builtin_memcpy(p, &x, sizeof x); }
INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat(int32_t x) { return x - vi{}; }
INLINE vu splat(uint32_t x) { return x - vu{}; }
INLINE vf masked(vi mask, vf x) { return (vf)((vi)x & mask); }  // x where the mask is set, +0 elsewhere
// a > b ? a : b and a < b ? a : b, so b where one is NaN: one instruction on x86, which compilers do not find by themselves
#if defined(__AVX__) && TRA_LANES == 8
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#elif defined(__SSE2__) && TRA_LANES == 4
INLINE vf vmax(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
#else
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
#endif
INLINE vf vabs(vf x) { return (vf)((vi)x & 0x7fffffff); }

INLINE bool any(vi mask) {
#if defined(__AVX512F__) && TRA_LANES == 16
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX__) && TRA_LANES == 8
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif defined(__SSE2__) && TRA_LANES == 4
  return _mm_movemask_ps((__m128)mask) != 0;
#else
  typedef int64_t vl __attribute__((vector_size(LANES * 4)));
  vl x = (vl)mask;
  int64_t r = 0;
  for (int i = 0; i < LANES / 2; i++) r |= x[i];
  return r != 0;
#endif
}

// 2^x for x >= -126 after the clamp (and < 128, which callers see to), about 1 ulp. NaN in gives NaN out.
INLINE vf exp2_vec(vf x) {
  x = vmax(splat(-126.f), x);
  vf t = x + 12582912.f;  // 1.5 * 2^23: the sum's low mantissa bits hold round(x)
  vf f = x - (t - 12582912.f);
  vf p = 0.00015353362f * f + 0.0013398875f;
  p = p * f + 0.00961843692f;
  p = p * f + 0.0555033237f;
  p = p * f + 0.240226477f;
  p = p * f + 0.693147182f;
  p = p * f + 1.0f;
  return (vf)((vi)p + ((vi)t << 23));
}

// Dropout: the weight of key j survives in a row iff mix(row's key + j * KEY_STEP) is at least the cut.
constexpr uint32_t KEY_STEP = 0x9e3779b9u;  // 2^32 over the golden ratio: neighbouring keys get hashes far apart
INLINE vu mix(vu x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}
INLINE uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}
INLINE vi survives(vu row_key, int key, uint32_t cut) { return (vi)(mix(row_key + splat((uint32_t)key * KEY_STEP)) >= splat(cut)); }
INLINE bool survives(uint32_t row_key, int key, uint32_t cut) { return mix(row_key + (uint32_t)key * KEY_STEP) >= cut; }
