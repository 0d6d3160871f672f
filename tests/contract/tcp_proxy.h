/* tcp_proxy.h - a TCP proxy of a test: loses answers, cuts connections, answers nonsense. */
#ifndef TESTS_CONTRACT_TCP_PROXY_H
#define TESTS_CONTRACT_TCP_PROXY_H

#include <stdbool.h>
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PROXY_PAIRS = 32 };
enum proxy_mode {
    PROXY_PASS,
    PROXY_LOSE_ANSWERS, /* of transactions: they reach the server, then the connection is closed */
    PROXY_NONSENSE,     /* to every request, which goes nowhere */
};

struct proxy_pair {
    int client, server;
    bool lose;
};
struct proxy {
    int listen_fd, port, server_port;
    atomic_int mode, lost;
    atomic_bool cut, stop; /* cut: close every connection, once */
    struct proxy_pair pair[PROXY_PAIRS];
    int npairs;
    pthread_t thread;
};

static inline int proxy_connect(int port)
{
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
        return fd;
    close(fd);
    return -1;
}

static inline void proxy_accept(struct proxy *p)
{
    int client = accept4(p->listen_fd, NULL, NULL, SOCK_CLOEXEC), server = proxy_connect(p->server_port);
    if (client < 0 || server < 0 || p->npairs == PROXY_PAIRS) {
        close(client);
        close(server);
        return;
    }
    p->pair[p->npairs++] = (struct proxy_pair){client, server, false};
}

static inline bool proxy_send(int fd, const char *data, ssize_t n)
{
    for (ssize_t sent; n > 0; data += sent, n -= sent)
        if ((sent = send(fd, data, (size_t)n, MSG_NOSIGNAL)) <= 0)
            return false;
    return true;
}

static inline bool proxy_from_client(struct proxy *p, struct proxy_pair *pair)
{
    static const char nonsense[] = "HTTP/1.1 200 OK\r\nContent-Length: 21\r\n\r\n{\"header\":[\"nonsense\"";
    char data[16384];
    ssize_t n = recv(pair->client, data, sizeof data, 0);
    if (n <= 0)
        return false;
    if (p->mode == PROXY_NONSENSE)
        return proxy_send(pair->client, nonsense, sizeof nonsense - 1);
    if (p->mode == PROXY_LOSE_ANSWERS && memmem(data, (size_t)n, "POST /v3/kv/txn", 15))
        pair->lose = true;
    return proxy_send(pair->server, data, n);
}

static inline bool proxy_from_server(struct proxy *p, struct proxy_pair *pair)
{
    char data[16384];
    ssize_t n = recv(pair->server, data, sizeof data, 0);
    if (n > 0 && pair->lose)
        p->lost++;
    return n > 0 && !pair->lose && proxy_send(pair->client, data, n);
}

static inline void *proxy_run(void *arg)
{
    struct proxy *p = arg;
    while (!p->stop) {
        struct pollfd fds[1 + 2 * PROXY_PAIRS] = {{p->listen_fd, POLLIN, 0}};
        for (int i = 0; i < p->npairs; i++) {
            fds[1 + 2 * i] = (struct pollfd){p->pair[i].client, POLLIN, 0};
            fds[2 + 2 * i] = (struct pollfd){p->pair[i].server, POLLIN, 0};
        }
        poll(fds, (nfds_t)(1 + 2 * p->npairs), 5);
        bool cut = atomic_exchange(&p->cut, false);
        for (int i = p->npairs - 1; i >= 0; i--) {
            struct proxy_pair *pair = &p->pair[i];
            bool ok = !cut && (!fds[1 + 2 * i].revents || proxy_from_client(p, pair));
            if (ok && (!fds[2 + 2 * i].revents || proxy_from_server(p, pair)))
                continue;
            close(pair->client);
            close(pair->server);
            *pair = p->pair[--p->npairs];
        }
        if (fds[0].revents)
            proxy_accept(p);
    }
    return NULL;
}

static inline void proxy_start(struct proxy *p, int server_port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    memset(p, 0, sizeof *p);
    p->server_port = server_port;
    p->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(p->listen_fd, (struct sockaddr *)&a, size) || listen(p->listen_fd, 64) ||
        getsockname(p->listen_fd, (struct sockaddr *)&a, &size) || pthread_create(&p->thread, NULL, proxy_run, p))
        abort();
    p->port = ntohs(a.sin_port);
}

static inline void proxy_stop(struct proxy *p)
{
    p->stop = true;
    pthread_join(p->thread, NULL);
    for (int i = 0; i < p->npairs; i++) {
        close(p->pair[i].client);
        close(p->pair[i].server);
    }
    close(p->listen_fd);
}

#endif
