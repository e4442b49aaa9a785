/* Decode a batch of training images in one call: read the files, draw the crops (or take whole images), decode and resize. Python's lock is given
   up once for all of them, so that many threads do not wait for each other. Crops are those of data/decoding/resize.py, to the bit. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "jpeg.h"

#ifdef __SSE4_2__
#include <immintrin.h>
#endif

#define GOLDEN 0x9E3779B9u
#define SPARE 64
#define MAX_FILE (1 << 28)

/* How crops are drawn, and what is made of them. */
typedef struct {
  double area[2], aspect[2];
  double min_covered, max_pixels;
  int32_t reference, attempts; /* reference: TensorFlow's sampler, else torchvision's */
  uint32_t seed, purpose;
  int32_t size, channels;
} Rule;

/* What a crop is drawn for. Objects of sample i, four numbers from 0 to 1 each, end with number object_ends[i]; NULL: none. */
typedef struct {
  const uint32_t *epochs, *samples;
  const int32_t *object_ends;
  const float *objects;
} Drawn;

/* Images: each in a file, `lengths` bytes from `offsets` on (-1: the whole file), of which `sizes` bytes from `skips` on are the
   image (-1: all). `crcs` is NONE, RECORD where the last four bytes are a TFRecord's checksum of those before, else the CRC-32. */
#define NONE (-1)
#define RECORD (-2)
typedef struct {
  const char *const *paths;
  const int64_t *offsets, *lengths, *crcs, *skips, *sizes;
  Drawn drawn;
} Images;

typedef struct {
  uint32_t address, next;
} Draws;

typedef struct {
  int top, left, height, width;
} Box;

static uint32_t mix(uint32_t h) {
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ h >> 16;
}

static uint32_t add_word(uint32_t h, uint32_t word) { return mix((h ^ word) * GOLDEN + GOLDEN); }

static double draw(Draws *draws) { return add_word(draws->address, draws->next++) / 4294967296.0; }

static double between(const double limits[2], double share) { return limits[0] + (limits[1] - limits[0]) * share; }

static int torchvision_box(int height, int width, const Rule *rule, Draws *draws, Box *box) {
  double area = (double)((int64_t)height * width) * between(rule->area, draw(draws));
  double logs[2] = {log(rule->aspect[0]), log(rule->aspect[1])};
  double aspect = exp(between(logs, draw(draws))), down = draw(draws), right = draw(draws);
  double w = rint(sqrt(area * aspect)), h = rint(sqrt(area / aspect));
  if (!(w > 0 && w <= width && h > 0 && h <= height)) return 0;
  *box = (Box){(int)(down * (height - h + 1)), (int)(right * (width - w + 1)), (int)h, (int)w};
  return 1;
}

static int reference_box(int height, int width, const Rule *rule, Draws *draws, Box *box) {
  double aspect = between(rule->aspect, draw(draws));
  double least = rule->area[0] * height * width, most = rule->area[1] * height * width;
  double lowest = rint(sqrt(least / aspect)), highest = fmin(rint(sqrt(most / aspect)), trunc((width + 0.4999999) / aspect));
  highest = fmin(highest, height);
  lowest = fmin(lowest, highest);
  double h = lowest + trunc(draw(draws) * (highest - lowest + 1)), down = draw(draws), right = draw(draws);
  if (rint(h * aspect) * h < least) h += 1;
  if (rint(h * aspect) * h > most) h -= 1;
  double w = rint(h * aspect);
  if (!(least <= w * h && w * h <= most && w > 0 && w <= width && h > 0 && h <= height)) return 0;
  *box = (Box){(int)(down * (height - h)), (int)(right * (width - w)), (int)h, (int)w};
  return 1;
}

/* Say whether a crop has enough of one of the objects (top, left, bottom, right), or of the whole image where none is known. */
static int covers(int height, int width, const Rule *rule, const Box *box, const float *objects, int count) {
  static const float whole[4] = {0, 0, 1, 1};
  if (!count) objects = whole, count = 1;
  for (const float *at = objects; at < objects + 4 * count; at += 4) {
    double y0 = (double)at[0] * height, x0 = (double)at[1] * width, y1 = (double)at[2] * height, x1 = (double)at[3] * width;
    double tall = fmin(box->top + box->height, y1) - fmax(box->top, y0);
    double wide = fmin(box->left + box->width, x1) - fmax(box->left, x0);
    double common = fmax(0, tall) * fmax(0, wide);
    if (common >= rule->min_covered * (y1 - y0) * (x1 - x0) && common > 0) return 1;
  }
  return 0;
}

