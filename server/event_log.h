/* event_log.h - a file that says what happened to a job's servers, for people and scripts that ask afterwards: one JSON
 * object a line, of everything that has to do with views, failover and replication.
 *
 *     {"time":"2026-01-02T03:04:05.678Z","mono_us":123,"server":"s0","event":"node_suspect","id":"7","name":"s1",...}
 *
 * It listens to the process's log (base/log.h): the cores report by log lines, and know nothing of files. `server` is the
 * name of the life that is running. Lines are appended with one write each, from any thread; several servers may share a
 * file. */
#ifndef SERVER_EVENT_LOG_H
#define SERVER_EVENT_LOG_H

/* Opens the file and listens from now on. 0, or KS_EIO with a line in err (of size bytes). Once a process, before it
 * has threads. */
int event_log_open(const char *path, char *err, unsigned size);
/* The name that lines carry from now on; it is copied. */
void event_log_name(const char *name);

#endif
