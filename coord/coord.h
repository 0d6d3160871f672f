/* coord.h - the coordination store: a small key-value map with revisions, transactions, leases and
 * watches, as etcd has them. Three implementations under one contract test: etcd (coord_etcd.c),
 * a shared LMDB file of one host (coord_local.c), in memory (coord_model.c).
 *
 * Asynchronous: submit a request, later take its event. Every event is taken with coord_next by the
 * owner's thread; `wake` (from any thread) says that there is one. Requests have deadlines of their
 * own: an answer always comes. The requests of one handle are done one by one, in their order. No call
 * blocks for longer than a local file lock.
 *
 * All keys live under the job's prefix ("/keepstep/JOB/" in etcd); callers see them without it. */
#ifndef COORD_COORD_H
#define COORD_COORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { COORD_KEY_MAX = 128, COORD_OPS_MAX = 16, COORD_ERR_TEXT = 256 };
enum { COORD_VALUE_MAX = 1 << 20 };   /* bytes of all values of one transaction */

struct coord_kv {
    char *key, *value;                 /* NUL-terminated; value_size excludes the NUL */
    size_t value_size;
    int64_t create_revision, mod_revision;
};

enum coord_guard_kind { GUARD_ABSENT = 1, GUARD_MOD_REVISION, GUARD_CREATE_REVISION };
struct coord_guard {
    enum coord_guard_kind kind;
    char key[COORD_KEY_MAX];
    int64_t revision;
};
struct coord_op {
    char key[COORD_KEY_MAX];
    const char *value;                 /* NULL: delete the key. Copied by submit. */
    int64_t lease;                     /* 0: none. The key goes when the lease ends. */
};

enum coord_request_kind { COORD_RANGE = 1, COORD_TXN, COORD_LEASE_GRANT, COORD_LEASE_REVOKE };
struct coord_request {
    enum coord_request_kind kind;
    uint64_t tag;                      /* comes back in the event */
    char prefix[COORD_KEY_MAX];        /* RANGE: every key that starts with it */
    uint32_t nguards, nops;            /* TXN: all guards hold -> all ops are done, at one revision */
    struct coord_guard guard[COORD_OPS_MAX];
    struct coord_op op[COORD_OPS_MAX];
    uint32_t ttl_ms;                   /* LEASE_GRANT: rounded up by the implementation (etcd: to 2 s at least) */
    int64_t lease;                     /* LEASE_REVOKE */
};

enum coord_event_kind {
    COORD_ANSWER = 1,      /* to a request */
    COORD_CHANGE,          /* a watched key: kv (value NULL: deleted), revision */
    COORD_RESYNC,          /* the watch is over (its history is gone, its revision not there): range, watch again */
    COORD_LEASE_LOST,      /* a lease of ours ended without our asking */
    COORD_REACHABLE,       /* status: 0 the store answers again, KS_EUNAVAIL it stopped answering (text) */
};
struct coord_event {
    enum coord_event_kind kind;
    enum coord_request_kind request;
    uint64_t tag;
    int status;            /* ANSWER: 0; KS_EUNAVAIL: not done; KS_EUNKNOWN: may or may not be done (ask);
                              KS_EAUTH, KS_EINVAL: refused, text says why; KS_ENOENT: no such lease */
    bool succeeded;        /* TXN with status 0: the guards held */
    int64_t revision;      /* of the store when it answered or changed */
    int64_t lease;         /* LEASE_GRANT, LEASE_LOST */
    uint32_t nkv;
    struct coord_kv *kv;   /* RANGE: ascending keys. CHANGE: one. Freed by coord_event_done. */
    char text[COORD_ERR_TEXT];
};
void coord_event_done(struct coord_event *e);

struct coord;
struct coord_ops {
    void (*submit)(struct coord *c, const struct coord_request *r);
    /* Watches every key that starts with prefix, from after `revision` on. One watch a coord; a second call
     * replaces it. */
    void (*watch)(struct coord *c, const char *prefix, int64_t revision);
    /* true and *ret filled (for coord_event_done), or false: nothing now. */
    bool (*next)(struct coord *c, struct coord_event *ret);
    /* Frees. Leases that were granted are kept alive until then by the implementation itself, at a third
     * of their time to live; close does not revoke them (a dead process would not either): local stores end them
     * at once, etcd when their time is over. Requests that were not answered may or may not be done. */
    void (*close)(struct coord *c);
};
struct coord {
    const struct coord_ops *ops;
};

struct coord_config {
    const char *url;                  /* "local:DIR", "etcd:http://h:2379,https://..." */
    const char *job;
    uint32_t timeout_ms;              /* of one request to one endpoint; 0: 2000 */
    void (*wake)(void *arg);
    void *wake_arg;
};
/* Picks the implementation by the URL. etcd reads KEEPSTEP_ETCD_CACERT, _CERT, _KEY (files), _USER and
 * _PASSWORD or _PASSWORD_FILE. One clear line in err on failure; an etcd that does not answer is not a
 * failure here (COORD_REACHABLE tells). */
int coord_open(const struct coord_config *c, struct coord **ret, char *err);
int coord_local_open(const struct coord_config *c, const char *dir, struct coord **ret, char *err);
int coord_etcd_open(const struct coord_config *c, const char *endpoints, struct coord **ret, char *err);

/* ---- model: one store for many clients, in the simulator's time ---- */
struct coord_model;                   /* the store itself */
struct coord_model *coord_model_create(void);
void coord_model_free(struct coord_model *m);
/* Does the request at once and fills *ret: what the store would answer. */
void coord_model_apply(struct coord_model *m, const struct coord_request *r, struct coord_event *ret);
int64_t coord_model_revision(const struct coord_model *m);
/* The n-th change (from 0) after `revision`, as a COORD_CHANGE event; false: no more. History is kept. */
bool coord_model_change(const struct coord_model *m, int64_t revision, size_t n, struct coord_event *ret);
/* The owner of a lease stopped keeping it alive and its time is over: keys go. */
void coord_model_expire(struct coord_model *m, int64_t lease);
/* A client handle over the model with immediate answers, for the contract test. */
int coord_model_open(struct coord_model *m, const struct coord_config *c, struct coord **ret);

#endif
