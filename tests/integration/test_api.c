/* keepstep.h as its users see it: tensors, first values, handles, results of every type, options, errors. */
#include "tests/integration/rig.h"

#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "wire/dtype.h"

enum { MEMBERS = 3 };

struct world {
    _Atomic int at[16]; /* how many have passed a place */
    _Atomic int won;
    float trained[64];
};
struct task {
    struct world *w;
    unsigned slot;
};

/* Everybody waits for everybody. */
static void meet(const struct ks_job *j, struct world *w, unsigned place, int members)
{
    w->at[place]++;
    RIG_AWAIT(j, w->at[place] >= members);
}

static void must_have(const struct ks_job *j, const char *text, const char *part)
{
    if (!strstr(text, part))
        rig_die(j, __FILE__, __LINE__, "'%s' does not say '%s'", text, part);
}

static struct world *start(struct rig *r, const char *mode, const char *members, const char *chunk_bytes)
{
    rig_server_options(r, "--servers", "2", "--members", members, "--loops", "2", "--shards", "6", "--mode", mode,
                       "--chunk-bytes", chunk_bytes, NULL);
    rig_servers_start(r, 2);
    return rig_shared(r, sizeof(struct world));
}

static void run(struct rig *r, struct world *w, void (*fn)(struct rig_self *), unsigned members)
{
    static struct task task[MEMBERS];
    for (unsigned i = 0; i < members; i++) {
        task[i] = (struct task){w, i};
        rig_worker_start(r, fn, &task[i]);
    }
    rig_workers_done(r);
}

/* ---- names and shapes ---- */

static void names(struct rig_self *s)
{
    struct task *task = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t, *again;
    struct ks_spec spec = {.dtype = KS_F32, .ndims = 2, .dims = {4, 3}},
                   other = {.dtype = KS_F64, .ndims = 1, .dims = {12}};
    if (task->slot == 0)
        RIG_OK(j, ks_tensor_register(j, "t", &spec, &t));
    meet(j, task->w, 0, 2);
    RIG_GIVES(j, ks_tensor_register(j, "t", &other, &again), KS_EEXIST);
    must_have(j, ks_last_error(j), "f32[4,3]");
    must_have(j, ks_last_error(j), "f64[12]");
    RIG_OK(j, ks_tensor_register(j, "t", &spec, &t));
    RIG_OK(j, ks_tensor_register(j, "t", &spec, &again));
    RIG_MUST(j, t == again && ks_tensor_bytes(t) == 48 && !strcmp(ks_tensor_name(t), "t"));
    RIG_GIVES(j, ks_tensor_register(j, "", &spec, &t), KS_EINVAL);
    static const char *const bad[] = {"a\nb", "a\xff", "\xed\xa0\x80", "\x7f"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        RIG_GIVES(j, ks_tensor_register(j, bad[i], &spec, &t), KS_EINVAL);
    must_have(j, ks_last_error(j), "UTF-8");
    RIG_OK(j, ks_tensor_register(j, "\xc3\xa9 \"%s\"\\", &spec, &t));
    spec.group = "a\nb";
    RIG_GIVES(j, ks_tensor_register(j, "u", &spec, &t), KS_EINVAL);
    other.dims[0] = (uint64_t)1 << 60;
    RIG_GIVES(j, ks_tensor_register(j, "u", &other, &t), KS_EINVAL);
    other.dims[0] = (uint64_t)1 << 40;
    RIG_GIVES(j, ks_tensor_register(j, "u", &other, &t), KS_ENOMEM);
    must_have(j, ks_last_error(j), "raise --memory");
    spec.dtype = 99;
    RIG_GIVES(j, ks_tensor_register(j, "u", &spec, &t), KS_EINVAL);
    spec = (struct ks_spec){.dtype = KS_F32, .kind = KS_PARAM, .optimizer = "sdg lr=1"};
    RIG_GIVES(j, ks_tensor_register(j, "u", &spec, &t), KS_EINVAL);
    must_have(j, ks_last_error(j), "sdg");
    must_have(j, ks_last_error(j), "sgd");
    spec.optimizer = "sgd";
    RIG_GIVES(j, ks_tensor_register(j, "u", &spec, &t), KS_EINVAL);
    must_have(j, ks_last_error(j), "lr");
    ks_close(j);
}

static void test_names(void **state)
{
    struct rig *r = *state;
    run(r, start(r, "sync", "2", "1M"), names, 2);
}

/* ---- first values ---- */

static void init_and_train(struct rig_self *s)
{
    struct task *task = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "w", KS_F32, 64, KS_PARAM, "sgd lr=1");
    float mine[64], grad[64], value[64];
    struct ks_handle *h;
    int won = -1;
    for (unsigned i = 0; i < 64; i++) {
        mine[i] = (float)(task->slot + 1) * 1000;
        grad[i] = 1;
    }
    RIG_OK(j, ks_init(t, mine, -1, &won));
    task->w->won += won;
    RIG_OK(j, ks_pull(t, value, &h));
    RIG_OK(j, ks_wait(h, -1));
    for (unsigned i = 0; i < 64; i++)
        RIG_MUST(j, value[i] == value[0] && (!won || value[i] == mine[i]));
    RIG_OK(j, ks_push_pull(t, grad, value, 1.0, &h));
    RIG_OK(j, ks_step_end(j));
    RIG_OK(j, ks_wait(h, -1));
    memcpy(task->w->trained, value, sizeof value);
    ks_close(j);
}

