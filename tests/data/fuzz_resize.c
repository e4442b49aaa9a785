/* Resize random images in every way: built with the address and undefined-behaviour sanitizers, it must not read or write where it
   may not. Arguments: number of rounds, seed. */
#include <stdio.h>
#include <stdlib.h>

#include "jpeg.h"

static int within(int least, int most) { return least + rand() % (most - least + 1); }

static double share(void) { return rand() % 100 / 100.0; }

int main(int argc, char **argv) {
  int rounds = argc > 2 ? atoi(argv[1]) : 0, done = 0;
  srand((unsigned)atoi(argv[2]));
  for (int round = 0; round < rounds; round++) {
    int height = within(1, 70), width = within(1, 70), channels = within(0, 1) ? 3 : 1;
    int tall = within(0, 4) ? within(1, 120) : height, wide = within(0, 4) ? within(1, 120) : width;
    int top = within(0, tall - 1), left = within(0, wide - 1), rows = within(1, tall - top), columns = within(1, wide - left);
    int cubic = within(0, 1), down_first = within(0, 1);
    double box[4] = {0, 0, height, width};
    if (within(0, 1)) {
      box[0] = height > 1 ? share() : 0, box[1] = width > 1 ? share() : 0;
      box[2] = (height - box[0]) * (1 - share() / 2), box[3] = (width - box[1]) * (1 - share() / 2);
    }
    uint8_t *pixels = malloc((size_t)(height * width * channels)), *out = malloc((size_t)(rows * columns * channels));
    uint8_t *between = malloc((size_t)((down_first ? rows * width : height * columns) * channels + 64));
    for (int i = 0; i < height * width * channels; i++) pixels[i] = (uint8_t)(within(0, 1) * 255);
    done += hr_resize(pixels, (ptrdiff_t)width * channels, height, width, channels, box, tall, wide, top, left, rows, columns, cubic,
                      down_first, out, between);
    free(pixels);
    free(out);
    free(between);
  }
  printf("%d\n", done);
  return 0;
}
