#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/keepstep_err.h"
#include "base/mem.h"
#include "base/rng.h"
#include "tests/unit/doc_again.h"

/* ---- samples ---- */

static struct view *view_sample(void)
{
    struct view *v = view_create(2, 2, 3);
    v->epoch = 7;
    v->term = UINT64_MAX;
    v->nonce = 0x123456789abcdef0ull;
    v->mchg = 6;
    v->short_of_replicas = true;
    v->nmodes = 2;
    v->mode[0] = (struct mode){0, MODE_SYNC, 0};
    v->mode[1] = (struct mode){100, MODE_SSP, 3};
    for (uint32_t i = 0; i < 2; i++) {
        struct view_server *s = &v->server[i];
        s->id = 10 + i;
        s->nloops = i + 1;
        snprintf(s->name, sizeof s->name, "s%u \"quoted\\\" \xc3\xa9", i);
        str_copy(s->ctl, sizeof s->ctl, "[::1]:7000");
        for (uint32_t k = 0; k < s->nloops; k++)
            snprintf(s->loop[k], sizeof s->loop[k], "127.0.0.1:%u", 8000 + k);
    }
    v->member[0] = (struct view_member){.id = 20, .join = 0, .last = 41, .local_size = 2, .name = "m0"};
    v->member[1] = (struct view_member){.id = UINT64_MAX, .join = 5, .last = STEP_NONE, .live = true, .local_size = 8};
    v->shard[0] = (struct view_shard){.primary = 10, .since = 1};
    v->shard[1] = (struct view_shard){.primary = 11, .since = 7, .nbackups = 1, .backup = {10}};
    v->shard[2] = (struct view_shard){.primary = 10, .since = 2, .njoining = 1, .joining = {11}};
    return v;
}

static struct tensor_spec tensor_sample(void)
{
    struct tensor_spec s = {.dtype = DTYPE_BF16,
                            .ndims = 2,
                            .dim = {64, 10},
                            .kind = TENSOR_PARAM,
                            .op = TENSOR_AVERAGE,
                            .finite = FINITE_REJECT,
                            .name = "layer.0/w",
                            .group = "default",
                            .optimizer = "adamw lr=0.001"};
    s.id = tensor_id(s.name);
    return s;
}

static char *sample_job(void)
{
    return job_encode(&(struct job_doc){.job = "digits",
                                        .nshards = 16,
                                        .chunk_bytes = 1 << 20,
                                        .servers_min = 2,
                                        .members_min = 3,
                                        .replicas = 2,
                                        .replicas_min = 1,
                                        .deterministic = true,
                                        .durability = "write",
                                        .mode = {0, MODE_SSP, 2},
                                        .wait_for_server_s = 60});
}

static char *sample_server(void)
{
    struct view *v = view_sample();
    struct server_doc s = {v->server[1], 9};
    view_free(v);
    return server_encode(&s);
}

static char *sample_view(void)
{
    struct view *v = view_sample();
    char *text = view_encode(v);
    view_free(v);
    return text;
}

static char *sample_join(void)
{
    return join_encode(&(struct join_doc){.id = 77, .name = "host:12", .local_size = 4});
}

static char *sample_prepare(void)
{
    struct view *base = view_sample();
    uint64_t gone[] = {10, 20}, heir[] = {30}, heir_of[] = {10};
    struct join_doc joins[] = {{77, "a", 1}, {78, "b", 2}};
    struct shard_move move[] = {{1, 10}, {2, 11}};
    struct prepare p = {.ballot = {3, 4},
                        .base = base,
                        .controller = 11,
                        .ngone = 2,
                        .njoins = 2,
                        .gone = gone,
                        .joins = joins,
                        .nheirs = 1,
                        .heir = heir,
                        .heir_of = heir_of,
                        .mode_change = true,
                        .nmoves = 2,
                        .move = move};
    char *text = prepare_encode(&p);
    view_free(base);
    return text;
}

static char *sample_report(void)
{
    struct shard_report shard[] = {
        {.shard = 0, .role = HOLDER_PRIMARY, .nsynced = 2, .synced = {12, UINT64_MAX}, .complete = 41, .join = 42},
        {.shard = 3, .role = HOLDER_JOINER, .full = true, .complete = 41, .join = 42},
        {.shard = 4095, .role = HOLDER_HEIR, .complete = -1, .join = 0}};
    return report_encode(
        &(struct report){.from = 11, .ballot = {3, 4}, .base_epoch = 7, .clock = -1, .nshards = 3, .shard = shard});
}

