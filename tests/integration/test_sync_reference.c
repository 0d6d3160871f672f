/* Synchronous training with 1, 2, 4 and 7 members equals an ordered single-process reference bit for bit, after every
 * step, at every member. */
#include "tests/integration/rig.h"

#include "server/optim.h"
#include "wire/dtype.h"

enum { WORKERS_MAX = 7, STEPS = 12, N = 1000, TENSORS = 5 };

static const struct kind_of {
    const char *name, *optimizer;
    enum ks_kind kind;
    enum ks_op op;
    enum ks_dtype dtype;
    bool weighted, uneven;
} kinds[TENSORS] = {
    {"momentum", "sgd lr=0.05 momentum=0.9 wd=0.01", KS_PARAM, KS_AVERAGE, KS_F32, false, false},
    {"adam", "adam lr=0.01", KS_PARAM, KS_AVERAGE, KS_F32, true, true},
    {"plain", "sgd lr=0.1", KS_PARAM, KS_SUM, KS_F32, false, true},
    {"mean", NULL, KS_REDUCE, KS_AVERAGE, KS_F32, true, false},
    {"half", NULL, KS_REDUCE, KS_SUM, KS_F16, false, true},
};

struct seen {
    _Atomic uint64_t id[WORKERS_MAX];
    int64_t first_step[WORKERS_MAX];
    int won[WORKERS_MAX][TENSORS];
    float start[WORKERS_MAX][TENSORS][N];
    float value[WORKERS_MAX][STEPS][TENSORS][N]; /* 16-bit ones use half of it */
};
struct task {
    struct seen *seen;
    unsigned slot;
};

static void numbers(unsigned slot, unsigned step, unsigned tensor, enum ks_dtype dtype, void *out)
{
    struct rng g = {slot * 1000003ull + step * 1009 + tensor};
    float wide[N];
    for (unsigned i = 0; i < N; i++)
        wide[i] = (float)((double)(int64_t)rng_below(&g, 2000001) / 1000000.0 - 1.0);
    dtype_narrow((enum dtype)dtype, out, wide, N);
}

static double weight_of(unsigned tensor, unsigned slot)
{
    return kinds[tensor].weighted ? 1.0 + (slot * 5 + 1) % 3 : 1.0;
}

static bool pushes(unsigned tensor, unsigned slot, unsigned step)
{
    return !kinds[tensor].uneven || (slot + step) % 4 != 0;
}

enum { FIRST = 999 }; /* the "step" of a member's first values */

static void member(struct rig_self *s)
{
    const struct task *task = s->arg;
    struct seen *seen = task->seen;
    unsigned slot = task->slot;
    static float grad[TENSORS][N], value[TENSORS][N];
    struct ks_tensor *t[TENSORS];
    struct ks_handle *h[TENSORS];
    struct ks_job *j = rig_open(s);
    seen->id[slot] = ks_member_id(j);
    for (unsigned i = 0; i < TENSORS; i++) {
        const struct kind_of *k = &kinds[i];
        struct ks_spec spec = {.dtype = k->dtype,
                               .ndims = 2,
                               .dims = {N / 10, 10},
                               .kind = k->kind,
                               .op = k->op,
                               .optimizer = k->optimizer};
        RIG_OK(j, ks_tensor_register(j, k->name, &spec, &t[i]));
        if (k->kind != KS_PARAM)
            continue;
        numbers(slot, FIRST, i, k->dtype, value[i]);
        RIG_OK(j, ks_init(t[i], value[i], -1, &seen->won[slot][i]));
        RIG_OK(j, ks_pull(t[i], seen->start[slot][i], &h[i]));
        RIG_OK(j, ks_wait(h[i], -1));
    }
    seen->first_step[slot] = ks_step(j);
    for (unsigned step = 0; step < STEPS; step++) {
        for (unsigned i = 0; i < TENSORS; i++) {
            numbers(slot, step, i, kinds[i].dtype, grad[i]);
            RIG_OK(j, ks_push_pull(t[i], pushes(i, slot, step) ? grad[i] : NULL, value[i], weight_of(i, slot), &h[i]));
        }
        RIG_OK(j, ks_step_end(j));
        for (unsigned i = TENSORS; i-- > 0;)
            RIG_OK(j, ks_wait(h[i], -1));
        memcpy(seen->value[slot][step], value, sizeof value);
    }
    RIG_OK(j, ks_leave(j, -1));
    ks_close(j);
}

/* ---- the reference ---- */