static void init_again(struct rig_self *s)
{
    struct task *task = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "w", KS_F32, 64, KS_PARAM, "sgd lr=1");
    float mine[64] = {0}, value[64];
    struct ks_handle *h;
    int won = -1;
    RIG_OK(j, ks_init(t, mine, -1, &won));
    RIG_MUST(j, won == 0);
    RIG_OK(j, ks_pull(t, value, &h));
    RIG_OK(j, ks_wait(h, -1));
    RIG_MUST(j, !memcmp(value, task->w->trained, sizeof value));
    ks_close(j);
}

static void test_init(void **state)
{
    struct rig *r = *state;
    struct world *w = start(r, "sync", "3", "64");
    run(r, w, init_and_train, MEMBERS);
    RIG_ASSERT(r, w->won == 1);
    run(r, w, init_again, 1);
    for (unsigned i = 0; i < 2; i++)
        rig_server_kill(r, i);
    rig_servers_start(r, 2);
    run(r, w, init_again, 2);
}

/* ---- handles ---- */

enum { MANY = 60 };

static void on_done(void *arg, int outcome)
{
    atomic_store((_Atomic int *)arg, outcome == 0 ? 1 : outcome);
}

static void many_tensors(struct ks_job *j, int members)
{
    static int32_t in[MANY], out[MANY];
    struct ks_tensor *t[MANY];
    struct ks_item item[MANY];
    struct ks_handle *h;
    for (int i = 0; i < MANY; i++) {
        char name[16];
        struct ks_spec spec = {.dtype = KS_I32};
        snprintf(name, sizeof name, "t%d", i);
        RIG_OK(j, ks_tensor_register(j, name, &spec, &t[i]));
        in[i] = i + 1;
        item[i] = (struct ks_item){.tensor = t[i], .data = &in[i], .out = i % 5 ? &out[i] : NULL};
    }
    RIG_OK(j, ks_many(j, item, MANY, &h));
    RIG_OK(j, ks_step_end(j));
    int rc;
    RIG_AWAIT(j, (rc = ks_poll(h)) != 0);
    RIG_MUST(j, rc == 1);
    for (int i = 0; i < MANY; i++)
        RIG_MUST(j, out[i] == (i % 5 ? members * (i + 1) : 0));
}

