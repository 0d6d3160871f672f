/* The LMDB store alone: killed processes, full disks, growing maps, damaged and foreign files. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <fcntl.h>
#include <lmdb.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/keepstep_err.h"
#include "base/mem.h"
#include "base/rng.h"
#include "storage/store_record.h"
#include "storage/store_sum.h"
#include "tests/store_help.h"

struct place {
    char root[PATH_MAX], dir[PATH_MAX + 16];
    sem_t woken;
};

static int setup(void **state)
{
    struct place *p = calloc(1, sizeof *p);
    scratch_make(p->root);
    snprintf(p->dir, sizeof p->dir, "%s/store", p->root);
    sem_init(&p->woken, 0, 0);
    *state = p;
    return 0;
}

static int teardown(void **state)
{
    struct place *p = *state;
    umount2(p->dir, MNT_DETACH); /* of the tests that mounted something; fails for the others */
    scratch_remove(p->root);
    sem_destroy(&p->woken);
    free(p);
    return 0;
}

static int open_with(struct place *p, int create, size_t map_bytes, struct store **ret, char *err)
{
    struct store_lmdb_config c = {p->dir, create, map_bytes, wake_post, &p->woken};
    return store_lmdb_open(&c, ret, err);
}

static struct store *open_ok(struct place *p, size_t map_bytes)
{
    char err[STORE_ERR_TEXT] = "";
    struct store *s = NULL;
    if (open_with(p, 1, map_bytes, &s, err) != 0)
        fail_msg("%s", err);
    return s;
}

static void open_refused(struct place *p, int create, int code, const char *words)
{
    char err[STORE_ERR_TEXT] = "";
    struct store *s = NULL;
    assert_int_equal(open_with(p, create, 0, &s, err), code);
    assert_null(s);
    if (!strstr(err, p->dir) || !strstr(err, words) || strchr(err, '\n'))
        fail_msg("\"%s\" lacks \"%s\" or the directory", err, words);
}

static void durable_ok(struct place *p, struct store *s, uint64_t seq)
{
    char err[STORE_ERR_TEXT] = "";
    uint64_t durable;
    if (store_wait(s, &p->woken, seq, &durable, err) != 0)
        fail_msg("%s", err);
}

static void file_path(const struct place *p, const char *name, char ret[PATH_MAX + 64])
{
    snprintf(ret, PATH_MAX + 64, "%s/%s", p->dir, name);
}

static off_t data_size(const struct place *p)
{
    char path[PATH_MAX + 64];
    struct stat st;
    file_path(p, "data.mdb", path);
    assert_int_equal(stat(path, &st), 0);
    return st.st_size;
}

/* Every value is one byte repeated; all values of the same batch have the same byte. */
struct seen {
    size_t records, bytes;
    int byte; /* of the last one; -1 when it is mixed */
};

static int seen_each(void *arg, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size)
{
    struct seen *seen = arg;
    (void)key, (void)key_size;
    seen->records++;
    seen->bytes += size;
    seen->byte = size > 0 ? value[0] : -1;
    if (size > 1 && memcmp(value, value + 1, size - 1) != 0)
        seen->byte = -1;
    return 0;
}

static struct seen load_ok(struct store *s)
{
    char err[STORE_ERR_TEXT] = "";
    struct seen seen = {0};
    if (s->ops->load(s, seen_each, &seen, err) != 0)
        fail_msg("%s", err);
    return seen;
}

/* ---- large and many ---- */

static void submit_numbered(struct store *s, uint64_t seq, size_t n, const void *value, size_t size)
{
    struct store_op *ops = mem_alloc(n * sizeof *ops);
    for (size_t i = 0; i < n; i++) {
        uint8_t key[8] = {0, 0, 0, 0, 0, 0, (uint8_t)(i >> 8), (uint8_t)i};
        ops[i] = op_put(key, sizeof key, value, size);
    }
    s->ops->submit(s, seq, ops, n);
    mem_free(ops);
}

/* LMDB 0.9.24 could crash in the first large commits of a fresh environment. */
static void test_fresh_store_takes_large_overwrites(void **state)
{
    enum { N = 256, SIZE = 1 << 20 };
    struct place *p = *state;
    uint8_t *value[3];
    struct store *s = open_ok(p, 0);
    for (int i = 0; i < 3; i++) {
        value[i] = mem_alloc(SIZE);
        memset(value[i], 'a' + i, SIZE);
        submit_numbered(s, 1 + (uint64_t)i, N, value[i], SIZE);
    }
    durable_ok(p, s, 3);
    s->ops->close(s);
    s = open_ok(p, 0);
    struct seen seen = load_ok(s);
    assert_int_equal(seen.records, N);
    assert_int_equal(seen.bytes, (size_t)N * SIZE);
    assert_int_equal(seen.byte, 'c');
    s->ops->close(s);
    for (int i = 0; i < 3; i++)
        mem_free(value[i]);
}

