/* loop_uv.c - loop.h: carries the shard_core's effects to sockets and disk. */
#include "server/loop.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/map.h"
#include "base/mem.h"

/* Buffers that a persisted batch reads from, until it is durable. */
struct held {
    uint64_t seq;
    struct buf *buf[4];
};

/* A connection with a loop of another server. `out`: we made it, as the primary of something that it holds. */
struct server_peer {
    uint64_t id;
    uint32_t loop;
    bool out, wanted;
    char addr[ADDR_MAX_BYTES];
    struct net_conn *conn;         /* in: NULL when it is gone */
};

struct loop {
    struct loop_config cfg;
    struct job_doc job;
    uv_loop_t uv;
    uv_async_t durable;
    struct mailbox mailbox;
    struct net *net;
    struct pool *pool;
    struct store *store;
    struct shard_core *core;
    struct shard_outbox out;
    struct map peers;              /* members: id -> struct net_conn * */
    struct server_peer **servers;
    uint32_t nservers, cservers;
    struct held *held;             /* ring */
    uint32_t held_head, nheld, cheld;
    bool stopping, failed, started;
    pthread_t thread;
};

static void step(struct loop *l, const struct shard_event *e);

static struct mail *mail_new(struct loop *l, enum mail_kind kind)
{
    struct mail *m = mem_alloc(sizeof *m);
    m->kind = kind;
    m->loop = l->cfg.index;
    return m;
}

static void tell(struct loop *l, enum mail_kind kind, uint64_t id, int status, const char *text)
{
    struct mail *m = mail_new(l, kind);
    m->id = id;
    m->status = status;
    snprintf(m->text, sizeof m->text, "%s", text);
    mailbox_post(l->cfg.control, m);
}

static void tell_synced(struct loop *l, const struct shard_effect *e)
{
    struct mail *m = mail_new(l, MAIL_SYNCED);
    m->id = e->to;
    m->seq = e->seq;
    mailbox_post(l->cfg.control, m);
}

/* ---- effects ---- */

static void release_buf(void *arg)
{
    buf_unref(arg);
}

static struct server_peer *server_peer_find(const struct loop *l, uint64_t id, uint32_t loop, bool out)
{
    for (uint32_t i = 0; i < l->nservers; i++)
        if (l->servers[i]->id == id && l->servers[i]->loop == loop && l->servers[i]->out == out)
            return l->servers[i];
    return NULL;
}

static bool travels_out(uint8_t type)
{
    return type == FRAME_IMAGE || type == FRAME_MARK || type == FRAME_SYNC_END || type == FRAME_DECLARE;
}

static void do_server_send(struct loop *l, const struct shard_effect *e)
{
    struct buf *const bufs[] = {e->payload, e->more[0], e->more[1]};
    struct net_part part[3];
    int n = 0;
    struct server_peer *p = server_peer_find(l, e->to, e->loop, travels_out(e->header.type));
    for (int i = 0; i < 3; i++)
        if (bufs[i])
            part[n++] = (struct net_part){bufs[i]->data, bufs[i]->len, release_buf, bufs[i]};
    if (p && p->conn) {
        (void)net_sendv(p->conn, &e->header, part, n);
        return;
    }
    for (int i = 0; i < n; i++)
        buf_unref(part[i].release_arg);
}

static void do_send(struct loop *l, const struct shard_effect *e)
{
    if (e->is_server) {
        do_server_send(l, e);
        return;
    }
    struct net_conn *c = map_get(&l->peers, e->to);
    if (!c) {
        buf_unref(e->payload);
        return;
    }
    const uint8_t *data = e->payload ? e->payload->data + e->offset : NULL;
    (void)net_send(c, &e->header, data, e->payload ? release_buf : NULL, e->payload);
}

static void hold(struct loop *l, const struct shard_effect *e)
{
    if (l->nheld == l->cheld) {
        uint32_t cap = l->cheld ? l->cheld * 2 : 64;
        struct held *grown = mem_alloc(cap * sizeof *grown);
        for (uint32_t i = 0; i < l->nheld; i++)
            grown[i] = l->held[(l->held_head + i) % l->cheld];
        mem_free(l->held);
        l->held = grown;
        l->cheld = cap;
        l->held_head = 0;
    }
    struct held *h = &l->held[(l->held_head + l->nheld++) % l->cheld];
    h->seq = e->seq;
    memcpy(h->buf, e->held, sizeof h->buf);
}