static char *sample_tensor(void)
{
    struct tensor_spec s = tensor_sample();
    return tensor_encode(&s);
}

static char *sample_hello(void)
{
    return hello_encode(&(struct hello){
        .job = "digits", .role = "member", .id = 20, .epoch = 7, .chunk_bytes = 4096, .loop = 63, .nonce = {0, 1, 0xfe, 0xff}});
}

static char *sample_proof(void)
{
    return proof_encode(&(struct proof_doc){.id = 11, .epoch = 7, .nonce = {9}, .proof = {0xab}});
}

static char *sample_mode(void)
{
    return mode_encode(&(struct mode){12, MODE_ASYNC, 0});
}

static const struct kind {
    const char *name;
    char *(*sample)(void);
    int (*again)(const char *text, size_t size, char **ret, char *err);
} kinds[] = {
    {"job", sample_job, again_job},
    {"server", sample_server, again_server},
    {"view", sample_view, again_view},
    {"join", sample_join, again_join},
    {"prepare", sample_prepare, again_prepare},
    {"report", sample_report, again_report},
    {"tensor", sample_tensor, again_tensor},
    {"hello", sample_hello, again_hello},
    {"proof", sample_proof, again_proof},
    {"mode", sample_mode, again_mode},
};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

static const struct kind *kind_find(const char *name)
{
    for (int i = 0; i < KINDS; i++) {
        if (strcmp(kinds[i].name, name) == 0)
            return &kinds[i];
    }
    fail_msg("no kind %s", name);
    return NULL;
}

static void test_round_trip(void **state)
{
    (void)state;
    for (int i = 0; i < KINDS; i++) {
        char err[ERR_TEXT] = "", *first = kinds[i].sample(), *second = NULL;
        if (kinds[i].again(first, strlen(first), &second, err) != 0)
            fail_msg("%s: %s in %s", kinds[i].name, err, first);
        assert_string_equal(first, second);
        mem_free(first);
        mem_free(second);
    }
}

static void test_view_values(void **state)
{
    (void)state;
    char err[ERR_TEXT], *text = sample_view();
    struct view *want = view_sample(), *v = NULL;
    assert_int_equal(view_decode(text, strlen(text), &v, err), 0);
    assert_true(v->short_of_replicas);
    assert_true(v->epoch == want->epoch && v->term == want->term && v->nonce == want->nonce && v->mchg == want->mchg);
    assert_int_equal(v->nmodes, 2);
    assert_memory_equal(v->mode, want->mode, sizeof v->mode);
    assert_int_equal(v->nservers, 2);
    assert_memory_equal(v->server, want->server, 2 * sizeof *v->server);
    assert_int_equal(v->nmembers, 2);
    assert_int_equal(v->member[0].last, 41);
    assert_false(v->member[0].live);
    assert_true(v->member[1].last == STEP_NONE && v->member[1].live && v->member[1].id == UINT64_MAX);
    assert_int_equal(v->nshards, 3);
    assert_memory_equal(v->shard, want->shard, 3 * sizeof *v->shard);
    view_free(want);
    view_free(v);
    mem_free(text);
}

/* A view whose reason was cut within a character must stay readable. */
static void test_view_ended(void **state)
{
    (void)state;
    char err[ERR_TEXT];
    struct view *v = view_sample(), *back = NULL;
    str_copy(v->ended, sizeof v->ended, "disk\nfull \xc3");
    char *text = view_encode(v);
    assert_int_equal(view_decode(text, strlen(text), &back, err), 0);
    assert_string_equal(back->ended, "disk?full ?");
    view_free(v);
    view_free(back);
    mem_free(text);
}

/* ---- refusals ---- */

static char *replaced(const char *text, const char *old, const char *new)
{
    const char *at = strstr(text, old);
    if (!at)
        fail_msg("no %s in %s", old, text);
    size_t head = (size_t)(at - text);
    char *out = mem_alloc(strlen(text) + strlen(new) + 1);
    memcpy(out, text, head);
    strcpy(out + head, new);
    strcat(out, at + strlen(old));
    return out;
}

