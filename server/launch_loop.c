#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/mem.h"
#include "server/launch.h"

enum { READY_MS = 30000, STOP_MS = 10000 };

static void complain(struct launch *l, int status)
{
    if (!l->bad)
        l->bad = status;
}

static uint32_t running(const struct launch *l, bool servers)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < l->n; i++)
        n += l->child[i].running && l->child[i].is_server == servers;
    return n;
}

static void signal_all(struct launch *l, bool servers, int number)
{
    for (uint32_t i = 0; i < l->n; i++)
        if (l->child[i].is_server == servers)
            child_signal(&l->child[i], number);
}

static void kill_all(struct launch *l)
{
    l->killed = true;
    signal_all(l, false, SIGKILL);
    signal_all(l, true, SIGKILL);
}

/* ---- what happens ---- */

/* The first signal is the workers'; servers follow when the workers have ended. The second ends it. */
static void on_signal(struct launch *l, int number)
{
    if (number == SIGCHLD)
        return;
    if (l->interrupted || l->stopping) {
        kill_all(l);
        return;
    }
    l->interrupted = number;
    fprintf(stderr, "keepstep launch: SIG%s: ending the workers; once more kills them\n", sigabbrev_np(number));
    signal_all(l, false, number);
}

static void read_signals(struct launch *l)
{
    struct signalfd_siginfo s;
    while (read(l->signal_fd, &s, sizeof s) == sizeof s)
        on_signal(l, (int)s.ssi_signo);
}

static bool start_again(struct launch *l, struct child *c, const char *how)
{
    uint32_t *budget = c->is_server ? &l->restarts_servers : &l->restarts_workers;
    char err[LAUNCH_ERR];
    /* A server that never served would fail the same way again. */
    if (l->interrupted || l->killed || *budget == 0 || (c->is_server && !c->once_ready))
        return false;
    --*budget;
    l->restarted++;
    fprintf(stderr, "keepstep launch: %s %s: starting it again (%u left)\n", c->tag, how, *budget);
    if (child_start(l, c, err) == 0)
        return true;
    fprintf(stderr, "keepstep launch: %s\n", err);
    return false;
}

static void on_worker_end(struct launch *l, struct child *c, const char *how)
{
    if (child_ended_well(c) || start_again(l, c, how))
        return;
    fprintf(stderr, "keepstep launch: %s %s\n", c->tag, how);
    complain(l, child_exit_status(c));
}

static void on_server_end(struct launch *l, struct child *c, const char *how)
{
    if (l->stopping || l->killed) {
        if (!child_ended_well(c) && !l->killed) {
            fprintf(stderr, "keepstep launch: %s %s\n", c->tag, how);
            complain(l, 1);
        }
        return;
    }
    if (!child_ended_well(c) && start_again(l, c, how))
        return;
    fprintf(stderr, "keepstep launch: %s %s and is not started again: ending the workers\n", c->tag, how);
    complain(l, 1);
    if (!l->interrupted) {
        l->interrupted = SIGTERM;
        signal_all(l, false, SIGTERM);
    }
}

static void reap(struct launch *l)
{
    char how[64];
    for (uint32_t i = 0; i < l->n; i++) {
        struct child *c = &l->child[i];
        if (!child_reap(l, c))
            continue;
        child_describe(c, how, sizeof how);
        if (c->is_server)
            on_server_end(l, c, how);
        else
            on_worker_end(l, c, how);
    }
}

static void on_ready(struct child *c)
{
    char line[256];
    ssize_t n = read(c->ready_fd, line, sizeof line);
    c->ready = n > 0;
    c->once_ready |= c->ready;
    close(c->ready_fd);
    c->ready_fd = -1;
}

/* ---- one round of waiting ---- */

static uint32_t add(struct pollfd *p, uint32_t n, int fd)
{
    p[n] = (struct pollfd){.fd = fd, .events = POLLIN};
    return n + (fd >= 0);
}

