#include "chaos/live/live.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/keepstep_err.h"
#include "server/operator.h"

enum { IN_FLIGHT = 3, LOOK_MS = 500, LOOK_PAUSE_MS = 10, SETTLE_MS = 40000 };

unsigned live_seconds(unsigned short_form)
{
    const char *v = getenv("LIVE_SECONDS");
    unsigned s = v && *v ? (unsigned)strtoul(v, NULL, 10) : short_form;
    alarm((unsigned)rig_ms(s + 150));
    return s;
}

/* Without a wish: always the same in the short form, another one each time in longer ones. */
uint64_t live_seed(const char *what)
{
    const char *v = getenv("LIVE_SEED"), *longer = getenv("LIVE_SECONDS");
    uint64_t seed = v && *v ? strtoull(v, NULL, 10) : longer && *longer ? clock_now_us() % 1000000 : 1;
    fprintf(stderr, "%s: LIVE_SEED=%llu\n", what, (unsigned long long)seed);
    return seed;
}

struct live *live_open(struct rig *r, const char *mode, const char *replicas, const char *durability, const char *servers)
{
    struct live *w = rig_shared(r, sizeof *w);
    w->sync = !strcmp(mode, "sync");
    rig_server_options(r, "--servers", servers, "--loops", "2", "--shards", "6", "--chunk-bytes", "4096", "--mode", mode,
                       "--durability", durability, "--replicas", replicas, "--notice", "25", NULL);
    return w;
}

/* ---- the observer ---- */

static int index_of(const char *name)
{
    char *end;
    long i = name[0] == 's' ? strtol(name + 1, &end, 10) : -1;
    return i >= 0 && i < RIG_SERVERS && name[1] && !*end ? (int)i : -1;
}

static void see_server(struct seen *s, const struct view *v, const struct view_server *server)
{
    int i = index_of(server->name);
    unsigned primaries = 0, backups = 0;
    if (i < 0)
        return;
    for (uint32_t h = 0; h < v->nshards; h++) {
        primaries += v->shard[h].primary == server->id;
        for (uint32_t b = 0; b < v->shard[h].nbackups; b++)
            backups += v->shard[h].backup[b] == server->id;
    }
    s->primaries[i] = primaries;
    s->backups[i] = backups;
    s->id[i] = server->id;
}

static void see(struct seen *s, const struct job_state *j)
{
    const struct view *v = j->view;
    unsigned least = BACKUPS_MAX, joining = 0, members = 0;
    bool listed[RIG_SERVERS] = {false};
    for (uint32_t h = 0; v && h < v->nshards; h++) {
        least = v->shard[h].nbackups < least ? v->shard[h].nbackups : least;
        joining += v->shard[h].njoining;
    }
    for (uint32_t i = 0; v && i < v->nmembers; i++)
        members += v->member[i].live;
    for (uint32_t i = 0; v && i < v->nservers; i++) {
        int at = index_of(v->server[i].name);
        if (at >= 0)
            listed[at] = true;
        see_server(s, v, &v->server[i]);
    }
    for (unsigned i = 0; i < RIG_SERVERS; i++)
        if (!listed[i])
            s->id[i] = 0;
    s->least_backups = least;
    s->joining = joining;
    s->nmembers = members;
    s->nservers = v ? v->nservers : 0;
    s->epoch = v ? v->epoch : 0;
    s->leader = j->has_leader ? j->leader.server.id : 0;
    s->looks++;
}

static void observer(struct rig_self *self)
{
    struct live *w = self->arg;
    struct operator *o;
    struct operator_config c = {self->rig->coord, self->rig->job, self->rig->token};
    char err[ERR_TEXT];
    RIG_MUST(NULL, operator_open(&c, &o, err) == 0);
    for (;;) {
        struct job_state s;
        if (operator_read(o, LOOK_MS, &s, err)) {
            w->seen.failed++;
            continue;
        }
        see(&w->seen, &s);
        job_state_done(&s);
        for (int i = 0; i < LOOK_PAUSE_MS; i++)
            rig_pause();
    }
}