static void refuse(const char *kind, const char *old, const char *new, const char *want)
{
    const struct kind *k = kind_find(kind);
    char err[ERR_TEXT] = "", *sample = k->sample(), *bad = replaced(sample, old, new), *again = NULL;
    int rc = k->again(bad, strlen(bad), &again, err);
    if (rc != KS_EPROTO || !strstr(err, want))
        fail_msg("%s: rc %d, \"%s\" instead of \"%s\" for %s", kind, rc, err, want, bad);
    assert_null(again);
    mem_free(sample);
    mem_free(bad);
}

static const struct refusal {
    const char *kind, *old, *new, *want;
} refusals[] = {
    {"job", "\"job\":\"digits\"", "\"job\":\"\"", "job.job: empty"},
    {"job", "digits", "0123456789012345678901234567890123456789012345678901234567890123", "64 bytes, more than the 63"},
    {"job", "digits", "dig\\u0000its", "NUL"},
    {"job", "digits", "dig\\nits", "job.job: control"},
    {"job", "digits", "dig\xff", "job.job: control characters or not UTF-8"},
    {"job", "digits", "dig\xed\xa0\x80", "not UTF-8"},
    {"job", "\"nshards\":16", "\"nshards\":0", "job.nshards: 0 is not in 1..4096"},
    {"job", "\"nshards\":16", "\"nshards\":4097", "job.nshards: 4097"},
    {"job", "\"nshards\":16", "\"nshards\":1.5", "job.nshards: not an integer"},
    {"job", "\"nshards\":16", "\"nshards\":\"16\"", "job.nshards: not an integer"},
    {"job", "\"nshards\":16", "\"nshards\":-1", "job.nshards"},
    {"job", "\"nshards\":16", "\"nshards\":1e999", "job.nshards"},
    {"job", "\"nshards\"", "\"other\"", "job.nshards: missing"},
    {"job", "\"chunk_bytes\":1048576", "\"chunk_bytes\":1048580", "job.chunk_bytes: 1048580 is not a multiple of 8"},
    {"job", "\"chunk_bytes\":1048576", "\"chunk_bytes\":56", "job.chunk_bytes"},
    {"job", "\"chunk_bytes\":1048576", "\"chunk_bytes\":67108872", "job.chunk_bytes"},
    {"job", "\"servers_min\":2", "\"servers_min\":0", "job.servers_min"},
    {"job", "\"members_min\":3", "\"members_min\":65537", "job.members_min"},
    {"job", "\"replicas\":2", "\"replicas\":3", "job.replicas"},
    {"job", "\"replicas_min\":1", "\"replicas_min\":3", "job.replicas_min: 3 is not in 0..2"},
    {"job", "\"replicas_min\":1", "\"replicas_min\":\"1\"", "job.replicas_min: not an integer"},
    {"job", "\"deterministic\":true", "\"deterministic\":1", "job.deterministic: neither true nor false"},
    {"job", "\"write\"", "\"maybe\"", "job.durability: none of none, write"},
    {"job", "\"from\":\"0\"", "\"from\":\"1\"", "job.mode.from: the first mode"},
    {"job", "\"from\":\"0\"", "\"from\":\"none\"", "job.mode.from: not a step"},
    {"job", "\"bound\":2", "\"bound\":1000001", "job.mode.bound"},
    {"job", "\"mode\":{", "\"mode\":[{}],\"x\":{", "job.mode: not an object"},
    {"job", "\"wait_for_server_s\":60", "\"wait_for_server_s\":4294967296", "job.wait_for_server_s"},
    {"job", "}", "", "job: not JSON, at byte"},
    {"job", "{", "[{", "job: not JSON"},
    {"job", "{\"job\"", "{}{\"job\"", "job: not JSON, at byte 2"},
    {"server", "\"id\":\"11\"", "\"id\":\"0\"", "server.id: 0 is not in"},
    {"server", "\"id\":\"11\"", "\"id\":11", "server.id: not a string"},
    {"server", "\"id\":\"11\"", "\"id\":\"011\"", "server.id: not an unsigned 64-bit integer"},
    {"server", "\"id\":\"11\"", "\"id\":\"18446744073709551616\"", "server.id: not an unsigned"},
    {"server", "\"id\":\"11\"", "\"id\":\"-1\"", "server.id: not an unsigned"},
    {"server", "\"id\":\"11\"", "\"id\":\"\"", "server.id: not an unsigned"},
    {"server", "\"id\":\"11\"", "\"id\":\" 1\"", "server.id: not an unsigned"},
    {"server", "[::1]:7000", "", "server.ctl: empty"},
    {"server", "127.0.0.1:8001", "", "server.loop[1]: empty"},
    {"server", "127.0.0.1:8001", "123456789012345678901234567890123456789012345678", "server.loop[1]: 48 bytes"},
    {"server", "\"loop\":[", "\"loop\":[],\"x\":[", "server.loop: not 1..64 elements"},
    {"server", "\"loop\":[", "\"loop\":{},\"x\":[", "server.loop: not a list"},
    {"server", "\"loop\":[", "\"loop\":[7,", "server.loop[0]: not a string"},
    {"server", "\"heir_of\":\"9\"", "\"heir_of\":\"11\"", "server.heir_of"},
    {"view", "\"epoch\":\"7\"", "\"epoch\":\"0\"", "view.epoch"},
    {"view", "\"short_of_replicas\":true", "\"short_of_replicas\":1", "view.short_of_replicas: neither"},
    {"view", "\"from\":\"0\"", "\"from\":\"1\"", "view.mode[0].from: the first mode"},
    {"view", "\"from\":\"100\"", "\"from\":\"0\"", "view.mode[1].from: not ascending"},
    {"view", "\"from\":\"100\"", "\"from\":\"-3\"", "view.mode[1].from: step -3 is out of range"},
    {"view", "\"kind\":\"sync\",\"bound\":0", "\"kind\":\"sync\",\"bound\":1", "view.mode[0].bound"},
    {"view", "\"mode\":[", "\"mode\":[],\"x\":[", "view.mode: not 1..16"},
    {"view", "\"id\":\"11\"", "\"id\":\"10\"", "view.server[1].id: not ascending"},
    {"view", "\"id\":\"20\"", "\"id\":\"18446744073709551615\"", "view.member[1].id: not ascending"},
    {"view", "\"join\":\"5\"", "\"join\":\"-1\"", "view.member[1].join"},
    {"view", "\"join\":\"5\"", "\"join\":\"none\"", "view.member[1].join: not a step"},
    {"view", "\"join\":\"5\"", "\"join\":\"4611686018427387904\"", "view.member[1].join: not a step"},
    {"view", "\"last\":\"41\"", "\"last\":\"-2\"", "view.member[0].last"},
    {"view", "\"last\":\"41\"", "\"last\":\"9223372036854775807\"", "view.member[0].last: not a step"},
    {"view", "\"local_size\":2", "\"local_size\":0", "view.member[0].local_size"},
    {"view", "\"primary\":\"10\"", "\"primary\":\"0\"", "view.shard[0].primary"},
    {"view", "\"backup\":[\"10\"]", "\"backup\":[\"0\"]", "view.shard[1].backup[0]"},
    {"view", "\"backup\":[\"10\"]", "\"backup\":[\"11\"]", "view.shard[1]: names the same server twice"},
    {"view", "\"backup\":[\"10\"]", "\"backup\":[\"1\",\"2\",\"3\"]", "view.shard[1].backup: not 0..2"},
    {"view", "\"joining\":[\"11\"]", "\"joining\":[\"10\"]", "view.shard[2]: names the same server twice"},
    {"view", "\"shard\":[", "\"shard\":[],\"x\":[", "view.shard: not 1..4096"},
    {"view", "\"shard\":[", "\"shard\":[7,", "view.shard[0]"},
    {"join", "\"id\":\"77\"", "\"id\":\"0\"", "join.id"},
    {"join", "\"local_size\":4", "\"local_size\":65536", "join.local_size"},
    {"prepare", "\"base\":{", "\"base\":null,\"x\":{", "prepare.base: not an object"},
    {"prepare", "\"epoch\":\"7\"", "\"epoch\":7", "prepare.base.epoch: not a string"},
    {"prepare", "\"controller\":\"11\"", "\"controller\":\"0\"", "prepare.controller"},
    {"prepare", "\"gone\":[\"10\",\"20\"]", "\"gone\":[\"20\",\"20\"]", "prepare.gone[1]: not ascending"},
    {"prepare", "\"gone\":[\"10\"", "\"gone\":[\"0\"", "prepare.gone[0]"},
    {"prepare", "\"name\":\"b\"", "\"name\":2", "prepare.joins[1].name: not a string"},
    {"prepare", "\"of\":\"10\"", "\"of\":\"0\"", "prepare.heirs[0].of"},
    {"prepare", "\"mode_change\":true", "\"mode_change\":null", "prepare.mode_change"},
    {"report", "\"from\":\"11\"", "\"from\":\"0\"", "report.from"},
    {"report", "\"clock\":\"-1\"", "\"clock\":\"-2\"", "report.clock"},
    {"report", "\"clock\":\"-1\"", "\"clock\":\"-0\"", "report.clock"},
    {"prepare", "\"shard\":2,\"to\"", "\"shard\":1,\"to\"", "prepare.moves[1].shard: not ascending"},
    {"prepare", "\"shard\":2,\"to\"", "\"shard\":3,\"to\"", "prepare.moves[1].shard: 3 is not in 0..2"},
    {"prepare", "\"shard\":1,\"to\":\"10\"", "\"shard\":1,\"to\":\"0\"", "prepare.moves[0].to"},
    {"prepare", "\"moves\":[", "\"moves\":[{},{},", "prepare.moves: not 0..3"},
    {"prepare", "\"moves\":[", "\"moves\":null,\"x\":[", "prepare.moves: not a list"},
    {"report", "\"synced\":[\"12\"", "\"synced\":[\"0\"", "report.shard[0].synced[0]"},
    {"report", "\"synced\":[\"12\"", "\"synced\":[\"1\",\"2\"", "report.shard[0].synced: not 0..2"},
    {"report", "\"synced\":[]", "\"synced\":[\"1\"]", "report.shard[1].synced: not 0..0"},
    {"report", "\"shard\":4095", "\"shard\":4096", "report.shard[2].shard"},
    {"report", "\"heir\"", "\"hair\"", "report.shard[2].role: none of primary, backup, joiner, heir"},
    {"report", "\"complete\":\"41\"", "\"complete\":\"none\"", "report.shard[0].complete"},
    {"report", "\"join\":\"42\"", "\"join\":\"x\"", "report.shard[0].join"},
    {"tensor", "layer.0/w", "layer.0/x", "tensor.id: not the hash"},
    {"tensor", "\"bf16\"", "\"q4\"", "tensor.dtype: no such element type"},
    {"tensor", "\"dim\":[\"64\",\"10\"]", "\"dim\":[\"1125899906842625\"]", "tensor.dim[0]"},
    {"tensor", "\"dim\":[\"64\",\"10\"]", "\"dim\":[\"562949953421313\"]", "tensor.dim: more than 2^50 bytes"},
    {"tensor", "\"dim\":[\"64\",\"10\"]", "\"dim\":[\"0\",\"1125899906842624\",\"1125899906842624\"]",
     "more than 2^50"},
    {"tensor", "\"dim\":[\"64\",\"10\"]", "\"dim\":[\"4294967296\",\"4294967296\",\"4294967296\"]", "more than 2^50"},
    {"tensor", "\"dim\":[\"64\",\"10\"]", "\"dim\":[64]", "tensor.dim[0]: not a string"},
    {"tensor", "[\"64\",",
     "[\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",",
     "tensor.dim: not 0..16"},
    {"tensor", "\"param\"", "\"gradient\"", "tensor.kind: none of reduce, param"},
    {"tensor", "\"param\"", "\"reduce\"", "tensor.optimizer: only params"},
    {"tensor", "\"average\"", "\"mean\"", "tensor.op"},
    {"tensor", "\"reject\"", "\"\"", "tensor.finite"},
    {"tensor", "\"group\":\"default\"", "\"group\":\"\"", "tensor.group: empty"},
    {"hello", "\"member\"", "\"king\"", "hello.role: none of member, server, operator"},
    {"hello", "\"member\"", "\"operator\"", "hello.id: 20 is not in 0..0"},
    {"hello", "\"id\":\"20\"", "\"id\":\"0\"", "hello.id"},
    {"hello", "\"chunk_bytes\":4096", "\"chunk_bytes\":8", "hello.chunk_bytes"},
    {"hello", "\"chunk_bytes\":4096", "\"chunk_bytes\":4097", "hello.chunk_bytes"},
    {"hello", "\"loop\":63", "\"loop\":64", "hello.loop: 64 is not in 0..63"},
    {"hello", "0001feff", "0001FEFF", "hello.nonce: not 32 hexadecimal digits"},
    {"hello", "0001feff", "0001fe", "hello.nonce: not 32 hexadecimal digits"},
    {"proof", "ab00", "zz00", "proof.proof: not 64 hexadecimal digits"},
    {"proof", "\"nonce\"", "\"once\"", "proof.nonce: missing"},
    {"mode", "\"async\"", "\"bsp\"", "mode.kind: none of sync, ssp, async"},
};

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++)
        refuse(refusals[i].kind, refusals[i].old, refusals[i].new, refusals[i].want);
}

