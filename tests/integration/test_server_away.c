/* A server is killed and stays away, comes back, or comes back with the wrong data. */
#include "tests/integration/rig.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MEMBERS = 2, SERVERS = 2, N = 256, SHORT_MS = 700, SILENT_TIMEOUTS = 6 };

struct world {
    _Atomic int64_t steps[MEMBERS];
    _Atomic int timed_out, ended;
    _Atomic bool server_away, stop;
};
struct task {
    struct world *w;
    unsigned slot;
};

static void servers_start(struct rig *r, const char *wait)
{
    rig_server_options(r, "--replicas", "0", "--durability", "write", "--loops", "2", "--shards", "6", "--chunk-bytes", "256", "--servers", "2",
                       "--members", "2", "--wait-for-server", wait, NULL);
    rig_servers_start(r, SERVERS);
}

static void members_start(struct rig *r, struct world *w, struct task *task, void (*fn)(struct rig_self *))
{
    for (unsigned i = 0; i < MEMBERS; i++) {
        task[i] = (struct task){w, i};
        rig_worker_start(r, fn, &task[i]);
    }
    for (unsigned i = 0; i < MEMBERS; i++)
        RIG_UNTIL(r, w->steps[i] >= 5);
}

static void must_name(const struct ks_job *j, const char *text, const char *server)
{
    if (!strstr(text, server))
        rig_die(j, __FILE__, __LINE__, "'%s' does not name server %s", text, server);
}

/* ---- it comes back ---- */

/* Waits with short deadlines; a wait that was in vain is taken up again. */
static int wait_patiently(struct world *w, struct ks_job *j, struct ks_handle *h)
{
    for (;;) {
        uint64_t start = clock_now_us();
        int rc = ks_wait(h, SHORT_MS);
        if (rc != KS_ETIMEOUT)
            return rc;
        int64_t ms = (int64_t)(clock_now_us() - start) / 1000;
        RIG_MUST(j, ms >= SHORT_MS - 1 && ms < SHORT_MS + rig_ms(1000));
        if (w->server_away)
            must_name(j, ks_last_error(j), "s1");
        w->timed_out++;
    }
}

static void patient(struct rig_self *s)
{
    struct task *task = s->arg;
    struct world *w = task->w;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "t", KS_I64, N, KS_PARAM, "add");
    static int64_t in[N], out[N];
    for (int64_t i = 1; !w->stop; i++) {
        struct ks_handle *h;
        for (unsigned k = 0; k < N; k++)
            in[k] = 1;
        RIG_OK(j, ks_push_pull(t, in, out, 1.0, &h));
        RIG_OK(j, ks_step_end(j));
        RIG_OK(j, wait_patiently(w, j, h));
        for (unsigned k = 0; k < N; k++)
            RIG_MUST(j, out[k] == out[0]);
        RIG_MUST(j, out[0] >= i && out[0] <= MEMBERS * i);
        w->steps[task->slot] = i;
    }
    ks_close(j);
}

static void progress(struct rig *r, const struct world *w)
{
    int64_t next[MEMBERS];
    for (unsigned i = 0; i < MEMBERS; i++)
        next[i] = w->steps[i] + 10;
    for (unsigned i = 0; i < MEMBERS; i++)
        RIG_UNTIL(r, w->steps[i] >= next[i]);
}

static void test_comes_back(void **state)
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    struct task task[MEMBERS];
    servers_start(r, "60");
    members_start(r, w, task, patient);
    rig_server_kill(r, 1);
    /* The first time-outs may be from before the death was known. */
    RIG_UNTIL(r, w->timed_out >= MEMBERS);
    w->server_away = true;
    int before = w->timed_out;
    RIG_UNTIL(r, w->timed_out >= before + 2 * MEMBERS);
    w->server_away = false;
    rig_server_start(r, 1);
    progress(r, w);
    w->stop = true;
    rig_workers_done(r);
}

