/* Words that are not zero, out of memory that mostly is: their places and what they hold. */
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#include <stdint.h>
#include <string.h>

#define BLOCK (1 << 16) /* words; a place in a block takes 16 bits */
#define GROUP 64        /* words that one mask speaks of */
#define MASKS (BLOCK / GROUP)

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

/* One bit for each of 64 words: it is not zero. */
static uint64_t mask_of(const uint32_t *words) {
    uint64_t mask = 0;
#if defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128();
    for (int64_t part = 0; part < 4; part++) {
        const __m128i *in = (const __m128i *)(words + 16 * part);
        __m128i equal[4];
        for (int64_t i = 0; i < 4; i++) equal[i] = _mm_cmpeq_epi32(_mm_loadu_si128(in + i), zero);
        __m128i low = _mm_packs_epi32(equal[0], equal[1]), high = _mm_packs_epi32(equal[2], equal[3]);
        mask |= (uint64_t)(uint16_t)~_mm_movemask_epi8(_mm_packs_epi16(low, high)) << (16 * part);
    }
#else
    for (int64_t i = 0; i < GROUP; i++) mask |= (uint64_t)(words[i] != 0) << i;
#endif
    return mask;
}

/* Which words of every stride-th block are not zero, and how many. Nobody reads all of them a second time. */
void everystep_find(const Range *ranges, int64_t count, int64_t stride, int64_t looks, uint32_t *counts,
                    uint64_t *masks, int threads) {
    (void)threads;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
    for (int64_t look = 0; look < looks; look++) {
        const uint32_t *words;
        uint32_t rest, found = 0;
        int64_t block = look * stride;
        int64_t whole = words_of(range_of(ranges, count, block), block, &words, &rest), group = 0;
        uint64_t *own = masks + look * MASKS;
        for (; group < whole / GROUP; group++)
            found += __builtin_popcountll(own[group] = mask_of(words + group * GROUP));
        if (group < MASKS) { /* a range ends here, within this group */
            own[group] = (uint64_t)(rest != 0) << whole % GROUP;
            for (int64_t i = group * GROUP; i < whole; i++) own[group] |= (uint64_t)(words[i] != 0) << i % GROUP;
            found += __builtin_popcountll(own[group]);
        }
        counts[look] = found;
    }
}

void everystep_gather(const Range *ranges, int64_t count, int64_t blocks, const uint64_t *masks,
                      const int64_t *starts, uint16_t *places, uint32_t *values, int threads) {
    (void)threads;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        const uint32_t *words;
        uint32_t rest;
        int64_t whole = words_of(range_of(ranges, count, block), block, &words, &rest), to = starts[block];
        for (int64_t group = 0; group < MASKS && group <= whole / GROUP; group++)
            for (uint64_t left = masks[block * MASKS + group]; left; left &= left - 1) {
                int64_t i = group * GROUP + __builtin_ctzll(left);
                places[to] = (uint16_t)i, values[to++] = i < whole ? words[i] : rest;
            }
    }
}
