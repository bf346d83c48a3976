/* LD_PRELOAD faults for one directory prefix.   gcc -O1 -shared -fPIC -o fault.so fault.c -ldl
 *
 * MXF_DIR=PREFIX      only paths and descriptors under it are affected (default: all)
 *
 * Errors (value: an errno name)
 *   MXF_FLOCK         flock(2), fcntl F_SETLK*, F_OFD_SETLK*; NOOP = says yes and locks nothing
 *   MXF_RENAME  MXF_LINK  MXF_SYMLINK  MXF_UNLINK  MXF_MKDIR  MXF_CHMOD  MXF_OPENW (open for writing)
 *   MXF_FSYNC         fsync, fdatasync          MXF_SYNCFS  syncfs
 *   MXF_FALLOC        fallocate, posix_fallocate   MXF_TRUNCATE  ftruncate
 *   MXF_COPY          copy_file_range           MXF_REFLINK ioctl FICLONE, FICLONERANGE
 *   MXF_SPLICE        splice, sendfile into a file
 *   MXF_DIRECT        preadv from a descriptor with O_DIRECT, once MXF_DIRECT_AFTER such reads went well
 *   MXF_READ          preadv, the first MXF_READ_TIMES times (always without) once MXF_READ_AFTER went well
 *   MXF_WRITE         write, pwrite, splice, sendfile, copy_file_range, once MXF_WRITE_AFTER bytes were written
 *
 * Points: the calls counted are open for writing or with O_CREAT, write, pwrite, splice, sendfile, copy_file_range,
 *   rename*, link*, symlink*, mkdir*, rmdir, unlink*, fsync, fdatasync, syncfs, ftruncate, fallocate, under MXF_DIR.
 *   MXF_KILL_AT=N     SIGKILL to itself just before the N-th (from 1)
 *   MXF_STOP_AT=N     SIGSTOP just before the N-th
 *   MXF_STOP_RENAME=N SIGSTOP just before the N-th rename
 *   MXF_COUNT_FILE=F  one line for each: pid, number, call, path (F itself outside of MXF_DIR)
 *   Counters are per process; a child that doesn't exec goes on with its parent's.
 *
 * MXF_CLOCK=SECS      added to CLOCK_REALTIME, time(), gettimeofday()
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* --- what is asked for, and for whom --- */

static int fault(const char *name) {
    static const struct { const char *name; int code; } table[] = {
        {"ENOLCK", ENOLCK}, {"ENOSYS", ENOSYS}, {"EOPNOTSUPP", EOPNOTSUPP}, {"EXDEV", EXDEV}, {"EPERM", EPERM},
        {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EIO", EIO}, {"ESTALE", ESTALE}, {"EROFS", EROFS},
        {"EACCES", EACCES}, {"EBUSY", EBUSY}, {"EINVAL", EINVAL}, {"ENOENT", ENOENT}, {"EEXIST", EEXIST},
        {"EMLINK", EMLINK}, {"EINTR", EINTR}, {"NOOP", -1}};
    const char *value = getenv(name);
    if (!value || !*value) return 0;
    for (unsigned i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(value, table[i].name)) return table[i].code;
    fprintf(stderr, "fault.so: %s=%s is not an errno that it knows\n", name, value);
    abort();
}

static int begins(const char *path) {
    const char *dir = getenv("MXF_DIR");
    if (!dir || !*dir) return 1;
    return !strncmp(path, dir, strlen(dir));
}

static const char *path_of_fd(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, buffer, PATH_MAX - 1);
    buffer[n < 0 ? 0 : n] = 0;
    return buffer;
}

static const char *absolute(int dirfd, const char *path, char *buffer) {
    if (!path) path = "";
    if (path[0] == '/') return path;
    if (dirfd == AT_FDCWD) { if (!getcwd(buffer, PATH_MAX)) buffer[0] = 0; }
    else path_of_fd(dirfd, buffer);
    size_t n = strlen(buffer);
    snprintf(buffer + n, PATH_MAX - n, "/%s", path);
    return buffer;
}

/* --- points --- */

