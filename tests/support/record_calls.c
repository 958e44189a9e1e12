/* Recorder of the calls that change a folder: LD_PRELOAD library for tests/support/power_cut.py.

   Environment: RECORD_ROOT, the folder; RECORD_FILE, the output. A record is
       char op; uint64 inode; int64 offset; uint32 bytes of path; uint32 bytes of data; path; data
   Calls and records have the same order, because one lock is held during both. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int output = -1;
static const char *root;
static size_t root_length;
static pid_t recorded;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    root = getenv("RECORD_ROOT");
    const char *file = getenv("RECORD_FILE");
    if (!root || !file) { root = NULL; return; }
    root_length = strlen(root);
    recorded = getpid();
    output = REAL(open)(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    unsetenv("LD_PRELOAD"); /* not for child processes */
}

static int inside(const char *path) {
    return root && getpid() == recorded && !strncmp(path, root, root_length)
        && (path[root_length] == '/' || !path[root_length]);
}

static void record(char op, uint64_t inode, int64_t offset, const char *path, const void *data, uint32_t size) {
    uint32_t length = path ? strlen(path) : 0;
    char head[25];
    head[0] = op;
    memcpy(head + 1, &inode, 8); memcpy(head + 9, &offset, 8); memcpy(head + 17, &length, 4); memcpy(head + 21, &size, 4);
    struct iovec parts[3] = {{head, 25}, {(void *)path, length}, {(void *)data, size}};
    ssize_t (*write_all)(int, const struct iovec *, int) = REAL(writev);
    if (write_all(output, parts, 3) != (ssize_t)(25 + length + size)) abort();
}

/* Absolute path of a name in a folder that is open as fd, or in the current folder. */
static void resolve(int fd, const char *name, char *path) {
    path[0] = 0;
    if (name[0] == '/') { snprintf(path, PATH_MAX, "%s", name); return; }
    char base[PATH_MAX] = "", link[64];
    if (fd == AT_FDCWD) { if (!getcwd(base, sizeof base)) return; }
    else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t size = readlink(link, base, sizeof base - 1);
        if (size < 0) return;
        base[size] = 0;
    }
    if ((size_t)snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) abort();
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return inside(path);
}

#define LOCKED(...) int kept; pthread_mutex_lock(&lock); __VA_ARGS__; kept = errno; pthread_mutex_unlock(&lock); errno = kept

static int open_at(int fd, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    struct stat found;
    int result;
    resolve(fd, name, path);
    if (!inside(path) || !(flags & (O_CREAT | O_TRUNC))) return REAL(openat)(fd, name, flags, mode);
    LOCKED(
        int existed = !stat(path, &found);
        result = REAL(openat)(fd, name, flags, mode);
        if (result >= 0 && !fstat(result, &found) && S_ISREG(found.st_mode)) {
            if (!existed) record('C', found.st_ino, 0, path, NULL, 0);
            else if (flags & O_TRUNC) record('T', found.st_ino, 0, NULL, NULL, 0);
        }
    );
    return result;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more); \
        return open_at(AT_FDCWD, path, flags, mode); }
OPEN(open) OPEN(open64)
int openat64(int fd, const char *path, int flags, ...) {
    va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more);
    return open_at(fd, path, flags, mode);
}

static void wrote(int fd, const void *data, ssize_t size, int64_t offset) {
    char path[PATH_MAX];
    struct stat found;
    if (size <= 0 || fd == output || fstat(fd, &found) || !S_ISREG(found.st_mode) || !path_of(fd, path)) return;
    record('W', found.st_ino, offset, NULL, data, size);
}

ssize_t write(int fd, const void *data, size_t size) {
    if (!root) return REAL(write)(fd, data, size);
    struct stat found;
    /* A pipe may block: without the lock. */
    if (fstat(fd, &found) || !S_ISREG(found.st_mode)) return REAL(write)(fd, data, size);
    ssize_t result;
    LOCKED(
        result = REAL(write)(fd, data, size);
        int failed = errno;
        if (result > 0) wrote(fd, data, result, lseek(fd, 0, SEEK_CUR) - result);
        errno = failed;
    );
    return result;
}

#define PWRITE(name) \
    ssize_t name(int fd, const void *data, size_t size, off_t offset) { \
        ssize_t result; \
        LOCKED(result = REAL(name)(fd, data, size, offset); if (root) wrote(fd, data, result, offset)); \
        return result; }
PWRITE(pwrite) PWRITE(pwrite64)

#define TRUNCATE(name) \
    int name(int fd, off_t size) { \
        int result; char path[PATH_MAX]; struct stat found; \
        LOCKED(result = REAL(name)(fd, size); \
               if (!result && root && path_of(fd, path) && !fstat(fd, &found)) record('T', found.st_ino, size, NULL, NULL, 0)); \
        return result; }
TRUNCATE(ftruncate) TRUNCATE(ftruncate64)

#define SYNC(name) \
    int name(int fd) { \
        int result; char path[PATH_MAX]; struct stat found; \
        LOCKED(result = REAL(name)(fd); \
               if (!result && root && path_of(fd, path) && !fstat(fd, &found)) \
                   record(S_ISDIR(found.st_mode) ? 'D' : 'S', found.st_ino, 0, path, NULL, 0)); \
        return result; }
SYNC(fsync) SYNC(fdatasync)

static int named(char op, int fd, const char *name, int result) {
    char path[PATH_MAX];
    resolve(fd, name, path);
    if (!result && inside(path)) record(op, 0, 0, path, NULL, 0);
    return result;
}

static void two_names(char op, int from, const char *old, int to, const char *new) {
    char before[PATH_MAX], after[PATH_MAX];
    resolve(from, old, before); resolve(to, new, after);
    if (inside(before) && inside(after)) record(op, 0, 0, before, after, strlen(after));
}

#define RUN(type, call, after) type result; LOCKED(result = call; if (root && !result) { after; }); return result;
int mkdir(const char *name, mode_t mode) { RUN(int, REAL(mkdir)(name, mode), named('M', AT_FDCWD, name, 0)) }
int mkdirat(int fd, const char *name, mode_t mode) { RUN(int, REAL(mkdirat)(fd, name, mode), named('M', fd, name, 0)) }
int rmdir(const char *name) { RUN(int, REAL(rmdir)(name), named('U', AT_FDCWD, name, 0)) }
int unlink(const char *name) { RUN(int, REAL(unlink)(name), named('U', AT_FDCWD, name, 0)) }
int unlinkat(int fd, const char *name, int flags) { RUN(int, REAL(unlinkat)(fd, name, flags), named('U', fd, name, 0)) }
int rename(const char *old, const char *new) {
    RUN(int, REAL(rename)(old, new), two_names('R', AT_FDCWD, old, AT_FDCWD, new))
}
int renameat(int from, const char *old, int to, const char *new) {
    RUN(int, REAL(renameat)(from, old, to, new), two_names('R', from, old, to, new))
}
int link(const char *old, const char *new) {
    RUN(int, REAL(link)(old, new), two_names('L', AT_FDCWD, old, AT_FDCWD, new))
}
int linkat(int from, const char *old, int to, const char *new, int flags) {
    RUN(int, REAL(linkat)(from, old, to, new, flags), two_names('L', from, old, to, new))
}
