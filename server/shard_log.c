/* What a loop says in the log of a view change: what it was promoted to, when that was announced, when the first step was
 * completed; how joiners catch up. */
#include "base/log.h"
#include "server/shard_impl.h"

static double ms_since(const struct shard_core *c, uint64_t us)
{
    return c->now_us > us ? (double)(c->now_us - us) / 1000 : 0;
}

static uint32_t promoted(const struct shard_core *c, bool announced)
{
    uint32_t n = 0;
    for (uint32_t i = c->cfg.loop; i < c->cfg.nshards; i += c->cfg.nloops) {
        const struct shard *s = &c->shard[i];
        n += s->primary && s->since == c->view->epoch && (s->announced || !announced);
    }
    return n;
}

static uint32_t joiners(const struct shard_core *c, bool behind)
{
    uint32_t n = 0;
    for (uint32_t i = c->cfg.loop; i < c->cfg.nshards; i += c->cfg.nloops)
        for (int k = 0; c->shard[i].primary && k < HOLDERS_MAX; k++) {
            const struct holder *h = &c->shard[i].holder[k];
            n += h->id && !h->backup && (!behind || !h->synced);
        }
    return n;
}

static void adopted(struct shard_core *c)
{
    struct shard_log *l = &c->log;
    uint32_t n = promoted(c, false);
    l->epoch = c->view->epoch;
    l->adopt_us = c->now_us;
    l->first_step = false;
    l->announcing = n > 0;
    if (n)
        log_info("promoted", "loop=%u epoch=%llu shards=%u", c->cfg.loop, (unsigned long long)l->epoch, n);
    if (!joiners(c, false))
        l->catch_us = 0;
}

void shard_log_after(struct shard_core *c)
{
    struct shard_log *l = &c->log;
    if (!c->view)
        return;
    if (l->epoch != c->view->epoch)
        adopted(c);
    if (l->announcing && promoted(c, true) == promoted(c, false)) {
        l->announcing = false;
        log_info("announced", "loop=%u epoch=%llu ms=%.1f", c->cfg.loop, (unsigned long long)l->epoch, ms_since(c, l->adopt_us));
    }
    if (!l->first_step && c->stats.progress_us >= l->adopt_us && c->stats.progress_us) {
        l->first_step = true;
        log_info("first_step", "loop=%u epoch=%llu ms=%.1f", c->cfg.loop, (unsigned long long)l->epoch, ms_since(c, l->adopt_us));
    }
}

void shard_log_catch_up(struct shard_core *c, uint64_t joiner)
{
    struct shard_log *l = &c->log;
    if (l->catch_us)
        return;
    l->catch_us = c->now_us;
    l->catch_bytes = 0;
    l->catch_shards = 0;
    log_info("catch_up", "loop=%u id=%llu shards=%u", c->cfg.loop, (unsigned long long)joiner, joiners(c, true));
}

void shard_log_synced(struct shard_core *c, uint64_t joiner)
{
    struct shard_log *l = &c->log;
    l->catch_shards++;
    if (!l->catch_us || joiners(c, true))
        return;
    log_info("caught_up", "loop=%u id=%llu shards=%u bytes=%llu ms=%.1f", c->cfg.loop, (unsigned long long)joiner,
             l->catch_shards, (unsigned long long)l->catch_bytes, ms_since(c, l->catch_us));
    l->catch_us = 0;
}
