/* store_sum.h - CRC-32C (Castagnoli) of stored values.
 *
 * Uses the processor's instruction where there is one, tables elsewhere; both give the same numbers. */
#ifndef STORAGE_STORE_SUM_H
#define STORAGE_STORE_SUM_H

#include <stddef.h>
#include <stdint.h>

/* Continues `sum` (0 at the start) over `size` more bytes. Any thread. */
uint32_t store_sum(uint32_t sum, const void *data, size_t size);
/* The same while copying: data goes to dst, each piece while it is still in the cache. */
uint32_t store_sum_copy(uint32_t sum, void *dst, const void *data, size_t size);
/* Tables only, for the test that compares the two. */
uint32_t store_sum_portable(uint32_t sum, const void *data, size_t size);

#endif
