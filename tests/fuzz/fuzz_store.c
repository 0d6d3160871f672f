/* Bytes from a disk: values with their checksum, the format record, keepstep.server. The first byte chooses.
 *
 * LMDB's own pages are not fuzzed: LMDB trusts its file. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "storage/datadir.h"
#include "storage/store_record.h"
#include "storage/store_sum.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fuzz_value(const uint8_t *data, size_t size)
{
    const uint8_t *payload = NULL;
    size_t n = 0;
    int rc = store_value_check(data, size, &payload, &n);
    CHECK(rc == 0 || rc == KS_ECORRUPT);
    if (rc == 0)
        CHECK(payload == data + STORE_HEAD_BYTES && n == size - STORE_HEAD_BYTES);
    else
        CHECK(payload == NULL);
}

/* A value that is written must be read back, and no longer once a bit has changed. */
static void fuzz_round_trip(const uint8_t *data, size_t size)
{
    size_t cut = size / 3;
    struct store_op op = {.key = "k", .key_size = 1, .nsegments = 2};
    op.segment[0] = (struct store_segment){data, cut};
    op.segment[1] = (struct store_segment){data + cut, size - cut};
    size_t n = store_value_size(&op), payload_size;
    const uint8_t *payload;
    uint8_t *value = malloc(n);
    CHECK(value != NULL);
    store_value_write(&op, value);
    CHECK(store_value_check(value, n, &payload, &payload_size) == 0);
    CHECK(payload_size == size && (size == 0 || memcmp(payload, data, size) == 0));
    value[(size * 7 + 3) % n] ^= 0x10;
    CHECK(store_value_check(value, n, &payload, &payload_size) == KS_ECORRUPT);
    free(value);
}

static void fuzz_format(const uint8_t *data, size_t size)
{
    struct store_op op = {.key = "k", .key_size = 1, .nsegments = 1, .segment = {{data, size}}};
    char err[STORE_ERR_TEXT] = "";
    uint8_t *value = malloc(store_value_size(&op));
    CHECK(value != NULL);
    store_value_write(&op, value);
    int rc = store_format_check(value, store_value_size(&op), err);
    CHECK(rc == 0 || rc == KS_ECORRUPT || rc == KS_EVERSION);
    CHECK((rc == 0) == (size == 10 && memcmp(data, "keepstep 1", 10) == 0));
    CHECK((rc == 0) == (err[0] == '\0'));
    free(value);
}

static void fuzz_server_file(const uint8_t *data, size_t size)
{
    static struct datadir d;
    char err[STORE_ERR_TEXT] = "";
    memset(&d, 0, sizeof d);
    int rc = datadir_text_parse((const char *)data, size, &d, err);
    if (rc == 0)
        CHECK(d.loops >= 1 && d.loops <= DATADIR_LOOPS_MAX && d.nshards >= 1 && d.job[0] != '\0');
    else
        CHECK(err[0] != '\0' && d.loops == 0);
}

static void fuzz_key_text(const uint8_t *data, size_t size)
{
    char text[STORE_KEY_TEXT];
    store_key_text(data, size, text);
    CHECK(strlen(text) < sizeof text);
    for (const char *c = text; *c != '\0'; c++)
        CHECK(*c > ' ' && *c < 127);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const target[])(const uint8_t *, size_t) = {fuzz_value, fuzz_round_trip, fuzz_format,
                                                              fuzz_server_file, fuzz_key_text};
    if (size == 0)
        return 0;
    target[data[0] % (sizeof target / sizeof *target)](data + 1, size - 1);
    return 0;
}