static void handles(struct rig_self *s)
{
    struct task *task = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "t", KS_I64, 8, KS_REDUCE, NULL);
    int64_t in[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8];
    _Atomic int called = 0;
    struct ks_handle *h, *twice;
    many_tensors(j, 2);
    /* Before the end of the step a result cannot come; twice a step is a mistake. */
    RIG_OK(j, ks_push_pull(t, in, out, 1.0, &h));
    RIG_GIVES(j, ks_wait(h, 1000), KS_ESTATE);
    RIG_MUST(j, ks_poll(h) == 0);
    RIG_GIVES(j, ks_push(t, in, 1.0, &twice), KS_ESTATE);
    must_have(j, ks_last_error(j), "'t'");
    if (task->slot == 0) {
        RIG_OK(j, ks_step_end(j));
        /* The other has not ended it: in time, and with a text that says what is waited for. */
        RIG_GIVES(j, ks_wait(h, 0), KS_ETIMEOUT);
        uint64_t now = clock_now_us();
        RIG_GIVES(j, ks_wait(h, 100), KS_ETIMEOUT);
        RIG_MUST(j, clock_now_us() - now >= 99000 && clock_now_us() - now < 99000 + 1000 * (uint64_t)rig_ms(1000));
        must_have(j, ks_last_error(j), "step");
        char text[256];
        RIG_MUST(j, ks_waiting(j, text, sizeof text) > 0);
        ks_on_done(h, on_done, (void *)&called);
        meet(j, task->w, 0, 2);
        RIG_AWAIT(j, called == 1);
    } else {
        meet(j, task->w, 0, 2);
        RIG_OK(j, ks_step_end(j));
        RIG_OK(j, ks_wait(h, -1));
    }
    RIG_OK(j, ks_step_wait(j, -1));
    for (int i = 0; i < 8; i++)
        RIG_MUST(j, out[i] == 2 * (i + 1));
    RIG_GIVES(j, ks_pull(t, out, &h), KS_ESTATE);
    RIG_GIVES(j, ks_push(t, in, -1.0, &h), KS_EINVAL);
    RIG_GIVES(j, ks_push(t, in, NAN, &h), KS_EINVAL);
    RIG_GIVES(j, ks_push(t, NULL, 1.0, &h), KS_EINVAL);
    ks_close(j);
}

static void test_handles(void **state)
{
    struct rig *r = *state;
    run(r, start(r, "sync", "2", "1M"), handles, 2);
}

/* ---- every type ---- */

static double number(enum ks_dtype t, const void *x, size_t i)
{
    float f;
    switch (t) {
    case KS_F32:
        return ((const float *)x)[i];
    case KS_F64:
        return ((const double *)x)[i];
    case KS_F16:
        dtype_widen(DTYPE_F16, &f, (const uint16_t *)x + i, 1);
        return f;
    case KS_BF16:
        dtype_widen(DTYPE_BF16, &f, (const uint16_t *)x + i, 1);
        return f;
    case KS_I32:
        return ((const int32_t *)x)[i];
    case KS_I64:
        return (double)((const int64_t *)x)[i];
    default:
        return ((const uint8_t *)x)[i];
    }
}

static void number_set(enum ks_dtype t, void *x, size_t i, int value)
{
    float f = (float)value;
    switch (t) {
    case KS_F32:
        ((float *)x)[i] = f;
        break;
    case KS_F64:
        ((double *)x)[i] = value;
        break;
    case KS_F16:
        dtype_narrow(DTYPE_F16, (uint16_t *)x + i, &f, 1);
        break;
    case KS_BF16:
        dtype_narrow(DTYPE_BF16, (uint16_t *)x + i, &f, 1);
        break;
    case KS_I32:
        ((int32_t *)x)[i] = value;
        break;
    case KS_I64:
        ((int64_t *)x)[i] = value;
        break;
    default:
        ((uint8_t *)x)[i] = (uint8_t)value;
    }
}

/* Small enough for all types to be exact. Odd rounds in place. */
static void types_of(struct ks_job *j, enum ks_dtype dtype, enum ks_kind kind, uint32_t ndims, uint64_t n)
{
    static uint64_t in[4096], out[4096];
    char name[32];
    struct ks_tensor *t;
    struct ks_handle *h;
    struct ks_spec spec = {.dtype = dtype, .ndims = ndims, .dims = {n}, .kind = kind, .op = KS_SUM};
    snprintf(name, sizeof name, "%d-%d-%u-%u", (int)dtype, (int)kind, ndims, (unsigned)n);
    RIG_OK(j, ks_tensor_register(j, name, &spec, &t));
    for (int round = 0; round < 4; round++) {
        void *to = round % 2 ? in : out;
        for (size_t i = 0; i < n; i++)
            number_set(dtype, in, i, (int)(i % 3) + round);
        RIG_OK(j, ks_push_pull(t, in, to, 1.0, &h));
        RIG_OK(j, ks_step_end(j));
        RIG_OK(j, ks_wait(h, -1));
        for (size_t i = 0; i < n; i++) {
            int sum = (int)(i % 3) + round;
            int total = (int)(i % 3) * (round + 1) + round * (round + 1) / 2;
            RIG_MUST(j, number(dtype, to, i) == 2 * (kind == KS_PARAM ? total : sum));
        }
    }
}

