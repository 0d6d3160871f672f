#include "server/cmd.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "wire/doc.h"

/* ---- messages ---- */

static void say(const struct cmd *c, const char *format, va_list ap)
{
    char text[1024];
    vsnprintf(text, sizeof text, format, ap);
    fprintf(stderr, "keepstep %s: %s\n", c->name, text);
}

int cmd_usage_error(const struct cmd *c, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    say(c, format, ap);
    va_end(ap);
    return CMD_USAGE;
}

int cmd_fail(const struct cmd *c, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    say(c, format, ap);
    va_end(ap);
    return CMD_FAILED;
}

void cmd_help(const struct cmd *c)
{
    printf("Usage: keepstep %s %s\n\n%s\n\nOptions:\n", c->name, c->usage, c->what);
    for (size_t i = 0; i < c->n; i++) {
        const struct cmd_option *o = &c->option[i];
        char left[64];
        snprintf(left, sizeof left, "%s%s%s%s%s", o->brief ? o->brief : "", o->brief ? ", " : "", o->name,
                 o->meta ? " " : "", o->meta ? o->meta : "");
        printf("  %-26s %s%s%s%s\n", left, o->help, o->variable ? " [" : "", o->variable ? o->variable : "",
               o->variable ? "]" : "");
    }
    printf("  %-26s %s\n", "--help", "this page");
    if (c->more)
        printf("\n%s\n", c->more);
}

/* ---- the most similar word ---- */

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Levenshtein's distance; words are short. */
static size_t distance(const char *a, const char *b)
{
    enum { MAX = 48 };
    size_t row[MAX + 1], n = strnlen(b, MAX);
    for (size_t j = 0; j <= n; j++)
        row[j] = j;
    for (size_t i = 0; a[i] && i < MAX; i++) {
        size_t diagonal = row[0];
        row[0] = i + 1;
        for (size_t j = 1; j <= n; j++) {
            size_t change = diagonal + (a[i] != b[j - 1]);
            diagonal = row[j];
            row[j] = least(change, least(row[j], row[j - 1]) + 1);
        }
    }
    return row[n];
}

const char *cmd_nearest(const char *word, const char *const *words, size_t n)
{
    const char *best = NULL;
    size_t shortest = strlen(word) / 2 + 1;
    for (size_t i = 0; i < n; i++) {
        /* What begins alike is similar, however much is missing at its end. */
        size_t d = strlen(word) > 3 && !strncmp(word, words[i], strlen(word)) ? 0 : distance(word, words[i]);
        if (d < shortest) {
            shortest = d;
            best = words[i];
        }
    }
    return best;
}

/* ---- parsing ---- */

static int find(const struct cmd *c, const char *name, size_t size)
{
    for (size_t i = 0; i < c->n; i++) {
        const struct cmd_option *o = &c->option[i];
        if ((strlen(o->name) == size && !strncmp(o->name, name, size)) ||
            (o->brief && strlen(o->brief) == size && !strncmp(o->brief, name, size)))
            return (int)i;
    }
    return -1;
}

static enum cmd_parsed unknown(const struct cmd *c, const char *name, size_t size)
{
    const char *names[CMD_OPTIONS_MAX + 1], *near;
    char word[64];
    snprintf(word, sizeof word, "%.*s", (int)size, name);
    for (size_t i = 0; i < c->n; i++)
        names[i] = c->option[i].name;
    names[c->n] = "--help";
    near = cmd_nearest(word, names, c->n + 1);
    if (near)
        cmd_usage_error(c, "unknown option %s, did you mean %s?", word, near);
    else
        cmd_usage_error(c, "unknown option %s; 'keepstep %s --help' lists them", word, c->name);
    return CMD_WRONG;
}

static void from_variables(struct cmd_args *a)
{
    for (size_t i = 0; i < a->cmd->n; i++) {
        const char *name = a->cmd->option[i].variable, *v = name ? getenv(name) : NULL;
        if (!a->value[i] && v && *v) {
            a->value[i] = v;
            a->from_variable[i] = true;
        }
    }
}

