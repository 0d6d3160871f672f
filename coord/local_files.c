#include "coord/local_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "coord/local_store.h"

enum { BOOT_ID = 36 };

/* The time stands twice, so that a reader sees when it read half of a new one. */
struct lease_record {
    char boot[BOOT_ID];
    uint32_t zero;
    uint64_t touched_us, again_us;
};

static void boot_id(char *out)
{
    memset(out, 0, BOOT_ID);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    if (read(fd, out, BOOT_ID) < 0)
        memset(out, 0, BOOT_ID);
    close(fd);
}

static int make_dirs(const char *dir)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", dir);
    for (char *p = path + 1; *p; p++) {
        if (*p != '/')
            continue;
        *p = 0;
        if (mkdir(path, 0755) && errno != EEXIST)
            return -1;
        *p = '/';
    }
    return mkdir(path, 0700) && errno != EEXIST ? -1 : 0;
}

static int open_inside(const struct local_files *f, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", f->dir, name);
    return open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
}

static bool watch_start(struct local_files *f)
{
    char path[PATH_MAX];
    f->inotify_fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (f->inotify_fd < 0)
        return false;
    snprintf(path, sizeof path, "%s/notify", f->dir);
    f->notify_watch = inotify_add_watch(f->inotify_fd, path, IN_MODIFY | IN_CLOSE_WRITE);
    snprintf(path, sizeof path, "%s/leases", f->dir);
    f->leases_watch = inotify_add_watch(f->inotify_fd, path, IN_CLOSE_WRITE);
    if (f->notify_watch >= 0 && f->leases_watch >= 0)
        return true;
    close(f->inotify_fd);
    f->inotify_fd = -1;
    return false;
}

int local_files_open(const char *dir, struct local_files *ret, char *err)
{
    struct local_files f = {.writer_fd = -1, .notify_fd = -1, .inotify_fd = -1};
    char path[PATH_MAX];
    if (str_copy(f.dir, sizeof f.dir, dir)) {
        snprintf(err, COORD_ERR_TEXT, "local store: the directory's name is longer than %zu bytes", sizeof f.dir - 1);
        return KS_EINVAL;
    }
    snprintf(path, sizeof path, "%s/leases", dir);
    if (make_dirs(path))
        goto failed;
    f.writer_fd = open_inside(&f, "writer.lock");
    f.notify_fd = open_inside(&f, "notify");
    if (f.writer_fd < 0 || f.notify_fd < 0)
        goto failed;
    if (!watch_start(&f))
        log_warn("coord_local_polls", "dir=\"%s\" cause=\"inotify: %s\" remedy=\"raise fs.inotify.max_user_instances\"",
                 dir, strerror(errno));
    *ret = f;
    return 0;
failed:
    snprintf(err, COORD_ERR_TEXT, "local store %.150s: %s", dir, strerror(errno));
    local_files_close(&f);
    return KS_EIO;
}

void local_files_close(struct local_files *f)
{
    if (f->inotify_fd >= 0)
        close(f->inotify_fd);
    if (f->notify_fd >= 0)
        close(f->notify_fd);
    if (f->writer_fd >= 0)
        close(f->writer_fd);
}

static int lock_set(int fd, short type)
{
    struct flock l = {.l_type = type, .l_whence = SEEK_SET};
    return fcntl(fd, F_OFD_SETLK, &l);
}

bool local_writer_try(struct local_files *f)
{
    return lock_set(f->writer_fd, F_WRLCK) == 0;
}

void local_writer_release(struct local_files *f)
{
    lock_set(f->writer_fd, F_UNLCK);
}

void local_notify(struct local_files *f, int64_t revision)
{
    if (pwrite(f->notify_fd, &revision, sizeof revision, 0) < 0)
        log_warn("coord_local_notify", "dir=\"%s\" cause=\"%s\"", f->dir, strerror(errno));
}

