/* The memory of the card is address space of this process: mapped without reserve, zero until written, returned to the host when freed.
 * A table that all processes of a session map (BRIM_CARD_SHARED) records how much of each card each process holds. */
#define _GNU_SOURCE
#include "device.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ARENA ((size_t)4 << 40)       /* address space of each device */
#define SMALLEST_ARENA ((size_t)1 << 36)
#define COPY_LIMIT (8 * MIB)          /* larger copies onto a card are not made unless values are computed: the target reads as zeros */
#define SESSION_BYTES ((size_t)1 << 36) /* sparse: only written pages take memory */

typedef struct { char *start; size_t bytes; enum { FREE, ALLOCATED, RESERVED } state; } Piece;
typedef struct { char *base; size_t bytes, next, most; Piece *pieces; size_t count, room; } Arena;
typedef struct { int pid, context[DEVICES]; size_t bytes[DEVICES]; } Process; /* bytes: without the context */

int tracing;
static Arena arenas[DEVICES]; /* by visible device */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static __thread int current;
static Card properties;
static size_t context;
static int installed, visible, shown[DEVICES], computing;
static Process alone[PROCESSES], *table = alone, *mine;
static int session = -1;

/* ---- the table of processes */
static void guard(int kind) {
    struct flock range = {.l_type = (short)kind, .l_whence = SEEK_SET, .l_len = sizeof alone};
    if (session >= 0)
        while (fcntl(session, F_SETLKW, &range) < 0 && errno == EINTR) {}
}
static void enter(void) { pthread_mutex_lock(&lock); guard(F_WRLCK); }
static void leave(void) { guard(F_UNLCK); pthread_mutex_unlock(&lock); }

static void open_session(void) {
    const char *path = getenv("BRIM_CARD_SHARED");
    off_t bytes = 0;
    if (!path || !*path) return;
    session = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (session >= 0) bytes = lseek(session, 0, SEEK_END);
    if (session < 0 || (bytes < (off_t)SESSION_BYTES && ftruncate(session, (off_t)SESSION_BYTES))) {
        fprintf(stderr, "brim: cannot open the shared memory of the emulated card (%s: %s)\n", path, strerror(errno));
        _exit(1);
    }
    table = mmap(NULL, SESSION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, session, 0);
    if (table == MAP_FAILED) { perror("brim: mmap of the session"); _exit(1); }
}

void lock_session(void) { enter(); }
void unlock_session(void) { leave(); }

void *session_memory(size_t *bytes) {
    size_t own = (sizeof alone + PAGE - 1) / PAGE * PAGE;
    card();
    *bytes = SESSION_BYTES - own;
    return session < 0 ? NULL : (char *)table + own;
}

int is_running(int pid) { /* a zombie holds nothing */
    char path[64], line[512], *end;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    size_t length = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[length] = 0;
    end = strrchr(line, ')'); /* the name of the program may contain any character */
    return end && end[1] && end[2] != 'Z' && end[2] != 'X';
}
static int is_live(const Process *p) { return p->pid && (p->pid == getpid() || is_running(p->pid)); }

static Process *self(void) { /* only between enter and leave */
    if (mine && mine->pid == getpid()) return mine;
    mine = NULL;
    for (int i = 0; i < PROCESSES && !mine; i++)
        if (table[i].pid == getpid() || !is_live(&table[i])) mine = &table[i]; /* same pid: left by a process that has exited */
    if (!mine) { fprintf(stderr, "brim: more than %d processes on the emulated card\n", PROCESSES); _exit(1); }
    memset(mine, 0, sizeof *mine);
    mine->pid = getpid();
    return mine;
}

static size_t held(const Process *p, int physical) { return p->bytes[physical] + (p->context[physical] ? context : 0); }
static size_t all_held(int physical) {
    size_t sum = 0;
    for (int i = 0; i < PROCESSES; i++)
        if (table[i].pid && held(&table[i], physical) && is_live(&table[i])) sum += held(&table[i], physical);
    return sum;
}

/* ---- properties, from the environment */
static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

