// One product: which instruction set, which kernel, and who works on which rows and columns.
#ifndef NM_SPARSITY_RUN_H_
#define NM_SPARSITY_RUN_H_

#include <functional>

#include "job.h"

namespace nm {

// Isa 0 is the best of this machine; 1, 2, 3 are portable, avx2, avx512. Null where it is not there.
const Isa* isa_of(int number);

// Calls `help` on other threads, now or later, or never; `helpers` says how many may be of use.
using Spread = std::function<void(int helpers, const std::function<void()>& help)>;

// A thread more for so many multiplications, some 25 us of them with AVX-512. To wake it takes 10 to
// 40 us, and some of these of the thread that wakes it.
constexpr long kEffort = 3 << 19;

// y [batch, features] = x [batch, depth] . W. What `job` has as `x` and `y` may be unaligned; it
// needs no stride and no lanes. Returns what is wrong, or null.
const char* run(Job job, long depth, const Isa& isa, int threads, const Spread& spread,
                long effort = kEffort);

}  // namespace nm

#endif  // NM_SPARSITY_RUN_H_
