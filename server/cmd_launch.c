/* cmd_launch.c - `keepstep launch`: its options, and where a run keeps its things. */
#include <errno.h>
#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "server/launch.h"

enum { SERVER_RESTARTS = 3, SERVER_PROCESSES_MAX = 64 };

static const struct cmd_option options[] = {
    {"--workers", "-n", NULL, "N", "workers to start (1)"},
    {"--servers", "-s", NULL, "N", "servers to start (1)"},
    CMD_OPTION_JOB,
    {"--coord", NULL, NULL, "URL", "coordination store (local:, in the data directory)"},
    CMD_OPTION_TOKEN,
    {"--mode", NULL, NULL, "MODE", "sync, ssp:S or async (sync)"},
    {"--durability", NULL, NULL, "WORD", "write (nothing is acknowledged before it is on disk) or none (write)"},
    {"--data", NULL, NULL, "DIR", "servers keep their data below it (a directory that is removed at the end)"},
    {"--restart-workers", NULL, NULL, "N", "start workers that fail again, N times in all (0)"},
    {"--restart-servers", NULL, NULL, "N", "likewise servers (3, none with durability=none)"},
    {"--no-servers", NULL, NULL, NULL, "only workers, for a job whose servers run already"},
    {"--log-dir", NULL, NULL, "DIR", "write DIR/w0.log, DIR/s0.log ... instead of lines that begin with [w0], [s0]"},
    {"--loops", NULL, NULL, "N", "event loops of each server (one a core)"},
    {"--memory", NULL, NULL, "BYTES", "limit of each server's buffers (none)"},
    {"--shards", NULL, NULL, "N", "number of shards (128)"},
    {"--chunk-bytes", NULL, NULL, "BYTES", "unit of sending and storing (1M)"},
    {"--deterministic", NULL, NULL, "on|off", "sum in member order: the same members give the same bits (off)"},
    {"--wait-for-server", NULL, NULL, "SECONDS", "end the job when a lost server does not return in time (0: never)"},
};
static const struct cmd cmd = {
    .name = "launch",
    .usage = "[-n WORKERS] [-s SERVERS] [OPTIONS] -- PROGRAM [ARGUMENTS]",
    .what = "Runs servers and workers of one job on this host, and ends when all workers have ended.",
    .more = "Workers find KEEPSTEP_COORD, _JOB, _TOKEN, _NAME (w0, w1 ...), _INDEX (0, 1 ...), _LAUNCHED (how many) and\n"
            "_RESTARTS in their environment. Exit status: 0 when all ended well, else that of the first worker that did\n"
            "not (128 + N: killed by signal N). SIGINT and SIGTERM are passed on; the second one kills.",
    .option = options,
    .n = sizeof options / sizeof options[0],
    .rest = true,
};

/* ---- options ---- */

static void pass_on(const struct cmd_args *a, struct launch *l)
{
    static const char *const names[] = {"--loops", "--memory", "--shards", "--chunk-bytes", "--deterministic",
                                        "--wait-for-server"};
    size_t n = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (!cmd_given(a, names[i]))
            continue;
        l->pass[n++] = names[i];
        l->pass[n++] = cmd_value(a, names[i]);
    }
    l->pass[n] = NULL;
}

static bool read_numbers(const struct cmd_args *a, struct launch *l)
{
    uint64_t workers = 1, servers = 1, again_servers = SERVER_RESTARTS, again_workers = 0;
    bool none = l->durability[0] == 'n';
    if (none)
        again_servers = 0;
    if (!cmd_number(a, "--workers", 1, MEMBERS_MAX, &workers) || !cmd_number(a, "--servers", 1, SERVER_PROCESSES_MAX, &servers) ||
        !cmd_number(a, "--restart-workers", 0, 1000000, &again_workers) ||
        !cmd_number(a, "--restart-servers", 0, 1000000, &again_servers))
        return false;
    if (none && again_servers) {
        cmd_usage_error(&cmd, "--restart-servers needs --durability write: without it a dead server's shards are lost");
        return false;
    }
    l->nworkers = (uint32_t)workers;
    l->nservers = cmd_given(a, "--no-servers") ? 0 : (uint32_t)servers;
    l->restarts_workers = (uint32_t)again_workers;
    l->restarts_servers = (uint32_t)again_servers;
    return true;
}

static bool read_words(const struct cmd_args *a, struct launch *l, char *job)
{
    static const char *const durability[] = {"write", "none"};
    uint32_t kept = 0;
    struct mode m;
    snprintf(job, NAME_MAX_BYTES, "default");
    if (!cmd_text(a, "--job", job, NAME_MAX_BYTES) || !cmd_word(a, "--durability", durability, 2, &kept) ||
        !cmd_mode(a, "--mode", &m))
        return false;
    l->job = job;
    l->durability = durability[kept];
    l->mode = cmd_given(a, "--mode") ? cmd_value(a, "--mode") : "sync";
    l->data = cmd_value(a, "--data");
    l->log_dir = cmd_value(a, "--log-dir");
    return true;
}

