/* The data directory: what is recorded, and every reason to refuse one, each with its line. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/keepstep_err.h"
#include "storage/datadir.h"
#include "tests/store_help.h"

struct place {
    char root[PATH_MAX], dir[PATH_MAX + 16];
    struct datadir_config config;
};

static int setup(void **state)
{
    struct place *p = calloc(1, sizeof *p);
    scratch_make(p->root);
    snprintf(p->dir, sizeof p->dir, "%s/data", p->root);
    p->config = (struct datadir_config){p->dir, 1, "digits", 5, "s0", 2, 128, 1 << 20};
    *state = p;
    return 0;
}

static int teardown(void **state)
{
    struct place *p = *state;
    scratch_remove(p->root);
    free(p);
    return 0;
}

static void open_ok(const struct datadir_config *c, struct datadir *ret)
{
    char err[STORE_ERR_TEXT] = "";
    if (datadir_open(c, ret, err) != 0)
        fail_msg("%s", err);
}

static void open_and_close(const struct datadir_config *c)
{
    struct datadir d;
    open_ok(c, &d);
    datadir_close(&d);
}

/* The line must name the directory and hold each of the words. */
static void open_refused(const struct place *p, int code, const char *word1, const char *word2)
{
    char err[STORE_ERR_TEXT] = "";
    struct datadir d;
    memset(&d, 0x5a, sizeof d);
    assert_int_equal(datadir_open(&p->config, &d, err), code);
    assert_int_equal((unsigned char)d.dir[0], 0x5a);
    if (!strstr(err, p->dir) || !strstr(err, word1) || !strstr(err, word2) || strchr(err, '\n'))
        fail_msg("\"%s\" lacks \"%s\", \"%s\" or the directory", err, word1, word2);
}

