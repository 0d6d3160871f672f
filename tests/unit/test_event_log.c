#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <cjson/cJSON.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "server/event_log.h"

enum { THREADS = 4, EACH = 200 };

static char dir[64], file[96];
static uint32_t shown;

static void on_shown(enum log_level level, const char *line, void *arg)
{
    (void)level;
    (void)line;
    (void)arg;
    shown++;
}

static int setup(void **state)
{
    (void)state;
    char err[256];
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%.32s/ks-events-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(dir))
        return -1;
    snprintf(file, sizeof file, "%s/events", dir);
    log_sink_set(on_shown, NULL);
    return event_log_open(file, err, sizeof err);
}

static int teardown(void **state)
{
    (void)state;
    log_tap_set(NULL, NULL);
    return unlink(file) || rmdir(dir) ? -1 : 0;
}

/* The n-th line of the file, parsed; NULL: there is none. */
static cJSON *line_read(uint32_t n)
{
    static char text[8192];
    FILE *f = fopen(file, "r");
    assert_non_null(f);
    char *got = fgets(text, sizeof text, f);
    while (got && n--)
        got = fgets(text, sizeof text, f);
    fclose(f);
    if (!got)
        return NULL;
    assert_int_equal(text[strlen(text) - 1], '\n');
    cJSON *o = cJSON_Parse(text);
    assert_non_null(o);
    return o;
}

static const char *text_of(const cJSON *o, const char *key)
{
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(o, key));
}

static void a_line_says_what_happened(void **state)
{
    (void)state;
    uint64_t before = clock_now_us();
    event_log_name("s\"0");
    log_info("node_suspect", "id=%s name=\"a \\b\" epoch=12 ms=-1.5 cause=\"it said \"no\" twice\" x= moved=\"\"",
             "18446744073709551615");
    /* It is written though stderr shows warnings only. */
    assert_int_equal(shown, 0);
    cJSON *o = line_read(0);
    assert_string_equal(text_of(o, "server"), "s\"0");
    assert_string_equal(text_of(o, "event"), "node_suspect");
    assert_string_equal(text_of(o, "id"), "18446744073709551615");
    assert_string_equal(text_of(o, "name"), "a \\b");
    assert_string_equal(text_of(o, "cause"), "it said \"no\" twice");
    assert_string_equal(text_of(o, "x"), "");
    assert_string_equal(text_of(o, "moved"), "");
    assert_true(cJSON_GetObjectItemCaseSensitive(o, "epoch")->valueint == 12);
    assert_true(cJSON_GetObjectItemCaseSensitive(o, "ms")->valuedouble == -1.5);
    assert_true(cJSON_GetObjectItemCaseSensitive(o, "mono_us")->valuedouble >= (double)before);
    assert_int_equal(strlen(text_of(o, "time")), strlen("2026-01-02T03:04:05.678Z"));
    cJSON_Delete(o);
}

static void other_events_are_left_out(void **state)
{
    (void)state;
    log_warn("net_refused", "peer=x");
    log_debug("view", "epoch=1");
    assert_int_equal(shown, 1);
    assert_null(line_read(1));
}

static void long_lines_stay_json(void **state)
{
    (void)state;
    char longer[1800];
    memset(longer, '"', sizeof longer);
    longer[sizeof longer - 1] = 0;
    log_info("view_prepare", "gone=\"%s\" round=1", longer);
    cJSON *o = line_read(1);
    assert_string_equal(text_of(o, "event"), "view_prepare");
    assert_true(strlen(text_of(o, "gone")) > 1000);
    cJSON_Delete(o);
}

static void *many(void *arg)
{
    for (int i = 0; i < EACH; i++)
        log_info("promoted", "loop=%d shards=%d", *(int *)arg, i);
    return NULL;
}

static void threads_write_whole_lines(void **state)
{
    (void)state;
    pthread_t thread[THREADS];
    int number[THREADS], next[THREADS] = {0};
    for (int i = 0; i < THREADS; i++) {
        number[i] = i;
        assert_int_equal(pthread_create(&thread[i], NULL, many, &number[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    for (uint32_t n = 0; n < THREADS * EACH; n++) {
        cJSON *o = line_read(2 + n);
        int loop = cJSON_GetObjectItemCaseSensitive(o, "loop")->valueint;
        assert_int_equal(cJSON_GetObjectItemCaseSensitive(o, "shards")->valueint, next[loop]++);
        cJSON_Delete(o);
    }
    assert_null(line_read(2 + THREADS * EACH));
}

static void a_bad_path_is_refused(void **state)
{
    (void)state;
    char err[256], path[128];
    snprintf(path, sizeof path, "%s/no/where", dir);
    assert_int_equal(event_log_open(path, err, sizeof err), KS_EIO);
    assert_non_null(strstr(err, path));
    assert_non_null(strstr(err, "No such file"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_line_says_what_happened),
        cmocka_unit_test(other_events_are_left_out),
        cmocka_unit_test(long_lines_stay_json),
        cmocka_unit_test(threads_write_whole_lines),
        cmocka_unit_test(a_bad_path_is_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
