/* Memory that a thread uses again and again. */
#ifndef WDSKIT_SCRATCH_H
#define WDSKIT_SCRATCH_H
#include <stddef.h>
#include <stdint.h>

/* Return `size` bytes of undefined content, valid until this thread's next call of scratch or trim_scratch. Returns
 * NULL if memory is exhausted. */
uint8_t *scratch(size_t size);

/* Free what exceeds the few megabytes that a thread keeps. */
void trim_scratch(void);

#endif
