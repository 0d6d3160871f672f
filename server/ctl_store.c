/* The coordination store: lease, registration, election, compare-and-swap; what is read and watched there.
 *
 * Whatever the outcome of a write is not certain of, is read again: one range of all keys settles everything. */
#include "server/ctl_internal.h"

#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/mutant.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RETRY_US = 250000, REFUSED_US = 2000000 };
static const char SERVERS[] = "servers/";

static uint64_t self_id(const struct ctl_core *c)
{
    return c->cfg.self.server.id;
}

static void server_key(char *key, uint64_t id)
{
    snprintf(key, COORD_KEY_MAX, "%s%llu", SERVERS, (unsigned long long)id);
}

/* ---- asking ---- */

static struct coord_request *request_new(struct ctl_core *c, enum coord_request_kind kind, enum ctl_ask ask)
{
    struct coord_request *r = mem_alloc(sizeof *r);
    ctl_hold(c, r, mem_free);
    r->kind = kind;
    r->tag = ++c->asked << ASK_BITS | ask;
    c->tag[ask] = r->tag;
    return r;
}

static void submit(struct ctl_core *c, struct coord_request *r)
{
    ctl_emit(c, &(struct ctl_effect){.kind = CTL_DO_COORD, .request = r});
}

static void guard(struct coord_request *r, enum coord_guard_kind kind, const char *key, int64_t revision)
{
    struct coord_guard *g = &r->guard[r->nguards++];
    g->kind = kind;
    g->revision = revision;
    snprintf(g->key, sizeof g->key, "%s", key);
}

/* Takes the value; NULL deletes the key. */
static void put(struct ctl_core *c, struct coord_request *r, const char *key, char *value, int64_t lease)
{
    struct coord_op *op = &r->op[r->nops++];
    if (value)
        ctl_hold(c, value, mem_free);
    op->value = value;
    op->lease = lease;
    snprintf(op->key, sizeof op->key, "%s", key);
}

static void ask_job(struct ctl_core *c)
{
    struct coord_request *r = request_new(c, COORD_TXN, ASK_JOB);
    guard(r, GUARD_ABSENT, "job", 0);
    put(c, r, "job", job_encode(&c->cfg.job), 0);
    submit(c, r);
}

/* The listed life whose disk this one holds. */
static uint64_t heir_of(const struct ctl_core *c)
{
    for (uint32_t i = c->cfg.nformer; c->view && i-- > 0;)
        if (view_server_find(c->view, c->cfg.former[i]))
            return c->cfg.former[i];
    return c->listed ? c->registered_heir_of : c->cfg.self.heir_of;
}

static bool registered(const struct ctl_core *c)
{
    return c->lease && c->registered_lease == c->lease && c->registered_heir_of == heir_of(c);
}

static void ask_register(struct ctl_core *c)
{
    struct coord_request *r = request_new(c, COORD_TXN, ASK_REGISTER);
    struct server_doc doc = c->cfg.self;
    char key[COORD_KEY_MAX];
    doc.heir_of = heir_of(c);
    /* Once it is listed its loops hold what they hold; that a former life is listed, too, only proves that one dead. */
    bool news = doc.heir_of != c->cfg.self.heir_of || (c->registered_heir_of && doc.heir_of != c->registered_heir_of);
    if (news && !c->listed)
        ctl_emit(c, &(struct ctl_effect){.kind = CTL_HEIR_OF, .id = doc.heir_of});
    c->registered_heir_of = doc.heir_of;
    c->registered_lease = 0;
    server_key(key, self_id(c));
    if (!c->register_unsure)
        guard(r, GUARD_ABSENT, key, 0);
    /* A life that was listed must not come back to the store after a view removed it. */
    if (c->listed)
        guard(r, GUARD_MOD_REVISION, "view", c->view_revision);
    put(c, r, key, server_encode(&doc), c->lease);
    submit(c, r);
}

