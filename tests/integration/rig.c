#include "tests/integration/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__)
enum { SLOW = 6 };
#elif defined(__SANITIZE_ADDRESS__)
enum { SLOW = 3 };
#else
enum { SLOW = 1 };
#endif
enum { LOG_TAIL = 3000, WHOLE_TEST_S = 240 };

int64_t rig_ms(int64_t ms)
{
    return ms * SLOW;
}

void rig_pause(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* ---- the directory ---- */

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

static void path_of(const struct rig *r, const char *kind, unsigned i, const char *end, char *ret)
{
    snprintf(ret, PATH_MAX, "%s/%s-%u%s", r->dir, kind, i, end);
}

static void tail_print(const char *path)
{
    char text[LOG_TAIL + 1];
    FILE *f = fopen(path, "re");
    if (!f)
        return;
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    fseek(f, size > LOG_TAIL ? size - LOG_TAIL : 0, SEEK_SET);
    size_t n = fread(text, 1, LOG_TAIL, f);
    fclose(f);
    text[n] = 0;
    if (n)
        fprintf(stderr, "---- %s%s\n%s\n", strrchr(path, '/') + 1, size > LOG_TAIL ? " (its end)" : "", text);
}

static void logs_print(const struct rig *r)
{
    char path[PATH_MAX];
    for (unsigned i = 0; i < r->nservers; i++) {
        path_of(r, "server", i, ".log", path);
        tail_print(path);
    }
    for (unsigned i = 0; i < r->nworkers; i++) {
        path_of(r, "worker", i, ".log", path);
        tail_print(path);
    }
}

void rig_fail(struct rig *r, const char *file, int line, const char *format, ...)
{
    char text[RIG_TEXT];
    va_list ap;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    logs_print(r);
    fprintf(stderr, "%s:%d: %s\n", file, line, text);
    _fail(file, line);
    abort();
}

/* ---- life ---- */

static void environment_set(void)
{
    const char *log = getenv("RIG_LOG");
    static const char *const own[] = {"COORD", "JOB", "TOKEN", "TOKEN_FILE", "NAME", "LOCAL_SIZE", "TIMEOUT", "DATA",
                                      "LISTEN", "ADVERTISE", "NOTICE", "EVENT_LOG", "REPLICAS", "MIN_REPLICAS", "LOOPS", "MEMORY", "SERVERS", "MEMBERS", "MODE",
                                      "DURABILITY", "DETERMINISTIC", "SHARDS", "CHUNK_BYTES", "WAIT_FOR_SERVER"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        char name[64];
        snprintf(name, sizeof name, "KEEPSTEP_%s", own[i]);
        unsetenv(name);
    }
    setenv("KEEPSTEP_LOG", log ? log : "warn", 1);
    /* All servers are told to end at the end of a test: nobody is there to take what they hold. */
    setenv("KEEPSTEP_NOTICE", "1", 1);
    setenv("TSAN_OPTIONS", "halt_on_error=1", 0);
}

int rig_setup(void **state)
{
    const char *tmp = getenv("TMPDIR");
    struct rig *r = calloc(1, sizeof *r);
    assert_non_null(r);
    environment_set();
    snprintf(r->dir, sizeof r->dir, "%.80s/keepstep-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->coord, sizeof r->coord, "local:%s/coord", r->dir);
    snprintf(r->job, sizeof r->job, "rig");
    snprintf(r->token, sizeof r->token, "a secret of %d", (int)getpid());
    setenv("KEEPSTEP_TOKEN", r->token, 1);
    alarm(WHOLE_TEST_S * SLOW);
    *state = r;
    return 0;
}

void rig_coord(struct rig *r, const char *url)
{
    snprintf(r->coord, sizeof r->coord, "%s", url);
}

static void kill_and_reap(pid_t *pid)
{
    if (*pid > 0) {
        kill(*pid, SIGKILL);
        waitpid(*pid, NULL, 0);
    }
    *pid = 0;
}

/* Ends in good order what still runs; 0 when all of it went well. */
static int end_all(struct rig *r)
{
    int bad = 0;
    for (unsigned i = 0; i < r->nworkers; i++)
        kill_and_reap(&r->worker[i].pid);
    for (unsigned i = 0; i < r->nservers; i++)
        if (r->server[i].pid)
            kill(r->server[i].pid, SIGTERM);
    for (unsigned i = 0; i < r->nservers; i++) {
        struct rig_server *s = &r->server[i];
        uint64_t end = clock_now_us() + (uint64_t)rig_ms(15000) * 1000;
        int status = -1;
        while (s->pid && waitpid(s->pid, &status, WNOHANG) == 0 && clock_now_us() < end)
            rig_pause();
        if (s->pid && status != 0) {
            fprintf(stderr, "server %u did not end well: status %x\n", i, (unsigned)status);
            bad = 1;
        }
        if (status == -1)
            kill_and_reap(&s->pid);
        s->pid = 0;
    }
    return bad;
}

int rig_teardown(void **state)
{
    struct rig *r = *state;
    const char *keep = getenv("RIG_KEEP");
    int bad = end_all(r);
    if (bad)
        logs_print(r);
    for (unsigned i = 0; i < r->nmaps; i++)
        munmap(r->map[i].at, r->map[i].size);
    if (keep && *keep)
        fprintf(stderr, "kept: %s\n", r->dir);
    else
        nftw(r->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    alarm(0);
    free(r);
    return bad;
}

void *rig_shared(struct rig *r, size_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    RIG_ASSERT(r, p != MAP_FAILED && r->nmaps < RIG_MAPS);
    r->map[r->nmaps].at = p;
    r->map[r->nmaps++].size = size;
    return p;
}

void rig_look(struct rig *r)
{
    int status;
    for (unsigned i = 0; i < r->nservers; i++) {
        struct rig_server *s = &r->server[i];
        if (s->pid && waitpid(s->pid, &status, WNOHANG) == s->pid) {
            s->pid = 0;
            s->ended = true;
            s->status = status;
            if (s->may_end)
                continue;
            RIG_FAIL(r, "server %u ended by itself, status %x", i, (unsigned)status);
        }
    }
    for (unsigned i = 0; i < r->nworkers; i++) {
        struct rig_worker *w = &r->worker[i];
        if (w->pid && waitpid(w->pid, &status, WNOHANG) == w->pid) {
            w->pid = 0;
            if (status)
                RIG_FAIL(r, "worker %u failed, status %x", i, (unsigned)status);
        }
    }
    rig_pause();
}

/* ---- servers ---- */

void rig_server_options(struct rig *r, const char *first, ...)
{
    va_list ap;
    va_start(ap, first);
    for (const char *a = first; a; a = va_arg(ap, const char *)) {
        RIG_ASSERT(r, r->nargs < RIG_ARGS / 2);
        r->args[r->nargs++] = a;
    }
    va_end(ap);
}

static void netns_enter(const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET)) {
        fprintf(stderr, "cannot enter %s: %s\n", path, strerror(errno));
        _exit(127);
    }
    close(fd);
}

/* Becomes a child that writes its stderr to a log and does not outlive the test. */
static pid_t fork_child(const char *log, const char *netns)
{
    pid_t parent = getpid(), pid;
    fflush(NULL);
    pid = fork();
    if (pid)
        return pid;
    alarm(0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(127);
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    dup2(fd, 2);
    dup2(fd, 1);
    if (netns)
        netns_enter(netns);
    return 0;
}

/* The program that was built together with this test. */
static void program(char *ret)
{
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    for (int up = 0; up < 3 && strrchr(self, '/'); up++)
        *strrchr(self, '/') = 0;
    snprintf(ret, PATH_MAX, "%.*s/keepstep", PATH_MAX - 16, self);
}

void rig_server_launch(struct rig *r, unsigned i, const char *data, const char *more, const char *value)
{
    struct rig_server *s = &r->server[i];
    char exe[PATH_MAX], log[PATH_MAX], ready[PATH_MAX], own[PATH_MAX], name[16];
    const char *argv[RIG_ARGS] = {"keepstep", "server", "--coord",      r->coord, "--job",  r->job,
                                  "--name",   name,     "--ready-file", ready,    "--data", data ? data : own};
    int n = 12;
    RIG_ASSERT(r, i < RIG_SERVERS && !s->pid);
    program(exe);
    snprintf(name, sizeof name, "s%u", i);
    path_of(r, "server", i, ".log", log);
    path_of(r, "server", i, ".ready", ready);
    if (s->data)
        snprintf(own, sizeof own, "%s", s->data);
    else
        path_of(r, "data", i, "", own);
    s->ended = false;
    unlink(ready);
    unlink(log);
    s->starts++;
    for (unsigned k = 0; k < r->nargs; k++)
        argv[n++] = r->args[k];
    if (s->listen) {
        argv[n++] = "--listen";
        argv[n++] = s->listen;
    }
    if (more)
        argv[n++] = more;
    if (value)
        argv[n++] = value;
    r->nservers = i >= r->nservers ? i + 1 : r->nservers;
    s->pid = fork_child(log, s->netns);
    if (s->pid == 0) {
        execv(exe, (char *const *)argv);
        fprintf(stderr, "cannot run %s: %s\n", exe, strerror(errno));
        _exit(127);
    }
}

static bool ready_read(struct rig *r, unsigned i)
{
    char path[PATH_MAX], text[64];
    path_of(r, "server", i, ".ready", path);
    FILE *f = fopen(path, "re");
    bool whole = f && fgets(text, sizeof text, f) && strchr(text, '\n');
    if (f)
        fclose(f);
    if (whole)
        snprintf(r->server[i].ctl, sizeof r->server[i].ctl, "%.*s", (int)strcspn(text, "\n"), text);
    return whole;
}

void rig_server_await(struct rig *r, unsigned i)
{
    RIG_UNTIL(r, ready_read(r, i));
}

void rig_server_start(struct rig *r, unsigned i)
{
    rig_server_launch(r, i, NULL, NULL, NULL);
    rig_server_await(r, i);
}

void rig_servers_start(struct rig *r, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        rig_server_launch(r, i, NULL, NULL, NULL);
    for (unsigned i = 0; i < n; i++)
        RIG_UNTIL(r, ready_read(r, i));
}

void rig_server_kill(struct rig *r, unsigned i)
{
    RIG_ASSERT(r, r->server[i].pid);
    kill_and_reap(&r->server[i].pid);
}

void rig_server_signal(struct rig *r, unsigned i, int number)
{
    RIG_ASSERT(r, r->server[i].pid > 0 && kill(r->server[i].pid, number) == 0);
}

int rig_server_end(struct rig *r, unsigned i, char *ret_text)
{
    struct rig_server *s = &r->server[i];
    char path[PATH_MAX], line[RIG_TEXT];
    uint64_t end = clock_now_us() + (uint64_t)rig_ms(30000) * 1000;
    int status = 0;
    while (s->pid && waitpid(s->pid, &status, WNOHANG) == 0) {
        rig_pause();
        if (clock_now_us() > end)
            RIG_FAIL(r, "server %u does not end", i);
    }
    status = s->pid ? status : s->status;
    s->pid = 0;
    if (!WIFEXITED(status))
        RIG_FAIL(r, "server %u was ended by signal %d", i, WTERMSIG(status));
    path_of(r, "server", i, ".log", path);
    FILE *f = fopen(path, "re");
    ret_text[0] = 0;
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, "keepstep", 8) && strlen(ret_text) + strlen(line) < RIG_TEXT)
            strcat(ret_text, line);
    if (f)
        fclose(f);
    return WEXITSTATUS(status);
}

