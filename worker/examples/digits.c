/* digits.c - trains a two-layer network on handwritten digits: 64 pixels, 32 tanh units, 10 classes.
 *
 *     digits --data digits.csv[.gz] [--steps 300] [--batch 32] [--seed 1] [--every 10] [--pause 0] [--slot N --ledger FILE]
 *     digits --data digits.csv[.gz] --audit 1
 *
 * The job's mode decides how: in sync mode a step pushes gradients and gets the parameters after it; in ssp and async
 * mode it pulls what is there, then pushes. The servers run AdamW. A fifth of the samples, the same for everybody, is
 * held out. One JSON object a line on stdout: every --every steps, and at the end with "final": 1. A member that was
 * removed pulls and goes on; SIGTERM finishes the step and leaves.
 *
 * --slot and --ledger count what the job's servers are trusted with: each step also adds one to this process's slot of
 * some ledger tensors, and FILE, which outlives a kill, keeps how many were pushed and how many acknowledged. --audit
 * prints the slots and the accuracy that the servers hold, and trains nothing. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "keepstep.h"

enum { PIXELS = 64, HIDDEN = 32, CLASSES = 10, PARTS = 4, SAMPLES_MAX = 20000, LINE_BYTES = 4096,
       LEDGERS = 8, SLOTS = 64 };

/* ---- options ---- */

struct options {
    const char *data, *ledger;
    long steps, batch, seed, every, pause_ms, slot, audit;
};

static bool option_number(const char *text, long *ret)
{
    char *end;
    errno = 0;
    long n = strtol(text, &end, 10);
    if (errno || end == text || *end || n < 0)
        return false;
    *ret = n;
    return true;
}

static int options_parse(int argc, char **argv, struct options *ret)
{
    struct options o = {.steps = 300, .batch = 32, .seed = 1, .every = 10};
    const struct {
        const char *name;
        long *at;
    } known[] = {{"--steps", &o.steps}, {"--batch", &o.batch},    {"--seed", &o.seed}, {"--every", &o.every},
                 {"--slot", &o.slot},   {"--pause", &o.pause_ms}, {"--audit", &o.audit}};
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        bool ok = false;
        for (size_t k = 0; k < sizeof known / sizeof known[0] && value; k++)
            ok |= !strcmp(argv[i], known[k].name) && option_number(value, known[k].at);
        const char **text = !strcmp(argv[i], "--data") ? &o.data : !strcmp(argv[i], "--ledger") ? &o.ledger : NULL;
        if (text && value)
            *text = value;
        if (!ok && !(text && value)) {
            fprintf(stderr,
                    "digits: bad argument '%s' (known: --data FILE, --steps, --batch, --seed, --every, --pause MS, "
                    "--slot, --ledger FILE, --audit)\n",
                    argv[i]);
            return -1;
        }
    }
    if (!o.data || !o.batch || !o.every || o.slot >= SLOTS) {
        fprintf(stderr, "digits: give --data FILE; --batch and --every are at least 1, --slot is at most %d\n", SLOTS - 1);
        return -1;
    }
    *ret = o;
    return 0;
}

/* ---- random numbers: splitmix64 (Steele, Lea, Flood, OOPSLA 2014) ---- */

