#include "net/auth.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/mem.h"
#include "wire/frame.h"

static const char wrong_token[] = "the token is not this job's";

struct message {
    uint8_t data[512];
    size_t size;
};

static void put(struct message *m, const void *data, size_t size)
{
    CHECK(size <= sizeof m->data - m->size);
    memcpy(m->data + m->size, data, size);
    m->size += size;
}

static void put_u64(struct message *m, uint64_t v)
{
    uint8_t b[8];
    for (int i = 0; i < 8; i++)
        b[i] = (uint8_t)(v >> (8 * i));
    put(m, b, sizeof b);
}

/* With its length, so that no two lists of strings give the same bytes. */
static void put_string(struct message *m, const char *s)
{
    put_u64(m, strlen(s));
    put(m, s, strlen(s));
}

static void prove(const struct auth *a, enum auth_side prover, uint8_t out[PROOF_BYTES])
{
    const struct hello *connector = a->side == AUTH_CONNECTOR ? &a->self : &a->peer;
    const struct hello *listener = a->side == AUTH_CONNECTOR ? &a->peer : &a->self;
    struct message m = {.size = 0};
    put_string(&m, prover == AUTH_CONNECTOR ? "keepstep 1 connector" : "keepstep 1 listener");
    put_string(&m, connector->job);
    put_string(&m, connector->role);
    put_u64(&m, connector->id);
    put_u64(&m, listener->id);
    put(&m, connector->nonce, NONCE_BYTES);
    put(&m, listener->nonce, NONCE_BYTES);
    put_u64(&m, connector->chunk_bytes);
    unsigned size = 0;
    CHECK(HMAC(EVP_sha256(), a->token, (int)strlen(a->token), m.data, m.size, out, &size));
    CHECK(size == PROOF_BYTES);
}

static char *proof_of_self(const struct auth *a)
{
    struct proof_doc p = {.id = a->self.id, .epoch = a->self.epoch};
    memcpy(p.nonce, a->self.nonce, NONCE_BYTES);
    prove(a, a->side, p.proof);
    return proof_encode(&p);
}

static bool proof_is_right(const struct auth *a, const struct proof_doc *p)
{
    uint8_t want[PROOF_BYTES];
    prove(a, a->side == AUTH_CONNECTOR ? AUTH_LISTENER : AUTH_CONNECTOR, want);
    return CRYPTO_memcmp(want, p->proof, PROOF_BYTES) == 0;
}

void auth_init(struct auth *a, enum auth_side side, const struct hello *self, const char *token,
               struct auth_reply *ret_reply)
{
    memset(a, 0, sizeof *a);
    a->side = side;
    a->state = side == AUTH_CONNECTOR ? AUTH_AT_CHALLENGE : AUTH_AT_HELLO;
    a->self = *self;
    a->token = token;
    *ret_reply = (struct auth_reply){0};
    if (side == AUTH_CONNECTOR)
        *ret_reply = (struct auth_reply){FRAME_HELLO, hello_encode(self)};
}

static int at_hello(struct auth *a, const char *doc, size_t size, struct auth_reply *ret_reply, char *err)
{
    struct hello h;
    int rc = hello_decode(doc, size, &h, err);
    if (rc)
        return rc;
    if (strcmp(h.job, a->self.job)) {
        snprintf(err, ERR_TEXT, "there is no job '%s' at this address", h.job);
        return KS_ENOENT;
    }
    if (h.chunk_bytes != a->self.chunk_bytes) {
        snprintf(err, ERR_TEXT, "this port is for chunk_bytes %u, the peer has %u", a->self.chunk_bytes, h.chunk_bytes);
        return KS_EINVAL;
    }
    if (a->accept) {
        rc = a->accept(a->accept_arg, &h, err);
        if (rc)
            return rc;
    }
    a->peer = h;
    a->state = AUTH_AT_AUTH;
    *ret_reply = (struct auth_reply){FRAME_CHALLENGE, proof_of_self(a)};
    return 0;
}

static int at_challenge(struct auth *a, const char *doc, size_t size, struct auth_reply *ret_reply, char *err)
{
    struct proof_doc p;
    int rc = proof_decode(doc, size, &p, err);
    if (rc)
        return rc;
    a->peer = (struct hello){.id = p.id, .epoch = p.epoch, .chunk_bytes = a->self.chunk_bytes};
    memcpy(a->peer.job, a->self.job, sizeof a->peer.job);
    memcpy(a->peer.role, "server", sizeof "server");
    memcpy(a->peer.nonce, p.nonce, NONCE_BYTES);
    if (!proof_is_right(a, &p)) {
        snprintf(err, ERR_TEXT, "%s", wrong_token);
        return KS_EAUTH;
    }
    a->state = AUTH_AT_WELCOME;
    *ret_reply = (struct auth_reply){FRAME_AUTH, proof_of_self(a)};
    return 0;
}

static int at_auth(struct auth *a, const char *doc, size_t size, struct auth_reply *ret_reply, char *err)
{
    struct proof_doc p;
    int rc = proof_decode(doc, size, &p, err);
    if (rc)
        return rc;
    if (p.id != a->peer.id || !proof_is_right(a, &p)) {
        snprintf(err, ERR_TEXT, "%s", wrong_token);
        return KS_EAUTH;
    }
    a->peer.epoch = p.epoch;
    a->state = AUTH_OPEN;
    *ret_reply = (struct auth_reply){FRAME_WELCOME, NULL};
    return 0;
}

int auth_step(struct auth *a, uint8_t type, const char *doc, size_t size, struct auth_reply *ret_reply, char *err)
{
    *ret_reply = (struct auth_reply){0};
    if (a->state == AUTH_AT_HELLO && type == FRAME_HELLO)
        return at_hello(a, doc, size, ret_reply, err);
    if (a->state == AUTH_AT_CHALLENGE && type == FRAME_CHALLENGE)
        return at_challenge(a, doc, size, ret_reply, err);
    if (a->state == AUTH_AT_AUTH && type == FRAME_AUTH)
        return at_auth(a, doc, size, ret_reply, err);
    if (a->state == AUTH_AT_WELCOME && type == FRAME_WELCOME && size == 0) {
        a->state = AUTH_OPEN;
        return 0;
    }
    snprintf(err, ERR_TEXT, "%s out of turn in the handshake", frame_type_name(type));
    return KS_EPROTO;
}
