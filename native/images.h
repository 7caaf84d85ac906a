/* JPEG -> region -> resize -> flip -> numbers, into memory of a batch. */
#ifndef WDSKIT_IMAGES_H
#define WDSKIT_IMAGES_H
#include "resize.h"

/* The wanted part of an image, as a row of int64 from Python. */
typedef struct {
    int64_t position;                            /* written to the board before the image is decoded */
    int64_t row;                                 /* index of the image in the batch */
    int64_t height, width;                       /* size in the file's header, as Python read it */
    int64_t top, bottom, total_rows, skip_rows;  /* rows top to bottom are resized to total_rows; those from */
    int64_t left, right, total_columns, skip_columns; /* skip_rows on are kept; columns likewise */
    int64_t flip;
} Plan;

/* Result for one image. All results but DONE leave the image to the decoder in Python, whose result counts. */
enum { DONE, REFUSED, WARNED, NO_MEMORY };

/* Decode one JPEG as `plan` says and write height x width x 3 bytes into `out`, or floats if `numbers` is not NULL.
 * Returns DONE or the reason why the image is left to Python. Needs no Python lock. The plan's height and width bound
 * the memory; the caller has compared them with a limit. */
int decode_jpeg(const uint8_t *data, size_t size, const Plan *plan, int height, int width, const Numbers *numbers, void *out);

#endif
