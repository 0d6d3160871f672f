/* map.h - open-addressing hash map from a 64-bit key to a pointer. Not thread-safe.
 * Keys are mixed first, so small integers are fine. A value is never NULL. */
#ifndef BASE_MAP_H
#define BASE_MAP_H

#include <stddef.h>
#include <stdint.h>

struct map_slot {
    uint64_t key;
    void *value;
};
struct map {
    struct map_slot *slot;
    uint32_t cap;     /* power of two, or 0 */
    uint32_t count;
};

void map_init(struct map *m);
void map_done(struct map *m);
void *map_get(const struct map *m, uint64_t key);           /* NULL: none */
void map_put(struct map *m, uint64_t key, void *value);      /* replaces */
void *map_remove(struct map *m, uint64_t key);               /* what was there, or NULL */
/* Iteration in slot order: for (uint32_t i = 0; map_next(&m, &i, &key, &value);) Do not change
 * the map inside; ret_key may be NULL. Order depends on keys and history only, so it is the same on replay. */
int map_next(const struct map *m, uint32_t *i, uint64_t *ret_key, void **ret_value);

#endif
