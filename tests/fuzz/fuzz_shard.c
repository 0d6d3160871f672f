/* fuzz_shard.c - hostile bytes at the shards of a loop: records from a damaged disk, and frames of a member that means no
 * good. Nothing may crash, leak or break a CHECK. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "server/shard_core.h"

enum { SERVER = 1, MEMBERS = 2, SHARDS = 3, CHUNK = 64 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct input {
    const uint8_t *p;
    size_t n;
};

static uint64_t number(struct input *in, size_t bytes)
{
    uint64_t v = 0;
    for (size_t i = 0; i < bytes && in->n; i++, in->n--)
        v = v << 8 | *in->p++;
    return v;
}

static struct tensor_spec spec_of(int i)
{
    struct tensor_spec s = {.dtype = i == 1 ? DTYPE_BF16 : DTYPE_F32, .ndims = 1, .dim = {i == 2 ? 40 : 7}, .op = TENSOR_AVERAGE,
                            .kind = i == 2 ? TENSOR_REDUCE : TENSOR_PARAM, .finite = FINITE_REJECT, .group = "default"};
    static const char *const name[] = {"a", "b", "c"};
    (void)str_copy(s.name, sizeof s.name, name[i]);
    (void)str_copy(s.optimizer, sizeof s.optimizer, i == 0 ? "adam" : "add");
    if (i == 2)
        s.optimizer[0] = 0;
    s.id = tensor_id(s.name);
    return s;
}

static void drop(const struct shard_outbox *out)
{
    for (uint32_t i = 0; i < out->n; i++) {
        buf_unref(out->effect[i].payload);
        for (int k = 0; k < 4; k++)
            buf_unref(out->effect[i].held[k]);
    }
}

static void step(struct shard_core *c, struct shard_outbox *out, struct shard_event e)
{
    shard_core_step(c, &e, out);
    uint64_t seq = 0;
    for (uint32_t i = 0; i < out->n; i++)
        seq = out->effect[i].kind == SHARD_PERSIST ? out->effect[i].seq : seq;
    drop(out);
    if (!seq)
        return;
    struct shard_event durable = {.kind = SHARD_DURABLE, .seq = seq};
    step(c, out, durable);
}

static struct view *view_make(struct input *in, uint64_t epoch)
{
    struct view *v = view_create(1, MEMBERS, SHARDS);
    v->epoch = epoch;
    v->nmodes = 1;
    v->mode[0].kind = 1 + (enum mode_kind)(number(in, 1) % 3);
    v->mode[0].bound = 1;
    v->server[0].id = SERVER;
    for (uint32_t i = 0; i < MEMBERS; i++)
        v->member[i] = (struct view_member){.id = 11 + i, .last = STEP_NONE, .live = true, .local_size = 1};
    for (uint32_t i = 0; i < SHARDS; i++)
        v->shard[i] = (struct view_shard){.primary = SERVER, .since = 1};
    return v;
}

static void frames(struct shard_core *c, struct shard_outbox *out, struct input *in)
{
    struct view *v = view_make(in, 1);
    step(c, out, (struct shard_event){.kind = SHARD_ADOPT, .view = v});
    for (int i = 0; i < 3; i++) {
        struct tensor_spec s = spec_of(i);
        step(c, out, (struct shard_event){.kind = SHARD_DECLARE, .from = 11, .spec = &s, .header = {.epoch = 1}});
    }
    while (in->n) {
        static const uint8_t types[] = {FRAME_PUSH, FRAME_DONE, FRAME_PULL, FRAME_CLOCK, FRAME_INIT, FRAME_RESULT};
        struct frame_header h = {.type = types[number(in, 1) % sizeof types], .epoch = 1};
        struct tensor_spec s = spec_of((int)(number(in, 1) % 3));
        uint64_t from = 11 + number(in, 1) % 3;
        h.tensor = s.id;
        h.dtype = (uint8_t)s.dtype;
        h.flags = (uint8_t)number(in, 1);
        h.chunk = (uint32_t)(number(in, 1) % 4);
        if (h.type == FRAME_INIT && h.chunk == 3)
            h.chunk = ~0u;
        h.step = (int64_t)(number(in, 1) % 5) - 1;
        h.seq = (uint32_t)(number(in, 1) % 5);
        h.weight = (float)(number(in, 1) % 4);
        h.version = number(in, 1) % 3 ? 1ull << 32 | 1 : number(in, 8);
        if (number(in, 1) % 4)
            h.len = h.type == FRAME_DONE || h.type == FRAME_CLOCK ? number(in, 1) : tensor_chunk_bytes(&s, h.chunk, CHUNK);
        struct buf *b = h.len ? shard_core_sink(c, from, &h) : NULL;
        bool discarded = h.len && !b;
        for (uint32_t i = 0; b && i < b->len; i++)
            b->data[i] = (uint8_t)number(in, 1);
        step(c, out, (struct shard_event){.kind = SHARD_FRAME, .from = from, .header = h, .payload = b, .discarded = discarded});
    }
    view_free(v);
}

static void records(struct shard_core *c, struct shard_outbox *out, struct input *in)
{
    char err[STORE_ERR_TEXT];
    for (int i = 0; i < 3; i++) {
        struct tensor_spec s = spec_of(i);
        uint8_t key[9] = {'a'};
        char *json = tensor_encode(&s), *value = mem_alloc(strlen(json) + 1);
        value[0] = 1;
        memcpy(value + 1, json, strlen(json));
        for (int k = 0; k < 8; k++)
            key[1 + k] = (uint8_t)(s.id >> (56 - 8 * k));
        if (shard_core_load(c, key, sizeof key, (uint8_t *)value, strlen(json) + 1, err))
            abort();
        mem_free(value);
        mem_free(json);
    }
    bool bad = false;
    while (in->n && !bad) {
        uint8_t key[14] = {(uint8_t)"abcd"[number(in, 1) % 4]};
        size_t key_size = key[0] == 'a' ? 9 : key[0] == 'b' ? 14 : key[0] == 'c' ? 3 : 1;
        uint64_t id = spec_of((int)(number(in, 1) % 3)).id;
        for (int k = 0; k < 8 && key[0] == 'b'; k++)
            key[1 + k] = (uint8_t)(id >> (56 - 8 * k));
        key[key_size - 1] = key_size > 1 ? (uint8_t)number(in, 1) : key[key_size - 1];
        size_t n = number(in, 2) % (in->n + 1);
        uint8_t *copy = mem_dup(in->p, n);
        bad = shard_core_load(c, key, key_size, copy, n, err) != 0;
        mem_free(copy);
        in->p += n;
        in->n -= n;
    }
    if (bad)
        return;
    shard_core_loaded(c, SERVER + 1);
    struct view *v = view_make(in, 2);
    v->shard[0].since = v->shard[1].since = v->shard[2].since = 2;
    step(c, out, (struct shard_event){.kind = SHARD_ADOPT, .view = v});
    view_free(v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size};
    static struct pool *pool;
    if (!pool)
        pool = pool_create(1 << 20);
    uint64_t what = number(&in, 1);
    struct shard_config sc = {.self = SERVER, .nloops = 1, .nshards = SHARDS, .chunk_bytes = CHUNK, .pool = pool,
                              .durable = what & 1, .deterministic = what & 2};
    struct shard_core *c = shard_core_create(&sc);
    struct shard_outbox out = {0};
    if (what & 4)
        records(c, &out, &in);
    else
        frames(c, &out, &in);
    shard_core_free(c);
    shard_outbox_done(&out);
    if (pool_used_bytes(pool))
        abort();
    return 0;
}
