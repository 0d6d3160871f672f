/* host_uv.c - host.h: the control thread. Carries the ctl_core's effects to the store, the peers and the loops. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/event_log.h"
#include "server/host_impl.h"

static void tick(uv_timer_t *t);

static struct mail *mail_new(enum mail_kind kind)
{
    struct mail *m = mem_alloc(sizeof *m);
    m->kind = kind;
    return m;
}

static void loops_stop(struct host *h)
{
    for (uint32_t i = 0; i < h->nloops; i++)
        if (h->loop[i])
            loop_post(h->loop[i], mail_new(MAIL_STOP));
}

void host_finish(struct host *h, enum host_end end, const char *text)
{
    if (h->ending)
        return;
    h->ending = true;
    h->end = end;
    snprintf(h->text, HOST_TEXT, "%s", text);
    loops_stop(h);
    if (!h->loops_running)
        uv_stop(&h->uv);
}

/* ---- effects ---- */

static void loops_prepare(struct host *h, const struct prepare *p)
{
    for (uint32_t i = 0; i < h->nloops; i++) {
        struct mail *m = mail_new(MAIL_PREPARE);
        m->prepare = mem_alloc(sizeof *m->prepare);
        prepare_copy(m->prepare, p);
        loop_post(h->loop[i], m);
    }
}

static void loops_heir_of(struct host *h, uint64_t id)
{
    log_info("heir_of", "id=%llu", (unsigned long long)id);
    for (uint32_t i = 0; h->has_dir && i < h->nloops; i++) {
        struct mail *m = mail_new(MAIL_HEIR_OF);
        m->id = id;
        loop_post(h->loop[i], m);
    }
}

static void loops_adopt(struct host *h, const struct view *v)
{
    log_info("view", "epoch=%llu servers=%u members=%u", (unsigned long long)v->epoch, v->nservers, v->nmembers);
    for (uint32_t i = 0; i < h->nloops; i++) {
        struct mail *m = mail_new(MAIL_ADOPT);
        m->view = view_copy(v);
        loop_post(h->loop[i], m);
    }
}

static bool operator_stop(const char *text)
{
    return !strncmp(text, "stopped", 7);
}

static void send_effect(struct host *h, const struct ctl_effect *e)
{
    switch (e->kind) {
    case CTL_SEND_PREPARE:
        host_ctl_send(h, e->to, (struct frame_header){.type = FRAME_PREPARE}, prepare_encode(e->prepare));
        break;
    case CTL_SEND_REPORT:
        host_ctl_send(h, e->to, (struct frame_header){.type = FRAME_REPORT}, report_encode(e->report));
        break;
    case CTL_SEND_VIEW:
        host_ctl_send(h, e->to, (struct frame_header){.type = FRAME_VIEW}, view_encode(e->view));
        break;
    case CTL_SEND_JOIN:
        host_ctl_send(h, e->to, (struct frame_header){.type = FRAME_JOIN}, join_encode(e->join));
        break;
    case CTL_SEND_LEAVE:
        host_ctl_send(h, e->to, (struct frame_header){.type = FRAME_LEAVE, .step = e->step, .tensor = e->id}, NULL);
        break;
    case CTL_SEND_SUSPECT:
        host_ctl_send(h, e->to, (struct frame_header){.type = FRAME_SUSPECT, .tensor = e->id}, mem_strdup(e->text));
        break;
    case CTL_SEND_DRAIN:
        host_ctl_send(h, e->to, (struct frame_header){.type = FRAME_DRAIN, .tensor = e->id}, NULL);
        break;
    case CTL_SEND_SYNCED:
        host_ctl_send(h, e->to, (struct frame_header){.type = FRAME_SYNCED, .tensor = e->id, .chunk = e->shard}, NULL);
        break;
    default:
        host_ctl_send(h, e->to, (struct frame_header){.type = FRAME_STOP}, mem_strdup(e->text));
    }
}

static void carry_out(struct host *h, const struct ctl_effect *e)
{
    switch (e->kind) {
    case CTL_DO_COORD:
        h->coord->ops->submit(h->coord, e->request);
        break;
    case CTL_DO_WATCH:
        h->coord->ops->watch(h->coord, "", e->revision);
        break;
    case CTL_LOOPS_PREPARE:
        loops_prepare(h, e->prepare);
        break;
    case CTL_LOOPS_ADOPT:
        loops_adopt(h, e->view);
        break;
    case CTL_CONNECT:
        host_peer_connect(h, e->to, e->addr);
        break;
    case CTL_DISCONNECT:
        host_peer_disconnect(h, e->to, e->text);
        break;
    case CTL_ADOPTED:
        host_status_view(h, e->view);
        break;
    case CTL_HEIR_OF:
        loops_heir_of(h, e->id);
        break;
    case CTL_FENCED:
        host_finish(h, HOST_FENCED, e->text);
        break;
    case CTL_DRAINED:
        host_finish(h, HOST_STOPPED, "drained: other servers hold what this one held");
        break;
    case CTL_ENDED:
        host_finish(h, operator_stop(e->text) ? HOST_STOPPED : HOST_FAILED, e->text);
        break;
    default:
        send_effect(h, e);
    }
}

