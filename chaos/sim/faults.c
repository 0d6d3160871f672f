/* faults.c - numbered faults. Each has its own random numbers, so that muting one changes no other.
 *
 * A fault comes at its time, or at the next moment after it that hurts most (a view was just written, a PREPARE was
 * just taken, a batch became durable and nobody knows yet ...). Servers of a job with neither durability nor replicas never
 * lose their memory, since nothing could bring it back. Of those that do, mostly another holder of every shard is left. */
#include "chaos/sim/sim.h"

static const char *const names[FAULT_KINDS] = {
    "kill server", "pause server", "kill member", "pause member", "break connection", "new member", "member leaves",
    "member suspected", "server suspected", "partition", "store outage", "cut from store", "watch lost", "change of mode",
    "slow disks", "kill leader", "pause leader", "lose answer of the next view", "next view is written late",
    "connection stalls", "leader's connections stall", "server lost for good", "server loses its data", "new server",
    "server is drained",
};

const char *fault_name(enum fault_kind k)
{
    return names[k];
}

/* May a server be taken for dead? */
static bool expendable(const struct world *w)
{
    return w->cfg.durable || w->cfg.replicas;
}

static bool possible(const struct world *w, enum fault_kind k)
{
    if (k == FAULT_LOSE_SERVER || k == FAULT_EMPTY_SERVER)
        return w->cfg.replicas > 0;
    bool risky = k == FAULT_KILL_SERVER || k == FAULT_PAUSE_SERVER || k == FAULT_SUSPECT_SERVER || k == FAULT_KILL_LEADER ||
           k == FAULT_PAUSE_LEADER || k == FAULT_STORE_CUT || k == FAULT_STALL_LEADER;
    return !risky || expendable(w);
}

static enum fault_kind kind_draw(const struct world *w, struct rng *r)
{
    static const uint8_t weight[FAULT_KINDS] = {
        [FAULT_KILL_SERVER] = 12, [FAULT_PAUSE_SERVER] = 6, [FAULT_KILL_MEMBER] = 12, [FAULT_PAUSE_MEMBER] = 5,
        [FAULT_BREAK] = 10, [FAULT_JOIN] = 12, [FAULT_LEAVE] = 7, [FAULT_SUSPECT_MEMBER] = 5, [FAULT_SUSPECT_SERVER] = 2,
        [FAULT_PARTITION] = 8, [FAULT_OUTAGE] = 3, [FAULT_STORE_CUT] = 4, [FAULT_RESYNC] = 2, [FAULT_MODE] = 0,
        [FAULT_SLOW_DISK] = 3, [FAULT_KILL_LEADER] = 5, [FAULT_PAUSE_LEADER] = 4, [FAULT_LOSE_CAS_ANSWER] = 3,
        [FAULT_LATE_CAS] = 3, [FAULT_STALL] = 8, [FAULT_STALL_LEADER] = 4, [FAULT_LOSE_SERVER] = 8,
        [FAULT_EMPTY_SERVER] = 8, [FAULT_NEW_SERVER] = 6, [FAULT_DRAIN] = 6,
    };
    uint32_t total = w->cfg.mode_changes ? 25 : 0;
    for (int k = 0; k < FAULT_KINDS; k++)
        total += possible(w, (enum fault_kind)k) ? weight[k] : 0;
    uint64_t at = rng_below(r, total);
    for (int k = 0; k < FAULT_KINDS; k++) {
        uint32_t mine = possible(w, (enum fault_kind)k) ? weight[k] : 0;
        if (at < mine)
            return (enum fault_kind)k;
        at -= mine;
    }
    return FAULT_MODE;
}

static enum fault_trigger trigger_draw(enum fault_kind k, struct rng *r)
{
    bool lasting = k == FAULT_JOIN || k == FAULT_NEW_SERVER || k == FAULT_DRAIN || k == FAULT_OUTAGE || k == FAULT_SLOW_DISK || k == FAULT_LOSE_CAS_ANSWER ||
                   k == FAULT_LATE_CAS;
    if (lasting || rng_chance(r, 550))
        return TRIGGER_TIME;
    return (enum fault_trigger)(1 + rng_below(r, TRIGGERS - 1));
}

void faults_draw(struct world *w)
{
    uint64_t t = w->cfg.faults_from;
    w->nfaults = w->cfg.nfaults;
    for (uint32_t i = 0; i < w->nfaults; i++) {
        struct fault *f = &w->fault[i];
        f->rng.state = hash_mix(w->opt.seed * 1000 + i + 7);
        f->kind = kind_draw(w, &f->rng);
        f->trigger = trigger_draw(f->kind, &f->rng);
        t += rng_below(&f->rng, rng_chance(&f->rng, 450) ? 2 * w->cfg.faults_span / w->nfaults : 5 * SIM_MS);
        f->at = t;
    }
}

