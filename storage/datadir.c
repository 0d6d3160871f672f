#include "storage/datadir.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/mem.h"
#include "storage/dirlock.h"
#include "storage/store_record.h"

#define SERVER_FILE "keepstep.server"
#define SERVER_TEMP "keepstep.server.tmp"

enum { SERVER_FILE_MAX = 4096 };

/* ---- the text ---- */

static int text_field_ok(const char *s)
{
    if (*s == '\0' || strlen(s) >= DATADIR_TEXT_MAX)
        return 0;
    for (; *s != '\0'; s++) {
        if (iscntrl((unsigned char)*s))
            return 0;
    }
    return 1;
}

static int text_make(const struct datadir *d, char text[SERVER_FILE_MAX])
{
    int n = snprintf(text, SERVER_FILE_MAX,
                     "keepstep %d\njob=%s\nname=%s\nloops=%" PRIu32 "\nnshards=%" PRIu32 "\nchunk_bytes=%" PRIu32
                     "\ncreated=%" PRIu64
                     "\nlife=%" PRIu64,
                     STORE_FORMAT, d->job, d->name, d->loops, d->nshards, d->chunk_bytes, d->created, d->life);
    for (uint32_t i = 0; i < d->nformer && n < SERVER_FILE_MAX; i++)
        n += snprintf(text + n, (size_t)(SERVER_FILE_MAX - n), ",%" PRIu64, d->former[i]);
    if (n < SERVER_FILE_MAX)
        n += snprintf(text + n, (size_t)(SERVER_FILE_MAX - n), "\n");
    return n;
}

/* Decimal digits only, at most max. */
static int number_parse(const char *s, uint64_t max, uint64_t *ret)
{
    uint64_t v = 0;
    if (*s == '\0' || (s[0] == '0' && s[1] != '\0'))
        return -1;
    for (; *s != '\0'; s++) {
        uint64_t digit = (uint64_t)(*s - '0');
        if (*s < '0' || *s > '9' || v > (max - digit) / 10)
            return -1;
        v = v * 10 + digit;
    }
    *ret = v;
    return 0;
}

static int number_parse_u32(const char *s, uint32_t min, uint32_t max, uint32_t *ret)
{
    uint64_t v;
    if (number_parse(s, max, &v) != 0 || v < min)
        return -1;
    *ret = (uint32_t)v;
    return 0;
}

static int text_parse_field(const char *s, char ret[DATADIR_TEXT_MAX])
{
    return text_field_ok(s) ? str_copy(ret, DATADIR_TEXT_MAX, s) : -1;
}

/* The newest life, and those before it behind commas. */
static int lives_parse(const char *s, struct datadir *d)
{
    char copy[SERVER_FILE_MAX + 1], *at = copy, *one;
    uint64_t life = 0;
    if (str_copy(copy, sizeof copy, s))
        return -1;
    d->nformer = 0;
    if (number_parse(strsep(&at, ","), UINT64_MAX, &d->life))
        return -1;
    while ((one = strsep(&at, ",")) != NULL) {
        if (d->nformer == DATADIR_FORMER_MAX || number_parse(one, UINT64_MAX, &life) || life == 0 || d->life == 0)
            return -1;
        d->former[d->nformer++] = life;
    }
    return 0;
}

enum { KEY_JOB, KEY_NAME, KEY_LOOPS, KEY_NSHARDS, KEY_CHUNK_BYTES, KEY_CREATED, KEY_LIFE, KEYS };
static const char *const key_name[KEYS] = {"job", "name", "loops", "nshards", "chunk_bytes", "created", "life"};

static int value_parse(int key, const char *value, struct datadir *d)
{
    switch (key) {
    case KEY_JOB:
        return text_parse_field(value, d->job);
    case KEY_NAME:
        return text_parse_field(value, d->name);
    case KEY_LOOPS:
        return number_parse_u32(value, 1, DATADIR_LOOPS_MAX, &d->loops);
    case KEY_NSHARDS:
        return number_parse_u32(value, 1, UINT32_MAX, &d->nshards);
    case KEY_CHUNK_BYTES:
        return number_parse_u32(value, 1, UINT32_MAX, &d->chunk_bytes);
    case KEY_CREATED:
        return number_parse(value, UINT64_MAX, &d->created);
    default:
        return lives_parse(value, d);
    }
}

/* *seen: a bit for each key. Keys that this program does not know are another version's: refused. */
static int line_parse(char *line, unsigned *seen, struct datadir *d, char *err)
{
    char *value = strchr(line, '=');
    int key = 0;
    if (value != NULL)
        *value++ = '\0';
    while (key < KEYS && strcmp(line, key_name[key]) != 0)
        key++;
    if (value == NULL || key == KEYS || (*seen & 1u << key)) {
        store_say(err, "the line \"%.40s\" is not understood", line);
        return KS_ECORRUPT;
    }
    *seen |= 1u << key;
    if (value_parse(key, value, d) == 0)
        return 0;
    store_say(err, "the value of %s is not valid", key_name[key]);
    return KS_ECORRUPT;
}