static void types(struct rig_self *s)
{
    struct ks_job *j = rig_open(s);
    for (int dtype = KS_F32; dtype <= KS_U8; dtype++)
        for (int kind = KS_REDUCE; kind <= KS_PARAM; kind++) {
            types_of(j, (enum ks_dtype)dtype, (enum ks_kind)kind, 0, 1);
            types_of(j, (enum ks_dtype)dtype, (enum ks_kind)kind, 1, 1);
            types_of(j, (enum ks_dtype)dtype, (enum ks_kind)kind, 1, 4001);
        }
    ks_close(j);
}

static void test_types(void **state)
{
    struct rig *r = *state;
    run(r, start(r, "sync", "2", "512"), types, 2);
}

/* ---- broadcast ---- */

static void broadcast(struct rig_self *s)
{
    static double buffer[5000];
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "b", KS_F64, 5000, KS_REDUCE, NULL);
    struct ks_handle *h;
    for (int64_t root = 0; root < MEMBERS; root++) {
        for (int i = 0; i < 5000; i++)
            buffer[i] = ks_rank(j) * 10000 + i;
        RIG_OK(j, ks_broadcast(t, buffer, root, &h));
        RIG_OK(j, ks_step_end(j));
        RIG_OK(j, ks_wait(h, -1));
        for (int i = 0; i < 5000; i++)
            RIG_MUST(j, buffer[i] == root * 10000 + i);
    }
    RIG_GIVES(j, ks_broadcast(t, buffer, MEMBERS, &h), KS_EINVAL);
    RIG_GIVES(j, ks_broadcast(t, buffer, -1, &h), KS_EINVAL);
    ks_close(j);
}

static void test_broadcast(void **state)
{
    struct rig *r = *state;
    run(r, start(r, "sync", "3", "1K"), broadcast, MEMBERS);
}

/* ---- what is not finite ---- */

enum { SIZE = 40, IN_CHUNK = 16, BAD = 3 };

/* Slot 0 pushes a NaN in one place, slot 1 ones. A policy goes chunk by chunk. */
static void finite_of(struct ks_job *j, unsigned slot, const char *name, enum ks_finite finite, int want, float at_bad,
                      float in_chunk)
{
    struct ks_spec spec = {
        .dtype = KS_F32, .ndims = 1, .dims = {SIZE}, .kind = KS_PARAM, .op = KS_SUM, .finite = finite};
    struct ks_tensor *t;
    struct ks_handle *h;
    float in[SIZE], out[SIZE];
    RIG_OK(j, ks_tensor_register(j, name, &spec, &t));
    for (int i = 0; i < SIZE; i++)
        in[i] = 1;
    if (slot == 0)
        in[BAD] = NAN;
    RIG_OK(j, ks_push_pull(t, in, out, 1.0, &h));
    RIG_OK(j, ks_step_end(j));
    int rc = ks_wait(h, -1);
    /* A step of a chunk that is skipped is skipped for all. */
    RIG_MUST(j, rc == (slot == 0 || finite == KS_FINITE_SKIP ? want : 0));
    for (int i = 0; i < SIZE; i++) {
        float expected = i == BAD ? at_bad : i < IN_CHUNK ? in_chunk : 2;
        RIG_MUST(j, isnan(expected) ? isnan(out[i]) : out[i] == expected);
    }
}

