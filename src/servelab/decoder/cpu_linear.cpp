// Products with matrices in bfloat16, on a CPU for which torch has no kernels in that format.
//
// Of a row of the matrix many numbers are multiplied at once, by those of several tokens, so that
// what was read and widened serves all of them. The matrix is read in its own order.

#include "cpu_numbers.h"

#include <algorithm>
#include <vector>

// Left free to change the order of sums, the compiler adds twice for each multiplication with one.
#pragma GCC optimize("no-associative-math")

static_assert(is_half, "of other formats torch has kernels for every CPU");
constexpr int width = widest_bytes / sizeof(float), chunk = 2 * width;
typedef float Lanes __attribute__((vector_size(widest_bytes)));
typedef uint32_t Bits __attribute__((vector_size(widest_bytes)));

// Two bfloat16 share 32 bits: the upper one is a float once the lower is cleared, the lower one
// once it is moved up. A chunk of 2 `width` numbers becomes a vector of the lower, one of the upper.
static inline Lanes lower(Bits pairs) { return (Lanes)(pairs << 16); }
static inline Lanes upper(Bits pairs) { return (Lanes)(pairs & 0xffff0000); }
static inline Bits pairs_at(const bfloat16* from) {
  Bits pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return pairs;
}

// Numbers by which a part of the matrix is asked for before it is needed: several rows side by side
// are too many short streams for the processor to foresee.
constexpr int64_t ahead = 2048;

// x (N, in), rows `x_row` numbers apart; w (O, in); bias (O) and added (N, O), or none; out (N, O).
struct Product {
  const bfloat16 *x, *w, *bias, *added;
  bfloat16* out;
  int64_t N, in, O, x_row;
  std::vector<Lanes> wide;  // x, (N, chunks, 2)

  int64_t chunks() const { return in / chunk; }

  void widen() {
    wide.resize(N * chunks() * 2);
#pragma omp parallel for if (N * in > worth_a_thread)
    for (int64_t n = 0; n < N; n++)
      for (int64_t c = 0; c < chunks(); c++) {
        const Bits pairs = pairs_at(x + n * x_row + c * chunk);
        Lanes* to = wide.data() + (n * chunks() + c) * 2;
        to[0] = lower(pairs), to[1] = upper(pairs);
      }
  }

  // T tokens from n on, times R rows of the matrix from o on.
  template <int T, int R>
  void tile(int64_t n, int64_t o) const {
    const int64_t count = chunks();
    const Lanes* tokens = wide.data() + n * count * 2;  // none where `in` is less than a chunk
    const bfloat16* rows = w + o * in;
    Lanes sums[T][R] = {};
    for (int64_t c = 0; c < count; c++) {
      Bits pairs[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const bfloat16* from = rows + r * in + c * chunk;
        pairs[r] = pairs_at(from);
        __builtin_prefetch(from + ahead);
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; t++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[t][r] += tokens[(t * count + c) * 2] * lower(pairs[r]);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[t][r] += tokens[(t * count + c) * 2 + 1] * upper(pairs[r]);
    }
    for (int t = 0; t < T; t++)
      for (int r = 0; r < R; r++) {
        float sum = bias ? load(bias[o + r]) : 0;
        if (added) sum += load(added[(n + t) * O + o + r]);
        for (int i = 0; i < width; i++) sum += sums[t][r][i];
        for (int64_t i = count * chunk; i < in; i++)  // less than a chunk
          sum += load(x[(n + t) * x_row + i]) * load(rows[r * in + i]);
        save(sum, out + (n + t) * O + o + r);
      }
  }

  // T tokens from n on, times the rows from o to before `end`, R at a time.
  template <int T, int R>
  void tokens(int64_t n, int64_t o, int64_t end) const {
    for (; o + R <= end; o += R) tile<T, R>(n, o);
    for (; o < end; o++) tile<T, 1>(n, o);
  }
};

// Rows of the matrix that stay in a core's own cache while all tokens are multiplied by them.
constexpr int64_t panel = 48;

extern "C" void linear(const bfloat16* x, const bfloat16* w, const bfloat16* bias,
                       const bfloat16* added, bfloat16* out, int64_t N, int64_t in, int64_t O,
                       int64_t x_row) {
  Product product{x, w, bias, added, out, N, in, O, x_row, {}};
  product.widen();
#pragma omp parallel for schedule(dynamic)
  for (int64_t o = 0; o < O; o += panel) {
    const int64_t end = std::min(O, o + panel);
    int64_t n = 0;
    for (; n + 4 <= N; n += 4) product.tokens<4, 3>(n, o, end);
    if (N - n == 3) product.tokens<3, 3>(n, o, end);
    if (N - n == 2) product.tokens<2, 3>(n, o, end);
    if (N - n == 1) product.tokens<1, 1>(n, o, end);  // bound by memory, read best in one stream
  }
}
