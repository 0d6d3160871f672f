/* Both stores, driven by the same random sequences, must hold the same records; and the promises of store.h. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/keepstep_err.h"
#include "base/mem.h"
#include "base/rng.h"
#include "storage/store.h"
#include "tests/store_help.h"

struct rig {
    const char *name;
    int (*open)(struct rig *r, struct store **ret, char *err);
    int (*wait)(struct rig *r, struct store *s, uint64_t seq, uint64_t *ret_seq, char *err);
    void (*disk_break)(struct rig *r, struct store *s);
    void (*disk_mend)(struct rig *r);
    char dir[PATH_MAX];
    sem_t woken;
    struct store_model_disk *disk;
};

static int lmdb_open(struct rig *r, struct store **ret, char *err)
{
    struct store_lmdb_config c = {r->dir, 1, 1 << 20, wake_post, &r->woken};
    return store_lmdb_open(&c, ret, err);
}

static int lmdb_wait(struct rig *r, struct store *s, uint64_t seq, uint64_t *ret_seq, char *err)
{
    return store_wait(s, &r->woken, seq, ret_seq, err);
}

/* No file may grow: the next commit of much data fails with EFBIG. */
static void lmdb_break(struct rig *r, struct store *s)
{
    struct rlimit limit;
    char path[PATH_MAX + 16];
    struct stat st;
    (void)s;
    snprintf(path, sizeof path, "%s/data.mdb", r->dir);
    assert_int_equal(stat(path, &st), 0);
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = (rlim_t)st.st_size;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

static void lmdb_mend(struct rig *r)
{
    struct rlimit limit;
    (void)r;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = limit.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

static int model_open(struct rig *r, struct store **ret, char *err)
{
    return store_model_open(r->disk, ret, err);
}

static int model_wait(struct rig *r, struct store *s, uint64_t seq, uint64_t *ret_seq, char *err)
{
    int rc = 0;
    (void)r;
    while (rc == 0 && (rc = s->ops->poll(s, ret_seq, err)) == 0 && *ret_seq < seq)
        store_model_commit(s, 3);
    return rc;
}

static void model_break(struct rig *r, struct store *s)
{
    (void)r;
    store_model_fail(s, KS_EIO);
}

static void model_mend(struct rig *r)
{
    (void)r;
}

static void rig_init(struct rig *r, int lmdb)
{
    memset(r, 0, sizeof *r);
    if (lmdb) {
        *r = (struct rig){
            .name = "lmdb", .open = lmdb_open, .wait = lmdb_wait, .disk_break = lmdb_break, .disk_mend = lmdb_mend};
        scratch_make(r->dir);
        sem_init(&r->woken, 0, 0);
    } else {
        *r = (struct rig){.name = "model",
                          .open = model_open,
                          .wait = model_wait,
                          .disk_break = model_break,
                          .disk_mend = model_mend};
        r->disk = store_model_disk_create();
    }
}

static void rig_done(struct rig *r)
{
    if (r->disk != NULL) {
        store_model_disk_free(r->disk);
        return;
    }
    scratch_remove(r->dir);
    sem_destroy(&r->woken);
}

static struct store *rig_open(struct rig *r)
{
    char err[STORE_ERR_TEXT] = "";
    struct store *s = NULL;
    int rc = r->open(r, &s, err);
    if (rc != 0)
        print_error("%s: %s\n", r->name, err);
    assert_int_equal(rc, 0);
    return s;
}

static void rig_durable(struct rig *r, struct store *s, uint64_t seq)
{
    char err[STORE_ERR_TEXT] = "";
    uint64_t durable;
    if (r->wait(r, s, seq, &durable, err) != 0)
        fail_msg("%s: %s", r->name, err);
    assert_true(durable >= seq);
}

/* ---- what load says, as bytes ---- */

struct dump {
    uint8_t *data;
    size_t size, cap, records;
    uint8_t last_key[STORE_KEY_MAX];
    size_t last_size;
};

static void dump_add(struct dump *d, const void *p, size_t size)
{
    while (d->size + size > d->cap) {
        d->cap = d->cap ? 2 * d->cap : 4096;
        d->data = mem_resize(d->data, d->cap);
    }
    if (size > 0)
        memcpy(d->data + d->size, p, size);
    d->size += size;
}

static int dump_each(void *arg, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size)
{
    struct dump *d = arg;
    if (d->records++ > 0) {
        size_t common = key_size < d->last_size ? key_size : d->last_size;
        int c = memcmp(d->last_key, key, common);
        assert_true(c < 0 || (c == 0 && d->last_size < key_size));
    }
    memcpy(d->last_key, key, key_size);
    d->last_size = key_size;
    dump_add(d, &key_size, sizeof key_size);
    dump_add(d, key, key_size);
    dump_add(d, &size, sizeof size);
    dump_add(d, value, size);
    return 0;
}

static struct dump dump_of(struct store *s)
{
    struct dump d = {0};
    char err[STORE_ERR_TEXT] = "";
    int rc = s->ops->load(s, dump_each, &d, err);
    if (rc != 0)
        fail_msg("%s", err);
    return d;
}

static void assert_dumps_equal(struct dump *a, struct dump *b)
{
    assert_int_equal(a->records, b->records);
    assert_int_equal(a->size, b->size);
    if (a->size > 0)
        assert_memory_equal(a->data, b->data, a->size);
    mem_free(a->data);
    mem_free(b->data);
}

/* ---- random sequences ---- */

enum { BATCH_OPS_MAX = 8, KEYS = 40, SEEDS = 24, STEPS = 120 };

static size_t random_size(struct rng *r)
{
    if (rng_chance(r, 20))
        return rng_below(r, 300000);
    return rng_below(r, rng_chance(r, 300) ? 9000 : 100);
}

/* Keys share prefixes, hold zero bytes and differ in length. */
static void random_key(struct rng *r, struct store_op *op)
{
    uint64_t n = rng_below(r, KEYS);
    op->key_size = (uint32_t)(1 + n % 5 * 15 + (n == 0 ? 3 : 0));
    for (uint32_t i = 0; i < op->key_size; i++)
        op->key[i] = i == 0 ? (uint8_t)(n * 37) : (uint8_t)(n / 20);
}

struct heap {
    uint8_t **block;
    size_t n, cap;
};

static const uint8_t *random_bytes(struct rng *r, struct heap *h, size_t size)
{
    uint8_t *p = mem_alloc(size + 1);
    for (size_t i = 0; i < size; i += 1 + i / 64)
        p[i] = (uint8_t)rng_next(r);
    ARRAY_ROOM(h->block, h->n, h->cap);
    h->block[h->n++] = p;
    return p;
}

static size_t random_batch(struct rng *r, struct heap *h, struct store_op *ops)
{
    size_t n = rng_below(r, BATCH_OPS_MAX + 1);
    for (size_t i = 0; i < n; i++) {
        memset(&ops[i], 0, sizeof ops[i]);
        random_key(r, &ops[i]);
        ops[i].nsegments = rng_chance(r, 250) ? 0 : 1 + (uint32_t)rng_below(r, STORE_SEGMENTS_MAX);
        for (uint32_t k = 0; k < ops[i].nsegments; k++) {
            size_t size = random_size(r);
            ops[i].segment[k] = (struct store_segment){random_bytes(r, h, size), size};
        }
    }
    return n;
}

static void reopen_and_compare(struct rig rig[2], struct store *s[2])
{
    struct dump d[2];
    for (int i = 0; i < 2; i++) {
        s[i]->ops->close(s[i]);
        s[i] = rig_open(&rig[i]);
        d[i] = dump_of(s[i]);
    }
    assert_dumps_equal(&d[0], &d[1]);
}

static void sequence_run(uint64_t seed)
{
    struct rng r = {seed};
    struct heap heap = {0};
    struct rig rig[2];
    struct store *s[2];
    uint64_t seq = 0;
    for (int i = 0; i < 2; i++) {
        rig_init(&rig[i], i);
        s[i] = rig_open(&rig[i]);
    }
    for (int step = 0; step < STEPS; step++) {
        struct store_op ops[BATCH_OPS_MAX];
        size_t n = random_batch(&r, &heap, ops);
        seq += 1 + rng_below(&r, 3);
        for (int i = 0; i < 2; i++)
            s[i]->ops->submit(s[i], seq, ops, n);
        for (int i = 0; i < 2 && step % 7 == 0; i++)
            rig_durable(&rig[i], s[i], seq);
        if (rng_chance(&r, 40))
            reopen_and_compare(rig, s);
    }
    reopen_and_compare(rig, s);
    for (int i = 0; i < 2; i++) {
        s[i]->ops->close(s[i]);
        rig_done(&rig[i]);
    }
    for (size_t i = 0; i < heap.n; i++)
        mem_free(heap.block[i]);
    mem_free(heap.block);
}

static void test_same_sequences_same_records(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++)
        sequence_run(seed);
}

/* ---- promises, one by one, of each ---- */

static void with_each(void (*check)(struct rig *r))
{
    for (int i = 0; i < 2; i++) {
        struct rig r;
        rig_init(&r, i);
        check(&r);
        rig_done(&r);
    }
}

static void check_fresh(struct rig *r)
{
    struct store *s = rig_open(r);
    char err[STORE_ERR_TEXT];
    uint64_t seq = 77;
    struct dump d = dump_of(s);
    assert_int_equal(d.records, 0);
    assert_int_equal(s->ops->poll(s, &seq, err), 0);
    assert_int_equal(seq, 0);
    s->ops->close(s);
}

static void test_fresh_store_is_empty(void **state)
{
    (void)state;
    with_each(check_fresh);
}

static void check_close_drains(struct rig *r)
{
    enum { N = 200 };
    static uint64_t value[N];
    struct store *s = rig_open(r);
    for (uint64_t i = 0; i < N; i++) {
        value[i] = i;
        struct store_op op[2] = {op_put(&value[i], sizeof value[i], &value[i], sizeof value[i]),
                                 op_put("last", 4, &value[i], sizeof value[i])};
        s->ops->submit(s, i + 1, op, 2);
    }
    s->ops->close(s);
    s = rig_open(r);
    struct dump d = dump_of(s);
    assert_int_equal(d.records, N + 1);
    s->ops->close(s);
    mem_free(d.data);
}

static void test_close_makes_queued_batches_durable(void **state)
{
    (void)state;
    with_each(check_close_drains);
}

static int stop_each(void *arg, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size)
{
    (void)key, (void)key_size, (void)value, (void)size;
    return ++*(int *)arg == 2 ? 42 : 0;
}

static void check_load_stops(struct rig *r)
{
    struct store *s = rig_open(r);
    struct store_op ops[3] = {op_put("a", 1, "1", 1), op_put("b", 1, "", 0), op_put("c", 1, "3", 1)};
    char err[STORE_ERR_TEXT];
    int calls = 0;
    s->ops->submit(s, 5, ops, 3);
    s->ops->close(s);
    s = rig_open(r);
    assert_int_equal(s->ops->load(s, stop_each, &calls, err), 42);
    assert_int_equal(calls, 2);
    s->ops->close(s);
}

static void test_load_passes_on_what_each_returns(void **state)
{
    (void)state;
    with_each(check_load_stops);
}

static void check_busy(struct rig *r)
{
    struct store *s = rig_open(r), *second = NULL;
    char err[STORE_ERR_TEXT] = "";
    assert_int_equal(r->open(r, &second, err), KS_EBUSY);
    assert_null(second);
    assert_non_null(strstr(err, "is in use"));
    s->ops->close(s);
    s = rig_open(r);
    s->ops->close(s);
}

static void test_one_holder_at_a_time(void **state)
{
    (void)state;
    with_each(check_busy);
}

static void check_sticky(struct rig *r)
{
    static uint8_t big[4 << 20];
    char err[STORE_ERR_TEXT] = "", again[STORE_ERR_TEXT] = "";
    uint64_t seq;
    struct store *s = rig_open(r);
    struct store_op good = op_put("good", 4, "x", 1),
                    bad[2] = {op_put("good", 4, "y", 1), op_put("big", 3, big, sizeof big)};
    s->ops->submit(s, 1, &good, 1);
    rig_durable(r, s, 1);
    r->disk_break(r, s);
    s->ops->submit(s, 2, bad, 2);
    assert_int_equal(r->wait(r, s, 2, &seq, err), KS_EIO);
    r->disk_mend(r);
    assert_int_equal(seq, 1);
    assert_true(strlen(err) > 0);
    /* The disk works again, but the batch before this one is missing. */
    s->ops->submit(s, 3, &good, 1);
    assert_int_equal(r->wait(r, s, 3, &seq, again), KS_EIO);
    assert_int_equal(seq, 1);
    assert_string_equal(err, again);
    s->ops->close(s);
    s = rig_open(r);
    struct dump d = dump_of(s);
    assert_int_equal(d.records, 1);
    assert_int_equal(d.data[d.size - 1], 'x');
    mem_free(d.data);
    s->ops->submit(s, 4, &good, 1);
    rig_durable(r, s, 4);
    s->ops->close(s);
}

static void test_errors_are_sticky_and_lose_nothing_durable(void **state)
{
    (void)state;
    with_each(check_sticky);
}

/* ---- the model's own: crashes between commits, flipped bits ---- */

static void test_model_crash_keeps_a_prefix_of_whole_batches(void **state)
{
    static const uint8_t value[6] = {1, 2, 3, 4, 5, 6};
    char err[STORE_ERR_TEXT];
    (void)state;
    for (size_t commits = 0; commits <= 6; commits++) {
        struct rig r;
        uint64_t seq;
        rig_init(&r, 0);
        struct store *s = rig_open(&r);
        for (uint64_t i = 0; i < 6; i++) {
            struct store_op ops[2] = {op_put("a", 1, &value[i], 1), op_put("b", 1, &value[i], 1)};
            s->ops->submit(s, 10 + i, ops, 2);
        }
        assert_int_equal(store_model_queued(s), 6);
        assert_int_equal(store_model_commit(s, commits), commits);
        assert_int_equal(store_model_queued(s), 6 - commits);
        assert_int_equal(s->ops->poll(s, &seq, err), 0);
        assert_int_equal(seq, commits ? 9 + commits : 0);
        store_model_crash(s);
        s = rig_open(&r);
        struct dump d = dump_of(s);
        assert_int_equal(d.records, commits ? 2 : 0);
        if (commits > 0) {
            assert_int_equal(d.data[d.size - 1], commits);
            assert_int_equal(d.data[d.size / 2 - 1], commits);
        }
        mem_free(d.data);
        s->ops->close(s);
        rig_done(&r);
    }
}

static void test_model_flip_is_found_by_load(void **state)
{
    char err[STORE_ERR_TEXT] = "";
    struct dump d = {0};
    struct rig r;
    (void)state;
    rig_init(&r, 0);
    struct store *s = rig_open(&r);
    struct store_op ops[2] = {op_put("k1", 2, "abc", 3), op_put("k%2", 3, "def", 3)};
    s->ops->submit(s, 1, ops, 2);
    s->ops->close(s);
    store_model_flip(r.disk, 0);
    s = rig_open(&r);
    assert_int_equal(s->ops->load(s, dump_each, &d, err), KS_ECORRUPT);
    assert_non_null(strstr(err, "k%252"));
    assert_int_equal(d.records, 0);
    s->ops->close(s);
    rig_done(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fresh_store_is_empty),
        cmocka_unit_test(test_same_sequences_same_records),
        cmocka_unit_test(test_close_makes_queued_batches_durable),
        cmocka_unit_test(test_load_passes_on_what_each_returns),
        cmocka_unit_test(test_one_holder_at_a_time),
        cmocka_unit_test(test_errors_are_sticky_and_lose_nothing_durable),
        cmocka_unit_test(test_model_crash_keeps_a_prefix_of_whole_batches),
        cmocka_unit_test(test_model_flip_is_found_by_load),
    };
    signal(SIGXFSZ, SIG_IGN);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
