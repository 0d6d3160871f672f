#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/keepstep_err.h"
#include "server/launch.h"

/* ---- in the child, between fork and exec ---- */

struct plumbing {
    int out[2], err[2], ready[2], failed[2];
};

static void set_number(const char *name, uint32_t n)
{
    char text[16];
    snprintf(text, sizeof text, "%u", n);
    setenv(name, text, 1);
}

/* What the launcher decides must not come from its own environment. */
static void set_environment(const struct launch *l, const struct child *c)
{
    static const char *const ours[] = {"KEEPSTEP_DATA", "KEEPSTEP_LISTEN", "KEEPSTEP_ADVERTISE", "KEEPSTEP_TOKEN_FILE",
                                       "KEEPSTEP_SERVERS", "KEEPSTEP_MEMBERS", "KEEPSTEP_MODE", "KEEPSTEP_DURABILITY"};
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++)
        unsetenv(ours[i]);
    setenv("KEEPSTEP_COORD", l->coord, 1);
    setenv("KEEPSTEP_JOB", l->job, 1);
    setenv("KEEPSTEP_TOKEN", l->token, 1);
    setenv("KEEPSTEP_NAME", c->tag, 1);
    if (c->is_server)
        return;
    set_number("KEEPSTEP_INDEX", c->index);
    set_number("KEEPSTEP_LAUNCHED", l->nworkers);
    set_number("KEEPSTEP_RESTARTS", c->starts);
}

static void exec_server(const struct launch *l, const struct child *c, int ready_fd)
{
    char data[LAUNCH_PATH + 24], ready[40], servers[16], members[16];
    const char *argv[40] = {"keepstep", "server", "--name", c->tag, "--servers", servers, "--members", members,
                            "--durability", l->durability, "--mode", l->mode, "--listen", "127.0.0.1:0",
                            "--ready-file", ready, "--data", data};
    size_t n = 18;
    snprintf(data, sizeof data, "%s/server-%u", l->base, c->index);
    snprintf(ready, sizeof ready, "/proc/self/fd/%d", ready_fd);
    snprintf(servers, sizeof servers, "%u", l->nservers);
    snprintf(members, sizeof members, "%u", l->nworkers);
    for (size_t i = 0; l->pass[i]; i++)
        argv[n++] = l->pass[i];
    argv[n] = NULL;
    execv("/proc/self/exe", (char **)argv);
}

