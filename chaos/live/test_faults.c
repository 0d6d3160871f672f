/* Training while processes are killed, stopped and continued, drained, told to end, and joined by others, at random: the
 * sums at the end are exactly what was acknowledged, training goes on after each fault, and the servers that are left hold
 * everything as often as wanted before the next one. */
#include "chaos/live/live.h"

#include <signal.h>

enum { MEMBERS = 3, SERVERS = 3, SERVERS_MOST = 5, SHORT_FORM_S = 2, LIVES_SPARE = 40, DEAD_MS = 4300 };

struct chaos {
    struct rig *r;
    struct live *w;
    struct rng rng;
    unsigned replicas, member_of[MEMBERS], next_server, member_events;
    bool write;
    uint64_t gone[RIG_SERVERS];          /* the last life of a server that cannot come back */
};

static void pass_ms(struct rig *r, uint64_t ms)
{
    uint64_t end = clock_now_us() + ms * 1000;
    while (clock_now_us() < end)
        rig_look(r);
}

static uint64_t from_to(struct chaos *c, uint64_t low, uint64_t high)
{
    return low + rng_below(&c->rng, high - low + 1);
}

static void tell(struct chaos *c, const char *what, unsigned i)
{
    fprintf(stderr, "%8.3f  step %lld  %s %u%s\n", (double)(clock_now_us() % 1000000000) / 1e6, (long long)live_steps(c->w),
            what, i, (int)i == live_leader(c->w) ? " (leads)" : "");
}

static unsigned running(const struct chaos *c)
{
    unsigned n = 0;
    for (unsigned i = 0; i < c->r->nservers; i++)
        n += c->r->server[i].pid != 0;
    return n;
}

/* One that runs and is not `other`; every third time the one that leads. */
static unsigned any_server(struct chaos *c, unsigned other)
{
    int leader = live_leader(c->w);
    if (leader >= 0 && (unsigned)leader != other && c->r->server[leader].pid && rng_chance(&c->rng, 333))
        return (unsigned)leader;
    for (;;) {
        unsigned i = (unsigned)rng_below(&c->rng, c->r->nservers);
        if (c->r->server[i].pid && i != other)
            return i;
    }
}

static bool lives_left(const struct chaos *c)
{
    return c->w->next_life + LIVES_SPARE < LIVE_LIVES && c->r->nworkers + LIVES_SPARE < RIG_WORKERS;
}

/* ---- what happens to members ---- */

static void member_replace(struct chaos *c, unsigned k)
{
    c->member_of[k] = rig_worker_start(c->r, live_member, c->w);
}

static void member_kill(struct chaos *c)
{
    unsigned k = (unsigned)rng_below(&c->rng, MEMBERS);
    tell(c, "kill worker", c->member_of[k]);
    rig_worker_kill(c->r, c->member_of[k]);
    member_replace(c, k);
}

static void member_leave(struct chaos *c)
{
    unsigned k = (unsigned)rng_below(&c->rng, MEMBERS), i = c->member_of[k];
    tell(c, "leaves: worker", i);
    c->w->leave[i] = true;
    member_replace(c, k);
    rig_worker_done(c->r, i);
}

static void member_stop(struct chaos *c)
{
    unsigned i = c->member_of[rng_below(&c->rng, MEMBERS)];
    uint64_t ms = rng_chance(&c->rng, 300) ? DEAD_MS : from_to(c, 10, 500);
    tell(c, ms == DEAD_MS ? "stop for long worker" : "stop worker", i);
    rig_worker_signal(c->r, i, SIGSTOP);
    pass_ms(c->r, ms);
    rig_worker_signal(c->r, i, SIGCONT);
}

static void hurt_member(struct chaos *c)
{
    static void (*const what[])(struct chaos *) = {member_kill, member_leave, member_stop};
    if (lives_left(c))
        what[rng_below(&c->rng, sizeof what / sizeof *what)](c);
}

/* ---- what happens to servers ---- */

static void server_add(struct chaos *c)
{
    if (c->next_server >= RIG_SERVERS)
        return;
    unsigned i = c->next_server++;
    tell(c, "new server", i);
    rig_server_start(c->r, i);
}

static void server_die(struct chaos *c, unsigned i)
{
    tell(c, "kill server", i);
    c->gone[i] = c->w->seen.id[i];
    rig_server_kill(c->r, i);
}

/* The same again, at once or after others took over; or another one in its place. */
static void server_return(struct chaos *c, unsigned i)
{
    if (rng_chance(&c->rng, 300) && c->next_server < RIG_SERVERS) {
        server_add(c);
        return;
    }
    tell(c, "start server", i);
    rig_server_start(c->r, i);
}

static void server_kill(struct chaos *c)
{
    unsigned i = any_server(c, RIG_SERVERS);
    server_die(c, i);
    if (rng_chance(&c->rng, 300))
        member_kill(c);
    if (rng_chance(&c->rng, 600))
        live_goes_on(c->r, c->w, 20, 30000);
    server_return(c, i);
}

/* Two of them at a time: the third has it all. */
static void server_kill_two(struct chaos *c)
{
    unsigned a = any_server(c, RIG_SERVERS), b = any_server(c, a);
    server_die(c, a);
    pass_ms(c->r, rng_chance(&c->rng, 500) ? 0 : from_to(c, 1, 400));
    server_die(c, b);
    if (rng_chance(&c->rng, 600))
        live_goes_on(c->r, c->w, 20, 30000);
    server_return(c, a);
    server_return(c, b);
}

