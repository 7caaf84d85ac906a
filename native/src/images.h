/* JPEG -> region -> resize -> flip -> numbers, into memory of a batch. */
#ifndef WDSKIT_IMAGES_H
#define WDSKIT_IMAGES_H
#include "resize.h"

/* The wanted part of an image, as a row of int64 from Python. */
typedef struct {
    int64_t position;                            /* written to the board before the image is touched */
    int64_t row;                                 /* which image of the batch it becomes */
    int64_t height, width;                       /* of the file's header, as Python read it */
    int64_t top, bottom, total_rows, skip_rows;  /* rows top to bottom become total_rows, of which the kept */
    int64_t left, right, total_columns, skip_columns; /* ones begin at skip_rows; columns likewise */
    int64_t flip;
} Plan;

/* What became of an image. All but DONE leave the image to the decoder in Python, whose verdict counts. */
enum { DONE, REFUSED, WARNED, NO_MEMORY };

/* Decode one JPEG as `plan` says, and write it into `out`: height x width x 3 bytes, or floats if `numbers` is not NULL.
 * It needs no Python lock. Memory is bounded by the plan's size, which the caller has compared with a limit. */
int decode_jpeg(const uint8_t *data, size_t size, const Plan *plan, int height, int width, const Numbers *numbers, void *out);

#endif
