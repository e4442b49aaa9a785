// What all calls share: the shapes of a convolution, and tasks on XLA's threads.
#pragma once
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "vectors.hh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace headrace {

using Floats = ffi::Buffer<ffi::F32>;
template <class T> using Images = ffi::Buffer<std::is_same_v<T, Half> ? ffi::BF16 : ffi::F32>;  // T: float or Half

struct Geometry {
  i64 n, h, w, c, kh, kw, o, stride, top, left, ho, wo;
  i64 group;  // inputs of one group of channels, which has as many outputs; c where there is but one
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

// The images' gradient in phases: with stride S, every S-th pixel of a row meets the same part of the window.
struct Phase {
  i64 first, count;  // of the pixels: first, first + S ...
  i64 tap, taps;     // of the window: tap, tap + S ...
  i64 start;         // the gradient's pixel that the first pixel's first tap (in reverse order) meets
};
inline std::vector<Phase> phases_of(i64 size, i64 kernel, i64 stride, i64 before) {
  std::vector<Phase> phases;
  for (i64 a = 0; a < std::min(stride, size); a++) {
    const i64 tap = (a + before) % stride, taps = tap < kernel ? (kernel - tap + stride - 1) / stride : 0;
    phases.push_back({a, (size - a + stride - 1) / stride, tap, taps, (a + before - tap) / stride - (taps - 1)});
  }
  return phases;
}

// Ask for pages of 2 MiB for memory that is about to be written, where the system leaves that to programs. XLA allocates the
// working memory of a program at each call: 167,000 pages of 4 KiB for ResNet-50, which the system fills with zeros one by one.
template <class T>
T* in_large_pages(T* memory, i64 count) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLarge = 2 << 20;
  const uintptr_t bytes = count * sizeof(T), first = (uintptr_t)memory & ~(kLarge - 1);
  // With the rest of the first and last page: mostly of arrays beside this one, which are written too. It is only a hint.
  if (bytes >= kLarge / 4) madvise((void*)first, ((uintptr_t)memory + bytes + kLarge - 1 - first) & ~(kLarge - 1), MADV_HUGEPAGE);
#endif
  return memory;
}

constexpr i64 kManyWeights = 192 * 1024;  // more than this are read, and their gradient is written, as rarely as possible
constexpr i64 kSlotFloats = 1024 * 1024;  // of the sums of a weights' gradient, one for each task, all together

struct Job {
  virtual void work() = 0;
  virtual ~Job() = default;
};

// Threads that wait for another job before they go back to XLA's pool. To wake a thread takes some microseconds, and a
// small network consists of 60 calls of 20 to 100.
class Waiting {
 public:
  // Wait for jobs, and work at them, until none has come for a while.
  static void stay() {
    for (Place& place : places()) {
      int is = kEmpty;
      if (!place.state.compare_exchange_strong(is, kWaits)) continue;
      for (int spins = 0; spins < kSpins; spins++) {
        pause();
        if (place.state.load(std::memory_order_acquire) == kHasJob) {
          std::shared_ptr<Job>(std::move(place.job))->work();
          place.state.store(kWaits, std::memory_order_release);
          spins = 0;
        }
        if (spins + 1 == kSpins && (is = kWaits, !place.state.compare_exchange_strong(is, kEmpty))) spins = 0;
      }
      return;
    }
  }
  // Give the job to a thread that waits, if there is one.
  static bool take(const std::shared_ptr<Job>& job) {
    for (Place& place : places()) {
      int is = kWaits;
      if (!place.state.compare_exchange_strong(is, kTaken)) continue;
      place.job = job;
      place.state.store(kHasJob, std::memory_order_release);
      return true;
    }
    return false;
  }

 private:
  enum { kEmpty, kWaits, kTaken, kHasJob };
  static constexpr int kSpins = 2000;  // 50 to 100 microseconds on x86
  struct alignas(64) Place {
    std::atomic<int> state{kEmpty};
    std::shared_ptr<Job> job;
  };
  static Place (&places())[16] {
    static Place all[16];
    return all;
  }
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
};

// XLA's threads. Those of calls for inference stay for the next call: only between calls for training has XLA work for them.
struct Threads {
  ffi::ThreadPool* pool;
  bool stay;
  Threads(ffi::ThreadPool& threads, bool inference = false) : pool(&threads), stay(inference) {}
  i64 count() const { return pool->num_threads(); }
};

// A reference to a function of (phase, task). What runs tasks is compiled once, not once for each kind of them.
class Tasks {
 public:
  template <class F> explicit Tasks(const F& f) : function_(&f), call_([](const void* g, int phase, i64 i) { (*(const F*)g)(phase, i); }) {}
  void operator()(int phase, i64 i) const { call_(function_, phase, i); }

 private:
  const void* function_;
  void (*call_)(const void*, int, i64);
};

class Phases : public Job {
 public:
  Phases(const i64* counts, int phases, i64 parts, const Tasks& run)
      : counts_(counts, counts + phases), parts_(parts), run_(run), done_(phases), next_(phases * parts) {}
  void work() override { work(arrived_.fetch_add(1)); }
  void work(i64 worker) {
    for (int phase = 0; phase < (int)counts_.size(); phase++) {
      for (i64 i = 0; i < parts_; i++) {
        const i64 part = (worker + i) % parts_;
        const Range tasks = range_of(counts_[phase], part, parts_);
        for (i64 task; (task = tasks.first + next_[phase * parts_ + part].fetch_add(1)) < tasks.last;) {
          run_(phase, task);
          done_[phase].fetch_add(1, std::memory_order_release);
        }
      }
      for (int spins = 0; done_[phase].load(std::memory_order_acquire) < counts_[phase]; spins++)
        if (spins > 4000) std::this_thread::yield();
    }
  }

 private:
  const std::vector<i64> counts_;
  const i64 parts_;
  const Tasks run_;
  std::atomic<i64> arrived_{1};
  std::vector<std::atomic<i64>> done_, next_;  // [phase], [phase][part]
};

inline void run_phases(const Threads& threads, const i64* counts, int phases, const Tasks& run) {
  const i64 largest = *std::max_element(counts, counts + phases), workers = std::min(largest, threads.count());
  if (workers < 2) {
    for (int phase = 0; phase < phases; phase++)
      for (i64 i = 0; i < counts[phase]; i++) run(phase, i);
    return;
  }
  auto job = std::make_shared<Phases>(counts, phases, workers, run);  // a helper may start after everything is done
  for (i64 i = 1; i < workers; i++)
    if (!threads.stay)
      threads.pool->Schedule([job] { job->work(); });
    else if (!Waiting::take(job))
      threads.pool->Schedule([job] {
        job->work();
        Waiting::stay();
      });
  job->work(0);
}

// Call f(phase, i) for i < counts[phase], on all threads; a phase begins when all tasks of the one before it are done.
// The caller works too, and waits only for tasks that a thread has begun: it cannot wait for ever, however busy the pool is.
// Each thread begins with its own part of the tasks, and so finds what it wrote in the call before in its own cache.
template <int kPhases, class F> void parallel_phases(const Threads& threads, const i64 (&counts)[kPhases], const F& f) {
  run_phases(threads, counts, kPhases, Tasks(f));
}

template <class F> void parallel(const Threads& threads, i64 count, const F& f) {
  parallel_phases(threads, {count}, [&](int, i64 i) { f(i); });
}

inline Geometry geometry_of(ffi::Span<const i64> q) {
  return {q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7], q[8], q[9], q[10], q[11], q[12]};
}

}  // namespace headrace
