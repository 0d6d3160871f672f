#include "base/mem.h"
#include "wire/doc_json.h"
#include "wire/frame.h"

static const char *const role_words[] = {"member", "server", "operator"};

char *hello_encode(const struct hello *h)
{
    struct doc_writer w = {0};
    doc_put_open(&w, NULL, '{');
    doc_put_text(&w, "job", h->job);
    doc_put_text(&w, "role", h->role);
    doc_put_id(&w, "id", h->id);
    doc_put_id(&w, "epoch", h->epoch);
    doc_put_number(&w, "chunk_bytes", h->chunk_bytes);
    doc_put_number(&w, "loop", h->loop);
    doc_put_bytes(&w, "nonce", h->nonce, sizeof h->nonce);
    doc_put_close(&w, '}');
    return doc_put_done(&w);
}

int hello_decode(const char *text, size_t size, struct hello *ret, char *err)
{
    struct doc_reader r;
    struct doc_node n;
    struct hello h = {0};
    doc_open(&r, "hello", text, size, DOC_SMALL_MAX, err, &n);
    doc_get_text(&n, "job", h.job, sizeof h.job, 1);
    uint32_t word = doc_get_word(&n, "role", role_words, 3);
    str_copy(h.role, sizeof h.role, role_words[word]);
    bool nobody = word == 2;
    h.id = doc_get_id(&n, "id", nobody ? 0 : 1, nobody ? 0 : UINT64_MAX);
    h.epoch = doc_get_id(&n, "epoch", 0, UINT64_MAX);
    h.chunk_bytes = doc_get_number(&n, "chunk_bytes", 0, CHUNK_BYTES_MAX);
    if (h.chunk_bytes && (h.chunk_bytes < CHUNK_BYTES_MIN || h.chunk_bytes % 8))
        doc_fail(&n, "chunk_bytes", "%u is neither 0 nor a multiple of 8 from %d on", h.chunk_bytes, CHUNK_BYTES_MIN);
    if (doc_has(&n, "loop"))
        h.loop = doc_get_number(&n, "loop", 0, LOOPS_MAX - 1);
    doc_get_bytes(&n, "nonce", h.nonce, sizeof h.nonce);
    int rc = doc_close(&r);
    if (rc == 0)
        *ret = h;
    return rc;
}

char *proof_encode(const struct proof_doc *p)
{
    struct doc_writer w = {0};
    doc_put_open(&w, NULL, '{');
    doc_put_id(&w, "id", p->id);
    doc_put_id(&w, "epoch", p->epoch);
    doc_put_bytes(&w, "nonce", p->nonce, sizeof p->nonce);
    doc_put_bytes(&w, "proof", p->proof, sizeof p->proof);
    doc_put_close(&w, '}');
    return doc_put_done(&w);
}

int proof_decode(const char *text, size_t size, struct proof_doc *ret, char *err)
{
    struct doc_reader r;
    struct doc_node n;
    struct proof_doc p = {0};
    doc_open(&r, "proof", text, size, DOC_SMALL_MAX, err, &n);
    p.id = doc_get_id(&n, "id", 0, UINT64_MAX);
    p.epoch = doc_get_id(&n, "epoch", 0, UINT64_MAX);
    doc_get_bytes(&n, "nonce", p.nonce, sizeof p.nonce);
    doc_get_bytes(&n, "proof", p.proof, sizeof p.proof);
    int rc = doc_close(&r);
    if (rc == 0)
        *ret = p;
    return rc;
}
