/* main.c - `keepstep COMMAND ...`. */
#include <stdio.h>
#include <string.h>

#include "server/cmd.h"

static const struct {
    const char *name, *what;
    int (*run)(int argc, char **argv);
} command[] = {
    {"server", "hold shards of a job", cmd_server},
    {"launch", "run servers and workers on this host", cmd_launch},
    {"status", "show servers, members, and who waits for whom", cmd_status},
    {"drain", "move everything away from a server", cmd_drain},
    {"stop", "end a job", cmd_stop},
};
enum { COMMANDS = sizeof command / sizeof command[0] };

static int help(FILE *to)
{
    fputs("Usage: keepstep COMMAND [OPTIONS]\n\n"
          "A parameter server for training on machines that come and go.\n\nCommands:\n", to);
    for (int i = 0; i < COMMANDS; i++)
        fprintf(to, "  %-10s %s\n", command[i].name, command[i].what);
    fputs("  version    print the version\n\n'keepstep COMMAND --help' shows the options of a command.\n", to);
    return to == stdout ? 0 : CMD_USAGE;
}

static int unknown(const char *word)
{
    const char *names[COMMANDS];
    for (int i = 0; i < COMMANDS; i++)
        names[i] = command[i].name;
    const char *near = cmd_nearest(word, names, COMMANDS);
    if (near)
        fprintf(stderr, "keepstep: unknown command '%.40s', did you mean '%s'?\n", word, near);
    else
        fprintf(stderr, "keepstep: unknown command '%.40s'; 'keepstep --help' lists them\n", word);
    return CMD_USAGE;
}

int main(int argc, char **argv)
{
    const char *word = argc > 1 ? argv[1] : NULL;
    if (!word)
        return help(stderr);
    for (int i = 0; i < COMMANDS; i++)
        if (!strcmp(word, command[i].name))
            return command[i].run(argc - 1, argv + 1);
    if (!strcmp(word, "help") || !strcmp(word, "--help") || !strcmp(word, "-h"))
        return help(stdout);
    if (strcmp(word, "version") && strcmp(word, "--version"))
        return unknown(word);
    puts("keepstep " KEEPSTEP_VERSION);
    return 0;
}
