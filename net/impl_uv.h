/* impl_uv.h - what the files of the TCP net share.
 *
 * net_uv.c: the net, listeners, sockets' options.  connect_uv.c: connectors.  conn_uv.c: a connection's life.
 * link_uv.c: a socket under libuv.  write_uv.c: sending.
 *
 * Functions here run with the owner's lock held. uv callbacks take it with net_enter and give it back with net_leave.
 * Fields of a connection marked L are touched by the loop's thread only; the others under the lock. */
#ifndef NET_IMPL_UV_H
#define NET_IMPL_UV_H

#include <uv.h>

#include "net/auth.h"
#include "net/net.h"
#include "net/receive.h"
#include "net/send_queue.h"

enum {
    NET_HANDSHAKE_MS = 5000, /* from connecting to opened */
    NET_LINGER_MS = 1000,    /* for a peer to take our last words */
    NET_BACKOFF_MIN_MS = 20,
    NET_BACKOFF_MAX_MS = 1000,
    NET_PENDING_MAX = 256, /* accepted connections that are not authenticated */
    NET_WRITE_NOW_BYTES = 256 << 10,
    NET_WRITE_MAX = 4 << 20, /* in one go */
    NET_IOV_MAX = 128,
};

/* One socket. Outlives its connection when it delivers a last BYE. */
struct link {
    struct net *net;
    struct net_conn *conn; /* NULL: lingering */
    struct link *prev, *next;
    uv_poll_t poll;
    uv_timer_t timer;
    int handles; /* uv handles that are not closed yet */
    int fd;
    int events;
    bool closing;
};

enum conn_state { CONN_IDLE, CONN_RESOLVING, CONN_CONNECTING, CONN_HANDSHAKE, CONN_OPEN };

struct net_conn {
    struct net *net;
    struct net_conn *prev, *next;            /* of all; accepted ones in the order of their coming */
    struct net_conn *dirty_next, **dirty_at; /* in the list of those with something to write */
    enum conn_state state;
    bool connector;
    bool dead;       /* the owner has no handle any more */
    bool out_armed;  /* the loop writes as soon as the socket takes more */
    bool out_full;   /* the socket took no more; trying again before it says so only costs system calls */
    bool paused;     /* not reading, it does not take what we answer */
    int write_error; /* an errno that the loop has to look at */
    void *tag;
    char addr[ADDR_MAX_BYTES];
    struct link *link;            /* L but for fd */
    uv_timer_t timer;             /* L: back-off, handshake deadline, heartbeat */
    struct auth auth;             /* L but for peer once open */
    struct receive in;            /* L */
    uint8_t *stage;               /* L */
    uint8_t own[RECEIVE_OWN_MAX]; /* L: payload of the connection's own frames */
    bool sunk;                    /* L: `cookie` belongs to a payload under way */
    void *cookie;
    struct send_queue out;
    uint64_t in_ms, ping_ms; /* L: when a byte came, when we pinged */
    uint64_t out_ms;         /* when a byte was written */
    uint64_t opened_ms;      /* L */
    uint32_t backoff_ms;     /* L */
    bool nobody;             /* L: the last try to connect was refused */
    struct resolve *resolve; /* L: under way, or NULL */
    unsigned tries;          /* L: picks one of the host's addresses */
};

struct listener {
    struct net *net;
    struct listener *next;
    uv_poll_t poll;
    uv_timer_t timer; /* after running out of descriptors */
    int handles, fd;
};

struct net {
    struct net_config config;
    char *token, *congestion;
    uv_prepare_t prepare;
    uv_check_t check;
    int handles; /* L: uv handles and links that are not closed yet */
    bool down;
    struct net_conn *conns, *conns_last, *dirty;
    struct link *links;
    struct listener *listeners;
    uint32_t npending;
    struct net_stats stats;
};

static inline void net_enter(struct net *n)
{
    if (n->config.lock)
        n->config.lock(n->config.arg);
}
static inline void net_leave(struct net *n)
{
    if (n->config.unlock)
        n->config.unlock(n->config.arg);
}
uint64_t net_now_ms(void);

/* net_uv.c */
void socket_options(const struct net *n, int fd);
/* conn_uv.c */
struct net_conn *conn_create(struct net *n, bool connector, const char *addr);
/* Takes fd; from now on poll it. Starts the handshake, or waits for the connect. */
void conn_attach(struct net_conn *c, int fd, enum conn_state state);
void conn_events(struct net_conn *c);
/* Something ended this socket. Tells the owner; a connector tries again, an accepted connection is freed. say: tell the
 * peer with FRAME_BYE. */
void conn_fail(struct net_conn *c, int status, bool say, const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Without telling the owner. */
void conn_destroy(struct net_conn *c, bool say, int status, const char *text);
/* link_uv.c */
struct link *link_create(struct net_conn *c, int fd);
void link_close(struct link *l);
/* Without its connection: takes what comes and drops it until the peer has closed, or for a moment. Closing at once
 * with unread bytes in the socket would reset the connection, and our BYE would be lost. */
void link_linger(struct link *l);
/* connect_uv.c */
void connect_later(struct net_conn *c, uint32_t delay_ms);
void connect_now(struct net_conn *c);
void connect_stop(struct net_conn *c);
/* write_uv.c */
void conn_queue(struct net_conn *c, const struct frame_header *h, const void *payload, void (*release)(void *arg),
                void *release_arg);
/* 0: everything is written; 1: the socket takes no more; KS_EIO: write_error is set. */
int conn_write(struct net_conn *c);
void conn_writable(struct net_conn *c);
void conn_undirty(struct net_conn *c);
/* Everything that was queued and not written. */
void net_write_dirty(struct net *n);

#endif
