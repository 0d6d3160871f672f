/* coord_world.h - where the implementations of coord.h live during a test: how each is started, opened,
 * disturbed and stopped. */
#ifndef TESTS_CONTRACT_COORD_WORLD_H
#define TESTS_CONTRACT_COORD_WORLD_H

#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "coord_rig.h"
#include "etcd_process.h"

enum { WORLD_TIMEOUT_MS = 1000 };

struct world {
    const struct backend *backend;
    struct coord_model *model;
    char url[512];
    char dir[64];
    int hold_fd; /* local: the writer lock, during an outage */
    struct etcd_member etcd;
};
struct backend {
    const char *name;
    bool url;                     /* opened by an URL, so that other processes can open it */
    uint32_t ttl_ms;              /* a short lease here */
    uint32_t death_ms;            /* keys of a killed process are gone within */
    const char *(*missing)(void); /* why it cannot run here, or NULL */
    int (*start)(struct world *w);
    void (*stop)(struct world *w);
    void (*open)(struct world *w, struct rig *r, const char *job);
    /* The owner stops keeping this lease alive. */
    void (*abandon)(struct world *w, struct rig *owner, int64_t lease);
    /* Forgets the history before now. */
    void (*compact)(struct world *w, struct rig *r);
    void (*outage)(struct world *w, bool on);
};

static inline int model_start(struct world *w)
{
    w->model = coord_model_create();
    return 0;
}

static inline void model_stop(struct world *w)
{
    coord_model_free(w->model);
}

static inline void model_open(struct world *w, struct rig *r, const char *job)
{
    struct coord_event e;
    struct coord_config c = {.job = job, .wake = rig_wake, .wake_arg = r};
    assert_int_equal(coord_model_open(w->model, &c, &r->coord), 0);
    struct coord_request all = {.kind = COORD_RANGE};
    coord_model_apply(w->model, &all, &e);
    /* One store has one job here: start every case from an empty one. */
    for (uint32_t i = 0; i < e.nkv; i++)
        if (strcmp(w->url, job) != 0)
            rig_delete(r, e.kv[i].key);
    snprintf(w->url, sizeof w->url, "%s", job);
    coord_event_done(&e);
}

static inline void model_abandon(struct world *w, struct rig *owner, int64_t lease)
{
    (void)owner;
    coord_model_expire(w->model, lease);
}

static inline void world_remove_dir(const char *dir)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    assert_int_equal(system(command), 0);
}

static inline void world_temp_dir(char *out, size_t size)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(out, size, "%s/keepstep-coord-XXXXXX", tmp && strlen(tmp) < size - 32 ? tmp : "/tmp");
    assert_non_null(mkdtemp(out));
}

static inline void url_open(struct world *w, struct rig *r, const char *job)
{
    char err[COORD_ERR_TEXT];
    struct coord_config c = {
        .url = w->url, .job = job, .timeout_ms = WORLD_TIMEOUT_MS, .wake = rig_wake, .wake_arg = r};
    if (coord_open(&c, &r->coord, err))
        fail_msg("%s", err);
}

static inline void url_abandon(struct world *w, struct rig *owner, int64_t lease)
{
    (void)w;
    (void)lease;
    owner->coord->ops->close(owner->coord);
    owner->coord = NULL;
}

static inline int local_start(struct world *w)
{
    world_temp_dir(w->dir, sizeof w->dir);
    snprintf(w->url, sizeof w->url, "local:%s/made/with parents", w->dir);
    return 0;
}

static inline void local_stop(struct world *w)
{
    world_remove_dir(w->dir);
}

static inline void local_compact(struct world *w, struct rig *r)
{
    (void)w;
    char *big = mem_alloc(COORD_VALUE_MAX + 1);
    memset(big, 'c', COORD_VALUE_MAX);
    for (int i = 0; i < 66; i++)
        rig_put(r, "compact", big, 0);
    rig_delete(r, "compact");
    mem_free(big);
}

