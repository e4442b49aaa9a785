// Convolutions of bfloat16 images: products over 32 inputs at a time, summed in float32 and rounded once.
//
// The products are AMX's, of 16 pixels and 16 outputs in one instruction; or, where a processor has no AMX, those of
// AVX512_BF16, of two inputs of a pixel and 16 outputs. Both are in the library for AVX-512 alone. Tests, and they alone, have
// the latter also in float32 arithmetic, in every library: everything around the products is tested on any processor.
#include "bfloat16.hh"

#include <utility>

#if defined(__AVX512F__) && defined(__x86_64__) && defined(__linux__)
#define HEADRACE_HALF 1
#include <sys/syscall.h>
#include <unistd.h>
#define AMX __attribute__((target("amx-tile,amx-bf16")))
#define DOT __attribute__((target("avx512bf16")))
#endif

namespace headrace::bfloat16 {
namespace {

typedef uint32_t Unsigned __attribute__((vector_size(kLanes * 4)));
typedef int32_t UnalignedInts __attribute__((vector_size(kLanes * 4), aligned(2), may_alias));
constexpr i64 kTile = 16, kStep = 32, kOutputs = 2 * kTile;  // pixels, inputs and outputs of one pass
constexpr i64 kTaskPixels = 512;
enum Products : i64 { kMissing, kEmulated, kVectors, kTiles };  // as in ops/native_units.py
using Halves = ffi::Buffer<ffi::BF16>;

i64 steps_of(i64 inputs) { return (inputs + kStep - 1) / kStep; }
i64 blocks_of(i64 outputs) { return (outputs + kOutputs - 1) / kOutputs; }
i64 block_size(const Geometry& g) { return g.kh * g.kw * steps_of(g.c) * kStep * kOutputs; }

// Windows of few channels, such as those of images, are [kh][1][kw c], as they lie in memory, to fill steps. The values behind
// a window are multiplied by zero.
bool is_narrow(const Geometry& g) { return g.c < kTile && g.kw > 1; }
Geometry narrowed(Geometry g) {
  if (is_narrow(g)) g.c *= g.kw, g.kw = 1;
  return g;
}

// One tile of weights, [pair of inputs][output][2], with zeros around; `input` and `output`: how far apart they are.
void pack_tile(const Half* w, i64 inputs, i64 outputs, i64 input, i64 output, Half* out) {
  auto pairs_at = [&](i64 pair, i64 o) -> UnalignedInts& { return *(UnalignedInts*)(out + (pair * kTile + o) * 2); };
  if (output == 1) {
    for (i64 k = 0; k < kStep; k += 2)
      for (i64 o = 0; o < kTile; o += kLanes) {
        const i64 n = std::clamp<i64>(outputs - o, 0, kLanes);
        auto row = [&](i64 i) { return i < inputs && n ? load_bits(w + i * input + o, n) : Ints{}; };
        pairs_at(k / 2, o) = row(k) | row(k + 1) << 16;
      }
  } else if (input == 1 && inputs >= kStep && outputs >= kTile) {
    for (i64 o = 0; o < kTile; o += kLanes)
      for (i64 pair = 0; pair < kStep / 2; pair += kLanes) {
        Vec rows[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) rows[i] = (Vec) * (const UnalignedInts*)(w + (o + i) * output + 2 * pair);
        exchange<kLanes / 2>(rows);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) pairs_at(pair + i, o) = (Ints)rows[i];
      }
  } else {
    for (i64 k = 0; k < kStep; k += 2)
      for (i64 o = 0; o < kTile; o++)
        for (i64 e = 0; e < 2; e++) *out++ = o < outputs && k + e < inputs ? w[(k + e) * input + o * output] : 0;
  }
}

// The weights of one block of outputs, [tap][step][half of the outputs] of tiles. at(tap): where a tap's weights are.
template <class At> void pack_block(const Geometry& g, const At& at, i64 input, i64 output, i64 block, Half* out) {
  for (i64 tap = 0; tap < g.kh * g.kw; tap++)
    for (i64 k = 0; k < steps_of(g.c) * kStep; k += kStep)
      for (i64 o = block * kOutputs; o < (block + 1) * kOutputs; o += kTile, out += kStep * kTile)
        pack_tile(at(tap) + k * input + o * output, g.c - k, g.o - o, input, output, out);
}

// Windows of some output rows: the first pixel of each, and how many values lie between pixels and rows.
struct Rows {
  const Half* data;
  i64 pixel, pitch, channels;
};
// Output rows first .. last of one image, or pixels of a pointwise convolution, with so many channels; copied where zeros are
// missing around the images or behind the channels.
Rows rows_at(const Half* x, const Geometry& g, Range rows, i64 channels, bool copies = false) {
  if (!copies && channels == g.c && g.fits_unpadded())
    return {x + rows.first * g.stride * g.w * g.c, g.stride * g.c, g.w * g.c, g.c};
  const i64 width = g.window_columns(), first = std::max<i64>(0, g.left), last = std::min(width, g.w + g.left);
  const i64 height = (rows.last - rows.first - 1) * g.stride + g.kh, pitch = width * channels;
  const i64 size = height * pitch + kStep;  // the last window of few channels ends with a step
  Half* copy = (Half*)scratch(4, size / 2 + 1);
  memset(copy, 0, size * sizeof(Half));
  for (i64 i = 0; i < height; i++) {
    const i64 y = rows.first * g.stride - g.top + i;
    if (y < 0 || y >= g.h || first >= last) continue;
    const Half* from = x + (y * g.w + first - g.left) * g.c;
    Half* to = copy + i * pitch + first * channels;
    if (channels == g.c) memcpy(to, from, (last - first) * g.c * sizeof(Half));
    for (i64 j = first; channels != g.c && j < last; j++, to += channels, from += g.c) memcpy(to, from, g.c * sizeof(Half));
  }
  return {copy, g.stride * channels, pitch, channels};
}

#if defined(HEADRACE_HALF)
AMX void configure(i64 rows) {
  struct alignas(64) {
    uint8_t palette = 1, first = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } tiles;
  for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = i < 6 ? (uint8_t)rows : (uint8_t)kTile;
  asm volatile("" : : "r"(&tiles) : "memory");  // GCC's intrinsic names only the first bytes of what it reads
  _tile_loadconfig(&tiles);
}
AMX void release() { _tile_release(); }

// out [2 kTile][kOutputs] = the products of two runs of pixels with one block of outputs
AMX void product(const Half* first, const Half* second, const Rows& x, const Geometry& g, const Half* w, float* out) {
  asm volatile("" : : : "memory");  // the loads below name no memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const i64 step = x.pixel * (i64)sizeof(Half);
  for (i64 i = 0; i < g.kh; i++)
    for (i64 j = 0; j < g.kw; j++) {
      const i64 at = i * x.pitch + j * x.channels;
      for (i64 k = at; k < at + x.channels; k += kStep, w += kStep * kOutputs) {
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + kStep * kTile, 64);
        _tile_loadd(4, first + k, step);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, second + k, step);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  constexpr i64 kBytes = kOutputs * sizeof(float);
  _tile_stored(0, out, kBytes);
  _tile_stored(1, out + kTile, kBytes);
  _tile_stored(2, out + kTile * kOutputs, kBytes);
  _tile_stored(3, out + kTile * kOutputs + kTile, kBytes);
  asm volatile("" : : : "memory");
}
#else
#define DOT
#endif

// sum += the products of a pair of inputs with those of kLanes outputs
template <Products kBy> DOT inline Vec with_pair(Vec sum, Ints weights, const Half* pair) {
  int32_t both;
  memcpy(&both, pair, sizeof both);
#if defined(HEADRACE_HALF)
  if constexpr (kBy == kVectors)
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(both));
#endif
  const Ints x = Ints{} + both, upper = Ints{} + (int32_t)0xffff0000;
  return sum + (Vec)(x << 16) * (Vec)(weights << 16) + (Vec)(x & upper) * (Vec)(weights & upper);
}

