/* How torch's optimizers compute, element by element. Everything here is inlined into kernels.h. */

#define INLINE static inline __attribute__((always_inline))

INLINE float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

/* A CUDA chip has one NaN; an x86 keeps the payload of the one it was given. */
INLINE float one_nan(float x) { return x != x ? as_float(0x7fffffffu) : x; }

INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits = as_bits(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(x != x ? 0x7fffu : rounded);
}
INLINE float from_bfloat16(uint16_t x) { return as_float((uint32_t)x << 16); }

/* the value as an operation of this dialect leaves it in memory */
INLINE float rounded(float x, const int dtype) {
    return dtype == BFLOAT16 ? from_bfloat16(to_bfloat16(x)) : x;
}

/* x / by, correctly rounded, where by is the same for many x: its reciprocal, corrected twice by the exact
 * remainder. x is not negative and neither tiny nor huge, or it is 0, infinite or no number. */
INLINE float divided(float x, float by, float reciprocal) {
    float q = x * reciprocal;
    float once = fmaf(fmaf(-q, by, x), reciprocal, q);
    float twice = fmaf(fmaf(-once, by, x), reciprocal, once);
    return x < INFINITY ? twice : q;
}

INLINE float linear(float from, float to, float weight) {
    return fabsf(weight) < 0.5f ? fmaf(weight, to - from, from) : fmaf(-(to - from), 1.0f - weight, to);
}

/* ------------------------------------------------------------------ Adam, AdamW */

INLINE void adam_block(float *restrict w, float *restrict m, float *restrict v, float *restrict largest,
                       const float *restrict g, int64_t count, const Step *step, const int dtype,
                       const int dialect, const int decoupled, const int amsgrad) {
    const double *n = step->number;
    const float decay = (float)n[DECAY], lr = (float)n[LR], beta1 = (float)n[BETA1], beta2 = (float)n[BETA2];
    const float bias1 = (float)n[BIAS1], bias2 = (float)n[BIAS2], eps = (float)n[EPS];
    const float weight1 = (float)n[WEIGHT1], weight2 = (float)n[WEIGHT2];
    const float inverse = 1.0f / bias2;
    const float step_size = dialect == FUSED ? lr / bias1 : lr;
    for (int64_t i = 0; i < count; i++) {
        float value = w[i], gradient = g[i], first = m[i], second = v[i];
        if (dialect == FUSED) {
            if (decoupled) value = fmaf(-decay, value, value);
            float square = gradient * gradient;
            first = fmaf(beta1, first, fmaf(-beta1, gradient, gradient));
            second = fmaf(beta2, second, fmaf(-beta2, square, square));
            float top = second;
            if (amsgrad) top = largest[i] = largest[i] < second ? second : largest[i];
            float below = divided(sqrtf(top), bias2, inverse) + eps;
            value = value - (step_size * first) / below;
        } else {
            if (decoupled) value = rounded(value * decay, dtype);
            first = rounded(linear(first, gradient, weight1), dtype);
            second = rounded(second * beta2, dtype);
            second = rounded(fmaf(weight2, gradient * gradient, second), dtype);
            float top = second;
            if (amsgrad) top = largest[i] = largest[i] != largest[i] || largest[i] > second ? largest[i] : second;
            float root = rounded(sqrtf(top), dtype);
            root = rounded(dialect == SINGLE ? root * bias2 : divided(root, bias2, inverse), dtype);
            root = rounded(root + eps, dtype);
            value = fmaf(step_size, first / root, value);
        }
        if (amsgrad) largest[i] = rounded(largest[i], dtype);
        w[i] = rounded(value, dtype);
        m[i] = rounded(first, dtype);
        v[i] = rounded(second, dtype);
    }
}

/* as `linear`, but for the sign of a zero */
INLINE float linear_cpu(float from, float to, float weight) {
    return fabsf(weight) < 0.5f ? fmaf(weight, to - from, from) : fmaf(weight - 1.0f, to - from, to);
}

/* torch on a CPU multiplies in another order. Square roots come a block at a time: whose they are is the
 * caller's choice. */
INLINE void adam_cpu_block(float *restrict w, float *restrict m, float *restrict v, float *restrict largest,
                           const float *restrict g, int64_t count, const Step *step,
                           void (*take_roots)(float *x, int64_t count), const int decoupled, const int amsgrad) {
    const double *n = step->number;
    const float decay = (float)n[DECAY], step_size = (float)n[LR], beta2 = (float)n[BETA2];
    const float bias2 = (float)n[BIAS2], eps = (float)n[EPS];
    const float weight1 = (float)n[WEIGHT1], weight2 = (float)n[WEIGHT2];
    _Alignas(64) float root[BLOCK];
    for (int64_t i = 0; i < count; i++) {
        m[i] = linear_cpu(m[i], g[i], weight1);
        root[i] = v[i] = fmaf(weight2 * g[i], g[i], v[i] * beta2);
        if (amsgrad) root[i] = largest[i] = largest[i] != largest[i] || largest[i] > v[i] ? largest[i] : v[i];
    }
    take_roots(root, count);
    for (int64_t i = 0; i < count; i++) {
        float value = decoupled ? w[i] * decay : w[i];
        w[i] = value + (step_size * m[i]) / (root[i] / bias2 + eps);
    }
}

/* ------------------------------------------------------------------ SGD */

INLINE void sgd_block(float *restrict w, float *restrict momentum, const float *restrict g, int64_t count,
                      const Step *step, const int dtype, const int dialect, const int has_momentum,
                      const int nesterov) {
    const float lr = (float)step->number[LR], factor = (float)step->number[FACTOR];
    const float damping = (float)step->number[DAMPING];
    const int first = (step->flags & FIRST) != 0;
    const int between = dialect == FUSED ? FLOAT32 : dtype; /* what an intermediate result is rounded to */
    for (int64_t i = 0; i < count; i++) {
        float gradient = g[i], moved = gradient;
        if (has_momentum) {
            float before = rounded(momentum[i] * factor, between);
            moved = first ? gradient : rounded(fmaf(damping, gradient, before), between);
            momentum[i] = rounded(moved, dtype);
            if (nesterov) moved = rounded(fmaf(factor, moved, gradient), between);
        }
        w[i] = rounded(fmaf(-lr, moved, w[i]), dtype);
    }
}
