#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "worker/host.h"

static uint64_t key_of(uint64_t server, uint32_t loop)
{
    return server * LOOPS_MAX + loop;
}

void peer_send(struct ks_job *j, uint64_t server, uint32_t loop, const struct frame_header *h, const void *payload,
               void (*release)(void *arg), void *release_arg)
{
    struct peer *p = map_get(&j->peer_by_key, key_of(server, loop));
    if (!p || !p->up) {
        if (release)
            release(release_arg);
        return;
    }
    (void)net_send(p->conn, h, payload, release, release_arg);
    if (p->touched)
        return;
    p->touched = true;
    p->touched_next = j->touched;
    j->touched = p;
}

void peer_untouch(struct peer *p)
{
    struct peer **at = &p->job->touched;
    while (*at && *at != p)
        at = &(*at)->touched_next;
    if (*at)
        *at = p->touched_next;
    p->touched = false;
}

/* ---- the net's handlers ---- */

static void on_opened(void *arg, struct net_conn *c)
{
    struct ks_job *j = arg;
    struct peer *p = net_tag(c);
    if (net_peer_id(c) != p->server) {
        /* A new life at the same address. The view that lists it is on its way. */
        follow_view_wanted(j);
        return;
    }
    p->up = true;
    struct client_event e = {.kind = CLIENT_PEER_UP, .from = p->server, .loop = p->loop};
    job_step(j, &e);
}

static void on_closed(void *arg, struct net_conn *c, int status, const char *cause)
{
    struct ks_job *j = arg;
    struct peer *p = net_tag(c);
    log_info("peer_closed", "server=%llu loop=%u addr=%s cause=\"%s\"", (unsigned long long)p->server, p->loop,
             net_addr(c), cause);
    if (status == KS_EFENCED)
        follow_view_wanted(j);
    if (!p->up)
        return;
    p->up = false;
    j->stats.reconnects++;
    struct client_event e = {.kind = CLIENT_PEER_DOWN, .from = p->server, .loop = p->loop};
    job_step(j, &e);
}

static void *on_sink(void *arg, struct net_conn *c, const struct frame_header *h, void **ret_cookie)
{
    struct ks_job *j = arg;
    struct peer *p = net_tag(c);
    if (!p->up)
        return NULL;
    if (h->type == FRAME_RESULT || h->type == FRAME_VALUE)
        return client_core_sink(j->core, p->server, p->loop, h);
    if (h->len > p->scratch_size) {
        mem_free(p->scratch);
        p->scratch = mem_alloc(h->len);
        p->scratch_size = h->len;
    }
    *ret_cookie = p->scratch;
    return p->scratch;
}

/* The core learns it from PEER_DOWN. */
static void on_abandon(void *arg, struct net_conn *c, const struct frame_header *h, void *cookie)
{
    (void)arg;
    (void)c;
    (void)h;
    (void)cookie;
}

static void on_frame(void *arg, struct net_conn *c, const struct frame_header *h, void *payload, void *cookie,
                     bool discarded)
{
    struct ks_job *j = arg;
    struct peer *p = net_tag(c);
    (void)discarded;
    if (!p->up)
        return;
    struct client_event e = {
        .kind = CLIENT_FRAME, .from = p->server, .loop = p->loop, .header = *h, .payload = cookie ? payload : NULL};
    job_step(j, &e);
}

const struct net_handlers peer_handlers = {NULL, on_opened, on_sink, on_abandon, on_frame, on_closed};

/* ---- which connections there are ---- */

static void peer_free(struct peer *p, const char *why)
{
    struct ks_job *j = p->job;
    struct peer **at = &j->peers;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    if (p->touched)
        peer_untouch(p);
    map_remove(&j->peer_by_key, key_of(p->server, p->loop));
    net_close(p->conn, KS_OK, why);
    mem_free(p->scratch);
    mem_free(p);
}

static void peer_want(struct ks_job *j, const struct view_server *s, uint32_t loop)
{
    struct peer *p = map_get(&j->peer_by_key, key_of(s->id, loop));
    if (!p) {
        p = mem_alloc(sizeof *p);
        p->job = j;
        p->server = s->id;
        p->loop = loop;
        p->conn = net_connect(j->data, s->loop[loop], p);
        p->next = j->peers;
        j->peers = p;
        map_put(&j->peer_by_key, key_of(s->id, loop), p);
    }
    p->listed = true;
}

static bool serves(const struct view *v, uint64_t server)
{
    for (uint32_t i = 0; i < v->nshards; i++)
        if (v->shard[i].primary == server)
            return true;
    return false;
}

void peers_follow(struct ks_job *j)
{
    const struct view *v = j->core ? client_core_view(j->core) : NULL;
    if (!v || !j->data || !j->listed)
        return;
    for (struct peer *p = j->peers; p; p = p->next)
        p->listed = false;
    for (uint32_t i = 0; i < v->nservers; i++)
        for (uint32_t n = 0; n < v->server[i].nloops && serves(v, v->server[i].id); n++)
            peer_want(j, &v->server[i], n);
    for (struct peer *p = j->peers, *next; p; p = next) {
        next = p->next;
        if (p->listed)
            continue;
        struct client_event e = {.kind = CLIENT_PEER_DOWN, .from = p->server, .loop = p->loop};
        bool up = p->up;
        peer_free(p, "this server serves no shards any more");
        if (up)
            job_step(j, &e);
    }
}

void peers_drop(struct ks_job *j)
{
    while (j->peers)
        peer_free(j->peers, "this life of the member is over");
}
