// Vectors of floats, activations, and passes over rows of channels. The instruction set is chosen by the compiler's flags.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <type_traits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace headrace {

using i64 = int64_t;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef float Unaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

static inline Vec load(const float* p) { return *(const Unaligned*)p; }
static inline void store(float* p, Vec v) { *(Unaligned*)p = v; }

// The first n lanes; n is a constant in the loops that matter, which leaves a plain load or store.
static inline Vec load(const float* p, i64 n) {
  if (n == kLanes) return load(p);
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  Vec v = {};
  memcpy(&v, p, n * sizeof(float));
  return v;
#endif
}
static inline void store(float* p, Vec v, i64 n) {
  if (n == kLanes) return store(p, v);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
  memcpy(p, &v, n * sizeof(float));
#endif
}

// bfloat16 values, the upper halves of floats: widened when they are loaded, rounded (to even) when they are stored.
using Half = uint16_t;
typedef Half Halfs __attribute__((vector_size(kLanes * 2)));
typedef Half UnalignedHalfs __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

// The first n of kLanes values, and zeros behind them; in the lower half of each lane. (GCC warns of conversions without a mask.)
static inline Ints load_bits(const Half* p, i64 n) {
#if defined(__AVX512F__)
  if (n == kLanes) return (Ints)_mm512_maskz_cvtepu16_epi32((__mmask16)-1, (__m256i)*(const UnalignedHalfs*)p);
  return (Ints)_mm512_maskz_cvtepu16_epi32((__mmask16)-1, _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
#else
  Halfs v = {};
  if (n == kLanes)
    v = *(const UnalignedHalfs*)p;
  else
    memcpy(&v, p, n * sizeof(Half));
  return __builtin_convertvector(v, Ints);
#endif
}
static inline Vec load(const Half* p, i64 n) { return (Vec)(load_bits(p, n) << 16); }
static inline Vec load(const Half* p) { return load(p, kLanes); }
static inline Ints rounded_bits(Vec v) {  // in the upper half of each lane
  const Ints bits = (Ints)v, even = bits + 0x7fff + ((bits >> 16) & 1);
  return v == v ? even : (bits | 0x400000);  // NaN stays NaN
}
static inline void store_bits(Half* p, Ints bits, i64 n) {  // the lower halves of the first n lanes
#if defined(__AVX512F__)
  const __m256i halfs = _mm512_maskz_cvtepi32_epi16((__mmask16)-1, (__m512i)bits);
  if (n == kLanes)
    *(UnalignedHalfs*)p = (Halfs)halfs;
  else
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), halfs);
#else
  const Halfs halfs = __builtin_convertvector(bits, Halfs);
  if (n == kLanes)
    *(UnalignedHalfs*)p = halfs;
  else
    memcpy(p, &halfs, n * sizeof(Half));
#endif
}
static inline void store(Half* p, Vec v, i64 n) { store_bits(p, rounded_bits(v) >> 16, n); }
static inline void store(Half* p, Vec v) { store(p, v, kLanes); }

enum Activation : i64 { kNone = 0, kRelu = 1, kRelu6 = 2, kSwish = 3, kHardSwish = 4 };

static inline Vec exponential(Vec x) {
  const Vec zero = {};
  x = x > 88.f ? zero + 88.f : x;
  x = x < -87.f ? zero - 87.f : x;
  Vec t = x * 1.44269504f;
  Ints i = __builtin_convertvector(t + (t < 0 ? zero - .5f : zero + .5f), Ints);
  Vec n = __builtin_convertvector(i, Vec);
  Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts: the first product is exact
  Vec p = r * (1.f / 5040) + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + .5f;
  p = p * r * r + r + 1.f;
  return p * (Vec)((i + 127) << 23);
}
static inline Vec sigmoid(Vec v) { return 1.f / (1.f + exponential(-v)); }

