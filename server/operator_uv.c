#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/mem.h"
#include "coord/coord.h"
#include "net/net.h"
#include "server/operator.h"

struct operator {
    char *url, *job, *token;
    uv_loop_t uv;
    uv_async_t wake;
    uv_timer_t timer;
    struct coord *coord;
    struct net *net;
    uint64_t tag;
    /* of the question under way */
    struct operator_answer *answer;
    struct net_conn **conn;
    bool *said;                        /* an answer, or why there is none, is known */
    uint32_t n, missing;
    const char *stop_reason;           /* what the leader is told; both unset: status is asked */
    uint64_t drain;
};

/* ---- the loop ---- */

static void on_wake(uv_async_t *a)
{
    (void)a;
}

static void on_time(uv_timer_t *t)
{
    (void)t;
}

static void wake(void *arg)
{
    struct operator *o = arg;
    uv_async_send(&o->wake);
}

/* One turn; false: the deadline has passed. */
static bool turn(struct operator *o, uint64_t until_us)
{
    uint64_t now = clock_now_us();
    if (now >= until_us)
        return false;
    uv_timer_start(&o->timer, on_time, (until_us - now) / 1000 + 1, 0);
    uv_run(&o->uv, UV_RUN_ONCE);
    return true;
}

/* ---- the store ---- */

static int ask_store(struct operator *o, struct coord_request *r, uint32_t timeout_ms, struct coord_event *ret, char *err)
{
    uint64_t until = clock_now_us() + (uint64_t)timeout_ms * 1000;
    char last[COORD_ERR_TEXT] = "no answer";
    struct coord_event e;
    int status = KS_EUNAVAIL;
    r->tag = ++o->tag;
    o->coord->ops->submit(o->coord, r);
    do {
        while (o->coord->ops->next(o->coord, &e)) {
            bool mine = e.kind == COORD_ANSWER && e.tag == r->tag;
            if (mine && e.status == 0) {
                *ret = e;
                return 0;
            }
            if (e.text[0])
                snprintf(last, sizeof last, "%s", e.text);
            if (mine)
                status = e.status;
            coord_event_done(&e);
            if (mine && (status == KS_EAUTH || status == KS_EINVAL))
                goto refused;
            if (mine)
                o->coord->ops->submit(o->coord, r);
        }
    } while (turn(o, until));
refused:
    snprintf(err, ERR_TEXT, "the coordination store %.80s %s: %.120s", o->url,
             status == KS_EAUTH || status == KS_EINVAL ? "refused" : "does not answer", last);
    return status;
}

static void take_key(struct job_state *s, const struct coord_kv *kv)
{
    char err[ERR_TEXT] = "";
    int r = 0;
    if (!strcmp(kv->key, "job"))
        s->has_job = (r = job_decode(kv->value, kv->value_size, &s->job, err)) == 0;
    else if (!strcmp(kv->key, "view"))
        r = view_decode(kv->value, kv->value_size, &s->view, err);
    else if (!strcmp(kv->key, "leader"))
        s->has_leader = (r = server_decode(kv->value, kv->value_size, &s->leader, err)) == 0;
    else if (!strncmp(kv->key, "servers/", 8))
        s->nservers += (r = server_decode(kv->value, kv->value_size, &s->server[s->nservers], err)) == 0;
    if (r)
        snprintf(s->damaged, sizeof s->damaged, "%.60s cannot be read: %.160s", kv->key, err);
}

int operator_read(struct operator *o, uint32_t timeout_ms, struct job_state *ret, char *err)
{
    struct coord_request range = {.kind = COORD_RANGE};
    struct job_state s = {0};
    struct coord_event e;
    int r = ask_store(o, &range, timeout_ms, &e, err);
    if (r)
        return r;
    s.server = mem_alloc((e.nkv + 1) * sizeof *s.server);
    s.key = mem_alloc((e.nkv + 1) * sizeof *s.key);
    s.nkeys = e.nkv;
    for (uint32_t i = 0; i < e.nkv; i++) {
        s.key[i] = mem_strdup(e.kv[i].key);
        take_key(&s, &e.kv[i]);
    }
    coord_event_done(&e);
    *ret = s;
    return 0;
}

