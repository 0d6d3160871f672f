#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "base/keepstep_err.h"
#include "base/mem.h"
#include "coord/etcd_reply.h"
#include "coord/etcd_request.h"

#define HEADER "\"header\":{\"cluster_id\":\"3\",\"revision\":\"9007199254740993\"}"

static const char prefix[] = "/keepstep/j/";

/* "/keepstep/j/KEY" and the value as etcd's answer to a range would hold them. */
static char *range_of(const char *fields)
{
    static char body[1024];
    snprintf(body, sizeof body, "{" HEADER ",\"kvs\":[{%s}],\"count\":\"1\"}", fields);
    return body;
}

static int read_range(const char *body, struct coord_event *ret)
{
    memset(ret, 0, sizeof *ret);
    return etcd_reply_range(body, strlen(body), prefix, ret);
}

static void test_range(void **state)
{
    (void)state;
    struct coord_event e;
    assert_int_equal(read_range(range_of("\"key\":\"L2tlZXBzdGVwL2ovYQ==\",\"value\":\"AGI=\","
                                         "\"create_revision\":\"9007199254740992\","
                                         "\"mod_revision\":\"9007199254740993\""),
                                &e),
                     0);
    assert_int_equal(e.nkv, 1);
    assert_string_equal(e.kv[0].key, "a");
    assert_int_equal(e.kv[0].value_size, 2);
    assert_memory_equal(e.kv[0].value, "\0b", 3);
    assert_true(e.kv[0].create_revision == 9007199254740992);
    assert_true(e.kv[0].mod_revision == 9007199254740993 && e.revision == 9007199254740993);
    coord_event_done(&e);
    assert_int_equal(read_range("{" HEADER "}", &e), 0);
    assert_int_equal(e.nkv, 0);
}

/* Keys that coord.h cannot hold are no fault of etcd. */
static void test_foreign_keys_are_skipped(void **state)
{
    (void)state;
    struct coord_event e;
    assert_int_equal(read_range(range_of("\"key\":\"L2tlZXBzdGVwL2ovAGE=\",\"mod_revision\":\"2\""), &e), 0);
    assert_int_equal(e.nkv, 0);
    assert_int_equal(read_range(range_of("\"key\":\"L2tlZXBzdGVwL2ov\",\"mod_revision\":\"2\""), &e), 0);
    assert_int_equal(e.nkv, 0);
}

static void test_bad_ranges(void **state)
{
    (void)state;
    static const char *const fields[] = {
        "",
        "\"key\":\"L2tlZXBzdGVwL2ovYQ==\"",
        "\"key\":\"L2tlZXBzdGVwL2ovYQ==\",\"mod_revision\":\"two\"",
        "\"key\":\"L2tlZXBzdGVwL2ovYQ==\",\"mod_revision\":\"99999999999999999999\"",
        "\"key\":\"L2tlZXBzdGVwL2ovYQ==\",\"mod_revision\":1e300",
        "\"key\":\"L2tlZXBzdGVwL2ovYQ==\",\"mod_revision\":\"-2\"",
        "\"key\":\"L2tlZXBzdGVwL2ovYQ\",\"mod_revision\":\"2\"",
        "\"key\":\"L2tlZXBzdGVwL2ovY===\",\"mod_revision\":\"2\"",
        "\"key\":\"L2tlZXBzdGVw_2ovYQ==\",\"mod_revision\":\"2\"",
        "\"key\":[1],\"mod_revision\":\"2\"",
        "\"key\":\"YQ==\",\"mod_revision\":\"2\"",
    };
    static const char *const body[] = {"",
                                       "[]",
                                       "{}",
                                       "{\"header\":{\"revision\":\"1\"},\"kvs\":7}",
                                       "{ ",
                                       "null",
                                       "{\"header\":{\"revision\":\"1\"},\"kvs\":[3]}"};
    struct coord_event e;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (read_range(range_of(fields[i]), &e) != KS_EPROTO)
            fail_msg("taken: %s", fields[i]);
    for (size_t i = 0; i < sizeof body / sizeof *body; i++)
        if (read_range(body[i], &e) != KS_EPROTO)
            fail_msg("taken: %s", body[i]);
}

static void test_small_answers(void **state)
{
    (void)state;
    bool succeeded = true;
    int64_t revision, lease, ttl_s;
    char *token;
    static const char failed[] = "{" HEADER "}", grant[] = "{" HEADER ",\"ID\":\"-5\",\"TTL\":\"2\"}";
    static const char kept[] = "{\"result\":{" HEADER ",\"ID\":\"5\",\"TTL\":\"2\"}}";
    static const char over[] = "{\"result\":{" HEADER ",\"ID\":\"5\"}}", auth[] = "{" HEADER ",\"token\":\"a.1\"}";
    static const char split[] = "{" HEADER ",\"token\":\"a\\r\\nX: 1\"}";
    assert_int_equal(etcd_reply_txn(failed, strlen(failed), &succeeded, &revision), 0);
    assert_false(succeeded);
    assert_int_equal(etcd_reply_grant(grant, strlen(grant), &lease, &ttl_s, &revision), 0);
    assert_int_equal(lease, -5);
    assert_int_equal(ttl_s, 2);
    assert_int_equal(etcd_reply_grant(failed, strlen(failed), &lease, &ttl_s, &revision), KS_EPROTO);
    assert_int_equal(etcd_reply_keepalive(kept, strlen(kept), &ttl_s), 0);
    assert_int_equal(ttl_s, 2);
    assert_int_equal(etcd_reply_keepalive(over, strlen(over), &ttl_s), 0);
    assert_int_equal(ttl_s, 0);
    assert_int_equal(etcd_reply_keepalive(failed, strlen(failed), &ttl_s), KS_EPROTO);
    assert_int_equal(etcd_reply_token(auth, strlen(auth), &token), 0);
    assert_string_equal(token, "a.1");
    mem_free(token);
    assert_int_equal(etcd_reply_token(split, strlen(split), &token), KS_EPROTO);
}

