/* What only the local store has: processes that die while they write, what is left on the disk, shared environments. */
#include "coord_world.h"

#include <sys/inotify.h>

#include "base/log.h"
#include "base/rng.h"

enum { WRITERS = 8, STRESS_MS = 2500 };

static char dir[64], url[128];

static void open_url(struct rig *r, const char *which, const char *job)
{
    char err[COORD_ERR_TEXT];
    struct coord_config c = {.url = which, .job = job, .timeout_ms = WORLD_TIMEOUT_MS, .wake = rig_wake, .wake_arg = r};
    rig_init(r);
    if (coord_open(&c, &r->coord, err))
        fail_msg("%s", err);
}

/* Increments "counter" for ever; every increment that was acknowledged is a byte on stdout. */
static int child_count(struct rig *r)
{
    char key[32], text[32];
    snprintf(key, sizeof key, "life/%d", (int)getpid());
    rig_put(r, key, "1", rig_grant(r, 60000));
    for (;;) {
        struct coord_event e = rig_range(r, "counter");
        struct coord_request q = {0};
        rig_guard(&q, GUARD_MOD_REVISION, "counter", e.kv[0].mod_revision);
        snprintf(text, sizeof text, "%ld", strtol(e.kv[0].value, NULL, 10) + 1);
        rig_op(&q, "counter", text, 0);
        coord_event_done(&e);
        e = rig_ask(r, &q);
        if (e.status == 0 && e.succeeded && write(STDOUT_FILENO, "+", 1) != 1)
            return 1;
        if (e.status && e.status != KS_EUNAVAIL)
            return 1;
    }
}

