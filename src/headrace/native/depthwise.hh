// Depthwise convolution of one image, 3x3 or 5x5, stride 1 or 2: 16 channels at a time; forward in place, gradients from a
// padded copy in which a pixel is one cache line.
#pragma once
#include "vectors.hh"

namespace headrace::depthwise {

constexpr i64 kBlock = 16;
constexpr int kVectors = kBlock / kLanes, kPixels = kVectors == 1 ? 8 : 4;  // enough sums at once to hide their latency

struct Shape {
  i64 h, w, c, kernel, stride, top, left, ho, wo;
};

// Copy `channels` of an image into [height][width][kBlock] with zeros around; `spread` puts pixels that far apart.
template <class T>
static void pad(const T* x, i64 h, i64 w, i64 c, i64 channels, i64 top, i64 left, i64 height, i64 width, i64 spread,
                float* out) {
  memset(out, 0, height * width * kBlock * sizeof(float));
  for (i64 i = 0; i < h; i++) {
    const i64 y = top + i * spread;
    if (y < 0 || y >= height) continue;
    for (i64 j = 0; j < w; j++) {
      const i64 at = left + j * spread;
      if (at < 0 || at >= width) continue;
      float* to = out + (y * width + at) * kBlock;
      const T* from = x + (i * w + j) * c;
      if (channels == kBlock)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) store(to + v * kLanes, load(from + v * kLanes));
      else copy_values(from, channels, to);
    }
  }
}

template <int kKernel, int kStride, int kCount, class T>
static inline void window_sums(const float* pixels, i64 width, const float* w, T* out, i64 c, i64 channels) {
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
    for (int p = 0; p < kCount; p++) copy_values((const float*)sum[p], channels, out + p * c);
  }
}

