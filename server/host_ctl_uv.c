/* host_ctl_uv.c - the control port: members, other servers, operators. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/host_impl.h"

/* PING_MS, SILENCE_MS: a host that vanishes, a process that is stopped. ASKS_MAX: tries to reach a server whose connection
 * closed; the first comes at once, and may meet a process that is about to be gone. */
enum { PING_MS = 200, SILENCE_MS = 1500, ASKS_MAX = 4 };

static struct peer *peer_get(struct host *h, uint64_t id)
{
    struct peer *p = map_get(&h->peers, id);
    if (!p) {
        p = mem_alloc(sizeof *p);
        p->id = id;
        map_put(&h->peers, id, p);
    }
    return p;
}

static struct net_conn *peer_conn(const struct peer *p)
{
    if (p->out && net_is_open(p->out))
        return p->out;
    return p->in && net_is_open(p->in) ? p->in : NULL;
}

static void free_doc(void *doc)
{
    mem_free(doc);
}

void host_ctl_send(struct host *h, uint64_t to, struct frame_header head, char *doc)
{
    struct peer *p = map_get(&h->peers, to);
    struct net_conn *c = p ? peer_conn(p) : NULL;
    const struct view *v = ctl_core_view(h->ctl);
    head.len = doc ? strlen(doc) : 0;
    head.epoch = v ? (uint32_t)v->epoch : 0;
    if (c)
        (void)net_send(c, &head, doc, doc ? free_doc : NULL, doc);
    else
        mem_free(doc);
}

static void event(struct host *h, enum ctl_event_kind kind, uint64_t from, bool is_server, const char *text)
{
    struct ctl_event e = {.kind = kind, .now_us = clock_now_us(), .from = from, .is_server = is_server, .text = text};
    host_step(h, &e);
}

/* ---- connections ---- */

static int on_accept(void *arg, const struct hello *hello, char *err)
{
    (void)arg;
    if (!strcmp(hello->role, "member") || !strcmp(hello->role, "server") || !strcmp(hello->role, "operator"))
        return 0;
    snprintf(err, ERR_TEXT, "unknown role '%s'", hello->role);
    return KS_EINVAL;
}

static void on_opened(void *arg, struct net_conn *c)
{
    struct host *h = arg;
    const struct hello *hello = net_peer(c);
    struct peer *tagged = net_tag(c);
    uint64_t id = net_peer_id(c);
    if (!tagged && !strcmp(hello->role, "operator"))
        return;
    struct peer *p = tagged ? tagged : peer_get(h, id);
    bool was_up;
    if (tagged) {
        if (id != p->id) {
            /* The address is another process's now. */
            p->out = NULL;
            net_close(c, KS_ENOENT, "another server than expected answers here");
            if (!p->in)
                event(h, CTL_PEER_DEAD, p->id, true, "another server answers at its address");
            return;
        }
        was_up = p->in != NULL;
        p->asks = p->asks ? ASKS_MAX : 0;
    } else {
        p->is_server = !strcmp(hello->role, "server");
        if (p->in)
            net_close(p->in, KS_ECLOSED, "replaced by a newer connection");
        was_up = p->out && net_is_open(p->out);
        p->in = c;
    }
    if (!was_up)
        event(h, CTL_PEER_UP, p->id, p->is_server, NULL);
}

/* The connector tries again by itself; only the loss of an open connection is news, and that nobody is there. */
static void out_closed(struct host *h, struct peer *p, struct net_conn *c, int status, const char *cause)
{
    uint64_t id = p->id;
    bool nobody = net_nobody(c), was_open = net_peer_id(c) == id;
    if (status == KS_EAUTH) {
        char text[HOST_TEXT];
        snprintf(text, sizeof text, "the server at %.60s, which was there first, has another token for job '%s' (KEEPSTEP_TOKEN "
                 "or --token-file): %.100s", p->addr, h->job.job, cause);
        host_finish(h, HOST_FAILED, text);
    }
    if (p->asks && (nobody || --p->asks == 0)) {
        p->asks = 0;
        p->out = NULL;
        net_close(c, 0, "it is not there");
    }
    if (p->in)
        return;
    if (was_open)
        event(h, CTL_PEER_DOWN, id, true, cause);
    else if (nobody)
        event(h, CTL_PEER_DEAD, id, true, cause);
}

/* What it said to us is at an end. Nothing is kept of it when there is no connection to it either. */
static void in_lost(struct host *h, struct peer *p, const char *cause)
{
    uint64_t id = p->id;
    bool is_server = p->is_server;
    p->in = NULL;
    if (p->out && net_is_open(p->out))
        return;
    if (is_server)
        host_peer_ask(h, id);
    event(h, CTL_PEER_DOWN, id, is_server, cause);
    p = map_get(&h->peers, id);
    if (p && !p->in && !p->out) {
        map_remove(&h->peers, id);
        mem_free(p);
    }
}