static int format_parse(const char *line, char *err)
{
    uint64_t format;
    if (strncmp(line, "keepstep ", 9) != 0 || number_parse(line + 9, UINT32_MAX, &format) != 0 || format == 0) {
        store_say(err, "it does not start with a line \"keepstep %d\"", STORE_FORMAT);
        return KS_ECORRUPT;
    }
    if (format == STORE_FORMAT)
        return 0;
    store_say(err, "it has format %" PRIu64 " and this program knows format %d; use the program that wrote it", format,
              STORE_FORMAT);
    return KS_EVERSION;
}

/* Ends the line at *at and moves *at behind it; NULL when there is no whole line left. */
static char *line_next(char **at)
{
    char *line = *at, *end = strchr(line, '\n');
    if (end == NULL)
        return NULL;
    *end = '\0';
    *at = end + 1;
    return line;
}

int datadir_text_parse(const char *text, size_t size, struct datadir *ret, char *err)
{
    char copy[SERVER_FILE_MAX + 1], *at = copy, *line;
    struct datadir d = *ret;
    unsigned seen = 0;
    if (size > SERVER_FILE_MAX || memchr(text, '\0', size) != NULL) {
        store_say(err, "it is not text of at most %d bytes", SERVER_FILE_MAX);
        return KS_ECORRUPT;
    }
    memcpy(copy, text, size);
    copy[size] = '\0';
    line = line_next(&at);
    int rc = format_parse(line != NULL ? line : "", err);
    while (rc == 0 && (line = line_next(&at)) != NULL)
        rc = line_parse(line, &seen, &d, err);
    if (rc != 0)
        return rc;
    if (*at != '\0' || seen != (1u << KEYS) - 1) {
        store_say(err, "it is cut short");
        return KS_ECORRUPT;
    }
    *ret = d;
    return 0;
}

/* ---- the file ---- */

static int io_failed(const struct datadir *d, const char *what, char *err)
{
    int code = errno == ENOSPC || errno == EDQUOT ? KS_EFULL : KS_EIO;
    store_say(err, "%.120s: cannot %s %s: %s", d->dir, what, SERVER_FILE, strerror(errno));
    return code;
}

static void path_make(const struct datadir *d, const char *file, char ret[PATH_MAX])
{
    snprintf(ret, PATH_MAX, "%s/%s", d->dir, file);
}

static int temp_write(const char *path, const char *text, size_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0)
        return -1;
    ssize_t n = write(fd, text, size);
    if (n >= 0 && (size_t)n < size)
        errno = ENOSPC;
    int rc = n == (ssize_t)size ? fsync(fd) : -1;
    int cause = errno;
    close(fd);
    errno = cause;
    return rc;
}

static int server_write(const struct datadir *d, char *err)
{
    char temp[PATH_MAX], path[PATH_MAX], text[SERVER_FILE_MAX];
    int n = text_make(d, text);
    path_make(d, SERVER_TEMP, temp);
    path_make(d, SERVER_FILE, path);
    if (temp_write(temp, text, (size_t)n) != 0 || rename(temp, path) != 0)
        return io_failed(d, "write", err);
    return dir_sync(d->dir, err);
}

