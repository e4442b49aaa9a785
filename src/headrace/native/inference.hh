// Convolutions of constant weights as products, with what follows them: the fastest way through memory for inference.
//
// Tiles of pixels are grouped into blocks that stay in the caches. For each block, the panels of weights pass by one after
// the other, so that all channels of a pixel are written within a short time.
#pragma once
#include <vector>

#include "products.hh"

namespace headrace::inference {

constexpr i64 kPass = 512;                // inputs of one pass over a tile at most
constexpr i64 kBlockRows = 4 * kMaxRows;  // pixels that share a panel in the L1 cache
constexpr i64 kNearWeights = 256 * 1024;  // floats: as many stay in the L2 cache
constexpr i64 kFarPixels = 192 * 1024;    // floats of a block that passes weights from further away

// One pass of a tile over a part of the inputs.
struct Pass {
  const float* a;
  i64 a_step, segments, segment_step, depth;
  const float* b;
  const float* next;  // weights that will be needed soon, and how many floats of them to fetch for each input
  i64 next_step;
  float* sums;  // [row][kPanel], of the passes before if `add`
  bool add;
  float* c;
  i64 c_step, channel;
  i64 ahead;  // floats from these results to those that will be needed soon; 0 where all are in the caches
  const Finish* finish;
};

// What a pass does with its sums: store them for the next pass, or finish them in registers. A choice of all activations
// here would leave the compiler too few registers for the sums.
enum Ending { kStored, kClamped, kHardSwished };

template <int kRows, int kVectors, Ending kEnding> static void tile(const Pass& p) {
  constexpr int kBases = (kRows + 2) / 3;
  Vec sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) sum[r][v] = p.add ? load(p.sums + r * kPanel + v * kLanes) : Vec{};
  if (kEnding != kStored && p.ahead) {
    const float* soon = (p.finish->residual ? p.finish->residual + (p.c - p.finish->y) : p.c) + p.ahead;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) __builtin_prefetch(soon + r * p.c_step + v * kLanes, 1);
  }
  const float *b = p.b, *next = p.next;
  const i64 a_step = p.a_step, depth = p.depth, next_step = p.next_step;
  for (i64 s = 0; s < p.segments; s++) {
    // Every third row has a pointer; the two after it are reached by x86's scaled index. One pointer for each row would
    // not fit the registers.
    const float* base[kBases];
#pragma GCC unroll 8
    for (int i = 0; i < kBases; i++) base[i] = p.a + s * p.segment_step + 3 * i * a_step;
    for (i64 k = 0; k < depth; k++, b += kPanel, next += next_step) {
      __builtin_prefetch(next, 0, 2);
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
  if constexpr (kEnding == kStored) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) store(p.sums + r * kPanel + v * kLanes, sum[r][v]);
    return;
  }
  const Finish& f = *p.finish;
  const float* residual = f.residual ? f.residual + (p.c - f.y) : nullptr;
  const float infinity = __builtin_inff();
  const Vec low = Vec{} + (f.act == kNone ? -infinity : 0.f), high = Vec{} + (f.act == kRelu6 ? 6.f : infinity);
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v++) {
    const Vec shift = load(f.shift + p.channel + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      Vec y = sum[r][v] + shift;
      if (residual) y += load(residual + r * p.c_step + v * kLanes);
      if constexpr (kEnding == kClamped) {
        y = y < low ? low : y;  // NaN stays NaN
        y = y > high ? high : y;
      } else {
        y = activated<kHardSwish>(y);
      }
      store(p.c + r * p.c_step + v * kLanes, y);
    }
  }
}

using Tile = void (*)(const Pass&);
template <int kVectors, Ending kEnding, int... kRows>
static inline Tile tile_fn(int rows, std::integer_sequence<int, kRows...>) {
  static const Tile table[] = {tile<kRows + 1, kVectors, kEnding>...};
  return table[rows - 1];
}
static inline Tile tile_fn(int rows, i64 width, Ending ending) {
  constexpr auto kRows = std::make_integer_sequence<int, kMaxRows>();
  auto choose = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    return ending == kStored    ? tile_fn<kVectors, kStored>(rows, kRows)
           : ending == kClamped ? tile_fn<kVectors, kClamped>(rows, kRows)
                                : tile_fn<kVectors, kHardSwished>(rows, kRows);
  };
  return width <= kLanes ? choose(std::integral_constant<int, 1>()) : choose(std::integral_constant<int, kPanelVectors>());
}

// Pixels of one tile.
struct Run {
  const float* a;
  float* c;
  int rows;
};

static inline void add_runs(std::vector<Run>& runs, const float* from, i64 from_step, float* to, i64 to_step, i64 pixels) {
  for (i64 tiles = (pixels + kMaxRows - 1) / kMaxRows, p = 0; tiles; tiles--) {
    const int rows = (int)((pixels - p + tiles - 1) / tiles);  // 16 pixels are 8 + 8 rather than 14 + 2
    runs.push_back({from + p * from_step, to + p * to_step, rows});
    p += rows;
  }
}

// A convolution: c[pixel][outputs] = finish(sum over segments (window rows) and their length of a[pixel ...] * packed
// weights), for a range of the panels.
struct Products {
  i64 segments, length, segment_step;
  const float* packed;
  i64 outputs;
  Range panels;
  const Finish& finish;

