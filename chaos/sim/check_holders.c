/* check_holders.c - replication: what leaves a primary is held by its backups (I2), backups equal their primaries bit for bit,
 * lost backups are replaced. */
#include "chaos/sim/sim.h"

#include <string.h>
#include "base/mem.h"

struct proc *shard_server(const struct world *w, uint64_t id, uint32_t shard, struct sim_loop **ret_loop)
{
    struct proc *p = world_proc(w, id);
    if (!p || !p->alive || p->kind != PROC_SERVER)
        return NULL;
    *ret_loop = &p->server->loop[loop_of(shard, p->server->machine->nloops)];
    return p;
}

/* ---- while it runs ---- */

/* A frame says that `step` (or push `seq` of member `to`) is in chunk or shard. */
struct claim {
    const struct shard_effect *e;
    uint32_t shard;
    bool whole;                    /* COMPLETE: of the shard */
};

static bool held(const struct world *w, const struct sim_loop *l, const struct claim *x)
{
    const struct frame_header *h = &x->e->header;
    struct shard_chunk_peek peek;
    if (x->whole && w->history.mode[h->step].kind != MODE_SYNC)
        return true;      /* W, which the backup has, says the same */
    if (x->whole)
        return shard_core_complete(l->core, x->shard) >= h->step;
    const struct view_member *to = h->type == FRAME_ACK ? view_member_find(l->view, x->e->to) : NULL;
    if (h->type == FRAME_ACK && (!to || !to->live))
        return true;      /* nobody waits for it; what it pushed is forgotten with it */
    if (h->type == FRAME_ACK)
        return shard_core_applied(l->core, h->tensor, h->chunk, x->e->to) >= h->seq;
    if (!shard_core_peek(l->core, h->tensor, h->chunk, &peek))
        return h->version == 0;
    /* What is promoted in asynchronous steps gets a new number, also the result of a synchronous step that is complete. */
    bool sealed = h->type == FRAME_RESULT && shard_core_complete(l->core, x->shard) >= h->step;
    return peek.version >= h->version || sealed;
}

static void claim_check(struct world *w, struct proc *p, uint32_t loop, const struct claim *x)
{
    const struct view *v = p->server->loop[loop].view;
    const struct view_shard *s = &v->shard[x->shard];
    const struct frame_header *h = &x->e->header;
    if (s->primary != p->id) {
        world_fail(w, "I7 %s/%u sends %s of shard %u, which it does not lead in view %lu", p->name, loop,
                   frame_type_name(h->type), x->shard, (unsigned long)v->epoch);
        return;
    }
    for (uint32_t i = 0; i < s->nbackups; i++) {
        struct sim_loop *l;
        const struct proc *b = shard_server(w, s->backup[i], x->shard, &l);
        if (!b || !l->view || l->view->epoch > v->epoch)
            continue;
        w->stats.holders_checked++;
        if (!held(w, l, x))
            world_fail(w, "I2 %s/%u sends %s of shard %u (step %ld, chunk %u, version %lu.%lu, seq %u), which backup %s lacks",
                       p->name, loop, frame_type_name(h->type), x->shard, (long)h->step, h->chunk,
                       (unsigned long)(h->version >> 32), (unsigned long)(h->version & UINT32_MAX), h->seq, b->name);
    }
}

static uint64_t buf_hash(uint64_t hash, const struct buf *b)
{
    return hash_mix(hash ^ (b ? hash_bytes(b->data, b->len) : 7));
}

static int tensor_index(const struct world *w, uint64_t id)
{
    for (uint32_t t = 0; t < w->cfg.ntensors; t++)
        if (w->cfg.tensor[t].spec.id == id)
            return (int)t;
    return -1;
}

void check_version(struct world *w, const struct proc *p, uint32_t loop, const struct frame_header *h)
{
    struct shard_chunk_peek peek;
    int t = tensor_index(w, h->tensor);
    if (t < 0 || !shard_core_peek(p->server->loop[loop].core, h->tensor, h->chunk, &peek) || !peek.version)
        return;
    uint32_t c = w->cfg.tensor[t].first + h->chunk;
    struct seen_version x = { peek.step, peek.version, buf_hash(buf_hash(1, peek.value), peek.result), p };
    if (!w->seen[c])
        w->seen[c] = mem_alloc(SIM_VERSIONS * sizeof *w->seen[c]);
    for (uint32_t i = 0; i < SIM_VERSIONS; i++) {
        const struct seen_version *o = &w->seen[c][i];
        if (o->version != x.version || o->step != x.step)
            continue;
        if (o->hash != x.hash)
            world_fail(w, "I1 %s/%u has other bytes than %s for tensor %d chunk %u step %ld version %lu.%lu", p->name, loop,
                       o->at->name, t, h->chunk, (long)x.step, (unsigned long)(x.version >> 32),
                       (unsigned long)(x.version & UINT32_MAX));
        return;
    }
    w->seen[c][w->nseen[c]++ % SIM_VERSIONS] = x;
}

