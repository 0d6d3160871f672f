/* What only etcd can do to its clients: restarts, clusters, passwords, TLS, lost answers. */
#include "coord_world.h"

#include "base/log.h"
#include "tcp_proxy.h"

static struct etcd_member member;
static char dir[64];
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[1 << 16];

static void log_keep(enum log_level level, const char *line, void *arg)
{
    (void)level;
    (void)arg;
    pthread_mutex_lock(&log_lock);
    size_t n = strlen(log_text);
    snprintf(log_text + n, sizeof log_text - n, "%s\n", line);
    pthread_mutex_unlock(&log_lock);
}

static bool logged(const char *text)
{
    pthread_mutex_lock(&log_lock);
    bool found = strstr(log_text, text) != NULL;
    pthread_mutex_unlock(&log_lock);
    return found;
}

static void open_url(struct rig *r, const char *url, const char *job)
{
    char err[COORD_ERR_TEXT];
    struct coord_config c = {.url = url, .job = job, .timeout_ms = WORLD_TIMEOUT_MS, .wake = rig_wake, .wake_arg = r};
    rig_init(r);
    if (coord_open(&c, &r->coord, err))
        fail_msg("%s", err);
}

static void open_member(struct rig *r, const struct etcd_member *m, const char *job)
{
    char url[128], full[160];
    etcd_url(m, url, sizeof url);
    snprintf(full, sizeof full, "etcd:%s", url);
    open_url(r, full, job);
}

static void open_port(struct rig *r, int port, const char *job)
{
    char url[128];
    snprintf(url, sizeof url, "etcd:http://127.0.0.1:%d", port);
    open_url(r, url, job);
}

static void expect_reachable(struct rig *r, int status)
{
    struct coord_event e = rig_take(r, COORD_REACHABLE, 0);
    assert_int_equal(e.status, status);
    assert_int_equal(e.text[0] != 0, status != 0);
}

static void test_killed_and_restarted(void **state)
{
    (void)state;
    struct rig a, b;
    struct coord_event e;
    open_member(&a, &member, "restart");
    open_member(&b, &member, "restart");
    int64_t start = rig_put(&a, "leased", "1", rig_grant(&a, 2000));
    rig_watch(&b, "", start);
    rig_put(&a, "key", "before", 0);
    rig_expect_change(&b, "key", "before");
    etcd_kill(&member);
    expect_reachable(&a, KS_EUNAVAIL);
    expect_reachable(&b, KS_EUNAVAIL);
    struct coord_request q = {0};
    rig_op(&q, "key", "never", 0);
    e = rig_ask(&a, &q);
    assert_int_equal(e.status, KS_EUNAVAIL);
    etcd_launch(&member);
    assert_true(etcd_await(&member));
    expect_reachable(&a, 0);
    expect_reachable(&b, 0);
    rig_put(&a, "key", "after", 0);
    rig_expect_change(&b, "key", "after");
    /* Longer than the lease would last if nobody kept it alive after the restart. */
    assert_false(rig_try(&b, COORD_CHANGE, 0, 3000, &e));
    assert_false(rig_try(&a, COORD_LEASE_LOST, 0, 0, &e));
    rig_done(&a);
    rig_done(&b);
}

static void test_other_endpoint(void **state)
{
    (void)state;
    struct rig r;
    struct coord_event e;
    char url[256];
    snprintf(url, sizeof url, "etcd:http://127.0.0.1:%d,http://127.0.0.1:%d/", free_port(), member.client_port);
    open_url(&r, url, "other");
    int64_t start = rig_put(&r, "key", "1", rig_grant(&r, 2000));
    rig_watch(&r, "", start);
    rig_put(&r, "key", "2", 0);
    rig_expect_change(&r, "key", "2");
    assert_false(rig_try(&r, COORD_REACHABLE, 0, 0, &e));
    rig_done(&r);
}