static void let_go(struct loop *l, uint64_t seq)
{
    while (l->nheld && l->held[l->held_head].seq <= seq) {
        for (int i = 0; i < 4; i++)
            buf_unref(l->held[l->held_head].buf[i]);
        l->held_head = (l->held_head + 1) % l->cheld;
        l->nheld--;
    }
}

static void server_reconnect(struct loop *l, uint64_t id)
{
    for (uint32_t i = 0; i < l->nservers; i++) {
        struct server_peer *p = l->servers[i];
        if (p->id != id)
            continue;
        if (p->conn)
            net_close(p->conn, KS_EAGAIN, "not cut off any more; connect again");
        p->conn = p->out ? net_connect(l->net, p->addr, p) : NULL;
    }
}

static void do_report(struct loop *l, const struct shard_effect *e)
{
    struct mail *m = mail_new(l, MAIL_REPORT);
    m->ballot = e->ballot;
    m->report = mem_alloc(sizeof *m->report);
    m->report->from = l->cfg.self;
    m->report->ballot = e->ballot;
    m->report->clock = -1;
    m->report->nshards = e->nreports;
    m->report->shard = mem_dup(e->reports, e->nreports * sizeof *e->reports);
    mailbox_post(l->cfg.control, m);
}

static void do_close(struct loop *l, uint64_t peer, int status, const char *text)
{
    struct net_conn *c = map_remove(&l->peers, peer);
    if (c)
        net_close(c, status, text);
}

static void fail(struct loop *l, int status, const char *text)
{
    if (!l->failed)
        tell(l, MAIL_FATAL, 0, status, text);
    l->failed = true;
}

static void carry_out(struct loop *l)
{
    for (uint32_t i = 0; i < l->out.n; i++) {
        const struct shard_effect *e = &l->out.effect[i];
        switch (e->kind) {
        case SHARD_SEND:
            do_send(l, e);
            break;
        case SHARD_PERSIST:
            hold(l, e);
            l->store->ops->submit(l->store, e->seq, e->ops, e->nops);
            break;
        case SHARD_REPORT:
            do_report(l, e);
            break;
        case SHARD_WANT_VIEW:
            tell(l, MAIL_WANT_VIEW, 0, 0, "");
            break;
        case SHARD_SYNCED:
            tell_synced(l, e);
            break;
        case SHARD_CLOSE:
            if (e->is_server) {
                server_reconnect(l, e->to);
                break;
            }
            log_warn("peer_refused", "id=%llu status=%d cause=\"%s\"", (unsigned long long)e->to, e->status, e->text);
            do_close(l, e->to, e->status, e->text);
            break;
        case SHARD_FATAL:
            fail(l, e->status, e->text);
            break;
        }
    }
}

static void step(struct loop *l, const struct shard_event *e)
{
    shard_core_step(l->core, e, &l->out);
    carry_out(l);
}

/* ---- the store ---- */

static void store_wake(void *arg)
{
    struct loop *l = arg;
    uv_async_send(&l->durable);
}

static void on_durable(uv_async_t *a)
{
    struct loop *l = a->data;
    char err[STORE_ERR_TEXT] = "";
    uint64_t seq;
    if (!l->store)
        return;
    int r = l->store->ops->poll(l->store, &seq, err);
    struct shard_event e = {.kind = SHARD_DURABLE, .now_us = clock_now_us(), .seq = seq};
    step(l, &e);
    let_go(l, seq);
    if (r)
        fail(l, r, err);
}

/* ---- connections ---- */

static int on_accept(void *arg, const struct hello *h, char *err)
{
    struct loop *l = arg;
    if (strcmp(h->role, "member") && strcmp(h->role, "server")) {
        snprintf(err, ERR_TEXT, "a data port serves members and servers, not role '%s'", h->role);
        return KS_EINVAL;
    }
    if (h->chunk_bytes != l->job.chunk_bytes) {
        snprintf(err, ERR_TEXT, "chunks of this job have %u bytes, not %u", l->job.chunk_bytes, h->chunk_bytes);
        return KS_EPROTO;
    }
    return 0;
}