/* Takes the option at argv[*at], and its value. */
static enum cmd_parsed take(struct cmd_args *a, int argc, char **argv, int *at)
{
    const char *word = argv[*at], *equals = strchr(word, '=');
    size_t size = equals ? (size_t)(equals - word) : strlen(word);
    int i = find(a->cmd, word, size);
    if (i < 0)
        return unknown(a->cmd, word, size);
    const struct cmd_option *o = &a->cmd->option[i];
    const char *next = *at + 1 < argc ? argv[*at + 1] : NULL;
    if (!o->meta && equals) {
        cmd_usage_error(a->cmd, "%s takes no value", o->name);
        return CMD_WRONG;
    }
    if (!o->meta) {
        a->value[i] = "";
    } else if (equals) {
        a->value[i] = equals + 1;
    } else if (o->meta[0] == '[') {
        bool follows = next && isdigit((unsigned char)next[0]);
        a->value[i] = follows ? next : "";
        *at += follows;
    } else if (!next) {
        cmd_usage_error(a->cmd, "%s needs a value: %s", o->name, o->meta);
        return CMD_WRONG;
    } else {
        a->value[i] = next;
        ++*at;
    }
    return CMD_GO;
}

enum cmd_parsed cmd_parse(const struct cmd *c, int argc, char **argv, struct cmd_args *ret)
{
    struct cmd_args a = {.cmd = c};
    CHECK(c->n <= CMD_OPTIONS_MAX);
    int i = 1;
    for (; i < argc && argv[i][0] == '-'; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            cmd_help(c);
            return CMD_HELP;
        }
        if (!strcmp(argv[i], "--")) {
            i++;
            break;
        }
        enum cmd_parsed r = take(&a, argc, argv, &i);
        if (r)
            return r;
    }
    if (i < argc && !c->rest) {
        cmd_usage_error(c, "'%.60s' is not understood; 'keepstep %s --help' shows the usage", argv[i], c->name);
        return CMD_WRONG;
    }
    a.rest = argv + i;
    a.nrest = argc - i;
    from_variables(&a);
    *ret = a;
    return CMD_GO;
}

/* ---- values ---- */

static int index_of(const struct cmd_args *a, const char *name)
{
    int i = find(a->cmd, name, strlen(name));
    CHECK(i >= 0);
    return i;
}

const char *cmd_value(const struct cmd_args *a, const char *name)
{
    return a->value[index_of(a, name)];
}

bool cmd_given(const struct cmd_args *a, const char *name)
{
    return cmd_value(a, name) != NULL;
}

/* How the user knows it: by its flag or by its variable. */
static const char *known_as(const struct cmd_args *a, const char *name)
{
    int i = index_of(a, name);
    return a->from_variable[i] ? a->cmd->option[i].variable : name;
}

bool cmd_number(const struct cmd_args *a, const char *name, uint64_t min, uint64_t max, uint64_t *ret)
{
    const char *v = cmd_value(a, name);
    char *end;
    if (!v)
        return true;
    errno = 0;
    unsigned long long n = strtoull(v, &end, 10);
    if (!isdigit((unsigned char)*v) || errno || *end || n < min || n > max) {
        cmd_usage_error(a->cmd, "%s is '%.40s': wanted is a whole number from %llu to %llu", known_as(a, name), v,
                        (unsigned long long)min, (unsigned long long)max);
        return false;
    }
    *ret = n;
    return true;
}

bool cmd_size(const struct cmd_args *a, const char *name, uint64_t *ret)
{
    const char *v = cmd_value(a, name), *units = "KMG", *unit;
    char *end;
    if (!v)
        return true;
    errno = 0;
    unsigned long long n = strtoull(v, &end, 10);
    int shift = 0;
    if (*end && (unit = strchr(units, toupper((unsigned char)*end)))) {
        shift = 10 * (int)(unit - units + 1);
        end++;
    }
    if (!isdigit((unsigned char)*v) || errno || *end || n > UINT64_MAX >> (shift + 1)) {
        cmd_usage_error(a->cmd, "%s is '%.40s': wanted is a number of bytes, like 512M or 4G", known_as(a, name), v);
        return false;
    }
    *ret = (uint64_t)n << shift;
    return true;
}

