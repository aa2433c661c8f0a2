// Attention of rows of one new token, on a CPU, to a paged cache where it lies.
//
// Built for one shape of heads, so that all loops over it unroll. The compiler is told GROUP, the
// query heads of a KV head, and HEAD_DIM.

#include "cpu_numbers.h"

#include <algorithm>
#include <cmath>
#include <vector>

constexpr int G = GROUP, d = HEAD_DIM;

// Numbers that the processor multiplies at once: as many as it can, of which a head holds whole
// vectors; of a cache in bfloat16 pairs of them.
constexpr int vector_bytes() {
  int bytes = widest_bytes;
  while (d * sizeof(Real) % (bytes * (is_half ? 2 : 1)) != 0) bytes /= 2;
  return bytes;
}
constexpr int width = vector_bytes() / sizeof(Real), D = d / width;  // D vectors are a head
typedef Real Lanes __attribute__((vector_size(vector_bytes())));
typedef uint32_t Bits __attribute__((vector_size(vector_bytes())));

// A head as it is stored, and as vectors. Two bfloat16 share 32 bits: the upper one is a float once
// the lower is cleared, the lower one once it is moved up. So numbers at even places come to lie in
// one vector, those at odd ones in the next; no matter, while queries, keys and values all lie so.
static inline void unpack(const Stored* from, Lanes* to) {
  if constexpr (is_half) {
#pragma GCC unroll 16
    for (int i = 0; i < D; i += 2) {
      Bits pairs;
      std::memcpy(&pairs, from + i * width, sizeof pairs);
      to[i] = (Lanes)(pairs << 16);
      to[i + 1] = (Lanes)(pairs & 0xffff0000);
    }
  } else {
    std::memcpy(to, from, d * sizeof(Stored));
  }
}

static inline void pack(const Lanes* from, Stored* to) {
  if constexpr (is_half) {
    for (int i = 0; i < D; i += 2) {
      Bits even = (Bits)from[i], odd = (Bits)from[i + 1];
      even += 0x7fff + (even >> 16 & 1);  // to the nearest, of two as near to the even one
      odd += 0x7fff + (odd >> 16 & 1);
      const Bits pairs = even >> 16 | (odd & 0xffff0000);
      std::memcpy(to + i * width, &pairs, sizeof pairs);
    }
  } else {
    std::memcpy(to, from, d * sizeof(Stored));
  }
}

