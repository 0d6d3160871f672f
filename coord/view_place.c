/* Where holders go: the first placement, what is dropped and added at a change, which shards move.
 *
 * All of it follows from the view, from who is drained and from the job's settings; nothing is remembered between
 * changes. Every step makes the servers more even, or replaces what is missing, so that the steps come to an end. */
#include "coord/view_internal.h"

#include "base/mem.h"
#include "base/mutant.h"

#include <string.h>

struct placing {
    const struct view_core *v;
    struct view *next;                /* its servers stand; the shards are being worked out */
    uint32_t n, degree;               /* servers; backups that a shard is to have */
    bool *usable;                     /* by index: it may get more */
    uint64_t *primaries, *holders;    /* by index: weights of what it leads, of all that it holds or is to hold */
    uint16_t *pairs;                  /* [primary * n + other]: shards that they share */
    struct holding *shard;
};

/* What a shard counts. All the same, until the bytes of each are known here. */
static uint64_t weight(const struct placing *p, uint32_t shard)
{
    (void)p;
    (void)shard;
    return 1;
}

static uint32_t at(const struct placing *p, uint64_t id)
{
    return (uint32_t)(view_server_find(p->next, id) - p->next->server);
}

static bool is_usable(const struct placing *p, uint64_t id)
{
    return p->usable[at(p, id)];
}

static void placing_open(struct placing *p, const struct view_core *v, struct view *next)
{
    uint32_t n = next->nservers, usable = 0;
    *p = (struct placing){.v = v, .next = next, .n = n};
    p->usable = mem_alloc(n * sizeof *p->usable);
    p->primaries = mem_alloc(n * sizeof *p->primaries);
    p->holders = mem_alloc(n * sizeof *p->holders);
    p->pairs = mem_alloc((size_t)n * n * sizeof *p->pairs);
    p->shard = mem_alloc(next->nshards * sizeof *p->shard);
    for (uint32_t i = 0; i < n; i++) {
        p->usable[i] = !view_nodes_draining(v, next->server[i].id);
        usable += p->usable[i];
    }
    p->degree = v->cfg.job.replicas < BACKUPS_MAX ? v->cfg.job.replicas : BACKUPS_MAX;
    if (p->degree >= usable)
        p->degree = usable ? usable - 1 : 0;
}

static void placing_close(struct placing *p)
{
    mem_free(p->usable);
    mem_free(p->primaries);
    mem_free(p->holders);
    mem_free(p->pairs);
    mem_free(p->shard);
}

/* ---- one shard's holders ---- */

static bool holds(const struct holding *s, uint64_t id)
{
    for (uint32_t i = 0; i < s->nbackups; i++)
        if (s->backup[i] == id)
            return true;
    for (uint32_t i = 0; i < s->njoining; i++)
        if (s->joining[i] == id)
            return true;
    return s->primary == id;
}

static uint32_t count_usable(const struct placing *p, const uint64_t *ids, uint32_t n)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        count += is_usable(p, ids[i]);
    return count;
}

/* The backup that goes first: one that is drained, else the one with the most to hold. Index, or -1. */
static int victim(const struct placing *p, const struct holding *s)
{
    int chosen = -1;
    for (uint32_t i = 0; i < s->nbackups; i++) {
        uint32_t x = at(p, s->backup[i]), best = chosen < 0 ? x : at(p, s->backup[chosen]);
        bool sooner = p->usable[x] != p->usable[best] ? !p->usable[x] : p->holders[x] > p->holders[best];
        if (chosen < 0 || sooner)
            chosen = (int)i;
    }
    return chosen;
}

/* Who will give the shard up when all its joiners are backups; -1: nobody. Without backups it is the primary: the joiner
 * takes its place. */
static int leaver(const struct placing *p, const struct holding *s)
{
    if (s->nbackups + s->njoining <= p->degree)
        return -1;
    int i = victim(p, s);
    if (p->degree == 0)
        return (int)at(p, s->primary);
    return i < 0 ? -1 : (int)at(p, s->backup[i]);
}

static void shard_count(struct placing *p, uint32_t h)
{
    const struct holding *s = &p->shard[h];
    uint64_t w = weight(p, h);
    uint32_t lead = at(p, s->primary);
    p->primaries[lead] += w;
    p->holders[lead] += w;
    for (uint32_t i = 0; i < s->nbackups + s->njoining; i++) {
        uint32_t x = at(p, i < s->nbackups ? s->backup[i] : s->joining[i - s->nbackups]);
        p->holders[x] += w;
        p->pairs[(size_t)lead * p->n + x]++;
    }
}

