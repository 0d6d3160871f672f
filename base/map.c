#include "base/map.h"

#include "base/check.h"
#include "base/mem.h"
#include "base/rng.h"

enum { CAP_MIN = 8 };

static uint32_t slot_home(const struct map *m, uint64_t key)
{
    return (uint32_t)hash_mix(key) & (m->cap - 1);
}

/* The slot of the key, or the empty slot where it would go. There is always an empty one. */
static uint32_t slot_find(const struct map *m, uint64_t key)
{
    uint32_t i = slot_home(m, key);
    while (m->slot[i].value && m->slot[i].key != key)
        i = (i + 1) & (m->cap - 1);
    return i;
}

static void map_grow(struct map *m)
{
    struct map old = *m;
    CHECK(m->cap <= UINT32_MAX / 2);
    m->cap = old.cap ? old.cap * 2 : CAP_MIN;
    m->slot = mem_alloc((size_t)m->cap * sizeof *m->slot);
    for (uint32_t i = 0; i < old.cap; i++) {
        if (old.slot[i].value)
            m->slot[slot_find(m, old.slot[i].key)] = old.slot[i];
    }
    mem_free(old.slot);
}

void map_init(struct map *m)
{
    *m = (struct map){0};
}

void map_done(struct map *m)
{
    mem_free(m->slot);
    *m = (struct map){0};
}

void *map_get(const struct map *m, uint64_t key)
{
    return m->count ? m->slot[slot_find(m, key)].value : NULL;
}

void map_put(struct map *m, uint64_t key, void *value)
{
    CHECK(value);
    if ((uint64_t)(m->count + 1) * 4 > (uint64_t)m->cap * 3)
        map_grow(m);
    struct map_slot *s = &m->slot[slot_find(m, key)];
    if (!s->value)
        m->count++;
    *s = (struct map_slot){key, value};
}

void *map_remove(struct map *m, uint64_t key)
{
    if (m->count == 0)
        return NULL;
    uint32_t mask = m->cap - 1, hole = slot_find(m, key);
    void *value = m->slot[hole].value;
    if (!value)
        return NULL;
    /* Close the gap: an entry may move back to the hole unless its home lies after the hole. */
    for (uint32_t i = (hole + 1) & mask; m->slot[i].value; i = (i + 1) & mask) {
        uint32_t home = slot_home(m, m->slot[i].key);
        if (((i - home) & mask) < ((i - hole) & mask))
            continue;
        m->slot[hole] = m->slot[i];
        hole = i;
    }
    m->slot[hole] = (struct map_slot){0};
    m->count--;
    return value;
}

int map_next(const struct map *m, uint32_t *i, uint64_t *ret_key, void **ret_value)
{
    while (*i < m->cap) {
        const struct map_slot *s = &m->slot[(*i)++];
        if (!s->value)
            continue;
        if (ret_key)
            *ret_key = s->key;
        *ret_value = s->value;
        return 1;
    }
    return 0;
}
