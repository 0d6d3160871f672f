#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <string.h>
#include <cmocka.h>

#include "base/keepstep_err.h"
#include "base/mem.h"
#include "net/auth.h"
#include "wire/frame.h"

static struct hello hello_of(const char *job, const char *role, uint64_t id, uint8_t nonce)
{
    struct hello h = {.id = id, .epoch = id * 10, .chunk_bytes = 4096};
    snprintf(h.job, sizeof h.job, "%s", job);
    snprintf(h.role, sizeof h.role, "%s", role);
    memset(h.nonce, nonce, sizeof h.nonce);
    return h;
}

struct pair {
    struct auth connector, listener;
    struct auth_reply reply; /* the newest */
    char err[ERR_TEXT];
};

static void pair_init(struct pair *p, const char *token_c, const char *token_l)
{
    memset(p, 0, sizeof *p);
    struct hello c = hello_of("digits", "member", 7, 1), l = hello_of("digits", "server", 9, 2);
    auth_init(&p->listener, AUTH_LISTENER, &l, token_l, &p->reply);
    assert_int_equal(p->reply.type, 0);
    auth_init(&p->connector, AUTH_CONNECTOR, &c, token_c, &p->reply);
    assert_int_equal(p->reply.type, FRAME_HELLO);
}

/* Hands the newest reply to `to`. */
static int deliver(struct pair *p, struct auth *to)
{
    struct auth_reply r = p->reply;
    int rc = auth_step(to, r.type, r.doc, r.doc ? strlen(r.doc) : 0, &p->reply, p->err);
    mem_free(r.doc);
    if (rc)
        p->reply = (struct auth_reply){0};
    return rc;
}

static void test_both_open(void **state)
{
    (void)state;
    struct pair p;
    pair_init(&p, "secret", "secret");
    assert_int_equal(deliver(&p, &p.listener), 0);
    assert_int_equal(p.reply.type, FRAME_CHALLENGE);
    assert_int_equal(deliver(&p, &p.connector), 0);
    assert_int_equal(p.reply.type, FRAME_AUTH);
    assert_int_not_equal(p.listener.state, AUTH_OPEN);
    assert_int_equal(deliver(&p, &p.listener), 0);
    assert_int_equal(p.reply.type, FRAME_WELCOME);
    assert_int_equal(p.listener.state, AUTH_OPEN);
    assert_int_equal(deliver(&p, &p.connector), 0);
    assert_int_equal(p.connector.state, AUTH_OPEN);
    assert_int_equal(p.listener.peer.id, 7);
    assert_int_equal(p.listener.peer.epoch, 70);
    assert_string_equal(p.listener.peer.role, "member");
    assert_int_equal(p.connector.peer.id, 9);
    assert_int_equal(p.connector.peer.epoch, 90);
}

static void test_wrong_token(void **state)
{
    (void)state;
    struct pair p;
    pair_init(&p, "secret", "other");
    assert_int_equal(deliver(&p, &p.listener), 0);
    assert_int_equal(deliver(&p, &p.connector), KS_EAUTH);
    assert_string_equal(p.err, "the token is not this job's");
    assert_int_not_equal(p.connector.state, AUTH_OPEN);
}

/* A connector that does not care whether the listener knows the token learns nothing that opens. */
static void test_listener_refuses_wrong_proof(void **state)
{
    (void)state;
    struct pair p;
    pair_init(&p, "secret", "secret");
    assert_int_equal(deliver(&p, &p.listener), 0);
    p.connector.token = "guess";
    assert_int_equal(deliver(&p, &p.connector), KS_EAUTH);

    struct hello c = hello_of("digits", "member", 7, 1);
    struct proof_doc proof = {.id = 7};
    memcpy(proof.nonce, c.nonce, sizeof proof.nonce);
    char *doc = proof_encode(&proof);
    assert_int_equal(auth_step(&p.listener, FRAME_AUTH, doc, strlen(doc), &p.reply, p.err), KS_EAUTH);
    mem_free(doc);
    assert_int_not_equal(p.listener.state, AUTH_OPEN);
}

/* The listener's own proof, sent back, is not the connector's. */
static void test_reflection(void **state)
{
    (void)state;
    struct pair p;
    pair_init(&p, "secret", "secret");
    assert_int_equal(deliver(&p, &p.listener), 0);
    struct proof_doc proof;
    assert_int_equal(proof_decode(p.reply.doc, strlen(p.reply.doc), &proof, p.err), 0);
    mem_free(p.reply.doc);
    proof.id = 7;
    char *doc = proof_encode(&proof);
    assert_int_equal(auth_step(&p.listener, FRAME_AUTH, doc, strlen(doc), &p.reply, p.err), KS_EAUTH);
    mem_free(doc);
}

