#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "base/mem.h"
#include "wire/view.h"

static struct view *sample(void)
{
    struct view *v = view_create(3, 4, 5);
    for (uint32_t i = 0; i < 3; i++) {
        v->server[i].id = 10 * (i + 1);
        v->server[i].nloops = 2;
        str_copy(v->server[i].loop[0], sizeof v->server[i].loop[0], "even");
        str_copy(v->server[i].loop[1], sizeof v->server[i].loop[1], "odd");
    }
    v->member[0] = (struct view_member){.id = 5, .last = STEP_NONE, .live = true, .local_size = 2};
    v->member[1] = (struct view_member){.id = 15, .join = 3, .last = 8, .local_size = 4};
    v->member[2] = (struct view_member){.id = 25, .last = STEP_NONE, .live = true, .local_size = 3};
    v->member[3] = (struct view_member){.id = 35, .last = STEP_NONE, .live = true, .local_size = 1};
    for (uint32_t i = 0; i < 5; i++)
        v->shard[i].primary = 10 * (i + 1);
    v->nmodes = 2;
    v->mode[0] = (struct mode){0, MODE_SYNC, 0};
    v->mode[1] = (struct mode){10, MODE_SSP, 3};
    return v;
}

static void test_find(void **state)
{
    (void)state;
    struct view *v = sample();
    for (uint64_t id = 0; id < 45; id++) {
        const struct view_server *s = view_server_find(v, id);
        const struct view_member *m = view_member_find(v, id);
        assert_true(s ? s->id == id : id != 10 && id != 20 && id != 30);
        assert_true(m ? m->id == id : id != 5 && id != 15 && id != 25 && id != 35);
    }
    view_free(v);
    v = view_create(0, 0, 0);
    assert_null(view_server_find(v, 1));
    assert_null(view_member_find(v, 1));
    view_free(v);
    view_free(NULL);
}

static void test_lists(void **state)
{
    (void)state;
    struct view *v = sample();
    assert_true(view_lists(v, 5));
    assert_true(view_lists(v, 20));
    assert_false(view_lists(v, 15));
    assert_false(view_lists(v, 0));
    assert_false(view_lists(v, 40));
    assert_false(view_member_in(&v->member[1], 2));
    assert_true(view_member_in(&v->member[1], 3) && view_member_in(&v->member[1], 8));
    assert_false(view_member_in(&v->member[1], 9));
    assert_true(view_member_in(&v->member[0], STEP_NONE));
    view_free(v);
}

static void test_ranks(void **state)
{
    (void)state;
    struct view *v = sample();
    assert_int_equal(view_rank(v, 5), 0);
    assert_int_equal(view_rank(v, 15), -1);
    assert_int_equal(view_rank(v, 25), 2);
    assert_int_equal(view_rank(v, 35), 5);
    assert_int_equal(view_rank(v, 10), -1);
    assert_int_equal(view_size(v), 6);
    view_free(v);
}

static void test_modes(void **state)
{
    (void)state;
    struct view *v = sample();
    assert_int_equal(view_mode_at(v, -1).kind, MODE_SYNC);
    assert_int_equal(view_mode_at(v, 9).kind, MODE_SYNC);
    assert_int_equal(view_mode_at(v, 10).kind, MODE_SSP);
    assert_int_equal(view_mode_at(v, STEP_NONE).bound, 3);
    v->nmodes = 0;
    assert_int_equal(view_mode_at(v, 10).kind, MODE_SYNC);
    view_free(v);
}

static void test_placement(void **state)
{
    (void)state;
    struct view *v = sample();
    const char *loop = "untouched";
    assert_int_equal(view_primary(v, 1, &loop)->id, 20);
    assert_string_equal(loop, "odd");
    assert_int_equal(view_primary(v, 2, &loop)->id, 30);
    assert_string_equal(loop, "even");
    assert_int_equal(view_primary(v, 2, NULL)->id, 30);
    loop = "untouched";
    assert_null(view_primary(v, 3, &loop));
    assert_null(view_primary(v, 5, &loop));
    v->server[0].nloops = 0;
    assert_null(view_primary(v, 0, &loop));
    assert_string_equal(loop, "untouched");
    assert_int_equal(shard_of(UINT64_MAX, 0, 7), UINT64_MAX % 7);
    assert_int_equal(loop_of(5, 2), 1);
    view_free(v);
}

static void test_copy(void **state)
{
    (void)state;
    struct view *v = sample(), *copy = view_copy(v);
    v->server[0].id = v->member[0].id = v->shard[0].primary = v->epoch = 1;
    assert_int_equal(copy->server[0].id, 10);
    assert_int_equal(copy->member[0].id, 5);
    assert_int_equal(copy->shard[0].primary, 10);
    assert_int_equal(copy->epoch, 0);
    assert_int_equal(copy->mode[1].bound, 3);
    view_free(v);
    view_free(copy);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_find),  cmocka_unit_test(test_lists),     cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_modes), cmocka_unit_test(test_placement), cmocka_unit_test(test_copy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
