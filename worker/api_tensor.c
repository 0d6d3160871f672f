/* Registering and initialising tensors. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "worker/host.h"

static int spec_numbers(const struct ks_spec *in, struct tensor_spec *s)
{
    if (dtype_size((enum dtype)in->dtype) == 0)
        return job_error(KS_EINVAL, "tensor '%s': dtype is %d: wanted is KS_F32 .. KS_U8", s->name, (int)in->dtype);
    if (in->ndims > TENSOR_DIMS_MAX)
        return job_error(KS_EINVAL, "tensor '%s': ndims is %u, at most %d are allowed", s->name, in->ndims,
                         TENSOR_DIMS_MAX);
    uint64_t bytes = dtype_size((enum dtype)in->dtype);
    for (uint32_t i = 0; i < in->ndims; i++) {
        if (!in->dims[i] || __builtin_mul_overflow(bytes, in->dims[i], &bytes) || bytes > TENSOR_BYTES_MAX)
            return job_error(KS_EINVAL,
                             "tensor '%s': dims[%u] is %llu: wanted is 1 or more, and at most 2^50 bytes in all",
                             s->name, i, (unsigned long long)in->dims[i]);
        s->dim[i] = in->dims[i];
    }
    if ((unsigned)in->kind > KS_PARAM || (unsigned)in->op > KS_AVERAGE || (unsigned)in->finite > KS_FINITE_SKIP)
        return job_error(KS_EINVAL, "tensor '%s': kind %d, op %d or finite %d is none of the known ones", s->name,
                         (int)in->kind, (int)in->op, (int)in->finite);
    s->dtype = (enum dtype)in->dtype;
    s->ndims = in->ndims;
    bool param = in->kind == KS_PARAM;
    s->kind = param ? TENSOR_PARAM : TENSOR_REDUCE;
    s->op = in->op ? (enum tensor_op)in->op : param ? TENSOR_AVERAGE : TENSOR_SUM;
    s->finite = in->finite ? (enum finite_policy)in->finite : param ? FINITE_REJECT : FINITE_APPLY;
    return 0;
}

/* How many bytes of a name that is not plain text are. */
static size_t plain_prefix(const char *name)
{
    char part[TENSOR_NAME_MAX];
    size_t n = strlen(name);
    do {
        n--;
        memcpy(part, name, n);
        part[n] = 0;
    } while (n && !text_is_plain(part));
    return n;
}

static int spec_make(const char *name, const struct ks_spec *in, struct tensor_spec *s)
{
    memset(s, 0, sizeof *s);
    if (!name || !*name || str_copy(s->name, sizeof s->name, name))
        return job_error(KS_EINVAL, "a tensor's name has 1 to %d bytes", TENSOR_NAME_MAX - 1);
    if (!text_is_plain(name))
        return job_error(KS_EINVAL, "a tensor's name is UTF-8 without control characters; byte %zu of this one is not",
                         plain_prefix(name));
    if (!in)
        return job_error(KS_EINVAL, "tensor '%s': spec is NULL", name);
    int rc = spec_numbers(in, s);
    if (rc)
        return rc;
    const char *group = in->group ? in->group : "default";
    if (!*group || str_copy(s->group, sizeof s->group, group))
        return job_error(KS_EINVAL, "tensor '%s': group has 1 to %d bytes", name, NAME_MAX_BYTES - 1);
    if (s->kind == TENSOR_REDUCE && in->optimizer)
        return job_error(KS_EINVAL, "tensor '%s': only KS_PARAM has an optimizer", name);
    const char *optimizer = s->kind == TENSOR_REDUCE ? "" : in->optimizer ? in->optimizer : "add";
    if (str_copy(s->optimizer, sizeof s->optimizer, optimizer))
        return job_error(KS_EINVAL, "tensor '%s': the optimizer's text is too long", name);
    if (!text_is_plain(s->group) || !text_is_plain(s->optimizer))
        return job_error(KS_EINVAL, "tensor '%s': group or optimizer is not UTF-8 without control characters", name);
    s->id = tensor_id(name);
    return 0;
}

static struct ks_tensor *tensor_add(struct ks_job *j, const struct tensor_spec *s)
{
    struct ks_tensor *t = mem_alloc(sizeof *t);
    t->job = j;
    t->spec = *s;
    t->declaring = true;
    ARRAY_ROOM(j->tensor, j->ntensors, j->tensors_cap);
    j->tensor[j->ntensors++] = t;
    map_put(&j->tensor_by_id, s->id, t);
    return t;
}

static void tensor_remove(struct ks_tensor *t)
{
    struct ks_job *j = t->job;
    uint32_t i = 0;
    while (j->tensor[i] != t)
        i++;
    for (j->ntensors--; i < j->ntensors; i++)
        j->tensor[i] = j->tensor[i + 1];
    map_remove(&j->tensor_by_id, t->spec.id);
    mem_free(t);
    job_notify(j);
}

