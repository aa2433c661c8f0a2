// The numbers of the kernels. The compiler is told STORED, the type of all tensors: bfloat16, float
// or double. Everything is counted in float or double.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

struct bfloat16 {  // the upper half of a float
  uint16_t bits;
};

using Stored = STORED;
constexpr bool is_half = std::is_same_v<Stored, bfloat16>;
using Real = std::conditional_t<is_half, float, Stored>;  // to count in

static inline float load(float x) { return x; }
static inline double load(double x) { return x; }
static inline float load(bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float real;
  std::memcpy(&real, &bits, sizeof real);
  return real;
}

static inline void save(float x, float* to) { *to = x; }
static inline void save(double x, double* to) { *to = x; }
static inline void save(float x, bfloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits += 0x7fff + (bits >> 16 & 1);  // to the nearest, of two as near to the even one
  to->bits = bits >> 16;
}

// What the processor adds or multiplies at once.
#if defined(__AVX512F__)
constexpr int widest_bytes = 64;
#elif defined(__AVX2__)
constexpr int widest_bytes = 32;
#else
constexpr int widest_bytes = 16;
#endif

constexpr int64_t worth_a_thread = 32768;  // numbers: fewer are done before a thread has woken up