/* ---- targets ---- */

static struct proc *pick(const struct world *w, struct rng *r, enum proc_kind kind)
{
    struct proc *found = NULL;
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->nprocs; i++)
        if (w->proc[i]->alive && w->proc[i]->kind == kind && rng_below(r, ++n) == 0)
            found = w->proc[i];
    return found;
}

static struct proc *leader(const struct world *w)
{
    struct proc *p = w->leader ? world_proc(w, w->leader) : NULL;
    return p && p->alive ? p : NULL;
}

static uint64_t pause_length(const struct world *w, struct rng *r, const struct proc *p)
{
    if (p->kind == PROC_SERVER && !expendable(w))
        return SIM_MS + rng_below(r, 30 * SIM_MS);
    return 5 * SIM_MS + rng_below(r, rng_chance(r, 500) ? 60 * SIM_MS : 700 * SIM_MS);
}

/* ---- what happens ---- */

/* Where the moment was, or anywhere. */
static struct proc *target(const struct world *w, struct fault *f, enum proc_kind kind)
{
    if (f->at_proc && f->at_proc->alive && f->at_proc->kind == kind)
        return f->at_proc;
    return pick(w, &f->rng, kind);
}

/* Does every shard that p holds have another holder that is well? */
static bool spare(const struct world *w, const struct proc *p)
{
    uint32_t others = 0;
    for (uint32_t i = 0; i < w->nmachines; i++)
        others += w->machine[i].proc && w->machine[i].proc != p && !w->machine[i].draining;
    if (!others || !w->view)
        return false;
    for (uint32_t s = 0; s < w->view->nshards; s++) {
        const struct view_shard *x = &w->view->shard[s];
        struct sim_loop *l;
        bool left = x->primary != p->id && shard_server(w, x->primary, s, &l);
        for (uint32_t i = 0; i < x->nbackups; i++)
            left = left || (x->backup[i] != p->id && shard_server(w, x->backup[i], s, &l));
        if (!left)
            return false;
    }
    return true;
}

/* Seldom the last holder goes too: the run is lost then. Somebody has to be there when faults are over. */
static void end_server(struct world *w, struct rng *r, struct proc *p, enum server_end how)
{
    bool ruthless = rng_chance(r, 30);
    bool forgets = how != END_RETURNS || !w->cfg.durable;
    if (!p || (forgets && !spare(w, p) && !(ruthless && how != END_FOR_GOOD)))
        return;
    w->stats.kills++;
    w->stats.machines_lost += how == END_FOR_GOOD;
    w->stats.disks_lost += forgets;
    server_end(w, p, "killed", how);
}

/* A signal to the server itself, or a word of the operator to any. The last one stays. */
static void drain(struct world *w, struct rng *r)
{
    struct proc *p = pick(w, r, PROC_SERVER), *by = rng_chance(r, 500) ? p : pick(w, r, PROC_SERVER);
    uint32_t others = 0;
    for (uint32_t i = 0; i < w->nmachines; i++)
        others += w->machine[i].proc && w->machine[i].proc != p && !w->machine[i].draining;
    if (!p || !others || p->server->machine->draining || !w->view)
        return;
    w->stats.drains++;
    p->server->machine->draining = true;
    world_note(w, "%s is to be drained (%s is told)", p->name, by->name);
    struct ctl_event e = { .kind = CTL_DRAIN, .id = p->id, .text = "" };
    server_event(w, by, &e);
}

static void new_server(struct world *w)
{
    struct machine *m = machine_new(w);
    if (!m)
        return;
    w->stats.machines_new++;
    server_start(w, m);
}

static void kill_member(struct world *w, struct rng *r)
{
    struct proc *p = pick(w, r, PROC_MEMBER);
    if (!p)
        return;
    w->stats.member_kills++;
    member_kill(w, p, "killed");
    if (rng_chance(r, 500))
        member_start(w);
}

static struct link *pick_link(const struct world *w, struct rng *r)
{
    struct link *found = NULL;
    uint32_t n = 0;
    for (struct link *l = w->links; l; l = l->next)
        if (!l->gone && !l->broken && (expendable(w) || l->connector->kind == PROC_MEMBER) && rng_below(r, ++n) == 0)
            found = l;
    return found;
}