bool cmd_word(const struct cmd_args *a, const char *name, const char *const *words, size_t n, uint32_t *ret)
{
    const char *v = cmd_value(a, name);
    char list[160] = "";
    if (!v)
        return true;
    for (size_t i = 0; i < n; i++) {
        if (!strcmp(v, words[i])) {
            *ret = (uint32_t)i;
            return true;
        }
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? " or " : "", words[i]);
    }
    cmd_usage_error(a->cmd, "%s is '%.40s': wanted is %s", known_as(a, name), v, list);
    return false;
}

bool cmd_mode(const struct cmd_args *a, const char *name, struct mode *ret)
{
    const char *v = cmd_value(a, name);
    if (!v || !mode_parse(v, ret))
        return true;
    cmd_usage_error(a->cmd, "%s is '%.40s': wanted is sync, ssp:S (S = steps that a worker may be ahead) or async",
                    known_as(a, name), v);
    return false;
}

bool cmd_text(const struct cmd_args *a, const char *name, char *ret, size_t size)
{
    const char *v = cmd_value(a, name);
    if (!v)
        return true;
    size_t n = strspn(v, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-");
    if (n == 0 || v[n] || str_copy(ret, size, v)) {
        cmd_usage_error(a->cmd, "%s is '%.80s': wanted are 1 to %zu letters, digits, '.', '_' or '-'",
                        known_as(a, name), v, size - 1);
        return false;
    }
    return true;
}

static bool token_from_file(const struct cmd_args *a, const char *path, char *ret)
{
    char text[TOKEN_MAX_BYTES_CMD + 2];
    FILE *f = fopen(path, "re");
    if (!f) {
        cmd_usage_error(a->cmd, "%s: cannot read %.200s: %m", known_as(a, "--token-file"), path);
        return false;
    }
    size_t n = fread(text, 1, sizeof text - 1, f);
    bool bad = ferror(f) != 0;
    fclose(f);
    while (n && (text[n - 1] == '\n' || text[n - 1] == '\r'))
        n--;
    text[n] = 0;
    if (bad || n == 0 || n > TOKEN_MAX_BYTES_CMD || memchr(text, 0, n)) {
        cmd_usage_error(a->cmd, "%s: %.200s must hold 1 to %d bytes of text", known_as(a, "--token-file"), path,
                        TOKEN_MAX_BYTES_CMD);
        return false;
    }
    memcpy(ret, text, n + 1);
    return true;
}

bool cmd_token(const struct cmd_args *a, char *ret)
{
    const char *path = cmd_value(a, "--token-file"), *v = getenv("KEEPSTEP_TOKEN");
    if (path && (!v || !*v || !a->from_variable[index_of(a, "--token-file")]))
        return token_from_file(a, path, ret);
    if (path) {
        cmd_usage_error(a->cmd, "KEEPSTEP_TOKEN and KEEPSTEP_TOKEN_FILE are both set: give one of them");
        return false;
    }
    if (str_copy(ret, TOKEN_MAX_BYTES_CMD + 1, v ? v : "")) {
        cmd_usage_error(a->cmd, "KEEPSTEP_TOKEN has more than %d bytes", TOKEN_MAX_BYTES_CMD);
        return false;
    }
    return true;
}

bool cmd_coord(const struct cmd_args *a, const char **ret)
{
    const char *v = cmd_value(a, "--coord");
    if (!v) {
        cmd_usage_error(a->cmd, "--coord is missing: give the coordination store (or KEEPSTEP_COORD), "
                                "local:DIR or etcd:URL[,URL...]");
        return false;
    }
    if ((strncmp(v, "local:", 6) || !v[6]) && (strncmp(v, "etcd:", 5) || !v[5])) {
        cmd_usage_error(a->cmd, "%s is '%.100s': wanted is local:DIR or etcd:URL[,URL...]", known_as(a, "--coord"), v);
        return false;
    }
    *ret = v;
    return true;
}
