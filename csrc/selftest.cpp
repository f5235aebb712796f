// A check of every instruction set in a build against the formula in double, without Python: for emulators and bare machines.
//   c++ -O2 -fopenmp selftest.cpp <objects of kernel.cpp and dispatch.cpp> -o selftest && ./selftest
#include "traformer.h"

#include <cmath>
#include <cstdio>
#include <vector>

static uint32_t state = 12345;
static float uniform() {
  state = state * 1664525u + 1013904223u;
  return (state >> 8) * (1.0f / (1 << 24)) * 2 - 1;
}

// out and gradients of one head, by the formula
static void formula(int T, int D, const float* q, const float* k, const float* v, const float* g, const float* up,
                    std::vector<double>* r) {
  std::vector<double>&out = r[0], &dq = r[1], &dk = r[2], &dv = r[3], &dg = r[4];
  double scale = 1 / std::sqrt((double)D);
  for (int i = 0; i < T; i++) {
    std::vector<double> w(i + 1, 0.0), c(i + 1, 0.0);
    double sum = 0, count = 0;
    for (int j = i; j >= 0; j--) {
      double dot = 0;
      for (int e = 0; e < D; e++) dot += (double)q[i * D + e] * k[j * D + e];
      if (dot * scale <= 0) continue;
      c[j] = count;
      w[j] = std::exp(dot * scale + g[i] * count++);
      sum += w[j];
    }
    double delta = 0;
    for (int j = 0; j <= i; j++) {
      if (w[j] == 0) continue;
      w[j] /= sum;
      for (int e = 0; e < D; e++) out[i * D + e] += w[j] * v[j * D + e];
    }
    for (int e = 0; e < D; e++) delta += up[i * D + e] * out[i * D + e];
    for (int j = 0; j <= i; j++) {
      double dp = 0;
      for (int e = 0; e < D; e++) dp += (double)up[i * D + e] * v[j * D + e];
      double ds = w[j] * (dp - delta);
      dg[i] += ds * c[j];
      for (int e = 0; e < D; e++) {
        dq[i * D + e] += ds * scale * k[j * D + e];
        dk[j * D + e] += ds * scale * q[i * D + e];
        dv[j * D + e] += w[j] * up[i * D + e];
      }
    }
  }
}

int main() {
  int failures = 0, checked = 0;
  for (int isa = 0; tra_isa_name(isa); isa++) {
    if (!tra_isa_supported(isa)) {
      std::printf("%s: not on this machine\n", tra_isa_name(isa));
      continue;
    }
    double worst = 0;
    for (int D : {8, 24, 64, 128})
      for (int T : {1, 7, 64, 150, 300}) {
        std::vector<float> x[5];
        for (auto& y : x) {
          y.resize(T * D);
          for (auto& z : y) z = 2 * uniform();
        }
        std::vector<float> g(T), out(T * D), dq(T * D), dk(T * D), dv(T * D), dg(T), normaliser(T);
        std::vector<int32_t> reach(T), kept(T);
        for (auto& z : g) z = -0.5f * (1.001f + uniform());
        std::vector<double> expected[5];
        for (int i = 0; i < 5; i++) expected[i].assign(i < 4 ? T * D : T, 0.0);
        formula(T, D, x[0].data(), x[1].data(), x[2].data(), g.data(), x[3].data(), expected);
        auto tensor = [&](std::vector<float>& y) { return TraTensor{y.data(), T * D, T * D, D}; };
        TraProblem p = {};
        p.batch = p.query_heads = p.key_heads = 1;
        p.queries = p.keys = T;
        p.head_size = D;
        p.threads = 2;
        p.needs_grad = 1;
        p.scale = 1 / std::sqrt((double)D);
        p.tolerance = T == 300 ? 0x1p-24 : 0;
        p.q = tensor(x[0]), p.k = tensor(x[1]), p.v = tensor(x[2]), p.grad_out = tensor(x[3]);
        p.log_decay = g.data();
        p.out = tensor(out), p.grad_q = tensor(dq), p.grad_k = tensor(dk), p.grad_v = tensor(dv);
        p.normaliser = normaliser.data(), p.reach = reach.data(), p.kept = kept.data(), p.grad_log_decay = dg.data();
        failures += tra_forward(isa, &p) != TRA_OK || tra_backward(isa, &p) != TRA_OK;
        std::vector<float>* got[5] = {&out, &dq, &dk, &dv, &dg};
        for (int i = 0; i < 5; i++)
          for (size_t n = 0; n < expected[i].size(); n++) {
            double error = std::fabs((*got[i])[n] - expected[i][n]) / (1 + std::fabs(expected[i][n]));
            if (!(error < 1e-4)) failures++;
            worst = error > worst ? error : worst;
          }
        checked++;
      }
    std::printf("%s: worst error %.2g\n", tra_isa_name(isa), worst);
  }
  std::printf("%d problems, %d failures\n", checked, failures);
  return failures || !checked;
}