static void ask_campaign(struct ctl_core *c)
{
    struct coord_request *r = request_new(c, COORD_TXN, ASK_CAMPAIGN);
    struct server_doc doc = c->cfg.self;
    doc.heir_of = c->registered_heir_of;
    guard(r, GUARD_ABSENT, "leader", 0);
    put(c, r, "leader", server_encode(&doc), c->lease);
    submit(c, r);
}

/* Safe whether or not it is alive: a leader whose key is gone cannot write a view. */
void ctl_store_unseat(struct ctl_core *c)
{
    if (!c->leader_revision || !registered(c) || c->tag[ASK_UNSEAT])
        return;
    struct coord_request *r = request_new(c, COORD_TXN, ASK_UNSEAT);
    log_warn("leader_lost", "id=%llu term=%lld", (unsigned long long)c->leader, (long long)c->leader_revision);
    guard(r, GUARD_CREATE_REVISION, "leader", c->leader_revision);
    put(c, r, "leader", NULL, 0);
    submit(c, r);
}

void ctl_store_pursue(struct ctl_core *c)
{
    if (!c->started || c->now_us < c->retry_us)
        return;
    if (!c->lease && !c->tag[ASK_LEASE]) {
        struct coord_request *r = request_new(c, COORD_LEASE_GRANT, ASK_LEASE);
        r->ttl_ms = c->cfg.lease_ms;
        submit(c, r);
    }
    if (c->want_range && !c->tag[ASK_RANGE]) {
        c->want_range = false;
        submit(c, request_new(c, COORD_RANGE, ASK_RANGE));
    }
    /* What the store holds is being read: it may change what is missing. */
    if (!c->ranged || c->tag[ASK_RANGE])
        return;
    if (!c->job_known && !c->tag[ASK_JOB])
        ask_job(c);
    if (c->listed && !c->view_revision)
        c->want_range = true;
    else if (c->lease && !registered(c) && !c->tag[ASK_REGISTER])
        ask_register(c);
    if (registered(c) && c->job_known && !c->view_unreadable && !c->leader_revision && !c->tag[ASK_REGISTER] &&
        !c->tag[ASK_CAMPAIGN])
        ask_campaign(c);
}

/* ---- compare-and-swap ---- */

static void release_view(void *memory)
{
    view_free(memory);
}

/* The records of the removed go with the view that removes them, as many as fit; leases end the others. */
static void put_removals(struct ctl_core *c, struct coord_request *r, const struct view *next)
{
    for (uint32_t i = 0; c->view && i < c->view->nservers && r->nops < COORD_OPS_MAX; i++) {
        char key[COORD_KEY_MAX];
        if (view_server_find(next, c->view->server[i].id))
            continue;
        server_key(key, c->view->server[i].id);
        put(c, r, key, NULL, 0);
    }
}

void ctl_store_cas(struct ctl_core *c, const struct view *next)
{
    if (c->cas)
        ctl_hold(c, c->cas, release_view);
    c->cas = view_copy(next);
    c->cas_unknown = false;
    c->tag[ASK_CAS] = 0;       /* an answer to an older write says nothing of this one */
    if (c->stored_epoch + 1 != next->epoch) {
        /* The revision that is to guard it is not known yet. */
        c->cas_unknown = c->want_range = true;
        return;
    }
    struct coord_request *r = request_new(c, COORD_TXN, ASK_CAS);
    if (!MUTANT(8)) {
        guard(r, GUARD_CREATE_REVISION, "leader", c->leader_revision);
        guard(r, c->view_revision ? GUARD_MOD_REVISION : GUARD_ABSENT, "view", c->view_revision);
    }
    put(c, r, "view", view_encode(next), 0);
    /* Who leaves last cannot lead on; nobody should have to wait for its lease to end. */
    if (!view_server_find(next, self_id(c)))
        put(c, r, "leader", NULL, 0);
    put_removals(c, r, next);
    submit(c, r);
}