/* Fenced meanwhile: again, as the new member. */
static int declare(struct ks_tensor *t, struct waiter *w)
{
    struct ks_job *j = t->job;
    for (;;) {
        int rc = job_until_running(j, w);
        if (rc)
            return rc;
        struct client_event e = {.kind = CLIENT_DECLARE, .spec = &t->spec};
        struct ks_handle *h = handle_create(j);
        int status;
        op_submit(j, h, t, &e);
        handle_seal(h);
        job_flush(j, true);
        if (!handle_wait(h, w, &status)) {
            h->forget = true;
            return status;
        }
        uint32_t index = h->tensor;
        rc = handle_take(h);
        if (rc == KS_EFENCED)
            continue;
        t->index = index;
        t->ready = !rc;
        return rc;
    }
}

/* The tensor of this name that was registered here before, when nobody is at it; NULL: none. */
static int find(struct ks_job *j, const struct tensor_spec *s, struct waiter *w, struct ks_tensor **ret)
{
    char have[128], want[128];
    struct ks_tensor *t;
    while ((t = map_get(&j->tensor_by_id, s->id)) && t->declaring)
        if (!waiter_wait(w, j))
            return job_error(KS_ETIMEOUT, "tensor '%s': another thread is registering it", s->name);
    if (t && !tensor_same(&t->spec, s)) {
        tensor_describe(&t->spec, have, sizeof have);
        tensor_describe(s, want, sizeof want);
        return job_error(KS_EEXIST, "tensor '%s' is registered here as %s, not as %s", s->name, have, want);
    }
    *ret = t;
    return 0;
}

/* What is begun and cannot be waited for would be left behind. */
static int may_wait(const struct ks_job *j)
{
    return job_in_loop(j) ? job_error(KS_ESTATE, "a callback must not wait") : 0;
}

static int tensor_register(struct ks_job *j, const struct tensor_spec *s, struct ks_tensor **ret)
{
    struct waiter w;
    struct ks_tensor *t = NULL;
    int rc = waiter_init(&w, j, -1);
    if (!rc)
        rc = may_wait(j);
    if (!rc)
        rc = job_until_running(j, &w);
    if (!rc)
        rc = find(j, s, &w, &t);
    if (rc)
        return rc;
    if (!t)
        t = tensor_add(j, s);
    if (!t->ready) {
        t->declaring = true;
        rc = declare(t, &w);
        t->declaring = false;
        /* One that timed out may still be declared later: it stays, so that the answer finds it. */
        if (rc && rc != KS_ETIMEOUT && !t->handed) {
            tensor_remove(t);
            return rc;
        }
        job_notify(j);
    }
    if (rc)
        return rc;
    t->handed = true;
    *ret = t;
    return 0;
}

int ks_tensor_register(struct ks_job *job, const char *name, const struct ks_spec *spec, struct ks_tensor **ret)
{
    struct tensor_spec s;
    int rc = job_check(job);
    if (!rc && !ret)
        rc = job_error(KS_EINVAL, "ks_tensor_register: ret is NULL");
    if (!rc)
        rc = spec_make(name, spec, &s);
    if (rc)
        return rc;
    job_lock(job);
    rc = tensor_register(job, &s, ret);
    job_unlock(job);
    return rc;
}

static int init(struct ks_tensor *t, const void *data, int64_t timeout_ms, int *ret_won)
{
    struct ks_job *j = t->job;
    struct waiter w;
    int status;
    int rc = waiter_init(&w, j, timeout_ms);
    if (!rc)
        rc = may_wait(j);
    if (!rc)
        rc = job_until_running(j, &w);
    if (!rc)
        rc = tensor_ready(t);
    if (rc)
        return rc;
    struct ks_handle *h = handle_create(j);
    /* After a timeout the servers may still grant the claim, and `data` is the caller's again. */
    h->copy = mem_dup(data, tensor_bytes(&t->spec));
    struct client_event e = {.kind = CLIENT_INIT, .in = h->copy};
    op_submit(j, h, t, &e);
    handle_seal(h);
    job_flush(j, true);
    if (!handle_wait(h, &w, &status)) {
        h->forget = true;
        return status;
    }
    rc = handle_take(h);
    if (rc && rc != KS_EEXIST)
        return rc;
    if (ret_won)
        *ret_won = rc == 0;
    return 0;
}

int ks_init(struct ks_tensor *t, const void *data, int64_t timeout_ms, int *ret_won)
{
    int rc = t ? job_check(t->job) : job_error(KS_EINVAL, "ks_init: the tensor is NULL");
    if (!rc && !data)
        rc = job_error(KS_EINVAL, "ks_init: tensor '%s': data is NULL", t->spec.name);
    if (!rc && t->spec.kind != TENSOR_PARAM)
        rc = job_error(KS_EINVAL, "ks_init: tensor '%s' is a sum: only KS_PARAM has a first value", t->spec.name);
    if (rc)
        return rc;
    job_lock(t->job);
    rc = init(t, data, timeout_ms, ret_won);
    job_unlock(t->job);
    return rc;
}

size_t ks_tensor_bytes(const struct ks_tensor *t)
{
    return t ? (size_t)tensor_bytes(&t->spec) : 0;
}

const char *ks_tensor_name(const struct ks_tensor *t)
{
    return t ? t->spec.name : "";
}
