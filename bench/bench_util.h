/* bench_util.h - what the bare-socket benchmarks share: time, arguments, statistics, sockets, processes. */
#ifndef BENCH_UTIL_H
#define BENCH_UTIL_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static inline void must(int ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, strerror(errno));
    exit(1);
}

static inline uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* "64M", "1k", "100"; powers of two. Ends the program when it is no such number, or 0. */
static inline size_t size_arg(const char *name, const char *text)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    unsigned shift = *end == 'k' || *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    if (text[0] < '0' || text[0] > '9' || errno || end[shift != 0] || value == 0 || value > (1ull << 40) >> shift) {
        fprintf(stderr, "%s: %s is \"%s\"; it must be a number above 0, as in 64M, 1k or 100\n",
                program_invocation_short_name, name, text);
        exit(2);
    }
    return (size_t)value << shift;
}

static inline int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Of a sorted array; permille 500 is the median. */
static inline uint64_t percentile(const uint64_t *sorted, size_t n, unsigned permille)
{
    return sorted[(n - 1) * permille / 1000];
}

/* Every socket of a comparison must have the same congestion control. */
static inline void socket_tune(int fd, const char *congestion)
{
    int one = 1;
    must(setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, (socklen_t)strlen(congestion)) == 0,
         "setting the congestion control");
    must(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0, "TCP_NODELAY");
}

/* On a free port of the loopback. */
static inline int socket_listen(const char *congestion, struct sockaddr_in *ret_addr)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof addr;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(fd >= 0, "socket");
    socket_tune(fd, congestion);
    must(bind(fd, (struct sockaddr *)&addr, sizeof addr) == 0, "bind");
    must(listen(fd, 64) == 0, "listen");
    must(getsockname(fd, (struct sockaddr *)&addr, &len) == 0, "getsockname");
    *ret_addr = addr;
    return fd;
}

static inline int socket_connect(const char *congestion, const struct sockaddr_in *addr)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(fd >= 0, "socket");
    socket_tune(fd, congestion);
    must(connect(fd, (const struct sockaddr *)addr, sizeof *addr) == 0, "connect");
    return fd;
}

static inline int socket_accept(const char *congestion, int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    must(fd >= 0, "accept");
    socket_tune(fd, congestion);
    return fd;
}

/* fork, with a child that dies with its parent. */
static inline pid_t process_start(void)
{
    pid_t parent = getpid(), pid = fork();
    must(pid >= 0, "fork");
    if (pid == 0) {
        must(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0, "prctl");
        if (getppid() != parent)
            _exit(1);
    }
    return pid;
}

static inline void process_join(pid_t pid, const char *what)
{
    int status;
    must(waitpid(pid, &status, 0) == pid, "waitpid");
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return;
    fprintf(stderr, "%s: the %s process failed\n", program_invocation_short_name, what);
    exit(1);
}

/* Huge pages if there are any, touched: what Keepstep's own buffers are. */
static inline uint8_t *memory_get(size_t size, int fill)
{
    size_t huge = (size_t)2 << 20, whole = (size + 2 * huge - 1) & ~(huge - 1);
    uint8_t *p = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(p != MAP_FAILED, "mmap");
    p += -(uintptr_t)p & (huge - 1);
    (void)madvise(p, size, MADV_HUGEPAGE);
    memset(p, fill, size);
    return p;
}

#endif