static void not_finite(struct rig_self *s)
{
    struct task *task = s->arg;
    struct ks_job *j = rig_open(s);
    finite_of(j, task->slot, "default", KS_FINITE_DEFAULT, KS_ENOTFINITE, 1, 1);
    finite_of(j, task->slot, "reject", KS_FINITE_REJECT, KS_ENOTFINITE, 1, 1);
    finite_of(j, task->slot, "apply", KS_FINITE_APPLY, KS_OK, NAN, 2);
    finite_of(j, task->slot, "skip", KS_FINITE_SKIP, KS_ENOTFINITE, 0, 0);
    ks_close(j);
}

static void test_finite(void **state)
{
    struct rig *r = *state;
    run(r, start(r, "sync", "2", "64"), not_finite, 2);
}

/* ---- options ---- */

enum { OPTION_STEPS = 9, OPTION_N = 600 };

static void options(struct rig_self *s)
{
    struct task *task = s->arg;
    static float grad[OPTION_N], value[OPTION_N], want[OPTION_N];
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "w", KS_F32, OPTION_N, KS_PARAM, "sgd lr=0.5");
    struct ks_handle *h;
    float lr = 0.5f;
    for (int i = 0; i < OPTION_N; i++)
        grad[i] = (float)i;
    for (int step = 0; step < OPTION_STEPS; step++) {
        /* One says it, in the step before. */
        if (step % 3 == 1 && task->slot == (unsigned)(step / 3) % 2)
            RIG_OK(j, ks_option_set(j, "default", "lr", 0.25 / (step + 1)));
        RIG_OK(j, ks_push_pull(t, grad, value, 1.0, &h));
        RIG_OK(j, ks_step_end(j));
        RIG_OK(j, ks_wait(h, -1));
        for (int i = 0; i < OPTION_N; i++) {
            want[i] -= lr * (grad[i] + grad[i]);
            if (value[i] != want[i])
                rig_die(j, __FILE__, __LINE__, "step %d, element %d: %.9g, not %.9g", step, i, value[i], want[i]);
        }
        if (step % 3 == 1)
            lr = (float)(0.25 / (step + 1));
    }
    RIG_GIVES(j, ks_option_set(j, "default", "learning_rate", 1), KS_ENOENT);
    must_have(j, ks_last_error(j), "momentum");
    RIG_GIVES(j, ks_option_set(j, "no such group", "lr", 1), KS_ENOENT);
    must_have(j, ks_last_error(j), "no such group");
    RIG_GIVES(j, ks_option_set(j, "default", "lr", NAN), KS_EINVAL);
    ks_close(j);
}

static void test_options(void **state)
{
    struct rig *r = *state;
    run(r, start(r, "sync", "2", "64"), options, 2);
}

/* ---- the asynchronous modes ---- */

static void modes(struct rig_self *s)
{
    struct task *task = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *p = rig_tensor(j, "p", KS_I64, 100, KS_PARAM, "add"),
                     *sum = rig_tensor(j, "s", KS_I64, 100, KS_REDUCE, NULL);
    struct ks_tensor *bad = rig_tensor(j, "bad", KS_F32, 1, KS_PARAM, "add");
    int64_t in[100], out[100], running[100];
    float nan = NAN, scalar;
    struct ks_handle *h, *k;
    for (int i = 0; i < 100; i++)
        in[i] = 1;
    for (int round = 1; round <= 5; round++) {
        /* As often as one likes, and a push_pull sees its own push. */
        for (int n = 0; n < 2; n++) {
            RIG_OK(j, ks_push(p, in, 1.0, &h));
            RIG_OK(j, ks_wait(h, -1));
        }
        RIG_OK(j, ks_push_pull(p, in, out, 1.0, &h));
        RIG_OK(j, ks_push_pull(sum, in, running, 1.0, &k));
        RIG_OK(j, ks_wait(h, -1));
        RIG_OK(j, ks_wait(k, -1));
        for (int i = 0; i < 100; i++)
            RIG_MUST(j, out[i] >= 3 * round && out[i] <= 6 * 5 && running[i] >= round && running[i] <= 2 * 5);
        RIG_OK(j, ks_step_end(j));
    }
    RIG_OK(j, ks_push(bad, &nan, 1.0, &h));
    RIG_GIVES(j, ks_wait(h, -1), KS_ENOTFINITE);
    RIG_OK(j, ks_pull(bad, &scalar, &h));
    RIG_OK(j, ks_wait(h, -1));
    RIG_MUST(j, scalar == 0);
    meet(j, task->w, 0, 2);
    RIG_OK(j, ks_pull(p, out, &h));
    RIG_OK(j, ks_pull(sum, running, &k));
    RIG_OK(j, ks_wait(h, -1));
    RIG_OK(j, ks_wait(k, -1));
    for (int i = 0; i < 100; i++)
        RIG_MUST(j, out[i] == 2 * 3 * 5 && running[i] == 2 * 5);
    RIG_GIVES(j, ks_broadcast(sum, running, 0, &h), KS_ESTATE);
    ks_close(j);
}

