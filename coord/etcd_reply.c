#include "coord/etcd_reply.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/keepstep_err.h"
#include "base/mem.h"

/* An object, or NULL. */
static cJSON *parse_object(const char *body, size_t size)
{
    cJSON *json = cJSON_ParseWithLength(body, size);
    if (cJSON_IsObject(json))
        return json;
    cJSON_Delete(json);
    return NULL;
}

/* A missing member is 0, as the gateway means it. */
static int get_int64(const cJSON *object, const char *name, int64_t *ret)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    char *end;
    if (!item) {
        *ret = 0;
        return 0;
    }
    if (cJSON_IsNumber(item)) {
        double v = item->valuedouble;
        if (!(fabs(v) < 9007199254740992.0) || v != floor(v))
            return KS_EPROTO;
        *ret = (int64_t)v;
        return 0;
    }
    if (!cJSON_IsString(item) || !item->valuestring[0])
        return KS_EPROTO;
    errno = 0;
    long long v = strtoll(item->valuestring, &end, 10);
    if (errno || *end)
        return KS_EPROTO;
    *ret = v;
    return 0;
}

static int get_bool(const cJSON *object, const char *name, bool *ret)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (item && !cJSON_IsBool(item))
        return KS_EPROTO;
    *ret = cJSON_IsTrue(item);
    return 0;
}

static int get_revision(const cJSON *json, int64_t *ret)
{
    const cJSON *header = cJSON_GetObjectItemCaseSensitive(json, "header");
    int64_t revision;
    if (!cJSON_IsObject(header) || get_int64(header, "revision", &revision) || revision < 0)
        return KS_EPROTO;
    *ret = revision;
    return 0;
}

static int base64_digit(char c)
{
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Bytes with a NUL behind them, for mem_free; a missing member is empty. */
static int get_bytes(const cJSON *object, const char *name, char **ret, size_t *ret_size)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (item && !cJSON_IsString(item))
        return KS_EPROTO;
    const char *in = item ? item->valuestring : "";
    size_t n = strlen(in), pad = n >= 2 && in[n - 1] == '=' ? 1 + (in[n - 2] == '=') : 0, size = 0;
    if (n % 4)
        return KS_EPROTO;
    char *out = mem_alloc(n / 4 * 3 + 1);
    for (size_t i = 0; i < n; i += 4) {
        uint32_t word = 0;
        for (size_t j = i; j < i + 4; j++) {
            int digit = j >= n - pad ? 0 : base64_digit(in[j]);
            if (digit < 0) {
                mem_free(out);
                return KS_EPROTO;
            }
            word = word << 6 | (uint32_t)digit;
        }
        out[size++] = (char)(word >> 16);
        out[size++] = (char)(word >> 8);
        out[size++] = (char)word;
    }
    size -= n ? pad : 0;
    out[size] = 0;
    *ret = out;
    *ret_size = size;
    return 0;
}

/* Adds one key; deleted ones without a value. */
static int kv_add(const cJSON *kv, const char *prefix, bool deleted, struct coord_event *e)
{
    char *key = NULL, *value = NULL;
    size_t key_size, value_size, prefix_size = strlen(prefix);
    int64_t create, mod;
    int status = KS_EPROTO;
    if (!cJSON_IsObject(kv) || get_int64(kv, "create_revision", &create) || get_int64(kv, "mod_revision", &mod))
        return KS_EPROTO;
    if (mod <= 0 || create < 0 || get_bytes(kv, "key", &key, &key_size))
        return KS_EPROTO;
    if (get_bytes(kv, "value", &value, &value_size))
        goto free_key;
    if (key_size < prefix_size || memcmp(key, prefix, prefix_size) != 0)
        goto free_value;
    status = 0;
    size_t name_size = key_size - prefix_size;
    if (name_size > 0 && name_size < COORD_KEY_MAX && strlen(key) == key_size)
        coord_event_add(e, key + prefix_size, deleted ? NULL : value, value_size, create, mod);
free_value:
    mem_free(value);
free_key:
    mem_free(key);
    return status;
}

int etcd_reply_range(const char *body, size_t size, const char *prefix, struct coord_event *ret)
{
    cJSON *json = parse_object(body, size);
    const cJSON *kvs = cJSON_GetObjectItemCaseSensitive(json, "kvs"), *kv;
    struct coord_event found = {0};
    int64_t revision;
    int status = !json || get_revision(json, &revision) || (kvs && !cJSON_IsArray(kvs)) ? KS_EPROTO : 0;
    if (!status) {
        cJSON_ArrayForEach(kv, kvs)
        {
            status = kv_add(kv, prefix, false, &found);
            if (status)
                break;
        }
    }
    cJSON_Delete(json);
    if (status) {
        coord_event_done(&found);
        return status;
    }
    ret->nkv = found.nkv;
    ret->kv = found.kv;
    ret->revision = revision;
    return 0;
}

int etcd_reply_txn(const char *body, size_t size, bool *ret_succeeded, int64_t *ret_revision)
{
    cJSON *json = parse_object(body, size);
    int64_t revision;
    bool succeeded;
    int status = !json || get_revision(json, &revision) || get_bool(json, "succeeded", &succeeded) ? KS_EPROTO : 0;
    cJSON_Delete(json);
    if (status)
        return status;
    *ret_succeeded = succeeded;
    *ret_revision = revision;
    return 0;
}