static Box centre_box(int height, int width, const Rule *rule) {
  double aspect = (double)width / height;
  int h = height, w = width;
  if (aspect < rule->aspect[0])
    h = (int)fmin(height, rint(width / rule->aspect[0]));
  else if (aspect > rule->aspect[1])
    w = (int)fmin(width, rint(height * rule->aspect[1]));
  return (Box){(height - h) / 2, (width - w) / 2, h, w};
}

static Box random_crop(int height, int width, const Rule *rule, const Drawn *all, int i) {
  Draws draws = {add_word(add_word(add_word(add_word(0, rule->seed), all->epochs[i]), all->samples[i]), rule->purpose), 0};
  int first = all->object_ends && i ? all->object_ends[i - 1] : 0, num = all->object_ends ? all->object_ends[i] - first : 0;
  Box box = rule->reference ? (Box){0, 0, height, width} : centre_box(height, width, rule), drawn;
  for (int n = 0; n < rule->attempts; n++) {
    int found = rule->reference ? reference_box(height, width, rule, &draws, &drawn)
                                : torchvision_box(height, width, rule, &draws, &drawn);
    if (found && (!rule->reference || covers(height, width, rule, &drawn, all->objects + 4 * (ptrdiff_t)first, num)))
      return drawn;
  }
  return box;
}

/* Draw the crops of images of these heights and widths: top, left, height and width of each. */
void hr_random_crops(const int32_t *sizes, const Rule *rule, const Drawn *all, int count, int32_t *out) {
  for (int i = 0; i < count; i++, out += 4) {
    Box box = random_crop(sizes[2 * i], sizes[2 * i + 1], rule, all, i);
    out[0] = box.top, out[1] = box.left, out[2] = box.height, out[3] = box.width;
  }
}

#define ZLIB 0xEDB88320u       /* the polynomial of zlib's CRC-32 */
#define CASTAGNOLI 0x82F63B78u /* that of CRC-32C */

/* A CRC of 32 bits, eight bytes at a time. The table is zero at first. */
static uint32_t crc32_of(const uint8_t *data, int64_t size, uint32_t (*table)[256], uint32_t polynomial) {
  uint32_t crc = 0xFFFFFFFFu;
#ifdef __SSE4_2__
  if (polynomial == CASTAGNOLI) {
    uint64_t wide = crc, word;
    for (; size >= 8; size -= 8, data += 8) {
      memcpy(&word, data, 8);
      wide = _mm_crc32_u64(wide, word);
    }
    for (crc = (uint32_t)wide; size > 0; size--) crc = _mm_crc32_u8(crc, *data++);
    return ~crc;
  }
#endif
  for (uint32_t n = 0; !table[7][255] && n < 256; n++) {
    table[0][n] = n;
    for (int bit = 0; bit < 8; bit++) table[0][n] = table[0][n] >> 1 ^ (table[0][n] & 1 ? polynomial : 0);
  }
  for (int k = 1; !table[7][255] && k < 8; k++)
    for (int n = 0; n < 256; n++) table[k][n] = table[k - 1][n] >> 8 ^ table[0][table[k - 1][n] & 255];
  for (; size >= 8; size -= 8, data += 8) {
    uint32_t low = crc ^ (data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24);
    crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
          table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]] ^ table[0][data[7]];
  }
  while (size-- > 0) crc = crc >> 8 ^ table[0][(crc ^ *data++) & 255];
  return ~crc;
}

/* Read `length` bytes (all: -1) of a file into the room; return how many were read, the size that is missing as a negative
   number where the room is too small, and 0 for everything that goes wrong: Python reads it again and says what it is. */
static int64_t read_file(const char *path, int64_t offset, int64_t length, uint8_t *room, int64_t room_size) {
  struct stat facts;
  int64_t done = 0;
  int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  /* opening a FIFO would wait for a writer */
  if (file < 0) return 0;
  if (length < 0) length = fstat(file, &facts) || !S_ISREG(facts.st_mode) ? 0 : facts.st_size;
  if (length > MAX_FILE) length = 0;
  if (length <= room_size) {
    while (done < length) {
      ssize_t got = pread(file, room + done, (size_t)(length - done), offset + done);
      if (got <= 0) break;
      done += got;
    }
  }
  close(file);
  if (length > room_size) return -length;
  return done == length ? done : 0;
}

