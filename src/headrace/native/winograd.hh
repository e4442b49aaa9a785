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
constexpr float kG[6][3] = {{.25f, 0, 0}, {-1 / 6.f, -1 / 6.f, -1 / 6.f}, {-1 / 6.f, 1 / 6.f, -1 / 6.f},
                            {1 / 24.f, 1 / 12.f, 1 / 6.f}, {1 / 24.f, -1 / 12.f, 1 / 6.f}, {0, 0, 1}};

static inline i64 weight_floats(i64 c, i64 o) { return kPoints * panels_of(o) * c * kPanel; }

// G w G^T of the outputs o .. o + kLanes, packed [point][panel][c][kPanel]. Turned: w is [3][3][o][c], rotated by 180 degrees.
template <class T>
static void weight_points(const T* w, float* out, i64 c_size, i64 o_size, bool turned, i64 o) {
  const i64 point = panels_of(o_size) * c_size * kPanel;
  float turn[9][kLanes * kLanes];
  for (i64 c = 0; c < c_size; c++) {
    Vec g[9], t[18];
    if (turned && c % kLanes == 0)
      for (i64 i = 0; i < 9; i++) transpose(w + ((8 - i) * o_size + o) * c_size + c, c_size, turn[i], kLanes);
    for (i64 i = 0; i < 9; i++)
      g[i] = turned ? load(turn[i] + c % kLanes * kLanes) : load(w + (i * c_size + c) * o_size + o);
    for (int j = 0; j < 3; j++)
      for (int i = 0; i < 6; i++) t[i * 3 + j] = kG[i][0] * g[j] + kG[i][1] * g[3 + j] + kG[i][2] * g[6 + j];
    float* to = out + (o / kPanel * c_size + c) * kPanel + o % kPanel;
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++)
#pragma GCC unroll 6
      for (int j = 0; j < 6; j++)
        store(to + (i * 6 + j) * point, kG[j][0] * t[i * 3] + kG[j][1] * t[i * 3 + 1] + kG[j][2] * t[i * 3 + 2]);
  }
}

// dw [3][3][c][o] = G^T du G for the channels first .. last of du [point][c][o]
template <class T>
static void weight_values(const float* du, T* dw, i64 c_size, i64 o_size, i64 first, i64 last) {
  for (i64 c = first; c < last; c++)
    for (i64 o = 0; o < o_size; o += kLanes) {
      Vec t[18];
      for (int j = 0; j < 6; j++) {
        Vec s[3] = {};
        for (int i = 0; i < 6; i++) {
          const Vec u = load(du + ((i * 6 + j) * c_size + c) * o_size + o);
          for (int k = 0; k < 3; k++) s[k] += kG[i][k] * u;
        }
        for (int k = 0; k < 3; k++) t[k * 6 + j] = s[k];
      }
      for (int i = 0; i < 3; i++)
        for (int j = 0; j < 3; j++) {
          Vec s = {};
          for (int k = 0; k < 6; k++) s += kG[k][j] * t[i * 6 + k];
          store(dw + ((i * 3 + j) * c_size + c) * o_size + o, s);
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

template <class T> static void transform_input(const T* images, const Tiles& g, i64 tile, float* out, i64 point) {
  const Place at = place_of(g, tile);
  const i64 y0 = at.y - g.top, x0 = at.x - g.left;
  const T* first = images + ((at.image * g.h + y0) * g.w + x0) * g.c;
  const bool inside = y0 >= 0 && x0 >= 0 && y0 + 6 <= g.h && x0 + 6 <= g.w;
  // The rows and columns of the tile that are in the image; zeros around them.
  const i64 i0 = std::max<i64>(0, -y0), i1 = std::min<i64>(6, g.h - y0), j0 = std::max<i64>(0, -x0);
  const i64 j1 = std::min<i64>(6, g.w - x0);
  for (i64 c = 0; c < g.c; c += kLanes) {
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
      for (int j = 0; j < 6; j++) store(out + (i * 6 + j) * point + c, row[j]);
    }
  }
}

template <class T>
static void transform_output(const float* products, i64 point, T* images, const Tiles& g, i64 tile,
                             const Finish* finish = nullptr) {
  const Place at = place_of(g, tile);
  T* first = images + ((at.image * g.ho + at.y) * g.wo + at.x) * g.o;
  const i64 rows = std::min<i64>(4, g.ho - at.y), columns = std::min<i64>(4, g.wo - at.x);
  for (i64 o = 0; o < g.o; o += kLanes) {
    Vec t[24], y[16];
#pragma GCC unroll 6
    for (int j = 0; j < 6; j++) {
      Vec m[6];
#pragma GCC unroll 6
      for (int i = 0; i < 6; i++) m[i] = load(products + (i * 6 + j) * point + o);
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
    if (!finish || !std::is_same_v<T, float>)  // of bfloat16 values nothing is finished here
      each_value([](Vec v, const T*) { return v; });
    else if constexpr (std::is_same_v<T, float>)
      for_activation(finish->act, [&](auto a) {
        const auto n = std::integral_constant<i64, kLanes>();
        each_value([&](Vec v, const float* to) { return finish->template apply<decltype(a)::value>(v, o, to, n); });
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
  return kPoints * block_tiles(c, o) * (c + outputs);
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
                     const Finish* finish = nullptr) {
  const i64 block = block_tiles(g.c, g.o), panels = panels_of(g.o);
  float* v = scratch(0, buffer_floats(g.c, g.o));
  float* m = v + kPoints * block * g.c;
  for (i64 t0 = first; t0 < last; t0 += block) {
    const i64 tiles = std::min(block, last - t0);
    for (i64 t = 0; t < tiles; t++) transform_input(x, g, t0 + t, v + t * g.c, block * g.c);
    for (i64 p = 0; p < kPoints; p++)
      point_product(v + p * block * g.c, tiles, weights + p * panels * g.c * kPanel, m + p * block * g.o, g);
    for (i64 t = 0; t < tiles; t++) transform_output(m + t * g.o, block * g.o, y, g, t0 + t, finish);
  }
}

// du [point][c][o] += the gradient of the weights' points, from the tiles first .. last
template <class T>
static void weight_gradient(const T* x, const float* dy, float* du, const Tiles& g, i64 first, i64 last) {
  const i64 block = block_tiles(g.c, g.o), panels = panels_of(g.o);
  float* v = scratch(0, buffer_floats(g.c, g.o));
  float* d = v + kPoints * block * g.c;
  for (i64 t0 = first; t0 < last; t0 += block) {
    const i64 tiles = std::min(block, last - t0);
    for (i64 t = 0; t < tiles; t++) {
      transform_input(x, g, t0 + t, v + t * g.c, block * g.c);
      transform_gradient(dy, g, t0 + t, d + t * kPanel, block * kPanel, panels * block * kPanel);
    }
    for (i64 p = 0; p < kPoints; p++)
      headrace::weight_gradient(v + p * block * g.c, {1, 1, tiles, 0, 0, g.c}, g.c, {0, g.c},
                                d + p * panels * block * kPanel, block * kPanel, {0, panels}, du + p * g.c * g.o, g.o);
  }
}

}  // namespace headrace::winograd
