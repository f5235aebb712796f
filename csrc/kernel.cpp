// Threshold relative attention on a CPU. Compiled once per instruction set, with
//   TRA_ISA        suffix of the exported names: avx512, avx2, plain, neon
//   TRA_LANES      floats per vector
//   TRA_REGISTERS  vector registers
// All the rest has internal linkage, so that no function compiled for one instruction set can stand in for another's.
#include "traformer.h"

#include <stdlib.h>
#include <initializer_list>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {
#include "vector.h"
#include "denormals.h"
#include "common.h"
static thread_local Workspace workspace, packed_rows;
#include "forward.h"
#include "backward.h"
#include "decode.h"
}  // namespace

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)

// Large row blocks let rows that outlast their neighbours share panels and read a block of keys for more rows at once; small
// ones keep all threads busy.
static int rows_per_block(const TraProblem* p, int large_from, int largest_from) {
  bool many = p->batch * p->query_heads * p->queries >= (int64_t)512 * p->threads;
  if (!many || p->queries < large_from) return ROWS / 4;
  return p->queries < largest_from ? ROWS / 2 : ROWS;
}

extern "C" int JOIN(tra_forward_, TRA_ISA)(const TraProblem* p) {
  if (p->batch == 0 || p->queries == 0) return TRA_OK;
  Call c;
  prepare(c, p);
  if (p->queries <= DECODE_QUERIES && !(p->surrogate_width > 0)) return decode(c);
  c.rows = rows_per_block(p, 128, 2048);
  return forward_blocks(c);
}

extern "C" int JOIN(tra_backward_, TRA_ISA)(const TraProblem* p) {
  if (p->batch == 0 || p->queries == 0) return TRA_OK;
  Call c;
  prepare(c, p);
  c.rows = rows_per_block(p, 1024, 4096);
  return backward_blocks(c);
}
