/* The store in memory: what the disk holds is a sorted array of records as they would be on disk. */
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/mem.h"
#include "storage/store.h"
#include "storage/store_record.h"

struct record {
    uint8_t key[STORE_KEY_MAX];
    size_t key_size;
    uint8_t *value;
    size_t size;
};
struct store_model_disk {
    struct record *record;
    size_t n, cap;
    int open;
};
struct store_model {
    struct store store;
    struct store_model_disk *disk;
    struct store_batch_list queue;
    uint64_t submitted, durable;
    int fail_next; /* what the next commit meets */
    int error;     /* what a commit met */
};

static struct store_model *self(struct store *s)
{
    return (struct store_model *)s;
}

struct store_model_disk *store_model_disk_create(void)
{
    return mem_alloc(sizeof(struct store_model_disk));
}

void store_model_disk_free(struct store_model_disk *d)
{
    CHECK(!d->open);
    for (size_t i = 0; i < d->n; i++)
        mem_free(d->record[i].value);
    mem_free(d->record);
    mem_free(d);
}

/* LMDB's order: bytes, then the shorter first. */
static int key_compare(const struct record *r, const uint8_t *key, size_t size)
{
    int c = memcmp(r->key, key, r->key_size < size ? r->key_size : size);
    if (c != 0)
        return c;
    return r->key_size < size ? -1 : r->key_size > size;
}

/* Where the key is, or would be. */
static size_t disk_find(const struct store_model_disk *d, const struct store_op *op, int *ret_found)
{
    size_t low = 0, high = d->n;
    *ret_found = 0;
    while (low < high) {
        size_t mid = (low + high) / 2;
        int c = key_compare(&d->record[mid], op->key, op->key_size);
        if (c == 0) {
            *ret_found = 1;
            return mid;
        }
        if (c < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static void disk_delete(struct store_model_disk *d, size_t at)
{
    mem_free(d->record[at].value);
    memmove(&d->record[at], &d->record[at + 1], (d->n - at - 1) * sizeof *d->record);
    d->n--;
}

static void disk_insert(struct store_model_disk *d, size_t at, const struct store_op *op)
{
    ARRAY_ROOM(d->record, d->n, d->cap);
    memmove(&d->record[at + 1], &d->record[at], (d->n - at) * sizeof *d->record);
    d->n++;
    d->record[at] = (struct record){.key_size = op->key_size};
    memcpy(d->record[at].key, op->key, op->key_size);
}

static void disk_apply(struct store_model_disk *d, const struct store_op *op)
{
    int found;
    size_t at = disk_find(d, op, &found);
    if (op->nsegments == 0) {
        if (found)
            disk_delete(d, at);
        return;
    }
    if (!found)
        disk_insert(d, at, op);
    struct record *r = &d->record[at];
    size_t size = store_value_size(op);
    if (r->size != size) {
        mem_free(r->value);
        r->value = mem_alloc(size);
        r->size = size;
    }
    store_value_write(op, r->value);
}

static void model_submit(struct store *store, uint64_t seq, const struct store_op *ops, size_t n)
{
    struct store_model *s = self(store);
    CHECK(seq > s->submitted);
    s->submitted = seq;
    if (s->error == 0)
        store_batch_list_append(&s->queue, store_batch_create(seq, ops, n));
}

static int model_poll(struct store *store, uint64_t *ret_seq, char *err)
{
    struct store_model *s = self(store);
    *ret_seq = s->durable;
    if (s->error != 0)
        store_say(err, "the model's disk: %s", s->error == KS_EFULL ? "no space left on the disk" : "cannot write");
    return s->error;
}

static int model_load(struct store *store,
                      int (*each)(void *arg, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size),
                      void *arg, char *err)
{
    struct store_model *s = self(store);
    char text[STORE_KEY_TEXT];
    const uint8_t *payload;
    size_t size;
    CHECK(s->submitted == 0);
    for (size_t i = 0; i < s->disk->n; i++) {
        const struct record *r = &s->disk->record[i];
        int rc = store_value_check(r->value, r->size, &payload, &size);
        if (rc != 0) {
            store_key_text(r->key, r->key_size, text);
            store_say(err, "record %s has a wrong checksum, in the model's disk", text);
            return rc;
        }
        rc = each(arg, r->key, r->key_size, payload, size);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static void model_free(struct store_model *s)
{
    store_batch_list_free(&s->queue);
    s->disk->open = 0;
    mem_free(s);
}

static void model_close(struct store *store)
{
    store_model_commit(store, store_model_queued(store));
    model_free(self(store));
}

static const struct store_ops model_ops = {model_submit, model_poll, model_load, model_close};

int store_model_open(struct store_model_disk *d, struct store **ret, char *err)
{
    if (d->open) {
        store_say(err, "the model's disk is in use");
        return KS_EBUSY;
    }
    struct store_model *s = mem_alloc(sizeof *s);
    d->open = 1;
    s->store.ops = &model_ops;
    s->disk = d;
    store_batch_list_init(&s->queue);
    *ret = &s->store;
    return 0;
}

size_t store_model_commit(struct store *store, size_t n)
{
    struct store_model *s = self(store);
    struct store_batch_list group;
    if (s->queue.first != NULL && n > 0 && s->fail_next != 0) {
        s->error = s->fail_next;
        store_batch_list_free(&s->queue);
        return 0;
    }
    store_batch_list_init(&group);
    store_batch_list_take(&s->queue, n, SIZE_MAX, &group);
    for (const struct store_batch *b = group.first; b != NULL; b = b->next) {
        for (size_t i = 0; i < b->n; i++)
            disk_apply(s->disk, &b->ops[i]);
        s->durable = b->seq;
    }
    n = group.count;
    store_batch_list_free(&group);
    return n;
}

size_t store_model_queued(const struct store *store)
{
    return ((const struct store_model *)store)->queue.count;
}

void store_model_fail(struct store *store, int error)
{
    self(store)->fail_next = error;
}

void store_model_crash(struct store *store)
{
    model_free(self(store));
}

void store_model_flip(struct store_model_disk *d, size_t n)
{
    CHECK(n < d->n);
    d->record[n].value[d->record[n].size / 2] ^= 1;
}
