#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 2048 };

enum log_level log_level_now = LOG_WARN;

static const char *const level_names[] = {"debug", "info", "warn", "error", "off"};
static const char *who_now;
static log_sink *sink_now;
static void *sink_arg;
static log_tap *tap_now;
static void *tap_arg;
static enum log_level shown = LOG_WARN;   /* log_level_now is lower while there is a tap */

void log_init(const char *who)
{
    const char *wanted = getenv("KEEPSTEP_LOG");
    who_now = who;
    log_level_set(LOG_WARN);
    for (int i = LOG_DEBUG; wanted && i <= LOG_OFF; i++) {
        if (strcmp(wanted, level_names[i]) == 0)
            log_level_set((enum log_level)i);
    }
}

void log_level_set(enum log_level level)
{
    shown = level;
    log_level_now = tap_now && level > LOG_INFO ? LOG_INFO : level;
}

enum log_level log_level_get(void)
{
    return shown;
}

void log_tap_set(log_tap *tap, void *arg)
{
    tap_now = tap;
    tap_arg = arg;
    log_level_set(shown);
}

void log_sink_set(log_sink *sink, void *arg)
{
    sink_now = sink;
    sink_arg = arg;
}

/* snprintf at the end of a line of *used bytes; what does not fit is cut off. */
static void line_vadd(char *line, size_t *used, const char *format, va_list args)
{
    size_t room = LINE_MAX_BYTES - *used;
    int n = vsnprintf(line + *used, room, format, args);
    if (n > 0)
        *used += (size_t)n < room ? (size_t)n : room - 1;
}

__attribute__((format(printf, 3, 4))) static void line_add(char *line, size_t *used, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    line_vadd(line, used, format, args);
    va_end(args);
}

static void line_add_time(char *line, size_t *used)
{
    struct timespec ts;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &ts);
    gmtime_r(&ts.tv_sec, &tm);
    line_add(line, used, "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ ", tm.tm_year + 1900, tm.tm_mon + 1, tm.tm_mday,
             tm.tm_hour, tm.tm_min, tm.tm_sec, (int)(ts.tv_nsec / 1000000));
}

/* Text from elsewhere (a peer's reason, a file name) must not look like lines of its own. */
static void line_flatten(char *line, size_t used)
{
    for (size_t i = 0; i < used; i++) {
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            line[i] = ' ';
    }
}

static void line_write(const char *line, size_t size)
{
    ssize_t n;
    do
        n = write(STDERR_FILENO, line, size);
    while (n < 0 && errno == EINTR);
}

void log_emit(enum log_level level, const char *event, const char *format, ...)
{
    char line[LINE_MAX_BYTES + 1];
    size_t used = 0, fields;
    int saved = errno;
    va_list args;

    if (!sink_now) {
        line_add_time(line, &used);
        line_add(line, &used, "%s ", level_names[level]);
    }
    line_add(line, &used, "%s", event);
    if (!sink_now && who_now)
        line_add(line, &used, " who=%s", who_now);
    if (format[0])
        line_add(line, &used, " ");
    fields = used;
    va_start(args, format);
    line_vadd(line, &used, format, args);
    va_end(args);
    line_flatten(line, used);
    if (tap_now && level >= LOG_INFO)
        tap_now(event, line + fields, tap_arg);
    if (level < shown) {
        errno = saved;
        return;
    }
    if (sink_now) {
        sink_now(level, line, sink_arg);
    } else {
        line[used++] = '\n';
        line_write(line, used);
    }
    errno = saved;
}