static void cas_answered(struct ctl_core *c, const struct coord_event *e)
{
    if (e->status || !e->succeeded) {
        /* Also when it was refused: an attempt whose answer was lost may be what it met. */
        c->cas_unknown = c->leads;
        c->want_range = true;
        return;
    }
    if (e->revision > c->view_revision) {
        c->view_revision = e->revision;
        c->stored_epoch = c->cas->epoch;
    }
    ctl_controller_step(c, &(struct view_event){.kind = VIEW_CAS_DONE, .ok = true});
    ctl_view_take(c, c->cas);
}

/* ---- leadership ---- */

void ctl_store_depose(struct ctl_core *c)
{
    if (!c->leads)
        return;
    c->leads = false;
    c->cas_unknown = false;
    log_info("deposed", "term=%lld", (long long)c->leader_revision);
    ctl_controller_step(c, &(struct view_event){.kind = VIEW_DEPOSED});
}

static void lead(struct ctl_core *c)
{
    if (c->leads || c->fenced || c->ended || c->view_unreadable || !c->controller || c->leader != self_id(c) ||
        c->leader_revision == c->lost_revision)
        return;
    c->leads = true;
    log_info("elected", "term=%lld", (long long)c->leader_revision);
    ctl_controller_step(c, &(struct view_event){.kind = VIEW_ELECTED, .term = (uint64_t)c->leader_revision,
                                                .view = c->view});
    ctl_peers_watch(c);
    ctl_tell_leader(c);
}

static void leader_is(struct ctl_core *c, uint64_t id, int64_t revision)
{
    if (id == c->leader && revision == c->leader_revision)
        return;
    ctl_store_depose(c);
    c->leader = id;
    c->leader_revision = revision;
    /* Elected on a view that was read after the election only: nobody else can write one from then on. */
    if (id == self_id(c))
        c->want_range = true;
    else
        ctl_tell_leader(c);
}

static void lease_lost(struct ctl_core *c, int64_t lease)
{
    if (!lease || lease != c->lease)
        return;
    log_warn("lease_lost", "lease=%lld", (long long)lease);
    c->lease = c->registered_lease = 0;
    c->register_unsure = true;
    if (c->leader == self_id(c))
        c->lost_revision = c->leader_revision;
    ctl_store_depose(c);
}

/* ---- records ---- */

static uint32_t server_slot(const struct ctl_core *c, uint64_t id)
{
    uint32_t i = 0;
    while (i < c->nservers && c->server[i].doc.server.id < id)
        i++;
    return i;
}

static struct ctl_server *server_find(const struct ctl_core *c, uint64_t id)
{
    uint32_t i = server_slot(c, id);
    return i < c->nservers && c->server[i].doc.server.id == id ? &c->server[i] : NULL;
}

const struct server_doc *ctl_store_server(const struct ctl_core *c, uint64_t id)
{
    const struct ctl_server *s = server_find(c, id);
    return s ? &s->doc : NULL;
}

static void server_is(struct ctl_core *c, const struct server_doc *doc, int64_t revision)
{
    struct ctl_server *s = server_find(c, doc->server.id);
    if (s && s->revision == revision)
        return;
    if (!s) {
        uint32_t i = server_slot(c, doc->server.id);
        ARRAY_ROOM(c->server, c->nservers, c->servers_cap);
        s = &c->server[i];
        memmove(s + 1, s, (c->nservers - i) * sizeof *s);
        c->nservers++;
    }
    *s = (struct ctl_server){*doc, revision};
    ctl_controller_step(c, &(struct view_event){.kind = VIEW_SERVER, .server = doc});
    ctl_peers_connect(c);
}

/* A view that removed this life took its record away, maybe before this life had seen a view that lists it. It would never
 * be listed again. */
static void self_is_gone(struct ctl_core *c)
{
    bool taken = c->registered_lease && c->registered_lease == c->lease;
    c->registered_lease = 0;
    if (taken && !c->listed)
        ctl_stop(c, CTL_FENCED, "its record was taken from the store before it was part of the job");
}