static uint64_t stall_end(const struct world *w, struct rng *r)
{
    return w->now + 5 * SIM_MS + rng_below(r, rng_chance(r, 500) ? 50 * SIM_MS : 1000 * SIM_MS);
}

/* One direction of a connection, or everything that a server sends to members. */
static void stall_link(struct world *w, struct rng *r)
{
    struct link *l = pick_link(w, r);
    bool to_connector = rng_chance(r, 600), all = rng_chance(r, 400);
    struct proc *s = all ? pick(w, r, PROC_SERVER) : NULL;
    if (l && !s) {
        link_stall(w, l, to_connector, stall_end(w, r));
        l->connector->faulted = l->listener->faulted = true;
    }
    for (uint32_t i = 0; s && i < s->nlinks; i++) {
        if (s->links[i]->control || !rng_chance(r, 700))
            continue;
        link_stall(w, s->links[i], true, stall_end(w, r));
        s->links[i]->connector->faulted = s->links[i]->listener->faulted = true;
    }
}

/* It still reaches the store: what it decides is written, and what it said arrives late. */
static void stall_leader(struct world *w, struct rng *r, struct proc *p)
{
    for (uint32_t i = 0; p && i < p->nlinks; i++)
        if (p->links[i]->control && rng_chance(r, 700)) {
            p->links[i]->connector->faulted = p->links[i]->listener->faulted = true;
            link_stall(w, p->links[i], p == p->links[i]->listener, stall_end(w, r));
        }
    if (p && rng_chance(r, 600))
        proc_pause(w, p, SIM_MS + rng_below(r, 1000 * SIM_MS));
}

static void break_link(struct world *w, struct rng *r)
{
    struct link *found = pick_link(w, r);
    if (!found)
        return;
    w->stats.breaks++;
    found->connector->faulted = found->listener->faulted = true;
    world_note(w, "connection %s - %s (%s) breaks", found->connector->name, found->listener->name,
               found->control ? "control" : "data");
    link_break(w, found);
}

static void leave(struct world *w, struct rng *r)
{
    struct proc *p = pick(w, r, PROC_MEMBER);
    if (p && p->member->started)
        p->member->want_leave = true;
}

static void suspect(struct world *w, struct rng *r, enum proc_kind kind)
{
    struct proc *p = pick(w, r, kind), *at = leader(w), *by = pick(w, r, PROC_SERVER);
    if (!p || !at || p == at)
        return;
    w->stats.suspicions++;
    p->faulted = true;
    world_note(w, "%s tells %s that %s is dead (it is not)", by->name, at->name, p->name);
    struct ctl_event e = { .kind = CTL_SUSPECT, .from = by->id, .id = p->id, .is_server = true, .text = "said so" };
    server_event(w, at, &e);
}

static void partition(struct world *w, struct rng *r)
{
    bool servers = expendable(w) && rng_chance(r, 500);
    struct proc *a = pick(w, r, servers ? PROC_SERVER : PROC_MEMBER), *b = pick(w, r, PROC_SERVER);
    bool turned = rng_chance(r, 500), both = rng_chance(r, 500);
    uint64_t until = w->now + 10 * SIM_MS + rng_below(r, rng_chance(r, 500) ? 60 * SIM_MS : 500 * SIM_MS);
    if (!a || !b || a == b)
        return;
    w->stats.partitions++;
    a->faulted = b->faulted = true;
    net_partition(w, turned ? b : a, turned ? a : b, both, until);
}

static void outage(struct world *w, struct rng *r, bool one)
{
    uint64_t until = w->now + 20 * SIM_MS + rng_below(r, rng_chance(r, 500) ? 100 * SIM_MS : 2500 * SIM_MS);
    struct proc *p = pick(w, r, rng_chance(r, 800) ? PROC_SERVER : PROC_MEMBER);
    if (!one) {
        world_note(w, "the store is down until %.1f ms", (double)until / 1e3);
        store_down(w, until);
    } else if (p) {
        world_note(w, "%s is cut from the store until %.1f ms", p->name, (double)until / 1e3);
        p->faulted = true;
        store_cut(w, p, until);
    }
}

