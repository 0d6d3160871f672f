#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"
#include "net/net.h"

enum { CHUNK = 1 << 20, DEADLINE_MS = 20000, SEEN_MAX = 64 };

/* One end: a net with its own loop, and what its handlers saw. */
struct end {
    uv_loop_t loop;
    struct net *net;
    struct net_conn *conn; /* newest that opened */
    char addr[ADDR_MAX_BYTES];
    unsigned opened, closed, abandoned, frames, discarded, refuse;
    int status; /* of the newest closed */
    char cause[ERR_TEXT];
    uint64_t closed_ms[SEEN_MAX];
    uint64_t peer;
    uint64_t sum; /* of payload bytes */
    uint32_t next_seq;
    bool out_of_order, drop, close_in_sink;
    uint8_t *space;
    unsigned released;
    pthread_mutex_t mutex;
};

static int on_accept(void *arg, const struct hello *h, char *err)
{
    struct end *e = arg;
    if (!e->refuse)
        return 0;
    snprintf(err, ERR_TEXT, "life %llu was removed", (unsigned long long)h->id);
    return KS_EFENCED;
}

static void on_opened(void *arg, struct net_conn *c)
{
    struct end *e = arg;
    e->conn = c;
    e->opened++;
    e->peer = net_peer_id(c);
    e->next_seq = 0;
}

static void *on_sink(void *arg, struct net_conn *c, const struct frame_header *h, void **ret_cookie)
{
    struct end *e = arg;
    (void)c;
    assert_true(h->len <= 4 * CHUNK);
    *ret_cookie = e;
    if (e->close_in_sink)
        net_close(c, KS_ESTATE, "enough");
    return e->drop ? NULL : e->space;
}

static void on_abandon(void *arg, struct net_conn *c, const struct frame_header *h, void *cookie)
{
    struct end *e = arg;
    (void)c;
    (void)h;
    assert_ptr_equal(cookie, e);
    e->abandoned++;
}

static void on_frame(void *arg, struct net_conn *c, const struct frame_header *h, void *payload, void *cookie,
                     bool discarded)
{
    struct end *e = arg;
    (void)c;
    assert_true(discarded || h->len == 0 || cookie == e);
    e->frames++;
    e->discarded += discarded;
    e->out_of_order |= h->seq != e->next_seq++;
    for (uint64_t i = 0; payload && i < h->len; i++)
        e->sum += ((const uint8_t *)payload)[i];
}

static void on_closed(void *arg, struct net_conn *c, int status, const char *cause)
{
    struct end *e = arg;
    if (e->closed < SEEN_MAX)
        e->closed_ms[e->closed] = clock_now_us() / 1000;
    e->closed++;
    e->status = status;
    snprintf(e->cause, sizeof e->cause, "%s", cause);
    if (c == e->conn)
        e->conn = NULL;
}

static void on_lock(void *arg)
{
    pthread_mutex_lock(&((struct end *)arg)->mutex);
}

static void on_unlock(void *arg)
{
    pthread_mutex_unlock(&((struct end *)arg)->mutex);
}

static struct net_config config_of(struct end *e, uint64_t id)
{
    struct net_config c = {
        .loop = &e->loop,
        .handlers = {on_accept, on_opened, on_sink, on_abandon, on_frame, on_closed},
        .arg = e,
        .lock = on_lock,
        .unlock = on_unlock,
        .token = "secret",
        .self = {.job = "digits", .role = "member", .id = id, .chunk_bytes = 4 * CHUNK},
    };
    return c;
}

static void end_open(struct end *e, const struct net_config *c)
{
    char err[ERR_TEXT];
    assert_int_equal(net_create(c, &e->net, err), 0);
}

static void end_init(struct end *e, uint64_t id)
{
    memset(e, 0, sizeof *e);
    assert_int_equal(uv_loop_init(&e->loop), 0);
    pthread_mutex_init(&e->mutex, NULL);
    e->space = mem_alloc(4 * CHUNK);
    struct net_config c = config_of(e, id);
    end_open(e, &c);
}

static void end_reopen(struct end *e, const struct net_config *c)
{
    net_shutdown(e->net);
    uv_run(&e->loop, UV_RUN_DEFAULT);
    net_free(e->net);
    end_open(e, c);
}

static void end_done(struct end *e)
{
    net_shutdown(e->net);
    uv_run(&e->loop, UV_RUN_DEFAULT);
    net_free(e->net);
    assert_int_equal(uv_loop_close(&e->loop), 0);
    pthread_mutex_destroy(&e->mutex);
    mem_free(e->space);
}

