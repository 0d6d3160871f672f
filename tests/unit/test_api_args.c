/* What the public functions refuse before there is any server. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include <unistd.h>

#include "worker/keepstep.h"

static char dir[] = "/tmp/keepstep-api-XXXXXX";
static char coord[64];

static const char *const variables[] = {"KEEPSTEP_COORD",      "KEEPSTEP_JOB",  "KEEPSTEP_TOKEN",
                                        "KEEPSTEP_TOKEN_FILE", "KEEPSTEP_NAME", "KEEPSTEP_LOCAL_SIZE",
                                        "KEEPSTEP_TIMEOUT"};

static int group_setup(void **state)
{
    (void)state;
    setenv("KEEPSTEP_LOG", "off", 1);
    if (!mkdtemp(dir))
        return -1;
    snprintf(coord, sizeof coord, "local:%s", dir);
    return 0;
}

static int group_teardown(void **state)
{
    char command[96];
    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    return system(command);
}

static int setup(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        unsetenv(variables[i]);
    return 0;
}

/* Fails with `status`, and the text has every one of the words (up to a NULL). */
static void refused(const struct ks_options *o, int status, const char *word, const char *word2)
{
    struct ks_job *job = (struct ks_job *)1;
    assert_int_equal(ks_open(o, &job), status);
    assert_ptr_equal(job, (struct ks_job *)1);
    const char *text = ks_last_error(NULL);
    assert_null(strchr(text, '\n'));
    if (!strstr(text, word) || !strstr(text, word2))
        fail_msg("\"%s\" lacks \"%s\" or \"%s\"", text, word, word2);
}

static void test_coord(void **state)
{
    (void)state;
    refused(NULL, KS_EINVAL, "KEEPSTEP_COORD is not set", "etcd:");
    setenv("KEEPSTEP_COORD", "", 1);
    refused(NULL, KS_EINVAL, "KEEPSTEP_COORD is not set", "local:DIR");
    setenv("KEEPSTEP_COORD", "zookeeper:there", 1);
    refused(NULL, KS_EINVAL, "KEEPSTEP_COORD", "zookeeper:there");
    refused(&(struct ks_options){.coord = "local:"}, KS_EINVAL, "KEEPSTEP_COORD", "local:DIR");
    refused(&(struct ks_options){.coord = "etcd:"}, KS_EINVAL, "KEEPSTEP_COORD", "etcd:URL");
    assert_int_equal(ks_open(&(struct ks_options){.coord = coord}, NULL), KS_EINVAL);
}

static void test_names(void **state)
{
    char name[80];
    (void)state;
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = 0;
    setenv("KEEPSTEP_COORD", coord, 1);
    setenv("KEEPSTEP_JOB", "a/b", 1);
    refused(NULL, KS_EINVAL, "KEEPSTEP_JOB", "a/b");
    setenv("KEEPSTEP_JOB", name, 1);
    refused(NULL, KS_EINVAL, "KEEPSTEP_JOB", "63");
    unsetenv("KEEPSTEP_JOB");
    setenv("KEEPSTEP_NAME", "two words", 1);
    refused(NULL, KS_EINVAL, "KEEPSTEP_NAME", "two words");
    setenv("KEEPSTEP_NAME", name, 1);
    refused(NULL, KS_EINVAL, "KEEPSTEP_NAME", "63");
}

static void test_numbers(void **state)
{
    static const char *const bad[] = {"x", "-1", "0", "3x", "99999999999999999999"};
    (void)state;
    setenv("KEEPSTEP_COORD", coord, 1);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("KEEPSTEP_LOCAL_SIZE", bad[i], 1);
        refused(NULL, KS_EINVAL, "KEEPSTEP_LOCAL_SIZE", bad[i]);
        unsetenv("KEEPSTEP_LOCAL_SIZE");
        setenv("KEEPSTEP_TIMEOUT", bad[i], 1);
        refused(NULL, KS_EINVAL, "KEEPSTEP_TIMEOUT", bad[i]);
        unsetenv("KEEPSTEP_TIMEOUT");
    }
    refused(&(struct ks_options){.timeout_ms = -5}, KS_EINVAL, "timeout_ms", "negative");
    refused(&(struct ks_options){.local_size = 1u << 20}, KS_EINVAL, "local_size", "65536");
}