/* A proof of one connection does not open another: the nonces differ. */
static void test_replay(void **state)
{
    (void)state;
    struct pair p, q;
    pair_init(&p, "secret", "secret");
    assert_int_equal(deliver(&p, &p.listener), 0);
    assert_int_equal(deliver(&p, &p.connector), 0);
    char *recorded = p.reply.doc;

    pair_init(&q, "secret", "secret");
    memset(q.listener.self.nonce, 3, NONCE_BYTES);
    assert_int_equal(deliver(&q, &q.listener), 0);
    mem_free(q.reply.doc);
    assert_int_equal(auth_step(&q.listener, FRAME_AUTH, recorded, strlen(recorded), &q.reply, q.err), KS_EAUTH);
    mem_free(recorded);
}

static void test_other_id_in_auth(void **state)
{
    (void)state;
    struct pair p;
    pair_init(&p, "secret", "secret");
    assert_int_equal(deliver(&p, &p.listener), 0);
    assert_int_equal(deliver(&p, &p.connector), 0);
    struct proof_doc proof;
    assert_int_equal(proof_decode(p.reply.doc, strlen(p.reply.doc), &proof, p.err), 0);
    mem_free(p.reply.doc);
    proof.id = 8;
    char *doc = proof_encode(&proof);
    assert_int_equal(auth_step(&p.listener, FRAME_AUTH, doc, strlen(doc), &p.reply, p.err), KS_EAUTH);
    mem_free(doc);
}

static void test_other_job_and_chunk_size(void **state)
{
    (void)state;
    struct pair p;
    pair_init(&p, "secret", "secret");
    snprintf(p.listener.self.job, sizeof p.listener.self.job, "letters");
    assert_int_equal(deliver(&p, &p.listener), KS_ENOENT);
    assert_non_null(strstr(p.err, "'digits'"));

    pair_init(&p, "secret", "secret");
    p.listener.self.chunk_bytes = 8192;
    assert_int_equal(deliver(&p, &p.listener), KS_EINVAL);
    assert_non_null(strstr(p.err, "8192"));
    assert_non_null(strstr(p.err, "4096"));
}

static int refuse(void *arg, const struct hello *h, char *err)
{
    snprintf(err, ERR_TEXT, "%s %s", (const char *)arg, h->role);
    return KS_EFENCED;
}

static void test_accept_refuses(void **state)
{
    (void)state;
    struct pair p;
    char word[] = "no";
    pair_init(&p, "secret", "secret");
    p.listener.accept = refuse;
    p.listener.accept_arg = word;
    assert_int_equal(deliver(&p, &p.listener), KS_EFENCED);
    assert_string_equal(p.err, "no member");
}

static void test_out_of_turn_and_garbage(void **state)
{
    (void)state;
    struct pair p;
    pair_init(&p, "", "");
    mem_free(p.reply.doc);
    assert_int_equal(auth_step(&p.listener, FRAME_AUTH, "{}", 2, &p.reply, p.err), KS_EPROTO);
    assert_int_equal(auth_step(&p.listener, FRAME_WELCOME, NULL, 0, &p.reply, p.err), KS_EPROTO);
    assert_int_equal(auth_step(&p.connector, FRAME_WELCOME, NULL, 0, &p.reply, p.err), KS_EPROTO);
    assert_int_equal(auth_step(&p.connector, FRAME_HELLO, "{}", 2, &p.reply, p.err), KS_EPROTO);
    static const char *const docs[] = {"", "{", "{}", "[1]", "\"x\"", "{\"job\":7}"};
    for (size_t i = 0; i < sizeof docs / sizeof *docs; i++) {
        assert_int_equal(auth_step(&p.listener, FRAME_HELLO, docs[i], strlen(docs[i]), &p.reply, p.err), KS_EPROTO);
        assert_int_equal(auth_step(&p.connector, FRAME_CHALLENGE, docs[i], strlen(docs[i]), &p.reply, p.err),
                         KS_EPROTO);
    }
    assert_int_equal(p.listener.state, AUTH_AT_HELLO);
    assert_int_equal(p.connector.state, AUTH_AT_CHALLENGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_open),
        cmocka_unit_test(test_wrong_token),
        cmocka_unit_test(test_listener_refuses_wrong_proof),
        cmocka_unit_test(test_reflection),
        cmocka_unit_test(test_replay),
        cmocka_unit_test(test_other_id_in_auth),
        cmocka_unit_test(test_other_job_and_chunk_size),
        cmocka_unit_test(test_accept_refuses),
        cmocka_unit_test(test_out_of_turn_and_garbage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