// Return the sums of the lanes of `width` vectors, as one vector: neighbours are added, over and
// over, until one lane is left of each.
static inline Lanes sums_of_lanes(Lanes* vectors) {
  typedef std::conditional_t<sizeof(Real) == 4, int32_t, int64_t> Index;
  typedef Index Order __attribute__((vector_size(vector_bytes())));
  Order even, odd;
  for (int i = 0; i < width; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
#pragma GCC unroll 4
  for (int left = width / 2; left > 0; left /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < left; i++)
      vectors[i] = __builtin_shuffle(vectors[2 * i], vectors[2 * i + 1], even) +
                   __builtin_shuffle(vectors[2 * i], vectors[2 * i + 1], odd);
  return vectors[0];
}

// Ask for a head before it is needed: blocks lie anywhere, and no processor foresees where.
constexpr int ahead = 16;  // slots
static inline void fetch(const Stored* head) {
#pragma GCC unroll 8
  for (size_t i = 0; i < d; i += 64 / sizeof(Stored)) __builtin_prefetch(head + i);
}

// Return where each of the positions `first` to `last` lies, in numbers behind the first slot's,
// and `spare` times more where the last does: for what is fetched or multiplied in vain.
static std::vector<int64_t> places(const int32_t* table, int64_t first, int64_t last,
                                   int64_t block_size, int64_t slot, int spare) {
  std::vector<int64_t> found;
  found.reserve(last - first + spare);
  for (int64_t position = first; position < last;) {
    const int64_t block = position / block_size, end = std::min(last, (block + 1) * block_size);
    int64_t place = (table[block] * block_size + position % block_size) * slot;
    for (; position < end; position++, place += slot) found.push_back(place);
  }
  found.insert(found.end(), spare, found.back());
  return found;
}

// The queries of some KV heads, (heads, G, d), read the keys and values of S places; `out` is
// (heads, G, d). All heads of a place are read before the next place: they lie side by side.
static void read(const Stored* q, Stored* out, const Stored* keys, const Stored* values,
                 const std::vector<int64_t>& at, int S, int heads, Real scale) {
  const int room = (S + width - 1) / width * width;
  std::vector<Lanes> queries(heads * G * D), sums(heads * G * D);
  std::vector<Real> weights(heads * G * room);  // scores first
  for (int q_head = 0; q_head < heads * G; q_head++) {
    unpack(q + q_head * d, &queries[q_head * D]);
    for (int i = 0; i < D; i++) queries[q_head * D + i] *= scale;
  }
  for (int start = 0; start < S; start += width)
    for (int head = 0; head < heads; head++) {
      Lanes own[G][D], products[G][width];
      std::memcpy(own, &queries[head * G * D], sizeof own);
      for (int s = 0; s < width; s++) {
        Lanes key[D];
        unpack(keys + at[start + s] + head * d, key);
        fetch(keys + at[start + s + ahead] + head * d);
#pragma GCC unroll 16
        for (int g = 0; g < G; g++) {
          Lanes product = {};
          for (int i = 0; i < D; i++) product += own[g][i] * key[i];
          products[g][s] = product;
        }
      }
      for (int g = 0; g < G; g++) {
        const Lanes scores = sums_of_lanes(products[g]);
        std::memcpy(&weights[(head * G + g) * room + start], &scores, sizeof scores);
      }
    }
  for (int q_head = 0; q_head < heads * G; q_head++) {
    Real *own = &weights[q_head * room], top = own[0], total = 0;
    for (int s = 0; s < S; s++) top = own[s] > top ? own[s] : top;
    for (int s = 0; s < S; s++) total += own[s] = std::exp(own[s] - top);
    for (int s = 0; s < S; s++) own[s] /= total;
  }
  for (int start = 0; start < S; start += width)
    for (int head = 0; head < heads; head++) {
      Lanes own[G][D];
      std::memcpy(own, &sums[head * G * D], sizeof own);
      for (int s = start; s < std::min(S, start + width); s++) {
        Lanes value[D];
        unpack(values + at[s] + head * d, value);
        fetch(values + at[s + ahead] + head * d);
#pragma GCC unroll 16
        for (int g = 0; g < G; g++)
#pragma GCC unroll 16
          for (int i = 0; i < D; i++) own[g][i] += weights[(head * G + g) * room + s] * value[i];
      }
      std::memcpy(&sums[head * G * D], own, sizeof own);
    }
  for (int q_head = 0; q_head < heads * G; q_head++) pack(&sums[q_head * D], out + q_head * d);
}

// q (R, K G, d), a row `q_row` numbers behind the one before; out (R, K G, d); cache (2, blocks,
// block_size, K, d); tables (R, W); context_lens (R). A query sees the `window` newest keys.
extern "C" void attend(const Stored* q, Stored* out, const Stored* cache, const int32_t* tables,
                       const int32_t* context_lens, int64_t R, int64_t K, int64_t W, int64_t q_row,
                       int64_t blocks, int64_t block_size, double scale, int64_t window) {
  const int64_t slot = K * d;  // numbers
  const Stored *keys = cache, *values = cache + blocks * block_size * slot;
  const int heads = R > 1 ? K : 1, parts = K / heads;  // of one row, each thread takes some heads
#pragma omp parallel for schedule(dynamic)
  for (int64_t task = 0; task < R * parts; task++) {
    const int64_t row = task / parts, head = task % parts * heads;
    const int64_t last = context_lens[row], first = std::max<int64_t>(0, last - window);
    const auto at = places(tables + row * W, first, last, block_size, slot, width + ahead);
    read(q + row * q_row + head * G * d, out + (row * K + head) * G * d, keys + head * d,
         values + head * d, at, last - first, heads, Real(scale));
  }
}
