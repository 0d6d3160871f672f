/* Any bytes, cut anywhere, through the receiver: no memory outside what was given, and the same frames however the
 * stream was cut. Odd inputs get their header checksums repaired first, so that what lies behind them is reached. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/rng.h"
#include "net/receive.h"
#include "wire/doc.h"

enum { CHUNK = 1 << 16, SINK_MAX = 1 << 20 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void repair(uint8_t *data, size_t size)
{
    for (size_t at = 0; size - at >= FRAME_SIZE;) {
        uint8_t *h = data + at;
        uint64_t len = 0;
        memcpy(&len, h + 16, 3);
        h[0] = FRAME_MAGIC & 0xff;
        h[1] = FRAME_MAGIC >> 8;
        h[2] = FRAME_VERSION;
        len %= 300;
        memset(h + 16, 0, 8);
        memcpy(h + 16, &len, 2);
        memset(h + 8, 0, 4);
        uint32_t crc = crc32c(0, h, FRAME_SIZE);
        memcpy(h + 8, &crc, 4);
        at += FRAME_SIZE;
        at += len < size - at ? len : size - at;
    }
}

/* Returns a hash over the frames that came out and how it ended. */
static uint64_t run(const uint8_t *data, size_t size, uint64_t seed)
{
    static uint8_t stage[RECEIVE_STAGE];
    static uint8_t *sink;
    struct rng rng = {seed};
    struct receive r;
    char err[ERR_TEXT];
    uint64_t hash = 0;
    size_t at = 0;
    if (!sink)
        sink = malloc(SINK_MAX);
    receive_init(&r, stage, CHUNK);
    r.own_only = size && (data[0] & 2);
    for (;;) {
        int rc = receive_next(&r, err);
        if (rc < 0)
            return hash_mix(hash + (uint64_t)rc);
        if (rc == RECEIVE_SINK) {
            receive_sink(&r, r.head.len <= SINK_MAX && (r.head.seq & 1) == 0 ? sink : NULL);
        } else if (rc == RECEIVE_FRAME) {
            hash = hash_mix(hash + r.head.type + r.head.len * 256 + r.head.tensor);
            if (r.target)
                hash = hash_mix(hash + hash_bytes(r.target, r.head.len));
        } else {
            struct iovec iov[2];
            size_t space;
            int n = receive_space(&r, iov, &space);
            size_t give = size - at < space ? size - at : space;
            if (seed && give > 1)
                give = 1 + rng_below(&rng, give);
            if (give == 0)
                return hash;
            size_t first = give < iov[0].iov_len ? give : iov[0].iov_len;
            memcpy(iov[0].iov_base, data + at, first);
            if (n == 2)
                memcpy(iov[1].iov_base, data + at + first, give - first);
            at += give;
            receive_added(&r, give);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size + 1);
    memcpy(copy, data, size);
    if (size && (data[size - 1] & 1))
        repair(copy, size);
    uint64_t whole = run(copy, size, 0);
    CHECK(run(copy, size, 1 + size) == whole);
    CHECK(run(copy, size, 77) == whole);
    free(copy);
    return 0;
}
