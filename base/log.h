/* log.h - structured log lines on stderr: time, level, event, key=value.
 *
 *     2026-01-02T03:04:05.678Z warn member_gone who=server:s0 id=12 cause="connection closed"
 *
 * Quiet by default (KEEPSTEP_LOG=warn). Any thread may log; a line is written whole.
 * Values with blanks must be quoted by the caller ("cause=\"%s\""). No secrets. */
#ifndef BASE_LOG_H
#define BASE_LOG_H

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR, LOG_OFF };

/* Reads KEEPSTEP_LOG (debug, info, warn, error, off); unknown words mean warn.
 * `who` (e.g. "server:s0") is put in every line; it must outlive the process's logging. */
void log_init(const char *who);
void log_level_set(enum log_level level);
enum log_level log_level_get(void);
/* The simulator's narration, tests: where lines go instead of stderr. NULL: stderr. A sink's line starts
 * with the event: no time, level or `who`, so that it is the same on replay. No newline at its end. */
typedef void log_sink(enum log_level level, const char *line, void *arg);
void log_sink_set(log_sink *sink, void *arg);
/* Also gets every line of level info or above, whatever level stderr shows: its event and its fields. NULL: nobody. Set it
 * before threads start; it is called by the thread that logs. */
typedef void log_tap(const char *event, const char *fields, void *arg);
void log_tap_set(log_tap *tap, void *arg);
void log_emit(enum log_level level, const char *event, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

extern enum log_level log_level_now;
#define LOG_AT(level, ...) ((level) >= log_level_now ? log_emit(level, __VA_ARGS__) : (void)0)
#define log_debug(...) LOG_AT(LOG_DEBUG, __VA_ARGS__)
#define log_info(...) LOG_AT(LOG_INFO, __VA_ARGS__)
#define log_warn(...) LOG_AT(LOG_WARN, __VA_ARGS__)
#define log_error(...) LOG_AT(LOG_ERROR, __VA_ARGS__)

#endif
