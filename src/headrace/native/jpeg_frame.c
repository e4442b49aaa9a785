/* What stands in front of a JPEG's scan: sizes, tables, orientation. Everything unusual is refused, and libjpeg takes it. */
#include "jpeg.h"

static int word(const uint8_t *at) { return at[0] << 8 | at[1]; }

/* Return the orientation in an EXIF block, 1 where it does not say. */
static int orientation_of(const uint8_t *tiff, size_t size) {
  if (size < 8) return 1;
  int little = tiff[0] == 'I' && tiff[1] == 'I';
  if (!little && !(tiff[0] == 'M' && tiff[1] == 'M')) return 1;
#define WORD(at) (little ? (size_t)tiff[at] | (size_t)tiff[(at) + 1] << 8 : (size_t)word(tiff + (at)))
  size_t first = little ? WORD(4) | WORD(6) << 16 : WORD(4) << 16 | WORD(6);
  if (first + 2 > size) return 1;
  size_t count = WORD(first);
  for (size_t entry = 0; entry < count; entry++) {
    size_t at = first + 2 + 12 * entry;
    if (at + 10 > size) return 1;
    if (WORD(at) == 0x0112 && WORD(at + 2) == 3) return (int)WORD(at + 8);
  }
#undef WORD
  return 1;
}

/* Read a frame header: 8 bits, grey or three components of which the last two have one block in a unit. */
static int read_components(const uint8_t *at, int length, Frame *frame, uint8_t *ids) {
  if (length < 11 || at[2] != 8 || frame->parts) return 0;
  frame->height = word(at + 3);
  frame->width = word(at + 5);
  int parts = at[7];
  if ((parts != 1 && parts != 3) || length != 8 + 3 * parts || !frame->height || !frame->width) return 0;
  if (frame->height > MAX_SIDE || frame->width > MAX_SIDE) return 0;
  for (int part = 0; part < parts; part++) {
    const uint8_t *one = at + 8 + 3 * part;
    int across = one[1] >> 4, down = one[1] & 15;
    ids[part] = one[0];
    if (one[2] > 3 || across < 1 || down < 1 || across > 2 || down > 2) return 0;
    if (part && (across > 1 || down > 1)) return 0;
    frame->quant_of[part] = one[2];
    if (!part) frame->across = across, frame->down = down;
  }
  if (parts == 1) frame->across = frame->down = 1; /* a single component is not interleaved */
  if (parts == 3 && (ids[0] == ids[1] || ids[1] == ids[2] || ids[0] == ids[2])) return 0;
  frame->parts = parts;
  return 1;
}

static int read_tables(const uint8_t *at, int length, Frame *frame, int marker) {
  int place = 2;
  while (place < length) {
    int kind = at[place] >> 4, id = at[place] & 15;
    if (marker == 0xDB) {
      if (kind || id > 3 || place + 65 > length) return 0; /* quantisation of 16 bits is left to libjpeg */
      frame->quant[id] = at + place + 1;
      place += 65;
    } else {
      if (kind > 1 || id > 3 || place + 17 > length) return 0;
      int symbols = 0;
      for (int bits = 1; bits <= 16; bits++) symbols += at[place + bits];
      if (symbols > 256 || place + 17 + symbols > length) return 0;
      frame->codes[kind][id] = at + place + 1;
      place += 17 + symbols;
    }
  }
  return place == length;
}

/* Read the header of the scan: it must have all components, in the frame's order. */
static int read_scan(const uint8_t *at, int length, Frame *frame, const uint8_t *ids) {
  int parts = frame->parts;
  if (!parts || length != 6 + 2 * parts || at[2] != parts) return 0;
  for (int part = 0; part < parts; part++) {
    const uint8_t *one = at + 3 + 2 * part;
    int dc = one[1] >> 4, ac = one[1] & 15;
    if (one[0] != ids[part] || dc > 3 || ac > 3) return 0;
    if (!frame->codes[0][dc] || !frame->codes[1][ac] || !frame->quant[frame->quant_of[part]]) return 0;
    frame->dc_of[part] = dc;
    frame->ac_of[part] = ac;
  }
  const uint8_t *rest = at + 3 + 2 * parts;
  return rest[0] == 0 && rest[1] == 63 && rest[2] == 0;
}

