/* cmd_server.c - `keepstep server`: lives of one server process, one after the other. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "server/cmd.h"
#include "server/event_log.h"
#include "server/host.h"
#include "wire/frame.h"

enum {
    SHARDS = 128,
    CHUNK_BYTES = 1 << 20,
    LIVES_MAX = 8,                 /* that were fenced one soon after the other */
    LIFE_LONG_US = 30 * 1000000,
    FILES = 64,                    /* descriptors of a server without loops and connections */
    FILES_LOOP = 16,
    PAUSE_MS = 200,
    PAUSE_MS_MAX = 5000,
};

static const struct cmd_option options[] = {
    CMD_OPTION_JOB,
    CMD_OPTION_COORD,
    CMD_OPTION_TOKEN,
    {"--data", NULL, "KEEPSTEP_DATA", "DIR", "where this server keeps its shards (needed with durability=write)"},
    {"--listen", NULL, "KEEPSTEP_LISTEN", "HOST:PORT",
     "control port; loops take the next ports, or free ones with port 0 (127.0.0.1:0)"},
    {"--advertise", NULL, "KEEPSTEP_ADVERTISE", "HOST", "host name that others reach it by (of --listen)"},
    {"--name", NULL, "KEEPSTEP_NAME", "NAME", "of this server, over its lives (as in the data directory, or host:pid)"},
    {"--loops", NULL, "KEEPSTEP_LOOPS", "N", "event loops (as in the data directory, or one a core)"},
    {"--memory", NULL, "KEEPSTEP_MEMORY", "BYTES", "limit of its buffers, with K, M or G (none)"},
    {"--notice", NULL, "KEEPSTEP_NOTICE", "SECONDS",
     "after SIGTERM: time to give its shards to other servers before it ends (25)"},
    {"--event-log", NULL, "KEEPSTEP_EVENT_LOG", "FILE",
     "append what happens to servers and views, a JSON object a line (none)"},
    {"--ready-file", NULL, NULL, "FILE", "written with the control address when it serves"},
    {"--servers", NULL, "KEEPSTEP_SERVERS", "N", "new job: servers to wait for before it starts (1)"},
    {"--members", NULL, "KEEPSTEP_MEMBERS", "N", "new job: members to wait for before its first step (1)"},
    {"--mode", NULL, "KEEPSTEP_MODE", "MODE", "new job: sync, ssp:S or async (sync)"},
    {"--durability", NULL, "KEEPSTEP_DURABILITY", "WORD",
     "new job: write (nothing is acknowledged before it is on disk) or none (write)"},
    {"--deterministic", NULL, "KEEPSTEP_DETERMINISTIC", "on|off", "new job: sum in member order, same bits (off)"},
    {"--shards", NULL, "KEEPSTEP_SHARDS", "N", "new job: number of shards (128)"},
    {"--chunk-bytes", NULL, "KEEPSTEP_CHUNK_BYTES", "BYTES", "new job: unit of sending and storing (1M)"},
    {"--replicas", NULL, "KEEPSTEP_REPLICAS", "N",
     "new job: backups of each shard, 0 to 2 (1 with two or more --servers, else 0)"},
    {"--min-replicas", NULL, "KEEPSTEP_MIN_REPLICAS", "N", "new job: with fewer backups than this, steps stop (0)"},
    {"--wait-for-server", NULL, "KEEPSTEP_WAIT_FOR_SERVER", "SECONDS",
     "new job: end it when a lost server does not return in time (0: wait for ever)"},
};
static const struct cmd cmd = {
    .name = "server",
    .usage = "--coord URL [--data DIR] [OPTIONS]",
    .what = "Holds shards of a job until SIGTERM, or until the job is stopped.",
    .more = "Options of a new job count for the first server, which creates the job; a later server that gives one must\n"
            "agree (--members, --mode and --wait-for-server of a later one are ignored). Errors: one line, status 1\n"
            "(2: of usage). Logs go to stderr (KEEPSTEP_LOG=debug|info|warn|error|off).",
    .option = options,
    .n = sizeof options / sizeof options[0],
};

