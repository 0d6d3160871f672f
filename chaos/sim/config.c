/* config.c - what a seed decides about its cluster, its job and its application. */
#include "chaos/sim/sim.h"

#include <stdio.h>
#include <string.h>
#include "base/mem.h"

static uint32_t between(struct rng *r, uint32_t low, uint32_t high)
{
    return low + (uint32_t)rng_below(r, high - low + 1);
}

static void draw_mode(struct sim_config *c, struct rng *r, uint32_t forced)
{
    static const enum mode_kind kinds[] = { MODE_SYNC, MODE_SYNC, MODE_SSP, MODE_ASYNC };
    c->mode.kind = kinds[rng_below(r, 4)];
    uint32_t bound = (uint32_t)rng_below(r, 4);
    bool changes = rng_chance(r, 150);
    bool floats = rng_chance(r, 250);
    if (forced)
        c->mode.kind = (enum mode_kind)forced;
    c->mode.bound = c->mode.kind == MODE_SSP ? bound : 0;
    c->mode_changes = changes;
    c->floats = floats && !changes && c->mode.kind == MODE_SYNC;
    c->deterministic = c->floats || rng_chance(r, 300);
    c->many_pushes = c->mode.kind != MODE_SYNC && !changes && rng_chance(r, 500);
}

static void draw_times(struct sim_config *c, struct rng *r)
{
    static const uint32_t delays[] = { 100, 500, 2000, 8000 };
    static const uint32_t disks[] = { 50, 1000, 6000 };
    static const uint32_t computes[] = { 1000, 8000, 30000 };
    c->delay_us = delays[rng_below(r, 4)];
    c->disk_us = disks[rng_below(r, 3)];
    c->compute_us = computes[rng_below(r, 3)];
    c->lease_ms = between(r, 200, 1000);
    c->suspect_ms = between(r, 10, 150);
    c->batch_ms = between(r, 1, 20);
    c->report_ms = between(r, 60, 300);
    c->faults_from = rng_chance(r, 250) ? 1 * SIM_MS : between(r, 50, 300) * SIM_MS;
    c->faults_span = rng_chance(r, 300) ? 60 * SIM_MS : between(r, 200, 1200) * SIM_MS;
    c->nfaults = rng_chance(r, 50) ? 0 : between(r, 1, 16);
}

static void tensor_draw(struct sim_config *c, struct rng *r, uint32_t i)
{
    struct sim_tensor *t = &c->tensor[i];
    uint32_t size = c->floats ? 4 : 8, full = SIM_CHUNK_BYTES / size;
    uint32_t chunks = between(r, 1, SIM_CHUNKS_MAX / SIM_TENSORS_MAX);
    memset(&t->spec, 0, sizeof t->spec);
    snprintf(t->spec.name, sizeof t->spec.name, "layer%u.weight", i);
    t->spec.id = tensor_id(t->spec.name);
    t->spec.dtype = c->floats ? DTYPE_F32 : DTYPE_I64;
    t->spec.ndims = 1;
    t->spec.dim[0] = (chunks - 1) * full + between(r, 5, full);
    t->spec.kind = rng_chance(r, 700) || c->floats || c->mode_changes ? TENSOR_PARAM : TENSOR_REDUCE;
    t->spec.op = TENSOR_SUM;
    t->spec.finite = FINITE_APPLY;
    snprintf(t->spec.group, sizeof t->spec.group, "default");
    if (t->spec.kind == TENSOR_PARAM)
        snprintf(t->spec.optimizer, sizeof t->spec.optimizer, "%s", c->floats ? "sgd lr=0.25" : "add");
    t->nchunks = chunks;
    t->first = c->nchunks;
    c->nchunks += chunks;
}

void config_tensors(struct sim_config *c, struct rng *r)
{
    c->nchunks = 0;
    for (uint32_t i = 0; i < c->ntensors; i++)
        tensor_draw(c, r, i);
}

/* Nothing could bring back what a server without durability forgets: nobody may take a live one for dead. */
static void be_patient(struct sim_config *c)
{
    c->suspect_ms += 400;
    c->report_ms += 1000;
    c->lease_ms += 4000;
}

static void draw(struct world *w)
{
    struct sim_config *c = &w->cfg;
    struct rng *r = &w->rng;
    c->nservers = between(r, 1, SIM_SERVERS_MAX);
    c->nloops = between(r, 1, SIM_LOOPS_MAX);
    c->nmembers = between(r, 1, 5);
    c->nshards = between(r, 1, 6);
    c->ntensors = between(r, 1, SIM_TENSORS_MAX);
    c->durable = rng_chance(r, 750);
    c->mixed_loops = rng_chance(r, 300);
    c->replicas = rng_chance(r, 250) ? 0 : between(r, 1, 2);
    if (w->opt.servers)
        c->nservers = w->opt.servers;
    if (w->opt.replicas)
        c->replicas = w->opt.replicas - 1;
    if (c->replicas && c->nservers == 1)
        c->nservers = 2;
    if (c->replicas >= c->nservers)
        c->replicas = c->nservers - 1;
    if (c->replicas)
        c->durable = rng_chance(r, 400);
    draw_mode(c, r, w->opt.mode);
    draw_times(c, r);
    if (!c->durable && !c->replicas)
        be_patient(c);
    config_tensors(c, r);
}

void config_draw(struct world *w)
{
    if (w->opt.config)
        w->cfg = *w->opt.config;
    else
        draw(w);
    struct sim_config *c = &w->cfg;
    struct job_doc *j = &w->job;
    snprintf(j->job, sizeof j->job, "sim");
    j->nshards = c->nshards;
    j->chunk_bytes = SIM_CHUNK_BYTES;
    j->servers_min = c->nservers;
    j->replicas = c->replicas;
    j->members_min = rng_chance(&w->rng, 500) ? c->nmembers : 1;
    j->deterministic = c->deterministic;
    snprintf(j->durability, sizeof j->durability, "%s", c->durable ? "write" : "none");
    j->mode = c->mode;
    char mode[32];
    mode_format(&c->mode, mode, sizeof mode);
    world_note(w, "%u servers x %u loops%s, R = %u, %u members, %u shards, %u tensors of %u chunks, %s, %s%s%s", c->nservers, c->nloops,
               c->mixed_loops ? " or so" : "", c->replicas, c->nmembers, c->nshards, c->ntensors, c->nchunks, mode, c->durable ? "durable" : "volatile",
               c->floats ? ", floats" : "", c->mode_changes ? ", changes of mode" : "");
}