/* Contributions in the order of member ids; equal weights cancel as long as they are equal. */
static bool reduce(unsigned tensor, unsigned step, const unsigned *order, unsigned n, float *ret)
{
    const struct kind_of *k = &kinds[tensor];
    enum dtype t = (enum dtype)k->dtype;
    static float x[N];
    double first = 0, sum = 0;
    unsigned count = 0;
    bool weighted = false;
    for (unsigned m = 0; m < n; m++) {
        double w = weight_of(tensor, order[m]);
        if (!pushes(tensor, order[m], step))
            continue;
        numbers(order[m], step, tensor, k->dtype, x);
        if (!count++) {
            dtype_widen(t, ret, x, N);
            first = w;
        } else if (k->op == KS_SUM || (!weighted && w == first)) {
            dtype_add(t, ret, x, N);
        } else {
            if (!weighted)
                dtype_scale(DTYPE_F32, ret, N, first);
            weighted = true;
            dtype_add_scaled(t, ret, x, N, w);
        }
        sum += w;
    }
    if (count && k->op == KS_AVERAGE)
        dtype_divide(DTYPE_F32, ret, N, weighted ? sum : count);
    return count > 0;
}

struct model {
    struct optim optim;
    float value[N], state[2][2 * N];
    uint64_t updates;
};

static void model_step(unsigned tensor, struct model *m, const float *grad, bool any, void *ret)
{
    float next[N];
    const struct kind_of *k = &kinds[tensor];
    if (k->kind == KS_REDUCE) {
        static const float zero[N];
        dtype_narrow((enum dtype)k->dtype, ret, any ? grad : zero, N);
        return;
    }
    if (any) {
        unsigned now = m->updates++ % 2;
        optim_apply(&m->optim, DTYPE_F32, m->updates, N, m->value, m->state[now], grad, next, m->state[!now]);
        memcpy(m->value, next, sizeof next);
    }
    memcpy(ret, m->value, sizeof m->value);
}

static void order_by_id(const struct seen *seen, unsigned n, unsigned *order)
{
    for (unsigned i = 0; i < n; i++) {
        unsigned at = i;
        for (; at > 0 && seen->id[order[at - 1]] > seen->id[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
}

/* Everybody starts with what the one winner gave. */
static void start_from(struct rig *r, const struct seen *seen, unsigned n, unsigned tensor, struct model *m)
{
    unsigned winners = 0;
    char err[256];
    if (kinds[tensor].kind != KS_PARAM)
        return;
    RIG_ASSERT(r, optim_parse(kinds[tensor].optimizer, &m->optim, err) == 0);
    optim_state_init(&m->optim, DTYPE_F32, m->state[0], N);
    for (unsigned s = 0; s < n; s++) {
        if (!seen->won[s][tensor])
            continue;
        winners++;
        numbers(s, FIRST, tensor, KS_F32, m->value);
    }
    RIG_ASSERT(r, winners == 1);
    for (unsigned s = 0; s < n; s++)
        RIG_ASSERT(r, memcmp(seen->start[s][tensor], m->value, sizeof m->value) == 0);
}

static void compare(struct rig *r, const struct seen *seen, unsigned n)
{
    static struct model model[TENSORS];
    unsigned order[WORKERS_MAX];
    memset(model, 0, sizeof model);
    order_by_id(seen, n, order);
    for (unsigned i = 0; i < TENSORS; i++)
        start_from(r, seen, n, i, &model[i]);
    for (unsigned step = 0; step < STEPS; step++)
        for (unsigned i = 0; i < TENSORS; i++) {
            float grad[N], want[N];
            size_t bytes = N * dtype_size((enum dtype)kinds[i].dtype);
            bool any = reduce(i, step, order, n, grad);
            model_step(i, &model[i], grad, any, want);
            for (unsigned s = 0; s < n; s++)
                if (memcmp(seen->value[s][step][i], want, bytes))
                    RIG_FAIL(r, "%u members, step %u, tensor %s: member %u differs", n, step, kinds[i].name, s);
        }
    for (unsigned s = 1; s < n; s++)
        RIG_ASSERT(r, seen->first_step[s] == seen->first_step[0]);
}

static void train(void **state, unsigned n, unsigned servers, const char *durability)
{
    struct rig *r = *state;
    static char members[8], wanted[8];
    struct seen *seen = rig_shared(r, sizeof *seen);
    struct task task[WORKERS_MAX];
    snprintf(members, sizeof members, "%u", n);
    snprintf(wanted, sizeof wanted, "%u", servers);
    rig_server_options(r, "--members", members, "--servers", wanted, "--loops", "2", "--shards", "7", "--chunk-bytes",
                       "256", "--deterministic", "on", "--durability", durability, NULL);
    rig_servers_start(r, servers);
    for (unsigned i = 0; i < n; i++) {
        task[i] = (struct task){seen, i};
        rig_worker_start(r, member, &task[i]);
    }
    rig_workers_done(r);
    compare(r, seen, n);
}

static void test_one(void **state)
{
    train(state, 1, 1, "none");
}

static void test_two(void **state)
{
    train(state, 2, 1, "write");
}

static void test_four(void **state)
{
    train(state, 4, 2, "none");
}

static void test_seven(void **state)
{
    train(state, 7, 3, "write");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_one, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_two, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_four, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_seven, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
