// Winograd's F(4x4, 3x3) for stride 1: 36 products for 16 outputs of a 3x3 window instead of 144. Forward, the images'
// gradient (the same with turned weights) and the weights' gradient. Channels must fill whole vectors.
#pragma once
#include "products.hh"

namespace headrace::winograd {

constexpr int kPoints = 36;

// Tiles of 4x4 outputs; `top` and `left` are the zeros around the images.
struct Tiles {
  i64 h, w, c, o, top, left, ho, wo, rows, columns;
  i64 per_image() const { return rows * columns; }
};
static inline Tiles tiles_of(i64 h, i64 w, i64 c, i64 o, i64 top, i64 left, i64 ho, i64 wo) {
  return {h, w, c, o, top, left, ho, wo, (ho + 3) / 4, (wo + 3) / 4};
}

// The one-dimensional transforms, from values `from` apart to values `to` apart: B^T d, A^T m and A y.
static inline void input_points(const Vec* d, Vec* out, int from, int to) {
  const Vec d0 = d[0], d1 = d[from], d2 = d[2 * from], d3 = d[3 * from], d4 = d[4 * from], d5 = d[5 * from];
  const Vec a = d4 - 4.f * d2, b = d3 - 4.f * d1, c = d4 - d2, e = 2.f * (d3 - d1);
  out[0] = 4.f * d0 - 5.f * d2 + d4;
  out[to] = a + b;
  out[2 * to] = a - b;
  out[3 * to] = c + e;
  out[4 * to] = c - e;
  out[5 * to] = 4.f * d1 - 5.f * d3 + d5;
}
static inline void output_values(const Vec* m, Vec* out, int from, int to) {
  const Vec m0 = m[0], m1 = m[from], m2 = m[2 * from], m3 = m[3 * from], m4 = m[4 * from], m5 = m[5 * from];
  const Vec p = m1 + m2, q = m1 - m2, r = m3 + m4, u = m3 - m4;
  out[0] = m0 + p + r;
  out[to] = q + 2.f * u;
  out[2 * to] = p + 4.f * r;
  out[3 * to] = q + 8.f * u + m5;
}
static inline void gradient_points(const Vec* y, Vec* out, int from, int to) {
  const Vec y0 = y[0], y1 = y[from], y2 = y[2 * from], y3 = y[3 * from];
  const Vec p = y0 + y2, q = y1 + y3, r = y0 + 4.f * y2, u = 2.f * y1 + 8.f * y3;
  out[0] = y0;
  out[to] = p + q;
  out[2 * to] = p - q;
  out[3 * to] = r + u;
  out[4 * to] = r - u;
  out[5 * to] = y3;
}
// The same of weights and of their gradient: G g and G^T u.
static inline void weight_points(const Vec* g, Vec* out, int from, int to) {
  const Vec g0 = g[0], g1 = g[from], g2 = g[2 * from];
  const Vec a = (-1 / 6.f) * (g0 + g2), b = (1 / 6.f) * g1, c = (1 / 24.f) * g0 + (1 / 6.f) * g2, e = (1 / 12.f) * g1;
  out[0] = .25f * g0;
  out[to] = a - b;
  out[2 * to] = a + b;
  out[3 * to] = c + e;
  out[4 * to] = c - e;
  out[5 * to] = g2;
}
static inline void weight_values(const Vec* u, Vec* out, int from, int to) {
  const Vec u0 = u[0], u1 = u[from], u2 = u[2 * from], u3 = u[3 * from], u4 = u[4 * from], u5 = u[5 * from];
  const Vec a = (1 / 6.f) * (u1 + u2), b = u1 - u2, c = u3 + u4, e = u3 - u4;
  out[0] = .25f * u0 - a + (1 / 24.f) * c;
  out[to] = (1 / 12.f) * e - (1 / 6.f) * b;
  out[2 * to] = (1 / 6.f) * c - a + u5;
}

static inline i64 weight_floats(i64 c, i64 o) { return kPoints * panels_of(o) * c * kPanel; }

// G w G^T of a range of channels and the outputs o .. o + kLanes: out [point][channel][kPanel], the points `point` apart.
// Turned: w is [3][3][o][c], rotated by 180 degrees.
template <class T>
static void weight_points(const T* w, i64 c_size, i64 o_size, bool turned, i64 o, Range channels, float* out, i64 point) {
  float turn[9][kLanes * kLanes];
  for (i64 c = channels.first; c < channels.last; c++) {
    Vec g[9], t[18];
    if (turned && c % kLanes == 0)
      for (i64 i = 0; i < 9; i++) transpose(w + ((8 - i) * o_size + o) * c_size + c, c_size, turn[i], kLanes);
    for (i64 i = 0; i < 9; i++)
      g[i] = turned ? load(turn[i] + c % kLanes * kLanes) : load(w + (i * c_size + c) * o_size + o);
#pragma GCC unroll 3
    for (int j = 0; j < 3; j++) weight_points(g + j, t + j, 3, 3);
    float* to = out + (c - channels.first) * kPanel;
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++) {
      Vec row[6];
      weight_points(t + i * 3, row, 1, 1);
#pragma GCC unroll 6
      for (int j = 0; j < 6; j++) store(to + (i * 6 + j) * point, row[j]);
    }
  }
}

