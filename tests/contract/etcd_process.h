/* etcd_process.h - an etcd of a test's own: started on free ports in a directory of its own, stopped by pid. */
#ifndef TESTS_CONTRACT_ETCD_PROCESS_H
#define TESTS_CONTRACT_ETCD_PROCESS_H

#include <arpa/inet.h>
#include <curl/curl.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

enum { ETCD_ARGS = 40, ETCD_START_MS = 15000 };

struct etcd_member {
    pid_t pid;
    const char *host;                /* that it listens on; NULL: 127.0.0.1 */
    int client_port, peer_port;
    char name[16], dir[128];
    char cluster[256];               /* --initial-cluster; empty: alone */
    const char *cacert, *cert, *key; /* not NULL: TLS, with client certificates */
};

/* The directory of the PATH that holds etcd, or a reason to skip. */
static inline const char *etcd_missing(void)
{
    const char *path = getenv("PATH");
    char file[512];
    for (const char *at = path ? path : ""; *at; at += strspn(at, ":")) {
        size_t n = strcspn(at, ":");
        snprintf(file, sizeof file, "%.*s/etcd", (int)n, at);
        if (access(file, X_OK) == 0)
            return NULL;
        at += n;
    }
    return "etcd is not on the PATH (Debian: etcd-server)";
}

static inline int free_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, size) || getsockname(fd, (struct sockaddr *)&a, &size))
        abort();
    close(fd);
    return ntohs(a.sin_port);
}

static inline const char *etcd_host(const struct etcd_member *m)
{
    return m->host ? m->host : "127.0.0.1";
}

static inline void etcd_url(const struct etcd_member *m, char *out, size_t size)
{
    snprintf(out, size, "%s://%s:%d", m->cacert ? "https" : "http", etcd_host(m), m->client_port);
}

static inline size_t etcd_body_drop(char *data, size_t one, size_t size, void *arg)
{
    char *out = arg;
    size_t have = strlen(out), n = size * one;
    n = n < 4000 - have ? n : 4000 - have;
    memcpy(out + have, data, n);
    out[have + n] = 0;
    return size * one;
}

/* The HTTP status, 0 without an answer. reply: 4,096 bytes, or NULL. */
static inline long etcd_post(const struct etcd_member *m, const char *path, const char *body, const char *token,
                             char *reply)
{
    char url[256], header[512], dump[4096];
    long http = 0;
    CURL *easy = curl_easy_init();
    struct curl_slist *headers = NULL;
    etcd_url(m, url, sizeof url);
    strcat(url, path);
    reply = reply ? reply : dump;
    reply[0] = 0;
    if (token) {
        snprintf(header, sizeof header, "Authorization: %s", token);
        headers = curl_slist_append(headers, header);
        curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
    }
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_NOPROXY, "*");
    curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, 8000L);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_POSTFIELDS, body);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, etcd_body_drop);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, reply);
    if (m->cacert) {
        curl_easy_setopt(easy, CURLOPT_CAINFO, m->cacert);
        curl_easy_setopt(easy, CURLOPT_SSLCERT, m->cert);
        curl_easy_setopt(easy, CURLOPT_SSLKEY, m->key);
    }
    if (curl_easy_perform(easy) == CURLE_OK)
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &http);
    curl_easy_cleanup(easy);
    curl_slist_free_all(headers);
    return http;
}

static inline void etcd_exec(const struct etcd_member *m)
{
    char client[128], peer[128], alone[256], log[256];
    const char *argv[ETCD_ARGS] = {"etcd", "--name", m->name, "--data-dir", m->dir};
    int n = 5;
    etcd_url(m, client, sizeof client);
    snprintf(peer, sizeof peer, "http://%s:%d", etcd_host(m), m->peer_port);
    snprintf(alone, sizeof alone, "%s=%s", m->name, peer);
    snprintf(log, sizeof log, "%s.log", m->dir);
    const char *const flags[] = {"--listen-client-urls",
                                 client,
                                 "--advertise-client-urls",
                                 client,
                                 "--listen-peer-urls",
                                 peer,
                                 "--initial-advertise-peer-urls",
                                 peer,
                                 "--initial-cluster",
                                 m->cluster[0] ? m->cluster : alone,
                                 "--heartbeat-interval",
                                 "30",
                                 "--election-timeout",
                                 "300"};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        argv[n++] = flags[i];
    if (m->cacert) {
        const char *const tls[] = {"--cert-file",       m->cert,   "--key-file",        m->key,
                                   "--trusted-ca-file", m->cacert, "--client-cert-auth"};
        for (size_t i = 0; i < sizeof tls / sizeof *tls; i++)
            argv[n++] = tls[i];
    }
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    dup2(fd, 1);
    dup2(fd, 2);
    execvp("etcd", (char *const *)argv);
    _exit(127);
}

static inline void etcd_launch(struct etcd_member *m)
{
    pid_t parent = getpid();
    m->pid = fork();
    if (m->pid == 0) {
        /* It must not outlive a test that crashes. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent)
            etcd_exec(m);
        _exit(127);
    }
}

/* Until it answers a request that needs a leader. */
static inline bool etcd_await(struct etcd_member *m)
{
    uint64_t end = clock_now_us() + ETCD_START_MS * 1000;
    while (clock_now_us() < end) {
        long http = etcd_post(m, "/v3/kv/range", "{\"key\":\"YQ==\"}", NULL, NULL);
        if (http == 200 || http == 400)
            return true;
        if (waitpid(m->pid, NULL, WNOHANG) == m->pid) {
            m->pid = 0;
            return false;
        }
        nanosleep(&(struct timespec){.tv_nsec = 10 * 1000000}, NULL);
    }
    return false;
}

static inline void etcd_kill(struct etcd_member *m)
{
    if (m->pid > 0) {
        kill(m->pid, SIGKILL);
        waitpid(m->pid, NULL, 0);
    }
    m->pid = 0;
}

static inline void etcd_prepare(struct etcd_member *m, const char *parent, const char *name)
{
    snprintf(m->name, sizeof m->name, "%s", name);
    snprintf(m->dir, sizeof m->dir, "%s/%s", parent, name);
    m->client_port = free_port();
    m->peer_port = free_port();
}

/* Somebody else may take a port between its choice and the start: then with other ones. */
static inline bool etcd_start_alone(struct etcd_member *m, const char *parent)
{
    for (int i = 0; i < 3; i++) {
        char name[16];
        snprintf(name, sizeof name, "m%d", i);
        etcd_prepare(m, parent, name);
        etcd_launch(m);
        if (etcd_await(m))
            return true;
        etcd_kill(m);
    }
    return false;
}

#endif
