// Convolutions of bfloat16 images: products over 32 inputs at a time, summed in float32 and rounded once.
//
// Only in the library for AVX-512. The products are AMX's, of 16 pixels and 16 outputs in one instruction; or, where a
// processor has no AMX, those of AVX512_BF16, of two inputs of a pixel and 16 outputs. Tests, and they alone, have the latter
// also in float32 arithmetic, so that everything around the products is tested on any processor with AVX-512.
#include <utility>

#include "tasks.hh"

#if defined(__AVX512F__) && defined(__x86_64__) && defined(__linux__)
#define HEADRACE_HALF 1
#include <sys/syscall.h>
#include <unistd.h>
#define AMX __attribute__((target("amx-tile,amx-bf16")))
#define DOT __attribute__((target("avx512bf16")))
#endif

namespace headrace {
namespace {

using Half = uint16_t;
constexpr i64 kTile = 16, kStep = 32, kOutputs = 2 * kTile;  // pixels, inputs and outputs of one pass
constexpr i64 kTaskPixels = 512;
enum Products : i64 { kMissing, kEmulated, kVectors, kTiles };  // as in ops/native_units.py
using Halves = ffi::Buffer<ffi::BF16>;

i64 steps_of(i64 inputs) { return (inputs + kStep - 1) / kStep; }
i64 blocks_of(i64 outputs) { return (outputs + kOutputs - 1) / kOutputs; }
i64 block_size(const Geometry& g) { return g.kh * g.kw * steps_of(g.c) * kStep * kOutputs; }

#if defined(HEADRACE_HALF)
// The weights of one block of outputs, [tap][step][half of the outputs][pair of inputs][output][2], with zeros around.
void pack_block(const Half* w, const Geometry& g, i64 block, Half* out) {
  for (i64 tap = 0; tap < g.kh * g.kw; tap++)
    for (i64 k0 = 0; k0 < steps_of(g.c) * kStep; k0 += kStep)
      for (i64 o0 = block * kOutputs; o0 < (block + 1) * kOutputs; o0 += kTile)
        for (i64 k = k0; k < k0 + kStep; k += 2)
          for (i64 o = o0; o < o0 + kTile; o++)
            for (i64 e = 0; e < 2; e++) *out++ = o < g.o && k + e < g.c ? w[(tap * g.c + k + e) * g.o + o] : 0;
}

// Windows of some output rows: the first pixel of each, and how many values lie between pixels and rows.
struct Rows {
  const Half* data;
  i64 pixel, pitch, channels;
};
// Output rows first .. last of one image, or pixels of a pointwise convolution; copied where zeros are missing around the
// images or behind the channels.
Rows rows_at(const Half* x, const Geometry& g, Range rows) {
  if (g.c % kStep == 0 && g.fits_unpadded())
    return {x + rows.first * g.stride * g.w * g.c, g.stride * g.c, g.w * g.c, g.c};
  const i64 channels = steps_of(g.c) * kStep, width = g.window_columns();
  const i64 height = (rows.last - rows.first - 1) * g.stride + g.kh, pitch = width * channels;
  Half* copy = (Half*)scratch(4, (height * pitch + 1) / 2);
  memset(copy, 0, height * pitch * sizeof(Half));
  for (i64 i = 0; i < height; i++) {
    const i64 y = rows.first * g.stride - g.top + i;
    if (y < 0 || y >= g.h) continue;
    for (i64 j = std::max<i64>(0, g.left); j < std::min(width, g.w + g.left); j++)
      memcpy(copy + i * pitch + j * channels, x + (y * g.w + j - g.left) * g.c, g.c * sizeof(Half));
  }
  return {copy, g.stride * channels, pitch, channels};
}

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

// sum += the products of a pair of inputs with those of 16 outputs
template <Products kBy> DOT inline Vec with_pair(Vec sum, __m512i weights, const Half* pair) {
  if constexpr (kBy == kVectors) {
    int32_t both;
    memcpy(&both, pair, sizeof both);
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(both));
  } else {
    const Ints w = (Ints)weights, x = Ints{} + (int32_t)(pair[0] | (uint32_t)pair[1] << 16);
    const Ints upper = Ints{} + (int32_t)0xffff0000;
    return sum + (Vec)(x << 16) * (Vec)(w << 16) + (Vec)(x & upper) * (Vec)(w & upper);
  }
}

// out [kRows][kOutputs] = the products of a run of pixels with one block of outputs
template <int kRows, Products kBy>
DOT void vector_product(const Half* from, const Rows& x, const Geometry& g, const Half* w, float* out) {
  constexpr int kBases = (kRows + 2) / 3;
  Vec sum[kRows][2] = {};
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
          const Half* both = w + 2 * kTile * p;
          const __m512i w0 = _mm512_loadu_si512(both), w1 = _mm512_loadu_si512(both + kStep * kTile);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; r++) {
            const Half* pair = base[r / 3] + (r % 3) * step;
            sum[r][0] = with_pair<kBy>(sum[r][0], w0, pair);
            sum[r][1] = with_pair<kBy>(sum[r][1], w1, pair);
          }
#pragma GCC unroll 8
          for (int b = 0; b < kBases; b++) {
            base[b] += 2;
            asm("" : "+r"(base[b]));  // keep the pointers apart
          }
        }
      }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++) {
    store(out + r * kOutputs, sum[r][0]);
    store(out + r * kOutputs + kTile, sum[r][1]);
  }
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