static uint64_t random_next(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static float random_unit(uint64_t *state) /* [-1, 1) */
{
    return (float)(random_next(state) >> 40) / (float)(1 << 23) - 1;
}

/* ---- data ---- */

struct sample {
    float pixel[PIXELS];
    int label;
};
struct data {
    struct sample *sample;
    size_t n, train; /* the first `train` are for training */
};

static bool sample_parse(char *line, struct sample *ret)
{
    for (int i = 0; i <= PIXELS; i++) {
        char *end;
        long v = strtol(line, &end, 10);
        if (end == line || v < 0 || v > 16 || *end != (i < PIXELS ? ',' : '\n'))
            return false;
        line = end + 1;
        if (i < PIXELS)
            ret->pixel[i] = (float)v / 16;
        else
            ret->label = (int)v;
    }
    return ret->label < CLASSES;
}

static int data_read(FILE *f, const char *name, struct data *d)
{
    char line[LINE_BYTES];
    while (fgets(line, sizeof line, f)) {
        if (d->n == SAMPLES_MAX || !sample_parse(line, &d->sample[d->n])) {
            fprintf(stderr, "digits: %s, line %zu: not 64 pixels of 0..16 and a label of 0..9\n", name, d->n + 1);
            return -1;
        }
        d->n++;
    }
    if (d->n < 10) {
        fprintf(stderr, "digits: %s: no samples\n", name);
        return -1;
    }
    return 0;
}

static FILE *data_open(const char *name, bool zipped)
{
    char command[LINE_BYTES];
    if (!zipped)
        return fopen(name, "r");
    if (strchr(name, '\'') || access(name, R_OK))
        return NULL;
    snprintf(command, sizeof command, "gzip -dc '%s'", name);
    return popen(command, "r");
}

/* Shuffled the same way by everybody with this seed. */
static int data_load(const struct options *o, struct data *d)
{
    size_t n = strlen(o->data);
    bool zipped = n > 3 && !strcmp(o->data + n - 3, ".gz");
    FILE *f = data_open(o->data, zipped);
    if (!f) {
        fprintf(stderr, "digits: cannot open %s: %s\n", o->data, strerror(errno));
        return -1;
    }
    d->sample = calloc(SAMPLES_MAX, sizeof *d->sample);
    int r = d->sample ? data_read(f, o->data, d) : -1;
    zipped ? pclose(f) : fclose(f);
    uint64_t random = (uint64_t)o->seed;
    for (size_t i = d->n; i > 1; i--) {
        size_t j = random_next(&random) % i;
        struct sample s = d->sample[i - 1];
        d->sample[i - 1] = d->sample[j];
        d->sample[j] = s;
    }
    d->train = d->n - d->n / 5;
    return r;
}

/* ---- the network ---- */

struct net {
    float w1[PIXELS][HIDDEN], b1[HIDDEN], w2[HIDDEN][CLASSES], b2[CLASSES];
};

static const struct {
    const char *name;
    size_t at;
    uint32_t ndims;
    uint64_t dims[2];
} parts[PARTS] = {
    {"digits.w1", offsetof(struct net, w1), 2, {PIXELS, HIDDEN}},
    {"digits.b1", offsetof(struct net, b1), 1, {HIDDEN}},
    {"digits.w2", offsetof(struct net, w2), 2, {HIDDEN, CLASSES}},
    {"digits.b2", offsetof(struct net, b2), 1, {CLASSES}},
};

static void net_first(struct net *p, uint64_t seed)
{
    memset(p, 0, sizeof *p);
    for (int i = 0; i < PIXELS; i++)
        for (int j = 0; j < HIDDEN; j++)
            p->w1[i][j] = random_unit(&seed) * 0.15f;
    for (int j = 0; j < HIDDEN; j++)
        for (int k = 0; k < CLASSES; k++)
            p->w2[j][k] = random_unit(&seed) * 0.25f;
}

/* Hidden units and probabilities; returns the most probable class. */
static int forward(const struct net *p, const float *x, float *hidden, float *prob)
{
    float sum = 0;
    int best = 0;
    memcpy(hidden, p->b1, sizeof p->b1);
    memcpy(prob, p->b2, sizeof p->b2);
    for (int i = 0; i < PIXELS; i++)
        for (int j = 0; j < HIDDEN; j++)
            hidden[j] += x[i] * p->w1[i][j];
    for (int j = 0; j < HIDDEN; j++) {
        hidden[j] = tanhf(hidden[j]);
        for (int k = 0; k < CLASSES; k++)
            prob[k] += hidden[j] * p->w2[j][k];
    }
    for (int k = 1; k < CLASSES; k++)
        best = prob[k] > prob[best] ? k : best;
    float top = prob[best];
    for (int k = 0; k < CLASSES; k++)
        sum += prob[k] = expf(prob[k] - top);
    for (int k = 0; k < CLASSES; k++)
        prob[k] /= sum;
    return best;
}

/* g += the gradient of one sample's loss; returns the loss. */
static float backward(const struct net *p, const struct sample *s, struct net *g, float scale)
{
    float hidden[HIDDEN], prob[CLASSES];
    (void)forward(p, s->pixel, hidden, prob);
    float loss = -logf(fmaxf(prob[s->label], 1e-12f));
    prob[s->label] -= 1;
    for (int k = 0; k < CLASSES; k++)
        g->b2[k] += prob[k] *= scale;
    for (int j = 0; j < HIDDEN; j++) {
        float d = 0;
        for (int k = 0; k < CLASSES; k++) {
            g->w2[j][k] += hidden[j] * prob[k];
            d += p->w2[j][k] * prob[k];
        }
        hidden[j] = d * (1 - hidden[j] * hidden[j]);
        g->b1[j] += hidden[j];
    }
    for (int i = 0; i < PIXELS; i++)
        for (int j = 0; s->pixel[i] != 0 && j < HIDDEN; j++)
            g->w1[i][j] += s->pixel[i] * hidden[j];
    return loss;
}

static double accuracy(const struct net *p, const struct data *d)
{
    float hidden[HIDDEN], prob[CLASSES];
    size_t right = 0;
    for (size_t i = d->train; i < d->n; i++)
        right += forward(p, d->sample[i].pixel, hidden, prob) == d->sample[i].label;
    return (double)right / (double)(d->n - d->train);
}

/* ---- the ledger ---- */

/* On disk, shared with who kills us: pushes begun and pushes acknowledged, of each ledger tensor. */
struct account {
    uint64_t pushed[LEDGERS], acked[LEDGERS];
};
struct ledger {
    struct account *account; /* NULL: no ledger is kept */
    struct ks_tensor *tensor[LEDGERS];
    struct ks_handle *handle[LEDGERS];
    int64_t one[SLOTS]; /* 1 in our slot */
};

static int ledger_open(struct ledger *l, const struct options *o)
{
    l->one[o->slot] = 1;
    if (!o->ledger)
        return 0;
    int fd = open(o->ledger, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    void *at = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, sizeof *l->account) == 0)
        at = mmap(NULL, sizeof *l->account, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        fprintf(stderr, "digits: cannot use %s: %s\n", o->ledger, strerror(errno));
        return -1;
    }
    close(fd);
    l->account = at;
    return 0;
}

