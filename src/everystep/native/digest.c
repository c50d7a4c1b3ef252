/* Digests of memory, on the processor; `digest.h` says what a digest is. */
#include <stdint.h>
#include <string.h>

#include "digest.h"

/* Word by word: those that do not fill a group. */
static u64 sum_words(const char *data, u64 count, u64 start, u64 width) {
    u64 sum = 0;
    for (u64 i = 0; i < count; i++) {
        u32 word = 0;
        memcpy(&word, data + i * width, width);
        sum += word * ((u64)factor((start + i) / LANES) * lane_factor((start + i) % LANES));
    }
    return sum;
}

typedef u64 SumGroups(const char *data, u64 groups, u64 group, const u32 *lane_factors);

#define SUM_GROUPS(name, word) \
    TARGET static u64 NAMED(name)(const char *data, u64 groups, u64 group, const u32 *lane_factors) { \
        const word *words = (const word *)data; \
        u64 sum = 0; \
        for (u64 j = 0; j < groups; j++, words += LANES) { \
            u64 own = 0; \
            for (int lane = 0; lane < LANES; lane++) own += (u64)words[lane] * lane_factors[lane]; \
            sum += own * factor(group + j); \
        } \
        return sum; \
    }
#define ALL_WIDTHS SUM_GROUPS(groups1, uint8_t) SUM_GROUPS(groups2, uint16_t) SUM_GROUPS(groups4, uint32_t)

#define TARGET
#define NAMED(name) name##_any
ALL_WIDTHS
#undef TARGET
#undef NAMED

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2")))
#define NAMED(name) name##_avx2
ALL_WIDTHS
#undef TARGET
#undef NAMED

#define TARGET __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl")))
#define NAMED(name) name##_avx512
ALL_WIDTHS
#undef TARGET
#undef NAMED
#endif

static SumGroups *best_sum(u64 width) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return width == 1 ? groups1_avx512 : width == 2 ? groups2_avx512 : groups4_avx512;
    if (__builtin_cpu_supports("avx2")) return width == 1 ? groups1_avx2 : width == 2 ? groups2_avx2 : groups4_avx2;
#endif
    return width == 1 ? groups1_any : width == 2 ? groups2_any : groups4_any;
}

static u64 sum_piece(const char *data, u64 count, u64 start, u64 width) {
    u32 lane_factors[LANES];
    for (u32 lane = 0; lane < LANES; lane++) lane_factors[lane] = lane_factor(lane);
    const u64 rest = (LANES - start % LANES) % LANES, head = rest < count ? rest : count;
    const u64 groups = (count - head) / LANES, tail = head + groups * LANES;
    return sum_words(data, head, start, width)
           + best_sum(width)(data + head * width, groups, (start + head) / LANES, lane_factors)
           + sum_words(data + tail * width, count - tail, start + tail, width);
}

/* The last run that begins no later than this piece. */
static const Run *run_of(const Run *runs, int64_t count, u64 piece) {
    while (count > 1) {
        const int64_t half = count / 2;
        if (runs[half].first <= piece) runs += half, count -= half;
        else count = half;
    }
    return runs;
}

void everystep_digests(const Run *runs, int64_t count, int64_t pieces, u64 *sums, int threads) {
    (void)threads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (pieces > 1)
    for (int64_t piece = 0; piece < pieces; piece++) {
        const Run *run = run_of(runs, count, (u64)piece);
        const u64 at = ((u64)piece - run->first) * PIECE, left = run->count - at;
        const char *data = (const char *)(uintptr_t)run->data + at * run->width;
        const u64 sum = sum_piece(data, left < PIECE ? left : PIECE, run->start + at, run->width);
#pragma omp atomic
        sums[run->tensor] += sum;
    }
}