static int is_point(const char *name, int count) {
    const char *value = getenv(name);
    return value && *value && atoi(value) == count;
}

static void note(const char *call, const char *path, int number) {
    const char *file = getenv("MXF_COUNT_FILE");
    if (!file || !*file) return;
    char line[PATH_MAX + 64];
    int n = snprintf(line, sizeof line, "%d %d %s %s\n", getpid(), number, call, path);
    int fd = REAL(open)(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0) { if (REAL(write)(fd, line, n) < 0) {} close(fd); }
}

static void point(const char *call, const char *path) {
    static int points, renames;
    if (!begins(path)) return;
    int saved = errno, number = __sync_add_and_fetch(&points, 1);
    note(call, path, number);
    if (is_point("MXF_KILL_AT", number)) kill(getpid(), SIGKILL);
    int stop = is_point("MXF_STOP_AT", number);
    if (!strncmp(call, "rename", 6)) stop |= is_point("MXF_STOP_RENAME", __sync_add_and_fetch(&renames, 1));
    if (stop) raise(SIGSTOP);
    errno = saved;
}

static int fails(const char *name, const char *path) {
    int code = fault(name);
    if (code <= 0 || !begins(path)) return 0;
    errno = code;
    return 1;
}

#define AT_PATH(call, dirfd, path, variable)                  \
    do {                                                      \
        char buffer_[PATH_MAX];                               \
        const char *full_ = absolute(dirfd, path, buffer_);   \
        point(call, full_);                                   \
        if (fails(variable, full_)) return -1;                \
    } while (0)

#define AT_FD(call, fd, variable)                             \
    do {                                                      \
        char buffer_[PATH_MAX];                               \
        const char *full_ = path_of_fd(fd, buffer_);          \
        point(call, full_);                                   \
        if (fails(variable, full_)) return -1;                \
    } while (0)

/* --- locks --- */

static int lock_fault(int fd) {
    int code = fault("MXF_FLOCK");
    char buffer[PATH_MAX];
    return code && begins(path_of_fd(fd, buffer)) ? code : 0;
}
int flock(int fd, int op) {
    int code = lock_fault(fd);
    if (code < 0) return 0;
    if (code) { errno = code; return -1; }
    return REAL(flock)(fd, op);
}
static int any_fcntl(int (*real)(int, int, ...), int fd, int cmd, void *arg) {
    if (cmd == F_SETLK || cmd == F_SETLKW || cmd == F_OFD_SETLK || cmd == F_OFD_SETLKW) {
        int code = lock_fault(fd);
        if (code < 0) return 0;
        if (code) { errno = code; return -1; }
    }
    return real(fd, cmd, arg);
}
#define FCNTL(name)                                                                   \
    int name(int fd, int cmd, ...) {                                                  \
        va_list list; va_start(list, cmd); void *arg = va_arg(list, void *); va_end(list); \
        return any_fcntl((int (*)(int, int, ...))dlsym(RTLD_NEXT, #name), fd, cmd, arg);   \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

/* --- names --- */

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT); }
#define MODE(flags) \
    mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list l; va_start(l, flags); mode = va_arg(l, mode_t); va_end(l); }
#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...) {                          \
        MODE(flags)                                                       \
        if (writes(flags)) AT_PATH("open", AT_FDCWD, path, "MXF_OPENW");  \
        return REAL(name)(path, flags, mode);                             \
    }