/* Read everything up to the scan; return 0 for what is not a plain baseline JPEG of grey or YCbCr. */
int hr_read_frame(const uint8_t *data, size_t size, Frame *frame) {
  uint8_t ids[3] = {0};
  int jfif = 0, adobe = -1, exif = 0;
  memset(frame, 0, sizeof *frame);
  frame->orientation = 1;
  if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return 0;
  size_t place = 2;
  for (int number = 0; number < MAX_SEGMENTS && place + 4 <= size; number++) {
    const uint8_t *at = data + place + 2;
    int marker = data[place + 1], length = word(at);
    if (data[place] != 0xFF || length < 2 || place + 2 + (size_t)length > size) return 0;
    if (marker == 0xC0) {
      if (!read_components(at, length, frame, ids)) return 0;
    } else if (marker == 0xC4 || marker == 0xDB) {
      if (!read_tables(at, length, frame, marker)) return 0;
    } else if (marker == 0xDD) {
      if (length != 4) return 0;
      frame->interval = word(at + 2);
    } else if (marker == 0xE0) {
      jfif |= length >= 16 && !memcmp(at + 2, "JFIF", 5);
    } else if (marker == 0xE1) {
      if (!exif && length >= 8 && !memcmp(at + 2, "Exif\0", 6)) {
        frame->orientation = orientation_of(at + 8, (size_t)length - 8);
        exif = 1;
      }
    } else if (marker == 0xEE) {
      if (length >= 14 && !memcmp(at + 2, "Adobe", 5)) adobe = at[13];
    } else if (marker == 0xDA) {
      if (!read_scan(at, length, frame, ids)) return 0;
      frame->scan = place + 2 + (size_t)length;
      int usual = ids[0] == 1 && ids[1] == 2 && ids[2] == 3;
      return frame->parts == 1 || jfif || (adobe >= 0 ? adobe == 1 : usual);
    } else if (marker < 0xE0 || (marker > 0xEF && marker != 0xFE)) {
      return 0; /* other kinds of frames, or something unknown */
    }
    place += 2 + (size_t)length;
  }
  return 0;
}

/* Return the entry of one code. */
uint32_t hr_entry(int length, int symbol, int is_ac) {
  int size = is_ac ? symbol & 15 : symbol, run = symbol >> 4;
  int steps = !is_ac ? 0 : size ? run + 1 : run == 15 ? 16 : END_OF_BLOCK;
  return (uint32_t)((length + size) | (length + size) << 6 | size << 11 | steps << 15);
}

/* Add the second value to all entries whose bits say what follows the first. */
static void add_seconds(Huffman *table) {
  uint32_t first[1 << LOOK];
  memcpy(first, table->look, sizeof first);
  for (uint32_t bits = 0; bits < 1 << LOOK; bits++) {
    uint32_t one = first[bits];
    if (!one || STEPS1(one) == END_OF_BLOCK || TOTAL1(one) >= LOOK) continue;
    uint32_t two = first[bits << TOTAL1(one) & ((1 << LOOK) - 1)];
    if (!two || TOTAL1(two) - SIZE1(two) > LOOK - TOTAL1(one)) continue;
    uint32_t total = (uint32_t)(TOTAL1(one) + TOTAL1(two));
    table->look[bits] = (one & ~(uint32_t)63) | total | (uint32_t)SIZE1(two) << 21 | (uint32_t)STEPS1(two) << 25;
  }
}

/* Make a table of the 16 counts and the symbols of a DHT segment; return 0 where they are not those of a baseline JPEG. */
int hr_make_table(Huffman *table, const uint8_t *codes, int is_ac) {
  int num = 0, code = 0, at = 0;
  for (int bits = 0; bits < 16; bits++) num += codes[bits];
  if (table->made && !memcmp(table->made_of, codes, (size_t)(16 + num))) return 1;
  table->made = 0;
  memset(table->look, 0, sizeof table->look);
  memcpy(table->symbols, codes + 16, (size_t)num);
  for (int bits = 1; bits <= 16; bits++, code <<= 1) {
    table->place[bits] = at - code;
    for (int n = codes[bits - 1]; n; n--, code++, at++) {
      int symbol = table->symbols[at], size = is_ac ? symbol & 15 : symbol;
      if (code >= 1 << bits || size > (is_ac ? 10 : 11)) return 0;
      if (bits > LOOK) continue;
      uint32_t entry = hr_entry(bits, symbol, is_ac), *to = table->look + (code << (LOOK - bits));
      for (int same = 1 << (LOOK - bits); same; same--) *to++ = entry;
    }
    table->last[bits] = codes[bits - 1] ? code - 1 : -1;
  }
  if (is_ac) add_seconds(table);
  memcpy(table->made_of, codes, (size_t)(16 + num));
  return table->made = 1;
}
