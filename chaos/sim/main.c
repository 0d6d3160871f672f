/* main.c - the simulator's command line: seeds, replay, shrinking, mutants. */
#include "chaos/sim/sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/log.h"

struct arguments {
    struct sim_options options;
    uint64_t seeds;
    bool shrink, mutants, digest, keep_going;
    int only;
};

static int usage(void)
{
    fprintf(stderr,
            "usage: sim [--seed N] [--seeds COUNT] [--mode sync|ssp|async] [--servers N] [--replicas R] [--mute 3,5] [--verbose [2]]\n"
            "           [--shrink] [--digest] [--keep-going] [--mutants [NUMBER]]\n");
    return 2;
}

static bool mute_parse(struct sim_options *o, const char *text)
{
    while (*text) {
        char *end;
        unsigned long n = strtoul(text, &end, 10);
        if (end == text || n >= SIM_FAULTS_MAX)
            return false;
        o->muted[n] = true;
        text = *end == ',' ? end + 1 : end;
        if (*end && *end != ',')
            return false;
    }
    return true;
}

static bool number_parse(const char *text, uint64_t *ret)
{
    char *end;
    if (!text)
        return false;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno || end == text || *end)
        return false;
    *ret = v;
    return true;
}

static bool mode_name(const char *text, uint32_t *ret)
{
    struct mode m;
    if (!text || mode_parse(strcmp(text, "ssp") ? text : "ssp:1", &m))
        return false;
    *ret = m.kind;
    return true;
}

static bool optional_number(char **argv, int *i, uint64_t *ret)
{
    if (!argv[*i + 1] || !number_parse(argv[*i + 1], ret))
        return false;
    (*i)++;
    return true;
}

static bool argument(struct arguments *a, char **argv, int *i)
{
    const char *name = argv[*i];
    uint64_t n = 0;
    if (strcmp(name, "--shrink") == 0)
        return a->shrink = true;
    if (strcmp(name, "--digest") == 0)
        return a->digest = true;
    if (strcmp(name, "--keep-going") == 0)
        return a->keep_going = true;
    if (strcmp(name, "--verbose") == 0) {
        a->options.verbose = optional_number(argv, i, &n) ? (int)n : 1;
        return true;
    }
    if (strcmp(name, "--mutants") == 0) {
        a->only = optional_number(argv, i, &n) ? (int)n : 0;
        return a->mutants = true;
    }
    const char *value = argv[++*i];
    if (strcmp(name, "--seed") == 0)
        return number_parse(value, &a->options.seed);
    if (strcmp(name, "--seeds") == 0)
        return number_parse(value, &a->seeds);
    if (strcmp(name, "--mute") == 0)
        return value && mute_parse(&a->options, value);
    if (strcmp(name, "--mode") == 0)
        return mode_name(value, &a->options.mode);
    if (strcmp(name, "--replicas") == 0) {
        bool ok = number_parse(value, &n) && n <= BACKUPS_MAX;
        a->options.replicas = (uint32_t)n + 1;
        return ok;
    }
    if (strcmp(name, "--servers") == 0) {
        bool ok = number_parse(value, &n) && n >= 1 && n <= SIM_SERVERS_MAX;
        a->options.servers = (uint32_t)n;
        return ok;
    }
    return false;
}

static void mute_print(const struct sim_options *o)
{
    bool first = true;
    for (int i = 0; i < SIM_FAULTS_MAX; i++)
        if (o->muted[i]) {
            printf("%s%d", first ? " --mute " : ",", i);
            first = false;
        }
}

static void command_print(const struct sim_options *o)
{
    printf("  replay: sim --seed %lu", (unsigned long)o->seed);
    if (o->servers)
        printf(" --servers %u", o->servers);
    if (o->replicas)
        printf(" --replicas %u", o->replicas - 1);
    if (o->mode)
        printf(" --mode %s", o->mode == MODE_SYNC ? "sync" : o->mode == MODE_SSP ? "ssp" : "async");
    mute_print(o);
    printf(" --verbose\n");
}

static void violation_print(const struct sim_options *o, const struct sim_result *r)
{
    printf("VIOLATION at seed %lu, %.3f ms: %s\n", (unsigned long)o->seed, (double)r->at_us / 1e3, r->why);
    command_print(o);
}

/* Mutes fault after fault as long as some violation stays. */
static void shrink(const struct sim_options *o, uint32_t nfaults)
{
    struct sim_options best = *o;
    struct sim_stats stats;
    struct sim_result r, last = { 0 };
    best.verbose = 0;
    bool smaller = true;
    while (smaller) {
        smaller = false;
        for (uint32_t i = 0; i < nfaults; i++) {
            if (best.muted[i])
                continue;
            struct sim_options trial = best;
            trial.muted[i] = true;
            sim_run(&trial, &stats, &r);
            if (!r.failed)
                continue;
            best = trial;
            last = r;
            smaller = true;
        }
    }
    uint32_t left = 0;
    for (uint32_t i = 0; i < nfaults; i++)
        left += !best.muted[i];
    printf("  shrunk to %u of %u faults: %s\n", left, nfaults, last.failed ? last.why : "(the same)");
    command_print(&best);
}

static void stats_add(struct sim_stats *sum, const struct sim_stats *s)
{
#define SIM_X(name) sum->name += s->name;
    SIM_COUNTERS(SIM_X)
#undef SIM_X
}

static void histogram(const struct sim_stats *s)
{
    int column = 0;
#define SIM_X(name) column += printf("%s%s %lu", column ? ", " : "  ", #name, (unsigned long)s->name);                        \
    if (column > 110) {                                                                                                \
        printf("\n");                                                                                                  \
        column = 0;                                                                                                    \
    }
    SIM_COUNTERS(SIM_X)
#undef SIM_X
    if (column)
        printf("\n");
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int seeds_run(const struct arguments *a)
{
    struct sim_stats sum = { 0 }, stats;
    struct sim_result r;
    uint64_t violations = 0, first = a->options.seed;
    double start = seconds();
    uint64_t n = 0;
    for (; n < a->seeds && (!violations || a->keep_going); n++) {
        struct sim_options o = a->options;
        o.seed = first + n;
        sim_run(&o, &stats, &r);
        stats_add(&sum, &stats);
        if (a->digest)
            printf("seed %lu digest %016lx\n", (unsigned long)o.seed, (unsigned long)r.digest);
        if (!r.failed)
            continue;
        violations++;
        violation_print(&o, &r);
        if (a->shrink)
            shrink(&o, r.nfaults);
    }
    printf("%lu seeds, %lu faults, %lu views, %lu reopened, %lu values checked, %lu violations, %.1f s\n", (unsigned long)n,
           (unsigned long)sum.faults, (unsigned long)sum.views, (unsigned long)sum.reopened,
           (unsigned long)sum.values_checked, (unsigned long)violations, seconds() - start);
    histogram(&sum);
    return violations ? 1 : 0;
}

static void narrate(enum log_level level, const char *line, void *arg)
{
    (void)level, (void)arg;
    printf("           log: %s", line);
}

int main(int argc, char **argv)
{
    struct arguments a = { .options.seed = 1, .seeds = 1 };
    for (int i = 1; i < argc; i++)
        if (!argument(&a, argv, &i))
            return usage();
    if (a.options.verbose > 1)
        log_sink_set(narrate, NULL);
    else
        log_level_set(LOG_OFF);
    int status = a.mutants ? mutants_run(&a.options, a.seeds > 1 ? a.seeds : 2000, a.only) : seeds_run(&a);
    pools_drop();
    return status;
}
