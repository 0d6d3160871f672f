#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "net/impl_uv.h"

static void conn_dirty(struct net_conn *c)
{
    if (c->dirty_at)
        return;
    struct net *n = c->net;
    c->dirty_next = n->dirty;
    if (n->dirty)
        n->dirty->dirty_at = &c->dirty_next;
    n->dirty = c;
    c->dirty_at = &n->dirty;
}

void conn_undirty(struct net_conn *c)
{
    if (!c->dirty_at)
        return;
    *c->dirty_at = c->dirty_next;
    if (c->dirty_next)
        c->dirty_next->dirty_at = c->dirty_at;
    c->dirty_next = NULL;
    c->dirty_at = NULL;
}

int conn_write(struct net_conn *c)
{
    struct net *n = c->net;
    size_t total = 0;
    while (c->out.bytes) {
        struct iovec iov[NET_IOV_MAX];
        size_t size;
        if (total >= NET_WRITE_MAX)
            return 1;
        int count = send_queue_fill(&c->out, iov, NET_IOV_MAX, NET_WRITE_MAX, &size);
        struct msghdr m = {.msg_iov = iov, .msg_iovlen = (size_t)count};
        ssize_t done = sendmsg(c->link->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        n->stats.writes++;
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            c->out_full = true;
            return 1;
        }
        if (done < 0) {
            c->write_error = errno;
            return KS_EIO;
        }
        n->stats.bytes_out += (uint64_t)done;
        c->out_ms = net_now_ms();
        total += (size_t)done;
        send_queue_sent(&c->out, (size_t)done);
        if ((size_t)done < size) {
            c->out_full = true;
            return 1;
        }
    }
    return 0;
}

/* On the loop's thread. */
void conn_writable(struct net_conn *c)
{
    c->out_full = false;
    int rc = c->write_error ? KS_EIO : conn_write(c);
    if (rc < 0) {
        conn_fail(c, KS_ECLOSED, false, "write: %s", strerror(c->write_error));
        return;
    }
    c->out_armed = rc > 0;
    conn_events(c);
}

void net_write_dirty(struct net *n)
{
    while (n->dirty) {
        struct net_conn *c = n->dirty;
        conn_undirty(c);
        if (!c->link || (!c->write_error && c->out_armed))
            continue;
        if (c->out_full && !c->write_error) {
            c->out_armed = true;
            conn_events(c);
        } else {
            conn_writable(c);
        }
    }
}

void conn_queue(struct net_conn *c, const struct frame_header *h, const void *payload, void (*release)(void *arg),
                void *release_arg)
{
    struct frame_header head = *h;
    uint8_t bytes[FRAME_SIZE];
    CHECK(h->len == 0 || payload);
    head.flags &= (uint8_t)~FRAME_CRC;
    if (c->net->config.payload_crc && h->len) {
        head.flags |= FRAME_CRC;
        head.payload_crc = crc32c(0, payload, h->len);
    }
    frame_encode(&head, bytes);
    send_queue_add(&c->out, bytes, payload, h->len, release, release_arg);
    c->net->stats.frames_out++;
    if (!c->out_armed)
        conn_dirty(c);
}

int net_sendv(struct net_conn *c, const struct frame_header *h, const struct net_part *parts, int n)
{
    struct frame_header head = *h;
    uint8_t bytes[FRAME_SIZE];
    if (!net_is_open(c)) {
        for (int i = 0; i < n; i++)
            if (parts[i].release)
                parts[i].release(parts[i].release_arg);
        return KS_ECLOSED;
    }
    head.flags &= (uint8_t)~FRAME_CRC;
    if (c->net->config.payload_crc && h->len) {
        head.flags |= FRAME_CRC;
        head.payload_crc = 0;
        for (int i = 0; i < n; i++)
            head.payload_crc = crc32c(head.payload_crc, parts[i].data, parts[i].size);
    }
    frame_encode(&head, bytes);
    send_queue_add(&c->out, bytes, NULL, 0, NULL, NULL);
    for (int i = 0; i < n; i++)
        send_queue_more(&c->out, parts[i].data, parts[i].size, parts[i].release, parts[i].release_arg);
    c->net->stats.frames_out++;
    if (!c->out_armed)
        conn_dirty(c);
    if (c->out.bytes >= NET_WRITE_NOW_BYTES && !c->out_armed && !c->out_full && !c->write_error)
        (void)conn_write(c);
    return 0;
}

int net_send(struct net_conn *c, const struct frame_header *h, const void *payload, void (*release)(void *arg),
             void *release_arg)
{
    if (!net_is_open(c)) {
        if (release)
            release(release_arg);
        return KS_ECLOSED;
    }
    conn_queue(c, h, payload, release, release_arg);
    if (c->out.bytes >= NET_WRITE_NOW_BYTES && !c->out_armed && !c->out_full && !c->write_error)
        (void)conn_write(c); /* the rest, or the error, is the loop's: the connection is dirty */
    return 0;
}

int net_flush(struct net_conn *c)
{
    if (!c->link || c->out_armed || c->state < CONN_HANDSHAKE)
        return 0;
    if (!c->write_error && !c->out_full && conn_write(c) == 0 && !c->paused) {
        conn_undirty(c);
        return 0;
    }
    conn_dirty(c);
    return 1;
}

bool net_is_open(const struct net_conn *c)
{
    return c->state == CONN_OPEN && !c->dead && !c->write_error;
}

bool net_blocked(const struct net_conn *c)
{
    return c->out.bytes > c->net->config.send_bytes_max;
}

size_t net_queued(const struct net_conn *c)
{
    return c->out.bytes;
}
