// What all calls share: the shapes of a convolution, and tasks on XLA's threads.
#pragma once
#include <atomic>
#include <memory>
#include <thread>

#include "vectors.hh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace headrace {

struct Geometry {
  i64 n, h, w, c, kh, kw, o, stride, top, left, ho, wo;
  i64 in() const { return h * w * c; }
  i64 out() const { return ho * wo * o; }
  bool is_pointwise() const { return kh == 1 && kw == 1 && stride == 1 && ho == h && wo == w; }
  // Height and width of the part of an image, with the zeros around it, that windows touch.
  i64 window_rows() const { return (ho - 1) * stride + kh; }
  i64 window_columns() const { return (wo - 1) * stride + kw; }
  bool fits_unpadded() const { return !top && !left && window_rows() <= h && window_columns() <= w; }
};

// A window of one pixel does not need to know rows: every pixel is an image.
inline Geometry flattened(Geometry g) {
  if (!g.is_pointwise()) return g;
  g.n *= g.h * g.w;
  g.h = g.w = g.ho = g.wo = 1;
  return g;
}

// The caller works too, and waits only for tasks that a thread has begun: it cannot wait for ever, however busy the pool is.
template <class F> void parallel(ffi::ThreadPool& pool, i64 count, const F& f) {
  struct Job {
    std::atomic<i64> next{0}, done{0};
    i64 count;
    const F* f;
    void work() {
      for (i64 i; (i = next.fetch_add(1)) < count;) {
        (*f)(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  const i64 helpers = std::min<i64>(count, pool.num_threads()) - 1;
  if (helpers < 1) {
    for (i64 i = 0; i < count; i++) f(i);
    return;
  }
  auto job = std::make_shared<Job>();  // a helper may start after everything is done
  job->count = count;
  job->f = &f;
  for (i64 i = 0; i < helpers; i++) pool.Schedule([job] { job->work(); });
  job->work();
  for (int spins = 0; job->done.load(std::memory_order_acquire) < count; spins++)
    if (spins > 4000) std::this_thread::yield();
}

inline Geometry geometry_of(ffi::Span<const i64> q) {
  return {q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7], q[8], q[9], q[10], q[11]};
}

}  // namespace headrace
