/* Pushing, pulling, steps, options, handles. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/rng.h"
#include "worker/host.h"

static int tensor_check(const struct ks_tensor *t, const void *ret, const char *who)
{
    int rc = t ? job_check(t->job) : job_error(KS_EINVAL, "%s: the tensor is NULL", who);
    if (!rc && !ret)
        rc = job_error(KS_EINVAL, "%s: tensor '%s': ret is NULL", who, t->spec.name);
    return rc;
}

static int weight_check(const struct ks_tensor *t, double weight, const char *who)
{
    if (weight > 0 && isfinite((float)weight) && (float)weight > 0)
        return 0;
    return job_error(KS_EINVAL, "%s: tensor '%s': weight is %g: wanted is a finite number above 0", who, t->spec.name,
                     weight);
}

/* The job runs and every tensor is declared in this life. */
static int enter(struct ks_job *j)
{
    struct waiter w;
    int rc = waiter_init(&w, j, -1);
    return rc ? rc : job_until_running(j, &w);
}

/* Hands the handle out, or the error when the call itself was wrong and nothing is under way. */
static int hand_out(struct ks_handle *h, struct ks_handle **ret)
{
    handle_seal(h);
    if (h->done && (h->status == KS_ESTATE || h->status == KS_EINVAL))
        return handle_take(h);
    *ret = h;
    return 0;
}

static int submit_one(struct ks_tensor *t, struct client_event *e, bool now, struct ks_handle **ret)
{
    struct ks_job *j = t->job;
    job_lock(j);
    int rc = e->kind == CLIENT_PUSH ? job_lost(j) : 0;
    if (!rc)
        rc = enter(j);
    if (!rc)
        rc = tensor_ready(t);
    if (!rc) {
        const struct view *v = client_core_view(j->core);
        now |= v && view_mode_at(v, client_core_step_now(j->core)).kind != MODE_SYNC;
        struct ks_handle *h = handle_create(j);
        op_submit(j, h, t, e);
        job_flush(j, now);
        rc = hand_out(h, ret);
    }
    job_unlock(j);
    return rc;
}

int ks_push(struct ks_tensor *t, const void *data, double weight, struct ks_handle **ret)
{
    int rc = tensor_check(t, ret, "ks_push");
    if (!rc && !data)
        rc = job_error(KS_EINVAL, "ks_push: tensor '%s': data is NULL", t->spec.name);
    if (!rc)
        rc = weight_check(t, weight, "ks_push");
    if (rc)
        return rc;
    struct client_event e = {.kind = CLIENT_PUSH, .in = data, .weight = weight};
    return submit_one(t, &e, false, ret);
}

int ks_pull(struct ks_tensor *t, void *out, struct ks_handle **ret)
{
    int rc = tensor_check(t, ret, "ks_pull");
    if (!rc && !out)
        rc = job_error(KS_EINVAL, "ks_pull: tensor '%s': out is NULL", t->spec.name);
    if (rc)
        return rc;
    struct client_event e = {.kind = CLIENT_PULL, .out = out};
    return submit_one(t, &e, true, ret);
}

int ks_push_pull(struct ks_tensor *t, const void *data, void *out, double weight, struct ks_handle **ret)
{
    int rc = tensor_check(t, ret, "ks_push_pull");
    if (!rc && !out)
        rc = job_error(KS_EINVAL, "ks_push_pull: tensor '%s': out is NULL", t->spec.name);
    if (!rc)
        rc = weight_check(t, weight, "ks_push_pull");
    if (rc)
        return rc;
    struct client_event e = {.kind = CLIENT_PUSH, .in = data, .out = out, .weight = weight};
    return submit_one(t, &e, false, ret);
}

static int root_check(struct ks_job *j, const struct ks_tensor *t, int64_t root, bool *ret_mine)
{
    job_lock(j);
    int rc = job_lost(j);
    if (!rc)
        rc = enter(j);
    const struct view *v = rc ? NULL : client_core_view(j->core);
    if (v) {
        int64_t rank = job_rank(j);
        *ret_mine = rank >= 0 && root >= rank && root < rank + j->set.local_size;
        if (root < 0 || root >= view_size(v))
            rc = job_error(KS_EINVAL, "ks_broadcast: tensor '%s': root is %lld: there are %u ranks", t->spec.name,
                           (long long)root, view_size(v));
        else if (view_mode_at(v, client_core_step_now(j->core)).kind != MODE_SYNC)
            rc = job_error(KS_ESTATE, "ks_broadcast: tensor '%s': only in sync mode", t->spec.name);
    }
    job_unlock(j);
    return rc;
}

