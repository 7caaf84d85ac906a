/* Antialiased bilinear resizing of 8-bit RGB rows, with the arithmetic of torch's uint8 path: weights are computed in
 * float64 and rounded to int16, rows are filtered first and rounded to uint8, then columns. */
#ifndef WDSKIT_RESIZE_H
#define WDSKIT_RESIZE_H
#include <stddef.h>
#include <stdint.h>

/* The filter of one axis. Result i is the sum of num[i] pixels from first[i] on, each times its weight, >> shift. */
typedef struct {
    int *first;       /* [size] */
    int *num;         /* [size], at least 1 */
    int16_t *weights; /* [size][taps], 0 from num[i] on */
    int size;         /* results */
    int taps;         /* a multiple of 4 */
    int most;         /* largest num */
    int shift;        /* 1 to 22 */
} Filter;

/* One axis of the wanted part of an image, in pixels from the edge of the part. Pixels `low` to `high` are resized to
 * `total` results; `size` results from `skip` on are kept, in reverse order if `flip`. `low` is below 1; it is a
 * fraction if the image is decoded at a smaller scale. The part has `end` pixels; the filter counts from pixel
 * `origin`. */
typedef struct {
    double low, high;
    int total, skip, size, end, origin, flip;
} Span;

/* Return the largest number of pixels that one result uses, rounded up to a multiple of 4. */
int filter_taps(const Span *span);

/* Return the bytes of memory that make_filter needs for a span: a multiple of 8. */
size_t filter_bytes(const Span *span);

/* Make the filter of a span in `scratch`, which is aligned to 8 bytes and has filter_bytes(span) bytes. */
void make_filter(Filter *filter, const Span *span, void *scratch);

/* Filter two rows, or one if `rows` is 1. Rows of `from` are `from_stride` bytes apart, rows of `to` are `to_stride`
 * bytes apart. After the pixels of `from`, 3 x taps + 16 bytes must be readable; after the pixels of `to`, one byte
 * must be writable. */
void filter_rows(const Filter *filter, const uint8_t *from, size_t from_stride, uint8_t *to, size_t to_stride, int rows);

/* Write row `i` of the result, `n` bytes, from filtered rows `stride` bytes apart. */
void filter_columns(const Filter *filter, int i, const uint8_t *rows, size_t stride, uint8_t *to, int n);

/* How uint8 values become float32: value / 255, or value * scale[channel] + shift[channel] in two roundings. */
typedef struct {
    int divides;
    float scale[3], shift[3];
} Numbers;

/* Write `n` RGB bytes as float32. */
void to_numbers(const Numbers *numbers, const uint8_t *from, float *to, int n);

/* Choose vector code if this CPU has AVX2 and `allow` is not 0, else plain code. Returns 1 for vector code. Not
 * thread-safe. */
int choose_vectors(int allow);

#endif
