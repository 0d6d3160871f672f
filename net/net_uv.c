#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "net/addr.h"
#include "net/impl_uv.h"

enum { ACCEPTS_MAX = 64, ACCEPT_PAUSE_MS = 100, BACKLOG = 512 };

uint64_t net_now_ms(void)
{
    return clock_now_us() / 1000;
}

static void on_prepare(uv_prepare_t *h)
{
    struct net *n = h->data;
    net_enter(n);
    net_write_dirty(n);
    net_leave(n);
}

static void on_check(uv_check_t *h)
{
    struct net *n = h->data;
    net_enter(n);
    net_write_dirty(n);
    net_leave(n);
}

static void on_handle_closed(uv_handle_t *h)
{
    struct net *n = h->data;
    n->handles--;
}

static int config_check(const struct net_config *c, char *err)
{
    const char *wrong =
        !c->loop ? "no loop"
        : !c->handlers.opened || !c->handlers.sink || !c->handlers.abandon || !c->handlers.frame || !c->handlers.closed
            ? "a handler is missing"
        : !c->token ? "no token"
                    : NULL;
    if (wrong)
        snprintf(err, ERR_TEXT, "net: %s", wrong);
    return wrong ? KS_EINVAL : 0;
}

int net_create(const struct net_config *c, struct net **ret, char *err)
{
    int rc = config_check(c, err);
    if (rc)
        return rc;
    struct net *n = mem_alloc(sizeof *n);
    n->config = *c;
    n->config.token = n->token = mem_strdup(c->token);
    n->congestion = mem_strdup(c->congestion && *c->congestion ? c->congestion : "cubic");
    n->config.congestion = n->congestion;
    if (!n->config.send_bytes_max)
        n->config.send_bytes_max = 64 << 20;
    CHECK(uv_prepare_init(c->loop, &n->prepare) == 0);
    CHECK(uv_check_init(c->loop, &n->check) == 0);
    n->prepare.data = n->check.data = n;
    n->handles = 2;
    uv_prepare_start(&n->prepare, on_prepare);
    uv_check_start(&n->check, on_check);
    uv_unref((uv_handle_t *)&n->prepare);
    uv_unref((uv_handle_t *)&n->check);
    *ret = n;
    return 0;
}

static void on_listener_closed(uv_handle_t *h)
{
    struct listener *l = h->data;
    l->net->handles--;
    if (--l->handles == 0)
        mem_free(l);
}

void net_shutdown(struct net *n)
{
    if (n->down)
        return;
    n->down = true;
    while (n->conns)
        conn_destroy(n->conns, false, 0, "");
    for (struct link *l = n->links; l; l = l->next)
        link_close(l);
    while (n->listeners) {
        struct listener *l = n->listeners;
        n->listeners = l->next;
        uv_close((uv_handle_t *)&l->poll, on_listener_closed);
        uv_close((uv_handle_t *)&l->timer, on_listener_closed);
        close(l->fd);
    }
    uv_close((uv_handle_t *)&n->prepare, on_handle_closed);
    uv_close((uv_handle_t *)&n->check, on_handle_closed);
}

bool net_is_down(const struct net *n)
{
    return n->down && n->handles == 0;
}

void net_free(struct net *n)
{
    if (!n)
        return;
    CHECK(net_is_down(n));
    mem_free(n->token);
    mem_free(n->congestion);
    mem_free(n);
}

void net_stats(const struct net *n, struct net_stats *ret)
{
    *ret = n->stats;
}

void socket_options(const struct net *n, int fd)
{
    int on = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    /* A kernel without it keeps its default: slower perhaps, never wrong. */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, n->congestion, (socklen_t)strlen(n->congestion));
}

/* ---- listening ---- */

static void drop_oldest_pending(struct net *n)
{
    for (struct net_conn *c = n->conns; c; c = c->next) {
        if (c->connector || c->state == CONN_OPEN)
            continue;
        n->stats.refused++;
        log_warn("net_pending_full", "peer=%s cause=\"%d connections are not authenticated, the oldest is dropped\"",
                 c->addr, NET_PENDING_MAX);
        conn_destroy(c, false, 0, "");
        return;
    }
}

