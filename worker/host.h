/* host.h - the client library behind keepstep.h: what its files share.
 *
 * api.c, api_tensor.c, api_ops.c, api_info.c   the public functions: check arguments, take the lock, ask
 * job.c       the state of a job, waiting, texts
 * ops.c       operations and handles; steps the core and carries out its effects
 * life.c      one life: its nets, joining, the leader's control connection, coming back after being fenced
 * peers.c     data connections, one to every loop that serves shards
 * follow.c    the coordination store: job, leader, view
 * host_uv.c   the job's thread
 *
 * One mutex guards all of struct ks_job. A thread that calls ks_push holds it while it steps the core and writes to the
 * sockets itself; the job's thread takes it for each event and gives it back while it polls and reads sockets.
 * Functions without another word are called with the lock held. "loop": on the job's thread only. */
#ifndef WORKER_HOST_H
#define WORKER_HOST_H

#include <pthread.h>

#include "base/map.h"
#include "coord/coord.h"
#include "net/net.h"
#include "worker/client_core.h"
#include "worker/keepstep.h"
#include "worker/settings.h"

enum {
    TICK_MS = 100,
    REPEAT_US = 1000000, /* JOIN, mode requests, the store: asked again */
    CTL_PING_MS = 200,
    CTL_SILENCE_MS = 1500,
    FLUSH_BYTES = 64 << 10, /* a push writes itself from here on; less waits for the end of the step */
    WAIT_LOG_US = 5000000,
    LEAVE_US = 1000, /* after a wait the loop is left to the next one for so long */
    STAY_US = 100000, /* how long the job's thread sleeps while another one runs the loop */
    WAIT_LOG_AGAIN_US = 10000000,
    CLOSE_LEAVE_MS = 2000, /* ks_close waits so long for leaving in good order */
    JOB_TEXT = 512,
};

enum job_state {
    JOB_OPENING = 1, /* not in the view yet */
    JOB_RUNNING,
    JOB_REJOINING, /* fenced: on its way to be a new member */
    JOB_LEFT,
    JOB_ENDED,  /* over for everybody; text */
    JOB_FAILED, /* ks_open has to fail; error, text */
    JOB_CLOSED,
};

struct host_loop; /* host_uv.c */
struct job_op;

struct ks_handle {
    struct ks_job *job;
    struct ks_handle *next, *prev; /* all live ones, or next in the spare list */
    struct ks_handle *call_next;   /* callbacks that are due */
    uint32_t pending;              /* operations that are not done */
    uint32_t waiters;
    int status;       /* the worst so far */
    uint32_t tensor;  /* DECLARE: its index */
    uint32_t unended; /* pushes among them: in sync mode they need the end of the step */
    bool done;
    bool step;   /* of ks_step_end */
    bool forget; /* nobody waits for it: freed when it is done */
    void (*fn)(void *arg, int outcome);
    void *arg;
    char *text; /* of status; NULL: its general text */
    void *copy; /* what the operation sends, when its caller may be gone before it */
};

struct job_op {
    struct job_op *next; /* spare list, or the tensor's list of those that are over */
    uint64_t id;
    struct ks_handle *handle; /* NULL: declares the tensor again in a new life */
    struct ks_tensor *tensor; /* may be NULL */
    bool push;
    int status;
};

struct ks_tensor {
    struct ks_job *job;
    struct tensor_spec spec;
    uint32_t index; /* in this life's core */
    bool ready;     /* declared in this life */
    bool declaring; /* somebody's ks_tensor_register is under way */
    bool handed;    /* the application has it */
    int failed;     /* it could not be declared again */
    char *failed_text;
    /* Payloads that name user memory in send queues. An operation that is over is told to its owner only when there are
     * none: he may free the memory then. */
    uint32_t sending;
    struct job_op *over;
};

struct peer {
    struct ks_job *job;
    struct peer *next, *touched_next;
    uint64_t server;
    uint32_t loop;
    struct net_conn *conn;
    bool up, touched, listed;
    uint8_t *scratch; /* small payload that is arriving */
    size_t scratch_size;
};

struct ks_job {
    struct settings set;
    unsigned forks;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t nwaiting;
    struct host_loop *loop;
    pthread_t thread;
    pthread_t driver;    /* who runs the loop now: its callbacks are "in the loop" */
    bool stop;

    enum job_state state;
    int error;
    char text[JOB_TEXT];

    struct coord *coord;           /* loop */
    bool ranged, ranging, watched; /* a range came; one is under way */
    uint64_t range_us;
    bool store_away;
    char store_text[COORD_ERR_TEXT];
    bool has_job, has_leader;
    struct job_doc job;
    struct server_doc leader;
    struct view *view; /* newest that is known */

