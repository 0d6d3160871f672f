/* Control connections, and who is suspected when they close. */
#include "server/ctl_internal.h"

#include "base/log.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

struct ctl_peer *ctl_peer_find(const struct ctl_core *c, uint64_t id)
{
    for (uint32_t i = 0; i < c->npeers; i++)
        if (c->peer[i].id == id)
            return &c->peer[i];
    return NULL;
}

bool ctl_peer_is_up(const struct ctl_core *c, uint64_t id)
{
    const struct ctl_peer *p = ctl_peer_find(c, id);
    return p && p->up;
}

static struct ctl_peer *peer_get(struct ctl_core *c, uint64_t id)
{
    struct ctl_peer *p = ctl_peer_find(c, id);
    if (p)
        return p;
    ARRAY_ROOM(c->peer, c->npeers, c->peers_cap);
    p = &c->peer[c->npeers++];
    *p = (struct ctl_peer){.id = id, .suspect_us = UINT64_MAX};
    return p;
}

/* Forgets those that nothing is kept for. */
static void peers_trim(struct ctl_core *c)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->npeers; i++) {
        const struct ctl_peer *p = &c->peer[i];
        if (p->up || p->wanted || p->lost || p->suspect_us != UINT64_MAX)
            c->peer[n++] = *p;
    }
    c->npeers = n;
}

/* Does its death change the view? */
static bool matters(const struct ctl_core *c, uint64_t id)
{
    return (c->view && view_lists(c->view, id)) || ctl_store_server(c, id);
}

/* ---- up and down ---- */

/* A suspicion that nobody was told of yet is taken back, and a lost PREPARE sent again. */
static void tell_alive(struct ctl_core *c, uint64_t id)
{
    const struct server_doc *doc = ctl_store_server(c, id);
    const struct view_server *s = c->view ? view_server_find(c->view, id) : NULL;
    const struct view_member *m = c->view ? view_member_find(c->view, id) : NULL;
    if (doc) {
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_SERVER, .server = doc});
    } else if (s) {
        struct server_doc unregistered = {.server = *s};
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_SERVER, .server = &unregistered});
    } else if (m && m->live) {
        struct join_doc join = {.id = id, .local_size = m->local_size};
        memcpy(join.name, m->name, sizeof join.name);
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_JOIN, .join = &join});
    }
}

void ctl_peer_up(struct ctl_core *c, const struct ctl_event *e)
{
    struct ctl_peer *p = peer_get(c, e->from);
    p->up = true;
    p->is_server = e->is_server;
    p->lost = p->dead = p->late = false;
    p->suspect_us = UINT64_MAX;
    if (ctl_view_concerns(c, e->from))
        ctl_emit(c, &(struct ctl_effect){.kind = CTL_SEND_VIEW, .to = e->from, .view = c->view});
    if (c->leads) {
        tell_alive(c, e->from);
        ctl_tell_drained(c, e->from);
    } else if (e->from == c->leader) {
        ctl_tell_leader(c);
    }
}

static void suspect_from(struct ctl_core *c, struct ctl_peer *p)
{
    bool member = c->view && view_member_find(c->view, p->id);
    uint64_t at = c->now_us + c->cfg.suspect_ms * (member ? 500ull : 1000ull);
    if (at < p->suspect_us)
        p->suspect_us = at;
}

void ctl_peer_down(struct ctl_core *c, const struct ctl_event *e)
{
    struct ctl_peer *p = ctl_peer_find(c, e->from);
    if (!p || !p->up)
        return;
    p->up = false;
    /* A joiner that no view lists yet can die too. */
    if (c->leads || matters(c, e->from))
        suspect_from(c, p);
    log_info("peer_down", "id=%llu cause=\"%s\"", (unsigned long long)e->from, e->text ? e->text : "");
    peers_trim(c);
}

void ctl_peer_dead(struct ctl_core *c, const struct ctl_event *e)
{
    if (ctl_peer_is_up(c, e->from) || !matters(c, e->from))
        return;
    struct ctl_peer *p = peer_get(c, e->from);
    if (!p->dead)
        p->suspect_us = c->now_us;
    p->dead = true;
}

/* Its data connection closed. The control connection knows better, where there is one. */
void ctl_peer_loop_down(struct ctl_core *c, const struct ctl_event *e)
{
    if (!c->view || !view_lists(c->view, e->from) || ctl_peer_is_up(c, e->from))
        return;
    suspect_from(c, peer_get(c, e->from));
}

void ctl_peer_suspected(struct ctl_core *c, const struct ctl_event *e)
{
    if (!c->leads || e->id == c->cfg.self.server.id || ctl_peer_is_up(c, e->id))
        return;
    if (c->view && view_lists(c->view, e->id))
        suspect_from(c, peer_get(c, e->id));
}

