/* rig.h - real processes over loopback: servers (`keepstep server`), members (forks of the test that use keepstep.h)
 * and a coordination store, in a directory of their own.
 *
 * Every wait has a deadline and watches all processes: one that ends without having been told to fails the test, with
 * the ends of all logs. What a member finds out it writes into memory shared with the test (rig_shared), so that
 * nothing is lost with a killed process. Everything ends with the test: rig_teardown stops, checks exit codes (and so
 * what sanitizers found), and removes; a test that dies takes its processes along.
 *
 * RIG_KEEP=1 keeps the directory; RIG_LOG sets KEEPSTEP_LOG of all processes. */
#ifndef TESTS_INTEGRATION_RIG_H
#define TESTS_INTEGRATION_RIG_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "base/clock.h"
#include "base/rng.h"
#include "worker/keepstep.h"

enum { RIG_SERVERS = 64, RIG_WORKERS = 512, RIG_ARGS = 48, RIG_TEXT = 512, RIG_MAPS = 64 };

struct rig_server {
    pid_t pid; /* 0: not running */
    unsigned starts;
    char ctl[64];                  /* its control address */
    const char *netns;             /* network namespace that it is started in; NULL: the test's */
    const char *listen, *data;     /* options; NULL: a free port of 127.0.0.1, and DIR/data-i */
    bool may_end;                  /* ending by itself does not fail the test; then `ended` and the wait status */
    bool ended;
    int status;
};
struct rig_worker {
    pid_t pid;
};
struct rig {
    char dir[128], coord[192], job[32], token[32];
    const char *args[RIG_ARGS];    /* of every server */
    unsigned nargs, nservers, nworkers, ncommands;
    struct rig_server server[RIG_SERVERS];
    struct rig_worker worker[RIG_WORKERS];
    const char *worker_netns;      /* of workers that are started from now on */
    int64_t timeout_ms;            /* of members' calls; 0: 30 s */
    struct { void *at; size_t size; } map[RIG_MAPS];
    unsigned nmaps;
};

/* For cmocka_unit_test_setup_teardown. The store is local:DIR unless rig_coord is called before the first server. */
int rig_setup(void **state);
int rig_teardown(void **state);
void rig_coord(struct rig *r, const char *url);
/* Seconds of patience, times what sanitizers cost. */
int64_t rig_ms(int64_t ms);
/* Zeroed memory that members share with the test. */
void *rig_shared(struct rig *r, size_t size);
/* Fails the test with this text and the logs. */
void rig_fail(struct rig *r, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5), noreturn));
#define RIG_FAIL(r, ...) rig_fail(r, __FILE__, __LINE__, __VA_ARGS__)
#define RIG_ASSERT(r, cond)                                                                                            \
    do {                                                                                                               \
        if (!(cond))                                                                                                   \
            RIG_FAIL(r, "not true: %s", #cond);                                                                        \
    } while (0)
/* Until the expression is true. */
#define RIG_UNTIL(r, cond) RIG_UNTIL_MS(r, cond, 30000)
#define RIG_UNTIL_MS(r, cond, ms)                                                                                      \
    do {                                                                                                               \
        uint64_t rig_end = clock_now_us() + (uint64_t)rig_ms(ms) * 1000;                                               \
        while (!(cond)) {                                                                                              \
            rig_look(r);                                                                                               \
            if (clock_now_us() > rig_end)                                                                              \
                RIG_FAIL(r, "still not true: %s", #cond);                                                              \
        }                                                                                                              \
    } while (0)
/* One millisecond in which everything that runs is looked at. */
void rig_look(struct rig *r);

/* ---- servers ---- */

/* Options of every server that is started from now on, up to NULL; the strings must stay. */
void rig_server_options(struct rig *r, const char *first, ...);
/* Starts server i ("s0", ..., data directory DIR/data-i) and waits until it serves. */
void rig_server_start(struct rig *r, unsigned i);
void rig_servers_start(struct rig *r, unsigned n);
/* With other last options (NULL: none); does not wait. */
void rig_server_launch(struct rig *r, unsigned i, const char *data, const char *more, const char *value);
void rig_server_kill(struct rig *r, unsigned i);
void rig_server_signal(struct rig *r, unsigned i, int number);
/* Until it serves after rig_server_launch. */
void rig_server_await(struct rig *r, unsigned i);
/* SIGTERM; it must end with status 0. */
void rig_server_stop(struct rig *r, unsigned i);
/* Waits until it ends by itself; ret_text (RIG_TEXT bytes): what it wrote since its last start, without log lines. */
int rig_server_end(struct rig *r, unsigned i, char *ret_text);
/* `keepstep WORD...` with the job's settings, words up to NULL: its exit status, and what it wrote (RIG_TEXT bytes), within
 * 30 s. What runs is looked at meanwhile. */
int rig_command(struct rig *r, char *ret_text, const char *word, ...);
/* KiB */
long rig_rss(pid_t pid);

/* ---- members ---- */

struct rig_self {
    struct rig *rig;
    unsigned index; /* of the worker */
    void *arg;
};
/* The function runs in a process of its own; returning ends it with status 0. */
unsigned rig_worker_start(struct rig *r, void (*fn)(struct rig_self *), void *arg);
void rig_worker_kill(struct rig *r, unsigned w);
void rig_worker_signal(struct rig *r, unsigned w, int number);
/* Waits until it has ended with status 0. */
void rig_worker_done(struct rig *r, unsigned w);
void rig_workers_done(struct rig *r);

/* ---- inside a member ---- */

struct ks_job *rig_open(struct rig_self *s);
void rig_die(const struct ks_job *j, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5), noreturn));
/* The member fails, and with it the test. */
#define RIG_MUST(j, cond)                                                                                              \
    do {                                                                                                               \
        if (!(cond))                                                                                                   \
            rig_die(j, __FILE__, __LINE__, "not true: %s", #cond);                                                     \
    } while (0)
#define RIG_OK(j, call)                                                                                                \
    do {                                                                                                               \
        int rig_rc = (call);                                                                                           \
        if (rig_rc != KS_OK)                                                                                           \
            rig_die(j, __FILE__, __LINE__, "%s gave %d", #call, rig_rc);                                               \
    } while (0)
#define RIG_GIVES(j, call, want)                                                                                       \
    do {                                                                                                               \
        int rig_rc = (call);                                                                                           \
        if (rig_rc != (want))                                                                                          \
            rig_die(j, __FILE__, __LINE__, "%s gave %d, not %s", #call, rig_rc, #want);                                \
    } while (0)
/* Until something that another process writes into shared memory is true. */
#define RIG_AWAIT(j, cond)                                                                                             \
    do {                                                                                                               \
        uint64_t rig_end = clock_now_us() + (uint64_t)rig_ms(30000) * 1000;                                            \
        while (!(cond)) {                                                                                              \
            rig_pause();                                                                                               \
            if (clock_now_us() > rig_end)                                                                              \
                rig_die(j, __FILE__, __LINE__, "still not true: %s", #cond);                                           \
        }                                                                                                              \
    } while (0)
void rig_pause(void);
/* Registers a one-dimensional tensor. */
struct ks_tensor *rig_tensor(struct ks_job *j, const char *name, enum ks_dtype dtype, uint64_t n, enum ks_kind kind,
                             const char *optimizer);

#endif