/* BRIM_CARD is "name=Tesla T4;major=7;...". Missing fields have the values of a T4, so that a hand-written card needs only a few. */
static void read_card(void) {
    properties = (Card){"Tesla T4", 7, 5, 40, 1024, 16, 65536, 4 << 20, 256, 70, 64 << 10, 64 << 10, 256, 0, 14912 * MIB};
    const char *text = getenv("BRIM_CARD");
    while (text && *text) {
        char key[32], value[256];
        int used = 0;
        if (sscanf(text, "%31[^=]=%255[^;]%n", key, value, &used) < 2) break;
        size_t n = strtoull(value, NULL, 0);
#define FIELD(field, type) if (!strcmp(key, #field)) properties.field = (type)n
        FIELD(major, int); FIELD(minor, int); FIELD(sms, int); FIELD(sm_threads, int); FIELD(sm_blocks, int); FIELD(sm_registers, int);
        FIELD(l2_bytes, int); FIELD(bus_bits, int); FIELD(watts, int); FIELD(sm_shared, size_t); FIELD(block_shared, size_t);
        FIELD(shared_unit, size_t); FIELD(reserved_shared, size_t); FIELD(memory, size_t);
        if (!strcmp(key, "name")) snprintf(properties.name, sizeof properties.name, "%s", value);
        text += used;
        if (*text == ';') text++;
    }
    properties.memory = number("BRIM_CARD_MEMORY", properties.memory);
}

void card_uuid(int physical, unsigned char uuid[16]) { memset(uuid, 0x11 * (physical + 1), 16); }

static int device_named(const char *word, size_t length) { /* an index, or the beginning of a UUID: "GPU-1111" */
    char *end, text[64], uuid[64];
    unsigned char bytes[16];
    if (!length || length >= sizeof text) return -1;
    memcpy(text, word, length);
    text[length] = 0;
    long index = strtol(text, &end, 10);
    if (!*end) return index >= 0 && index < installed ? (int)index : -1;
    int match = -1;
    for (int d = 0; d < installed; d++) {
        card_uuid(d, bytes);
        char *to = uuid + sprintf(uuid, "GPU-");
        for (int i = 0; i < 16; i++) to += sprintf(to, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
        if (strncmp(uuid, text, length)) continue;
        if (match >= 0) return -1; /* ambiguous */
        match = d;
    }
    return match;
}

static void read_visible(void) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    visible = 0;
    if (!list) {
        for (; visible < installed; visible++) shown[visible] = visible;
        return;
    }
    while (1) { /* as in CUDA: the list ends at the first entry that matches no device; if a device is repeated, none is visible */
        list += strspn(list, " ");
        size_t length = strcspn(list, ","), word = length;
        while (word && list[word - 1] == ' ') word--;
        int device = device_named(list, word);
        if (device < 0) return;
        for (int i = 0; i < visible; i++)
            if (shown[i] == device) { visible = 0; return; }
        shown[visible++] = device;
        list += length;
        if (*list++ != ',') return;
    }
}

static void make_arena(Arena *arena) {
    for (arena->bytes = ARENA; arena->bytes >= SMALLEST_ARENA; arena->bytes /= 2) {
        char *base = mmap(NULL, arena->bytes + GRANULARITY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) continue;
        madvise(base, arena->bytes + GRANULARITY, MADV_NOHUGEPAGE);
        madvise(base, arena->bytes + GRANULARITY, MADV_DONTDUMP);
        arena->base = (char *)(((uintptr_t)base + GRANULARITY - 1) & ~(uintptr_t)(GRANULARITY - 1));
        return;
    }
    perror("brim: no address space for the emulated card (a limit on virtual memory, ulimit -v?)");
    _exit(1);
}

static void after_fork(void);
static void start(void) {
    static int watched;
    if (!watched++) pthread_atfork(NULL, NULL, after_fork);
    read_card();
    installed = (int)number("BRIM_CARD_COUNT", 1);
    if (installed > DEVICES) installed = DEVICES;
    context = number("BRIM_CARD_CONTEXT", 0);
    computing = (int)number("BRIM_CARD_COMPUTE", 0);
    tracing = (int)number("BRIM_CARD_TRACE", 0);
    read_visible();
    if (session < 0) open_session();
    for (int d = 0; d < visible; d++)
        if (!arenas[d].base) make_arena(&arenas[d]);
}

