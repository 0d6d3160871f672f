#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "net/impl_uv.h"

/* ---- the end of a connection ---- */

static void say_bye(struct net_conn *c, int status, const char *text)
{
    struct frame_header h = {.type = FRAME_BYE, .status = (int16_t)status, .len = strlen(text)};
    if (h.len > RECEIVE_OWN_MAX)
        h.len = RECEIVE_OWN_MAX;
    conn_queue(c, &h, text, NULL, NULL);
}

/* Gives up the socket and what was under way on it. */
static void conn_detach(struct net_conn *c, bool say, int status, const char *text)
{
    struct link *l = c->link;
    uv_timer_stop(&c->timer);
    connect_stop(c);
    if (!c->connector && c->state != CONN_OPEN && l)
        c->net->npending--;
    bool said = false;
    if (l && say && c->state >= CONN_HANDSHAKE && !c->write_error) {
        say_bye(c, status, text);
        said = conn_write(c) == 0;
    }
    if (c->state == CONN_OPEN)
        c->net->stats.closes++;
    c->state = CONN_IDLE;
    c->link = NULL;
    c->out_armed = c->out_full = c->paused = false;
    c->write_error = 0;
    conn_undirty(c);
    if (c->sunk) {
        c->sunk = false;
        c->net->config.handlers.abandon(c->net->config.arg, c, &c->in.head, c->cookie);
    }
    send_queue_clear(&c->out);
    if (l && said)
        link_linger(l);
    else if (l)
        link_close(l);
}

static void on_conn_closed(uv_handle_t *h)
{
    struct net_conn *c = h->data;
    c->net->handles--;
    send_queue_done(&c->out);
    mem_free(c->stage);
    mem_free(c);
}

void conn_destroy(struct net_conn *c, bool say, int status, const char *text)
{
    struct net *n = c->net;
    if (uv_is_closing((uv_handle_t *)&c->timer))
        return;
    c->dead = true;
    conn_detach(c, say, status, text);
    *(c->prev ? &c->prev->next : &n->conns) = c->next;
    *(c->next ? &c->next->prev : &n->conns_last) = c->prev;
    uv_close((uv_handle_t *)&c->timer, on_conn_closed);
}

static uint32_t backoff_next(struct net_conn *c, int status, bool was_open)
{
    /* A peer that says no will say no again. */
    bool refused = status == KS_EAUTH || status == KS_ENOENT || status == KS_EINVAL;
    if (refused)
        c->backoff_ms = NET_BACKOFF_MAX_MS;
    else if (!c->backoff_ms || (was_open && net_now_ms() - c->opened_ms >= NET_BACKOFF_MAX_MS))
        c->backoff_ms = NET_BACKOFF_MIN_MS;
    else
        c->backoff_ms = c->backoff_ms * 2 < NET_BACKOFF_MAX_MS ? c->backoff_ms * 2 : NET_BACKOFF_MAX_MS;
    return c->backoff_ms;
}

void conn_fail(struct net_conn *c, int status, bool say, const char *format, ...)
{
    struct net *n = c->net;
    char cause[ERR_TEXT];
    va_list ap;
    va_start(ap, format);
    vsnprintf(cause, sizeof cause, format, ap);
    va_end(ap);
    bool was_open = c->state == CONN_OPEN;
    /* A connector's owner is told of each failed try, and decides what is worth a line. */
    if (was_open ? say : !c->connector) {
        n->stats.refused++;
        LOG_AT(status == KS_ECLOSED ? LOG_INFO : LOG_WARN, "net_refused", "peer=%s id=%llu cause=\"%s\"", c->addr,
               (unsigned long long)c->auth.peer.id, cause);
    }
    if (c->connector) {
        conn_detach(c, say, status, cause);
        connect_later(c, backoff_next(c, status, was_open));
        n->config.handlers.closed(n->config.arg, c, status, cause);
        c->auth.state = AUTH_AT_HELLO;
        return;
    }
    c->dead = true;
    conn_detach(c, say, status, cause);
    if (was_open)
        n->config.handlers.closed(n->config.arg, c, status, cause);
    conn_destroy(c, false, 0, "");
}

