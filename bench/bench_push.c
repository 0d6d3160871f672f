/* One worker of a Keepstep job that measures what it does. bench/run starts the servers and as many of these as a row needs,
 * next to bench_raw and bench_uvping. Prints one JSON line. */
#include <getopt.h>
#include <stdbool.h>
#include <sys/resource.h>

#include "bench/bench_util.h"
#include "worker/keepstep.h"

struct args {
    const char *what;
    size_t bytes, rounds, warmup, tensors, seconds;
};

static struct ks_job *job;

static void ok(int r, const char *what)
{
    if (r >= 0)
        return;
    fprintf(stderr, "bench_push: %s: %s: %s\n", what, ks_strerror(r), ks_last_error(job));
    exit(1);
}

static struct ks_tensor *reduce_tensor(const char *name, size_t bytes)
{
    struct ks_tensor *t;
    struct ks_spec s = {.dtype = KS_F32, .ndims = 1, .dims = {bytes / 4}, .kind = KS_REDUCE};
    ok(ks_tensor_register(job, name, &s, &t), name);
    return t;
}

static void *memory(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(p != MAP_FAILED, "mmap");
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 0, bytes);
    return p;
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static void one_round(struct ks_tensor *t, const void *in, void *out)
{
    struct ks_handle *h;
    ok(ks_push_pull(t, in, out, 1, &h), "push_pull");
    ok(ks_step_end(job), "step_end");
    ok(ks_wait(h, -1), "wait");
}

/* Goodput of push_pull of one tensor, out of place. */
static void run_big(const struct args *a)
{
    struct ks_tensor *t = reduce_tensor("big", a->bytes);
    float *in = memory(a->bytes), *out = memory(a->bytes);
    in[0] = in[a->bytes / 4 - 1] = 1;
    for (size_t i = 0; i < a->warmup; i++)
        one_round(t, in, out);
    double cpu = cpu_seconds();
    uint64_t start = now_ns();
    for (size_t i = 0; i < a->rounds; i++)
        one_round(t, in, out);
    double seconds = (double)(now_ns() - start) / 1e9;
    if (out[0] != (float)ks_size(job) || out[a->bytes / 4 - 1] != (float)ks_size(job)) {
        fprintf(stderr, "bench_push: the sum is %g, not %lld\n", (double)out[0], (long long)ks_size(job));
        exit(1);
    }
    printf("{\"what\":\"big\",\"rank\":%lld,\"bytes\":%zu,\"rounds\":%zu,\"seconds\":%.6f,\"gb_s\":%.4f,\"cpu_s\":%.3f}\n",
           (long long)ks_rank(job), a->bytes, a->rounds, seconds, (double)a->bytes * (double)a->rounds / seconds / 1e9,
           cpu_seconds() - cpu);
}

/* Round trip of a 4-byte push_pull. */
static void run_tiny(const struct args *a)
{
    struct ks_tensor *t = reduce_tensor("tiny", 4);
    float in = 1, out = 0;
    uint64_t *ns = memory(a->rounds * sizeof *ns);
    for (size_t i = 0; i < a->warmup; i++)
        one_round(t, &in, &out);
    for (size_t i = 0; i < a->rounds; i++) {
        uint64_t start = now_ns();
        one_round(t, &in, &out);
        ns[i] = now_ns() - start;
    }
    qsort(ns, a->rounds, sizeof *ns, by_value);
    printf("{\"what\":\"tiny\",\"rounds\":%zu,\"p50_us\":%.2f,\"p99_us\":%.2f}\n", a->rounds,
           (double)percentile(ns, a->rounds, 500) / 1e3, (double)percentile(ns, a->rounds, 990) / 1e3);
}

