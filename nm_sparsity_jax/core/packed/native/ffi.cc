// What XLA calls. It checks sizes: buffers come from a program, and the kernels trust their numbers.

#include "run.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

ffi::Error refuse(const char* why) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("nm_sparsity_dot: ") + why);
}

ffi::Error dot(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer values,
               ffi::Buffer<ffi::U8> indices, ffi::Buffer<ffi::F32> scale,
               ffi::ResultBuffer<ffi::F32> y, int64_t n, int64_t m, int64_t bits, int64_t isa,
               int64_t threads) {
  const auto xs = x.dimensions(), vs = values.dimensions(), is = indices.dimensions(),
             ys = y->dimensions();
  if (xs.size() != 2 || vs.size() != 2 || is.size() != 2 || ys.size() != 2)
    return refuse("x, values, indices and y have two axes");
  if (n < 1 || m < n || m > 256 || (bits != 2 && bits != 4 && bits != 8) || (m - 1) >> bits)
    return refuse("n, m and bits do not fit each other");
  nm::Job job{};
  job.batch = xs[0], job.features = vs[1], job.rows = vs[0];
  job.n = n, job.m = m, job.bits = static_cast<int>(bits);
  job.groups = (xs[1] + m - 1) / m;
  if (job.groups * n != job.rows || is[0] != (job.rows * bits + 7) / 8 || is[1] != vs[1] ||
      ys[0] != xs[0] || ys[1] != vs[1])
    return refuse("the shapes do not fit each other");
  const auto kind = values.element_type();
  if (kind != ffi::F32 && kind != ffi::BF16 && kind != ffi::S8)
    return refuse("values are float32, bfloat16 or int8");
  const bool scaled = kind == ffi::S8;
  if (scale.element_count() != (scaled ? static_cast<size_t>(vs[1]) : 0))
    return refuse("int8 has a scale for each column, and no other values have one");
  job.kind = kind == ffi::F32 ? nm::kFloat32 : kind == ffi::BF16 ? nm::kBFloat16 : nm::kInt8;
  job.values = values.untyped_data();
  job.indices = indices.typed_data();
  job.scale = scaled ? scale.typed_data() : nullptr;
  job.x = x.typed_data();
  job.y = y->typed_data();
  const nm::Isa* with = nm::isa_of(static_cast<int>(isa));
  if (!with) return refuse("this machine lacks that instruction set");
  const int64_t there = pool.num_threads();
  const int64_t most = threads > 0 && threads < there ? threads : there;
  const char* wrong = nm::run(job, xs[1], *with, static_cast<int>(most),
                              [&pool](int helpers, const std::function<void()>& help) {
                                for (int i = 0; i < helpers; ++i) pool.Schedule(std::function<void()>(help));
                              });
  return wrong ? refuse(wrong) : ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(nm_sparsity_dot, dot,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("n")
                                  .Attr<int64_t>("m")
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("threads"));

extern "C" {

int nm_sparsity_version() { return NM_VERSION; }

// The name of an instruction set as `isa` counts them, "" where this machine lacks it.
const char* nm_sparsity_isa(int number) {
  const nm::Isa* found = nm::isa_of(number);
  return found ? found->name : "";
}
}

#pragma GCC visibility pop
