#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "coord/etcd_client.h"
#include "coord/etcd_reply.h"
#include "coord/etcd_request.h"

enum { PAUSE_MIN_MS = 20, PAUSE_MAX_MS = 1000, BEHIND_MAX = 3 };

static void connection_close(struct etcd *e)
{
    struct etcd_watch *w = &e->watch;
    if (w->easy) {
        curl_multi_remove_handle(e->multi, w->easy);
        curl_easy_cleanup(w->easy);
        curl_slist_free_all(w->headers);
    }
    mem_free(w->body);
    w->easy = NULL;
    w->headers = NULL;
    w->body = NULL;
    w->created = false;
    w->line.size = 0;
}

static void pause_then_connect(struct etcd *e)
{
    struct etcd_watch *w = &e->watch;
    connection_close(e);
    w->pause_ms = w->pause_ms ? 2 * w->pause_ms : PAUSE_MIN_MS;
    if (w->pause_ms > PAUSE_MAX_MS)
        w->pause_ms = PAUSE_MAX_MS;
    w->start_us = clock_now_us() + w->pause_ms * 1000;
}

void etcd_watch_stop(struct etcd *e)
{
    connection_close(e);
    etcd_text_done(&e->watch.line);
    e->watch.wanted = false;
}

void etcd_watch_set(struct etcd *e, const char *prefix, int64_t revision)
{
    struct etcd_watch *w = &e->watch;
    connection_close(e);
    snprintf(w->prefix, sizeof w->prefix, "%s", prefix);
    w->revision = revision;
    w->wanted = true;
    w->behind = 0;
    w->pause_ms = 0;
    w->start_us = 0;
}

void etcd_watch_move(struct etcd *e)
{
    if (!e->watch.easy)
        return;
    connection_close(e);
    e->watch.start_us = clock_now_us() + PAUSE_MIN_MS * 1000;
}

/* Not when the owner has replaced this watch: then nothing of it may come any more. */
static void tell(struct etcd *e, struct coord_event *event)
{
    pthread_mutex_lock(&e->lock);
    if (e->inbox.watch)
        coord_event_done(event);
    else
        coord_queue_push(&e->queue, event);
    pthread_mutex_unlock(&e->lock);
}

static void resync(struct etcd *e, int64_t revision)
{
    struct coord_event event = {.kind = COORD_RESYNC, .revision = revision};
    e->watch.wanted = false;
    tell(e, &event);
}

/* Every change of a reply as an event of its own. A reply holds whole revisions. */
static void changes_tell(struct etcd *e, struct etcd_watch_reply *reply)
{
    struct coord_event *all = &reply->change;
    int64_t after = e->watch.revision;
    for (uint32_t i = 0; i < all->nkv; i++) {
        struct coord_kv *kv = &all->kv[i];
        if (kv->mod_revision <= after)
            continue;
        struct coord_event one = {.kind = COORD_CHANGE, .revision = kv->mod_revision, .nkv = 1};
        one.kv = mem_alloc(sizeof *one.kv);
        *one.kv = *kv;
        kv->key = kv->value = NULL;
        if (one.revision > e->watch.revision)
            e->watch.revision = one.revision;
        tell(e, &one);
    }
}

/* The member that answers has not seen yet what we have: an old one that catches up, or a store that lost its data. */
static bool is_behind(struct etcd *e, const struct etcd_watch_reply *reply)
{
    if (!reply->created || reply->revision >= e->watch.revision)
        return false;
    if (++e->watch.behind >= BEHIND_MAX)
        resync(e, reply->revision);
    return true;
}

/* false: the stream is over. */
static bool line_take(struct etcd *e, const char *line, size_t size)
{
    struct etcd_watch *w = &e->watch;
    struct etcd_watch_reply reply;
    if (etcd_reply_watch(line, size, e->prefix, &reply)) {
        snprintf(w->curl_error, sizeof w->curl_error, "its answer cannot be understood");
        return false;
    }
    bool more = false;
    if (reply.compact_revision) {
        resync(e, reply.revision);
    } else if (reply.error.text[0]) {
        snprintf(w->curl_error, sizeof w->curl_error, "%.200s", reply.error.text);
        /* Also refused for the token: it may have been lost in a restart. */
        etcd_token_drop(e);
    } else if (!is_behind(e, &reply)) {
        bool progress = !reply.created && reply.change.nkv == 0;
        w->created |= reply.created;
        w->behind = 0;
        w->pause_ms = 0;
        changes_tell(e, &reply);
        if (progress && w->created && reply.revision > w->revision)
            w->revision = reply.revision;
        more = true;
    }
    coord_event_done(&reply.change);
    return more;
}

