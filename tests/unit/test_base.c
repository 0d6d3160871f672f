#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/rng.h"

static jmp_buf hook_jump;
static char hook_text[64];

static void hook(const char *text, const char *file, int line)
{
    (void)file;
    assert_true(line > 0);
    assert_int_equal(str_copy(hook_text, sizeof hook_text, text), 0);
    longjmp(hook_jump, 1);
}

static void test_check_hook(void **state)
{
    (void)state;
    check_hook_set(hook);
    volatile int one = 1;
    if (setjmp(hook_jump) == 0) {
        CHECK(one == 2);
        fail();
    }
    check_hook_set(NULL);
    assert_string_equal(hook_text, "one == 2");
}

static char sink_line[4096];
static enum log_level sink_level;

static void sink(enum log_level level, const char *line, void *arg)
{
    ++*(int *)arg;
    sink_level = level;
    assert_int_equal(str_copy(sink_line, sizeof sink_line, line), 0);
}

static void test_log_sink(void **state)
{
    (void)state;
    int lines = 0;
    setenv("KEEPSTEP_LOG", "info", 1);
    log_init("server:s0");
    assert_int_equal(log_level_get(), LOG_INFO);
    log_sink_set(sink, &lines);
    log_debug("quiet", "id=%d", 1);
    assert_int_equal(lines, 0);
    log_warn("member_gone", "id=%d cause=\"%s\"", 12, "two\nlines\x1b");
    assert_int_equal(lines, 1);
    assert_int_equal(sink_level, LOG_WARN);
    assert_string_equal(sink_line, "member_gone id=12 cause=\"two lines \"");
    char *big = mem_alloc(10001);
    memset(big, 'x', 10000);
    log_error("long", "text=%s", big);
    assert_true(strlen(sink_line) > 2000 && strlen(sink_line) < 2100);
    mem_free(big);
    log_level_set(LOG_OFF);
    log_error("quiet", "id=%d", 1);
    assert_int_equal(lines, 2);
    log_sink_set(NULL, NULL);
    setenv("KEEPSTEP_LOG", "nonsense", 1);
    log_init(NULL);
    assert_int_equal(log_level_get(), LOG_WARN);
}

/* What a real line on stderr looks like: whole, with the time and who. */
static void test_log_stderr(void **state)
{
    (void)state;
    int fd[2], saved = dup(STDERR_FILENO);
    char line[256] = "";
    assert_int_equal(pipe(fd), 0);
    dup2(fd[1], STDERR_FILENO);
    unsetenv("KEEPSTEP_LOG");
    log_init("server:s0");
    log_warn("member_gone", "id=%d", 12);
    dup2(saved, STDERR_FILENO);
    ssize_t n = read(fd[0], line, sizeof line - 1);
    close(saved);
    close(fd[0]);
    close(fd[1]);
    assert_true(n > 24);
    assert_string_equal(line + 24, " warn member_gone who=server:s0 id=12\n");
    static const char pattern[] = "dddd-dd-ddTdd:dd:dd.dddZ";
    for (int i = 0; i < 24; i++) {
        if (pattern[i] == 'd')
            assert_in_range(line[i], '0', '9');
        else
            assert_int_equal(line[i], pattern[i]);
    }
}

static void test_mem(void **state)
{
    (void)state;
    uint8_t *p = mem_alloc(100);
    for (int i = 0; i < 100; i++)
        assert_int_equal(p[i], 0);
    mem_free(p);
    mem_free(mem_alloc(0));
    mem_free(mem_dup(NULL, 0));
    char *s = mem_strdup("abc");
    assert_string_equal(s, "abc");
    mem_free(s);
    char small[4] = "x";
    assert_int_equal(str_copy(small, sizeof small, "abcd"), -1);
    assert_string_equal(small, "x");
    assert_int_equal(str_copy(small, sizeof small, "abc"), 0);
    assert_string_equal(small, "abc");
    int *v = NULL;
    uint32_t n = 0, cap = 0;
    for (int i = 0; i < 100; i++) {
        ARRAY_ROOM(v, n, cap);
        v[n++] = i;
    }
    for (int i = 0; i < 100; i++)
        assert_int_equal(v[i], i);
    mem_free(v);
}

static void test_clock(void **state)
{
    (void)state;
    uint64_t a = clock_now_us();
    assert_true(clock_now_us() >= a);
    assert_true(clock_wall_ms() > 1600000000000ull);
    uint64_t first = incarnation_new(), second = incarnation_new();
    assert_true(first != 0 && first >> 20 <= second >> 20);
    assert_true(first >> 20 >= 1600000000000ull);
}

static void test_map_basics(void **state)
{
    (void)state;
    struct map m;
    int a, b;
    map_init(&m);
    assert_null(map_get(&m, 1));
    assert_null(map_remove(&m, 1));
    map_put(&m, 0, &a);
    map_put(&m, UINT64_MAX, &b);
    assert_ptr_equal(map_get(&m, 0), &a);
    assert_ptr_equal(map_get(&m, UINT64_MAX), &b);
    map_put(&m, 0, &b);
    assert_int_equal(m.count, 2);
    assert_ptr_equal(map_remove(&m, 0), &b);
    assert_null(map_get(&m, 0));
    assert_int_equal(m.count, 1);
    map_done(&m);
    assert_null(map_get(&m, 1));
}

