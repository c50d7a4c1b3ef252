/* What a digest is. C and CUDA compile these lines; `digests.py` has the arithmetic once more, for numpy and torch.
 *
 * A digest is the sum of word * weight(place), modulo 2^64, over the words of a tensor in row-major order. A word is
 * an element as an unsigned number; an element of 8 bytes is two words, the lower half first. A place counts from the
 * beginning of the whole tensor, so the digests of regions that make up a tensor add up to the tensor's digest.
 *
 * LANES words make a group: weight(place) = factor(group) * lane_factor(lane) modulo 2^64. So a group costs one
 * product for each word and one more, whatever the mixing of its factor takes.
 *
 * - Weights are odd: a word that changes is always found. The sum changes by difference * weight, and an odd number
 *   times what is not a multiple of 2^64 is none either.
 * - No two weights of the same 2^31 places are equal modulo 2^32: the lowest six bits tell the lane (a factor is 1
 *   modulo 64, a lane factor 2 * lane + 1), and factors of one lane differ, as mixing is a bijection of 26 bits. So two
 *   different words that change places are always found: the sum changes by (a - b) * (weight - weight'), where 2 divides
 *   neither factor 32 times, so not the product 64 times.
 *
 * Anything else (places further apart, many words at once, both halves of an element) is missed by chance alone. */
typedef unsigned int u32;
typedef unsigned long long u64;

#define LANES 32
#define PIECE (1 << 15) /* words that one thread, or one block of threads of a GPU, takes at a time */

/* Words that follow each other both in memory and in their tensor. */
typedef struct {
    u64 data; /* their address */
    u64 count;
    u64 start;  /* place of the first */
    u64 width;  /* bytes of a word: 1, 2 or 4 */
    u64 tensor; /* which sum they are added to */
    u64 first;  /* number of the first of their pieces; a run of nothing has none */
} Run;

#ifndef ON_DEVICE
#define ON_DEVICE
#endif

/* A bijection of 26 bits; what is above them comes in between. Without the additions mixing would nearly commute with
 * doubling, and a change of three equally distant words that keeps their sum could pass. */
ON_DEVICE static inline u32 factor(u64 group) {
    const u32 high = ~63u;
    u32 x = ((u32)group << 6) + 0x6a09e640u;
    x ^= x >> 13 & high;
    x = x * 0xae2eb155u + (u32)(group >> 26) * 0x9e3779c0u + 0xbb67ae80u;
    x ^= x >> 11 & high;
    x = x * 0x881ed163u + 0x3c6ef340u;
    x ^= x >> 12 & high;
    x = x * 0xfaecbd39u + 0xa54ff500u;
    x ^= x >> 13 & high;
    return x | 1;
}

/* Of the groups that lie farthest away. */
ON_DEVICE static inline u32 lane_factor(u32 lane) {
    return factor(~(u64)lane) + 2 * lane;
}
