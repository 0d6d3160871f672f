/* cmd_drain.c - `keepstep drain SERVER`: moves everything that a server holds to others, waits until the view lists it no more. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "server/cmd.h"
#include "server/operator.h"

enum { READ_MS = 2000, ASK_MS = 2000, LOOK_MS = 50, TELL_US = 2000000, WAIT_S = 300 };

static const struct cmd_option options[] = {
    CMD_OPTION_JOB,
    CMD_OPTION_COORD,
    CMD_OPTION_TOKEN,
    {"--timeout", NULL, NULL, "SECONDS", "how long to wait until it holds nothing (300)"},
};
static const struct cmd cmd = {
    .name = "drain",
    .usage = "--coord URL [--job NAME] [OPTIONS] SERVER",
    .what = "Moves everything that a server holds to other servers while training goes on; then it ends.",
    .more = "SERVER is a name or an id that 'keepstep status' shows. SIGTERM to a server does the same within --notice.",
    .option = options,
    .n = sizeof options / sizeof options[0],
    .rest = true,
};

static const struct view_server *find(const struct job_state *s, const char *word)
{
    char id[24];
    for (uint32_t i = 0; s->view && i < s->view->nservers; i++) {
        const struct view_server *v = &s->view->server[i];
        snprintf(id, sizeof id, "%llu", (unsigned long long)v->id);
        if (!strcmp(v->name, word) || !strcmp(id, word))
            return v;
    }
    return NULL;
}

static uint32_t holds(const struct view *v, uint64_t id)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < v->nshards; i++) {
        const struct view_shard *s = &v->shard[i];
        bool here = s->primary == id;
        for (uint32_t k = 0; k < s->nbackups; k++)
            here |= s->backup[k] == id;
        n += here;
    }
    return n;
}

/* Tells the leader, whoever it is by then, until the server is out of the view. */
static int wait_drained(struct operator *o, uint64_t id, const char *name, uint64_t timeout_s)
{
    uint64_t until = clock_now_us() + timeout_s * 1000000, told = 0;
    uint32_t left = UINT32_MAX;
    for (;;) {
        struct job_state s;
        char err[ERR_TEXT];
        if (operator_read(o, READ_MS, &s, err))
            return cmd_fail(&cmd, "%s", err);
        bool listed = s.view && view_server_find(s.view, id);
        uint32_t now = listed ? holds(s.view, id) : 0;
        if (listed && now != left)
            printf("server %s: %u shards left\n", name, now);
        left = now;
        if (listed && s.has_leader && clock_now_us() - told > TELL_US) {
            told = clock_now_us();
            (void)operator_drain(o, s.leader.server.ctl, id, ASK_MS, err);
        }
        job_state_done(&s);
        if (!listed)
            break;
        if (clock_now_us() >= until)
            return cmd_fail(&cmd, "server '%s' still holds %u shards after %llu s: are there other servers to take them?", name,
                            left, (unsigned long long)timeout_s);
        nanosleep(&(struct timespec){0, LOOK_MS * 1000000}, NULL);
    }
    printf("server %s: drained\n", name);
    return 0;
}

static int drain(struct operator *o, const char *job, const char *word, uint64_t timeout_s)
{
    struct job_state s;
    char err[ERR_TEXT], name[NAME_MAX_BYTES] = "";
    if (operator_read(o, READ_MS, &s, err))
        return cmd_fail(&cmd, "%s", err);
    const struct view_server *v = find(&s, word);
    uint64_t id = v ? v->id : 0;
    uint32_t servers = s.view ? s.view->nservers : 0;
    if (v)
        snprintf(name, sizeof name, "%s", v->name);
    job_state_done(&s);
    if (!id)
        return cmd_fail(&cmd, "job '%s' has no server '%.60s': 'keepstep status' lists them", job, word);
    if (servers < 2)
        return cmd_fail(&cmd, "server '%s' is the only one of job '%s': start another one first", name, job);
    return wait_drained(o, id, name, timeout_s);
}

int cmd_drain(int argc, char **argv)
{
    static char token[TOKEN_MAX_BYTES_CMD + 1];
    char job[NAME_MAX_BYTES] = "default", err[ERR_TEXT];
    uint64_t timeout = WAIT_S;
    struct cmd_args a;
    struct operator *o;
    struct operator_config c = {.job = job, .token = token};
    enum cmd_parsed p = cmd_parse(&cmd, argc, argv, &a);
    if (p)
        return p == CMD_HELP ? 0 : CMD_USAGE;
    if (!cmd_text(&a, "--job", job, sizeof job) || !cmd_coord(&a, &c.coord) || !cmd_token(&a, token) ||
        !cmd_number(&a, "--timeout", 1, 86400, &timeout))
        return CMD_USAGE;
    if (a.nrest != 1)
        return cmd_usage_error(&cmd, "wanted is one SERVER, after the options");
    log_init("drain");
    log_level_set(LOG_OFF);
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (operator_open(&c, &o, err))
        return cmd_fail(&cmd, "%s", err);
    int status = drain(o, job, a.rest[0], timeout);
    operator_close(o);
    return status;
}
