#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *checked(void *p, size_t size)
{
    if (p)
        return p;
    fprintf(stderr, "out of memory: the system refused %zu bytes\n", size);
    abort();
}

void *mem_alloc(size_t size)
{
    return checked(calloc(1, size ? size : 1), size);
}

void *mem_resize(void *p, size_t size)
{
    return checked(realloc(p, size ? size : 1), size);
}

char *mem_strdup(const char *s)
{
    return mem_dup(s, strlen(s) + 1);
}

void *mem_dup(const void *p, size_t size)
{
    void *copy = checked(malloc(size ? size : 1), size);
    if (size)
        memcpy(copy, p, size);
    return copy;
}

void mem_free(void *p)
{
    free(p);
}

int str_copy(char *dst, size_t size, const char *s)
{
    size_t n = strlen(s);
    if (n >= size)
        return -1;
    memmove(dst, s, n + 1);
    return 0;
}
