/* Digests of memory, on a GPU; `digest.h` says what a digest is. Compiled at run time, and for a test by a plain C
 * compiler, so it keeps to what C and CUDA share. A block of threads takes a piece of a run and reads it once. */
#define ON_DEVICE __device__
#include "digest.h"

#define RUNS 80 /* of one launch: as many as fit among a kernel's arguments, 4 KiB in all */

typedef struct {
    Run run[RUNS];
} Runs;

#define ROUNDS 4 /* of loads that are under way together */

/* One instruction; a compiler that has moved the widening elsewhere takes four. */
ON_DEVICE static inline u64 multiply_add(u32 a, u32 b, u64 sum) {
#ifdef __CUDACC__
    asm("mad.wide.u32 %0, %1, %2, %0;" : "+l"(sum) : "r"(a), "r"(b));
    return sum;
#else
    return sum + (u64)a * b;
#endif
}

/* Vectors of 16 bytes, none of which goes beyond the group in which it begins. A thread meets the same lanes in each of
 * its vectors, as all threads together take whole groups. */
#define SUM_VECTORS(name, words_in_four_bytes, bits, mask) \
    ON_DEVICE static u64 name(const uint4 *vectors, u32 count, u64 start) { \
        enum { WORDS = 4 * words_in_four_bytes }; \
        const uint4 nothing = {0, 0, 0, 0}; \
        u32 own[WORDS]; \
        u64 sum = 0; \
        for (u32 j = 0; j < WORDS; j++) own[j] = lane_factor((u32)(start + threadIdx.x * WORDS + j) % LANES); \
        for (u32 i = threadIdx.x; i < count; i += ROUNDS * blockDim.x) { \
            uint4 loaded[ROUNDS]; \
            for (u32 r = 0; r < ROUNDS; r++) \
                loaded[r] = i + r * blockDim.x < count ? vectors[i + r * blockDim.x] : nothing; \
            for (u32 r = 0; r < ROUNDS; r++) { \
                const u32 four[4] = {loaded[r].x, loaded[r].y, loaded[r].z, loaded[r].w}; \
                const u32 times = factor((start + (u64)(i + r * blockDim.x) * WORDS) / LANES); \
                u64 part = 0; \
                for (u32 j = 0; j < WORDS; j++) \
                    part = multiply_add(four[j / words_in_four_bytes] >> j % words_in_four_bytes * bits & mask, own[j], part); \
                sum = multiply_add((u32)part, times, sum) + ((part >> 32) * times << 32); \
            } \
        } \
        return sum; \
    }
SUM_VECTORS(sum_bytes, 4, 8, 0xffu)
SUM_VECTORS(sum_halves, 2, 16, 0xffffu)
SUM_VECTORS(sum_fours, 1, 0, 0xffffffffu)

/* Word by word, from the thread's own one on: what is no whole vector. */
ON_DEVICE static u64 sum_words(u64 data, u32 from, u32 count, u64 start, u64 width) {
    u64 sum = 0;
    for (u32 i = from + threadIdx.x; i < count; i += blockDim.x) {
        const u64 at = data + i * width, place = start + i;
        const u32 word = width == 1 ? *(const unsigned char *)at : width == 2 ? *(const unsigned short *)at : *(const u32 *)at;
        sum += word * ((u64)factor(place / LANES) * lane_factor(place % LANES));
    }
    return sum;
}

ON_DEVICE static u64 sum_piece(u64 data, u32 count, u64 start, u64 width) {
    const u32 words = 16 / (u32)width, vectors = data % 16 || start % words ? 0 : count / words;
    const uint4 *from = (const uint4 *)data;
    u64 sum = 0;
    if (width == 1) sum = sum_bytes(from, vectors, start);
    else if (width == 2) sum = sum_halves(from, vectors, start);
    else sum = sum_fours(from, vectors, start);
    return sum + sum_words(data, vectors * words, count, start, width);
}

#ifdef __cplusplus
extern "C"
#endif
__global__ void digest_runs(const __grid_constant__ Runs runs, int count, u64 *sums) {
    int at = 0; /* the last run that begins no later than this block's piece */
    while (count > 1) {
        const int half = count / 2;
        if (runs.run[at + half].first <= blockIdx.x) at += half, count -= half;
        else count = half;
    }
    const Run run = runs.run[at];
    const u64 done = (blockIdx.x - run.first) * PIECE, left = run.count - done;
    const u32 own = left < PIECE ? (u32)left : PIECE;
    u64 sum = sum_piece(run.data + done * run.width, own, run.start + done, run.width);
    for (int lane = warpSize / 2; lane; lane /= 2) sum += __shfl_down_sync(0xffffffffu, sum, lane);
    if (threadIdx.x % warpSize == 0) atomicAdd(sums + run.tensor, sum);
}
