// Depthwise convolution of one image, 3x3 or 5x5, stride 1 or 2: 16 channels at a time, from a padded copy in which a
// pixel is one cache line.
#pragma once
#include "vectors.hh"

namespace headrace::depthwise {

constexpr i64 kBlock = 16;
constexpr int kVectors = kBlock / kLanes, kPixels = kVectors == 1 ? 8 : 4;  // enough sums at once to hide their latency

struct Shape {
  i64 h, w, c, kernel, stride, top, left, ho, wo;
};

// Copy `channels` of an image into [height][width][kBlock] with zeros around; `spread` puts pixels that far apart.
static void pad(const float* x, i64 h, i64 w, i64 c, i64 channels, i64 top, i64 left, i64 height, i64 width, i64 spread,
                float* out) {
  memset(out, 0, height * width * kBlock * sizeof(float));
  for (i64 i = 0; i < h; i++) {
    const i64 y = top + i * spread;
    if (y < 0 || y >= height) continue;
    for (i64 j = 0; j < w; j++) {
      const i64 at = left + j * spread;
      if (at < 0 || at >= width) continue;
      float* to = out + (y * width + at) * kBlock;
      const float* from = x + (i * w + j) * c;
      if (channels == kBlock)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) store(to + v * kLanes, load(from + v * kLanes));
      else memcpy(to, from, channels * sizeof(float));
    }
  }
}

template <int kKernel, int kStride, int kCount>
static inline void window_sums(const float* pixels, i64 width, const float* w, float* out, i64 c, i64 channels) {
  Vec sum[kCount][kVectors] = {};
  for (int i = 0; i < kKernel; i++)
#pragma GCC unroll 5
    for (int j = 0; j < kKernel; j++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        const Vec weight = load(w + (i * kKernel + j) * kBlock + v * kLanes);
#pragma GCC unroll 8
        for (int p = 0; p < kCount; p++)
          sum[p][v] += weight * load(pixels + (i * width + p * kStride + j) * kBlock + v * kLanes);
      }
  if (channels == kBlock) {
    for (int p = 0; p < kCount; p++)
      for (int v = 0; v < kVectors; v++) store(out + p * c + v * kLanes, sum[p][v]);
  } else {
    for (int p = 0; p < kCount; p++) memcpy(out + p * c, sum[p], channels * sizeof(float));
  }
}

template <int kKernel, int kStride>
static void convolve(const float* padded, i64 width, const float* w, float* out, i64 ho, i64 wo, i64 c, i64 channels) {
  for (i64 y = 0; y < ho; y++) {
    const float* row = padded + y * kStride * width * kBlock;
    i64 x = 0;
    for (; x + kPixels <= wo; x += kPixels)
      window_sums<kKernel, kStride, kPixels>(row + x * kStride * kBlock, width, w, out + (y * wo + x) * c, c, channels);
    for (; x < wo; x++)
      window_sums<kKernel, kStride, 1>(row + x * kStride * kBlock, width, w, out + (y * wo + x) * c, c, channels);
  }
}

// dw [kernel][kernel][c] += the sums over the pixels of padded * dy
template <int kKernel, int kStride>
static void weight_gradient(const float* padded, i64 width, const float* dy, float* dw, i64 ho, i64 wo, i64 c,
                            i64 channels) {
  for (int i = 0; i < kKernel; i++) {
    Vec sum[2][kKernel][kVectors] = {};  // even and odd pixels: more sums at once
    for (i64 y = 0; y < ho; y++) {
      const float* row = padded + (y * kStride + i) * width * kBlock;
      const float* g = dy + y * wo * c;
      auto pixel = [&](Vec(&s)[kKernel][kVectors]) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
          const i64 n = std::clamp<i64>(channels - v * kLanes, 0, kLanes);
          const Vec d = channels == kBlock ? load(g + v * kLanes) : load(g + v * kLanes, n);
#pragma GCC unroll 5
          for (int j = 0; j < kKernel; j++) s[j][v] += d * load(row + j * kBlock + v * kLanes);
        }
        row += kStride * kBlock;
        g += c;
      };
      i64 x = 0;
      for (; x + 2 <= wo; x += 2) pixel(sum[0]), pixel(sum[1]);
      if (x < wo) pixel(sum[0]);
    }
    for (int j = 0; j < kKernel; j++) {
      float part[kBlock];
      for (int v = 0; v < kVectors; v++) store(part + v * kLanes, sum[0][j][v] + sum[1][j][v]);
      for (i64 k = 0; k < channels; k++) dw[(i * kKernel + j) * c + k] += part[k];
    }
  }
}