int etcd_reply_grant(const char *body, size_t size, int64_t *ret_lease, int64_t *ret_ttl_s, int64_t *ret_revision)
{
    cJSON *json = parse_object(body, size);
    int64_t revision, lease, ttl;
    bool bad = !json || get_revision(json, &revision) || get_int64(json, "ID", &lease) || get_int64(json, "TTL", &ttl);
    cJSON_Delete(json);
    if (bad || lease == 0 || ttl <= 0 || ttl > INT32_MAX)
        return KS_EPROTO;
    *ret_lease = lease;
    *ret_ttl_s = ttl;
    *ret_revision = revision;
    return 0;
}

int etcd_reply_revision(const char *body, size_t size, int64_t *ret_revision)
{
    cJSON *json = parse_object(body, size);
    int status = json ? get_revision(json, ret_revision) : KS_EPROTO;
    cJSON_Delete(json);
    return status;
}

int etcd_reply_keepalive(const char *body, size_t size, int64_t *ret_ttl_s)
{
    cJSON *json = parse_object(body, size);
    const cJSON *result = cJSON_GetObjectItemCaseSensitive(json, "result");
    int64_t ttl;
    int status = !cJSON_IsObject(result) || get_int64(result, "TTL", &ttl) || ttl < 0 ? KS_EPROTO : 0;
    cJSON_Delete(json);
    if (!status)
        *ret_ttl_s = ttl;
    return status;
}

int etcd_reply_token(const char *body, size_t size, char **ret_token)
{
    cJSON *json = parse_object(body, size);
    const cJSON *token = cJSON_GetObjectItemCaseSensitive(json, "token");
    bool ok = cJSON_IsString(token) && token->valuestring[0] && !strpbrk(token->valuestring, "\r\n");
    if (ok)
        *ret_token = mem_strdup(token->valuestring);
    cJSON_Delete(json);
    return ok ? 0 : KS_EPROTO;
}

/* Printable and short: it goes into logs and answers. */
static void text_copy(char *out, const char *text, size_t size)
{
    size_t n = size < COORD_ERR_TEXT - 1 ? size : COORD_ERR_TEXT - 1;
    for (size_t i = 0; i < n; i++)
        out[i] = text[i] >= ' ' && text[i] <= '~' ? text[i] : '?';
    out[n] = 0;
}

/* Of {"error": TEXT, "code": N}, {"message": TEXT, "code": N} or {"grpc_code": N, "message": TEXT}. */
static bool error_read(const cJSON *json, struct etcd_error *ret)
{
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(json, "message");
    const cJSON *code = cJSON_GetObjectItemCaseSensitive(json, "code");
    if (!cJSON_IsString(text))
        text = cJSON_GetObjectItemCaseSensitive(json, "error");
    if (!cJSON_IsNumber(code))
        code = cJSON_GetObjectItemCaseSensitive(json, "grpc_code");
    if (!cJSON_IsString(text))
        return false;
    text_copy(ret->text, text->valuestring, strlen(text->valuestring));
    ret->code = cJSON_IsNumber(code) ? code->valueint : 0;
    return true;
}

void etcd_reply_error(const char *body, size_t size, struct etcd_error *ret)
{
    cJSON *json = parse_object(body, size);
    const cJSON *inner = cJSON_GetObjectItemCaseSensitive(json, "error");
    memset(ret, 0, sizeof *ret);
    if (!error_read(cJSON_IsObject(inner) ? inner : json, ret))
        text_copy(ret->text, body, size);
    if (!ret->text[0])
        snprintf(ret->text, sizeof ret->text, "an error without a text");
    cJSON_Delete(json);
}

static int watch_event_add(const cJSON *event, const char *prefix, struct coord_event *e)
{
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(event, "type");
    if (type && !cJSON_IsString(type))
        return KS_EPROTO;
    bool deleted = type && strcmp(type->valuestring, "DELETE") == 0;
    return kv_add(cJSON_GetObjectItemCaseSensitive(event, "kv"), prefix, deleted, e);
}

static int watch_result_read(const cJSON *result, const char *prefix, struct etcd_watch_reply *ret)
{
    const cJSON *events = cJSON_GetObjectItemCaseSensitive(result, "events"), *event;
    const cJSON *reason = cJSON_GetObjectItemCaseSensitive(result, "cancel_reason");
    if (!cJSON_IsObject(result) || get_revision(result, &ret->revision) || get_bool(result, "created", &ret->created) ||
        get_bool(result, "canceled", &ret->canceled) || get_int64(result, "compact_revision", &ret->compact_revision) ||
        (events && !cJSON_IsArray(events)))
        return KS_EPROTO;
    if (ret->canceled)
        text_copy(ret->error.text, cJSON_IsString(reason) ? reason->valuestring : "canceled",
                  cJSON_IsString(reason) ? strlen(reason->valuestring) : strlen("canceled"));
    cJSON_ArrayForEach(event, events)
    {
        int status = watch_event_add(event, prefix, &ret->change);
        if (status)
            return status;
    }
    return 0;
}

int etcd_reply_watch(const char *line, size_t size, const char *prefix, struct etcd_watch_reply *ret)
{
    cJSON *json = parse_object(line, size);
    const cJSON *error = cJSON_GetObjectItemCaseSensitive(json, "error");
    struct etcd_watch_reply reply = {0};
    int status = KS_EPROTO;
    if (error) {
        etcd_reply_error(line, size, &reply.error);
        status = 0;
    } else if (json) {
        status = watch_result_read(cJSON_GetObjectItemCaseSensitive(json, "result"), prefix, &reply);
    }
    cJSON_Delete(json);
    if (status)
        coord_event_done(&reply.change);
    else
        *ret = reply;
    return status;
}