// out [kRows][kOutputs] = the products of a run of pixels with one block of outputs
template <int kRows, Products kBy>
DOT void vector_product(const Half* from, const Rows& x, const Geometry& g, const Half* w, float* out) {
  constexpr int kBases = (kRows + 2) / 3, kParts = kOutputs / kLanes, kHalf = kParts / 2;
  Vec sum[kRows][kParts] = {};
  const i64 step = x.pixel;
  for (i64 i = 0; i < g.kh; i++)
    for (i64 j = 0; j < g.kw; j++)
      for (i64 k = 0; k < x.channels; k += kStep, w += kStep * kOutputs) {
        // As in inference.hh: every third row has a pointer.
        const Half* base[kBases];
#pragma GCC unroll 8
        for (int b = 0; b < kBases; b++) base[b] = from + i * x.pitch + j * x.channels + k + 3 * b * step;
        const i64 pairs = std::min(kStep, g.c - k + 1) / 2;  // behind them are zeros
        for (i64 p = 0; p < pairs; p++) {
          Ints weights[kParts];
#pragma GCC unroll 8
          for (int v = 0; v < kParts; v++)
            weights[v] = *(const UnalignedInts*)(w + 2 * kTile * p + v / kHalf * kStep * kTile + v % kHalf * 2 * kLanes);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < kParts; v++)
              sum[r][v] = with_pair<kBy>(sum[r][v], weights[v], base[r / 3] + (r % 3) * step);
#pragma GCC unroll 8
          for (int b = 0; b < kBases; b++) {
            base[b] += 2;
            asm("" : "+r"(base[b]));  // keep the pointers apart
          }
        }
      }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kParts; v++) store(out + r * kOutputs + v * kLanes, sum[r][v]);
}