/* ---- time ---- */

/* Who never connected to this leader: a server is as good as its lease. A member has to hear of a new leader first, from a store
 * that may just have come back; if it is dead its data connections close, and then it is suspected sooner. */
enum { MEMBER_GRACE_US = 15 * 1000000 };

static void watch_one(struct ctl_core *c, uint64_t id, uint64_t grace_us)
{
    if (id == c->cfg.self.server.id || ctl_peer_is_up(c, id))
        return;
    struct ctl_peer *p = peer_get(c, id);
    if (p->lost)
        p->suspect_us = c->now_us;
    else if (p->suspect_us == UINT64_MAX)
        p->suspect_us = c->now_us + grace_us;
    p->lost = false;
}

void ctl_peers_watch(struct ctl_core *c)
{
    for (uint32_t i = 0; c->view && i < c->view->nservers; i++)
        watch_one(c, c->view->server[i].id, c->cfg.lease_ms * 1000ull);
    for (uint32_t i = 0; c->view && i < c->view->nmembers; i++)
        if (c->view->member[i].live)
            watch_one(c, c->view->member[i].id, MEMBER_GRACE_US);
}

static void expire(struct ctl_core *c, struct ctl_peer *p)
{
    static const char why[] = "its connection closed and it did not come back", gone[] = "its process is gone";
    uint64_t id = p->id;
    p->lost = !c->leads && c->view && view_lists(c->view, id);
    if (c->leads) {
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_SUSPECT, .id = id, .text = p->dead ? gone : why});
    } else if (c->leader == id && p->lost && (p->dead || p->late)) {
        ctl_store_unseat(c);
    } else if (c->leader == id && p->lost) {
        p->late = true;
        p->suspect_us = c->now_us + c->cfg.suspect_ms * 500ull;
    } else if (c->leader && c->leader != c->cfg.self.server.id && c->leader != id && c->view &&
               view_lists(c->view, id)) {
        struct ctl_effect e = {.kind = CTL_SEND_SUSPECT, .to = c->leader, .id = id};
        snprintf(e.text, sizeof e.text, "%s", why);
        ctl_emit(c, &e);
    }
}

void ctl_peers_expire(struct ctl_core *c)
{
    bool any = false;
    for (uint32_t i = 0; i < c->npeers; i++) {
        struct ctl_peer *p = &c->peer[i];
        if (c->now_us < p->suspect_us)
            continue;
        if (c->before_us < p->suspect_us && c->now_us - p->suspect_us > CTL_LATE_US) {
            p->suspect_us = c->now_us + CTL_LATE_US;
            continue;
        }
        p->suspect_us = UINT64_MAX;
        any = true;
        expire(c, p);
    }
    if (any)
        peers_trim(c);
}

uint64_t ctl_peers_deadline(const struct ctl_core *c)
{
    uint64_t at = UINT64_MAX;
    for (uint32_t i = 0; i < c->npeers; i++)
        if (c->peer[i].suspect_us < at)
            at = c->peer[i].suspect_us;
    return at;
}

/* ---- connections to keep ---- */

static const struct view_server *target(const struct ctl_core *c, uint64_t id)
{
    const struct view_server *s = c->view ? view_server_find(c->view, id) : NULL;
    const struct server_doc *doc = ctl_store_server(c, id);
    if (c->controller && view_core_removed(c->controller, id))
        return NULL;
    return s ? s : doc ? &doc->server : NULL;
}

static void connect_one(struct ctl_core *c, uint64_t id)
{
    const struct view_server *s = target(c, id);
    if (!s || id >= c->cfg.self.server.id)
        return;
    struct ctl_peer *p = peer_get(c, id);
    if (p->wanted)
        return;
    p->wanted = p->is_server = true;
    struct ctl_effect e = {.kind = CTL_CONNECT, .to = id, .id = id};
    memcpy(e.addr, s->ctl, sizeof e.addr);
    ctl_emit(c, &e);
}

void ctl_peers_connect(struct ctl_core *c)
{
    for (uint32_t i = 0; c->view && i < c->view->nservers; i++)
        connect_one(c, c->view->server[i].id);
    for (uint32_t i = 0; i < c->nservers; i++)
        connect_one(c, c->server[i].doc.server.id);
    for (uint32_t i = 0; i < c->npeers; i++) {
        struct ctl_peer *p = &c->peer[i];
        p->lost &= c->view && view_lists(c->view, p->id);
        if (!p->wanted || target(c, p->id))
            continue;
        p->wanted = false;
        struct ctl_effect e = {.kind = CTL_DISCONNECT, .to = p->id};
        snprintf(e.text, sizeof e.text, "removed from the job");
        ctl_emit(c, &e);
    }
    peers_trim(c);
}
