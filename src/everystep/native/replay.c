/* Twins: the steps of torch's optimizers, bit for bit, on the CPU.
 *
 * A dialect says how one implementation rounds: torch's multi-tensor ("foreach") and single-tensor code
 * round after every operation, the fused CUDA kernels only when they store. Fused multiply-adds stand where
 * the original has them and nowhere else: this file is compiled with contraction off.
 *
 * k queued steps pass over the state once, in blocks that stay in the cache. An element depends on nothing
 * but its own past, so no result depends on k, the block size or the number of threads.
 */
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 2048           /* elements: three states and a gradient stay in the first-level cache */
#define TASK (32 * BLOCK)    /* elements that one thread takes at a time */

enum { FLOAT32, BFLOAT16 };
enum { FOREACH, SINGLE, FUSED, CPU }; /* dialects */
enum { MAXIMIZE = 1, L2 = 2, DECOUPLED = 4, AMSGRAD = 8, FIRST = 16, NESTEROV = 32, MOMENTUM = 64, SCALED = 128,
       LANES = 256 };

typedef struct {
    void *value, *slots[3];
    void *copies[4]; /* where value and slots go before they change; NULL: nowhere */
    int64_t count;
} Target;

typedef struct {
    const void *gradient;    /* NULL: this call did not move the target */
    double number[10];
    uint32_t flags;
} Step;

/* what `number` holds */
enum { SCALE, DECAY, LR, BETA1, BETA2, BIAS1, BIAS2, EPS, WEIGHT1, WEIGHT2 };
enum { FACTOR = BETA1, DAMPING = BETA2 };

#include "rules.h"

typedef void Rule(float *w, float **slots, const float *g, int64_t count, const Step *step);
typedef struct {
    const char *name;
    Rule *rule;
    int dtype;
    int rounds;  /* also a prepared gradient is rounded to the dtype */
    int one_nan; /* whatever NaN comes out is the one of a CUDA chip */
} Twin;

typedef struct {
    void (*widen)(float *to, const uint16_t *from, int64_t count);
    void (*narrow)(uint16_t *to, const float *from, int64_t count);
    void (*prepare)(float *to, const float *from, const float *w, int64_t count, const Step *step,
                    int rounds, int run);
    void (*canonical)(float *x, int64_t count);
    void (*mkl_roots)(float *x, int64_t count);
    const Twin *twins; /* the last one has no name */
} Kit;

#define TARGET
#define NAMED(name) name##_any
#include "kernels.h"
#undef TARGET
#undef NAMED

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma")))
#define NAMED(name) name##_avx2
#define ESTIMATE_OF_12_BITS
#include "kernels.h"
#undef TARGET
#undef NAMED

#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define NAMED(name) name##_avx512
#undef ESTIMATE_OF_12_BITS
#define ESTIMATE_OF_14_BITS
#include "kernels.h"
#endif

static const Kit *best_kit(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &kit_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kit_avx2;
#endif
    return &kit_any;
}

/* ------------------------------------------------------------------ k steps over blocks */

enum { PREPARED = SCALED | MAXIMIZE | L2 };

/* The fused CUDA kernel unrolls by four, and its compiler fused L2's multiply and add in three of the four
 * lanes only. Where a tensor's length allows vectors, lanes are neighbours; else they lie a block of threads
 * apart. Returns for how many elements in a row a lane goes on; 0: L2 is fused everywhere. */
static int lanes(const Target *target, const Step *step) {
    if (!(step->flags & LANES)) return 0;
    return target->count % 4 ? 512 : 1;
}

static void block_float32(const Kit *kit, const Twin *twin, const Target *target, int64_t at, int64_t count,
                          const Step *steps, int64_t k, float *scratch) {
    float *w = (float *)target->value + at, *slots[3];
    const Step *last = NULL;
    for (int s = 0; s < 3; s++) slots[s] = target->slots[s] ? (float *)target->slots[s] + at : NULL;
    for (int64_t j = 0; j < k; j++) {
        if (!steps[j].gradient) continue;
        const float *g = (const float *)steps[j].gradient + at;
        if (steps[j].flags & PREPARED) {
            kit->prepare(scratch, g, w, count, &steps[j], 0, lanes(target, &steps[j]));
            g = scratch;
        }
        twin->rule(w, slots, g, count, &steps[j]);
        last = &steps[j];
    }
    if (!twin->one_nan || !last) return;
    kit->canonical(w, count);
    for (int s = 0; s < 3; s++) /* a first momentum is the gradient itself, whatever NaN that held */
        if (slots[s] && !(last->flags & FIRST && last->flags & MOMENTUM)) kit->canonical(slots[s], count);
}

