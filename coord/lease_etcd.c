#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "coord/etcd_client.h"

void etcd_lease_add(struct etcd *e, int64_t lease, int64_t ttl_s)
{
    uint64_t ttl_us = (uint64_t)ttl_s * 1000000;
    ARRAY_ROOM(e->lease, e->nleases, e->lease_cap);
    e->lease[e->nleases++] = (struct etcd_lease){lease, ttl_us, clock_now_us() + ttl_us / 3, false};
}

static struct etcd_lease *lease_find(struct etcd *e, int64_t lease)
{
    for (size_t i = 0; i < e->nleases; i++)
        if (e->lease[i].id == lease)
            return &e->lease[i];
    return NULL;
}

void etcd_lease_forget(struct etcd *e, int64_t lease)
{
    struct etcd_lease *l = lease_find(e, lease);
    if (l)
        *l = e->lease[--e->nleases];
}

/* A store that does not answer may have ended the lease or not: only it can say. */
void etcd_lease_kept(struct etcd *e, int64_t lease, int64_t ttl_s)
{
    struct etcd_lease *l = lease_find(e, lease);
    struct coord_event lost = {.kind = COORD_LEASE_LOST, .lease = lease};
    if (!l)
        return;
    l->busy = false;
    l->next_us = clock_now_us() + (ttl_s < 0 ? ETCD_RETRY_MS * 1000 : l->ttl_us / 3);
    if (ttl_s != 0)
        return;
    log_warn("coord_lease_lost", "store=etcd lease=%lld", (long long)lease);
    etcd_lease_forget(e, lease);
    coord_queue_push(&e->queue, &lost);
}

uint64_t etcd_leases_run(struct etcd *e)
{
    uint64_t now = clock_now_us(), next = UINT64_MAX;
    /* A call that fails at once changes the list. */
    for (size_t i = 0; i < e->nleases; i++) {
        struct etcd_lease *l = &e->lease[i];
        if (!l->busy && now >= l->next_us) {
            l->busy = true;
            etcd_call_start(e, CALL_KEEPALIVE, NULL, l->id, now + l->ttl_us / 3);
        }
    }
    for (size_t i = 0; i < e->nleases; i++)
        if (!e->lease[i].busy && e->lease[i].next_us < next)
            next = e->lease[i].next_us;
    return next;
}