static int is_intact(const uint8_t *data, int64_t size, int64_t crc, Tables *tables) {
  if (crc == NONE) return 1;
  if (crc != RECORD) return crc32_of(data, size, tables->crc[0], ZLIB) == (uint32_t)crc;
  if (size < 4) return 0;
  uint32_t found = crc32_of(data, size - 4, tables->crc[1], CASTAGNOLI);
  const uint8_t *kept = data + size - 4;
  return (found >> 15 | found << 17) + 0xA282EAD8u ==
         (kept[0] | (uint32_t)kept[1] << 8 | (uint32_t)kept[2] << 16 | (uint32_t)kept[3] << 24);
}

/* Turn a square view by what EXIF says of the image: swap rows and columns, then mirror. */
static void turn(const uint8_t *from, const uint8_t turns[3], int size, int channels, uint8_t *out) {
  for (int y = 0; y < size; y++)
    for (int x = 0; x < size; x++, out += channels) {
      int row = turns[1] ? size - 1 - y : y, column = turns[0] ? size - 1 - x : x;
      const uint8_t *pixel = from + channels * (turns[2] ? (ptrdiff_t)column * size + row : (ptrdiff_t)row * size + column);
      for (int c = 0; c < channels; c++) out[c] = pixel[c];
    }
}

/* Decode one image; return as hr_jpeg_view does. A crop is drawn in the upright image, and decoded and resized as it is stored. */
static int64_t decode_one(const uint8_t *data, int64_t size, const Rule *rule, const Drawn *drawn, int i, int32_t *hw,
                          uint8_t *out, uint8_t *room, int64_t room_size, Tables *tables) {
  static const uint8_t turns[9][3] = {{0}, {0}, {1, 0, 0}, {1, 1, 0}, {0, 1, 0}, {0, 0, 1}, {1, 0, 1}, {1, 1, 1}, {0, 1, 1}};
  Frame frame;
  if (!hr_read_frame(data, (size_t)size, &frame)) return -1;
  if ((double)frame.height * frame.width > rule->max_pixels) return -1;
  int orientation = frame.orientation >= 2 && frame.orientation <= 8 ? frame.orientation : 1;
  const uint8_t *turned = turns[orientation];
  int height = turned[2] ? frame.width : frame.height, width = turned[2] ? frame.height : frame.width;
  hw[0] = height, hw[1] = width;
  Box box = random_crop(height, width, rule, drawn, i);
  double least = fmin((double)box.height / rule->size, (double)box.width / rule->size);
  int factor = least >= 8 ? 8 : least >= 4 ? 4 : least >= 2 ? 2 : 1;
  if (turned[0]) box.left = width - box.left - box.width;
  if (turned[1]) box.top = height - box.top - box.height;
  if (turned[2]) box = (Box){box.left, box.top, box.width, box.height};
  int64_t each = orientation == 1 ? 0 : (int64_t)rule->size * rule->size * rule->channels;
  each += -each & 63;
  if (each > room_size) return each;
  int64_t said = hr_jpeg_view(data, size, factor, box.top, box.left, box.height, box.width, rule->size, rule->size, 0, 0, rule->size,
                              rule->size, rule->channels, each ? room : out, room + each, room_size - each, tables);
  if (!said && each) turn(room, turned, rule->size, rule->channels, out);
  return said > 0 ? said + each : said;
}

/* Decode images *next to `count` - 1, each [size, size, channels] of `out`; decoded[i] says whether it could be done, and two
   numbers of `hws` are the image's height and width. Returns 0 when all were tried; else the bytes that the room must have for
   number *next, to go on with. */
int64_t hr_decode_batch(const Images *all, const Rule *rule, int count, int32_t *next, uint8_t *decoded, int32_t *hws,
                        uint8_t *out, uint8_t *room, int64_t room_size, Tables *tables) {
  size_t each = (size_t)rule->size * rule->size * rule->channels;
  for (int i = *next; i < count; i++) {
    int64_t size = read_file(all->paths[i], all->offsets[i], all->lengths[i], room, room_size - SPARE), said = -1;
    int64_t used = (size < 0 ? -size : size) + SPARE;
    used += -used & 63;
    *next = i;
    if (size < 0) return 3 * used + (1 << 20); /* a guess of what decoding takes; what is missing then is asked for */
    int64_t skip = all->skips[i], length = all->sizes[i] < 0 ? size : all->sizes[i];
    int inside = skip >= 0 && skip <= size && length <= size - skip;
    if (size && inside && is_intact(room, size, all->crcs[i], tables)) {
      said = decode_one(room + skip, length, rule, &all->drawn, i, hws + 2 * i, out + (size_t)i * each, room + used,
                        room_size - used, tables);
      if (said > 0) return said + used + SPARE;
    }
    decoded[i] = said == 0;
  }
  return 0;
}