static void after_fork(void) {
    static const pthread_once_t not_started = PTHREAD_ONCE_INIT;
    static const pthread_mutex_t unlocked = PTHREAD_MUTEX_INITIALIZER;
    lock = unlocked; /* another thread of the parent may have held it */
    for (int d = 0; d < visible; d++)
        if (arenas[d].next) return;
    once = not_started; /* the parent has not used a card: the child may set CUDA_VISIBLE_DEVICES */
}

static void ready(void) { pthread_once(&once, start); }

const Card *card(void) { ready(); return &properties; }
int card_compute(void) { ready(); return computing; }
int physical_count(void) { ready(); return installed; }
int visible_count(void) { ready(); return visible; }
int physical_device(int device) { ready(); return shown[device]; }

int current_device(void) { return current; }
int set_current_device(int device) {
    if (device < 0 || device >= visible_count()) return -1;
    current = device;
    return 0;
}

/* ---- capacity */
int has_context(int device) { ready(); return mine && mine->pid == getpid() && mine->context[shown[device]]; }

int make_context(int device) {
    int status = 0;
    if (has_context(device)) return 0;
    enter();
    if (all_held(shown[device]) + context > properties.memory) status = -1; else self()->context[shown[device]] = 1;
    leave();
    trace("context of process %d on device %d: %s", getpid(), device, status ? "out of memory" : "made");
    return status;
}

int take(int device, size_t bytes) {
    int status = -1;
    if (make_context(device)) return -1;
    enter();
    if (all_held(shown[device]) + bytes <= properties.memory) {
        size_t *used = &self()->bytes[shown[device]];
        *used += bytes;
        if (*used > arenas[device].most) arenas[device].most = *used;
        status = 0;
    }
    leave();
    return status;
}

void give_back(int device, size_t bytes) {
    enter();
    self()->bytes[shown[device]] -= bytes;
    leave();
}

size_t bytes_in_use(int device) { ready(); return mine && mine->pid == getpid() ? mine->bytes[shown[device]] : 0; }
size_t most_bytes_in_use(int device) { return arenas[device].most; }
size_t brim_card_peak(int device) { ready(); return arenas[device].most + context; } /* called by the agent; includes the context */

size_t bytes_held(int physical) {
    ready();
    enter();
    size_t sum = all_held(physical);
    leave();
    return sum;
}

int holders(int physical, int *pids, size_t *bytes, int room) {
    int n = 0;
    ready();
    enter();
    for (int i = 0; i < PROCESSES; i++)
        if (is_live(&table[i]) && held(&table[i], physical)) {
            if (n < room) { pids[n] = table[i].pid; bytes[n] = held(&table[i], physical); }
            n++;
        }
    leave();
    return n;
}

/* ---- addresses */
static char *place(Arena *arena, size_t bytes, int state) {
    for (size_t i = 0; i < arena->count; i++)
        if (arena->pieces[i].state == FREE && arena->pieces[i].bytes == bytes) {
            arena->pieces[i].state = state;
            return arena->pieces[i].start;
        }
    if (arena->next + bytes > arena->bytes) return NULL;
    if (arena->count == arena->room) {
        arena->room = arena->room ? 2 * arena->room : 256;
        arena->pieces = realloc(arena->pieces, arena->room * sizeof *arena->pieces);
    }
    char *start = arena->base + arena->next;
    arena->pieces[arena->count++] = (Piece){start, bytes, state};
    arena->next += bytes;
    return start;
}