int ks_broadcast(struct ks_tensor *t, void *buffer, int64_t root, struct ks_handle **ret)
{
    bool mine = false;
    int rc = tensor_check(t, ret, "ks_broadcast");
    if (!rc && !buffer)
        rc = job_error(KS_EINVAL, "ks_broadcast: tensor '%s': buffer is NULL", t->spec.name);
    if (!rc && t->spec.kind != TENSOR_REDUCE)
        rc = job_error(KS_EINVAL, "ks_broadcast: tensor '%s' is a parameter: use ks_init", t->spec.name);
    if (!rc)
        rc = root_check(t->job, t, root, &mine);
    if (rc)
        return rc;
    struct client_event e = {.kind = CLIENT_PUSH, .in = mine ? buffer : NULL, .out = buffer, .weight = 1};
    return submit_one(t, &e, false, ret);
}

static int item_check(const struct ks_job *j, const struct ks_item *item, size_t i)
{
    if (!item->tensor || item->tensor->job != j)
        return job_error(KS_EINVAL, "ks_many: item %zu: the tensor is NULL or of another job", i);
    if (!item->data && !item->out)
        return job_error(KS_EINVAL, "ks_many: item %zu: tensor '%s': both data and out are NULL", i,
                         item->tensor->spec.name);
    return item->weight == 0 ? 0 : weight_check(item->tensor, item->weight, "ks_many");
}

static int many(struct ks_job *j, const struct ks_item *items, size_t n, struct ks_handle **ret)
{
    int rc = job_lost(j);
    if (!rc)
        rc = enter(j);
    for (size_t i = 0; !rc && i < n; i++)
        rc = tensor_ready(items[i].tensor);
    if (rc)
        return rc;
    struct ks_handle *h = handle_create(j);
    for (size_t i = 0; i < n; i++) {
        const struct ks_item *item = &items[i];
        struct client_event e = {
            .kind = item->data ? CLIENT_PUSH : CLIENT_PULL,
            .in = item->data,
            .out = item->out,
            .weight = item->weight == 0 ? 1.0 : item->weight,
        };
        op_submit(j, h, item->tensor, &e);
        job_flush(j, false);
    }
    job_flush(j, true);
    if (n == 1)
        return hand_out(h, ret);
    handle_seal(h);
    *ret = h;
    return 0;
}

int ks_many(struct ks_job *job, const struct ks_item *items, size_t n, struct ks_handle **ret)
{
    int rc = job_check(job);
    if (!rc && (!items || !n || !ret))
        rc = job_error(KS_EINVAL, "ks_many: items or ret is NULL, or n is 0");
    for (size_t i = 0; !rc && i < n; i++)
        rc = item_check(job, &items[i], i);
    if (rc)
        return rc;
    job_lock(job);
    rc = many(job, items, n, ret);
    job_unlock(job);
    return rc;
}

/* ---- handles ---- */

static void count_wait(struct ks_job *j, uint64_t start_us)
{
    uint64_t us = clock_now_us() - start_us;
    j->stats.wait_us += us;
    if (us > j->stats.wait_us_max)
        j->stats.wait_us_max = us;
}

int ks_wait(struct ks_handle *h, int64_t timeout_ms)
{
    struct waiter w;
    int rc = h ? job_check(h->job) : job_error(KS_EINVAL, "ks_wait: the handle is NULL");
    if (rc)
        return rc;
    struct ks_job *j = h->job;
    job_lock(j);
    rc = h->fn ? job_error(KS_EINVAL, "ks_wait: this handle has a callback") : waiter_init(&w, j, timeout_ms);
    if (!rc) {
        job_flush(j, true);
        bool over = handle_wait(h, &w, &rc);
        count_wait(j, w.start_us);
        if (over)
            rc = handle_take(h);
    }
    job_unlock(j);
    return rc;
}

int ks_poll(struct ks_handle *h)
{
    int rc = h ? job_check(h->job) : job_error(KS_EINVAL, "ks_poll: the handle is NULL");
    if (rc)
        return rc;
    struct ks_job *j = h->job;
    job_lock(j);
    job_flush(j, true);
    if (h->fn)
        rc = job_error(KS_EINVAL, "ks_poll: this handle has a callback");
    else if (h->done) {
        rc = handle_take(h);
        rc = rc ? rc : 1;
    }
    job_unlock(j);
    return rc;
}

void ks_on_done(struct ks_handle *h, void (*fn)(void *arg, int outcome), void *arg)
{
    if (!h || !fn || job_check(h->job))
        return;
    struct ks_job *j = h->job;
    job_lock(j);
    job_flush(j, true);
    int status = h->status;
    bool done = h->done && !h->fn;
    if (done) {
        handle_free(h);
    } else {
        h->fn = fn;
        h->arg = arg;
    }
    job_unlock(j);
    if (done)
        fn(arg, status);
}

/* ---- steps ---- */