// dw [3][3][c][o] = G^T du G for some channels and outputs of du [point][channel][output], which are so far apart
template <class T>
static void weight_values(const float* du, i64 point, i64 channel, T* dw, i64 c_size, i64 o_size, Range channels, Range outputs) {
  for (i64 c = channels.first; c < channels.last; c++)
    for (i64 o = outputs.first; o < outputs.last; o += kLanes) {
      const float* from = du + (c - channels.first) * channel + o - outputs.first;
      Vec t[18];
#pragma GCC unroll 6
      for (int j = 0; j < 6; j++) {
        Vec u[6];
#pragma GCC unroll 6
        for (int i = 0; i < 6; i++) u[i] = load(from + (i * 6 + j) * point);
        weight_values(u, t + j, 1, 6);
      }
#pragma GCC unroll 3
      for (int i = 0; i < 3; i++) {
        Vec row[3];
        weight_values(t + i * 6, row, 1, 1);
#pragma GCC unroll 3
        for (int j = 0; j < 3; j++) store(dw + ((i * 3 + j) * c_size + c) * o_size + o, row[j]);
      }
    }
}

struct Place {
  i64 image, y, x;
};
static inline Place place_of(const Tiles& g, i64 tile) {
  const i64 in_image = tile % g.per_image();
  return {tile / g.per_image(), in_image / g.columns * 4, in_image % g.columns * 4};
}

template <class T>
static void transform_input(const T* images, const Tiles& g, i64 tile, Range channels, float* out, i64 point) {
  const Place at = place_of(g, tile);
  const i64 y0 = at.y - g.top, x0 = at.x - g.left;
  const T* first = images + ((at.image * g.h + y0) * g.w + x0) * g.c;
  const bool inside = y0 >= 0 && x0 >= 0 && y0 + 6 <= g.h && x0 + 6 <= g.w;
  // The rows and columns of the tile that are in the image; zeros around them.
  const i64 i0 = std::max<i64>(0, -y0), i1 = std::min<i64>(6, g.h - y0), j0 = std::max<i64>(0, -x0);
  const i64 j1 = std::min<i64>(6, g.w - x0);
  for (i64 c = channels.first; c < channels.last; c += kLanes) {
    Vec d[kPoints] = {}, t[kPoints];
    if (inside)
#pragma GCC unroll 36
      for (i64 k = 0; k < kPoints; k++) d[k] = load(first + (k / 6 * g.w + k % 6) * g.c + c);
    else
      for (i64 i = i0; i < i1; i++)
        for (i64 j = j0; j < j1; j++) d[i * 6 + j] = load(first + (i * g.w + j) * g.c + c);
#pragma GCC unroll 6
    for (int j = 0; j < 6; j++) input_points(d + j, t + j, 6, 6);
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++) {
      Vec row[6];
      input_points(t + i * 6, row, 1, 1);
#pragma GCC unroll 6
      for (int j = 0; j < 6; j++) store(out + (i * 6 + j) * point + c - channels.first, row[j]);
    }
  }
}

template <class T>
static void transform_output(const float* products, i64 point, T* images, const Tiles& g, i64 tile, Range outputs,
                             const FinishOf<T>* finish = nullptr) {
  const Place at = place_of(g, tile);
  T* first = images + ((at.image * g.ho + at.y) * g.wo + at.x) * g.o;
  const i64 rows = std::min<i64>(4, g.ho - at.y), columns = std::min<i64>(4, g.wo - at.x);
  for (i64 o = outputs.first; o < outputs.last; o += kLanes) {
    Vec t[24], y[16];
#pragma GCC unroll 6
    for (int j = 0; j < 6; j++) {
      Vec m[6];
#pragma GCC unroll 6
      for (int i = 0; i < 6; i++) m[i] = load(products + (i * 6 + j) * point + o - outputs.first);
      output_values(m, t + j, 1, 6);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) output_values(t + i * 6, y + i * 4, 1, 1);
    auto each_value = [&](auto f) {
      for (i64 i = 0; i < rows; i++)
        for (i64 j = 0; j < columns; j++) {
          T* to = first + (i * g.wo + j) * g.o + o;
          store(to, f(y[i * 4 + j], to));
        }
    };
    if (!finish)
      each_value([](Vec v, const T*) { return v; });
    else
      for_activation(finish->act, [&](auto a) {
        const auto n = std::integral_constant<i64, kLanes>();
        each_value([&](Vec v, const T* to) { return finish->template apply<decltype(a)::value>(v, o, to, n); });
      });
  }
}

