#include "images.h"
#include "scratch.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <jpeglib.h>

/* libjpeg-turbo bypasses the cache when it stores to a row aligned to 32 bytes; reading such a row takes five times as
 * long. */
#define MISALIGNED 8

#define MARGIN 8 /* additional pixels decoded on each side of the part */

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf jump;
} Errors;

static void on_error(j_common_ptr state) { longjmp(((Errors *)state->err)->jump, 1); }
static void on_message(j_common_ptr state, int level) { state->err->num_warnings += level < 0; }
static void on_output(j_common_ptr state) { (void)state; }

#define MOST_SCRATCH ((size_t)256 << 20) /* for one image */

/* The decoded pixels of one axis: `start` to `stop`. */
typedef struct {
    int start, stop;
    Span span;
} Part;

/* Return the part of an axis to decode at 1/step of the size, at which the axis has `side` pixels. Antialiasing uses no
 * pixel beyond the wanted part, as if the image were cropped before it is resized. */
static Part part_of(int64_t low, int64_t high, int64_t total, int64_t skip, int size, int step, int side, int flip) {
    int lowest = (int)(low / step), highest = (int)((high + step - 1) / step);
    if (highest > side) highest = side;
    Span span = {.low = (double)low / step - lowest, .high = (double)high / step - lowest, .total = (int)total,
                 .skip = (int)skip, .size = size, .end = highest - lowest, .flip = flip};
    double scale = (span.high - span.low) / total, support = scale >= 1 ? scale : 1.0;
    int start = (int)(span.low + scale * (skip + 0.5) - support), stop = (int)(span.low + scale * (skip + size - 0.5) + support) + 2;
    span.origin = start < 0 ? 0 : start;
    return (Part){lowest + span.origin, stop > span.end ? highest : lowest + stop, span};
}

static int is_side(int64_t low, int64_t high, int64_t total, int64_t skip, int size, int64_t side) {
    return 0 <= low && low < high && high <= side && 0 <= skip && size <= total && skip <= total - size && total <= 1 << 16;
}

/* Return 1 if a progressive file has all scans. Versions of libjpeg guess missing scans in different ways. */
static int has_all_scans(j_decompress_ptr jpeg) {
    if (!jpeg->progressive_mode || !jpeg->coef_bits) return 1;
    for (int component = 0; component < jpeg->num_components; component++)
        for (int i = 0; i < DCTSIZE2; i++)
            if (jpeg->coef_bits[component][i]) return 0;
    return 1;
}

/* Decode the rows of the part and filter them into `middle`. The rows below the part are read too, so that damage there
 * is found, but they are not decoded to pixels. Returns DONE, WARNED or REFUSED. */
static int decode_rows(j_decompress_ptr jpeg, const Part *rows, const Filter *filter, uint8_t *lines, size_t line, int lead,
                       uint8_t *middle, size_t mid) {
    int num = rows->stop - rows->start, rest = (int)jpeg->output_height - rows->stop;
    if (rows->start > 0 && (int)jpeg_skip_scanlines(jpeg, rows->start) != rows->start) return REFUSED;
    for (int y = 0; y < num;) {
        JSAMPROW pair[2] = {lines, lines + line};
        int got = (int)jpeg_read_scanlines(jpeg, pair, num - y > 1 ? 2 : 1);
        if (got < 1) return REFUSED;
        filter_rows(filter, lines + 3 * lead, line, middle + mid * y, mid, got);
        y += got;
    }
    /* Skipping would not read the end of the file: the last row is decoded. */
    if (rest > 1 && (int)jpeg_skip_scanlines(jpeg, rest - 1) != rest - 1) return REFUSED;
    if (rest > 0 && jpeg_read_scanlines(jpeg, &lines, 1) != 1) return REFUSED;
    jpeg_finish_decompress(jpeg);
    return jpeg->err->num_warnings ? WARNED : DONE;
}

