/* etcd_client.h - the handle of coord_etcd.c, for the files that make it up. Inside coord/ only.
 *
 *   coord_etcd.c   opening, the service thread's loop, which endpoint is in use, whether the store answers
 *   call_etcd.c    one HTTP request and its answer, tried at one endpoint after the other; passwords and tokens
 *   lease_etcd.c   keep-alives
 *   watch_etcd.c   the stream of changes
 *
 * One service thread owns everything but `inbox` (under `lock`) and `queue`. */
#ifndef COORD_ETCD_CLIENT_H
#define COORD_ETCD_CLIENT_H

#include <curl/curl.h>

#include "coord/coord_event.h"

enum { ETCD_ENDPOINTS_MAX = 16, ETCD_REPLY_MAX = 64 << 20, ETCD_RETRY_MS = 100 };

struct etcd_text {
    char *data;                       /* with a NUL behind it once something was added */
    size_t size, cap;
};

enum etcd_call_kind { CALL_REQUEST = 1, CALL_AUTH, CALL_KEEPALIVE, CALL_PROBE };

/* One request to the store, until it is answered. */
struct etcd_call {
    enum etcd_call_kind kind;
    struct coord_request *request;    /* CALL_REQUEST */
    int64_t lease;                    /* CALL_KEEPALIVE */
    char *body;
    const char *path;
    uint64_t deadline_us;
    unsigned tries, endpoint;
    bool maybe_done;                  /* an earlier try may have reached the store */
    bool waits_for_token, reauthenticated;
    CURL *easy;                       /* while a try runs */
    struct curl_slist *headers;
    struct etcd_text reply;
    char curl_error[CURL_ERROR_SIZE];
    struct etcd_call *next;
};

struct etcd_lease {
    int64_t id;
    uint64_t ttl_us, next_us;
    bool busy;                        /* a keep-alive is on its way */
};

struct etcd_watch {
    bool wanted;
    char prefix[COORD_KEY_MAX];
    int64_t revision;                 /* everything up to it was told */
    unsigned endpoint, behind;
    bool created;
    uint64_t start_us, created_by_us; /* when to connect (again); when the stream must have begun */
    unsigned pause_ms;
    CURL *easy;
    struct curl_slist *headers;
    char *body;
    struct etcd_text line;
    char curl_error[CURL_ERROR_SIZE];
};

struct etcd_waiting {
    struct coord_request *request;
    uint64_t deadline_us;
    struct etcd_waiting *next;
};

struct etcd {
    struct coord base;
    struct coord_queue queue;
    char prefix[96];                  /* "/keepstep/JOB/" */
    char *endpoint[ETCD_ENDPOINTS_MAX];
    unsigned nendpoints;
    uint32_t timeout_ms;
    char *cacert, *cert, *key, *user, *password;
    CURLM *multi;
    pthread_t thread;

    pthread_mutex_t lock;
    struct {
        struct etcd_waiting *first, **last;
        bool watch, closing;
        char prefix[COORD_KEY_MAX];
        int64_t revision;
    } inbox;

    struct etcd_waiting *first, **last;
    struct etcd_call *call;           /* all that run or wait for a token */
    bool request_runs;                /* requests are sent one by one, in their order */
    unsigned current, failures;       /* endpoint in use; failures since one answered */
    bool unreachable;
    uint64_t probe_us;
    bool probing;
    char *token;
    bool authenticating, auth_off;    /* auth_off: the store says that it has no users */
    uint64_t auth_again_us;           /* not before, after a refusal: refused_text says why */
    char refused_text[COORD_ERR_TEXT];
    struct etcd_lease *lease;
    size_t nleases, lease_cap;
    struct etcd_watch watch;
};

/* ---- coord_etcd.c ---- */
void etcd_text_add(struct etcd_text *t, const char *data, size_t size);
void etcd_text_done(struct etcd_text *t);
/* What all transfers have in common: endpoint, TLS, no proxy, headers. The caller frees *ret_headers after easy. */
CURL *etcd_easy(struct etcd *e, unsigned endpoint, const char *path, const char *body, char *error,
                struct curl_slist **ret_headers);
void etcd_answered(struct etcd *e);
void etcd_endpoint_failed(struct etcd *e, unsigned endpoint, const char *text);
void etcd_token_drop(struct etcd *e);

/* ---- call_etcd.c ---- */
void etcd_call_start(struct etcd *e, enum etcd_call_kind kind, struct coord_request *request, int64_t lease,
                     uint64_t deadline_us);
/* The transfer of this easy handle ended. */
void etcd_call_ended(struct etcd *e, CURL *easy, CURLcode result);
void etcd_calls_free(struct etcd *e);
/* Whether a call may be sent now; asks for a token when one is needed. */
bool etcd_token_ready(struct etcd *e);

/* ---- lease_etcd.c ---- */
void etcd_lease_add(struct etcd *e, int64_t lease, int64_t ttl_s);
void etcd_lease_forget(struct etcd *e, int64_t lease);
/* ttl_s 0: over; negative: no answer. */
void etcd_lease_kept(struct etcd *e, int64_t lease, int64_t ttl_s);
/* Sends the keep-alives that are due; returns when the next one is. */
uint64_t etcd_leases_run(struct etcd *e);

/* ---- watch_etcd.c ---- */
void etcd_watch_set(struct etcd *e, const char *prefix, int64_t revision);
uint64_t etcd_watch_run(struct etcd *e);
void etcd_watch_ended(struct etcd *e, CURLcode result);
/* Leaves the connection and makes another at once. */
void etcd_watch_move(struct etcd *e);
void etcd_watch_stop(struct etcd *e);

#endif