static void mode_change(struct world *w, struct rng *r)
{
    static const enum mode_kind kinds[] = { MODE_SYNC, MODE_SYNC, MODE_SSP, MODE_ASYNC };
    struct proc *p = pick(w, r, PROC_SERVER);
    struct mode m = { .kind = kinds[rng_below(r, 4)] };
    m.bound = m.kind == MODE_SSP ? (uint32_t)rng_below(r, 4) : 0;
    m.from = w->history.finished + (int64_t)rng_below(r, 4);
    m.from = m.from < 1 ? 1 : m.from;
    if (leader(w) && rng_chance(r, 700))
        p = leader(w);
    if (!p)
        return;
    char text[32];
    mode_format(&m, text, sizeof text);
    world_note(w, "%s is asked for mode %s from step %ld on", p->name, text, (long)m.from);
    w->stats.mode_changes++;
    struct ctl_event e = { .kind = CTL_MODE, .from = 0, .mode = m, .text = "" };
    server_event(w, p, &e);
}

static void pause(struct world *w, struct rng *r, struct proc *p)
{
    if (p)
        proc_pause(w, p, pause_length(w, r, p));
}

static void strike(struct world *w, struct fault *f)
{
    struct rng *r = &f->rng;
    struct proc *p;
    switch (f->kind) {
    case FAULT_KILL_SERVER: end_server(w, r, target(w, f, PROC_SERVER), END_RETURNS); break;
    case FAULT_PAUSE_SERVER: pause(w, r, target(w, f, PROC_SERVER)); break;
    case FAULT_KILL_MEMBER: kill_member(w, r); break;
    case FAULT_PAUSE_MEMBER: pause(w, r, pick(w, r, PROC_MEMBER)); break;
    case FAULT_BREAK: break_link(w, r); break;
    case FAULT_JOIN: member_start(w); break;
    case FAULT_LEAVE: leave(w, r); break;
    case FAULT_SUSPECT_MEMBER: suspect(w, r, PROC_MEMBER); break;
    case FAULT_SUSPECT_SERVER: suspect(w, r, PROC_SERVER); break;
    case FAULT_PARTITION: partition(w, r); break;
    case FAULT_OUTAGE: outage(w, r, false); break;
    case FAULT_STORE_CUT: outage(w, r, true); break;
    case FAULT_RESYNC:
        if ((p = pick(w, r, PROC_SERVER)))
            store_resync(w, p);
        break;
    case FAULT_MODE: mode_change(w, r); break;
    case FAULT_SLOW_DISK: w->disk_slow_until = w->now + rng_below(r, 300 * SIM_MS); break;
    case FAULT_KILL_LEADER: end_server(w, r, leader(w), rng_chance(r, 500) ? END_RETURNS : w->cfg.replicas ? END_EMPTY : END_RETURNS); break;
    case FAULT_PAUSE_LEADER: pause(w, r, leader(w)); break;
    case FAULT_LOSE_CAS_ANSWER: w->lose_next_cas_answer = true; break;
    case FAULT_LATE_CAS: w->delay_next_cas = true; break;
    case FAULT_STALL: stall_link(w, r); break;
    case FAULT_STALL_LEADER: stall_leader(w, r, leader(w)); break;
    case FAULT_LOSE_SERVER: end_server(w, r, pick(w, r, PROC_SERVER), END_FOR_GOOD); break;
    case FAULT_EMPTY_SERVER: end_server(w, r, pick(w, r, PROC_SERVER), END_EMPTY); break;
    case FAULT_NEW_SERVER: new_server(w); break;
    case FAULT_DRAIN: drain(w, r); break;
    case FAULT_KINDS: break;
    }
}

static void fault_strike(struct world *w, void *arg, uint64_t n)
{
    struct fault *f = arg;
    if (w->calm || f->done)
        return;
    f->done = true;
    w->stats.faults++;
    world_note(w, "FAULT %lu: %s", (unsigned long)n, names[f->kind]);
    strike(w, f);
}

static void fault_due(struct world *w, void *arg, uint64_t n)
{
    struct fault *f = arg;
    if (f->trigger == TRIGGER_TIME)
        fault_strike(w, f, n);
    else
        w->armed[f->trigger] = f;
}

void fault_trigger(struct world *w, enum fault_trigger t, struct proc *p)
{
    struct fault *f = w->armed[t];
    w->moments[t]++;
    w->moment_of[t] = p;
    if (!f || w->calm)
        return;
    w->armed[t] = NULL;
    if (p && p->alive && rng_chance(&f->rng, 500))
        f->at_proc = p;
    uint64_t delay = rng_chance(&f->rng, 500) ? 0 : rng_below(&f->rng, 3 * SIM_MS);
    world_at(w, w->now + delay, NULL, fault_strike, f, (uint64_t)(f - w->fault));
}

void faults_start(struct world *w)
{
    for (uint32_t i = 0; i < w->nfaults; i++)
        if (!w->opt.muted[i])
            world_at(w, w->fault[i].at, NULL, fault_due, &w->fault[i], i);
}
