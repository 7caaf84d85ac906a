#include "scratch.h"

#include <pthread.h>
#include <stdlib.h>

#define MOST_KEPT ((size_t)8 << 20)

static _Thread_local struct {
    uint8_t *memory;
    size_t size;
} kept;

static pthread_key_t at_exit;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_key(void) { pthread_key_create(&at_exit, free); }

static void hold(uint8_t *memory, size_t size) {
    free(kept.memory);
    kept.memory = memory, kept.size = memory ? size : 0;
    pthread_once(&once, make_key);
    pthread_setspecific(at_exit, memory); /* freed when the thread ends */
}

uint8_t *scratch(size_t size) {
    if (size > kept.size) hold(malloc(size), size);
    return kept.memory;
}

void trim_scratch(void) {
    if (kept.size > MOST_KEPT) hold(NULL, 0);
}