/* ---- dropping ---- */

/* Would it even things out if the shard was led by `to`? */
static bool move_helps(const struct placing *p, uint32_t h, uint64_t to)
{
    uint32_t from = at(p, p->shard[h].primary), x = at(p, to);
    if (!p->usable[x])
        return false;
    return !p->usable[from] || p->primaries[from] > p->primaries[x] + weight(p, h);
}

static void move_count(struct placing *p, uint32_t h, uint64_t to)
{
    p->primaries[at(p, p->shard[h].primary)] -= weight(p, h);
    p->primaries[at(p, to)] += weight(p, h);
}

/* Joiners that are drained, and backups beyond what is wanted. A job without backups keeps one that is on its way to
 * become the primary. */
static void shard_trim(struct placing *p, uint32_t h)
{
    struct holding *s = &p->shard[h];
    uint32_t limit = p->degree, n = 0;
    for (uint32_t i = 0; i < s->njoining; i++) {
        if (is_usable(p, s->joining[i]))
            s->joining[n++] = s->joining[i];
        else
            p->holders[at(p, s->joining[i])] -= weight(p, h);
    }
    s->njoining = n;
    if (limit == 0 && s->nbackups == 1 && move_helps(p, h, s->backup[0])) {
        move_count(p, h, s->backup[0]);
        limit = 1;
    }
    while (s->nbackups > limit) {
        int i = victim(p, s);
        p->holders[at(p, s->backup[i])] -= weight(p, h);
        s->backup[i] = s->backup[--s->nbackups];
    }
    int x = leaver(p, s);
    if (x >= 0)
        p->holders[x] -= weight(p, h);
}

/* ---- adding ---- */

/* For a backup more of a shard that `lead` leads: who has the least to hold, then who shares least with `lead`. -1: none. */
static int candidate(const struct placing *p, const struct holding *s)
{
    uint32_t lead = at(p, s->primary);
    const uint16_t *pairs = p->pairs + (size_t)lead * p->n;
    int chosen = -1;
    for (uint32_t k = 1; k < p->n; k++) {
        uint32_t i = (lead + k) % p->n;
        if (!p->usable[i] || holds(s, p->next->server[i].id))
            continue;
        if (chosen < 0 || p->holders[i] < p->holders[chosen] ||
            (p->holders[i] == p->holders[chosen] && pairs[i] < pairs[chosen]))
            chosen = (int)i;
    }
    return chosen;
}

static void add_joiner(struct placing *p, uint32_t h, uint32_t server)
{
    struct holding *s = &p->shard[h];
    s->joining[s->njoining++] = p->next->server[server].id;
    p->holders[server] += weight(p, h);
    p->pairs[(size_t)at(p, s->primary) * p->n + server]++;
}

/* true: the shard has, without its joiners, all that it is to have. */
static bool replace_lost(struct placing *p, uint32_t h)
{
    struct holding *s = &p->shard[h];
    uint32_t want = p->degree, have = count_usable(p, s->backup, s->nbackups);
    if (!want && !is_usable(p, s->primary))
        want = 1;             /* to move to */
    for (uint32_t all = have + s->njoining; all < want && s->njoining < BACKUPS_MAX; all++) {
        int x = candidate(p, s);
        if (x < 0)
            break;
        add_joiner(p, h, (uint32_t)x);
    }
    return have >= want;
}

/* The shard and the server between which a copy evens out most. false: none does. */
static bool evening(const struct placing *p, uint32_t *ret_shard, uint32_t *ret_to, uint32_t *ret_from)
{
    uint64_t gain = 0;
    for (uint32_t h = 0; h < p->next->nshards; h++) {
        struct holding s = p->shard[h];
        if (s.njoining || s.nbackups > p->degree)
            continue;
        int i = victim(p, &s);
        uint32_t from = p->degree && i >= 0 ? at(p, s.backup[i]) : at(p, s.primary);
        int to = p->degree && i < 0 ? -1 : candidate(p, &s);
        uint64_t w = weight(p, h);
        if (to < 0 || !p->usable[from] || p->holders[from] <= p->holders[to] + w ||
            p->holders[from] - p->holders[to] <= gain)
            continue;
        gain = p->holders[from] - p->holders[to];
        *ret_shard = h;
        *ret_to = (uint32_t)to;
        *ret_from = from;
    }
    return gain > 0;
}