constexpr int kMostRows = 14;  // 28 of the 32 registers are sums, two are weights
using VectorProduct = void (*)(const Half*, const Rows&, const Geometry&, const Half*, float*);
template <Products kBy, int... kRows> VectorProduct product_of(i64 rows, std::integer_sequence<int, kRows...>) {
  static const VectorProduct table[] = {vector_product<kRows + 1, kBy>...};
  return table[rows - 1];
}
// The same for up to kTile pixels.
void vector_products(Products by, i64 pixels, const Half* from, const Rows& x, const Geometry& g, const Half* w, float* out) {
  constexpr auto kRows = std::make_integer_sequence<int, kMostRows>();
  for (i64 parts = pixels > kMostRows ? 2 : 1, p = 0; parts; parts--) {
    const i64 rows = (pixels - p + parts - 1) / parts;
    const auto product = by == kVectors ? product_of<kVectors>(rows, kRows) : product_of<kEmulated>(rows, kRows);
    product(from + p * x.pixel, x, g, w, out + p * kOutputs);
    p += rows;
  }
}

// The tiles of this thread while a task multiplies with them: runs of this many pixels.
struct Tiles {
  Products by;
  Tiles(Products products, [[maybe_unused]] i64 pixels) : by(products) {
#if defined(HEADRACE_HALF)
    if (by == kTiles) configure(pixels);
#endif
  }
  ~Tiles() {
#if defined(HEADRACE_HALF)
    if (by == kTiles) release();
#endif
  }
};

// A row of pixels is runs of equal length, so the last begins before the one ahead of it ends. Two are multiplied at a time.
struct Runs {
  i64 all, runs, pixels;
  explicit Runs(i64 count) : all(count), runs((count + kTile - 1) / kTile), pixels((count + runs - 1) / runs) {}
  i64 pairs() const { return (runs + 1) / 2; }
  i64 in_pair(i64 pair) const { return std::min<i64>(2, runs - 2 * pair); }
  i64 place(i64 run) const { return std::min(run * pixels, all - pixels); }

  // out [2 kTile][kOutputs] = the products of a pair of runs with one block of outputs; of an odd one, AMX computes it twice
  void multiply(Products by, i64 pair, const Half* row, const Rows& x, const Geometry& g, const Half* w, float* out) const {
    const Half *first = row + place(2 * pair) * x.pixel, *second = row + place(2 * pair + 1) * x.pixel;
#if defined(HEADRACE_HALF)
    if (by == kTiles) return product(first, second, x, g, w, out);
#endif
    vector_products(by, pixels, first, x, g, w, out);
    if (in_pair(pair) > 1) vector_products(by, pixels, second, x, g, w, out + kTile * kOutputs);
  }
};