static void test_refuse_extremes(void **state)
{
    (void)state;
    static char deep[200000];
    char err[ERR_TEXT];
    struct mode m;
    assert_int_equal(mode_decode("", 0, &m, err), KS_EPROTO);
    assert_int_equal(mode_decode("null", 4, &m, err), KS_EPROTO);
    assert_string_equal(err, "mode: not an object");
    char *text = sample_mode();
    assert_int_equal(mode_decode(text, strlen(text) + 1, &m, err), KS_EPROTO);
    assert_string_equal(err, "mode: contains a NUL character");
    mem_free(text);
    memset(deep, '[', sizeof deep);
    assert_int_equal(mode_decode(deep, 60000, &m, err), KS_EPROTO);
    assert_int_equal(mode_decode(deep, sizeof deep, &m, err), KS_EPROTO);
    assert_string_equal(err, "mode: 200000 bytes, more than the 65536 allowed");
    struct view *v = (struct view *)1;
    assert_int_equal(view_decode(deep, sizeof deep, &v, err), KS_EPROTO);
    assert_ptr_equal(v, (struct view *)1);
}

/* Documents of writers that knew nothing of replication: what is missing is none. */
static void test_older_writers(void **state)
{
    (void)state;
    static const struct {
        const char *kind, *now, *before;
    } older[] = {
        {"job", "\"replicas_min\":1,", ""},   {"view", "\"short_of_replicas\":true,", ""},
        {"hello", "\"loop\":63,", ""},        {"prepare", ",\"moves\":[", ",\"other\":["},
        {"report", "\"synced\":[\"12\"", "\"other\":[\"12\""},
    };
    for (size_t i = 0; i < sizeof older / sizeof older[0]; i++) {
        const struct kind *k = kind_find(older[i].kind);
        char err[ERR_TEXT] = "", *sample = k->sample(), *text = replaced(sample, older[i].now, older[i].before), *again = NULL;
        if (k->again(text, strlen(text), &again, err))
            fail_msg("%s: %s in %s", k->name, err, text);
        assert_non_null(again);
        mem_free(sample);
        mem_free(text);
        mem_free(again);
    }
}

