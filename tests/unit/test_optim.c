/* Optimizers: known values, PyTorch's own results, options, texts of errors. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "keepstep_err.h"
#include "server/optim.h"

enum { MAX = 67, SLOTS = 2 };

static struct optim parsed(const char *text)
{
    struct optim o;
    char err[256] = "";
    if (optim_parse(text, &o, err) != 0)
        fail_msg("\"%s\": %s", text, err);
    return o;
}

/* One tensor of up to MAX elements that a test steps along. */
struct run {
    struct optim o;
    enum dtype t;
    size_t n;
    uint64_t step;
    double value[MAX], state[MAX * SLOTS]; /* elements of dtype t */
};

static void run_start(struct run *r, const char *text, enum dtype t, size_t n)
{
    memset(r, 0, sizeof *r);
    r->o = parsed(text);
    r->t = t;
    r->n = n;
    optim_state_init(&r->o, t, r->state, n);
}

static void run_step(struct run *r, const void *grad)
{
    double value[MAX], state[MAX * SLOTS];
    memcpy(value, r->value, sizeof value);
    memcpy(state, r->state, sizeof state);
    optim_apply(&r->o, r->t, ++r->step, r->n, value, state, grad, r->value, r->state);
}

static void check_known(const char *text, const double want[3])
{
    static const double grad[3] = {.5, -.25, 1};
    struct run wide, narrow;
    run_start(&wide, text, DTYPE_F64, 1);
    run_start(&narrow, text, DTYPE_F32, 1);
    wide.value[0] = 1;
    ((float *)narrow.value)[0] = 1;
    for (int i = 0; i < 3; i++) {
        float g = (float)grad[i];
        run_step(&wide, &grad[i]);
        run_step(&narrow, &g);
        if (fabs(wide.value[0] - want[i]) > 1e-9 || fabs(((float *)narrow.value)[0] - want[i]) > 1e-6)
            fail_msg("%s, step %d: %.12g, %.9g instead of %.12g", text, i + 1, wide.value[0],
                     ((float *)narrow.value)[0], want[i]);
    }
}

static void test_known_values(void **arg)
{
    (void)arg;
    check_known("add", (double[]){1.5, 1.25, 2.25});
    check_known("sgd lr=.1", (double[]){.95, .975, .875});
    check_known("adam lr=.1", (double[]){.900000002, .8733662987, .8075551397});
    check_known("adamw lr=.1 wd=.1", (double[]){.890000002, .8544662987, .7801104767});
    check_known("sgd lr=.1 momentum=.9", (double[]){.95, .93, .812});
    check_known("sgd lr=.1 momentum=.9 nesterov=1", (double[]){.905, .912, .7058});
    check_known("adagrad lr=.1", (double[]){.9, .9447213596, .8574342035});
    check_known("rmsprop lr=.1", (double[]){2e-7, .4490133744, -.4257262161});
}

static void random_vector(struct rng *r, enum dtype t, size_t n, void *ret)
{
    for (size_t i = 0; i < n; i++) {
        double x = ((double)(rng_next(r) % (1u << 21)) - (1 << 20)) / (1 << 20);
        if (t == DTYPE_F32)
            ((float *)ret)[i] = (float)x;
        else
            ((double *)ret)[i] = x;
    }
}

static double element(const struct run *r, size_t i)
{
    return r->t == DTYPE_F32 ? (double)((const float *)r->value)[i] : r->value[i];
}

/* A line "STEP VALUES" of the golden file: steps the run up to it and compares bits. */
static void golden_line(struct run *r, struct rng *rng, const char *line)
{
    double grad[MAX];
    char *end;
    uint64_t step = strtoull(line, &end, 10);
    while (r->step < step) {
        random_vector(rng, r->t, r->n, grad);
        run_step(r, grad);
    }
    for (size_t i = 0; i < r->n; i++) {
        double want = strtod(end, &end);
        if (element(r, i) != want)
            fail_msg("step %d, element %zu: %a instead of %a", (int)step, i, element(r, i), want);
    }
}

