/* shard_settings.c - hyper-parameters that members change: in force from a step on, the same on every shard.
 *
 * A member's DONE(k) carries settings for step k + 1; every loop has every member's DONE(k) before any chunk of k + 1
 * is computed, so all shards switch together. */
#include "base/log.h"
#include "server/shard_impl.h"

static bool same_key(const struct setting_entry *e, const struct setting *s, uint64_t member)
{
    return e->s.from_step == s->from_step && e->s.group == s->group && e->s.option == s->option && e->member == member;
}

void setting_put(struct shard_core *c, uint64_t member, const struct setting *s)
{
    for (uint32_t i = 0; i < c->nsetting; i++) {
        if (same_key(&c->setting[i], s, member)) {
            if (c->setting[i].s.value != s->value)
                c->settings_dirty = true;
            c->setting[i].s.value = s->value;
            c->setting_generation++;
            return;
        }
    }
    if (c->nsetting >= SETTINGS_MAX) {
        settings_compact(c);
        if (c->nsetting >= SETTINGS_MAX)
            return;
    }
    ARRAY_ROOM(c->setting, c->nsetting, c->csetting);
    c->setting[c->nsetting++] = (struct setting_entry){.s = *s, .member = member};
    c->setting_generation++;
    c->settings_dirty = true;
}

void settings_take(struct shard_core *c, uint64_t member, const struct done_head *d)
{
    char err[256];
    for (uint32_t i = 0; i < d->nsettings; i++) {
        struct setting s;
        done_setting(d, i, &s);
        if (s.option >= OPT_MAX || optim_option_check(s.option, s.value, err)) {
            shard_close(c, member, KS_EPROTO, "a setting is out of its range");
            return;
        }
        setting_put(c, member, &s);
    }
}

void settings_drop(struct shard_core *c, uint64_t member, int64_t from_step)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->nsetting; i++) {
        if (c->setting[i].member == member && c->setting[i].s.from_step == from_step)
            c->settings_dirty = true;
        else
            c->setting[n++] = c->setting[i];
    }
    c->nsetting = n;
    c->setting_generation++;
}

static int64_t oldest_open(const struct shard_core *c)
{
    int64_t step = INT64_MAX;
    for (uint32_t i = 0; i < c->cfg.nshards; i++) {
        const struct shard *s = &c->shard[i];
        if (!s->primary && !s->backup && !s->joining)
            continue;
        int64_t at = s->complete > s->w ? s->complete : s->w;
        step = at < step ? at : step;
    }
    return step;
}

static bool superseded(const struct shard_core *c, uint32_t i, int64_t open)
{
    const struct setting_entry *e = &c->setting[i];
    for (uint32_t k = 0; k < c->nsetting; k++) {
        const struct setting_entry *o = &c->setting[k];
        if (o->s.group != e->s.group || o->s.option != e->s.option || o->s.from_step > open)
            continue;
        if (o->s.from_step > e->s.from_step || (o->s.from_step == e->s.from_step && o->member > e->member))
            return true;
    }
    return false;
}

/* Of each option, what is in force at the oldest open step and everything later stays. */
void settings_compact(struct shard_core *c)
{
    int64_t open = oldest_open(c);
    uint32_t n = 0;
    struct setting_entry *kept = mem_alloc((c->nsetting + 1) * sizeof *kept);
    for (uint32_t i = 0; i < c->nsetting; i++)
        if (c->setting[i].s.from_step > open || !superseded(c, i, open))
            kept[n++] = c->setting[i];
    mem_free(c->setting);
    c->setting = kept;
    c->csetting = c->nsetting + 1;
    c->nsetting = n;
    c->setting_generation++;
}