static void server_is_gone(struct ctl_core *c, uint64_t id)
{
    struct ctl_server *s = server_find(c, id);
    if (id == self_id(c))
        self_is_gone(c);
    if (!s || c->fenced)
        return;
    memmove(s, s + 1, (c->nservers - (uint32_t)(s - c->server) - 1) * sizeof *s);
    c->nservers--;
    /* A lease that runs out says little of a listed server that is connected: its store may be cut off, not it. */
    bool listed = c->view && view_server_find(c->view, id);
    if (!listed || !ctl_peer_is_up(c, id))
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_SERVER_GONE, .id = id,
                                                    .text = "its lease in the store ran out"});
    ctl_peers_connect(c);
}

static void unreadable(const char *key, const char *err)
{
    log_error("store_record_unreadable", "key=%s cause=\"%s\"", key, err);
}

static void view_record(struct ctl_core *c, const struct coord_kv *kv)
{
    char err[ERR_TEXT];
    struct view *view;
    if (!kv->value || kv->mod_revision <= c->view_revision)
        return;
    c->view_unreadable = view_decode(kv->value, kv->value_size, &view, err) != 0;
    if (c->view_unreadable) {
        unreadable(kv->key, err);
        ctl_store_depose(c);
        return;
    }
    c->view_revision = kv->mod_revision;
    c->stored_epoch = view->epoch;
    ctl_view_take(c, view);
    view_free(view);
}

static void server_record(struct ctl_core *c, const struct coord_kv *kv)
{
    char err[ERR_TEXT];
    struct server_doc doc;
    uint64_t id = strtoull(kv->key + sizeof SERVERS - 1, NULL, 10);
    if (!kv->value)
        server_is_gone(c, id);
    else if (server_decode(kv->value, kv->value_size, &doc, err))
        unreadable(kv->key, err);
    else if (doc.server.id == id)
        server_is(c, &doc, kv->mod_revision);
}

static void leader_record(struct ctl_core *c, const struct coord_kv *kv)
{
    char err[ERR_TEXT];
    struct server_doc doc = {0};
    if (kv->value && server_decode(kv->value, kv->value_size, &doc, err))
        unreadable(kv->key, err);
    leader_is(c, doc.server.id, kv->value ? kv->create_revision : 0);
}

static void job_record(struct ctl_core *c, const struct coord_kv *kv)
{
    char err[ERR_TEXT];
    struct job_doc job;
    if (c->job_known || !kv->value)
        return;
    if (job_decode(kv->value, kv->value_size, &job, err)) {
        unreadable(kv->key, err);
        return;
    }
    c->job_known = true;
    ctl_controller_open(c, &job);
}

static void record(struct ctl_core *c, const struct coord_kv *kv)
{
    if (c->fenced)
        return;
    if (strcmp(kv->key, "job") == 0)
        job_record(c, kv);
    else if (strcmp(kv->key, "view") == 0)
        view_record(c, kv);
    else if (strcmp(kv->key, "leader") == 0)
        leader_record(c, kv);
    else if (strncmp(kv->key, SERVERS, sizeof SERVERS - 1) == 0)
        server_record(c, kv);
}

/* ---- answers ---- */

static bool range_has(const struct coord_event *e, uint64_t id)
{
    char key[COORD_KEY_MAX];
    server_key(key, id);
    for (uint32_t i = 0; i < e->nkv; i++)
        if (strcmp(e->kv[i].key, key) == 0)
            return true;
    return false;
}

