/* auth.h - the handshake: both sides prove that they know the job's token. Sans-IO.
 *
 *     connector                                listener
 *     HELLO  job role id epoch nonce     ->
 *                                        <-    CHALLENGE  id epoch nonce proof
 *     AUTH   id epoch nonce proof        ->
 *                                        <-    WELCOME
 *
 * A proof is HMAC-SHA-256, keyed with the token, over a label of the side, the job, the connector's role, both ids,
 * both nonces and the chunk size. The labels differ, so that nobody's proof can be played back to him. */
#ifndef NET_AUTH_H
#define NET_AUTH_H

#include "wire/doc.h"

enum auth_side { AUTH_CONNECTOR = 1, AUTH_LISTENER };
enum auth_state { AUTH_AT_HELLO, AUTH_AT_CHALLENGE, AUTH_AT_AUTH, AUTH_AT_WELCOME, AUTH_OPEN };

struct auth {
    enum auth_side side;
    enum auth_state state;
    const char *token;
    struct hello self, peer; /* peer.id is proven when state is AUTH_OPEN */
    /* Listener: 0, or KS_E* to refuse this hello with a line in err. NULL: everybody. */
    int (*accept)(void *arg, const struct hello *hello, char *err);
    void *accept_arg;
};
struct auth_reply {
    uint8_t type; /* FRAME_HELLO .. FRAME_WELCOME; 0: nothing to send */
    char *doc;    /* for mem_free; NULL: empty */
};

/* self->nonce must be fresh for every connection. A connector's reply is its HELLO. */
void auth_init(struct auth *a, enum auth_side side, const struct hello *self, const char *token,
               struct auth_reply *ret_reply);
/* A frame of the peer. 0, or KS_EPROTO, KS_EAUTH, KS_ENOENT (other job), KS_EINVAL, or what accept said, with a line
 * in err; then the connection has to be closed with FRAME_BYE. */
int auth_step(struct auth *a, uint8_t type, const char *doc, size_t size, struct auth_reply *ret_reply, char *err);

#endif
