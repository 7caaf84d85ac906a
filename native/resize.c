#include "resize.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static int has_avx2;

int filter_taps(const Span *span) {
    double scale = (span->high - span->low) / span->total;
    int taps = 2 * (int)ceil(scale >= 1 ? scale : 1.0) + 1;
    return (taps + 3) & ~3;
}

/* Return the bytes of the rounded weights, rounded up so that ints can follow. */
static size_t weight_bytes(int taps, int size) { return ((size_t)taps * size * sizeof(int16_t) + 7) & ~(size_t)7; }

size_t filter_bytes(const Span *span) {
    int taps = filter_taps(span);
    return (size_t)taps * span->total * sizeof(double) + weight_bytes(taps, span->size) + 2 * (size_t)span->size * sizeof(int);
}

/* Compute the weights of result `i` and return how many there are. `*first` is set to the number of the first pixel. */
static int weigh(const Span *span, int i, int most, double *weights, int *first) {
    double scale = (span->high - span->low) / span->total;
    double support = scale >= 1 ? scale : 1.0, inverse = scale >= 1 ? 1 / scale : 1.0;
    double centre = span->low + scale * (i + 0.5), sum = 0;
    int start = (int)(centre - support + 0.5), stop = (int)(centre + support + 0.5);
    if (start < 0) start = 0;
    if (stop > span->end) stop = span->end;
    int num = stop - start < most ? stop - start : most;
    for (int j = 0; j < num; j++) {
        double distance = fabs((j + start - centre + 0.5) * inverse);
        weights[j] = distance < 1 ? 1 - distance : 0;
        sum += weights[j];
    }
    if (sum != 0)
        for (int j = 0; j < num; j++) weights[j] /= sum;
    *first = start - span->origin;
    return num;
}

void make_filter(Filter *filter, const Span *span, void *scratch) {
    const int taps = filter_taps(span);
    double *exact = scratch, largest = 0;
    filter->size = span->size, filter->taps = taps, filter->most = 0;
    filter->weights = (int16_t *)(exact + (size_t)taps * span->total);
    filter->first = (int *)((char *)filter->weights + weight_bytes(taps, span->size));
    filter->num = filter->first + span->size;
    for (int i = 0; i < span->total; i++) {
        int first, num = weigh(span, i, taps, exact + (size_t)taps * i, &first), kept = i - span->skip;
        for (int j = 0; j < num; j++) largest = exact[(size_t)taps * i + j] > largest ? exact[(size_t)taps * i + j] : largest;
        if (kept < 0 || kept >= span->size) continue;
        int at = span->flip ? span->size - 1 - kept : kept;
        filter->first[at] = first, filter->num[at] = num;
        if (num > filter->most) filter->most = num;
    }
    /* The precision depends on all results, also on those that are not kept. */
    for (filter->shift = 1; filter->shift < 22; filter->shift++)
        if ((int)(0.5 + largest * (1 << (filter->shift + 1))) >= 1 << 15) break;
    for (int at = 0; at < span->size; at++) {
        const double *from = exact + (size_t)taps * (span->skip + (span->flip ? span->size - 1 - at : at));
        int16_t *rounded = filter->weights + (size_t)at * taps;
        for (int j = 0; j < taps; j++) rounded[j] = j < filter->num[at] ? (int16_t)(0.5 + from[j] * (1 << filter->shift)) : 0;
    }
}

static inline uint8_t clip(int value) { return value < 0 ? 0 : value > 255 ? 255 : (uint8_t)value; }

static void row_plain(const Filter *filter, const uint8_t *from, uint8_t *to) {
    const int shift = filter->shift, half = 1 << (shift - 1);
    for (int i = 0; i < filter->size; i++, to += 3) {
        const uint8_t *pixel = from + 3 * (size_t)filter->first[i];
        const int16_t *weights = filter->weights + (size_t)i * filter->taps;
        int r = half, g = half, b = half;
        for (int j = 0; j < filter->num[i]; j++, pixel += 3) {
            r += weights[j] * pixel[0];
            g += weights[j] * pixel[1];
            b += weights[j] * pixel[2];
        }
        to[0] = clip(r >> shift), to[1] = clip(g >> shift), to[2] = clip(b >> shift);
    }
}

