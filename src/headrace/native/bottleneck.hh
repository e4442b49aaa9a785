// What inverted bottlenecks have, for inference: a 1x1 convolution with the depthwise one behind it as one call, and gates of
// squeeze and excitation.
//
// The expanded images are four to seven times as large as those on either side. Here they are never whole: a panel of their
// channels, of one image or of a band of its rows, is computed into a buffer that stays in the caches, with the zeros
// around it that the depthwise windows need, and is convolved from there.
#pragma once
#include <vector>

#include "depthwise.hh"
#include "inference.hh"
#include "tasks.hh"

namespace headrace {

constexpr i64 kTileFloats = 64 * 1024;  // of the expanded panel of one task at most: a part of the L2 cache
constexpr i64 kGateBand = 8 * 1024;     // floats that a task multiplies by their gates

// mean[channels of one panel] = the sums over some pixels, divided by the `count` of an image
static void average_pixels(const float* x, i64 pixels, i64 c, i64 panel, i64 count, float* mean) {
  for (i64 k = panel * kPanel, end = std::min(c, k + kPanel); k < end; k += kLanes) {
    const i64 lanes = std::min<i64>(kLanes, end - k);
    Vec part[4] = {};
    i64 p = 0;
    for (; p + 4 <= pixels; p += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) part[i] += load(x + (p + i) * c + k, lanes);
    for (; p < pixels; p++) part[0] += load(x + p * c + k, lanes);
    store(mean + k, (part[0] + part[1] + part[2] + part[3]) / (float)count, lanes);
  }
}

// A depthwise convolution of expanded images; both weights are packed in panels, with their shifts behind them.
struct Expanded {
  depthwise::Shape s;
  i64 n, inputs, expand_act, act;
  const float *x, *w1, *w2;
  float* y;

  i64 columns() const { return (s.wo - 1) * s.stride + s.kernel; }
  i64 rows_of(i64 rows) const { return (rows - 1) * s.stride + s.kernel; }
  i64 panels() const { return panels_of(s.c); }
  i64 vectors_of(i64 panel) const { return (panel_width(s.c, panel) + kLanes - 1) / kLanes; }
  const float* shift1() const { return w1 + panels() * inputs * kPanel; }
  const float* shift2() const { return w2 + panels() * s.kernel * s.kernel * kPanel; }

  // The rows that a band's windows touch, of one panel: [row][columns()][kPanel].
  void expand(const float* image, i64 panel, Range rows, float* to) const {
    const i64 width = columns(), first = rows.first * s.stride - s.top, count = rows_of(rows.last - rows.first);
    const i64 pixels = std::min(s.w, width - s.left), right = width - s.left - pixels;
    float shift[kPanel] = {};
    memcpy(shift, shift1() + panel * kPanel, panel_width(s.c, panel) * sizeof(float));
    const Finish finish = {shift, nullptr, to, expand_act};
    const i64 outputs = vectors_of(panel) * kLanes;
    const inference::Products products = {1, inputs, 0, w1 + panel * inputs * kPanel, outputs, {0, 1}, finish};
    static thread_local std::vector<inference::Run> runs;
    runs.clear();
    i64 collected = 0;
    for (i64 i = 0; i < count; i++) {
      float* row = to + i * width * kPanel;
      if (first + i < 0 || first + i >= s.h) {
        memset(row, 0, width * kPanel * sizeof(float));
        continue;
      }
      memset(row, 0, s.left * kPanel * sizeof(float));
      memset(row + (s.left + pixels) * kPanel, 0, right * kPanel * sizeof(float));
      inference::add_runs(runs, image + (first + i) * s.w * inputs, inputs, row + s.left * kPanel, kPanel, pixels);
      collected += pixels;
    }
    products.apply(runs, collected, inputs, kPanel, true);
  }

