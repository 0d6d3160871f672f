/* shard_view.c - PREPARE and ADOPT at the shards of one loop (docs/PROTOCOL.md "View change"). */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "server/shard_impl.h"

/* ---- PREPARE ---- */

static bool is_in(const uint64_t *ids, uint32_t n, uint64_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

/* o when every one of (gone + departed) in set(o) is done, also when there is none; else complete. */
static int64_t report_complete(const struct shard_core *c, const struct shard *s, const struct prepare *p)
{
    for (uint32_t m = 0; m < c->nslots; m++) {
        if (!mset_has(&s->oset, m) || mset_has(&s->done, m))
            continue;
        if (!c->slot[m].live || is_in(p->gone, p->ngone, c->slot[m].id))
            return s->complete;
    }
    return s->complete + 1;
}

static bool open_started(const struct shard *s)
{
    if (s->marking)
        return true;
    for (uint32_t i = 0; i < s->nchunks; i++)
        if (s->chunk[i]->cur.step == s->complete + 1)
            return true;
    return false;
}

static int64_t join_distance(struct mode m)
{
    if (m.kind == MODE_SSP)
        return m.bound < 2 ? 1 : (m.bound + 1) / 2;
    return m.kind == MODE_ASYNC ? 1 : 0;
}

static struct shard_report report_one(const struct shard_core *c, const struct shard *s, const struct prepare *p,
                                      enum holder_role role)
{
    int64_t o = s->complete + 1, at = s->w > o ? s->w : o;
    struct mode mode = view_mode_at(p->base, at);
    struct shard_report r = {.shard = s->no, .role = role};
    if (mode.kind == MODE_SYNC && at == o) {
        r.complete = role == HOLDER_PRIMARY || MUTANT(61) ? report_complete(c, s, p) : s->complete;
        r.join = open_started(s) ? o + 1 : o;
    } else {
        r.complete = at - 1;
        r.join = at + join_distance(mode);
    }
    return r;
}

static bool asked_as_heir(const struct shard_core *c, const struct prepare *p)
{
    for (uint32_t i = 0; i < p->nheirs; i++)
        if (p->heir[i] == c->cfg.self && p->heir_of[i] == c->heir_of)
            return true;
    return false;
}

/* The life whose disk this is held the shard in the base view: what it had acknowledged is here. */
static bool inherits(const struct shard_core *c, const struct shard *s, const struct prepare *p)
{
    const struct view_shard *vs = &p->base->shard[s->no];
    return s->held && asked_as_heir(c, p) &&
           (vs->primary == c->heir_of || is_in(vs->backup, vs->nbackups, c->heir_of));
}

static enum holder_role role_of(const struct shard_core *c, const struct shard *s, const struct prepare *p)
{
    if (s->primary)
        return HOLDER_PRIMARY;
    if (s->backup)
        return HOLDER_BACKUP;
    if (s->joining)
        return HOLDER_JOINER;
    return s->no < p->base->nshards && inherits(c, s, p) ? HOLDER_HEIR : 0;
}

static void joiners_report(const struct shard *s, struct shard_report *r)
{
    r->nsynced = 0;
    for (int i = 0; i < HOLDERS_MAX && r->nsynced < BACKUPS_MAX; i++)
        if (s->holder[i].id && s->holder[i].synced && !s->holder[i].backup)
            r->synced[r->nsynced++] = s->holder[i].id;
}

static bool move_target(const struct shard_core *c, const struct shard *s, const struct prepare *p)
{
    for (uint32_t i = 0; i < p->nmoves; i++)
        if (p->move[i].shard == s->no && p->move[i].to == c->cfg.self)
            return true;
    return false;
}

static bool slot_live(const struct shard_core *c, uint64_t id)
{
    uint32_t m = slot_find(c, id);
    return m != SLOT_NONE && c->slot[m].live;
}

/* The cut-set is replaced. Frames of whoever is not cut off any more were dropped meanwhile: it has to connect, and send,
 * again. */
static void cut_set(struct shard_core *c, const uint64_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < c->ncut; i++) {
        bool server = c->view && view_server_find(c->view, c->cut[i]);
        if (is_in(ids, n, c->cut[i]) || (!server && !slot_live(c, c->cut[i])))
            continue;
        shard_close(c, c->cut[i], KS_EAGAIN, "not cut off any more; connect again");
        c->out->effect[c->out->n - 1].is_server = server;
    }
    mem_free(c->cut);
    c->cut = n ? mem_dup(ids, n * sizeof *ids) : NULL;
    c->ncut = n;
}

