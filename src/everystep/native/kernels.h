/* The rules of rules.h as loops, compiled once for each kind of processor: TARGET says for which one, NAMED
 * how its functions are called. */

#define ADAM(name, block, ...) \
    TARGET static void NAMED(name)(float *w, float **s, const float *g, int64_t n, const Step *step) { \
        switch (step->flags & (AMSGRAD | DECOUPLED)) { \
        case AMSGRAD | DECOUPLED: block(w, s[0], s[1], s[2], g, n, step, __VA_ARGS__, 1, 1); break; \
        case AMSGRAD: block(w, s[0], s[1], s[2], g, n, step, __VA_ARGS__, 0, 1); break; \
        case DECOUPLED: block(w, s[0], s[1], s[2], g, n, step, __VA_ARGS__, 1, 0); break; \
        default: block(w, s[0], s[1], s[2], g, n, step, __VA_ARGS__, 0, 0); \
        } \
    }

#define SGD(name, dtype, dialect) \
    TARGET static void NAMED(name)(float *w, float **s, const float *g, int64_t n, const Step *step) { \
        if (!(step->flags & MOMENTUM)) sgd_block(w, s[0], g, n, step, dtype, dialect, 0, 0); \
        else if (step->flags & NESTEROV) sgd_block(w, s[0], g, n, step, dtype, dialect, 1, 1); \
        else sgd_block(w, s[0], g, n, step, dtype, dialect, 1, 0); \
    }

TARGET static void NAMED(roots)(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = sqrtf(x[i]);
}

/* torch takes the roots of float32 tensors from MKL, which makes them of the chip's estimate of 1 / sqrt(x): with
 * AVX-512 one correction follows, and one root in 160 is a last bit too small; with AVX2 the estimate is coarser,
 * two follow, and one in six is a last bit off. */
TARGET static void NAMED(mkl_roots)(float *x, int64_t count) {
#if defined(ESTIMATE_OF_14_BITS)
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 here = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1) : 0xffff;
        const __m512 from = _mm512_maskz_loadu_ps(here, x + i), half = _mm512_set1_ps(0.5f);
        /* tiny ones are scaled, so that what the correction needs does not vanish */
        const __mmask16 tiny = _mm512_cmp_ps_mask(from, _mm512_set1_ps(0x1p-64f), _CMP_LT_OQ);
        const __m512 a = _mm512_mask_mul_ps(from, tiny, from, _mm512_set1_ps(0x1p96f));
        const __m512 estimate = _mm512_rsqrt14_ps(a);
        __m512 root = _mm512_mul_ps(a, estimate);
        root = _mm512_fmadd_ps(_mm512_fnmadd_ps(root, root, a), _mm512_mul_ps(estimate, half), root);
        root = _mm512_mask_mul_ps(root, tiny, root, _mm512_set1_ps(0x1p-48f));
        /* 0, infinity, no number */
        const __mmask16 usual = _mm512_cmp_ps_mask(from, _mm512_setzero_ps(), _CMP_GT_OQ)
                                & _mm512_cmp_ps_mask(from, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
        _mm512_mask_storeu_ps(x + i, here, _mm512_mask_blend_ps(usual, _mm512_sqrt_ps(from), root));
    }
#elif defined(ESTIMATE_OF_12_BITS)
    const __m256 half = _mm256_set1_ps(0.5f);
    for (int64_t i = 0; i < count; i += 8) {
        float few[8] = {0};
        const size_t rest = count - i < 8 ? (size_t)(count - i) * sizeof(float) : 0;
        float *here = rest ? memcpy(few, x + i, rest) : x + i;
        const __m256 a = _mm256_loadu_ps(here), estimate = _mm256_rsqrt_ps(a);
        __m256 root = _mm256_mul_ps(a, estimate), slope = _mm256_mul_ps(estimate, half);
        const __m256 off = _mm256_sub_ps(half, _mm256_mul_ps(root, slope));
        root = _mm256_add_ps(root, _mm256_mul_ps(root, off));
        slope = _mm256_add_ps(slope, _mm256_mul_ps(slope, off));
        root = _mm256_add_ps(root, _mm256_mul_ps(_mm256_sub_ps(a, _mm256_mul_ps(root, root)), slope));
        /* not so tiny that it has no estimate, nor so large that its square overflows, nor 0, no number */
        const __m256 usual = _mm256_and_ps(_mm256_cmp_ps(a, _mm256_set1_ps(0x1p-126f), _CMP_GE_OQ),
                                           _mm256_cmp_ps(a, _mm256_set1_ps(0x1.ffep127f), _CMP_LT_OQ));
        _mm256_storeu_ps(here, _mm256_blendv_ps(_mm256_sqrt_ps(a), root, usual));
        if (rest) memcpy(x + i, few, rest);
    }
#else
    NAMED(roots)(x, count);
#endif
}

ADAM(adam_foreach, adam_block, FLOAT32, FOREACH)
ADAM(adam_single, adam_block, FLOAT32, SINGLE)
ADAM(adam_fused, adam_block, FLOAT32, FUSED)
ADAM(adam_foreach_bfloat16, adam_block, BFLOAT16, FOREACH)
ADAM(adam_single_bfloat16, adam_block, BFLOAT16, SINGLE)
ADAM(adam_fused_bfloat16, adam_block, BFLOAT16, FUSED)
SGD(sgd_ops, FLOAT32, FOREACH)
SGD(sgd_cpu, FLOAT32, CPU)
SGD(sgd_ops_bfloat16, BFLOAT16, FOREACH)
SGD(sgd_fused_bfloat16, BFLOAT16, FUSED)
ADAM(adam_cpu, adam_cpu_block, NAMED(roots))
ADAM(adam_mkl, adam_cpu_block, NAMED(mkl_roots))
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

/* every twin there is, by the name that it has in replay/rules */
static const Twin NAMED(twins)[] = {
    {"adam-foreach-float32", NAMED(adam_foreach), FLOAT32, 0, 1},
    {"adam-single-float32", NAMED(adam_single), FLOAT32, 0, 1},
    {"adam-fused-float32", NAMED(adam_fused), FLOAT32, 0, 1},
    {"adam-foreach-bfloat16", NAMED(adam_foreach_bfloat16), BFLOAT16, 1, 1},
    {"adam-single-bfloat16", NAMED(adam_single_bfloat16), BFLOAT16, 1, 1},
    {"adam-fused-bfloat16", NAMED(adam_fused_bfloat16), BFLOAT16, 0, 1},
    {"adam-cpu-float32", NAMED(adam_cpu), FLOAT32, 0, 0},
    {"adam-mkl-float32", NAMED(adam_mkl), FLOAT32, 0, 0},
    {"sgd-ops-float32", NAMED(sgd_ops), FLOAT32, 0, 1},
    {"sgd-cpu-float32", NAMED(sgd_cpu), FLOAT32, 0, 0},
    {"sgd-ops-bfloat16", NAMED(sgd_ops_bfloat16), BFLOAT16, 1, 1},
    {"sgd-fused-bfloat16", NAMED(sgd_fused_bfloat16), BFLOAT16, 0, 1},
    {NULL, NULL, 0, 0, 0},
};

static const Kit NAMED(kit) = {
    NAMED(widen), NAMED(narrow), NAMED(prepare), NAMED(canonical), NAMED(mkl_roots), NAMED(twins),
};