void job_state_done(struct job_state *s)
{
    for (uint32_t i = 0; i < s->nkeys; i++)
        mem_free(s->key[i]);
    mem_free(s->key);
    mem_free(s->server);
    view_free(s->view);
    *s = (struct job_state){0};
}

int operator_forget(struct operator *o, const struct job_state *s, uint32_t timeout_ms, char *err)
{
    for (uint32_t i = 0; i < s->nkeys;) {
        struct coord_request r = {.kind = COORD_TXN};
        struct coord_event e;
        for (; i < s->nkeys && r.nops < COORD_OPS_MAX; i++)
            snprintf(r.op[r.nops++].key, COORD_KEY_MAX, "%s", s->key[i]);
        int status = ask_store(o, &r, timeout_ms, &e, err);
        if (status)
            return status;
        coord_event_done(&e);
    }
    return 0;
}

/* ---- control connections ---- */

static void settle(struct operator *o, uint32_t i, int status, const char *text)
{
    if (o->said[i])
        return;
    o->said[i] = true;
    o->missing--;
    o->answer[i].status = status;
    snprintf(o->answer[i].text, sizeof o->answer[i].text, "%s", text);
}

static uint32_t index_of(const struct operator *o, const struct net_conn *c)
{
    return (uint32_t)((struct net_conn **)net_tag(c) - o->conn);
}

static int on_accept(void *arg, const struct hello *h, char *err)
{
    (void)arg;
    (void)h;
    snprintf(err, ERR_TEXT, "an operator takes no connections");
    return KS_EINVAL;
}

static void on_opened(void *arg, struct net_conn *c)
{
    struct operator *o = arg;
    const char *text = o->stop_reason;
    struct frame_header f = {.type = text ? FRAME_STOP : o->drain ? FRAME_DRAIN : FRAME_STATUS, .version = 1,
                             .tensor = o->drain, .len = text ? strlen(text) : 0};
    (void)net_send(c, &f, text, NULL, NULL);
}

static void *on_sink(void *arg, struct net_conn *c, const struct frame_header *h, void **ret_cookie)
{
    (void)arg;
    (void)c;
    *ret_cookie = h->len <= FRAME_CONTROL_MAX ? mem_alloc(h->len + 1) : NULL;
    return *ret_cookie;
}

static void on_abandon(void *arg, struct net_conn *c, const struct frame_header *h, void *cookie)
{
    (void)arg;
    (void)c;
    (void)h;
    mem_free(cookie);
}

static void on_frame(void *arg, struct net_conn *c, const struct frame_header *h, void *payload, void *cookie,
                     bool discarded)
{
    struct operator *o = arg;
    uint32_t i = index_of(o, c);
    (void)payload;
    (void)discarded;
    if (h->type == FRAME_STATUS_REPLY && cookie && !o->said[i]) {
        o->answer[i].doc = cookie;
        settle(o, i, 0, "");
    } else {
        mem_free(cookie);
    }
}

/* The first failure counts: whoever asks for the status of a dead server wants to know now. */
static void on_closed(void *arg, struct net_conn *c, int status, const char *cause)
{
    struct operator *o = arg;
    uint32_t i = index_of(o, c);
    settle(o, i, status ? status : KS_ECLOSED, cause);
    o->conn[i] = NULL;
    net_close(c, 0, "");
}

static void questions_start(struct operator *o, const char *const *addr, uint32_t n, struct operator_answer *ret)
{
    memset(ret, 0, n * sizeof *ret);
    o->answer = ret;
    o->n = o->missing = n;
    o->conn = mem_alloc((n + 1) * sizeof *o->conn);
    o->said = mem_alloc((n + 1) * sizeof *o->said);
    for (uint32_t i = 0; i < n; i++)
        o->conn[i] = net_connect(o->net, addr[i], &o->conn[i]);
}