template <i64 kAct> static inline Vec activated(Vec v) {
  const Vec zero = {};
  if (kAct == kRelu) return v < 0 ? zero : v;  // NaN stays NaN
  if (kAct == kRelu6) { v = v < 0 ? zero : v; return v > 6.f ? zero + 6.f : v; }
  if (kAct == kSwish) return v * sigmoid(v);
  if (kAct == kHardSwish) return v * activated<kRelu6>(v + 3.f) * (1.f / 6);
  return v;
}
// The gradient d times the slope of the activation at v.
template <i64 kAct> static inline Vec with_slope(Vec d, Vec v) {
  const Vec zero = {};
  if (kAct == kRelu) return v > 0 ? d : zero;
  if (kAct == kRelu6) { d = v > 0 ? d : zero; return v < 6.f ? d : zero; }
  if (kAct == kSwish) { Vec s = sigmoid(v); return d * (s * (1.f + v * (1.f - s))); }
  if (kAct == kHardSwish) {
    Vec inside = d * ((2.f * v + 3.f) * (1.f / 6));
    inside = v > -3.f ? inside : zero;
    return v < 3.f ? inside : d;
  }
  return d;
}

struct Range {
  i64 first, last;
};
// The i-th of `parts` parts of 0 .. count.
static inline Range range_of(i64 count, i64 i, i64 parts) { return {count * i / parts, count * (i + 1) / parts}; }

// A buffer of this thread that only grows: a step maps no new pages.
static inline float* scratch(int which, i64 floats) {
  struct Buffer {
    float* p = nullptr;
    i64 size = 0;
    ~Buffer() { free(p); }
  };
  static thread_local Buffer buffers[11];
  Buffer& b = buffers[which];
  if (b.size < floats) {
    free(b.p);
    b.size = (floats + floats / 8 + 31) / 16 * 16;
    b.p = (float*)aligned_alloc(64, b.size * sizeof(float));
  }
  return b.p;
}

// Lane i of the result is lane m[i] of a, or of b for m[i] >= kLanes.
static inline Vec pick(Vec a, Vec b, Ints m) {
#if defined(__clang__)
  Vec v;
  for (int i = 0; i < kLanes; i++) v[i] = m[i] < kLanes ? a[m[i]] : b[m[i] - kLanes];
  return v;
#else
  return __builtin_shuffle(a, b, m);
#endif
}

// Transpose kLanes x kLanes floats: in step s, rows s apart exchange the lanes whose number has, or has not, that bit.
template <int kStep> static inline void exchange(Vec* rows) {
  Ints low, high;
  for (int i = 0; i < kLanes; i++) low[i] = i & kStep ? kLanes + i - kStep : i, high[i] = i & kStep ? kLanes + i : i + kStep;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++)
    if (!(i & kStep)) {
      const Vec a = rows[i], b = rows[i + kStep];
      rows[i] = pick(a, b, low);
      rows[i + kStep] = pick(a, b, high);
    }
  if constexpr (kStep > 1) exchange<kStep / 2>(rows);
}
template <class T> static inline void transpose(const T* from, i64 from_step, float* to, i64 to_step) {
  Vec rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) rows[i] = load(from + i * from_step);
  exchange<kLanes / 2>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) store(to + i * to_step, rows[i]);
}

// Rows of channels are processed as one flat array in whole vectors, whatever the number of channels: coefficients are
// repeated until they fill `period` floats, a multiple of both the channels and the lanes.
static inline i64 period_of(i64 channels) { return std::lcm(channels, (i64)kLanes); }
static inline void repeat(const float* v, i64 channels, float* out) {
  for (i64 i = 0, period = period_of(channels); i < period; i++) out[i] = v[i % channels];
}

// Call f(position, position in the period, lanes) for each vector of `count` floats.
template <class F> static inline void each_vector(i64 count, i64 period, F f) {
  i64 i = 0;
  for (; i + period <= count; i += period)
    for (i64 j = 0; j < period; j += kLanes) f(i + j, j, std::integral_constant<i64, kLanes>());
  for (i64 j = 0; i + j < count; j += kLanes) f(i + j, j, std::min<i64>(kLanes, count - i - j));
}

// The same values, of another type or not.
template <class From, class To> static inline void copy_values(const From* from, i64 count, To* to) {
  each_vector(count, kLanes, [&](i64 i, i64, auto n) { store(to + i, load(from + i, n), n); });
}

// Add sums of the channels from j on; rarely called, and inlined it was half of what two_sums compiles to.
__attribute__((noinline)) static void fold_sums(double* first, double* second, i64 channels, i64 j, Vec s, Vec q, i64 n) {
  for (i64 i = 0; i < n; i++) first[(j + i) % channels] += s[i], second[(j + i) % channels] += q[i];
}

