#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "coord/etcd_client.h"
#include "coord/etcd_reply.h"
#include "coord/etcd_request.h"

enum { AUTH_AGAIN_MS = 1000, GRPC_INVALID = 3, GRPC_NOT_FOUND = 5, GRPC_DENIED = 7, GRPC_UNAUTHENTICATED = 16 };

/* What became of one try. */
enum outcome {
    OUTCOME_DONE = 1, /* a reply with HTTP 200 */
    OUTCOME_REFUSED,  /* the store will not do it, here or elsewhere */
    OUTCOME_TOKEN,    /* it wants a (new) token: not done */
    OUTCOME_NOT_DONE, /* certainly not done; another endpoint might */
    OUTCOME_MAYBE,    /* the connection or the member failed with the request in its hands */
};

static void call_free(struct etcd *e, struct etcd_call *c)
{
    struct etcd_call **at = &e->call;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    if (c->easy) {
        curl_multi_remove_handle(e->multi, c->easy);
        curl_easy_cleanup(c->easy);
    }
    curl_slist_free_all(c->headers);
    etcd_text_done(&c->reply);
    coord_request_free(c->request);
    if (c->kind == CALL_AUTH)
        explicit_bzero(c->body, strlen(c->body));
    mem_free(c->body);
    mem_free(c);
}

void etcd_calls_free(struct etcd *e)
{
    while (e->call)
        call_free(e, e->call);
}

static size_t reply_take(char *data, size_t one, size_t size, void *arg)
{
    struct etcd_call *c = arg;
    if (size * one > ETCD_REPLY_MAX - c->reply.size)
        return 0;
    etcd_text_add(&c->reply, data, size * one);
    return size * one;
}

static void try_send(struct etcd *e, struct etcd_call *c)
{
    uint64_t now = clock_now_us(), left_ms = c->deadline_us > now ? (c->deadline_us - now) / 1000 : 0;
    long ms = (long)(left_ms < e->timeout_ms ? left_ms : e->timeout_ms);
    c->endpoint = e->current;
    c->tries++;
    c->reply.size = 0;
    c->easy = etcd_easy(e, c->endpoint, c->path, c->body, c->curl_error, &c->headers);
    curl_easy_setopt(c->easy, CURLOPT_TIMEOUT_MS, ms > 0 ? ms : 1L);
    curl_easy_setopt(c->easy, CURLOPT_CONNECTTIMEOUT_MS, ms > 0 ? ms : 1L);
    curl_easy_setopt(c->easy, CURLOPT_WRITEFUNCTION, reply_take);
    curl_easy_setopt(c->easy, CURLOPT_WRITEDATA, c);
    /* curl sends a request again by itself when a connection that it kept turns out to be dead. A transaction
     * that was done the first time would then be refused by its own guards: a fresh connection has no second try. */
    if (c->kind == CALL_REQUEST && c->request->kind == COORD_TXN) {
        curl_easy_setopt(c->easy, CURLOPT_FRESH_CONNECT, 1L);
        curl_easy_setopt(c->easy, CURLOPT_FORBID_REUSE, 1L);
    }
    CHECK(curl_multi_add_handle(e->multi, c->easy) == CURLM_OK);
}

bool etcd_token_ready(struct etcd *e)
{
    if (!e->user || e->token || e->auth_off)
        return true;
    if (!e->authenticating && clock_now_us() >= e->auth_again_us) {
        e->authenticating = true;
        etcd_call_start(e, CALL_AUTH, NULL, 0, clock_now_us() + (uint64_t)e->timeout_ms * 1000 * e->nendpoints);
    }
    return false;
}

static void call_answer(struct etcd *e, struct etcd_call *c, struct coord_event *event)
{
    coord_queue_push(&e->queue, event);
    e->request_runs = false;
    call_free(e, c);
}

/* Ends a call without a reply. */
static void call_fail(struct etcd *e, struct etcd_call *c, int status, const char *text)
{
    struct coord_event event;
    switch (c->kind) {
    case CALL_REQUEST:
        coord_event_answer(&event, c->request, status, "%s", text);
        call_answer(e, c, &event);
        return;
    case CALL_KEEPALIVE:
        etcd_lease_kept(e, c->lease, -1);
        break;
    case CALL_AUTH:
        e->authenticating = false;
        break;
    case CALL_PROBE:
        e->probing = false;
        break;
    }
    call_free(e, c);
}

static void call_try(struct etcd *e, struct etcd_call *c)
{
    c->waits_for_token = false;
    if (c->kind == CALL_AUTH || etcd_token_ready(e))
        try_send(e, c);
    else if (e->authenticating)
        c->waits_for_token = true;
    else
        call_fail(e, c, KS_EAUTH, e->refused_text);
}