#define OPENAT(name)                                                      \
    int name(int dir, const char *path, int flags, ...) {                 \
        MODE(flags)                                                       \
        if (writes(flags)) AT_PATH("open", dir, path, "MXF_OPENW");       \
        return REAL(name)(dir, path, flags, mode);                        \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int rename(const char *a, const char *b) { AT_PATH("rename", AT_FDCWD, b, "MXF_RENAME"); return REAL(rename)(a, b); }
int renameat(int x, const char *a, int y, const char *b) { AT_PATH("rename", y, b, "MXF_RENAME"); return REAL(renameat)(x, a, y, b); }
int renameat2(int x, const char *a, int y, const char *b, unsigned f) { AT_PATH("rename", y, b, "MXF_RENAME"); return REAL(renameat2)(x, a, y, b, f); }
int link(const char *a, const char *b) { AT_PATH("link", AT_FDCWD, b, "MXF_LINK"); return REAL(link)(a, b); }
int linkat(int x, const char *a, int y, const char *b, int f) { AT_PATH("link", y, b, "MXF_LINK"); return REAL(linkat)(x, a, y, b, f); }
int symlink(const char *a, const char *b) { AT_PATH("symlink", AT_FDCWD, b, "MXF_SYMLINK"); return REAL(symlink)(a, b); }
int symlinkat(const char *a, int d, const char *b) { AT_PATH("symlink", d, b, "MXF_SYMLINK"); return REAL(symlinkat)(a, d, b); }
int mkdir(const char *p, mode_t m) { AT_PATH("mkdir", AT_FDCWD, p, "MXF_MKDIR"); return REAL(mkdir)(p, m); }
int mkdirat(int d, const char *p, mode_t m) { AT_PATH("mkdir", d, p, "MXF_MKDIR"); return REAL(mkdirat)(d, p, m); }
int rmdir(const char *p) { AT_PATH("rmdir", AT_FDCWD, p, "MXF_UNLINK"); return REAL(rmdir)(p); }
int unlink(const char *p) { AT_PATH("unlink", AT_FDCWD, p, "MXF_UNLINK"); return REAL(unlink)(p); }
int unlinkat(int d, const char *p, int f) { AT_PATH("unlink", d, p, "MXF_UNLINK"); return REAL(unlinkat)(d, p, f); }
int chmod(const char *p, mode_t m) {
    char buffer[PATH_MAX];
    return fails("MXF_CHMOD", absolute(AT_FDCWD, p, buffer)) ? -1 : REAL(chmod)(p, m);
}
int fchmod(int fd, mode_t m) {
    char buffer[PATH_MAX];
    return fails("MXF_CHMOD", path_of_fd(fd, buffer)) ? -1 : REAL(fchmod)(fd, m);
}
int fchmodat(int d, const char *p, mode_t m, int f) {
    char buffer[PATH_MAX];
    return fails("MXF_CHMOD", absolute(d, p, buffer)) ? -1 : REAL(fchmodat)(d, p, m, f);
}

/* --- durability and space --- */

int fsync(int fd) { AT_FD("fsync", fd, "MXF_FSYNC"); return REAL(fsync)(fd); }
int fdatasync(int fd) { AT_FD("fdatasync", fd, "MXF_FSYNC"); return REAL(fdatasync)(fd); }
int syncfs(int fd) { AT_FD("syncfs", fd, "MXF_SYNCFS"); return REAL(syncfs)(fd); }
int ftruncate(int fd, off_t n) { AT_FD("ftruncate", fd, "MXF_TRUNCATE"); return REAL(ftruncate)(fd, n); }
int ftruncate64(int fd, off64_t n) { AT_FD("ftruncate", fd, "MXF_TRUNCATE"); return REAL(ftruncate64)(fd, n); }
int fallocate(int fd, int m, off_t o, off_t n) { AT_FD("fallocate", fd, "MXF_FALLOC"); return REAL(fallocate)(fd, m, o, n); }
int fallocate64(int fd, int m, off64_t o, off64_t n) { AT_FD("fallocate", fd, "MXF_FALLOC"); return REAL(fallocate64)(fd, m, o, n); }
static int posix_falloc_fault(int fd) {
    char buffer[PATH_MAX];
    const char *path = path_of_fd(fd, buffer);
    point("fallocate", path);
    return fails("MXF_FALLOC", path) ? errno : 0;
}
int posix_fallocate(int fd, off_t o, off_t n) { int e = posix_falloc_fault(fd); return e ? e : REAL(posix_fallocate)(fd, o, n); }
int posix_fallocate64(int fd, off64_t o, off64_t n) { int e = posix_falloc_fault(fd); return e ? e : REAL(posix_fallocate64)(fd, o, n); }

/* --- bytes --- */

static int write_fault(const char *call, int fd, size_t n) {
    static long long written;
    char buffer[PATH_MAX];
    const char *path = path_of_fd(fd, buffer), *after = getenv("MXF_WRITE_AFTER");
    point(call, path);
    if (!fault("MXF_WRITE") || !begins(path)) return 0;
    if (written + (long long)n > (after ? atoll(after) : 0)) return fails("MXF_WRITE", path);
    __sync_fetch_and_add(&written, (long long)n);
    return 0;
}
static int is_file(int fd) {
    struct stat st;
    return !fstat(fd, &st) && S_ISREG(st.st_mode);
}
/* Descriptors 0 to 2 are the process's own: never counted. */
ssize_t write(int fd, const void *b, size_t n) { return fd > 2 && write_fault("write", fd, n) ? -1 : REAL(write)(fd, b, n); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { return write_fault("pwrite", fd, n) ? -1 : REAL(pwrite)(fd, b, n, o); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { return write_fault("pwrite", fd, n) ? -1 : REAL(pwrite64)(fd, b, n, o); }
static int moved_fault(const char *call, int fd, size_t n, const char *variable) {
    char buffer[PATH_MAX];
    if (!is_file(fd)) return 0;
    return write_fault(call, fd, n) || fails(variable, path_of_fd(fd, buffer));
}
ssize_t splice(int in, off64_t *oi, int out, off64_t *oo, size_t n, unsigned f) {
    return moved_fault("splice", out, n, "MXF_SPLICE") ? -1 : REAL(splice)(in, oi, out, oo, n, f);
}
ssize_t sendfile(int out, int in, off_t *o, size_t n) {
    return moved_fault("sendfile", out, n, "MXF_SPLICE") ? -1 : REAL(sendfile)(out, in, o, n);
}
ssize_t sendfile64(int out, int in, off64_t *o, size_t n) {
    return moved_fault("sendfile", out, n, "MXF_SPLICE") ? -1 : REAL(sendfile64)(out, in, o, n);
}
ssize_t copy_file_range(int in, off64_t *oi, int out, off64_t *oo, size_t n, unsigned f) {
    return moved_fault("copy_file_range", out, n, "MXF_COPY") ? -1 : REAL(copy_file_range)(in, oi, out, oo, n, f);
}
int ioctl(int fd, unsigned long request, ...) {
    va_list list; va_start(list, request); void *arg = va_arg(list, void *); va_end(list);
    if (request == FICLONE || request == FICLONERANGE) AT_FD("reflink", fd, "MXF_REFLINK");
    return REAL(ioctl)(fd, request, arg);
}

/* --- time --- */

int clock_gettime(clockid_t clock, struct timespec *t) {
    int result = REAL(clock_gettime)(clock, t);
    const char *shift = getenv("MXF_CLOCK");
    if (!result && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) t->tv_sec += atoll(shift);
    return result;
}
time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}
int gettimeofday(struct timeval *tv, void *zone) {
    struct timespec t;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &t);
    tv->tv_sec = t.tv_sec;
    tv->tv_usec = t.tv_nsec / 1000;
    return 0;
}

/* --- reads --- */

static int number_of(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int refuses(const char *name, int fd, int *seen, int after, int times) {
    char buffer[PATH_MAX];
    int code = fault(name);
    if (!code || !begins(path_of_fd(fd, buffer))) return 0;
    int before = __sync_fetch_and_add(seen, 1) - after;
    if (before < 0 || before >= times) return 0;
    errno = code;
    return 1;
}

static int refuses_read(int fd) {
    static int direct, any;
    if (refuses("MXF_READ", fd, &any, number_of("MXF_READ_AFTER", 0), number_of("MXF_READ_TIMES", INT_MAX))) return 1;
    return REAL(fcntl)(fd, F_GETFL) & O_DIRECT
        && refuses("MXF_DIRECT", fd, &direct, number_of("MXF_DIRECT_AFTER", 0), INT_MAX);
}

ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return refuses_read(fd) ? -1 : REAL(preadv64)(fd, parts, count, offset);
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    return refuses_read(fd) ? -1 : REAL(preadv64v2)(fd, parts, count, offset, flags);
}
