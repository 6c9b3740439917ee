// Tries every kernel on small products against plain loops. Built with sanitizers by
// tests/test_packed_dot.py: buffers have their exact size, so a read beside one is seen.
//
//   check [seed]      prints how many products were compared; fails at the first that differs

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "run.h"

namespace {

std::mt19937 random_bits;

long below(long n) { return static_cast<long>(random_bits() % n); }
float real() { return static_cast<float>(below(2001) - 1000) / 500; }

int bytes_of(nm::Kind kind) { return kind == nm::kFloat32 ? 4 : kind == nm::kBFloat16 ? 2 : 1; }

// Memory of its exact size, whose first element stands `off` elements after an aligned address.
template <class T>
struct Exact {
  Exact(long count, long off) : all(new T[count + off]), at(all.get() + off) {}
  std::unique_ptr<T[]> all;
  T* at;
};

float value_at(const nm::Job& job, long i) {
  if (job.kind == nm::kInt8) return static_cast<const int8_t*>(job.values)[i];
  if (job.kind == nm::kFloat32) return static_cast<const float*>(job.values)[i];
  const uint32_t wide = static_cast<const uint16_t*>(job.values)[i] << 16;
  float v;
  std::memcpy(&v, &wide, 4);
  return v;
}

struct Shape {
  long n, m, depth, features, batch;
};

std::vector<std::function<void()>> late;  // helpers whose product is done and whose buffers are gone
long spread = 0;                          // helpers that were asked for

// Returns whether one product is right; with wild indices it must only stay inside its buffers.
// With `effort` 1 a thread more is worth it however small the product is.
bool one(const Shape& s, nm::Kind kind, int bits, int isa, int threads, bool wild, long effort = 1) {
  const long off = below(2), groups = (s.depth + s.m - 1) / s.m, rows = groups * s.n;
  const long lines = (rows * bits + 7) / 8, width = bytes_of(kind);
  Exact<uint8_t> indices(lines * s.features, off);
  Exact<float> x(s.batch * s.depth, off), y(s.batch * s.features, off), scale(s.features, off);
  std::vector<char> backing;
  Exact<float> f32(width == 4 ? rows * s.features : 0, off);
  Exact<uint16_t> bf16(width == 2 ? rows * s.features : 0, off);
  Exact<int8_t> int8(width == 1 ? rows * s.features : 0, off);
  for (long i = 0; i < rows * s.features; ++i) {
    if (width == 4) f32.at[i] = real();
    if (width == 2) bf16.at[i] = static_cast<uint16_t>(0x3f00 + below(256) + (below(2) << 15));
    if (width == 1) int8.at[i] = static_cast<int8_t>(below(255) - 127);
  }
  std::memset(indices.at, 0, lines * s.features);
  for (long j = 0; j < rows; ++j)
    for (long f = 0; f < s.features; ++f) {
      uint8_t& byte = indices.at[j * bits / 8 * s.features + f];
      if (wild) byte = static_cast<uint8_t>(below(256));
      else byte |= below(s.m) << (j * bits % 8);
    }
  for (long i = 0; i < s.batch * s.depth; ++i) x.at[i] = real();
  for (long i = 0; i < s.features; ++i) scale.at[i] = 1 + static_cast<float>(below(100)) / 100;

  nm::Job job{};
  job.batch = s.batch, job.features = s.features, job.rows = rows, job.n = s.n, job.m = s.m;
  job.groups = groups, job.bits = bits, job.kind = kind;
  job.values = width == 4 ? static_cast<void*>(f32.at) : width == 2 ? static_cast<void*>(bf16.at)
                                                                    : static_cast<void*>(int8.at);
  job.indices = indices.at, job.scale = width == 1 ? scale.at : nullptr;
  job.x = x.at, job.y = y.at;
  // Helpers come at once, or when the product is done, or never.
  const long when = below(3);
  std::vector<std::thread> helpers;
  const char* wrong = nm::run(job, s.depth, *nm::isa_of(isa), threads,
                              [&](int count, const std::function<void()>& help) {
                                spread += count;
                                for (int i = 0; i < count && when == 0; ++i) helpers.emplace_back(help);
                                for (int i = 0; i < count && when == 1; ++i) late.push_back(help);
                              },
                              effort);
  for (auto& helper : helpers) helper.join();
  if (wrong) return false;
  for (long b = 0; b < s.batch && !wild; ++b)
    for (long f = 0; f < s.features; ++f) {
      double due = 0, size = 1;
      for (long j = 0; j < rows; ++j) {
        const int at = indices.at[j * bits / 8 * s.features + f] >> (j * bits % 8) & ((1 << bits) - 1);
        const long k = j / s.n * s.m + at;
        const double term = k < s.depth ? value_at(job, j * s.features + f) * x.at[b * s.depth + k] : 0;
        due += term, size += std::fabs(term);
      }
      const double factor = job.scale ? scale.at[f] : 1;
      if (!(std::fabs(y.at[b * s.features + f] - due * factor) <= 1e-5 * size * factor)) return false;
    }
  return true;
}

}  // namespace

int main(int count, char** words) {
  random_bits.seed(count > 1 ? std::atoi(words[1]) : 1);
  const long patterns[][2] = {{1, 1}, {2, 4}, {1, 4}, {3, 4}, {1, 3}, {1, 8}, {3, 8}, {7, 16}, {1, 16},
                              {1, 17}, {2, 32}, {1, 32}, {3, 64}, {1, 128}, {2, 128}, {1, 200},
                              {5, 256}};
  const long features[] = {1, 15, 16, 63, 80, 300, 1100}, batches[] = {0, 1, 2, 3, 7, 13, 17, 33, 70, 150};
  long tried = 0;
  for (const auto& p : patterns)
    for (int isa = 1; isa <= 3; ++isa) {
      if (!nm::isa_of(isa)) continue;
      for (int kind = 0; kind < 3; ++kind)
        for (const long batch : batches) {
          const int least = p[1] <= 4 ? 2 : p[1] <= 16 ? 4 : 8, bits = below(3) ? least : 8;
          const Shape s{p[0], p[1], 1 + below(3 * p[1] + 9), features[below(7)], batch};
          const bool wild = below(4) == 0;
          const int threads = below(4) ? 1 : 3;
          if (!one(s, static_cast<nm::Kind>(kind), bits, isa, threads, wild)) {
            std::printf("%ld:%ld depth %ld features %ld batch %ld kind %d bits %d isa %d\n", s.n, s.m,
                        s.depth, s.features, s.batch, kind, bits, isa);
            return 1;
          }
          ++tried;
          for (const auto& help : late) help();
          late.clear();
        }
    }
  std::printf("%ld products, %ld helpers\n", tried, spread);
  if (spread < tried / 20) return 1;  // a quarter has threads, and half of these enough to do
  // By the library's own measure a large product asks for threads, and a small one does not.
  for (const long batch : {2L, 200L}) {
    spread = 0;
    const Shape s{1, 8, 1024, 600, batch};
    if (!one(s, nm::kFloat32, 4, 0, 3, false, nm::kEffort) || (spread > 0) != (batch > 2)) {
      std::printf("batch %ld: %ld helpers\n", batch, spread);
      return 1;
    }
    for (const auto& help : late) help();
    late.clear();
  }
  return 0;
}
