/* Every decoder of control documents: the first byte ('0'..'9') says which, the rest is the text. What is accepted
 * must encode to a text that is accepted again and encodes to itself. */
#include <stdint.h>
#include <string.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "tests/unit/doc_again.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int (*const again[])(const char *text, size_t size, char **ret, char *err) = {
    again_job,    again_server, again_view,  again_join,  again_prepare,
    again_report, again_tensor, again_hello, again_proof, again_mode,
};

static void check_describe(const char *text, size_t size)
{
    struct tensor_spec s;
    char line[600], err[ERR_TEXT];
    if (tensor_decode(text, size, &s, err) != 0)
        return;
    CHECK(tensor_same(&s, &s));
    tensor_describe(&s, line, sizeof line);
    uint32_t chunks = tensor_chunks(&s, 4096);
    CHECK(chunks >= 1 && tensor_chunk_bytes(&s, chunks - 1, 4096) <= 4096);
    CHECK(tensor_bytes(&s) == 0 || tensor_chunk_bytes(&s, 0, 4096) > 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char err[ERR_TEXT] = "", *first = NULL, *second = NULL;
    if (size == 0)
        return 0;
    unsigned which = (uint8_t)(data[0] - '0') % (sizeof again / sizeof again[0]);
    const char *text = (const char *)data + 1;
    int rc = again[which](text, size - 1, &first, err);
    CHECK(rc == 0 || (rc == KS_EPROTO && err[0] && memchr(err, 0, sizeof err)));
    if (rc)
        return 0;
    CHECK(again[which](first, strlen(first), &second, err) == 0);
    CHECK(strcmp(first, second) == 0);
    if (again[which] == again_tensor)
        check_describe(text, size - 1);
    mem_free(first);
    mem_free(second);
    return 0;
}
