// The two kernels, written once. A file for one instruction set defines NM_NAME, NM_WIDTH (floats in
// a vector) and NM_SHUFFLE (1 where a variable shuffle of a vector is one instruction), and includes
// this. No header of the standard library is included here, and everything has internal linkage: a
// linker could keep one file's copy of a shared inline function for all of them.
//
// Vectors are those of gcc and clang. Loads and stores may be unaligned.

#if NM_WIDTH > 4
#include <immintrin.h>  // each of its functions is inlined always, so no copy is there to be shared
#endif

#include "job.h"

namespace {

using nm::Job;

constexpr int W = NM_WIDTH;
constexpr bool WIDE = W == 16;  // with 32 registers

typedef float F __attribute__((vector_size(4 * W)));
typedef float Fu __attribute__((vector_size(4 * W), aligned(1), may_alias));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint8_t Bu __attribute__((vector_size(W), aligned(1), may_alias));
typedef int8_t Cu __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint16_t Hu __attribute__((vector_size(2 * W), aligned(1), may_alias));
typedef uint16_t Half __attribute__((aligned(1), may_alias));
typedef float Float __attribute__((aligned(1), may_alias));

#define NM_INLINE inline __attribute__((always_inline))

NM_INLINE F load(const float* p) { return *reinterpret_cast<const Fu*>(p); }
NM_INLINE void store(float* p, F v) { *reinterpret_cast<Fu*>(p) = v; }
NM_INLINE F all(float v) { return v - F{}; }
NM_INLINE I all(int32_t v) { return v - I{}; }

// W small integers, one in each int. gcc 12 widens a vector by __builtin_convertvector one element at
// a time.
#if NM_WIDTH == 16
NM_INLINE I widen(const Bu* p) { return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((__m128i*)p)); }
NM_INLINE I widen(const Cu* p) { return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((__m128i*)p)); }
NM_INLINE I widen(const Hu* p) { return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((__m256i*)p)); }
#elif NM_WIDTH == 8
NM_INLINE I widen(const Bu* p) { return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((__m128i*)p)); }
NM_INLINE I widen(const Cu* p) { return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((__m128i*)p)); }
NM_INLINE I widen(const Hu* p) { return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((__m128i*)p)); }
#else
NM_INLINE I widen(const Bu* p) { return __builtin_convertvector(*p, I); }
NM_INLINE I widen(const Cu* p) { return __builtin_convertvector(*p, I); }
NM_INLINE I widen(const Hu* p) { return __builtin_convertvector(*p, I); }
#endif

// Values, as floats.
struct Float32 {
  static constexpr int kBytes = 4;
  static NM_INLINE F at(const void* p, long i) {
    return *reinterpret_cast<const Fu*>(static_cast<const char*>(p) + 4 * i);
  }
  static NM_INLINE float one(const void* p, long i) {
    return *reinterpret_cast<const Float*>(static_cast<const char*>(p) + 4 * i);
  }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  static NM_INLINE F at(const void* p, long i) {
    return (F)(widen(reinterpret_cast<const Hu*>(static_cast<const char*>(p) + 2 * i)) << 16);
  }
  static NM_INLINE float one(const void* p, long i) {
    const uint32_t v = *reinterpret_cast<const Half*>(static_cast<const char*>(p) + 2 * i);
    return __builtin_bit_cast(float, v << 16);
  }
};

struct Int8 {
  static constexpr int kBytes = 1;
  static NM_INLINE F at(const void* p, long i) {
    return __builtin_convertvector(widen(reinterpret_cast<const Cu*>(static_cast<const char*>(p) + i)), F);
  }
  static NM_INLINE float one(const void* p, long i) {
    return static_cast<const int8_t*>(p)[i];
  }
};

// W bytes of indices, one in each int.
NM_INLINE I bytes(const uint8_t* p) { return widen(reinterpret_cast<const Bu*>(p)); }

NM_INLINE long index_at(const Job& job, long j, long f) {
  const int at = static_cast<int>(j * job.bits % 8);
  const uint8_t byte = job.indices[j * job.bits / 8 * job.features + f];
  return (byte >> at) & ((1 << job.bits) - 1);
}

NM_INLINE float scaled(const Job& job, float v, long f) {
  return job.scale ? v * reinterpret_cast<const Float*>(job.scale)[f] : v;
}

// --- `few`: rows of x in registers ----------------------------------------------------------------

