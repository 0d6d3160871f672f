/* frame.h - what goes over a connection: a 64-byte little-endian header and a payload.
 *
 *  off size field
 *    0   2  magic 0x534b ("KS")        2   1  version        3  1  type
 *    4   1  flags                      5   1  dtype          6  2  status (negated KS_E*)
 *    8   4  CRC-32C of the header with this field 0
 *   12   4  CRC-32C of the payload, when FRAME_CRC is set
 *   16   8  payload length in bytes
 *   24   8  tensor (hash of its name; 0: none)
 *   32   8  step (two's complement; -1 is "before the first step")
 *   40   4  chunk                     44   4  seq (occurrence; async: push number of tensor and member)
 *   48   4  epoch of the sender's view, low 32 bits are enough: views differ by far less
 *   52   4  weight, f32
 *   56   8  version: of the value (epoch << 32 | n), or a request number in control frames
 *
 * Pure functions over caller's memory; no allocation. */
#ifndef WIRE_FRAME_H
#define WIRE_FRAME_H

#include <stddef.h>
#include <stdint.h>

enum {
    FRAME_SIZE = 64,
    FRAME_MAGIC = 0x534b,
    FRAME_VERSION = 1,
    FRAME_CONTROL_MAX = 16 << 20,     /* bytes of a control document */
    CHUNK_BYTES_MIN = 64,
    CHUNK_BYTES_MAX = 64 << 20,
};

/* Never renumber. The comment says who sends it, what the payload is, and which fields count. */
enum frame_type {
    FRAME_HELLO = 1,   /* connector: JSON hello (wire/doc.h) */
    FRAME_CHALLENGE,   /* listener: JSON, its nonce and proof */
    FRAME_AUTH,        /* connector: JSON, its proof */
    FRAME_WELCOME,     /* listener: empty */
    FRAME_BYE,         /* either: text, why the connection is closed; status */
    FRAME_PING,        /* either, on control connections */
    FRAME_PONG,

    FRAME_DECLARE = 16, /* member: JSON tensor spec; tensor, version = request number */
    FRAME_DECLARED,     /* server: status, version = request number, flags FRAME_INITIALISED; text on error */
    FRAME_INIT,         /* member: chunk bytes of the first value; tensor, chunk. Empty + chunk = ~0: claim */
    FRAME_INITED,       /* server: tensor, chunk, status; chunk ~0: answer to a claim (KS_OK granted, KS_EEXIST done) */
    FRAME_PUSH,         /* member: chunk bytes (or none: nothing to add); tensor chunk step seq weight flags */
    FRAME_DONE,         /* member: step, flags FRAME_AGAIN/FRAME_READER; payload: see struct done_head */
    FRAME_PULL,         /* member: tensor chunk step; seq = request number of the member */
    FRAME_CLOCK,        /* member, async/SSP: step = its clock; payload as FRAME_DONE's settings */
    FRAME_RESULT,       /* server: chunk bytes; tensor chunk step version status */
    FRAME_COMPLETE,     /* server: step; payload: u16 shard numbers that completed it */
    FRAME_NEED,         /* server: step; payload: array of struct chunk_ref it lacks of this member */
    FRAME_ACK,          /* server, async/SSP: tensor chunk seq status version */
    FRAME_VALUE,        /* server, answer to PULL: chunk bytes; tensor chunk step seq version */
    FRAME_FENCED,       /* server: you are not in the committed view of `epoch` */
    FRAME_REFUSED,      /* server: tensor chunk step seq status; this frame changed nothing */

    /* Between servers. Primary -> holder on the connection that the primary made; answers go back on the same. */
    FRAME_IMAGE = 48,  /* tensor chunk step version, seq = item number; value or gradient bytes, state bytes, image trailer */
    FRAME_IMAGE_ACK,   /* tensor chunk seq; status KS_EAGAIN: the base of a gradient is not here, send all of it */
    FRAME_MARK,        /* tensor = shard, step = complete, seq = item number; payload: shard record, settings */
    FRAME_MARK_ACK,    /* tensor = shard, seq */
    FRAME_HAVE,        /* joiner -> primary: tensor = shard; payload: what it holds (struct have_entry) */
    FRAME_SYNC_END,    /* tensor = shard: you have everything */
    FRAME_SYNC_OK,     /* joiner -> primary: tensor = shard */