static void block_bfloat16(const Kit *kit, const Twin *twin, const Target *target, int64_t at, int64_t count,
                           const Step *steps, int64_t k, float *scratch) {
    float *w = scratch + BLOCK, *slots[3];
    kit->widen(w, (const uint16_t *)target->value + at, count);
    for (int s = 0; s < 3; s++) {
        slots[s] = target->slots[s] ? scratch + (2 + s) * BLOCK : NULL;
        if (slots[s]) kit->widen(slots[s], (const uint16_t *)target->slots[s] + at, count);
    }
    for (int64_t j = 0; j < k; j++) {
        if (!steps[j].gradient) continue;
        kit->widen(scratch, (const uint16_t *)steps[j].gradient + at, count);
        if (steps[j].flags & PREPARED) kit->prepare(scratch, scratch, w, count, &steps[j], twin->rounds, lanes(target, &steps[j]));
        twin->rule(w, slots, scratch, count, &steps[j]);
    }
    kit->narrow((uint16_t *)target->value + at, w, count);
    for (int s = 0; s < 3; s++)
        if (slots[s]) kit->narrow((uint16_t *)target->slots[s] + at, slots[s], count);
}

/* The state as it was before this pass, for whoever writes it away: while it is in the cache anyway. */
static void keep(const Target *target, int64_t at, int64_t count, size_t size) {
    const void *sources[4] = {target->value, target->slots[0], target->slots[1], target->slots[2]};
    for (int i = 0; i < 4; i++)
        if (target->copies[i])
            memcpy((char *)target->copies[i] + at * size, (const char *)sources[i] + at * size, count * size);
}

static void task(const Kit *kit, const Twin *twin, const Target *target, int64_t at, const Step *steps, int64_t k) {
    _Alignas(64) float scratch[5 * BLOCK];
    int64_t end = at + TASK < target->count ? at + TASK : target->count;
    for (; at < end; at += BLOCK) {
        int64_t count = end - at < BLOCK ? end - at : BLOCK;
        keep(target, at, count, twin->dtype == FLOAT32 ? 4 : 2);
        if (twin->dtype == FLOAT32) block_float32(kit, twin, target, at, count, steps, k, scratch);
        else block_bfloat16(kit, twin, target, at, count, steps, k, scratch);
    }
}

static const Twin *find_twin(const Kit *kit, const char *name) {
    const Twin *twin = kit->twins;
    while (twin->name && strcmp(twin->name, name)) twin++;
    return twin->name ? twin : NULL;
}

/* Steps of target i are steps[i * k .. i * k + k). Returns 0, or -1 for a twin there is none of. */
int everystep_replay(const char *name, const Target *targets, int64_t count, const Step *steps, int64_t k, int threads) {
    const Kit *kit = best_kit();
    const Twin *twin = find_twin(kit, name);
    if (!twin) return -1;
    int64_t tasks = 0;
    for (int64_t i = 0; i < count; i++) tasks += (targets[i].count + TASK - 1) / TASK;
    (void)threads;
#pragma omp parallel num_threads(threads)
    {
        int64_t target = 0, before = 0; /* tasks of the targets before this one */
#pragma omp for schedule(dynamic, 4)
        for (int64_t t = 0; t < tasks; t++) {
            if (t < before) target = before = 0;
            for (int64_t own; t >= before + (own = (targets[target].count + TASK - 1) / TASK); target++) before += own;
            task(kit, twin, &targets[target], (t - before) * TASK, steps + target * k, k);
        }
    }
    return 0;
}

/* Square roots in place, as the twins of MKL's take them: for whoever wants to know whether torch does. */
void everystep_mkl_roots(float *x, int64_t count) { best_kit()->mkl_roots(x, count); }
