/* Decode a crop of a JPEG and resize it: bits to blocks, blocks to rows of pixels, and the calls that Python makes. */
#include "jpeg_bits.h"

#define SLACK 4096 /* zeros after the bits: a unit of damaged ones cannot read further before it is noticed */
#define UNUSUAL (-1)

/* The parts of the working memory are one buffer to a sanitizer. In a build with AddressSanitizer (tests/fuzz) what lies
   between them must not be touched. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define GUARD(from, size) __asan_poison_memory_region(from, size)
#define UNGUARD(from, size) __asan_unpoison_memory_region(from, size)
#else
#define GUARD(from, size) (void)0
#define UNGUARD(from, size) (void)0
#endif

/* Where the bits of each restart interval begin in the buffer, and where they end. */
typedef struct {
  uint8_t *bytes;
  uint32_t *ends;
  int count;
} Segments;

typedef struct {
  Frame frame;
  const Huffman *dc[3], *ac[3];
  int16_t quant[3][64];
  int units_across, units_down;
  int side[3];                        /* of a block, in pixels: 8, or less where the image is decoded smaller */
  int wider, taller;                  /* how often a pixel of colour is repeated */
  int top, left, height, width;       /* the crop, in pixels */
  int unit_left, unit_right;          /* its units */
  uint8_t *planes[3], *wide[2];       /* one row of units; colours at full width */
  ptrdiff_t strides[3];
  int grey;                           /* only brightness is wanted */
  uint8_t *pixels;                    /* the crop's */
} Job;

static int skip_unit(const Job *job, Bits *bits, int *before) {
  int brightness = job->frame.across * job->frame.down;
  for (int n = 0; n < brightness; n++)
    if (read_block(bits, job->dc[0], job->ac[0], before, NULL, NULL) < 0) return 0;
  for (int part = 1; part < job->frame.parts; part++)
    if (read_block(bits, job->dc[part], job->ac[part], before + part, NULL, NULL) < 0) return 0;
  return 1;
}

static int read_unit(const Job *job, Bits *bits, int *before, int unit) {
  int16_t block[64] __attribute__((aligned(64)));
  for (int part = 0; part < job->frame.parts; part++) {
    int across = part ? 1 : job->frame.across, down = part ? 1 : job->frame.down;
    for (int y = 0; y < down; y++)
      for (int x = 0; x < across; x++) {
        int last = read_block(bits, job->dc[part], job->ac[part], before + part, job->quant[part], block);
        if (last < 0) return 0;
        if (part && job->grey) continue;
        int side = job->side[part];
        uint8_t *to = job->planes[part] + side * (y * job->strides[part] + (unit - job->unit_left) * across + x);
        if (side == 8)
          hr_inverse(block, last, to, job->strides[part]);
        else
          hr_inverse_small(block, side, to, job->strides[part]);
      }
  }
  return 1;
}

/* Write those pixels of a row of units that are in the crop. */
static void write_rows(const Job *job, int unit_row) {
  int tall = job->side[0] * job->frame.down, first = unit_row * tall;
  int x = job->left - job->unit_left * job->side[0] * job->frame.across;
  int from = job->top > first ? job->top - first : 0;
  int to = job->top + job->height < first + tall ? job->top + job->height - first : tall;
  for (int y = from; y < to; y++) {
    const uint8_t *light = job->planes[0] + y * job->strides[0] + x, *colours[2];
    size_t row = (size_t)(first + y - job->top) * (size_t)job->width;
    if (job->grey) {
      memcpy(job->pixels + row, light, (size_t)job->width);
      continue;
    }
    for (int part = 1; part < 3; part++) {
      const uint8_t *narrow = job->planes[part] + y / job->taller * job->strides[part];
      colours[part - 1] = narrow + x;
      if (job->wider == 1) continue;
      uint8_t *wide = job->wide[part - 1];
      if (job->taller == 1 || y == from || !(y & 1)) /* two rows have the same colours */
        for (int i = 0; i < job->strides[part]; i++) wide[2 * i] = wide[2 * i + 1] = narrow[i];
      colours[part - 1] = wide + x;
    }
    hr_colour_row(light, colours[0], colours[1], job->pixels + 3 * row, job->width);
  }
}

/* Copy the scan's bits without the zeros that follow each 0xFF, cut at restart markers. Return 0 unless the scan ends with
   the end of the image and has `most` segments: files that were cut short are noticed here. */