/* Both, one after the other: also whoever leads. */
static void test_each_comes_back(void **state)
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    struct task task[MEMBERS];
    servers_start(r, "60");
    members_start(r, w, task, patient);
    for (unsigned i = 0; i < SERVERS; i++) {
        rig_server_kill(r, i);
        rig_server_start(r, i);
        progress(r, w);
    }
    for (unsigned i = 0; i < SERVERS; i++)
        rig_server_kill(r, i);
    rig_servers_start(r, SERVERS);
    progress(r, w);
    w->stop = true;
    rig_workers_done(r);
}

/* Stopped for longer than a server may be silent, each in turn: what it was meanwhile told about it counts. */
static void test_stopped(void **state)
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    struct task task[MEMBERS];
    servers_start(r, "60");
    members_start(r, w, task, patient);
    for (unsigned i = 0; i < SERVERS; i++) {
        int before = w->timed_out;
        kill(r->server[i].pid, SIGSTOP);
        RIG_UNTIL(r, w->timed_out >= before + SILENT_TIMEOUTS * MEMBERS);
        kill(r->server[i].pid, SIGCONT);
        progress(r, w);
    }
    w->stop = true;
    rig_workers_done(r);
}

/* ---- it stays away ---- */

static void until_the_end(struct rig_self *s)
{
    struct task *task = s->arg;
    struct world *w = task->w;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "t", KS_I64, N, KS_REDUCE, NULL);
    static int64_t in[N], out[N];
    int rc = 0;
    while (!rc) {
        struct ks_handle *h;
        rc = ks_push_pull(t, in, out, 1.0, &h);
        if (!rc)
            rc = ks_step_end(j);
        if (!rc)
            rc = ks_wait(h, -1);
        w->steps[task->slot] += rc == 0;
    }
    RIG_MUST(j, rc == KS_EJOB);
    must_name(j, ks_last_error(j), "s1");
    RIG_GIVES(j, ks_step_end(j), KS_EJOB);
    must_name(j, ks_last_error(j), "s1");
    w->ended++;
    ks_close(j);
}

static unsigned lines(const char *text)
{
    unsigned n = 0;
    for (; *text; text++)
        n += *text == '\n';
    return n;
}

static void test_stays_away(void **state)
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    struct task task[MEMBERS];
    char text[RIG_TEXT];
    servers_start(r, "2");
    members_start(r, w, task, until_the_end);
    rig_server_kill(r, 1);
    int status = rig_server_end(r, 0, text);
    if (status == 0 || lines(text) != 1 || !strstr(text, "s1"))
        RIG_FAIL(r, "the other server ended with %d and '%s'", status, text);
    rig_workers_done(r);
    RIG_ASSERT(r, w->ended == MEMBERS);
    /* Nobody goes on with a job that has ended. */
    rig_server_launch(r, 1, NULL, NULL, NULL);
    status = rig_server_end(r, 1, text);
    if (status == 0 || lines(text) != 1 || !strstr(text, "has ended"))
        RIG_FAIL(r, "a server of a job that has ended gave %d and '%s'", status, text);
}

/* ---- it comes back with other data ---- */

static void refused(struct rig *r, unsigned i, const char *data, const char *want)
{
    char text[RIG_TEXT];
    rig_server_launch(r, i, data, NULL, NULL);
    int status = rig_server_end(r, i, text);
    if (status == 0 || lines(text) != 1 || !strstr(text, want))
        RIG_FAIL(r, "with %s the server gave %d and '%s'", data, status, text);
}

static void test_other_data(void **state)
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    struct task task[MEMBERS];
    char empty[200], other[200];
    servers_start(r, "60");
    members_start(r, w, task, patient);
    rig_server_kill(r, 1);
    snprintf(empty, sizeof empty, "%s/empty", r->dir);
    snprintf(other, sizeof other, "%s/data-0", r->dir);
    refused(r, 1, empty, "s1");
    RIG_ASSERT(r, mkdir(empty, 0700) == 0 || access(empty, F_OK) == 0);
    refused(r, 1, empty, "s1");
    refused(r, 1, other, other);
    /* Another server's directory, which takes this one's name. */
    rig_server_kill(r, 0);
    refused(r, 1, other, "s1");
    rig_server_start(r, 0);
    rig_server_start(r, 1);
    progress(r, w);
    w->stop = true;
    rig_workers_done(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_comes_back, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_each_comes_back, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_stopped, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_stays_away, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_other_data, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
