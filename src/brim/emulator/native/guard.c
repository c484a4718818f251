/* Keeps a command from changing files: writes outside the folders of BRIM_CARD_WRITABLE fail with EROFS.
 *
 * brim emulate redirects the writes of Python code to a shadow folder. This file covers C and C++ libraries and programs that are not Python.
 * Without the variable every function calls the original one. */
#define _GNU_SOURCE
#include <alloca.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int is_below(const char *path, const char *folder, size_t length) {
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int is_listed(const char *path, const char *folders) {
    for (const char *start = folders; *start;) {
        const char *end = strchrnul(start, ':');
        if (is_below(path, start, (size_t)(end - start))) return 1;
        start = *end ? end + 1 : end;
    }
    return 0;
}

/* The path with the links of its folder resolved. The file itself need not exist. */
static int resolve(int folder, const char *path, char *whole) {
    char joined[PATH_MAX], place[64], parent[PATH_MAX];
    if (path[0] == '/') snprintf(joined, sizeof joined, "%s", path);
    else {
        ssize_t length;
        if (folder == AT_FDCWD) { if (!getcwd(parent, sizeof parent)) return -1; }
        else {
            snprintf(place, sizeof place, "/proc/self/fd/%d", folder);
            if ((length = readlink(place, parent, sizeof parent - 1)) < 0) return -1;
            parent[length] = 0;
        }
        if (snprintf(joined, sizeof joined, "%s/%s", parent, path) >= (int)sizeof joined) return -1;
    }
    char *slash = strrchr(joined, '/');
    snprintf(parent, sizeof parent, "%.*s", (int)(slash - joined), joined);
    char *real = realpath(*parent ? parent : "/", NULL);
    if (!real) return -1; /* no such folder: the call fails by itself */
    int length = snprintf(whole, PATH_MAX, "%s/%s", real[1] ? real : "", slash + 1);
    free(real);
    return length < PATH_MAX ? 0 : -1;
}

/* /proc/PID/fd/0 to 2: the standard streams of the command. */
static int is_standard_stream(const char *path) {
    const char *descriptor = strstr(path, "/fd/");
    return !strncmp(path, "/proc/", 6) && descriptor && descriptor[4] >= '0' && descriptor[4] <= '2' && !descriptor[5];
}

/* Nonzero, with errno set, if the file must not be changed. Opening follows a link in the last component, deleting does not. */
static int is_refused(int folder, const char *path, int follows) {
    const char *writable = getenv("BRIM_CARD_WRITABLE");
    char whole[PATH_MAX], target[PATH_MAX];
    if (!writable || !path || !*path) return 0;
    static const char *const DEVICES = "/dev:/proc:/sys", *const STREAMS = "/dev/stdin:/dev/stdout:/dev/stderr";
    if (resolve(folder, path, whole) || is_listed(whole, STREAMS) || is_standard_stream(whole)) return 0;
    if (follows && realpath(whole, target)) { /* /proc/self/fd/7 leads to a file */
        if (is_listed(target, writable) || is_listed(target, DEVICES)) return 0;
    } else if (is_listed(whole, writable) || is_listed(whole, DEVICES)) return 0;
    errno = EROFS;
    return 1;
}

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC); }
static int has_mode(int flags) { return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE; }

