/* check.h - assertions that stay on in release builds. Never check input with them. */
#ifndef BASE_CHECK_H
#define BASE_CHECK_H

/* Prints "check failed: TEXT at FILE:LINE" and aborts. Replaceable by the simulator, which
 * turns a failed check into a violation of the seed that is running. */
_Noreturn void check_failed(const char *text, const char *file, int line);
typedef void check_hook(const char *text, const char *file, int line);
/* Called before the abort; may leave with longjmp. NULL restores the default. */
void check_hook_set(check_hook *hook);

#define CHECK(x) ((x) ? (void)0 : check_failed(#x, __FILE__, __LINE__))

#endif