void check_released(struct world *w, struct proc *p, uint32_t loop, const struct shard_effect *e)
{
    const struct frame_header *h = &e->header;
    struct claim x = { .e = e };
    if (h->type == FRAME_IMAGE_ACK || h->type == FRAME_IMAGE || h->type == FRAME_RESULT || h->type == FRAME_VALUE)
        check_version(w, p, loop, h);
    if (e->is_server || !p->server->loop[loop].view)
        return;
    if (h->type == FRAME_COMPLETE) {
        const uint8_t *shards = e->payload->data + e->offset;
        x.whole = true;
        for (uint64_t i = 0; i + 1 < h->len && !w->failed; i += 2) {
            x.shard = (uint32_t)(shards[i] | shards[i + 1] << 8);
            claim_check(w, p, loop, &x);
        }
        return;
    }
    if ((h->type != FRAME_RESULT && h->type != FRAME_ACK && h->type != FRAME_VALUE) || h->status)
        return;
    x.shard = shard_of(h->tensor, h->chunk, w->cfg.nshards);
    claim_check(w, p, loop, &x);
}

/* ---- at the end ---- */

static bool buf_same(const struct buf *a, const struct buf *b)
{
    if (!a || !b)
        return a == b;
    return a->len == b->len && memcmp(a->data, b->data, a->len) == 0;
}

static void chunk_compare(struct world *w, const struct proc *p, const struct sim_loop *pl, const struct proc *b,
                          const struct sim_loop *bl, uint32_t tensor, uint32_t chunk)
{
    struct shard_chunk_peek mine, other;
    uint64_t id = w->cfg.tensor[tensor].spec.id;
    bool known = shard_core_peek(pl->core, id, chunk, &mine);
    w->stats.backups_compared++;
    if (!known)
        return;
    if (!shard_core_peek(bl->core, id, chunk, &other)) {
        if (mine.version)
            world_fail(w, "I2 at the end backup %s does not know tensor %u chunk %u", b->name, tensor, chunk);
    } else if (mine.step != other.step || mine.version != other.version) {
        world_fail(w, "I2 at the end backup %s has tensor %u chunk %u of step %ld version %lu.%lu; its primary %s step %ld version %lu.%lu",
                   b->name, tensor, chunk, (long)other.step, (unsigned long)(other.version >> 32),
                   (unsigned long)(other.version & UINT32_MAX), p->name, (long)mine.step, (unsigned long)(mine.version >> 32),
                   (unsigned long)(mine.version & UINT32_MAX));
    } else if (!buf_same(mine.value, other.value) || !buf_same(mine.result, other.result)) {
        world_fail(w, "I2 at the end backup %s and primary %s differ in tensor %u chunk %u (step %ld, version %lu.%lu)", b->name,
                   p->name, tensor, chunk, (long)mine.step, (unsigned long)(mine.version >> 32),
                   (unsigned long)(mine.version & UINT32_MAX));
    }
}

static void backup_compare(struct world *w, uint32_t shard, const struct proc *p, const struct sim_loop *pl, uint64_t id)
{
    struct sim_loop *bl;
    const struct proc *b = shard_server(w, id, shard, &bl);
    if (!b) {
        world_fail(w, "I6 at the end a backup of shard %u is dead", shard);
        return;
    }
    if (shard_core_complete(bl->core, shard) != shard_core_complete(pl->core, shard))
        world_fail(w, "I2 at the end backup %s has shard %u complete to step %ld, its primary %s to step %ld", b->name, shard,
                   (long)shard_core_complete(bl->core, shard), p->name, (long)shard_core_complete(pl->core, shard));
    for (uint32_t t = 0; t < w->cfg.ntensors; t++)
        for (uint32_t c = 0; c < w->cfg.tensor[t].nchunks && !w->failed; c++)
            if (shard_of(w->cfg.tensor[t].spec.id, c, w->cfg.nshards) == shard)
                chunk_compare(w, p, pl, b, bl, t, c);
}

void check_backups(struct world *w)
{
    for (uint32_t s = 0; s < w->view->nshards && !w->failed; s++) {
        const struct view_shard *x = &w->view->shard[s];
        struct sim_loop *pl;
        const struct proc *p = shard_server(w, x->primary, s, &pl);
        for (uint32_t i = 0; p && i < x->nbackups; i++)
            backup_compare(w, s, p, pl, x->backup[i]);
    }
}

/* ---- the number of backups ---- */

bool replicas_restored(const struct world *w)
{
    uint32_t up = 0;
    for (uint32_t i = 0; i < w->nmachines; i++)
        up += w->machine[i].proc && !w->machine[i].draining;
    uint32_t want = up && w->job.replicas > up - 1 ? up - 1 : w->job.replicas;
    for (uint32_t s = 0; w->view && s < w->view->nshards; s++)
        if (w->view->shard[s].nbackups < want)
            return false;
    return w->view != NULL;
}

static bool holder_lost(const struct world *w, uint64_t id, bool suspected_too)
{
    const struct proc *p = world_proc(w, id);
    return !p || p->lost || (suspected_too && p->faulted);
}

/* Is there a shard that nobody holds any more? */
bool shard_lost(const struct world *w, bool suspected_too)
{
    for (uint32_t s = 0; w->view && s < w->view->nshards; s++) {
        const struct view_shard *x = &w->view->shard[s];
        bool lost = holder_lost(w, x->primary, suspected_too);
        for (uint32_t i = 0; i < x->nbackups; i++)
            lost = lost && holder_lost(w, x->backup[i], suspected_too);
        if (lost)
            return true;
    }
    return false;
}
