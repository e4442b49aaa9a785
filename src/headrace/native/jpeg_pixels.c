/* From coefficients to pixels: the quick inverse transform (after Arai, Agui and Nakajima) and colours, with the whole-number
   arithmetic of libjpeg-turbo's quick settings, so that the bits are the same. */
#include <math.h>

#include "jpeg.h"
#ifdef __SSSE3__
#include <immintrin.h>
#endif

const uint8_t hr_natural[64] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
                                41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
                                30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

typedef int16_t Row __attribute__((vector_size(16)));

/* Fold the quick transform's scale factors into the quantisation: 14 bits of each, 2 bits kept. Zigzag order. Blocks of fewer
   pixels than 8 x 8 have another transform, without such factors. */
void hr_scale_quant(const uint8_t *quant, int side, int16_t *scaled) {
  static const double factors[8] = {1.0, 1.387039845322148, 1.306562964876377, 1.175875602419359,
                                    1.0, 0.785694958387102, 0.541196100146197, 0.275899379282943};
  for (int k = 0; k < 64; k++) {
    int at = hr_natural[k], factor = (int)floor(16384.0 * factors[at >> 3] * factors[at & 7] + 0.5);
    scaled[k] = (int16_t)(side == 8 ? (quant[k] * factor + (1 << 11)) >> 12 : quant[k]);
  }
}

/* Multiply by a constant of 8 fractional bits: (x * c) >> 8, as the high half of (4 x) * (64 c). */
static inline Row times(Row x, int16_t constant) {
  Row four = x << 2;
#ifdef __SSSE3__
  return (Row)_mm_mulhi_epi16((__m128i)four, _mm_set1_epi16((short)(constant * 64)));
#else
  Row out;
  for (int i = 0; i < 8; i++) out[i] = (int16_t)((int32_t)four[i] * (constant * 64) >> 16);
  return out;
#endif
}

/* One pass: eight transforms side by side, down the eight rows. */
static inline __attribute__((always_inline)) void one_pass(Row r[8]) {
  Row a = r[0] + r[4], b = r[0] - r[4], c = r[2] + r[6], d = times(r[2] - r[6], 362) - c;
  Row even0 = a + c, even3 = a - c, even1 = b + d, even2 = b - d;
  Row plus53 = r[5] + r[3], minus53 = r[5] - r[3], plus17 = r[1] + r[7], minus17 = r[1] - r[7];
  Row odd7 = plus17 + plus53, cross = times(plus17 - plus53, 362);
  Row both = times(minus53 + minus17, 473);
  Row right = times(minus17, 277) - both;
  Row left = times(minus53, -413) - minus53 + both; /* 2.613 in two parts: the whole would not fit 16 bits */
  Row odd6 = left - odd7, odd5 = cross - odd6, odd4 = right + odd5;
  r[0] = even0 + odd7;
  r[7] = even0 - odd7;
  r[1] = even1 + odd6;
  r[6] = even1 - odd6;
  r[2] = even2 + odd5;
  r[5] = even2 - odd5;
  r[4] = even3 + odd4;
  r[3] = even3 - odd4;
}

static inline __attribute__((always_inline)) void transpose(Row r[8]) {
#ifdef __SSSE3__
#define LOW(a, b) _mm_unpacklo_epi16((__m128i)(a), (__m128i)(b))
#define HIGH(a, b) _mm_unpackhi_epi16((__m128i)(a), (__m128i)(b))
  __m128i a[8], b[8];
  for (int i = 0; i < 4; i++) a[2 * i] = LOW(r[i], r[i + 4]), a[2 * i + 1] = HIGH(r[i], r[i + 4]);
  for (int i = 0; i < 4; i++) b[2 * i] = LOW(a[i], a[i + 4]), b[2 * i + 1] = HIGH(a[i], a[i + 4]);
  for (int i = 0; i < 4; i++) r[2 * i] = (Row)LOW(b[i], b[i + 4]), r[2 * i + 1] = (Row)HIGH(b[i], b[i + 4]);
#else
  Row out[8];
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) out[j][i] = r[i][j];
  memcpy(r, out, sizeof out);