#define OPEN(name)                                                                   \
    int name(const char *path, int flags, ...) {                                     \
        NEXT(name);                                                                  \
        mode_t mode = 0;                                                             \
        if (has_mode(flags)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
        if (writes(flags) && is_refused(AT_FDCWD, path, 1)) return -1;               \
        return next(path, flags, mode);                                              \
    }
#define OPENAT(name)                                                                 \
    int name(int folder, const char *path, int flags, ...) {                         \
        NEXT(name);                                                                  \
        mode_t mode = 0;                                                             \
        if (has_mode(flags)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
        if (writes(flags) && is_refused(folder, path, 1)) return -1;                 \
        return next(folder, path, flags, mode);                                      \
    }
#define FOPEN(name)                                                                  \
    FILE *name(const char *path, const char *mode) {                                 \
        NEXT(name);                                                                  \
        if (strpbrk(mode, "wa+") && is_refused(AT_FDCWD, path, 1)) return NULL;      \
        return next(path, mode);                                                     \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
#define FREOPEN(name)                                                                \
    FILE *name(const char *path, const char *mode, FILE *stream) {                   \
        NEXT(name);                                                                  \
        if (strpbrk(mode, "wa+") && is_refused(AT_FDCWD, path, 1)) return NULL;      \
        return next(path, mode, stream);                                             \
    }
/* Called by programs that were compiled with _FORTIFY_SOURCE; they have no mode argument. */
#define CHECKED_OPEN(name)                                                           \
    int name(const char *path, int flags);                                           \
    int name(const char *path, int flags) {                                          \
        NEXT(name);                                                                  \
        return writes(flags) && is_refused(AT_FDCWD, path, 1) ? -1 : next(path, flags); \
    }
#define CHECKED_OPENAT(name)                                                         \
    int name(int folder, const char *path, int flags);                               \
    int name(int folder, const char *path, int flags) {                              \
        NEXT(name);                                                                  \
        return writes(flags) && is_refused(folder, path, 1) ? -1 : next(folder, path, flags); \
    }
#define TEMPORARY(name, given, passed)                                               \
    int name given { NEXT(name); return is_refused(AT_FDCWD, path, 0) ? -1 : next passed; }
FOPEN(fopen)
FOPEN(fopen64)
FREOPEN(freopen)
FREOPEN(freopen64)
CHECKED_OPEN(__open_2)
CHECKED_OPEN(__open64_2)
CHECKED_OPENAT(__openat_2)
CHECKED_OPENAT(__openat64_2)
TEMPORARY(mkstemp, (char *path), (path))
TEMPORARY(mkstemp64, (char *path), (path))
TEMPORARY(mkostemp, (char *path, int flags), (path, flags))
TEMPORARY(mkostemp64, (char *path, int flags), (path, flags))
TEMPORARY(mkstemps, (char *path, int suffix), (path, suffix))
TEMPORARY(mkstemps64, (char *path, int suffix), (path, suffix))
TEMPORARY(mkostemps, (char *path, int suffix, int flags), (path, suffix, flags))
TEMPORARY(mkostemps64, (char *path, int suffix, int flags), (path, suffix, flags))
char *mkdtemp(char *path) { NEXT(mkdtemp); return is_refused(AT_FDCWD, path, 0) ? NULL : next(path); }
int creat(const char *path, mode_t mode) { NEXT(creat); return is_refused(AT_FDCWD, path, 1) ? -1 : next(path, mode); }
int creat64(const char *path, mode_t mode) { NEXT(creat64); return is_refused(AT_FDCWD, path, 1) ? -1 : next(path, mode); }
int truncate(const char *path, off_t length) { NEXT(truncate); return is_refused(AT_FDCWD, path, 1) ? -1 : next(path, length); }
int truncate64(const char *path, off64_t length) { NEXT(truncate64); return is_refused(AT_FDCWD, path, 1) ? -1 : next(path, length); }
int unlink(const char *path) { NEXT(unlink); return is_refused(AT_FDCWD, path, 0) ? -1 : next(path); }
int unlinkat(int folder, const char *path, int flags) { NEXT(unlinkat); return is_refused(folder, path, 0) ? -1 : next(folder, path, flags); }
int remove(const char *path) { NEXT(remove); return is_refused(AT_FDCWD, path, 0) ? -1 : next(path); }
int rmdir(const char *path) { NEXT(rmdir); return is_refused(AT_FDCWD, path, 0) ? -1 : next(path); }
int mkdir(const char *path, mode_t mode) { NEXT(mkdir); return is_refused(AT_FDCWD, path, 0) ? -1 : next(path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { NEXT(mkdirat); return is_refused(folder, path, 0) ? -1 : next(folder, path, mode); }
int mkfifo(const char *path, mode_t mode) { NEXT(mkfifo); return is_refused(AT_FDCWD, path, 0) ? -1 : next(path, mode); }
int rename(const char *from, const char *to) {
    NEXT(rename);
    return is_refused(AT_FDCWD, from, 0) || is_refused(AT_FDCWD, to, 0) ? -1 : next(from, to);
}
int renameat(int a, const char *from, int b, const char *to) {
    NEXT(renameat);
    return is_refused(a, from, 0) || is_refused(b, to, 0) ? -1 : next(a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    NEXT(renameat2);
    return is_refused(a, from, 0) || is_refused(b, to, 0) ? -1 : next(a, from, b, to, flags);
}
int link(const char *from, const char *to) { /* a hard link would give write access to the original */
    NEXT(link);
    return is_refused(AT_FDCWD, from, 0) || is_refused(AT_FDCWD, to, 0) ? -1 : next(from, to);
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    NEXT(linkat);
    return is_refused(a, from, 0) || is_refused(b, to, 0) ? -1 : next(a, from, b, to, flags);
}
int symlink(const char *from, const char *to) { NEXT(symlink); return is_refused(AT_FDCWD, to, 0) ? -1 : next(from, to); }
int symlinkat(const char *from, int folder, const char *to) { NEXT(symlinkat); return is_refused(folder, to, 0) ? -1 : next(from, folder, to); }
int chmod(const char *path, mode_t mode) { NEXT(chmod); return is_refused(AT_FDCWD, path, 1) ? -1 : next(path, mode); }
int fchmodat(int folder, const char *path, mode_t mode, int flags) { NEXT(fchmodat); return is_refused(folder, path, 1) ? -1 : next(folder, path, mode, flags); }

/* A program that is started with another environment (env -i, subprocess.run(env={...})) would run without this library and without the agent.
 * So the variables of brim are restored. Nothing is allocated, because this may run between vfork and exec. */
#define KEPT 64
static char *kept[KEPT]; /* NAME=value, as at the start of this process */
static int kept_count;

__attribute__((constructor)) static void keep_environment(void) {
    if (!getenv("BRIM_CARD_WRITABLE")) return;
    for (char **entry = environ; *entry && kept_count < KEPT; entry++)
        if (!strncmp(*entry, "BRIM_", 5) || !strncmp(*entry, "LD_PRELOAD=", 11) || !strncmp(*entry, "PYTHONPATH=", 11)) kept[kept_count++] = strdup(*entry);
}

static size_t name_length(const char *entry) { return (size_t)(strchrnul(entry, '=') - entry) + 1; }
static int is_list(const char *entry) { return entry[0] != 'B'; } /* LD_PRELOAD and PYTHONPATH: a program may add its own entries */

static size_t merged_bytes(char *const *given) {
    size_t bytes = (size_t)(kept_count + 1) * sizeof(char *);
    for (; given && *given; given++) bytes += sizeof(char *) + strlen(*given) + 1;
    for (int i = 0; i < kept_count; i++) bytes += strlen(kept[i]) + 1;
    return bytes;
}

static char **merged(char *const *given, char **result) {
    size_t count = 0;
    for (; given && given[count]; count++) result[count] = given[count];
    char *text = (char *)(result + count + (size_t)kept_count + 1);
    for (int i = 0; i < kept_count; i++) {
        size_t length = name_length(kept[i]), at = 0;
        for (; given && given[at] && strncmp(given[at], kept[i], length); at++) {}
        if (!given || !given[at]) result[count++] = kept[i];
        else if (is_list(kept[i]) && !strstr(given[at], kept[i] + length)) {
            result[at] = text;
            text += sprintf(text, given[at][length] ? "%s:%s" : "%s", kept[i], given[at] + length) + 1;
        }
    }
    result[count] = NULL;
    return result;
}
#define MERGED(given) (kept_count ? merged(given, alloca(merged_bytes(given))) : (char **)(given))

int execve(const char *path, char *const argv[], char *const envp[]) { NEXT(execve); return next(path, argv, MERGED(envp)); }
int execvpe(const char *file, char *const argv[], char *const envp[]) { NEXT(execvpe); return next(file, argv, MERGED(envp)); }
int execv(const char *path, char *const argv[]) { return execve(path, argv, environ); }
int execvp(const char *file, char *const argv[]) { return execvpe(file, argv, environ); }
int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes, char *const argv[], char *const envp[]) {
    NEXT(posix_spawn);
    return next(pid, path, actions, attributes, argv, MERGED(envp));
}
int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes, char *const argv[], char *const envp[]) {
    NEXT(posix_spawnp);
    return next(pid, file, actions, attributes, argv, MERGED(envp));
}