__mmask16 lanes(i64 n) { return (__mmask16)((1u << n) - 1); }
Vec widened(const Half* p, i64 n) {
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(n), p)), 16);
}
void store_rounded(Half* p, Vec v, i64 n) {
  const Ints bits = (Ints)v, even = bits + 0x7fff + ((bits >> 16) & 1);
  const Ints rounded = v == v ? even : (bits | 0x400000);  // NaN stays NaN
  _mm256_mask_storeu_epi16(p, lanes(n), _mm512_cvtepi32_epi16((__m512i)(rounded >> 16)));
}

struct Behind {
  const float *scale, *shift;  // null where nothing follows
  const Half* residual;
  i64 act;
};
void finish_pixels(const float* sums, Half* y, const Half* residual, i64 pixels, i64 channel, i64 outputs, const Behind& b) {
  for_activation(b.act, [&](auto act) {
    for (i64 o = channel; o < std::min(outputs, channel + kOutputs); o += kTile) {
      const i64 n = std::min(kTile, outputs - o);
      const Vec scale = b.scale ? load(b.scale + o, n) : Vec{} + 1.f, shift = b.shift ? load(b.shift + o, n) : Vec{};
      for (i64 p = 0; p < pixels; p++) {
        Vec v = load(sums + p * kOutputs + o - channel) * scale + shift;
        if (residual) v += widened(residual + p * outputs + o, n);
        store_rounded(y + p * outputs + o, activated<decltype(act)::value>(v), n);
      }
    }
  });
}

// Output rows first .. last of one image, and a range of the blocks of outputs; y is the image's.
void convolve_rows(Products by, const Half* x, const Half* packed, Half* y, const Geometry& g, Range rows, Range blocks,
                   const Behind& b) {
  const Rows view = rows_at(x, g, rows);
  const i64 tiles = (g.wo + kTile - 1) / kTile, pixels = (g.wo + tiles - 1) / tiles;
  alignas(64) float sums[2 * kTile * kOutputs];
  if (by == kTiles) configure(pixels);
  for (i64 block = blocks.first; block < blocks.last; block++)
    for (i64 row = 0; row < rows.last - rows.first; row++)
      for (i64 t = 0; t < tiles; t += 2) {
        // The last tile ends with the row, and an odd one is computed twice by AMX.
        const i64 places[2] = {std::min(t * pixels, g.wo - pixels), std::min((t + 1) * pixels, g.wo - pixels)};
        const i64 runs = std::min<i64>(2, tiles - t);
        const Half *from = view.data + row * g.stride * view.pitch, *w = packed + block * block_size(g);
        if (by == kTiles)
          product(from + places[0] * view.pixel, from + places[1] * view.pixel, view, g, w, sums);
        else
          for (i64 i = 0; i < runs; i++)
            vector_products(by, pixels, from + places[i] * view.pixel, view, g, w, sums + i * kTile * kOutputs);
        for (i64 i = 0; i < runs; i++) {
          const i64 at = ((rows.first + row) * g.wo + places[i]) * g.o;
          finish_pixels(sums + i * kTile * kOutputs, y + at, b.residual ? b.residual + at : nullptr, pixels,
                        block * kOutputs, g.o, b);
        }
      }
  if (by == kTiles) release();
}
#endif