static void drain_buffer(const struct local_files *f, const char *buffer, ssize_t size, bool *changed, bool *died)
{
    for (const char *p = buffer; p < buffer + size;) {
        const struct inotify_event *e = (const struct inotify_event *)p;
        bool all = e->mask & (IN_Q_OVERFLOW | IN_IGNORED);
        *changed |= all || e->wd == f->notify_watch;
        *died |= all || e->wd == f->leases_watch || (e->mask & IN_CLOSE_WRITE);
        p += sizeof *e + e->len;
    }
}

void local_files_drain(struct local_files *f, bool *ret_changed, bool *ret_died)
{
    _Alignas(struct inotify_event) char buffer[4096];
    bool changed = f->inotify_fd < 0, died = changed;
    while (f->inotify_fd >= 0) {
        ssize_t n = read(f->inotify_fd, buffer, sizeof buffer);
        if (n <= 0)
            break;
        drain_buffer(f, buffer, n, &changed, &died);
    }
    *ret_changed = changed;
    *ret_died = died;
}

static void lease_path(const struct local_files *f, int64_t lease, char *out)
{
    snprintf(out, PATH_MAX, "%s/leases/%lld", f->dir, (long long)lease);
}

int local_lease_create(const struct local_files *f, int64_t lease, uint64_t now_us)
{
    char path[PATH_MAX];
    struct lease_record record = {.touched_us = now_us, .again_us = now_us};
    lease_path(f, lease, path);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    boot_id(record.boot);
    if (fd >= 0 && lock_set(fd, F_WRLCK) == 0 && pwrite(fd, &record, sizeof record, 0) == sizeof record)
        return fd;
    log_error("coord_lease_file", "path=\"%s\" cause=\"%s\"", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    return KS_EIO;
}

void local_lease_touch(int fd, uint64_t now_us)
{
    uint64_t twice[2] = {now_us, now_us};
    if (pwrite(fd, twice, sizeof twice, offsetof(struct lease_record, touched_us)) != sizeof twice)
        log_error("coord_lease_touch", "cause=\"%s\"", strerror(errno));
}

bool local_lease_alive(const struct local_files *f, int64_t lease, uint32_t ttl_ms, uint64_t now_us,
                       uint64_t *ret_until_us)
{
    char path[PATH_MAX], boot[BOOT_ID];
    struct lease_record record;
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    lease_path(f, lease, path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    /* Out of descriptors and the like say nothing about the owner. */
    if (fd < 0) {
        *ret_until_us = now_us + (uint64_t)ttl_ms * 1000;
        return errno != ENOENT;
    }
    bool locked = fcntl(fd, F_OFD_GETLK, &l) == 0 && l.l_type != F_UNLCK;
    ssize_t n = pread(fd, &record, sizeof record, 0);
    close(fd);
    boot_id(boot);
    if (!locked || n != sizeof record || memcmp(record.boot, boot, BOOT_ID) != 0)
        return false;
    uint64_t touched = record.touched_us == record.again_us ? record.touched_us : now_us;
    *ret_until_us = touched + (uint64_t)ttl_ms * 1000;
    return *ret_until_us > now_us;
}

void local_lease_remove(const struct local_files *f, int64_t lease)
{
    char path[PATH_MAX];
    lease_path(f, lease, path);
    if (unlink(path) && errno != ENOENT)
        log_warn("coord_lease_remove", "path=\"%s\" cause=\"%s\"", path, strerror(errno));
}

static bool lease_known(const struct local_lease *known, size_t n, int64_t lease)
{
    size_t low = 0, high = n;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (known[mid].id == lease)
            return true;
        if (known[mid].id < lease)
            low = mid + 1;
        else
            high = mid;
    }
    return false;
}

void local_lease_clean(const struct local_files *f, const struct local_lease *known, size_t n)
{
    char path[PATH_MAX], *end;
    struct dirent *entry;
    snprintf(path, sizeof path, "%s/leases", f->dir);
    DIR *d = opendir(path);
    while (d && (entry = readdir(d))) {
        long long lease = strtoll(entry->d_name, &end, 10);
        if (entry->d_name[0] != '.' && !*end && !lease_known(known, n, lease))
            local_lease_remove(f, lease);
    }
    if (d)
        closedir(d);
}
