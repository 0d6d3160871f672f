#include "wire/frame.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/keepstep_err.h"
#include "wire/bytes.h"
#include "wire/dtype.h"

enum {
    AT_MAGIC = 0,
    AT_VERSION = 2,
    AT_TYPE = 3,
    AT_FLAGS = 4,
    AT_DTYPE = 5,
    AT_STATUS = 6,
    AT_HEADER_CRC = 8,
    AT_PAYLOAD_CRC = 12,
    AT_LEN = 16,
    AT_TENSOR = 24,
    AT_STEP = 32,
    AT_CHUNK = 40,
    AT_SEQ = 44,
    AT_EPOCH = 48,
    AT_WEIGHT = 52,
    AT_VALUE_VERSION = 56,
};

enum {
    HANDSHAKE_MAX = 4096, /* from a peer that has not proved anything yet */
    TEXT_MAX = 4096,
    SPEC_MAX = 1 << 16,
    IMAGE_CHUNKS_MAX = 16, /* a chunk's image: its value, optimizer slots and sums, all widened at most */
    IMAGE_BYTES_MAX = 1 << 30,
    CHUNK_REF_SIZE = 12,
    DONE_FIXED = 8,
};

/* How long a type's payload may be. */
enum payload {
    PAYLOAD_EMPTY,
    PAYLOAD_HANDSHAKE,
    PAYLOAD_TEXT,
    PAYLOAD_SPEC,
    PAYLOAD_CHUNK,
    PAYLOAD_CONTROL,
    PAYLOAD_IMAGE
};

static const struct frame_kind {
    const char *name;
    enum payload payload;
} kinds[FRAME_TYPE_MAX + 1] = {
    [FRAME_HELLO] = {"hello", PAYLOAD_HANDSHAKE},
    [FRAME_CHALLENGE] = {"challenge", PAYLOAD_HANDSHAKE},
    [FRAME_AUTH] = {"auth", PAYLOAD_HANDSHAKE},
    [FRAME_WELCOME] = {"welcome", PAYLOAD_EMPTY},
    [FRAME_BYE] = {"bye", PAYLOAD_TEXT},
    [FRAME_PING] = {"ping", PAYLOAD_EMPTY},
    [FRAME_PONG] = {"pong", PAYLOAD_EMPTY},
    [FRAME_DECLARE] = {"declare", PAYLOAD_SPEC},
    [FRAME_DECLARED] = {"declared", PAYLOAD_TEXT},
    [FRAME_INIT] = {"init", PAYLOAD_CHUNK},
    [FRAME_INITED] = {"inited", PAYLOAD_TEXT},
    [FRAME_PUSH] = {"push", PAYLOAD_CHUNK},
    [FRAME_DONE] = {"done", PAYLOAD_CONTROL},
    [FRAME_PULL] = {"pull", PAYLOAD_EMPTY},
    [FRAME_CLOCK] = {"clock", PAYLOAD_CONTROL},
    [FRAME_RESULT] = {"result", PAYLOAD_CHUNK},
    [FRAME_COMPLETE] = {"complete", PAYLOAD_CONTROL},
    [FRAME_NEED] = {"need", PAYLOAD_CONTROL},
    [FRAME_ACK] = {"ack", PAYLOAD_TEXT},
    [FRAME_VALUE] = {"value", PAYLOAD_CHUNK},
    [FRAME_FENCED] = {"fenced", PAYLOAD_TEXT},
    [FRAME_REFUSED] = {"refused", PAYLOAD_TEXT},
    [FRAME_IMAGE] = {"image", PAYLOAD_IMAGE},
    [FRAME_IMAGE_ACK] = {"image_ack", PAYLOAD_CONTROL},
    [FRAME_MARK] = {"mark", PAYLOAD_CONTROL},
    [FRAME_MARK_ACK] = {"mark_ack", PAYLOAD_CONTROL},
    [FRAME_HAVE] = {"have", PAYLOAD_CONTROL},
    [FRAME_SYNC_END] = {"sync_end", PAYLOAD_CONTROL},
    [FRAME_SYNC_OK] = {"sync_ok", PAYLOAD_CONTROL},
    [FRAME_JOIN] = {"join", PAYLOAD_CONTROL},
    [FRAME_LEAVE] = {"leave", PAYLOAD_EMPTY},
    [FRAME_VIEW] = {"view", PAYLOAD_CONTROL},
    [FRAME_PREPARE] = {"prepare", PAYLOAD_CONTROL},
    [FRAME_REPORT] = {"report", PAYLOAD_CONTROL},
    [FRAME_SUSPECT] = {"suspect", PAYLOAD_TEXT},
    [FRAME_MODE] = {"mode", PAYLOAD_CONTROL},
    [FRAME_STATUS] = {"status", PAYLOAD_EMPTY},
    [FRAME_STATUS_REPLY] = {"status_reply", PAYLOAD_CONTROL},
    [FRAME_STOP] = {"stop", PAYLOAD_TEXT},
    [FRAME_DRAIN] = {"drain", PAYLOAD_EMPTY},
    [FRAME_SYNCED] = {"synced", PAYLOAD_EMPTY},
};

