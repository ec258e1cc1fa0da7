/* One system call that fails. A process arms it with the calls to count; those on other folders are as usual.

   A call is known by what it does and where, digits as '#': "open-w /benchmark_output/runs/s/stats.json". */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char top[PATH_MAX], target[PATH_MAX], folders[8][64];
static int log_fd = -1, code, lasts, num_folders;
static long at, seen;

/* Count calls below `top`/FOLDER of each folder (',' between them), and write them to a log. Of those called `call`,
   the one numbered `number` fails with `error`; if `lasting`, all later ones too. */
void arm(const char *root, const char *names, const char *log, const char *call, long number, int error, int lasting) {
    char copy[512], *rest = copy, *name;
    snprintf(copy, sizeof copy, "%s", names);
    while ((name = strsep(&rest, ",")) && num_folders < 8) snprintf(folders[num_folders++], 64, "/%s", name);
    snprintf(top, sizeof top, "%s", root);
    snprintf(target, sizeof target, "%s", call);
    at = number, code = error, lasts = lasting;
    log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

static int fails(const char *what, const char *path) {
    char known[PATH_MAX + 64], line[PATH_MAX + 128];
    size_t length = strlen(top), to = 0;
    int is_below = 0;
    if (strncmp(path, top, length)) return 0;
    path += length;
    for (int i = 0; i < num_folders; i++) {
        size_t part = strlen(folders[i]);
        is_below |= !strncmp(path, folders[i], part) && (path[part] == '/' || !path[part]);
    }
    if (!is_below) return 0;
    to = snprintf(known, 64, "%s ", what);
    for (; *path && to < sizeof known - 1; path++)
        if (*path < '0' || *path > '9') known[to++] = *path;
        else if (known[to - 1] != '#') known[to++] = '#';
    known[to] = 0;
    int is_hit = 0;
    if (code && !strcmp(known, target)) {
        long number = __sync_fetch_and_add(&seen, 1);
        is_hit = lasts ? number >= at : number == at;
    }
    int size = snprintf(line, sizeof line, "%s%s\n", is_hit ? "FAILED " : "", known);
    syscall(SYS_write, log_fd, line, size);
    if (is_hit) errno = code;
    return is_hit;
}

static int fails_at(const char *what, int folder, const char *path) {
    char base[PATH_MAX], whole[2 * PATH_MAX], link[64];
    if (log_fd < 0 || !path) return 0;
    if (*path == '/') return fails(what, path);
    ssize_t length;
    if (folder == AT_FDCWD) length = getcwd(base, sizeof base) ? (ssize_t)strlen(base) : -1;
    else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        length = readlink(link, base, sizeof base - 1);
    }
    if (length < 0) return 0;
    base[length] = 0;
    while (!strncmp(path, "./", 2)) path += 2;
    snprintf(whole, sizeof whole, "%s%s%s", base, *path && strcmp(path, ".") ? "/" : "", strcmp(path, ".") ? path : "");
    return fails(what, whole);
}

static int fails_fd(const char *what, int fd) {
    int before = errno, is_hit = fd >= 0 && fails_at(what, fd, "");
    if (!is_hit) errno = before;
    return is_hit;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define OPEN(name, folder_, folder, ...)                                                     \
    int name(folder_ const char *path, int flags, ...) {                                    \
        REAL(name);                                                                         \
        va_list rest;                                                                       \
        va_start(rest, flags);                                                              \
        int mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, int) : 0;                 \
        va_end(rest);                                                                       \
        const char *what = flags & (O_ACCMODE | O_CREAT) ? "open-w" : "open-r";             \
        return fails_at(what, folder, path) ? -1 : real(__VA_ARGS__ path, flags, mode);     \
    }
#define COMMA ,
OPEN(open, , AT_FDCWD, )
OPEN(open64, , AT_FDCWD, )
OPEN(openat, int at_ COMMA, at_, at_ COMMA)
OPEN(openat64, int at_ COMMA, at_, at_ COMMA)

