// Convolutions as matrix products over windows of the images, without a copy of each window: the pixels of one window
// row are consecutive in memory. Weights and gradients are packed into panels of `kPanel` output channels.
#pragma once
#include <utility>

#include "vectors.hh"

namespace headrace {

// Rows of a register tile: pixels, or weights of one gradient. Its columns are the kPanel channels.
#if defined(__AVX512F__)
constexpr int kMaxRows = 14;
#else
constexpr int kMaxRows = 6;
#endif
constexpr int kPanelVectors = 2, kPanel = kPanelVectors * kLanes;
constexpr i64 kDepth = 256;  // input values per pixel of one pass: with kPanel channels, weights that stay in the L1 cache

// How far apart arrays of so many floats lie of which a line each is written at once: an odd number of cache lines. Lines that
// are a large power of two apart would share a few sets of the caches.
static constexpr i64 odd_lines(i64 floats) { return (floats + 15) / 16 * 16 | 16; }
static inline i64 panels_of(i64 outputs) { return (outputs + kPanel - 1) / kPanel; }
static inline i64 panel_width(i64 outputs, i64 panel) { return std::min<i64>(kPanel, outputs - panel * kPanel); }

// Pixels in images of rows, and how many floats lie between them.
struct Pixels {
  i64 images, rows, pixels;
  i64 image_step, row_step, pixel_step;
  i64 count() const { return images * rows * pixels; }
};

// matrix [depth][outputs] -> [panel][depth][kPanel], zeros behind the last output; the panels may be a part of deeper ones
static void pack_panels(const float* matrix, i64 depth, i64 outputs, float* out, i64 first, i64 last, i64 whole_depth = 0) {
  for (i64 p = first; p < last; p++) {
    const i64 width = panel_width(outputs, p);
    float* to = out + p * std::max(depth, whole_depth) * kPanel;
    const float* from = matrix + p * kPanel;
    if (width == kPanel)
      for (i64 k = 0; k < depth; k++, to += kPanel, from += outputs)
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; v++) store(to + v * kLanes, load(from + v * kLanes));
    else
      for (i64 k = 0; k < depth; k++, to += kPanel, from += outputs) {
        memcpy(to, from, width * sizeof(float));
        memset(to + width, 0, (kPanel - width) * sizeof(float));
      }
  }
}

// Ask for the cache lines of `count` floats. Memory is asked for one tile before it is used: the processor's own prefetching
// does not see that a panel follows, or which results come next.
static inline void fetch(const float* p, i64 count) {
  for (i64 i = 0; i < count; i += 16) __builtin_prefetch(p + i, 0, 2);
}
template <int kRows, int kVectors> static inline void fetch_results(const float* c, i64 c_step) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors * kLanes; v += 16) __builtin_prefetch(c + r * c_step + v, 1);
}

template <int kRows, int kVectors>
static inline void write_results(const Vec (&sum)[kRows][kVectors], float* c, i64 c_step, bool add) {
  if (add)
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) {
        float* to = c + r * c_step + v * kLanes;
        store(to, load(to) + sum[r][v]);
      }
  else
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) store(c + r * c_step + v * kLanes, sum[r][v]);
}

// c[row][...] (+)= sum over segments and depth of a[row * a_step + segment * segment_step + k] * b[k][...]
template <int kRows, int kVectors>
static void product_tile(const float* a, i64 a_step, i64 segments, i64 segment_step, i64 depth, const float* b, float* c,
                         i64 c_step, bool add) {
  constexpr int kBases = (kRows + 2) / 3;
  fetch_results<kRows, kVectors>(c, c_step);
  Vec sum[kRows][kVectors] = {};
  for (i64 s = 0; s < segments; s++) {
    // Every third row has a pointer; the two after it are reached by x86's scaled index. One pointer for each row would
    // not fit the registers.
    const float* base[kBases];
#pragma GCC unroll 8
    for (int i = 0; i < kBases; i++) base[i] = a + s * segment_step + 3 * i * a_step;
    for (const float* end = b + depth * kPanel; b != end; b += kPanel) {
      Vec w[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) w[v] = load(b + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++) {
        const float x = base[r / 3][(r % 3) * a_step];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) sum[r][v] += x * w[v];
      }
#pragma GCC unroll 8
      for (int i = 0; i < kBases; i++) {
        base[i]++;
        asm("" : "+r"(base[i]));  // keep the pointers apart
      }
    }
  }
  write_results<kRows, kVectors>(sum, c, c_step, add);
}