void host_step(struct host *h, const struct ctl_event *e)
{
    if (h->ending)
        return;
    ctl_core_step(h->ctl, e, &h->out);
    for (uint32_t i = 0; i < h->out.n && !h->ending; i++)
        carry_out(h, &h->out.effect[i]);
    if (h->ending)
        return;
    uint64_t now = clock_now_us(), at = ctl_core_deadline(h->ctl);
    uint64_t ms = at == UINT64_MAX ? 1000 : at <= now ? 1 : (at - now) / 1000 + 1;
    uv_timer_start(&h->timer, tick, ms < 1000 ? ms : 1000, 0);
}

static void tick(uv_timer_t *t)
{
    struct ctl_event e = {.kind = CTL_TICK, .now_us = clock_now_us()};
    host_step(t->data, &e);
}

/* ---- what wakes the control thread ---- */

static void coord_wake(void *arg)
{
    struct host *h = arg;
    uv_async_send(&h->coord_wake);
}

static void on_coord(uv_async_t *a)
{
    struct host *h = a->data;
    struct coord_event ce;
    while (h->ctl && !h->ending && h->coord->ops->next(h->coord, &ce)) {
        struct ctl_event e = {.kind = CTL_COORD, .now_us = clock_now_us(), .coord = &ce};
        if (ce.kind == COORD_REACHABLE)
            log_warn(ce.status ? "store_unreachable" : "store_reachable", "store=%s cause=\"%s\"", h->cfg->coord, ce.text);
        host_step(h, &e);
        coord_event_done(&ce);
    }
}

static void on_mail(void *arg, struct mail *m)
{
    struct host *h = arg;
    struct ctl_event e = {.now_us = clock_now_us(), .loop = m->loop};
    switch (m->kind) {
    case MAIL_REPORT:
        e.kind = CTL_LOOP_REPORT;
        e.report = m->report;
        host_step(h, &e);
        break;
    case MAIL_PEER_DOWN:
        e.kind = CTL_LOOP_PEER_DOWN;
        e.from = m->id;
        e.text = m->text;
        host_step(h, &e);
        break;
    case MAIL_SYNCED:
        e.kind = CTL_LOOP_SYNCED;
        e.id = m->id;
        e.shard = (uint32_t)m->seq;
        host_step(h, &e);
        break;
    case MAIL_WANT_VIEW:
        e.kind = CTL_WANT_VIEW;
        host_step(h, &e);
        break;
    case MAIL_STATS:
        host_status_loop(h, m);
        break;
    case MAIL_FATAL:
        host_finish(h, HOST_FAILED, m->text);
        break;
    case MAIL_STOPPED:
        if (--h->loops_running == 0 && h->ending)
            uv_stop(&h->uv);
        break;
    default:
        CHECK(!"mail that is not for the control thread");
    }
}

static void on_notice_over(uv_timer_t *t)
{
    host_finish(t->data, HOST_STOPPED, "SIGTERM; the notice was too short to give everything away");
}

/* Somebody to give it to, and somebody who needs it. */
static bool worth_draining(const struct host *h)
{
    const struct view *v = h->ctl ? ctl_core_view(h->ctl) : NULL;
    bool members = false;
    for (uint32_t i = 0; v && i < v->nmembers; i++)
        members |= v->member[i].live;
    return members && v->nservers > 1 && view_server_find(v, h->id) && h->cfg->notice_s;
}

static void on_signal(uv_signal_t *s, int number)
{
    struct host *h = s->data;
    if (number != SIGTERM || h->draining || !worth_draining(h)) {
        host_finish(h, HOST_STOPPED, number == SIGTERM ? "SIGTERM" : "SIGINT");
        return;
    }
    h->draining = true;
    log_warn("draining", "notice_s=%u", h->cfg->notice_s);
    uv_timer_start(&h->notice, on_notice_over, h->cfg->notice_s * 1000ull, 0);
    struct ctl_event e = {.kind = CTL_DRAIN, .now_us = clock_now_us()};
    host_step(h, &e);
}

/* ---- life ---- */

static void handles_init(struct host *h)
{
    uv_loop_init(&h->uv);
    uv_async_init(&h->uv, &h->coord_wake, on_coord);
    uv_timer_init(&h->uv, &h->timer);
    uv_timer_init(&h->uv, &h->notice);
    uv_signal_init(&h->uv, &h->term);
    uv_signal_init(&h->uv, &h->interrupt);
    h->coord_wake.data = h->notice.data = h->timer.data = h->term.data = h->interrupt.data = h;
    mailbox_init(&h->mailbox, &h->uv, on_mail, h);
    map_init(&h->peers);
}

