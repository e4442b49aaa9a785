/* Bilinear and bicubic resizing with antialiasing: each of the two passes is Pillow's for 8-bit images, bit for bit (weights as
   whole numbers of 22 bits, rounded and clipped to 8 bits in between). Only the rows and columns of the window are computed.
   Pillow's own code takes several times as long; data/decoding/resize.py checks this against it before the first use. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "jpeg.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define BITS 22
#define LOW_BITS 11 /* a weight is taken in two parts that fit 16 bits: two products of 16 bits are quicker than one of 32 */

/* For each of `count` places in a row: its first neighbour, and the weights of its `num` neighbours. All places have as many
   as the widest, with weights of 0, so that loops have one length and no branch is mispredicted. */
typedef struct {
  int count, num;
  int *from;
  int32_t *weights;
} Taps;

/* Pillow's filters, by the distance in new pixels: a triangle, and the cubic that sharpens a little (its factor is -1/2). */
static inline double weight_at(double at, int cubic) {
  if (at < 0) at = -at;
  if (!cubic) return at < 1.0 ? 1.0 - at : 0.0;
  if (at < 1.0) return (1.5 * at - 2.5) * at * at + 1.0;
  return at < 2.0 ? (((at - 5.0) * at + 8.0) * at - 4.0) * -0.5 : 0.0;
}

/* Make the weights of places `first` to `first + count` when `length` pixels, from `start` on, of the `size` that there are
   become `resized`; return 0 when there is no memory. */
static int make_taps(Taps *taps, int size, double start, double length, int resized, int first, int count,
                     int cubic) {
  double scale = length / resized, least = scale < 1.0 ? 1.0 : scale, step = 1.0 / least, wide = cubic ? 2.0 * least : least;
  int most = (int)wide * 2 + 3;
  if (most > size) most = size;
  double *row = malloc(sizeof *row * (size_t)(2 * (int)wide + 3));
  taps->from = malloc(sizeof *taps->from * (size_t)count);
  taps->weights = malloc(sizeof *taps->weights * (size_t)count * most);
  taps->count = count;
  taps->num = 0;
  if (!row || !taps->from || !taps->weights) {
    free(row);
    return 0;
  }
  for (int i = 0; i < count; i++) { /* how many neighbours the widest has */
    double centre = start + (first + i + 0.5) * scale;
    int low = (int)(centre - wide + 0.5), high = (int)(centre + wide + 0.5);
    int num = (high > size ? size : high) - (low < 0 ? 0 : low);
    taps->num = num > taps->num ? num : taps->num;
  }
  for (int i = 0; i < count; i++) {
    double centre = start + (first + i + 0.5) * scale, sum = 0.0;
    int low = (int)(centre - wide + 0.5), high = (int)(centre + wide + 0.5);
    if (low < 0) low = 0;
    if (high > size) high = size;
    for (int x = 0; x < high - low; x++) {
      row[x] = weight_at((x + low - centre + 0.5) * step, cubic);
      sum += row[x];
    }
    taps->from[i] = low + taps->num > size ? size - taps->num : low;
    int32_t *weights = taps->weights + (size_t)i * taps->num;
    memset(weights, 0, sizeof *weights * (size_t)taps->num);
    for (int x = 0; x < high - low; x++) {
      double weight = sum != 0.0 ? row[x] / sum : row[x];
      weights[low - taps->from[i] + x] = (int32_t)((weight < 0 ? -0.5 : 0.5) + weight * (1 << BITS));
    }
  }
  free(row);
  return 1;
}

/* Round to a level. Bicubic weights are negative too, so a sum may lie outside of what a byte holds. */
static inline uint8_t whole(int32_t value) {
  int32_t level = value >> BITS;
  return (uint8_t)(level < 0 ? 0 : level > 255 ? 255 : level);
}