static void report_send(struct shard_core *c)
{
    struct shard_effect *e = shard_effect_add(c, SHARD_REPORT);
    e->ballot = c->ballot;
    e->nreports = c->nreport;
    e->reports = c->report;
}

static void report_all(struct shard_core *c, const struct prepare *p)
{
    c->nreport = 0;
    for (uint32_t i = 0; i < c->cfg.nshards; i++) {
        struct shard *s = &c->shard[i];
        if (!shard_is_mine(c, i))
            continue;
        s->cap = s->w_cap = STEP_NONE;
        s->fenced = move_target(c, s, p);
        enum holder_role role = role_of(c, s, p);
        if (!role)
            continue;
        ARRAY_ROOM(c->report, c->nreport, c->creport);
        c->report[c->nreport] = report_one(c, s, p, role);
        c->report[c->nreport].full = s->full;
        joiners_report(s, &c->report[c->nreport]);
        if (p->njoins)
            s->cap = s->w_cap = c->report[c->nreport].join;
        c->nreport++;
    }
}

void shard_on_prepare(struct shard_core *c, const struct prepare *p)
{
    /* Asked again: the first answer stands, whichever copy of it arrives, and so does its cap. */
    if (p->ballot.term == c->ballot.term && p->ballot.round == c->ballot.round) {
        report_send(c);
        return;
    }
    c->ballot = p->ballot;
    cut_set(c, p->gone, p->ngone);
    report_all(c, p);
    report_send(c);
    for (uint32_t i = 0; !p->njoins && c->view && i < c->cfg.nshards; i++) {
        if (!c->shard[i].primary)
            continue;
        sync_try_shard(c, &c->shard[i]);
        async_recompute(c, &c->shard[i]);
    }
}

/* ---- ADOPT ---- */

static void slot_new(struct shard_core *c, const struct view_member *m)
{
    for (uint32_t i = 0; i < MSET_MAX; i++) {
        if (c->slot[i].id)
            continue;
        c->slot[i] = (struct slot){.id = m->id, .join = m->join, .last = m->last, .live = m->live};
        map_put(&c->slot_of, m->id, &c->slot[i]);
        c->nslots = i + 1 > c->nslots ? i + 1 : c->nslots;
        for (uint32_t k = 0; k < c->cfg.nshards; k++) {
            struct shard *s = &c->shard[k];
            if (!s->primary)
                continue;
            mset_add(&s->clock_known, i);
            s->clock[i] = m->join;
        }
        return;
    }
    log_error("too_many_members", "max=%d member=%llu", MSET_MAX, (unsigned long long)m->id);
}

static void slots_update(struct shard_core *c, const struct view *v)
{
    for (uint32_t i = 0; i < c->nslots; i++)
        if (c->slot[i].id && !view_member_find(v, c->slot[i].id))
            c->slot[i].live = false;
    for (uint32_t i = 0; i < v->nmembers; i++) {
        const struct view_member *m = &v->member[i];
        uint32_t slot = slot_find(c, m->id);
        if (slot == SLOT_NONE) {
            slot_new(c, m);
            continue;
        }
        c->slot[slot].join = m->join;
        c->slot[slot].last = m->last;
        c->slot[slot].live = m->live;
    }
}

static void slot_forget(struct shard_core *c, uint32_t slot)
{
    for (uint32_t k = 0; k < c->cfg.nshards; k++) {
        struct shard *s = &c->shard[k];
        if (!s->want)
            continue;
        mset_del(&s->fact, slot);
        mset_del(&s->done, slot);
        mset_del(&s->clock_known, slot);
        mset_del(&s->mark_set, slot);
        s->clock[slot] = 0;
        s->want[slot] = s->have[slot] = 0;
        for (uint32_t i = 0; i < s->nchunks; i++) {
            mset_del(&s->chunk[i]->mask, slot);
            mset_del(&s->chunk[i]->want, slot);
            mset_del(&s->chunk[i]->rejected, slot);
        }
    }
    async_slot_gone(c, slot);
    map_remove(&c->slot_of, c->slot[slot].id);
    c->slot[slot] = (struct slot){0};
}