/* Never beyond the largest buffer of base/buf.h, which receives it. */
static uint64_t image_max(uint32_t chunk_bytes)
{
    uint64_t bytes = (uint64_t)chunk_bytes * IMAGE_CHUNKS_MAX + FRAME_CONTROL_MAX;
    if (chunk_bytes == 0)
        return 0;
    return bytes < IMAGE_BYTES_MAX ? bytes : IMAGE_BYTES_MAX;
}

static uint64_t payload_max(enum payload payload, uint32_t chunk_bytes)
{
    switch (payload) {
    case PAYLOAD_EMPTY:
        return 0;
    case PAYLOAD_HANDSHAKE:
        return HANDSHAKE_MAX;
    case PAYLOAD_TEXT:
        return TEXT_MAX;
    case PAYLOAD_SPEC:
        return SPEC_MAX;
    case PAYLOAD_CHUNK:
        return chunk_bytes;
    case PAYLOAD_CONTROL:
        return FRAME_CONTROL_MAX;
    case PAYLOAD_IMAGE:
        return image_max(chunk_bytes);
    }
    return 0;
}

const char *frame_type_name(unsigned type)
{
    return type <= FRAME_TYPE_MAX && kinds[type].name ? kinds[type].name : "?";
}

/* The checksum with its own field taken as 0. */
static uint32_t header_crc(const uint8_t *in)
{
    static const uint8_t zeros[4];
    uint32_t crc = crc32c(0, in, AT_HEADER_CRC);
    crc = crc32c(crc, zeros, sizeof zeros);
    return crc32c(crc, in + AT_PAYLOAD_CRC, FRAME_SIZE - AT_PAYLOAD_CRC);
}

void frame_encode(const struct frame_header *h, uint8_t *out)
{
    uint32_t weight;
    memcpy(&weight, &h->weight, sizeof weight);
    put_u16(out + AT_MAGIC, FRAME_MAGIC);
    out[AT_VERSION] = FRAME_VERSION;
    out[AT_TYPE] = h->type;
    out[AT_FLAGS] = h->flags;
    out[AT_DTYPE] = h->dtype;
    put_u16(out + AT_STATUS, (uint16_t)-h->status);
    put_u32(out + AT_PAYLOAD_CRC, h->payload_crc);
    put_u64(out + AT_LEN, h->len);
    put_u64(out + AT_TENSOR, h->tensor);
    put_u64(out + AT_STEP, (uint64_t)h->step);
    put_u32(out + AT_CHUNK, h->chunk);
    put_u32(out + AT_SEQ, h->seq);
    put_u32(out + AT_EPOCH, h->epoch);
    put_u32(out + AT_WEIGHT, weight);
    put_u64(out + AT_VALUE_VERSION, h->version);
    put_u32(out + AT_HEADER_CRC, header_crc(out));
}

static void header_read(const uint8_t *in, struct frame_header *h)
{
    uint32_t weight = get_u32(in + AT_WEIGHT);
    *h = (struct frame_header){
        .type = in[AT_TYPE],
        .flags = in[AT_FLAGS],
        .dtype = in[AT_DTYPE],
        .status = (int16_t)-get_u16(in + AT_STATUS),
        .payload_crc = get_u32(in + AT_PAYLOAD_CRC),
        .len = get_u64(in + AT_LEN),
        .tensor = get_u64(in + AT_TENSOR),
        .step = (int64_t)get_u64(in + AT_STEP),
        .chunk = get_u32(in + AT_CHUNK),
        .seq = get_u32(in + AT_SEQ),
        .epoch = get_u32(in + AT_EPOCH),
        .version = get_u64(in + AT_VALUE_VERSION),
    };
    memcpy(&h->weight, &weight, sizeof weight);
}