/* KS_ENOENT, with no text: there is none. */
static int server_read(struct datadir *d, char *err)
{
    char path[PATH_MAX], text[SERVER_FILE_MAX + 1], why[STORE_ERR_TEXT];
    path_make(d, SERVER_FILE, path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? KS_ENOENT : io_failed(d, "open", err);
    ssize_t n = read(fd, text, sizeof text);
    int rc = n < 0 ? io_failed(d, "read", err) : 0;
    close(fd);
    if (rc != 0)
        return rc;
    rc = datadir_text_parse(text, (size_t)n, d, why);
    if (rc != 0)
        store_say(err, "%.120s/%s: %s", d->dir, SERVER_FILE, why);
    return rc;
}

/* ---- opening ---- */

static int number_same(const struct datadir *d, const char *what, uint32_t has, uint32_t asked, char *err)
{
    if (asked == 0 || asked == has)
        return 0;
    store_say(err, "%.120s has %s %" PRIu32 " and %" PRIu32 " was asked for; use %" PRIu32 " or another directory",
              d->dir, what, has, asked, has);
    return KS_EEXIST;
}

static int recorded_compare(const struct datadir *d, const struct datadir_config *c, char *err)
{
    if (strcmp(d->job, c->job) != 0) {
        store_say(err, "%.80s is of job \"%.60s\", not of job \"%.60s\"; use another directory", d->dir, d->job,
                  c->job);
        return KS_EEXIST;
    }
    if (c->created && d->created != c->created) {
        store_say(err, "%.80s is of an earlier job \"%.60s\", which was forgotten (stop --purge); use an empty directory", d->dir,
                  d->job);
        return KS_EEXIST;
    }
    int rc = number_same(d, "loops", d->loops, c->loops, err);
    if (rc == 0)
        rc = number_same(d, "nshards", d->nshards, c->nshards, err);
    if (rc == 0)
        rc = number_same(d, "chunk_bytes", d->chunk_bytes, c->chunk_bytes, err);
    return rc;
}

static int recorded_open(struct datadir *d, const struct datadir_config *c, char *err)
{
    int rc = recorded_compare(d, c, err);
    if (rc != 0 || c->name == NULL || strcmp(c->name, d->name) == 0)
        return rc;
    str_copy(d->name, sizeof d->name, c->name);
    return server_write(d, err);
}

static int new_open(struct datadir *d, const struct datadir_config *c, char *err)
{
    if (c->name == NULL || c->loops == 0 || c->nshards == 0 || c->chunk_bytes == 0) {
        store_say(err, "%.120s is new: a name, loops, nshards and chunk_bytes are needed", d->dir);
        return KS_EINVAL;
    }
    str_copy(d->job, sizeof d->job, c->job);
    str_copy(d->name, sizeof d->name, c->name);
    d->created = c->created;
    d->loops = c->loops;
    d->nshards = c->nshards;
    d->chunk_bytes = c->chunk_bytes;
    return server_write(d, err);
}

static int config_check(const struct datadir_config *c, char *err)
{
    if (!text_field_ok(c->job) || (c->name != NULL && !text_field_ok(c->name))) {
        store_say(err, "the names of job and server must have 1 to %d bytes and no control characters",
                  DATADIR_TEXT_MAX - 1);
        return KS_EINVAL;
    }
    if (c->loops > DATADIR_LOOPS_MAX) {
        store_say(err, "loops is %" PRIu32 ", at most %d are possible", c->loops, DATADIR_LOOPS_MAX);
        return KS_EINVAL;
    }
    if (strlen(c->dir) == 0 || strlen(c->dir) >= sizeof((struct datadir *)0)->dir) {
        store_say(err, "the name of the data directory must have 1 to %zu bytes", sizeof((struct datadir *)0)->dir - 1);
        return KS_EINVAL;
    }
    return 0;
}

static int entry_known(const char *name)
{
    return strcmp(name, SERVER_TEMP) == 0;
}

/* No keepstep.server in it: only an empty directory may become ours. Nothing is written before this is known. */
static int unowned_check(const struct datadir *d, int create, char *err)
{
    char path[PATH_MAX];
    path_make(d, SERVER_FILE, path);
    if (access(path, F_OK) == 0)
        return 0;
    int rc = dir_has_other(d->dir, entry_known, err);
    if (rc == 1) {
        store_say(err, "%.120s is not a Keepstep data directory (no %s in it); choose an empty one", d->dir,
                  SERVER_FILE);
        return KS_ECORRUPT;
    }
    if (rc == 0 && !create) {
        store_say(err, "%.120s is empty, not a Keepstep data directory", d->dir);
        return KS_ENOENT;
    }
    return rc;
}

int datadir_open(const struct datadir_config *c, struct datadir *ret, char *err)
{
    struct datadir d = {0};
    int rc = config_check(c, err);
    if (rc != 0)
        return rc;
    str_copy(d.dir, sizeof d.dir, c->dir);
    rc = dir_ensure(d.dir, c->create, err);
    if (rc == 0)
        rc = unowned_check(&d, c->create, err);
    if (rc == 0)
        rc = dirlock_take(d.dir, &d.lock_fd, err);
    if (rc != 0)
        return rc;
    rc = server_read(&d, err);
    if (rc == 0)
        rc = recorded_open(&d, c, err);
    else if (rc == KS_ENOENT)
        rc = new_open(&d, c, err);
    if (rc != 0)
        goto release_lock;
    d.fresh = d.life == 0;
    *ret = d;
    return 0;
release_lock:
    dirlock_release(d.lock_fd);
    return rc;
}

int datadir_life_set(struct datadir *d, uint64_t life, char *err)
{
    struct datadir next = *d;
    CHECK(life != 0);
    if (d->life) {
        uint32_t kept = d->nformer < DATADIR_FORMER_MAX ? d->nformer : DATADIR_FORMER_MAX - 1;
        memcpy(next.former + 1, d->former, kept * sizeof *d->former);
        next.former[0] = d->life;
        next.nformer = kept + 1;
    }
    next.life = life;
    next.fresh = 0;
    int rc = server_write(&next, err);
    if (rc == 0)
        *d = next;
    return rc;
}

void datadir_loop_dir(const struct datadir *d, uint32_t loop, char ret[PATH_MAX])
{
    CHECK(loop < d->loops);
    snprintf(ret, PATH_MAX, "%s/loop-%" PRIu32, d->dir, loop);
}

void datadir_close(struct datadir *d)
{
    dirlock_release(d->lock_fd);
    d->lock_fd = -1;
}
