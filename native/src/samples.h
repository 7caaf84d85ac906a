/* Samples of tar shards -> their keys and fields, checked as wdskit checks them. */
#ifndef WDSKIT_SAMPLES_H
#define WDSKIT_SAMPLES_H
#include <stddef.h>
#include <stdint.h>

#define BLOCK 512
#define MOST_FIELDS 16

/* The members of one sample: their names after the key's dot, and their data, as offsets into the sample's bytes. */
typedef struct {
    int key; /* bytes of the key, with which the sample's bytes start */
    int num;
    int32_t name[MOST_FIELDS], name_size[MOST_FIELDS];
    int32_t data[MOST_FIELDS], data_size[MOST_FIELDS];
} Members;

/* Find the members of a sample in data[0:stop], which a block follows. Returns 1 if they are plain: regular files with
 * ustar headers whose checksums hold, ASCII names of one key, data that fills the sample, and behind it another key or the
 * end marker. Returns 0 if the reader in Python has to decide. */
int find_members(const uint8_t *data, int32_t stop, Members *members);

#endif