void net_close(struct net_conn *c, int status, const char *text)
{
    if (!c->dead)
        conn_destroy(c, c->state == CONN_OPEN, status, text);
}

/* ---- frames ---- */

static void on_heartbeat(uv_timer_t *h);

static void conn_open(struct net_conn *c)
{
    struct net *n = c->net;
    const struct net_config *g = &n->config;
    if (!c->connector)
        n->npending--;
    c->state = CONN_OPEN;
    c->in.own_only = false;
    c->opened_ms = c->in_ms = c->out_ms = c->ping_ms = net_now_ms();
    uv_timer_stop(&c->timer);
    uint32_t period = g->ping_ms && (!g->silence_ms || g->ping_ms < g->silence_ms) ? g->ping_ms : g->silence_ms;
    if (period)
        uv_timer_start(&c->timer, on_heartbeat, period / 2 + 1, period / 2 + 1);
    n->stats.connects++;
    g->handlers.opened(g->arg, c);
}

static void send_reply(struct net_conn *c, const struct auth_reply *r)
{
    if (!r->type)
        return;
    struct frame_header h = {.type = r->type, .len = r->doc ? strlen(r->doc) : 0};
    conn_queue(c, &h, r->doc, mem_free, r->doc);
}

/* What a peer says about itself goes into logs: one line, printable. */
static void printable(const uint8_t *in, size_t size, char *out, size_t out_size)
{
    size_t n = size < out_size - 1 ? size : out_size - 1;
    for (size_t i = 0; i < n; i++)
        out[i] = in[i] < ' ' || in[i] == '"' || in[i] == 0x7f ? '\'' : (char)in[i];
    out[n] = 0;
}

static void own_frame(struct net_conn *c)
{
    const struct frame_header *h = &c->in.head;
    struct frame_header pong = {.type = FRAME_PONG};
    char text[ERR_TEXT];
    struct auth_reply reply;
    if (h->type == FRAME_BYE) {
        printable(c->own, h->len, text, sizeof text);
        conn_fail(c, h->status ? h->status : KS_ECLOSED, false, "%s", *text ? text : "the peer closed the connection");
        return;
    }
    if (c->state == CONN_OPEN) {
        if (h->type == FRAME_PING)
            conn_queue(c, &pong, NULL, NULL, NULL);
        else if (h->type != FRAME_PONG)
            conn_fail(c, KS_EPROTO, true, "%s on an open connection", frame_type_name(h->type));
        return;
    }
    int rc = auth_step(&c->auth, h->type, (const char *)c->own, h->len, &reply, text);
    if (rc) {
        conn_fail(c, rc, true, "%s", text);
        return;
    }
    send_reply(c, &reply);
    if (c->auth.state == AUTH_OPEN)
        conn_open(c);
}

static void take_sink(struct net_conn *c)
{
    const struct net_config *g = &c->net->config;
    if (c->in.head.type < RECEIVE_OWN_TYPES) {
        receive_sink(&c->in, c->own);
        return;
    }
    const struct link *l = c->link;
    void *cookie = NULL;
    void *target = g->handlers.sink(g->arg, c, &c->in.head, &cookie);
    receive_sink(&c->in, target);
    if (target && (c->dead || c->link != l)) { /* the handler closed it */
        g->handlers.abandon(g->arg, c, &c->in.head, cookie);
        return;
    }
    c->cookie = cookie;
    c->sunk = target != NULL;
}

static void take_frame(struct net_conn *c)
{
    const struct net_config *g = &c->net->config;
    const struct frame_header h = c->in.head;
    c->net->stats.frames_in++;
    if (h.type < RECEIVE_OWN_TYPES) {
        own_frame(c);
        return;
    }
    bool sunk = c->sunk;
    c->sunk = false;
    g->handlers.frame(g->arg, c, &h, sunk ? c->in.target : NULL, sunk ? c->cookie : NULL, h.len && !sunk);
}

