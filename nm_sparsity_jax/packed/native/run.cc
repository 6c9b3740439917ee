#include "run.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

namespace nm {

extern const Isa portable;
#ifdef NM_X86
extern const Isa avx2, avx512;
#endif

const Isa* isa_of(int number) {
#ifdef NM_X86
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq");
  if (number == 3 || (number == 0 && has_avx512)) return has_avx512 ? &avx512 : nullptr;
  if (number == 2 || (number == 0 && has_avx2)) return has_avx2 ? &avx2 : nullptr;
#endif
  return number == 0 || number == 1 ? &portable : nullptr;
}

namespace {

constexpr long kSmall = 1 << 18;  // multiplications below which one thread is enough

// Memory that a thread keeps for its next product, unless it is large.
class Buffer {
 public:
  ~Buffer() { std::free(kept_); }
  float* get(long floats) {
    if (floats > size_) {
      std::free(kept_);
      size_ = (floats + 15) / 16 * 16;
      kept_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
      if (!kept_) size_ = 0;
    }
    return kept_;
  }
  void shrink() {
    if (size_ > (1 << 20)) {
      std::free(kept_);
      kept_ = nullptr, size_ = 0;
    }
  }

 private:
  float* kept_ = nullptr;
  long size_ = 0;
};

// Rows of x from which on `many` is the faster one.
long many_from(const Job& job, const Isa& isa) {
#ifdef NM_X86
  // Eight lanes pick from more than eight x's by several shuffles, for each row of x.
  if (&isa == &avx2 && job.m > 8 && job.m <= 64) return job.m <= 16 ? 12 : job.m <= 32 ? 6 : 4;
#endif
  return job.m <= 16 ? kMostFew + 1 : job.m <= 32 ? 17 : job.m <= 64 ? 12 : 8;
}

// Rows of x that `many` takes at once. 128 need fewer loads for each addition, and 64 leave room in
// the first cache for the many rows of x^T that a large group picks from.
long lanes_of(const Job& job) { return job.batch > 64 && job.m <= 8 ? kMostLanes : 64; }

// Columns that are shared out. A helper may start late, so it owns a share of this.
struct Work {
  Job job;
  const Isa* isa;
  bool many;
  long tile, tiles;
  std::atomic<long> next{0};
  std::atomic<bool> failed{false};
  long done = 0;
  std::mutex mutex;
  std::condition_variable all;

  void take() {
    long finished = 0;
    for (long i; (i = next.fetch_add(1)) < tiles; ++finished) {
      static thread_local Buffer own;
      float* scratch = own.get(kScratch);
      if (!scratch) {
        failed = true;
        continue;
      }
      const long first = i * tile, last = std::min(first + tile, job.features);
      (many ? isa->many : isa->few)(job, first, last, scratch);
    }
    if (finished) {
      std::lock_guard<std::mutex> lock(mutex);
      done += finished;
      if (done == tiles) all.notify_all();
    }
  }
};

// Copies x with its padding: rows as they are for `few`, transposed for `many`.
float* arrange(Job& job, long depth, const Isa& isa, bool many, Buffer& buffer) {
  const long length = job.groups * job.m;
  const char* x = reinterpret_cast<const char*>(job.x);
  if (!many) {
    job.stride = length + 256;
    float* to = buffer.get(job.batch * job.stride);
    if (!to) return nullptr;
    for (long b = 0; b < job.batch; ++b) {
      std::memcpy(to + b * job.stride, x + b * depth * 4, depth * 4);
      std::fill(to + b * job.stride + depth, to + (b + 1) * job.stride, 0.0f);
    }
    return to;
  }
  job.lanes = job.batch <= 16 ? 16 : job.batch <= 32 ? 32 : lanes_of(job);
  float* to = buffer.get(length * job.lanes);
  if (!to) return nullptr;
  const bool whole = job.batch == job.lanes;
  std::fill(to + (whole ? depth * job.lanes : 0), to + length * job.lanes, 0.0f);
  isa.turn(reinterpret_cast<const float*>(x), depth, to, job.lanes, job.batch, depth);
  return to;
}

// Multiplies rows of x that one of the two kernels takes at once.
const char* multiply(Job job, long depth, const Isa& isa, bool many, int threads,
                     const Spread& spread) {
  static thread_local Buffer arranged;
  job.x = arrange(job, depth, isa, many, arranged);
  if (!job.x) return "there is no memory for x";
  auto work = std::make_shared<Work>();
  const bool small = threads <= 1 || job.rows * job.features * job.batch < kSmall;
  // Shares for each thread, so that a late one holds up nobody; whole tiles of 64 columns.
  const long shares = small ? 1 : 4L * threads;
  const long least = many ? 64 : 256;
  work->tile = std::max(least, (job.features + shares * 64 - 1) / (shares * 64) * 64);
  work->tiles = (job.features + work->tile - 1) / work->tile;
  work->job = job, work->isa = &isa, work->many = many;
  const int helpers = static_cast<int>(std::min<long>(threads, work->tiles)) - 1;
  if (!small && helpers > 0) spread(helpers, [work] { work->take(); });
  work->take();
  {
    // Only for columns that somebody works on: nothing here waits for a thread to become free.
    std::unique_lock<std::mutex> lock(work->mutex);
    work->all.wait(lock, [&] { return work->done == work->tiles; });
  }
  arranged.shrink();
  return work->failed ? "there is no memory for sums" : nullptr;
}

}  // namespace

const char* run(Job job, long depth, const Isa& isa, int threads, const Spread& spread) {
  if (!job.batch || !job.features) return nullptr;
  if (!job.rows) {
    std::fill(job.y, job.y + job.batch * job.features, 0.0f);
    return nullptr;
  }
  if (job.groups * job.m > (1L << 31) / kMostLanes - 512) return "the weight is too deep";
  // Blocks of rows one after the other: what is arranged of x stays in the second cache.
  const bool many = job.batch >= many_from(job, isa);
  const long batch = job.batch, most = many ? lanes_of(job) : batch;
  const float* x = job.x;
  float* y = job.y;
  for (long b = 0; b < batch; b += most) {
    job.batch = std::min(most, batch - b);
    job.x = x + b * depth;
    job.y = y + b * job.features;
    if (const char* wrong = multiply(job, depth, isa, many, threads, spread)) return wrong;
  }
  return nullptr;
}

}  // namespace nm
