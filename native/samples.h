/* Bytes of tar samples -> keys and fields, checked as wdskit checks them. */
#ifndef WDSKIT_SAMPLES_H
#define WDSKIT_SAMPLES_H
#include <stddef.h>
#include <stdint.h>

#define BLOCK 512
#define MOST_FIELDS 16

/* The members of one sample: names after the key's dot, and data. All pointers point into the sample's bytes. */
typedef struct {
    const uint8_t *key;
    int key_size;
    int num;
    const uint8_t *name[MOST_FIELDS], *data[MOST_FIELDS]; /* data is NULL for the member of the hole */
    int32_t name_size[MOST_FIELDS], data_size[MOST_FIELDS];
    int is_followed; /* a plain header with another key follows the sample */
} Members;

/* A part of a sample that is not in memory: in memory, the bytes after the hole follow the bytes before the hole. */
typedef struct {
    int32_t at, size;
} Hole;

/* Find the first member of at least `least` bytes whose header is in the first `size` bytes of a sample, and store its
 * data's place in `hole`. Returns 0 if no such member comes before the first header that is not plain. */
int find_large(const uint8_t *sample, int32_t size, int32_t least, Hole *hole);

/* Find the members of a sample of `stop` bytes. `sample` has its bytes without the hole, then the next block of the
 * shard. Returns 1 if the members are plain: regular files with ustar headers, right checksums and ASCII names of
 * one key, data that fills the sample, then another key or the end marker. Returns 0 if the reader in Python has to
 * decide. */
int find_members(const uint8_t *sample, int32_t stop, Hole hole, Members *members);

#endif