static void test_map_grows_under_values_larger_than_itself(void **state)
{
    enum { SIZE = 64 << 20 };
    struct place *p = *state;
    uint8_t *value = mem_alloc(SIZE);
    memset(value, 'v', SIZE);
    struct store *s = open_ok(p, 1 << 20);
    submit_numbered(s, 1, 1, "small", 5);
    submit_numbered(s, 2, 2, value, SIZE);
    durable_ok(p, s, 2);
    s->ops->close(s);
    s = open_ok(p, 1 << 20);
    struct seen seen = load_ok(s);
    assert_int_equal(seen.records, 2);
    assert_int_equal(seen.bytes, 2 * (size_t)SIZE);
    assert_int_equal(seen.byte, 'v');
    submit_numbered(s, 1, 3, value, SIZE);
    durable_ok(p, s, 1);
    s->ops->close(s);
    mem_free(value);
}

/* Batch by batch, so that pages freed by one commit serve a later one. */
static void test_rewriting_does_not_grow_the_file_for_ever(void **state)
{
    enum { N = 64, SIZE = 1 << 20, PASSES = 8 };
    struct place *p = *state;
    uint8_t *value = mem_alloc(SIZE);
    struct store *s = open_ok(p, 0);
    uint64_t seq = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        for (uint8_t i = 0; i < N; i++) {
            struct store_op op = op_put(&i, 1, value, SIZE);
            s->ops->submit(s, ++seq, &op, 1);
        }
        durable_ok(p, s, seq);
    }
    assert_true(data_size(p) < (off_t)4 * N * SIZE);
    s->ops->close(s);
    mem_free(value);
}

static void test_segments_at_odd_sizes_are_joined(void **state)
{
    struct place *p = *state;
    uint8_t data[10000];
    struct store *s = open_ok(p, 0);
    memset(data, 'z', sizeof data);
    for (uint32_t i = 0; i < 200; i++) {
        struct store_op op = op_put(&i, sizeof i, data, 0);
        op.nsegments = 3;
        op.segment[0] = (struct store_segment){data + i % 7, i};
        op.segment[1] = (struct store_segment){data + i % 5, i * 41};
        op.segment[2] = (struct store_segment){data + i % 3, 1};
        s->ops->submit(s, i + 1, &op, 1);
    }
    s->ops->close(s);
    s = open_ok(p, 0);
    struct seen seen = load_ok(s);
    assert_int_equal(seen.records, 200);
    assert_int_equal(seen.bytes, 199 * 100 * 42 + 200);
    assert_int_equal(seen.byte, 'z');
    s->ops->close(s);
}

/* ---- killed ---- */

enum { KILLS = 40, KILL_KEYS = 12 };

static void kill_op(struct store_op *op, uint8_t key, uint64_t seq, const uint8_t *value, size_t size)
{
    *op = op_put(&key, 1, &seq, sizeof seq);
    op->nsegments = 2;
    op->segment[1] = (struct store_segment){value, size};
}

/* Writes batches that set every key to the batch's number, and says in the pipe which are durable. */
static void child_write(struct place *p, int out, uint64_t seq)
{
    static uint8_t value[200000];
    enum { RING = 64 };
    static uint64_t number[RING];
    char err[STORE_ERR_TEXT];
    struct store *s;
    uint64_t durable = 0, told = 0;
    if (open_with(p, 1, 1 << 20, &s, err) != 0)
        _exit(1);
    for (uint64_t first = seq;; seq++) {
        struct store_op ops[KILL_KEYS];
        number[seq % RING] = seq;
        for (uint8_t k = 0; k < KILL_KEYS; k++) {
            kill_op(&ops[k], k, seq, value, (seq * 7919 + k * 104729) % sizeof value);
            ops[k].segment[0].data = &number[seq % RING];
        }
        s->ops->submit(s, seq, ops, KILL_KEYS);
        if (store_wait(s, &p->woken, seq < first + 8 ? 0 : seq - 8, &durable, err) != 0)
            _exit(1);
        if (durable > told && write(out, &durable, sizeof durable) != sizeof durable)
            _exit(1);
        told = durable;
    }
}

