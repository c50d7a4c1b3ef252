/* Words that are not zero, out of memory that mostly is: their places and what they hold. */
#include <stdint.h>
#include <string.h>

#define BLOCK (1 << 16) /* words; a place in a block takes 16 bits */

typedef struct {
    const char *data; /* aligned to words */
    int64_t bytes;
    int64_t blocks_before; /* of the ranges in front of this one */
} Range;

static const Range *range_of(const Range *ranges, int64_t count, int64_t block) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (ranges[middle].blocks_before <= block) low = middle;
        else high = middle - 1;
    }
    return &ranges[low];
}

/* The words of a block that are whole; what is left of a last one, filled up with zeros, goes to `rest`. */
static int64_t words_of(const Range *range, int64_t block, const uint32_t **words, uint32_t *rest) {
    int64_t at = (block - range->blocks_before) * BLOCK * 4, left = range->bytes - at;
    *words = (const uint32_t *)(range->data + at);
    *rest = 0;
    if (left >= BLOCK * 4) return BLOCK;
    memcpy(rest, range->data + at + left / 4 * 4, left % 4);
    return left / 4;
}

void everystep_count(const Range *ranges, int64_t count, int64_t first, int64_t stride, int64_t blocks,
                     uint32_t *counts, int threads) {
    (void)threads;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
    for (int64_t block = first; block < blocks; block += stride) {
        const uint32_t *words;
        uint32_t rest, found = 0;
        int64_t whole = words_of(range_of(ranges, count, block), block, &words, &rest);
        for (int64_t i = 0; i < whole; i++) found += words[i] != 0;
        counts[block] = found + (rest != 0);
    }
}

void everystep_gather(const Range *ranges, int64_t count, int64_t blocks, const int64_t *starts, uint16_t *places,
                      uint32_t *values, int threads) {
    (void)threads;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        const uint32_t *words;
        uint32_t rest;
        int64_t whole = words_of(range_of(ranges, count, block), block, &words, &rest), to = starts[block], i = 0;
        for (; i + 8 <= whole; i += 8) {
            uint32_t any = 0;
            for (int64_t j = 0; j < 8; j++) any |= words[i + j];
            for (int64_t j = 0; any && j < 8; j++)
                if (words[i + j]) places[to] = (uint16_t)(i + j), values[to++] = words[i + j];
        }
        for (; i < whole; i++)
            if (words[i]) places[to] = (uint16_t)i, values[to++] = words[i];
        if (rest) places[to] = (uint16_t)whole, values[to] = rest;
    }
}
