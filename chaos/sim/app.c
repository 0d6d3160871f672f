/* app.c - a member's application: declares, initialises, then pulls, pushes and ends steps, and has every value checked.
 *
 * What it does in a step is a hash of (seed, life, tensor, step): a run without some fault pushes the same. */
#include "chaos/sim/sim.h"

#include <string.h>
#include "base/keepstep_err.h"
#include "base/mem.h"

enum { OUTSTANDING_MAX = 24 };

static uint64_t draw(const struct world *w, uint64_t a, uint64_t b, uint64_t c)
{
    return hash_mix(hash_mix(hash_mix(w->opt.seed * 31 + a) + b) + c);
}

uint32_t app_push_count(const struct world *w, uint32_t member, uint32_t tensor, int64_t step)
{
    uint64_t d = draw(w, member * 8 + tensor, (uint64_t)step, 1);
    if (d % 100 < 20 || draw(w, tensor, (uint64_t)step, 2) % 12 == 0)
        return 0;
    return w->cfg.many_pushes && d % 3 == 0 ? 2 : 1;
}

double app_rate(const struct world *w, uint32_t member, int64_t step)
{
    uint64_t d = draw(w, member, (uint64_t)step, 3);
    return w->cfg.floats && d % 8 == 0 ? 0.125 * (double)(1 + d / 8 % 6) : 0;
}

static bool step_is_sync(const struct member *m)
{
    return view_mode_at(client_core_view(m->core), m->step).kind == MODE_SYNC;
}

/* ---- operations ---- */

static uint64_t tensor_size(const struct world *w, uint32_t tensor)
{
    return tensor_bytes(&w->cfg.tensor[tensor].spec);
}

static struct op *op_new(struct world *w, struct proc *p, enum client_event_kind kind, uint32_t tensor)
{
    struct op *o = mem_alloc(sizeof *o);
    o->id = ++w->next_op;
    o->kind = kind;
    o->tensor = tensor;
    o->step = p->member->step;
    o->next = p->member->ops;
    p->member->ops = o;
    p->member->nops++;
    return o;
}

static void op_free(struct op *o)
{
    mem_free(o->in);
    mem_free(o->out);
    mem_free(o);
}

static void op_submit(struct world *w, struct proc *p, struct op *o)
{
    struct member *m = p->member;
    struct client_event e = { .kind = o->kind, .op = o->id, .in = o->in, .out = o->out, .weight = 1 };
    if (o->kind == CLIENT_DECLARE)
        e.spec = &w->cfg.tensor[o->tensor].spec;
    else
        e.tensor = m->tensor[o->tensor];
    if (o->counted)
        m->waiting++;
    member_event(w, p, &e);
}

static void run(struct world *w, void *arg, uint64_t n);

static void run_later(struct world *w, struct proc *p, uint64_t delay)
{
    world_at(w, w->now + delay, p, run, p, (uint64_t)p->member->phase);
}

static void phase_set(struct world *w, struct proc *p, enum app_phase phase, uint64_t delay)
{
    p->member->phase = phase;
    run_later(w, p, delay);
}

/* ---- before the first step ---- */

static void declare_all(struct world *w, struct proc *p)
{
    uint32_t first = (uint32_t)rng_below(&w->rng, w->cfg.ntensors);
    for (uint32_t i = 0; i < w->cfg.ntensors && p->alive && !w->failed; i++) {
        struct op *o = op_new(w, p, CLIENT_DECLARE, (first + i) % w->cfg.ntensors);
        o->counted = true;
        op_submit(w, p, o);
    }
}

static void init_all(struct world *w, struct proc *p)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->cfg.ntensors && p->alive && !w->failed; i++) {
        if (w->cfg.tensor[i].spec.kind != TENSOR_PARAM)
            continue;
        struct op *o = op_new(w, p, CLIENT_INIT, i);
        o->in = mem_alloc(tensor_size(w, i));
        value_initial(w, i, o->in);
        o->counted = true;
        n++;
        op_submit(w, p, o);
    }
    if (!n)
        phase_set(w, p, APP_READY, 1);
}