static int ledger_register(struct ledger *l, struct ks_job *job)
{
    static const int64_t zero[SLOTS];
    struct ks_spec spec = {
        .dtype = KS_I64, .ndims = 1, .dims = {SLOTS}, .kind = KS_PARAM, .op = KS_SUM, .optimizer = "add"};
    int r = 0;
    for (int i = 0; i < LEDGERS && !r; i++) {
        char name[32];
        snprintf(name, sizeof name, "digits.ledger.%d", i);
        r = ks_tensor_register(job, name, &spec, &l->tensor[i]);
        r = r ? r : ks_init(l->tensor[i], zero, -1, NULL);
    }
    return r;
}

static int ledger_push(struct ledger *l)
{
    int r = 0;
    for (int i = 0; i < LEDGERS; i++)
        l->handle[i] = NULL;
    for (int i = 0; l->account && i < LEDGERS && !r; i++) {
        l->account->pushed[i]++;
        r = ks_push(l->tensor[i], l->one, 1.0, &l->handle[i]);
    }
    return r;
}

/* After the step was ended. What was not acknowledged stays between pushed and acked. */
static int ledger_wait(struct ledger *l)
{
    int worst = 0;
    for (int i = 0; i < LEDGERS; i++) {
        int r = l->handle[i] ? ks_wait(l->handle[i], -1) : 0;
        if (l->handle[i] && !r)
            l->account->acked[i]++;
        worst = worst ? worst : r;
    }
    return worst;
}

