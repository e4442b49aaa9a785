/* Show random crops of damaged JPEGs to the decoder: built with the address and undefined-behaviour sanitizers, it must not
   read or write where it may not, and end. Arguments: number of rounds, seed, files. */
#include <stdio.h>
#include <stdlib.h>

#include "jpeg.h"

int hr_jpeg_header(const uint8_t *data, int64_t size, int32_t *out);
int64_t hr_jpeg_view(const uint8_t *data, int64_t size, int factor, int top, int left, int height, int width, int resized_h,
                     int resized_w, int skip_y, int skip_x, int out_h, int out_w, int channels, uint8_t *out, uint8_t *room,
                     int64_t room_size, Tables *tables);

static uint32_t state;
static uint32_t below(uint32_t limit) {
  state = state * 1664525u + 1013904223u;
  return (uint32_t)(((uint64_t)state * limit) >> 32);
}

static uint8_t *damaged(const uint8_t *data, size_t *size) {
  size_t length = below(4) ? *size : 2 + below((uint32_t)*size - 2);
  uint8_t *copy = malloc(length);
  memcpy(copy, data, length);
  for (uint32_t n = below(8); n; n--) {
    uint32_t at = below(2) ? below((uint32_t)length) : below(length < 700 ? (uint32_t)length : 700);
    copy[at] = (uint8_t)(below(3) ? below(256) : 0xFF);
  }
  *size = length;
  return copy;
}

int main(int argc, char **argv) {
  int rounds = atoi(argv[1]), shown = 0;
  state = (uint32_t)atoi(argv[2]);
  Tables *tables = calloc(1, sizeof *tables);
  for (int file = 3; file < argc; file++) {
    FILE *input = fopen(argv[file], "rb");
    static uint8_t whole[1 << 22];
    size_t full = fread(whole, 1, sizeof whole, input);
    fclose(input);
    for (int round = 0; round < rounds; round++) {
      size_t size = full;
      uint8_t *data = damaged(whole, &size);
      int32_t header[3];
      if (hr_jpeg_header(data, (int64_t)size, header) && (int64_t)header[0] * header[1] < 4000000) {
        int factor = 1 << below(4), tall = header[0], wide = header[1];
        int top = (int)below((uint32_t)tall), left = (int)below((uint32_t)wide), channels = below(4) ? 3 : 1;
        int height = 1 + (int)below((uint32_t)(tall - top)), width = 1 + (int)below((uint32_t)(wide - left));
        int to_h = 1 + (int)below(90), to_w = 1 + (int)below(90), out_h = 1 + (int)below((uint32_t)to_h);
        int out_w = 1 + (int)below((uint32_t)to_w), skip_y = to_h - out_h, skip_x = to_w - out_w;
        uint8_t *out = malloc((size_t)out_h * out_w * channels), *room = NULL;
        int64_t has = 0, said;
        while ((said = hr_jpeg_view(data, (int64_t)size, factor, top, left, height, width, to_h, to_w, skip_y, skip_x, out_h,
                                    out_w, channels, out, room, has, tables)) > 0) {
          free(room);
          room = malloc((size_t)said); /* exactly what it asks for */
          has = said;
        }
        shown += said == 0;
        free(room);
        free(out);
      }
      free(data);
    }
  }
  free(tables);
  printf("%d shown\n", shown);
  return 0;
}
