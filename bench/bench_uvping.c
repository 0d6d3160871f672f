/* The round trip that libuv and loopback TCP give: one small message there and back between two processes.
 * Prints one JSON line. */
#include <getopt.h>
#include <uv.h>

#include "bench/bench_util.h"

enum { BYTES_MAX = 65536 };

struct args {
    size_t bytes, iterations, warmup;
    const char *congestion;
};

/* One end. The client sends the next message when the last one is back, the server sends back what is whole. */
struct peer {
    uv_tcp_t tcp;
    const struct args *args;
    uint8_t message[BYTES_MAX];
    size_t filled;
    uint64_t *took; /* the client's times; NULL in the server */
    uint64_t sent_at;
    size_t count;
};

static void uv_must(int rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "bench_uvping: %s: %s\n", what, uv_strerror(rc));
    exit(1);
}

static void on_written(uv_write_t *request, int status)
{
    uv_must(status, "write");
    free(request);
}

/* A request of its own for each: the answer may come before libuv has called back. */
static void message_send(struct peer *p)
{
    uv_buf_t buf = uv_buf_init((char *)p->message, (unsigned)p->args->bytes);
    uv_write_t *request = malloc(sizeof *request);
    must(request != NULL, "malloc");
    p->sent_at = now_ns();
    uv_must(uv_write(request, (uv_stream_t *)&p->tcp, &buf, 1, on_written), "uv_write");
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *ret)
{
    struct peer *p = handle->data;
    (void)suggested;
    *ret = uv_buf_init((char *)p->message + p->filled, (unsigned)(p->args->bytes - p->filled));
}

static void message_whole(struct peer *p)
{
    size_t all = p->args->warmup + p->args->iterations;
    if (p->took)
        p->took[p->count] = now_ns() - p->sent_at;
    p->count++;
    if (p->took && p->count == all)
        uv_close((uv_handle_t *)&p->tcp, NULL);
    else
        message_send(p);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    struct peer *p = stream->data;
    (void)buf;
    if (n == UV_EOF && !p->took) {
        uv_close((uv_handle_t *)stream, NULL);
        return;
    }
    uv_must((int)n, "read");
    p->filled += (size_t)n;
    if (p->filled < p->args->bytes)
        return;
    p->filled = 0;
    message_whole(p);
}

static void peer_run(const struct args *a, int fd, uint64_t *took)
{
    static struct peer p;
    uv_loop_t loop;
    p.args = a;
    p.took = took;
    uv_must(uv_loop_init(&loop), "uv_loop_init");
    uv_must(uv_tcp_init(&loop, &p.tcp), "uv_tcp_init");
    uv_must(uv_tcp_open(&p.tcp, fd), "uv_tcp_open");
    p.tcp.data = &p;
    uv_must(uv_read_start((uv_stream_t *)&p.tcp, on_alloc, on_read), "uv_read_start");
    if (took)
        message_send(&p);
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_must(uv_loop_close(&loop), "uv_loop_close");
}

static void usage(FILE *to)
{
    fprintf(to, "usage: bench_uvping [options]\n"
                "Ping-pong of one message over loopback TCP between two libuv processes: the limit to compare with.\n"
                "  --bytes N        size of the message, up to 64k (64)\n"
                "  --iterations N   measured round trips (20000)\n"
                "  --warmup N       round trips before them (1000)\n"
                "  --congestion S   TCP congestion control of both sockets (cubic)\n"
                "Prints one JSON line: microseconds of a round trip.\n");
}

static struct args args_parse(int argc, char **argv)
{
    static const struct option options[] = {
        {"bytes", required_argument, 0, 'b'},  {"iterations", required_argument, 0, 'i'},
        {"warmup", required_argument, 0, 'w'}, {"congestion", required_argument, 0, 'g'},
        {"help", no_argument, 0, 'h'},         {0},
    };
    struct args a = {64, 20000, 1000, "cubic"};
    int c;
    while ((c = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        switch (c) {
        case 'b':
            a.bytes = size_arg("--bytes", optarg);
            break;
        case 'i':
            a.iterations = size_arg("--iterations", optarg);
            break;
        case 'w':
            a.warmup = size_arg("--warmup", optarg);
            break;
        case 'g':
            a.congestion = optarg;
            break;
        case 'h':
            usage(stdout);
            exit(0);
        default:
            usage(stderr);
            exit(2);
        }
    }
    if (optind < argc || a.bytes > BYTES_MAX || a.iterations > 100000000 || a.warmup > 100000000) {
        usage(stderr);
        exit(2);
    }
    return a;
}

int main(int argc, char **argv)
{
    struct args a = args_parse(argc, argv);
    struct sockaddr_in addr;
    int listener = socket_listen(a.congestion, &addr);
    pid_t server = process_start();
    if (server == 0) {
        peer_run(&a, socket_accept(a.congestion, listener), NULL);
        exit(0);
    }
    uint64_t *took = calloc(a.warmup + a.iterations, sizeof *took), *measured = took + a.warmup, sum = 0;
    must(took != NULL, "calloc");
    peer_run(&a, socket_connect(a.congestion, &addr), took);
    process_join(server, "server");
    qsort(measured, a.iterations, sizeof *measured, by_value);
    for (size_t i = 0; i < a.iterations; i++)
        sum += measured[i];
    printf(
        "{\"bench\":\"uv_ping\",\"bytes\":%zu,\"iterations\":%zu,\"congestion\":\"%s\",\"p50_us\":%.2f,\"p99_us\":%.2f,"
        "\"mean_us\":%.2f,\"min_us\":%.2f}\n",
        a.bytes, a.iterations, a.congestion, (double)percentile(measured, a.iterations, 500) / 1e3,
        (double)percentile(measured, a.iterations, 990) / 1e3, (double)sum / (double)a.iterations / 1e3,
        (double)measured[0] / 1e3);
    free(took);
    return 0;
}