/* Waits until something happens or `until_us`, and does what follows. */
static void turn(struct launch *l, uint64_t until_us)
{
    struct pollfd *p = mem_alloc((l->n * 3 + 1) * sizeof *p);
    uint64_t now = clock_now_us();
    uint32_t n = add(p, 0, l->signal_fd), at = 1;
    int ms = until_us == UINT64_MAX ? -1 : until_us <= now ? 0 : (int)((until_us - now) / 1000 + 1);
    bool heard = true;
    for (uint32_t i = 0; i < l->n; i++) {
        n = add(p, n, l->child[i].out.fd);
        n = add(p, n, l->child[i].err.fd);
        n = add(p, n, l->child[i].ready_fd);
    }
    bool happened = poll(p, n, ms) > 0;
    for (uint32_t i = 0; happened && i < l->n; i++) {
        struct child *c = &l->child[i];
        if (c->out.fd >= 0 && p[at++].revents)
            heard &= stream_pump(&c->out, c->tag, false);
        if (c->err.fd >= 0 && p[at++].revents)
            heard &= stream_pump(&c->err, c->tag, false);
        if (c->ready_fd >= 0 && p[at++].revents)
            on_ready(c);
    }
    mem_free(p);
    read_signals(l);
    reap(l);
    if (!heard && !l->interrupted)
        on_signal(l, SIGTERM);
}

/* ---- from start to end ---- */

static int signals_open(struct launch *l)
{
    sigset_t s;
    sigemptyset(&s);
    sigaddset(&s, SIGINT);
    sigaddset(&s, SIGTERM);
    sigaddset(&s, SIGHUP);
    sigaddset(&s, SIGCHLD);
    sigprocmask(SIG_BLOCK, &s, NULL);
    signal(SIGPIPE, SIG_IGN);
    l->signal_fd = signalfd(-1, &s, SFD_CLOEXEC | SFD_NONBLOCK);
    return l->signal_fd < 0 ? -1 : 0;
}

static uint32_t not_ready(const struct launch *l)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < l->n; i++)
        n += l->child[i].is_server && !l->child[i].once_ready;
    return n;
}

static bool start_kind(struct launch *l, bool servers)
{
    char err[LAUNCH_ERR];
    for (uint32_t i = 0; i < l->n && !l->interrupted; i++) {
        if (l->child[i].is_server != servers || child_start(l, &l->child[i], err) == 0)
            continue;
        fprintf(stderr, "keepstep launch: %s\n", err);
        complain(l, 1);
        return false;
    }
    return true;
}

static bool start_servers(struct launch *l)
{
    uint64_t until = clock_now_us() + (uint64_t)READY_MS * 1000;
    if (!start_kind(l, true))
        return false;
    while (not_ready(l) && !l->interrupted && clock_now_us() < until)
        turn(l, until);
    if (not_ready(l) && !l->interrupted) {
        fprintf(stderr, "keepstep launch: %u of %u servers do not serve after %d s\n", not_ready(l), l->nservers,
                READY_MS / 1000);
        complain(l, 1);
    }
    return not_ready(l) == 0 && !l->interrupted;
}

static void stop_all(struct launch *l)
{
    while (running(l, false))
        turn(l, UINT64_MAX);
    l->stopping = true;
    signal_all(l, true, SIGTERM);
    l->kill_at_us = clock_now_us() + (uint64_t)STOP_MS * 1000;
    while (running(l, true)) {
        if (clock_now_us() >= l->kill_at_us && !l->killed) {
            fprintf(stderr, "keepstep launch: servers did not end within %d s after SIGTERM: killing them\n",
                    STOP_MS / 1000);
            complain(l, 1);
            kill_all(l);
        }
        turn(l, l->killed ? UINT64_MAX : l->kill_at_us);
    }
}

static int summary(struct launch *l, uint64_t began)
{
    uint32_t well = 0;
    for (uint32_t i = 0; i < l->n; i++)
        well += !l->child[i].is_server && l->child[i].starts && child_ended_well(&l->child[i]);
    if (l->interrupted)
        complain(l, 128 + l->interrupted);
    fprintf(stderr, "keepstep launch: %u of %u workers ended well, %u restarts, %.1f s\n", well, l->nworkers, l->restarted,
            (double)(clock_now_us() - began) / 1e6);
    return l->bad;
}

int launch_run(struct launch *l)
{
    uint64_t began = clock_now_us();
    if (signals_open(l))
        return cmd_fail(l->cmd, "cannot watch signals: %m");
    if (start_servers(l) && !start_kind(l, false))
        signal_all(l, false, SIGTERM);
    stop_all(l);
    close(l->signal_fd);
    return summary(l, began);
}