template <int kKernel, int kStride, class T>
static void convolve(const float* padded, i64 width, const float* w, T* out, i64 ho, i64 wo, i64 c, i64 channels) {
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

// ---- forward, read in place

// kCount neighbours in a row, one vector of each, the window's rows i0 .. i1: put(pixel, sum). The weights are [tap][kChannels].
template <int kKernel, int kStride, int kCount, i64 kChannels, class T, class Put>
static inline void sums_in_place(const T* x, i64 row_step, i64 c, const float* w, i64 i0, i64 i1, Put put) {
  Vec sum[kCount] = {};
  for (i64 i = i0; i < i1; i++) {
    const T* row = x + i * row_step;
    const float* weights = w + i * kKernel * kChannels;
    // Pixels that several windows share are loaded once: those of 72 channels, say, often cross a cache line.
    constexpr int kShared = kStride == 1 ? kCount + kKernel - 1 : 0;
    Vec shared[kShared + 1];
#pragma GCC unroll 16
    for (int k = 0; k < kShared; k++) shared[k] = load(row + k * c);
#pragma GCC unroll 5
    for (int j = 0; j < kKernel; j++) {
      const Vec weight = load(weights + j * kChannels);
#pragma GCC unroll 8
      for (int p = 0; p < kCount; p++) sum[p] += weight * (kShared ? shared[p + j] : load(row + (p * kStride + j) * c));
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < kCount; p++) put(p, sum[p]);
}

// A pixel at the edge, whose window has the columns j0 .. j1 only.
template <int kKernel, class T>
static inline Vec sum_at_edge(const T* x, i64 row_step, i64 c, const float* w, i64 i0, i64 i1, i64 j0, i64 j1) {
  Vec sum = {};
  for (i64 i = i0; i < i1; i++)
    for (i64 j = j0; j < j1; j++) sum += load(w + (i * kKernel + j) * kBlock) * load(x + i * row_step + j * c);
  return sum;
}

// The output rows y0 .. y1 of one image and a whole block of channels.
template <int kKernel, int kStride, class T, class Put>
static void rows_in_place(const T* x, const float* window, const Shape& s, i64 y0, i64 y1, Put put) {
  const i64 row_step = s.w * s.c;
  // Windows from `first` to `last` lie within the image's columns.
  const i64 first = std::min(s.wo, (s.left + kStride - 1) / kStride);
  const i64 last = std::clamp<i64>((s.w - kKernel + s.left + kStride) / kStride, first, s.wo);
  for (i64 y = y0; y < y1; y++) {
    const i64 top = y * kStride - s.top, i0 = std::max<i64>(0, -top), i1 = std::min<i64>(kKernel, s.h - top);
    auto at = [&](i64 column) { return x + top * row_step + (column * kStride - s.left) * s.c; };
    // Each of these is inlined for every window, activation and type: at one place, and for one vector, it compiles in a
    // third of the time.
    auto inside = [&](auto count, i64 column) {
#pragma GCC unroll 1
      for (int v = 0; v < kVectors; v++)
        sums_in_place<kKernel, kStride, decltype(count)::value, kBlock>(
            at(column) + v * kLanes, row_step, s.c, window + v * kLanes, i0, i1,
            [&](int p, Vec sum) { put(y, column + p, v, sum); });
    };
    auto edge = [&](i64 column) {
      const i64 begin = column * kStride - s.left, j0 = std::max<i64>(0, -begin), j1 = std::min<i64>(kKernel, s.w - begin);
#pragma GCC unroll 1
      for (int v = 0; v < kVectors; v++)
        put(y, column, v, sum_at_edge<kKernel>(at(column) + v * kLanes, row_step, s.c, window + v * kLanes, i0, i1, j0, j1));
    };
    for (i64 column = first ? 0 : last; column < s.wo; column = column + 1 == first ? last : column + 1) edge(column);
    i64 column = first;
    for (; column < last && last - first >= kPixels; column += kPixels)  // computed twice where the tiles meet
      inside(std::integral_constant<int, kPixels>(), std::min(column, last - kPixels));
    for (; column + 2 <= last; column += 2) inside(std::integral_constant<int, 2>(), column);
    for (; column < last; column++) inside(std::integral_constant<int, 1>(), column);
  }
}

static inline i64 blocks_of(i64 channels) { return (channels + kBlock - 1) / kBlock; }

// Some output rows and blocks of channels of one image; y is the image's.
template <class T>
static void forward(const T* x, const float* w, T* y, const Shape& s, Range rows, Range blocks, const FinishOf<T>* finish) {
  const i64 y0 = rows.first, y1 = rows.last;
  float window[25 * kBlock];
  const bool small = s.c < kBlock;
  const i64 width = (s.wo - 1) * s.stride + s.kernel, height = (y1 - y0 - 1) * s.stride + s.kernel;
  for (i64 block = blocks.first; block < blocks.last; block++) {
    const i64 c0 = small ? 0 : std::min(block * kBlock, s.c - kBlock);  // the last block may begin in the one before it
    if (small) {
      float* padded = scratch(0, height * width * kBlock);
      copy_window(w, s, 0, s.c, false, window);
      pad(x, s.h, s.w, s.c, s.c, s.top - y0 * s.stride, s.left, height, width, 1, padded);
      auto convolve_to = [&](auto* to) {
        for_window(s, [&](auto k, auto t) {
          convolve<decltype(k)::value, decltype(t)::value>(padded, width, window, to, y1 - y0, s.wo, s.c, s.c);
        });
      };
      T* to = y + y0 * s.wo * s.c;
      if (!finish) return convolve_to(to);
      float* sums = scratch(1, (y1 - y0) * s.wo * s.c);
      convolve_to(sums);
      return finish_rows(sums, s.c, to, s.c, (int)((y1 - y0) * s.wo), 0, s.c, *finish);
    }
    copy_window(w, s, c0, kBlock, false, window);
    for_window(s, [&](auto k, auto t) {
      const auto n = std::integral_constant<i64, kLanes>();
      auto place = [&](i64 row, i64 column, int v) { return y + (row * s.wo + column) * s.c + c0 + v * kLanes; };
      if (finish)
        return for_activation(finish->act, [&](auto a) {
          rows_in_place<decltype(k)::value, decltype(t)::value>(
              x + c0, window, s, y0, y1, [&](i64 row, i64 at, int v, Vec sum) {
                T* to = place(row, at, v);
                store(to, finish->template apply<decltype(a)::value>(sum, c0 + v * kLanes, to, n));
              });
        });
      rows_in_place<decltype(k)::value, decltype(t)::value>(
          x + c0, window, s, y0, y1, [&](i64 row, i64 at, int v, Vec sum) { store(place(row, at, v), sum); });
    });
  }
}

// The same block's gradients: dw += ..., and dx unless it is null.
template <class T>
static void backward(const T* x, const float* w, const float* dy, T* dx, float* dw, const Shape& s, i64 c0) {
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