/* A few at a time: copies compete with the training for the network. */
static void even_out(struct placing *p)
{
    uint32_t moving = 0, h, to, from;
    for (h = 0; h < p->next->nshards; h++)
        moving += p->shard[h].njoining > 0 || p->shard[h].nbackups > p->degree;
    for (; moving < MOVES_MAX && evening(p, &h, &to, &from); moving++) {
        p->holders[from] -= weight(p, h);
        add_joiner(p, h, to);
    }
}

/* ---- the whole ---- */

static void shard_write(const struct placing *p, uint32_t h)
{
    const struct holding *s = &p->shard[h];
    struct view_shard *x = &p->next->shard[h];
    const struct view_shard *base = p->v->base ? &p->v->base->shard[h] : NULL;
    *x = (struct view_shard){.primary = s->primary, .nbackups = s->nbackups, .njoining = s->njoining};
    bool kept = base && base->primary == s->primary;
    x->since = kept || (base && MUTANT(44)) ? base->since : p->next->epoch;
    memcpy(x->backup, s->backup, s->nbackups * sizeof *s->backup);
    memcpy(x->joining, s->joining, s->njoining * sizeof *s->joining);
    p->next->short_of_replicas |= s->nbackups < p->v->cfg.job.replicas_min;
}

/* Applies the rules; false: a shard has nobody left. */
static bool take_over(struct placing *p)
{
    uint64_t *busy = mem_alloc(p->n * sizeof *busy);
    bool whole = true;
    for (uint32_t h = 0; h < p->next->nshards; h++) {
        const struct view_server *s = view_server_find(p->next, p->v->base->shard[h].primary);
        if (s)
            busy[s - p->next->server] += weight(p, h);
    }
    for (uint32_t h = 0; h < p->next->nshards && whole; h++) {
        struct holding *s = &p->shard[h];
        view_rules_shard(p->v, p->next, h, busy, s);
        whole = s->primary != 0;
        if (whole && !view_server_find(p->next, p->v->base->shard[h].primary))
            busy[at(p, s->primary)] += weight(p, h);
    }
    mem_free(busy);
    return whole;
}

bool view_place_shards(const struct view_core *v, struct view *next)
{
    struct placing p;
    bool settled = true;
    placing_open(&p, v, next);
    bool whole = take_over(&p);
    if (whole) {
        for (uint32_t h = 0; h < next->nshards; h++)
            shard_count(&p, h);
        for (uint32_t h = 0; h < next->nshards; h++)
            shard_trim(&p, h);
        for (uint32_t h = 0; h < next->nshards; h++)
            settled &= replace_lost(&p, h);
        if (settled)
            even_out(&p);
        for (uint32_t h = 0; h < next->nshards; h++)
            shard_write(&p, h);
    }
    placing_close(&p);
    return whole;
}

static void add_backup(struct placing *p, uint32_t h, uint32_t server)
{
    struct holding *s = &p->shard[h];
    s->backup[s->nbackups++] = p->next->server[server].id;
    p->holders[server] += weight(p, h);
    p->pairs[(size_t)at(p, s->primary) * p->n + server]++;
}

/* There is nothing to copy yet: a backup changes its place at once. */
static void first_even_out(struct placing *p)
{
    uint32_t h, to, from;
    while (p->degree && evening(p, &h, &to, &from)) {
        struct holding *s = &p->shard[h];
        s->backup[victim(p, s)] = s->backup[s->nbackups - 1];
        s->nbackups--;
        p->holders[from] -= weight(p, h);
        p->pairs[(size_t)at(p, s->primary) * p->n + from]--;
        add_backup(p, h, to);
    }
}

/* Primaries go round the servers. */
void view_place_first(struct view_core *v, struct view *next)
{
    struct placing p;
    placing_open(&p, v, next);
    for (uint32_t h = 0; h < next->nshards; h++) {
        p.shard[h].primary = next->server[h % p.n].id;
        shard_count(&p, h);
    }
    for (uint32_t h = 0; h < next->nshards; h++)
        while (p.shard[h].nbackups < p.degree)
            add_backup(&p, h, (uint32_t)candidate(&p, &p.shard[h]));
    first_even_out(&p);
    for (uint32_t h = 0; h < next->nshards; h++)
        shard_write(&p, h);
    placing_close(&p);
}