static int coordination_open(struct host *h, char *err)
{
    struct coord_config c = {.url = h->cfg->coord, .job = h->cfg->job.job, .wake = coord_wake, .wake_arg = h};
    return coord_open(&c, &h->coord, err);
}

static void core_start(struct host *h)
{
    struct ctl_config c = {.job = h->job, .nloops = h->nloops};
    c.self.server = h->self;
    c.self.heir_of = h->heir_of;
    c.nformer = h->nformer;
    memcpy(c.former, h->former, sizeof c.former);
    h->ctl = ctl_core_create(&c);
}

/* Before anybody hears of this life: should it die as soon as a view lists it, the next one must know that it was here. */
static int life_record(struct host *h, char *err)
{
    struct datadir *d = &h->dir;
    if (!h->has_dir)
        return 0;
    if (d->life) {
        for (uint32_t i = d->nformer; i-- > 0;)
            h->former[h->nformer++] = d->former[i];
        h->former[h->nformer++] = d->life;
    }
    return datadir_life_set(d, h->id, err);
}

static int ready_write(const struct host *h, char *err)
{
    if (!h->cfg->ready_file)
        return 0;
    FILE *f = fopen(h->cfg->ready_file, "w");
    if (!f || fprintf(f, "%s\n", h->self.ctl) < 0 || fclose(f)) {
        snprintf(err, HOST_TEXT, "cannot write %s: %m", h->cfg->ready_file);
        return KS_EIO;
    }
    return 0;
}

static int start(struct host *h, char *err)
{
    int r = coordination_open(h, err);
    if (!r)
        r = host_job_find(h, err);
    if (!r)
        r = host_net_open(h, err);
    if (!r)
        r = life_record(h, err);
    if (!r)
        r = ready_write(h, err);
    for (uint32_t i = 0; !r && i < h->nloops; i++) {
        r = loop_start(h->loop[i]);
        h->loops_running += r == 0;
    }
    return r;
}

static void handles_close(struct host *h)
{
    uv_close((uv_handle_t *)&h->coord_wake, NULL);
    uv_close((uv_handle_t *)&h->timer, NULL);
    uv_close((uv_handle_t *)&h->notice, NULL);
    uv_close((uv_handle_t *)&h->term, NULL);
    uv_close((uv_handle_t *)&h->interrupt, NULL);
    mailbox_close(&h->mailbox);
    uv_run(&h->uv, UV_RUN_DEFAULT);
}

static void destroy(struct host *h)
{
    if (h->net)
        net_shutdown(h->net);
    for (uint32_t i = 0; i < h->nloops; i++)
        loop_free(h->loop[i]);
    if (h->coord)
        h->coord->ops->close(h->coord);
    handles_close(h);
    if (h->net)
        net_free(h->net);
    host_status_forget(h, NULL);
    view_free(h->under);
    ctl_core_free(h->ctl);
    ctl_outbox_done(&h->out);
    host_peers_free(h);
    if (h->has_dir)
        datadir_close(&h->dir);
    mailbox_done(&h->mailbox);
    CHECK(uv_loop_close(&h->uv) == 0);
}

static uint32_t cores(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > LOOPS_MAX ? LOOPS_MAX : (uint32_t)n;
}

enum host_end host_run(const struct host_config *c, char *text)
{
    struct host *h = mem_alloc(sizeof *h);
    h->cfg = c;
    h->id = incarnation_new();
    h->nloops = c->loops ? c->loops : cores();
    h->started_us = clock_now_us();
    h->text = text;
    h->end = HOST_FAILED;
    handles_init(h);
    uv_signal_start(&h->term, on_signal, SIGTERM);
    uv_signal_start(&h->interrupt, on_signal, SIGINT);
    text[0] = 0;
    event_log_name(c->name ? c->name : "");
    log_info("starting", "id=%llu pid=%d", (unsigned long long)h->id, (int)getpid());
    int r = start(h, text);
    event_log_name(h->name);
    if (!r && !h->ending) {
        core_start(h);
        log_info("serving", "name=%s control=%s loops=%u heir_of=%llu", h->name, h->self.ctl, h->nloops,
                 (unsigned long long)h->heir_of);
        struct ctl_event e = {.kind = CTL_START, .now_us = clock_now_us()};
        host_step(h, &e);
        uv_run(&h->uv, UV_RUN_DEFAULT);
    } else if (r) {
        h->ending = true;
        loops_stop(h);
    }
    enum host_end end = h->end;
    log_info("stopped", "id=%llu cause=\"%s\"", (unsigned long long)h->id, text);
    destroy(h);
    mem_free(h);
    return end;
}