static void file_write(const struct place *p, const char *name, const char *text)
{
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/%s", p->dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void test_new_directory_then_its_lives(void **state)
{
    struct place *p = *state;
    char err[STORE_ERR_TEXT], path[PATH_MAX];
    struct datadir d;
    open_ok(&p->config, &d);
    assert_int_equal(d.life, 0);
    assert_true(d.fresh);
    datadir_loop_dir(&d, 1, path);
    assert_non_null(strstr(path, "/data/loop-1"));
    datadir_close(&d);

    open_ok(&p->config, &d);
    assert_true(d.fresh);
    assert_int_equal(datadir_life_set(&d, 0xfedcba9876543210u, err), 0);
    assert_false(d.fresh);
    datadir_close(&d);

    p->config = (struct datadir_config){.dir = p->dir, .job = "digits"};
    open_ok(&p->config, &d);
    assert_true(d.life == 0xfedcba9876543210u);
    assert_false(d.fresh);
    assert_string_equal(d.name, "s0");
    assert_int_equal(d.loops, 2);
    assert_int_equal(d.nshards, 128);
    assert_int_equal(d.chunk_bytes, 1 << 20);
    datadir_close(&d);
}

static void test_former_lives_are_remembered(void **state)
{
    struct place *p = *state;
    char err[STORE_ERR_TEXT];
    struct datadir d;
    enum { LIVES = DATADIR_FORMER_MAX + 5 };
    for (uint64_t life = 1; life <= LIVES; life++) {
        open_ok(&p->config, &d);
        assert_int_equal(d.life, life - 1);
        assert_int_equal(d.nformer, life < 2 ? 0 : life - 2 < DATADIR_FORMER_MAX ? life - 2 : DATADIR_FORMER_MAX);
        for (uint32_t i = 0; i < d.nformer; i++)
            assert_int_equal(d.former[i], life - 2 - i);
        assert_int_equal(datadir_life_set(&d, life, err), 0);
        assert_int_equal(d.life, life);
        datadir_close(&d);
    }
}

static void test_new_name_is_recorded(void **state)
{
    struct place *p = *state;
    struct datadir d;
    open_and_close(&p->config);
    p->config.name = "other";
    open_and_close(&p->config);
    p->config.name = NULL;
    open_ok(&p->config, &d);
    assert_string_equal(d.name, "other");
    datadir_close(&d);
}

static void test_missing_or_empty_is_refused_without_create(void **state)
{
    struct place *p = *state;
    struct stat st;
    p->config.create = 0;
    open_refused(p, KS_ENOENT, "does not exist", "");
    assert_int_not_equal(stat(p->dir, &st), 0);
    mkdir(p->dir, 0755);
    open_refused(p, KS_ENOENT, "empty", "");
}

static void test_other_job_is_refused_with_both_names(void **state)
{
    struct place *p = *state;
    open_and_close(&p->config);
    p->config.job = "letters";
    open_refused(p, KS_EEXIST, "\"digits\"", "\"letters\"");
}

static void test_other_shape_is_refused_with_what_to_use(void **state)
{
    struct place *p = *state;
    open_and_close(&p->config);
    p->config.loops = 4;
    open_refused(p, KS_EEXIST, "loops 2", "use 2");
    p->config.loops = 2;
    p->config.nshards = 64;
    open_refused(p, KS_EEXIST, "nshards 128", "use 128");
    p->config.nshards = 0;
    p->config.chunk_bytes = 4096;
    open_refused(p, KS_EEXIST, "chunk_bytes 1048576", "use 1048576");
}

static void test_other_contents_are_refused_and_left_alone(void **state)
{
    struct place *p = *state;
    struct stat st;
    char path[PATH_MAX + 64];
    mkdir(p->dir, 0755);
    file_write(p, "thesis.tex", "x");
    open_refused(p, KS_ECORRUPT, "not a Keepstep data directory", "choose an empty one");
    snprintf(path, sizeof path, "%s/owner.lock", p->dir);
    assert_int_not_equal(stat(path, &st), 0);
}

static void test_a_file_is_refused(void **state)
{
    struct place *p = *state;
    FILE *f = fopen(p->dir, "w");
    fclose(f);
    open_refused(p, KS_ECORRUPT, "is not a directory", "");
}

static void test_newer_format_is_refused(void **state)
{
    struct place *p = *state;
    open_and_close(&p->config);
    file_write(p, "keepstep.server", "keepstep 2\nshape=round\n");
    open_refused(p, KS_EVERSION, "format 2", "format 1");
}

static void test_damaged_file_is_refused(void **state)
{
    static const char *const text[] = {
        "",
        "keepstep",
        "keepstep 1",
        "keepstep 1\n",
        "keepstep 01\n",
        "keepstep x\n",
        "job=digits\n",
        "keepstep 1\njob=digits\nname=s0\nloops=2\nnshards=128\nchunk_bytes=1048576\ncreated=5\nlife=1",
        "keepstep 1\njob=digits\nname=s0\nloops=2\nnshards=128\nchunk_bytes=1048576\n",
        "keepstep 1\njob=digits\nname=s0\nloops=0\nnshards=128\nchunk_bytes=1048576\ncreated=5\nlife=1\n",
        "keepstep 1\njob=digits\nname=s0\nloops=-2\nnshards=128\nchunk_bytes=1048576\ncreated=5\nlife=1\n",
        "keepstep 1\njob=digits\nname=s0\nloops=2\nnshards=128\nchunk_bytes=1048576\ncreated=5\nlife=18446744073709551616\n",
        "keepstep 1\njob=digits\njob=digits\nloops=2\nnshards=128\nchunk_bytes=1048576\ncreated=5\nlife=1\n",
        "keepstep 1\njob=\nname=s0\nloops=2\nnshards=128\nchunk_bytes=1048576\ncreated=5\nlife=1\n",
        "keepstep 1\njob=digits\nname=s0\nloops=2\nnshards=128\nchunk_bytes=1048576\ncreated=5\nlife=1\nmore\n",
        "keepstep 1\njob=digits\nname=s0\nloops=2\nnshards=128\nchunk_bytes=1048576\ncreated=5\nlife=1,\n",
        "keepstep 1\njob=digits\nname=s0\nloops=2\nnshards=128\nchunk_bytes=1048576\ncreated=5\nlife=0,1\n",
        "keepstep 1\njob=digits\nname=s0\nloops=2\nnshards=128\nchunk_bytes=1048576\ncreated=5\nlife=17,16,15,14,13,12,11,10,9,8,7,6,5,4,3,2,1\n",
    };
    struct place *p = *state;
    open_and_close(&p->config);
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        file_write(p, "keepstep.server", text[i]);
        open_refused(p, KS_ECORRUPT, "keepstep.server: ", "");
    }
    file_write(
        p, "keepstep.server",
        "keepstep 1\njob=digits\nname=s0\nloops=2\nnshards=128\nchunk_bytes=1048576\ncreated=5\nlife=18446744073709551615\n");
    open_and_close(&p->config);
}