struct numbers {
    uint64_t number[KILL_KEYS];
    size_t n;
};

static int numbers_each(void *arg, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size)
{
    struct numbers *got = arg;
    assert_int_equal(key_size, 1);
    assert_int_equal(key[0], got->n);
    assert_true(size >= 8);
    memcpy(&got->number[got->n++], value, 8);
    return 0;
}

/* Reads what the child reports, kills it after `reports` of them, returns the last one it had got out. */
static uint64_t child_kill(struct place *p, uint64_t seq, uint64_t reports)
{
    int pipes[2];
    uint64_t last = 0, n = 0;
    assert_int_equal(pipe(pipes), 0);
    pid_t child = fork();
    if (child == 0) {
        close(pipes[0]);
        child_write(p, pipes[1], seq);
    }
    close(pipes[1]);
    while (read(pipes[0], &last, sizeof last) == sizeof last) {
        if (++n == reports)
            kill(child, SIGKILL);
    }
    close(pipes[0]);
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_true(n >= reports);
    return last;
}

static void test_sigkill_loses_nothing_durable_and_tears_nothing(void **state)
{
    struct place *p = *state;
    struct rng r = {7};
    uint64_t seq = 1;
    for (int i = 0; i < KILLS; i++) {
        char err[STORE_ERR_TEXT] = "";
        struct numbers got = {0};
        uint64_t durable = child_kill(p, seq, 1 + rng_below(&r, 12));
        struct store *s = open_ok(p, 1 << 20);
        if (s->ops->load(s, numbers_each, &got, err) != 0)
            fail_msg("%s", err);
        s->ops->close(s);
        assert_int_equal(got.n, KILL_KEYS);
        for (size_t k = 1; k < KILL_KEYS; k++)
            assert_true(got.number[k] == got.number[0]);
        assert_true(got.number[0] >= durable);
        seq = got.number[0] + 1;
    }
}

/* ---- disks that refuse ---- */

static int mount_small(struct place *p)
{
    mkdir(p->dir, 0755);
    if (mount("tmpfs", p->dir, "tmpfs", 0, "size=16m") == 0)
        return 0;
    print_message("skipped: cannot mount a small tmpfs here: %s\n", strerror(errno));
    return -1;
}

static void test_full_disk_is_reported_and_keeps_the_last_commit(void **state)
{
    enum { SIZE = 4 << 20 };
    struct place *p = *state;
    char err[STORE_ERR_TEXT] = "";
    uint64_t durable, seq = 0;
    if (mount_small(p) != 0)
        skip();
    uint8_t *value = mem_alloc(SIZE);
    memset(value, 'f', SIZE);
    struct store *s = open_ok(p, 0);
    int rc;
    do {
        struct store_op op = op_put(&seq, sizeof seq, value, SIZE);
        s->ops->submit(s, ++seq, &op, 1);
        rc = store_wait(s, &p->woken, seq, &durable, err);
    } while (rc == 0 && seq < 100);
    assert_int_equal(rc, KS_EFULL);
    assert_non_null(strstr(err, "no space left"));
    assert_non_null(strstr(err, p->dir));
    assert_int_equal(durable, seq - 1);
    s->ops->close(s);
    s = open_ok(p, 0);
    struct seen seen = load_ok(s);
    assert_int_equal(seen.records, durable);
    assert_int_equal(seen.byte, 'f');
    s->ops->close(s);
    mem_free(value);
}

static void test_full_disk_at_creation(void **state)
{
    struct place *p = *state;
    char path[PATH_MAX + 64];
    if (mount_small(p) != 0)
        skip();
    file_path(p, "lost+found", path);
    int fd = open(path, O_WRONLY | O_CREAT, 0644);
    assert_int_equal(ftruncate(fd, 0), 0);
    while (write(fd, path, sizeof path) > 0)
        continue;
    close(fd);
    open_refused(p, 1, KS_EFULL, "no space left");
}

static void test_read_only_file_system_is_refused(void **state)
{
    struct place *p = *state;
    if (mount_small(p) != 0)
        skip();
    struct store *s = open_ok(p, 0);
    s->ops->close(s);
    assert_int_equal(mount("tmpfs", p->dir, "tmpfs", MS_REMOUNT | MS_RDONLY, "size=16m"), 0);
    open_refused(p, 1, KS_EIO, "Read-only file system");
}