// How many values lie between results.
struct Steps {
  i64 pixel, row, image;
};
// Sums over the results of one task, of one block of outputs.
struct BlockSums {
  float values[kOutputs] = {}, squares[kOutputs] = {};
  void add(double* to, i64 outputs, i64 channel) const {  // to [2][outputs]
    for (i64 k = 0; k < std::min(kOutputs, outputs - channel); k++)
      to[channel + k] += values[k], to[outputs + channel + k] += squares[k];
  }
};
// The same values as bfloat16, in the lower half of each lane.
template <Products kBy> DOT inline Ints halved(Vec v) {
#if defined(HEADRACE_HALF)
  if constexpr (kBy != kEmulated)  // its own instruction; values below 2^-126 become zero
    return (Ints)_mm512_maskz_cvtepu16_epi32((__mmask16)-1, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#endif
  return (Ints)((Unsigned)rounded_bits(v) >> 16);
}
// Round the products of some pixels; of those from `first` on, the sums are added too, if they are not null.
template <Products kBy>
DOT void round_pixels(const float* products, Half* y, i64 step, i64 pixels, i64 first, i64 channel, i64 outputs, BlockSums* sums) {
  for (i64 o = channel; o < std::min(outputs, channel + kOutputs); o += kLanes) {
    const i64 n = std::min<i64>(kLanes, outputs - o);
    const float* from = products + o - channel;
    Half* to = y + o;
    if (!sums) {
      for (i64 p = 0; p < pixels; p++) store_bits(to + p * step, halved<kBy>(load(from + p * kOutputs)), n);
      continue;
    }
    Vec sum = load(sums->values + o - channel), squares = load(sums->squares + o - channel);
    for (i64 p = 0; p < pixels; p++) {
      const Ints bits = halved<kBy>(load(from + p * kOutputs));
      store_bits(to + p * step, bits, n);
      const Vec v = p < first ? Vec{} : (Vec)(bits << 16);
      sum += v;
      squares += v * v;
    }
    store(sums->values + o - channel, sum);
    store(sums->squares + o - channel, squares);
  }
}
void finish_pixels(const float* sums, Half* y, i64 step, const Half* residual, i64 pixels, i64 channel, i64 outputs,
                   const Behind& b) {
  for_activation(b.act, [&](auto act) {
    for (i64 o = channel; o < std::min(outputs, channel + kOutputs); o += kLanes) {
      const i64 n = std::min<i64>(kLanes, outputs - o);
      const Vec scale = b.scale ? load(b.scale + o, n) : Vec{} + 1.f, shift = b.shift ? load(b.shift + o, n) : Vec{};
      for (i64 p = 0; p < pixels; p++) {
        Vec v = load(sums + p * kOutputs + o - channel) * scale + shift;
        if (residual) v += load(residual + p * step + o, n);
        store(y + p * step + o, activated<decltype(act)::value>(v), n);
      }
    }
  });
}

// Output rows first .. last of one image, and a range of the blocks of outputs; y is the image's. `sums`, if not null: [2][o].
void convolve_rows(Products by, const Half* x, const Half* packed, Half* y, const Steps& to, const Geometry& g, Range rows,
                   Range blocks, const Behind& b, double* sums, bool narrow = false) {
  const Geometry d = narrow ? narrowed(g) : g;
  Rows view = rows_at(x, g, rows, narrow ? g.c : steps_of(g.c) * kStep, narrow);
  view.channels = steps_of(d.c) * kStep;
  const bool rounds = !b.scale && !b.residual && !b.act;
  const auto round = by == kEmulated ? round_pixels<kEmulated> : round_pixels<kVectors>;
  const Runs runs(g.wo);
  alignas(64) float products[2 * kTile * kOutputs];
  const Tiles tiles(by, runs.pixels);
  for (i64 block = blocks.first; block < blocks.last; block++) {
    BlockSums added;
    for (i64 row = 0; row < rows.last - rows.first; row++)
      for (i64 pair = 0; pair < runs.pairs(); pair++) {
        runs.multiply(by, pair, view.data + row * g.stride * view.pitch, view, d, packed + block * block_size(d), products);
        for (i64 i = 0; i < runs.in_pair(pair); i++) {
          const i64 run = 2 * pair + i, at = (rows.first + row) * to.row + runs.place(run) * to.pixel;
          const float* from = products + i * kTile * kOutputs;
          if (rounds)
            round(from, y + at, to.pixel, runs.pixels, run * runs.pixels - runs.place(run), block * kOutputs, g.o,
                  sums ? &added : nullptr);
          else
            finish_pixels(from, y + at, to.pixel, b.residual ? b.residual + at : nullptr, runs.pixels, block * kOutputs, g.o, b);
        }
      }
    if (sums) added.add(sums, g.o, block * kOutputs);
  }
}

// Pointwise: all pixels as one row.
Geometry in_one_row(Geometry g) {
  g = flattened(g);
  if (g.is_pointwise() && g.h == 1) g.w = g.wo = g.n, g.n = 1;
  return g;
}

// The tasks of a convolution.
struct Division {
  Geometry g;
  Steps steps;
  i64 groups, bands;
  bool by_pixels, narrow;

  Division(const Geometry& geometry, const Steps& between, i64 threads, bool joins = false)
      : g(geometry), steps(between), narrow(joins && is_narrow(g)) {
    const i64 blocks = blocks_of(g.o);
    // Fewer pixels than weights: each thread has some of the outputs. Else some of the rows or, of one long row, pixels.
    const bool by_outputs = g.kh * g.kw * g.c * g.o > g.n * g.in() && blocks >= threads;
    by_pixels = g.is_pointwise() && g.n * g.h == 1;
    const i64 units = by_pixels ? (g.wo + 4 * kTile - 1) / (4 * kTile) : g.ho;
    const i64 wanted = by_pixels ? std::max(4 * threads, g.wo / kTaskPixels) : (4 * threads + g.n - 1) / g.n;
    groups = by_outputs ? threads : 1;
    bands = by_outputs ? 1 : std::min(units, wanted);
  }
  i64 tasks() const { return g.n * bands * groups; }
  void convolve(Products by, i64 task, const Half* x, const Half* w, Half* y, const Behind& b, double* sums) const {
    const i64 n = task / groups / bands, band = task / groups % bands;
    const Range range = range_of(blocks_of(g.o), task % groups, groups);
    Geometry part = g;
    Range rows = range_of(g.ho, band, bands);
    i64 from = n * g.in(), to = n * steps.image;
    if (by_pixels) {
      const Range pixels = range_of(g.wo, band, bands);
      part.w = part.wo = pixels.last - pixels.first;
      from += pixels.first * g.c, to += pixels.first * steps.pixel;
      rows = {0, 1};
    }
    const Behind behind = {b.scale, b.shift, b.residual ? b.residual + to : nullptr, b.act};
    convolve_rows(by, x + from, w, y + to, steps, part, rows, range, behind, sums, narrow);
  }
};

void pack_forward(const Geometry& whole, const Half* w, i64 block, Half* packed) {
  const Geometry g = narrowed(whole);
  auto at = [&](i64 tap) { return w + tap * g.c * g.o; };
  pack_block(g, at, g.o, 1, block, packed + block * block_size(g));
}

// ---- the gradient of the weights
//
// dw[tap][channel][output] is the sum over pixels of x[the tap's pixel][channel] dy[pixel][output]: the products from above, with
// channels for their pixels, and pixels for their inputs. The images are packed as planes, [channel][pixel], in which the pixels
// of each tap lie as far behind those of the first. A plane's rows have the zeros around the image in them and are longer than
// those of the outputs, whose gradient therefore has zeros behind each row. With stride S a tap meets every S-th row and column:
// these are a plane of their own, one of S S phases.

constexpr i64 kMostPixels = 2048;          // of one product: the values of 32 channels and of 32 outputs stay in the L2 cache
constexpr i64 kPackedHalfs = 512 * 1024;   // of a task that packs for itself: all of them stay there
constexpr i64 kFewestPixels = 64;          // of a task, unless there are more for each
constexpr i64 kSums = 2 * kTile * kOutputs;  // of one tap, a pair of runs of channels and a block of outputs

i64 rounded_up(i64 value, i64 to) { return (value + to - 1) / to * to; }

struct Planes {
  Geometry g;
  bool many;
  i64 channels, columns;        // of a window; those of few channels are [kh][1][kw c], as they lie in memory, to fill tiles
  i64 across, phases;           // phases of columns, and of rows and columns
  // Rows of outputs, and pixels of a plane's. Windows of one pixel: the rows of all images; pointwise: of so many pixels.
  i64 images, rows, width;
  i64 band, bands;              // rows of a band, which are packed at once, and bands of an image
  i64 pixels, pitch;            // of a band's gradient, in whole steps with zeros, and of each of its planes
  i64 together, groups;         // bands of one product, and all such groups

  Planes(const Geometry& geometry, i64 threads) : g(geometry), many(g.kh * g.kw * g.c * g.o > kManyWeights) {
    const bool is_pixel = g.kh == 1 && g.kw == 1;
    channels = narrowed(g).c, columns = narrowed(g).kw;
    across = std::min(g.stride, columns), phases = std::min(g.stride, g.kh) * across;
    images = is_pixel ? 1 : g.n, rows = is_pixel ? g.n * g.ho : g.ho, width = g.wo + (columns - 1) / g.stride;
    const i64 fitting = kPackedHalfs / (phases * channels + g.o), most = many ? kMostPixels : std::min(kMostPixels, fitting);
    if (g.is_pointwise()) {
      const i64 all = g.n * g.h * g.w, wanted = std::max(kFewestPixels, all / (4 * threads));
      const i64 parts = (all + std::min(wanted, many ? kTaskPixels : most) - 1) / std::min(wanted, many ? kTaskPixels : most);
      width = rounded_up((all + parts - 1) / parts, kStep);
      rows = (all + width - 1) / width;
    }
    band = g.is_pointwise() ? 1 : std::clamp<i64>(most / width, 1, rows);
    bands = (rows + band - 1) / band, band = (rows + bands - 1) / bands, bands = (rows + band - 1) / band;
    pixels = rounded_up(band * width, kStep);
    // An odd number of cache lines: channels of one pixel are spread over all sets of a cache.
    pitch = (rounded_up(pixels + place_of(taps() - 1), kStep) / kStep | 1) * kStep;
    together = std::clamp<i64>(most / pixels, 1, images * bands), groups = (images * bands + together - 1) / together;
  }
  i64 taps() const { return g.kh * columns; }
  i64 phase_of(i64 tap) const { return tap / columns % g.stride * across + tap % columns % g.stride; }
  i64 place_of(i64 tap) const { return tap / columns / g.stride * width + tap % columns / g.stride; }
  i64 band_size() const { return phases * channels * pitch; }
  i64 block_size() const { return together * pixels * kOutputs; }
  i64 bands_of(i64 group) const { return std::min(together, images * bands - group * together); }
  // Pixels of the gradient of one band, which follow each other.
  Range pixels_of(i64 index) const {
    const i64 pointwise = g.n * g.h * g.w, image = index / bands, first = index % bands * band;
    if (g.is_pointwise()) return {index * width, std::min(pointwise, (index + 1) * width)};
    return {(image * rows + first) * g.wo, (image * rows + std::min(rows, first + band)) * g.wo};
  }
};

// The pixels of some rows, one after another: null rows, and what is behind `count` pixels of a row, are zeros.
struct Walk {
  const std::vector<const Half*>& lines;
  i64 count, step, width;
  const Half* zeros;
  size_t y = 0;
  i64 x = 0;
  const Half* next() {
    const Half* at = y < lines.size() && lines[y] && x < count ? lines[y] + x * step : zeros;
    if (++x == width) x = 0, y++;
    return at;
  }
};

// out [channel][pixel]: pairs of pixels, as 32 bits, are transposed
void pack_plane(Walk walk, i64 channels, i64 pixels, Half* out) {
  for (i64 p = 0; p < pixels; p += 2 * kLanes) {
    const Half* from[2 * kLanes];
    for (const Half*& each : from) each = walk.next();
    for (i64 c = 0; c < channels; c += kLanes) {
      const i64 n = std::min<i64>(kLanes, channels - c);
      Vec pairs[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) pairs[i] = (Vec)(load_bits(from[2 * i] + c, n) | load_bits(from[2 * i + 1] + c, n) << 16);
      exchange<kLanes / 2>(pairs);
      for (i64 i = 0; i < n; i++) store((float*)(out + (c + i) * pixels + p), pairs[i]);
    }
  }
}

// out [block of outputs][step][half of the outputs][pair of pixels][output][2], as pack_block's, the blocks `size` apart
void pack_pairs(Walk walk, i64 outputs, i64 pixels, Half* out, i64 size) {
  for (i64 p = 0; p < pixels; p += 2) {
    const Half *first = walk.next(), *second = walk.next();
    Half* to = out + p / kStep * kStep * kOutputs + p % kStep * kTile;
    for (i64 o = 0; o < blocks_of(outputs) * kOutputs; o += kLanes) {
      const i64 n = std::clamp<i64>(outputs - o, 0, kLanes);
      const Ints pairs = n ? load_bits(first + o, n) | load_bits(second + o, n) << 16 : Ints{};
      *(UnalignedInts*)(to + o / kOutputs * size + o % kOutputs / kTile * kStep * kTile + o % kTile * 2) = pairs;
    }
  }
}

// One band of the images, [phase][channel][pitch], and of the gradient, which begins at dz
void pack_band(const Planes& l, const Half* x, const Half* dz, i64 index, Half* planes, Half* pairs) {
  const Geometry& g = l.g;
  const i64 image = index / l.bands, first = index % l.bands * l.band, rows = std::min(l.band, l.rows - first);
  const i64 most = std::max(l.channels, g.o);
  Half* zeros = (Half*)scratch(10, most);
  memset(zeros, 0, most * sizeof(Half));
  std::vector<const Half*> lines(rows);
  if (g.is_pointwise()) {
    const Range pixels = l.pixels_of(index);
    const i64 count = pixels.last - pixels.first;
    lines[0] = dz;
    pack_pairs({lines, count, g.o, l.width, zeros}, g.o, l.pixels, pairs, l.block_size());
    lines[0] = x + pixels.first * g.c;
    return pack_plane({lines, count, g.c, l.width, zeros}, g.c, l.pitch, planes);
  }
  for (i64 y = 0; y < rows; y++) lines[y] = dz + y * g.wo * g.o;
  pack_pairs({lines, g.wo, g.o, l.width, zeros}, g.o, l.pixels, pairs, l.block_size());
  if (g.kh == 1 && g.kw == 1) {
    for (i64 y = 0; y < rows; y++) lines[y] = x + (first + y) / g.ho * g.in() + (first + y) % g.ho * g.stride * g.w * g.c;
    return pack_plane({lines, g.wo, g.stride * g.c, l.width, zeros}, g.c, l.pitch, planes);
  }
  const Rows view = rows_at(x + image * g.in(), g, {first, first + rows}, g.c);
  const i64 height = (rows - 1) * g.stride + g.kh;
  for (i64 phase = 0; phase < l.phases; phase++) {
    const i64 down = phase / l.across, right = phase % l.across;
    lines.clear();
    for (i64 y = down; y < height; y += g.stride) lines.push_back(view.data + y * view.pitch + right * g.c);
    const i64 count = g.wo + (l.columns - 1 - right) / g.stride;
    pack_plane({lines, count, view.pixel, l.width, zeros}, l.channels, l.pitch, planes + phase * l.channels * l.pitch);
  }
}

// sums [block][pair of runs of channels][tap][kSums] (+)= the products of one group of bands
void multiply_group(Products by, const Planes& l, const Half* planes, const Half* pairs, i64 bands, Range blocks, Range channels,
                    bool add, float* sums) {
  const Runs runs(l.channels);
  const Rows view = {planes, l.pitch, l.band_size(), l.pixels};
  Geometry depth = {};
  depth.kh = bands, depth.kw = 1, depth.c = l.pixels;
  alignas(64) float part[kSums];
  const Tiles tiles(by, runs.pixels);
  for (i64 block = blocks.first; block < blocks.last; block++)
    for (i64 pair = channels.first; pair < channels.last; pair++)
      for (i64 tap = 0; tap < l.taps(); tap++, sums += kSums) {
        const Half* from = planes + l.phase_of(tap) * l.channels * l.pitch + l.place_of(tap);
        runs.multiply(by, pair, from, view, depth, pairs + block * l.block_size(), add ? part : sums);
        for (i64 i = 0; add && i < runs.in_pair(pair); i++)
          for (i64 k = i * kTile * kOutputs; k < (i * kTile + runs.pixels) * kOutputs; k += kLanes)
            store(sums + k, load(sums + k) + load(part + k));
      }
}

// The weights of one kSums: those of all slots, `step` apart, are added.
void finish_weights(const Planes& l, const float* sums, i64 slots, i64 step, i64 block, i64 pair, i64 tap, Half* dw) {
  const Runs runs(l.channels);
  for (i64 i = 0; i < runs.in_pair(pair); i++)
    for (i64 r = 0; r < runs.pixels; r++) {
      const float* from = sums + (i * kTile + r) * kOutputs;
      Half* to = dw + (tap * l.channels + runs.place(2 * pair + i) + r) * l.g.o;
      for (i64 o = block * kOutputs; o < std::min(l.g.o, (block + 1) * kOutputs); o += kLanes, from += kLanes) {
        Vec sum = load(from);
        for (i64 s = 1; s < slots; s++) sum += load(from + s * step);
        store(to + o, sum, std::min<i64>(kLanes, l.g.o - o));
      }
    }
}

// ---- the gradient of the images

// Each phase is a convolution of the gradient, with zeros around, with the phase's weights turned.
struct ImageGradient {
  struct Part {
    Phase y, x;
    Geometry g;
    i64 weights;
  };
  Geometry g;
  std::vector<Part> parts;
  i64 size = 0;
  bool has_gaps = false;

  explicit ImageGradient(const Geometry& geometry) : g(in_one_row(geometry)) {
    for (const Phase& y : phases_of(g.h, g.kh, g.stride, g.top))
      for (const Phase& x : phases_of(g.w, g.kw, g.stride, g.left)) {
        has_gaps |= !y.taps || !x.taps;
        if (!y.taps || !x.taps) continue;
        const Geometry part = {g.n, g.ho, g.wo, g.o, y.taps, x.taps, g.c, 1, -y.start, -x.start, y.count, x.count, g.o};
        parts.push_back({y, x, part, size});
        size += blocks_of(g.c) * block_size(part);
      }
  }
  i64 packs() const { return blocks_of(g.c) * (i64)parts.size(); }
  void pack(const Half* w, i64 i, Half* packed) const {
    const Part& part = parts[i / blocks_of(g.c)];
    const i64 block = i % blocks_of(g.c);
    auto at = [&](i64 tap) {
      const i64 row = part.y.taps - 1 - tap / part.x.taps, column = part.x.taps - 1 - tap % part.x.taps;
      return w + ((part.y.tap + row * g.stride) * g.kw + part.x.tap + column * g.stride) * g.c * g.o;
    };
    pack_block(part.g, at, 1, g.o, block, packed + part.weights + block * block_size(part.g));
  }
  void apply(const Threads& pool, Products by, const Half* dz, const Half* packed, Half* dx) const {
    if (has_gaps) parallel(pool, g.n, [&](i64 i) { memset(dx + i * g.in(), 0, g.in() * sizeof(Half)); });
    for (const Part& part : parts) {
      const Division d(part.g, {g.stride * g.c, g.stride * g.w * g.c, g.in()}, pool.count());
      Half* to = dx + (part.y.first * g.w + part.x.first) * g.c;
      parallel(pool, d.tasks(), [&](i64 i) { d.convolve(by, i, dz, packed + part.weights, to, {}, nullptr); });
    }
  }
  // Of some pixels of a pointwise convolution.
  void apply_pixels(Products by, i64 pixels, const Half* dz, const Half* packed, Half* dx) const {
    const Geometry row = {1, 1, pixels, g.o, 1, 1, g.c, 1, 0, 0, 1, pixels, g.o};
    convolve_rows(by, dz, packed, dx, {g.c, 0, 0}, row, {0, 1}, {0, blocks_of(g.c)}, {}, nullptr);
  }
};

// The weights as a convolution reads them.
ffi::Error PackHalf(ffi::ThreadPool pool, ffi::Span<const i64> geometry, Halves w, ffi::Result<Halves> packed) {
  const Geometry g = geometry_of(geometry);
  if ((i64)packed->element_count() != blocks_of(g.o) * block_size(narrowed(g)))
    return ffi::Error::InvalidArgument("the packed weights have another size");
  parallel(pool, blocks_of(g.o), [&](i64 i) { pack_forward(g, w.typed_data(), i, packed->typed_data()); });
  return ffi::Error::Success();
}

}  // namespace