static void test_errors(void **state)
{
    (void)state;
    static const char *const body[] = {
        "{\"error\":\"no lease\",\"message\":\"no lease\",\"code\":5}",
        "{\"error\":{\"grpc_code\":5,\"http_code\":404,\"message\":\"no lease\"}}",
        "{\"code\":5,\"message\":\"no lease\",\"details\":[]}",
    };
    struct etcd_error e;
    for (size_t i = 0; i < sizeof body / sizeof *body; i++) {
        etcd_reply_error(body[i], strlen(body[i]), &e);
        assert_int_equal(e.code, 5);
        assert_string_equal(e.text, "no lease");
    }
    etcd_reply_error("<html>\x1b[2J", 10, &e);
    assert_int_equal(e.code, 0);
    assert_string_equal(e.text, "<html>?[2J");
    etcd_reply_error("", 0, &e);
    assert_true(e.text[0] != 0);
}

static int read_watch(const char *line, struct etcd_watch_reply *ret)
{
    return etcd_reply_watch(line, strlen(line), prefix, ret);
}

static void test_watch(void **state)
{
    (void)state;
    struct etcd_watch_reply r;
    assert_int_equal(read_watch("{\"result\":{" HEADER ",\"created\":true}}", &r), 0);
    assert_true(r.created);
    assert_int_equal(read_watch("{\"result\":{" HEADER ",\"events\":[{\"kv\":{\"key\":\"L2tlZXBzdGVwL2ovYQ==\","
                                "\"create_revision\":\"2\",\"mod_revision\":\"3\"}},{\"type\":\"DELETE\",\"kv\":{"
                                "\"key\":\"L2tlZXBzdGVwL2ovYQ==\",\"mod_revision\":\"4\"}}]}}",
                                &r),
                     0);
    assert_int_equal(r.change.nkv, 2);
    assert_string_equal(r.change.kv[0].value, "");
    assert_null(r.change.kv[1].value);
    assert_int_equal(r.change.kv[1].mod_revision, 4);
    coord_event_done(&r.change);
    assert_int_equal(read_watch("{\"result\":{\"header\":{},\"canceled\":true,\"compact_revision\":\"7\"}}", &r), 0);
    assert_true(r.canceled);
    assert_int_equal(r.compact_revision, 7);
    assert_int_equal(read_watch("{\"error\":{\"grpc_code\":14,\"message\":\"etcdserver: no leader\"}}", &r), 0);
    assert_int_equal(r.error.code, 14);
    assert_int_equal(read_watch("{\"result\":{" HEADER ",\"events\":[{}]}}", &r), KS_EPROTO);
    assert_int_equal(read_watch("{\"result\":3}", &r), KS_EPROTO);
    assert_int_equal(read_watch("}", &r), KS_EPROTO);
}

static void test_request_bodies(void **state)
{
    (void)state;
    struct coord_request q = {.kind = COORD_TXN, .nguards = 1, .nops = 2};
    q.guard[0] = (struct coord_guard){GUARD_MOD_REVISION, "a", 9007199254740993};
    q.op[0] = (struct coord_op){"a", "b", 7};
    q.op[1] = (struct coord_op){"c", NULL, 0};
    char *body = etcd_request_body(&q, prefix);
    assert_string_equal(body, "{\"compare\":[{\"key\":\"L2tlZXBzdGVwL2ovYQ==\",\"result\":\"EQUAL\",\"target\":\"MOD\","
                              "\"mod_revision\":\"9007199254740993\"}],\"success\":[{\"request_put\":{\"key\":"
                              "\"L2tlZXBzdGVwL2ovYQ==\",\"value\":\"Yg==\",\"lease\":\"7\"}},{\"request_delete_range\":"
                              "{\"key\":\"L2tlZXBzdGVwL2ovYw==\"}}]}");
    mem_free(body);
    struct coord_request range = {.kind = COORD_RANGE, .prefix = "a\xff\xff"};
    body = etcd_request_body(&range, prefix);
    assert_string_equal(body, "{\"key\":\"L2tlZXBzdGVwL2ovYf//\",\"range_end\":\"L2tlZXBzdGVwL2ovYg==\"}");
    mem_free(body);
    assert_int_equal(etcd_ttl_s(1), 2);
    assert_int_equal(etcd_ttl_s(2001), 3);
    assert_int_equal(etcd_ttl_s(UINT32_MAX), 4294968);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_range),          cmocka_unit_test(test_foreign_keys_are_skipped),
        cmocka_unit_test(test_bad_ranges),     cmocka_unit_test(test_small_answers),
        cmocka_unit_test(test_errors),         cmocka_unit_test(test_watch),
        cmocka_unit_test(test_request_bodies),
    };
    return cmocka_run_group_tests_name("etcd_reply", tests, NULL, NULL);
}
