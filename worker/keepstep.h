/* keepstep.h - the client of Keepstep, a parameter server for training on machines that come and go.
 *
 * ONE STEP OF TRAINING
 *
 *     struct ks_job *job;   struct ks_tensor *w;   struct ks_handle *h;
 *     ks_open(NULL, &job);                                   // settings from KEEPSTEP_* (see ks_options)
 *     ks_tensor_register(job, "w", &(struct ks_spec){ .dtype = KS_F32, .ndims = 2, .dims = {64, 10},
 *                                  .kind = KS_PARAM, .optimizer = "adamw lr=0.001" }, &w);
 *     ks_init(w, first_value, -1, NULL);                        // the first caller of the job wins
 *     for (;;) {
 *         ks_push_pull(w, gradient, value, 1.0, &h);         // returns at once
 *         ks_step_end(job);                                  // I pushed all that I push in this step
 *         ks_wait(h, -1);                                    // `value` is the parameter after the step
 *     }
 *     ks_close(job);
 *
 * WORDS. A *member* is this process (or a group of `local_size` ranks that aggregate first). Its *clock* is the
 * number of steps that it has ended. *sync*: a step ends when every member has ended it, and results appear then.
 * *ssp:S*: a pull waits until no member is more than S steps behind; *async*: nobody waits.
 *
 * TENSORS. KS_PARAM: the servers hold the value and the optimizer state; a push is a gradient. KS_REDUCE: the
 * servers only sum; in sync mode a result is the sum (or weighted average) of one step's pushes, in ssp and async mode
 * the running sum of all pushes. In sync mode a tensor is pushed at most once a step by each member.
 *
 * WHEN MACHINES DIE. The library reconnects, sends again and rejoins by itself; nothing acknowledged is lost and
 * nothing is applied twice. A member that was cut off and removed (fenced) gets KS_EFENCED from what was under way,
 * and goes on as a new member: pull the parameters and continue with ks_step().
 *
 * MEMORY. Buffers given to push/pull/push_pull/broadcast belong to the library until the handle is done (ks_wait
 * returned, ks_poll gave 1, or the callback ran): inputs must not change, outputs must not be read. Input and output may
 * be the same buffer (then the library keeps one more copy).
 *
 * THREADS. Every function may be called from any thread. Callbacks run on the library's thread, or on a thread that is inside
 * one of the waits and does the library's work meanwhile: they must not block and must not call functions that wait. After fork()
 * the child must not use the job.
 *
 * ERRORS. 0 or a negative KS_E* (keepstep_err.h). ks_last_error(job) is the last error's text for this thread.
 * Deadlines are in milliseconds; -1 means the job's default (KEEPSTEP_TIMEOUT, 600 s). No call waits for ever. */
#ifndef KEEPSTEP_H
#define KEEPSTEP_H

#include <stddef.h>
#include <stdint.h>
#include "keepstep_err.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KS_VERSION "0.1.0"
#if defined(__GNUC__)
#define KS_API __attribute__((visibility("default")))
#else
#define KS_API
#endif

struct ks_job;
struct ks_tensor;
struct ks_handle;

enum ks_dtype { KS_F32 = 1, KS_F64, KS_F16, KS_BF16, KS_I32, KS_I64, KS_U8 };
enum ks_kind { KS_REDUCE = 1, KS_PARAM };
enum ks_op { KS_SUM = 1, KS_AVERAGE };
enum ks_finite { KS_FINITE_DEFAULT = 0, KS_FINITE_APPLY, KS_FINITE_REJECT, KS_FINITE_SKIP };
enum ks_mode_kind { KS_SYNC = 1, KS_SSP, KS_ASYNC };

/* All zero: from the environment. Strings are copied. */
struct ks_options {
    const char *coord;        /* "local:DIR" or "etcd:URL[,URL]"      KEEPSTEP_COORD (required) */
    const char *job;          /* name                                KEEPSTEP_JOB ("default") */
    const char *token;        /* shared secret                       KEEPSTEP_TOKEN, KEEPSTEP_TOKEN_FILE ("") */
    const char *name;         /* of this member, for people          KEEPSTEP_NAME (host:pid) */
    uint32_t local_size;      /* ranks in this member                KEEPSTEP_LOCAL_SIZE (1) */
    int64_t timeout_ms;       /* default deadline                    KEEPSTEP_TIMEOUT, seconds (600) */
    int64_t join_timeout_ms;  /* for ks_open; 0: timeout_ms */
};

