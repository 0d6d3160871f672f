#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "coord/etcd_client.h"

enum { TIMEOUT_MS = 2000, PASSWORD_MAX = 1024, POLL_MS = 3600 * 1000 };

void etcd_text_add(struct etcd_text *t, const char *data, size_t size)
{
    if (t->cap - t->size < size + 1) {
        t->cap = t->cap * 2 > t->size + size + 1 ? t->cap * 2 : t->size + size + 1;
        t->data = mem_resize(t->data, t->cap);
    }
    memcpy(t->data + t->size, data, size);
    t->size += size;
    t->data[t->size] = 0;
}

void etcd_text_done(struct etcd_text *t)
{
    mem_free(t->data);
    *t = (struct etcd_text){0};
}

static void wipe_free(char *secret)
{
    if (secret)
        explicit_bzero(secret, strlen(secret));
    mem_free(secret);
}

void etcd_token_drop(struct etcd *e)
{
    wipe_free(e->token);
    e->token = NULL;
    e->auth_off = false;
}

CURL *etcd_easy(struct etcd *e, unsigned endpoint, const char *path, const char *body, char *error,
                struct curl_slist **ret_headers)
{
    char url[1024], authorization[2048];
    struct curl_slist *headers = curl_slist_append(NULL, "Content-Type: application/json");
    CURL *easy = curl_easy_init();
    CHECK(easy && headers);
    snprintf(url, sizeof url, "%s%s", e->endpoint[endpoint], path);
    /* Without it curl asks before it sends a large body, and waits a second for an answer. */
    headers = curl_slist_append(headers, "Expect:");
    if (e->token) {
        snprintf(authorization, sizeof authorization, "Authorization: %s", e->token);
        headers = curl_slist_append(headers, authorization);
    }
    error[0] = 0;
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_NOPROXY, "*");
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_TCP_NODELAY, 1L);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, error);
    curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(body));
    curl_easy_setopt(easy, CURLOPT_POSTFIELDS, body);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
    if (e->cacert)
        curl_easy_setopt(easy, CURLOPT_CAINFO, e->cacert);
    if (e->cert)
        curl_easy_setopt(easy, CURLOPT_SSLCERT, e->cert);
    if (e->key)
        curl_easy_setopt(easy, CURLOPT_SSLKEY, e->key);
    *ret_headers = headers;
    return easy;
}

static uint64_t probe_interval_us(const struct etcd *e)
{
    return e->unreachable ? ETCD_RETRY_MS * 1000 : 2 * (uint64_t)e->timeout_ms * 1000;
}

static void reachable_set(struct etcd *e, bool reachable, const char *text)
{
    struct coord_event event = {.kind = COORD_REACHABLE, .status = reachable ? 0 : KS_EUNAVAIL};
    if (reachable == !e->unreachable)
        return;
    e->unreachable = !reachable;
    snprintf(event.text, sizeof event.text, "%s", text);
    log_warn("coord_reachable", "store=etcd reachable=%d cause=\"%s\"", reachable, text);
    coord_queue_push(&e->queue, &event);
}

void etcd_answered(struct etcd *e)
{
    e->failures = 0;
    reachable_set(e, true, "");
    e->probe_us = clock_now_us() + probe_interval_us(e);
}

/* Only the endpoint in use counts: late failures of one that was left say nothing new. */
void etcd_endpoint_failed(struct etcd *e, unsigned endpoint, const char *text)
{
    if (endpoint == e->current) {
        e->current = (e->current + 1) % e->nendpoints;
        e->failures++;
        if (e->failures >= e->nendpoints)
            reachable_set(e, false, text);
        e->probe_us = clock_now_us() + probe_interval_us(e);
    }
    if (e->watch.easy && e->watch.endpoint == endpoint)
        etcd_watch_move(e);
}

static void request_next(struct etcd *e)
{
    struct etcd_waiting *w = e->first;
    struct coord_event event;
    uint64_t now = clock_now_us();
    e->first = w->next;
    if (!e->first)
        e->last = &e->first;
    /* Too late to give it a fair try: rather certainly not done than unknown. */
    if (now + (uint64_t)e->timeout_ms * 1000 / 4 > w->deadline_us) {
        coord_event_answer(&event, w->request, KS_EUNAVAIL, "etcd: requests before this one took all of its time");
        coord_queue_push(&e->queue, &event);
        coord_request_free(w->request);
    } else {
        if (w->request->kind == COORD_LEASE_REVOKE)
            etcd_lease_forget(e, w->request->lease);
        etcd_call_start(e, CALL_REQUEST, w->request, 0, w->deadline_us);
    }
    mem_free(w);
}

static uint64_t probe_run(struct etcd *e)
{
    uint64_t now = clock_now_us();
    if (e->probing)
        return UINT64_MAX;
    if (now >= e->probe_us) {
        e->probing = true;
        e->probe_us = now + probe_interval_us(e);
        etcd_call_start(e, CALL_PROBE, NULL, 0, now + (uint64_t)e->timeout_ms * 1000 * e->nendpoints);
    }
    return e->probe_us;
}