// A dy A^T, packed [point][panel][tile][kPanel]
static void transform_gradient(const float* images, const Tiles& g, i64 tile, float* out, i64 panel, i64 point) {
  const Place at = place_of(g, tile);
  const float* first = images + ((at.image * g.ho + at.y) * g.wo + at.x) * g.o;
  const i64 rows = std::min<i64>(4, g.ho - at.y), columns = std::min<i64>(4, g.wo - at.x);
  for (i64 o = 0; o < g.o; o += kLanes) {
    Vec d[16], t[24];
    for (i64 i = 0; i < 4; i++)
      for (i64 j = 0; j < 4; j++)
        d[i * 4 + j] = i < rows && j < columns ? load(first + (i * g.wo + j) * g.o + o) : Vec{};
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) gradient_points(d + j, t + j, 4, 4);
    float* to = out + o / kPanel * panel + o % kPanel;
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++) {
      Vec row[6];
      gradient_points(t + i * 4, row, 1, 1);
#pragma GCC unroll 6
      for (int j = 0; j < 6; j++) store(to + (i * 6 + j) * point, row[j]);
    }
  }
}

// Tiles of one block: what a block stores should stay in the L2 cache.
static inline i64 block_tiles(i64 c, i64 o) {
  const i64 bytes = (c + o <= 64 ? 320 : 1280) * 1024, tiles = bytes / (kPoints * 4 * (c + o));
  return std::clamp<i64>(tiles / kMaxRows * kMaxRows, 2 * kMaxRows, 8 * kMaxRows);
}
static inline i64 buffer_floats(i64 c, i64 o) {
  const i64 outputs = panels_of(o) * kPanel;
  return kPoints * (odd_lines(block_tiles(c, o) * c) + odd_lines(block_tiles(c, o) * outputs));
}

// m [tile][o] = v [tile][c] * the packed weights of one point
static void point_product(const float* v, i64 tiles, const float* weights, float* m, const Tiles& g) {
  for (i64 k0 = 0; k0 < g.c; k0 += kDepth)
    for (i64 panel = 0; panel < panels_of(g.o); panel++)
      product_run(v + k0, g.c, tiles, 1, 0, std::min<i64>(kDepth, g.c - k0), weights + (panel * g.c + k0) * kPanel,
                  m + panel * kPanel, g.o, panel_width(g.o, panel), k0 > 0);
}

// The tiles first .. last of the images: y = convolution of x, with the packed points of the weights
template <class X, class Y>
static void convolve(const X* x, Y* y, const float* weights, const Tiles& g, i64 first, i64 last,
                     const FinishOf<Y>* finish = nullptr) {
  const i64 block = block_tiles(g.c, g.o), panels = panels_of(g.o);
  const i64 v_step = odd_lines(block * g.c), m_step = odd_lines(block * g.o);
  float* v = scratch(0, buffer_floats(g.c, g.o));
  float* m = v + kPoints * v_step;
  for (i64 t0 = first; t0 < last; t0 += block) {
    const i64 tiles = std::min(block, last - t0);
    for (i64 t = 0; t < tiles; t++) transform_input(x, g, t0 + t, {0, g.c}, v + t * g.c, v_step);
    for (i64 p = 0; p < kPoints; p++)
      point_product(v + p * v_step, tiles, weights + p * panels * g.c * kPanel, m + p * m_step, g);
    for (i64 t = 0; t < tiles; t++) transform_output(m + t * g.o, m_step, y, g, t0 + t, {0, g.o}, finish);
  }
}

