#include "worker/settings.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"

#define TIMEOUT_S_MAX (100ll * 365 * 24 * 3600)
enum { TIMEOUT_S = 600 };

/* An empty variable counts as one that is not set. */
static const char *variable(const char *name)
{
    const char *v = getenv(name);
    return v && *v ? v : NULL;
}

static int read_coord(const char *option, struct settings *s, char *err)
{
    const char *v = option ? option : variable("KEEPSTEP_COORD");
    if (!v || !*v) {
        snprintf(err, SETTINGS_ERR,
                 "KEEPSTEP_COORD is not set: give the coordination store, local:DIR or etcd:URL[,URL]");
        return KS_EINVAL;
    }
    if ((strncmp(v, "local:", 6) || !v[6]) && (strncmp(v, "etcd:", 5) || !v[5])) {
        snprintf(err, SETTINGS_ERR, "KEEPSTEP_COORD is \"%.100s\": wanted is local:DIR or etcd:URL[,URL]", v);
        return KS_EINVAL;
    }
    s->coord = mem_strdup(v);
    return 0;
}

static int read_job(const char *option, struct settings *s, char *err)
{
    const char *v = option ? option : variable("KEEPSTEP_JOB");
    if (!v)
        v = "default";
    size_t n = strspn(v, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-");
    if (n == 0 || v[n] || str_copy(s->job, sizeof s->job, v)) {
        snprintf(err, SETTINGS_ERR, "KEEPSTEP_JOB is \"%.80s\": wanted are 1 to %d letters, digits, '.', '_' or '-'", v,
                 NAME_MAX_BYTES - 1);
        return KS_EINVAL;
    }
    return 0;
}

static int read_name(const char *option, struct settings *s, char *err)
{
    const char *v = option ? option : variable("KEEPSTEP_NAME");
    if (!v) {
        char host[NAME_MAX_BYTES - 12] = "";
        if (gethostname(host, sizeof host - 1))
            snprintf(host, sizeof host, "host");
        snprintf(s->name, sizeof s->name, "%s:%ld", host, (long)getpid());
        return 0;
    }
    const char *bad = v;
    while (isgraph((unsigned char)*bad) && *bad != '"')
        bad++;
    if (!*v || *bad || str_copy(s->name, sizeof s->name, v)) {
        snprintf(err, SETTINGS_ERR,
                 "KEEPSTEP_NAME is \"%.80s\": wanted are 1 to %d printable characters without blanks or quotes", v,
                 NAME_MAX_BYTES - 1);
        return KS_EINVAL;
    }
    return 0;
}

static int token_from_file(const char *path, struct settings *s, char *err)
{
    char text[TOKEN_MAX_BYTES + 2];
    FILE *f = fopen(path, "re");
    if (!f) {
        snprintf(err, SETTINGS_ERR, "KEEPSTEP_TOKEN_FILE: cannot read %.120s: %s", path, strerror(errno));
        return KS_EINVAL;
    }
    size_t n = fread(text, 1, sizeof text - 1, f);
    bool bad = ferror(f);
    fclose(f);
    while (n && (text[n - 1] == '\n' || text[n - 1] == '\r'))
        n--;
    text[n] = 0;
    if (bad || n == 0 || n > TOKEN_MAX_BYTES || memchr(text, 0, n)) {
        snprintf(err, SETTINGS_ERR, "KEEPSTEP_TOKEN_FILE: %.120s must hold 1 to %d bytes of text", path,
                 TOKEN_MAX_BYTES);
        return KS_EINVAL;
    }
    s->token = mem_strdup(text);
    return 0;
}

static int read_token(const char *option, struct settings *s, char *err)
{
    const char *v = option ? option : variable("KEEPSTEP_TOKEN"), *path = variable("KEEPSTEP_TOKEN_FILE");
    if (!v && path)
        return token_from_file(path, s, err);
    if (v && !option && path) {
        snprintf(err, SETTINGS_ERR, "KEEPSTEP_TOKEN and KEEPSTEP_TOKEN_FILE are both set: give one of them");
        return KS_EINVAL;
    }
    if (v && strlen(v) > TOKEN_MAX_BYTES) {
        snprintf(err, SETTINGS_ERR, "KEEPSTEP_TOKEN has more than %d bytes", TOKEN_MAX_BYTES);
        return KS_EINVAL;
    }
    s->token = mem_strdup(v ? v : "");
    return 0;
}

static int read_number(const char *name, int64_t otherwise, int64_t min, int64_t max, int64_t *ret, char *err)
{
    const char *v = variable(name);
    if (!v) {
        *ret = otherwise;
        return 0;
    }
    char *end;
    errno = 0;
    long long n = strtoll(v, &end, 10);
    if (errno || *end || n < min || n > max) {
        snprintf(err, SETTINGS_ERR, "%s is \"%.60s\": wanted is a whole number from %lld to %lld", name, v,
                 (long long)min, (long long)max);
        return KS_EINVAL;
    }
    *ret = n;
    return 0;
}

static int read_numbers(const struct ks_options *o, struct settings *s, char *err)
{
    int64_t size = o->local_size, seconds;
    int rc = size ? 0 : read_number("KEEPSTEP_LOCAL_SIZE", 1, 1, LOCAL_SIZE_MAX, &size, err);
    if (rc)
        return rc;
    if (size > LOCAL_SIZE_MAX || o->timeout_ms < 0 || o->join_timeout_ms < 0) {
        snprintf(err, SETTINGS_ERR,
                 "options: local_size is at most %d, timeout_ms and join_timeout_ms are not negative", LOCAL_SIZE_MAX);
        return KS_EINVAL;
    }
    s->local_size = (uint32_t)size;
    rc = read_number("KEEPSTEP_TIMEOUT", TIMEOUT_S, 1, TIMEOUT_S_MAX, &seconds, err);
    if (rc && !o->timeout_ms)
        return rc;
    s->timeout_ms = o->timeout_ms ? o->timeout_ms : seconds * 1000;
    s->join_timeout_ms = o->join_timeout_ms ? o->join_timeout_ms : s->timeout_ms;
    if (s->timeout_ms > TIMEOUT_S_MAX * 1000)
        s->timeout_ms = TIMEOUT_S_MAX * 1000;
    if (s->join_timeout_ms > TIMEOUT_S_MAX * 1000)
        s->join_timeout_ms = TIMEOUT_S_MAX * 1000;
    return 0;
}

int settings_read(const struct ks_options *options, struct settings *ret, char *err)
{
    static const struct ks_options none;
    const struct ks_options *o = options ? options : &none;
    struct settings s = {0};
    int rc = read_coord(o->coord, &s, err);
    if (!rc)
        rc = read_job(o->job, &s, err);
    if (!rc)
        rc = read_name(o->name, &s, err);
    if (!rc)
        rc = read_token(o->token, &s, err);
    if (!rc)
        rc = read_numbers(o, &s, err);
    if (rc) {
        settings_done(&s);
        return rc;
    }
    *ret = s;
    return 0;
}

void settings_done(struct settings *s)
{
    mem_free(s->coord);
    mem_free(s->token);
    s->coord = s->token = NULL;
}
