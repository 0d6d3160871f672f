#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>

static check_hook *hook_now;

void check_hook_set(check_hook *hook)
{
    hook_now = hook;
}

void check_failed(const char *text, const char *file, int line)
{
    check_hook *hook = hook_now;
    if (hook)
        hook(text, file, line);
    fprintf(stderr, "check failed: %s at %s:%d\n", text, file, line);
    abort();
}