static void on_closed(void *arg, struct net_conn *c, int status, const char *cause)
{
    struct host *h = arg;
    struct peer *p = net_tag(c);
    host_status_forget(h, c);
    if (p) {
        out_closed(h, p, c, status, cause);
        return;
    }
    p = map_get(&h->peers, net_peer_id(c));
    if (!p || p->in != c)
        return;
    in_lost(h, p, cause);
}

void host_peer_connect(struct host *h, uint64_t id, const char *addr)
{
    struct peer *p = peer_get(h, id);
    p->is_server = true;
    p->asks = 0;
    if (p->out && !strcmp(p->addr, addr))
        return;
    if (p->out)
        net_close(p->out, 0, "address changed");
    snprintf(p->addr, sizeof p->addr, "%s", addr);
    p->out = net_connect(h->net, addr, p);
}

/* It is for the other one to connect again, if it can. */
void host_peer_ask(struct host *h, uint64_t id)
{
    const struct view *v = ctl_core_view(h->ctl);
    const struct view_server *s = v ? view_server_find(v, id) : NULL;
    struct peer *p = peer_get(h, id);
    if (!s || p->out)
        return;
    host_peer_connect(h, id, s->ctl);
    p->asks = ASKS_MAX;
}

void host_peer_disconnect(struct host *h, uint64_t id, const char *text)
{
    struct peer *p = map_remove(&h->peers, id);
    struct mail *m;
    if (p) {
        if (p->out)
            net_close(p->out, KS_EFENCED, text);
        if (p->in)
            net_close(p->in, KS_EFENCED, text);
        mem_free(p);
    }
    for (uint32_t i = 0; i < h->nloops; i++) {
        m = mem_alloc(sizeof *m);
        m->kind = MAIL_CLOSE_PEER;
        m->id = id;
        snprintf(m->text, sizeof m->text, "%s", text);
        loop_post(h->loop[i], m);
    }
}

void host_peers_free(struct host *h)
{
    uint32_t i = 0;
    void *p;
    while (map_next(&h->peers, &i, NULL, &p))
        mem_free(p);
    map_done(&h->peers);
}

/* ---- frames ---- */

static void *on_sink(void *arg, struct net_conn *c, const struct frame_header *fh, void **ret_cookie)
{
    (void)arg;
    (void)c;
    *ret_cookie = fh->len <= FRAME_CONTROL_MAX ? mem_alloc(fh->len + 1) : NULL;
    return *ret_cookie;
}

static void on_abandon(void *arg, struct net_conn *c, const struct frame_header *fh, void *cookie)
{
    (void)arg;
    (void)c;
    (void)fh;
    mem_free(cookie);
}

/* Decodes a document into the event and steps the core. 0, or KS_EPROTO with the reason. */
static int decode_and_step(struct host *h, const struct frame_header *fh, const char *doc, struct ctl_event *e, char *err)
{
    size_t n = fh->len;
    int r = 0;
    switch (fh->type) {
    case FRAME_JOIN: {
        struct join_doc j;
        r = join_decode(doc, n, &j, err);
        e->kind = CTL_JOIN;
        e->join = &j;
        if (!r)
            host_step(h, e);
        break;
    }
    case FRAME_VIEW: {
        struct view *v;
        r = view_decode(doc, n, &v, err);
        e->kind = CTL_VIEW;
        if (!r) {
            e->view = v;
            host_step(h, e);
            view_free(v);
        }
        break;
    }
    case FRAME_PREPARE: {
        struct prepare p;
        r = prepare_decode(doc, n, &p, err);
        e->kind = CTL_PREPARE;
        e->prepare = &p;
        if (!r) {
            host_step(h, e);
            prepare_done(&p);
        }
        break;
    }
    case FRAME_REPORT: {
        struct report p;
        r = report_decode(doc, n, &p, err);
        e->kind = CTL_REPORT;
        e->report = &p;
        if (!r) {
            host_step(h, e);
            report_done(&p);
        }
        break;
    }
    case FRAME_MODE:
        e->kind = CTL_MODE;
        r = mode_decode(doc, n, &e->mode, err);
        if (!r)
            host_step(h, e);
        break;
    default:
        snprintf(err, ERR_TEXT, "%s does not belong on a control connection", frame_type_name(fh->type));
        r = KS_EPROTO;
    }
    return r;
}