#define CALL(type, failed, name, what, folder, path, parameters, ...)     \
    type name parameters {                                                \
        REAL(name);                                                       \
        return fails_at(what, folder, path) ? failed : real(__VA_ARGS__); \
    }
CALL(FILE *, NULL, fopen, "fopen", AT_FDCWD, p, (const char *p, const char *m), p, m)
CALL(FILE *, NULL, fopen64, "fopen", AT_FDCWD, p, (const char *p, const char *m), p, m)
CALL(DIR *, NULL, opendir, "opendir", AT_FDCWD, p, (const char *p), p)
CALL(int, -1, mkdir, "mkdir", AT_FDCWD, p, (const char *p, mode_t m), p, m)
CALL(int, -1, mkdirat, "mkdir", f, p, (int f, const char *p, mode_t m), f, p, m)
CALL(int, -1, rename, "rename", AT_FDCWD, q, (const char *p, const char *q), p, q)
CALL(int, -1, renameat, "rename", g, q, (int f, const char *p, int g, const char *q), f, p, g, q)
CALL(int, -1, unlink, "unlink", AT_FDCWD, p, (const char *p), p)
CALL(int, -1, rmdir, "rmdir", AT_FDCWD, p, (const char *p), p)
CALL(int, -1, unlinkat, "unlink", f, p, (int f, const char *p, int m), f, p, m)
CALL(int, -1, symlink, "symlink", AT_FDCWD, q, (const char *p, const char *q), p, q)

#define FD(type, failed, name, what, fd, parameters, ...)          \
    type name parameters {                                         \
        REAL(name);                                                \
        return fails_fd(what, fd) ? failed : real(__VA_ARGS__);    \
    }
FD(int, -1, fsync, "fsync", f, (int f), f)
FD(int, -1, fdatasync, "fsync", f, (int f), f)
FD(int, -1, flock, "flock", f, (int f, int o), f, o)
FD(ssize_t, -1, write, "write", f, (int f, const void *b, size_t n), f, b, n)
FD(ssize_t, -1, pwrite, "write", f, (int f, const void *b, size_t n, off_t o), f, b, n, o)
FD(ssize_t, -1, pwrite64, "write", f, (int f, const void *b, size_t n, off64_t o), f, b, n, o)
FD(ssize_t, -1, writev, "write", f, (int f, const struct iovec *v, int n), f, v, n)
FD(ssize_t, -1, pwritev2, "write", f, (int f, const struct iovec *v, int n, off_t o, int g), f, v, n, o, g)
FD(ssize_t, -1, pwritev64v2, "write", f, (int f, const struct iovec *v, int n, off64_t o, int g), f, v, n, o, g)
FD(ssize_t, -1, pwritev, "write", f, (int f, const struct iovec *v, int n, off_t o), f, v, n, o)
FD(ssize_t, -1, pwritev64, "write", f, (int f, const struct iovec *v, int n, off64_t o), f, v, n, o)
FD(int, -1, ftruncate, "truncate", f, (int f, off_t n), f, n)
FD(int, -1, ftruncate64, "truncate", f, (int f, off64_t n), f, n)
FD(int, code, posix_fallocate, "fallocate", f, (int f, off_t o, off_t n), f, o, n)
FD(int, code, posix_fallocate64, "fallocate", f, (int f, off64_t o, off64_t n), f, o, n)
FD(void *, MAP_FAILED, mmap, "mmap", f, (void *a, size_t n, int p, int g, int f, off_t o), a, n, p, g, f, o)
FD(void *, MAP_FAILED, mmap64, "mmap", f, (void *a, size_t n, int p, int g, int f, off64_t o), a, n, p, g, f, o)

#define FCNTL(name)                                                                                 \
    int name(int fd, int command, ...) {                                                            \
        REAL(name);                                                                                 \
        va_list rest;                                                                               \
        va_start(rest, command);                                                                    \
        void *argument = va_arg(rest, void *);                                                      \
        va_end(rest);                                                                               \
        int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK;            \
        return locks && fails_fd("lock", fd) ? -1 : real(fd, command, argument);                    \
    }
FCNTL(fcntl)
FCNTL(fcntl64)
