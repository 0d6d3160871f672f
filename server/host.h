/* host.h - one life of a server process: the control thread, its loops, the coordination store.
 *
 * host_run returns when the life is over. Everything it opened is closed then. */
#ifndef SERVER_HOST_H
#define SERVER_HOST_H

#include "wire/doc.h"

struct host_config {
    struct job_doc job;            /* to create the job with; where `job_set` has no bit, an existing job's value is taken */
    uint32_t job_set;              /* enum host_job_field: given by the user, must agree with an existing job */
    const char *coord;             /* URL */
    const char *token;
    const char *data;              /* directory; NULL with durability=none */
    const char *listen;            /* "host:port" of the control port; loops take the next ports, or free ones when 0 */
    const char *advertise;         /* host name for others; NULL: of listen */
    const char *name;              /* NULL: from the data directory, or "HOST:PID" */
    uint32_t loops;                /* 0: as in the data directory, else one per core */
    size_t memory_max;             /* bytes of buffers a process; 0: no limit */
    uint32_t start_timeout_ms;     /* to reach the store at the start; 0: 10000 */
    uint32_t notice_s;             /* after SIGTERM: time to give the shards away; 0: none */
    const char *ready_file;        /* written with the control address when serving; NULL: none */
};
enum host_job_field { JOB_SHARDS = 1, JOB_CHUNK = 2, JOB_SERVERS = 4, JOB_MEMBERS = 8, JOB_DETERMINISTIC = 16,
                      JOB_DURABILITY = 32, JOB_MODE = 64, JOB_WAIT = 128, JOB_REPLICAS = 256, JOB_REPLICAS_MIN = 512 };
enum host_end {
    HOST_STOPPED = 0,      /* by a signal, or the job was stopped by its operator */
    HOST_FENCED,           /* run again: a new life */
    HOST_FAILED,           /* text says why */
};
/* text: 512 bytes. Handles SIGTERM and SIGINT while it runs. SIGTERM is a notice: while members train, what this server holds
 * moves to others first, for notice_s at most. SIGINT, or a second SIGTERM, ends it at once. */
enum host_end host_run(const struct host_config *c, char *text);

#endif