// du [point][c][o] += the gradient of the weights' points, from the tiles first .. last
template <class T>
static void weight_gradient(const T* x, const float* dy, float* du, const Tiles& g, i64 first, i64 last) {
  const i64 block = block_tiles(g.c, g.o), panels = panels_of(g.o);
  const i64 v_step = odd_lines(block * g.c), d_step = odd_lines(panels * block * kPanel);
  float* v = scratch(0, buffer_floats(g.c, g.o));
  float* d = v + kPoints * v_step;
  for (i64 t0 = first; t0 < last; t0 += block) {
    const i64 tiles = std::min(block, last - t0);
    for (i64 t = 0; t < tiles; t++) {
      transform_input(x, g, t0 + t, {0, g.c}, v + t * g.c, v_step);
      transform_gradient(dy, g, t0 + t, d + t * kPanel, block * kPanel, d_step);
    }
    for (i64 p = 0; p < kPoints; p++)
      headrace::weight_gradient(v + p * v_step, {1, 1, tiles, 0, 0, g.c}, g.c, {0, g.c}, d + p * d_step, block * kPanel,
                                {0, panels}, du + p * g.c * g.o, g.o);
  }
}

// Few tiles of many weights, whose points would take longer to write and read than to multiply: the points of some channels
// and one panel of outputs are computed, used and forgotten while they are in the L2 cache. The tiles' points are
// v [block of channels][point][tile][kChannels], those of the gradient d [panel][point][tile][kPanel].
constexpr i64 kChannels = 128;
constexpr i64 kWeightStep = odd_lines(kChannels * kPanel);
static inline i64 blocks_of(i64 channels) { return (channels + kChannels - 1) / kChannels; }
static inline Range block_channels(const Tiles& g, i64 block) {
  return {block * kChannels, std::min(g.c, (block + 1) * kChannels)};
}

template <class X> static void transform_blocks(const X* x, const Tiles& g, i64 tile, i64 tiles, float* v) {
  const i64 step = odd_lines(tiles * kChannels);
  for (i64 b = 0; b < blocks_of(g.c); b++)
    transform_input(x, g, tile, block_channels(g, b), v + b * kPoints * step + tile * kChannels, step);
}

// y = convolution of all tiles, for one panel of outputs
template <class W, class Y>
static void convolve_panel(const float* v, i64 tiles, const W* w, bool turned, Y* y, const Tiles& g, i64 panel,
                           const FinishOf<Y>* finish) {
  const i64 v_step = odd_lines(tiles * kChannels), m_step = odd_lines(tiles * kPanel);
  float *u = scratch(0, kPoints * kWeightStep), *m = scratch(1, kPoints * m_step);
  const i64 width = panel_width(g.o, panel), o = panel * kPanel;
  for (i64 b = 0; b < blocks_of(g.c); b++) {
    const Range channels = block_channels(g, b);
    for (i64 k = 0; k < width; k += kLanes) weight_points(w, g.c, g.o, turned, o + k, channels, u + k, kWeightStep);
    for (i64 p = 0; p < kPoints; p++, v += v_step) {
      fetch(v + v_step, tiles * kChannels);
      product_run(v, kChannels, tiles, 1, 0, channels.last - channels.first, u + p * kWeightStep, m + p * m_step, kPanel, width,
                  b > 0);
    }
  }
  for (i64 t = 0; t < tiles; t++) transform_output(m + t * kPanel, m_step, y, g, t, {o, o + width}, finish);
}

// The weights' gradient of one block of channels and one panel of outputs
template <class W>
static void gradient_panel(const float* v, const float* d, i64 tiles, W* dw, const Tiles& g, i64 block, i64 panel) {
  using Rows = std::make_integer_sequence<int, kMaxRows>;
  const i64 v_step = odd_lines(tiles * kChannels), d_step = odd_lines(tiles * kPanel);
  float* du = scratch(0, kPoints * kWeightStep);
  const Range channels = block_channels(g, block);
  const i64 size = channels.last - channels.first, parts = (size + kMaxRows - 1) / kMaxRows;
  const i64 width = panel_width(g.o, panel), o = panel * kPanel;
  v += block * kPoints * v_step, d += panel * kPoints * d_step;
  for (i64 p = 0; p < kPoints; p++, v += v_step, d += d_step) {
    fetch(v + v_step, tiles * kChannels);
    for (i64 i = 0; i < parts; i++) {
      const Range rows = range_of(size, i, parts);
      const auto tile = gradient_fn<kChannels>((int)(rows.last - rows.first), width, Rows());
      tile(v + rows.first, tiles, d, du + p * kWeightStep + rows.first * kPanel, kPanel, false);
    }
  }
  weight_values(du, kWeightStep, kPanel, dw, g.c, g.o, channels, {o, o + width});
}

}  // namespace headrace::winograd