/* Unknown keys, blanks and the order of keys do not matter; a literal \\u0000 is not a NUL. */
static void test_accepts(void **state)
{
    (void)state;
    static const char text[] =
        " { \"later\" : [ { \"x\" : \"\\\\u0000\" } ], \"bound\" : 3.0, \"kind\" : \"s\\u0073p\","
        "\n\t\"from\" : \"9\" } \r\n";
    char err[ERR_TEXT] = "";
    struct mode m;
    assert_int_equal(mode_decode(text, sizeof text - 1, &m, err), 0);
    assert_true(m.from == 9 && m.kind == MODE_SSP && m.bound == 3);
}

/* Whatever the bytes: refused with a text, or accepted and then stable. */
static void test_mutations(void **state)
{
    (void)state;
    struct rng rng = {11};
    static const char alphabet[] = "\"\\{}[]:,0129-.eEnulltruefalse\x00\x01\xff ";
    for (int round = 0; round < 40000; round++) {
        const struct kind *k = &kinds[rng_below(&rng, KINDS)];
        char err[ERR_TEXT] = "", *text = k->sample(), *second = NULL, *third = NULL;
        size_t size = strlen(text);
        for (uint64_t n = 1 + rng_below(&rng, 3); n; n--)
            text[rng_below(&rng, size)] = alphabet[rng_below(&rng, sizeof alphabet - 1)];
        if (rng_chance(&rng, 200))
            size = rng_below(&rng, size);
        int rc = k->again(text, size, &second, err);
        if (rc == 0) {
            assert_int_equal(k->again(second, strlen(second), &third, err), 0);
            assert_string_equal(second, third);
        } else {
            assert_int_equal(rc, KS_EPROTO);
            assert_int_equal(strncmp(err, k->name, strlen(k->name)), 0);
        }
        mem_free(text);
        mem_free(second);
        mem_free(third);
    }
}

