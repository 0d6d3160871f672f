/* coord_event.h - what the implementations of coord.h share: checking and copying requests, making events,
 * and the queue between an implementation's thread and the owner's. Inside coord/ only. */
#ifndef COORD_COORD_EVENT_H
#define COORD_COORD_EVENT_H

#include <pthread.h>

#include "coord/coord.h"

/* 0, or KS_EINVAL and a line in err (COORD_ERR_TEXT bytes): what every implementation refuses. */
int coord_request_check(const struct coord_request *r, char *err);
/* 0, or KS_EINVAL and a line in err. A job's name becomes part of keys. */
int coord_job_check(const char *job, char *err);

/* A deep copy; the values of its ops belong to it. */
struct coord_request *coord_request_copy(const struct coord_request *r);
void coord_request_free(struct coord_request *r);

/* *ret becomes the answer to r, without kv. format NULL: no text. */
void coord_event_answer(struct coord_event *ret, const struct coord_request *r, int status, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Appends a copy; value NULL: deleted. The array grows by doubling. */
void coord_event_add(struct coord_event *e, const char *key, const void *value, size_t value_size,
                     int64_t create_revision, int64_t mod_revision);
/* A COORD_CHANGE of one key. */
void coord_event_change(struct coord_event *ret, const char *key, const void *value, size_t value_size,
                        int64_t create_revision, int64_t revision);

/* First in, first out; any thread may push, the owner pops. push takes over what *e holds and calls wake. */
struct coord_queue {
    pthread_mutex_t lock;
    struct coord_event *event;
    size_t first, n, cap;         /* a ring of cap events */
    void (*wake)(void *arg);
    void *wake_arg;
};
void coord_queue_init(struct coord_queue *q, const struct coord_config *c);
void coord_queue_done(struct coord_queue *q);
void coord_queue_push(struct coord_queue *q, struct coord_event *e);
bool coord_queue_pop(struct coord_queue *q, struct coord_event *ret);
/* Drops what a watch that was replaced has left: COORD_CHANGE and COORD_RESYNC. */
void coord_queue_drop_changes(struct coord_queue *q);

/* A thread that takes no signals: they are for the owner's threads. 0, or an errno. */
int coord_thread_start(pthread_t *ret, void *(*run)(void *arg), void *arg);

#endif