// Add two sums per channel: f(position, position in the period, lanes, first sum, second sum). Sums of up to 256 values
// are kept in float32, those of more in float64.
template <class F> static void two_sums(i64 count, i64 channels, double* first, double* second, F f) {
  const i64 period = period_of(channels), periods = count / period;
  auto fold = [&](i64 j, const Vec& s, const Vec& q, i64 n) { fold_sums(first, second, channels, j, s, q, n); };
  auto strip = [&](auto size, i64 j) {
    constexpr int kSize = decltype(size)::value;
    for (i64 p0 = 0; p0 < periods; p0 += 256) {
      Vec s[kSize] = {}, q[kSize] = {};
      for (i64 p = p0; p < std::min(periods, p0 + 256); p++)
#pragma GCC unroll 4
        for (int m = 0; m < kSize; m++) {
          const i64 k = j + m * kLanes;
          f(p * period + k, k, std::integral_constant<i64, kLanes>(), s[m], q[m]);
        }
      for (int m = 0; m < kSize; m++) fold(j + m * kLanes, s[m], q[m], kLanes);
    }
  };
  if (period > 16 * kLanes) {
    // Many channels: whole rows, a few at a time, with the sums in memory. Strips would take 256 bytes of each row, which the
    // processor does not fetch ahead: 1.05 instead of 0.81 ms for 1568 rows of 1024 channels in two threads.
    constexpr int kRows = 4;
    float* sums = scratch(0, 2 * period);
    for (i64 p0 = 0; p0 < periods; p0 += 256) {
      const i64 p1 = std::min(periods, p0 + 256);
      memset(sums, 0, 2 * period * sizeof(float));
      auto rows = [&](auto size, i64 p) {
        for (i64 j = 0; j < period; j += kLanes) {
          Vec s = load(sums + j), q = load(sums + period + j);
#pragma GCC unroll 4
          for (int m = 0; m < decltype(size)::value; m++)
            f((p + m) * period + j, j, std::integral_constant<i64, kLanes>(), s, q);
          store(sums + j, s);
          store(sums + period + j, q);
        }
      };
      i64 p = p0;
      for (; p + kRows <= p1; p += kRows) rows(std::integral_constant<int, kRows>(), p);
      for (; p < p1; p++) rows(std::integral_constant<int, 1>(), p);
      for (i64 j = 0; j < period; j += kLanes) fold(j, load(sums + j), load(sums + period + j), kLanes);
    }
  } else {
    i64 j = 0;
    for (; j + 4 * kLanes <= period; j += 4 * kLanes) strip(std::integral_constant<int, 4>(), j);
    for (; j + 2 * kLanes <= period; j += 2 * kLanes) strip(std::integral_constant<int, 2>(), j);
    for (; j < period; j += kLanes) strip(std::integral_constant<int, 1>(), j);
  }
  for (i64 i = periods * period, k = 0; i + k < count; k += kLanes) {
    const i64 n = std::min<i64>(kLanes, count - i - k);
    Vec s = {}, q = {};
    f(i + k, k, n, s, q);
    fold(k, s, q, n);
  }
}

// Call f(std::integral_constant<i64, activation>()) for an activation known at run time.
template <class F> static inline void for_activation(i64 act, F f) {
  switch (act) {
    case kRelu: return f(std::integral_constant<i64, kRelu>());
    case kRelu6: return f(std::integral_constant<i64, kRelu6>());
    case kSwish: return f(std::integral_constant<i64, kSwish>());
    case kHardSwish: return f(std::integral_constant<i64, kHardSwish>());
    default: return f(std::integral_constant<i64, kNone>());
  }
}

// What follows a convolution whose weights have the norm's scale: activation(y + shift + residual). Applied to a few rows
// at a time, in registers or while they are in the L1 cache.
template <class T> struct FinishOf {
  const float* shift;  // of each channel
  const T *residual, *y;  // null or like the results, in whose place it may be; where the results begin
  i64 act;

  template <i64 kAct, class N> Vec apply(Vec v, i64 channel, const T* at, N n) const {
    v += load(shift + channel, n);
    if (residual) v += load(residual + (at - y), n);
    return activated<kAct>(v);
  }
};

using Finish = FinishOf<float>;

