/* Digests of memory: order-free sums over its 64-bit words, and over the elements left behind them. */
#include <stdint.h>
#include <string.h>

#define PIECE (1 << 17) /* words that one thread takes at a time */

typedef struct {
    const char *data;
    int64_t bytes;
    int64_t width; /* of an element: 1, 2, 4 or 8 bytes */
    uint64_t sum;
} Digest;

static uint64_t sum_words(const uint64_t *words, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += words[i];
    return sum;
}

static uint64_t sum_rest(const Digest *d) {
    uint64_t sum = 0;
    for (int64_t at = d->bytes / 8 * 8; at < d->bytes; at += d->width) {
        int8_t one;
        int16_t two;
        int32_t four;
        if (d->width == 1) memcpy(&one, d->data + at, 1), sum += (uint64_t)one;
        else if (d->width == 2) memcpy(&two, d->data + at, 2), sum += (uint64_t)two;
        else memcpy(&four, d->data + at, 4), sum += (uint64_t)four;
    }
    return sum;
}

void everystep_digest(Digest *digests, int64_t count, int threads) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < count; i++) pieces += digests[i].bytes / 8 / PIECE + 1;
    (void)threads;
#pragma omp parallel num_threads(threads)
    {
        int64_t row = 0, before = 0; /* pieces of the digests before this one */
#pragma omp for schedule(dynamic, 1)
        for (int64_t p = 0; p < pieces; p++) {
            if (p < before) row = before = 0;
            for (int64_t own; p >= before + (own = digests[row].bytes / 8 / PIECE + 1); row++) before += own;
            Digest *d = &digests[row];
            int64_t at = (p - before) * PIECE, words = d->bytes / 8, left = words - at;
            uint64_t sum = sum_words((const uint64_t *)d->data + at, left < PIECE ? left : PIECE);
            if (p == before) sum += sum_rest(d);
#pragma omp atomic
            d->sum += sum;
        }
    }
}
