#include "coord/etcd_request.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"

/* Prefixes are "/keepstep/JOB/" and a key. */
enum { FULL_KEY_MAX = 128 + COORD_KEY_MAX };

static char *base64(const void *data, size_t size)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const uint8_t *in = data;
    char *out = mem_alloc((size + 2) / 3 * 4 + 1), *p = out;
    for (size_t i = 0; i < size; i += 3) {
        size_t left = size - i;
        uint32_t word = (uint32_t)in[i] << 16 | (left > 1 ? (uint32_t)in[i + 1] << 8 : 0) | (left > 2 ? in[i + 2] : 0);
        *p++ = digit[word >> 18];
        *p++ = digit[word >> 12 & 63];
        *p++ = left > 1 ? digit[word >> 6 & 63] : '=';
        *p++ = left > 2 ? digit[word & 63] : '=';
    }
    return out;
}

static void add_bytes(cJSON *object, const char *name, const void *data, size_t size)
{
    char *text = base64(data, size);
    CHECK(cJSON_AddStringToObject(object, name, text));
    mem_free(text);
}

static void add_int64(cJSON *object, const char *name, int64_t v)
{
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)v);
    CHECK(cJSON_AddStringToObject(object, name, text));
}

static size_t full_key(char *out, const char *prefix, const char *key)
{
    int n = snprintf(out, FULL_KEY_MAX, "%s%s", prefix, key);
    CHECK(n > 0 && n < FULL_KEY_MAX);
    return (size_t)n;
}

static void add_key(cJSON *object, const char *prefix, const char *key)
{
    char full[FULL_KEY_MAX];
    size_t n = full_key(full, prefix, key);
    add_bytes(object, "key", full, n);
}

/* key and range_end for everything that starts with it: the end is the key with its last byte one higher. */
static void add_range(cJSON *object, const char *prefix, const char *key)
{
    char full[FULL_KEY_MAX];
    size_t n = full_key(full, prefix, key);
    add_bytes(object, "key", full, n);
    while ((uint8_t)full[n - 1] == 0xff)
        n--;
    full[n - 1]++;
    add_bytes(object, "range_end", full, n);
}

/* Takes the object apart. */
static char *body_of(cJSON *json)
{
    char *printed = cJSON_PrintUnformatted(json);
    CHECK(printed);
    char *body = mem_strdup(printed);
    cJSON_free(printed);
    cJSON_Delete(json);
    return body;
}

static cJSON *guard_json(const struct coord_guard *g, const char *prefix)
{
    cJSON *compare = cJSON_CreateObject();
    bool mod = g->kind == GUARD_MOD_REVISION;
    add_key(compare, prefix, g->key);
    cJSON_AddStringToObject(compare, "result", "EQUAL");
    cJSON_AddStringToObject(compare, "target", mod ? "MOD" : "CREATE");
    add_int64(compare, mod ? "mod_revision" : "create_revision", g->kind == GUARD_ABSENT ? 0 : g->revision);
    return compare;
}

static cJSON *op_json(const struct coord_op *op, const char *prefix)
{
    cJSON *wrapped = cJSON_CreateObject();
    cJSON *inner = cJSON_AddObjectToObject(wrapped, op->value ? "request_put" : "request_delete_range");
    add_key(inner, prefix, op->key);
    if (op->value) {
        add_bytes(inner, "value", op->value, strlen(op->value));
        add_int64(inner, "lease", op->lease);
    }
    return wrapped;
}

static void add_txn(cJSON *json, const struct coord_request *r, const char *prefix)
{
    cJSON *compare = cJSON_AddArrayToObject(json, "compare"), *success = cJSON_AddArrayToObject(json, "success");
    for (uint32_t i = 0; i < r->nguards; i++)
        cJSON_AddItemToArray(compare, guard_json(&r->guard[i], prefix));
    for (uint32_t i = 0; i < r->nops; i++)
        cJSON_AddItemToArray(success, op_json(&r->op[i], prefix));
}

char *etcd_request_body(const struct coord_request *r, const char *prefix)
{
    cJSON *json = cJSON_CreateObject();
    switch (r->kind) {
    case COORD_RANGE:
        add_range(json, prefix, r->prefix);
        break;
    case COORD_TXN:
        add_txn(json, r, prefix);
        break;
    case COORD_LEASE_GRANT:
        add_int64(json, "TTL", etcd_ttl_s(r->ttl_ms));
        break;
    case COORD_LEASE_REVOKE:
        add_int64(json, "ID", r->lease);
        break;
    }
    return body_of(json);
}

const char *etcd_request_path(const struct coord_request *r)
{
    switch (r->kind) {
    case COORD_RANGE:
        return "/v3/kv/range";
    case COORD_TXN:
        return "/v3/kv/txn";
    case COORD_LEASE_GRANT:
        return "/v3/lease/grant";
    case COORD_LEASE_REVOKE:
        break;
    }
    return "/v3/lease/revoke";
}

/* etcd counts whole seconds, and gives 2 at least. */
int64_t etcd_ttl_s(uint32_t ttl_ms)
{
    int64_t s = ((int64_t)ttl_ms + 999) / 1000;
    return s < 2 ? 2 : s;
}

char *etcd_keepalive_body(int64_t lease)
{
    cJSON *json = cJSON_CreateObject();
    add_int64(json, "ID", lease);
    return body_of(json);
}

char *etcd_probe_body(const char *prefix)
{
    cJSON *json = cJSON_CreateObject();
    add_range(json, prefix, "");
    cJSON_AddBoolToObject(json, "count_only", true);
    return body_of(json);
}

char *etcd_auth_body(const char *user, const char *password)
{
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "name", user);
    cJSON_AddStringToObject(json, "password", password);
    return body_of(json);
}

char *etcd_watch_body(const char *prefix, const char *key, int64_t revision)
{
    cJSON *json = cJSON_CreateObject(), *create = cJSON_AddObjectToObject(json, "create_request");
    add_range(create, prefix, key);
    add_int64(create, "start_revision", revision + 1);
    cJSON_AddBoolToObject(create, "progress_notify", true);
    return body_of(json);
}
