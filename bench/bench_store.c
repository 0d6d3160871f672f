/* bench_store [DIR] - the store next to bare pwrite + fdatasync in the same directory (default: $TMPDIR or /tmp).
 *
 * Prints one JSON line each: latency of one small batch, rate of small batches in flight, MB/s of large values.
 * Both sides of a pair run in turns; numbers are medians over the rounds, so the ratio is what to trust. */
#include <fcntl.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "storage/store.h"
#include "tests/store_help.h"

enum { ROUNDS = 7, SMALL = 200, SMALL_BYTES = 256, IN_FLIGHT = 256, LARGE = 256, LARGE_BYTES = 1 << 20 };

struct bench {
    struct store *store;
    sem_t woken;
    uint64_t seq;
    int fd;
    off_t at;
    uint8_t *large;
};

static void must(int ok, const char *what)
{
    if (ok)
        return;
    perror(what);
    exit(1);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, size_t n)
{
    qsort(v, n, sizeof *v, by_value);
    return v[n / 2];
}

static void durable_wait(struct bench *b, uint64_t seq)
{
    char err[STORE_ERR_TEXT] = "";
    uint64_t durable;
    if (store_wait(b->store, &b->woken, seq, &durable, err) == 0)
        return;
    fprintf(stderr, "bench_store: %s\n", err);
    exit(1);
}

static void put(struct bench *b, uint64_t key, const void *value, size_t size)
{
    struct store_op op = op_put(&key, sizeof key, value, size);
    b->store->ops->submit(b->store, ++b->seq, &op, 1);
}

static void bare_write(struct bench *b, const void *data, size_t size)
{
    must(pwrite(b->fd, data, size, b->at) == (ssize_t)size, "pwrite");
    b->at += (off_t)size;
}

static double store_latency_us(struct bench *b)
{
    static double us[SMALL];
    for (int i = 0; i < SMALL; i++) {
        uint64_t start = clock_now_us();
        put(b, (uint64_t)i % 64, b->large, SMALL_BYTES);
        durable_wait(b, b->seq);
        us[i] = (double)(clock_now_us() - start);
    }
    return median(us, SMALL);
}

static double bare_latency_us(struct bench *b)
{
    static double us[SMALL];
    for (int i = 0; i < SMALL; i++) {
        uint64_t start = clock_now_us();
        bare_write(b, b->large, SMALL_BYTES);
        must(fdatasync(b->fd) == 0, "fdatasync");
        us[i] = (double)(clock_now_us() - start);
    }
    return median(us, SMALL);
}

static double store_rate(struct bench *b)
{
    enum { N = 20000 };
    uint64_t start = clock_now_us();
    for (int i = 0; i < N; i++) {
        put(b, (uint64_t)i % 4096, b->large, SMALL_BYTES);
        if (b->seq > IN_FLIGHT)
            durable_wait(b, b->seq - IN_FLIGHT);
    }
    durable_wait(b, b->seq);
    return N * 1e6 / (double)(clock_now_us() - start);
}

static double store_bulk_mbs(struct bench *b)
{
    uint64_t start = clock_now_us();
    for (size_t i = 0; i < LARGE; i++)
        put(b, 1u << 20 | i, b->large + i * LARGE_BYTES, LARGE_BYTES);
    durable_wait(b, b->seq);
    return (double)LARGE * LARGE_BYTES / (double)(clock_now_us() - start);
}

static double bare_bulk_mbs(struct bench *b)
{
    uint64_t start = clock_now_us();
    b->at = 0;
    for (size_t i = 0; i < LARGE; i++)
        bare_write(b, b->large + i * LARGE_BYTES, LARGE_BYTES);
    must(fdatasync(b->fd) == 0, "fdatasync");
    return (double)LARGE * LARGE_BYTES / (double)(clock_now_us() - start);
}

static void bench_pair(struct bench *b, const char *what, const char *unit, double (*store)(struct bench *),
                       double (*bare)(struct bench *))
{
    double s[ROUNDS], p[ROUNDS];
    store(b), bare(b);
    for (int i = 0; i < ROUNDS; i++) {
        s[i] = store(b);
        p[i] = bare(b);
    }
    double store_median = median(s, ROUNDS), bare_median = median(p, ROUNDS);
    printf("{\"bench\":\"%s\",\"unit\":\"%s\",\"store\":%.1f,\"pwrite_fdatasync\":%.1f,\"ratio\":%.3f}\n", what, unit,
           store_median, bare_median, store_median / bare_median);
    fflush(stdout);
}

static double bare_rate(struct bench *b)
{
    return 1e6 / bare_latency_us(b);
}

int main(int argc, char **argv)
{
    char dir[PATH_MAX], path[PATH_MAX + 16], err[STORE_ERR_TEXT] = "";
    struct bench b = {0};
    if (argc > 1)
        setenv("TMPDIR", argv[1], 1);
    scratch_make(dir);
    snprintf(path, sizeof path, "%s/bare", dir);
    b.fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    must(b.fd >= 0, path);
    b.large = mem_alloc((size_t)LARGE * LARGE_BYTES);
    for (size_t i = 0; i < (size_t)LARGE * LARGE_BYTES; i++)
        b.large[i] = (uint8_t)(i * 131 + i / 4096);
    sem_init(&b.woken, 0, 0);
    snprintf(path, sizeof path, "%s/store", dir);
    struct store_lmdb_config c = {path, 1, (size_t)4 << 30, wake_post, &b.woken};
    if (store_lmdb_open(&c, &b.store, err) != 0) {
        fprintf(stderr, "bench_store: %s\n", err);
        return 1;
    }
    bench_pair(&b, "store_small_latency", "us", store_latency_us, bare_latency_us);
    bench_pair(&b, "store_small_rate", "batches/s", store_rate, bare_rate);
    bench_pair(&b, "store_bulk", "MB/s", store_bulk_mbs, bare_bulk_mbs);
    b.store->ops->close(b.store);
    close(b.fd);
    mem_free(b.large);
    scratch_remove(dir);
    return 0;
}