    uint64_t id; /* this life; 0: none */
    struct client_core *core;
    struct client_outbox out;
    bool stepping;
    struct net *data, *control;
    struct net_conn *leader_conn;
    uint64_t leader_id; /* of leader_conn */
    bool listed, fenced, declare_again;
    bool lost; /* this member was fenced, and nobody was told yet */
    uint32_t redeclaring;
    uint64_t join_us;
    uint64_t leave_op;
    char leader_text[ERR_TEXT];
    struct net **dying;
    uint32_t ndying, dying_cap;
    struct peer *peers, *touched;
    struct map peer_by_key;

    struct ks_tensor **tensor;
    uint32_t ntensors, tensors_cap;
    struct map tensor_by_id, op_by_id;
    uint64_t op_last;
    struct job_op *spare_ops;
    struct ks_handle *handles, *spare_handles, *calls;
    uint64_t steps_ended, steps_done;
    int step_status; /* of the newest that is done */

    bool mode_wanted;
    struct mode mode;
    uint64_t mode_us;

    struct ks_stats stats; /* of earlier lives, and what the core does not count */
};

/* ---- job.c ---- */
/* How often this process is a fork of a process that used the library. Starts logging. */
unsigned job_forks(void);
void job_lock(void *job);
void job_unlock(void *job);
/* Text of this thread's last error; returns status. */
int job_error(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *job_error_text(void);
/* Is this job usable in this process? */
int job_check(const struct ks_job *j);
bool job_in_loop(const struct ks_job *j);
void job_notify(struct ks_job *j);
void job_fail(struct ks_job *j, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));
void job_end(struct ks_job *j, const char *text);
/* Why it does not go on: one line, "" when nothing is waited for. Returns the length. */
size_t job_waiting(const struct ks_job *j, char *out, size_t size);
int64_t job_rank(const struct ks_job *j);

struct waiter {
    uint64_t start_us, deadline_us, log_us;
};
/* timeout_ms -1: the job's default. KS_EINVAL: below that. */
int waiter_init(struct waiter *w, const struct ks_job *j, int64_t timeout_ms);
/* Waits for the next change; gives the lock back meanwhile. false: the deadline has passed. */
bool waiter_wait(struct waiter *w, struct ks_job *j);
/* KS_EFENCED, once, before something is added to a step that is not the one its caller has in mind. */
int job_lost(struct ks_job *j);
/* Waits until the job runs. 0, or KS_EJOB, KS_ESTATE (left), KS_ECLOSED, KS_ETIMEOUT. */
int job_until_running(struct ks_job *j, struct waiter *w);

/* ---- ops.c ---- */
struct ks_handle *handle_create(struct ks_job *j);
void handle_free(struct ks_handle *h);
/* Ends when nothing is pending: after the last op_submit. */
void handle_seal(struct ks_handle *h);
/* e->op is set here. */
void op_submit(struct ks_job *j, struct ks_handle *h, struct ks_tensor *t, struct client_event *e);
/* 0 when it is declared in this life. */
int tensor_ready(const struct ks_tensor *t);
void ops_end_all(struct ks_job *j, int status);
/* Steps the core (there must be one) and does what it says. */
void job_step(struct ks_job *j, struct client_event *e);
/* Writes what job_step queued. now: also little. */
void job_flush(struct ks_job *j, bool now);
/* Waits for the outcome. true: *ret_status is it. false: *ret_status is why not (KS_ETIMEOUT, KS_ESTATE). */
bool handle_wait(struct ks_handle *h, struct waiter *w, int *ret_status);
/* Sets this thread's error text from the handle, frees it, returns its status. */
int handle_take(struct ks_handle *h);

/* ---- life.c: loop ---- */
void life_start(struct ks_job *j);
void life_end(struct ks_job *j);
void life_leader(struct ks_job *j);               /* the leader may be another one */
void life_view(struct ks_job *j, struct view *v); /* takes it */
void life_tick(struct ks_job *j);
bool life_send(struct ks_job *j, const struct frame_header *h, char *doc); /* to the leader; takes doc */
void life_join(struct ks_job *j);

/* ---- peers.c: loop, but for peer_send ---- */
extern const struct net_handlers peer_handlers;
void peers_follow(struct ks_job *j);
void peers_drop(struct ks_job *j); /* all, without a word to the core */
void peer_send(struct ks_job *j, uint64_t server, uint32_t loop, const struct frame_header *h, const void *payload,
               void (*release)(void *arg), void *release_arg);
void peer_untouch(struct peer *p);

/* ---- follow.c: loop ---- */
void follow_events(struct ks_job *j);
void follow_tick(struct ks_job *j);
void follow_view_wanted(struct ks_job *j);

/* ---- host_uv.c ---- */
int host_start(struct ks_job *j, char *err);
/* Ends the thread; everything that belongs to the loop is gone then. Without the lock. */
void host_stop(struct ks_job *j);
void host_wake(struct ks_job *j);
/* Lets the calling thread run the loop, until something happened or the time has come. The lock is given back meanwhile.
 * False: another thread does that already. */
bool host_drive(struct ks_job *j, uint64_t until_us);
struct uv_loop_s *host_uv(struct ks_job *j);

#endif