/* ---- tensors and modes ---- */

static void test_tensor_sizes(void **state)
{
    (void)state;
    struct tensor_spec s = tensor_sample();
    assert_int_equal(tensor_count(&s), 640);
    assert_int_equal(tensor_bytes(&s), 1280);
    assert_int_equal(tensor_chunks(&s, 1280), 1);
    assert_int_equal(tensor_chunks(&s, 512), 3);
    assert_int_equal(tensor_chunk_bytes(&s, 0, 512), 512);
    assert_int_equal(tensor_chunk_bytes(&s, 2, 512), 256);
    assert_int_equal(tensor_chunk_bytes(&s, 3, 512), 0);
    s.ndims = 0;
    assert_int_equal(tensor_count(&s), 1);
    assert_int_equal(tensor_chunks(&s, 64), 1);
    s.ndims = 1;
    s.dim[0] = 0;
    assert_int_equal(tensor_chunks(&s, 64), 1);
    assert_int_equal(tensor_chunk_bytes(&s, 0, 64), 0);
    s.dim[0] = 5ull << 30;
    assert_int_equal(tensor_bytes(&s), 10ull << 30);
    assert_int_equal(tensor_chunk_bytes(&s, 10239, 1 << 20), 1 << 20);
    assert_int_equal(tensor_chunk_bytes(&s, 10240, 1 << 20), 0);
    s.dim[0] = 1ull << 49;
    assert_int_equal(tensor_chunks(&s, 64), UINT32_MAX);
    assert_true(tensor_id("") != 0 && tensor_id("a") != tensor_id("b"));
}

