/* The store is etcd: one of its three members is killed, or all of it is away for a time, during training. A server that dies
 * meanwhile is replaced when the store is back, and the sums are exactly what was acknowledged. */
#include "chaos/live/live.h"

#include <signal.h>

#include "tests/contract/etcd_process.h"

enum { SERVERS = 3, MEMBERS = 3, ETCDS = 3, GAP_MS = 1000, AWAY_S = 8, AWAY_LONG_S = 60 };

static struct etcd_member etcd[ETCDS];

static int teardown(void **state)
{
    int bad = rig_teardown(state);
    for (unsigned i = 0; i < ETCDS; i++)
        etcd_kill(&etcd[i]);
    memset(etcd, 0, sizeof etcd);
    return bad;
}

static void need_etcd(void)
{
    const char *why = etcd_missing();
    if (why) {
        print_message("skipped: %s\n", why);
        skip();
    }
}

static bool cluster_try(struct rig *r, unsigned attempt)
{
    bool well = true;
    char cluster[256] = "";
    for (unsigned i = 0; i < ETCDS; i++) {
        char name[16];
        snprintf(name, sizeof name, "e%u-%u", attempt, i);
        etcd_prepare(&etcd[i], r->dir, name);
        snprintf(cluster + strlen(cluster), sizeof cluster - strlen(cluster), "%s%s=http://127.0.0.1:%d", i ? "," : "", name,
                 etcd[i].peer_port);
    }
    for (unsigned i = 0; i < ETCDS; i++) {
        memcpy(etcd[i].cluster, cluster, sizeof cluster);
        etcd_launch(&etcd[i]);
    }
    for (unsigned i = 0; i < ETCDS; i++)
        well &= etcd_await(&etcd[i]);
    for (unsigned i = 0; !well && i < ETCDS; i++)
        etcd_kill(&etcd[i]);
    return well;
}

static void cluster_start(struct rig *r)
{
    bool well = false;
    for (unsigned attempt = 0; attempt < 3 && !well; attempt++)
        well = cluster_try(r, attempt);
    RIG_ASSERT(r, well);
}

static unsigned etcd_leader(struct rig *r)
{
    for (unsigned i = 0; i < ETCDS; i++) {
        char reply[4096], own[64], leader[64];
        const char *id, *of;
        RIG_ASSERT(r, etcd_post(&etcd[i], "/v3/maintenance/status", "{}", NULL, reply) == 200);
        id = strstr(reply, "\"member_id\":\"");
        of = strstr(reply, "\"leader\":\"");
        if (id && of && sscanf(id + 13, "%63[0-9]", own) == 1 && sscanf(of + 10, "%63[0-9]", leader) == 1 && !strcmp(own, leader))
            return i;
    }
    RIG_FAIL(r, "no member of etcd says that it leads");
}

static void coord_set(struct rig *r, unsigned members)
{
    char coord[192] = "etcd:", url[64];
    for (unsigned i = 0; i < members; i++) {
        etcd_url(&etcd[i], url, sizeof url);
        snprintf(coord + strlen(coord), sizeof coord - strlen(coord), "%s%s", i ? "," : "", url);
    }
    rig_coord(r, coord);
}

static struct live *train(struct rig *r, const char *mode)
{
    struct live *w = live_open(r, mode, "1", "none", "3");
    w->pause_ms = 1;
    rig_servers_start(r, SERVERS);
    live_observe(r, w);
    for (unsigned i = 0; i < MEMBERS; i++)
        rig_worker_start(r, live_member, w);
    RIG_UNTIL(r, w->next_life == MEMBERS);
    live_goes_on(r, w, 50, 30000);
    live_settled(r, w, 1, NULL);
    return w;
}

/* No pause in training that somebody would notice, and nobody is removed. */
static void unaffected_ms(struct rig *r, const struct live *w, uint64_t ms)
{
    uint64_t began = clock_now_us(), last_us = began, now;
    int64_t last = live_steps(w);
    unsigned lives = w->next_life;
    while ((now = clock_now_us()) - began < ms * 1000) {
        int64_t n = live_steps(w);
        rig_look(r);
        if (n == last && now - last_us > (uint64_t)rig_ms(GAP_MS) * 1000)
            RIG_FAIL(r, "no step for %d ms", GAP_MS);
        last_us = n == last ? last_us : now;
        last = n;
    }
    RIG_ASSERT(r, w->next_life == lives);
}

static void test_leader_of_three_killed(void **state)
{
    struct rig *r = *state;
    need_etcd();
    live_seconds(0);
    cluster_start(r);
    coord_set(r, ETCDS);
    struct live *w = train(r, "sync");
    unsigned i = etcd_leader(r);
    fprintf(stderr, "etcd member %u leads and is killed\n", i);
    etcd_kill(&etcd[i]);
    unaffected_ms(r, w, 4000);
    live_settled(r, w, 1, NULL);
    RIG_ASSERT(r, live_leader(w) >= 0);
    rig_server_kill(r, (unsigned)live_leader(w));
    live_settled(r, w, 1, NULL);
    live_goes_on(r, w, 50, 30000);
    live_end(r, w);
}

static void outage(struct rig *r, const char *mode, bool leader_dies)
{
    need_etcd();
    uint64_t away_ms = (live_seconds(0) ? AWAY_LONG_S : AWAY_S) * 1000ull;
    RIG_ASSERT(r, etcd_start_alone(&etcd[0], r->dir));
    coord_set(r, 1);
    struct live *w = train(r, mode);
    unsigned leader = (unsigned)live_leader(w), dies = leader_dies ? leader : (leader + 1) % SERVERS;
    etcd_kill(&etcd[0]);
    fprintf(stderr, "etcd is away for %u s\n", (unsigned)(away_ms / 1000));
    unaffected_ms(r, w, away_ms * 2 / 3);
    fprintf(stderr, "server %u is killed%s\n", dies, leader_dies ? ", it led" : "");
    uint64_t gone[RIG_SERVERS] = {0};
    gone[dies] = w->seen.id[dies];
    rig_server_kill(r, dies);
    rig_worker_kill(r, w->observer + 1);
    for (uint64_t end = clock_now_us() + away_ms / 3 * 1000; clock_now_us() < end;)
        rig_look(r);
    etcd_launch(&etcd[0]);
    RIG_ASSERT(r, etcd_await(&etcd[0]));
    fprintf(stderr, "etcd is back\n");
    live_settled(r, w, 1, gone);
    live_goes_on(r, w, 50, 30000);
    RIG_ASSERT(r, w->next_life == MEMBERS);
    rig_server_start(r, dies);
    rig_worker_start(r, live_member, w);
    live_settled(r, w, 1, gone);
    live_end(r, w);
}

static void test_away(void **state)
{
    outage(*state, "sync", false);
}

static void test_away_and_leader_dies(void **state)
{
    outage(*state, "async", true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_leader_of_three_killed, rig_setup, teardown),
        cmocka_unit_test_setup_teardown(test_away, rig_setup, teardown),
        cmocka_unit_test_setup_teardown(test_away_and_leader_dies, rig_setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