static void test_equals_torch_to_the_last_bit(void **arg)
{
    (void)arg;
    char line[1024];
    struct run r = {0};
    struct rng rng = {0};
    int cases = 0, lines = 0;
    FILE *f = fopen("tests/data/optim_golden.txt", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "case ", 5) == 0) {
            run_start(&r, line + 9, strncmp(line + 5, "f32", 3) == 0 ? DTYPE_F32 : DTYPE_F64, 8);
            rng.state = 1;
            random_vector(&rng, r.t, r.n, r.value);
            cases++;
        } else if (line[0] != '#') {
            golden_line(&r, &rng, line);
            lines++;
        }
    }
    fclose(f);
    assert_int_equal(cases, 28);
    assert_int_equal(lines, 28 * 11);
}

static const char *const every[] = {
    "add",
    "sgd lr=.1",
    "sgd lr=.1 wd=.1 momentum=.9",
    "sgd lr=.1 momentum=.9 nesterov=1",
    "adagrad",
    "adagrad wd=.1",
    "rmsprop",
    "rmsprop momentum=.9 wd=.1",
    "adam",
    "adam wd=.1 lr=.1",
    "adamw",
};

/* Each element as if alone, whatever n, the alignment, and whether the output is the gradient's memory. */
static void check_layout(const char *text, enum dtype t, size_t n, size_t offset)
{
    size_t size = dtype_size(t);
    struct run r;
    uint8_t value[MAX * 8 + 8], grad[MAX * 8 + 8], state[MAX * 16 + 8], out[MAX * 8 + 8], new_state[MAX * 16 + 8];
    uint8_t one[8], one_state[16];
    struct rng rng = {n * 31 + offset};
    run_start(&r, text, t, n);
    unsigned slots = optim_slots(&r.o);
    random_vector(&rng, t, n, r.value);
    memcpy(value + offset, r.value, n * size);
    memcpy(state + offset, r.state, n * size * slots);
    random_vector(&rng, t, n, r.value);
    memcpy(grad + offset, r.value, n * size);

    memset(out, 0x5a, sizeof out);
    optim_apply(&r.o, t, 2, n, value + offset, state + offset, grad + offset, out + offset, new_state + offset);
    assert_int_equal(out[offset + n * size], 0x5a);
    for (size_t i = 0; i < n; i++) {
        optim_apply(&r.o, t, 2, 1, value + offset + i * size, state + offset, grad + offset + i * size, one, one_state);
        assert_memory_equal(one, out + offset + i * size, size);
        for (unsigned s = 0; s < slots; s++)
            assert_memory_equal(one_state + s * size, new_state + offset + (s * n + i) * size, size);
    }
    optim_apply(&r.o, t, 2, n, value + offset, state + offset, grad + offset, grad + offset, new_state + offset);
    assert_memory_equal(grad + offset, out + offset, n * size);
}

static void test_layout(void **arg)
{
    (void)arg;
    for (size_t k = 0; k < sizeof every / sizeof *every; k++) {
        for (size_t n = 1; n <= MAX; n += 11) {
            for (size_t offset = 0; offset < 8; offset += 3) {
                check_layout(every[k], DTYPE_F32, n, offset);
                check_layout(every[k], DTYPE_F64, n, offset);
            }
        }
    }
}

static void test_add_takes_every_accumulator(void **arg)
{
    (void)arg;
    struct optim o = parsed("add");
    int32_t a32[] = {1, INT32_MAX}, b32[] = {2, 1}, out32[2];
    int64_t a64[] = {1, INT64_MIN}, b64[] = {-2, -1}, out64[2];
    uint8_t a8[] = {1, 255}, b8[] = {2, 2}, out8[2];
    optim_apply(&o, DTYPE_I32, 1, 2, a32, NULL, b32, out32, NULL);
    assert_int_equal(out32[0], 3);
    assert_int_equal(out32[1], INT32_MIN);
    optim_apply(&o, DTYPE_I64, 1, 2, a64, NULL, b64, out64, NULL);
    assert_true(out64[0] == -1 && out64[1] == INT64_MAX);
    optim_apply(&o, DTYPE_U8, 1, 2, a8, NULL, b8, out8, NULL);
    assert_true(out8[0] == 3 && out8[1] == 1);
    optim_apply(&o, DTYPE_U8, 1, 2, a8, NULL, b8, b8, NULL);
    assert_memory_equal(b8, out8, 2);
}