void etcd_call_start(struct etcd *e, enum etcd_call_kind kind, struct coord_request *request, int64_t lease,
                     uint64_t deadline_us)
{
    struct etcd_call *c = mem_alloc(sizeof *c);
    *c = (struct etcd_call){.kind = kind, .request = request, .lease = lease, .deadline_us = deadline_us};
    switch (kind) {
    case CALL_REQUEST:
        e->request_runs = true;
        c->path = etcd_request_path(request);
        c->body = etcd_request_body(request, e->prefix);
        break;
    case CALL_AUTH:
        c->path = "/v3/auth/authenticate";
        c->body = etcd_auth_body(e->user, e->password);
        break;
    case CALL_KEEPALIVE:
        c->path = "/v3/lease/keepalive";
        c->body = etcd_keepalive_body(lease);
        break;
    case CALL_PROBE:
        c->path = "/v3/kv/range";
        c->body = etcd_probe_body(e->prefix);
        break;
    }
    c->next = e->call;
    e->call = c;
    call_try(e, c);
}

/* Calls that waited go on, or end: with status and text when there will be no token. */
static void token_settled(struct etcd *e, int status, const char *text)
{
    struct etcd_call *c = e->call;
    e->authenticating = false;
    while (c) {
        if (!c->waits_for_token) {
            c = c->next;
            continue;
        }
        if (status)
            call_fail(e, c, status, text);
        else
            call_try(e, c);
        c = e->call;
    }
}

static void auth_refused(struct etcd *e, const char *text)
{
    snprintf(e->refused_text, sizeof e->refused_text, "etcd refuses user \"%.40s\": %.160s", e->user, text);
    e->auth_again_us = clock_now_us() + AUTH_AGAIN_MS * 1000;
    log_error("coord_auth", "store=etcd cause=\"%s\"", e->refused_text);
    token_settled(e, KS_EAUTH, e->refused_text);
}

static int request_done(struct etcd *e, struct etcd_call *c, struct coord_event *ret)
{
    const struct coord_request *r = c->request;
    const char *body = c->reply.size ? c->reply.data : "";
    int64_t ttl_s;
    int status = 0;
    coord_event_answer(ret, r, 0, NULL);
    switch (r->kind) {
    case COORD_RANGE:
        return etcd_reply_range(body, c->reply.size, e->prefix, ret);
    case COORD_TXN:
        return etcd_reply_txn(body, c->reply.size, &ret->succeeded, &ret->revision);
    case COORD_LEASE_GRANT:
        status = etcd_reply_grant(body, c->reply.size, &ret->lease, &ttl_s, &ret->revision);
        if (!status)
            etcd_lease_add(e, ret->lease, ttl_s);
        return status;
    case COORD_LEASE_REVOKE:
        break;
    }
    return etcd_reply_revision(body, c->reply.size, &ret->revision);
}

static int auth_done(struct etcd *e, struct etcd_call *c)
{
    char *token;
    if (etcd_reply_token(c->reply.size ? c->reply.data : "", c->reply.size, &token))
        return KS_EPROTO;
    etcd_token_drop(e);
    e->token = token;
    call_free(e, c);
    token_settled(e, 0, NULL);
    return 0;
}

/* HTTP 200. KS_EPROTO: it is not what etcd would say; the call is not over then. */
static int call_done(struct etcd *e, struct etcd_call *c)
{
    const char *body = c->reply.size ? c->reply.data : "";
    struct coord_event event;
    int64_t number;
    switch (c->kind) {
    case CALL_REQUEST:
        if (request_done(e, c, &event))
            return KS_EPROTO;
        call_answer(e, c, &event);
        return 0;
    case CALL_AUTH:
        return auth_done(e, c);
    case CALL_KEEPALIVE:
        if (etcd_reply_keepalive(body, c->reply.size, &number))
            return KS_EPROTO;
        etcd_lease_kept(e, c->lease, number);
        break;
    case CALL_PROBE:
        if (etcd_reply_revision(body, c->reply.size, &number))
            return KS_EPROTO;
        e->probing = false;
        break;
    }
    call_free(e, c);
    return 0;
}

/* The store says no. */
static void call_refused(struct etcd *e, struct etcd_call *c, const struct etcd_error *error)
{
    if (c->kind == CALL_AUTH) {
        /* No users are set up there: go on without a token, as etcd's own clients do. */
        e->auth_off = strstr(error->text, "authentication is not enabled") != NULL;
        char text[COORD_ERR_TEXT];
        snprintf(text, sizeof text, "%s", error->text);
        call_free(e, c);
        if (e->auth_off)
            token_settled(e, 0, NULL);
        else
            auth_refused(e, text);
        return;
    }
    bool revoked = c->kind == CALL_REQUEST && c->request->kind == COORD_LEASE_REVOKE && c->maybe_done;
    int status = error->code == GRPC_NOT_FOUND                                       ? revoked ? 0 : KS_ENOENT
                 : error->code == GRPC_INVALID                                       ? KS_EINVAL
                 : error->code == GRPC_DENIED || error->code == GRPC_UNAUTHENTICATED ? KS_EAUTH
                                                                                     : KS_EUNAVAIL;
    if (strstr(error->text, "user name is empty") || strstr(error->text, "authentication failed"))
        status = KS_EAUTH;
    call_fail(e, c, status, status ? error->text : "");
}