static size_t rounded(size_t bytes) { return (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY; }

static void *place_locked(int device, size_t bytes, int state) {
    pthread_mutex_lock(&lock);
    void *start = place(&arenas[device], bytes, state);
    pthread_mutex_unlock(&lock);
    return start;
}

static Piece *piece_of(const void *pointer, int device) { /* with the lock held; pieces are sorted by address */
    Arena *arena = &arenas[device];
    size_t low = 0, high = arena->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (arena->pieces[middle].start + arena->pieces[middle].bytes <= (char *)pointer) low = middle + 1; else high = middle;
    }
    return low < arena->count ? &arena->pieces[low] : NULL;
}

void *device_malloc(int device, size_t bytes) {
    if (take(device, rounded(bytes))) { trace("malloc %zu: out of memory, %zu in use", bytes, bytes_in_use(device)); return NULL; }
    void *start = place_locked(device, rounded(bytes), ALLOCATED);
    if (!start) give_back(device, rounded(bytes));
    trace("malloc %zu: %p, %zu in use", bytes, start, bytes_in_use(device));
    return start;
}

int device_of(const void *pointer) {
    for (int d = 0; d < visible; d++)
        if (arenas[d].base && (char *)pointer >= arenas[d].base && (char *)pointer < arenas[d].base + arenas[d].bytes) return d;
    return -1;
}

static size_t release(void *pointer, int device, int state) {
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    Piece *piece = piece_of(pointer, device);
    if (piece && piece->start == pointer && (int)piece->state == state) {
        bytes = piece->bytes;
        discard(pointer, bytes);
        piece->state = FREE;
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

int device_free(void *pointer) {
    int device = device_of(pointer);
    size_t bytes = device < 0 ? 0 : release(pointer, device, ALLOCATED);
    if (!bytes) return -1;
    give_back(device, bytes);
    trace("free %p, %zu in use", pointer, bytes_in_use(device));
    return 0;
}

int allocation_of(const void *pointer, char **start, size_t *bytes) {
    int device = device_of(pointer), status = -1;
    if (device < 0) return -1;
    pthread_mutex_lock(&lock);
    Piece *piece = piece_of(pointer, device);
    if (piece && piece->state != FREE) { *start = piece->start; *bytes = piece->bytes; status = 0; }
    pthread_mutex_unlock(&lock);
    return status;
}

void *reserve_addresses(int device, size_t bytes) { ready(); return place_locked(device, rounded(bytes), RESERVED); }
void free_addresses(void *pointer) {
    int device = device_of(pointer);
    if (device >= 0) release(pointer, device, RESERVED);
}

/* ---- contents */
void discard(void *pointer, size_t bytes) { madvise(pointer, bytes, MADV_DONTNEED); }

static void zero(char *to, size_t bytes) { /* releases whole pages instead of writing them */
    size_t head = (PAGE - (uintptr_t)to % PAGE) % PAGE;
    if (bytes < 4 * PAGE) { memset(to, 0, bytes); return; }
    memset(to, 0, head);
    size_t body = (bytes - head) / PAGE * PAGE;
    discard(to + head, body);
    memset(to + head + body, 0, bytes - head - body);
}

void copy(void *to, const void *from, size_t bytes) {
    if (device_of(to) >= 0 && bytes > COPY_LIMIT && !computing) zero(to, bytes); else memmove(to, from, bytes);
}

void fill(void *to, int value, size_t bytes) {
    if (device_of(to) >= 0 && (value == 0 || (bytes > COPY_LIMIT && !computing))) zero(to, bytes); else memset(to, value, bytes);
}

/* ---- unsupported features */
static const char *refused[8];
static int refused_count;

void refuse_feature(const char *name, const char *advice) {
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < refused_count && strcmp(refused[at], name)) at++;
    if (at == refused_count && at < (int)(sizeof refused / sizeof *refused)) {
        refused[refused_count++] = name;
        fprintf(stderr, "brim: not supported on an emulated card: %s. %s\n", name, advice);
    }
    pthread_mutex_unlock(&lock);
}

const char *brim_card_refused(int index) { return index >= 0 && index < refused_count ? refused[index] : NULL; } /* called by the agent */

void trace_line(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    fputs("brim card: ", stderr);
    vfprintf(stderr, format, rest);
    fputc('\n', stderr);
    va_end(rest);
}