/* false: this socket is not the connection's any more. */
static bool parse(struct net_conn *c)
{
    const struct link *l = c->link;
    char err[ERR_TEXT];
    for (;;) {
        int rc = receive_next(&c->in, err);
        if (rc == RECEIVE_BYTES)
            return true;
        if (rc < 0) {
            conn_fail(c, rc, true, "%s", err);
            return false;
        }
        if (rc == RECEIVE_SINK)
            take_sink(c);
        else
            take_frame(c);
        if (c->dead || c->link != l)
            return false;
    }
}

static void pause_or_not(struct net_conn *c)
{
    size_t max = c->net->config.send_bytes_max;
    if (!c->paused && c->out.bytes > 2 * max)
        c->paused = true;
    else if (c->paused && c->out.bytes <= max) {
        c->paused = false;
        c->in_ms = net_now_ms();
    }
}

static void conn_readable(struct net_conn *c)
{
    struct net *n = c->net;
    size_t total = 0;
    while (total < RECEIVE_READ_MAX) {
        pause_or_not(c);
        if (c->paused) {
            conn_events(c);
            return;
        }
        struct iovec iov[2];
        size_t size;
        int count = receive_space(&c->in, iov, &size);
        int fd = c->link->fd;
        net_leave(n);
        ssize_t got = readv(fd, iov, count);
        int e = errno;
        net_enter(n);
        n->stats.reads++;
        if (got < 0 && e == EINTR)
            continue;
        if (got < 0 && (e == EAGAIN || e == EWOULDBLOCK))
            return;
        if (got <= 0) {
            conn_fail(c, KS_ECLOSED, false, got ? "read: %s" : "the peer closed the connection", strerror(e));
            return;
        }
        n->stats.bytes_in += (uint64_t)got;
        total += (size_t)got;
        c->in_ms = net_now_ms();
        receive_added(&c->in, (size_t)got);
        if (!parse(c))
            return;
        if ((size_t)got < size)
            return;
    }
}

/* ---- heartbeats ---- */

static void on_heartbeat(uv_timer_t *h)
{
    struct net_conn *c = h->data;
    struct net *n = c->net;
    const struct net_config *g = &n->config;
    struct frame_header ping = {.type = FRAME_PING};
    net_enter(n);
    uint64_t now = net_now_ms();
    /* When this process was stopped for a while, what the peer said lies in the socket. */
    if (g->silence_ms && now - c->in_ms >= g->silence_ms && !c->paused) {
        conn_readable(c);
        if (c->state != CONN_OPEN)
            goto leave;
        now = net_now_ms();
    }
    uint64_t heard = c->paused && c->out_ms > c->in_ms ? c->out_ms : c->in_ms;
    if (g->silence_ms && now - heard >= g->silence_ms) {
        conn_fail(c, KS_ETIMEOUT, false, "silent for %llu ms", (unsigned long long)(now - heard));
        goto leave;
    }
    uint64_t quiet = c->out_ms < c->in_ms ? c->out_ms : c->in_ms;
    if (g->ping_ms && now - quiet >= g->ping_ms && now - c->ping_ms >= g->ping_ms) {
        c->ping_ms = now;
        conn_queue(c, &ping, NULL, NULL, NULL);
    }
leave:
    net_leave(n);
}

/* ---- the beginning ---- */

static void on_handshake_over(uv_timer_t *h)
{
    struct net_conn *c = h->data;
    struct net *n = c->net;
    net_enter(n);
    conn_fail(c, KS_ETIMEOUT, true, "the handshake took more than %d ms", NET_HANDSHAKE_MS);
    net_leave(n);
}

static void handshake_start(struct net_conn *c)
{
    struct net *n = c->net;
    struct hello self = n->config.self;
    struct auth_reply reply;
    CHECK(getrandom(self.nonce, sizeof self.nonce, 0) == (ssize_t)sizeof self.nonce);
    auth_init(&c->auth, c->connector ? AUTH_CONNECTOR : AUTH_LISTENER, &self, n->config.token, &reply);
    c->auth.accept = n->config.handlers.accept;
    c->auth.accept_arg = n->config.arg;
    receive_init(&c->in, c->stage, self.chunk_bytes);
    c->state = CONN_HANDSHAKE;
    send_reply(c, &reply);
    if (!c->connector)
        uv_timer_start(&c->timer, on_handshake_over, NET_HANDSHAKE_MS, 0);
}