static void test_new_directory_needs_every_field(void **state)
{
    struct place *p = *state;
    p->config.loops = 0;
    open_refused(p, KS_EINVAL, "is new", "loops");
    p->config.loops = 2;
    open_and_close(&p->config);
}

static void test_names_with_control_characters_are_refused(void **state)
{
    struct place *p = *state;
    struct datadir d;
    char err[STORE_ERR_TEXT] = "";
    p->config.job = "a\nlife=7";
    assert_int_equal(datadir_open(&p->config, &d, err), KS_EINVAL);
    assert_non_null(strstr(err, "control"));
}

static void test_in_use_names_the_process(void **state)
{
    struct place *p = *state;
    char pid_text[32];
    struct datadir d;
    open_ok(&p->config, &d);
    snprintf(pid_text, sizeof pid_text, "process %ld", (long)getpid());
    open_refused(p, KS_EBUSY, "in use by", pid_text);
    datadir_close(&d);
    open_and_close(&p->config);
}

static void test_a_killed_holder_lets_go(void **state)
{
    struct place *p = *state;
    struct datadir d;
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        char err[STORE_ERR_TEXT];
        byte = datadir_open(&p->config, &d, err) == 0 && datadir_life_set(&d, 42, err) == 0;
        if (write(ready[1], &byte, 1) != 1)
            _exit(1);
        pause();
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 1);
    open_refused(p, KS_EBUSY, "in use by process", "");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(ready[0]);
    close(ready[1]);
    open_ok(&p->config, &d);
    assert_int_equal(d.life, 42);
    datadir_close(&d);
}

/* A crash before the rename leaves a temporary file; it means nothing. */
static void test_leftover_temporary_file_is_ignored(void **state)
{
    struct place *p = *state;
    mkdir(p->dir, 0755);
    file_write(p, "keepstep.server.tmp", "keepst");
    open_and_close(&p->config);
}

static void test_failed_write_keeps_the_recorded_life(void **state)
{
    struct place *p = *state;
    struct rlimit limit, none;
    struct datadir d;
    char err[STORE_ERR_TEXT] = "";
    open_ok(&p->config, &d);
    assert_int_equal(datadir_life_set(&d, 1, err), 0);
    getrlimit(RLIMIT_FSIZE, &limit);
    none = limit;
    none.rlim_cur = 0;
    setrlimit(RLIMIT_FSIZE, &none);
    int rc = datadir_life_set(&d, 2, err);
    setrlimit(RLIMIT_FSIZE, &limit);
    assert_int_equal(rc, KS_EIO);
    assert_non_null(strstr(err, p->dir));
    assert_int_equal(d.life, 1);
    datadir_close(&d);
    open_ok(&p->config, &d);
    assert_int_equal(d.life, 1);
    datadir_close(&d);
}

static void test_earlier_job(void **state)
{
    struct place *p = *state;
    struct datadir d;
    char err[STORE_ERR_TEXT] = "";
    open_ok(&p->config, &d);
    datadir_close(&d);
    p->config.created = 6;
    assert_int_equal(datadir_open(&p->config, &d, err), KS_EEXIST);
    assert_non_null(strstr(err, "earlier job"));
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_new_directory_then_its_lives),
        T(test_former_lives_are_remembered),
        T(test_new_name_is_recorded),
        T(test_earlier_job),
        T(test_missing_or_empty_is_refused_without_create),
        T(test_other_job_is_refused_with_both_names),
        T(test_other_shape_is_refused_with_what_to_use),
        T(test_other_contents_are_refused_and_left_alone),
        T(test_a_file_is_refused),
        T(test_newer_format_is_refused),
        T(test_damaged_file_is_refused),
        T(test_new_directory_needs_every_field),
        T(test_names_with_control_characters_are_refused),
        T(test_in_use_names_the_process),
        T(test_a_killed_holder_lets_go),
        T(test_leftover_temporary_file_is_ignored),
        T(test_failed_write_keeps_the_recorded_life),
    };
    signal(SIGXFSZ, SIG_IGN);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
