/* Copies of large memory by several threads. */
#include <stdint.h>
#include <string.h>

#define PIECE (1 << 18) /* small enough that a few MiB keep every thread busy */

typedef struct {
    char *to;
    const char *from;
    int64_t bytes;
} Copy;

void everystep_copy(const Copy *copies, int64_t count, int threads) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < count; i++) pieces += (copies[i].bytes + PIECE - 1) / PIECE;
    (void)threads;
#pragma omp parallel num_threads(threads)
    {
        int64_t copy = 0, before = 0; /* pieces of the copies before this one */
#pragma omp for schedule(dynamic, 1)
        for (int64_t p = 0; p < pieces; p++) {
            if (p < before) copy = before = 0;
            for (int64_t own; p >= before + (own = (copies[copy].bytes + PIECE - 1) / PIECE); copy++) before += own;
            int64_t at = (p - before) * PIECE, left = copies[copy].bytes - at;
            memcpy(copies[copy].to + at, copies[copy].from + at, left < PIECE ? left : PIECE);
        }
    }
}