static void listen_free(struct end *e)
{
    char err[ERR_TEXT] = "";
    assert_int_equal(net_listen(e->net, "127.0.0.1:0", e->addr, err), 0);
}

static void nap(void)
{
    struct timespec t = {.tv_nsec = 200000};
    nanosleep(&t, NULL);
}

/* Runs both loops until the condition holds; b may be NULL. */
#define RUN_UNTIL(a, b, condition)                                                                                     \
    do {                                                                                                               \
        uint64_t end_ = clock_now_us() + DEADLINE_MS * 1000ull;                                                        \
        while (!(condition)) {                                                                                         \
            assert_true(clock_now_us() < end_);                                                                        \
            run_both(a, b);                                                                                            \
        }                                                                                                              \
    } while (0)

static void run_both(struct end *a, struct end *b)
{
    uv_run(&a->loop, UV_RUN_NOWAIT);
    if (b)
        uv_run(&b->loop, UV_RUN_NOWAIT);
    nap();
}

struct fixture {
    struct end l, c; /* listener, connector */
};

static int setup(void **state)
{
    log_level_set(LOG_OFF);
    struct fixture *f = mem_alloc(sizeof *f);
    end_init(&f->l, 9);
    end_init(&f->c, 7);
    listen_free(&f->l);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    end_done(&f->c);
    end_done(&f->l);
    mem_free(f);
    return 0;
}

static void open_pair(struct fixture *f)
{
    net_connect(f->c.net, f->l.addr, &f->c);
    RUN_UNTIL(&f->l, &f->c, f->l.opened == 1 && f->c.opened == 1);
}

static void on_release(void *arg)
{
    ++*(unsigned *)arg;
}

static void test_open(void **state)
{
    struct fixture *f = *state;
    open_pair(f);
    assert_int_equal(f->l.peer, 7);
    assert_int_equal(f->c.peer, 9);
    assert_ptr_equal(net_tag(f->c.conn), &f->c);
    assert_string_equal(net_peer(f->l.conn)->role, "member");
    assert_string_equal(net_addr(f->c.conn), f->l.addr);
    net_close(f->c.conn, 0, "done here");
    RUN_UNTIL(&f->l, &f->c, f->l.closed == 1);
    assert_int_equal(f->l.status, KS_ECLOSED);
    assert_string_equal(f->l.cause, "done here");
    assert_int_equal(f->c.closed, 0);
}

static void test_many_small_frames_few_writes(void **state)
{
    struct fixture *f = *state;
    enum { N = 20000 };
    open_pair(f);
    uint8_t payload[200];
    memset(payload, 3, sizeof payload);
    unsigned released = 0;
    for (uint32_t i = 0; i < N; i++) {
        struct frame_header h = {
            .type = FRAME_PUSH, .dtype = DTYPE_U8, .seq = i, .weight = 1, .len = i % 2 ? sizeof payload : 0};
        assert_int_equal(net_send(f->c.conn, &h, payload, on_release, &released), 0);
        if (i % 500 == 0)
            run_both(&f->c, &f->l);
    }
    assert_int_equal(released, N);
    RUN_UNTIL(&f->l, &f->c, f->l.frames == N);
    assert_false(f->l.out_of_order);
    assert_int_equal(f->l.sum, (uint64_t)N / 2 * 3 * sizeof payload);
    struct net_stats s;
    net_stats(f->c.net, &s);
    assert_true(s.writes < N / 20);
    net_stats(f->l.net, &s);
    assert_true(s.reads < N / 20);
}

static void test_sizes_arrive_whole(void **state)
{
    struct fixture *f = *state;
    static const uint32_t sizes[] = {1, 511, 512, 513, 4095, 65535, 65536, 65537, 1 << 20, (4 << 20) - 1, 4 << 20, 7};
    enum { N = sizeof sizes / sizeof *sizes };
    struct net_config g = config_of(&f->c, 7);
    g.payload_crc = true;
    end_reopen(&f->c, &g);
    open_pair(f);
    uint8_t *data = mem_alloc(4 * CHUNK);
    uint64_t sum = 0;
    unsigned released = 0;
    for (uint32_t i = 0; i < 4 * CHUNK; i++)
        data[i] = (uint8_t)hash_mix(i);
    for (uint32_t round = 0; round < 3; round++)
        for (uint32_t i = 0; i < N; i++) {
            struct frame_header h = {
                .type = FRAME_PUSH, .dtype = DTYPE_U8, .seq = round * N + i, .weight = 1, .len = sizes[i]};
            assert_int_equal(net_send(f->c.conn, &h, data + (4 * CHUNK - sizes[i]), on_release, &released), 0);
            for (uint32_t k = 4 * CHUNK - sizes[i]; k < 4 * CHUNK; k++)
                sum += data[k];
        }
    RUN_UNTIL(&f->l, &f->c, f->l.frames == 3 * N);
    assert_int_equal(f->l.sum, sum);
    assert_false(f->l.out_of_order);
    assert_int_equal(released, 3 * N);
    mem_free(data);
}

