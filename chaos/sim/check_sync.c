/* check_sync.c - I1, I3, I4, I10 for synchronous steps: every value that an application is shown is recomputed. */
#include "chaos/sim/sim.h"

#include <string.h>

static bool always_sync(const struct world *w)
{
    return w->cfg.mode.kind == MODE_SYNC && !w->cfg.mode_changes;
}

/* Of a member that is in the set, every push up to the step is in the value. Of one that left or was removed in
 * synchronous steps, those up to its last one; in asynchronous steps, at least what was acknowledged. */
static bool count_right(const struct world *w, uint32_t m, uint32_t tensor, int64_t step, uint32_t count)
{
    const struct history *h = &w->history;
    const struct known_member *x = &h->member[m];
    if (h->set[step] >> m & 1)
        return count == pushes_until(w, m, tensor, step);
    if (always_sync(w))
        return count == (h->until[step][m] ? pushes_until(w, m, tensor, h->until[step][m] - 1) : 0);
    if (x->live && x->join > step)
        return count == 0;
    uint32_t by_then = pushes_until(w, m, tensor, step);
    return count >= (by_then < x->acked[tensor] ? by_then : x->acked[tensor]);
}

static void check_integers(struct world *w, const char *who, int64_t step, uint32_t tensor, uint32_t chunk,
                           const uint8_t *bytes)
{
    uint32_t counts[SIM_MEMBERS_MAX];
    if (!value_explain(w, who, tensor, chunk, bytes, counts))
        return;
    for (uint32_t m = 0; m < w->nmembers; m++)
        if (!count_right(w, m, tensor, step, counts[m])) {
            world_fail(w, "I4/I3 %s: tensor %u chunk %u after step %ld holds %u pushes of m%u, which made %u by then (set %x)", who,
                       tensor, chunk, (long)step, counts[m], m, pushes_until(w, m, tensor, step), w->history.set[step]);
            return;
        }
}

static void check_one_history(struct world *w, const char *who, int64_t step, uint32_t tensor, uint32_t chunk,
                              const uint8_t *bytes)
{
    uint64_t *seen = &w->history.seen[w->cfg.tensor[tensor].first + chunk][step];
    uint64_t now = hash_bytes(bytes, tensor_chunk_bytes(&w->cfg.tensor[tensor].spec, chunk, SIM_CHUNK_BYTES)) | 1;
    if (*seen && *seen != now)
        world_fail(w, "I1 %s: tensor %u chunk %u after step %ld is not what others were shown", who, tensor, chunk,
                   (long)step);
    *seen = now;
}

static void check_floats(struct world *w, const char *who, int64_t step, uint32_t tensor, uint32_t chunk,
                         const uint8_t *bytes)
{
    const float *want = history_reference(w, step) + (w->cfg.tensor[tensor].first + chunk) * (SIM_CHUNK_BYTES / 4);
    if (memcmp(want, bytes, tensor_chunk_bytes(&w->cfg.tensor[tensor].spec, chunk, SIM_CHUNK_BYTES)) == 0)
        return;
    float got;
    memcpy(&got, bytes, sizeof got);
    world_fail(w, "I10 %s: tensor %u chunk %u after step %ld begins with %.9g, the ordered reference with %.9g (set %x, rate %g)", who,
               tensor, chunk, (long)step, (double)got, (double)want[0], w->history.set[step], w->history.rate[step]);
}

void check_sync_chunk(struct world *w, const char *who, int64_t step, uint32_t tensor, uint32_t chunk, const uint8_t *bytes)
{
    w->stats.values_checked++;
    if (w->cfg.floats)
        check_floats(w, who, step, tensor, chunk, bytes);
    else
        check_integers(w, who, step, tensor, chunk, bytes);
    check_one_history(w, who, step, tensor, chunk, bytes);
}

static void check_reduced(struct world *w, struct proc *p, const struct op *o, uint32_t chunk)
{
    uint8_t want[SIM_CHUNK_BYTES];
    uint32_t size = tensor_chunk_bytes(&w->cfg.tensor[o->tensor].spec, chunk, SIM_CHUNK_BYTES);
    w->stats.values_checked++;
    value_step_sum(w, o->tensor, chunk, o->step, w->history.set[o->step], want);
    if (memcmp(want, o->out + (size_t)chunk * SIM_CHUNK_BYTES, size) != 0)
        world_fail(w, "I3/I4 %s: the sum of tensor %u chunk %u in step %ld is not that of its members (set %x)", p->name,
                   o->tensor, chunk, (long)o->step, w->history.set[o->step]);
}

static void check_initial(struct world *w, struct proc *p, const struct op *o)
{
    uint8_t want[SIM_CHUNK_BYTES * SIM_CHUNKS_MAX];
    value_initial(w, o->tensor, want);
    w->stats.values_checked++;
    if (memcmp(want, o->out, tensor_bytes(&w->cfg.tensor[o->tensor].spec)) != 0)
        world_fail(w, "I1 %s: tensor %u before step 0 is not its first value", p->name, o->tensor);
}

void check_sync_value(struct world *w, struct proc *p, const struct op *o)
{
    int64_t step = o->kind == CLIENT_PULL ? o->step - 1 : o->step;
    if (step < 0) {
        check_initial(w, p, o);
        return;
    }
    history_finish(w, client_core_view(p->member->core), p->name, step);
    for (uint32_t c = 0; c < w->cfg.tensor[o->tensor].nchunks && !w->failed; c++) {
        if (w->cfg.tensor[o->tensor].spec.kind == TENSOR_REDUCE)
            check_reduced(w, p, o, c);
        else
            check_sync_chunk(w, p->name, step, o->tensor, c, o->out + (size_t)c * SIM_CHUNK_BYTES);
    }
}

void check_sync_finished(struct world *w, struct proc *p, int64_t step)
{
    const struct view *v = client_core_view(p->member->core);
    const struct view_member *m = view_member_find(v, p->id);
    if (m && !view_member_in(m, step))
        world_fail(w, "I4 %s finishes step %ld, which it is not in", p->name, (long)step);
    history_finish(w, v, p->name, step);
    if (w->opt.verbose)
        world_note(w, "  %s finishes step %ld", p->name, (long)step);
}

void check_sync_read(struct world *w, struct proc *p, int64_t step)
{
    const struct view *v = client_core_view(p->member->core);
    if (step > 0 && w->history.mode[step].kind == MODE_SYNC && w->history.mode[step - 1].kind == MODE_SYNC)
        history_finish(w, v, p->name, step - 1);
}