static void test_lost_answers(void **state)
{
    (void)state;
    struct rig r;
    struct proxy p;
    proxy_start(&p, member.client_port);
    open_port(&r, p.port, "lost");
    rig_put(&r, "warm", "1", 0);
    rig_expect_absent(&r, "key");
    for (int i = 0; i < 5; i++) {
        struct coord_request q = {0};
        char key[16];
        snprintf(key, sizeof key, "key%d", i);
        rig_guard(&q, GUARD_ABSENT, key, 0);
        rig_op(&q, key, "once", 0);
        p.mode = PROXY_LOSE_ANSWERS;
        struct coord_event e = rig_ask(&r, &q);
        assert_int_equal(e.status, KS_EUNKNOWN);
        assert_int_equal(p.lost, i + 1);
        p.mode = PROXY_PASS;
        e = rig_range(&r, key);
        assert_int_equal(e.nkv, 1);
        assert_int_equal(e.kv[0].create_revision, e.kv[0].mod_revision);
        coord_event_done(&e);
        assert_false(rig_ask(&r, &q).succeeded);
    }
    rig_done(&r);
    proxy_stop(&p);
}

static void test_watch_is_cut(void **state)
{
    (void)state;
    struct rig a, b;
    struct proxy p;
    char value[16];
    proxy_start(&p, member.client_port);
    open_member(&a, &member, "cut");
    open_port(&b, p.port, "cut");
    rig_watch(&b, "", rig_put(&a, "start", "", 0));
    for (int i = 0; i < 60; i++) {
        snprintf(value, sizeof value, "%d", i);
        rig_put(&a, "key", value, 0);
        if (i % 10 == 5)
            p.cut = true;
    }
    for (int i = 0; i < 60; i++) {
        snprintf(value, sizeof value, "%d", i);
        rig_expect_change(&b, "key", value);
    }
    rig_done(&a);
    rig_done(&b);
    proxy_stop(&p);
}

static void test_nonsense(void **state)
{
    (void)state;
    struct rig r;
    struct proxy p;
    proxy_start(&p, member.client_port);
    open_port(&r, p.port, "nonsense");
    rig_watch(&r, "", rig_put(&r, "key", "1", 0));
    p.mode = PROXY_NONSENSE;
    p.cut = true;
    struct coord_request range = {.kind = COORD_RANGE}, txn = {0};
    struct coord_event e = rig_ask(&r, &range);
    assert_int_equal(e.status, KS_EUNAVAIL);
    rig_op(&txn, "key", "2", 0);
    e = rig_ask(&r, &txn);
    assert_int_equal(e.status, KS_EUNKNOWN);
    expect_reachable(&r, KS_EUNAVAIL);
    p.mode = PROXY_PASS;
    p.cut = true;
    expect_reachable(&r, 0);
    rig_put(&r, "key", "3", 0);
    rig_expect_change(&r, "key", "3");
    rig_done(&r);
    proxy_stop(&p);
}

static bool is_leader(const struct etcd_member *m)
{
    char reply[4096], id[32] = "", leader[32] = "?";
    if (etcd_post(m, "/v3/maintenance/status", "{}", NULL, reply) != 200)
        return false;
    const char *at = strstr(reply, "\"member_id\":\"");
    assert_true(at && sscanf(at, "\"member_id\":\"%31[0-9]", id) == 1);
    at = strstr(reply, "\"leader\":\"");
    assert_true(at && sscanf(at, "\"leader\":\"%31[0-9]", leader) == 1);
    return strcmp(id, leader) == 0;
}

static bool cluster_start(struct etcd_member *m, const char *parent)
{
    char cluster[256] = "";
    for (int i = 0; i < 3; i++) {
        char name[16];
        snprintf(name, sizeof name, "c%d", i);
        etcd_prepare(&m[i], parent, name);
        size_t n = strlen(cluster);
        snprintf(cluster + n, sizeof cluster - n, "%s%s=http://127.0.0.1:%d", i ? "," : "", name, m[i].peer_port);
    }
    for (int i = 0; i < 3; i++) {
        memcpy(m[i].cluster, cluster, sizeof cluster);
        etcd_launch(&m[i]);
    }
    return etcd_await(&m[0]) && etcd_await(&m[1]) && etcd_await(&m[2]);
}