using TileFn = void (*)(const float*, i64, i64, i64, i64, const float*, float*, i64, bool);
template <int kVectors, int... kRows> static inline TileFn tile_fn(int rows, std::integer_sequence<int, kRows...>) {
  static const TileFn table[] = {product_tile<kRows + 1, kVectors>...};
  return table[rows - 1];
}
static inline TileFn tile_fn(int rows, i64 width) {
  using Rows = std::make_integer_sequence<int, kMaxRows>;
  return width <= kLanes ? tile_fn<1>(rows, Rows()) : tile_fn<kPanelVectors>(rows, Rows());
}

// One pass over a run of pixels and one panel; a partial panel goes through a tile of its own. `next`: the weights that
// the pass after this one uses; null where they are near. `far`: the pixels' values are not in the cache yet.
static void product_run(const float* a, i64 a_step, i64 pixels, i64 segments, i64 segment_step, i64 depth,
                        const float* b, float* c, i64 c_step, i64 width, bool add, const float* next = nullptr,
                        bool far = false) {
  const i64 tiles = (pixels + kMaxRows - 1) / kMaxRows;
  for (i64 t = 0, p = 0; t < tiles; t++) {
    if (next) {
      const Range part = range_of(segments * depth, t, tiles);
      fetch(next + part.first * kPanel, (part.last - part.first) * kPanel);
    }
    const int rows = (int)((pixels - p + tiles - t - 1) / (tiles - t));  // 16 pixels are 8 + 8 rather than 14 + 2
    const TileFn tile = tile_fn(rows, width);
    float* to = c + p * c_step;
    if (far)
      for (int r = 0; r < rows; r++) fetch(a + (p + rows + r) * a_step, depth);
    if (width % kLanes == 0) {
      tile(a + p * a_step, a_step, segments, segment_step, depth, b, to, c_step, add);
    } else {
      float part[kMaxRows * kPanel];
      if (add)
        for (int r = 0; r < rows; r++) memcpy(part + r * kPanel, to + r * c_step, width * sizeof(float));
      tile(a + p * a_step, a_step, segments, segment_step, depth, b, part, kPanel, add);
      for (int r = 0; r < rows; r++) memcpy(to + r * c_step, part + r * kPanel, width * sizeof(float));
    }
    p += rows;
  }
}

// Pixels of a block: with kDepth values each, they stay in the L2 cache while all panels pass by.
constexpr i64 kBlockPixels = 32 * kMaxRows;

