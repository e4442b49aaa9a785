// The largest values of windows, and their gradient. T: float or Half, as in kernels.cc.
#pragma once
#include "tasks.hh"

namespace headrace {

using Places = ffi::Buffer<ffi::U8>;

constexpr i64 kPoolFloats = 32 * 1024;  // of one band of an image

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
static inline Ints load_places(const uint8_t* p, i64 n) {
  Bytes v = {};
  memcpy(&v, p, n);
  return __builtin_convertvector(v, Ints);
}
static inline void store_places(uint8_t* p, Ints places, i64 n) {
  const Bytes v = __builtin_convertvector(places, Bytes);
  memcpy(p, &v, n);
}

// Call f(channel, lanes) for each vector of the channels of a pixel.
template <class F> static inline void each_strip(i64 channels, F f) {
  i64 k = 0;
  for (; k + kLanes <= channels; k += kLanes) f(k, std::integral_constant<i64, kLanes>());
  if (k < channels) f(k, channels - k);
}

// The largest value of each window, which has at least one pixel of the image; in training also its place there, by rows.
template <class T>
static ffi::Error MaxPool(ffi::ThreadPool xla_pool, ffi::Span<const i64> geometry, Images<T> x_, ffi::Result<Images<T>> y_,
                          ffi::RemainingRets rets) {
  const Threads pool(xla_pool, rets.size() == 0);
  const Geometry g = geometry_of(geometry);
  const T* x = x_.typed_data();
  T* y = in_large_pages(y_->typed_data(), y_->element_count());
  uint8_t* places = nullptr;
  if (rets.size() > 0) {
    ffi::Result<Places> found = *rets.get<Places>(0);
    places = in_large_pages(found->typed_data(), found->element_count());
  }
  const i64 bands = std::clamp<i64>(g.in() / kPoolFloats, 1, g.ho), c = g.c;
  parallel(pool, g.n * bands, [&](i64 task) {
    const Range rows = range_of(g.ho, task % bands, bands);
    const T* image = x + task / bands * g.in();
    for (i64 r = rows.first; r < rows.last; r++)
      for (i64 q = 0; q < g.wo; q++) {
        const i64 top = r * g.stride - g.top, left = q * g.stride - g.left;
        const i64 i0 = std::max<i64>(0, top), i1 = std::min(g.h, top + g.kh);
        const i64 j0 = std::max<i64>(0, left), j1 = std::min(g.w, left + g.kw);
        const i64 to = ((task / bands * g.ho + r) * g.wo + q) * c;
        each_strip(c, [&](i64 k, auto n) {
          Vec best = load(image + (i0 * g.w + j0) * c + k, n);
          Ints place = Ints{} + (int32_t)((i0 - top) * g.kw + j0 - left);
          for (i64 i = i0; i < i1; i++)
            for (i64 j = j0; j < j1; j++) {
              const Vec v = load(image + (i * g.w + j) * c + k, n);
              place = v > best ? Ints{} + (int32_t)((i - top) * g.kw + j - left) : place;  // of equal ones the first
              best = best >= v ? best : (v == v ? (best == best ? v : best) : v);          // NaN wins
            }
          store(y + to + k, best, n);
          if (places) store_places(places + to + k, place, n);
        });
      }
  });
  return ffi::Error::Success();
}

// Each pixel's gradient is the sum of those of the windows in which it was the largest.
template <class T>
static ffi::Error MaxPoolGradient(ffi::ThreadPool xla_pool, ffi::Span<const i64> geometry, Images<T> dy_, Places places_,
                                  ffi::Result<Images<T>> dx_) {
  const Threads pool(xla_pool);
  const Geometry g = geometry_of(geometry);
  const T* dy = dy_.typed_data();
  const uint8_t* places = places_.typed_data();
  T* dx = in_large_pages(dx_->typed_data(), dx_->element_count());
  const i64 bands = std::clamp<i64>(g.in() / kPoolFloats, 1, g.h), c = g.c;
  // The windows of a pixel: the first that has not ended before it, to the last that has begun.
  auto windows = [&](i64 pixel, i64 before, i64 size, i64 count) {
    const i64 at = pixel + before, first = at < size ? 0 : (at - size) / g.stride + 1;
    return Range{first, std::min(count, at / g.stride + 1)};
  };
  parallel(pool, g.n * bands, [&](i64 task) {
    const Range lines = range_of(g.h, task % bands, bands);
    const i64 image = task / bands;
    for (i64 i = lines.first; i < lines.last; i++)
      for (i64 j = 0; j < g.w; j++) {
        const Range rows = windows(i, g.top, g.kh, g.ho), columns = windows(j, g.left, g.kw, g.wo);
        each_strip(c, [&](i64 k, auto n) {
          Vec sum = {};
          for (i64 r = rows.first; r < rows.last; r++)
            for (i64 q = columns.first; q < columns.last; q++) {
              const i64 from = ((image * g.ho + r) * g.wo + q) * c + k;
              const auto place = (int32_t)((i + g.top - r * g.stride) * g.kw + j + g.left - q * g.stride);
              sum += load_places(places + from, n) == place ? load(dy + from, n) : Vec{};
            }
          store(dx + ((image * g.h + i) * g.w + j) * c + k, sum, n);
        });
      }
  });
  return ffi::Error::Success();
}

}  // namespace headrace
