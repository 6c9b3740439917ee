#include "run.h"

#include <algorithm>
#include <atomic>
#include <climits>
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

constexpr int kSpins = 2000;  // looks at what others still do, before this thread sleeps

long up(long a, long b) { return (a + b - 1) / b; }

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
  // Sixteen lanes pick from 32 x's by one shuffle, as fast as `many` loads a column of x.
  if (&isa == &avx512 && job.m <= 64) return job.m <= 32 ? LONG_MAX : kMostFew + 1;
  // Eight lanes pick from more than eight by several shuffles, for each row of x.
  if (&isa == &avx2 && job.m > 8 && job.m <= 64) return job.m <= 16 ? 12 : job.m <= 32 ? 6 : 4;
#endif
  return job.m <= 16 ? kMostFew + 1 : job.m <= 32 ? 17 : job.m <= 64 ? 12 : 8;
}

// Rows of x that are taken at once. `few` has them shared out evenly, in fours.
long rows_at_once(const Job& job, bool many) {
  if (many) return kMostLanes;
  const long blocks = up(job.batch, kMostFew);
  return blocks == 1 ? job.batch : 4 * up(job.batch, 4 * blocks);
}

void relax() {
#ifdef NM_X86
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Multiplications that take as long as to arrange one x. A thread that joins a block arranges it
// again, so more than half of its time is for products.
constexpr long kArrange = 10;

// A product in tasks: some columns of a block of rows of x. A thread arranges x for itself, block by
// block, since to read what another core has just written takes longer. A helper may start late, so
// it owns a share of this.
struct Work {
  Job job;  // whose x and y are those of all rows
  const Isa* isa;
  bool many;
  long depth, most, blocks, tile, tiles, workers;
  std::unique_ptr<std::atomic<long>[]> next;  // the first tile of each block that nobody has taken
  std::atomic<long> arrived{0};
  std::atomic<long> left{0};  // tasks that are not finished
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::condition_variable all;

  void take() {
    static thread_local Buffer arranged, sums;
    // Each begins with blocks of its own, and then helps with those of others.
    const long first = arrived.fetch_add(1) * blocks / workers;
    for (long i = 0; i < blocks; ++i) block((first + i) % blocks, arranged, sums);
    arranged.shrink();
  }

  void block(long number, Buffer& arranged, Buffer& sums) {
    long finished = 0;
    Job part = job;
    part.x = nullptr;
    for (long t; next[number].load(std::memory_order_relaxed) < tiles &&
                 (t = next[number].fetch_add(1)) < tiles;
         ++finished) {
      if (!part.x) part.x = arrange(part, number * most, arranged);
      float* scratch = sums.get(kScratch);
      if (!part.x || !scratch) {
        failed = true;
        continue;
      }
      const long first = t * tile, last = std::min(first + tile, part.features);
      (many ? isa->many : isa->few)(part, first, last, scratch);
    }
    if (finished && left.fetch_sub(finished) == finished) {
      std::lock_guard<std::mutex> lock(mutex);
      all.notify_all();
    }
  }

  // Makes `part` the block of rows that begins at `row`, and returns its x with padding: rows as
  // they are for `few`, transposed for `many`; null without memory.
  float* arrange(Job& part, long row, Buffer& buffer) const {
    const long length = job.groups * job.m;
    const char* x = reinterpret_cast<const char*>(job.x + row * depth);
    part.y = job.y + row * job.features;
    part.batch = std::min(most, job.batch - row);
    if (!many) {
      part.stride = length + 256;
      float* to = buffer.get(part.batch * part.stride);
      if (!to) return nullptr;
      for (long b = 0; b < part.batch; ++b) {
        std::memcpy(to + b * part.stride, x + b * depth * 4, depth * 4);
        std::fill(to + b * part.stride + depth, to + (b + 1) * part.stride, 0.0f);
      }
      return to;
    }
    part.lanes = part.batch <= 16 ? 16 : part.batch <= 32 ? 32 : most;
    float* to = buffer.get(length * part.lanes);
    if (!to) return nullptr;
    const bool whole = part.batch == part.lanes;
    std::fill(to + (whole ? depth * part.lanes : 0), to + length * part.lanes, 0.0f);
    isa->turn(reinterpret_cast<const float*>(x), depth, to, part.lanes, part.batch, depth);
    return to;
  }

  // Waits for tasks that somebody works on: nothing here waits for a thread to become free.
  void wait() {
    for (int i = 0; i < kSpins && left.load(); ++i) relax();
    std::unique_lock<std::mutex> lock(mutex);
    all.wait(lock, [&] { return !left.load(); });
  }
};

}  // namespace

const char* run(Job job, long depth, const Isa& isa, int threads, const Spread& spread,
                long effort) {
  if (!job.batch || !job.features) return nullptr;
  if (!job.rows) {
    std::fill(job.y, job.y + job.batch * job.features, 0.0f);
    return nullptr;
  }
  if (job.groups * job.m > (1L << 31) / kMostLanes - 512) return "the weight is too deep";
  auto work = std::make_shared<Work>();
  work->job = job, work->depth = depth, work->isa = &isa;
  work->many = job.batch >= many_from(job, isa);
  // As many workers as have enough to do: two more multiplications stand for reading a weight.
  const long size = job.rows * job.features, worth = size * (job.batch + 2) / effort;
  work->most = rows_at_once(job, work->many);
  work->blocks = up(job.batch, work->most);
  const long most = work->blocks * std::max(1L, size / (kArrange * depth + 1));
  const long workers = std::max(1L, std::min({static_cast<long>(threads), worth, most}));
  // Tasks enough that a late thread holds up nobody, but of long pieces where memory is what binds;
  // tiles of 64 columns, as even as can be.
  const long cuts = workers == 1 ? 1 : up(4 * workers, work->blocks);
  const long least = std::min(work->many ? 64L : job.batch < 8 ? 512L : 256L,
                              64 * up(job.features, 64 * workers));
  work->tiles = up(job.features, std::max(least, 64 * up(job.features, 64 * cuts)));
  work->tile = 64 * up(job.features, 64 * work->tiles);
  work->tiles = up(job.features, work->tile);
  work->workers = std::min(workers, work->blocks * work->tiles);
  work->left = work->blocks * work->tiles;
  work->next = std::make_unique<std::atomic<long>[]>(work->blocks);
  if (work->workers > 1) spread(static_cast<int>(work->workers) - 1, [work] { work->take(); });
  work->take();
  work->wait();
  return work->failed ? "there is no memory for x or for sums" : nullptr;
}

}  // namespace nm