static void across(const uint8_t *row, uint8_t *out, int channels, int first, int count, const Taps *taps) {
  for (int i = first; i < count; i++)
    for (int c = 0; c < channels; c++) {
      int32_t sum = 1 << (BITS - 1);
      for (int x = 0; x < taps->num; x++)
        sum += row[(ptrdiff_t)(taps->from[i] + x) * channels + c] * taps->weights[(size_t)i * taps->num + x];
      out[i * channels + c] = whole(sum);
    }
}

#ifdef __AVX2__
/* Lay the weights out as the pass across for three channels wants them: for four pixels and two neighbours at a time, high and
   low parts of the first and third pixel, then of the second and fourth. Return NULL where there is no memory. */
static int16_t *quick_weights(const Taps *taps) {
  int groups = taps->count / 4, pairs = (taps->num + 1) / 2;
  int16_t *all = malloc((size_t)groups * pairs * 64 * sizeof *all + 64), *to = all;
  if (!all) return NULL;
  for (int group = 0; group < groups; group++)
    for (int pair = 0; pair < pairs; pair++)
      for (int half = 0; half < 2; half++)
        for (int part = 0; part < 2; part++)
          for (int lane = 0; lane < 2; lane++)
            for (int n = 0; n < 8; n++) {
              int tap = 2 * pair + (n & 1);
              int32_t weight = tap < taps->num ? taps->weights[(size_t)(4 * group + half + 2 * lane) * taps->num + tap] : 0;
              *to++ = (int16_t)(part ? weight & ((1 << LOW_BITS) - 1) : weight >> LOW_BITS);
            }
  return all;
}

static inline __m256i two_pixels(const uint8_t *first, const uint8_t *second) {
  const __m256i spread = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1, /* r r g g b b 0 0 */
                                          0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1);
  __m128i low = _mm_loadl_epi64((const __m128i *)first), high = _mm_loadl_epi64((const __m128i *)second);
  return _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1), spread);
}

/* Signed words, which packing with saturation clips to a byte. */
static inline __m256i rounded(__m256i high, __m256i low) {
  __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(high, LOW_BITS), low);
  return _mm256_srai_epi32(_mm256_add_epi32(sum, _mm256_set1_epi32(1 << (BITS - 1))), BITS);
}

/* One row of three channels, four pixels at a time: each neighbour's two channels of 16 bits beside its partner's. Up to 11
   bytes after the row's last pixel are read. */