/* Joins the job: finds its servers in the store, connects, and returns when this member is in the view, at the step that
 * it starts with. KS_ETIMEOUT names what it waited for. KS_EAUTH: wrong token. KS_ENOENT: no such job in time. */
KS_API int ks_open(const struct ks_options *options, struct ks_job **ret_job);
/* Finishes nothing: what is under way is given up. Leaves the view if ks_leave was not called. Frees everything,
 * also tensors and handles. NULL is fine. */
KS_API void ks_close(struct ks_job *job);
/* Leaves in good order after the last ended step is finished; the others go on without this member. */
KS_API int ks_leave(struct ks_job *job, int64_t timeout_ms);

KS_API int64_t ks_step(const struct ks_job *job);      /* the step this member is in (its clock) */
KS_API int64_t ks_rank(const struct ks_job *job);      /* of the view now; -1 while not in it */
KS_API int64_t ks_size(const struct ks_job *job);      /* ranks in the view now */
KS_API uint64_t ks_epoch(const struct ks_job *job);    /* of the view; rank and size change with it only */
KS_API uint64_t ks_member_id(const struct ks_job *job);
struct ks_member {
    uint64_t id;
    char name[64];
    int64_t join;             /* first step it takes part in */
    int64_t rank;
    uint32_t local_size;
};
/* Fills up to max in rank order; returns how many members there are. */
KS_API int64_t ks_members(const struct ks_job *job, struct ks_member *ret, size_t max);
/* The mode in force at the current step; *ret_bound: SSP's s. */
KS_API enum ks_mode_kind ks_mode(const struct ks_job *job, uint32_t *ret_bound);
/* Changes the job's mode from step `from` on; waits until it is decided. *ret_from: when it takes effect (not earlier
 * than asked, later when somebody is past it). */
KS_API int ks_mode_set(struct ks_job *job, enum ks_mode_kind kind, uint32_t bound, int64_t from, int64_t *ret_from);

struct ks_spec {
    enum ks_dtype dtype;
    uint32_t ndims;                /* 0..16 */
    uint64_t dims[16];
    enum ks_kind kind;             /* 0: KS_REDUCE */
    enum ks_op op;                 /* 0: KS_AVERAGE for KS_PARAM, KS_SUM for KS_REDUCE. Average: sum(w x) / sum(w) */
    enum ks_finite finite;         /* default: reject for KS_PARAM, apply for KS_REDUCE */
    const char *group;             /* parameter group; NULL: "default" */
    const char *optimizer;         /* KS_PARAM: "add", "sgd lr=.1 momentum=.9", "adagrad", "rmsprop", "adam", "adamw"
                                      with PyTorch's options and defaults; NULL: "add" (value += push) */
};
/* Same name with other properties than somebody declared before: KS_EEXIST, the text names both. Names have 1..255
 * bytes of UTF-8 without control characters. The tensor lives until ks_close. */
KS_API int ks_tensor_register(struct ks_job *job, const char *name, const struct ks_spec *spec, struct ks_tensor **ret);
/* The tensor's first value (KS_PARAM; `data` holds the whole tensor). The first member of the job's life wins; everybody else's
 * data is ignored and they wait until the winner is through. Never overwrites a trained value. *ret_won may be NULL. */
KS_API int ks_init(struct ks_tensor *t, const void *data, int64_t timeout_ms, int *ret_won);
KS_API size_t ks_tensor_bytes(const struct ks_tensor *t);
KS_API const char *ks_tensor_name(const struct ks_tensor *t);