// c[pixel][outputs] = sum over segments (window rows) and their length of a[pixel ...] * packed weights, for a range of
// the panels
static void convolve(const float* a, const Pixels& in, i64 segments, i64 length, i64 segment_step, const float* packed,
                     float* c, const Pixels& out, i64 outputs, Range range) {
  const i64 depth = segments * length, panels = range.last - range.first;
  // As many window rows as fit a pass, or each row in equal parts.
  const bool whole = depth <= kDepth;
  const i64 parts = whole ? 1 : (length + kDepth - 1) / kDepth, part = (length + parts - 1) / parts;
  // Rows that are a large power of two apart fall into the same few cache sets; packed they do not. That pays where
  // several panels read them.
  const bool packs = !whole && panels > 2;
  const i64 packed_step = part + 16;
  // Packed rows follow each other: where the outputs do too, tiles need not end with a row.
  const bool is_run = packs && out.row_step == out.pixels * out.pixel_step &&
                      (out.images == 1 || out.image_step == out.rows * out.row_step);
  // A block is some rows, or a part of one.
  const i64 lines = in.images * in.rows, per_line = (in.pixels + kBlockPixels - 1) / kBlockPixels;
  const i64 lines_at_once = per_line > 1 ? 1 : std::max<i64>(1, kBlockPixels / in.pixels);
  const i64 blocks = (lines + lines_at_once - 1) / lines_at_once;
  auto input = [&](i64 line) { return line / in.rows * in.image_step + line % in.rows * in.row_step; };
  auto output = [&](i64 line) { return line / in.rows * out.image_step + line % in.rows * out.row_step; };
  for (i64 i = 0; i < blocks * per_line; i++) {
    const Range block = range_of(lines, i / per_line, blocks);
    const i64 first = in.pixels * (i % per_line) / per_line, pixels = in.pixels * (i % per_line + 1) / per_line - first;
    const i64 count = (block.last - block.first) * pixels;
    float* copy = packs ? scratch(3, count * packed_step) : nullptr;
    for (i64 s = 0; s < (whole ? 1 : segments); s++)
      for (i64 k0 = 0; k0 < length; k0 += part) {
        const i64 k = std::min(part, length - k0), row = s * length + k0;
        const float* from = a + s * segment_step + k0 + first * in.pixel_step;
        float* to = copy;
        for (i64 line = block.first; packs && line < block.last; line++)
          for (i64 x = 0; x < pixels; x++, to += packed_step) {
            const float* pixel = from + input(line) + x * in.pixel_step;
            fetch(pixel + 4 * in.pixel_step, k);
            memcpy(to, pixel, k * sizeof(float));
          }
        for (i64 p = range.first; p < range.last; p++) {
          const float *b = packed + (p * depth + row) * kPanel, *next = p + 1 < range.last ? b + depth * kPanel : nullptr;
          float* results = c + first * out.pixel_step + p * kPanel;
          const i64 width = panel_width(outputs, p);
          if (is_run) {
            product_run(copy, packed_step, count, 1, 0, k, b, results + output(block.first), out.pixel_step, width, row > 0,
                        next);
            continue;
          }
          for (i64 line = block.first; line < block.last; line++)
            product_run(packs ? copy + (line - block.first) * pixels * packed_step : from + input(line),
                        packs ? packed_step : in.pixel_step, pixels, whole ? segments : 1, segment_step, k, b,
                        results + output(line), out.pixel_step, width, row > 0, line == block.first ? next : nullptr,
                        !packs && p == range.first && segments == 1);
        }
      }
  }
}

// The gradient of the weights is a product over pixels. Their values are copied to [block of taps][pixel][kSlot] first: read
// in place they would be a whole pixel apart, and for many channels in the same few cache sets.
constexpr int kSlot = (kMaxRows + kLanes - 1) / kLanes * kLanes;
constexpr i64 kPixelDepth = 256;  // pixels of one pass: enough to read and write the sums rarely, few enough for the L1 cache
constexpr i64 kSlotBlocks = 20;   // blocks of taps that stay in the L2 cache while all panels pass by

// c[tap][...] (+)= sum over pixels of a[pixel][tap] * g[pixel][...], kStep taps apart
template <i64 kStep, int kRows, int kVectors>
static void gradient_tile(const float* a, i64 pixels, const float* g, float* c, i64 c_step, bool add) {
  fetch_results<kRows, kVectors>(c, c_step);
  Vec sum[kRows][kVectors] = {};
  auto some = [&](auto size) {  // pixels at once: pointers and counters take a fifth of the instructions of a single one
    constexpr int kSize = decltype(size)::value;
#pragma GCC unroll 4
    for (int u = 0; u < kSize; u++) {
      Vec d[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) d[v] = load(g + u * kPanel + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) sum[r][v] += a[u * kStep + r] * d[v];
    }
    a += kSize * kStep, g += kSize * kPanel;
  };
  i64 k = 0;
  for (; k + 4 <= pixels; k += 4) some(std::integral_constant<int, 4>());
  for (; k < pixels; k++) some(std::integral_constant<int, 1>());
  write_results<kRows, kVectors>(sum, c, c_step, add);
}

using GradientFn = void (*)(const float*, i64, const float*, float*, i64, bool);
template <i64 kStep, int... kRows>
static inline GradientFn gradient_fn(int rows, i64 width, std::integer_sequence<int, kRows...>) {
  static const GradientFn narrow[] = {gradient_tile<kStep, kRows + 1, 1>...};
  static const GradientFn whole[] = {gradient_tile<kStep, kRows + 1, kPanelVectors>...};
  return (width <= kLanes ? narrow : whole)[rows - 1];
}