static void test_discarded_payload(void **state)
{
    struct fixture *f = *state;
    open_pair(f);
    f->l.drop = true;
    uint8_t *data = mem_alloc(CHUNK);
    for (uint32_t i = 0; i < 8; i++) {
        struct frame_header h = {.type = FRAME_PUSH, .dtype = DTYPE_U8, .seq = i, .weight = 1, .len = CHUNK};
        net_send(f->c.conn, &h, data, NULL, NULL);
    }
    RUN_UNTIL(&f->l, &f->c, f->l.frames == 8);
    assert_int_equal(f->l.discarded, 8);
    assert_false(f->l.out_of_order);
    mem_free(data);
}

static void test_wrong_token(void **state)
{
    struct fixture *f = *state;
    struct net_config g = config_of(&f->c, 7);
    g.token = "guess";
    end_reopen(&f->c, &g);
    net_connect(f->c.net, f->l.addr, NULL);
    RUN_UNTIL(&f->l, &f->c, f->c.closed == 2);
    assert_int_equal(f->c.status, KS_EAUTH);
    assert_string_equal(f->c.cause, "the token is not this job's");
    assert_true(f->c.closed_ms[1] - f->c.closed_ms[0] >= 900);
    assert_int_equal(f->l.opened + f->c.opened, 0);
    struct net_stats s;
    RUN_UNTIL(&f->l, &f->c, (net_stats(f->l.net, &s), s.refused >= 2));
    assert_int_equal(f->l.closed, 0);
}

static void test_other_job(void **state)
{
    struct fixture *f = *state;
    struct net_config g = config_of(&f->c, 7);
    snprintf(g.self.job, sizeof g.self.job, "letters");
    end_reopen(&f->c, &g);
    net_connect(f->c.net, f->l.addr, NULL);
    RUN_UNTIL(&f->l, &f->c, f->c.closed == 1);
    assert_int_equal(f->c.status, KS_ENOENT);
    assert_non_null(strstr(f->c.cause, "letters"));
}

static void test_refused_by_accept(void **state)
{
    struct fixture *f = *state;
    f->l.refuse = 1;
    net_connect(f->c.net, f->l.addr, NULL);
    RUN_UNTIL(&f->l, &f->c, f->c.closed == 1);
    assert_int_equal(f->c.status, KS_EFENCED);
    assert_string_equal(f->c.cause, "life 7 was removed");
    f->l.refuse = 0;
    RUN_UNTIL(&f->l, &f->c, f->c.opened == 1);
}

static void test_reconnects(void **state)
{
    struct fixture *f = *state;
    open_pair(f);
    net_close(f->l.conn, KS_ESTATE, "again, please");
    RUN_UNTIL(&f->l, &f->c, f->c.opened == 2 && f->l.opened == 2);
    assert_int_equal(f->c.closed, 1);
    assert_int_equal(f->c.status, KS_ESTATE);
    assert_string_equal(f->c.cause, "again, please");
}

static void test_nobody_listens_then_somebody_does(void **state)
{
    struct fixture *f = *state;
    char addr[ADDR_MAX_BYTES], err[ERR_TEXT];
    snprintf(addr, sizeof addr, "%s", f->l.addr);
    struct net_config g = config_of(&f->l, 9);
    end_reopen(&f->l, &g);
    net_connect(f->c.net, addr, NULL);
    RUN_UNTIL(&f->c, NULL, f->c.closed == 3);
    assert_int_equal(f->c.status, KS_EUNAVAIL);
    assert_non_null(strstr(f->c.cause, addr));
    assert_non_null(strstr(f->c.cause, "refused"));
    assert_int_equal(net_listen(f->l.net, addr, f->l.addr, err), 0);
    RUN_UNTIL(&f->l, &f->c, f->c.opened == 1);
}