/* Members that the view lists no more: their last step is sealed, or their life was never of this view. */
static void slots_drop(struct shard_core *c)
{
    for (uint32_t i = 0; i < c->nslots; i++)
        if (c->slot[i].id && !view_member_find(c->view, c->slot[i].id))
            slot_forget(c, i);
    while (c->nslots && !c->slot[c->nslots - 1].id)
        c->nslots--;
}

/* DONE(k) of a member is void when it is not in set(k); so are the settings for k + 1 that came with it. */
static void settings_void(struct shard_core *c)
{
    for (uint32_t i = 0; i < c->view->nmembers; i++) {
        const struct view_member *m = &c->view->member[i];
        for (uint32_t k = 0; k < c->nsetting; k++) {
            int64_t from = c->setting[k].s.from_step;
            if (c->setting[k].member == m->id && m->last != STEP_NONE && from > m->last + 1 &&
                shard_mode(c, from - 1).kind == MODE_SYNC) {
                settings_drop(c, m->id, from);
                k = 0;
            }
        }
    }
}

/* A loop without a part in the view that is more than joining gets its settings with the marks of its primaries: what it
 * has, from its disk, may be void since a view that it never saw. This comes before marks are sent under the new view. */
static void settings_follow(struct shard_core *c)
{
    bool part = false;
    for (uint32_t i = c->cfg.loop; i < c->cfg.nshards; i += c->cfg.nloops) {
        const struct view_shard *vs = &c->view->shard[i];
        part |= c->shard[i].primary || c->shard[i].backup || vs->primary == c->cfg.self ||
                is_in(vs->backup, vs->nbackups, c->cfg.self);
    }
    if (!part && c->nsetting) {
        c->nsetting = 0;
        c->setting_generation++;
        c->settings_dirty = true;
    }
    settings_void(c);
}

/* Results of the open step that this life has, from its backup or its disk: safe again before anything counts on them. */
static void results_make_safe(struct shard_core *c, struct shard *s)
{
    s->unreleased = 0;
    for (uint32_t i = 0; i < s->nchunks; i++) {
        struct chunk *ch = s->chunk[i];
        ch->released = true;
        if (ch->cur.step != s->complete + 1)
            continue;
        ch->released = false;
        s->unreleased++;
        ch->acks = 0;
        ch->item = ++c->items;
        if (c->cfg.durable) {
            ch->persist_seq = persist_image(c, ch, &ch->cur);
            wait_add(c, (struct wait){.kind = WAIT_RESULT, .seq = ch->persist_seq, .chunk = ch});
        }
        if (MUTANT(60))
            ch->acks = s->required;
        else if (s->targets)
            holders_image(c, ch, NULL);
    }
}

static void promote(struct shard_core *c, struct shard *s, const struct view_shard *vs, bool fresh)
{
    s->primary = true;
    s->since = vs->since;
    s->marking = false;
    sync_facts_clear(c, s);
    holders_adopt(c, s, vs, true);
    async_promoted(c, s);
    async_seal(c, s);
    sync_open(c, s);
    results_make_safe(c, s);
    sync_redo(c, s);
    s->announced = fresh;
    if (fresh)
        return;
    s->announce_acks = 0;
    s->announce_item = ++c->items;
    if (c->cfg.durable) {
        uint64_t seq = persist_shard(c, s);
        wait_add(c, (struct wait){.kind = WAIT_ANNOUNCE, .seq = seq, .shard = s, .item = s->announce_item});
    }
    holders_mark(c, s, s->complete, s->cset, s->ncset, s->announce_item, s->targets & s->required);
}

/* A shard that begins with this view knows where everybody begins. */
static void clocks_at_join(struct shard_core *c, struct shard *s)
{
    for (uint32_t m = 0; m < c->nslots; m++) {
        if (!c->slot[m].id)
            continue;
        mset_add(&s->clock_known, m);
        s->clock[m] = c->slot[m].join;
    }
}

