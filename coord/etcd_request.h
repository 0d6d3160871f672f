/* etcd_request.h - the bodies of requests to etcd's JSON gateway. Strings for mem_free. Inside coord/ only. */
#ifndef COORD_ETCD_REQUEST_H
#define COORD_ETCD_REQUEST_H

#include "coord/coord.h"

/* Of a request that was checked; keys get `prefix`. */
char *etcd_request_body(const struct coord_request *r, const char *prefix);
const char *etcd_request_path(const struct coord_request *r);
/* Seconds that etcd is asked for. */
int64_t etcd_ttl_s(uint32_t ttl_ms);
char *etcd_keepalive_body(int64_t lease);
/* The cheapest request that only a member with a quorum answers. */
char *etcd_probe_body(const char *prefix);
char *etcd_auth_body(const char *user, const char *password);
/* Changes of keys that start with prefix and key, after revision. */
char *etcd_watch_body(const char *prefix, const char *key, int64_t revision);

#endif
