#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mem.h"
#include "net/impl_uv.h"

static void on_link_closed(uv_handle_t *h)
{
    struct link *l = h->data;
    if (--l->handles)
        return;
    struct net *n = l->net;
    *(l->prev ? &l->prev->next : &n->links) = l->next;
    if (l->next)
        l->next->prev = l->prev;
    n->handles--;
    mem_free(l);
}

void link_close(struct link *l)
{
    if (l->closing)
        return;
    l->closing = true;
    uv_close((uv_handle_t *)&l->poll, on_link_closed);
    uv_close((uv_handle_t *)&l->timer, on_link_closed);
    close(l->fd);
}

struct link *link_create(struct net_conn *c, int fd)
{
    struct net *n = c->net;
    struct link *l = mem_alloc(sizeof *l);
    l->net = n;
    l->conn = c;
    l->fd = fd;
    CHECK(uv_poll_init(n->config.loop, &l->poll, fd) == 0);
    CHECK(uv_timer_init(n->config.loop, &l->timer) == 0);
    l->poll.data = l->timer.data = l;
    l->handles = 2;
    n->handles++;
    l->next = n->links;
    if (n->links)
        n->links->prev = l;
    n->links = l;
    return l;
}

static void on_linger_over(uv_timer_t *h)
{
    link_close(h->data);
}

static void on_linger(uv_poll_t *h, int status, int events)
{
    (void)status;
    (void)events;
    struct link *l = h->data;
    char drop[4096];
    ssize_t n = read(l->fd, drop, sizeof drop);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
        link_close(l);
}

void link_linger(struct link *l)
{
    l->conn = NULL;
    shutdown(l->fd, SHUT_WR);
    uv_poll_start(&l->poll, UV_READABLE, on_linger);
    uv_timer_start(&l->timer, on_linger_over, NET_LINGER_MS, 0);
}