static int split_scan(const uint8_t *data, size_t size, Segments *segments, int most) {
  const uint8_t *from = data, *end = data + size;
  uint8_t *to = segments->bytes;
  segments->count = 0;
  for (;;) {
    const uint8_t *mark = memchr(from, 0xFF, (size_t)(end - from));
    if (!mark || mark + 1 >= end) return 0;
    size_t plain = (size_t)(mark - from);
    memcpy(to, from, plain);
    to += plain;
    from = mark + 2;
    if (mark[1] == 0) {
      *to++ = 0xFF;
      continue;
    }
    if (segments->count == most) return 0;
    segments->ends[segments->count] = (uint32_t)(to - segments->bytes);
    if (mark[1] == 0xD9) break;
    if (mark[1] != 0xD0 + (segments->count & 7)) return 0;
    segments->count++;
  }
  memset(to, 0, SLACK);
  return ++segments->count == most;
}

static Bits start_at(const Segments *segments, int number) {
  Bits bits = {0, 0, segments->bytes + (number ? segments->ends[number - 1] : 0)};
  refill(&bits);
  return bits;
}

/* Return how many bits of a segment are left: below 0 it was too short. */
static int64_t bits_left(const Segments *segments, int number, const Bits *bits) {
  return (segments->bytes + segments->ends[number] - bits->next) * 8 + bits->count;
}

/* Decode all rows of units that the crop needs. Rows before its first restart interval are not even looked at. */
static int read_rows(const Job *job, const Segments *segments) {
  int tall = job->side[0] * job->frame.down, first = job->top / tall, last = (job->top + job->height - 1) / tall;
  int64_t across = job->units_across, interval = job->frame.interval ? job->frame.interval : across * job->units_down;
  int number = (int)(first * across / interval), before[3] = {0};
  int row = (int)(number * interval / across), column = (int)(number * interval % across);
  Bits bits = start_at(segments, number);
  for (int64_t in_segment = 0; row <= last; in_segment++) {
    if (in_segment == interval) {
      if ((uint64_t)bits_left(segments, number, &bits) > 7) return 0; /* too few bits, or bytes too many */
      bits = start_at(segments, ++number);
      before[0] = before[1] = before[2] = 0;
      in_segment = 0;
    }
    int needed = row >= first && column >= job->unit_left && column < job->unit_right;
    if (!(needed ? read_unit(job, &bits, before, column) : skip_unit(job, &bits, before))) return 0;
    if (bits_left(segments, number, &bits) < 0) return 0;
    if (++column == across) {
      if (row >= first) write_rows(job, row);
      column = 0, row++;
    }
  }
  return row < job->units_down || (uint64_t)bits_left(segments, number, &bits) <= 7;
}

/* Take `size` bytes of the room, aligned; with no room, only count. */
static uint8_t *take(uint8_t *room, size_t *used, size_t size) {
  uint8_t *at = room ? room + *used : NULL;
  *used += (size + 127) & ~(size_t)63; /* at least 64 bytes between two: rows are read and written in whole vectors */
  if (room) GUARD(at + size, (size_t)(room + *used - at) - size);
  return at;
}

/* Give every part of the work its place; return how much room all of them take. */
static size_t lay_out(Job *job, Segments *segments, size_t size, uint8_t *room, int num_segments) {
  size_t used = 0;
  segments->bytes = take(room, &used, size - job->frame.scan + SLACK);
  segments->ends = (uint32_t *)(void *)take(room, &used, (size_t)num_segments * sizeof(uint32_t));
  int units = job->unit_right - job->unit_left;
  for (int part = 0; part < job->frame.parts; part++) {
    job->strides[part] = (ptrdiff_t)job->side[part] * units * (part ? 1 : job->frame.across);
    job->planes[part] = take(room, &used, (size_t)(job->strides[part] * job->side[part] * (part ? 1 : job->frame.down)));
  }
  for (int n = 0; n < 2; n++) job->wide[n] = take(room, &used, (size_t)job->strides[0]);
  job->pixels = take(room, &used, (size_t)job->height * (size_t)job->width * (job->grey ? 1 : 3));
  return used;
}

/* Make what is needed of tables and quantisation; return 0 where a table is not that of a baseline JPEG. */
static int make_tables(Job *job, Tables *tables) {
  const Frame *frame = &job->frame;
  for (int part = 0; part < frame->parts; part++) {
    Huffman *dc = &tables->dc[frame->dc_of[part]], *ac = &tables->ac[frame->ac_of[part]];
    if (!hr_make_table(dc, frame->codes[0][frame->dc_of[part]], 0)) return 0;
    if (!hr_make_table(ac, frame->codes[1][frame->ac_of[part]], 1)) return 0;
    job->dc[part] = dc;
    job->ac[part] = ac;
    hr_scale_quant(frame->quant[frame->quant_of[part]], job->side[part], job->quant[part]);
  }
  return 1;
}

