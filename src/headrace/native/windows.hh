// The windows of convolutions in memory, with zeros around the images, and the gradient of the images as convolutions.
#pragma once
#include <vector>

#include "products.hh"
#include "tasks.hh"

namespace headrace {

// Copy images, or a band of one, with zeros around: [images][height][width][c], starting `top` rows and `left` columns
// before their first pixel (negative: after it).
static void pad_images(const float* x, i64 images, i64 h, i64 w, i64 c, i64 top, i64 left, i64 height, i64 width, float* out) {
  const i64 x0 = std::max<i64>(0, -left), x1 = std::min(w, width - left);
  for (i64 n = 0; n < images; n++)
    for (i64 y = 0; y < height; y++, out += width * c) {
      const i64 from = y - top;
      if (from < 0 || from >= h || x1 <= x0) {
        memset(out, 0, width * c * sizeof(float));
        continue;
      }
      memset(out, 0, (x0 + left) * c * sizeof(float));
      memcpy(out + (x0 + left) * c, x + ((n * h + from) * w + x0) * c, (x1 - x0) * c * sizeof(float));
      memset(out + (x1 + left) * c, 0, (width - x1 - left) * c * sizeof(float));
    }
}

struct View {
  const float* data;
  Pixels pixels;  // the first pixel of each window
  i64 pitch;      // floats between rows of the image
};

// The windows of `images` images, `rows` output rows each, that begin at `data` and have their padding.
static View windows_at(const float* data, const Geometry& g, i64 images, i64 rows) {
  const i64 height = (rows - 1) * g.stride + g.kh, pitch = g.window_columns() * g.c;
  return {data, {images, rows, g.wo, height * pitch, g.stride * pitch, g.stride * g.c}, pitch};
}

// The windows of `images` images from x on, or of the output rows row0 .. row1 of one image; in a padded copy where needed.
static View windows(const float* x, const Geometry& g, i64 images, i64 row0, i64 row1, float* copy = nullptr) {
  const i64 rows = row1 - row0;
  if (g.is_pointwise() && g.h == 1) return {x, {1, 1, images, 0, 0, g.c}, g.c};
  if (g.fits_unpadded()) {
    const i64 pitch = g.w * g.c;
    return {x + row0 * g.stride * pitch, {images, rows, g.wo, g.in(), g.stride * pitch, g.stride * g.c}, pitch};
  }
  const i64 height = (rows - 1) * g.stride + g.kh, width = g.window_columns();
  if (!copy) copy = scratch(4, images * height * width * g.c);
  pad_images(x, images, g.h, g.w, g.c, g.top - row0 * g.stride, g.left, height, width, copy);
  return windows_at(copy, g, images, rows);
}

static Pixels outputs(const Geometry& g, i64 images, i64 rows) {
  if (g.is_pointwise() && g.h == 1) return {1, 1, images, 0, 0, g.o};
  return {images, rows, g.wo, g.out(), g.wo * g.o, g.o};
}

// ---- the gradient of the images, in phases

struct ImageGradient {
  Geometry g;
  std::vector<Phase> rows, columns;
  std::vector<i64> offsets;  // of each phase's packed weights
  i64 top = 0, left = 0, height = 0, width = 0, floats = 0;
  bool has_gaps = false;

  explicit ImageGradient(const Geometry& geometry) : g(geometry) {
    rows = phases_of(g.h, g.kh, g.stride, g.top);
    columns = phases_of(g.w, g.kw, g.stride, g.left);
    auto extent = [](const std::vector<Phase>& phases, i64& before, i64& size) {
      for (const Phase& p : phases)
        if (p.taps) before = std::max(before, -p.start);
      for (const Phase& p : phases)
        if (p.taps) size = std::max(size, before + p.start + p.count - 1 + p.taps);
    };
    extent(rows, top, height);
    extent(columns, left, width);
    for (const Phase& y : rows)
      for (const Phase& x : columns) {
        offsets.push_back(floats);
        has_gaps |= !y.taps || !x.taps;
        floats += y.taps * x.taps * g.o * panels_of(g.c) * kPanel;
      }
  }

  // The weights of each phase, [tap][o][c] with the taps reversed, as one panel of input channels.
  void pack(const float* w, float* out, i64 panel) const {
    size_t phase = 0;
    const i64 c0 = panel * kPanel, width = panel_width(g.c, panel);
    for (const Phase& y : rows)
      for (const Phase& x : columns) {
        const i64 depth = y.taps * x.taps * g.o;
        float* to = out + offsets[phase++] + panel * depth * kPanel;
        for (i64 i = y.taps - 1; i >= 0; i--)
          for (i64 j = x.taps - 1; j >= 0; j--) {
            const i64 tap = (y.tap + i * g.stride) * g.kw + x.tap + j * g.stride;
            const float* from = w + (tap * g.c + c0) * g.o;
            i64 o = 0;
            if (width == kPanel)
              for (; o + kLanes <= g.o; o += kLanes)
                for (i64 k = 0; k < kPanel; k += kLanes)
                  transpose(from + k * g.o + o, g.o, to + o * kPanel + k, kPanel);
            for (; o < g.o; o++)
              for (i64 k = 0; k < kPanel; k++) to[o * kPanel + k] = k < width ? from[k * g.o + o] : 0.f;
            to += g.o * kPanel;
          }
      }
  }

  void apply(const float* dz, i64 images, const float* packed, float* dx) const {
    if (g.is_pointwise() && g.h == 1)
      return convolve(dz, {1, 1, images, 0, 0, g.o}, 1, g.o, 0, packed, dx, {1, 1, images, 0, 0, g.c}, g.c,
                      {0, panels_of(g.c)});
    const bool copies = top || left || height > g.ho || width > g.wo;
    const i64 pitch = (copies ? width : g.wo) * g.o, image = copies ? height * pitch : g.out();
    const float* from = dz;
    if (copies) {
      float* padded = scratch(4, images * image);
      pad_images(dz, images, g.ho, g.wo, g.o, top, left, height, width, padded);
      from = padded;
    }
    if (has_gaps) memset(dx, 0, images * g.in() * sizeof(float));
    size_t phase = 0;
    for (const Phase& y : rows)
      for (const Phase& x : columns) {
        const float* weights = packed + offsets[phase++];
        if (!y.taps || !x.taps) continue;
        const float* first = from + (top + y.start) * pitch + (left + x.start) * g.o;
        const Pixels to = {images, y.count, x.count, g.in(), g.stride * g.w * g.c, g.stride * g.c};
        convolve(first, {images, y.count, x.count, image, pitch, g.o}, y.taps, x.taps * g.o, pitch, weights,
                 dx + (y.first * g.w + x.first) * g.c, to, g.c, {0, panels_of(g.c)});
      }
  }
};

}  // namespace headrace
