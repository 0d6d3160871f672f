/* One worker of a Keepstep job whose steps bench/recovery looks at while it kills, stops, drains and adds processes.
 *
 * Appends {time, step} of each completed step to a file: two little-endian 64-bit words, CLOCK_MONOTONIC nanoseconds. Or,
 * with --turns, does as many steps as a line of its input says and prints how long they took. */
#include <getopt.h>
#include <stdbool.h>

#include "bench/bench_util.h"
#include "base/keepstep_err.h"
#include "worker/keepstep.h"

struct args {
    const char *file, *optimizer;
    size_t bytes;
    unsigned pace_us;
    bool turns;
};

static struct ks_job *job;
static struct ks_tensor *tensor;
static float *in, *out;

static void ok(int r, const char *what)
{
    if (r >= 0)
        return;
    fprintf(stderr, "bench_recovery: %s: %s: %s\n", what, ks_strerror(r), ks_last_error(job));
    exit(1);
}

static void open_job(const struct args *a)
{
    struct ks_spec s = {.dtype = KS_F32, .ndims = 1, .dims = {a->bytes / 4}, .kind = a->optimizer ? KS_PARAM : KS_REDUCE,
                        .optimizer = a->optimizer};
    /* Once it is in the view, the others' steps wait for it: what takes time comes before. */
    in = (float *)memory_get(a->bytes, 0);
    out = (float *)memory_get(a->bytes, 0);
    in[0] = 1;
    ok(ks_open(NULL, &job), "open");
    ok(ks_tensor_register(job, "model", &s, &tensor), "register");
    if (a->optimizer)
        ok(ks_init(tensor, out, -1, NULL), "init");
}

/* false: this life was cut off, and goes on as a new member. */
static bool one_step(void)
{
    struct ks_handle *h;
    int r = ks_push_pull(tensor, in, out, 1, &h);
    if (!r) {
        r = ks_step_end(job);
        int outcome = ks_wait(h, -1);
        r = r ? r : outcome;
    }
    if (r != KS_EFENCED)
        ok(r, "step");
    return r != KS_EFENCED;
}

static void run_steps(const struct args *a)
{
    FILE *f = fopen(a->file, "a");
    must(f != NULL, a->file);
    for (;;) {
        struct timespec pause = {.tv_nsec = a->pace_us * 1000};
        uint64_t record[2];
        if (a->pace_us)
            nanosleep(&pause, NULL);
        if (!one_step())
            continue;
        record[0] = now_ns();
        record[1] = (uint64_t)ks_step(job);
        must(write(fileno(f), record, sizeof record) == sizeof record, a->file);
    }
}

static void run_turns(void)
{
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        unsigned long n = strtoul(line, NULL, 10);
        uint64_t start = now_ns();
        for (unsigned long i = 0; i < n; i++)
            (void)one_step();
        printf("%.6f\n", (double)(now_ns() - start) / 1e9);
        fflush(stdout);
    }
}

static void usage(FILE *to)
{
    fprintf(to, "usage: bench_recovery [options] (--file FILE | --turns)\n"
                "Joins the job that KEEPSTEP_COORD and KEEPSTEP_JOB name, and pushes and pulls one tensor a step.\n"
                "  --file FILE       where the time of each completed step is appended\n"
                "  --turns           steps as lines of stdin say, and prints the seconds\n"
                "  --bytes N         of the tensor (4M)\n"
                "  --optimizer SPEC  a parameter with this optimizer (else the servers only sum)\n"
                "  --pace-us N       between two steps, for what training would compute (0)\n");
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"file", 1, 0, 'f'}, {"turns", 0, 0, 't'}, {"bytes", 1, 0, 'b'},
                                            {"optimizer", 1, 0, 'o'}, {"pace-us", 1, 0, 'p'}, {"help", 0, 0, 'h'}, {0}};
    struct args a = {.bytes = 4 << 20};
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (o) {
        case 'f': a.file = optarg; break;
        case 't': a.turns = true; break;
        case 'b': a.bytes = size_arg("--bytes", optarg); break;
        case 'o': a.optimizer = optarg; break;
        case 'p': a.pace_us = (unsigned)strtoul(optarg, NULL, 10); break;
        case 'h': usage(stdout); return 0;
        default: usage(stderr); return 2;
        }
    }
    if (optind != argc || (!a.file && !a.turns) || a.bytes < 4) {
        usage(stderr);
        return 2;
    }
    open_job(&a);
    if (a.turns)
        run_turns();
    else
        run_steps(&a);
    ks_close(job);
    return 0;
}