void rig_server_stop(struct rig *r, unsigned i)
{
    char text[RIG_TEXT];
    kill(r->server[i].pid, SIGTERM);
    int status = rig_server_end(r, i, text);
    if (status)
        RIG_FAIL(r, "server %u was told to stop and gave %d: %s", i, status, text);
}

static void file_read(const char *path, char *ret_text)
{
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(ret_text, 1, RIG_TEXT - 1, f) : 0;
    ret_text[n] = 0;
    if (f)
        fclose(f);
}

int rig_command(struct rig *r, char *ret_text, const char *word, ...)
{
    char exe[PATH_MAX], log[PATH_MAX];
    const char *argv[RIG_ARGS] = {"keepstep"};
    int n = 1, status = 0;
    uint64_t end = clock_now_us() + (uint64_t)rig_ms(30000) * 1000;
    va_list ap;
    va_start(ap, word);
    for (const char *a = word; a && n < RIG_ARGS - 5; a = va_arg(ap, const char *))
        argv[n++] = a;
    va_end(ap);
    const char *const job[] = {"--coord", r->coord, "--job", r->job};
    memmove(argv + 2 + 4, argv + 2, (size_t)(n - 2) * sizeof *argv);
    memcpy(argv + 2, job, sizeof job);
    program(exe);
    path_of(r, "command", r->ncommands++, ".log", log);
    pid_t pid = fork_child(log, NULL);
    if (pid == 0) {
        execv(exe, (char *const *)argv);
        _exit(127);
    }
    while (waitpid(pid, &status, WNOHANG) == 0) {
        rig_look(r);
        if (clock_now_us() > end) {
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
            file_read(log, ret_text);
            RIG_FAIL(r, "keepstep %s does not end: %s", word, ret_text);
        }
    }
    file_read(log, ret_text);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

long rig_rss(pid_t pid)
{
    char path[64], line[128];
    long kib = -1;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "VmRSS: %ld", &kib) == 1)
            break;
    if (f)
        fclose(f);
    return kib;
}