static void test_half_a_payload_is_abandoned(void **state)
{
    struct fixture *f = *state;
    open_pair(f);
    uint8_t *data = mem_alloc(4 * CHUNK);
    unsigned released = 0;
    for (uint32_t i = 0; i < 8; i++) {
        struct frame_header h = {.type = FRAME_PUSH, .dtype = DTYPE_U8, .seq = i, .weight = 1, .len = 4 * CHUNK};
        net_send(f->c.conn, &h, data, on_release, &released);
    }
    uv_run(&f->c.loop, UV_RUN_NOWAIT);
    net_close(f->c.conn, 0, "");
    assert_int_equal(released, 8);
    mem_free(data);
    RUN_UNTIL(&f->l, &f->c, f->l.closed == 1);
    assert_int_equal(f->l.abandoned, 1);
    assert_true(f->l.frames < 8);
    assert_int_equal(f->l.status, KS_ECLOSED);
}

static void test_close_inside_handler(void **state)
{
    struct fixture *f = *state;
    open_pair(f);
    f->l.close_in_sink = true;
    uint8_t data[2000] = {0};
    struct frame_header h = {.type = FRAME_PUSH, .dtype = DTYPE_U8, .weight = 1, .len = sizeof data};
    net_send(f->c.conn, &h, data, NULL, NULL);
    RUN_UNTIL(&f->l, &f->c, f->c.closed == 1);
    assert_string_equal(f->c.cause, "enough");
    assert_int_equal(f->l.frames, 0);
    assert_int_equal(f->l.abandoned, 1);
}

static void heartbeat_pair(struct fixture *f, uint32_t ping_ms, uint32_t silence_ms)
{
    struct net_config g = config_of(&f->c, 7);
    g.ping_ms = ping_ms;
    g.silence_ms = silence_ms;
    end_reopen(&f->c, &g);
    open_pair(f);
}

static void test_heartbeats_keep_it_open(void **state)
{
    struct fixture *f = *state;
    heartbeat_pair(f, 20, 300);
    uint64_t until = clock_now_us() + 900000;
    while (clock_now_us() < until)
        run_both(&f->l, &f->c);
    assert_int_equal(f->c.closed, 0);
    assert_int_equal(f->c.frames + f->l.frames, 0);
}

static void test_silence_closes(void **state)
{
    struct fixture *f = *state;
    heartbeat_pair(f, 20, 200);
    RUN_UNTIL(&f->c, NULL, f->c.closed == 1);
    assert_int_equal(f->c.status, KS_ETIMEOUT);
    assert_memory_equal(f->c.cause, "silent for ", 11);
}

/* Being stopped oneself is not the peer's silence: what it said lies in the socket. */
static void test_stopped_for_a_while(void **state)
{
    struct fixture *f = *state;
    heartbeat_pair(f, 20, 200);
    uint64_t until = clock_now_us() + 400000;
    struct frame_header h = {.type = FRAME_COMPLETE};
    while (clock_now_us() < until) {
        uv_run(&f->l.loop, UV_RUN_NOWAIT);
        nap();
    }
    net_send(f->l.conn, &h, NULL, NULL, NULL);
    RUN_UNTIL(&f->l, &f->c, f->c.frames == 1);
    assert_int_equal(f->c.closed, 0);
}

static void test_backpressure(void **state)
{
    struct fixture *f = *state;
    struct net_config g = config_of(&f->c, 7);
    g.send_bytes_max = 4 << 20;
    end_reopen(&f->c, &g);
    open_pair(f);
    uint8_t *data = mem_alloc(CHUNK);
    unsigned n = 0, released = 0;
    uint64_t end = clock_now_us() + DEADLINE_MS * 1000ull;
    while (!net_blocked(f->c.conn)) {
        assert_true(clock_now_us() < end);
        struct frame_header h = {.type = FRAME_PUSH, .dtype = DTYPE_U8, .seq = n++, .weight = 1, .len = CHUNK};
        net_send(f->c.conn, &h, data, on_release, &released);
        uv_run(&f->c.loop, UV_RUN_NOWAIT);
    }
    assert_true(released < n);
    RUN_UNTIL(&f->l, &f->c, f->l.frames == n);
    assert_false(net_blocked(f->c.conn));
    assert_int_equal(released, n);
    mem_free(data);
}