// T floats of x, of which an index picks one for each lane.
template <int T>
struct Table {
  static constexpr int N = T < W ? 1 : T / W;
#if NM_SHUFFLE
  F v[N];
  NM_INLINE void set(const float* x) {
    if constexpr (T < W) {
      for (int i = 0; i < W; ++i) v[0][i] = x[i % T];
    } else {
      for (int i = 0; i < N; ++i) v[i] = load(x + i * W);
    }
  }
  template <int A, int C>
  NM_INLINE F pick(I at) const {
    if constexpr (C == 1) {
      return __builtin_shuffle(v[A], at);
    } else if constexpr (C == 2) {
      return __builtin_shuffle(v[A], v[A + 1], at);
    } else {
      const F low = pick<A, C / 2>(at), high = pick<A + C / 2, C / 2>(at);
      return (at & (C / 2 * W)) != 0 ? high : low;
    }
  }
  NM_INLINE F look(I at) const { return pick<0, N>(at); }
#else
  const float* x;
  NM_INLINE void set(const float* p) { x = p; }
  NM_INLINE F look(I at) const {
    F found;
    for (int i = 0; i < W; ++i) found[i] = x[at[i] & (T - 1)];
    return found;
  }
#endif
};

// Adds R rows of the weight, from row j on, times NB rows of x to `sums` [NB, width]. It asks for the
// next R rows of the weight: no processor foresees so short a piece of each row.
template <class V, int T, int BITS, int R, int NB>
NM_INLINE void step(const Job& job, long j, const float* x, long first, long width, float* sums,
                    long apart) {
  Table<T> tables[NB][R];
  for (int b = 0; b < NB; ++b)
    for (int r = 0; r < R; ++r) tables[b][r].set(x + b * job.stride + (j + r) / job.n * job.m);
  const int shift = R == 1 ? static_cast<int>(j * BITS % 8) : 0;
  const char* values[R];
  const uint8_t* lines[R];
  for (int r = 0; r < R; ++r) {
    values[r] = static_cast<const char*>(job.values) + ((j + r) * job.features + first) * V::kBytes;
    lines[r] = job.indices + (j + r) * BITS / 8 * job.features + first;
  }
  for (long c = 0; c < width; c += W) {
    F total[NB];
    for (int b = 0; b < NB; ++b) total[b] = load(sums + b * apart + c);
    I at{};
    for (int r = 0; r < R; ++r) {
      if (r * BITS % 8 == 0) at = bytes(lines[r] + c);
      const I here = R == 1 ? at >> shift : at >> (r * BITS % 8);
      const F v = V::at(values[r], c);
      if (T <= 16) {  // 1:32 and beyond are so small that they lie in a cache
        __builtin_prefetch(values[r] + (c + R * job.features) * V::kBytes);
        if (r * BITS % 8 == 0) __builtin_prefetch(lines[r] + c + R * BITS / 8 * job.features);
      }
      for (int b = 0; b < NB; ++b) total[b] += v * tables[b][r].look(here);
    }
    for (int b = 0; b < NB; ++b) store(sums + b * apart + c, total[b]);
  }
}

template <class V, int T, int BITS, int R>
NM_INLINE void rows_of(const Job& job, long j, long first, long width, float* sums, long apart) {
  constexpr int MOST = T <= 16 ? 4 : T == 32 ? (WIDE ? 4 : 2) : WIDE && T == 64 ? 2 : 1;
  long b = 0;
  if constexpr (MOST >= 4)
    for (; b + 4 <= job.batch; b += 4)
      step<V, T, BITS, R, 4>(job, j, job.x + b * job.stride, first, width, sums + b * apart, apart);
  if constexpr (MOST >= 2)
    for (; b + 2 <= job.batch; b += 2)
      step<V, T, BITS, R, 2>(job, j, job.x + b * job.stride, first, width, sums + b * apart, apart);
  for (; b < job.batch; ++b)
    step<V, T, BITS, R, 1>(job, j, job.x + b * job.stride, first, width, sums + b * apart, apart);
}

constexpr long kSums = 4096;  // of as many columns and rows of x

template <class V, int T, int BITS>
void few_of(const Job& job, long first, long last, float* sums) {
  // So that x stays in registers, as far as it can.
  constexpr int R = T <= 16 ? 4 : WIDE ? (T == 32 ? 3 : T <= 128 ? 2 : 1) : T <= 64 ? 4 : T == 128 ? 2 : 1;
  // Pieces of a row of the weight for which the sums of all rows of x stay in the first cache.
  const long most = job.batch <= 16 ? kSums / job.batch / W * W : kSums / 16;
  const long whole = first + (last - first) / W * W;
  for (long f = first; f < whole; f += most) {
    const long width = whole - f < most ? whole - f : most;
    for (long b = 0; b < job.batch; ++b)
      for (long c = 0; c < width; ++c) sums[b * most + c] = 0;
    long j = 0;
    for (; j + R <= job.rows; j += R) rows_of<V, T, BITS, R>(job, j, f, width, sums, most);
    for (; j < job.rows; ++j) rows_of<V, T, BITS, 1>(job, j, f, width, sums, most);
    for (long b = 0; b < job.batch; ++b)
      for (long c = 0; c < width; ++c)
        job.y[b * job.features + f + c] = scaled(job, sums[b * most + c], f + c);
  }
  for (long b = 0; b < job.batch; ++b)
    for (long f = whole; f < last; ++f) {
      float total = 0;
      for (long j = 0; j < job.rows; ++j)
        total += V::one(job.values, j * job.features + f) *
                 job.x[b * job.stride + j / job.n * job.m + index_at(job, j, f)];
      job.y[b * job.features + f] = scaled(job, total, f);
    }
}

