/* mailbox.h - messages between the control thread and the loops; never on the path of a chunk.
 *
 * Any thread posts; the owner's loop thread is woken and takes all. A message owns what it points to. */
#ifndef SERVER_MAILBOX_H
#define SERVER_MAILBOX_H

#include <pthread.h>
#include <uv.h>

#include "server/shard_core.h"

enum mail_kind {
    MAIL_PREPARE = 1,   /* control -> loop: prepare */
    MAIL_ADOPT,         /* control -> loop: view */
    MAIL_CLOSE_PEER,    /* control -> loop: id, text */
    MAIL_HEIR_OF,       /* control -> loop: id, whose heir this life is */
    MAIL_STATS,         /* control -> loop: seq = request; answered with stats */
    MAIL_STOP,          /* control -> loop: close everything and end the thread */
    MAIL_REPORT,        /* loop -> control: ballot, report */
    MAIL_PEER_DOWN,     /* loop -> control: member id; text */
    MAIL_WANT_VIEW,     /* loop -> control */
    MAIL_SYNCED,        /* loop -> control: joiner id has everything of shard seq */
    MAIL_FATAL,         /* loop -> control: status, text */
    MAIL_STOPPED,       /* loop -> control: the thread is about to end */
};
/* A picture of one loop for `keepstep status`. */
struct loop_stats {
    struct shard_stats shard;
    uint32_t nmembers, nwaiting;
    struct shard_member_stats member[256];
    uint64_t waiting[256];
    int64_t waiting_step;
    size_t pool_used, pool_held;
};
struct mail {
    enum mail_kind kind;
    uint32_t loop;
    uint64_t id, seq;
    int status;
    struct ballot ballot;
    struct prepare *prepare;
    struct view *view;
    struct report *report;
    struct loop_stats *stats;
    char text[160];
    struct mail *next;
};
void mail_free(struct mail *m);

struct mailbox {
    pthread_mutex_t mutex;
    struct mail *head, **tail;
    uv_async_t async;
    void (*each)(void *arg, struct mail *m);   /* owner's thread; does not free m */
    void *arg;
};
int mailbox_init(struct mailbox *b, uv_loop_t *loop, void (*each)(void *arg, struct mail *m), void *arg);
/* Takes m over. */
void mailbox_post(struct mailbox *b, struct mail *m);
/* Owner's thread: closes the wake-up handle; frees what is left. The loop must run once more. */
void mailbox_close(struct mailbox *b);
void mailbox_done(struct mailbox *b);

#endif
