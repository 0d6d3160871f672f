/* The most that loopback TCP gives a parameter server: clients that send and receive at once, and a server that
 * only echoes. No framing, no processing. Prints one JSON line. */
#include <fcntl.h>
#include <getopt.h>
#include <stdbool.h>
#include <sys/epoll.h>

#include "bench/bench_util.h"

enum { CLIENTS_MAX = 16 };

struct args {
    size_t bytes, chunk, rounds, warmup, clients;
    const char *congestion;
};

/* A stream of rounds * bytes each way over one buffer. The server's sends follow its receives by whole chunks; a
 * client starts a round when the one before came back. */
struct stream {
    int fd;
    const struct args *args;
    uint8_t *in, *out; /* the same memory in the server */
    uint64_t received, sent, total;
    bool server, readable, writable;
};

/* The server must not overwrite what it has not sent back. */
static uint64_t receive_limit(const struct stream *s)
{
    uint64_t room = s->sent + s->args->bytes;
    return s->server && room < s->total ? room : s->total;
}

static uint64_t send_limit(const struct stream *s)
{
    const struct args *a = s->args;
    if (s->server)
        return s->received % a->bytes == 0 ? s->received : s->received - s->received % a->bytes % a->chunk;
    uint64_t next = (s->received / a->bytes + 1) * a->bytes;
    return next < s->total ? next : s->total;
}

/* The end of the chunk that position `at` is in: chunks do not straddle rounds. */
static uint64_t chunk_end(const struct args *a, uint64_t at)
{
    uint64_t within = at % a->bytes, end = (within / a->chunk + 1) * a->chunk;
    return at - within + (end < a->bytes ? end : a->bytes);
}

/* Up to one chunk in; true when that did something. */
static bool stream_receive(struct stream *s)
{
    uint64_t limit = receive_limit(s), end = chunk_end(s->args, s->received);
    if (!s->readable || s->received >= limit)
        return false;
    ssize_t n =
        recv(s->fd, s->in + s->received % s->args->bytes, (size_t)((end < limit ? end : limit) - s->received), 0);
    if (n < 0 && errno == EAGAIN) {
        s->readable = false;
        return false;
    }
    must(n > 0, "recv");
    s->received += (uint64_t)n;
    return true;
}

static bool stream_send(struct stream *s)
{
    uint64_t limit = send_limit(s), end = chunk_end(s->args, s->sent);
    if (!s->writable || s->sent >= limit)
        return false;
    ssize_t n =
        send(s->fd, s->out + s->sent % s->args->bytes, (size_t)((end < limit ? end : limit) - s->sent), MSG_NOSIGNAL);
    if (n < 0 && errno == EAGAIN) {
        s->writable = false;
        return false;
    }
    must(n > 0, "send");
    s->sent += (uint64_t)n;
    return true;
}

static bool stream_done(const struct stream *s)
{
    return s->received == s->total && s->sent == s->total;
}

static int poller_create(struct stream *s, size_t n)
{
    int poller = epoll_create1(EPOLL_CLOEXEC);
    must(poller >= 0, "epoll_create1");
    for (size_t i = 0; i < n; i++) {
        struct epoll_event e = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = &s[i]};
        must(fcntl(s[i].fd, F_SETFL, O_NONBLOCK) == 0, "fcntl");
        must(epoll_ctl(poller, EPOLL_CTL_ADD, s[i].fd, &e) == 0, "epoll_ctl");
    }
    return poller;
}

/* Asked after every piece, or a busy direction starves the others; sleeps only when nothing was possible. */
static void poller_wait(int poller, bool busy)
{
    struct epoll_event events[CLIENTS_MAX];
    int n = epoll_wait(poller, events, CLIENTS_MAX, busy ? 0 : -1);
    must(n >= 0 || errno == EINTR, "epoll_wait");
    for (int i = 0; i < n; i++) {
        struct stream *s = events[i].data.ptr;
        s->readable |= (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0;
        s->writable |= (events[i].events & EPOLLOUT) != 0;
    }
}

static bool all_done(const struct stream *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!stream_done(&s[i]))
            return false;
    return true;
}

static void server_run(const struct args *a, int listener)
{
    struct stream s[CLIENTS_MAX] = {0};
    for (size_t i = 0; i < a->clients; i++) {
        uint8_t *memory = memory_get(a->bytes, 0);
        s[i] = (struct stream){.fd = socket_accept(a->congestion, listener),
                               .args = a,
                               .server = true,
                               .in = memory,
                               .out = memory,
                               .total = (a->warmup + a->rounds) * a->bytes};
    }
    int poller = poller_create(s, a->clients);
    for (bool busy = true; !all_done(s, a->clients); poller_wait(poller, busy)) {
        busy = false;
        for (size_t i = 0; i < a->clients; i++) {
            busy |= stream_receive(&s[i]);
            busy |= stream_send(&s[i]);
        }
    }
}

