// One product y = x . W of a packed weight W, as the files of one instruction set see it.
#ifndef NM_SPARSITY_JOB_H_
#define NM_SPARSITY_JOB_H_

#include <stdint.h>

// Python asks the library for this number and refuses another one.
#define NM_VERSION 1

namespace nm {

enum Kind { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

struct Job {
  const void* values;      // [rows, features]
  const uint8_t* indices;  // [ceil(rows * bits / 8), features]
  const float* scale;      // [features], or null
  const float* x;          // few: [batch, stride]; many: [groups * m, lanes]
  float* y;                // [batch, features]
  long batch, features, rows, n, m, groups, stride, lanes;
  int bits;
  Kind kind;
};

// What one instruction set offers. A call works on the columns [first, last); `scratch` has
// kScratch floats and is aligned to 64 bytes.
struct Isa {
  const char* name;
  // Rows of x stay in registers and are permuted. Needs 256 floats behind each.
  void (*few)(const Job&, long first, long last, float* scratch);
  // Columns of x^T are added up.
  void (*many)(const Job&, long first, long last, float* scratch);
  // dst[c * to + r] = src[r * from + c].
  void (*turn)(const float* src, long from, float* dst, long to, long rows, long columns);
};

constexpr long kScratch = 24 * 1024;
constexpr long kMostFew = 32;    // rows of x that `few` takes at once
constexpr long kMostLanes = 64;  // rows of x that `many` takes at once

}  // namespace nm

#endif  // NM_SPARSITY_JOB_H_