void live_observe(struct rig *r, struct live *w)
{
    const char *netns = r->worker_netns;
    r->worker_netns = NULL;
    w->observer = rig_worker_start(r, observer, w);
    r->worker_netns = netns;
}

void live_look(struct rig *r, const struct live *w)
{
    uint64_t next = w->seen.looks + 2;
    RIG_UNTIL(r, w->seen.looks >= next);
}

int live_leader(const struct live *w)
{
    uint64_t id = w->seen.leader;
    for (int i = 0; id && i < RIG_SERVERS; i++)
        if (w->seen.id[i] == id)
            return i;
    return -1;
}

bool live_is_settled(const struct rig *r, const struct live *w, unsigned replicas, const uint64_t *forbidden)
{
    unsigned running = 0, most;
    for (unsigned i = 0; i < r->nservers; i++) {
        uint64_t id = w->seen.id[i];
        if (!r->server[i].pid != !id || (id && forbidden && forbidden[i] == id))
            return false;
        running += id != 0;
    }
    most = running ? running - 1 : 0;
    return w->seen.nservers == running && w->seen.joining == 0 &&
           w->seen.least_backups >= (replicas < most ? replicas : most);
}

static void unsettled_tell(struct rig *r, const struct live *w)
{
    fprintf(stderr, "epoch %llu, %u servers, %u members, %u joining, %u backups at the least, leader %d\n",
            (unsigned long long)w->seen.epoch, w->seen.nservers, w->seen.nmembers, w->seen.joining, w->seen.least_backups,
            live_leader(w));
    for (unsigned i = 0; i < r->nservers; i++)
        fprintf(stderr, "s%u: %s, id %llu, %u primaries, %u backups\n", i, r->server[i].pid ? "runs" : "does not run",
                (unsigned long long)w->seen.id[i], w->seen.primaries[i], w->seen.backups[i]);
}

void live_settled(struct rig *r, struct live *w, unsigned replicas, const uint64_t *forbidden)
{
    uint64_t end = clock_now_us() + (uint64_t)rig_ms(SETTLE_MS) * 1000;
    for (;;) {
        live_look(r, w);
        if (live_is_settled(r, w, replicas, forbidden))
            return;
        if (clock_now_us() > end) {
            unsettled_tell(r, w);
            RIG_FAIL(r, "the servers that run do not become the holders of everything");
        }
    }
}

/* ---- a member ---- */

static void fill(int64_t *out, unsigned life, int64_t value)
{
    memset(out, 0, LIVE_N * sizeof *out);
    for (unsigned c = 0; c < LIVE_CHUNKS; c++)
        out[c * LIVE_LIVES + life] = value;
}

static struct ks_tensor *tensor(struct ks_job *j, unsigned i)
{
    char name[16];
    snprintf(name, sizeof name, "p%u", i);
    return i < LIVE_PARAMS ? rig_tensor(j, name, KS_I64, LIVE_N, KS_PARAM, "add")
                           : rig_tensor(j, "sum", KS_I64, LIVE_N, KS_REDUCE, NULL);
}

static unsigned life_new(struct live *w, const struct ks_job *j)
{
    unsigned l = atomic_fetch_add(&w->next_life, 1);
    RIG_MUST(j, l < LIVE_LIVES);
    return l;
}

/* All of a step or nothing of it; the same for all. */
static void step_check(struct live *w, const struct ks_job *j, int64_t step, unsigned life, int64_t value, const int64_t *sum)
{
    uint64_t hash = hash_bytes(sum, LIVE_N * sizeof *sum) | 1, none = 0;
    for (unsigned i = LIVE_LIVES; i < LIVE_N; i++)
        RIG_MUST(j, sum[i] == sum[i % LIVE_LIVES]);
    RIG_MUST(j, sum[life] == value);
    RIG_MUST(j, step < LIVE_STEPS_MAX);
    RIG_MUST(j, atomic_compare_exchange_strong(&w->result_of_step[step], &none, hash) || none == hash);
}

