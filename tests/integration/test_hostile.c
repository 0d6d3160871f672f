/* Hostile bytes on the control and data ports while two members train: the server stays up, training goes on and is
 * right to the end. TEST_SEED sets the seed. */
#include "tests/integration/rig.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/mem.h"
#include "net/auth.h"
#include "wire/frame.h"

enum { MEMBERS = 2, N = 300, CHUNK = 1024, PORTS_MAX = 8, ROUNDS = 150, IDLE = 40, PAYLOAD_MAX = 70000 };

struct world {
    _Atomic int64_t steps[MEMBERS];
    _Atomic uint64_t id[MEMBERS];
    _Atomic int removed;
    _Atomic bool stop;
};
struct task {
    struct world *w;
    unsigned slot;
};

/* ---- those who train ---- */

/* Who knows the token and a member's id can have that member removed, at the worst: it goes on as a new one. */
static bool removed(const struct ks_job *j, int rc)
{
    RIG_MUST(j, rc == KS_OK || rc == KS_EFENCED);
    return rc == KS_EFENCED;
}

/* false: this member was removed meanwhile. */
static bool step(struct ks_job *j, struct ks_tensor *p, struct ks_tensor *sum, int64_t *value, int64_t *out)
{
    int64_t in[N];
    struct ks_handle *h = NULL, *k = NULL;
    for (int i = 0; i < N; i++)
        in[i] = 1;
    bool gone = removed(j, ks_push_pull(p, in, value, 1.0, &h));
    gone |= removed(j, ks_push_pull(sum, in, out, 1.0, &k));
    gone |= removed(j, ks_step_end(j));
    gone |= h && removed(j, ks_wait(h, -1));
    gone |= k && removed(j, ks_wait(k, -1));
    return !gone;
}

static void honest(struct rig_self *s)
{
    struct task *task = s->arg;
    struct world *w = task->w;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *p = rig_tensor(j, "p", KS_I64, N, KS_PARAM, "add"),
                     *sum = rig_tensor(j, "s", KS_I64, N, KS_REDUCE, NULL);
    int64_t out[N], value[N], before = -1;
    while (!w->stop) {
        w->id[task->slot] = ks_member_id(j);
        if (!step(j, p, sum, value, out)) {
            w->removed++;
            before = -1;
            continue;
        }
        for (int i = 0; i < N; i++)
            RIG_MUST(j, out[i] == out[0] && value[i] == value[0]);
        RIG_MUST(j, out[0] >= 1 && out[0] <= MEMBERS);
        RIG_MUST(j, before < 0 || value[0] == before + out[0]);
        before = value[0];
        w->steps[task->slot]++;
    }
    ks_close(j);
}

/* ---- ports ---- */

static bool port_of_inode(unsigned long inode, unsigned *ret_port)
{
    char line[512];
    unsigned port, state;
    unsigned long at;
    bool found = false;
    FILE *f = fopen("/proc/net/tcp", "re");
    while (f && !found && fgets(line, sizeof line, f)) {
        found = sscanf(line, " %*d: %*8x:%x %*x:%*x %x %*x:%*x %*x:%*x %*x %*u %*u %lu", &port, &state, &at) == 3 &&
                at == inode && state == 0x0a;
    }
    if (f)
        fclose(f);
    if (found)
        *ret_port = port;
    return found;
}

/* What a process listens at. */
static unsigned ports_of(pid_t pid, unsigned *ret_port)
{
    char path[64], link[300], target[64];
    unsigned n = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d)) && n < PORTS_MAX;) {
        unsigned long inode;
        snprintf(link, sizeof link, "%s/%s", path, e->d_name);
        ssize_t size = readlink(link, target, sizeof target - 1);
        target[size > 0 ? size : 0] = 0;
        if (sscanf(target, "socket:[%lu]", &inode) == 1 && port_of_inode(inode, &ret_port[n]))
            n++;
    }
    if (d)
        closedir(d);
    return n;
}

/* ---- a connection ---- */

struct target {
    struct rig *rig;
    struct world *w;
    struct rng rng;
    unsigned port[PORTS_MAX], nports, control;
    int idle[IDLE];
    unsigned nidle, impostors;
    const char *job, *token, *role;
    uint64_t id;
};