// The same of rows of `width` channels from `channel` on, which may be in a buffer of their own.
template <i64 kAct, class T, class N>
static inline void finish_column(const float* from, i64 from_step, T* to, i64 step, int rows, i64 channel, N n,
                                 const FinishOf<T>& f) {
  const Vec shift = load(f.shift + channel, n);
  const T* residual = f.residual ? f.residual + (to - f.y) : nullptr;
  for (int r = 0; r < rows; r++, from += from_step, to += step) {
    Vec v = load(from, n) + shift;
    if (residual) v += load(residual + r * step, n);
    store(to, activated<kAct>(v), n);
  }
}
template <class T>
static inline void finish_rows(const float* from, i64 from_step, T* to, i64 step, int rows, i64 channel, i64 width,
                               const FinishOf<T>& f) {
  for_activation(f.act, [&](auto a) {
    constexpr i64 kAct = decltype(a)::value;
    i64 v = 0;
    for (; v + kLanes <= width; v += kLanes)
      finish_column<kAct>(from + v, from_step, to + v, step, rows, channel + v, std::integral_constant<i64, kLanes>(), f);
    if (v < width) finish_column<kAct>(from + v, from_step, to + v, step, rows, channel + v, width - v, f);
  });
}

// A norm's coefficients, repeated. The mean is subtracted first: folded into the shift, z scale + (shift - mean scale) would
// lose digits where it is large.
struct Affine {
  const float *scale, *mean, *shift;

  Vec apply(Vec z, i64 j) const { return (z - load(mean + j)) * load(scale + j) + load(shift + j); }
};

// y = activation((z - mean) scale + shift + residual); the residual may be null. y may be z.
template <class T>
static void activate_rows(const T* z, const T* residual, T* y, i64 count, i64 channels, Affine norm, i64 act) {
  const i64 period = period_of(channels);
  for_activation(act, [&](auto a) {
    if (residual)
      each_vector(count, period, [&](i64 i, i64 j, auto n) {
        store(y + i, activated<decltype(a)::value>(norm.apply(load(z + i, n), j) + load(residual + i, n)), n);
      });
    else
      each_vector(count, period, [&](i64 i, i64 j, auto n) {
        store(y + i, activated<decltype(a)::value>(norm.apply(load(z + i, n), j)), n);
      });
  });
}

// The sums of values and of squares of each channel, which are zero before. They are taken around the mean of a few rows, and
// moved to zero in float64: squares in float32 lose digits where the mean is much larger than the deviation.
template <class T> static void sums_of_rows(const T* z, i64 count, i64 channels, double* sum, double* squares) {
  constexpr i64 kRows = 4, kParts = 9;  // every second of so many parts of the rows: not all at the edges of usual images
  const i64 rows = count / channels, period = period_of(channels);
  float* origin = scratch(1, period);
  memset(origin, 0, channels * sizeof(float));
  for (i64 r = 0; r < kRows; r++) {
    const T* row = z + rows * (2 * r + 1) / kParts * channels;
    each_vector(channels, kLanes, [&](i64 i, i64, auto n) {
      store(origin + i, load(origin + i, n) + load(row + i, n) * (1.f / kRows), n);
    });
  }
  for (i64 i = 0; i < channels; i++)
    if (!(origin[i] - origin[i] == 0)) origin[i] = 0;  // NaN and infinity shall reach the sums as they are
  for (i64 i = channels; i < period; i++) origin[i] = origin[i - channels];
  two_sums(count, channels, sum, squares, [&](i64 i, i64 j, auto n, Vec& s, Vec& q) {
    const Vec v = load(z + i, n) - load(origin + j, n);
    s += v;
    q += v * v;
  });
  for (i64 c = 0; c < channels; c++) {
    const double from = origin[c];
    squares[c] += from * (2 * sum[c] + (double)rows * from);
    sum[c] += (double)rows * from;
  }
}

// The gradient of a normalised and activated z: d = dy slope(norm of z), dz = d scale + (z - mean) slope + constant.
struct NormGradient {
  Affine norm;
  const float *slope, *constant;  // repeated
};
template <class T, class D>
static void gradient_of_rows(const T* dy, const T* z, D* dz, i64 count, i64 channels, NormGradient g, i64 act) {
  for_activation(act, [&](auto a) {
    each_vector(count, period_of(channels), [&](i64 i, i64 j, auto n) {
      const Vec v = load(z + i, n) - load(g.norm.mean + j), scale = load(g.norm.scale + j);
      const Vec d = with_slope<decltype(a)::value>(load(dy + i, n), v * scale + load(g.norm.shift + j));
      store(dz + i, d * scale + v * load(g.slope + j) + load(g.constant + j), n);
    });
  });
}

}  // namespace headrace