static bool inbox_take(struct etcd *e)
{
    char prefix[COORD_KEY_MAX];
    pthread_mutex_lock(&e->lock);
    bool closing = e->inbox.closing, watch = e->inbox.watch;
    int64_t revision = e->inbox.revision;
    if (e->inbox.first) {
        *e->last = e->inbox.first;
        e->last = e->inbox.last;
        e->inbox.first = NULL;
        e->inbox.last = &e->inbox.first;
    }
    memcpy(prefix, e->inbox.prefix, sizeof prefix);
    /* Before the flag falls: nothing of the old watch may be told from here on. */
    if (watch)
        etcd_watch_set(e, prefix, revision);
    e->inbox.watch = false;
    pthread_mutex_unlock(&e->lock);
    return !closing;
}

static void transfers_end(struct etcd *e)
{
    CURLMsg *message;
    int left;
    while ((message = curl_multi_info_read(e->multi, &left))) {
        if (message->msg != CURLMSG_DONE)
            continue;
        CURL *easy = message->easy_handle;
        CURLcode result = message->data.result;
        if (easy == e->watch.easy)
            etcd_watch_ended(e, result);
        else
            etcd_call_ended(e, easy, result);
    }
}

static uint64_t soonest(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void *service(void *arg)
{
    struct etcd *e = arg;
    int running;
    while (inbox_take(e)) {
        curl_multi_perform(e->multi, &running);
        transfers_end(e);
        while (e->first && !e->request_runs)
            request_next(e);
        uint64_t due = etcd_watch_run(e); /* first: when it fails, the store is probed sooner */
        due = soonest(due, etcd_leases_run(e));
        due = soonest(due, probe_run(e));
        if (e->first && !e->request_runs)
            continue;
        uint64_t now = clock_now_us(), ms = due > now ? (due - now) / 1000 + 1 : 0;
        curl_multi_poll(e->multi, NULL, 0, (int)(ms < POLL_MS ? ms : POLL_MS), NULL);
    }
    return NULL;
}

static void etcd_submit(struct coord *coord, const struct coord_request *r)
{
    struct etcd *e = (struct etcd *)coord;
    char err[COORD_ERR_TEXT];
    if (coord_request_check(r, err)) {
        struct coord_event event;
        coord_event_answer(&event, r, KS_EINVAL, "%s", err);
        coord_queue_push(&e->queue, &event);
        return;
    }
    struct etcd_waiting *w = mem_alloc(sizeof *w);
    w->request = coord_request_copy(r);
    w->deadline_us = clock_now_us() + (uint64_t)e->timeout_ms * 1000 * e->nendpoints;
    pthread_mutex_lock(&e->lock);
    *e->inbox.last = w;
    e->inbox.last = &w->next;
    pthread_mutex_unlock(&e->lock);
    curl_multi_wakeup(e->multi);
}

static void etcd_watch(struct coord *coord, const char *prefix, int64_t revision)
{
    struct etcd *e = (struct etcd *)coord;
    pthread_mutex_lock(&e->lock);
    CHECK(str_copy(e->inbox.prefix, sizeof e->inbox.prefix, prefix) == 0);
    e->inbox.revision = revision;
    e->inbox.watch = true;
    coord_queue_drop_changes(&e->queue);
    pthread_mutex_unlock(&e->lock);
    curl_multi_wakeup(e->multi);
}

static bool etcd_next(struct coord *coord, struct coord_event *ret)
{
    return coord_queue_pop(&((struct etcd *)coord)->queue, ret);
}

static void etcd_free(struct etcd *e)
{
    while (e->first) {
        struct etcd_waiting *w = e->first;
        e->first = w->next;
        coord_request_free(w->request);
        mem_free(w);
    }
    etcd_watch_stop(e);
    etcd_calls_free(e);
    if (e->multi)
        curl_multi_cleanup(e->multi);
    etcd_token_drop(e);
    for (unsigned i = 0; i < e->nendpoints; i++)
        mem_free(e->endpoint[i]);
    mem_free(e->cacert);
    mem_free(e->cert);
    mem_free(e->key);
    mem_free(e->user);
    wipe_free(e->password);
    mem_free(e->lease);
    coord_queue_done(&e->queue);
    pthread_mutex_destroy(&e->lock);
    mem_free(e);
}

static void etcd_close(struct coord *coord)
{
    struct etcd *e = (struct etcd *)coord;
    pthread_mutex_lock(&e->lock);
    e->inbox.closing = true;
    pthread_mutex_unlock(&e->lock);
    curl_multi_wakeup(e->multi);
    pthread_join(e->thread, NULL);
    inbox_take(e);
    etcd_free(e);
}

static const struct coord_ops etcd_ops = {etcd_submit, etcd_watch, etcd_next, etcd_close};

static int endpoint_add(struct etcd *e, const char *url, size_t size, char *err)
{
    while (size && url[size - 1] == '/')
        size--;
    bool scheme = strncmp(url, "http://", 7) == 0 || strncmp(url, "https://", 8) == 0;
    if (size && memchr(url, '@', size)) {
        snprintf(err, COORD_ERR_TEXT, "etcd: an endpoint holds '@': give the password in KEEPSTEP_ETCD_PASSWORD_FILE");
        return KS_EINVAL;
    }
    if (!scheme || size < 9 || size > 256 || strcspn(url, " \t\r\n") < size) {
        snprintf(err, COORD_ERR_TEXT, "etcd endpoint \"%.*s\": give http://HOST:PORT or https://HOST:PORT",
                 (int)(size < 80 ? size : 80), url);
        return KS_EINVAL;
    }
    if (e->nendpoints == ETCD_ENDPOINTS_MAX) {
        snprintf(err, COORD_ERR_TEXT, "etcd: more than %d endpoints", ETCD_ENDPOINTS_MAX);
        return KS_EINVAL;
    }
    char *copy = mem_alloc(size + 1);
    memcpy(copy, url, size);
    e->endpoint[e->nendpoints++] = copy;
    return 0;
}

static int endpoints_set(struct etcd *e, const char *list, char *err)
{
    int status = 0;
    for (const char *at = list; !status; at++) {
        size_t n = strcspn(at, ",");
        status = endpoint_add(e, at, n, err);
        at += n;
        if (!*at)
            break;
    }
    return status;
}

static int file_check(const char *variable, char **ret, char *err)
{
    const char *path = getenv(variable);
    if (!path || !*path)
        return 0;
    FILE *f = fopen(path, "re");
    if (!f) {
        snprintf(err, COORD_ERR_TEXT, "%s=%.120s: %s", variable, path, strerror(errno));
        return KS_EINVAL;
    }
    fclose(f);
    *ret = mem_strdup(path);
    return 0;
}

static int password_read(const char *path, char **ret, char *err)
{
    char line[PASSWORD_MAX] = "";
    FILE *f = fopen(path, "re");
    if (!f || !fgets(line, sizeof line, f)) {
        snprintf(err, COORD_ERR_TEXT, "KEEPSTEP_ETCD_PASSWORD_FILE=%.120s: %s", path,
                 f ? "the file is empty" : strerror(errno));
        if (f)
            fclose(f);
        return KS_EINVAL;
    }
    fclose(f);
    line[strcspn(line, "\r\n")] = 0;
    *ret = mem_strdup(line);
    explicit_bzero(line, sizeof line);
    return 0;
}

static int credentials_set(struct etcd *e, char *err)
{
    const char *user = getenv("KEEPSTEP_ETCD_USER"), *password = getenv("KEEPSTEP_ETCD_PASSWORD");
    const char *file = getenv("KEEPSTEP_ETCD_PASSWORD_FILE");
    int status = file_check("KEEPSTEP_ETCD_CACERT", &e->cacert, err);
    if (!status)
        status = file_check("KEEPSTEP_ETCD_CERT", &e->cert, err);
    if (!status)
        status = file_check("KEEPSTEP_ETCD_KEY", &e->key, err);
    if (status || !user || !*user)
        return status;
    e->user = mem_strdup(user);
    if (file && *file)
        return password_read(file, &e->password, err);
    if (!password) {
        snprintf(err, COORD_ERR_TEXT,
                 "KEEPSTEP_ETCD_USER is set: set KEEPSTEP_ETCD_PASSWORD_FILE or KEEPSTEP_ETCD_PASSWORD, too");
        return KS_EINVAL;
    }
    e->password = mem_strdup(password);
    return 0;
}

static void curl_once(void)
{
    CHECK(curl_global_init(CURL_GLOBAL_DEFAULT) == 0);
}

static struct etcd *etcd_new(const struct coord_config *c)
{
    struct etcd *e = mem_alloc(sizeof *e);
    e->base.ops = &etcd_ops;
    snprintf(e->prefix, sizeof e->prefix, "/keepstep/%s/", c->job);
    e->timeout_ms = c->timeout_ms ? c->timeout_ms : TIMEOUT_MS;
    e->last = &e->first;
    e->inbox.last = &e->inbox.first;
    pthread_mutex_init(&e->lock, NULL);
    coord_queue_init(&e->queue, c);
    return e;
}

int coord_etcd_open(const struct coord_config *c, const char *endpoints, struct coord **ret, char *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int status = coord_job_check(c->job, err);
    if (status)
        return status;
    struct etcd *e = etcd_new(c);
    status = endpoints_set(e, endpoints, err);
    if (!status)
        status = credentials_set(e, err);
    if (status)
        goto free_handle;
    pthread_once(&once, curl_once);
    e->multi = curl_multi_init();
    if (!e->multi || coord_thread_start(&e->thread, service, e)) {
        snprintf(err, COORD_ERR_TEXT, "etcd: no thread or descriptor to be had");
        status = KS_EIO;
        goto free_handle;
    }
    *ret = &e->base;
    return 0;
free_handle:
    etcd_free(e);
    return status;
}