static int socket_error(const struct net_conn *c)
{
    int e = 0;
    socklen_t size = sizeof e;
    return getsockopt(c->link->fd, SOL_SOCKET, SO_ERROR, &e, &size) ? errno : e;
}

/* The peer reset it. What it said before, a BYE perhaps, is still read. libuv polls this socket no more. */
static void socket_failed(struct net_conn *c)
{
    const struct link *l = c->link;
    int e = socket_error(c);
    conn_readable(c);
    if (c->link == l)
        conn_fail(c, KS_ECLOSED, false, "the connection broke: %s", strerror(e ? e : EPIPE));
}

static void connected(struct net_conn *c)
{
    int e = socket_error(c);
    if (e) {
        c->nobody = e == ECONNREFUSED;
        conn_fail(c, KS_EUNAVAIL, false, "connect to %.128s: %s", c->addr, strerror(e));
        return;
    }
    handshake_start(c);
    conn_events(c);
}

static void on_socket(uv_poll_t *h, int status, int events)
{
    struct link *l = h->data;
    struct net *n = l->net;
    net_enter(n);
    struct net_conn *c = l->conn;
    if (l->closing || !c) {
        net_leave(n);
        return;
    }
    if (c->state == CONN_CONNECTING) {
        connected(c);
    } else if (status < 0) {
        socket_failed(c);
    } else {
        if (events & UV_WRITABLE)
            conn_writable(c);
        if (c->link == l && (events & UV_READABLE))
            conn_readable(c);
    }
    net_leave(n);
}

void conn_events(struct net_conn *c)
{
    struct link *l = c->link;
    pause_or_not(c);
    int events =
        c->state == CONN_CONNECTING ? UV_WRITABLE : (c->paused ? 0 : UV_READABLE) | (c->out_armed ? UV_WRITABLE : 0);
    if (events == l->events)
        return;
    l->events = events;
    if (events)
        uv_poll_start(&l->poll, events, on_socket);
    else
        uv_poll_stop(&l->poll);
}

void conn_attach(struct net_conn *c, int fd, enum conn_state state)
{
    c->link = link_create(c, fd);
    c->state = state;
    if (!c->stage)
        c->stage = mem_alloc(RECEIVE_STAGE);
    if (state == CONN_HANDSHAKE) {
        c->net->npending++;
        handshake_start(c);
    }
    conn_events(c);
}

struct net_conn *conn_create(struct net *n, bool connector, const char *addr)
{
    struct net_conn *c = mem_alloc(sizeof *c);
    c->net = n;
    c->connector = connector;
    snprintf(c->addr, sizeof c->addr, "%s", addr);
    CHECK(uv_timer_init(n->config.loop, &c->timer) == 0);
    c->timer.data = c;
    n->handles++;
    send_queue_init(&c->out);
    c->prev = n->conns_last;
    *(n->conns_last ? &n->conns_last->next : &n->conns) = c;
    n->conns_last = c;
    return c;
}

struct net_conn *net_connect(struct net *n, const char *addr, void *tag)
{
    struct net_conn *c = conn_create(n, true, addr);
    c->tag = tag;
    connect_later(c, 0);
    return c;
}

bool net_nobody(const struct net_conn *c)
{
    return c->nobody;
}

uint64_t net_peer_id(const struct net_conn *c)
{
    return c->auth.state == AUTH_OPEN ? c->auth.peer.id : 0;
}

const struct hello *net_peer(const struct net_conn *c)
{
    return c->auth.state == AUTH_OPEN ? &c->auth.peer : NULL;
}

void *net_tag(const struct net_conn *c)
{
    return c->tag;
}

void net_tag_set(struct net_conn *c, void *tag)
{
    c->tag = tag;
}

const char *net_addr(const struct net_conn *c)
{
    return c->addr;
}
