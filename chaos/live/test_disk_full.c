/* The disk of one server is full, with a backup of every shard elsewhere: that server ends with one clear line, training goes
 * on without it, and the sums are exactly what was acknowledged. */
#include "chaos/live/live.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SERVERS = 3, MEMBERS = 2, FULL = 1, GROWTH = 1 << 20 };

/* A file system that is gone with the test's processes, whatever happens to them. NULL, or why not. */
static const char *small_disk(const char *dir)
{
    if (geteuid() != 0)
        return "a small file system of the test's own needs root";
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) || mkdir(dir, 0700) ||
        mount("none", dir, "tmpfs", 0, "size=2m"))
        return "this container lets nobody mount a tmpfs";
    return NULL;
}

/* Its tensor does not fit. */
static void grower(struct rig_self *s)
{
    static int64_t in[GROWTH], out[GROWTH];
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "big", KS_I64, GROWTH, KS_PARAM, "add");
    struct ks_handle *h;
    for (unsigned i = 0; i < GROWTH; i++)
        in[i] = i;
    RIG_OK(j, ks_push_pull(t, in, out, 1.0, &h));
    RIG_OK(j, ks_step_end(j));
    RIG_OK(j, ks_wait(h, -1));
    RIG_MUST(j, !memcmp(in, out, sizeof in));
    RIG_OK(j, ks_leave(j, -1));
    ks_close(j);
}

static void run(struct rig *r, const char *mode)
{
    char text[RIG_TEXT], dir[192];
    struct rig_server *full = &r->server[FULL];
    snprintf(dir, sizeof dir, "%s/small", r->dir);
    const char *why = small_disk(dir);
    if (why) {
        print_message("skipped: %s\n", why);
        skip();
    }
    live_seconds(0);
    struct live *w = live_open(r, mode, "1", "write", "3");
    full->data = dir;
    full->may_end = true;
    rig_servers_start(r, SERVERS);
    live_observe(r, w);
    for (unsigned i = 0; i < MEMBERS; i++)
        rig_worker_start(r, live_member, w);
    live_goes_on(r, w, 50, 30000);
    live_settled(r, w, 1, NULL);
    rig_worker_done(r, rig_worker_start(r, grower, NULL));
    int status = rig_server_end(r, FULL, text);
    if (status != 1 || !strstr(text, "no space left") || strchr(text, '\n') != text + strlen(text) - 1)
        RIG_FAIL(r, "wanted is status 1 and one line about the full disk: %d, '%s'", status, text);
    fprintf(stderr, "%s", text);
    full->ended = false;
    live_settled(r, w, 1, NULL);
    live_goes_on(r, w, 50, 30000);
    live_end(r, w);
}

static int teardown(void **state)
{
    struct rig *r = *state;
    char dir[192];
    snprintf(dir, sizeof dir, "%s/small", r->dir);
    umount2(dir, MNT_DETACH);
    return rig_teardown(state);
}

static void test_sync(void **state)
{
    run(*state, "sync");
}

static void test_async(void **state)
{
    run(*state, "async");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_sync, rig_setup, teardown),
        cmocka_unit_test_setup_teardown(test_async, rig_setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
