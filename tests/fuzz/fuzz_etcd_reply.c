/* Any bytes as an answer of etcd. The first byte picks the reader. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "coord/etcd_reply.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_watch(const char *body, size_t size)
{
    struct etcd_watch_reply reply = {0};
    if (etcd_reply_watch(body, size, "/keepstep/j/", &reply) == 0)
        coord_event_done(&reply.change);
}

static void read_range(const char *body, size_t size)
{
    struct coord_event event = {0};
    if (etcd_reply_range(body, size, "/keepstep/j/", &event))
        return;
    for (uint32_t i = 0; i < event.nkv; i++)
        if (!event.kv[i].key || strlen(event.kv[i].key) >= COORD_KEY_MAX || event.kv[i].value[event.kv[i].value_size])
            abort();
    coord_event_done(&event);
}

static void read_numbers(const char *body, size_t size)
{
    bool succeeded;
    int64_t revision, lease, ttl_s;
    char *token;
    etcd_reply_txn(body, size, &succeeded, &revision);
    if (etcd_reply_grant(body, size, &lease, &ttl_s, &revision) == 0 && (!lease || ttl_s <= 0))
        abort();
    etcd_reply_revision(body, size, &revision);
    if (etcd_reply_keepalive(body, size, &ttl_s) == 0 && ttl_s < 0)
        abort();
    if (etcd_reply_token(body, size, &token) == 0)
        mem_free(token);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct etcd_error error;
    if (!size)
        return 0;
    const char *body = (const char *)data + 1;
    switch (data[0] % 4) {
    case 0:
        read_watch(body, size - 1);
        break;
    case 1:
        read_range(body, size - 1);
        break;
    case 2:
        read_numbers(body, size - 1);
        break;
    default:
        etcd_reply_error(body, size - 1, &error);
        if (!memchr(error.text, 0, sizeof error.text))
            abort();
    }
    return 0;
}
