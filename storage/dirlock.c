#include "storage/dirlock.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/keepstep_err.h"
#include "storage/store_record.h"

static int failed(int code, char *err, const char *dir, const char *what)
{
    store_say(err, "%.100s: %s: %s", dir, what, strerror(errno));
    return code;
}

static int busy_text(const char *dir, int fd, char *err)
{
    char text[32] = "";
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    long pid = n > 0 ? strtol(text, NULL, 10) : 0;
    if (pid > 0)
        store_say(err, "%.100s is in use by process %ld", dir, pid);
    else
        store_say(err, "%.100s is in use by another process", dir);
    return KS_EBUSY;
}

/* May fail: only the text of a later message depends on it, and a full disk must not keep us from reading. */
static void pid_write(int fd)
{
    char text[32];
    int n = snprintf(text, sizeof text, "%ld\n", (long)getpid());
    ssize_t written = ftruncate(fd, 0) == 0 ? pwrite(fd, text, (size_t)n, 0) : -1;
    (void)written;
}

int dirlock_take(const char *dir, int *ret_fd, char *err)
{
    char path[PATH_MAX];
    int rc;
    if (snprintf(path, sizeof path, "%s/%s", dir, DIRLOCK_FILE) >= (int)sizeof path) {
        store_say(err, "the name of the directory is too long");
        return KS_EINVAL;
    }
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0)
        return failed(KS_EIO, err, dir, "cannot create " DIRLOCK_FILE);
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        rc = errno == EWOULDBLOCK ? busy_text(dir, fd, err) : failed(KS_EIO, err, dir, "cannot lock " DIRLOCK_FILE);
        goto close_fd;
    }
    pid_write(fd);
    *ret_fd = fd;
    return 0;
close_fd:
    close(fd);
    return rc;
}

void dirlock_release(int fd)
{
    close(fd);
}

static int parent_sync(const char *dir, char *err)
{
    char parent[PATH_MAX];
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/')
        n--;
    while (n > 0 && dir[n - 1] != '/')
        n--;
    if (n == 0)
        return dir_sync(".", err);
    snprintf(parent, sizeof parent, "%.*s", (int)n, dir);
    return dir_sync(parent, err);
}

static int dir_create(const char *dir, char *err)
{
    if (mkdir(dir, 0755) != 0 && errno != EEXIST)
        return failed(errno == ENOENT ? KS_ENOENT : KS_EIO, err, dir, "cannot create the directory");
    return parent_sync(dir, err);
}

int dir_ensure(const char *dir, int create, char *err)
{
    struct stat st;
    if (stat(dir, &st) == 0) {
        if (S_ISDIR(st.st_mode))
            return 0;
        store_say(err, "%.100s is not a directory", dir);
        return KS_ECORRUPT;
    }
    if (errno != ENOENT)
        return failed(KS_EIO, err, dir, "cannot look at it");
    if (create)
        return dir_create(dir, err);
    store_say(err, "%.100s does not exist", dir);
    return KS_ENOENT;
}

int dir_sync(const char *dir, char *err)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return failed(KS_EIO, err, dir, "cannot open the directory");
    int rc = fsync(fd);
    if (rc != 0)
        rc = failed(KS_EIO, err, dir, "cannot sync the directory");
    close(fd);
    return rc;
}

static int entry_ignored(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strcmp(name, "lost+found") == 0 ||
           strcmp(name, DIRLOCK_FILE) == 0;
}

int dir_has_other(const char *dir, int (*known)(const char *entry), char *err)
{
    DIR *d = opendir(dir);
    int other = 0;
    if (d == NULL)
        return failed(KS_EIO, err, dir, "cannot read the directory");
    for (struct dirent *e = readdir(d); e != NULL && !other; e = readdir(d))
        other = !entry_ignored(e->d_name) && !known(e->d_name);
    closedir(d);
    return other;
}