template <class V>
void few_of(const Job& job, long first, long last, float* sums) {
  if (job.bits == 2) return few_of<V, 4, 2>(job, first, last, sums);
  if constexpr (W == 8)
    if (job.bits == 4 && job.m <= 8) return few_of<V, 8, 4>(job, first, last, sums);
  if (job.bits == 4) return few_of<V, 16, 4>(job, first, last, sums);
  if (job.m <= 16) return few_of<V, 16, 8>(job, first, last, sums);
  if (job.m <= 32) return few_of<V, 32, 8>(job, first, last, sums);
  if (job.m <= 64) return few_of<V, 64, 8>(job, first, last, sums);
  if (job.m <= 128) return few_of<V, 128, 8>(job, first, last, sums);
  return few_of<V, 256, 8>(job, first, last, sums);
}

void few(const Job& job, long first, long last, float* scratch) {
  if (job.kind == nm::kFloat32) return few_of<Float32>(job, first, last, scratch);
  if (job.kind == nm::kBFloat16) return few_of<BFloat16>(job, first, last, scratch);
  few_of<Int8>(job, first, last, scratch);
}

// --- transposition --------------------------------------------------------------------------------

void turn_each(const float* src, long from, float* dst, long to, long rows, long columns) {
  for (long c = 0; c < columns; ++c)
    for (long r = 0; r < rows; ++r) dst[c * to + r] = src[r * from + c];
}

#if NM_SHUFFLE
// Exchanges, in each pair of vectors S apart, the blocks of S lanes off the diagonal.
template <int S>
NM_INLINE void exchange(F* v) {
  I low, high;
  for (int i = 0; i < W; ++i) {
    low[i] = i & S ? i - S + W : i;
    high[i] = i & S ? i + W : i + S;
  }
  for (int i = 0; i < W; ++i)
    if (!(i & S)) {
      const F a = v[i], b = v[i + S];
      v[i] = __builtin_shuffle(a, b, low);
      v[i + S] = __builtin_shuffle(a, b, high);
    }
}

void turn(const float* src, long from, float* dst, long to, long rows, long columns) {
  const long whole_rows = rows / W * W, whole_columns = columns / W * W;
  // The inner loop walks along the longer lines, so that memory is read and written ahead.
  const bool down = to > from;
  const long outer = down ? whole_columns : whole_rows, inner = down ? whole_rows : whole_columns;
  for (long o = 0; o < outer; o += W)
    for (long p = 0; p < inner; p += W) {
      const long r = down ? p : o, c = down ? o : p;
      F v[W];
      for (int i = 0; i < W; ++i) v[i] = load(src + (r + i) * from + c);
      exchange<1>(v);
      exchange<2>(v);
      if constexpr (W > 4) exchange<4>(v);
      if constexpr (W > 8) exchange<8>(v);
      for (int i = 0; i < W; ++i) store(dst + (c + i) * to + r, v[i]);
    }
  turn_each(src + whole_rows * from, from, dst + whole_rows, to, rows - whole_rows, columns);
  turn_each(src + whole_columns, from, dst + whole_columns * to, to, whole_rows,
            columns - whole_columns);
}
#else
void turn(const float* src, long from, float* dst, long to, long rows, long columns) {
  turn_each(src, from, dst, to, rows, columns);
}
#endif

// --- `many`: columns of x^T added up --------------------------------------------------------------

constexpr int kColumns = 16;     // that are unpacked at once: one cache line of float32
constexpr long kTile = 256;      // columns that one slab of x^T serves
constexpr long kMostRows = 128;  // of the weight that are unpacked at once

static_assert(nm::kMostFew * kSums / 16 <= nm::kScratch, "sums of `few` do not fit");
static_assert(kTile * nm::kMostLanes + 2 * kMostRows * kColumns <= nm::kScratch,
              "sums of `many` do not fit");

struct Unpacked {
  float values[kMostRows][kColumns];
  int32_t places[kMostRows][kColumns];  // of columns of x^T
};

