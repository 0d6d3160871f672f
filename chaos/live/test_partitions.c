/* Servers and members on hosts of their own that lose each other, for some time: training goes on, whoever was cut off and
 * removed comes back by itself as a new life, and the sums are exactly what was acknowledged. */
#include "chaos/live/live.h"
#include "chaos/live/lan.h"
#include "tests/contract/etcd_process.h"

#include <signal.h>

enum { SERVERS = 3, MEMBERS = 3, HOSTS = SERVERS + MEMBERS, REPLICAS = 1, GOES_ON = 50 };

struct lab {
    struct rig *r;
    struct live *w;
    uint64_t gone[RIG_SERVERS];
    struct etcd_member etcd;
};

static void say(const struct lab *l, const char *what, unsigned i)
{
    fprintf(stderr, "%8.3f  step %lld  %s %u\n", (double)(clock_now_us() % 1000000000) / 1e6, (long long)live_steps(l->w), what,
            i);
}


static void hosts_start(struct lab *l, const char *mode)
{
    struct rig *r = l->r;
    lan_open(r, HOSTS);
    l->w = live_open(r, mode, "1", "none", "3");
    l->w->pause_ms = 1;
    if (l->etcd.host) {
        char url[128], coord[160];
        RIG_ASSERT(r, etcd_start_alone(&l->etcd, r->dir));
        etcd_url(&l->etcd, url, sizeof url);
        snprintf(coord, sizeof coord, "etcd:%s", url);
        rig_coord(r, coord);
    }
    for (unsigned i = 0; i < SERVERS; i++) {
        r->server[i].netns = lan_name(i);
        r->server[i].listen = lan_listen(i);
    }
    rig_servers_start(r, SERVERS);
    live_observe(r, l->w);
    for (unsigned i = 0; i < MEMBERS; i++) {
        r->worker_netns = lan_name(SERVERS + i);
        rig_worker_start(r, live_member, l->w);
    }
    live_goes_on(r, l->w, GOES_ON, 30000);
    live_settled(r, l->w, REPLICAS, NULL);
}

static void end(struct lab *l)
{
    live_settled(l->r, l->w, REPLICAS, l->gone);
    live_end(l->r, l->w);
    etcd_kill(&l->etcd);
}

static unsigned leader(struct lab *l)
{
    RIG_UNTIL(l->r, live_leader(l->w) >= 0);
    return (unsigned)live_leader(l->w);
}

static unsigned no_leader(struct lab *l)
{
    return (leader(l) + 1) % SERVERS;
}

/* It is removed while it is away, and comes back by itself as a new life. */
static void away_and_back(struct lab *l, unsigned i, const char *what)
{
    uint64_t id = l->w->seen.id[i];
    say(l, what, i);
    RIG_UNTIL(l->r, l->w->seen.id[i] != id);
    live_goes_on(l->r, l->w, GOES_ON, 30000);
    say(l, "heal", i);
    lan_heal(l->r, i);
    l->gone[i] = id;
    live_settled(l->r, l->w, REPLICAS, l->gone);
    live_goes_on(l->r, l->w, GOES_ON, 30000);
}

/* From all other hosts; the hub, where the store may be, is still reached. */
static void cut_from_hosts(struct lab *l, unsigned i)
{
    for (unsigned k = 0; k < HOSTS; k++)
        if (k != i)
            lan_cut(l->r, i, (int)k, LAN_BOTH);
}

static void server_cut_off(struct lab *l, enum lan_way way, const char *what)
{
    unsigned i = no_leader(l);
    lan_cut(l->r, i, LAN_ANY, way);
    away_and_back(l, i, what);
}

static void leader_cut_off(struct lab *l)
{
    unsigned i = leader(l);
    cut_from_hosts(l, i);
    away_and_back(l, i, "cut off from the hosts: leader");
}

static void packets_lost(struct lab *l, unsigned percent)
{
    unsigned i = no_leader(l);
    say(l, "loses packets: server", i);
    lan_lose(l->r, i, percent);
    lan_lose(l->r, SERVERS, percent);
    live_goes_on(l->r, l->w, GOES_ON, 60000);
    lan_heal(l->r, i);
    lan_heal(l->r, SERVERS);
    live_settled(l->r, l->w, REPLICAS, l->gone);
}

static void member_cut_off(struct lab *l)
{
    unsigned worker = l->w->observer + 1;
    unsigned members = l->w->seen.nmembers;
    say(l, "cut off: worker", worker);
    lan_cut(l->r, SERVERS, LAN_ANY, LAN_BOTH);
    RIG_UNTIL(l->r, l->w->seen.nmembers < members);
    live_goes_on(l->r, l->w, GOES_ON, 30000);
    int64_t steps = l->w->worker_steps[worker];
    lan_heal(l->r, SERVERS);
    say(l, "heal: worker", worker);
    RIG_UNTIL(l->r, l->w->worker_steps[worker] > steps + 10 && l->w->seen.nmembers == members);
}

/* ---- the tests ---- */

static bool may_run(void)
{
    if (lan_missing())
        print_message("skipped: %s\n", lan_missing());
    return !lan_missing();
}

static void test_sync(void **state)
{
    struct lab l = {.r = *state};
    if (!may_run())
        skip();
    live_seconds(0);
    hosts_start(&l, "sync");
    server_cut_off(&l, LAN_BOTH, "cut off: server");
    packets_lost(&l, 5);
    member_cut_off(&l);
    leader_cut_off(&l);
    end(&l);
}

static void test_one_way(void **state)
{
    struct lab l = {.r = *state};
    if (!may_run())
        skip();
    live_seconds(0);
    hosts_start(&l, "async");
    server_cut_off(&l, LAN_IN, "receives nothing: server");
    server_cut_off(&l, LAN_OUT, "can send nothing: server");
    end(&l);
}

/* With the store on the network. */
static void test_leader(void **state)
{
    struct lab l = {.r = *state, .etcd.host = LAN_HUB};
    const char *why = etcd_missing();
    if (why)
        print_message("skipped: %s\n", why);
    if (why || !may_run())
        skip();
    live_seconds(0);
    hosts_start(&l, "sync");
    unsigned i = leader(&l);
    say(&l, "cut off from the store: leader", i);
    lan_cut(l.r, i, LAN_HOSTS, LAN_BOTH);
    RIG_UNTIL(l.r, live_leader(l.w) >= 0 && live_leader(l.w) != (int)i);
    live_goes_on(l.r, l.w, GOES_ON, 30000);
    lan_heal(l.r, i);
    say(&l, "heal", i);
    live_settled(l.r, l.w, REPLICAS, l.gone);
    leader_cut_off(&l);
    end(&l);
}

static int teardown(void **state)
{
    struct rig *r = *state;
    for (unsigned i = 0; i < r->nservers; i++)
        if (r->server[i].pid)
            kill(r->server[i].pid, SIGKILL);
    int bad = rig_teardown(state);
    lan_close();
    return bad;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_sync, rig_setup, teardown),
        cmocka_unit_test_setup_teardown(test_one_way, rig_setup, teardown),
        cmocka_unit_test_setup_teardown(test_leader, rig_setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
