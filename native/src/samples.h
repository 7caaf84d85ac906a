/* Samples of tar shards -> their keys and fields, checked as wdskit checks them. */
#ifndef WDSKIT_SAMPLES_H
#define WDSKIT_SAMPLES_H
#include <stddef.h>
#include <stdint.h>

#define BLOCK 512
#define MOST_FIELDS 16

/* The members of one sample: their names after the key's dot, and their data. The pointers lead into the sample's bytes. */
typedef struct {
    const uint8_t *key;
    int key_size;
    int num;
    const uint8_t *name[MOST_FIELDS], *data[MOST_FIELDS]; /* data is NULL for the member whose data is the hole */
    int32_t name_size[MOST_FIELDS], data_size[MOST_FIELDS];
    int is_followed; /* a plain header follows the sample, whose name has another key */
} Members;

/* A part of a sample's bytes that is not in its memory: the bytes after the hole follow those before it. */
typedef struct {
    int32_t at, size;
} Hole;

/* Find the first member of at least `least` bytes whose header is in the first `size` bytes of a sample. Its data becomes
 * the hole. Returns 0 if there is none before the first header that is not plain. */
int find_large(const uint8_t *sample, int32_t size, int32_t least, Hole *hole);

/* Find the members of a sample of `stop` bytes, which a block follows. Its memory has all bytes but those of the hole.
 * Returns 1 if the members are plain: regular files with ustar headers whose checksums hold, ASCII names of one key, data
 * that fills the sample, and after it another key or the end marker. Returns 0 if the reader in Python has to decide. */
int find_members(const uint8_t *sample, int32_t stop, Hole hole, Members *members);

#endif