/* Frames without a document. */
static bool plain_frame(struct host *h, struct net_conn *c, const struct frame_header *fh, const char *text,
                        struct ctl_event *e)
{
    char reason[160];
    switch (fh->type) {
    case FRAME_STATUS:
        host_status_ask(h, c, fh->version);
        return true;
    case FRAME_LEAVE:
        e->kind = CTL_LEAVE;
        e->id = fh->tensor;
        e->step = fh->step;
        break;
    case FRAME_SUSPECT:
        e->kind = CTL_SUSPECT;
        e->id = fh->tensor;
        e->text = text;
        break;
    case FRAME_DRAIN:
        e->kind = CTL_DRAIN;
        e->id = fh->tensor;
        break;
    case FRAME_SYNCED:
        e->kind = CTL_SYNCED;
        e->id = fh->tensor;
        e->shard = fh->chunk;
        break;
    case FRAME_STOP:
        snprintf(reason, sizeof reason, "stopped by its operator%s%.100s", text[0] ? ": " : "", text);
        e->kind = CTL_END;
        e->text = reason;
        break;
    default:
        return false;
    }
    host_step(h, e);
    return true;
}

/* net_close does not tell: whoever broke the protocol is as good as gone until it connects again. */
static void refused(struct host *h, struct net_conn *c, uint64_t from, int status, const char *cause)
{
    struct peer *tagged = net_tag(c), *p = tagged ? tagged : map_get(&h->peers, from);
    host_status_forget(h, c);
    net_close(c, status, cause);
    if (tagged) {
        tagged->out = NULL;
        if (!tagged->in)
            event(h, CTL_PEER_DOWN, tagged->id, true, cause);
    } else if (p && p->in == c) {
        in_lost(h, p, cause);
    }
}

static void on_frame(void *arg, struct net_conn *c, const struct frame_header *fh, void *payload, void *cookie, bool discarded)
{
    struct host *h = arg;
    char err[ERR_TEXT] = "the document is too large";
    struct peer *tagged = net_tag(c);
    const struct hello *hello = net_peer(c);
    struct ctl_event e = {.now_us = clock_now_us(), .from = net_peer_id(c),
                          .is_server = tagged || (hello && !strcmp(hello->role, "server"))};
    (void)payload;
    int r = discarded ? KS_EPROTO : 0;
    if (!r && !plain_frame(h, c, fh, cookie ? cookie : "", &e))
        r = decode_and_step(h, fh, cookie ? cookie : "", &e, err);
    mem_free(cookie);
    if (r && !h->ending) {
        log_warn("control_frame_refused", "from=%llu type=%s cause=\"%s\"", (unsigned long long)e.from,
                 frame_type_name(fh->type), err);
        refused(h, c, e.from, r, err);
    }
}

static void advertise(struct host *h, const char *bound, char *out, size_t size)
{
    const char *port = strrchr(bound, ':');
    if (h->cfg->advertise && port)
        snprintf(out, size, "%s%s", h->cfg->advertise, port);
    else
        snprintf(out, size, "%s", bound);
}

/* The loop's port follows the control port; with port 0 both are free ones. */
static void loop_listen(const char *listen, uint32_t i, char *out, size_t size)
{
    const char *colon = strrchr(listen, ':');
    unsigned port = colon ? (unsigned)strtoul(colon + 1, NULL, 10) : 0;
    snprintf(out, size, "%.*s:%u", colon ? (int)(colon - listen) : 0, listen, port ? port + 1 + i : 0);
}

static int open_loops(struct host *h, char *err)
{
    char listen[ADDR_MAX_BYTES], bound[ADDR_MAX_BYTES], dir[PATH_MAX];
    for (uint32_t i = 0; i < h->nloops; i++) {
        struct loop_config c = {.index = i, .nloops = h->nloops, .self = h->id, .heir_of = h->heir_of, .job = &h->job,
                                .listen = listen, .token = h->cfg->token, .control = &h->mailbox,
                                .memory_max = h->cfg->memory_max / h->nloops};
        loop_listen(h->cfg->listen, i, listen, sizeof listen);
        if (h->has_dir) {
            datadir_loop_dir(&h->dir, i, dir);
            c.store_dir = dir;
            c.create = h->dir.fresh;
        }
        int r = loop_create(&c, &h->loop[i], bound, err);
        if (r)
            return r;
        advertise(h, bound, h->self.loop[i], sizeof h->self.loop[i]);
    }
    h->self.nloops = h->nloops;
    return 0;
}

int host_net_open(struct host *h, char *err)
{
    char bound[ADDR_MAX_BYTES];
    struct net_config nc = {.loop = &h->uv, .arg = h, .token = h->cfg->token, .ping_ms = PING_MS, .silence_ms = SILENCE_MS,
                            .handlers = {on_accept, on_opened, on_sink, on_abandon, on_frame, on_closed}};
    nc.self.id = h->id;
    snprintf(nc.self.job, sizeof nc.self.job, "%s", h->job.job);
    snprintf(nc.self.role, sizeof nc.self.role, "server");
    int r = net_create(&nc, &h->net, err);
    if (!r)
        r = net_listen(h->net, h->cfg->listen, bound, err);
    if (r)
        return r;
    advertise(h, bound, h->self.ctl, sizeof h->self.ctl);
    h->self.id = h->id;
    snprintf(h->self.name, sizeof h->self.name, "%s", h->name);
    return open_loops(h, err);
}