// Unpacks rows [j, end) of 16 columns, or of `width` of them and zeros.
template <class V>
NM_INLINE void unpack(const Job& job, long j, long end, long f, long width, Unpacked* out) {
  const int32_t lanes = static_cast<int32_t>(job.lanes), top = job.groups * job.m - 1;
  for (long i = 0; j + i < end; ++i) {
    const int32_t base = (j + i) / job.n * job.m;
    if (width == kColumns) {
      const uint8_t* line = job.indices + (j + i) * job.bits / 8 * job.features + f;
      const int shift = (j + i) * job.bits % 8, mask = (1 << job.bits) - 1;
      // What the next call for these columns unpacks.
      __builtin_prefetch(static_cast<const char*>(job.values) +
                         ((end + i) * job.features + f) * V::kBytes);
      __builtin_prefetch(line + (end - j) * job.bits / 8 * job.features);
      for (int c = 0; c < kColumns; c += W) {
        I at = ((bytes(line + c) >> shift) & mask) + base;
        at = at < top ? at : all(top);  // an index that is wrong reads what is there
        *reinterpret_cast<I*>(&out->places[i][c]) = at * lanes;
        *reinterpret_cast<F*>(&out->values[i][c]) = V::at(job.values, (j + i) * job.features + f + c);
      }
    } else {
      for (int c = 0; c < kColumns; ++c) {
        const bool in = c < width;
        const int32_t at = base + (in ? index_at(job, j + i, f + c) : 0);
        out->places[i][c] = (at < top ? at : top) * lanes;
        out->values[i][c] = in ? V::one(job.values, (j + i) * job.features + f + c) : 0;
      }
    }
  }
}

// Adds what was unpacked to `sums` [16, L].
template <int L>
NM_INLINE void add(const Unpacked& u, long rows, const float* x, float* sums) {
  constexpr int N = L / W, C = N >= 8 ? 1 : 8 / N;
  for (int c = 0; c < kColumns; c += C) {
    F total[C][N];
    for (int k = 0; k < C; ++k)
      for (int i = 0; i < N; ++i) total[k][i] = load(sums + (c + k) * L + i * W);
    for (long j = 0; j < rows; ++j)
      for (int k = 0; k < C; ++k) {
        const float* p = x + u.places[j][c + k];
        const F v = all(u.values[j][c + k]);
        for (int i = 0; i < N; ++i) total[k][i] += v * load(p + i * W);
      }
    for (int k = 0; k < C; ++k)
      for (int i = 0; i < N; ++i) store(sums + (c + k) * L + i * W, total[k][i]);
  }
}

template <class V, int L>
void many_of(const Job& job, long first, long last, float* sums) {
  Unpacked& unpacked = *reinterpret_cast<Unpacked*>(sums + kTile * L);
  // Rows of x^T that fit the first cache beside what is unpacked of them, or nearly.
  const long reach = job.m <= 4 ? 64 : (job.m <= 16 ? 128 : 256) * 64 / L;
  long step = job.m > 64 ? kMostRows : reach / job.m * job.n / 4 * 4;
  step = step < 4 ? 4 : step > kMostRows ? kMostRows : step;
  for (long f = first; f < last; f += kTile) {
    const long width = last - f < kTile ? last - f : kTile;
    for (long i = 0; i < (width + kColumns - 1) / kColumns * kColumns * L; ++i) sums[i] = 0;
    for (long j = 0; j < job.rows; j += step) {
      const long end = j + step < job.rows ? j + step : job.rows;
      for (long c = 0; c < width; c += kColumns) {
        const long here = width - c < kColumns ? width - c : kColumns;
        unpack<V>(job, j, end, f + c, here, &unpacked);
        add<L>(unpacked, end - j, job.x, sums + c * L);
      }
    }
    if (job.scale)
      for (long c = 0; c < width; ++c)
        for (int l = 0; l < L; ++l) sums[c * L + l] = scaled(job, sums[c * L + l], f + c);
    turn(sums, L, job.y + f, job.features, width, job.batch);
  }
}

template <class V>
void many_of(const Job& job, long first, long last, float* scratch) {
  if (job.lanes == 16) return many_of<V, 16>(job, first, last, scratch);
  if (job.lanes == 32) return many_of<V, 32>(job, first, last, scratch);
  many_of<V, 64>(job, first, last, scratch);
}

void many(const Job& job, long first, long last, float* scratch) {
  if (job.kind == nm::kFloat32) return many_of<Float32>(job, first, last, scratch);
  if (job.kind == nm::kBFloat16) return many_of<BFloat16>(job, first, last, scratch);
  many_of<Int8>(job, first, last, scratch);
}

}  // namespace

namespace nm {
extern const Isa NM_NAME;
const Isa NM_NAME = {NM_TEXT, few, many, turn};
}  // namespace nm
