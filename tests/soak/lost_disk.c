/* Disk that fails: once a file exists, every access to the files below a folder fails with EIO.
 *
 * Preloaded into a rank and its reading processes (LD_PRELOAD). LOST_DISK is the folder, LOST_DISK_WHEN the file.
 * The other ranks load it too; only the rank LOST_DISK_RANK loses its disk. Mapped files are not covered.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_lost(void) {
    static const char *rank, *target, *when;
    if (!when) {
        rank = getenv("RANK"), target = getenv("LOST_DISK_RANK"), when = getenv("LOST_DISK_WHEN");
        if (!when) when = "";
    }
    return *when && rank && target && !strcmp(rank, target) && faccessat(AT_FDCWD, when, F_OK, 0) == 0;
}

static int below(const char *path) {
    const char *folder = getenv("LOST_DISK");
    return folder && path && !strncmp(path, folder, strlen(folder));
}

static int fails_fd(int fd) {
    char link[64], path[PATH_MAX];
    int saved = errno;
    if (!is_lost()) { errno = saved; return 0; }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length < 0) return 0;
    path[length] = 0;
    if (!below(path)) return 0;
    errno = EIO;
    return 1;
}

static int fails_path(const char *path) {
    int saved = errno;
    int lost = below(path) && is_lost();
    errno = lost ? EIO : saved;
    return lost;
}

#define NEXT(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

#define WRAP_FD(type, name, parameters, arguments, ...) \
    type name parameters { \
        static type (*next)(__VA_ARGS__); \
        if (!next) next = NEXT(type, #name, __VA_ARGS__); \
        return fails_fd(fd) ? -1 : next arguments; \
    }

WRAP_FD(ssize_t, read, (int fd, void *p, size_t n), (fd, p, n), int, void *, size_t)
WRAP_FD(ssize_t, write, (int fd, const void *p, size_t n), (fd, p, n), int, const void *, size_t)
WRAP_FD(ssize_t, pread, (int fd, void *p, size_t n, off_t o), (fd, p, n, o), int, void *, size_t, off_t)
WRAP_FD(ssize_t, pread64, (int fd, void *p, size_t n, off_t o), (fd, p, n, o), int, void *, size_t, off_t)
WRAP_FD(ssize_t, pwrite, (int fd, const void *p, size_t n, off_t o), (fd, p, n, o), int, const void *, size_t, off_t)
WRAP_FD(ssize_t, pwrite64, (int fd, const void *p, size_t n, off_t o), (fd, p, n, o), int, const void *, size_t, off_t)
WRAP_FD(ssize_t, preadv, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o), int, const struct iovec *, int, off_t)

WRAP_FD(ssize_t, pwritev, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o), int, const struct iovec *, int, off_t)
WRAP_FD(int, fsync, (int fd), (fd), int)
WRAP_FD(int, fdatasync, (int fd), (fd), int)

#define WRAP_OPEN(name) \
    int name(const char *path, int flags, ...) { \
        static int (*next)(const char *, int, mode_t); \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list); \
        if (!next) next = NEXT(int, #name, const char *, int, mode_t); \
        return fails_path(path) ? -1 : next(path, flags, mode); \
    }

WRAP_OPEN(open)
WRAP_OPEN(open64)

#define WRAP_PATH(name, parameters, arguments, ...) \
    int name parameters { \
        static int (*next)(__VA_ARGS__); \
        if (!next) next = NEXT(int, #name, __VA_ARGS__); \
        return fails_path(path) ? -1 : next arguments; \
    }

WRAP_PATH(rename, (const char *path, const char *to), (path, to), const char *, const char *)
WRAP_PATH(mkdir, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
WRAP_PATH(unlink, (const char *path), (path), const char *)