static void accepted(struct net *n, int fd, const struct sockaddr *sa, socklen_t size)
{
    char addr[ADDR_MAX_BYTES];
    addr_format(sa, size, addr);
    if (n->npending == NET_PENDING_MAX)
        drop_oldest_pending(n);
    socket_options(n, fd);
    conn_attach(conn_create(n, false, addr), fd, CONN_HANDSHAKE);
}

static void on_incoming(uv_poll_t *h, int status, int events);

static void on_accept_again(uv_timer_t *h)
{
    struct listener *l = h->data;
    uv_poll_start(&l->poll, UV_READABLE, on_incoming);
}

static void accept_some(struct listener *l)
{
    for (int i = 0; i < ACCEPTS_MAX; i++) {
        struct sockaddr_storage sa;
        socklen_t size = sizeof sa;
        int fd = accept4(l->fd, (struct sockaddr *)&sa, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            accepted(l->net, fd, (struct sockaddr *)&sa, size);
            continue;
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return;
        if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS)
            continue;
        /* It stays readable: without a pause this would spin. */
        log_error("net_accept", "cause=\"%s: new connections wait\"", strerror(errno));
        uv_poll_stop(&l->poll);
        uv_timer_start(&l->timer, on_accept_again, ACCEPT_PAUSE_MS, 0);
        return;
    }
}

static void on_incoming(uv_poll_t *h, int status, int events)
{
    (void)status;
    (void)events;
    struct listener *l = h->data;
    struct net *n = l->net;
    net_enter(n);
    accept_some(l);
    net_leave(n);
}

static int listen_one(struct net *n, const struct addrinfo *ai, int *ret_fd, const char **ret_what)
{
    int on = 1;
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        *ret_what = "socket";
        return errno;
    }
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    socket_options(n, fd);
    *ret_what = "bind";
    if (bind(fd, ai->ai_addr, ai->ai_addrlen) || (*ret_what = "listen", listen(fd, BACKLOG))) {
        int e = errno;
        close(fd);
        return e;
    }
    *ret_fd = fd;
    return 0;
}

static void listener_add(struct net *n, int fd)
{
    struct listener *l = mem_alloc(sizeof *l);
    l->net = n;
    l->fd = fd;
    CHECK(uv_poll_init(n->config.loop, &l->poll, fd) == 0);
    CHECK(uv_timer_init(n->config.loop, &l->timer) == 0);
    l->poll.data = l->timer.data = l;
    l->handles = 2;
    n->handles += 2;
    uv_poll_start(&l->poll, UV_READABLE, on_incoming);
    l->next = n->listeners;
    n->listeners = l;
}

int net_listen(struct net *n, const char *addr, char *ret_addr, char *err)
{
    char host[ADDR_MAX_BYTES], port[ADDR_MAX_BYTES];
    int rc = addr_split(addr, host, port, err);
    if (rc)
        return rc;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *list;
    int bad = getaddrinfo(host, port, &hints, &list);
    if (bad) {
        snprintf(err, ERR_TEXT, "listen on %.128s: %s", addr, gai_strerror(bad));
        return KS_EINVAL;
    }
    int fd = -1, e = 0;
    const char *what = "";
    for (const struct addrinfo *ai = list; ai && fd < 0; ai = ai->ai_next)
        e = listen_one(n, ai, &fd, &what);
    freeaddrinfo(list);
    if (fd < 0) {
        snprintf(err, ERR_TEXT, "listen on %.128s: %s: %s", addr, what, strerror(e));
        return e == EADDRINUSE ? KS_EBUSY : e == EADDRNOTAVAIL || e == EACCES ? KS_EINVAL : KS_EIO;
    }
    struct sockaddr_storage sa;
    socklen_t size = sizeof sa;
    CHECK(getsockname(fd, (struct sockaddr *)&sa, &size) == 0);
    addr_format((struct sockaddr *)&sa, size, ret_addr);
    listener_add(n, fd);
    return 0;
}