static void server_opened(struct loop *l, struct net_conn *c)
{
    struct server_peer *p = net_tag(c);
    if (!p) {
        p = server_peer_find(l, net_peer_id(c), net_peer(c)->loop, false);
        if (!p) {
            p = mem_alloc(sizeof *p);
            p->id = net_peer_id(c);
            p->loop = net_peer(c)->loop;
            ARRAY_ROOM(l->servers, l->nservers, l->cservers);
            l->servers[l->nservers++] = p;
        }
        if (p->conn)
            net_close(p->conn, KS_ECLOSED, "replaced by a newer connection");
        p->conn = c;
        net_tag_set(c, p);
    }
    struct shard_event e = {.kind = SHARD_PEER_UP, .now_us = clock_now_us(), .from = p->id, .loop = p->loop,
                            .is_server = true, .outgoing = p->out};
    step(l, &e);
}

static void on_opened(void *arg, struct net_conn *c)
{
    struct loop *l = arg;
    uint64_t id = net_peer_id(c);
    if (net_tag(c) || !strcmp(net_peer(c)->role, "server")) {
        server_opened(l, c);
        return;
    }
    do_close(l, id, KS_ECLOSED, "replaced by a newer connection");
    map_put(&l->peers, id, c);
    struct shard_event e = {.kind = SHARD_PEER_UP, .now_us = clock_now_us(), .from = id};
    step(l, &e);
}

static void *on_sink(void *arg, struct net_conn *c, const struct frame_header *h, void **ret_cookie)
{
    struct loop *l = arg;
    struct buf *b;
    if (h->type == FRAME_DECLARE)
        b = h->len <= 65536 ? pool_get(l->pool, h->len) : NULL;
    else
        b = shard_core_sink(l->core, net_peer_id(c), h);
    *ret_cookie = b;
    return b ? b->data : NULL;
}

static void on_abandon(void *arg, struct net_conn *c, const struct frame_header *h, void *cookie)
{
    (void)arg;
    (void)c;
    (void)h;
    buf_unref(cookie);
}

static void on_declare(struct loop *l, struct net_conn *c, struct shard_event *e)
{
    struct tensor_spec spec;
    char err[ERR_TEXT] = "the declaration is too long";
    int r = e->payload ? tensor_decode((const char *)e->payload->data, e->payload->len, &spec, err) : KS_EPROTO;
    buf_unref(e->payload);
    e->payload = NULL;
    if (r) {
        struct server_peer *p = net_tag(c);
        if (!p)
            map_remove(&l->peers, e->from);
        else if (!p->out)
            p->conn = NULL;
        net_close(c, r, err);
        return;
    }
    e->kind = SHARD_DECLARE;
    e->spec = &spec;
    step(l, e);
}

static void on_frame(void *arg, struct net_conn *c, const struct frame_header *h, void *payload, void *cookie,
                     bool discarded)
{
    struct loop *l = arg;
    (void)payload;
    struct shard_event e = {.kind = SHARD_FRAME, .now_us = clock_now_us(), .from = net_peer_id(c), .header = *h,
                            .payload = cookie, .discarded = discarded};
    const struct server_peer *p = net_tag(c);
    if (p) {
        e.from = p->id;
        e.loop = p->loop;
        e.is_server = true;
    } else if (map_get(&l->peers, e.from) != c) {
        buf_unref(cookie);
        return;
    }
    if (h->type == FRAME_DECLARE)
        on_declare(l, c, &e);
    else
        step(l, &e);
}

static void on_closed(void *arg, struct net_conn *c, int status, const char *cause)
{
    struct loop *l = arg;
    uint64_t id = net_peer_id(c);
    struct server_peer *p = net_tag(c);
    if (p && !p->out && p->conn == c)
        p->conn = NULL;
    if (p || map_get(&l->peers, id) != c)
        return;
    map_remove(&l->peers, id);
    tell(l, MAIL_PEER_DOWN, id, status, cause);
}

/* ---- other servers ---- */

static void server_want(struct loop *l, const struct view *v, uint64_t id, uint32_t shard)
{
    const struct view_server *s = view_server_find(v, id);
    if (!s || id == l->cfg.self)
        return;
    uint32_t loop = loop_of(shard, s->nloops);
    struct server_peer *p = server_peer_find(l, id, loop, true);
    if (!p) {
        p = mem_alloc(sizeof *p);
        p->id = id;
        p->loop = loop;
        p->out = true;
        snprintf(p->addr, sizeof p->addr, "%s", s->loop[loop]);
        ARRAY_ROOM(l->servers, l->nservers, l->cservers);
        l->servers[l->nservers++] = p;
        p->conn = net_connect(l->net, p->addr, p);
    }
    p->wanted = true;
}