static size_t stream_take(char *data, size_t one, size_t size, void *arg)
{
    struct etcd *e = arg;
    struct etcd_text *t = &e->watch.line;
    size_t total = size * one;
    for (size_t from = 0; from < total;) {
        const char *end = memchr(data + from, '\n', total - from);
        size_t n = end ? (size_t)(end - data) - from : total - from;
        if (n > ETCD_REPLY_MAX - t->size)
            return 0;
        etcd_text_add(t, data + from, n);
        from += n + (end != NULL);
        if (!end)
            break;
        size_t line = t->size;
        t->size = 0;
        if (line && !line_take(e, t->data, line))
            return 0;
    }
    return total;
}

static void connect_now(struct etcd *e)
{
    struct etcd_watch *w = &e->watch;
    w->endpoint = e->current;
    w->curl_error[0] = 0;
    w->body = etcd_watch_body(e->prefix, w->prefix, w->revision);
    w->easy = etcd_easy(e, w->endpoint, "/v3/watch", w->body, w->curl_error, &w->headers);
    /* A member that is cut off from the others ends the watch instead of keeping silent. */
    w->headers = curl_slist_append(w->headers, "Grpc-Metadata-hasleader: true");
    curl_easy_setopt(w->easy, CURLOPT_HTTPHEADER, w->headers);
    curl_easy_setopt(w->easy, CURLOPT_CONNECTTIMEOUT_MS, (long)e->timeout_ms);
    curl_easy_setopt(w->easy, CURLOPT_FRESH_CONNECT, 1L);
    curl_easy_setopt(w->easy, CURLOPT_FORBID_REUSE, 1L);
    curl_easy_setopt(w->easy, CURLOPT_TCP_KEEPALIVE, 1L);
    curl_easy_setopt(w->easy, CURLOPT_TCP_KEEPIDLE, 5L);
    curl_easy_setopt(w->easy, CURLOPT_TCP_KEEPINTVL, 2L);
    curl_easy_setopt(w->easy, CURLOPT_WRITEFUNCTION, stream_take);
    curl_easy_setopt(w->easy, CURLOPT_WRITEDATA, e);
    w->created_by_us = clock_now_us() + (uint64_t)e->timeout_ms * 1000;
    CHECK(curl_multi_add_handle(e->multi, w->easy) == CURLM_OK);
}

uint64_t etcd_watch_run(struct etcd *e)
{
    struct etcd_watch *w = &e->watch;
    uint64_t now = clock_now_us();
    if (!w->wanted)
        return UINT64_MAX;
    if (w->easy && !w->created && now >= w->created_by_us) {
        char text[COORD_ERR_TEXT];
        unsigned endpoint = w->endpoint;
        snprintf(text, sizeof text, "etcd %.80s: a watch does not begin", e->endpoint[endpoint]);
        pause_then_connect(e);
        etcd_endpoint_failed(e, endpoint, text);
    }
    if (!w->easy && now >= w->start_us) {
        if (etcd_token_ready(e))
            connect_now(e);
        else
            w->start_us = now + PAUSE_MIN_MS * 1000;
    }
    if (!w->easy)
        return w->start_us;
    return w->created ? UINT64_MAX : w->created_by_us;
}

void etcd_watch_ended(struct etcd *e, CURLcode result)
{
    struct etcd_watch *w = &e->watch;
    char text[COORD_ERR_TEXT];
    curl_off_t before_send = 0;
    long http = 0;
    unsigned endpoint = w->endpoint;
    curl_easy_getinfo(w->easy, CURLINFO_RESPONSE_CODE, &http);
    curl_easy_getinfo(w->easy, CURLINFO_PRETRANSFER_TIME_T, &before_send);
    if (http == 401)
        etcd_token_drop(e);
    snprintf(text, sizeof text, "etcd %.80s: watch: %.140s", e->endpoint[endpoint],
             w->curl_error[0] ? w->curl_error
             : result         ? curl_easy_strerror(result)
                              : "the stream ended");
    log_info("coord_watch_ended", "store=etcd http=%ld cause=\"%s\"", http, text);
    pause_then_connect(e);
    if (before_send == 0)
        etcd_endpoint_failed(e, endpoint, text);
    else if (w->behind)
        e->current = (endpoint + 1) % e->nendpoints;
}
