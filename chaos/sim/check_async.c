/* check_async.c - I2, I3, I5 for asynchronous and staleness-bounded steps, and what must hold at the end of any run. */
#include "chaos/sim/sim.h"

#include <string.h>

static bool acts(const struct world *w, uint32_t m)
{
    const struct known_member *x = &w->history.member[m];
    return x->first_epoch && x->live;
}

/* I5: what live members pushed in steps below the need, and one's own. */
static void check_bound(struct world *w, struct proc *p, const struct op *o, uint32_t chunk, const uint32_t *counts)
{
    struct mode mode = check_mode(w, p, o->step);
    int64_t need = mode.kind == MODE_SSP ? o->step - (int64_t)mode.bound : 0;
    for (uint32_t m = 0; m < w->nmembers; m++) {
        const struct known_member *x = &w->history.member[m];
        int64_t below = m == p->member->index ? o->step : need;
        if (!acts(w, m))
            continue;
        if (counts[m] < pushes_until(w, m, o->tensor, below - 1))
            world_fail(w, "I5 %s at step %ld is shown %u pushes of m%u to tensor %u chunk %u; %u were made below step %ld",
                       p->name, (long)o->step, counts[m], m, o->tensor, chunk, pushes_until(w, m, o->tensor, below - 1),
                       (long)below);
        int64_t clock = x->ended + 1 > x->join ? x->ended + 1 : x->join;
        if (mode.kind == MODE_SSP && clock < need)
            world_fail(w, "I5 %s is answered at step %ld while m%u is in step %ld (bound %u)", p->name, (long)o->step, m,
                       (long)clock, mode.bound);
    }
}

/* Whatever this member was shown, or was acknowledged to anybody by the server before it asked, stays (I2). */
static void check_kept(struct world *w, struct proc *p, const struct op *o, uint32_t chunk, const uint32_t *counts)
{
    struct known_member *self = &w->history.member[p->member->index];
    uint32_t *seen = self->seen[w->cfg.tensor[o->tensor].first + chunk];
    for (uint32_t m = 0; m < w->nmembers; m++) {
        if (counts[m] < seen[m])
            world_fail(w, "I2 %s was shown %u pushes of m%u to tensor %u chunk %u, and now %u", p->name, seen[m], m,
                       o->tensor, chunk, counts[m]);
        seen[m] = counts[m];
    }
}

void check_async_value(struct world *w, struct proc *p, const struct op *o)
{
    uint32_t counts[SIM_MEMBERS_MAX];
    for (uint32_t c = 0; c < w->cfg.tensor[o->tensor].nchunks && !w->failed; c++) {
        w->stats.values_checked++;
        if (!value_explain(w, p->name, o->tensor, c, o->out + (size_t)c * SIM_CHUNK_BYTES, counts))
            return;
        check_bound(w, p, o, c, counts);
        check_kept(w, p, o, c, counts);
    }
}

void check_acked(struct world *w, uint32_t member, uint32_t tensor, uint32_t seq)
{
    uint32_t *acked = &w->history.member[member].acked[tensor];
    w->stats.pushes_acked++;
    if (seq > *acked)
        *acked = seq;
}

/* ---- the end ---- */

static void final_integers(struct world *w, const char *who, uint32_t tensor, uint32_t chunk, const uint8_t *bytes)
{
    uint32_t counts[SIM_MEMBERS_MAX];
    if (!value_explain(w, who, tensor, chunk, bytes, counts))
        return;
    for (uint32_t m = 0; m < w->nmembers; m++) {
        const struct known_member *x = &w->history.member[m];
        if (counts[m] < x->acked[tensor])
            world_fail(w, "I2 at the end %s holds %u pushes of m%u to tensor %u chunk %u; %u were acknowledged", who, counts[m],
                       m, tensor, chunk, x->acked[tensor]);
        if (acts(w, m) && counts[m] != x->pushed[tensor])
            world_fail(w, "I3 at the end %s holds %u pushes of live m%u to tensor %u chunk %u of %u", who, counts[m], m, tensor,
                       chunk, x->pushed[tensor]);
    }
}

static void final_chunk(struct world *w, struct proc *p, uint32_t tensor, uint32_t chunk)
{
    const struct sim_tensor *t = &w->cfg.tensor[tensor];
    uint32_t shard = shard_of(t->spec.id, chunk, w->cfg.nshards);
    const struct shard_core *core = p->server->loop[loop_of(shard, p->server->machine->nloops)].core;
    struct shard_chunk_peek peek;
    bool sync = view_mode_at(w->view, w->target).kind == MODE_SYNC;
    int64_t complete = shard_core_complete(core, shard), last = w->history.finished;
    if (sync && complete < last) {
        world_fail(w, "I2 at the end shard %u is complete to step %ld; step %ld was finished", shard, (long)complete,
                   (long)last);
        return;
    }
    if (!shard_core_peek(core, t->spec.id, chunk, &peek)) {
        world_fail(w, "I2 at the end %s does not know tensor %u chunk %u", p->name, tensor, chunk);
        return;
    }
    if (t->spec.kind == TENSOR_REDUCE && sync)
        return;
    static const uint8_t zeros[SIM_CHUNK_BYTES];
    const uint8_t *value = peek.value ? peek.value->data : zeros;
    if (!w->cfg.floats)
        final_integers(w, p->name, tensor, chunk, value);
    if (sync && !w->failed && complete == last && last >= 0 && peek.step <= last)
        check_sync_chunk(w, p->name, last, tensor, chunk, value);
}

/* Faults are over and everybody reached the target: what was acknowledged is there, and nothing else. */
void check_final(struct world *w)
{
    if (!w->view) {
        world_fail(w, "I6 no view was ever committed");
        return;
    }
    for (uint32_t t = 0; t < w->cfg.ntensors; t++)
        for (uint32_t c = 0; c < w->cfg.tensor[t].nchunks && !w->failed; c++) {
            uint32_t shard = shard_of(w->cfg.tensor[t].spec.id, c, w->cfg.nshards);
            struct proc *p = world_proc(w, w->view->shard[shard].primary);
            if (!p || !p->alive)
                world_fail(w, "I6 at the end shard %u has no live primary", shard);
            else
                final_chunk(w, p, t, c);
        }
    check_backups(w);
}
