/* Memory of a thread that is used again. */
#ifndef WDSKIT_SCRATCH_H
#define WDSKIT_SCRATCH_H
#include <stddef.h>
#include <stdint.h>

/* `size` bytes of undefined content, which this thread's next call of scratch or trim_scratch takes back; NULL if there is
 * no memory. */
uint8_t *scratch(size_t size);

/* Free what exceeds the few megabytes that a thread keeps. */
void trim_scratch(void);

#endif