static void columns_plain(const uint8_t *rows, size_t stride, const int16_t *weights, int num, int shift, uint8_t *to, int n) {
    const int half = 1 << (shift - 1);
    for (int i = 0; i < n; i++) {
        int value = half;
        for (int j = 0; j < num; j++) value += weights[j] * rows[j * stride + i];
        to[i] = clip(value >> shift);
    }
}

static void numbers_plain(const Numbers *numbers, const uint8_t *from, float *to, int n) {
    for (int i = 0; i < n; i++) {
        if (numbers->divides) {
            to[i] = from[i] / 255.0f;
            continue;
        }
        float scaled = from[i] * numbers->scale[i % 3];
        to[i] = scaled + numbers->shift[i % 3];
    }
}

#if defined(__x86_64__)
/* Add four pixels of two rows, one row in each half of a register, times four weights. */
#define ADD_FOUR(J)                                                                                                     \
    do {                                                                                                                \
        __m256i pixels = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(pixel + 3 * (J))));                   \
        pixels = _mm256_inserti128_si256(pixels, _mm_loadu_si128((const __m128i *)(pixel + 3 * (J) + below)), 1);       \
        __m256i four = _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)(weights + (J))));                      \
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, low), _mm256_shuffle_epi32(four, 0)));  \
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, high), _mm256_shuffle_epi32(four, 0x55))); \
    } while (0)
#define STORE_PAIR(I)                                                                                                   \
    do {                                                                                                                \
        sum = _mm256_sra_epi32(sum, shift);                                                                             \
        sum = _mm256_packus_epi16(_mm256_packs_epi32(sum, sum), sum);                                                   \
        int32_t upper = _mm256_cvtsi256_si32(sum), lower = _mm_cvtsi128_si32(_mm256_extracti128_si256(sum, 1));         \
        memcpy(to + 3 * (I), &upper, 4), memcpy(to + to_stride + 3 * (I), &lower, 4);                                   \
    } while (0)

/* Filter two rows at once. Each result takes the same number of steps, so that no branch is mispredicted. */
__attribute__((target("avx2"))) static void rows_avx2(
    const Filter *filter, const uint8_t *from, size_t below, uint8_t *to, size_t to_stride) {
    const __m256i low = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
    const __m256i half = _mm256_set1_epi32(1 << (filter->shift - 1));
    const __m128i shift = _mm_cvtsi32_si128(filter->shift);
    const int16_t *weights = filter->weights;
    const int taps = filter->taps, size = filter->size, most = filter->most;
    const int *first = filter->first;
    for (int i = 0; i < size; i++, weights += taps) {
        const uint8_t *pixel = from + 3 * (size_t)first[i];
        __m256i sum = half;
        ADD_FOUR(0);
        for (int j = 4; j < most; j += 4) ADD_FOUR(j);
        STORE_PAIR(i);
    }
}

