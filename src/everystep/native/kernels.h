/* The rules of rules.h as loops, compiled once for each kind of processor: TARGET says for which one, NAMED
 * how its functions are called. */

#define ADAM(name, dtype, dialect) \
    TARGET static void NAMED(name)(float *w, float **s, const float *g, int64_t n, const Step *step) { \
        switch (step->flags & (AMSGRAD | DECOUPLED)) { \
        case AMSGRAD | DECOUPLED: adam_block(w, s[0], s[1], s[2], g, n, step, dtype, dialect, 1, 1); break; \
        case AMSGRAD: adam_block(w, s[0], s[1], s[2], g, n, step, dtype, dialect, 0, 1); break; \
        case DECOUPLED: adam_block(w, s[0], s[1], s[2], g, n, step, dtype, dialect, 1, 0); break; \
        default: adam_block(w, s[0], s[1], s[2], g, n, step, dtype, dialect, 0, 0); \
        } \
    }

#define SGD(name, dtype, dialect) \
    TARGET static void NAMED(name)(float *w, float **s, const float *g, int64_t n, const Step *step) { \
        if (!(step->flags & MOMENTUM)) sgd_block(w, s[0], g, n, step, dtype, dialect, 0, 0); \
        else if (step->flags & NESTEROV) sgd_block(w, s[0], g, n, step, dtype, dialect, 1, 1); \
        else sgd_block(w, s[0], g, n, step, dtype, dialect, 1, 0); \
    }

ADAM(adam_foreach, FLOAT32, FOREACH)
ADAM(adam_single, FLOAT32, SINGLE)
ADAM(adam_fused, FLOAT32, FUSED)
ADAM(adam_foreach_bfloat16, BFLOAT16, FOREACH)
ADAM(adam_single_bfloat16, BFLOAT16, SINGLE)
ADAM(adam_fused_bfloat16, BFLOAT16, FUSED)
SGD(sgd_ops, FLOAT32, FOREACH)
SGD(sgd_cpu, FLOAT32, CPU)
SGD(sgd_ops_bfloat16, BFLOAT16, FOREACH)
SGD(sgd_fused_bfloat16, BFLOAT16, FUSED)
#undef ADAM
#undef SGD

TARGET static void NAMED(widen)(float *restrict to, const uint16_t *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = from_bfloat16(from[i]);
}

TARGET static void NAMED(narrow)(uint16_t *restrict to, const float *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = (uint16_t)(as_bits(from[i]) >> 16);
}

TARGET static void NAMED(canonical)(float *restrict x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = one_nan(x[i]);
}

/* unscaled, negated, with L2 decay: into `to`, which may be `from` */
TARGET static void NAMED(prepare)(float *to, const float *from, const float *restrict w, int64_t count,
                                  const Step *step, int rounds, int run) {
    const float scale = (float)step->number[SCALE], decay = (float)step->number[DECAY];
    if (step->flags & SCALED)
        for (int64_t i = 0; i < count; i++) to[i] = from[i] / scale;
    else if (to != from)
        memcpy(to, from, (size_t)count * sizeof(float));
    if (step->flags & MAXIMIZE)
        for (int64_t i = 0; i < count; i++) to[i] = -to[i];
    if (!(step->flags & L2)) return;
    if (run)
        for (int64_t i = 0; i < count; i++) {
            float fused = fmaf(decay, w[i], to[i]), apart = to[i] + decay * w[i];
            to[i] = i / run % 4 ? fused : apart;
        }
    else
        for (int64_t i = 0; i < count; i++) {
            float x = fmaf(decay, w[i], to[i]);
            to[i] = rounds ? rounded(x, BFLOAT16) : x;
        }
}

static const Kit NAMED(kit) = {
    NAMED(widen), NAMED(narrow), NAMED(prepare), NAMED(canonical),
    {
        {NAMED(adam_foreach), FLOAT32, 0, 1}, {NAMED(adam_single), FLOAT32, 0, 1}, {NAMED(adam_fused), FLOAT32, 0, 1},
        {NAMED(adam_foreach_bfloat16), BFLOAT16, 1, 1}, {NAMED(adam_single_bfloat16), BFLOAT16, 1, 1},
        {NAMED(adam_fused_bfloat16), BFLOAT16, 0, 1},
        {NAMED(sgd_ops), FLOAT32, 0, 1}, {NAMED(sgd_cpu), FLOAT32, 0, 0},
        {NAMED(sgd_ops_bfloat16), BFLOAT16, 1, 1}, {NAMED(sgd_fused_bfloat16), BFLOAT16, 0, 1},
    },
};
