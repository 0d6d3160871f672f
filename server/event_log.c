#include "server/event_log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"

enum { LINE_MAX_BYTES = 4096, NAME_BYTES = 64 };

/* What is worth a line: everything else in the log is about single connections and frames. */
static const char *const events[] = {
    "starting", "serving", "stopped", "new_life", "store_unreachable", "store_reachable", "lease_lost", "leader_lost", "elected", "deposed",
    "peer_down", "node_suspect", "view_wait", "report_silent", "view_prepare", "view_reports", "view_propose", "view_commit",
    "view", "reported", "promoted", "announced", "first_step", "catch_up", "caught_up", "shard_without_holder", "server_drain",
    "draining", "drained", "fenced", "job_ended",
};

static int file = -1;
static char server[NAME_BYTES];

struct line {
    char text[LINE_MAX_BYTES];
    size_t n;
};

static void put(struct line *l, const char *s, size_t n)
{
    /* Room is kept for the end of a string and of the object. */
    size_t room = sizeof l->text - 8 - l->n;
    n = n < room ? n : room;
    memcpy(l->text + l->n, s, n);
    l->n += n;
}

static void put_text(struct line *l, const char *s)
{
    put(l, s, strlen(s));
}

static void put_string(struct line *l, const char *s, size_t n)
{
    put(l, "\"", 1);
    for (size_t i = 0; i < n && l->n < sizeof l->text - 16; i++) {
        if (s[i] == '"' || s[i] == '\\')
            put(l, "\\", 1);
        put(l, s + i, 1);
    }
    l->text[l->n++] = '"';
}

/* Ids need 64 bits: what a reader could round stays a string. */
static bool is_number(const char *s, size_t n)
{
    size_t digits = strspn(s, "-0123456789.");
    return n > 0 && n < 15 && digits >= n && s[n - 1] != '-' && s[n - 1] != '.' && s[0] != '.';
}

/* The text may have quotes of its own: the last one is followed by the next key, or by nothing. */
static const char *quoted_end(const char *s)
{
    const char *end = s;
    for (; *end; end++) {
        const char *next = end + 2;
        if (*end == '"' && (!end[1] || (end[1] == ' ' && next[strcspn(next, " =\"")] == '=')))
            break;
    }
    return end;
}

/* key=value, key="value with blanks" */
static void put_fields(struct line *l, const char *s)
{
    while (*s && l->n < sizeof l->text - 300) {
        size_t key = strcspn(s, "= ");
        if (s[key] != '=') {
            s += key + (s[key] == ' ');
            continue;
        }
        put(l, ",", 1);
        put_string(l, s, key);
        put(l, ":", 1);
        s += key + 1;
        if (*s == '"') {
            const char *end = quoted_end(s + 1);
            put_string(l, s + 1, (size_t)(end - s - 1));
            s = *end ? end + 1 : end;
        } else {
            size_t n = strcspn(s, " ");
            if (is_number(s, n))
                put(l, s, n);
            else
                put_string(l, s, n);
            s += n;
        }
        s += *s == ' ';
    }
}

static void put_head(struct line *l, const char *event)
{
    struct timespec now;
    struct tm tm;
    char text[96];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    snprintf(text, sizeof text, "{\"time\":\"%04d-%02d-%02dT%02d:%02d:%02d.%03dZ\",\"mono_us\":%llu,\"server\":", tm.tm_year + 1900,
             tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec, (int)(now.tv_nsec / 1000000),
             (unsigned long long)clock_now_us());
    put_text(l, text);
    put_string(l, server, strlen(server));
    put_text(l, ",\"event\":");
    put_string(l, event, strlen(event));
}

static bool wanted(const char *event)
{
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++)
        if (!strcmp(events[i], event))
            return true;
    return false;
}

static void on_line(const char *event, const char *fields, void *arg)
{
    struct line l;
    ssize_t r;
    (void)arg;
    if (!wanted(event))
        return;
    l.n = 0;
    put_head(&l, event);
    put_fields(&l, fields);
    l.text[l.n++] = '}';
    l.text[l.n++] = '\n';
    do
        r = write(file, l.text, l.n);
    while (r < 0 && errno == EINTR);
}

int event_log_open(const char *path, char *err, unsigned size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) {
        snprintf(err, size, "cannot open the event log %.200s: %s", path, strerror(errno));
        return KS_EIO;
    }
    file = fd;
    log_tap_set(on_line, NULL);
    return 0;
}

void event_log_name(const char *name)
{
    snprintf(server, sizeof server, "%s", name);
}
