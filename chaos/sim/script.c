/* script.c - the simulator's world told step by step. */
#include "chaos/sim/script.h"

#include <stdio.h>
#include <string.h>
#include "base/log.h"

enum { PATIENCE_MS = 60000 };

static struct sim_config config(const struct script *s)
{
    struct sim_config c = { .nservers = s->servers ? s->servers : 1, .nloops = s->loops ? s->loops : 1,
                            .nmembers = s->members ? s->members : 2, .nshards = s->shards ? s->shards : 4,
                            .ntensors = s->tensors ? s->tensors : 2, .durable = !s->in_memory, .mode = s->mode };
    struct rng r = { 7 };
    if (!c.mode.kind)
        c.mode.kind = MODE_SYNC;
    c.delay_us = 200;
    c.disk_us = 500;
    c.compute_us = (s->compute_ms ? s->compute_ms : 2) * 1000;
    c.lease_ms = 400;
    c.suspect_ms = 60;
    c.batch_ms = 5;
    c.report_ms = 150;
    config_tensors(&c, &r);
    return c;
}

struct world *script_begin(struct script s)
{
    struct sim_config c = config(&s);
    struct sim_options o = { .seed = 1, .config = &c, .quiet_net = true };
    log_level_set(LOG_OFF);
    return world_create(&o);
}

bool script_until(struct world *w, bool (*holds)(const struct world *w, void *arg), void *arg)
{
    uint64_t end = w->now + PATIENCE_MS * SIM_MS;
    while (!holds(w, arg)) {
        if (!world_step(w))
            return false;
        if (w->now > end)
            world_fail(w, "I6 the script waits in vain");
    }
    return true;
}

static bool time_is(const struct world *w, void *arg)
{
    return w->now >= *(uint64_t *)arg;
}

void script_run_ms(struct world *w, uint64_t ms)
{
    uint64_t end = w->now + ms * SIM_MS;
    script_until(w, time_is, &end);
}

static bool step_over(const struct world *w, void *arg)
{
    int64_t step = *(int64_t *)arg;
    if (w->history.finished >= step)
        return true;
    for (uint32_t i = 0; i < w->nmembers; i++)
        if (w->cfg.mode.kind != MODE_SYNC && w->history.member[i].ended >= step)
            return true;
    return false;
}

bool script_until_step(struct world *w, int64_t step)
{
    return script_until(w, step_over, &step);
}

struct moment {
    enum fault_trigger trigger;
    uint32_t before;
};

static bool moment_came(const struct world *w, void *arg)
{
    const struct moment *m = arg;
    return w->moments[m->trigger] > m->before;
}

bool script_until_moment(struct world *w, enum fault_trigger t)
{
    struct moment m = { t, w->moments[t] };
    return script_until(w, moment_came, &m);
}

static bool is_listed(const struct world *w, void *arg)
{
    return w->history.member[*(uint32_t *)arg].live;
}

bool script_until_listed(struct world *w, uint32_t member)
{
    return script_until(w, is_listed, &member);
}

static bool is_removed(const struct world *w, void *arg)
{
    return w->history.member[*(uint32_t *)arg].gone_epoch != 0;
}

bool script_until_removed(struct world *w, uint32_t member)
{
    return script_until(w, is_removed, &member);
}

struct half {
    uint32_t member;
    int64_t step;
};

static bool is_half_pushed(const struct world *w, void *arg)
{
    const struct half *h = arg;
    const struct known_member *m = &w->history.member[h->member];
    for (uint32_t t = 0; t < w->cfg.ntensors; t++) {
        uint32_t n = m->pushed[t];
        if (n && m->stamp[t][n - 1] >= h->step && m->ended < m->stamp[t][n - 1])
            return true;
    }
    return false;
}

bool script_until_half_pushed(struct world *w, uint32_t member, int64_t step)
{
    struct half h = { member, step };
    return script_until(w, is_half_pushed, &h);
}

struct proc *script_member(struct world *w, uint32_t index)
{
    return world_proc(w, w->history.member[index].id);
}

struct proc *script_server(struct world *w, uint32_t machine)
{
    return w->machine[machine].proc;
}

struct proc *script_leader(struct world *w)
{
    struct proc *p = w->leader ? world_proc(w, w->leader) : NULL;
    return p && p->alive ? p : NULL;
}

void script_kill_member(struct world *w, uint32_t index)
{
    member_kill(w, script_member(w, index), "killed");
}

void script_kill_server(struct world *w, struct proc *p)
{
    server_kill(w, p, "killed");
}

void script_stall(struct world *w, uint32_t member, uint64_t ms)
{
    struct proc *p = script_member(w, member);
    for (uint32_t i = 0; i < p->nlinks; i++)
        link_stall(w, p->links[i], true, w->now + ms * SIM_MS);
}

int script_end(struct world *w)
{
    if (!w->failed && !w->calm)
        world_calm(w);
    if (!w->failed)
        world_run_out(w);
    int failed = w->failed;
    if (failed)
        printf("%.3f ms: %s\n", (double)w->now / 1e3, w->why);
    world_free(w);
    return failed;
}
