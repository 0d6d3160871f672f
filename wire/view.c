#include "wire/view.h"

#include "base/mem.h"

struct view *view_create(uint32_t nservers, uint32_t nmembers, uint32_t nshards)
{
    struct view *v = mem_alloc(sizeof *v);
    v->nservers = nservers;
    v->nmembers = nmembers;
    v->nshards = nshards;
    v->server = mem_alloc(nservers * sizeof *v->server);
    v->member = mem_alloc(nmembers * sizeof *v->member);
    v->shard = mem_alloc(nshards * sizeof *v->shard);
    return v;
}

struct view *view_copy(const struct view *v)
{
    struct view *copy = mem_dup(v, sizeof *v);
    copy->server = mem_dup(v->server, v->nservers * sizeof *v->server);
    copy->member = mem_dup(v->member, v->nmembers * sizeof *v->member);
    copy->shard = mem_dup(v->shard, v->nshards * sizeof *v->shard);
    return copy;
}

void view_free(struct view *v)
{
    if (!v)
        return;
    mem_free(v->server);
    mem_free(v->member);
    mem_free(v->shard);
    mem_free(v);
}

const struct view_server *view_server_find(const struct view *v, uint64_t id)
{
    uint32_t low = 0, high = v->nservers;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (v->server[mid].id < id)
            low = mid + 1;
        else
            high = mid;
    }
    return low < v->nservers && v->server[low].id == id ? &v->server[low] : NULL;
}

const struct view_member *view_member_find(const struct view *v, uint64_t id)
{
    uint32_t low = 0, high = v->nmembers;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (v->member[mid].id < id)
            low = mid + 1;
        else
            high = mid;
    }
    return low < v->nmembers && v->member[low].id == id ? &v->member[low] : NULL;
}

bool view_lists(const struct view *v, uint64_t id)
{
    const struct view_member *m = view_member_find(v, id);
    return m ? m->live : view_server_find(v, id) != NULL;
}

struct mode view_mode_at(const struct view *v, int64_t step)
{
    struct mode mode = {.kind = MODE_SYNC};
    for (uint32_t i = 0; i < v->nmodes; i++) {
        if (i == 0 || v->mode[i].from <= step)
            mode = v->mode[i];
    }
    return mode;
}

int64_t view_rank(const struct view *v, uint64_t id)
{
    int64_t rank = 0;
    for (uint32_t i = 0; i < v->nmembers; i++) {
        const struct view_member *m = &v->member[i];
        if (m->id == id)
            return m->live ? rank : -1;
        if (m->live)
            rank += m->local_size;
    }
    return -1;
}

uint32_t view_size(const struct view *v)
{
    uint32_t size = 0;
    for (uint32_t i = 0; i < v->nmembers; i++)
        size += v->member[i].live ? v->member[i].local_size : 0;
    return size;
}

const struct view_server *view_primary(const struct view *v, uint32_t shard, const char **ret_loop_addr)
{
    if (shard >= v->nshards)
        return NULL;
    const struct view_server *s = view_server_find(v, v->shard[shard].primary);
    if (!s || s->nloops == 0)
        return NULL;
    if (ret_loop_addr)
        *ret_loop_addr = s->loop[loop_of(shard, s->nloops)];
    return s;
}