/* Who does not read our answers is not read: his requests stay with him. */
static void test_slow_reader_is_not_read(void **state)
{
    struct fixture *f = *state;
    struct net_config g = config_of(&f->l, 9);
    g.send_bytes_max = 1 << 20;
    end_reopen(&f->l, &g);
    listen_free(&f->l);
    open_pair(f);
    uint8_t *data = mem_alloc(CHUNK);
    uint32_t n = 0;
    uint64_t end = clock_now_us() + DEADLINE_MS * 1000ull;
    for (uint32_t more = 0; more < 3;) {
        assert_true(clock_now_us() < end);
        struct frame_header h = {.type = FRAME_VALUE, .dtype = DTYPE_U8, .seq = n++, .len = CHUNK};
        net_send(f->l.conn, &h, data, NULL, NULL);
        if (net_blocked(f->l.conn))
            more++;
        else
            uv_run(&f->l.loop, UV_RUN_NOWAIT);
    }
    struct frame_header ask = {.type = FRAME_PULL};
    net_send(f->c.conn, &ask, NULL, NULL, NULL);
    assert_int_equal(net_flush(f->c.conn), 0);
    for (int i = 0; i < 50; i++)
        uv_run(&f->l.loop, UV_RUN_NOWAIT);
    assert_int_equal(f->l.frames, 0);
    RUN_UNTIL(&f->l, &f->c, f->c.frames == n && f->l.frames == 1);
    mem_free(data);
}

/* ---- hostile peers ---- */

static int raw_connect(const struct end *l)
{
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    sa.sin_port = htons((uint16_t)atoi(strrchr(l->addr, ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&sa, sizeof sa), 0);
    return fd;
}

static bool raw_is_closed(int fd)
{
    uint8_t b[512];
    ssize_t n;
    while ((n = recv(fd, b, sizeof b, MSG_DONTWAIT)) > 0)
        ;
    return n == 0 || errno == ECONNRESET;
}

static void test_garbage_costs_nobody_else(void **state)
{
    struct fixture *f = *state;
    open_pair(f);
    int fd = raw_connect(&f->l);
    uint8_t junk[300];
    for (size_t i = 0; i < sizeof junk; i++)
        junk[i] = (uint8_t)hash_mix(i);
    assert_int_equal(send(fd, junk, sizeof junk, MSG_NOSIGNAL), sizeof junk);
    RUN_UNTIL(&f->l, &f->c, raw_is_closed(fd));
    close(fd);
    assert_int_equal(f->l.opened, 1);
    assert_int_equal(f->l.closed + f->c.closed, 0);
}

static void raw_send_frame(int fd, uint8_t type, uint64_t len)
{
    struct frame_header h = {.type = type, .len = len};
    uint8_t bytes[FRAME_SIZE];
    frame_encode(&h, bytes);
    assert_int_equal(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL), sizeof bytes);
}

static void test_frames_before_the_handshake(void **state)
{
    struct fixture *f = *state;
    static const struct {
        uint8_t type;
        uint64_t len;
    } bad[] = {
        {FRAME_PULL, 0}, {FRAME_HELLO, 5000}, {FRAME_AUTH, 0}, {FRAME_WELCOME, 0}, {FRAME_PING, 0}, {FRAME_VIEW, 100},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int fd = raw_connect(&f->l);
        raw_send_frame(fd, bad[i].type, bad[i].len);
        RUN_UNTIL(&f->l, NULL, raw_is_closed(fd));
        close(fd);
    }
    assert_int_equal(f->l.opened + f->l.closed + f->l.frames, 0);
}

static void test_pending_limit(void **state)
{
    struct fixture *f = *state;
    enum { N = 300 };
    int fd[N];
    for (int i = 0; i < N; i++) {
        fd[i] = raw_connect(&f->l);
        uv_run(&f->l.loop, UV_RUN_NOWAIT);
    }
    RUN_UNTIL(&f->l, NULL, raw_is_closed(fd[N - 257]));
    assert_true(raw_is_closed(fd[0]));
    assert_false(raw_is_closed(fd[N - 1]));
    assert_false(raw_is_closed(fd[N - 256]));
    net_connect(f->c.net, f->l.addr, NULL);
    RUN_UNTIL(&f->l, &f->c, f->c.opened == 1 && f->l.opened == 1);
    for (int i = 0; i < N; i++)
        close(fd[i]);
}

static void test_violation_on_an_open_connection(void **state)
{
    struct fixture *f = *state;
    open_pair(f);
    struct frame_header h = {.type = FRAME_HELLO};
    net_send(f->c.conn, &h, NULL, NULL, NULL);
    RUN_UNTIL(&f->l, &f->c, f->l.closed == 1 && f->c.closed == 1);
    assert_int_equal(f->l.status, KS_EPROTO);
    assert_int_equal(f->c.status, KS_EPROTO);
    assert_non_null(strstr(f->c.cause, "hello on an open connection"));
}