/* ---- what is not ours ---- */

static void test_missing_or_empty_is_refused_without_create(void **state)
{
    struct place *p = *state;
    open_refused(p, 0, KS_ENOENT, "does not exist");
    mkdir(p->dir, 0755);
    open_refused(p, 0, KS_ENOENT, "holds no store");
    struct store *s = open_ok(p, 0);
    s->ops->close(s);
    char err[STORE_ERR_TEXT];
    assert_int_equal(open_with(p, 0, 0, &s, err), 0);
    s->ops->close(s);
}

static void file_write(const struct place *p, const char *name, const void *data, size_t size)
{
    char path[PATH_MAX + 64];
    file_path(p, name, path);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, size, f), size);
    fclose(f);
}

static void test_foreign_files_are_refused(void **state)
{
    static char text[20000] = "SQLite format 3";
    struct place *p = *state;
    mkdir(p->dir, 0755);
    file_write(p, "data.mdb", text, sizeof text);
    open_refused(p, 1, KS_ECORRUPT, "data.mdb");
    file_write(p, "data.mdb", text, 30);
    open_refused(p, 1, KS_ECORRUPT, "data.mdb");
    file_write(p, "notes.txt", text, 30);
    open_refused(p, 1, KS_ECORRUPT, "choose an empty directory");
}

/* Puts one raw record into the environment, as another program would. */
static void raw_put(const struct place *p, const char *key, const void *value, size_t size)
{
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
    MDB_val k = {strlen(key), (void *)key}, v = {size, (void *)value};
    mkdir(p->dir, 0755);
    assert_int_equal(mdb_env_create(&env), 0);
    assert_int_equal(mdb_env_open(env, p->dir, 0, 0644), 0);
    assert_int_equal(mdb_txn_begin(env, NULL, 0, &txn), 0);
    assert_int_equal(mdb_dbi_open(txn, NULL, 0, &dbi), 0);
    assert_int_equal(mdb_put(txn, dbi, &k, &v, 0), 0);
    assert_int_equal(mdb_txn_commit(txn), 0);
    mdb_env_close(env);
}

static void raw_format(const struct place *p, const char *text)
{
    uint8_t value[128];
    struct store_op op = op_put("format", 6, text, strlen(text));
    store_value_write(&op, value);
    raw_put(p, "format", value, store_value_size(&op));
}

static void test_another_programs_environment_is_refused(void **state)
{
    struct place *p = *state;
    raw_put(p, "users", "bob", 3);
    open_refused(p, 1, KS_ECORRUPT, "no format record");
}

static void test_other_formats_are_refused(void **state)
{
    struct place *p = *state;
    raw_format(p, "keepstep 2");
    open_refused(p, 1, KS_EVERSION, "format 2");
    raw_format(p, "keepstep 01");
    open_refused(p, 1, KS_ECORRUPT, "not Keepstep's");
    raw_format(p, "keepstep");
    open_refused(p, 1, KS_ECORRUPT, "not Keepstep's");
    raw_put(p, "format", "keepstep 1", 10);
    open_refused(p, 1, KS_ECORRUPT, "checksum");
    raw_format(p, "keepstep 1");
    struct store *s = open_ok(p, 0);
    s->ops->close(s);
}

static void test_in_use_names_the_process(void **state)
{
    struct place *p = *state;
    char words[64];
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        struct store *s;
        char err[STORE_ERR_TEXT];
        byte = open_with(p, 1, 0, &s, err) == 0;
        if (write(ready[1], &byte, 1) != 1)
            _exit(1);
        pause();
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 1);
    snprintf(words, sizeof words, "is in use by process %ld", (long)child);
    open_refused(p, 1, KS_EBUSY, words);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(ready[0]);
    close(ready[1]);
    struct store *s = open_ok(p, 0);
    s->ops->close(s);
}

/* ---- damage ---- */

static void fill_three(struct place *p)
{
    static uint8_t value[3][100000];
    struct store *s = open_ok(p, 0);
    for (uint8_t i = 0; i < 3; i++) {
        memset(value[i], 'p' + i, sizeof value[i]);
        struct store_op op = op_put(i == 1 ? "mid" : i == 0 ? "low" : "top", 3, value[i], sizeof value[i]);
        s->ops->submit(s, i + 1u, &op, 1);
    }
    durable_ok(p, s, 3);
    s->ops->close(s);
}