static void test_tensor_same(void **state)
{
    (void)state;
    struct tensor_spec a = tensor_sample(), b = tensor_sample();
    char text[400], short_text[12];
    b.dim[2] = 99;
    assert_true(tensor_same(&a, &b));
    tensor_describe(&a, text, sizeof text);
    assert_string_equal(text, "bf16[64,10] param op=average finite=reject group=default optimizer=\"adamw lr=0.001\"");
    tensor_describe(&a, short_text, sizeof short_text);
    assert_string_equal(short_text, "bf16[64,10]");
    b.dim[1] = 11;
    assert_false(tensor_same(&a, &b));
    b = tensor_sample();
    b.optimizer[0] = 0;
    assert_false(tensor_same(&a, &b));
    b = tensor_sample();
    b.finite = FINITE_SKIP;
    assert_false(tensor_same(&a, &b));
    b = tensor_sample();
    b.ndims = 1;
    assert_false(tensor_same(&a, &b));
}

static void test_mode_text(void **state)
{
    (void)state;
    static const char *const good[][2] = {{"sync", "sync"},
                                          {"async", "async"},
                                          {"ssp:0", "ssp:0"},
                                          {"staleness:12", "ssp:12"},
                                          {"ssp:1000000", "ssp:1000000"}};
    static const char *const bad[] = {
        "", "syn", "sync ", "ssp", "ssp:", "ssp:-1", "ssp:1x", "ssp:1000001", "async:1", "ssp:99999999999999999999"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        struct mode m = {.from = 99};
        char text[32];
        assert_int_equal(mode_parse(good[i][0], &m), 0);
        assert_int_equal(m.from, 0);
        mode_format(&m, text, sizeof text);
        assert_string_equal(text, good[i][1]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct mode m = {.from = 99};
        assert_int_equal(mode_parse(bad[i], &m), KS_EINVAL);
        assert_int_equal(m.from, 99);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_view_values),     cmocka_unit_test(test_view_ended),
        cmocka_unit_test(test_refusals),   cmocka_unit_test(test_refuse_extremes), cmocka_unit_test(test_accepts),
        cmocka_unit_test(test_mutations),  cmocka_unit_test(test_tensor_sizes),    cmocka_unit_test(test_tensor_same),
        cmocka_unit_test(test_mode_text),  cmocka_unit_test(test_older_writers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