/* Everything as it stood at one revision. The leader last: who is elected needs the rest. */
static void snapshot(struct ctl_core *c, const struct coord_event *e)
{
    const struct coord_kv *leader = NULL;
    c->snapshot_revision = e->revision;
    c->ranged = true;
    for (uint32_t i = c->nservers; i-- > 0;)
        if (i < c->nservers && !range_has(e, c->server[i].doc.server.id))
            server_is_gone(c, c->server[i].doc.server.id);
    if (c->registered_lease && !range_has(e, self_id(c)))
        server_is_gone(c, self_id(c));
    if (c->fenced)
        return;
    for (uint32_t i = 0; i < e->nkv; i++) {
        if (strcmp(e->kv[i].key, "leader") == 0)
            leader = &e->kv[i];
        else
            record(c, &e->kv[i]);
    }
    if (c->fenced || c->ended)
        return;
    bool again = c->want_range;
    leader_record(c, leader ? leader : &(struct coord_kv){.key = "leader"});
    c->want_range = again;     /* this very answer was read after the election */
    lead(c);
    if (c->leads && c->cas_unknown) {
        c->cas_unknown = false;
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_CAS_UNKNOWN, .view = c->view});
    }
}

static void range_answered(struct ctl_core *c, const struct coord_event *e)
{
    if (e->status || e->revision < c->seen_revision) {
        c->want_range = true;
        return;
    }
    c->seen_revision = e->revision;
    snapshot(c, e);
    if (c->watching || c->fenced)
        return;
    c->watching = true;
    ctl_emit(c, &(struct ctl_effect){.kind = CTL_DO_WATCH, .revision = e->revision});
}

static void register_answered(struct ctl_core *c, const struct coord_event *e)
{
    if (e->status == 0 && e->succeeded) {
        c->registered_lease = c->lease;
        c->register_unsure = true;
        if (e->revision > c->seen_revision)
            c->seen_revision = e->revision;     /* what was read before says nothing of it */
        return;
    }
    if (e->status == 0 && !c->register_unsure) {
        ctl_stop(c, CTL_FENCED, "another server has registered the same id");
        return;
    }
    c->register_unsure = true;
    c->want_range = true;
}

static void job_answered(struct ctl_core *c, const struct coord_event *e)
{
    if (e->status || !e->succeeded) {
        c->want_range = true;
        return;
    }
    if (c->job_known)
        return;
    c->job_known = true;
    ctl_controller_open(c, &c->cfg.job);
}

static void answered(struct ctl_core *c, const struct coord_event *e)
{
    enum ctl_ask ask = e->tag & ((1u << ASK_BITS) - 1);
    if (ask >= ASKS || e->tag != c->tag[ask] || !e->tag)
        return;
    c->tag[ask] = 0;
    if (e->status == KS_EAUTH || e->status == KS_EINVAL)
        log_error("store_refused", "cause=\"%s\"", e->text);
    if (e->status)
        c->retry_us = c->now_us + (e->status == KS_EAUTH || e->status == KS_EINVAL ? REFUSED_US : RETRY_US);
    if (e->status == KS_ENOENT)
        lease_lost(c, c->lease);
    switch (ask) {
    case ASK_RANGE:
        range_answered(c, e);
        break;
    case ASK_LEASE:
        c->lease = e->status ? 0 : e->lease;
        break;
    case ASK_JOB:
        job_answered(c, e);
        break;
    case ASK_REGISTER:
        register_answered(c, e);
        break;
    case ASK_CAMPAIGN:
    case ASK_UNSEAT:
        c->want_range = true;
        break;
    case ASK_CAS:
        cas_answered(c, e);
        break;
    case ASKS:
        break;
    }
}

void ctl_store_event(struct ctl_core *c, const struct coord_event *e)
{
    if (!e || c->ended)
        return;
    switch (e->kind) {
    case COORD_ANSWER:
        answered(c, e);
        break;
    case COORD_CHANGE:
        if (e->revision <= c->snapshot_revision || e->nkv == 0)
            break;
        c->seen_revision = e->revision > c->seen_revision ? e->revision : c->seen_revision;
        record(c, &e->kv[0]);
        break;
    case COORD_RESYNC:
        c->watching = false;
        c->want_range = true;
        break;
    case COORD_LEASE_LOST:
        lease_lost(c, e->lease);
        break;
    case COORD_REACHABLE:
        if (e->status == 0)
            c->retry_us = c->now_us;
        break;
    }
}