static int dial(struct target *t, unsigned port)
{
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct timeval limit = {.tv_sec = 20};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    RIG_ASSERT(t->rig, fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    return fd;
}

/* The other end may have closed: that is no error here. */
static bool put(int fd, const void *data, size_t size)
{
    for (const char *p = data; size;) {
        ssize_t n = send(fd, p, size, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        p += n;
        size -= (size_t)n;
    }
    return true;
}

static bool get(int fd, void *data, size_t size)
{
    for (char *p = data; size;) {
        ssize_t n = recv(fd, p, size, 0);
        if (n <= 0)
            return false;
        p += n;
        size -= (size_t)n;
    }
    return true;
}

static bool put_frame(int fd, const struct frame_header *h, const void *payload)
{
    uint8_t head[FRAME_SIZE];
    frame_encode(h, head);
    return put(fd, head, sizeof head) && put(fd, payload, h->len);
}

/* Until the server closes. */
static void drain(struct target *t, int fd)
{
    char dump[4096];
    ssize_t n;
    while ((n = recv(fd, dump, sizeof dump, 0)) > 0)
        ;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        RIG_FAIL(t->rig, "the server keeps a connection that broke the protocol");
    close(fd);
}

static int reply_send(int fd, struct auth_reply *reply)
{
    struct frame_header h = {.type = reply->type, .len = reply->doc ? strlen(reply->doc) : 0};
    bool sent = !reply->type || put_frame(fd, &h, reply->doc);
    mem_free(reply->doc);
    return sent ? 0 : KS_ECLOSED;
}

/* A proof that is none, instead of the one that it takes the token for. */
static void forge(struct target *t, struct auth_reply *ret_reply)
{
    struct proof_doc p = {.id = t->id};
    for (int i = 0; i < PROOF_BYTES; i++)
        p.proof[i] = (uint8_t)rng_next(&t->rng);
    *ret_reply = (struct auth_reply){FRAME_AUTH, proof_encode(&p)};
}

/* 0, or the status of the server's goodbye. */
static int handshake(struct target *t, int fd, unsigned port)
{
    uint32_t chunk = port == t->control ? 0 : CHUNK;
    struct hello self = {.id = t->id, .chunk_bytes = chunk};
    struct auth a;
    struct auth_reply reply;
    char doc[8192], err[ERR_TEXT];
    snprintf(self.job, sizeof self.job, "%s", t->job);
    snprintf(self.role, sizeof self.role, "%s", t->role);
    for (int i = 0; i < NONCE_BYTES; i++)
        self.nonce[i] = (uint8_t)rng_next(&t->rng);
    auth_init(&a, AUTH_CONNECTOR, &self, t->token, &reply);
    while (a.state != AUTH_OPEN) {
        uint8_t head[FRAME_SIZE];
        struct frame_header h;
        int rc = reply_send(fd, &reply);
        if (rc || !get(fd, head, sizeof head) || frame_decode(head, chunk, &h) || h.len >= sizeof doc ||
            !get(fd, doc, h.len))
            return KS_ECLOSED;
        doc[h.len] = 0;
        if (h.type == FRAME_BYE)
            return h.status;
        rc = auth_step(&a, h.type, doc, h.len, &reply, err);
        if (rc == KS_EAUTH)
            forge(t, &reply);
        else if (rc)
            return rc;
    }
    return 0;
}

static void as(struct target *t, const char *job, const char *token, const char *role, uint64_t id)
{
    t->job = job;
    t->token = token;
    t->role = role;
    t->id = id;
}

static unsigned any_port(struct target *t)
{
    return t->port[rng_below(&t->rng, t->nports)];
}

static void noise(struct target *t, void *out, size_t size)
{
    for (size_t i = 0; i < size; i++)
        ((uint8_t *)out)[i] = (uint8_t)rng_next(&t->rng);
}

/* ---- attacks ---- */

static void random_bytes(struct target *t)
{
    static uint8_t bytes[PAYLOAD_MAX];
    int fd = dial(t, any_port(t));
    size_t size = FRAME_SIZE + rng_below(&t->rng, sizeof bytes - FRAME_SIZE);
    noise(t, bytes, size);
    put(fd, bytes, size);
    drain(t, fd);
}

static void half_a_frame(struct target *t)
{
    uint8_t bytes[FRAME_SIZE + 100] = {0};
    struct frame_header h = {.type = FRAME_HELLO, .len = 200};
    int fd = dial(t, any_port(t));
    frame_encode(&h, bytes);
    put(fd, bytes, 1 + rng_below(&t->rng, sizeof bytes - 1));
    if (rng_chance(&t->rng, 500) || t->nidle == IDLE)
        close(fd);
    else
        t->idle[t->nidle++] = fd;
}

static void too_long(struct target *t)
{
    int fd = dial(t, any_port(t));
    struct frame_header h = {.type = FRAME_HELLO, .len = 1ull << (20 + rng_below(&t->rng, 43))};
    uint8_t head[FRAME_SIZE];
    frame_encode(&h, head);
    put(fd, head, sizeof head);
    drain(t, fd);
}

static void out_of_turn(struct target *t)
{
    struct frame_header h = {.type = (uint8_t)rng_below(&t->rng, 256), .chunk = (uint32_t)rng_next(&t->rng)};
    int fd = dial(t, any_port(t));
    if (h.type == FRAME_HELLO)
        h.type = FRAME_PUSH;
    put_frame(fd, &h, NULL);
    drain(t, fd);
}

static void refused(struct target *t, int want)
{
    unsigned port = any_port(t);
    int fd = dial(t, port), rc = handshake(t, fd, port);
    if (rc != want)
        RIG_FAIL(t->rig, "a handshake gave %d, not %d", rc, want);
    drain(t, fd);
}

static void wrong_token(struct target *t)
{
    as(t, t->rig->job, "guessed", "member", rng_next(&t->rng) | 1);
    refused(t, KS_EAUTH);
}

static void wrong_job(struct target *t)
{
    as(t, "another", t->rig->token, "member", rng_next(&t->rng) | 1);
    refused(t, KS_ENOENT);
}

static void random_header(struct target *t, struct frame_header *h)
{
    struct rng *g = &t->rng;
    *h = (struct frame_header){.type = (uint8_t)rng_below(g, FRAME_TYPE_MAX + 10),
                               .flags = (uint8_t)rng_next(g),
                               .dtype = (uint8_t)rng_below(g, 9),
                               .status = (int16_t) - (int64_t)rng_below(g, 30),
                               .tensor = rng_chance(g, 500) ? tensor_id("p") : rng_next(g),
                               .step = (int64_t)rng_below(g, 1000) - 1,
                               .chunk = (uint32_t)rng_below(g, 5),
                               .seq = (uint32_t)rng_below(g, 5),
                               .epoch = (uint32_t)rng_below(g, 10),
                               .weight = 1,
                               .version = rng_next(g),
                               .len = rng_chance(g, 300) ? 0 : rng_below(g, 2 * CHUNK)};
    h->flags &= (uint8_t)~FRAME_CRC;
    /* Those that a holder of the token may say: they end the job, by design. */
    if (h->type == FRAME_STOP || h->type == FRAME_BYE)
        h->type = FRAME_RESULT;
}

/* A connection that has proved the token, and then sends nonsense until it is closed or has had enough. */
static void nonsense(struct target *t)
{
    static uint8_t payload[2 * CHUNK];
    unsigned port = any_port(t);
    int fd = dial(t, port);
    if (handshake(t, fd, port) == 0)
        for (int i = 0; i < 20; i++) {
            struct frame_header h;
            random_header(t, &h);
            if (rng_chance(&t->rng, 500))
                memset(payload, 0, sizeof payload);
            else
                noise(t, payload, sizeof payload);
            if (!put_frame(fd, &h, payload))
                break;
        }
    /* A broken header at the end: now it has to be closed. */
    noise(t, payload, sizeof payload);
    put(fd, payload, sizeof payload);
    drain(t, fd);
}

static void nonsense_of_a_stranger(struct target *t)
{
    as(t, t->rig->job, t->rig->token, rng_chance(&t->rng, 700) ? "member" : "operator", rng_next(&t->rng) | 1);
    nonsense(t);
}

/* With the id of one that trains: it loses a connection, and connects again. */
static void broken_of_a_member(struct target *t)
{
    uint8_t bytes[FRAME_SIZE];
    unsigned port = any_port(t);
    int fd = dial(t, port);
    t->impostors++;
    as(t, t->rig->job, t->rig->token, "member", t->w->id[rng_below(&t->rng, MEMBERS)]);
    (void)handshake(t, fd, port);
    noise(t, bytes, sizeof bytes);
    put(fd, bytes, sizeof bytes);
    drain(t, fd);
}

static void (*const attack[])(struct target *) = {
    random_bytes,           half_a_frame,           too_long,          out_of_turn, wrong_token, wrong_job,
    nonsense_of_a_stranger, nonsense_of_a_stranger, broken_of_a_member};
enum { ATTACKS = sizeof attack / sizeof *attack };

/* ---- the test ---- */

static void progress(struct rig *r, const struct world *w)
{
    int64_t next[MEMBERS];
    for (unsigned i = 0; i < MEMBERS; i++)
        next[i] = w->steps[i] + 2;
    for (unsigned i = 0; i < MEMBERS; i++)
        RIG_UNTIL(r, w->steps[i] >= next[i]);
}

static uint64_t seed(void)
{
    const char *v = getenv("TEST_SEED");
    return v && *v ? strtoull(v, NULL, 10) : 1;
}

static void test_hostile(void **state)
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    struct task task[MEMBERS];
    struct target t = {.rig = r, .w = w, .rng = {seed()}};
    rig_server_options(r, "--members", "2", "--loops", "2", "--shards", "6", "--chunk-bytes", "1024", NULL);
    rig_server_start(r, 0);
    t.nports = ports_of(r->server[0].pid, t.port);
    t.control = (unsigned)strtoul(strrchr(r->server[0].ctl, ':') + 1, NULL, 10);
    RIG_ASSERT(r, t.nports == 3);
    for (unsigned i = 0; i < MEMBERS; i++) {
        task[i] = (struct task){w, i};
        rig_worker_start(r, honest, &task[i]);
    }
    progress(r, w);
    for (unsigned i = 0; i < ROUNDS; i++) {
        attack[i < ATTACKS ? i : rng_below(&t.rng, ATTACKS)](&t);
        progress(r, w);
    }
    /* A peer that does not finish its hello is sent away in the end. */
    for (unsigned i = 0; i < t.nidle; i++)
        drain(&t, t.idle[i]);
    progress(r, w);
    w->stop = true;
    rig_workers_done(r);
    RIG_ASSERT(r, w->removed <= (int)t.impostors);
    rig_server_stop(r, 0);
}

/* What a dead member is heard to say last is refused: it is dead all the same. */
static void test_refused_and_dead(void **state)
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    struct task task[MEMBERS] = {{w, 0}, {w, 1}};
    struct target t = {.rig = r, .w = w, .rng = {seed()}};
    struct frame_header h = {.type = FRAME_JOIN, .len = 4};
    rig_server_options(r, "--members", "2", "--loops", "2", "--shards", "6", "--chunk-bytes", "1024", NULL);
    rig_server_start(r, 0);
    t.control = (unsigned)strtoul(strrchr(r->server[0].ctl, ':') + 1, NULL, 10);
    for (unsigned i = 0; i < MEMBERS; i++)
        rig_worker_start(r, honest, &task[i]);
    progress(r, w);
    as(&t, r->job, r->token, "member", w->id[1]);
    rig_worker_kill(r, 1);
    int fd = dial(&t, t.control);
    RIG_ASSERT(r, handshake(&t, fd, t.control) == 0);
    put_frame(fd, &h, "junk");
    drain(&t, fd);
    int64_t next = w->steps[0] + 10;
    RIG_UNTIL(r, w->steps[0] >= next);
    w->stop = true;
    rig_worker_done(r, 0);
    rig_server_stop(r, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_hostile, rig_setup, rig_teardown),
                                       cmocka_unit_test_setup_teardown(test_refused_and_dead, rig_setup, rig_teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