static void set_bit(const struct cmd_args *a, const char *name, uint32_t bit, uint32_t *set)
{
    if (cmd_given(a, name))
        *set |= bit;
}

static void set_bits(const struct cmd_args *a, struct host_config *c)
{
    set_bit(a, "--shards", JOB_SHARDS, &c->job_set);
    set_bit(a, "--chunk-bytes", JOB_CHUNK, &c->job_set);
    set_bit(a, "--servers", JOB_SERVERS, &c->job_set);
    set_bit(a, "--members", JOB_MEMBERS, &c->job_set);
    set_bit(a, "--deterministic", JOB_DETERMINISTIC, &c->job_set);
    set_bit(a, "--durability", JOB_DURABILITY, &c->job_set);
    set_bit(a, "--replicas", JOB_REPLICAS, &c->job_set);
    set_bit(a, "--min-replicas", JOB_REPLICAS_MIN, &c->job_set);
    set_bit(a, "--mode", JOB_MODE, &c->job_set);
    set_bit(a, "--wait-for-server", JOB_WAIT, &c->job_set);
}

static bool read_job(const struct cmd_args *a, struct job_doc *j)
{
    static const char *const durability[] = {"write", "none"}, *const switched[] = {"off", "on"};
    uint64_t shards = SHARDS, chunk = CHUNK_BYTES, servers = 1, members = 1, wait = 0;
    uint32_t kept = 0, ordered = 0;
    snprintf(j->job, sizeof j->job, "default");
    j->mode.kind = MODE_SYNC;
    if (!cmd_text(a, "--job", j->job, sizeof j->job) || !cmd_number(a, "--shards", 1, SHARDS_MAX, &shards) ||
        !cmd_size(a, "--chunk-bytes", &chunk) || !cmd_number(a, "--servers", 1, 1024, &servers) ||
        !cmd_number(a, "--members", 0, MEMBERS_MAX, &members) || !cmd_word(a, "--durability", durability, 2, &kept) ||
        !cmd_word(a, "--deterministic", switched, 2, &ordered) || !cmd_mode(a, "--mode", &j->mode) ||
        !cmd_number(a, "--wait-for-server", 0, 1000000, &wait))
        return false;
    uint64_t replicas = servers >= 2 ? 1 : 0, least = 0;
    if (!cmd_number(a, "--replicas", 0, BACKUPS_MAX, &replicas) || !cmd_number(a, "--min-replicas", 0, BACKUPS_MAX, &least))
        return false;
    if (least > replicas) {
        cmd_usage_error(&cmd, "--min-replicas is %u: wanted is at most --replicas, %u", (unsigned)least, (unsigned)replicas);
        return false;
    }
    if (chunk < CHUNK_BYTES_MIN || chunk > CHUNK_BYTES_MAX || chunk % 8) {
        cmd_usage_error(&cmd, "--chunk-bytes is %llu: wanted is a multiple of 8 from %d to %dM", (unsigned long long)chunk,
                        CHUNK_BYTES_MIN, CHUNK_BYTES_MAX >> 20);
        return false;
    }
    j->nshards = (uint32_t)shards;
    j->chunk_bytes = (uint32_t)chunk;
    j->servers_min = (uint32_t)servers;
    j->members_min = (uint32_t)members;
    j->wait_for_server_s = (uint32_t)wait;
    j->replicas = (uint32_t)replicas;
    j->replicas_min = (uint32_t)least;
    j->deterministic = ordered;
    snprintf(j->durability, sizeof j->durability, "%s", durability[kept]);
    return true;
}

static bool read_address(const struct cmd_args *a, struct host_config *c)
{
    const char *v = cmd_value(a, "--listen"), *colon = v ? strrchr(v, ':') : NULL;
    c->listen = v ? v : "127.0.0.1:0";
    c->advertise = cmd_value(a, "--advertise");
    if (v && (!colon || colon == v || !colon[1] || strspn(colon + 1, "0123456789") != strlen(colon + 1))) {
        cmd_usage_error(&cmd, "--listen is '%.100s': wanted is HOST:PORT", v);
        return false;
    }
    if (c->advertise && strlen(c->advertise) > 40) {
        cmd_usage_error(&cmd, "--advertise has more than 40 bytes");
        return false;
    }
    return true;
}