/* ---- addresses ---- */

static void test_addresses(void **state)
{
    struct fixture *f = *state;
    char err[ERR_TEXT], addr[ADDR_MAX_BYTES];
    assert_int_equal(net_listen(f->l.net, f->l.addr, addr, err), KS_EBUSY);
    assert_non_null(strstr(err, f->l.addr));
    static const char *const bad[] = {"", "host", ":1", "host:", "host:x", "host:70000", "::1:5", "[::1:5", "[]:5"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(net_listen(f->l.net, bad[i], addr, err), KS_EINVAL);
    struct net_conn *c = net_connect(f->c.net, "no-port", NULL);
    RUN_UNTIL(&f->c, NULL, f->c.closed == 1);
    assert_int_equal(f->c.status, KS_EINVAL);
    net_close(c, 0, "");
    snprintf(addr, sizeof addr, "localhost%s", strrchr(f->l.addr, ':'));
    net_connect(f->c.net, addr, NULL);
    RUN_UNTIL(&f->l, &f->c, f->c.opened == 1);
}

static void test_ipv6(void **state)
{
    struct fixture *f = *state;
    char err[ERR_TEXT], addr[ADDR_MAX_BYTES];
    if (net_listen(f->l.net, "[::1]:0", addr, err))
        skip();
    assert_memory_equal(addr, "[::1]:", 6);
    net_connect(f->c.net, addr, NULL);
    RUN_UNTIL(&f->l, &f->c, f->c.opened == 1);
}

static void test_shutdown_while_resolving(void **state)
{
    struct fixture *f = *state;
    net_connect(f->c.net, "localhost:1", NULL);
    uv_run(&f->c.loop, UV_RUN_NOWAIT);
    assert_int_equal(f->c.closed, 0);
}

/* ---- another thread sends ---- */

struct sender {
    struct end *end;
    uv_async_t wake;
    uint8_t *data;
    uint32_t n;
};

static void *sender_run(void *arg)
{
    struct sender *s = arg;
    for (uint32_t i = 0; i < s->n; i++) {
        struct frame_header h = {
            .type = FRAME_PUSH, .dtype = DTYPE_U8, .seq = i, .weight = 1, .len = i % 7 ? 100 : 100000};
        on_lock(s->end);
        int rc = net_send(s->end->conn, &h, s->data, NULL, NULL);
        int left = net_flush(s->end->conn);
        on_unlock(s->end);
        if (rc)
            return s;
        if (left)
            uv_async_send(&s->wake);
    }
    return NULL;
}

static void on_wake(uv_async_t *h)
{
    (void)h;
}

static void test_another_thread_sends(void **state)
{
    struct fixture *f = *state;
    open_pair(f);
    struct sender s = {.end = &f->c, .n = 2000};
    s.data = mem_alloc(100000);
    uv_async_init(&f->c.loop, &s.wake, on_wake);
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, sender_run, &s), 0);
    RUN_UNTIL(&f->l, &f->c, f->l.frames == s.n);
    void *failed;
    pthread_join(t, &failed);
    assert_null(failed);
    assert_false(f->l.out_of_order);
    uv_close((uv_handle_t *)&s.wake, NULL);
    run_both(&f->l, &f->c);
    mem_free(s.data);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_open),
        TEST(test_many_small_frames_few_writes),
        TEST(test_sizes_arrive_whole),
        TEST(test_discarded_payload),
        TEST(test_wrong_token),
        TEST(test_other_job),
        TEST(test_refused_by_accept),
        TEST(test_reconnects),
        TEST(test_nobody_listens_then_somebody_does),
        TEST(test_half_a_payload_is_abandoned),
        TEST(test_close_inside_handler),
        TEST(test_heartbeats_keep_it_open),
        TEST(test_silence_closes),
        TEST(test_stopped_for_a_while),
        TEST(test_backpressure),
        TEST(test_slow_reader_is_not_read),
        TEST(test_garbage_costs_nobody_else),
        TEST(test_frames_before_the_handshake),
        TEST(test_pending_limit),
        TEST(test_violation_on_an_open_connection),
        TEST(test_addresses),
        TEST(test_ipv6),
        TEST(test_shutdown_while_resolving),
        TEST(test_another_thread_sends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