static void test_allows(void **arg)
{
    (void)arg;
    for (enum dtype t = DTYPE_F32; t <= DTYPE_U8; t++) {
        assert_true(optim_allows(OPTIM_ADD, t));
        for (enum optim_kind k = OPTIM_SGD; k <= OPTIM_ADAMW; k++)
            assert_int_equal(optim_allows(k, t), dtype_is_float(t));
    }
    assert_false(optim_allows(OPTIM_ADD, (enum dtype)0));
    assert_false(optim_allows((enum optim_kind)7, DTYPE_F32));
}

static void test_slots_and_first_state(void **arg)
{
    (void)arg;
    static const unsigned slots[] = {0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2};
    float state[6];
    double wide[2];
    for (size_t k = 0; k < sizeof every / sizeof *every; k++) {
        struct optim o = parsed(every[k]);
        assert_int_equal(optim_slots(&o), slots[k]);
        for (int i = 0; i < 6; i++)
            state[i] = 7;
        optim_state_init(&o, DTYPE_F32, state, 3);
        for (unsigned i = 0; i < 6; i++)
            assert_true(state[i] == (i < 3 * slots[k] ? 0 : 7));
    }
    struct optim o = parsed("adagrad initial_accumulator=.1");
    optim_state_init(&o, DTYPE_F32, state, 2);
    optim_state_init(&o, DTYPE_F64, wide, 2);
    assert_true(state[0] == .1f && state[1] == .1f && wide[0] == .1 && wide[1] == .1);
}

static void test_defaults_are_torchs(void **arg)
{
    (void)arg;
    struct optim o = parsed("adam");
    assert_true(o.kind == OPTIM_ADAM && o.option[OPT_LR] == 1e-3 && o.option[OPT_BETA1] == .9);
    assert_true(o.option[OPT_BETA2] == .999 && o.option[OPT_EPS] == 1e-8 && o.option[OPT_WD] == 0);
    o = parsed("adamw");
    assert_true(o.kind == OPTIM_ADAMW && o.option[OPT_LR] == 1e-3 && o.option[OPT_WD] == .01);
    o = parsed("rmsprop");
    assert_true(o.option[OPT_LR] == .01 && o.option[OPT_ALPHA] == .99 && o.option[OPT_EPS] == 1e-8);
    assert_true(o.option[OPT_MOMENTUM] == 0);
    o = parsed("adagrad");
    assert_true(o.option[OPT_LR] == .01 && o.option[OPT_EPS] == 1e-10 && o.option[OPT_LR_DECAY] == 0);
    o = parsed("sgd lr=1");
    assert_true(o.option[OPT_MOMENTUM] == 0 && o.option[OPT_DAMPENING] == 0 && o.option[OPT_NESTEROV] == 0);
}

static void test_other_spellings(void **arg)
{
    (void)arg;
    struct optim a = parsed("  adam\tlr=1e-2 betas=.8,.99  weight_decay=.5 ");
    struct optim b = parsed("adam wd=0.5 beta2=0.99 beta1=0.8 lr=.01");
    assert_memory_equal(&a, &b, sizeof a);
    a = parsed("sgd lr=1 momentum=.5 nesterov=true");
    b = parsed("sgd lr=1 momentum=.5 nesterov=1");
    assert_memory_equal(&a, &b, sizeof a);
}