/* ---- members ---- */

unsigned rig_worker_start(struct rig *r, void (*fn)(struct rig_self *), void *arg)
{
    char log[PATH_MAX];
    unsigned w = r->nworkers;
    struct rig_self self = {r, w, arg};
    RIG_ASSERT(r, w < RIG_WORKERS);
    path_of(r, "worker", w, ".log", log);
    r->nworkers++;
    r->worker[w].pid = fork_child(log, r->worker_netns);
    if (r->worker[w].pid)
        return w;
    fn(&self);
    fflush(NULL);
    exit(0);
}

void rig_worker_kill(struct rig *r, unsigned w)
{
    kill_and_reap(&r->worker[w].pid);
}

void rig_worker_signal(struct rig *r, unsigned w, int number)
{
    RIG_ASSERT(r, r->worker[w].pid > 0 && kill(r->worker[w].pid, number) == 0);
}

void rig_worker_done(struct rig *r, unsigned w)
{
    RIG_UNTIL(r, r->worker[w].pid == 0);
}

void rig_workers_done(struct rig *r)
{
    for (unsigned w = 0; w < r->nworkers; w++)
        rig_worker_done(r, w);
}

/* ---- inside a member ---- */

void rig_die(const struct ks_job *j, const char *file, int line, const char *format, ...)
{
    char text[RIG_TEXT], waiting[RIG_TEXT] = "";
    va_list ap;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    if (j)
        ks_waiting(j, waiting, sizeof waiting);
    fprintf(stderr, "%s:%d: %s; last error: %s; step %lld; waiting: %s\n", file, line, text, ks_last_error(j),
            j ? (long long)ks_step(j) : -1, waiting);
    fflush(stderr);
    _exit(1);
}

struct ks_job *rig_open(struct rig_self *s)
{
    char name[32];
    struct ks_job *j = NULL;
    snprintf(name, sizeof name, "w%u", s->index);
    struct ks_options o = {.coord = s->rig->coord, .job = s->rig->job, .token = s->rig->token, .name = name,
                           .timeout_ms = rig_ms(s->rig->timeout_ms ? s->rig->timeout_ms : 30000)};
    RIG_OK(NULL, ks_open(&o, &j));
    return j;
}

struct ks_tensor *rig_tensor(struct ks_job *j, const char *name, enum ks_dtype dtype, uint64_t n, enum ks_kind kind,
                             const char *optimizer)
{
    struct ks_tensor *t = NULL;
    struct ks_spec spec = {.dtype = dtype, .ndims = 1, .dims = {n}, .kind = kind, .op = KS_SUM, .optimizer = optimizer};
    RIG_OK(j, ks_tensor_register(j, name, &spec, &t));
    return t;
}
