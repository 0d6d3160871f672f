#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/mem.h"
#include "net/addr.h"
#include "net/impl_uv.h"

/* A name look-up under way. libuv cannot always cancel it, so it lives on its own: conn is NULL when nobody waits. */
struct resolve {
    uv_getaddrinfo_t request;
    struct net *net;
    struct net_conn *conn;
};

static void connect_to(struct net_conn *c, const struct sockaddr *sa, socklen_t size)
{
    int fd = socket(sa->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        conn_fail(c, KS_EUNAVAIL, false, "connect to %.128s: socket: %s", c->addr, strerror(errno));
        return;
    }
    socket_options(c->net, fd);
    if (connect(fd, sa, size) && errno != EINPROGRESS) {
        int e = errno;
        c->nobody = e == ECONNREFUSED;
        close(fd);
        conn_fail(c, KS_EUNAVAIL, false, "connect to %.128s: %s", c->addr, strerror(e));
        return;
    }
    conn_attach(c, fd, CONN_CONNECTING);
}

/* Each try takes the next of the host's addresses. */
static void connect_to_one_of(struct net_conn *c, const struct addrinfo *list)
{
    unsigned n = 0;
    for (const struct addrinfo *ai = list; ai; ai = ai->ai_next)
        n++;
    unsigned skip = c->tries++ % n;
    while (skip--)
        list = list->ai_next;
    connect_to(c, list->ai_addr, list->ai_addrlen);
}

static void on_resolved(uv_getaddrinfo_t *request, int status, struct addrinfo *list)
{
    struct resolve *r = request->data;
    struct net_conn *c = r->conn;
    if (c) {
        struct net *n = r->net;
        net_enter(n);
        c->resolve = NULL;
        if (status)
            conn_fail(c, KS_EUNAVAIL, false, "connect to %.128s: the name is not known: %s", c->addr,
                      uv_strerror(status));
        else
            connect_to_one_of(c, list);
        net_leave(n);
    }
    uv_freeaddrinfo(list);
    mem_free(r);
}

static void resolve_start(struct net_conn *c, const char *host, const char *port)
{
    struct resolve *r = mem_alloc(sizeof *r);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV | AI_ADDRCONFIG};
    r->request.data = r;
    r->net = c->net;
    r->conn = c;
    c->state = CONN_RESOLVING;
    int rc = uv_getaddrinfo(c->net->config.loop, &r->request, on_resolved, host, port, &hints);
    if (rc) {
        mem_free(r);
        conn_fail(c, KS_EUNAVAIL, false, "connect to %.128s: %s", c->addr, uv_strerror(rc));
        return;
    }
    c->resolve = r;
}

void connect_stop(struct net_conn *c)
{
    if (!c->resolve)
        return;
    c->resolve->conn = NULL;
    (void)uv_cancel((uv_req_t *)&c->resolve->request);
    c->resolve = NULL;
}

static void on_too_long(uv_timer_t *h)
{
    struct net_conn *c = h->data;
    struct net *n = c->net;
    net_enter(n);
    conn_fail(c, KS_ETIMEOUT, false, "%.128s did not answer within %d ms", c->addr, NET_HANDSHAKE_MS);
    net_leave(n);
}

void connect_now(struct net_conn *c)
{
    char host[ADDR_MAX_BYTES], port[ADDR_MAX_BYTES], err[ERR_TEXT];
    if (addr_split(c->addr, host, port, err)) {
        conn_fail(c, KS_EINVAL, false, "%s", err);
        return;
    }
    c->nobody = false;
    uv_timer_start(&c->timer, on_too_long, NET_HANDSHAKE_MS, 0);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV}, *list;
    if (getaddrinfo(host, port, &hints, &list)) {
        resolve_start(c, host, port);
        return;
    }
    connect_to_one_of(c, list);
    freeaddrinfo(list);
}

static void on_backoff_over(uv_timer_t *h)
{
    struct net_conn *c = h->data;
    struct net *n = c->net;
    net_enter(n);
    connect_now(c);
    net_leave(n);
}

void connect_later(struct net_conn *c, uint32_t delay_ms)
{
    uv_timer_start(&c->timer, on_backoff_over, delay_ms, 0);
}
