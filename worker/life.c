#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "worker/host.h"

/* ---- to the leader ---- */

bool life_send(struct ks_job *j, const struct frame_header *h, char *doc)
{
    struct frame_header head = *h;
    head.len = doc ? strlen(doc) : 0;
    head.epoch = j->view ? (uint32_t)j->view->epoch : 0;
    if (!j->leader_conn) {
        mem_free(doc);
        return false;
    }
    bool sent = net_send(j->leader_conn, &head, doc, mem_free, doc) == 0;
    if (sent && !job_in_loop(j) && net_flush(j->leader_conn) > 0)
        host_wake(j);
    return sent;
}

void life_join(struct ks_job *j)
{
    struct join_doc d = {.id = j->id, .local_size = j->set.local_size};
    struct frame_header h = {.type = FRAME_JOIN};
    if (!j->core || j->listed || j->fenced || j->state > JOB_REJOINING || j->state == JOB_RUNNING)
        return;
    memcpy(d.name, j->set.name, sizeof d.name);
    if (life_send(j, &h, join_encode(&d)))
        j->join_us = clock_now_us();
}

static void mode_send(struct ks_job *j)
{
    struct frame_header h = {.type = FRAME_MODE};
    if (j->mode_wanted && life_send(j, &h, mode_encode(&j->mode)))
        j->mode_us = clock_now_us();
}

/* ---- from the leader ---- */

static void on_opened(void *arg, struct net_conn *c)
{
    struct ks_job *j = arg;
    if (c != j->leader_conn)
        return;
    j->leader_text[0] = 0;
    life_join(j);
    mode_send(j);
}

static void on_closed(void *arg, struct net_conn *c, int status, const char *cause)
{
    struct ks_job *j = arg;
    if (c != j->leader_conn)
        return;
    if (strcmp(j->leader_text, cause))
        log_info("leader_closed", "addr=%s cause=\"%s\"", net_addr(c), cause);
    snprintf(j->leader_text, sizeof j->leader_text, "%s", cause);
    if (status == KS_EAUTH)
        job_fail(j, KS_EAUTH, "server %s at %s: %s (see KEEPSTEP_TOKEN, KEEPSTEP_TOKEN_FILE)", j->leader.server.name,
                 net_addr(c), cause);
}

static void *on_sink(void *arg, struct net_conn *c, const struct frame_header *h, void **ret_cookie)
{
    (void)arg;
    (void)c;
    *ret_cookie = mem_alloc(h->len);
    return *ret_cookie;
}

static void on_abandon(void *arg, struct net_conn *c, const struct frame_header *h, void *cookie)
{
    (void)arg;
    (void)c;
    (void)h;
    mem_free(cookie);
}

static void prepared(struct ks_job *j, const char *doc, size_t size)
{
    struct prepare p;
    char err[ERR_TEXT];
    if (prepare_decode(doc, size, &p, err)) {
        log_warn("prepare_refused", "cause=\"%s\"", err);
        return;
    }
    life_view(j, view_copy(p.base));
    if (j->core && !j->fenced) {
        struct client_event e = {.kind = CLIENT_PREPARE, .prepare = &p};
        job_step(j, &e);
    }
    prepare_done(&p);
    peers_follow(j);
}

static void viewed(struct ks_job *j, const char *doc, size_t size)
{
    struct view *v;
    char err[ERR_TEXT];
    if (view_decode(doc, size, &v, err))
        log_warn("view_refused", "cause=\"%s\"", err);
    else
        life_view(j, v);
}

static void on_frame(void *arg, struct net_conn *c, const struct frame_header *h, void *payload, void *cookie,
                     bool discarded)
{
    struct ks_job *j = arg;
    (void)discarded;
    if (c == j->leader_conn && j->core && h->type == FRAME_PREPARE && payload)
        prepared(j, payload, h->len);
    else if (c == j->leader_conn && j->core && h->type == FRAME_VIEW && payload)
        viewed(j, payload, h->len);
    mem_free(cookie);
}

/* ---- views ---- */

static void mode_decided(struct ks_job *j)
{
    if (j->mode_wanted)
        job_notify(j);
}

void life_view(struct ks_job *j, struct view *v)
{
    if (j->view && v->epoch <= j->view->epoch) {
        view_free(v);
        return;
    }
    view_free(j->view);
    j->view = v;
    mode_decided(j);
    if (!j->core || j->fenced)
        return;
    const struct view_member *m = view_member_find(v, j->id);
    bool listed = m && m->live;
    if (listed)
        j->listed = true;
    struct client_event e = {.kind = CLIENT_ADOPT, .view = v};
    job_step(j, &e);
    j->listed = listed;
    if (!listed && j->state == JOB_RUNNING && !j->fenced)
        j->state = JOB_LEFT;
    peers_follow(j);
    job_notify(j);
}