static inline void local_outage(struct world *w, bool on)
{
    char path[600];
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (!on) {
        close(w->hold_fd);
        return;
    }
    snprintf(path, sizeof path, "%s/writer.lock", w->url + 6);
    w->hold_fd = open(path, O_RDWR | O_CLOEXEC);
    assert_int_equal(fcntl(w->hold_fd, F_OFD_SETLK, &lock), 0);
}

static inline int etcd_world_start(struct world *w)
{
    char url[128];
    world_temp_dir(w->dir, sizeof w->dir);
    if (!etcd_start_alone(&w->etcd, w->dir))
        return -1;
    etcd_url(&w->etcd, url, sizeof url);
    snprintf(w->url, sizeof w->url, "etcd:%s", url);
    return 0;
}

static inline void etcd_world_stop(struct world *w)
{
    etcd_kill(&w->etcd);
    world_remove_dir(w->dir);
}

static inline void etcd_compact(struct world *w, struct rig *r)
{
    char body[64];
    rig_put(r, "compact", "1", 0);
    rig_put(r, "compact", "2", 0);
    int64_t revision = rig_delete(r, "compact");
    snprintf(body, sizeof body, "{\"revision\":\"%lld\",\"physical\":true}", (long long)revision);
    assert_int_equal(etcd_post(&w->etcd, "/v3/kv/compaction", body, NULL, NULL), 200);
}

static inline void etcd_outage(struct world *w, bool on)
{
    assert_int_equal(kill(w->etcd.pid, on ? SIGSTOP : SIGCONT), 0);
}

/* A process that opens the same store: this program with arguments, see world_child. */
static inline pid_t world_spawn(struct world *w, const char *job, const char *what)
{
    extern char **environ;
    pid_t pid;
    char *argv[] = {"test", (char *)what, w->url, (char *)job, NULL};
    assert_int_equal(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, argv, environ), 0);
    return pid;
}

static inline int world_wait(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

/* Puts a key under a lease (and stops), and another when the lease is lost. */
static inline int child_hold(struct rig *r, bool stop)
{
    struct coord_event e;
    rig_put(r, "child", "here", rig_grant(r, 1000));
    if (stop)
        raise(SIGSTOP);
    if (!rig_try(r, COORD_LEASE_LOST, 0, 60000, &e))
        return 1;
    rig_put(r, "lost", "told", 0);
    return 0;
}

static inline int world_child(int argc, char **argv)
{
    struct rig r;
    char err[COORD_ERR_TEXT];
    if (argc < 4)
        return 2;
    rig_init(&r);
    struct coord_config c = {
        .url = argv[2], .job = argv[3], .timeout_ms = WORLD_TIMEOUT_MS, .wake = rig_wake, .wake_arg = &r};
    if (coord_open(&c, &r.coord, err)) {
        fprintf(stderr, "%s\n", err);
        return 2;
    }
    int result = child_hold(&r, strcmp(argv[1], "stop") == 0);
    rig_done(&r);
    return result;
}

static const struct backend world_backend[] = {
    {.name = "coord_model",
     .ttl_ms = 100,
     .start = model_start,
     .stop = model_stop,
     .open = model_open,
     .abandon = model_abandon},
    {.name = "coord_local",
     .url = true,
     .ttl_ms = 600,
     .death_ms = 400,
     .start = local_start,
     .stop = local_stop,
     .open = url_open,
     .abandon = url_abandon,
     .compact = local_compact,
     .outage = local_outage},
    {.name = "coord_etcd",
     .url = true,
     .ttl_ms = 2000,
     .death_ms = 5000,
     .missing = etcd_missing,
     .start = etcd_world_start,
     .stop = etcd_world_stop,
     .open = url_open,
     .abandon = url_abandon,
     .compact = etcd_compact,
     .outage = etcd_outage},
};
enum { WORLD_BACKENDS = sizeof world_backend / sizeof *world_backend };

#endif