static int log_open(const struct launch *l, const struct child *c)
{
    char path[LAUNCH_PATH];
    snprintf(path, sizeof path, "%s/%s.log", l->log_dir, c->tag);
    return open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

static void become(const struct launch *l, const struct child *c, struct plumbing *p, pid_t parent)
{
    sigset_t none;
    int null = open("/dev/null", O_RDONLY);
    int log = l->log_dir ? log_open(l, c) : -1;
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(127);
    dup2(null, 0);
    dup2(l->log_dir ? log : p->out[1], 1);
    dup2(l->log_dir ? log : p->err[1], 2);
    if (c->is_server)
        fcntl(p->ready[1], F_SETFD, 0);
    set_environment(l, c);
    signal(SIGPIPE, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (c->is_server)
        exec_server(l, c, p->ready[1]);
    else
        execvp(l->program[0], l->program);
    int e = errno;
    ssize_t told = write(p->failed[1], &e, sizeof e);
    _exit(told == sizeof e ? 127 : 126);
}

/* ---- in the launcher ---- */

static void pair_close(int fd[2])
{
    for (int i = 0; i < 2; i++)
        if (fd[i] >= 0)
            close(fd[i]);
}

static int plumbing_open(struct plumbing *p)
{
    *p = (struct plumbing){{-1, -1}, {-1, -1}, {-1, -1}, {-1, -1}};
    int *pair[] = {p->out, p->err, p->ready, p->failed};
    for (size_t i = 0; i < 4; i++) {
        if (pipe2(pair[i], O_CLOEXEC)) {
            pair[i][0] = pair[i][1] = -1;
            return errno;
        }
    }
    return 0;
}

static void stream_start(struct stream *s, int fd, FILE *to)
{
    s->fd = fd;
    s->to = to;
    s->n = 0;
    fcntl(fd, F_SETFL, O_NONBLOCK);
}

/* Waits until the child runs its program; else the errno that it failed with. */
static int exec_result(struct plumbing *p)
{
    int e = 0;
    while (read(p->failed[0], &e, sizeof e) < 0 && errno == EINTR)
        continue;
    return e;
}

static void take_ends(struct child *c, struct plumbing *p, pid_t pid)
{
    setpgid(pid, pid);
    stream_start(&c->out, p->out[0], stdout);
    stream_start(&c->err, p->err[0], stderr);
    c->ready_fd = p->ready[0];
    p->out[0] = p->err[0] = p->ready[0] = -1;
    c->pid = pid;
    c->starts++;
    c->running = true;
    c->ready = false;
}

int child_start(struct launch *l, struct child *c, char *err)
{
    struct plumbing p;
    int e = plumbing_open(&p);
    pid_t parent = getpid(), pid = -1;
    fflush(stdout);
    if (!e && (pid = fork()) < 0)
        e = errno;
    if (pid == 0)
        become(l, c, &p, parent);
    if (!e) {
        close(p.failed[1]);
        p.failed[1] = -1;
        e = exec_result(&p);
        if (e)
            waitpid(pid, NULL, 0);
        else
            take_ends(c, &p, pid);
    }
    pair_close(p.out);
    pair_close(p.err);
    pair_close(p.ready);
    pair_close(p.failed);
    if (e)
        snprintf(err, LAUNCH_ERR, "cannot run %.200s: %s", c->is_server ? "a server" : l->program[0], strerror(e));
    return e ? KS_EIO : 0;
}

void child_signal(const struct child *c, int number)
{
    if (c->running && kill(-c->pid, number))
        kill(c->pid, number);
}

bool child_reap(struct launch *l, struct child *c)
{
    if (!c->running || waitpid(c->pid, &c->status, WNOHANG) != c->pid)
        return false;
    c->running = false;
    bool heard = stream_pump(&c->out, c->tag, true);
    if (!(stream_pump(&c->err, c->tag, true) && heard) && !l->interrupted)
        l->interrupted = SIGPIPE;
    if (c->ready_fd >= 0)
        close(c->ready_fd);
    c->ready_fd = -1;
    return true;
}

/* ---- output ---- */

static bool emit(struct stream *s, const char *tag, const char *line, size_t n)
{
    fprintf(s->to, "[%s] %.*s\n", tag, (int)n, line);
    s->n = 0;
    return fflush(s->to) == 0;
}

static bool lines(struct stream *s, const char *tag, const char *data, size_t n)
{
    bool heard = true;
    for (size_t i = 0; i < n; i++) {
        if (data[i] == '\n' || s->n == sizeof s->line)
            heard &= emit(s, tag, s->line, s->n);
        if (data[i] != '\n')
            s->line[s->n++] = data[i];
    }
    return heard;
}

bool stream_pump(struct stream *s, const char *tag, bool to_its_end)
{
    char data[65536];
    bool heard = true;
    while (s->fd >= 0) {
        ssize_t n = read(s->fd, data, sizeof data);
        if (n < 0 && errno == EINTR)
            continue;
        if (n > 0) {
            heard &= lines(s, tag, data, (size_t)n);
            if (!to_its_end)
                return heard;
            continue;
        }
        /* A grandchild may hold the pipe open: what is there now is all that is waited for. */
        if (n < 0 && errno == EAGAIN && !to_its_end)
            return heard;
        close(s->fd);
        s->fd = -1;
    }
    if (s->n)
        heard &= emit(s, tag, s->line, s->n);
    return heard;
}

/* ---- how it ended ---- */

bool child_ended_well(const struct child *c)
{
    return WIFEXITED(c->status) && WEXITSTATUS(c->status) == 0;
}

int child_exit_status(const struct child *c)
{
    return WIFEXITED(c->status) ? WEXITSTATUS(c->status) : 128 + WTERMSIG(c->status);
}

void child_describe(const struct child *c, char *out, size_t size)
{
    const char *name = WIFSIGNALED(c->status) ? sigabbrev_np(WTERMSIG(c->status)) : NULL;
    if (WIFEXITED(c->status))
        snprintf(out, size, "ended with status %d", WEXITSTATUS(c->status));
    else if (name)
        snprintf(out, size, "was killed by SIG%s", name);
    else
        snprintf(out, size, "was killed by signal %d", WTERMSIG(c->status));
}