static void test_leader_is_killed(void **state)
{
    (void)state;
    struct etcd_member m[3] = {{0}};
    struct rig r;
    struct coord_event e;
    char url[256];
    int leader = -1, left = 0;
    assert_true(cluster_start(m, dir));
    for (int i = 0; i < 3; i++)
        leader = is_leader(&m[i]) ? i : leader;
    assert_true(leader >= 0);
    /* The leader comes first, so that it is the one in use. */
    snprintf(url, sizeof url, "etcd:http://127.0.0.1:%d,http://127.0.0.1:%d,http://127.0.0.1:%d", m[leader].client_port,
             m[(leader + 1) % 3].client_port, m[(leader + 2) % 3].client_port);
    open_url(&r, url, "cluster");
    int64_t start = rig_put(&r, "leased", "1", rig_grant(&r, 2000));
    rig_watch(&r, "", start);
    etcd_kill(&m[leader]);
    uint64_t end = clock_now_us() + RIG_WAIT_MS * 1000;
    struct coord_request q = {0};
    rig_op(&q, "key", "after", 0);
    do {
        e = rig_ask(&r, &q);
        assert_true(clock_now_us() < end);
    } while (e.status);
    assert_true(e.succeeded);
    rig_expect_change(&r, "key", "after");
    assert_false(rig_try(&r, COORD_LEASE_LOST, 0, 0, &e));
    /* No quorum: nobody may claim to know. */
    left = (leader + 1) % 3;
    etcd_kill(&m[left]);
    uint64_t began = clock_now_us();
    e = rig_ask(&r, &q);
    assert_true(e.status == KS_EUNKNOWN || e.status == KS_EUNAVAIL);
    assert_true(clock_now_us() - began < 4 * WORLD_TIMEOUT_MS * 1000);
    while ((e = rig_take(&r, COORD_REACHABLE, 0)).status == 0)
        continue;
    etcd_launch(&m[left]);
    assert_true(etcd_await(&m[left]));
    while ((e = rig_take(&r, COORD_REACHABLE, 0)).status)
        continue;
    rig_put(&r, "last", "1", 0);
    do
        e = rig_take(&r, COORD_CHANGE, 0);
    while (strcmp(e.kv[0].key, "last") != 0 && (coord_event_done(&e), true));
    coord_event_done(&e);
    rig_done(&r);
    for (int i = 0; i < 3; i++)
        etcd_kill(&m[i]);
}

static void auth_enable(const struct etcd_member *m)
{
    static const char *const step[][2] = {
        {"/v3/auth/user/add", "{\"name\":\"root\",\"password\":\"sekret-7\"}"},
        {"/v3/auth/role/add", "{\"name\":\"root\"}"},
        {"/v3/auth/user/grant", "{\"user\":\"root\",\"role\":\"root\"}"},
        {"/v3/auth/enable", "{}"},
    };
    for (size_t i = 0; i < sizeof step / sizeof *step; i++)
        assert_int_equal(etcd_post(m, step[i][0], step[i][1], NULL, NULL), 200);
}

