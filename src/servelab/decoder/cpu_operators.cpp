// What lies between the matrices of a layer, on a CPU, each in one pass over its numbers; and the
// writing of keys and values to their slots. Everything is rounded once, in the end.

#include "cpu_numbers.h"

#include <cmath>

// x (N, D), a row `x_row` numbers behind the one before; weight (D); out (N, D).
extern "C" void rms_norm(const Stored* x, const Stored* weight, Stored* out, int64_t N, int64_t D,
                         int64_t x_row, double eps) {
#pragma omp parallel for if (N * D > worth_a_thread)
  for (int64_t n = 0; n < N; n++) {
    const Stored* own = x + n * x_row;
    Real squares = 0;
    for (int64_t i = 0; i < D; i++) squares += load(own[i]) * load(own[i]);
    // In double: for floats the compiler takes an estimate, which makes NaN of what is infinite.
    const Real scale = 1 / std::sqrt(double(squares) / D + eps);
    for (int64_t i = 0; i < D; i++) save(load(own[i]) * scale * load(weight[i]), out + n * D + i);
  }
}

// x (N, heads, d), rows as above; cos and sin (N, d), the first half of sin negative; out as x.
extern "C" void rotate(const Stored* x, const Stored* cos, const Stored* sin, Stored* out,
                       int64_t N, int64_t heads, int64_t d, int64_t x_row) {
  const int64_t half = d / 2;
#pragma omp parallel for if (N * heads * d > worth_a_thread)
  for (int64_t n = 0; n < N; n++) {
    const Stored *c = cos + n * d, *s = sin + n * d;
    for (int64_t head = 0; head < heads; head++) {
      const Stored *a = x + n * x_row + head * d, *b = a + half;
      Stored* to = out + (n * heads + head) * d;
#pragma omp simd
      for (int64_t i = 0; i < half; i++) {
        save(load(a[i]) * load(c[i]) + load(b[i]) * load(s[i]), to + i);
        save(load(b[i]) * load(c[i + half]) + load(a[i]) * load(s[i + half]), to + half + i);
      }
    }
  }
}

// gate_up (N, 2 M), rows as above; out (N, M).
extern "C" void gate(const Stored* gate_up, Stored* out, int64_t N, int64_t M, int64_t row) {
#pragma omp parallel for if (N * M > worth_a_thread)
  for (int64_t n = 0; n < N; n++) {
    const Stored *gate = gate_up + n * row, *up = gate + M;
    for (int64_t i = 0; i < M; i++) {
      const Real x = load(gate[i]), tail = std::exp(-std::abs(x));  // which is never infinite
      save(x * (x < 0 ? tail : 1) / (1 + tail) * load(up[i]), out + n * M + i);
    }
  }
}

// keys and values (N, width), rows as above, go to slots (N) of the cache, (2, room, width).
extern "C" void store(const Stored* keys, const Stored* values, Stored* cache, const int64_t* slots,
                      int64_t N, int64_t width, int64_t keys_row, int64_t values_row,
                      int64_t room) {
  for (int64_t n = 0; n < N; n++) {
    std::memcpy(cache + slots[n] * width, keys + n * keys_row, width * sizeof(Stored));
    std::memcpy(cache + (room + slots[n]) * width, values + n * values_row, width * sizeof(Stored));
  }
}
