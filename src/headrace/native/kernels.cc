// Convolution, batch norm, residual and activation of images (NHWC, weights HWIO) as calls from XLA's CPU programs.
//
// Images and weights are float32, or bfloat16 (T is Half): these are widened where they are loaded and rounded where they are
// stored. Winograd's algorithm and depthwise convolutions compute in float32 between; other products of bfloat16 are
// bfloat16.cc's.
// Images are divided into chunks that fit the L2 cache, over XLA's own threads. What follows or precedes a convolution
// (sums for the statistics, the activation's mask, the norm's gradient) is done on the chunk while it is in the cache.
// Sums are added in a fixed order, so that the same program gives the same bits. ops/native_units.py has the formulas.
#include <vector>

#include "bfloat16.hh"
#include "bottleneck.hh"
#include "depthwise.hh"
#include "grouped.hh"
#include "inference.hh"
#include "pool.hh"
#include "products.hh"
#include "tasks.hh"
#include "vectors.hh"
#include "windows.hh"
#include "winograd.hh"

namespace headrace {
namespace {

constexpr i64 kChunkFloats = 128 * 1024;       // of one chunk's images, to stay in the L2 cache
constexpr i64 kTaskTiles = 32 * kMaxRows;      // of Winograd's algorithm in one task
constexpr i64 kBandFloats = 32 * 1024;         // of one band of a depthwise convolution's image
constexpr i64 kTaskPixels = 24 * kMaxRows;     // of one task with so many weights, which it reads once
constexpr i64 kFewProducts = 256 * 1024;       // are computed before another thread has begun
enum Method : i64 { kProducts = 0, kWinograd = 1, kDepthwise = 2, kGrouped = 3, kHalf = 4 };

// Images per chunk: near the size wanted, and a number of chunks that keeps all threads busy to the end.
i64 chunk_size(i64 images, i64 floats, i64 threads, i64 wanted = kChunkFloats) {
  i64 size = std::clamp<i64>(wanted / std::max<i64>(floats, 1), 1, (images + threads - 1) / threads);
  i64 chunks = (images + size - 1) / size;
  if (chunks % threads && chunks < 8 * threads) chunks += threads - chunks % threads;
  chunks = std::min(chunks, images);
  return (images + chunks - 1) / chunks;
}

// Images of one task of a product. Tasks are more than threads: the cores of a virtual machine are rarely equally fast.
i64 product_chunk(const Geometry& g, i64 floats, bool many, i64 threads) {
  return many ? chunk_size(g.n, g.ho * g.wo, threads, kTaskPixels) : chunk_size(g.n, floats, threads);
}

winograd::Tiles forward_tiles(const Geometry& g) {
  return winograd::tiles_of(g.h, g.w, g.c, g.o, g.top, g.left, g.ho, g.wo);
}
winograd::Tiles backward_tiles(const Geometry& g) {  // convolves the gradient, with zeros around, to the images' gradient
  return winograd::tiles_of(g.ho, g.wo, g.o, g.c, 2 - g.top, 2 - g.left, g.h, g.w);
}
depthwise::Shape depthwise_shape(const Geometry& g) {
  return {g.h, g.w, g.c, g.kh, g.stride, g.top, g.left, g.ho, g.wo};
}
template <class T> void weight_values(const float* du, T* dw, i64 c, i64 o, i64 part, i64 parts) {
  const Range r = range_of(c, part, parts);
  winograd::weight_values(du + r.first * o, c * o, o, dw, c, o, r, {0, o});
}
// The points of the outputs i kLanes .. (i + 1) kLanes, packed [point][panel][c][kPanel]
template <class T> void pack_points(const T* w, float* packed, i64 c, i64 o, bool turned, i64 i) {
  const i64 first = i * kLanes;
  winograd::weight_points(w, c, o, turned, first, {0, c}, packed + first / kPanel * c * kPanel + first % kPanel,
                          panels_of(o) * c * kPanel);
}

// Winograd's algorithm for large weights, whose points do not fit the caches: all tiles are transformed, then each thread
// multiplies the tiles of some points, so that a point's weights, or their gradient, are read and written once.
constexpr i64 kPointTiles = 256;  // transformed at a time

// Call f(tile, its number in the group) for the tiles of a group, on all threads.
template <class F> void each_tile(const Threads& pool, Range group, const F& f) {
  const i64 count = group.last - group.first, parts = std::min(count, 4 * pool.count());
  parallel(pool, parts, [&](i64 i) {
    const Range r = range_of(count, i, parts);
    for (i64 t = r.first; t < r.last; t++) f(group.first + t, t);
  });
}
template <class F> void each_group(const winograd::Tiles& t, i64 images, const F& f) {
  const i64 count = images * t.per_image(), groups = (count + kPointTiles - 1) / kPointTiles;
  for (i64 i = 0; i < groups; i++) f(range_of(count, i, groups));
}

template <class X, class Y>
void convolve_by_points(const Threads& pool, const X* x, Y* y, const float* weights,
                        const winograd::Tiles& g, i64 images, const FinishOf<Y>* finish = nullptr) {
  each_group(g, images, [&](Range group) {
    const i64 tiles = group.last - group.first, panels = panels_of(g.o);
    const i64 v_step = odd_lines(tiles * g.c), m_step = odd_lines(tiles * g.o);
    float *v = scratch(7, winograd::kPoints * (v_step + m_step)), *m = v + winograd::kPoints * v_step;
    const i64 parts = std::min(tiles, 4 * pool.count());
    const std::vector<float> zeros(finish ? g.o : 0);
    auto multiply = [&](const float* from, const float* by, float* to) {
      if (!finish) return point_product(from, tiles, by, to, g);
      inference::convolve(from, {1, 1, tiles, 0, 0, g.c}, 1, g.c, 0, by, to, {1, 1, tiles, 0, 0, g.o}, g.o, {0, panels},
                          {zeros.data(), nullptr, to, kNone});
    };
    parallel_phases(pool, {parts, winograd::kPoints, parts}, [&](int phase, i64 i) {
      const Range r = range_of(tiles, i, parts);
      if (phase == 0)
        for (i64 t = r.first; t < r.last; t++) transform_input(x, g, group.first + t, {0, g.c}, v + t * g.c, v_step);
      else if (phase == 1)
        multiply(v + i * v_step, weights + i * panels * g.c * kPanel, m + i * m_step);
      else
        for (i64 t = r.first; t < r.last; t++) transform_output(m + t * g.o, m_step, y, g, group.first + t, {0, g.o}, finish);
    });
  });
}

// du [point][c][o] = the gradient of the weights' points
template <class T>
void weight_gradient_by_points(const Threads& pool, const T* x, const float* dz, float* du,
                               const winograd::Tiles& g, i64 images) {
  each_group(g, images, [&](Range group) {
    const i64 tiles = group.last - group.first, panels = panels_of(g.o);
    const i64 v_step = odd_lines(tiles * g.c), d_step = odd_lines(panels * tiles * kPanel);
    float *v = scratch(7, winograd::kPoints * (v_step + d_step)), *d = v + winograd::kPoints * v_step;
    each_tile(pool, group, [&](i64 tile, i64 t) {
      transform_input(x, g, tile, {0, g.c}, v + t * g.c, v_step);
      transform_gradient(dz, g, tile, d + t * kPanel, tiles * kPanel, d_step);
    });
    parallel(pool, winograd::kPoints, [&](i64 p) {
      float* sum = du + p * g.c * g.o;
      if (group.first == 0) memset(sum, 0, g.c * g.o * sizeof(float));
      weight_gradient(v + p * v_step, {1, 1, tiles, 0, 0, g.c}, g.c, {0, g.c}, d + p * d_step, tiles * kPanel, {0, panels}, sum,
                      g.o);
    });
  });
}

// The same, where the tiles are few and there is a panel for each thread: a task computes the points of its own weights. On two
// cores (AVX-512, 8 images of 7x7 pixels, 512 channels) 4.7 ms instead of 6.4 forward, and 9.5 without Winograd's algorithm.
constexpr i64 kPanelTiles = 128;  // with more, their products leave the L2 cache
bool is_by_panels(const Threads& pool, const winograd::Tiles& g, i64 images) {
  return images * g.per_image() <= kPanelTiles && panels_of(std::min(g.c, g.o)) >= pool.count();
}
template <class X, class W, class Y>
void convolve_by_panels(const Threads& pool, const X* x, const W* w, bool turned, Y* y, const winograd::Tiles& g, i64 images,
                        const FinishOf<Y>* finish = nullptr) {
  const i64 tiles = images * g.per_image(), parts = std::min(tiles, 4 * pool.count());
  float* v = scratch(7, winograd::blocks_of(g.c) * winograd::kPoints * odd_lines(tiles * winograd::kChannels));
  parallel_phases(pool, {parts, panels_of(g.o)}, [&](int phase, i64 i) {
    if (phase == 1) return winograd::convolve_panel(v, tiles, w, turned, y, g, i, finish);
    const Range r = range_of(tiles, i, parts);
    for (i64 t = r.first; t < r.last; t++) winograd::transform_blocks(x, g, t, tiles, v);
  });
}
template <class X, class W>
void weight_gradient_by_panels(const Threads& pool, const X* x, const float* dz, W* dw, const winograd::Tiles& g, i64 images) {
  const i64 tiles = images * g.per_image(), panels = panels_of(g.o), blocks = winograd::blocks_of(g.c);
  const i64 parts = std::min(tiles, 4 * pool.count()), d_step = odd_lines(tiles * kPanel);
  const i64 floats = blocks * winograd::kPoints * odd_lines(tiles * winograd::kChannels);
  float *v = scratch(7, floats + panels * winograd::kPoints * d_step), *d = v + floats;
  parallel_phases(pool, {parts, panels * blocks}, [&](int phase, i64 i) {
    if (phase == 1) return winograd::gradient_panel(v, d, tiles, dw, g, i % blocks, i / blocks);
    const Range r = range_of(tiles, i, parts);
    for (i64 t = r.first; t < r.last; t++) {
      winograd::transform_blocks(x, g, t, tiles, v);
      transform_gradient(dz, g, t, d + t * kPanel, winograd::kPoints * d_step, d_step);
    }
  });
}

// ---- handlers

template <class T = float> const T* argument(ffi::RemainingArgs& args, size_t i) {
  return i < args.size() ? args.get<Images<T>>(i)->typed_data() : nullptr;
}
template <class T = float> T* result(ffi::RemainingRets& rets, size_t i) {
  ffi::Result<Images<T>> found = *rets.get<Images<T>>(i);
  return in_large_pages(found->typed_data(), found->element_count());
}

// Coefficients of a norm, each repeated to whole vectors, in the order given.
std::vector<const float*> repeated(std::initializer_list<const float*> vectors, i64 channels, int which) {
  const i64 period = period_of(channels);
  float* to = scratch(which, period * (i64)vectors.size());
  std::vector<const float*> found;
  for (const float* v : vectors) {
    repeat(v, channels, to);
    found.push_back(to);
    to += period;
  }
  return found;
}

// The floats of a convolution's weights as its method reads them.
i64 packed_floats(const Geometry& g, i64 method) {
  const i64 depth = g.kh * g.kw * g.c;
  if (method == kDepthwise) return depth;
  if (method == kGrouped) return grouped::Blocks(g).count() * grouped::Blocks(g).packed();
  return method == kWinograd ? winograd::weight_floats(g.c, g.o) : panels_of(g.o) * depth * kPanel;
}
// Packing in tasks: how many, and one of them.
i64 pack_tasks(const Geometry& g, i64 method) {
  if (method == kDepthwise) return 1;
  if (method == kGrouped) return grouped::Blocks(g).count();
  return method == kWinograd ? g.o / kLanes : panels_of(g.o);
}
template <class T> void pack_part(const T* w, float* packed, const Geometry& g, i64 method, i64 i) {
  const i64 depth = g.kh * g.kw * g.c;
  if (method == kDepthwise)
    copy_values(w, depth, packed);
  else if (method == kWinograd)
    pack_points(w, packed, g.c, g.o, false, i);
  else if constexpr (std::is_same_v<T, Half>)
    return;
  else if (method == kGrouped)
    grouped::Blocks(g).pack(w, i, packed);
  else
    pack_panels(w, depth, g.o, packed, i, i + 1);
}
template <class T> void pack_weights(const Threads& pool, const T* w, float* packed, const Geometry& g, i64 method) {
  parallel(pool, pack_tasks(g, method), [&](i64 i) { pack_part(w, packed, g, method, i); });
}

const float* scaled_weights(const float* w, const float* scale, i64 rows, i64 o) {
  float* scaled = scratch(5, rows * o);
  for (i64 r = 0; r < rows; r++)
    for (i64 k = 0; k < o; k++) scaled[r * o + k] = w[r * o + k] * scale[k];
  return scaled;
}

// The weights times the scale of each output channel, packed, and the shifts.
ffi::Error Pack(ffi::ThreadPool xla_pool, ffi::Span<const i64> geometry, i64 method, Floats w_, Floats scale_,
                Floats shift, ffi::Result<Floats> packed) {
  const Threads pool(xla_pool);
  const Geometry g = geometry_of(geometry);
  const float *w = w_.typed_data(), *scale = scale_.typed_data();
  const i64 floats = packed_floats(g, method);
  if ((i64)packed->element_count() != floats + g.o)
    return ffi::Error::InvalidArgument("the packed weights have another size");
  memcpy(packed->typed_data() + floats, shift.typed_data(), g.o * sizeof(float));
  pack_weights(pool, scaled_weights(w, scale, w_.element_count() / g.o, g.o), packed->typed_data(), g, method);
  return ffi::Error::Success();
}

void convolve_windows(const View& v, const float* w, float* y, const Geometry& g, const Pixels& out, Range panels,
                      const Finish* finish) {
  if (finish)
    inference::convolve(v.data, v.pixels, g.kh, g.kw * g.c, v.pitch, w, y, out, g.o, panels, *finish);
  else
    convolve(v.data, v.pixels, g.kh, g.kw * g.c, v.pitch, w, y, out, g.o, panels);
}

// Some images of one task.
template <class T>
void convolve_images(const T* x, const float* w, T* y, const Geometry& g, i64 method, i64 images,
                     const FinishOf<T>* finish = nullptr) {
  if (method == kWinograd) {
    const winograd::Tiles t = forward_tiles(g);
    winograd::convolve(x, y, w, t, 0, images * t.per_image(), finish);
  } else if (method == kDepthwise) {
    for (i64 n = 0; n < images; n++)
      depthwise::forward(x + n * g.in(), w, y + n * g.out(), depthwise_shape(g), {0, g.ho}, {0, depthwise::blocks_of(g.c)},
                         finish);
  } else if constexpr (std::is_same_v<T, Half>) {
    return;
  } else if (method == kGrouped) {
    const grouped::Blocks b(g);
    for (i64 n = 0; n < images; n++)
      grouped::forward(x + n * g.in(), w, y + n * g.out(), b, {0, g.ho}, {0, b.count()}, finish);
  } else {
    const View v = windows(x, g, images, 0, g.ho);
    convolve_windows(v, w, y, g, outputs(g, images, g.ho), {0, panels_of(g.o)}, finish);
  }
}

// All images, divided between the threads by what their memory traffic asks for: images, parts of one, or channels.
void convolve_products(const Threads& pool, const float* x, const float* w, float* y, const Geometry& g, i64 method,
                       const Finish* finish);
template <class T>
void convolve_all(const Threads& pool, const T* x, const float* w, T* y, const Geometry& g, i64 method,
                  const FinishOf<T>* finish) {
  const i64 threads = pool.count(), weights = g.kh * g.kw * g.c * g.o;
  if (method == kWinograd && weights > kManyWeights)
    return convolve_by_points(pool, x, y, w, forward_tiles(g), g.n, finish);
  if (method == kWinograd) {
    const winograd::Tiles t = forward_tiles(g);
    const i64 all = g.n * t.per_image(), blocks = (all + kTaskTiles - 1) / kTaskTiles;
    const i64 parts = std::min(all, (blocks + threads - 1) / threads * threads);
    return parallel(pool, parts, [&](i64 i) {
      const Range tiles = range_of(all, i, parts);
      winograd::convolve(x, y, w, t, tiles.first, tiles.last, finish);
    });
  }
  if (method == kDepthwise) {
    // Bands of rows or, of small images, groups of channels, so that several threads have work also for one image.
    const i64 bands = std::clamp<i64>(g.in() / kBandFloats, 1, g.ho), blocks = depthwise::blocks_of(g.c);
    const i64 parts = g.n * g.out() * g.kh * g.kw < kFewProducts ? 1 : std::max<i64>(1, 2 * threads / (g.n * bands));
    const i64 groups = std::min(blocks, parts);
    return parallel(pool, g.n * bands * groups, [&](i64 i) {
      const i64 n = i / groups / bands;
      const Range rows = range_of(g.ho, i / groups % bands, bands);
      depthwise::forward(x + n * g.in(), w, y + n * g.out(), depthwise_shape(g), rows, range_of(blocks, i % groups, groups),
                         finish);
    });
  }
  if constexpr (std::is_same_v<T, float>) convolve_products(pool, x, w, y, g, method, finish);
}
void convolve_products(const Threads& pool, const float* x, const float* w, float* y, const Geometry& g, i64 method,
                       const Finish* finish) {
  const i64 threads = pool.count(), weights = g.kh * g.kw * g.c * g.o, panels = panels_of(g.o);
  if (method == kGrouped) {
    const grouped::Blocks b(g);
    const i64 parts = g.n * g.out() * g.kh * g.kw * b.size < kFewProducts ? 1 : std::max<i64>(1, 4 * threads / g.n);
    const i64 groups = std::min(b.count(), parts), bands = std::min(g.ho, (parts + groups - 1) / groups);
    return parallel(pool, g.n * bands * groups, [&](i64 i) {
      const i64 n = i / groups / bands;
      const Range rows = range_of(g.ho, i / groups % bands, bands);
      grouped::forward(x + n * g.in(), w, y + n * g.out(), b, rows, range_of(b.count(), i % groups, groups), finish);
    });
  }
  if (finish && g.is_pointwise() && g.h == 1) {
    // Parts of the pixels, of the channels, or both: whatever is larger should be read once.
    const i64 tiles = (g.n + kMaxRows - 1) / kMaxRows, work = g.n * weights;
    const i64 wanted = work < kFewProducts ? 1 : weights > inference::kNearWeights ? threads : 4 * threads;
    i64 groups = 1, parts = std::min(tiles, wanted);
    if (weights > g.n * g.c && panels > 1 && wanted > 1) {
      groups = std::min(panels, inference::gathers(g.c) ? threads : 2 * threads);
      parts = panels % threads && panels < 4 * threads ? std::min(tiles, threads) : 1;
      if (parts > 1) groups = panels;
    }
    return parallel(pool, groups * parts, [&](i64 i) {
      const Range t = range_of(tiles, i % parts, parts);
      const i64 first = t.first * kMaxRows, pixels = std::min(t.last * kMaxRows, g.n) - first;
      const View v = windows(x + first * g.c, g, pixels, 0, 1);
      convolve_windows(v, w, y + first * g.o, g, outputs(g, pixels, 1), range_of(panels, i / parts, groups), finish);
    });
  }
  if (weights > g.n * g.in() && panels > 1) {
    // Fewer pixels than weights: each thread reads all images and some of the weights, which come from further away.
    const i64 groups = std::min(panels, threads);
    return parallel(pool, groups, [&](i64 i) {
      const View v = windows(x, g, g.n, 0, g.ho);
      convolve_windows(v, w, y, g, outputs(g, g.n, g.ho), range_of(panels, i, groups), finish);
    });
  }
  if (g.n >= threads) {
    i64 chunk = product_chunk(g, g.in() + g.out(), weights > kManyWeights, threads);
    if (g.is_pointwise() && chunk > 4 * kMaxRows) chunk = (chunk + kMaxRows - 1) / kMaxRows * kMaxRows;
    return parallel(pool, (g.n + chunk - 1) / chunk, [&](i64 i) {
      const i64 n = i * chunk;
      convolve_images(x + n * g.in(), w, y + n * g.out(), g, method, std::min(chunk, g.n - n), finish);
    });
  }
  const i64 bands = std::min(g.ho, 2 * threads);
  parallel(pool, g.n * bands, [&](i64 i) {
    const i64 n = i / bands;
    const Range rows = range_of(g.ho, i % bands, bands);
    const View v = windows(x + n * g.in(), g, 1, rows.first, rows.last);
    convolve_windows(v, w, y + n * g.out() + rows.first * g.wo * g.o, g, outputs(g, 1, rows.last - rows.first), {0, panels},
                     finish);
  });
}

// Mean and biased variance of `count` values of each channel, from the sums [task][2][channel] of values and of squares.
void statistics(const std::vector<double>& sums, i64 channels, double count, float* mean, float* variance) {
  for (i64 c = 0; c < channels; c++) {
    double sum = 0, squares = 0;
    for (size_t i = c; i < sums.size(); i += 2 * channels) sum += sums[i], squares += sums[i + channels];
    mean[c] = (float)(sum / count);
    // written so that NaN and infinity stay what they are
    const double v = squares / count - sum / count * (sum / count);
    variance[c] = (float)(v < 0 ? 0 : v);
  }
}

// y = convolution of x. With (scale, shift[, residual]) y = activation(y scale + shift + residual). `packed`: w is the result
// of Pack, float32 with scale and shift in it, and only the residual may follow. With more results, the mean and the biased
// variance of each channel. For bfloat16 products packed weights are PackHalf's, and scale and shift are apart; other methods
// of bfloat16 images have them in packed weights only.
template <class T>
ffi::Error Convolve(ffi::ThreadPool xla_pool, ffi::Span<const i64> geometry, i64 method, i64 products, i64 act, bool is_packed,
                    Images<T> x_, ffi::AnyBuffer w_, ffi::RemainingArgs rest, ffi::RemainingRets rets) {
  const Threads pool(xla_pool, is_packed);
  const Geometry whole = geometry_of(geometry), g = method == kProducts ? flattened(whole) : whole;
  const i64 threads = pool.count(), o = g.o;
  const T* x = x_.typed_data();
  T* y = result<T>(rets, 0);
  std::vector<double> sums;  // [task][2][channel]
  auto finish_statistics = [&] { statistics(sums, o, (double)g.n * g.ho * g.wo, result(rets, 1), result(rets, 2)); };
  if constexpr (std::is_same_v<T, Half>)
    if (method == kHalf) {
      const bfloat16::Behind behind = {argument(rest, 0), argument(rest, 1), argument<Half>(rest, 2), act};
      bfloat16::convolve(pool, products, g, x, (const Half*)w_.untyped_data(), is_packed, y, behind,
                         rets.size() > 1 ? &sums : nullptr);
      if (rets.size() > 1) finish_statistics();
      return ffi::Error::Success();
    }
  if (std::is_same_v<T, Half> && !is_packed && rest.size())
    return ffi::Error::InvalidArgument("scale and shift behind this method need packed weights for images of bfloat16");
  const T* unpacked = is_packed ? nullptr : (const T*)w_.untyped_data();
  const float* w = is_packed ? (const float*)w_.untyped_data() : nullptr;
  FinishOf<T> found = {};
  if (is_packed) found = {w + packed_floats(g, method), argument<T>(rest, 0), y, act};
  if constexpr (std::is_same_v<T, float>)
    if (!is_packed) {
      w = unpacked;
      found = {argument(rest, 1), argument(rest, 2), y, act};
      if (found.shift) w = unpacked = scaled_weights(w, argument(rest, 0), w_.element_count() / o, o);
    }
  const FinishOf<T>* finish = found.shift ? &found : nullptr;
  // Sums for the statistics are formed while a chunk is in the cache.
  const bool by_image = method == kDepthwise || method == kGrouped;
  const bool many = !by_image && g.kh * g.kw * g.c * o > kManyWeights;
  const bool together = g.n < threads || (method == kWinograd && many);
  const bool by_panels = method == kWinograd && many && !is_packed && is_by_panels(pool, forward_tiles(g), g.n);
  float* packed = is_packed || by_panels || (method == kDepthwise && w) ? nullptr : scratch(6, packed_floats(g, method));
  if (packed) w = packed;
  if (packed && (rets.size() == 1 || together)) pack_weights(pool, unpacked, packed, g, method);
  if (by_panels)
    convolve_by_panels(pool, x, unpacked, false, y, forward_tiles(g), g.n, finish);
  else if (rets.size() == 1 || together)
    convolve_all(pool, x, w, y, g, method, finish);
  if (rets.size() == 1) return ffi::Error::Success();
  const i64 units = together ? g.n * g.ho * g.wo : g.n, out = together ? o : g.out();
  const i64 chunk = together ? chunk_size(units, o, threads)
                    : by_image ? 1
                               : product_chunk(g, g.in() + g.out(), many, threads);
  const i64 tasks = (units + chunk - 1) / chunk;
  sums.assign(tasks * 2 * o, 0.0);
  const i64 packs = packed && !together ? pack_tasks(g, method) : 0;
  parallel_phases(pool, {packs, tasks}, [&](int phase, i64 i) {
    if (phase == 0) return pack_part(unpacked, packed, g, method, i);
    const i64 n = i * chunk, count = std::min(chunk, units - n);
    if (count <= 0) return;
    if (!together) convolve_images(x + n * g.in(), w, y + n * out, g, method, count);
    sums_of_rows(y + n * out, count * out, o, &sums[i * 2 * o], &sums[i * 2 * o + o]);
  });
  finish_statistics();
  return ffi::Error::Success();
}

// y = activation((z - mean) scale + shift[ + residual])
template <class T>
ffi::Error Activate(ffi::ThreadPool xla_pool, i64 act, Images<T> z_, Floats scale, Floats mean, Floats shift,
                    ffi::RemainingArgs rest, ffi::Result<Images<T>> y_) {
  const Threads pool(xla_pool);
  const i64 o = scale.element_count(), rows = z_.element_count() / o;
  const auto c = repeated({scale.typed_data(), mean.typed_data(), shift.typed_data()}, o, 5);
  const T *z = z_.typed_data(), *residual = argument<T>(rest, 0);
  T* y = in_large_pages(y_->typed_data(), y_->element_count());
  const i64 chunk = chunk_size(rows, 3 * o, pool.count());
  parallel(pool, (rows + chunk - 1) / chunk, [&](i64 i) {
    const i64 first = i * chunk * o, count = std::min(chunk, rows - i * chunk) * o;
    activate_rows(z + first, residual ? residual + first : nullptr, y + first, count, o, {c[0], c[1], c[2]}, act);
  });
  return ffi::Error::Success();
}

// With d = dy times the activation's slope: the sums over the pixels of d and of d (z - mean). With a residual the slope
// comes from y, and d is a result too: it is the residual's gradient.
template <class T>
ffi::Error Sums(ffi::ThreadPool xla_pool, i64 act, Images<T> dy_, Images<T> z_, Floats scale, Floats mean, Floats shift,
                ffi::RemainingArgs rest, ffi::Result<Floats> sum, ffi::Result<Floats> moment, ffi::RemainingRets rets) {
  const Threads pool(xla_pool);
  const i64 o = scale.element_count(), rows = z_.element_count() / o;
  const auto c = repeated({scale.typed_data(), mean.typed_data(), shift.typed_data()}, o, 5);
  const T *dy = dy_.typed_data(), *z = z_.typed_data(), *y = argument<T>(rest, 0);
  T* d_out = y ? result<T>(rets, 0) : nullptr;
  const i64 chunk = chunk_size(rows, 3 * o, pool.count()), tasks = (rows + chunk - 1) / chunk;
  std::vector<double> parts(tasks * 2 * o, 0.0);
  parallel(pool, tasks, [&](i64 task) {
    const i64 start = task * chunk * o, count = std::min(chunk, rows - task * chunk) * o;
    double *first = &parts[task * 2 * o], *second = first + o;
    for_activation(act, [&](auto a) {
      if (y)
        two_sums(count, o, first, second, [&](i64 i, i64 j, auto n, Vec& s, Vec& q) {
          const Vec d = with_slope<decltype(a)::value>(load(dy + start + i, n), load(y + start + i, n));
          store(d_out + start + i, d, n);
          s += d;
          q += d * (load(z + start + i, n) - load(c[1] + j));
        });
      else
        two_sums(count, o, first, second, [&](i64 i, i64 j, auto n, Vec& s, Vec& q) {
          const Vec v = load(z + start + i, n) - load(c[1] + j);
          const Vec d = with_slope<decltype(a)::value>(load(dy + start + i, n), v * load(c[0] + j) + load(c[2] + j));
          s += d;
          q += d * v;
        });
    });
  });
  for (i64 k = 0; k < o; k++) {
    double first = 0, second = 0;
    for (i64 i = 0; i < tasks; i++) first += parts[i * 2 * o + k], second += parts[i * 2 * o + o + k];
    sum->typed_data()[k] = (float)first;
    moment->typed_data()[k] = (float)second;
  }
  return ffi::Error::Success();
}

// The gradients of a convolution: of the weights, of the images, or of both, by `wants` (1, 2 or 3). With (z, scale,
// mean, shift, slope, constant) dy is the gradient behind norm and activation, and their gradient is applied to it first. Of
// bfloat16 products a last result may follow: memory for that gradient.
template <class T>
ffi::Error Gradients(ffi::ThreadPool xla_pool, ffi::Span<const i64> geometry, i64 method, i64 products, i64 act, i64 wants,
                     Images<T> dy_, Images<T> x_, Images<T> w_, ffi::RemainingArgs rest, ffi::RemainingRets rets) {
  constexpr bool kIsHalf = std::is_same_v<T, Half>;
  const Threads pool(xla_pool);
  const Geometry whole = geometry_of(geometry), g = method == kProducts ? flattened(whole) : whole;
  const i64 threads = pool.count(), o = g.o;
  const T *dy = dy_.typed_data(), *x = x_.typed_data(), *w = w_.typed_data(), *z = argument<T>(rest, 0);
  T *dw = wants & 1 ? result<T>(rets, 0) : nullptr, *dx = wants & 2 ? result<T>(rets, wants & 1) : nullptr;
  NormGradient norm = {};
  if (z) {
    const auto c = repeated({argument(rest, 1), argument(rest, 2), argument(rest, 3), argument(rest, 4), argument(rest, 5)}, o, 5);
    norm = {{c[0], c[1], c[2]}, c[3], c[4]};
  }
  if constexpr (kIsHalf)
    if (method == kHalf) {
      const size_t last = (wants & 1) + (wants >> 1);
      Half* dz = rets.size() > last ? result<Half>(rets, last) : nullptr;
      bfloat16::gradients(pool, products, whole, x, w, {dy, z, norm, act, dz}, dw, dx);
      return ffi::Error::Success();
    }
  const grouped::Blocks blocks(g);
  const i64 depth = g.kh * g.kw * g.c;
  const i64 weights = method == kDepthwise ? depth : method == kGrouped ? blocks.count() * blocks.weights() : depth * o;
  const bool many = method == kProducts && weights > kManyWeights;
  const bool by_points = method == kWinograd && weights > kManyWeights;
  const bool by_panels = by_points && is_by_panels(pool, forward_tiles(g), g.n);
  const i64 chunk = method == kDepthwise || method == kGrouped
                        ? 1
                        : product_chunk(g, g.in() + 2 * g.out(), many, threads);
  const i64 chunks = (g.n + chunk - 1) / chunk, panels = panels_of(o);
  const ImageGradient image_gradient(method == kGrouped ? blocks.block() : g);

  // The weights as the images' gradient reads them.
  const i64 packed_size = method == kWinograd ? winograd::weight_floats(o, g.c)
                          : method == kGrouped ? blocks.count() * image_gradient.floats
                                               : image_gradient.floats;
  float* packed = dx && !by_panels && (kIsHalf || method != kDepthwise) ? scratch(6, packed_size) : nullptr;
  const i64 packs = !packed                ? 0
                    : method == kWinograd  ? g.c / kLanes
                    : method == kGrouped   ? blocks.count()
                    : method == kDepthwise ? 1
                                           : panels_of(g.c);
  auto pack = [&](i64 i) {
    if (method == kWinograd) return pack_points(w, packed, o, g.c, true, i);
    if (method == kDepthwise) return copy_values(w, depth, packed);
    if constexpr (!kIsHalf) {
      if (method == kProducts) return image_gradient.pack(w, packed, i);
      float* dense = scratch(0, blocks.weights());
      blocks.matrix(w, i, dense);
      for (i64 p = 0; p < panels_of(blocks.size); p++) image_gradient.pack(dense, packed + i * image_gradient.floats, p);
    }
  };
  // The gradient behind the convolution for some images, formed in `buffer` if a norm follows, or widened there.
  const bool forms = z || kIsHalf;
  auto gradient = [&](i64 n0, i64 images, float* buffer) -> const float* {
    if constexpr (!kIsHalf)
      if (!z) return dy + n0 * g.out();
    if (z)
      gradient_of_rows(dy + n0 * g.out(), z + n0 * g.out(), buffer, images * g.out(), o, norm, act);
    else
      copy_values(dy + n0 * g.out(), images * g.out(), buffer);
    return buffer;
  };
  const i64 row_taps = g.kw * g.c;  // weights of one window row

  if constexpr (!kIsHalf)
    if (many) {
      // Large weights: each thread has some of their channels and reads all images, instead of a copy of all weights.
      const i64 pixels = g.ho * g.wo;
      float* panel_buffer = dw ? scratch(7, g.n * pixels * panels * kPanel) : nullptr;
      const i64 padded = g.window_rows() * g.window_columns() * g.c;
      float* copy = dw && !g.fits_unpadded() ? scratch(2, g.n * padded) : nullptr;
      // Of the weights' gradient, a task has some of the taps, and some of the panels where few taps would read each panel
      // again and again.
      const i64 wanted = 4 * threads, ranges = std::clamp<i64>(row_taps / 128, 1, wanted);
      const i64 groups = std::min(panels, (wanted + ranges * g.kh - 1) / (ranges * g.kh));
      parallel_phases(pool, {packs, chunks, dw ? g.kh * ranges * groups : 0}, [&](int phase, i64 i) {
        if (phase == 0) return pack(i);
        if (phase == 1) {
          const i64 n0 = i * chunk, images = std::min(chunk, g.n - n0);
          if (images <= 0) return;
          const float* dz = gradient(n0, images, forms ? scratch(1, images * g.out()) : nullptr);
          if (dw) pack_panels(dz, images * pixels, o, panel_buffer + n0 * pixels * kPanel, 0, panels, g.n * pixels);
          if (copy) windows(x + n0 * g.in(), g, images, 0, g.ho, copy + n0 * padded);
          if (dx) image_gradient.apply(dz, images, packed, dx + n0 * g.in());
          return;
        }
        const i64 row = i / groups / ranges;
        const Range taps = range_of(row_taps, i / groups % ranges, ranges), part = range_of(panels, i % groups, groups);
        float* sum = dw + row * row_taps * o;
        const i64 first = part.first * kPanel, width = std::min(o, part.last * kPanel) - first;
        for (i64 t = taps.first; t < taps.last; t++) memset(sum + t * o + first, 0, width * sizeof(float));
        const View v = copy ? windows_at(copy, g, g.n, g.ho) : windows(x, g, g.n, 0, g.ho);
        weight_gradient(v.data + row * v.pitch, v.pixels, row_taps, taps, panel_buffer, g.n * pixels * kPanel, part, sum, o);
      });
      return ffi::Error::Success();
    }

  if (by_points) {
    float* buffer = forms ? scratch(2, g.n * g.out()) : nullptr;
    parallel_phases(pool, {packs, forms ? chunks : 0}, [&](int phase, i64 i) {
      if (phase == 0) return pack(i);
      const i64 n0 = std::min(g.n, i * chunk);
      gradient(n0, std::min(chunk, g.n - n0), buffer + n0 * g.out());
    });
    const float* dz = forms ? buffer : gradient(0, 0, nullptr);
    if (dx && by_panels) convolve_by_panels(pool, dz, w, true, dx, backward_tiles(g), g.n);
    if (dw && by_panels) weight_gradient_by_panels(pool, x, dz, dw, forward_tiles(g), g.n);
    if (by_panels) return ffi::Error::Success();
    if (dx) convolve_by_points(pool, dz, dx, packed, backward_tiles(g), g.n);
    if (dw) {
      float* du = scratch(6, winograd::kPoints * g.c * o);  // the weights' points are not needed any more
      weight_gradient_by_points(pool, x, dz, du, forward_tiles(g), g.n);
      const i64 parts = std::min(g.c, 4 * threads);
      parallel(pool, parts, [&](i64 i) { weight_values(du, dw, g.c, o, i, parts); });
    }
    return ffi::Error::Success();
  }

  const i64 size = method == kWinograd ? winograd::kPoints * g.c * o : weights;
  const i64 slots = std::min(chunks, threads * std::clamp<i64>(kSlotFloats / (threads * size), 1, 4));
  float* sums = dw ? scratch(7, slots * size) : nullptr;
  float* total = sums;
  if constexpr (!kIsHalf) total = method == kWinograd || method == kGrouped ? sums : dw;
  auto gradients = [&](i64 s) {
    float* sum = dw ? sums + s * size : nullptr;
    if (sum) memset(sum, 0, size * sizeof(float));
    for (i64 i = chunks * s / slots; i < chunks * (s + 1) / slots; i++) {
      const i64 n0 = i * chunk, images = std::min(chunk, g.n - n0);
      if (images <= 0) break;
      const float* dz = gradient(n0, images, forms ? scratch(1, images * g.out()) : nullptr);
      const T* from = x + n0 * g.in();
      T* to = dx ? dx + n0 * g.in() : nullptr;
      if (method == kWinograd) {
        const winograd::Tiles t = forward_tiles(g), b = backward_tiles(g);
        if (sum) winograd::weight_gradient(from, dz, sum, t, 0, images * t.per_image());
        if (to) winograd::convolve(dz, to, packed, b, 0, images * b.per_image());
      } else if (method == kDepthwise) {
        const float* weights = packed;
        if constexpr (!kIsHalf) weights = w;
        for (i64 c = 0; c < g.c; c += depthwise::kBlock)
          depthwise::backward(from, weights, dz, to, sum, depthwise_shape(g), c);
      } else if constexpr (kIsHalf) {
        continue;
      } else if (method == kGrouped) {
        for (i64 n = 0; n < images; n++)
          grouped::backward(from + n * g.in(), dz + n * g.out(), packed, to ? to + n * g.in() : nullptr, sum, blocks,
                            image_gradient);
      } else {
        if (sum) {
          const i64 pixels = images * g.ho * g.wo;
          float* dz_panels = scratch(2, pixels * panels * kPanel);
          pack_panels(dz, pixels, o, dz_panels, 0, panels);
          const View v = windows(from, g, images, 0, g.ho);
          for (i64 i = 0; i < g.kh; i++)
            weight_gradient(v.data + i * v.pitch, v.pixels, row_taps, {0, row_taps}, dz_panels, pixels * kPanel,
                            {0, panels}, sum + i * row_taps * o, o);
        }
        if (to) image_gradient.apply(dz, images, packed, to);
      }
    }
  };
  const i64 parts = size > 65536 ? 4 * threads : 1, value_parts = std::min(g.c, 4 * threads);
  parallel_phases(pool, {packs, slots, dw ? parts : 0, dw && method == kWinograd ? value_parts : 0}, [&](int phase, i64 i) {
    if (phase == 0) return pack(i);
    if (phase == 1) return gradients(i);
    if (phase == 3) return weight_values(sums, dw, g.c, o, i, value_parts);
    const Range part = range_of(size, i, parts);
    if (total != sums) memcpy(total + part.first, sums + part.first, (part.last - part.first) * sizeof(float));
    for (i64 s = 1; s < slots; s++)
      for (i64 k = part.first; k < part.last; k++) total[k] += sums[s * size + k];
  });
  if (!dw) return ffi::Error::Success();
  if constexpr (kIsHalf)
    if (method == kDepthwise) copy_values(sums, size, dw);
  if (method == kGrouped)
    for (i64 block = 0; block < blocks.count(); block++)
      blocks.each_weight(block, [&](i64 at, i64 from) { dw[at] = (T)sums[block * blocks.weights() + from]; });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace headrace

using headrace::Floats;
using Integers = ffi::Span<const int64_t>;

// The calls for images of one type.
#define HEADRACE_UNIT(SUFFIX, T)                                                                                              \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_convolve##SUFFIX, headrace::Convolve<T>,                                                   \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<Integers>("geometry").Attr<int64_t>("method")    \
                                    .Attr<int64_t>("products").Attr<int64_t>("activation").Attr<bool>("packed")               \
                                    .Arg<headrace::Images<T>>().Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets());       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_activate##SUFFIX, headrace::Activate<T>,                                                   \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<int64_t>("activation")                           \
                                    .Arg<headrace::Images<T>>().Arg<Floats>().Arg<Floats>().Arg<Floats>().RemainingArgs()     \
                                    .Ret<headrace::Images<T>>());                                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_sums##SUFFIX, headrace::Sums<T>,                                                           \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<int64_t>("activation")                           \
                                    .Arg<headrace::Images<T>>().Arg<headrace::Images<T>>().Arg<Floats>().Arg<Floats>()        \
                                    .Arg<Floats>().RemainingArgs().Ret<Floats>().Ret<Floats>().RemainingRets());              \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_gradients##SUFFIX, headrace::Gradients<T>,                                                 \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<Integers>("geometry").Attr<int64_t>("method")    \
                                    .Attr<int64_t>("products").Attr<int64_t>("activation").Attr<int64_t>("wants")             \
                                    .Arg<headrace::Images<T>>().Arg<headrace::Images<T>>().Arg<headrace::Images<T>>()         \
                                    .RemainingArgs().RemainingRets());                                                        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_max_pool##SUFFIX, headrace::MaxPool<T>,                                                    \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<Integers>("geometry")                            \
                                    .Arg<headrace::Images<T>>().Ret<headrace::Images<T>>().RemainingRets());                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_max_pool_gradient##SUFFIX, headrace::MaxPoolGradient<T>,                                   \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<Integers>("geometry")                            \
                                    .Arg<headrace::Images<T>>().Arg<headrace::Places>().Ret<headrace::Images<T>>())

HEADRACE_UNIT(, float);
HEADRACE_UNIT(_half, headrace::Half);
XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_pack, headrace::Pack,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<Integers>("geometry").Attr<int64_t>("method")
                                  .Arg<Floats>().Arg<Floats>().Arg<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_gate, headrace::Gate,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<int64_t>("activation").Attr<bool>("hard")
                                  .Attr<int64_t>("squeezed").Arg<Floats>().Arg<Floats>().Arg<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_bottleneck, headrace::Bottleneck,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<Integers>("geometry").Attr<int64_t>("expansion")
                                  .Attr<int64_t>("depthwise").Attr<int64_t>("activation").Attr<bool>("hard")
                                  .Attr<int64_t>("squeezed").Arg<Floats>().Arg<Floats>().Arg<Floats>().RemainingArgs()
                                  .Ret<Floats>());

extern "C" {
const char* hr_source_hash(void) { return HEADRACE_SOURCE_HASH; }
int hr_lanes(void) { return headrace::kLanes; }
int hr_runs_here(void) {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#else
  return 1;
#endif
}
}