static void test_passwords(void **state)
{
    (void)state;
    struct etcd_member m = {0};
    struct rig r;
    struct coord_event e;
    char parent[128], file[160];
    snprintf(parent, sizeof parent, "%s/auth", dir);
    assert_int_equal(mkdir(parent, 0700), 0);
    assert_true(etcd_start_alone(&m, parent));

    setenv("KEEPSTEP_ETCD_USER", "root", 1);
    setenv("KEEPSTEP_ETCD_PASSWORD", "sekret-7", 1);
    open_member(&r, &m, "auth");
    rig_put(&r, "before", "auth is off: no token is needed", 0);
    int64_t lease = rig_grant(&r, 2000);
    rig_watch(&r, "", rig_put(&r, "leased", "1", lease));
    auth_enable(&m);
    rig_put(&r, "key", "1", 0);
    rig_expect_change(&r, "key", "1");
    /* A restart forgets the tokens. */
    etcd_kill(&m);
    etcd_launch(&m);
    assert_true(etcd_await(&m));
    rig_put(&r, "key", "2", 0);
    rig_expect_change(&r, "key", "2");
    assert_false(rig_try(&r, COORD_LEASE_LOST, 0, 0, &e));
    rig_done(&r);

    setenv("KEEPSTEP_ETCD_PASSWORD", "sekret-wrong", 1);
    open_member(&r, &m, "auth");
    struct coord_request q = {.kind = COORD_RANGE};
    e = rig_ask(&r, &q);
    assert_int_equal(e.status, KS_EAUTH);
    assert_non_null(strstr(e.text, "root"));
    assert_null(strstr(e.text, "sekret"));
    rig_done(&r);

    unsetenv("KEEPSTEP_ETCD_USER");
    open_member(&r, &m, "auth");
    e = rig_ask(&r, &q);
    assert_int_equal(e.status, KS_EAUTH);
    rig_done(&r);

    setenv("KEEPSTEP_ETCD_USER", "root", 1);
    snprintf(file, sizeof file, "%s/password", parent);
    FILE *f = fopen(file, "w");
    fputs("sekret-7\n", f);
    fclose(f);
    setenv("KEEPSTEP_ETCD_PASSWORD_FILE", file, 1);
    open_member(&r, &m, "auth");
    e = rig_range(&r, "before");
    assert_int_equal(e.nkv, 1);
    coord_event_done(&e);
    rig_done(&r);
    unsetenv("KEEPSTEP_ETCD_USER");
    unsetenv("KEEPSTEP_ETCD_PASSWORD");
    unsetenv("KEEPSTEP_ETCD_PASSWORD_FILE");
    etcd_kill(&m);
    assert_false(logged("sekret"));
}

static void make_certificates(const char *where)
{
    char command[1024];
    snprintf(command, sizeof command,
             "cd '%s' && exec >openssl.log 2>&1 && for ca in ca other; do openssl req -x509 -newkey ec -pkeyopt "
             "ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=$ca -keyout $ca.key -out $ca.pem || exit 1; done && "
             "printf 'subjectAltName=IP:127.0.0.1\\nextendedKeyUsage=serverAuth,clientAuth\\n' >ext && "
             "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /O=test -keyout node.key -out "
             "node.csr && openssl x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext "
             "-out node.pem",
             where);
    assert_int_equal(system(command), 0);
}

static void test_tls(void **state)
{
    (void)state;
    struct etcd_member m = {0};
    struct rig r;
    char parent[128], file[4][160];
    static const char *const name[] = {"ca.pem", "node.pem", "node.key", "other.pem"};
    snprintf(parent, sizeof parent, "%s/tls", dir);
    assert_int_equal(mkdir(parent, 0700), 0);
    make_certificates(parent);
    for (int i = 0; i < 4; i++)
        snprintf(file[i], sizeof file[i], "%s/%s", parent, name[i]);
    m.cacert = file[0];
    m.cert = file[1];
    m.key = file[2];
    assert_true(etcd_start_alone(&m, parent));
    setenv("KEEPSTEP_ETCD_CACERT", file[0], 1);
    setenv("KEEPSTEP_ETCD_CERT", file[1], 1);
    setenv("KEEPSTEP_ETCD_KEY", file[2], 1);
    open_member(&r, &m, "tls");
    rig_watch(&r, "", rig_put(&r, "key", "1", rig_grant(&r, 2000)));
    rig_put(&r, "key", "2", 0);
    rig_expect_change(&r, "key", "2");
    rig_done(&r);

    setenv("KEEPSTEP_ETCD_CACERT", file[3], 1);
    open_member(&r, &m, "tls");
    struct coord_request q = {0};
    rig_op(&q, "key", "3", 0);
    struct coord_event e = rig_ask(&r, &q);
    assert_int_equal(e.status, KS_EUNAVAIL);
    assert_non_null(strstr(e.text, "certificate"));
    rig_done(&r);
    unsetenv("KEEPSTEP_ETCD_CACERT");
    unsetenv("KEEPSTEP_ETCD_CERT");
    unsetenv("KEEPSTEP_ETCD_KEY");
    etcd_kill(&m);
}

