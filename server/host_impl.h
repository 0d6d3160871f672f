/* host_impl.h - the inside of host.h, shared by host_*.c. */
#ifndef SERVER_HOST_IMPL_H
#define SERVER_HOST_IMPL_H

#include <uv.h>

#include "base/map.h"
#include "coord/coord.h"
#include "net/net.h"
#include "server/ctl_core.h"
#include "server/host.h"
#include "server/loop.h"
#include "storage/datadir.h"

/* Another process on a control connection. Servers connect to each other both ways; either will do. */
struct peer {
    uint64_t id;
    bool is_server;
    struct net_conn *in, *out;
    unsigned asks;                 /* `out` is only to find out whether it lives: tries that are left; 0: it is to stay */
    char addr[ADDR_MAX_BYTES];
};
/* A status request that waits for the loops. */
struct asking {
    struct net_conn *conn;         /* NULL: it went away */
    uint64_t request, seq;
    uint32_t missing;
    struct loop_stats *loop[LOOPS_MAX];
    struct asking *next;
};
enum { HOST_TEXT = 512 };
struct host {
    const struct host_config *cfg;
    struct job_doc job;
    uint64_t id;
    char name[NAME_MAX_BYTES];
    uv_loop_t uv;
    uv_async_t coord_wake;
    uv_timer_t timer, notice;
    uv_signal_t term, interrupt;
    struct mailbox mailbox;
    struct net *net;
    struct coord *coord;
    struct ctl_core *ctl;
    struct ctl_outbox out;
    struct datadir dir;
    bool has_dir;
    uint64_t heir_of;
    uint32_t nformer;              /* lives that the directory had before, oldest first */
    uint64_t former[CTL_FORMER_MAX];
    uint32_t nloops, loops_running;
    struct loop *loop[LOOPS_MAX];
    struct view_server self;
    struct map peers;              /* id -> struct peer * */
    struct asking *asking;
    uint64_t asked;
    uint64_t started_us;
    struct view *under;            /* the newest adopted view */
    uint64_t view_us;              /* since when */
    uint64_t failovers;            /* views that gave shards of a dead server to another, since this one serves */
    bool ending, draining;
    enum host_end end;
    char *text;                    /* of host_run's caller, 512 bytes */
};

/* ---- host_start_uv.c: before the loop runs; one line in err (HOST_TEXT) ---- */
int host_job_find(struct host *h, char *err);      /* reads or creates "job"; finds whose heir we are */
int host_data_open(struct host *h, char *err);

/* ---- host_uv.c ---- */
void host_step(struct host *h, const struct ctl_event *e);
void host_finish(struct host *h, enum host_end end, const char *text);

/* ---- host_ctl_uv.c: control connections ---- */
int host_net_open(struct host *h, char *err);
void host_peer_connect(struct host *h, uint64_t id, const char *addr);
/* After its connection closed: looks whether its process is there. */
void host_peer_ask(struct host *h, uint64_t id);
void host_peer_disconnect(struct host *h, uint64_t id, const char *text);
/* Sends a control frame with a JSON document (taken over; NULL: none) to node `to`. */
void host_ctl_send(struct host *h, uint64_t to, struct frame_header head, char *doc);
void host_peers_free(struct host *h);

/* ---- host_status.c ---- */
void host_status_ask(struct host *h, struct net_conn *c, uint64_t request);
/* The process runs under another view now. */
void host_status_view(struct host *h, const struct view *v);
void host_status_loop(struct host *h, struct mail *m);      /* takes m->stats */
void host_status_forget(struct host *h, struct net_conn *c);

#endif