  template <int kKernel, int kStride, i64 kAct> void convolve(const float* from, i64 panel, Range rows, float* to) const {
    const i64 width = panel_width(s.c, panel), row_step = columns() * kPanel, c0 = panel * kPanel;
    const float *window = w2 + panel * kKernel * kKernel * kPanel, *shifts = shift2() + c0;
    for (i64 row = rows.first; row < rows.last; row++, from += kStride * row_step) {
      float* place = to + row * s.wo * s.c + c0;
      auto tile = [&](auto count, i64 column) {
        for (i64 v = 0; v < width; v += kLanes) {
          const i64 lanes = std::min<i64>(width - v, kLanes);
          const Vec shift = load(shifts + v, lanes);
          depthwise::sums_in_place<kKernel, kStride, decltype(count)::value, kPanel>(
              from + column * kStride * kPanel + v, row_step, kPanel, window + v, 0, kKernel, [&](int p, Vec sum) {
                store(place + (column + p) * s.c + v, activated<kAct>(sum + shift), lanes);
              });
        }
      };
      constexpr int kMany = kLanes == 16 ? 7 : 4, kFew = 4;  // seven: the sizes of ImageNet's images
      i64 column = 0;
      for (; column + kMany <= s.wo; column += kMany) tile(std::integral_constant<int, kMany>(), column);
      for (; column < s.wo && s.wo >= kFew; column += kFew)  // computed twice where the tiles meet
        tile(std::integral_constant<int, kFew>(), std::min(column, s.wo - kFew));
      for (; column < s.wo; column++) tile(std::integral_constant<int, 1>(), column);
    }
  }

  // A band of an image's output rows, and some of the panels; `mean`, unless it is null, is the band's part of the means.
  void run(i64 image, Range rows, Range range, float* mean) const {
    float *buffer = scratch(0, rows_of(rows.last - rows.first) * columns() * kPanel), *to = y + image * s.ho * s.wo * s.c;
    for (i64 panel = range.first; panel < range.last; panel++) {
      expand(x + image * s.h * s.w * inputs, panel, rows, buffer);
      depthwise::for_window(s, [&](auto k, auto t) {
        for_activation(act, [&](auto a) {
          convolve<decltype(k)::value, decltype(t)::value, decltype(a)::value>(buffer, panel, rows, to);
        });
      });
      if (mean)
        average_pixels(to + rows.first * s.wo * s.c, (rows.last - rows.first) * s.wo, s.c, panel, s.ho * s.wo, mean);
    }
  }
};

// Squeeze and excitation: y = x times gate(w2 act(w1 m + b1) + b2), with m the means of an image's channels. Both weights are
// packed, with their biases. After the means come three phases: hidden values, gates, products.
struct Gates {
  i64 n, pixels, c, inner, act, threads;
  bool is_hard;
  const float *x, *w1, *w2;
  float *y, *gates, *hidden;  // the gates are the means first

  i64 image() const { return pixels * c; }
  // Four phases of two threads take longer than few pixels and weights.
  bool alone() const { return n * image() < 32 * kGateBand && 2 * c * inner < 8 * kGateBand; }
  i64 parts(i64 panels) const { return alone() ? 1 : std::min(panels, 2 * threads); }
  i64 bands() const { return std::clamp<i64>(image() / kGateBand, 1, pixels); }
  i64 count(int phase) const {
    return phase == 0 ? parts(panels_of(inner)) : phase == 1 ? parts(panels_of(c)) : n * bands();
  }

