/* Bilinear resizing with antialiasing: each of the two passes is Pillow's for 8-bit images, bit for bit (weights as whole
   numbers of 22 bits, rounded to 8 bits in between). Only the rows and columns of the window are computed.
   Own code because Pillow's takes several times as long; data/native.py compiles it on first use and checks it there. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BITS 22

#ifdef HR_CLONES
#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FAST
#endif

typedef uint8_t bytes4 __attribute__((vector_size(4)));
typedef int32_t ints4 __attribute__((vector_size(16)));

/* Fill first pixel and number of pixels of each of `count` places, and their weights; return how many weights a place has.
   All places get as many as the widest, the others with weights of 0, so that loops have one length and no branch is
   mispredicted: that alone halves the time. */
static int make_weights(int size, int resized, int first, int count, int *bounds, int32_t **out) {
  double scale = (double)size / resized, wide = scale < 1.0 ? 1.0 : scale;
  int taps = (int)wide * 2 + 3;
  int32_t *weights = calloc((size_t)count * taps, sizeof *weights);
  double *row = malloc(sizeof *row * taps);
  if (!weights || !row) {
    free(weights);
    free(row);
    return 0;
  }
  for (int i = 0; i < count; i++) {
    double centre = (first + i + 0.5) * scale, sum = 0.0, step = 1.0 / wide;
    int low = (int)(centre - wide + 0.5), high = (int)(centre + wide + 0.5);
    if (low < 0) low = 0;
    if (high > size) high = size;
    int num = high - low;
    for (int x = 0; x < num; x++) {
      double at = (x + low - centre + 0.5) * step;
      if (at < 0) at = -at;
      row[x] = at < 1.0 ? 1.0 - at : 0.0;
      sum += row[x];
    }
    for (int x = 0; x < num; x++) {
      double weight = sum != 0.0 ? row[x] / sum : row[x];
      weights[(size_t)i * taps + x] = (int32_t)(0.5 + weight * (1 << BITS));
    }
    bounds[2 * i] = low;
    bounds[2 * i + 1] = num;
  }
  free(row);
  int most = 0;
  for (int i = 0; i < count; i++) most = bounds[2 * i + 1] > most ? bounds[2 * i + 1] : most;
  for (int i = 0; i < count; i++) {
    int over = bounds[2 * i] + most - size;
    if (over > 0) {
      int32_t *mine = weights + (size_t)i * taps;
      memmove(mine + over, mine, sizeof *mine * (most - over));
      memset(mine, 0, sizeof *mine * over);
      bounds[2 * i] -= over;
    }
    bounds[2 * i + 1] = most;
  }
  *out = weights;
  return taps;
}

/* Weights are never negative and add up to 1 but for their rounding, far too little to carry 255 over: no clipping. */
static inline uint8_t whole(int32_t value) { return (uint8_t)(value >> BITS); }

/* One row of a picture of three channels. Four bytes are read for a pixel of three, so not at the very end of the data. */
static inline __attribute__((always_inline)) void across3_of(const uint8_t *row, uint8_t *out, int count, const int *bounds,
                                                             const int32_t *weights, int taps, const int num) {
  const int32_t half = 1 << (BITS - 1);
  for (int i = 0; i < count; i++) {
    const uint8_t *pixel = row + (ptrdiff_t)bounds[2 * i] * 3;
    const int32_t *weight = weights + (size_t)i * taps;
    ints4 sum = {half, half, half, half};
    for (int x = 0; x < num; x++, pixel += 3) {
      bytes4 four;
      memcpy(&four, pixel, 4);
      sum += __builtin_convertvector(four, ints4) * weight[x];
    }
    bytes4 done = __builtin_convertvector(sum >> BITS, bytes4);
    memcpy(out + 3 * i, &done, i + 1 < count ? 4 : 3); /* the fourth byte belongs to the next pixel, which comes later */
  }
}

FAST static void across3(const uint8_t *row, uint8_t *out, int count, const int *bounds, const int32_t *weights, int taps) {
  switch (bounds[1]) { /* the usual numbers, known to the compiler */
    case 2: across3_of(row, out, count, bounds, weights, taps, 2); break;
    case 3: across3_of(row, out, count, bounds, weights, taps, 3); break;
    case 4: across3_of(row, out, count, bounds, weights, taps, 4); break;
    case 5: across3_of(row, out, count, bounds, weights, taps, 5); break;
    default: across3_of(row, out, count, bounds, weights, taps, bounds[1]);
  }
}

