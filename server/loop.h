/* loop.h - one data loop of a server: a thread with a uv loop, a listening port, a shard_core, a store. */
#ifndef SERVER_LOOP_H
#define SERVER_LOOP_H

#include "net/net.h"
#include "server/mailbox.h"

struct loop_config {
    uint32_t index, nloops;
    uint64_t self, heir_of;
    const struct job_doc *job;
    const char *listen;            /* "host:port" */
    const char *token;
    const char *store_dir;         /* NULL: durability=none */
    int create;
    size_t memory_max;             /* of buffers; 0: no limit */
    struct mailbox *control;       /* where its mail goes */
};
struct loop;

/* Opens the port and the store, loads what the disk holds; the thread starts with loop_start. ret_addr: ADDR_MAX_BYTES.
 * On failure one line in err (STORE_ERR_TEXT bytes). */
int loop_create(const struct loop_config *c, struct loop **ret, char *ret_addr, char *err);
int loop_start(struct loop *l);
void loop_post(struct loop *l, struct mail *m);    /* any thread */
/* After MAIL_STOPPED, or when it never started: joins the thread, closes the store (what was submitted becomes
 * durable), frees. */
void loop_free(struct loop *l);

#endif