/* ---- moves ---- */

static void add_move(struct placing *p, struct prepare *prepare, uint32_t h, uint64_t to)
{
    uint32_t k = prepare->nmoves++;
    for (; k > 0 && prepare->move[k - 1].shard > h; k--)
        prepare->move[k] = prepare->move[k - 1];
    prepare->move[k] = (struct shard_move){h, to};
    move_count(p, h, to);
    p->shard[h].primary = to;         /* once in a change is enough */
    p->shard[h].nbackups = 0;
}

/* The least busy backup to which it helps to move. 0: none. */
static uint64_t move_target(const struct placing *p, uint32_t h)
{
    const struct holding *s = &p->shard[h];
    uint64_t chosen = 0;
    for (uint32_t i = 0; i < s->nbackups; i++)
        if (move_helps(p, h, s->backup[i]) &&
            (!chosen || p->primaries[at(p, s->backup[i])] < p->primaries[at(p, chosen)]))
            chosen = s->backup[i];
    return chosen;
}

static void choose_moves(struct placing *p, struct prepare *prepare, bool drained)
{
    for (uint32_t h = 0; h < p->next->nshards && prepare->nmoves < MOVES_MAX; h++) {
        if (!p->shard[h].primary || is_usable(p, p->shard[h].primary) == drained)
            continue;
        uint64_t to = move_target(p, h);
        if (to)
            add_move(p, prepare, h, to);
    }
}

static uint32_t living(const struct view *next, const uint64_t *ids, uint32_t n, uint64_t *ret)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        if (view_server_find(next, ids[i]))
            ret[count++] = ids[i];
    return count;
}

/* Shards whose primary is gone go to somebody anyway; nothing is evened out while that is going on. */
void view_place_moves(const struct view_core *v, struct prepare *prepare)
{
    const struct view *b = v->base;
    struct view *next = view_create(b->nservers + v->nservers, 0, b->nshards);
    struct placing p;
    bool lost = false;
    view_next_servers(v, next);
    placing_open(&p, v, next);
    for (uint32_t h = 0; h < b->nshards; h++) {
        struct holding *s = &p.shard[h];
        if (!view_server_find(next, b->shard[h].primary)) {
            lost = true;
            continue;
        }
        s->primary = b->shard[h].primary;
        s->nbackups = living(next, b->shard[h].backup, b->shard[h].nbackups, s->backup);
        shard_count(&p, h);
    }
    prepare->move = mem_alloc(MOVES_MAX * sizeof *prepare->move);
    choose_moves(&p, prepare, true);
    if (!lost)
        choose_moves(&p, prepare, false);
    placing_close(&p);
    view_free(next);
}

/* ---- is there anything to do? ---- */

static bool same_ids(const uint64_t *a, uint32_t na, const uint64_t *b, uint32_t nb)
{
    return na == nb && memcmp(a, b, na * sizeof *a) == 0;
}

static bool same_shards(const struct view *a, const struct view *b)
{
    for (uint32_t h = 0; h < a->nshards; h++) {
        const struct view_shard *x = &a->shard[h], *y = &b->shard[h];
        if (x->primary != y->primary || !same_ids(x->backup, x->nbackups, y->backup, y->nbackups) ||
            !same_ids(x->joining, x->njoining, y->joining, y->njoining))
            return false;
    }
    return true;
}

static bool drained_listed(const struct view_core *v, const struct view *next)
{
    for (uint32_t i = 0; i < v->base->nservers; i++)
        if (!view_server_find(next, v->base->server[i].id))
            return true;
    return false;
}

static bool plan_wants(const struct view_core *v)
{
    const struct view *b = v->base;
    struct view *next = view_create(b->nservers + v->nservers, 0, b->nshards);
    struct prepare moves = {0};
    view_next_servers(v, next);
    bool wants = drained_listed(v, next) || !view_place_shards(v, next) || !same_shards(next, b);
    if (!wants) {
        view_place_moves(v, &moves);
        wants = moves.nmoves > 0;
        mem_free(moves.move);
    }
    view_free(next);
    return wants;
}

/* Asked only while nobody is gone. */
bool view_place_wanted(struct view_core *v)
{
    if (!v->plan_known) {
        v->plan_wants = plan_wants(v);
        v->plan_known = true;
    }
    return v->plan_wants;
}