// The weights as ConvolveHalf reads them.
ffi::Error PackHalf(ffi::ThreadPool pool, ffi::Span<const i64> geometry, Halves w, ffi::Result<Halves> packed) {
#if defined(HEADRACE_HALF)
  const Geometry g = geometry_of(geometry);
  if ((i64)packed->element_count() != blocks_of(g.o) * block_size(g))
    return ffi::Error::InvalidArgument("the packed weights have another size");
  parallel(pool, blocks_of(g.o), [&](i64 i) {
    pack_block((const Half*)w.untyped_data(), g, i, (Half*)packed->untyped_data() + i * block_size(g));
  });
  return ffi::Error::Success();
#else
  return ffi::Error::Internal("this library has no products of bfloat16 values");
#endif
}

// y = convolution of x with packed weights; with (scale, shift[, residual]) y = activation(y scale + shift + residual).
ffi::Error ConvolveHalf(ffi::ThreadPool pool, ffi::Span<const i64> geometry, i64 act, i64 products, Halves x_, Halves w_,
                        ffi::RemainingArgs rest, ffi::Result<Halves> y_) {
#if defined(HEADRACE_HALF)
  Geometry g = flattened(geometry_of(geometry));
  if (g.is_pointwise() && g.h == 1) g.w = g.wo = g.n, g.n = 1;  // all pixels as one row
  const Half *x = (const Half*)x_.untyped_data(), *w = (const Half*)w_.untyped_data();
  Half* y = (Half*)y_->untyped_data();
  auto floats = [&](size_t i) { return i < rest.size() ? rest.get<ffi::Buffer<ffi::F32>>(i)->typed_data() : nullptr; };
  const Half* residual = rest.size() > 2 ? (const Half*)rest.get<Halves>(2)->untyped_data() : nullptr;
  const float *scale = floats(0), *shift = floats(1);
  const i64 threads = pool.num_threads(), blocks = blocks_of(g.o);
  // Fewer pixels than weights: each thread has some of the outputs. Else some of the rows or, of one long row, pixels.
  const bool by_outputs = g.kh * g.kw * g.c * g.o > g.n * g.in() && blocks >= threads;
  const bool by_pixels = g.is_pointwise();
  const i64 groups = by_outputs ? threads : 1, units = by_pixels ? (g.wo + 4 * kTile - 1) / (4 * kTile) : g.ho;
  const i64 wanted = by_pixels ? std::max(4 * threads, g.wo / kTaskPixels) : (4 * threads + g.n - 1) / g.n;
  const i64 bands = by_outputs ? 1 : std::min(units, wanted);
  parallel(pool, g.n * bands * groups, [&](i64 i) {
    const i64 n = i / groups / bands, band = i / groups % bands;
    const Range range = range_of(blocks, i % groups, groups);
    Geometry part = g;
    Range rows = range_of(g.ho, band, bands);
    i64 from = n * g.in(), to = n * g.out();
    if (by_pixels) {
      const Range pixels = range_of(g.wo, band, bands);
      part.w = part.wo = pixels.last - pixels.first;
      from += pixels.first * g.c, to += pixels.first * g.o;
      rows = {0, 1};
    }
    const Behind behind = {scale, shift, residual ? residual + to : nullptr, act};
    convolve_rows((Products)products, x + from, w, y + to, part, rows, range, behind);
  });
  return ffi::Error::Success();
#else
  return ffi::Error::Internal("this library has no products of bfloat16 values");
#endif
}

}  // namespace
}  // namespace headrace

using headrace::Halves;
using Integers = ffi::Span<const int64_t>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_pack_half, headrace::PackHalf,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<Integers>("geometry").Arg<Halves>().Ret<Halves>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(hr_convolve_half, headrace::ConvolveHalf,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<Integers>("geometry").Attr<int64_t>("activation")
                                  .Attr<int64_t>("products").Arg<Halves>().Arg<Halves>().RemainingArgs().Ret<Halves>());

// The products that processor and system have. The system must allow a process to use AMX, since tiles make its state larger.
extern "C" int hr_half_products(void) {
#if defined(HEADRACE_HALF)
  unsigned eax = 7, ebx, ecx = 0, edx;
  asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTiles = 1u << 24, kAvx512Bf16 = 1u << 5;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if ((edx & kAmxBf16) && (edx & kAmxTiles) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0)
    return headrace::kTiles;
  eax = 7, ecx = 1;
  asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  return eax & kAvx512Bf16 ? headrace::kVectors : headrace::kMissing;
#else
  return headrace::kMissing;
#endif
}
