/* cmd.h - the commands of `keepstep`, and how they read their options.
 *
 * An option's value comes from the command line ("--job X", "--job=X"), else from its variable (an empty one counts
 * as not set), else it has none. What is wrong with them is one line on stderr and exit status 2; what goes wrong
 * later is one line and status 1. */
#ifndef SERVER_CMD_H
#define SERVER_CMD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire/view.h"

enum { CMD_OPTIONS_MAX = 32, CMD_FAILED = 1, CMD_USAGE = 2, TOKEN_MAX_BYTES_CMD = 4096 };

struct cmd_option {
    const char *name;          /* "--job" */
    const char *brief;         /* "-n", or NULL */
    const char *variable;      /* "KEEPSTEP_JOB", or NULL */
    const char *meta;          /* what its value is called; NULL: a switch; "[X]": may be left out */
    const char *help;
};
struct cmd {
    const char *name;          /* "server" */
    const char *usage;         /* what follows the name */
    const char *what;          /* one line */
    const char *more;          /* end of the help; NULL: none */
    const struct cmd_option *option;
    size_t n;
    bool rest;                 /* "-- PROGRAM ARGUMENTS" may follow */
};
struct cmd_args {
    const struct cmd *cmd;
    const char *value[CMD_OPTIONS_MAX];    /* NULL: not given; "": given without a value */
    bool from_variable[CMD_OPTIONS_MAX];
    char **rest;
    int nrest;
};
enum cmd_parsed { CMD_GO = 0, CMD_HELP, CMD_WRONG };

/* argv[0] is the command's name. CMD_HELP: the help was printed. CMD_WRONG: the line was printed. */
enum cmd_parsed cmd_parse(const struct cmd *c, int argc, char **argv, struct cmd_args *ret);
void cmd_help(const struct cmd *c);

/* Of an option that the command has; NULL: not given. */
const char *cmd_value(const struct cmd_args *a, const char *name);
bool cmd_given(const struct cmd_args *a, const char *name);
/* These leave *ret alone when the option is not given. false: the line was printed. */
bool cmd_number(const struct cmd_args *a, const char *name, uint64_t min, uint64_t max, uint64_t *ret);
bool cmd_size(const struct cmd_args *a, const char *name, uint64_t *ret);        /* bytes, with K, M or G */
bool cmd_word(const struct cmd_args *a, const char *name, const char *const *words, size_t n, uint32_t *ret);
bool cmd_mode(const struct cmd_args *a, const char *name, struct mode *ret);
bool cmd_text(const struct cmd_args *a, const char *name, char *ret, size_t size);   /* a name: letters, digits, ._- */
/* The job's token from --token-file or KEEPSTEP_TOKEN; "" when there is none. ret: TOKEN_MAX_BYTES_CMD + 1 bytes. */
bool cmd_token(const struct cmd_args *a, char *ret);
/* --coord, which must be there. */
bool cmd_coord(const struct cmd_args *a, const char **ret);

/* One line "keepstep COMMAND: ..." on stderr; returns CMD_USAGE or CMD_FAILED. */
int cmd_usage_error(const struct cmd *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
int cmd_fail(const struct cmd *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The most similar of the words, or NULL when none is similar. */
const char *cmd_nearest(const char *word, const char *const *words, size_t n);

/* Options that most commands have. */
#define CMD_OPTION_COORD                                                                                               \
    {"--coord", NULL, "KEEPSTEP_COORD", "URL", "coordination store: local:DIR or etcd:URL[,URL...]"}
#define CMD_OPTION_JOB {"--job", NULL, "KEEPSTEP_JOB", "NAME", "the job's name (default)"}
#define CMD_OPTION_TOKEN                                                                                               \
    {"--token-file", NULL, "KEEPSTEP_TOKEN_FILE", "FILE", "the job's shared secret; or put it in KEEPSTEP_TOKEN"}

int cmd_server(int argc, char **argv);
int cmd_launch(int argc, char **argv);
int cmd_status(int argc, char **argv);
int cmd_drain(int argc, char **argv);
int cmd_stop(int argc, char **argv);

#endif