/* ---- a step ---- */

static void leave(struct world *w, struct proc *p)
{
    p->member->phase = APP_LEAVING;
    w->stats.leaves++;
    world_note(w, "%s leaves before step %ld", p->name, (long)p->member->step);
    op_submit(w, p, op_new(w, p, CLIENT_LEAVE, 0));
}

static bool pulls(const struct world *w, const struct member *m, uint32_t tensor, bool sync)
{
    if (sync && w->cfg.tensor[tensor].spec.kind != TENSOR_PARAM)
        return false;
    return draw(w, m->index * 8 + tensor, (uint64_t)m->step, 4) % 100 < 35;
}

static void begin_step(struct world *w, struct proc *p)
{
    struct member *m = p->member;
    m->step = client_core_step_now(m->core);
    if (m->step >= w->target || (m->step >= SIM_STEP_LAST && !w->calm)) {
        m->phase = APP_IDLE;
        return;
    }
    if (m->want_leave) {
        leave(w, p);
        return;
    }
    m->phase = APP_PULL;
    m->next_push = 0;
    bool sync = step_is_sync(m);
    for (uint32_t i = 0; i < w->cfg.ntensors && p->alive && !w->failed; i++) {
        if (!pulls(w, m, i, sync))
            continue;
        struct op *o = op_new(w, p, CLIENT_PULL, i);
        o->out = mem_alloc(tensor_size(w, i));
        o->counted = true;
        op_submit(w, p, o);
    }
    if (p->alive && !w->failed && m->waiting == 0)
        phase_set(w, p, APP_PUSH, 1 + rng_below(&w->rng, m->speed_us));
}

static void push_one(struct world *w, struct proc *p, uint32_t tensor)
{
    struct member *m = p->member;
    bool sync = step_is_sync(m);
    struct op *o = op_new(w, p, CLIENT_PUSH, tensor);
    history_pushed(w, m->index, tensor, m->step);
    o->seq = w->history.member[m->index].pushed[tensor];
    o->in = mem_alloc(tensor_size(w, tensor));
    value_push(w, m->index, tensor, o->seq, m->step, o->in);
    if (draw(w, m->index * 8 + tensor, (uint64_t)m->step, 5) % 100 < (sync ? 60 : 15))
        o->out = mem_alloc(tensor_size(w, tensor));
    o->counted = sync;
    op_submit(w, p, o);
}

static void push_next(struct world *w, struct proc *p)
{
    struct member *m = p->member;
    uint32_t start = (uint32_t)(draw(w, m->index, (uint64_t)m->step, 6) % w->cfg.ntensors);
    while (m->next_push < w->cfg.ntensors * 2) {
        uint32_t tensor = (start + m->next_push / 2) % w->cfg.ntensors, turn = m->next_push % 2;
        m->next_push++;
        if (turn >= app_push_count(w, m->index, tensor, m->step))
            continue;
        push_one(w, p, tensor);
        if (p->alive && !w->failed)
            run_later(w, p, rng_below(&w->rng, 1 + m->speed_us / 4));
        return;
    }
    phase_set(w, p, APP_END, 1);
}

static void set_rate(struct world *w, struct proc *p)
{
    struct member *m = p->member;
    double rate = app_rate(w, m->index, m->step);
    if (rate == 0)
        return;
    struct client_event e = { .kind = CLIENT_OPTION };
    e.setting.group = hash_bytes("default", 7);
    e.setting.option = 1;   /* OPT_LR */
    e.setting.value = rate;
    member_event(w, p, &e);
}

static void end_step(struct world *w, struct proc *p)
{
    struct member *m = p->member;
    set_rate(w, p);
    struct op *o = op_new(w, p, CLIENT_STEP_END, 0);
    o->counted = true;
    check_ended(w, m->index, m->step);
    op_submit(w, p, o);
}