static inline __attribute__((always_inline)) void across3_of(const uint8_t *row, uint8_t *out, const Taps *taps,
                                                             const int16_t *weights, const int pairs) {
  const __m256i close_up = _mm256_setr_epi8(0, 1, 2, 4, 5, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, /* without the fourths */
                                            0, 1, 2, 4, 5, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  int i = 0;
  for (; i + 4 <= taps->count; i += 4) {
    const uint8_t *from[4];
    for (int n = 0; n < 4; n++) from[n] = row + 3 * (ptrdiff_t)taps->from[i + n];
    __m256i high0 = _mm256_setzero_si256(), low0 = high0, high1 = high0, low1 = high0;
    for (int pair = 0; pair < pairs; pair++, weights += 64) {
      const __m256i *weight = (const __m256i *)weights;
      __m256i even = two_pixels(from[0] + 6 * pair, from[2] + 6 * pair);
      __m256i odd = two_pixels(from[1] + 6 * pair, from[3] + 6 * pair);
      high0 = _mm256_add_epi32(high0, _mm256_madd_epi16(even, _mm256_loadu_si256(weight)));
      low0 = _mm256_add_epi32(low0, _mm256_madd_epi16(even, _mm256_loadu_si256(weight + 1)));
      high1 = _mm256_add_epi32(high1, _mm256_madd_epi16(odd, _mm256_loadu_si256(weight + 2)));
      low1 = _mm256_add_epi32(low1, _mm256_madd_epi16(odd, _mm256_loadu_si256(weight + 3)));
    }
    __m256i words = _mm256_packs_epi32(rounded(high0, low0), rounded(high1, low1));
    __m256i bytes = _mm256_shuffle_epi8(_mm256_packus_epi16(words, words), close_up);
    uint8_t *to = out + 3 * i, last[16];
    int ends = i + 8 > taps->count; /* nothing is written after the row */
    _mm_storel_epi64((__m128i *)(ends ? last : to), _mm256_castsi256_si128(bytes));
    _mm_storel_epi64((__m128i *)((ends ? last : to) + 6), _mm256_extracti128_si256(bytes, 1));
    if (ends) memcpy(to, last, 12);
  }
  across(row, out, 3, i, taps->count, taps);
}

static void across3(const uint8_t *row, uint8_t *out, const Taps *taps, const int16_t *weights) {
  switch ((taps->num + 1) / 2) { /* the usual numbers, known to the compiler */
    case 1: across3_of(row, out, taps, weights, 1); break;
    case 2: across3_of(row, out, taps, weights, 2); break;
    case 3: across3_of(row, out, taps, weights, 3); break;
    default: across3_of(row, out, taps, weights, (taps->num + 1) / 2);
  }
}

/* 32 bytes of a row: two rows above each other are taken at a time. */
static inline void down32(const uint8_t *rows, ptrdiff_t stride, uint8_t *out, int num, const int32_t *weights) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i high[4] = {zero, zero, zero, zero}, low[4] = {zero, zero, zero, zero};
  for (int y = 0; y < num; y += 2) {
    int partner = y + 1 < num;
    int32_t one = weights[y], two = partner ? weights[y + 1] : 0, mask = (1 << LOW_BITS) - 1;
    __m256i highs = _mm256_set1_epi32((int32_t)((uint16_t)(one >> LOW_BITS) | (uint32_t)(two >> LOW_BITS) << 16));
    __m256i lows = _mm256_set1_epi32((one & mask) | (two & mask) << 16);
    __m256i above = _mm256_loadu_si256((const __m256i *)(rows + y * stride));
    __m256i below = _mm256_loadu_si256((const __m256i *)(rows + (y + partner) * stride));
    __m256i left = _mm256_unpacklo_epi8(above, below), right = _mm256_unpackhi_epi8(above, below);
    __m256i four[4] = {_mm256_unpacklo_epi8(left, zero), _mm256_unpackhi_epi8(left, zero), _mm256_unpacklo_epi8(right, zero),
                       _mm256_unpackhi_epi8(right, zero)};
    for (int n = 0; n < 4; n++) {
      high[n] = _mm256_add_epi32(high[n], _mm256_madd_epi16(four[n], highs));
      low[n] = _mm256_add_epi32(low[n], _mm256_madd_epi16(four[n], lows));
    }
  }
  __m256i left = _mm256_packs_epi32(rounded(high[0], low[0]), rounded(high[1], low[1]));
  __m256i right = _mm256_packs_epi32(rounded(high[2], low[2]), rounded(high[3], low[3]));
  _mm256_storeu_si256((__m256i *)out, _mm256_packus_epi16(left, right));
}
#endif

/* One row of `width` bytes from `num` rows that lie above each other. */
static void down(const uint8_t *rows, ptrdiff_t stride, int width, uint8_t *out, int num, const int32_t *weights) {
  int x = 0;
#ifdef __AVX2__
  for (; x + 32 <= width; x += 32) down32(rows + x, stride, out + x, num, weights);
#endif
  for (; x < width; x++) {
    int32_t sum = 1 << (BITS - 1);
    for (int y = 0; y < num; y++) sum += rows[y * stride + x] * weights[y];
    out[x] = whole(sum);
  }
}

/* Resize rows across. Nothing may be read after the end of an image, so rows that near it are copied first: the last one, and of an
   image that is a few pixels wide those before it. */