/* The disks have it. */
static void server_kill_all(struct chaos *c)
{
    bool ran[RIG_SERVERS];
    for (unsigned i = 0; i < c->r->nservers; i++) {
        ran[i] = c->r->server[i].pid != 0;
        if (ran[i])
            server_die(c, i);
    }
    for (unsigned i = 0; i < RIG_SERVERS; i++)
        if (i < c->r->nservers && ran[i])
            rig_server_launch(c->r, i, NULL, NULL, NULL);
    for (unsigned i = 0; i < c->r->nservers; i++)
        if (ran[i])
            rig_server_await(c->r, i);
}

static void server_stop(struct chaos *c)
{
    unsigned i = any_server(c, RIG_SERVERS);
    uint64_t ms = rng_chance(&c->rng, 400) ? DEAD_MS : from_to(c, 10, 500);
    tell(c, ms == DEAD_MS ? "stop for long server" : "stop server", i);
    rig_server_signal(c->r, i, SIGSTOP);
    if (ms == DEAD_MS)
        live_goes_on(c->r, c->w, 20, 30000);
    else
        pass_ms(c->r, ms);
    tell(c, "continue server", i);
    rig_server_signal(c->r, i, SIGCONT);
}

static void must_end_well(struct chaos *c, unsigned i, const char *how)
{
    struct rig_server *s = &c->r->server[i];
    RIG_UNTIL_MS(c->r, s->ended, 35000);
    if (s->status)
        RIG_FAIL(c->r, "server %u was %s and ended with %x", i, how, (unsigned)s->status);
    c->gone[i] = 0;
}

static void server_drain(struct chaos *c)
{
    char name[16], text[RIG_TEXT];
    unsigned i = any_server(c, RIG_SERVERS);
    tell(c, "drain server", i);
    snprintf(name, sizeof name, "s%u", i);
    c->r->server[i].may_end = true;
    if (rig_command(c->r, text, "drain", name, NULL))
        RIG_FAIL(c->r, "keepstep drain %s: %s", name, text);
    must_end_well(c, i, "drained");
}

static void server_term(struct chaos *c)
{
    unsigned i = any_server(c, RIG_SERVERS);
    tell(c, "terminate server", i);
    c->r->server[i].may_end = true;
    rig_server_signal(c->r, i, SIGTERM);
    must_end_well(c, i, "told to end");
}

static void hurt_server(struct chaos *c)
{
    bool more = running(c) > c->replicas + 1;
    uint64_t dice = rng_below(&c->rng, 100);
    if (dice < 35)
        server_kill(c);
    else if (dice < 55)
        server_stop(c);
    else if (c->replicas == 2 && dice < 70 && running(c) >= 3)
        server_kill_two(c);
    else if (c->write && dice < 75)
        server_kill_all(c);
    else if (more && dice < 85)
        server_drain(c);
    else if (more && dice < 95)
        server_term(c);
    if (running(c) < SERVERS_MOST && (running(c) < SERVERS || dice >= 80))
        server_add(c);
}

/* ---- the test ---- */

static void run(void **state, const char *mode, unsigned replicas, const char *durability)
{
    struct rig *r = *state;
    char what[64];
    const char *const number[] = {"0", "1", "2"};
    uint64_t end;
    snprintf(what, sizeof what, "%s, %u backups, durability %s", mode, replicas, durability);
    struct chaos c = {.r = r, .rng = {live_seed(what)}, .replicas = replicas, .next_server = SERVERS,
                      .write = !strcmp(durability, "write")};
    unsigned seconds = live_seconds(SHORT_FORM_S);
    c.w = live_open(r, mode, number[replicas], durability, "3");
    rig_servers_start(r, SERVERS);
    live_observe(r, c.w);
    for (unsigned k = 0; k < MEMBERS; k++)
        member_replace(&c, k);
    live_goes_on(r, c.w, 20, 30000);
    end = clock_now_us() + seconds * 1000000ull;
    do {
        live_settled(r, c.w, replicas, c.gone);
        hurt_server(&c);
        if (rng_chance(&c.rng, 500))
            hurt_member(&c);
        live_goes_on(r, c.w, 20, 30000);
    } while (clock_now_us() < end);
    live_settled(r, c.w, replicas, c.gone);
    live_end(r, c.w);
}

static void test_sync_in_memory(void **state)
{
    run(state, "sync", 1, "none");
}

static void test_sync_on_disk(void **state)
{
    run(state, "sync", 1, "write");
}

static void test_sync_two_backups(void **state)
{
    run(state, "sync", 2, "none");
}

static void test_ssp_in_memory(void **state)
{
    run(state, "ssp:2", 1, "none");
}

static void test_ssp_on_disk(void **state)
{
    run(state, "ssp:2", 1, "write");
}

static void test_ssp_two_backups(void **state)
{
    run(state, "ssp:2", 2, "none");
}

static void test_async_in_memory(void **state)
{
    run(state, "async", 1, "none");
}

static void test_async_on_disk(void **state)
{
    run(state, "async", 1, "write");
}

static void test_async_two_backups(void **state)
{
    run(state, "async", 2, "write");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_sync_in_memory, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_sync_on_disk, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_sync_two_backups, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_ssp_in_memory, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_ssp_on_disk, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_ssp_two_backups, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_async_in_memory, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_async_on_disk, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_async_two_backups, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