static bool header_valid(const struct frame_header *h, uint32_t chunk_bytes)
{
    if (h->type > FRAME_TYPE_MAX || !kinds[h->type].name)
        return false;
    if (h->len > payload_max(kinds[h->type].payload, chunk_bytes))
        return false;
    if (h->dtype && !dtype_size((enum dtype)h->dtype))
        return false;
    return h->status <= 0 && h->step >= -1 && isfinite(h->weight) && h->weight >= 0;
}

int frame_decode(const uint8_t *in, uint32_t chunk_bytes, struct frame_header *ret_h)
{
    struct frame_header h;
    if (get_u16(in + AT_MAGIC) != FRAME_MAGIC)
        return KS_EPROTO;
    /* Before the checksum: another version may keep it elsewhere. */
    if (in[AT_VERSION] != FRAME_VERSION)
        return KS_EVERSION;
    if (get_u32(in + AT_HEADER_CRC) != header_crc(in))
        return KS_EPROTO;
    header_read(in, &h);
    if (!header_valid(&h, chunk_bytes))
        return KS_EPROTO;
    *ret_h = h;
    return 0;
}

size_t chunk_refs_size(size_t n)
{
    return n * CHUNK_REF_SIZE;
}

void chunk_refs_encode(const struct chunk_ref *refs, size_t n, uint8_t *out)
{
    for (size_t i = 0; i < n; i++, out += CHUNK_REF_SIZE) {
        put_u64(out, refs[i].tensor);
        put_u32(out + 8, refs[i].chunk);
    }
}

int64_t chunk_refs_count(size_t size)
{
    return size % CHUNK_REF_SIZE ? KS_EPROTO : (int64_t)(size / CHUNK_REF_SIZE);
}

void chunk_ref_decode(const uint8_t *in, size_t i, struct chunk_ref *ret)
{
    in += i * CHUNK_REF_SIZE;
    *ret = (struct chunk_ref){get_u64(in), get_u32(in + 8)};
}

size_t done_size(uint32_t ntensors, uint32_t nsettings)
{
    return DONE_FIXED + (size_t)ntensors * 8 + (size_t)nsettings * SETTING_SIZE;
}

static void setting_encode(const struct setting *s, uint8_t *out)
{
    uint64_t value;
    memcpy(&value, &s->value, sizeof value);
    put_u64(out, (uint64_t)s->from_step);
    put_u64(out + 8, s->group);
    put_u64(out + 16, value);
    put_u32(out + 24, s->option);
    put_u32(out + 28, 0);
}

void done_encode(const uint64_t *tensors, uint32_t ntensors, const struct setting *settings, uint32_t nsettings,
                 uint8_t *out)
{
    put_u32(out, ntensors);
    put_u32(out + 4, nsettings);
    out += DONE_FIXED;
    for (uint32_t i = 0; i < ntensors; i++, out += 8)
        put_u64(out, tensors[i]);
    for (uint32_t i = 0; i < nsettings; i++, out += SETTING_SIZE)
        setting_encode(&settings[i], out);
}

static bool done_valid(const struct done_head *d)
{
    for (uint32_t i = 0; i < d->ntensors; i++) {
        if (done_tensor(d, i) == 0)
            return false;
    }
    for (uint32_t i = 0; i < d->nsettings; i++) {
        struct setting s;
        done_setting(d, i, &s);
        if (s.from_step < 0 || !isfinite(s.value) || get_u32(d->settings + (size_t)i * SETTING_SIZE + 28) != 0)
            return false;
    }
    return true;
}

int done_decode(const uint8_t *in, size_t size, struct done_head *ret)
{
    if (size < DONE_FIXED)
        return KS_EPROTO;
    struct done_head d = {.ntensors = get_u32(in), .nsettings = get_u32(in + 4), .tensors = in + DONE_FIXED};
    if (size != done_size(d.ntensors, d.nsettings))
        return KS_EPROTO;
    d.settings = d.tensors + (size_t)d.ntensors * 8;
    if (!done_valid(&d))
        return KS_EPROTO;
    *ret = d;
    return 0;
}

uint64_t done_tensor(const struct done_head *d, uint32_t i)
{
    return get_u64(d->tensors + (size_t)i * 8);
}

void done_setting(const struct done_head *d, uint32_t i, struct setting *ret)
{
    const uint8_t *in = d->settings + (size_t)i * SETTING_SIZE;
    uint64_t value = get_u64(in + 16);
    *ret = (struct setting){.from_step = (int64_t)get_u64(in), .group = get_u64(in + 8), .option = get_u32(in + 24)};
    memcpy(&ret->value, &value, sizeof value);
}