static int across_rows(const uint8_t *from, ptrdiff_t stride, int rows, int last_row, int width, int channels, uint8_t *to,
                       const Taps *taps) {
  size_t line = (size_t)taps->count * channels;
#ifdef __AVX2__
  if (channels == 3) {
    int16_t *weights = quick_weights(taps);
    uint8_t *copy = malloc((size_t)width * 3 + 64);
    int done = weights && copy;
    for (int y = 0; done && y < rows; y++) {
      const uint8_t *row = from + y * stride;
      if (last_row >= 0 && (last_row - y) * stride < 16) row = memcpy(copy, row, (size_t)width * 3);
      across3(row, to + y * line, taps, weights);
    }
    free(weights);
    free(copy);
    return done;
  }
#else
  (void)last_row, (void)width;
#endif
  for (int y = 0; y < rows; y++) across(from + y * stride, to + y * line, channels, 0, taps->count, taps);
  return 1;
}

/* pixels: `height` rows of `width` pixels, `stride` bytes apart. `box` is the part of them that is resized (top, left, height,
   width; it may begin and end inside of pixels), NULL for all. The window begins at (top, left) of the resized image, whose size
   is resized_h x resized_w, and fills out_h x out_w pixels of `out`. Pillow's pass across comes first; `down_first` is for images
   that are stored sideways, and for those that shrink downwards where time counts more than a level, since the slower pass across
   then has fewer rows. `between` has room for what lies between the passes, (down_first ? out_h * width : height * out_w) *
   channels + 64 bytes: taken afresh each time, such memory costs more than the work in it. Returns 0 when there is no memory. */
int hr_resize(const uint8_t *pixels, ptrdiff_t stride, int height, int width, int channels, const double *box, int resized_h,
              int resized_w, int top, int left, int out_h, int out_w, int cubic, int down_first, uint8_t *out, uint8_t *between) {
  const double all[4] = {0, 0, height, width};
  if (!box) box = all;
  int same_h = box[0] == 0 && box[2] == height && height == resized_h;
  int same_w = box[1] == 0 && box[3] == width && width == resized_w;
  Taps x = {0}, y = {0};
  int done = make_taps(&x, width, box[1], box[3], resized_w, left, out_w, cubic) &&
             make_taps(&y, height, box[0], box[2], resized_h, top, out_h, cubic);
  if (done && down_first) {
    int x0 = x.from[0], across = x.from[out_w - 1] + x.num - x0, line = across * channels;
    const uint8_t *from = pixels + (ptrdiff_t)x0 * channels;
    for (int i = 0; i < out_h; i++)
      down(from + y.from[i] * stride, stride, line, between + (size_t)i * line, y.num, y.weights + (size_t)i * y.num);
    for (int i = 0; i < out_w; i++) x.from[i] -= x0;
    if (same_w)
      for (int i = 0; i < out_h; i++)
        memcpy(out + (size_t)i * out_w * channels, between + (size_t)i * line + (ptrdiff_t)(left - x0) * channels,
               (size_t)out_w * channels);
    else
      done = across_rows(between, line, out_h, -1, across, channels, out, &x);
  } else if (done) {
    int y0 = y.from[0], rows = y.from[out_h - 1] + y.num - y0, line = out_w * channels;
    const uint8_t *from = pixels + y0 * stride;
    if (same_w)
      for (int i = 0; i < rows; i++) memcpy(between + (size_t)i * line, from + i * stride + (ptrdiff_t)left * channels, line);
    else
      done = across_rows(from, stride, rows, height - 1 - y0, width, channels, between, &x);
    if (same_h)
      memcpy(out, between + (size_t)(top - y0) * line, (size_t)out_h * line);
    else
      for (int i = 0; i < out_h; i++)
        down(between + (size_t)(y.from[i] - y0) * line, line, line, out + (size_t)i * line, y.num, y.weights + (size_t)i * y.num);
  }
  free(x.from);
  free(x.weights);
  free(y.from);
  free(y.weights);
  return done;
}
