/* Decode a batch of training images in one call: read the files, draw the crops, decode and resize. Python's lock is given
   up once for all of them, so that many threads do not wait for each other. Crops are those of data/decoding/crop.py, to the bit. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "jpeg.h"

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

/* Images: each in a file, `lengths` bytes from `offsets` on (-1: the whole file); `crcs` is -1 where there is none. */
typedef struct {
  const char *const *paths;
  const int64_t *offsets, *lengths, *crcs;
  const uint32_t *epochs, *samples;
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

/* Say whether a crop has enough of the image. (Images of which objects are known do not come here.) */
static int covers(int height, int width, const Rule *rule, const Box *box) {
  double common = (double)box->height * box->width;
  return common >= rule->min_covered * height * width && common > 0;
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

/* Draw a crop; tests compare it with Python's. */
void hr_random_crop(int height, int width, const Rule *rule, uint32_t epoch, uint32_t sample, int32_t *out) {
  Draws draws = {add_word(add_word(add_word(add_word(0, rule->seed), epoch), sample), rule->purpose), 0};
  Box box = rule->reference ? (Box){0, 0, height, width} : centre_box(height, width, rule), drawn;
  for (int n = 0; n < rule->attempts; n++) {
    int found = rule->reference ? reference_box(height, width, rule, &draws, &drawn)
                                : torchvision_box(height, width, rule, &draws, &drawn);
    if (found && (!rule->reference || covers(height, width, rule, &drawn))) {
      box = drawn;
      break;
    }
  }
  out[0] = box.top, out[1] = box.left, out[2] = box.height, out[3] = box.width;
}

/* CRC-32 as zlib has it, eight bytes at a time. The table is zero at first. */
static uint32_t crc32_of(const uint8_t *data, int64_t size, uint32_t (*table)[256]) {
  uint32_t crc = 0xFFFFFFFFu;
  for (uint32_t n = 0; !table[7][255] && n < 256; n++) {
    table[0][n] = n;
    for (int bit = 0; bit < 8; bit++) table[0][n] = table[0][n] >> 1 ^ (table[0][n] & 1 ? 0xEDB88320u : 0);
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
  int file = open(path, O_RDONLY | O_CLOEXEC);
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

/* Decode one image; return as hr_jpeg_view does. */
static int64_t decode_one(const uint8_t *data, int64_t size, const Rule *rule, const Images *all, int i, uint8_t *out,
                        uint8_t *room, int64_t room_size, Tables *tables) {
  Frame frame;
  int32_t box[4];
  if (!hr_read_frame(data, (size_t)size, &frame) || frame.orientation != 1) return -1; /* turned: not here */
  if ((double)frame.height * frame.width > rule->max_pixels) return -1;
  hr_random_crop(frame.height, frame.width, rule, all->epochs[i], all->samples[i], box);
  double least = fmin((double)box[2] / rule->size, (double)box[3] / rule->size);
  int factor = least >= 8 ? 8 : least >= 4 ? 4 : least >= 2 ? 2 : 1;
  if (factor > 1) {
    for (int n = 0; n < 4; n++) box[n] = (int32_t)rint((double)box[n] / factor);
    int tall = (frame.height + factor - 1) / factor - box[0], wide = (frame.width + factor - 1) / factor - box[1];
    box[2] = box[2] < tall ? box[2] : tall;
    box[3] = box[3] < wide ? box[3] : wide;
  }
  return hr_jpeg_view(data, size, factor, box[0], box[1], box[2], box[3], rule->size, rule->size, 0, 0, rule->size, rule->size,
                      rule->channels, out, room, room_size, tables);
}

/* Decode images *next to `count` - 1, each [size, size, channels] of `out`; decoded[i] says whether it could be done. Returns 0 when all
   were tried; else the bytes that the room must have for number *next, to go on with. */
int64_t hr_decode_batch(const Images *all, const Rule *rule, int count, int32_t *next, uint8_t *decoded, uint8_t *out,
                      uint8_t *room, int64_t room_size, Tables *tables) {
  size_t each = (size_t)rule->size * rule->size * rule->channels;
  for (int i = *next; i < count; i++) {
    int64_t size = read_file(all->paths[i], all->offsets[i], all->lengths[i], room, room_size - SPARE), said = -1;
    int64_t used = (size < 0 ? -size : size) + SPARE;
    used += -used & 63;
    *next = i;
    if (size < 0) return 3 * used + (1 << 20); /* a guess of what decoding takes; what is missing then is asked for */
    if (size && (all->crcs[i] < 0 || crc32_of(room, size, tables->crc) == (uint32_t)all->crcs[i])) {
      said = decode_one(room, size, rule, all, i, out + (size_t)i * each, room + used, room_size - used, tables);
      if (said > 0) return said + used + SPARE;
    }
    decoded[i] = said == 0;
  }
  return 0;
}