static bool read_token(const struct cmd_args *a, struct launch *l, char *token)
{
    uint8_t random[16];
    if (!cmd_token(a, token))
        return false;
    l->token = token;
    if (token[0] || l->nservers == 0)
        return true;
    if (getrandom(random, sizeof random, 0) != sizeof random) {
        cmd_fail(&cmd, "cannot make a token: %m");
        return false;
    }
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(token + 2 * i, 3, "%02x", random[i]);
    return true;
}

static bool check_together(const struct cmd_args *a, const struct launch *l)
{
    if (a->nrest == 0) {
        cmd_usage_error(&cmd, "which program? Usage: keepstep launch %s", cmd.usage);
        return false;
    }
    if (l->nservers == 0 && !cmd_given(a, "--coord") && !getenv("KEEPSTEP_COORD")) {
        cmd_usage_error(&cmd, "--no-servers needs --coord: where is the job?");
        return false;
    }
    if (l->nservers == 0 && (cmd_given(a, "--servers") || cmd_given(a, "--data"))) {
        cmd_usage_error(&cmd, "--no-servers goes with neither --servers nor --data");
        return false;
    }
    const char *coord;
    return !cmd_given(a, "--coord") || cmd_coord(a, &coord);
}

/* ---- places ---- */

static int make_directory(const char *path)
{
    if (mkdir(path, 0755) == 0 || errno == EEXIST)
        return 0;
    cmd_fail(&cmd, "cannot make the directory %.200s: %m", path);
    return -1;
}

static int remove_one(const char *path, const struct stat *s, int kind, struct FTW *at)
{
    (void)s;
    (void)kind;
    (void)at;
    return remove(path);
}

static int make_places(const struct cmd_args *a, struct launch *l)
{
    const char *coord = cmd_value(a, "--coord"), *tmp = getenv("TMPDIR");
    if (!coord && l->nservers == 0)
        coord = getenv("KEEPSTEP_COORD");
    if (l->log_dir && make_directory(l->log_dir))
        return -1;
    if (l->data && make_directory(l->data))
        return -1;
    if (l->data && !realpath(l->data, l->base)) {
        cmd_fail(&cmd, "cannot use the directory %.200s: %m", l->data);
        return -1;
    }
    if (!l->data) {
        snprintf(l->temp, sizeof l->temp, "%.4000s/keepstep-XXXXXX", tmp && *tmp ? tmp : "/tmp");
        if (!mkdtemp(l->temp)) {
            cmd_fail(&cmd, "cannot make a directory like %.200s: %m", l->temp);
            l->temp[0] = 0;
            return -1;
        }
        snprintf(l->base, sizeof l->base, "%s", l->temp);
    }
    if (coord)
        snprintf(l->coord, sizeof l->coord, "%s", coord);
    else
        snprintf(l->coord, sizeof l->coord, "local:%s/coord", l->base);
    return 0;
}

static void make_children(struct launch *l)
{
    l->n = l->nservers + l->nworkers;
    l->child = mem_alloc(l->n * sizeof *l->child);
    for (uint32_t i = 0; i < l->n; i++) {
        struct child *c = &l->child[i];
        c->is_server = i < l->nservers;
        c->index = c->is_server ? i : i - l->nservers;
        c->out.fd = c->err.fd = c->ready_fd = -1;
        snprintf(c->tag, sizeof c->tag, "%c%u", c->is_server ? 's' : 'w', c->index);
    }
}

int cmd_launch(int argc, char **argv)
{
    static char token[TOKEN_MAX_BYTES_CMD + 1], job[NAME_MAX_BYTES];
    static struct launch l;
    struct cmd_args a;
    enum cmd_parsed p = cmd_parse(&cmd, argc, argv, &a);
    if (p)
        return p == CMD_HELP ? 0 : CMD_USAGE;
    l.cmd = &cmd;
    l.program = a.rest;
    if (!read_words(&a, &l, job) || !read_numbers(&a, &l) || !read_token(&a, &l, token) || !check_together(&a, &l))
        return CMD_USAGE;
    pass_on(&a, &l);
    int status = CMD_FAILED;
    if (make_places(&a, &l) == 0) {
        make_children(&l);
        status = launch_run(&l);
        mem_free(l.child);
    }
    if (l.temp[0] && nftw(l.temp, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT))
        cmd_fail(&cmd, "could not remove %s: %m", l.temp);
    return status;
}
