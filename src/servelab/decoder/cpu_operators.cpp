// What lies between the matrices of a layer, on a CPU, each in one pass over its numbers; and the
// writing of keys and values to their slots. Everything is rounded once, in the end.

#include "cpu_numbers.h"

#include <algorithm>
#include <cmath>
#include <limits>

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

// As integers, numbers above 0 are in order; those below 0 are once their sign is an integer's.
// They are read where they lie: with -ffast-math, NaN or infinity passed or returned as a float is
// undefined, and clang++ makes use of that.
using Int = std::conditional_t<is_half, int16_t,
                               std::conditional_t<sizeof(Stored) == 4, int32_t, int64_t>>;
static inline Int size_of(const Stored& x) {  // without its sign
  Int bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & std::numeric_limits<Int>::max();
}
static inline Int in_order(const Stored& x) {
  Int bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits < 0 ? -size_of(x) : size_of(x);  // so that both zeros are 0
}

// Infinity: all bits of the exponent, none behind them, of which a bfloat16 has 7.
constexpr int fraction_bits = is_half ? 7 : std::numeric_limits<Real>::digits - 1;
constexpr Int infinite = std::numeric_limits<Int>::max() >> fraction_bits << fraction_bits;

// logits (L, V), rows as above; out (L): the first place of the largest, or V where it is no finite
// number.
extern "C" void likeliest(const Stored* logits, int64_t* out, int64_t L, int64_t V, int64_t row) {
  const Int lowest = std::numeric_limits<Int>::min();
  constexpr int64_t part = 1024;  // numbers, of which only the largest is kept at first
#pragma omp parallel for if (L * V > worth_a_thread)
  for (int64_t n = 0; n < L; n++) {
    const Stored* own = logits + n * row;
    Int top = lowest, widest = 0;
    int64_t place = 0;
    for (int64_t start = 0; start < V; start += part) {
      const int64_t end = std::min(V, start + part);
      Int here = lowest;
#pragma omp simd reduction(max : here, widest)
      for (int64_t i = start; i < end; i++) {
        const Int size = size_of(own[i]), signed_size = in_order(own[i]);
        here = signed_size > here ? signed_size : here;
        widest = size > widest ? size : widest;  // NaN is wider than all numbers
      }
      if (here > top) top = here, place = start;
    }
    while (place < V && in_order(own[place]) != top) place++;
    out[n] = widest > infinite || top == infinite || top == -infinite ? V : place;
  }
}
