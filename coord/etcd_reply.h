/* etcd_reply.h - reading what etcd's JSON gateway answers. Pure functions over any bytes: 0, or KS_EPROTO for
 * what etcd would not say. Outputs are untouched then. Inside coord/ only.
 *
 * The gateway leaves zero and false out, writes 64-bit integers as strings, and keys and values in base64. Keys
 * come back without `prefix`; keys that coord.h could not hold (too long, with a NUL) are skipped, nobody here
 * wrote them. */
#ifndef COORD_ETCD_REPLY_H
#define COORD_ETCD_REPLY_H

#include "coord/coord_event.h"

/* For an event that is an answer already: adds kv and the revision. */
int etcd_reply_range(const char *body, size_t size, const char *prefix, struct coord_event *ret);
int etcd_reply_txn(const char *body, size_t size, bool *ret_succeeded, int64_t *ret_revision);
int etcd_reply_grant(const char *body, size_t size, int64_t *ret_lease, int64_t *ret_ttl_s, int64_t *ret_revision);
/* Any other answer that has a header. */
int etcd_reply_revision(const char *body, size_t size, int64_t *ret_revision);
/* 0 s: the lease is over. */
int etcd_reply_keepalive(const char *body, size_t size, int64_t *ret_ttl_s);
/* The token, for mem_free. */
int etcd_reply_token(const char *body, size_t size, char **ret_token);

struct etcd_error {
    int code;                      /* of gRPC; 0: none was given */
    char text[COORD_ERR_TEXT];
};
/* An error answer, also one that is no JSON (a proxy's page): its beginning is the text then. */
void etcd_reply_error(const char *body, size_t size, struct etcd_error *ret);

struct etcd_watch_reply {
    bool created, canceled;
    int64_t compact_revision;      /* not 0: history before it is gone */
    int64_t revision;              /* of the store */
    struct etcd_error error;       /* text not empty: the stream ended with an error */
    struct coord_event change;     /* every change; nkv 0: none */
};
/* One line of a watch's stream. Free with coord_event_done(&ret->change). */
int etcd_reply_watch(const char *line, size_t size, const char *prefix, struct etcd_watch_reply *ret);

#endif
