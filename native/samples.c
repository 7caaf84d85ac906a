#include "samples.h"

#include <string.h>

/* Fields of a header: name [100], size [12] at 124, checksum [8] at 148, type at 156, magic [8] at 257, prefix at 345. */
#define NAME_BYTES 100
#define SIZE_AT 124
#define CHECKSUM_AT 148
#define TYPE_AT 156
#define MAGIC_AT 257
#define PREFIX_AT 345

static int is_alnum(uint8_t c) {
    uint8_t letter = c | 32;
    return (c >= '0' && c <= '9') || (letter >= 'a' && letter <= 'z');
}

/* Return the octal number in `digits` bytes, or -1. */
static int64_t octal(const uint8_t *text, int digits) {
    int64_t number = 0;
    for (int i = 0; i < digits; i++) {
        unsigned digit = text[i] - (unsigned)'0';
        if (digit > 7) return -1;
        number = number << 3 | digit;
    }
    return number;
}

/* Return the size in a plain header, and set `*name_size` to the length of its name; return -1 if it is not plain. */
static int64_t plain_size(const uint8_t *header, int *name_size) {
    static const uint8_t magic[8] = {'u', 's', 't', 'a', 'r', 0, '0', '0'};
    if (memcmp(header + MAGIC_AT, magic, sizeof magic) || header[TYPE_AT] != '0' || header[PREFIX_AT]) return -1;
    if (header[SIZE_AT + 11] || header[CHECKSUM_AT + 6] || header[CHECKSUM_AT + 7] != ' ') return -1;
    int64_t size = octal(header + SIZE_AT, 11), checksum = octal(header + CHECKSUM_AT, 6);
    unsigned sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += header[i];
    for (int i = CHECKSUM_AT; i < CHECKSUM_AT + 8; i++) sum += ' ' - header[i];
    if (size < 0 || checksum != (int64_t)sum) return -1;
    int n = (int)strnlen((const char *)header, NAME_BYTES);
    uint8_t high = 0;
    for (int i = 0; i < n; i++) high |= header[i];
    if (!n || high >= 128 || !is_alnum(header[n - 1])) return -1;
    *name_size = n;
    return size;
}

/* Remove each `./` at the start of a name of `*n` bytes: it belongs to no key. Returns the rest of the name. */
static const uint8_t *strip_dots(const uint8_t *name, int *n) {
    while (*n >= 2 && name[0] == '.' && name[1] == '/') name += 2, *n -= 2;
    return name;
}

/* Return the bytes of a name's key, which ends before the first dot of the last path part. Returns 0 if it has no
 * key. */
static int key_size(const uint8_t *name, int n) {
    int base = 0;
    if (n >= 2 && name[0] == '_' && name[1] == '_') return 0;
    for (int i = 0; i < n; i++)
        if (name[i] == '/') base = i + 1;
    const uint8_t *dot = memchr(name + base, '.', n - base);
    int key = dot ? (int)(dot - name) : 0;
    return key <= base || key + 1 >= n ? 0 : key;
}

int find_large(const uint8_t *sample, int32_t size, int32_t least, Hole *hole) {
    for (int32_t at = 0; at + BLOCK <= size;) {
        int n;
        int64_t data_size = plain_size(sample + at, &n);
        if (data_size < 0 || data_size > INT32_MAX / 2) return 0;
        if (data_size >= least) {
            hole->at = at + BLOCK, hole->size = (int32_t)data_size;
            return 1;
        }
        at += BLOCK + (int32_t)((data_size + BLOCK - 1) / BLOCK * BLOCK);
    }
    return 0;
}

int find_members(const uint8_t *sample, int32_t stop, Hole hole, Members *members) {
    int32_t at = 0;
    int key = members->num = 0;
    const uint8_t *first = sample; /* the first name, which begins with the key */
    while (at < stop) {
        int n, field = members->num;
        const uint8_t *header = sample + at - (at > hole.at ? hole.size : 0);
        int64_t size = plain_size(header, &n);
        if (size < 0 || size > stop - at || field == MOST_FIELDS) return 0;
        const uint8_t *name = strip_dots(header, &n);
        if (!field) first = name, key = key_size(name, n);
        if (!key || n <= key + 1 || name[key] != '.' || memcmp(first, name, key)) return 0;
        if (memchr(name + key, '/', n - key)) return 0;
        int is_hole = hole.size && at + BLOCK == hole.at;
        if (is_hole && size != hole.size) return 0;
        members->name[field] = name + key + 1, members->name_size[field] = n - key - 1;
        members->data[field] = is_hole ? NULL : header + BLOCK, members->data_size[field] = (int32_t)size;
        members->num++;
        at += BLOCK + (int32_t)((size + BLOCK - 1) / BLOCK * BLOCK);
    }
    members->key = first, members->key_size = key;
    /* The next block must be a header with its whole name at the start, or no header; and its name must have another
     * key. A member without a key may stand inside a sample: it does not show that the sample ends. */
    const uint8_t *after = sample + stop - hole.size;
    if (at != stop || !key || (after[TYPE_AT] != '0' && after[TYPE_AT]) || after[PREFIX_AT]) return 0;
    int n = 0, most = NAME_BYTES;
    const uint8_t *next = strip_dots(after, &most);
    members->is_followed = plain_size(after, &n) >= 0 && key_size(next, n - (NAME_BYTES - most));
    return memcmp(next, first, (size_t)key + 1) != 0;
}