/* Tell height, width and orientation of a JPEG that can be decoded here; return 0 for others. */
int hr_jpeg_header(const uint8_t *data, int64_t size, int32_t *out) {
  Frame frame;
  if (!hr_read_frame(data, (size_t)size, &frame)) return 0;
  out[0] = frame.height;
  out[1] = frame.width;
  out[2] = frame.orientation;
  return 1;
}

int hr_tables_size(void) { return (int)sizeof(Tables); }

/* Say what the crop, in an image that is decoded at 1/factor, asks for; return 0 where it does not lie in the image. As libjpeg
   does it, colours that have half the pixels both ways are not made as small as brightness. */
static int plan_job(Job *job, int factor, int channels) {
  const Frame *frame = &job->frame;
  int halved = frame->across == 2 && frame->down == 2 && factor > 1, side = 8 / factor;
  job->side[0] = side;
  job->side[1] = job->side[2] = halved ? 2 * side : side;
  job->wider = halved ? 1 : frame->across;
  job->taller = halved ? 1 : frame->down;
  job->grey = channels == 1 || frame->parts == 1;
  job->units_across = (frame->width + 8 * frame->across - 1) / (8 * frame->across);
  job->units_down = (frame->height + 8 * frame->down - 1) / (8 * frame->down);
  job->unit_left = job->left / (side * frame->across);
  job->unit_right = (job->left + job->width - 1) / (side * frame->across) + 1;
  int height = (frame->height + factor - 1) / factor, width = (frame->width + factor - 1) / factor;
  return job->top <= height - job->height && job->left <= width - job->width;
}

/* Write a view of a JPEG to `out`, uint8 [out_h, out_w, channels]: the crop, in pixels of the whole image, is decoded at 1/factor
   (1, 2, 4 or 8) and resized to resized_h x resized_w, of which `out` begins at (skip_y, skip_x). Where the crop's edges lie
   inside of decoded pixels, those count by the part that is in it: rounded edges would shift the view by half a pixel. `tables` belongs to one thread and is
   zero at first. Returns 0 when done, the bytes that `room` must have when it has fewer, and -1 for what is unusual or
   damaged. */
int64_t hr_jpeg_view(const uint8_t *data, int64_t size, int factor, int top, int left, int height, int width, int resized_h,
                     int resized_w, int skip_y, int skip_x, int out_h, int out_w, int channels, uint8_t *out, uint8_t *room,
                     int64_t room_size, Tables *tables) {
  if (top < 0 || left < 0 || height < 1 || width < 1 || height > MAX_SIDE || width > MAX_SIDE) return UNUSUAL;
  if (top > MAX_SIDE || left > MAX_SIDE) return UNUSUAL;
  Job job = {.top = top / factor, .left = left / factor};
  Segments segments;
  Frame *frame = &job.frame;
  double box[4] = {(double)top / factor - job.top, (double)left / factor - job.left, (double)height / factor,
                   (double)width / factor};
  height = job.height = (top + height + factor - 1) / factor - job.top;
  width = job.width = (left + width + factor - 1) / factor - job.left;
  if (!hr_read_frame(data, (size_t)size, frame) || !plan_job(&job, factor, channels)) return UNUSUAL;
  int64_t units = (int64_t)job.units_across * job.units_down;
  int num_segments = frame->interval ? (int)((units + frame->interval - 1) / frame->interval) : 1;
  if (num_segments > size) return UNUSUAL;
  int shown = job.grey ? 1 : 3, repeat = channels / shown;
  int down_first = resized_h < height;
  size_t between = (size_t)(down_first ? out_h * (int64_t)width : height * (int64_t)out_w) * shown + 64;
  size_t used = lay_out(&job, &segments, (size_t)size, NULL, num_segments), needed = used + between + 64;
  if (repeat > 1) needed += (size_t)out_h * out_w + 64;
  if ((int64_t)needed > room_size) return (int64_t)needed;
  UNGUARD(room, (size_t)room_size);
  lay_out(&job, &segments, (size_t)size, room, num_segments);
  if (!split_scan(data + frame->scan, (size_t)size - frame->scan, &segments, num_segments)) return UNUSUAL;
  if (!make_tables(&job, tables) || !read_rows(&job, &segments)) return UNUSUAL;
  uint8_t *to = repeat > 1 ? room + used + between + 64 : out;
  if (!hr_resize(job.pixels, (ptrdiff_t)width * shown, height, width, shown, box, resized_h, resized_w, skip_y, skip_x, out_h,
                 out_w, 0, down_first, to, room + used))
    return UNUSUAL;
  if (repeat > 1)
    for (size_t i = 0; i < (size_t)out_h * out_w; i++) out[3 * i] = out[3 * i + 1] = out[3 * i + 2] = to[i];
  return 0;
}
