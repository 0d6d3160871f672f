/* doc_copy.c - documents on their way: plain copies, or through the JSON and frame codecs and back. */
#include "chaos/sim/sim.h"

#include <stdio.h>
#include <string.h>
#include "base/mem.h"

enum { CODED_PERMILLE = 60, FRAMES_CODED_PERMILLE = 200 };

static bool coded(struct world *w)
{
    if (!rng_chance(&w->rng, CODED_PERMILLE))
        return false;
    w->stats.docs_coded++;
    return true;
}

static void coded_badly(struct world *w, const char *what, const char *err)
{
    world_fail(w, "I12 our own %s cannot be decoded: %s", what, err);
}

struct view *doc_view(struct world *w, const struct view *v)
{
    if (!coded(w))
        return view_copy(v);
    char err[ERR_TEXT] = "";
    char *text = view_encode(v);
    struct view *ret = NULL;
    if (view_decode(text, strlen(text), &ret, err)) {
        coded_badly(w, "view", err);
        ret = view_copy(v);
    }
    mem_free(text);
    return ret;
}

struct prepare *doc_prepare(struct world *w, const struct prepare *p)
{
    struct prepare *ret = mem_alloc(sizeof *ret);
    if (!coded(w)) {
        prepare_copy(ret, p);
        return ret;
    }
    char err[ERR_TEXT] = "";
    char *text = prepare_encode(p);
    if (prepare_decode(text, strlen(text), ret, err)) {
        coded_badly(w, "prepare", err);
        prepare_copy(ret, p);
    }
    mem_free(text);
    return ret;
}

struct report *doc_report(struct world *w, const struct report *r)
{
    struct report *ret = mem_alloc(sizeof *ret);
    char err[ERR_TEXT] = "";
    if (coded(w)) {
        char *text = report_encode(r);
        int status = report_decode(text, strlen(text), ret, err);
        mem_free(text);
        if (!status)
            return ret;
        coded_badly(w, "report", err);
    }
    *ret = *r;
    ret->shard = r->nshards ? mem_dup(r->shard, r->nshards * sizeof *r->shard) : NULL;
    return ret;
}

struct tensor_spec *doc_spec(struct world *w, const struct tensor_spec *s)
{
    struct tensor_spec *ret = mem_dup(s, sizeof *s);
    if (!coded(w))
        return ret;
    char err[ERR_TEXT] = "";
    char *text = tensor_encode(s);
    if (tensor_decode(text, strlen(text), ret, err))
        coded_badly(w, "tensor", err);
    mem_free(text);
    return ret;
}

struct join_doc *doc_join(struct world *w, const struct join_doc *j)
{
    struct join_doc *ret = mem_dup(j, sizeof *j);
    if (!coded(w))
        return ret;
    char err[ERR_TEXT] = "";
    char *text = join_encode(j);
    if (join_decode(text, strlen(text), ret, err))
        coded_badly(w, "join", err);
    mem_free(text);
    return ret;
}

void doc_header(struct world *w, struct frame_header *h)
{
    if (!rng_chance(&w->rng, FRAMES_CODED_PERMILLE))
        return;
    uint8_t bytes[FRAME_SIZE];
    struct frame_header got;
    frame_encode(h, bytes);
    int status = frame_decode(bytes, SIM_CHUNK_BYTES, &got);
    if (status) {
        world_fail(w, "I12 our own %s frame is refused (%d): step %ld chunk %u len %lu dtype %u", frame_type_name(h->type),
                   status, (long)h->step, h->chunk, (unsigned long)h->len, h->dtype);
        return;
    }
    *h = got;
}