    /* Control connections. All payloads are JSON documents of wire/doc.h. */
    FRAME_JOIN = 80,   /* member -> controller: struct join_doc */
    FRAME_LEAVE,       /* member -> controller: step = last step finished */
    FRAME_VIEW,        /* server -> anyone: struct view */
    FRAME_PREPARE,     /* controller -> node: struct prepare */
    FRAME_REPORT,      /* node -> controller: struct report */
    FRAME_SUSPECT,     /* node -> controller: tensor = id of the suspect; text: why */
    FRAME_MODE,        /* member -> controller: JSON mode request */
    FRAME_STATUS,      /* anyone -> server: version = request number */
    FRAME_STATUS_REPLY,/* server: JSON */
    FRAME_STOP,        /* operator -> controller: end the job, text: why */
    FRAME_DRAIN,       /* server, operator -> controller: tensor = server that is to give everything away; 0: the sender */
    FRAME_SYNCED,      /* server -> controller: primary of shard `chunk`, joiner `tensor` has everything */
    FRAME_TYPE_MAX = 95,
};

enum frame_flag {
    FRAME_CRC = 1,          /* the payload's CRC is set */
    FRAME_WANT = 2,         /* PUSH: send me the result */
    FRAME_AGAIN = 4,        /* DONE: re-send what was released */
    FRAME_READER = 8,       /* DONE: a joiner reads step join-1 */
    FRAME_INITIALISED = 16, /* DECLARED: the tensor has its first value */
    FRAME_GRADIENT = 32,    /* IMAGE: the bytes are the reduced gradient; the holder applies it to the version before */
    FRAME_BEFORE = 64,      /* IMAGE: this is the version before one that may be undone (catching up) */
};

struct frame_header {
    uint8_t type, flags, dtype;
    int16_t status;          /* KS_E*, 0 or negative */
    uint32_t payload_crc;
    uint64_t len;
    uint64_t tensor;
    int64_t step;
    uint32_t chunk, seq, epoch;
    float weight;
    uint64_t version;
};

/* Writes FRAME_SIZE bytes. */
void frame_encode(const struct frame_header *h, uint8_t *out);
/* 0, or KS_EPROTO (magic, checksum, type, length over what the type allows, dtype unknown, step
 * below -1, weight not finite or negative), KS_EVERSION. *ret_h is untouched on failure.
 * chunk_bytes: the job's; bounds the payload of chunk frames (f64 etc. included, it is bytes). */
int frame_decode(const uint8_t *in, uint32_t chunk_bytes, struct frame_header *ret_h);
const char *frame_type_name(unsigned type);
/* CRC-32C (Castagnoli), hardware when there is SSE4.2. Start with crc 0. */
uint32_t crc32c(uint32_t crc, const void *data, size_t size);

/* ---- binary payloads, little endian; decoders return KS_EPROTO on any malformed byte ---- */

struct chunk_ref {
    uint64_t tensor;
    uint32_t chunk;
};
size_t chunk_refs_size(size_t n);
void chunk_refs_encode(const struct chunk_ref *refs, size_t n, uint8_t *out);
/* Number of refs in a payload of `size` bytes, or KS_EPROTO. */
int64_t chunk_refs_count(size_t size);
void chunk_ref_decode(const uint8_t *in, size_t i, struct chunk_ref *ret);

/* DONE and CLOCK carry: u32 number of tensors, u32 number of settings, then the tensors' hashes
 * (u64 each; none in CLOCK), then settings of SETTING_SIZE bytes: hyper-parameters that this
 * member changes, in force from `from_step` on. */
enum { SETTING_SIZE = 8 + 8 + 8 + 4 + 4 };
struct setting {
    int64_t from_step;
    uint64_t group;       /* hash of the parameter group's name */
    double value;
    uint32_t option;      /* enum optim_option of server/optim.h */
};
struct done_head {
    uint32_t ntensors, nsettings;
    const uint8_t *tensors, *settings;    /* into the payload */
};
size_t done_size(uint32_t ntensors, uint32_t nsettings);
void done_encode(const uint64_t *tensors, uint32_t ntensors, const struct setting *settings,
                 uint32_t nsettings, uint8_t *out);
int done_decode(const uint8_t *in, size_t size, struct done_head *ret);
uint64_t done_tensor(const struct done_head *d, uint32_t i);
void done_setting(const struct done_head *d, uint32_t i, struct setting *ret);

#endif