/* ---- a life ---- */

static struct net *net_of(struct ks_job *j, bool data)
{
    static const struct net_handlers control_handlers = {NULL, on_opened, on_sink, on_abandon, on_frame, on_closed};
    struct net_config g = {
        .loop = host_uv(j),
        .handlers = data ? peer_handlers : control_handlers,
        .arg = j,
        .lock = job_lock,
        .unlock = job_unlock,
        .token = j->set.token,
        .self = {.role = "member", .id = j->id, .chunk_bytes = data ? j->job.chunk_bytes : 0},
        .ping_ms = data ? 0 : CTL_PING_MS,
        .silence_ms = data ? 0 : CTL_SILENCE_MS,
        /* What is queued is user memory. A member always reads: else it and a server could wait for each other. */
        .send_bytes_max = SIZE_MAX / 4,
    };
    struct net *n;
    char err[ERR_TEXT];
    memcpy(g.self.job, j->set.job, sizeof g.self.job);
    CHECK(net_create(&g, &n, err) == 0);
    return n;
}

void life_start(struct ks_job *j)
{
    CHECK(!j->core && j->has_job);
    struct client_config config = {.chunk_bytes = j->job.chunk_bytes, .nshards = j->job.nshards};
    j->id = config.self = incarnation_new();
    j->core = client_core_create(&config);
    j->data = net_of(j, true);
    j->control = net_of(j, false);
    j->listed = j->fenced = false;
    log_info("joining", "job=%s id=%llu name=%s", j->set.job, (unsigned long long)j->id, j->set.name);
    life_leader(j);
}

static void stats_keep(struct ks_job *j)
{
    struct client_stats c;
    struct net_stats n;
    client_core_stats(j->core, &c);
    net_stats(j->data, &n);
    struct ks_stats *s = &j->stats;
    s->pushes += c.pushes;
    s->pulls += c.pulls;
    s->steps += c.steps;
    s->resent += c.resent;
    s->acked += c.acked;
    s->late += c.late;
    s->stale += c.stale;
    s->not_finite += c.not_finite;
    s->views += c.views;
    s->bytes_in += n.bytes_in;
    s->bytes_out += n.bytes_out;
}

static void net_drop(struct ks_job *j, struct net **n)
{
    net_shutdown(*n);
    ARRAY_ROOM(j->dying, j->ndying, j->dying_cap);
    j->dying[j->ndying++] = *n;
    *n = NULL;
}

void life_end(struct ks_job *j)
{
    if (!j->core)
        return;
    stats_keep(j);
    peers_drop(j);
    j->leader_conn = NULL;
    net_drop(j, &j->data);
    net_drop(j, &j->control);
    client_core_free(j->core);
    j->core = NULL;
    j->listed = j->declare_again = false;
    j->leave_op = 0;
    for (uint32_t i = 0; i < j->ntensors; i++)
        j->tensor[i]->ready = false;
}

void life_leader(struct ks_job *j)
{
    if (!j->core)
        return;
    if (j->leader_conn && j->has_leader && j->leader_id == j->leader.server.id)
        return;
    if (j->leader_conn)
        net_close(j->leader_conn, KS_OK, "there is another leader");
    j->leader_conn = NULL;
    j->leader_text[0] = 0;
    if (!j->has_leader)
        return;
    j->leader_id = j->leader.server.id;
    j->leader_conn = net_connect(j->control, j->leader.server.ctl, NULL);
}

static void dying_free(struct ks_job *j)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < j->ndying; i++) {
        if (net_is_down(j->dying[i]))
            net_free(j->dying[i]);
        else
            j->dying[n++] = j->dying[i];
    }
    j->ndying = n;
}

void life_tick(struct ks_job *j)
{
    uint64_t now = clock_now_us();
    dying_free(j);
    if (j->fenced && (j->state == JOB_REJOINING || j->state == JOB_OPENING)) {
        life_end(j);
        j->stats.rejoins++;
        life_start(j);
    }
    if (!j->core)
        return;
    if (now - j->join_us >= REPEAT_US)
        life_join(j);
    if (now - j->mode_us >= REPEAT_US)
        mode_send(j);
    struct client_event e = {.kind = CLIENT_TICK};
    job_step(j, &e);
}