static int ledger_print(struct ledger *l)
{
    int64_t value[SLOTS];
    for (int i = 0; i < LEDGERS; i++) {
        struct ks_handle *h;
        int r = ks_pull(l->tensor[i], value, &h);
        r = r ? r : ks_wait(h, -1);
        if (r)
            return r;
        printf("%s[", i ? "," : "{\"ledger\":[");
        for (int k = 0; k < SLOTS; k++)
            printf("%s%lld", k ? "," : "", (long long)value[k]);
        printf("]");
    }
    printf("]}\n");
    fflush(stdout);
    return 0;
}

/* ---- training ---- */

struct trainer {
    struct options o;
    struct data data;
    struct ks_job *job;
    struct ks_tensor *tensor[PARTS];
    struct ledger ledger;
    struct net value, gradient;
    bool fresh; /* value is what the step starts with */
    double loss;
};

static volatile sig_atomic_t stop;

static void on_term(int signal)
{
    (void)signal;
    stop = 1;
}

static int parts_register(struct trainer *t)
{
    struct net first;
    int r = 0;
    net_first(&first, (uint64_t)t->o.seed);
    for (int i = 0; i < PARTS && !r; i++) {
        struct ks_spec spec = {.dtype = KS_F32,
                               .ndims = parts[i].ndims,
                               .kind = KS_PARAM,
                               .op = KS_AVERAGE,
                               .optimizer = "adamw lr=0.005"};
        memcpy(spec.dims, parts[i].dims, sizeof parts[i].dims);
        r = ks_tensor_register(t->job, parts[i].name, &spec, &t->tensor[i]);
        r = r ? r : ks_init(t->tensor[i], (char *)&first + parts[i].at, -1, NULL);
    }
    return r;
}

static int tensors_make(struct trainer *t)
{
    int r;
    do {
        r = parts_register(t);
        if (!r && (t->ledger.account || t->o.audit))
            r = ledger_register(&t->ledger, t->job);
    } while (r == KS_EFENCED && !stop);
    return r;
}

/* All four as one call: push what is in `gradient`, or want the values, or both. */
static int exchange(struct trainer *t, bool push, bool want, struct ks_handle **ret)
{
    struct ks_item item[PARTS];
    for (int i = 0; i < PARTS; i++)
        item[i] = (struct ks_item){.tensor = t->tensor[i],
                                   .weight = (double)t->o.batch,
                                   .data = push ? (char *)&t->gradient + parts[i].at : NULL,
                                   .out = want ? (char *)&t->value + parts[i].at : NULL};
    return ks_many(t->job, item, PARTS, ret);
}

static int pull(struct trainer *t)
{
    struct ks_handle *h[PARTS];
    int r = 0, made = 0;
    while (made < PARTS && !r) {
        r = ks_pull(t->tensor[made], (char *)&t->value + parts[made].at, &h[made]);
        made += !r;
    }
    for (int i = 0; i < made; i++) {
        int outcome = ks_wait(h[i], -1);
        r = r ? r : outcome;
    }
    return r;
}

static void gradient_make(struct trainer *t, int64_t step)
{
    uint64_t random = (uint64_t)t->o.seed * 1000003 + (uint64_t)step * 8191 + (uint64_t)(ks_rank(t->job) + 1);
    memset(&t->gradient, 0, sizeof t->gradient);
    t->loss = 0;
    for (long i = 0; i < t->o.batch; i++) {
        const struct sample *s = &t->data.sample[random_next(&random) % t->data.train];
        t->loss += (double)backward(&t->value, s, &t->gradient, 1 / (float)t->o.batch) / (double)t->o.batch;
    }
}

/* A push that came too late or too stale is lost, and the training goes on. */
static bool lost_push(int r)
{
    return r == KS_ELATE || r == KS_ESTALE || r == KS_ENOTFINITE;
}

