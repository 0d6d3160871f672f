/* mem.h - allocation that cannot fail (it aborts with a clear line), for start and declare time. */
#ifndef BASE_MEM_H
#define BASE_MEM_H

#include <stddef.h>

void *mem_alloc(size_t size);                 /* zeroed; free with free() */
void *mem_resize(void *p, size_t size);       /* like realloc */
char *mem_strdup(const char *s);
void *mem_dup(const void *p, size_t size);
void mem_free(void *p);                       /* free(), so that cores need not import it */

/* Copies s into dst of `size` bytes; returns -1 (dst untouched) when it does not fit. */
int str_copy(char *dst, size_t size, const char *s);

/* Grows an array (pointer, count, capacity) so that one more element fits. */
#define ARRAY_ROOM(v, n, cap)                                                   \
    do {                                                                        \
        if ((n) == (cap)) {                                                     \
            (cap) = (cap) ? (cap) * 2 : 8;                                      \
            (v) = mem_resize((v), (size_t)(cap) * sizeof *(v));                 \
        }                                                                       \
    } while (0)

#endif