static bool read_config(const struct cmd_args *a, struct host_config *c, char *token, char *name)
{
    uint64_t loops = 0, memory = 0, notice = 25;
    if (!read_job(a, &c->job) || !cmd_coord(a, &c->coord) || !cmd_token(a, token) || !read_address(a, c) ||
        !cmd_number(a, "--loops", 1, LOOPS_MAX, &loops) || !cmd_size(a, "--memory", &memory) ||
        !cmd_number(a, "--notice", 0, 86400, &notice) || !cmd_text(a, "--name", name, NAME_MAX_BYTES))
        return false;
    c->token = token;
    c->name = name[0] ? name : NULL;
    c->data = cmd_value(a, "--data");
    c->ready_file = cmd_value(a, "--ready-file");
    c->loops = (uint32_t)loops;
    c->memory_max = memory;
    c->notice_s = (uint32_t)notice;
    set_bits(a, c);
    return true;
}

/* true: a signal to end came. */
static bool pause_ms(uint32_t ms)
{
    sigset_t ends, before;
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, &before);
    int r = sigtimedwait(&ends, NULL, &t);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return r > 0;
}

static int live(const struct host_config *c)
{
    char text[512];
    uint32_t pause = PAUSE_MS, soon = 0;
    for (;;) {
        uint64_t began = clock_now_us();
        enum host_end end = host_run(c, text);
        if (end == HOST_STOPPED)
            return 0;
        if (end == HOST_FAILED)
            return cmd_fail(&cmd, "%s", text);
        bool was_long = clock_now_us() - began > LIFE_LONG_US;
        soon = was_long ? 0 : soon + 1;
        pause = was_long ? PAUSE_MS : pause;
        if (soon == LIVES_MAX)
            return cmd_fail(&cmd, "removed from the job %d times in a row, the last time: %s", LIVES_MAX, text);
        log_warn("new_life", "pause_ms=%u", pause);
        if (pause_ms(pause))
            return 0;
        pause = pause * 2 < PAUSE_MS_MAX ? pause * 2 : PAUSE_MS_MAX;
    }
}

/* A connection takes a descriptor, and the usual soft limit is less than what a large job needs. */
static int files_allow(uint32_t loops)
{
    struct rlimit l;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t least = FILES + FILES_LOOP * (uint64_t)(loops ? loops : cores > 0 ? (uint32_t)cores : 1);
    if (getrlimit(RLIMIT_NOFILE, &l))
        return 0;
    l.rlim_cur = l.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &l);
    (void)getrlimit(RLIMIT_NOFILE, &l);
    if (l.rlim_cur >= least)
        return 0;
    return cmd_fail(&cmd, "at most %llu files may be open (ulimit -n); wanted are %llu, and one for each connection",
                    (unsigned long long)l.rlim_cur, (unsigned long long)least);
}

int cmd_server(int argc, char **argv)
{
    static char token[TOKEN_MAX_BYTES_CMD + 1], who[NAME_MAX_BYTES + 8], name[NAME_MAX_BYTES];
    struct cmd_args a;
    struct host_config c = {0};
    enum cmd_parsed p = cmd_parse(&cmd, argc, argv, &a);
    if (p)
        return p == CMD_HELP ? 0 : CMD_USAGE;
    if (!read_config(&a, &c, token, name))
        return CMD_USAGE;
    snprintf(who, sizeof who, "server%s%s", name[0] ? ":" : "", name);
    log_init(who);
    const char *events = cmd_value(&a, "--event-log");
    char err[256];
    if (events && event_log_open(events, err, sizeof err))
        return cmd_fail(&cmd, "%s", err);
    signal(SIGPIPE, SIG_IGN);
    int r = files_allow(c.loops);
    return r ? r : live(&c);
}
