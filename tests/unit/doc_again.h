/* doc_again.h - decode a document and encode what came out; for tests and fuzzers.
 *
 * Each returns the decoder's code; *ret (for mem_free) is set when that is 0. */
#ifndef TESTS_UNIT_DOC_AGAIN_H
#define TESTS_UNIT_DOC_AGAIN_H

#include "base/mem.h"
#include "wire/doc.h"

static int again_job(const char *text, size_t size, char **ret, char *err)
{
    struct job_doc d;
    int rc = job_decode(text, size, &d, err);
    if (rc == 0)
        *ret = job_encode(&d);
    return rc;
}

static int again_server(const char *text, size_t size, char **ret, char *err)
{
    struct server_doc d;
    int rc = server_decode(text, size, &d, err);
    if (rc == 0)
        *ret = server_encode(&d);
    return rc;
}

static int again_view(const char *text, size_t size, char **ret, char *err)
{
    struct view *d;
    int rc = view_decode(text, size, &d, err);
    if (rc == 0) {
        *ret = view_encode(d);
        view_free(d);
    }
    return rc;
}

static int again_join(const char *text, size_t size, char **ret, char *err)
{
    struct join_doc d;
    int rc = join_decode(text, size, &d, err);
    if (rc == 0)
        *ret = join_encode(&d);
    return rc;
}

static int again_prepare(const char *text, size_t size, char **ret, char *err)
{
    struct prepare d, copy;
    int rc = prepare_decode(text, size, &d, err);
    if (rc == 0) {
        prepare_copy(&copy, &d);
        prepare_done(&d);
        *ret = prepare_encode(&copy);
        prepare_done(&copy);
    }
    return rc;
}

static int again_report(const char *text, size_t size, char **ret, char *err)
{
    struct report d;
    int rc = report_decode(text, size, &d, err);
    if (rc == 0) {
        *ret = report_encode(&d);
        report_done(&d);
    }
    return rc;
}

static int again_tensor(const char *text, size_t size, char **ret, char *err)
{
    struct tensor_spec d;
    int rc = tensor_decode(text, size, &d, err);
    if (rc == 0)
        *ret = tensor_encode(&d);
    return rc;
}

static int again_hello(const char *text, size_t size, char **ret, char *err)
{
    struct hello d;
    int rc = hello_decode(text, size, &d, err);
    if (rc == 0)
        *ret = hello_encode(&d);
    return rc;
}

static int again_proof(const char *text, size_t size, char **ret, char *err)
{
    struct proof_doc d;
    int rc = proof_decode(text, size, &d, err);
    if (rc == 0)
        *ret = proof_encode(&d);
    return rc;
}

static int again_mode(const char *text, size_t size, char **ret, char *err)
{
    struct mode d;
    int rc = mode_decode(text, size, &d, err);
    if (rc == 0)
        *ret = mode_encode(&d);
    return rc;
}

#endif