static void expect_refused(const char *url, const char *job, const char *word)
{
    char err[COORD_ERR_TEXT] = "";
    struct coord *c = NULL;
    struct coord_config config = {.url = url, .job = job};
    assert_int_equal(coord_open(&config, &c, err), KS_EINVAL);
    assert_null(c);
    assert_non_null(strstr(err, word));
    assert_null(strstr(err, "sekret"));
}

static void test_bad_configuration(void **state)
{
    (void)state;
    expect_refused("etcd:http://root:sekret@h:1", "j", "KEEPSTEP_ETCD_PASSWORD_FILE");
    expect_refused("etcd:127.0.0.1:2379", "j", "127.0.0.1:2379");
    expect_refused("etcd:http://h:1,,http://h:2", "j", "http://HOST:PORT");
    expect_refused("etcd:http://h:1,ftp://h:2", "j", "ftp://h:2");
    expect_refused("zookeeper:h", "j", "zookeeper:h");
    expect_refused("etcd:http://h:1", "a/b", "a/b");
    expect_refused("etcd:http://h:1", "", "job name");
    setenv("KEEPSTEP_ETCD_USER", "root", 1);
    expect_refused("etcd:http://h:1", "j", "KEEPSTEP_ETCD_PASSWORD");
    setenv("KEEPSTEP_ETCD_PASSWORD_FILE", "/nowhere/at/all", 1);
    expect_refused("etcd:http://h:1", "j", "/nowhere/at/all");
    unsetenv("KEEPSTEP_ETCD_PASSWORD_FILE");
    unsetenv("KEEPSTEP_ETCD_USER");
    setenv("KEEPSTEP_ETCD_CACERT", "/nowhere/ca.pem", 1);
    expect_refused("etcd:http://h:1", "j", "KEEPSTEP_ETCD_CACERT");
    unsetenv("KEEPSTEP_ETCD_CACERT");
}

static int group_start(void **state)
{
    (void)state;
    world_temp_dir(dir, sizeof dir);
    return etcd_start_alone(&member, dir) ? 0 : -1;
}

static int group_stop(void **state)
{
    (void)state;
    etcd_kill(&member);
    world_remove_dir(dir);
    return 0;
}

int main(void)
{
    static const struct CMUnitTest without[] = {cmocka_unit_test(test_bad_configuration)};
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed_and_restarted),
        cmocka_unit_test(test_other_endpoint),
        cmocka_unit_test(test_lost_answers),
        cmocka_unit_test(test_watch_is_cut),
        cmocka_unit_test(test_nonsense),
        cmocka_unit_test(test_leader_is_killed),
        cmocka_unit_test(test_passwords),
        cmocka_unit_test(test_tls),
    };
    log_sink_set(log_keep, NULL);
    log_level_set(LOG_DEBUG);
    int failed = cmocka_run_group_tests_name("coord_open", without, NULL, NULL);
    if (etcd_missing()) {
        printf("skipped: coord_etcd: %s\n", etcd_missing());
        return failed;
    }
    return failed + cmocka_run_group_tests_name("coord_etcd", tests, group_start, group_stop);
}
