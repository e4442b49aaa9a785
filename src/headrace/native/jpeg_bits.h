/* Read the blocks of a scan from its bits. In a header of its own so that the compiler can put all of it into the loops. */
#ifndef HEADRACE_JPEG_BITS_H
#define HEADRACE_JPEG_BITS_H
#include "jpeg.h"

#define INLINE static inline __attribute__((always_inline))

typedef struct {
  uint64_t held; /* the next bits, the first on top */
  int count;     /* how many are surely held */
  const uint8_t *next;
} Bits;

INLINE void refill(Bits *bits) {
  uint64_t word;
  memcpy(&word, bits->next, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  bits->held |= word >> bits->count;
  bits->next += (63 - bits->count) >> 3;
  bits->count |= 56;
}

/* Return the entry of a code that is longer than what is looked up, or 0 where there is none. */
static __attribute__((noinline, unused)) uint32_t long_code(const Huffman *table, uint64_t held, int is_ac) {
  for (int length = LOOK + 1; length <= 16; length++) {
    int32_t code = (int32_t)(held >> (64 - length));
    if (code <= table->last[length])
      return hr_entry(length, table->symbols[(table->place[length] + code) & 255], is_ac);
  }
  return 0;
}

/* Return the value whose bits are the first `size` of these. No branch: it would be mispredicted. */
INLINE int value_of(uint64_t bits, int size) {
  int negative = (int)((int64_t)bits >> 63) ^ -1;
  return (int)(bits >> 1 >> (63 - size)) + (negative & (1 - (1 << size)));
}

INLINE void step_over(Bits *bits, uint64_t held, int count) {
  bits->held = held << count;
  bits->count -= count;
}

/* Read the difference of the first coefficient; return 0 for a code that does not exist. */
INLINE int read_first(Bits *bits, const Huffman *table, int *before) {
  uint32_t entry = table->look[bits->held >> (64 - LOOK)];
  refill(bits);
  if (__builtin_expect(!entry, 0) && !(entry = long_code(table, bits->held, 0))) return 0;
  int size = SIZE1(entry), total = TOTAL1(entry);
  int value = value_of(bits->held << (total - size), size);
  *before = (int)((unsigned)*before + (unsigned)value); /* wraps where the data are damaged */
  step_over(bits, bits->held, total);
  return 1;
}

/* Read a block, times its quantisation, or only step over it (`block` is NULL); return its last coefficient's number, or -1
   for damage. Where the table knows two coefficients from the bits that are looked up, both are taken at once: what takes
   time is to know where the next one begins. A refill holds 56 bits, and what is taken at once has at most 36 (10 and 26), so 20
   are left to look up the next before the refill, which then need not be waited for. */
INLINE int read_block(Bits *bits, const Huffman *dc, const Huffman *ac, int *before, const int16_t *quant, int16_t *block) {
  if (!read_first(bits, dc, before)) return -1;
  if (block) {
    memset(block, 0, 64 * sizeof *block);
    block[0] = (int16_t)(*before * quant[0]);
  }
  for (int k = 0;;) {
    uint32_t entry = ac->look[bits->held >> (64 - LOOK)];
    refill(bits);
    uint64_t held = bits->held;
    if (__builtin_expect(!entry, 0) && !(entry = long_code(ac, held, 1))) return -1;
    int total = TOTAL(entry), one = k + STEPS1(entry), two = one + STEPS2(entry), value1 = 0, value2 = 0;
    step_over(bits, held, total);
    if (block) {
      value1 = value_of(held << (TOTAL1(entry) - SIZE1(entry)), SIZE1(entry));
      value2 = value_of(held << (total - SIZE2(entry)), SIZE2(entry));
    }
    if (two >= 63) { /* the block ends */
      if (STEPS1(entry) == END_OF_BLOCK) return k;
      if (one > 63) return -1;
      if (block) block[hr_natural[one]] = (int16_t)(value1 * quant[one]);
      if (one == 63) { /* the second belongs to the next block: give it back */
        bits->count += total - TOTAL1(entry);
        bits->held = held << TOTAL1(entry);
        return 63;
      }
      if (STEPS2(entry) == END_OF_BLOCK) return one;
      if (two > 63) return -1;
      if (block) block[63] = (int16_t)(value2 * quant[63]);
      return 63;
    }
    if (block) { /* where there is no second one, its place is that of the first: so this order */
      block[hr_natural[two]] = (int16_t)(value2 * quant[two]);
      block[hr_natural[one]] = (int16_t)(value1 * quant[one]);
    }
    k = two;
  }
}
#endif