static void run(struct world *w, void *arg, uint64_t n)
{
    struct proc *p = arg;
    struct member *m = p->member;
    if ((uint64_t)m->phase != n)
        return;
    switch (m->phase) {
    case APP_DECLARE: declare_all(w, p); break;
    case APP_INIT: init_all(w, p); break;
    case APP_READY:
        if (m->nops <= (m->want_leave ? 0 : OUTSTANDING_MAX))
            begin_step(w, p);
        break;
    case APP_PUSH: push_next(w, p); break;
    case APP_END: end_step(w, p); break;
    default: break;
    }
}

void app_begin(struct world *w, struct proc *p)
{
    if (p->member->phase == APP_NEW)
        phase_set(w, p, APP_DECLARE, 1);
}

void app_poke(struct world *w, struct proc *p)
{
    if (p->member->phase == APP_IDLE)
        phase_set(w, p, APP_READY, 1);
}

/* ---- answers ---- */

static void waited(struct world *w, struct proc *p)
{
    struct member *m = p->member;
    switch (m->phase) {
    case APP_DECLARE: phase_set(w, p, APP_INIT, 1); break;
    case APP_INIT: phase_set(w, p, APP_READY, 1); break;
    case APP_PULL: phase_set(w, p, APP_PUSH, 1 + rng_below(&w->rng, m->speed_us)); break;
    case APP_END: phase_set(w, p, APP_READY, 1); break;
    default: break;
    }
}

static bool status_expected(const struct op *o, int status)
{
    return status == KS_OK || (o->kind == CLIENT_INIT && status == KS_EEXIST);
}

static void op_check(struct world *w, struct proc *p, const struct op *o)
{
    struct member *m = p->member;
    bool sync = check_mode(w, p, o->step).kind == MODE_SYNC;
    if (o->kind == CLIENT_PULL || (o->kind == CLIENT_PUSH && o->out)) {
        if (sync)
            check_sync_value(w, p, o);
        else
            check_async_value(w, p, o);
    }
    if (o->kind == CLIENT_PUSH && !sync)
        check_acked(w, m->index, o->tensor, o->seq);
    if (o->kind == CLIENT_STEP_END && sync)
        check_sync_finished(w, p, o->step);
}

void app_done(struct world *w, struct proc *p, const struct client_effect *e)
{
    struct member *m = p->member;
    struct op **at = &m->ops;
    while (*at && (*at)->id != e->op)
        at = &(*at)->next;
    struct op *o = *at;
    if (!o) {
        world_fail(w, "I3 operation %lu of %s ends twice", (unsigned long)e->op, p->name);
        return;
    }
    if (e->status == KS_EFENCED)
        return;   /* the process ends; its memory goes with it */
    if (!status_expected(o, e->status)) {
        world_fail(w, "I3 operation %d of live %s (step %ld, tensor %u) ends with %d: %s", (int)o->kind, p->name,
                   (long)o->step, o->tensor, e->status, e->text);
        return;
    }
    if (o->kind == CLIENT_DECLARE)
        m->tensor[o->tensor] = e->tensor;
    op_check(w, p, o);
    *at = o->next;
    m->nops--;
    if (o->kind == CLIENT_LEAVE) {
        m->phase = APP_LEFT;
        m->exit_why = "left";
    } else if (o->counted && --m->waiting == 0) {
        waited(w, p);
    } else if (m->phase == APP_READY && (m->nops == OUTSTANDING_MAX || (m->nops == 0 && m->want_leave))) {
        run_later(w, p, 1);
    }
    op_free(o);
}

void app_free(struct world *w, struct proc *p)
{
    (void)w;
    while (p->member->ops) {
        struct op *o = p->member->ops;
        p->member->ops = o->next;
        op_free(o);
    }
}
