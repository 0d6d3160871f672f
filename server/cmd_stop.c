/* cmd_stop.c - `keepstep stop`: asks the leader to end the job, waits until the view says so; --purge forgets it. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "server/cmd.h"
#include "server/operator.h"

enum { READ_MS = 2000, STOP_MS = 10000, ASK_MS = 2000, LOOK_MS = 50 };

static const struct cmd_option options[] = {
    CMD_OPTION_JOB,
    CMD_OPTION_COORD,
    CMD_OPTION_TOKEN,
    {"--reason", NULL, NULL, "TEXT", "why; members and servers show it"},
    {"--purge", NULL, NULL, NULL, "then delete the job's keys from the store: its name is free again"},
};
static const struct cmd cmd = {
    .name = "stop",
    .usage = "--coord URL [--job NAME] [OPTIONS]",
    .what = "Ends a job: its servers exit, its members get an error that says why.",
    .more = "Data directories stay. --purge also works for a job whose servers are gone.",
    .option = options,
    .n = sizeof options / sizeof options[0],
};

static void pause_ms(uint32_t ms)
{
    nanosleep(&(struct timespec){ms / 1000, (long)(ms % 1000) * 1000000}, NULL);
}

/* Asks until the view says that the job has ended. The leader may change meanwhile. */
static int end_job(struct operator *o, const char *reason, struct job_state *s, char *err)
{
    uint64_t until = clock_now_us() + (uint64_t)STOP_MS * 1000, asked = 0;
    snprintf(err, ERR_TEXT, "no server leads the job");
    while (!(s->view && s->view->ended[0])) {
        if (clock_now_us() >= until)
            return -1;
        if (s->has_leader && asked != s->leader.server.id) {
            int r = operator_stop(o, s->leader.server.ctl, reason, ASK_MS, err);
            if (r == KS_EAUTH)
                return -1;
            if (!r) {
                asked = s->leader.server.id;
                snprintf(err, ERR_TEXT, "the leader %.60s has not ended it within %d s", s->leader.server.name,
                         STOP_MS / 1000);
            }
        }
        pause_ms(LOOK_MS);
        job_state_done(s);
        char text[ERR_TEXT];
        if (operator_read(o, READ_MS, s, text)) {
            snprintf(err, ERR_TEXT, "%s", text);
            return -1;
        }
    }
    return 0;
}

static int stop(struct operator *o, const char *job, const char *reason, bool purge)
{
    struct job_state s;
    char err[ERR_TEXT];
    if (operator_read(o, READ_MS, &s, err))
        return cmd_fail(&cmd, "%s", err);
    int status = 0;
    bool alive = s.has_leader || s.nservers;
    if (s.nkeys == 0)
        status = cmd_fail(&cmd, "there is no job '%s' in this store", job);
    else if (!alive && !purge && !(s.view && s.view->ended[0]))
        status = cmd_fail(&cmd, "job '%s' has no server now: start one, or forget the job with --purge", job);
    else if (alive && end_job(o, reason, &s, err))
        status = cmd_fail(&cmd, "job '%s' was not stopped: %s", job, err);
    else if (purge && operator_forget(o, &s, READ_MS, err))
        status = cmd_fail(&cmd, "job '%s' could not be forgotten: %s", job, err);
    if (!status)
        printf("job %s: %s%s\n", job, s.view && s.view->ended[0] ? s.view->ended : "had no servers",
               purge ? "; forgotten" : "");
    job_state_done(&s);
    return status;
}

int cmd_stop(int argc, char **argv)
{
    static char token[TOKEN_MAX_BYTES_CMD + 1];
    char job[NAME_MAX_BYTES] = "default", err[ERR_TEXT];
    struct cmd_args a;
    struct operator *o;
    struct operator_config c = {.job = job, .token = token};
    enum cmd_parsed p = cmd_parse(&cmd, argc, argv, &a);
    if (p)
        return p == CMD_HELP ? 0 : CMD_USAGE;
    if (!cmd_text(&a, "--job", job, sizeof job) || !cmd_coord(&a, &c.coord) || !cmd_token(&a, token))
        return CMD_USAGE;
    const char *reason = cmd_value(&a, "--reason");
    log_init("stop");
    log_level_set(LOG_OFF);
    signal(SIGPIPE, SIG_IGN);
    if (operator_open(&c, &o, err))
        return cmd_fail(&cmd, "%s", err);
    int status = stop(o, job, reason ? reason : "", cmd_given(&a, "--purge"));
    operator_close(o);
    return status;
}