static void test_bad_texts(void **arg)
{
    (void)arg;
    static const struct {
        const char *text, *err;
    } bad[] = {
        {"", "there is no optimizer \"\"; there are add, sgd, adagrad, rmsprop, adam, adamw"},
        {"Adam", "there is no optimizer \"Adam\"; there are add, sgd, adagrad, rmsprop, adam, adamw"},
        {"sgd", "optimizer sgd needs a learning rate, as in \"sgd lr=0.1\""},
        {"sgd lr", "optimizer sgd: \"lr\" is not name=number; its options are lr, wd, momentum, dampening, nesterov"},
        {"sgd rate=1", "optimizer sgd has no option \"rate\"; its options are lr, wd, momentum, dampening, nesterov"},
        {"sgd lr=", "optimizer option lr is \"\"; it must be a number, as in lr=0.1"},
        {"sgd lr=0.1x", "optimizer option lr is \"0.1x\"; it must be a number, as in lr=0.1"},
        {"sgd lr=nan", "optimizer option lr is \"nan\"; it must be a number, as in lr=0.1"},
        {"sgd lr=0x1", "optimizer option lr is \"0x1\"; it must be a number, as in lr=0.1"},
        {"sgd lr=1e999", "optimizer option lr is \"1e999\"; it must be a number, as in lr=0.1"},
        {"sgd lr=-1", "optimizer option lr is -1; it must be at least 0"},
        {"sgd lr=1 lr=2", "optimizer option lr is given twice; leave one out"},
        {"sgd lr=1 wd=1 weight_decay=2", "optimizer option wd is given twice; leave one out"},
        {"sgd lr=1 nesterov=1", "optimizer sgd: nesterov needs momentum above 0 and no dampening"},
        {"sgd lr=1 nesterov=1 momentum=.9 dampening=.1",
         "optimizer sgd: nesterov needs momentum above 0 and no dampening"},
        {"sgd lr=1 nesterov=2", "optimizer option nesterov is 2; it must be 0 or 1"},
        {"sgd lr=1 betas=.9,.9",
         "optimizer sgd has no option \"betas\"; its options are lr, wd, momentum, dampening, nesterov"},
        {"adam beta1=1", "optimizer option beta1 is 1; it must be at least 0 and below 1"},
        {"adam betas=.9", "optimizer option betas is \".9\"; it must be two numbers, as in betas=0.9,0.999"},
        {"adam betas=.9,1", "optimizer option beta2 is 1; it must be at least 0 and below 1"},
        {"adam betas=.9,.9,.9", "optimizer option beta2 is \".9,.9\"; it must be a number, as in beta2=0.1"},
        {"adam amsgrad=1", "optimizer adam has no option \"amsgrad\"; its options are lr, wd, beta1, beta2, eps"},
        {"adam alpha=1", "optimizer adam has no option \"alpha\"; its options are lr, wd, beta1, beta2, eps"},
        {"rmsprop alpha=1.5", "optimizer option alpha is 1.5; it must be from 0 to 1"},
        {"adagrad eps=-1", "optimizer option eps is -1; it must be at least 0"},
        {"add lr=1", "optimizer add has no option \"lr\"; its options are none"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct optim o = {.kind = OPTIM_ADD, .option = {[OPT_LR] = 42}}, before = o;
        char err[256] = "";
        assert_int_equal(optim_parse(bad[i].text, &o, err), KS_EINVAL);
        assert_string_equal(err, bad[i].err);
        assert_memory_equal(&o, &before, sizeof o);
    }
}

static void test_long_words(void **arg)
{
    (void)arg;
    char text[4096], err[256];
    struct optim o;
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = 0;
    assert_int_equal(optim_parse(text, &o, err), KS_EINVAL);
    assert_non_null(strstr(err, "less than 64 characters"));
    memcpy(text, "adam lr=1 ", 10);
    assert_int_equal(optim_parse(text, &o, err), KS_EINVAL);
    assert_non_null(strstr(err, "this is longer: \"xxxx"));
    text[10 + 63] = 0;
    assert_int_equal(optim_parse(text, &o, err), KS_EINVAL);
    assert_non_null(strstr(err, "is not name=number; its options are lr, wd, beta1, beta2, eps"));
}

static void test_options(void **arg)
{
    (void)arg;
    static const char *const names[] = {"lr",    "wd",  "momentum", "dampening", "nesterov",           "beta1",
                                        "beta2", "eps", "alpha",    "lr_decay",  "initial_accumulator"};
    enum optim_option o, last = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        assert_int_equal(optim_option_parse(names[i], &o), 0);
        assert_string_equal(optim_option_name(o), names[i]);
        assert_true(o > last);
        last = o;
    }
    assert_int_equal(optim_option_parse("weight_decay", &o), 0);
    assert_int_equal(o, OPT_WD);
    assert_int_equal(optim_option_parse("?", &o), KS_EINVAL);
    assert_int_equal(optim_option_parse("", &o), KS_EINVAL);
    assert_int_equal(o, OPT_WD);
    assert_string_equal(optim_option_name(OPT_AMSGRAD_RESERVED), "?");
    assert_string_equal(optim_option_name(OPT_MAX), "?");
    assert_string_equal(optim_option_name((enum optim_option) - 1), "?");
}