/* Many small tensors: in one call, and one by one with a wait each. */
static void run_many(const struct args *a)
{
    struct ks_item *item = calloc(a->tensors, sizeof *item);
    uint8_t *in = memory(a->tensors * a->bytes), *out = memory(a->tensors * a->bytes);
    for (size_t i = 0; i < a->tensors; i++) {
        char name[32];
        snprintf(name, sizeof name, "small-%zu", i);
        item[i] = (struct ks_item){.tensor = reduce_tensor(name, a->bytes), .data = in + i * a->bytes,
                                   .out = out + i * a->bytes};
    }
    uint64_t start = 0;
    for (size_t r = 0; r < a->warmup + a->rounds; r++) {
        struct ks_handle *h;
        if (r == a->warmup)
            start = now_ns();
        ok(ks_many(job, item, a->tensors, &h), "many");
        ok(ks_step_end(job), "step_end");
        ok(ks_wait(h, -1), "wait");
    }
    double together = (double)(now_ns() - start) / 1e9 / (double)a->rounds;
    size_t some = a->tensors < 2000 ? a->tensors : 2000;
    start = now_ns();
    for (size_t i = 0; i < some; i++)
        one_round(item[i].tensor, item[i].data, item[i].out);
    double apart = (double)(now_ns() - start) / 1e9 / (double)some * (double)a->tensors;
    printf("{\"what\":\"many\",\"tensors\":%zu,\"bytes\":%zu,\"together_s\":%.6f,\"apart_s\":%.6f,\"gb_s\":%.4f}\n", a->tensors,
           a->bytes, together, apart, (double)(a->tensors * a->bytes) / together / 1e9);
    free(item);
}

/* A parameter with server-side AdamW, then nothing: bench/run looks at the server's memory and at idle CPU. */
static void run_param(const struct args *a)
{
    struct ks_spec s = {.dtype = KS_F32, .ndims = 1, .dims = {a->bytes / 4}, .kind = KS_PARAM, .optimizer = "adamw"};
    struct ks_tensor *t;
    ok(ks_tensor_register(job, "model", &s, &t), "register");
    float *grad = memory(a->bytes), *out = memory(a->bytes);
    ok(ks_init(t, out, -1, NULL), "init");
    grad[0] = 1;
    uint64_t start = now_ns();
    for (size_t i = 0; i < a->rounds; i++)
        one_round(t, grad, out);
    printf("{\"what\":\"param\",\"bytes\":%zu,\"seconds_a_step\":%.4f}\n", a->bytes,
           (double)(now_ns() - start) / 1e9 / (double)a->rounds);
}

/* Joined, one push_pull, then idle for the given time. */
static void run_idle(const struct args *a)
{
    struct ks_tensor *t = reduce_tensor("idle", 4);
    float in = 1, out = 0;
    one_round(t, &in, &out);
    double cpu = cpu_seconds();
    uint64_t start = now_ns();
    struct timespec pause = {.tv_sec = (time_t)a->seconds};
    nanosleep(&pause, NULL);
    printf("{\"what\":\"idle\",\"cpu_percent\":%.3f}\n", (cpu_seconds() - cpu) / ((double)(now_ns() - start) / 1e9) * 100);
}

static void usage(FILE *to)
{
    fprintf(to, "usage: bench_push [options] big|tiny|many|param|idle\n"
                "Joins the job that KEEPSTEP_COORD and KEEPSTEP_JOB name.\n"
                "  --bytes N     of one tensor (64M)\n"
                "  --rounds N    measured steps (10)\n"
                "  --warmup N    steps before them (3)\n"
                "  --tensors N   many: how many (10000)\n"
                "  --seconds N   idle: how long (5)\n");
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"bytes", 1, 0, 'b'}, {"rounds", 1, 0, 'r'}, {"warmup", 1, 0, 'w'},
                                            {"tensors", 1, 0, 't'}, {"seconds", 1, 0, 's'}, {"help", 0, 0, 'h'}, {0}};
    static const struct { const char *name; void (*run)(const struct args *); } cases[] = {
        {"big", run_big}, {"tiny", run_tiny}, {"many", run_many}, {"param", run_param}, {"idle", run_idle}};
    struct args a = {.bytes = 64 << 20, .rounds = 10, .warmup = 3, .tensors = 10000, .seconds = 5};
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        size_t *to = o == 'b' ? &a.bytes : o == 'r' ? &a.rounds : o == 'w' ? &a.warmup : o == 't' ? &a.tensors : &a.seconds;
        if (o == 'h') {
            usage(stdout);
            return 0;
        }
        if (o == '?') {
            usage(stderr);
            return 2;
        }
        *to = size_arg(argv[optind - 2], optarg);
    }
    a.what = optind < argc ? argv[optind] : "";
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (strcmp(a.what, cases[i].name))
            continue;
        ok(ks_open(NULL, &job), "open");
        cases[i].run(&a);
        fflush(stdout);
        ok(ks_leave(job, -1), "leave");
        ks_close(job);
        return 0;
    }
    usage(stderr);
    return 2;
}