static int step(struct trainer *t)
{
    bool sync = ks_mode(t->job, NULL) == KS_SYNC;
    struct ks_handle *h;
    int r = t->fresh ? 0 : pull(t);
    if (r)
        return r;
    gradient_make(t, ks_step(t->job));
    t->fresh = false;
    r = exchange(t, true, sync, &h);
    if (r)
        return r;
    int counted = ledger_push(&t->ledger), ended = ks_step_end(t->job);
    r = ks_wait(h, -1);
    t->fresh = sync && !r;
    int known = ledger_wait(&t->ledger);
    r = lost_push(r) ? 0 : r;
    r = r ? r : counted ? counted : ended;
    return r ? r : lost_push(known) ? 0 : known;
}

static int staleness_max(const struct trainer *t)
{
    uint64_t bucket[KS_STALENESS_BUCKETS];
    int max = 0;
    for (int i = 0; i < PARTS; i++) {
        ks_staleness(t->tensor[i], bucket);
        for (int k = max + 1; k < KS_STALENESS_BUCKETS; k++)
            max = bucket[k] ? k : max;
    }
    return max;
}

static void report(const struct trainer *t, bool final)
{
    struct ks_stats s;
    ks_stats(t->job, &s);
    printf("{%s\"step\":%lld,\"loss\":%.6f,\"accuracy\":%.4f,\"rank\":%lld,\"size\":%lld,\"member\":\"%llu\",\"epoch\":"
           "%llu,"
           "\"staleness_max\":%d,\"acked\":%llu,\"late\":%llu,\"stale\":%llu,\"resent\":%llu,\"rejoins\":%llu}\n",
           final ? "\"final\":1," : "", (long long)ks_step(t->job), t->loss, accuracy(&t->value, &t->data),
           (long long)ks_rank(t->job), (long long)ks_size(t->job), (unsigned long long)ks_member_id(t->job),
           (unsigned long long)ks_epoch(t->job), staleness_max(t), (unsigned long long)s.acked,
           (unsigned long long)s.late, (unsigned long long)s.stale, (unsigned long long)s.resent,
           (unsigned long long)s.rejoins);
    fflush(stdout);
}

static void pause_ms(long ms)
{
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    if (ms)
        (void)nanosleep(&t, NULL);
}

/* The last value, for the final line. */
static int pull_last(struct trainer *t)
{
    int r = 0;
    for (int tries = 0; !t->fresh && tries < 3; tries++) {
        r = pull(t);
        t->fresh = !r;
        if (r != KS_EFENCED)
            return r;
    }
    return r;
}

/* 0, or what ended the training early. Being removed is no end: the library has joined again. */
static int train(struct trainer *t)
{
    int r = 0;
    while (!stop && !r && ks_step(t->job) < t->o.steps) {
        bool tells = ks_step(t->job) % t->o.every == 0;
        r = step(t);
        if (r == KS_EFENCED) {
            t->fresh = false;
            r = 0;
        } else if (!r && tells) {
            report(t, false);
        }
        pause_ms(t->o.pause_ms);
    }
    return r || stop ? r : pull_last(t);
}

static int audit(struct trainer *t)
{
    int r = ledger_print(&t->ledger);
    return r ? r : pull_last(t);
}

static int run(struct trainer *t)
{
    int r = ks_open(NULL, &t->job);
    if (r) {
        fprintf(stderr, "digits: %s\n", ks_last_error(NULL));
        return 1;
    }
    r = tensors_make(t);
    r = r ? r : t->o.audit ? audit(t) : train(t);
    if (r)
        fprintf(stderr, "digits: %s\n", ks_last_error(t->job));
    else
        report(t, true);
    if (!r)
        (void)ks_leave(t->job, -1);
    ks_close(t->job);
    return r != 0;
}

int main(int argc, char **argv)
{
    static struct trainer t;
    struct sigaction on = {.sa_handler = on_term, .sa_flags = SA_RESTART};
    if (options_parse(argc, argv, &t.o))
        return 2;
    signal(SIGPIPE, SIG_IGN);
    sigaction(SIGTERM, &on, NULL);
    int r = data_load(&t.o, &t.data) || ledger_open(&t.ledger, &t.o) ? 2 : run(&t);
    free(t.data.sample);
    return r;
}