static int step_wait(struct ks_job *j, struct waiter *w)
{
    char text[JOB_TEXT];
    uint64_t target = j->steps_ended;
    while (j->steps_done < target) {
        if (job_in_loop(j))
            return job_error(KS_ESTATE, "a callback must not wait");
        if (waiter_wait(w, j))
            continue;
        (void)job_waiting(j, text, sizeof text);
        return job_error(KS_ETIMEOUT, "%s", *text ? text : ks_strerror(KS_ETIMEOUT));
    }
    if (j->step_status == KS_EFENCED)
        j->lost = false;
    return j->step_status ? job_error(j->step_status, "%s", ks_strerror(j->step_status)) : 0;
}

static int step_end(struct ks_job *j)
{
    struct waiter w;
    int rc = waiter_init(&w, j, -1);
    if (!rc)
        rc = job_lost(j);
    if (!rc)
        rc = job_until_running(j, &w);
    if (!rc && j->steps_done < j->steps_ended) {
        job_flush(j, true);
        rc = step_wait(j, &w);
        if (!rc)
            rc = job_until_running(j, &w);
    }
    if (rc)
        return rc;
    struct ks_handle *h = handle_create(j);
    struct client_event e = {.kind = CLIENT_STEP_END};
    h->step = h->forget = true;
    j->steps_ended++;
    op_submit(j, h, NULL, &e);
    handle_seal(h);
    job_flush(j, true);
    return 0;
}

int ks_step_end(struct ks_job *job)
{
    int rc = job_check(job);
    if (rc)
        return rc;
    job_lock(job);
    rc = step_end(job);
    job_unlock(job);
    return rc;
}

int ks_step_wait(struct ks_job *job, int64_t timeout_ms)
{
    struct waiter w;
    int rc = job_check(job);
    if (rc)
        return rc;
    job_lock(job);
    rc = waiter_init(&w, job, timeout_ms);
    if (!rc) {
        job_flush(job, true);
        rc = step_wait(job, &w);
        count_wait(job, w.start_us);
    }
    job_unlock(job);
    return rc;
}

/* ---- options ---- */

/* Numbers are on the wire and equal to enum optim_option of the server. */
static const struct {
    const char *name;
    uint32_t number;
} options[] = {
    {"lr", 1},    {"wd", 2},    {"momentum", 3}, {"dampening", 4}, {"nesterov", 5},
    {"beta1", 6}, {"beta2", 7}, {"eps", 8},      {"alpha", 9},     {"lr_decay", 10},
};
enum { NOPTIONS = sizeof options / sizeof *options, OPTION_DAMPENING = 4 };

static int option_find(const char *option, uint32_t *ret)
{
    char known[160] = "";
    for (size_t i = 0; i < NOPTIONS; i++) {
        if (strcmp(option, options[i].name) == 0) {
            *ret = options[i].number;
            return 0;
        }
        size_t n = strlen(known);
        snprintf(known + n, sizeof known - n, "%s%s", i ? ", " : "", options[i].name);
    }
    return job_error(KS_ENOENT, "ks_option_set: there is no option \"%.40s\"; known are %s", option, known);
}

static int group_find(const struct ks_job *j, const char *group)
{
    for (uint32_t i = 0; i < j->ntensors; i++)
        if (j->tensor[i]->spec.kind == TENSOR_PARAM && strcmp(j->tensor[i]->spec.group, group) == 0)
            return 0;
    return job_error(KS_ENOENT, "ks_option_set: no parameter of group \"%.60s\" is registered here", group);
}

static int option_set(struct ks_job *j, const char *group, uint32_t option, double value)
{
    int rc = enter(j);
    if (!rc)
        rc = group_find(j, group);
    if (rc)
        return rc;
    struct ks_handle *h = handle_create(j);
    struct client_event e = {
        .kind = CLIENT_OPTION,
        .setting = {.from_step = client_core_step_now(j->core) + 1,
                    .group = hash_bytes(group, strlen(group)),
                    .value = value,
                    .option = option},
    };
    /* It rides on the end of the step: nobody waits for it. */
    h->forget = true;
    op_submit(j, h, NULL, &e);
    handle_seal(h);
    return 0;
}

int ks_option_set(struct ks_job *job, const char *group, const char *option, double value)
{
    uint32_t number = 0;
    int rc = job_check(job);
    if (!rc && (!group || !*group || !option))
        rc = job_error(KS_EINVAL, "ks_option_set: group or option is NULL or empty");
    if (!rc)
        rc = option_find(option, &number);
    if (!rc && !(isfinite(value) && (value >= 0 || number == OPTION_DAMPENING)))
        rc = job_error(KS_EINVAL, "ks_option_set: %s is %g: wanted is a finite number, 0 or more", option, value);
    if (rc)
        return rc;
    job_lock(job);
    rc = option_set(job, group, number, value);
    job_unlock(job);
    return rc;
}