static void across(const uint8_t *row, uint8_t *out, int channels, int count, const int *bounds, const int32_t *weights,
                   int taps) {
  for (int i = 0; i < count; i++)
    for (int c = 0; c < channels; c++) {
      int32_t sum = 1 << (BITS - 1);
      for (int x = 0; x < bounds[2 * i + 1]; x++)
        sum += row[(ptrdiff_t)(bounds[2 * i] + x) * channels + c] * weights[(size_t)i * taps + x];
      out[i * channels + c] = whole(sum);
    }
}

FAST static void down(const uint8_t *rows, ptrdiff_t stride, int width, uint8_t *out, int32_t *sums, int num,
                      const int32_t *weights) {
  for (int x = 0; x < width; x++) sums[x] = 1 << (BITS - 1);
  for (int y = 0; y < num; y++) {
    const uint8_t *row = rows + y * stride;
    int32_t weight = weights[y];
    for (int x = 0; x < width; x++) sums[x] += row[x] * weight;
  }
  for (int x = 0; x < width; x++) out[x] = whole(sums[x]);
}

static void across_rows(const uint8_t *from, ptrdiff_t stride, int rows, int has_more, int channels, uint8_t *to, int count,
                        const int *bounds, const int32_t *weights, int taps) {
  for (int y = 0; y < rows; y++) {
    const uint8_t *row = from + y * stride;
    uint8_t *out = to + (size_t)y * count * channels;
    if (channels == 3 && (has_more || y + 1 < rows))
      across3(row, out, count, bounds, weights, taps);
    else
      across(row, out, channels, count, bounds, weights, taps);
  }
}

/* pixels: `height` rows of `width` pixels, `stride` bytes apart. The window begins at (top, left) of the resized picture,
   whose size is resized_h x resized_w, and fills out_h x out_w pixels of `out`. A picture that shrinks downwards is resized
   downwards first, others across first: so the slower pass across has fewer rows. `between` has room for what lies between the passes, (resized_h < height ?
   out_h * width : height * out_w) * channels + 4 bytes: taken afresh each time, such memory costs more than the work in it.
   Returns 0 when there is no memory. */
int hr_resize(const uint8_t *pixels, ptrdiff_t stride, int height, int width, int channels, int resized_h, int resized_w,
              int top, int left, int out_h, int out_w, uint8_t *out, uint8_t *between) {
  int done = 0, down_first = resized_h < height;
  int *bounds_x = malloc(sizeof *bounds_x * 2 * out_w), *bounds_y = malloc(sizeof *bounds_y * 2 * out_h);
  int32_t *weights_x = NULL, *weights_y = NULL, *sums = NULL;
  if (!bounds_x || !bounds_y) goto end;
  int taps_x = make_weights(width, resized_w, left, out_w, bounds_x, &weights_x);
  int taps_y = make_weights(height, resized_h, top, out_h, bounds_y, &weights_y);
  if (!taps_x || !taps_y) goto end;
  int x0 = bounds_x[0], x1 = bounds_x[2 * out_w - 2] + bounds_x[2 * out_w - 1];
  int y0 = bounds_y[0], y1 = bounds_y[2 * out_h - 2] + bounds_y[2 * out_h - 1];
  int line = (down_first ? x1 - x0 : out_w) * channels, rows = down_first ? out_h : y1 - y0;
  sums = malloc(sizeof *sums * line);
  if (!sums) goto end;
  if (down_first) {
    const uint8_t *from = pixels + (ptrdiff_t)x0 * channels;
    for (int y = 0; y < out_h; y++)
      down(from + bounds_y[2 * y] * stride, stride, line, between + (size_t)y * line, sums, bounds_y[2 * y + 1],
           weights_y + (size_t)y * taps_y);
    for (int i = 0; i < out_w; i++) bounds_x[2 * i] -= x0;
    if (width == resized_w)
      memcpy(out, between, (size_t)out_h * line);
    else
      across_rows(between, line, out_h, 1, channels, out, out_w, bounds_x, weights_x, taps_x);
  } else {
    const uint8_t *from = pixels + y0 * stride;
    if (width == resized_w)
      for (int y = 0; y < rows; y++) memcpy(between + (size_t)y * line, from + y * stride + (ptrdiff_t)left * channels, line);
    else
      across_rows(from, stride, rows, y1 < height, channels, between, out_w, bounds_x, weights_x, taps_x);
    if (height == resized_h)
      memcpy(out, between + (size_t)(top - y0) * line, (size_t)out_h * line);
    else
      for (int y = 0; y < out_h; y++)
        down(between + (size_t)(bounds_y[2 * y] - y0) * line, line, line, out + (size_t)y * line, sums, bounds_y[2 * y + 1],
             weights_y + (size_t)y * taps_y);
  }
  done = 1;
end:
  free(bounds_x);
  free(bounds_y);
  free(weights_x);
  free(weights_y);
  free(sums);
  return done;
}
