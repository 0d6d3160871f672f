/* launch.h - the inside of `keepstep launch`: servers and workers of one job as children of this process.
 *
 * One thread. Children run in process groups of their own, so that Ctrl-C reaches them through us only, and die with
 * us (PR_SET_PDEATHSIG). SIGINT, SIGTERM, SIGHUP and SIGCHLD are blocked and read from a signalfd. */
#ifndef SERVER_LAUNCH_H
#define SERVER_LAUNCH_H

#include <limits.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "server/cmd.h"

enum { LAUNCH_ERR = 512, LINE_BYTES = 4096, LAUNCH_PATH = PATH_MAX + 64 };

/* What a child writes, in whole lines with its name before each. */
struct stream {
    int fd;                        /* -1: closed */
    FILE *to;
    size_t n;
    char line[LINE_BYTES];
};
struct child {
    char tag[16];                  /* "w0", "s1" */
    bool is_server, running, ready, once_ready;
    uint32_t index, starts;
    pid_t pid;                     /* also its process group */
    int status;                    /* of waitpid, of the life that ended last */
    int ready_fd;                  /* servers: a line comes when it serves; -1 */
    struct stream out, err;
};
struct launch {
    const struct cmd *cmd;
    char **program;                /* NULL-terminated */
    uint32_t nservers, nworkers, restarts_servers, restarts_workers;
    const char *job, *token, *data, *log_dir, *mode, *durability;
    const char *pass[16];          /* more options for servers, NULL-terminated */
    char coord[LAUNCH_PATH + 8], base[LAUNCH_PATH];   /* base: data directories are below */
    char temp[PATH_MAX];           /* to remove at the end; "": none */
    struct child *child;           /* servers first */
    uint32_t n;
    int signal_fd;
    int interrupted;               /* the signal that asked us to end; 0: none */
    bool stopping;                 /* servers were told to end */
    bool killed;
    uint64_t kill_at_us;           /* servers that do not end by then are killed */
    uint32_t restarted;
    int bad;                       /* exit status of the first that ended badly */
};

/* ---- launch_child.c ---- */
/* 0, or a line in err (LAUNCH_ERR bytes). The worker's program not being there is such a failure. */
int child_start(struct launch *l, struct child *c, char *err);
/* Has it ended? Takes its status, and what it wrote before. */
bool child_reap(struct launch *l, struct child *c);
void child_signal(const struct child *c, int number);
/* Copies what is there. false: the reader of our own output is gone. */
bool stream_pump(struct stream *s, const char *tag, bool to_its_end);
/* "ended with status 3", "was killed by SIGKILL" */
void child_describe(const struct child *c, char *out, size_t size);
bool child_ended_well(const struct child *c);
int child_exit_status(const struct child *c);

/* ---- launch_loop.c ---- */
/* Runs everything to its end; returns the exit status. */
int launch_run(struct launch *l);

#endif