  i64 depth() const { return segments * length; }
  bool is_near() const { return (panels.last - panels.first) * depth() * kPanel <= kNearWeights; }
  i64 block_rows() const {
    return is_near() ? kBlockRows : std::max<i64>(kBlockRows, kFarPixels / depth() / kMaxRows * kMaxRows);
  }

  // All panels of one block of pixels, which are `a_step` and `c_step` apart. Of many inputs, each pass has a part.
  void apply(const std::vector<Run>& runs, i64 rows, i64 a_step, i64 c_step, bool into_cache = false) const {
    const bool whole = depth() <= kPass;
    const i64 parts = whole ? 1 : (length + kPass - 1) / kPass, part = (length + parts - 1) / parts;
    float* sums = scratch(3, rows * kPanel);
    Pass p = {};
    p.a_step = a_step, p.segment_step = segment_step, p.c_step = c_step, p.finish = &finish;
    p.segments = whole ? segments : 1;
    // The places of the next block's results, and what will be added to them, come closer meanwhile.
    p.ahead = into_cache ? 0 : rows * c_step;
    for (i64 panel = panels.first; panel < panels.last; panel++) {
      const i64 width = panel_width(outputs, panel);
      const bool in_registers = width % kLanes == 0 && finish.act != kSwish;
      p.channel = panel * kPanel;
      for (i64 s = 0; s < (whole ? 1 : segments); s++)
        for (i64 k0 = 0; k0 < length; k0 += part) {
          const i64 at = s * length + k0, size = std::min(part, length - k0);
          const bool is_last = whole || at + size == depth();
          const Ending ending = !is_last || !in_registers ? kStored : finish.act == kHardSwish ? kHardSwished : kClamped;
          p.depth = size;
          p.b = packed + (panel * depth() + at) * kPanel;
          p.add = at > 0;
          p.sums = sums;
          // While all tiles use these weights, those of the next pass come closer.
          p.next = p.b + p.segments * size * kPanel;
          p.next_step = std::max<i64>(1, kPanel / (i64)runs.size());
          for (const Run& run : runs) {
            p.a = run.a + s * segment_step + k0;
            p.c = run.c + p.channel;
            tile_fn(run.rows, width, ending)(p);
            if (is_last && ending == kStored)
              finish_rows(p.sums, kPanel, p.c, c_step, run.rows, p.channel, width, finish);
            p.sums += run.rows * kPanel;
            p.next += p.segments * size * p.next_step;
          }
        }
    }
  }
};

// Pixels a multiple of 4 KB apart fall into one set of the L1 cache: they are copied.
static inline bool gathers(i64 pixel_step) { return pixel_step * sizeof(float) % 4096 == 0; }

static void convolve(const float* a, const Pixels& in, i64 segments, i64 length, i64 segment_step, const float* packed,
                     float* c, const Pixels& out, i64 outputs, Range panels, const Finish& finish) {
  Products products = {segments, length, segment_step, packed, outputs, panels, finish};
  const i64 limit = products.block_rows(), count = in.count();
  std::vector<Run> runs;
  auto add = [&](const float* from, i64 from_step, float* to, i64 pixels) {
    add_runs(runs, from, from_step, to, out.pixel_step, pixels);
  };
  const bool is_aliased = gathers(in.pixel_step) && count > 8;
  // Rows of few pixels do not fill tiles, unless they are copied one behind the other.
  const bool fills_badly = in.images * in.rows > 1 && in.pixels < 2 * kMaxRows && in.pixels % kMaxRows;
  const bool is_dense = out.images * out.rows == 1 || (out.row_step == out.pixels * out.pixel_step &&
                                                       (out.images == 1 || out.image_step == out.rows * out.row_step));
  if (is_dense && (is_aliased || fills_badly)) {
    const i64 depth = products.depth(), step = depth + kLanes, blocks = (count + limit - 1) / limit;
    products.segments = 1, products.length = depth;
    float* copy = scratch(2, std::min(limit, count) * step);
    for (i64 i = 0; i < blocks; i++) {
      const Range r = range_of(count, i, blocks);
      for (i64 p = r.first; p < r.last; p++) {
        const i64 row = p / in.pixels;
        const float* from = a + row / in.rows * in.image_step + row % in.rows * in.row_step + p % in.pixels * in.pixel_step;
        for (i64 s = 0; s < segments; s++)
          memcpy(copy + (p - r.first) * step + s * length, from + s * segment_step, length * sizeof(float));
      }
      runs.clear();
      add(copy, step, c + r.first * out.pixel_step, r.last - r.first);
      products.apply(runs, r.last - r.first, step, out.pixel_step);
    }
    return;
  }
  i64 rows = 0;
  auto apply = [&] {
    products.apply(runs, rows, in.pixel_step, out.pixel_step);
    runs.clear(), rows = 0;
  };
  for (i64 n = 0; n < in.images; n++)
    for (i64 y = 0; y < in.rows; y++)
      for (i64 p = 0; p < in.pixels; p += limit) {
        const i64 pixels = std::min(limit, in.pixels - p);
        if (rows && rows + pixels > limit) apply();
        add(a + n * in.image_step + y * in.row_step + p * in.pixel_step, in.pixel_step,
            c + n * out.image_step + y * out.row_step + p * out.pixel_step, pixels);
        rows += pixels;
      }
  if (rows) apply();
}

}  // namespace headrace::inference
