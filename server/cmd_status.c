/* cmd_status.c - `keepstep status`. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/cmd.h"
#include "server/status.h"

enum { ASK_MS = 2000, WATCH_S = 2 };

static const struct cmd_option options[] = {
    CMD_OPTION_JOB,
    CMD_OPTION_COORD,
    CMD_OPTION_TOKEN,
    {"--json", NULL, NULL, NULL, "one JSON object (with --watch: one a line)"},
    {"--watch", NULL, NULL, "[SECONDS]", "again and again (2), with rates"},
};
static const struct cmd cmd = {
    .name = "status",
    .usage = "--coord URL [--job NAME] [OPTIONS]",
    .what = "Shows a job: its servers, its members, and who waits for whom.",
    .more = "A server that does not answer within 2 s is shown as unreachable. Status 1: the store does not answer, there is\n"
            "no such job, or a server of the view is unreachable.",
    .option = options,
    .n = sizeof options / sizeof options[0],
};

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
    (void)number;
    interrupted = 1;
}

static void show(const struct picture *p, bool json, bool again)
{
    if (json) {
        char *doc = picture_json(p);
        puts(doc);
        mem_free(doc);
    } else {
        /* Home and clear to the end: no flicker. */
        if (again && isatty(1))
            fputs("\033[H\033[J", stdout);
        picture_print(p, stdout);
        if (again && !isatty(1))
            putchar('\n');
    }
    fflush(stdout);
}

static int judge(const struct picture *p)
{
    for (uint32_t i = 0; i < p->nservers; i++)
        if (p->server[i].in_view && !p->server[i].doc && !p->state.view->ended[0])
            return CMD_FAILED;
    return 0;
}

static int look(struct operator *o, const char *job, bool json, bool watch, uint64_t seconds, struct picture *last)
{
    struct picture now;
    char err[ERR_TEXT];
    if (picture_take(o, ASK_MS, last->taken_us ? last : NULL, &now, err))
        return cmd_fail(&cmd, "%s", err);
    picture_done(last);
    *last = now;
    if (!now.state.has_job)
        return cmd_fail(&cmd, "there is no job '%s' in this store", job);
    show(last, json, watch);
    if (watch)
        nanosleep(&(struct timespec){(time_t)seconds, 0}, NULL);
    return judge(last);
}

int cmd_status(int argc, char **argv)
{
    static char token[TOKEN_MAX_BYTES_CMD + 1];
    char job[NAME_MAX_BYTES] = "default", err[ERR_TEXT];
    struct cmd_args a;
    struct operator *o;
    struct operator_config c = {.job = job, .token = token};
    struct picture last = {0};
    uint64_t seconds = WATCH_S;
    enum cmd_parsed p = cmd_parse(&cmd, argc, argv, &a);
    if (p)
        return p == CMD_HELP ? 0 : CMD_USAGE;
    bool watch = cmd_given(&a, "--watch"), json = cmd_given(&a, "--json");
    if (!cmd_text(&a, "--job", job, sizeof job) || !cmd_coord(&a, &c.coord) || !cmd_token(&a, token) ||
        (watch && cmd_value(&a, "--watch")[0] && !cmd_number(&a, "--watch", 1, 3600, &seconds)))
        return CMD_USAGE;
    log_init("status");
    log_level_set(LOG_OFF);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    if (operator_open(&c, &o, err))
        return cmd_fail(&cmd, "%s", err);
    int status = look(o, job, json, watch, seconds, &last);
    while (watch && !interrupted && last.state.has_job && !ferror(stdout))
        status = look(o, job, json, watch, seconds, &last);
    picture_done(&last);
    operator_close(o);
    return watch && interrupted ? 0 : status;
}
