/* Headers and binary payloads. The header is tried as it is, and once more with the magic, version and checksum put
 * right, since no mutation would find those. What is accepted must encode to the same bytes. */
#include <stdint.h>
#include <string.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/mem.h"
#include "wire/bytes.h"
#include "wire/dtype.h"
#include "wire/frame.h"

enum { CHUNK = 4096 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_header(const uint8_t *in)
{
    struct frame_header h;
    uint8_t out[FRAME_SIZE];
    int rc = frame_decode(in, CHUNK, &h);
    CHECK(rc == 0 || rc == KS_EPROTO || rc == KS_EVERSION);
    if (rc)
        return;
    CHECK(h.step >= -1 && h.weight >= 0 && h.status <= 0 && h.len <= 16 * CHUNK + FRAME_CONTROL_MAX);
    CHECK(h.dtype == 0 || dtype_size((enum dtype)h.dtype) > 0);
    CHECK(strcmp(frame_type_name(h.type), "?") != 0);
    frame_encode(&h, out);
    CHECK(memcmp(in, out, FRAME_SIZE) == 0);
}

static void check_header_repaired(const uint8_t *in)
{
    uint8_t fixed[FRAME_SIZE];
    memcpy(fixed, in, FRAME_SIZE);
    put_u16(fixed, FRAME_MAGIC);
    fixed[2] = FRAME_VERSION;
    put_u32(fixed + 8, 0);
    put_u32(fixed + 8, crc32c(0, fixed, FRAME_SIZE));
    check_header(fixed);
}

static void check_done(const uint8_t *in, size_t size)
{
    struct done_head d;
    if (done_decode(in, size, &d) != 0)
        return;
    uint64_t *tensors = mem_alloc(d.ntensors * sizeof *tensors);
    struct setting *settings = mem_alloc(d.nsettings * sizeof *settings);
    uint8_t *out = mem_alloc(size);
    for (uint32_t i = 0; i < d.ntensors; i++)
        tensors[i] = done_tensor(&d, i);
    for (uint32_t i = 0; i < d.nsettings; i++)
        done_setting(&d, i, &settings[i]);
    CHECK(done_size(d.ntensors, d.nsettings) == size);
    done_encode(tensors, d.ntensors, settings, d.nsettings, out);
    CHECK(memcmp(in, out, size) == 0);
    mem_free(tensors);
    mem_free(settings);
    mem_free(out);
}

static void check_refs(const uint8_t *in, size_t size)
{
    int64_t n = chunk_refs_count(size);
    for (int64_t i = 0; i < n; i++) {
        struct chunk_ref ref;
        uint8_t out[12];
        chunk_ref_decode(in, (size_t)i, &ref);
        chunk_refs_encode(&ref, 1, out);
        CHECK(memcmp(out, in + 12 * i, 12) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size >= FRAME_SIZE) {
        check_header(data);
        check_header_repaired(data);
    }
    check_done(data, size);
    check_refs(data, size);
    return 0;
}
