/* What the controller says in the log of a change: who is suspected, what was asked, what was decided, how long each part
 * took. */
#include "coord/view_internal.h"

#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>

enum { LIST_BYTES = 600 };

struct list {
    char text[LIST_BYTES];
    size_t n;
    bool cut;
};

__attribute__((format(printf, 2, 3))) static void list_add(struct list *l, const char *format, ...)
{
    va_list ap;
    size_t room = sizeof l->text - 4 - l->n;
    if (l->cut)
        return;
    va_start(ap, format);
    int n = vsnprintf(l->text + l->n, room, format, ap);
    va_end(ap);
    l->cut = n < 0 || (size_t)n >= room;
    if (l->cut)
        snprintf(l->text + l->n, 4, "...");
    else
        l->n += (size_t)n;
}

static double ms_since(const struct view_core *v, uint64_t us)
{
    return us && v->now_us > us ? (double)(v->now_us - us) / 1000 : 0;
}

static const char *name_of(const struct view_core *v, uint64_t id)
{
    const struct view_server *s = v->base ? view_server_find(v->base, id) : NULL;
    const struct view_member *m = v->base ? view_member_find(v->base, id) : NULL;
    return s ? s->name : m ? m->name : "?";
}

static void list_ids(const struct view_core *v, struct list *l, const uint64_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        list_add(l, "%s%s(%llu)", i ? " " : "", name_of(v, ids[i]), (unsigned long long)ids[i]);
}

void view_log_suspect(struct view_core *v, uint64_t id, const char *cause)
{
    bool server = v->base && view_server_find(v->base, id);
    v->began_us = v->began_us ? v->began_us : v->now_us;
    log_warn("node_suspect", "id=%llu name=\"%s\" role=%s cause=\"%s\"", (unsigned long long)id, name_of(v, id),
             server ? "server" : "member", cause ? cause : "");
}

void view_log_prepare(struct view_core *v)
{
    const struct prepare *p = v->prepare;
    struct list gone = {.n = 0}, joins = {.n = 0}, heirs = {.n = 0}, moves = {.n = 0};
    if (log_level_now > LOG_INFO)
        return;
    list_ids(v, &gone, p->gone, p->ngone);
    for (uint32_t i = 0; i < p->njoins; i++)
        list_add(&joins, "%s%s(%llu)", i ? " " : "", p->joins[i].name, (unsigned long long)p->joins[i].id);
    list_ids(v, &heirs, p->heir_of, p->nheirs);
    for (uint32_t i = 0; i < p->nmoves; i++)
        list_add(&moves, "%s%u:%s", i ? " " : "", p->move[i].shard, name_of(v, p->move[i].to));
    v->prepared_us = v->now_us;
    log_info("view_prepare", "epoch=%llu term=%llu round=%llu gone=\"%s\" joins=\"%s\" heirs_of=\"%s\" moves=\"%s\" mode_change=%d "
             "waited_ms=%.1f", (unsigned long long)v->base->epoch, (unsigned long long)v->term, (unsigned long long)v->round,
             gone.text, joins.text, heirs.text, moves.text, p->mode_change, ms_since(v, v->began_us));
}

void view_log_reports(struct view_core *v)
{
    v->reported_us = v->now_us;
    log_info("view_reports", "epoch=%llu round=%llu reports=%u ms=%.1f", (unsigned long long)v->base->epoch,
             (unsigned long long)v->round, v->nanswers, ms_since(v, v->prepared_us));
}

/* "s0>s1 0-3,7; s0>s2 4-6": who leads which shards now, of those that have another primary than before. */
static void list_moved(const struct view *from, const struct view *to, struct list *l)
{
    bool told[SHARDS_MAX] = {0};
    for (uint32_t h = 0; h < to->nshards; h++) {
        uint64_t a = from->shard[h].primary, b = to->shard[h].primary;
        if (a == b || told[h])
            continue;
        const struct view_server *x = view_server_find(from, a), *y = view_server_find(to, b);
        list_add(l, "%s%s>%s ", l->n ? "; " : "", x ? x->name : "?", y ? y->name : "?");
        const char *comma = "";
        for (uint32_t k = h, end; k < to->nshards; k = end + 1) {
            end = k;
            if (from->shard[k].primary != a || to->shard[k].primary != b)
                continue;
            while (end + 1 < to->nshards && from->shard[end + 1].primary == a && to->shard[end + 1].primary == b)
                end++;
            for (uint32_t t = k; t <= end; t++)
                told[t] = true;
            if (end > k)
                list_add(l, "%s%u-%u", comma, k, end);
            else
                list_add(l, "%s%u", comma, k);
            comma = ",";
        }
    }
}

void view_log_commit(struct view_core *v, const struct view *next)
{
    struct list moved = {.n = 0};
    int64_t join = -1;
    if (log_level_now > LOG_INFO)
        return;
    if (v->base && v->base->nshards == next->nshards)
        list_moved(v->base, next, &moved);
    for (uint32_t i = 0; i < next->nmembers; i++)
        if (!v->base || !view_member_find(v->base, next->member[i].id))
            join = next->member[i].join;
    log_info("view_commit", "epoch=%llu term=%llu servers=%u members=%u last=%lld join=%lld moved=\"%s\" store_ms=%.1f "
             "total_ms=%.1f", (unsigned long long)next->epoch, (unsigned long long)next->term, next->nservers, next->nmembers,
             (long long)v->last_step, (long long)join, moved.text, ms_since(v, v->reported_us), ms_since(v, v->began_us));
    v->began_us = v->prepared_us = v->reported_us = 0;
}