static inline i64 buffer_floats(const Shape& s) {
  const i64 forward = ((s.ho - 1) * s.stride + s.kernel) * ((s.wo - 1) * s.stride + s.kernel);
  const i64 backward = (s.h + s.kernel) * (s.w + s.kernel);
  return std::max(forward, backward) * kBlock;
}

template <class F> static inline void for_window(const Shape& s, F f) {
  using std::integral_constant;
  if (s.kernel == 3 && s.stride == 1) return f(integral_constant<int, 3>(), integral_constant<int, 1>());
  if (s.kernel == 3) return f(integral_constant<int, 3>(), integral_constant<int, 2>());
  if (s.stride == 1) return f(integral_constant<int, 5>(), integral_constant<int, 1>());
  return f(integral_constant<int, 5>(), integral_constant<int, 2>());
}

static void copy_window(const float* w, const Shape& s, i64 c0, i64 channels, bool turned, float* out) {
  const i64 taps = s.kernel * s.kernel;
  memset(out, 0, taps * kBlock * sizeof(float));
  for (i64 k = 0; k < taps; k++)
    memcpy(out + k * kBlock, w + (turned ? taps - 1 - k : k) * s.c + c0, channels * sizeof(float));
}

// One block of channels of one image.
static void forward(const float* x, const float* w, float* y, const Shape& s, i64 c0) {
  const i64 channels = std::min(kBlock, s.c - c0), width = (s.wo - 1) * s.stride + s.kernel;
  float window[25 * kBlock], *padded = scratch(0, buffer_floats(s));
  copy_window(w, s, c0, channels, false, window);
  pad(x + c0, s.h, s.w, s.c, channels, s.top, s.left, (s.ho - 1) * s.stride + s.kernel, width, 1, padded);
  for_window(s, [&](auto k, auto t) {
    convolve<decltype(k)::value, decltype(t)::value>(padded, width, window, y + c0, s.ho, s.wo, s.c, channels);
  });
}

// The same block's gradients: dw += ..., and dx unless it is null.
static void backward(const float* x, const float* w, const float* dy, float* dx, float* dw, const Shape& s, i64 c0) {
  const i64 channels = std::min(kBlock, s.c - c0);
  float *padded = scratch(0, buffer_floats(s));
  if (dw) {
    const i64 width = (s.wo - 1) * s.stride + s.kernel;
    pad(x + c0, s.h, s.w, s.c, channels, s.top, s.left, (s.ho - 1) * s.stride + s.kernel, width, 1, padded);
    for_window(s, [&](auto k, auto t) {
      weight_gradient<decltype(k)::value, decltype(t)::value>(padded, width, dy + c0, dw + c0, s.ho, s.wo, s.c, channels);
    });
  }
  if (!dx) return;
  float window[25 * kBlock];
  const i64 around = s.kernel - 1, width = s.w + around;
  copy_window(w, s, c0, channels, true, window);
  pad(dy + c0, s.ho, s.wo, s.c, channels, around - s.top, around - s.left, s.h + around, width, s.stride, padded);
  if (s.kernel == 3) convolve<3, 1>(padded, width, window, dx + c0, s.h, s.w, s.c, channels);
  else convolve<5, 1>(padded, width, window, dx + c0, s.h, s.w, s.c, channels);
}

}  // namespace headrace::depthwise