static pid_t spawn_count(int stdout_fd)
{
    extern char **environ;
    pid_t pid;
    posix_spawn_file_actions_t actions;
    char *argv[] = {"test", "count", url, "stress", NULL};
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, stdout_fd, STDOUT_FILENO);
    assert_int_equal(posix_spawn(&pid, "/proc/self/exe", &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    return pid;
}

static long drain(int fd)
{
    char dump[4096];
    long total = 0;
    for (ssize_t n; (n = read(fd, dump, sizeof dump)) > 0; total += n)
        continue;
    return total;
}

/* A writer that dies may have committed its last increment without having said so: at most one each. */
static void test_writers_are_killed(void **state)
{
    (void)state;
    struct rng rng = {.state = 4711};
    struct rig r;
    int fd[2];
    long acknowledged = 0, kills = 0;
    pid_t pid[WRITERS];
    open_url(&r, url, "stress");
    rig_put(&r, "counter", "0", 0);
    assert_int_equal(pipe2(fd, O_CLOEXEC | O_NONBLOCK), 0);
    for (int i = 0; i < WRITERS; i++)
        pid[i] = spawn_count(fd[1]);
    uint64_t end = clock_now_us() + STRESS_MS * 1000;
    while (clock_now_us() < end || kills < 20) {
        int victim = (int)rng_below(&rng, WRITERS);
        struct pollfd p = {fd[0], POLLIN, 0};
        assert_int_equal(poll(&p, 1, RIG_WAIT_MS), 1);
        long more = drain(fd[0]);
        acknowledged += more;
        if (rng_chance(&rng, 800))
            continue;
        kill(pid[victim], SIGKILL);
        assert_int_equal(WTERMSIG(world_wait(pid[victim])), SIGKILL);
        kills++;
        pid[victim] = spawn_count(fd[1]);
    }
    for (int i = 0; i < WRITERS; i++) {
        kill(pid[i], SIGKILL);
        assert_int_equal(WTERMSIG(world_wait(pid[i])), SIGKILL);
        kills++;
    }
    acknowledged += drain(fd[0]);
    struct coord_event e = rig_range(&r, "counter");
    long counted = strtol(e.kv[0].value, NULL, 10);
    coord_event_done(&e);
    assert_true(acknowledged > 0);
    assert_true(counted >= acknowledged);
    assert_true(counted <= acknowledged + kills);
    uint64_t patience = clock_now_us() + RIG_WAIT_MS * 1000;
    uint32_t alive;
    do {
        e = rig_range(&r, "life/");
        alive = e.nkv;
        coord_event_done(&e);
        assert_true(clock_now_us() < patience);
    } while (alive);
    close(fd[0]);
    close(fd[1]);
    rig_done(&r);
}

static void test_contents_survive(void **state)
{
    (void)state;
    struct rig r;
    open_url(&r, url, "survive");
    int64_t revision = rig_put(&r, "kept", "1", 0);
    rig_put(&r, "leased", "1", rig_grant(&r, 60000));
    rig_done(&r);
    open_url(&r, url, "survive");
    struct coord_event e = rig_range(&r, "");
    assert_int_equal(e.nkv, 1);
    assert_string_equal(e.kv[0].key, "kept");
    assert_int_equal(e.kv[0].mod_revision, revision);
    coord_event_done(&e);
    rig_watch(&r, "", revision);
    rig_expect_change(&r, "leased", "1");
    rig_expect_change(&r, "leased", NULL);
    rig_done(&r);
}

/* The environment is shared in the process, whatever name it is opened by and whichever handle closes first. */
static void test_handles_share(void **state)
{
    (void)state;
    struct rig a, b, c;
    char other[160];
    snprintf(other, sizeof other, "local:%s/../%s/", dir, strrchr(dir, '/') + 1);
    open_url(&a, url, "share");
    open_url(&b, other, "share");
    rig_watch(&b, "", rig_put(&a, "key", "1", 0));
    rig_put(&a, "key", "2", 0);
    rig_expect_change(&b, "key", "2");
    rig_done(&a);
    open_url(&c, url, "share");
    rig_put(&c, "key", "3", 0);
    rig_expect_change(&b, "key", "3");
    rig_done(&b);
    rig_put(&c, "key", "4", 0);
    rig_done(&c);
}

/* A process that forks without exec leaves the lease's descriptor in its child: only the clock can end the lease. */
static void test_lock_is_inherited(void **state)
{
    (void)state;
    struct rig owner, other;
    open_url(&owner, url, "inherit");
    open_url(&other, url, "inherit");
    rig_watch(&other, "", rig_put(&owner, "key", "1", rig_grant(&owner, 300)));
    pid_t pid = fork();
    if (pid == 0) {
        pause();
        _exit(0);
    }
    rig_done(&owner);
    rig_expect_change(&other, "key", NULL);
    kill(pid, SIGKILL);
    world_wait(pid);
    rig_done(&other);
}

static void test_leftover_files_go(void **state)
{
    (void)state;
    struct rig r;
    char path[128];
    open_url(&r, url, "leftover");
    int64_t lease = rig_grant(&r, 60000);
    rig_done(&r);
    /* Of a grant that was never committed. */
    snprintf(path, sizeof path, "%s/leases/999999", dir);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
    open_url(&r, url, "leftover");
    assert_int_not_equal(access(path, F_OK), 0);
    struct coord_event e = rig_range(&r, "");
    coord_event_done(&e);
    assert_int_equal(rig_revoke(&r, lease), KS_ENOENT);
    snprintf(path, sizeof path, "%s/leases/%lld", dir, (long long)lease);
    assert_int_not_equal(access(path, F_OK), 0);
    rig_done(&r);
}

/* A host whose inotify instances are used up: the store polls, and all that matters still happens. */
static void test_without_inotify(void **state)
{
    (void)state;
    enum { INSTANCES = 900 };
    struct rig a, b;
    int fd[INSTANCES], n = 0;
    while (n < INSTANCES && (fd[n] = inotify_init1(IN_CLOEXEC)) >= 0)
        n++;
    if (n < INSTANCES) {
        open_url(&a, url, "poll");
        open_url(&b, url, "poll");
        rig_watch(&b, "", rig_put(&a, "start", "", 0));
        rig_put(&a, "key", "1", rig_grant(&a, 60000));
        rig_expect_change(&b, "key", "1");
        rig_done(&a);
        rig_expect_change(&b, "key", NULL);
        rig_done(&b);
    }
    while (n > 0)
        close(fd[--n]);
}

static int try_open(const char *which, char *err)
{
    struct coord *c = NULL;
    struct coord_config config = {.url = which, .job = "job", .timeout_ms = 100};
    int status = coord_open(&config, &c, err);
    assert_true(status != 0 && !c);
    return status;
}

static void test_bad_directories(void **state)
{
    (void)state;
    char path[128], which[160], err[COORD_ERR_TEXT];
    snprintf(path, sizeof path, "%s/file", dir);
    FILE *f = fopen(path, "w");
    fputs("no directory", f);
    fclose(f);
    snprintf(which, sizeof which, "local:%s", path);
    assert_int_equal(try_open(which, err), KS_EIO);
    assert_non_null(strstr(err, path));

    snprintf(path, sizeof path, "%s/damaged", dir);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(which, sizeof which, "local:%s", path);
    strcat(path, "/data.mdb");
    f = fopen(path, "w");
    for (int i = 0; i < 2048; i++)
        fputs("damaged ", f);
    fclose(f);
    assert_int_equal(try_open(which, err), KS_ECORRUPT);
    assert_non_null(strstr(err, dir));
    assert_int_equal(try_open("local:", err), KS_EINVAL);
}

static int group_start(void **state)
{
    (void)state;
    world_temp_dir(dir, sizeof dir);
    snprintf(url, sizeof url, "local:%s", dir);
    return 0;
}

static int group_stop(void **state)
{
    (void)state;
    world_remove_dir(dir);
    return 0;
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_writers_are_killed), cmocka_unit_test(test_contents_survive),
        cmocka_unit_test(test_handles_share),      cmocka_unit_test(test_lock_is_inherited),
        cmocka_unit_test(test_leftover_files_go),  cmocka_unit_test(test_without_inotify),
        cmocka_unit_test(test_bad_directories),
    };
    if (argc > 1) {
        struct rig r;
        open_url(&r, argv[2], argv[3]);
        return child_count(&r);
    }
    log_level_set(LOG_ERROR);
    return cmocka_run_group_tests_name("coord_local", tests, group_start, group_stop);
}