/* Connections to whoever holds, or is to hold, what this loop is the primary of; others are closed. */
static void servers_follow(struct loop *l, const struct view *v)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < l->nservers; i++)
        l->servers[i]->wanted = !l->servers[i]->out && view_server_find(v, l->servers[i]->id) != NULL;
    for (uint32_t i = l->cfg.index; i < v->nshards; i += l->cfg.nloops) {
        const struct view_shard *s = &v->shard[i];
        for (uint32_t k = 0; s->primary == l->cfg.self && k < s->nbackups; k++)
            server_want(l, v, s->backup[k], i);
        for (uint32_t k = 0; s->primary == l->cfg.self && k < s->njoining; k++)
            server_want(l, v, s->joining[k], i);
    }
    for (uint32_t i = 0; i < l->nservers; i++) {
        struct server_peer *p = l->servers[i];
        if (p->wanted) {
            l->servers[n++] = p;
            continue;
        }
        if (p->conn)
            net_close(p->conn, 0, "not needed any more");
        mem_free(p);
    }
    l->nservers = n;
}

static void server_cut(struct loop *l, uint64_t id)
{
    for (uint32_t i = 0; i < l->nservers; i++) {
        struct server_peer *p = l->servers[i];
        if (p->id != id || p->out || !p->conn)
            continue;
        net_close(p->conn, KS_EFENCED, "cut off by a change of the view");
        p->conn = NULL;
    }
}

/* ---- mail ---- */

static void send_stats(struct loop *l, uint64_t request)
{
    struct mail *m = mail_new(l, MAIL_STATS);
    struct loop_stats *s = m->stats = mem_alloc(sizeof *s);
    m->seq = request;
    shard_core_stats(l->core, &s->shard);
    s->nmembers = shard_core_member_stats(l->core, s->member, 256);
    s->nwaiting = shard_core_waiting(l->core, s->waiting, 256, &s->waiting_step);
    s->nmembers = s->nmembers > 256 ? 256 : s->nmembers;
    s->nwaiting = s->nwaiting > 256 ? 256 : s->nwaiting;
    s->pool_used = pool_used_bytes(l->pool);
    s->pool_held = pool_held_bytes(l->pool);
    mailbox_post(l->cfg.control, m);
}

static void stop(struct loop *l)
{
    if (l->stopping)
        return;
    l->stopping = true;
    net_shutdown(l->net);
    uv_close((uv_handle_t *)&l->durable, NULL);
    mailbox_close(&l->mailbox);
}

/* Connections of members that a view removed learn it by FENCED, then go. */
static void close_unlisted(struct loop *l, const struct view *v)
{
    uint64_t gone[256];
    uint32_t i = 0, n = 0;
    uint64_t id;
    void *c;
    while (n < 256 && map_next(&l->peers, &i, &id, &c)) {
        const struct view_member *m = view_member_find(v, id);
        if (m && !m->live)
            gone[n++] = id;
    }
    while (n--)
        do_close(l, gone[n], KS_EFENCED, "not in the view any more");
}

static void on_mail(void *arg, struct mail *m)
{
    struct loop *l = arg;
    struct shard_event e = {.now_us = clock_now_us()};
    if (l->stopping)
        return;
    switch (m->kind) {
    case MAIL_PREPARE:
        for (uint32_t i = 0; i < m->prepare->ngone; i++) {
            do_close(l, m->prepare->gone[i], KS_EFENCED, "cut off by a change of the view");
            server_cut(l, m->prepare->gone[i]);
        }
        e.kind = SHARD_PREPARE;
        e.prepare = m->prepare;
        step(l, &e);
        break;
    case MAIL_ADOPT:
        e.kind = SHARD_ADOPT;
        e.view = m->view;
        servers_follow(l, m->view);
        step(l, &e);
        close_unlisted(l, m->view);
        break;
    case MAIL_HEIR_OF:
        shard_core_loaded(l->core, m->id);
        break;
    case MAIL_CLOSE_PEER:
        do_close(l, m->id, KS_EFENCED, m->text);
        break;
    case MAIL_STATS:
        send_stats(l, m->seq);
        break;
    case MAIL_STOP:
        stop(l);
        break;
    default:
        CHECK(!"mail that is not for a loop");
    }
}

