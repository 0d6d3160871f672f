#include "net/receive.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "wire/doc.h"

/* Behind a big payload most likely comes another one: take its header and little more, the rest of it can then
 * be read straight into place. */
enum { STAGE_BEHIND_BIG = 4096 };

void receive_init(struct receive *r, uint8_t *stage, uint32_t chunk_bytes)
{
    memset(r, 0, sizeof *r);
    r->stage = stage;
    r->chunk_bytes = chunk_bytes;
    r->own_only = true;
}

static void take(struct receive *r, const uint8_t *from, size_t size, bool in_place)
{
    if (r->target && !in_place)
        memcpy(r->target + r->got, from, size);
    if (r->head.flags & FRAME_CRC)
        r->crc = crc32c(r->crc, from, size);
    r->got += size;
}

static int next_header(struct receive *r, char *err)
{
    if (r->end - r->begin < FRAME_SIZE)
        return RECEIVE_BYTES;
    int rc = frame_decode(r->stage + r->begin, r->chunk_bytes, &r->head);
    if (rc) {
        snprintf(err, ERR_TEXT,
                 rc == KS_EVERSION ? "the peer speaks another version of the protocol" : "a frame header is malformed");
        return rc;
    }
    bool own = r->head.type < RECEIVE_OWN_TYPES;
    if (r->own_only && !own) {
        snprintf(err, ERR_TEXT, "%s before the handshake is complete", frame_type_name(r->head.type));
        return KS_EPROTO;
    }
    if (own && r->head.len > RECEIVE_OWN_MAX) {
        snprintf(err, ERR_TEXT, "%s of %llu bytes, at most %d are allowed", frame_type_name(r->head.type),
                 (unsigned long long)r->head.len, RECEIVE_OWN_MAX);
        return KS_EPROTO;
    }
    r->begin += FRAME_SIZE;
    r->target = NULL;
    r->got = 0;
    r->crc = 0;
    r->state = r->head.len ? RECEIVE_AT_SINK : RECEIVE_DONE;
    return r->head.len ? RECEIVE_SINK : RECEIVE_FRAME;
}

static int next_payload(struct receive *r, char *err)
{
    uint64_t rest = r->head.len - r->got;
    size_t here = r->end - r->begin;
    size_t n = here < rest ? here : (size_t)rest;
    if (n) {
        take(r, r->stage + r->begin, n, false);
        r->begin += n;
    }
    if (r->got < r->head.len)
        return RECEIVE_BYTES;
    if ((r->head.flags & FRAME_CRC) && r->crc != r->head.payload_crc) {
        snprintf(err, ERR_TEXT, "the payload of %s has a wrong checksum", frame_type_name(r->head.type));
        return KS_ECORRUPT;
    }
    r->state = RECEIVE_DONE;
    return RECEIVE_FRAME;
}

int receive_next(struct receive *r, char *err)
{
    CHECK(r->state != RECEIVE_AT_SINK);
    if (r->state == RECEIVE_IN_PAYLOAD)
        return next_payload(r, err);
    r->state = RECEIVE_IN_HEADER;
    return next_header(r, err);
}

void receive_sink(struct receive *r, void *target)
{
    CHECK(r->state == RECEIVE_AT_SINK);
    r->target = target;
    r->state = RECEIVE_IN_PAYLOAD;
}

int receive_space(struct receive *r, struct iovec iov[2], size_t *ret_size)
{
    /* At most a part of a header is left in the stage here. */
    if (r->begin) {
        memmove(r->stage, r->stage + r->begin, r->end - r->begin);
        r->end -= r->begin;
        r->begin = 0;
    }
    struct iovec stage = {r->stage + r->end, RECEIVE_STAGE - r->end};
    CHECK(stage.iov_len > 0);
    if (r->state != RECEIVE_IN_PAYLOAD || !r->target) {
        iov[0] = stage;
        *ret_size = stage.iov_len;
        return 1;
    }
    uint64_t rest = r->head.len - r->got;
    iov[0].iov_base = r->target + r->got;
    if (rest >= RECEIVE_READ_MAX) {
        *ret_size = iov[0].iov_len = RECEIVE_READ_MAX;
        return 1;
    }
    if (r->head.len >= RECEIVE_STAGE)
        stage.iov_len = STAGE_BEHIND_BIG;
    iov[0].iov_len = (size_t)rest;
    iov[1] = stage;
    *ret_size = iov[0].iov_len + stage.iov_len;
    return 2;
}

void receive_added(struct receive *r, size_t size)
{
    if (r->state == RECEIVE_IN_PAYLOAD && r->target) {
        uint64_t rest = r->head.len - r->got;
        size_t n = size < rest ? size : (size_t)rest;
        take(r, r->target + r->got, n, true);
        size -= n;
    }
    r->end += size;
    CHECK(r->end <= RECEIVE_STAGE);
}