/* A member that was taken for dead goes on as a new life. */
static bool fenced(const struct ks_job *j, int rc)
{
    RIG_MUST(j, rc == KS_OK || rc == KS_EFENCED);
    return rc == KS_EFENCED;
}

static int sync_step(struct live *w, struct ks_job *j, struct ks_tensor **t, unsigned life, int64_t value)
{
    static int64_t in[LIVE_N], out[LIVE_PARAMS + 1][LIVE_N];
    struct ks_handle *h[LIVE_PARAMS + 1];
    int64_t step = ks_step(j);
    int worst = 0;
    fill(in, life, value);
    atomic_fetch_add(&w->life[life].pushed, value);
    for (unsigned i = 0; i <= LIVE_PARAMS; i++) {
        int rc = ks_push_pull(t[i], in, out[i], 1.0, &h[i]);
        h[i] = rc ? NULL : h[i];
        worst = fenced(j, rc) ? rc : worst;
    }
    worst = fenced(j, ks_step_end(j)) ? KS_EFENCED : worst;
    for (unsigned i = 0; i <= LIVE_PARAMS; i++)
        if (h[i] && fenced(j, ks_wait(h[i], -1)))
            worst = KS_EFENCED;
    if (worst)
        return worst;
    step_check(w, j, step, life, value, out[LIVE_PARAMS]);
    for (unsigned i = 0; i < LIVE_PARAMS; i++)
        for (unsigned k = LIVE_LIVES; k < LIVE_N; k++)
            RIG_MUST(j, out[i][k] == out[i][k % LIVE_LIVES]);
    atomic_fetch_add(&w->life[life].acked, value);
    return 0;
}

/* What was acknowledged before is seen by a pull after it. */
static int own_pushes_seen(struct ks_job *j, struct ks_tensor *t, unsigned life, int64_t acked)
{
    static int64_t now[LIVE_N];
    struct ks_handle *h;
    if (fenced(j, ks_pull(t, now, &h)) || fenced(j, ks_wait(h, -1)))
        return KS_EFENCED;
    for (unsigned c = 0; c < LIVE_CHUNKS; c++)
        RIG_MUST(j, now[c * LIVE_LIVES + life] >= acked);
    return 0;
}

static int async_step(struct live *w, struct ks_job *j, struct ks_tensor **t, unsigned life, int64_t value)
{
    static int64_t in[IN_FLIGHT][LIVE_N];
    struct ks_handle *h[IN_FLIGHT][LIVE_PARAMS + 1];
    int worst = 0;
    for (unsigned f = 0; f < IN_FLIGHT; f++) {
        fill(in[f], life, value);
        atomic_fetch_add(&w->life[life].pushed, value);
        for (unsigned i = 0; i <= LIVE_PARAMS; i++) {
            int rc = ks_push(t[i], in[f], 1.0, &h[f][i]);
            h[f][i] = fenced(j, rc) ? NULL : h[f][i];
        }
    }
    for (unsigned f = 0; f < IN_FLIGHT; f++) {
        int mine = 0;
        for (unsigned i = 0; i <= LIVE_PARAMS; i++)
            if (!h[f][i] || fenced(j, ks_wait(h[f][i], -1)))
                mine = KS_EFENCED;
        if (mine == 0)
            atomic_fetch_add(&w->life[life].acked, value);
        worst = mine ? mine : worst;
    }
    if (!worst)
        worst = own_pushes_seen(j, t[0], life, w->life[life].acked);
    return fenced(j, ks_step_end(j)) ? KS_EFENCED : worst;
}