void convolve(const Threads& pool, i64 products, const Geometry& whole, const Half* x, const Half* w, bool is_packed, Half* y,
              const Behind& b, std::vector<double>* sums) {
  const Geometry g = in_one_row(whole);
  const i64 blocks = blocks_of(g.o);
  const Division d(g, {g.o, g.wo * g.o, g.out()}, pool.count(), true);
  if (sums) sums->assign(d.tasks() * 2 * g.o, 0.0);
  Half* packed = is_packed ? nullptr : (Half*)scratch(6, blocks * block_size(narrowed(g)) / 2);
  parallel_phases(pool, {is_packed ? 0 : blocks, d.tasks()}, [&](int phase, i64 i) {
    if (phase == 0) return pack_forward(g, w, i, packed);
    d.convolve((Products)products, i, x, packed ? packed : w, y, b, sums ? &(*sums)[i * 2 * g.o] : nullptr);
  });
}

void gradients(const Threads& pool, i64 products, const Geometry& g, const Half* x, const Half* w, const Gradient& d, Half* dw,
               Half* dx) {
  const auto by = (Products)products;
  const i64 threads = pool.count();
  const Planes l(g, threads);
  const ImageGradient images(g);
  const i64 blocks = blocks_of(g.o), pairs = Runs(l.channels).pairs(), taps = l.taps(), packs = dx ? images.packs() : 0;
  Half* weights = dx ? (Half*)scratch(8, images.size / 2) : nullptr;
  // The gradient of one band, formed and packed while it is in the cache; pointwise it is multiplied, too.
  auto each_band = [&](i64 index, Half* planes, Half* packed) {
    const Range pixels = l.pixels_of(index);
    const i64 count = pixels.last - pixels.first, at = pixels.first * g.o;
    const Half* dz = d.dy + at;
    if (d.z) {
      Half* to = d.memory ? d.memory + at : (Half*)scratch(9, count * g.o / 2 + 1);
      gradient_of_rows(d.dy + at, d.z + at, to, count * g.o, g.o, d.norm, d.act);
      dz = to;
    }
    if (dw) pack_band(l, x, dz, index, planes, packed);
    if (dx && g.is_pointwise()) images.apply_pixels(by, count, dz, weights, dx + pixels.first * g.c);
  };
  // Halfs of a group of bands; buffers are counted in floats.
  const i64 images_size = l.together * l.band_size(), gradient_size = blocks * l.block_size(), bands = l.images * l.bands;
  if (!dw) {
    const bool forms = d.z || g.is_pointwise();
    parallel_phases(pool, {packs, forms ? bands : 0}, [&](int phase, i64 i) {
      if (phase == 0) return images.pack(w, i, weights);
      each_band(i, nullptr, nullptr);
    });
  } else if (l.many) {
    // Each task has some channels and outputs, of all pixels: these are packed once.
    i64 down = 1, across = 1;
    while (down * across < 4 * threads && (down < pairs || across < blocks))
      if (across >= blocks || (down < pairs && pairs * across >= blocks * down))
        down = std::min(pairs, 2 * down);
      else
        across = std::min(blocks, 2 * across);
    Half *planes = (Half*)scratch(6, l.groups * images_size / 2), *packed = (Half*)scratch(7, l.groups * gradient_size / 2);
    parallel_phases(pool, {packs, bands, down * across}, [&](int phase, i64 i) {
      if (phase == 0) return images.pack(w, i, weights);
      if (phase == 1) {
        const i64 group = i / l.together, at = i % l.together;
        return each_band(i, planes + group * images_size + at * l.band_size(),
                         packed + group * gradient_size + at * l.pixels * kOutputs);
      }
      const Range outputs = range_of(blocks, i % across, across), channels = range_of(pairs, i / across, down);
      float* sums = scratch(2, (outputs.last - outputs.first) * (channels.last - channels.first) * taps * kSums);
      for (i64 group = 0; group < l.groups; group++)
        multiply_group(by, l, planes + group * images_size, packed + group * gradient_size, l.bands_of(group), outputs, channels,
                       group > 0, sums);
      for (i64 block = outputs.first; block < outputs.last; block++)
        for (i64 pair = channels.first; pair < channels.last; pair++)
          for (i64 tap = 0; tap < taps; tap++, sums += kSums) finish_weights(l, sums, 1, 0, block, pair, tap, dw);
    });
  } else {
    const i64 size = blocks * pairs * taps * kSums;
    const i64 slots = std::min(l.groups, threads * std::clamp<i64>(kSlotFloats / (threads * size), 1, 4));
    float* sums = scratch(7, slots * size);
    parallel_phases(pool, {packs, slots, blocks * pairs * taps}, [&](int phase, i64 i) {
      if (phase == 0) return images.pack(w, i, weights);
      if (phase == 2) return finish_weights(l, sums + i * kSums, slots, size, i / taps / pairs, i / taps % pairs, i % taps, dw);
      Half *planes = (Half*)scratch(0, images_size / 2), *packed = (Half*)scratch(1, gradient_size / 2);
      const Range groups = range_of(l.groups, i, slots);
      for (i64 group = groups.first; group < groups.last; group++) {
        for (i64 at = 0; at < l.bands_of(group); at++)
          each_band(group * l.together + at, planes + at * l.band_size(), packed + at * l.pixels * kOutputs);
        multiply_group(by, l, planes, packed, l.bands_of(group), {0, blocks}, {0, pairs}, group > groups.first, sums + i * size);
      }
    });
  }
  if (dx && !g.is_pointwise()) images.apply(pool, by, d.z ? d.memory : d.dy, weights, dx);
}

}  // namespace headrace::bfloat16

using headrace::bfloat16::Halves;

XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_pack_half, headrace::bfloat16::PackHalf,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<ffi::Span<const int64_t>>("geometry").Arg<Halves>()
                                  .Ret<Halves>());

// The products that processor and system have. The system must allow a process to use AMX, since tiles make its state larger.
extern "C" int hr_half_products(void) {
#if defined(HEADRACE_HALF)
  unsigned eax = 7, ebx, ecx = 0, edx;
  asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTiles = 1u << 24, kAvx512Bf16 = 1u << 5;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if ((edx & kAmxBf16) && (edx & kAmxTiles) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0)
    return headrace::bfloat16::kTiles;
  eax = 7, ecx = 1;
  asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  return eax & kAvx512Bf16 ? headrace::bfloat16::kVectors : headrace::bfloat16::kMissing;
#else
  return headrace::bfloat16::kMissing;
#endif
}