static int decode(j_decompress_ptr jpeg, const Plan *plan, int height, int width, const Numbers *numbers, void *out) {
    if (jpeg_read_header(jpeg, TRUE) != JPEG_HEADER_OK) return REFUSED;
    if (jpeg->num_components != 1 && jpeg->num_components != 3) return REFUSED;
    /* At 1/2 and 1/4, jpeg_crop_scanline moves the colours of an image sampled 4x2 or 2x4. */
    if (jpeg->max_h_samp_factor * jpeg->max_v_samp_factor > 4) return REFUSED;
    if (jpeg->image_height != plan->height || jpeg->image_width != plan->width) return REFUSED;
    if (!is_side(plan->top, plan->bottom, plan->total_rows, plan->skip_rows, height, plan->height)) return REFUSED;
    if (!is_side(plan->left, plan->right, plan->total_columns, plan->skip_columns, width, plan->width)) return REFUSED;
    double covers = fmin((double)(plan->bottom - plan->top) / plan->total_rows, (double)(plan->right - plan->left) / plan->total_columns);
    int step = covers >= 8 ? 8 : covers >= 4 ? 4 : covers >= 2 ? 2 : 1;
    jpeg->out_color_space = JCS_RGB;
    jpeg->scale_num = 1, jpeg->scale_denom = step;
    jpeg->dct_method = JDCT_ISLOW;
    jpeg_start_decompress(jpeg);
    if (!has_all_scans(jpeg)) return REFUSED;

    Part rows = part_of(plan->top, plan->bottom, plan->total_rows, plan->skip_rows, height, step, jpeg->output_height, 0);
    Part columns = part_of(plan->left, plan->right, plan->total_columns, plan->skip_columns, width, step, jpeg->output_width, plan->flip != 0);
    /* MARGIN more pixels on each side, so that smooth upsampling of chroma has its neighbours and is used in a narrow
     * part. */
    JDIMENSION from = columns.start > MARGIN ? columns.start - MARGIN : 0, end = columns.stop + MARGIN;
    if (end > jpeg->output_width) end = jpeg->output_width;
    JDIMENSION decoded = end - from;
    if (decoded < jpeg->output_width) jpeg_crop_scanline(jpeg, &from, &decoded);

    size_t row_bytes = filter_bytes(&rows.span), column_bytes = filter_bytes(&columns.span);
    size_t mid = (size_t)width * 3 + 32, num_rows = rows.stop - rows.start;
    size_t line = ((size_t)decoded * 3 + 3 * filter_taps(&columns.span) + 16 + 31) & ~(size_t)31;
    size_t total = row_bytes + column_bytes + 2 * line + mid * (num_rows + 1) + 32 + MISALIGNED;
    uint8_t *memory = total > MOST_SCRATCH ? NULL : scratch(total);
    if (!memory) return NO_MEMORY;
    Filter by_row, by_column;
    make_filter(&by_row, &rows.span, memory);
    make_filter(&by_column, &columns.span, memory + row_bytes);
    uint8_t *lines = memory + row_bytes + column_bytes;
    lines += (32 - (uintptr_t)lines % 32) % 32 + MISALIGNED;
    uint8_t *middle = lines + 2 * line, *last = middle + mid * num_rows;
    int verdict = decode_rows(jpeg, &rows, &by_column, lines, line, columns.start - (int)from, middle, mid);
    if (verdict != DONE) return verdict;
    for (int i = 0; i < height; i++) {
        if (numbers) {
            filter_columns(&by_row, i, middle, mid, last, 3 * width);
            to_numbers(numbers, last, (float *)out + (size_t)i * 3 * width, 3 * width);
        } else {
            filter_columns(&by_row, i, middle, mid, (uint8_t *)out + (size_t)i * 3 * width, 3 * width);
        }
    }
    return DONE;
}

int decode_jpeg(const uint8_t *data, size_t size, const Plan *plan, int height, int width, const Numbers *numbers, void *out) {
    struct jpeg_decompress_struct jpeg;
    Errors errors;
    volatile int verdict = REFUSED;
    memset(&jpeg, 0, sizeof jpeg);
    jpeg.err = jpeg_std_error(&errors.base);
    errors.base.error_exit = on_error, errors.base.emit_message = on_message, errors.base.output_message = on_output;
    if (!setjmp(errors.jump)) {
        jpeg_create_decompress(&jpeg);
        jpeg_mem_src(&jpeg, data, size);
        verdict = decode(&jpeg, plan, height, width, numbers, out);
    }
    jpeg_destroy_decompress(&jpeg);
    trim_scratch();
    return verdict;
}