static bool wants_token(const struct etcd_error *error)
{
    return error->code == GRPC_UNAUTHENTICATED || strstr(error->text, "invalid auth token") ||
           strstr(error->text, "auth: revision in header is old") || strstr(error->text, "user name is empty");
}

static enum outcome http_outcome(const struct etcd *e, const struct etcd_call *c, long http,
                                 const struct etcd_error *error)
{
    static const char *const never_done[] = {"etcdserver: no leader", "etcdserver: too many requests",
                                             "etcdserver: not capable"};
    if (http == 200)
        return OUTCOME_DONE;
    if (c->kind != CALL_AUTH && e->user && !c->reauthenticated && (http == 401 || wants_token(error)))
        return OUTCOME_TOKEN;
    for (size_t i = 0; i < sizeof never_done / sizeof *never_done; i++)
        if (strstr(error->text, never_done[i]))
            return OUTCOME_NOT_DONE;
    /* Without a code it is not etcd that speaks. */
    return http >= 400 && http < 500 && error->code ? OUTCOME_REFUSED : OUTCOME_MAYBE;
}

static enum outcome curl_outcome(struct etcd_call *c, CURLcode result, char *text)
{
    curl_off_t before_send = 0;
    curl_easy_getinfo(c->easy, CURLINFO_PRETRANSFER_TIME_T, &before_send);
    snprintf(text, COORD_ERR_TEXT, "%.200s", c->curl_error[0] ? c->curl_error : curl_easy_strerror(result));
    /* The time stays 0 until there is a connection to send on. */
    return before_send == 0 ? OUTCOME_NOT_DONE : OUTCOME_MAYBE;
}

/* Another endpoint, while there is one and time; else the call ends. */
static void call_again(struct etcd *e, struct etcd_call *c, bool maybe, const char *text)
{
    bool txn = c->kind == CALL_REQUEST && c->request->kind == COORD_TXN;
    bool revoke = c->kind == CALL_REQUEST && c->request->kind == COORD_LEASE_REVOKE;
    c->maybe_done |= maybe;
    etcd_endpoint_failed(e, c->endpoint, text);
    bool again = c->tries < e->nendpoints && clock_now_us() < c->deadline_us && !(txn && c->maybe_done);
    if (again) {
        call_try(e, c);
    } else if (c->kind == CALL_AUTH) {
        call_free(e, c);
        token_settled(e, KS_EUNAVAIL, text);
    } else {
        call_fail(e, c, (txn || revoke) && c->maybe_done ? KS_EUNKNOWN : KS_EUNAVAIL, text);
    }
}

void etcd_call_ended(struct etcd *e, CURL *easy, CURLcode result)
{
    struct etcd_call *c = e->call;
    struct etcd_error error = {0};
    char text[COORD_ERR_TEXT];
    enum outcome outcome;
    long http = 0;
    while (c && c->easy != easy)
        c = c->next;
    CHECK(c);
    if (result) {
        outcome = curl_outcome(c, result, error.text);
    } else {
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &http);
        if (http != 200)
            etcd_reply_error(c->reply.size ? c->reply.data : "", c->reply.size, &error);
        outcome = http_outcome(e, c, http, &error);
    }
    curl_multi_remove_handle(e->multi, easy);
    curl_easy_cleanup(easy);
    curl_slist_free_all(c->headers);
    c->easy = NULL;
    c->headers = NULL;
    snprintf(text, sizeof text, "etcd %.80s: %.160s", e->endpoint[c->endpoint], error.text);
    if (outcome == OUTCOME_DONE || outcome == OUTCOME_REFUSED || outcome == OUTCOME_TOKEN)
        etcd_answered(e);
    switch (outcome) {
    case OUTCOME_DONE:
        snprintf(text, sizeof text, "etcd %.80s: its answer cannot be understood", e->endpoint[c->endpoint]);
        if (call_done(e, c))
            call_again(e, c, true, text);
        break;
    case OUTCOME_REFUSED:
        call_refused(e, c, &error);
        break;
    case OUTCOME_TOKEN:
        c->reauthenticated = true;
        c->tries--;
        etcd_token_drop(e);
        call_try(e, c);
        break;
    case OUTCOME_NOT_DONE:
    case OUTCOME_MAYBE:
        call_again(e, c, outcome == OUTCOME_MAYBE, text);
        break;
    }
}
