// C ABI of the threshold relative attention kernel. Plain pointers and sizes: no torch, no Python.
//
// Everything is indexed as the Python side sees it: q [B, Hq, Tq, D], k and v [B, Hkv, Tk, D] with any strides on B, H and T
// and unit stride on D. Per-row arrays (log_decay, threshold, normaliser, ...) are contiguous [B, Hq, Tq].
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { TRA_FLOAT32 = 0, TRA_BFLOAT16 = 1, TRA_FLOAT16 = 2 };

enum { TRA_MOST_THREADS = 256 };  // more are refused: starting hundreds of thousands would end the process

// Raise it whenever the fields of TraProblem, or what they may hold, change.
enum { TRA_INTERFACE = 2 };

enum {
  TRA_OK = 0,
  TRA_OUT_OF_MEMORY = 1,
  TRA_BAD_ARGUMENT = 2,
  TRA_NO_SUCH_ISA = 3,
  TRA_BAD_DECAY = 4,  // a log_decay is above 0, or -inf
};

typedef struct {
  void* data;
  int64_t stride_b, stride_h, stride_t;  // in elements
} TraTensor;

typedef struct {
  int64_t batch, query_heads, key_heads, queries, keys, head_size;
  int64_t query_start;  // position of query 0 on the key axis
  int32_t dtype;        // of q, k, v, out, grad_out, grad_q
  int32_t threads;
  int32_t needs_grad;   // choose the stopping rule that also bounds the gradient of log_decay
  int32_t index_block;  // keys per block of the key index, 0 without one
  double scale, threshold_value, tolerance;
  double surrogate_width;  // > 0: a removed key has a gradient, as if keys were weighted by sigmoid((s - threshold) / width)
  uint64_t dropout_seed;
  uint32_t dropout_cut;  // a weight is dropped iff its hash is below this; 0 = no dropout
  float dropout_scale;   // 1 / (1 - p)

  TraTensor q, k, v;
  const float* log_decay;       // [B, Hq, Tq]
  const double* threshold;      // [B, Hq, Tq] or null
  const uint8_t* exclude_self;  // [Hq] or null
  const uint8_t* key_padding;   // [B, Tk], 1 = real key, or null
  const int32_t* first_key;     // [Tq] or null
  const float* score_bound;     // [Hq] or null

  // The key index (decode only, null without one). Per block of index_block keys: the least and greatest value of each
  // channel, [B, Hkv, index_stride, D]; the largest norm, [B, Hkv, 1 + index_stride], where entry 0 is that of all keys.
  const float* index_low;
  const float* index_high;
  const float* index_norm;
  int64_t index_stride;  // blocks allocated per (batch, key head)

  // forward writes these; backward reads out, normaliser, reach. Where normaliser is null, forward writes out alone.
  TraTensor out;
  float* normaliser;
  int32_t* reach;
  int32_t* kept;

  // backward only
  TraTensor grad_out, grad_q;
  TraTensor grad_k, grad_v;  // fp32 whatever dtype is, zeroed by the caller
  float* grad_log_decay;     // [B, Hq, Tq]
  float* grad_threshold;     // [B, Hq, Tq]; with a surrogate only, else null
} TraProblem;

// Names of the instruction sets in this build, best first: "avx512", "avx2", "plain" or "neon"; null past the end.
const char* tra_isa_name(int index);
// Whether this machine can run it.
int tra_isa_supported(int index);
int tra_forward(int isa, const TraProblem* problem);
int tra_backward(int isa, const TraProblem* problem);
// Whether this CPU announces AMX but has no tiles, as some virtual machines do: whoever believes it dies of SIGILL.
int tra_amx_is_broken(void);
// Sets whether the calling thread and the first `threads` of its OpenMP pool flush denormal numbers to zero, from now on.
// Returns whether the calling thread did before.
int tra_set_flush_denormals(int flush, int threads);
// sizeof(TraProblem) and TRA_INTERFACE, so that a loader can refuse a library of another version.
int64_t tra_problem_size(void);
int tra_interface(void);

#ifdef __cplusplus
}
#endif
