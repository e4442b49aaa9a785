/* A decoder of baseline JPEGs that decodes a crop and no more: what its files share.

   Own code because libjpeg reads every bit of all rows before a crop coefficient by coefficient and transforms them row by
   row: here bits outside of the crop are stepped over, and a crop and its resizing are one call. Its pixels are those of
   libjpeg-turbo's quick settings (JDCT_IFAST, no fancy upsampling), bit for bit. Whatever is unusual or damaged is not judged
   here: it returns a failure, and libjpeg has the word. */
#ifndef HEADRACE_JPEG_H
#define HEADRACE_JPEG_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LOOK 11         /* bits that are looked up at once; longer codes are rare */
#define END_OF_BLOCK 63 /* steps of the code that ends a block */
#define MAX_SIDE 65500  /* of an image, as libjpeg has it */
#define MAX_SEGMENTS 10000 /* in front of the scan, as data/decoding/limits.py has it */

/* A Huffman table. An entry of `look` is 0 where the code is longer than LOOK or does not exist. Else it has, of one value or of
   two that follow each other: bits of all, bits of the first code and value, bits of the first value, how many steps it goes on
   in the block; and bits of the second value, and its steps (0 where it is not known). */
#define TOTAL(entry) ((int)((entry) & 63))
#define TOTAL1(entry) ((int)((entry) >> 6 & 31))
#define SIZE1(entry) ((int)((entry) >> 11 & 15))
#define STEPS1(entry) ((int)((entry) >> 15 & 63))
#define SIZE2(entry) ((int)((entry) >> 21 & 15))
#define STEPS2(entry) ((int)((entry) >> 25))

typedef struct {
  uint32_t look[1 << LOOK];
  int32_t last[17];  /* the last code of each length, -1 where there is none */
  int32_t place[17]; /* what to add to a code to find its symbol */
  uint8_t symbols[256];
  uint8_t made_of[16 + 256]; /* the bytes it was made of: most images have the same tables */
  int32_t made;
} Huffman;

typedef struct {
  Huffman dc[4], ac[4];
  uint32_t crc[2][8][256];
} Tables; /* of one thread */

/* What stands in front of the scan. */
typedef struct {
  int height, width, parts; /* parts: components, 1 or 3 */
  int across, down;         /* blocks of the first component in a unit; the others have one */
  int quant_of[3], dc_of[3], ac_of[3];
  int interval; /* units between restart markers, 0: none */
  int orientation;
  size_t scan;                /* where the scan's bits begin */
  const uint8_t *quant[4];    /* 64 bytes each, in zigzag order */
  const uint8_t *codes[2][4]; /* counts and symbols of the tables, dc and ac */
} Frame;

int hr_read_frame(const uint8_t *data, size_t size, Frame *frame);
uint32_t hr_entry(int length, int symbol, int is_ac);
int hr_make_table(Huffman *table, const uint8_t *codes, int is_ac);
void hr_scale_quant(const uint8_t *quant, int side, int16_t *scaled);
void hr_inverse(const int16_t *block, int last, uint8_t *out, ptrdiff_t stride);
void hr_inverse_small(const int16_t *block, int side, uint8_t *out, ptrdiff_t stride);
void hr_colour_row(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *rgb, int width);
int hr_resize(const uint8_t *pixels, ptrdiff_t stride, int height, int width, int channels, const double *box, int resized_h,
              int resized_w, int top, int left, int out_h, int out_w, int cubic, int down_first, uint8_t *out, uint8_t *between);

int64_t hr_jpeg_view(const uint8_t *data, int64_t size, int factor, int top, int left, int height, int width, int resized_h,
                     int resized_w, int skip_y, int skip_x, int out_h, int out_w, int channels, uint8_t *out, uint8_t *room,
                     int64_t room_size, Tables *tables);

extern const uint8_t hr_natural[64];
#endif