__attribute__((target("avx2"))) static void columns_avx2(
    const uint8_t *rows, size_t stride, const int16_t *weights, int num, int shift, uint8_t *to, int n) {
    const __m256i half = _mm256_set1_epi32(1 << (shift - 1)), zero = _mm256_setzero_si256();
    const __m128i by = _mm_cvtsi32_si128(shift);
    int i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i a = half, b = half, c = half, d = half;
        for (int j = 0; j < num; j += 2) {
            const uint8_t *pixel = rows + j * stride + i;
            __m256i upper = _mm256_loadu_si256((const __m256i *)pixel);
            __m256i lower = j + 1 < num ? _mm256_loadu_si256((const __m256i *)(pixel + stride)) : zero;
            int32_t pair;
            memcpy(&pair, weights + j, 4);
            __m256i both = _mm256_set1_epi32(pair);
            __m256i left = _mm256_unpacklo_epi8(upper, lower), right = _mm256_unpackhi_epi8(upper, lower);
            a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_unpacklo_epi8(left, zero), both));
            b = _mm256_add_epi32(b, _mm256_madd_epi16(_mm256_unpackhi_epi8(left, zero), both));
            c = _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_unpacklo_epi8(right, zero), both));
            d = _mm256_add_epi32(d, _mm256_madd_epi16(_mm256_unpackhi_epi8(right, zero), both));
        }
        a = _mm256_packs_epi32(_mm256_sra_epi32(a, by), _mm256_sra_epi32(b, by));
        c = _mm256_packs_epi32(_mm256_sra_epi32(c, by), _mm256_sra_epi32(d, by));
        _mm256_storeu_si256((__m256i *)(to + i), _mm256_packus_epi16(a, c));
    }
    if (i < n) columns_plain(rows + i, stride, weights, num, shift, to + i, n - i);
}

/* 24 values fill whole pixels and whole registers. */
__attribute__((target("avx2"))) static void numbers_avx2(const Numbers *numbers, const uint8_t *from, float *to, int n) {
    __m256 scales[3], shifts[3];
    const __m256 most = _mm256_set1_ps(255.0f);
    for (int k = 0; k < 3; k++) {
        float scale[8], shift[8];
        for (int j = 0; j < 8; j++) scale[j] = numbers->scale[(8 * k + j) % 3], shift[j] = numbers->shift[(8 * k + j) % 3];
        scales[k] = _mm256_loadu_ps(scale), shifts[k] = _mm256_loadu_ps(shift);
    }
    int i = 0;
    for (; i + 24 <= n; i += 24) {
        for (int k = 0; k < 3; k++) {
            __m128i bytes = _mm_loadl_epi64((const __m128i *)(from + i + 8 * k));
            __m256 values = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
            if (numbers->divides) values = _mm256_div_ps(values, most);
            else values = _mm256_add_ps(_mm256_mul_ps(values, scales[k]), shifts[k]);
            _mm256_storeu_ps(to + i + 8 * k, values);
        }
    }
    if (i < n) numbers_plain(numbers, from + i, to + i, n - i);
}
#endif

void filter_rows(const Filter *filter, const uint8_t *from, size_t from_stride, uint8_t *to, size_t to_stride, int rows) {
#if defined(__x86_64__)
    if (has_avx2) {
        if (rows == 2) rows_avx2(filter, from, from_stride, to, to_stride);
        else rows_avx2(filter, from, 0, to, 0);
        return;
    }
#endif
    for (int row = 0; row < rows; row++) row_plain(filter, from + row * from_stride, to + row * to_stride);
}

void filter_columns(const Filter *filter, int i, const uint8_t *rows, size_t stride, uint8_t *to, int n) {
    const uint8_t *first = rows + (size_t)filter->first[i] * stride;
    const int16_t *weights = filter->weights + (size_t)i * filter->taps;
#if defined(__x86_64__)
    if (has_avx2) {
        columns_avx2(first, stride, weights, filter->num[i], filter->shift, to, n);
        return;
    }
#endif
    columns_plain(first, stride, weights, filter->num[i], filter->shift, to, n);
}

void to_numbers(const Numbers *numbers, const uint8_t *from, float *to, int n) {
#if defined(__x86_64__)
    if (has_avx2) {
        numbers_avx2(numbers, from, to, n);
        return;
    }
#endif
    numbers_plain(numbers, from, to, n);
}

int choose_vectors(int allow) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    has_avx2 = allow && __builtin_cpu_supports("avx2");
#else
    (void)allow;
#endif
    return has_avx2;
}