/* Writes the time at the start of the first measured round and at the end of every measured one. */
static void client_run(const struct args *a, const struct sockaddr_in *addr, int result)
{
    struct stream s = {.args = a, .total = (a->warmup + a->rounds) * a->bytes};
    uint64_t *at = calloc(a->rounds + 1, sizeof *at);
    must(at != NULL, "calloc");
    s.in = memory_get(a->bytes, 0);
    s.out = memory_get(a->bytes, 0x5a);
    for (size_t i = 0; i < a->bytes; i++)
        s.out[i] = (uint8_t)(i * 0x9e3779b1u >> 24);
    s.fd = socket_connect(a->congestion, addr);
    int poller = poller_create(&s, 1);
    uint64_t round = 0;
    for (bool busy = true; !stream_done(&s); poller_wait(poller, busy)) {
        busy = stream_send(&s);
        busy |= stream_receive(&s);
        if (s.received / a->bytes > round) {
            round++;
            if (round >= a->warmup)
                at[round - a->warmup] = now_ns();
        }
    }
    if (memcmp(s.in, s.out, a->bytes) != 0) {
        fprintf(stderr, "bench_raw: what came back is not what was sent\n");
        exit(1);
    }
    must(write(result, at, (a->rounds + 1) * sizeof *at) == (ssize_t)((a->rounds + 1) * sizeof *at), "write");
}

static void usage(FILE *to)
{
    fprintf(to, "usage: bench_raw [options]\n"
                "Raw TCP echo over loopback, both directions at once, between processes: the limit to compare with.\n"
                "  --bytes N        each client sends and receives a round (64M)\n"
                "  --chunk N        the server sends a chunk back when it has it whole (1M)\n"
                "  --clients N      processes, 1 to 16 (1)\n"
                "  --rounds N       measured rounds, up to 1000 (20)\n"
                "  --warmup N       rounds before them, at least 1 (2)\n"
                "  --congestion S   TCP congestion control of every socket (cubic)\n"
                "Prints one JSON line: GB/s each way of all clients together, and of one client's median round.\n");
}

static struct args args_parse(int argc, char **argv)
{
    static const struct option options[] = {
        {"bytes", required_argument, 0, 'b'},   {"chunk", required_argument, 0, 'c'},
        {"clients", required_argument, 0, 'n'}, {"rounds", required_argument, 0, 'r'},
        {"warmup", required_argument, 0, 'w'},  {"congestion", required_argument, 0, 'g'},
        {"help", no_argument, 0, 'h'},          {0},
    };
    struct args a = {64 << 20, 1 << 20, 20, 2, 1, "cubic"};
    int c;
    while ((c = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        switch (c) {
        case 'b':
            a.bytes = size_arg("--bytes", optarg);
            break;
        case 'c':
            a.chunk = size_arg("--chunk", optarg);
            break;
        case 'n':
            a.clients = size_arg("--clients", optarg);
            break;
        case 'r':
            a.rounds = size_arg("--rounds", optarg);
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
    if (optind < argc || a.clients > CLIENTS_MAX || a.rounds > 1000) {
        usage(stderr);
        exit(2);
    }
    return a;
}

static void report(const struct args *a, uint64_t (*at)[1001])
{
    uint64_t first = UINT64_MAX, last = 0, *took = calloc(a->clients * a->rounds, sizeof *took);
    must(took != NULL, "calloc");
    for (size_t c = 0; c < a->clients; c++) {
        first = at[c][0] < first ? at[c][0] : first;
        last = at[c][a->rounds] > last ? at[c][a->rounds] : last;
        for (size_t r = 0; r < a->rounds; r++)
            took[c * a->rounds + r] = at[c][r + 1] - at[c][r];
    }
    qsort(took, a->clients * a->rounds, sizeof *took, by_value);
    double median = (double)percentile(took, a->clients * a->rounds, 500);
    printf("{\"bench\":\"raw_echo\",\"clients\":%zu,\"bytes\":%zu,\"chunk\":%zu,\"rounds\":%zu,\"congestion\":\"%s\","
           "\"gb_s_each_way\":%.3f,\"client_median_gb_s_each_way\":%.3f,\"client_best_gb_s_each_way\":%.3f,"
           "\"median_round_ms\":%.3f}\n",
           a->clients, a->bytes, a->chunk, a->rounds, a->congestion,
           (double)a->bytes * (double)(a->rounds * a->clients) / (double)(last - first), (double)a->bytes / median,
           (double)a->bytes / (double)took[0], median / 1e6);
    free(took);
}

int main(int argc, char **argv)
{
    static uint64_t at[CLIENTS_MAX][1001];
    struct args a = args_parse(argc, argv);
    struct sockaddr_in addr;
    int listener = socket_listen(a.congestion, &addr), pipes[CLIENTS_MAX][2];
    pid_t client[CLIENTS_MAX], server = process_start();
    if (server == 0) {
        server_run(&a, listener);
        exit(0);
    }
    for (size_t i = 0; i < a.clients; i++) {
        must(pipe(pipes[i]) == 0, "pipe");
        client[i] = process_start();
        if (client[i] == 0) {
            client_run(&a, &addr, pipes[i][1]);
            exit(0);
        }
        close(pipes[i][1]);
    }
    for (size_t i = 0; i < a.clients; i++) {
        size_t size = (a.rounds + 1) * sizeof at[i][0];
        ssize_t n = read(pipes[i][0], at[i], size);
        process_join(client[i], "client");
        must(n == (ssize_t)size, "reading a client's times");
    }
    process_join(server, "server");
    report(&a, at);
    return 0;
}