static void demote(struct shard_core *c, struct shard *s)
{
    s->primary = s->announced = s->marking = false;
    s->w_item = 0;
    s->w = s->w_held;      /* what others hold: images of the next primary may take the place of what is newer here */
    s->async_pending = s->unreleased = 0;
    for (uint32_t i = 0; i < s->nchunks; i++) {
        struct chunk *ch = s->chunk[i];
        acc_clear(c, ch);
        ch->npull = ch->nack = 0;
        ch->flying = false;
    }
    sync_facts_clear(c, s);
    holders_clear(c, s);
}

/* A view that gives us a shard whose data is not here would lose it: this process must not go on. */
static void lacks_data(struct shard_core *c, const struct shard *s, const char *part)
{
    struct shard_effect *e = shard_effect_add(c, SHARD_FATAL);
    e->status = KS_ESTATE;
    snprintf(e->text, sizeof e->text, "the view makes this server %s of shard %u, which it holds no data of", part, s->no);
}

static void adopt_primary(struct shard_core *c, struct shard *s, const struct view_shard *vs)
{
    if (s->primary) {
        holders_adopt(c, s, vs, false);
        holders_resend(c, s);
        return;
    }
    bool fresh = !s->held && vs->since <= 1;
    if (!s->held && !fresh) {
        lacks_data(c, s, "primary");
        return;
    }
    s->held = true;
    s->backup = s->joining = s->full = false;
    promote(c, s, vs, fresh);
    if (fresh)
        clocks_at_join(c, s);
}

static void adopt_other(struct shard_core *c, struct shard *s, const struct view_shard *vs)
{
    bool backup = is_in(vs->backup, vs->nbackups, c->cfg.self);
    bool joining = is_in(vs->joining, vs->njoining, c->cfg.self);
    bool had = s->primary || s->backup || s->full;
    if (s->primary)
        demote(c, s);
    if (backup && !had && !s->held && c->view->epoch > 1) {
        lacks_data(c, s, "backup");
        return;
    }
    if (!joining || !s->joining || (s->upstream != vs->primary && !MUTANT(62)))
        s->full = false;
    s->backup = backup;
    s->joining = joining;
    s->upstream = vs->primary;
    if (backup)
        s->held = true;
    if (joining)
        replica_adopt(c, s);
    if (!backup && !joining && had)
        shard_drop_data(c, s);
}

static void adopt_shard(struct shard_core *c, struct shard *s, const struct view_shard *vs)
{
    bool primary = vs->primary == c->cfg.self;
    bool holds = s->primary || s->backup || (s->joining && s->full) || (s->held && !s->joining);
    /* Asynchronous steps after it have sealed the last synchronous one. */
    if (holds && s->w <= s->complete + 1)
        sync_resolve(c, s);
    else
        sync_open(c, s);
    s->held |= s->joining && s->full;
    if (primary)
        adopt_primary(c, s, vs);
    else
        adopt_other(c, s, vs);
}

static void retry(struct shard_core *c, struct shard *s)
{
    if (!s->primary)
        return;
    sync_announce_check(c, s);
    for (uint32_t i = 0; i < s->nchunks; i++) {
        sync_check(c, s->chunk[i]);
        async_check(c, s->chunk[i]);
    }
    sync_mark_check(c, s);
    async_w_check(c, s);
    sync_try_shard(c, s);
    async_recompute(c, s);
    sync_serve_pulls(c, s);
}

uint32_t server_loop(const struct shard_core *c, uint64_t id, uint32_t shard)
{
    const struct view_server *v = view_server_find(c->view, id);
    return v && v->nloops ? loop_of(shard, v->nloops) : 0;
}

void shard_on_adopt(struct shard_core *c, const struct view *v)
{
    struct view *old = c->view;
    CHECK(v->nshards == c->cfg.nshards);
    c->view = view_copy(v);
    view_free(old);
    slots_update(c, c->view);
    settings_follow(c);
    for (uint32_t i = 0; i < c->cfg.nshards; i++) {
        c->shard[i].cap = c->shard[i].w_cap = STEP_NONE;
        c->shard[i].fenced = false;
        if (shard_is_mine(c, i))
            adopt_shard(c, &c->shard[i], &c->view->shard[i]);
    }
    slots_drop(c);
    cut_set(c, NULL, 0);
    for (uint32_t i = 0; i < c->cfg.nshards; i++)
        retry(c, &c->shard[i]);
    shard_claims_recheck(c);
}
