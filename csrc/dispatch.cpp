// Chooses among the instruction sets that this library was built with.
#include "traformer.h"

namespace {
#include "denormals.h"
}

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

#define DECLARE(isa)                                   \
  extern "C" int tra_forward_##isa(const TraProblem*); \
  extern "C" int tra_backward_##isa(const TraProblem*);

namespace {
struct Isa {
  const char* name;
  int (*supported)();
  int (*forward)(const TraProblem*);
  int (*backward)(const TraProblem*);
};
[[maybe_unused]] int always() { return 1; }
}  // namespace

#if defined(TRA_HAVE_AVX512)
DECLARE(avx512)
static int has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif
#if defined(TRA_HAVE_AVX2)
DECLARE(avx2)
static int has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif
#if defined(TRA_HAVE_WIDE)
DECLARE(wide)  // test build: the 16-lane logic of AVX-512 on AVX2 registers
#endif
#if defined(TRA_HAVE_NEON)
DECLARE(neon)
#endif
DECLARE(plain)

static const Isa kIsas[] = {
#if defined(TRA_HAVE_AVX512)
    {"avx512", has_avx512, tra_forward_avx512, tra_backward_avx512},
#endif
#if defined(TRA_HAVE_AVX2)
    {"avx2", has_avx2, tra_forward_avx2, tra_backward_avx2},
#endif
#if defined(TRA_HAVE_NEON)
    {"neon", always, tra_forward_neon, tra_backward_neon},
#endif
    {"plain", always, tra_forward_plain, tra_backward_plain},
#if defined(TRA_HAVE_WIDE)
    {"wide", has_avx2, tra_forward_wide, tra_backward_wide},
#endif
};
static const int kCount = sizeof(kIsas) / sizeof(kIsas[0]);

static bool valid(const TraProblem* p) {
  return p->batch >= 0 && p->query_heads > 0 && p->key_heads > 0 && p->query_heads % p->key_heads == 0 && p->queries >= 0 &&
         p->keys >= 0 && p->head_size >= 8 && p->head_size <= 256 && p->head_size % 8 == 0 && p->query_start >= 0 &&
         p->query_start + p->queries <= p->keys && p->keys <= (int64_t(1) << 24) && p->dtype >= 0 && p->dtype <= 2 &&
         p->threads >= 1 && p->threads <= TRA_MOST_THREADS;
}

static bool decays(const TraProblem* p) {
  const int64_t rows = p->batch * p->query_heads * p->queries;
  bool good = true;
  for (int64_t i = 0; i < rows; i++) good &= !(p->log_decay[i] > 0.f) & (p->log_decay[i] != -__builtin_inff());
  return good;  // NaN passes: it makes its row NaN
}

extern "C" {
const char* tra_isa_name(int index) { return index >= 0 && index < kCount ? kIsas[index].name : nullptr; }
int tra_isa_supported(int index) { return index >= 0 && index < kCount && kIsas[index].supported(); }
int tra_amx_is_broken(void) {
#if defined(__x86_64__) || defined(__i386__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1)) return 0;  // no AMX-TILE: nothing is announced
  return !__get_cpuid_count(0x1d, 0, &a, &b, &c, &d) || a == 0;              // eax: the highest palette of tiles
#else
  return 0;
#endif
}
int tra_set_flush_denormals(int flush, int threads) {
  const bool before = DenormalMode::flushes();
  threads = threads < 1 ? 1 : threads > TRA_MOST_THREADS ? TRA_MOST_THREADS : threads;
#pragma omp parallel num_threads(threads)
  DenormalMode::set(flush != 0);
  return before;
}
int64_t tra_problem_size(void) { return sizeof(TraProblem); }
int tra_interface(void) { return TRA_INTERFACE; }
int tra_forward(int isa, const TraProblem* problem) {
  if (!tra_isa_supported(isa)) return TRA_NO_SUCH_ISA;
  if (!valid(problem)) return TRA_BAD_ARGUMENT;
  if (!decays(problem)) return TRA_BAD_DECAY;
  return kIsas[isa].forward(problem);
}
int tra_backward(int isa, const TraProblem* problem) {
  if (!tra_isa_supported(isa)) return TRA_NO_SUCH_ISA;
  if (!valid(problem)) return TRA_BAD_ARGUMENT;
  return kIsas[isa].backward(problem);
}
}
