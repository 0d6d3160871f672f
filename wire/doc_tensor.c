#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/rng.h"
#include "wire/doc_json.h"

static const char *const kind_words[] = {"reduce", "param"};
static const char *const op_words[] = {"sum", "average"};
static const char *const finite_words[] = {"apply", "reject", "skip"};

uint64_t tensor_id(const char *name)
{
    uint64_t id = hash_bytes(name, strlen(name));
    return id ? id : 1;
}

uint64_t tensor_count(const struct tensor_spec *s)
{
    uint64_t count = 1;
    for (uint32_t i = 0; i < s->ndims; i++)
        count *= s->dim[i];
    return count;
}

uint64_t tensor_bytes(const struct tensor_spec *s)
{
    return tensor_count(s) * dtype_size(s->dtype);
}

uint32_t tensor_chunks(const struct tensor_spec *s, uint32_t chunk_bytes)
{
    uint64_t chunks = (tensor_bytes(s) + chunk_bytes - 1) / chunk_bytes;
    return chunks == 0 ? 1 : chunks > UINT32_MAX ? UINT32_MAX : (uint32_t)chunks;
}

uint32_t tensor_chunk_bytes(const struct tensor_spec *s, uint32_t chunk, uint32_t chunk_bytes)
{
    uint64_t bytes = tensor_bytes(s), start = (uint64_t)chunk * chunk_bytes;
    if (start >= bytes)
        return 0;
    return bytes - start < chunk_bytes ? (uint32_t)(bytes - start) : chunk_bytes;
}

void tensor_describe(const struct tensor_spec *s, char *out, size_t size)
{
    char dims[TENSOR_DIMS_MAX * 21 + 1] = "";
    size_t used = 0;
    for (uint32_t i = 0; i < s->ndims; i++)
        used += (size_t)snprintf(dims + used, sizeof dims - used, "%s%" PRIu64, i ? "," : "", s->dim[i]);
    CHECK(s->kind >= TENSOR_REDUCE && s->kind <= TENSOR_PARAM && s->op >= TENSOR_SUM && s->op <= TENSOR_AVERAGE &&
          s->finite >= FINITE_APPLY && s->finite <= FINITE_SKIP);
    snprintf(out, size, "%s[%s] %s op=%s finite=%s group=%s%s%s%s", dtype_name(s->dtype), dims,
             kind_words[s->kind - TENSOR_REDUCE], op_words[s->op - TENSOR_SUM], finite_words[s->finite - FINITE_APPLY],
             s->group, s->optimizer[0] ? " optimizer=\"" : "", s->optimizer, s->optimizer[0] ? "\"" : "");
}

bool tensor_same(const struct tensor_spec *a, const struct tensor_spec *b)
{
    if (a->ndims != b->ndims || memcmp(a->dim, b->dim, a->ndims * sizeof a->dim[0]) != 0)
        return false;
    return a->id == b->id && a->dtype == b->dtype && a->kind == b->kind && a->op == b->op && a->finite == b->finite &&
           strcmp(a->name, b->name) == 0 && strcmp(a->group, b->group) == 0 && strcmp(a->optimizer, b->optimizer) == 0;
}

char *tensor_encode(const struct tensor_spec *s)
{
    struct doc_writer w = {0};
    doc_put_open(&w, NULL, '{');
    doc_put_text(&w, "name", s->name);
    doc_put_id(&w, "id", s->id);
    doc_put_text(&w, "dtype", dtype_name(s->dtype));
    doc_put_open(&w, "dim", '[');
    for (uint32_t i = 0; i < s->ndims; i++)
        doc_put_id(&w, NULL, s->dim[i]);
    doc_put_close(&w, ']');
    doc_put_word(&w, "kind", kind_words, 2, (uint32_t)s->kind - TENSOR_REDUCE);
    doc_put_word(&w, "op", op_words, 2, (uint32_t)s->op - TENSOR_SUM);
    doc_put_word(&w, "finite", finite_words, 3, (uint32_t)s->finite - FINITE_APPLY);
    doc_put_text(&w, "group", s->group);
    doc_put_text(&w, "optimizer", s->optimizer);
    doc_put_close(&w, '}');
    return doc_put_done(&w);
}

static enum dtype get_dtype(const struct doc_node *n, const char *key)
{
    char name[16] = "";
    enum dtype t = DTYPE_F32;
    doc_get_text(n, key, name, sizeof name, 1);
    if (dtype_parse(name, &t) != 0)
        doc_fail(n, key, "no such element type");
    return t;
}

/* The product counts dims of 0 as 1, so that it is bounded whatever their order. */
static void get_dims(const struct doc_node *n, struct tensor_spec *s)
{
    struct doc_list list;
    struct doc_node dim;
    uint64_t bytes = dtype_size(s->dtype);
    s->ndims = doc_get_list(n, "dim", 0, TENSOR_DIMS_MAX, &list);
    for (uint32_t i = 0; i < s->ndims; i++) {
        doc_list_next(&list, &dim);
        s->dim[i] = doc_get_id(&dim, NULL, 0, TENSOR_BYTES_MAX);
        uint64_t factor = s->dim[i] ? s->dim[i] : 1;
        if (bytes > TENSOR_BYTES_MAX / factor)
            doc_fail(n, "dim", "more than 2^50 bytes");
        else
            bytes *= factor;
    }
}

int tensor_decode(const char *text, size_t size, struct tensor_spec *ret, char *err)
{
    struct doc_reader r;
    struct doc_node n;
    struct tensor_spec s = {0};
    doc_open(&r, "tensor", text, size, DOC_SMALL_MAX, err, &n);
    doc_get_text(&n, "name", s.name, sizeof s.name, 1);
    s.id = doc_get_id(&n, "id", 1, UINT64_MAX);
    if (s.id != tensor_id(s.name))
        doc_fail(&n, "id", "not the hash of the name");
    s.dtype = get_dtype(&n, "dtype");
    get_dims(&n, &s);
    s.kind = (enum tensor_kind)(TENSOR_REDUCE + doc_get_word(&n, "kind", kind_words, 2));
    s.op = (enum tensor_op)(TENSOR_SUM + doc_get_word(&n, "op", op_words, 2));
    s.finite = (enum finite_policy)(FINITE_APPLY + doc_get_word(&n, "finite", finite_words, 3));
    doc_get_text(&n, "group", s.group, sizeof s.group, 1);
    doc_get_text(&n, "optimizer", s.optimizer, sizeof s.optimizer, 0);
    if (s.kind == TENSOR_REDUCE && s.optimizer[0])
        doc_fail(&n, "optimizer", "only params have one");
    int rc = doc_close(&r);
    if (rc == 0)
        *ret = s;
    return rc;
}
