/* operator.h - what `keepstep status` and `keepstep stop` do: read a job's keys, ask servers on their control ports.
 *
 * Every call waits at most for its deadline. One thread. Lines in err have ERR_TEXT bytes. */
#ifndef SERVER_OPERATOR_H
#define SERVER_OPERATOR_H

#include "wire/doc.h"

struct operator;
struct operator_config {
    const char *coord, *job, *token;
};
int operator_open(const struct operator_config *c, struct operator **ret, char *err);
void operator_close(struct operator *o);

/* What the store says. A key that cannot be read is as if it was not there, and `damaged` says which. */
struct job_state {
    bool has_job, has_leader;
    struct job_doc job;
    struct server_doc leader;
    struct view *view;                 /* NULL: none yet */
    uint32_t nservers, nkeys;
    struct server_doc *server;         /* registered now */
    char **key;
    char damaged[ERR_TEXT];
};
int operator_read(struct operator *o, uint32_t timeout_ms, struct job_state *ret, char *err);
void job_state_done(struct job_state *s);
/* Deletes the keys of *s and nothing else. */
int operator_forget(struct operator *o, const struct job_state *s, uint32_t timeout_ms, char *err);

struct operator_answer {
    int status;                        /* 0, or why there is no answer: text */
    char *doc;                         /* JSON, NUL-terminated; owned */
    char text[ERR_TEXT];
};
/* FRAME_STATUS to every address at once. ret: n answers. */
void operator_status(struct operator *o, const char *const *addr, uint32_t n, uint32_t timeout_ms,
                     struct operator_answer *ret);
/* FRAME_STOP to one; 0 when it is written to the socket. */
int operator_stop(struct operator *o, const char *addr, const char *reason, uint32_t timeout_ms, char *err);
/* FRAME_DRAIN of server `id` to one; likewise. */
int operator_drain(struct operator *o, const char *addr, uint64_t id, uint32_t timeout_ms, char *err);

#endif
