/* A disk that fails: calls on files whose path contains FAIL_PATH, after the first FAIL_AFTER of them.

   FAIL_HOW: eio (the call fails), nospace (writes fail), short (reads and writes stop after half of what was asked). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long calls;

static int is_ours(int fd) {
    char link[64], path[4096];
    const char *part = getenv("FAIL_PATH"), *after = getenv("FAIL_AFTER");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0 || !part) return 0;
    path[length] = 0;
    return strstr(path, part) && __sync_fetch_and_add(&calls, 1) >= atol(after ? after : "0");
}

/* 0: as usual; 1: errno is set; 2: half. */
static int fate(int fd, int is_write, size_t size) {
    const char *how = getenv("FAIL_HOW");
    if (!how || !is_ours(fd)) return 0;
    if (!strcmp(how, "eio")) return errno = EIO, 1;
    if (!strcmp(how, "nospace")) return is_write ? (errno = ENOSPC, 1) : 0;
    return size > 8192 ? 2 : 0;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define PLAIN(name, data, is_write)                                      \
    ssize_t name(int fd, data buffer, size_t size) {                     \
        REAL(name);                                                      \
        int what = fate(fd, is_write, size);                             \
        return what == 1 ? -1 : real(fd, buffer, what == 2 ? size / 2 / 4096 * 4096 : size); \
    }
#define AT(name, data, offset_t, is_write)                               \
    ssize_t name(int fd, data buffer, size_t size, offset_t at) {        \
        REAL(name);                                                      \
        int what = fate(fd, is_write, size);                             \
        return what == 1 ? -1 : real(fd, buffer, what == 2 ? size / 2 / 4096 * 4096 : size, at); \
    }
#define VECTOR(name, offset_t, is_write, more, ...)                      \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_t at more) { \
        REAL(name);                                                      \
        int what = fate(fd, is_write, parts[0].iov_len);                 \
        if (what == 1) return -1;                                        \
        if (!what) return real(fd, parts, count, at __VA_ARGS__);                    \
        struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2 / 4096 * 4096}; \
        return real(fd, &half, 1, at __VA_ARGS__);                                   \
    }

PLAIN(read, void *, 0)
PLAIN(write, const void *, 1)
AT(pread, void *, off_t, 0)
AT(pread64, void *, off64_t, 0)
AT(pwrite, const void *, off_t, 1)
AT(pwrite64, const void *, off64_t, 1)
#define COMMA ,
VECTOR(preadv, off_t, 0, )
VECTOR(preadv64, off64_t, 0, )
VECTOR(pwritev, off_t, 1, )
VECTOR(pwritev64, off64_t, 1, )
VECTOR(preadv2, off_t, 0, COMMA int flags, COMMA flags)
VECTOR(preadv64v2, off64_t, 0, COMMA int flags, COMMA flags)
VECTOR(pwritev2, off_t, 1, COMMA int flags, COMMA flags)
VECTOR(pwritev64v2, off64_t, 1, COMMA int flags, COMMA flags)

int fsync(int fd) {
    REAL(fsync);
    return fate(fd, 1, 0) == 1 ? -1 : real(fd);
}
