// Grouped convolutions as products: some groups that fill a vector, or one large group, are a block of channels with
// weights of its own, zero between different groups. Blocks are copied out of the images one by one, with zeros around them.
#pragma once
#include <vector>

#include "inference.hh"
#include "windows.hh"

namespace headrace::grouped {

struct Blocks {
  Geometry g;  // of all channels
  i64 size;    // channels of a block
  explicit Blocks(const Geometry& geometry) : g(geometry), size(g.group) {
    const i64 groups = g.c / g.group;
    for (i64 together = 2; together * g.group <= kLanes; together++)
      if (groups % together == 0) size = together * g.group;
  }

  i64 count() const { return g.c / size; }
  i64 depth() const { return g.kh * g.kw * size; }
  i64 weights() const { return depth() * size; }  // of a block, as a matrix [tap][input][output]
  i64 packed() const { return panels_of(size) * depth() * kPanel; }
  Geometry block() const {
    Geometry b = g;
    b.c = b.o = b.group = size;
    return b;
  }

  // f(number in `from` or `to`, its number in the matrix of a block): all weights of one block
  template <class F> void each_weight(i64 block, const F& f) const {
    for (i64 tap = 0; tap < g.kh * g.kw; tap++)
      for (i64 k = 0; k < g.group; k++)
        for (i64 o = 0; o < size; o++)
          f((tap * g.group + k) * g.o + block * size + o, (tap * size + o / g.group * g.group + k) * size + o);
  }
  void matrix(const float* w, i64 block, float* out) const {
    memset(out, 0, weights() * sizeof(float));
    each_weight(block, [&](i64 at, i64 to) { out[to] = w[at]; });
  }
  void pack(const float* w, i64 block, float* out) const {
    float* dense = scratch(0, weights());
    matrix(w, block, dense);
    pack_panels(dense, depth(), size, out + block * packed(), 0, panels_of(size));
  }
};

// Channels of pixels that are `from_step` and `to_step` floats apart
static inline void copy_pixels(const float* from, i64 from_step, float* to, i64 to_step, i64 pixels, i64 channels) {
  if (channels % kLanes) {
    for (i64 p = 0; p < pixels; p++) memcpy(to + p * to_step, from + p * from_step, channels * sizeof(float));
    return;
  }
  for (i64 p = 0; p < pixels; p++)
    for (i64 k = 0; k < channels; k += kLanes) store(to + p * to_step + k, load(from + p * from_step + k));
}

// The windows of some output rows of one image, with the channels of one block.
static View windows_of(const float* x, const Blocks& b, i64 block, Range rows) {
  const Geometry& g = b.g;
  const i64 height = (rows.last - rows.first - 1) * g.stride + g.kh, width = g.window_columns(), size = b.size;
  float *copy = scratch(4, height * width * size), *to = copy;
  const i64 pixels = std::max<i64>(0, std::min(g.w, width - g.left)), right = width - g.left - pixels;
  for (i64 i = 0; i < height; i++, to += width * size) {
    const i64 y = rows.first * g.stride - g.top + i;
    if (y < 0 || y >= g.h) {
      memset(to, 0, width * size * sizeof(float));
      continue;
    }
    memset(to, 0, g.left * size * sizeof(float));
    copy_pixels(x + y * g.w * g.c + block * size, g.c, to + g.left * size, size, pixels, size);
    memset(to + (g.left + pixels) * size, 0, right * size * sizeof(float));
  }
  return windows_at(copy, b.block(), 1, rows.last - rows.first);
}

// Some output rows and blocks of one image; y is the image's.
static void forward(const float* x, const float* packed, float* y, const Blocks& b, Range rows, Range blocks,
                    const Finish* finish) {
  const Geometry& g = b.g;
  const Pixels out = {1, rows.last - rows.first, g.wo, 0, g.wo * g.o, g.o};
  for (i64 block = blocks.first; block < blocks.last; block++) {
    const View v = windows_of(x, b, block, rows);
    const float* w = packed + block * b.packed();
    float* to = y + rows.first * g.wo * g.o + block * b.size;
    const Range panels = {0, panels_of(b.size)};
    if (finish) {
      Finish part = *finish;
      part.shift += block * b.size;
      inference::convolve(v.data, v.pixels, g.kh, g.kw * b.size, v.pitch, w, to, out, b.size, panels, part);
    } else {
      convolve(v.data, v.pixels, g.kh, g.kw * b.size, v.pitch, w, to, out, b.size, panels);
    }
  }
}

// The gradients of one image: dw [block][tap][input][output] += ..., and dx unless it is null. `packed` are the weights
// as `gradient` reads them, one block after the other.
static void backward(const float* x, const float* dz, const float* packed, float* dx, float* dw, const Blocks& b,
                     const ImageGradient& gradient) {
  const Geometry& g = b.g;
  const i64 pixels = g.ho * g.wo, size = b.size, taps = g.kw * size, panels = panels_of(size);
  for (i64 block = 0; block < b.count(); block++) {
    float* mine = scratch(0, pixels * size);
    copy_pixels(dz + block * size, g.o, mine, size, pixels, size);
    if (dw) {
      float* dz_panels = scratch(2, pixels * panels * kPanel);
      pack_panels(mine, pixels, size, dz_panels, 0, panels);
      const View v = windows_of(x, b, block, {0, g.ho});
      float* sum = dw + block * b.weights();
      for (i64 i = 0; i < g.kh; i++)
        weight_gradient(v.data + i * v.pitch, v.pixels, taps, {0, taps}, dz_panels, pixels * kPanel, {0, panels},
                        sum + i * taps * size, size);
    }
    if (dx) {
      float* found = scratch(2, g.h * g.w * size);
      gradient.apply(mine, 1, packed + block * gradient.floats, found);
      copy_pixels(found, size, dx + block * size, g.c, g.h * g.w, size);
    }
  }
}

}  // namespace headrace::grouped