static void *run(void *arg)
{
    struct loop *l = arg;
    char name[16];
    snprintf(name, sizeof name, "ks-loop-%u", l->cfg.index);
    pthread_setname_np(pthread_self(), name);
    uv_run(&l->uv, UV_RUN_DEFAULT);
    tell(l, MAIL_STOPPED, 0, 0, "");
    return NULL;
}

/* ---- life ---- */

static int load_each(void *arg, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size)
{
    struct { struct loop *l; char *err; } *x = arg;
    return shard_core_load(x->l->core, key, key_size, value, size, x->err);
}

static int open_store(struct loop *l, char *err)
{
    if (!l->cfg.store_dir)
        return 0;
    struct store_lmdb_config sc = {.dir = l->cfg.store_dir, .create = l->cfg.create, .wake = store_wake, .wake_arg = l};
    int r = store_lmdb_open(&sc, &l->store, err);
    if (r)
        return r;
    struct { struct loop *l; char *err; } x = {l, err};
    r = l->store->ops->load(l->store, load_each, &x, err);
    if (!r && l->cfg.heir_of)
        shard_core_loaded(l->core, l->cfg.heir_of);
    return r;
}

static uint64_t memory_of_host(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size : 0;
}

static void core_create(struct loop *l)
{
    struct shard_config sc = {.self = l->cfg.self, .loop = l->cfg.index, .nloops = l->cfg.nloops,
                              .nshards = l->job.nshards, .chunk_bytes = l->job.chunk_bytes,
                              .deterministic = l->job.deterministic, .durable = l->cfg.store_dir != NULL};
    l->pool = pool_create(l->cfg.memory_max);
    sc.declared_max = l->cfg.memory_max ? l->cfg.memory_max : memory_of_host();
    sc.pool = l->pool;
    l->core = shard_core_create(&sc);
}

static int open_net(struct loop *l, char *ret_addr, char *err)
{
    struct net_config nc = {.loop = &l->uv, .arg = l, .token = l->cfg.token,
                            .handlers = {on_accept, on_opened, on_sink, on_abandon, on_frame, on_closed}};
    nc.self.id = l->cfg.self;
    nc.self.loop = l->cfg.index;
    nc.self.chunk_bytes = l->job.chunk_bytes;
    snprintf(nc.self.job, sizeof nc.self.job, "%s", l->job.job);
    snprintf(nc.self.role, sizeof nc.self.role, "server");
    int r = net_create(&nc, &l->net, err);
    return r ? r : net_listen(l->net, l->cfg.listen, ret_addr, err);
}

int loop_create(const struct loop_config *c, struct loop **ret, char *ret_addr, char *err)
{
    struct loop *l = mem_alloc(sizeof *l);
    l->cfg = *c;
    l->job = *c->job;
    map_init(&l->peers);
    uv_loop_init(&l->uv);
    l->durable.data = l;
    uv_async_init(&l->uv, &l->durable, on_durable);
    mailbox_init(&l->mailbox, &l->uv, on_mail, l);
    core_create(l);
    int r = open_store(l, err);
    if (!r)
        r = open_net(l, ret_addr, err);
    if (r) {
        loop_free(l);
        return r;
    }
    *ret = l;
    return 0;
}

int loop_start(struct loop *l)
{
    int r = pthread_create(&l->thread, NULL, run, l);
    l->started = r == 0;
    return r ? KS_EIO : 0;
}

void loop_post(struct loop *l, struct mail *m)
{
    mailbox_post(&l->mailbox, m);
}

void loop_free(struct loop *l)
{
    if (!l)
        return;
    if (l->started)
        pthread_join(l->thread, NULL);
    if (l->store)
        l->store->ops->close(l->store);
    if (!l->stopping) {
        if (l->net)
            net_shutdown(l->net);
        uv_close((uv_handle_t *)&l->durable, NULL);
        mailbox_close(&l->mailbox);
    }
    uv_run(&l->uv, UV_RUN_DEFAULT);
    if (l->net)
        net_free(l->net);
    let_go(l, UINT64_MAX);
    shard_core_free(l->core);
    pool_free(l->pool);
    mailbox_done(&l->mailbox);
    shard_outbox_done(&l->out);
    map_done(&l->peers);
    for (uint32_t i = 0; i < l->nservers; i++)
        mem_free(l->servers[i]);
    mem_free(l->servers);
    mem_free(l->held);
    CHECK(uv_loop_close(&l->uv) == 0);
    mem_free(l);
}