void live_member(struct rig_self *s)
{
    struct live *w = s->arg;
    struct ks_tensor *t[LIVE_PARAMS + 1];
    struct ks_job *j = rig_open(s);
    unsigned life = life_new(w, j);
    for (unsigned i = 0; i <= LIVE_PARAMS; i++)
        t[i] = tensor(j, i);
    for (int64_t n = 0; !w->stop && !w->leave[s->index]; n++) {
        int rc = (w->sync ? sync_step : async_step)(w, j, t, life, 1 + n % 5);
        if (rc == KS_EFENCED) {
            life = life_new(w, j);
            continue;
        }
        atomic_fetch_add(&w->life[life].steps, 1);
        w->worker_steps[s->index]++;
        for (unsigned i = 0; i < w->pause_ms; i++)
            rig_pause();
    }
    int rc = ks_leave(j, -1);
    w->life[life].ended_well = !fenced(j, rc);
    ks_close(j);
}

/* ---- the end ---- */

static void reader(struct rig_self *s)
{
    struct live *w = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_handle *h;
    for (unsigned i = 0; i < (w->sync ? LIVE_PARAMS : LIVE_PARAMS + 1u); i++) {
        RIG_OK(j, ks_pull(tensor(j, i), i < LIVE_PARAMS ? w->final[i] : w->running, &h));
        RIG_OK(j, ks_wait(h, -1));
    }
    w->read = true;
    ks_close(j);
}

int64_t live_steps(const struct live *w)
{
    int64_t n = 0;
    unsigned lives = w->next_life;
    for (unsigned l = 0; l < lives && l < LIVE_LIVES; l++)
        n += w->life[l].steps;
    return n;
}

void live_goes_on(struct rig *r, const struct live *w, int64_t steps, int64_t ms)
{
    int64_t next = live_steps(w) + steps;
    RIG_UNTIL_MS(r, live_steps(w) >= next, ms);
}

static void check_sums(struct rig *r, const struct live *w, const int64_t *sum, const char *what)
{
    for (unsigned i = 0; i < LIVE_N; i++) {
        const struct live_life *l = &w->life[i % LIVE_LIVES];
        int64_t acked = l->acked, pushed = l->pushed;
        if (sum[i] < acked || sum[i] > pushed || (l->ended_well && acked != pushed))
            RIG_FAIL(r, "%s: life %u, chunk %u: %lld is applied, %lld acknowledged, %lld pushed%s", what, i % LIVE_LIVES,
                     i / LIVE_LIVES, (long long)sum[i], (long long)acked, (long long)pushed,
                     l->ended_well ? " (ended well)" : "");
        if (w->sync && sum[i] != sum[i % LIVE_LIVES])
            RIG_FAIL(r, "%s: life %u: chunk %u has %lld, chunk 0 %lld", what, i % LIVE_LIVES, i / LIVE_LIVES,
                     (long long)sum[i], (long long)sum[i % LIVE_LIVES]);
    }
}

static bool members_done(const struct rig *r, const struct live *w)
{
    for (unsigned i = 0; i < r->nworkers; i++)
        if (r->worker[i].pid && i != w->observer)
            return false;
    return true;
}

static bool servers_done(const struct rig *r)
{
    unsigned run = 0;
    for (unsigned i = 0; i < r->nservers; i++)
        run += r->server[i].pid != 0;
    return run == 0;
}

void live_end(struct rig *r, struct live *w)
{
    char text[RIG_TEXT];
    w->stop = true;
    RIG_UNTIL_MS(r, members_done(r, w), 40000);
    rig_worker_done(r, rig_worker_start(r, reader, w));
    RIG_ASSERT(r, w->read);
    for (unsigned i = 0; i < LIVE_PARAMS; i++)
        check_sums(r, w, w->final[i], "parameter");
    if (!w->sync)
        check_sums(r, w, w->running, "running sum");
    for (unsigned i = 0; i < r->nservers; i++)
        r->server[i].may_end = true;
    if (rig_command(r, text, "stop", NULL))
        RIG_FAIL(r, "keepstep stop: %s", text);
    RIG_UNTIL(r, servers_done(r));
    for (unsigned i = 0; i < r->nservers; i++)
        if (r->server[i].ended && r->server[i].status)
            RIG_FAIL(r, "server %u ended with %x when the job was stopped", i, (unsigned)r->server[i].status);
}