/* What a call did when its handle is done: KS_OK applied (or read); KS_ELATE dropped late; KS_ESTALE rejected as stale;
 * KS_ENOTFINITE; KS_EFENCED. With several chunks or tensors: the worst of them.
 *
 * weight > 0, finite: for averages. Handles are freed by the first ks_wait that returns their outcome, by the ks_poll that
 * returns 1 or an error, or after their callback. */
KS_API int ks_push(struct ks_tensor *t, const void *data, double weight, struct ks_handle **ret);
/* sync: the value at the start of this step. ssp/async: the value now, within the bound. KS_REDUCE: ssp/async only. */
KS_API int ks_pull(struct ks_tensor *t, void *out, struct ks_handle **ret);
/* sync: the result of this step, after ks_step_end. ssp/async: push, then a pull that sees it. data NULL: add nothing, want the
 * result. */
KS_API int ks_push_pull(struct ks_tensor *t, const void *data, void *out, double weight, struct ks_handle **ret);
/* Everybody calls it, in sync mode, for a KS_REDUCE tensor: `buffer` of rank `root` goes to all. */
KS_API int ks_broadcast(struct ks_tensor *t, void *buffer, int64_t root, struct ks_handle **ret);
struct ks_item {
    struct ks_tensor *tensor;
    const void *data;      /* NULL: nothing to push */
    void *out;             /* NULL: no result wanted */
    double weight;         /* 0: 1.0 */
};
/* push, pull or push_pull of many tensors as one call and one handle. Earlier items go first. */
KS_API int ks_many(struct ks_job *job, const struct ks_item *items, size_t n, struct ks_handle **ret);

/* The outcome, or KS_ETIMEOUT (the handle lives on; the text names who is waited for). In sync mode KS_ESTATE when
 * ks_step_end was not called: the result could never come. */
KS_API int ks_wait(struct ks_handle *h, int64_t timeout_ms);
/* 0: not yet. 1: done and KS_OK. negative: done, with this outcome. */
KS_API int ks_poll(struct ks_handle *h);
/* Runs fn(arg, outcome) once; at once when it is done already. */
KS_API void ks_on_done(struct ks_handle *h, void (*fn)(void *arg, int outcome), void *arg);

/* This member has pushed all that it pushes in this step. Returns at once; the clock is one more when the step is
 * finished (sync: everybody ended it) or at once (ssp, async). In sync mode a second call waits for the first step. */
KS_API int ks_step_end(struct ks_job *job);
/* Waits until the step that was ended is finished. */
KS_API int ks_step_wait(struct ks_job *job, int64_t timeout_ms);

/* Sets an option ("lr", "wd", "momentum", ...) of a parameter group from the next step on, on every shard at once (sync);
 * in ssp and async mode for pushes of later steps. Sent with ks_step_end. KS_ENOENT: no tensor of this group is registered here,
 * or no such option: the text lists the known ones. */
KS_API int ks_option_set(struct ks_job *job, const char *group, const char *option, double value);

enum { KS_STALENESS_BUCKETS = 64 };
struct ks_stats {
    uint64_t pushes, pulls, steps, bytes_out, bytes_in;
    uint64_t acked, late, stale, not_finite;        /* pushes (chunks) by outcome */
    uint64_t reconnects, resent, rejoins, views;
    uint64_t wait_us, wait_us_max;                  /* in ks_wait, ks_step_wait */
};
KS_API void ks_stats(const struct ks_job *job, struct ks_stats *ret);
/* Of one tensor: applied pushes of this member (chunks) by how many steps the most advanced member was ahead (last bucket: more).
 * In ssp:S at most S + 1: the most advanced one may end a step before it has to wait. */
KS_API void ks_staleness(const struct ks_tensor *t, uint64_t ret[KS_STALENESS_BUCKETS]);
/* Who or what this member waits for at this moment ("step 812: waiting 12 s for member gpu-7"), or "". Returns its length. */
KS_API size_t ks_waiting(const struct ks_job *job, char *out, size_t size);

KS_API const char *ks_strerror(int error);
KS_API const char *ks_last_error(const struct ks_job *job);   /* job NULL: of ks_open on this thread */

#ifdef __cplusplus
}
#endif
#endif