static void questions_end(struct operator *o, const char *missing_text)
{
    for (uint32_t i = 0; i < o->n; i++) {
        settle(o, i, KS_ETIMEOUT, missing_text);
        if (o->conn[i])
            net_close(o->conn[i], 0, "done");
    }
    mem_free(o->conn);
    mem_free(o->said);
    o->conn = NULL;
    o->said = NULL;
    o->n = 0;
}

void operator_status(struct operator *o, const char *const *addr, uint32_t n, uint32_t timeout_ms,
                     struct operator_answer *ret)
{
    uint64_t until = clock_now_us() + (uint64_t)timeout_ms * 1000;
    char text[64];
    snprintf(text, sizeof text, "no answer within %u ms", timeout_ms);
    questions_start(o, addr, n, ret);
    while (o->missing && turn(o, until))
        continue;
    questions_end(o, text);
}

/* Tells one server something that has no answer: done when it is written to the socket. */
static int tell(struct operator *o, const char *addr, uint32_t timeout_ms, char *err)
{
    uint64_t until = clock_now_us() + (uint64_t)timeout_ms * 1000;
    struct operator_answer a;
    questions_start(o, &addr, 1, &a);
    while (o->missing && !(o->conn[0] && net_is_open(o->conn[0]) && net_queued(o->conn[0]) == 0) && turn(o, until))
        continue;
    if (o->conn[0] && net_is_open(o->conn[0]))
        settle(o, 0, 0, "");
    questions_end(o, "no answer");
    if (a.status)
        snprintf(err, ERR_TEXT, "%.80s: %.160s", addr, a.text);
    return a.status;
}

int operator_stop(struct operator *o, const char *addr, const char *reason, uint32_t timeout_ms, char *err)
{
    o->stop_reason = reason;
    int r = tell(o, addr, timeout_ms, err);
    o->stop_reason = NULL;
    return r;
}

int operator_drain(struct operator *o, const char *addr, uint64_t id, uint32_t timeout_ms, char *err)
{
    o->drain = id;
    int r = tell(o, addr, timeout_ms, err);
    o->drain = 0;
    return r;
}

/* ---- life ---- */

static int net_start(struct operator *o, char *err)
{
    struct net_config nc = {.loop = &o->uv, .arg = o, .token = o->token,
                            .handlers = {on_accept, on_opened, on_sink, on_abandon, on_frame, on_closed}};
    snprintf(nc.self.job, sizeof nc.self.job, "%s", o->job);
    snprintf(nc.self.role, sizeof nc.self.role, "operator");
    return net_create(&nc, &o->net, err);
}

int operator_open(const struct operator_config *c, struct operator **ret, char *err)
{
    if (!strncmp(c->coord, "local:", 6) && access(c->coord + 6, F_OK)) {
        snprintf(err, ERR_TEXT, "the coordination store %.160s is not there: %m", c->coord);
        return KS_ENOENT;
    }
    struct operator *o = mem_alloc(sizeof *o);
    o->url = mem_strdup(c->coord);
    o->job = mem_strdup(c->job);
    o->token = mem_strdup(c->token);
    uv_loop_init(&o->uv);
    uv_async_init(&o->uv, &o->wake, on_wake);
    uv_timer_init(&o->uv, &o->timer);
    struct coord_config cc = {.url = o->url, .job = o->job, .timeout_ms = 1500, .wake = wake, .wake_arg = o};
    int r = coord_open(&cc, &o->coord, err);
    if (!r)
        r = net_start(o, err);
    if (r) {
        operator_close(o);
        return r;
    }
    *ret = o;
    return 0;
}

void operator_close(struct operator *o)
{
    if (!o)
        return;
    if (o->net)
        net_shutdown(o->net);
    if (o->coord)
        o->coord->ops->close(o->coord);
    uv_close((uv_handle_t *)&o->wake, NULL);
    uv_close((uv_handle_t *)&o->timer, NULL);
    uv_run(&o->uv, UV_RUN_DEFAULT);
    net_free(o->net);
    CHECK(uv_loop_close(&o->uv) == 0);
    mem_free(o->url);
    mem_free(o->job);
    mem_free(o->token);
    mem_free(o);
}