static void test_token(void **state)
{
    char path[80];
    (void)state;
    setenv("KEEPSTEP_COORD", coord, 1);
    snprintf(path, sizeof path, "%s/token", dir);
    setenv("KEEPSTEP_TOKEN_FILE", path, 1);
    refused(NULL, KS_EINVAL, "KEEPSTEP_TOKEN_FILE", path);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("\n", f);
    fclose(f);
    refused(NULL, KS_EINVAL, "KEEPSTEP_TOKEN_FILE", path);
    setenv("KEEPSTEP_TOKEN", "secret", 1);
    refused(NULL, KS_EINVAL, "KEEPSTEP_TOKEN ", "KEEPSTEP_TOKEN_FILE");
    unlink(path);
}

/* A store that is there and knows no such job: the text says which, the code that it is the name. */
static void test_no_such_job(void **state)
{
    (void)state;
    struct ks_options o = {.coord = coord, .job = "nowhere", .join_timeout_ms = 300};
    refused(&o, KS_ENOENT, "\"nowhere\"", coord);
}

static void test_store_does_not_answer(void **state)
{
    (void)state;
    struct ks_options o = {.coord = "etcd:http://127.0.0.1:1", .join_timeout_ms = 300};
    refused(&o, KS_ETIMEOUT, "coordination store", "127.0.0.1:1");
}

static void test_null_everywhere(void **state)
{
    (void)state;
    struct ks_handle *h;
    struct ks_tensor *t;
    struct ks_member m;
    struct ks_stats s;
    uint64_t buckets[KS_STALENESS_BUCKETS];
    char text[8];
    uint32_t bound;
    ks_close(NULL);
    assert_int_equal(ks_leave(NULL, 0), KS_EINVAL);
    assert_int_equal(ks_step(NULL), -1);
    assert_int_equal(ks_rank(NULL), -1);
    assert_int_equal(ks_size(NULL), 0);
    assert_int_equal(ks_epoch(NULL), 0);
    assert_int_equal(ks_member_id(NULL), 0);
    assert_int_equal(ks_members(NULL, &m, 1), 0);
    assert_int_equal(ks_mode(NULL, &bound), KS_SYNC);
    assert_int_equal(ks_mode_set(NULL, KS_ASYNC, 0, 0, NULL), KS_EINVAL);
    assert_int_equal(ks_tensor_register(NULL, "w", &(struct ks_spec){.dtype = KS_F32}, &t), KS_EINVAL);
    assert_int_equal(ks_init(NULL, text, 0, NULL), KS_EINVAL);
    assert_int_equal(ks_tensor_bytes(NULL), 0);
    assert_string_equal(ks_tensor_name(NULL), "");
    assert_int_equal(ks_push(NULL, text, 1, &h), KS_EINVAL);
    assert_int_equal(ks_pull(NULL, text, &h), KS_EINVAL);
    assert_int_equal(ks_push_pull(NULL, text, text, 1, &h), KS_EINVAL);
    assert_int_equal(ks_broadcast(NULL, text, 0, &h), KS_EINVAL);
    assert_int_equal(ks_many(NULL, NULL, 0, &h), KS_EINVAL);
    assert_int_equal(ks_wait(NULL, 0), KS_EINVAL);
    assert_int_equal(ks_poll(NULL), KS_EINVAL);
    ks_on_done(NULL, NULL, NULL);
    assert_int_equal(ks_step_end(NULL), KS_EINVAL);
    assert_int_equal(ks_step_wait(NULL, 0), KS_EINVAL);
    assert_int_equal(ks_option_set(NULL, "default", "lr", 1), KS_EINVAL);
    ks_stats(NULL, &s);
    ks_staleness(NULL, buckets);
    assert_int_equal(ks_waiting(NULL, text, sizeof text), 0);
    assert_string_equal(text, "");
}

static void test_error_texts(void **state)
{
    (void)state;
#define KS_X(name, value, text) assert_string_equal(ks_strerror(name), text);
    KS_ERROR_TABLE(KS_X)
#undef KS_X
    assert_string_equal(ks_strerror(1), "no such error");
    assert_string_equal(ks_strerror(-1000), "no such error");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_coord, setup),           cmocka_unit_test_setup(test_names, setup),
        cmocka_unit_test_setup(test_numbers, setup),         cmocka_unit_test_setup(test_token, setup),
        cmocka_unit_test_setup(test_no_such_job, setup),     cmocka_unit_test_setup(test_store_does_not_answer, setup),
        cmocka_unit_test_setup(test_null_everywhere, setup), cmocka_unit_test_setup(test_error_texts, setup),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