  void dense(const float* from, i64 inputs, const float* w, i64 activation, float* to, i64 results, Range panels) const {
    const Finish finish = {w + panels_of(results) * inputs * kPanel, nullptr, to, activation};
    inference::convolve(from, {1, 1, n, 0, 0, inputs}, 1, inputs, 0, w, to, {1, 1, n, 0, 0, results}, results, panels, finish);
  }
  void run(int phase, i64 task) const {
    if (phase == 0) return dense(gates, c, w1, act, hidden, inner, range_of(panels_of(inner), task, count(0)));
    if (phase == 1) return open(range_of(panels_of(c), task, count(1)));
    multiply(task / bands(), range_of(pixels, task % bands(), bands()));
  }
  void open(Range panels) const {
    dense(hidden, inner, w2, kNone, gates, c, panels);
    const i64 begin = panels.first * kPanel, end = std::min(c, panels.last * kPanel);
    for (i64 i = 0; i < n; i++)
      for (i64 k = begin; k < end; k += kLanes) {
        const i64 lanes = std::min<i64>(kLanes, end - k);
        const Vec v = load(gates + i * c + k, lanes);
        store(gates + i * c + k, is_hard ? activated<kRelu6>(v + 3.f) * (1.f / 6) : sigmoid(v), lanes);
      }
  }
  void multiply(i64 n, Range range) const {
    const float *from = x + n * image(), *gate = gates + n * c;
    float* to = y + n * image();
    for (i64 p = range.first; p < range.last; p++) {
      i64 k = 0;
      for (; k + kLanes <= c; k += kLanes) store(to + p * c + k, load(from + p * c + k) * load(gate + k));
      if (k < c) store(to + p * c + k, load(from + p * c + k, c - k) * load(gate + k, c - k), c - k);
    }
  }
};

static ffi::Error Gate(ffi::ThreadPool xla_pool, i64 act, bool is_hard, i64 inner, Floats x, Floats w1, Floats w2,
                       ffi::Result<Floats> y) {
  const Threads pool(xla_pool, true);
  const auto shape = x.dimensions();
  const i64 n = shape[0], c = shape[3], panels = panels_of(c);
  float* gates = scratch(7, n * (c + inner) + kLanes);
  const Gates g = {n, shape[1] * shape[2], c, inner, act, pool.count(), is_hard, x.typed_data(), w1.typed_data(),
                   w2.typed_data(), y->typed_data(), gates, gates + n * c};
  auto task = [&](int phase, i64 i) {
    if (phase) return g.run(phase - 1, i);
    average_pixels(g.x + i / panels * g.image(), g.pixels, c, i % panels, g.pixels, gates + i / panels * c);
  };
  const i64 counts[] = {n * panels, g.count(0), g.count(1), g.count(2)};
  if (!g.alone())
    parallel_phases(pool, counts, task);
  else
    for (int phase = 0; phase < 4; phase++)
      for (i64 i = 0; i < counts[phase]; i++) task(phase, i);
  return ffi::Error::Success();
}

// activation(depthwise convolution of activation(1x1 convolution of x)), times a gate where `inner` is not 0: then w1 and w2 of
// the gate are the last arguments. The geometry is the depthwise convolution's.
static ffi::Error Bottleneck(ffi::ThreadPool xla_pool, ffi::Span<const i64> geometry, i64 expand_act, i64 act,
                             i64 gate_act, bool is_hard, i64 inner, Floats x, Floats w1, Floats w2,
                             ffi::RemainingArgs rest, ffi::Result<Floats> y_) {
  const Threads pool(xla_pool, true);
  const Geometry q = geometry_of(geometry);
  const i64 threads = pool.count(), n = q.n, c = q.c, inputs = x.dimensions()[3];
  float* y = y_->typed_data();
  const Expanded e = {{q.h, q.w, c, q.kh, q.stride, q.top, q.left, q.ho, q.wo}, n, inputs, expand_act, act,
                      x.typed_data(), w1.typed_data(), w2.typed_data(), y};
  // The threads divide the panels, which costs nothing, or bands of rows, which overlap.
  const i64 panels = e.panels(), floats = e.rows_of(q.ho) * e.columns() * kPanel;
  const bool by_panels = floats <= kTileFloats && n * panels >= 2 * threads;
  i64 bands = by_panels ? 1 : std::max((floats + kTileFloats - 1) / kTileFloats, (threads + n - 1) / n);
  if (n * bands % threads) bands += threads - bands % threads;
  if (by_panels || bands > q.ho) bands = by_panels ? 1 : q.ho;

  float* gates = inner ? scratch(7, n * (c + inner + (bands > 1 ? bands * c : 0)) + kLanes) : nullptr;
  float* means = bands > 1 ? gates + n * (c + inner) : gates;  // of each image and band
  Gates g = {};
  if (inner)
    g = {n, q.ho * q.wo, c, inner, gate_act, threads, is_hard, y, rest.get<Floats>(0)->typed_data(),
         rest.get<Floats>(1)->typed_data(), y, gates, gates + n * c};
  auto task = [&](int phase, i64 i) {
    if (phase == 0) {
      const i64 image = by_panels ? i % n : i / bands, panel = i / n;  // a panel's weights meet all images in turn
      const Range range = by_panels ? Range{panel, panel + 1} : Range{0, panels};
      return e.run(image, range_of(q.ho, by_panels ? 0 : i % bands, bands), range,
                   inner ? means + (by_panels ? image : i) * c : nullptr);
    }
    if (phase > 1) return g.run(phase - 2, i);
    for (i64 k = 0; k < c; k++) {
      float sum = 0;
      for (i64 band = 0; band < bands; band++) sum += means[(i * bands + band) * c + k];
      gates[i * c + k] = sum;
    }
  };
  const i64 first = by_panels ? n * panels : n * bands;
  if (inner)
    parallel_phases(pool, {first, bands > 1 ? n : 0, g.count(0), g.count(1), g.count(2)}, task);
  else
    parallel(pool, first, [&](i64 i) { task(0, i); });
  return ffi::Error::Success();
}

}  // namespace headrace