/* Against a plain array, with few keys so that chains form and break all the time. */
static void test_map_model(void **state)
{
    (void)state;
    enum { KEYS = 200 };
    static int values[64];
    void *model[KEYS] = {0};
    struct rng rng = {7};
    struct map m;
    map_init(&m);
    for (int round = 0; round < 50000; round++) {
        uint64_t key = rng_below(&rng, KEYS);
        if (rng_chance(&rng, 500)) {
            void *value = &values[rng_below(&rng, 64)];
            map_put(&m, key, value);
            model[key] = value;
        } else {
            assert_ptr_equal(map_remove(&m, key), model[key]);
            model[key] = NULL;
        }
        key = rng_below(&rng, KEYS);
        assert_ptr_equal(map_get(&m, key), model[key]);
    }
    uint32_t seen = 0, want = 0;
    uint64_t key;
    void *value;
    for (uint32_t i = 0; map_next(&m, &i, &key, &value); seen++)
        assert_ptr_equal(model[key], value);
    for (int i = 0; i < KEYS; i++)
        want += model[i] != NULL;
    assert_int_equal(seen, want);
    assert_int_equal(m.count, want);
    map_done(&m);
}

static void test_pool_reuse(void **state)
{
    (void)state;
    struct pool *pool = pool_create(0);
    struct buf *a = pool_get(pool, 1000);
    assert_int_equal(a->len, 1000);
    assert_int_equal(a->cap, 1024);
    assert_int_equal(a->refs, 1);
    assert_int_equal((uintptr_t)a->data % 64, 0);
    assert_int_equal(pool_used_bytes(pool), 1024);
    assert_int_equal(pool_held_bytes(pool), 2 << 20);
    uint8_t *data = a->data;
    buf_ref(a);
    buf_unref(a);
    assert_int_equal(pool_used_bytes(pool), 1024);
    buf_unref(a);
    buf_unref(NULL);
    assert_int_equal(pool_used_bytes(pool), 0);
    a = pool_get(pool, 1024);
    assert_ptr_equal(a->data, data);
    struct buf *big = pool_get(pool, (2 << 20) + 1);
    assert_int_equal(big->cap, 4 << 20);
    assert_int_equal((uintptr_t)big->data % (2 << 20), 0);
    buf_unref(big);
    buf_unref(a);
    pool_free(pool);
    pool_free(NULL);
}

static void test_pool_limit(void **state)
{
    (void)state;
    struct pool *pool = pool_create(4 << 20);
    struct buf *b[4];
    for (int i = 0; i < 4; i++) {
        b[i] = pool_get(pool, 1 << 20);
        assert_non_null(b[i]);
        memset(b[i]->data, i, b[i]->cap);
    }
    assert_null(pool_get(pool, 1));
    assert_int_equal(pool_held_bytes(pool), 4 << 20);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(b[i]->data[(1 << 20) - 1], i);
        buf_unref(b[i]);
    }
    /* Everything is free, but in another size: it serves all the same. */
    struct buf *small = pool_get(pool, 300);
    assert_non_null(small);
    assert_int_equal(small->len, 300);
    assert_null(pool_get(pool, 2 << 20));
    buf_unref(small);
    pool_free(pool);

    pool = pool_create(10000);
    small = pool_get(pool, 4096);
    assert_non_null(small);
    assert_null(pool_get(pool, 16384));
    assert_true(pool_held_bytes(pool) <= 10000);
    buf_unref(small);
    pool_free(pool);
}

/* Random sizes: buffers never overlap, and after the first round nothing is taken from the system. */
static void test_pool_random(void **state)
{
    (void)state;
    enum { HELD = 64 };
    struct pool *pool = pool_create(0);
    struct buf *held[HELD] = {0};
    uint64_t slabs = 0;
    for (int round = 0; round < 3; round++) {
        struct rng rng = {3};
        for (int i = 0; i < 3000; i++) {
            uint32_t at = (uint32_t)rng_below(&rng, HELD);
            if (held[at]) {
                assert_int_equal(held[at]->data[0], at);
                assert_int_equal(held[at]->data[held[at]->len - 1], at);
                buf_unref(held[at]);
            }
            held[at] = pool_get(pool, 1 + rng_below(&rng, 1ull << rng_below(&rng, 22)));
            assert_int_equal((uintptr_t)held[at]->data % 64, 0);
            held[at]->data[0] = held[at]->data[held[at]->len - 1] = (uint8_t)at;
        }
        for (int i = 0; i < HELD; i++) {
            buf_unref(held[i]);
            held[i] = NULL;
        }
        assert_int_equal(pool_used_bytes(pool), 0);
        if (round == 0)
            slabs = pool_slabs(pool);
        assert_int_equal(pool_slabs(pool), slabs);
    }
    pool_free(pool);
}

static void test_error_table(void **state)
{
    (void)state;
    static const int values[] = {
#define VALUE(name, value, text) value,
        KS_ERROR_TABLE(VALUE)
#undef VALUE
    };
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        assert_int_equal(values[i], -(int)i);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_check_hook),  cmocka_unit_test(test_log_sink),    cmocka_unit_test(test_log_stderr),
        cmocka_unit_test(test_mem),         cmocka_unit_test(test_clock),       cmocka_unit_test(test_map_basics),
        cmocka_unit_test(test_map_model),   cmocka_unit_test(test_pool_reuse),  cmocka_unit_test(test_pool_limit),
        cmocka_unit_test(test_pool_random), cmocka_unit_test(test_error_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