#endif
}

static inline uint8_t within(int value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

/* Write the 8 x 8 pixels of a block of scaled coefficients; `last` is its last one that is not 0, in zigzag order. */
void hr_inverse(const int16_t *block, int last, uint8_t *out, ptrdiff_t stride) {
  if (last == 0) {
    uint8_t level = within((block[0] >> 5) + 128);
    for (int y = 0; y < 8; y++) memset(out + y * stride, level, 8);
    return;
  }
  Row r[8];
  memcpy(r, block, sizeof r);
  one_pass(r);
  transpose(r);
  one_pass(r);
  transpose(r);
  for (int y = 0; y < 8; y++) {
#ifdef __SSSE3__
    __m128i row = _mm_packs_epi16((__m128i)(r[y] >> 5), _mm_setzero_si128());
    _mm_storel_epi64((__m128i *)(out + y * stride), _mm_add_epi8(row, _mm_set1_epi8((char)128)));
#else
    for (int x = 0; x < 8; x++) out[y * stride + x] = within((r[y][x] >> 5) + 128);
#endif
  }
}

static inline int32_t rounded(int32_t value, int bits) { return (value + (1 << (bits - 1))) >> bits; }

/* Four values of eight coefficients that lie `step` apart; constants have 13 bits. The fifth is not needed. */
static inline void four_of(const int32_t *in, int step, int bits, int32_t out[4]) {
  int32_t middle = in[0] * (1 << 14), side = in[2 * step] * 15137 - in[6 * step] * 6270;
  int32_t inner = in[step] * 8697 - in[3 * step] * 17799 + in[5 * step] * 11893 - in[7 * step] * 1730;
  int32_t outer = in[step] * 20995 + in[3 * step] * 7373 - in[5 * step] * 4926 - in[7 * step] * 4176;
  out[0] = rounded(middle + side + outer, bits);
  out[1] = rounded(middle - side + inner, bits);
  out[2] = rounded(middle - side - inner, bits);
  out[3] = rounded(middle + side - outer, bits);
}

static inline void two_of(const int32_t *in, int step, int bits, int32_t out[2]) {
  int32_t middle = in[0] * (1 << 15);
  int32_t odd = in[step] * 29692 - in[3 * step] * 10426 + in[5 * step] * 6967 - in[7 * step] * 5906;
  out[0] = rounded(middle + odd, bits);
  out[1] = rounded(middle - odd, bits);
}

/* Write a block as 4 x 4, 2 x 2 or 1 x 1 pixels: an image at 1/2, 1/4 or 1/8 of its size. */
void hr_inverse_small(const int16_t *block, int side, uint8_t *out, ptrdiff_t stride) {
  int32_t in[64], between[4][8], done[4];
  if (side == 1) {
    out[0] = within(rounded(block[0], 3) + 128);
    return;
  }
  for (int i = 0; i < 64; i++) in[i] = block[i];
  for (int x = 0; x < 8; x++) {
    if (side == 4)
      four_of(in + x, 8, 12, done);
    else
      two_of(in + x, 8, 13, done);
    for (int y = 0; y < side; y++) between[y][x] = done[y];
  }
  for (int y = 0; y < side; y++) {
    if (side == 4)
      four_of(between[y], 1, 19, done);
    else
      two_of(between[y], 1, 20, done);
    for (int x = 0; x < side; x++) out[y * stride + x] = within(done[x] + 128);
  }
}

static void colour_pixel(int y, int cb, int cr, uint8_t *rgb) {
  rgb[0] = within(y + ((91881 * cr + 32768) >> 16));
  rgb[1] = within(y + ((-22554 * cb - 46802 * cr + 32768) >> 16));
  rgb[2] = within(y + ((116130 * cb + 32768) >> 16));
}

#ifdef __SSSE3__
/* Eight pixels: 16-bit lanes, whole parts of the factors taken out so that the rest fits. */
static inline void colour_eight(__m128i y, __m128i cb, __m128i cr, __m128i *red, __m128i *green, __m128i *blue) {
  const __m128i one = _mm_set1_epi16(1);
  __m128i two_cb = _mm_add_epi16(cb, cb), two_cr = _mm_add_epi16(cr, cr);
  __m128i r = _mm_srai_epi16(_mm_add_epi16(_mm_mulhi_epi16(two_cr, _mm_set1_epi16(26345)), one), 1);
  __m128i b = _mm_srai_epi16(_mm_add_epi16(_mm_mulhi_epi16(two_cb, _mm_set1_epi16(-14942)), one), 1);
  const __m128i factors = _mm_set1_epi32((int)((uint32_t)18734 << 16 | (uint16_t)-22554)), half = _mm_set1_epi32(32768);
  __m128i low = _mm_srai_epi32(_mm_add_epi32(_mm_madd_epi16(_mm_unpacklo_epi16(cb, cr), factors), half), 16);
  __m128i high = _mm_srai_epi32(_mm_add_epi32(_mm_madd_epi16(_mm_unpackhi_epi16(cb, cr), factors), half), 16);
  *red = _mm_add_epi16(y, _mm_add_epi16(cr, r));
  *green = _mm_add_epi16(y, _mm_sub_epi16(_mm_packs_epi32(low, high), cr));
  *blue = _mm_add_epi16(y, _mm_add_epi16(two_cb, b));
}

/* Which of sixteen reds, greens and blues (-1: none) come to each byte of the three parts of r g b r g b. */
static const int8_t PLACES[3][3][16] = {
      {{0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1, 5},
       {-1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1},
       {-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1}},
      {{-1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10, -1},
       {5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10},
       {-1, 5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1}},
      {{-1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1, -1},
       {-1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1},
       {10, -1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15}}};

static inline void interleave(__m128i r, __m128i g, __m128i b, uint8_t *rgb) {
  for (int part = 0; part < 3; part++) {
    __m128i reds = _mm_shuffle_epi8(r, _mm_loadu_si128((const __m128i *)PLACES[part][0]));
    __m128i greens = _mm_shuffle_epi8(g, _mm_loadu_si128((const __m128i *)PLACES[part][1]));
    __m128i blues = _mm_shuffle_epi8(b, _mm_loadu_si128((const __m128i *)PLACES[part][2]));
    _mm_storeu_si128((__m128i *)(rgb + 16 * part), _mm_or_si128(_mm_or_si128(reds, greens), blues));
  }
}
#endif

/* Turn one row of planes into red, green and blue. */
void hr_colour_row(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *rgb, int width) {
  int x = 0;
#ifdef __SSSE3__
  const __m128i zero = _mm_setzero_si128(), centre = _mm_set1_epi16(128);
  for (; x + 16 <= width; x += 16) {
    __m128i ys = _mm_loadu_si128((const __m128i *)(y + x)), bs = _mm_loadu_si128((const __m128i *)(cb + x)),
            rs = _mm_loadu_si128((const __m128i *)(cr + x)), low[3], high[3];
    colour_eight(_mm_unpacklo_epi8(ys, zero), _mm_sub_epi16(_mm_unpacklo_epi8(bs, zero), centre),
                 _mm_sub_epi16(_mm_unpacklo_epi8(rs, zero), centre), &low[0], &low[1], &low[2]);
    colour_eight(_mm_unpackhi_epi8(ys, zero), _mm_sub_epi16(_mm_unpackhi_epi8(bs, zero), centre),
                 _mm_sub_epi16(_mm_unpackhi_epi8(rs, zero), centre), &high[0], &high[1], &high[2]);
    interleave(_mm_packus_epi16(low[0], high[0]), _mm_packus_epi16(low[1], high[1]), _mm_packus_epi16(low[2], high[2]),
               rgb + 3 * x);
  }
#endif
  for (; x < width; x++) colour_pixel(y[x], cb[x] - 128, cr[x] - 128, rgb + 3 * x);
}