/* Where the run of `byte` of at least 4096 starts in data.mdb. */
static off_t run_find(const struct place *p, int fd, int byte)
{
    off_t size = data_size(p), at = -1;
    uint8_t *file = mem_alloc((size_t)size);
    assert_int_equal(pread(fd, file, (size_t)size, 0), size);
    size_t run = 0;
    for (off_t i = 0; i < size && at < 0; i++) {
        run = file[i] == byte ? run + 1 : 0;
        if (run == 4096)
            at = i - 4095;
    }
    mem_free(file);
    assert_true(at > 0);
    return at;
}

static void test_one_wrong_bit_is_found_and_named(void **state)
{
    struct place *p = *state;
    char path[PATH_MAX + 64], err[STORE_ERR_TEXT] = "";
    struct seen seen = {0};
    fill_three(p);
    file_path(p, "data.mdb", path);
    int fd = open(path, O_RDWR);
    off_t at = run_find(p, fd, 'q') + 5000;
    assert_int_equal(pwrite(fd, "s", 1, at), 1);
    close(fd);
    struct store *s = open_ok(p, 0);
    assert_int_equal(s->ops->load(s, seen_each, &seen, err), KS_ECORRUPT);
    assert_int_equal(seen.records, 1);
    assert_non_null(strstr(err, "record mid"));
    assert_non_null(strstr(err, p->dir));
    s->ops->close(s);
}

/* Reading past the end of the file would be SIGBUS in the map. */
static void test_file_cut_short_is_an_error_not_a_signal(void **state)
{
    struct place *p = *state;
    char path[PATH_MAX + 64], err[STORE_ERR_TEXT] = "";
    struct seen seen = {0};
    fill_three(p);
    file_path(p, "data.mdb", path);
    int fd = open(path, O_RDWR);
    off_t at = run_find(p, fd, 'r') + 50000;
    close(fd);
    assert_int_equal(truncate(path, at), 0);
    struct store *s = open_ok(p, 0);
    assert_int_equal(s->ops->load(s, seen_each, &seen, err), KS_ECORRUPT);
    s->ops->close(s);
}

/* ---- the checksum ---- */

static void test_checksum_known_answers(void **state)
{
    uint8_t zeros[32] = {0};
    (void)state;
    assert_int_equal(store_sum(0, "123456789", 9), 0xe3069283u);
    assert_int_equal(store_sum(0, zeros, sizeof zeros), 0x8a9136aau);
    assert_int_equal(store_sum(0, "", 0), 0);
}

static void test_checksum_fast_copying_and_portable_agree(void **state)
{
    enum { SIZE = 100000 };
    struct rng r = {3};
    uint8_t *data = mem_alloc(SIZE), *copy = mem_alloc(SIZE);
    (void)state;
    for (size_t i = 0; i < SIZE; i++)
        data[i] = (uint8_t)rng_next(&r);
    for (int i = 0; i < 300; i++) {
        size_t from = rng_below(&r, SIZE), size = rng_below(&r, SIZE - from + 1), cut = rng_below(&r, size + 1);
        uint32_t start = (uint32_t)rng_next(&r), want = store_sum_portable(start, data + from, size);
        assert_int_equal(store_sum(start, data + from, size), want);
        assert_int_equal(store_sum_copy(start, copy + from, data + from, size), want);
        assert_memory_equal(copy + from, data + from, size);
        assert_int_equal(store_sum(store_sum(start, data + from, cut), data + from + cut, size - cut), want);
    }
    mem_free(data);
    mem_free(copy);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_fresh_store_takes_large_overwrites),
        T(test_map_grows_under_values_larger_than_itself),
        T(test_rewriting_does_not_grow_the_file_for_ever),
        T(test_segments_at_odd_sizes_are_joined),
        T(test_sigkill_loses_nothing_durable_and_tears_nothing),
        T(test_full_disk_is_reported_and_keeps_the_last_commit),
        T(test_full_disk_at_creation),
        T(test_read_only_file_system_is_refused),
        T(test_missing_or_empty_is_refused_without_create),
        T(test_foreign_files_are_refused),
        T(test_another_programs_environment_is_refused),
        T(test_other_formats_are_refused),
        T(test_in_use_names_the_process),
        T(test_one_wrong_bit_is_found_and_named),
        T(test_file_cut_short_is_an_error_not_a_signal),
        T(test_checksum_known_answers),
        T(test_checksum_fast_copying_and_portable_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