static void test_async(void **state)
{
    struct rig *r = *state;
    run(r, start(r, "async", "2", "128"), modes, 2);
}

static void test_bounded(void **state)
{
    struct rig *r = *state;
    run(r, start(r, "ssp:1", "2", "128"), modes, 2);
}

/* ---- forks, closing ---- */

static void *wait_for_it(void *arg)
{
    return (void *)(intptr_t)ks_wait(arg, -1);
}

static void forks_and_closes(struct rig_self *s)
{
    struct task *task = s->arg;
    static float big[1 << 20], out[1 << 20];
    int status;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "big", KS_F32, 1 << 20, KS_REDUCE, NULL);
    struct ks_handle *h;
    pid_t child = fork();
    if (child == 0) {
        int rc = ks_push(t, big, 1.0, &h);
        ks_close(j);
        _exit(rc == KS_ESTATE && strstr(ks_last_error(NULL), "fork") ? 0 : 1);
    }
    RIG_MUST(j, waitpid(child, &status, 0) == child && status == 0);
    RIG_OK(j, ks_push_pull(t, big, out, 1.0, &h));
    if (task->slot == 0) {
        /* Its result never comes: the other has not pushed. Closing ends the wait. */
        pthread_t thread;
        void *outcome;
        RIG_OK(j, ks_step_end(j));
        RIG_MUST(j, pthread_create(&thread, NULL, wait_for_it, h) == 0);
        struct ks_stats stats;
        uint64_t pushes;
        ks_stats(j, &stats);
        pushes = stats.pushes;
        RIG_MUST(j, pushes > 0);
        ks_close(j);
        RIG_MUST(NULL, pthread_join(thread, &outcome) == 0);
        RIG_MUST(NULL, (intptr_t)outcome == KS_ECLOSED);
    } else {
        /* The other has gone; this one is alone and can go on. */
        RIG_AWAIT(j, ks_size(j) == 1);
        RIG_OK(j, ks_step_end(j));
        RIG_OK(j, ks_wait(h, -1));
        RIG_OK(j, ks_push_pull(t, big, out, 1.0, &h));
        ks_close(j);
    }
}

static void test_forks_and_closes(void **state)
{
    struct rig *r = *state;
    run(r, start(r, "sync", "2", "256K"), forks_and_closes, 2);
}

static void wrong_settings(struct rig_self *s)
{
    struct ks_job *j = NULL;
    struct ks_options o = {.coord = s->rig->coord, .job = s->rig->job, .token = "another", .join_timeout_ms = 5000};
    RIG_GIVES(NULL, ks_open(&o, &j), KS_EAUTH);
    o.token = s->rig->token;
    o.job = "no-such-job";
    o.join_timeout_ms = 500;
    RIG_GIVES(NULL, ks_open(&o, &j), KS_ENOENT);
    must_have(NULL, ks_last_error(NULL), "no-such-job");
    o.coord = "somewhere";
    RIG_GIVES(NULL, ks_open(&o, &j), KS_EINVAL);
    must_have(NULL, ks_last_error(NULL), "somewhere");
    RIG_MUST(NULL, !j);
}

static void test_wrong_settings(void **state)
{
    struct rig *r = *state;
    run(r, start(r, "sync", "1", "1M"), wrong_settings, 1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, rig_setup, rig_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_names),          TEST(test_init),
        TEST(test_handles),        TEST(test_types),
        TEST(test_broadcast),      TEST(test_finite),
        TEST(test_options),        TEST(test_async),
        TEST(test_bounded),        TEST(test_forks_and_closes),
        TEST(test_wrong_settings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