// For each pixel first .. last, the values of `blocks` blocks of taps, `size` from starts[block] on, to slots [block][pixel],
// `block_step` apart. Pixel by pixel: a pixel's values lie side by side, those of one block a whole pixel apart.
static void copy_slots(const float* a, const Pixels& in, i64 first, i64 last, i64 size, const i64* starts, i64 blocks,
                       float* out, i64 block_step) {
  i64 x = first % in.pixels, y = first / in.pixels % in.rows, n = first / in.pixels / in.rows;
  for (i64 i = first; i < last; n++, y = 0)
    for (; y < in.rows && i < last; y++, x = 0) {
      const float* p = a + n * in.image_step + y * in.row_step + x * in.pixel_step;
      const i64 count = std::min(in.pixels - x, last - i);
      i += count;
      for (i64 k = 0; k < count; k++, p += in.pixel_step, out += kSlot)
        for (i64 b = 0; b < blocks; b++) {
          const float* from = p + starts[b];
          float* to = out + b * block_step;
          if (size == kSlot)
#pragma GCC unroll 2
            for (int v = 0; v < kSlot / kLanes; v++) store(to + v * kLanes, load(from + v * kLanes));
          else
            memcpy(to, from, size * sizeof(float));
        }
    }
}

// dw[tap][outputs] += sum over pixels of a[pixel + tap] * gradients, for a range of the `taps` and of the panels; the
// gradients are panels [pixel][kPanel], `panel_step` apart
static void weight_gradient(const float* a, const Pixels& in, i64 taps, Range range, const float* g, i64 panel_step,
                            Range panels, float* dw, i64 outputs) {
  using Rows = std::make_integer_sequence<int, kMaxRows>;
  const i64 count = range.last - range.first, blocks = (count + kMaxRows - 1) / kMaxRows, pixels = in.count();
  const i64 parts = (pixels + kPixelDepth - 1) / kPixelDepth, part = (pixels + parts - 1) / parts;
  const i64 size = std::min<i64>(kSlot, taps);
  auto tap_of = [&](i64 block) { return range.first + count * block / blocks; };
  auto start_of = [&](i64 block) { return std::min(tap_of(block), taps - size); };  // never beyond the last tap
  const i64 block_step = odd_lines(part * kSlot);
  float* slots = scratch(3, std::min(blocks, kSlotBlocks) * block_step);
  for (i64 p0 = 0; p0 < pixels; p0 += part)
    for (i64 b0 = 0; b0 < blocks; b0 += kSlotBlocks) {
      const i64 depth = std::min(part, pixels - p0), b1 = std::min(blocks, b0 + kSlotBlocks);
      i64 starts[kSlotBlocks];
      for (i64 b = b0; b < b1; b++) starts[b - b0] = start_of(b);
      copy_slots(a, in, p0, p0 + depth, size, starts, b1 - b0, slots, block_step);
      for (i64 panel = panels.first; panel < panels.last; panel++) {
        const i64 width = panel_width(outputs, panel);
        const float *d = g + panel * panel_step + p0 * kPanel, *next = panel + 1 < panels.last ? d + panel_step : nullptr;
        for (i64 b = b0; b < b1; b++) {
          const i64 tap = tap_of(b);
          const int rows = (int)(tap_of(b + 1) - tap);
          const float* from = slots + (b - b0) * block_step + tap - start_of(b);
          const GradientFn tile = gradient_fn<kSlot>(rows, width, Rows());
          float* to = dw + tap * outputs + panel * kPanel;
          if (next) {
            const Range soon = range_of(depth, b - b0, b1 - b0);
            fetch(next + soon.first * kPanel, (soon.last - soon.first) * kPanel);
          }
          if (width % kLanes == 0) {
            tile(from, depth, d, to, outputs, true);
          } else {
            float sums[kMaxRows * kPanel];
            tile(from, depth, d, sums, kPanel, false);
            for (int r = 0; r < rows; r++)
              for (i64 k = 0; k < width; k++) to[r * outputs + k] += sums[r * kPanel + k];
          }
        }
      }
    }
}

}  // namespace headrace