static void test_has_option(void **arg)
{
    (void)arg;
    assert_true(optim_has_option(OPTIM_SGD, OPT_NESTEROV));
    assert_true(optim_has_option(OPTIM_RMSPROP, OPT_MOMENTUM));
    assert_true(optim_has_option(OPTIM_ADAMW, OPT_BETA2));
    assert_true(optim_has_option(OPTIM_ADAGRAD, OPT_INITIAL_ACCUMULATOR));
    assert_false(optim_has_option(OPTIM_ADD, OPT_LR));
    assert_false(optim_has_option(OPTIM_ADAM, OPT_MOMENTUM));
    assert_false(optim_has_option(OPTIM_ADAM, OPT_AMSGRAD_RESERVED));
    assert_false(optim_has_option(OPTIM_RMSPROP, OPT_CENTERED_RESERVED));
    assert_false(optim_has_option((enum optim_kind)0, OPT_LR));
    assert_false(optim_has_option((enum optim_kind)7, OPT_LR));
    assert_false(optim_has_option(OPTIM_SGD, (enum optim_option)40));
}

static void test_option_check(void **arg)
{
    (void)arg;
    char err[256] = "";
    assert_int_equal(optim_option_check(OPT_LR, 0, err), 0);
    assert_int_equal(optim_option_check(OPT_DAMPENING, -1, err), 0);
    assert_int_equal(optim_option_check(OPT_ALPHA, 1, err), 0);
    assert_string_equal(err, "");
    assert_int_equal(optim_option_check(OPT_LR, -.5, err), KS_EINVAL);
    assert_string_equal(err, "optimizer option lr is -0.5; it must be at least 0");
    assert_int_equal(optim_option_check(OPT_LR, INFINITY, err), KS_EINVAL);
    assert_int_equal(optim_option_check(OPT_DAMPENING, NAN, err), KS_EINVAL);
    assert_string_equal(err, "optimizer option dampening is nan; it must be a finite number");
    assert_int_equal(optim_option_check(OPT_BETA2, 1, err), KS_EINVAL);
    assert_int_equal(optim_option_check(OPT_AMSGRAD_RESERVED, 1, err), KS_EINVAL);
    assert_string_equal(err, "there is no optimizer option with number 11");
    assert_int_equal(optim_option_check(OPT_MAX, 1, err), KS_EINVAL);
}

static void test_option_set_keeps_the_size_of_state(void **arg)
{
    (void)arg;
    char err[256] = "";
    struct optim plain = parsed("sgd lr=1"), heavy = parsed("sgd lr=1 momentum=.9"), before = plain;
    assert_int_equal(optim_option_set(&plain, OPT_MOMENTUM, .9, err), KS_EINVAL);
    assert_string_equal(err, "optimizer option momentum cannot go from 0 to 0.9 during a run: the tensor's state would "
                             "have another size; declare it with momentum above 0");
    assert_int_equal(optim_option_set(&plain, OPT_EPS, .9, err), KS_EINVAL);
    assert_string_equal(err,
                        "optimizer sgd has no option \"eps\"; its options are lr, wd, momentum, dampening, nesterov");
    assert_int_equal(optim_option_set(&plain, OPT_LR, -1, err), KS_EINVAL);
    assert_string_equal(err, "optimizer option lr is -1; it must be at least 0");
    assert_int_equal(optim_option_set(&plain, OPT_MAX, 1, err), KS_EINVAL);
    assert_memory_equal(&plain, &before, sizeof plain);
    assert_int_equal(optim_option_set(&plain, OPT_LR, .5, err), 0);
    assert_true(plain.option[OPT_LR] == .5);
    assert_int_equal(optim_option_set(&heavy, OPT_MOMENTUM, .5, err), 0);
    assert_true(heavy.option[OPT_MOMENTUM] == .5);
    assert_int_equal(optim_option_set(&heavy, OPT_MOMENTUM, 0, err), KS_EINVAL);
    assert_true(heavy.option[OPT_MOMENTUM] == .5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_values),
        cmocka_unit_test(test_equals_torch_to_the_last_bit),
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_add_takes_every_accumulator),
        cmocka_unit_test(test_allows),
        cmocka_unit_test(test_slots_and_first_state),
        cmocka_unit_test(test_defaults_are_torchs),
        cmocka_unit_test(test_other_spellings),
        cmocka_unit_test(test_bad_texts),
        cmocka_unit_test(test_long_words),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_has_option),
        cmocka_unit_test(test_option_check),
        cmocka_unit_test(test_option_set_keeps_the_size_of_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
