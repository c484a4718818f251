/* NCCL between the processes of one session, through the memory that they share.
 *
 * A communicator is a slot of that memory, identified by its unique id. In a collective every rank copies its part into its mailbox, waits until
 * all ranks have done so, and reads the parts that it needs from the others, piece by piece. Sends and receives use a ring buffer for each pair
 * of ranks. A call returns when its work is complete, so streams are always idle. The calls of a group make progress together, so that their
 * order does not matter. A rank that only sends (the root of a broadcast) waits until its mailbox is free, but not for the readers. Messages
 * above COPY_LIMIT bytes synchronise the ranks and copy nothing, unless values are computed. */
#define _GNU_SOURCE
#include "cuda_api.h"
#include "device.h"
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = DEVICES, SLOTS = 512, ID_BYTES = 128 };
#define COPY_LIMIT (8 * MIB)
#define MAILBOX (1 * MIB)
#define RING (256 << 10)
#define GIVE_UP_SECONDS 1800 /* longest wait for a rank that is alive */
/* Assumed device memory of one communicator, allocated at its first use. Measured on four A100 with NVLink (github.com/NVIDIA/nccl, issue 964). */
#define PAIR_BYTES ((size_t)544000000)
#define GROUP_BYTES ((size_t)688000000)

typedef enum { SUCCESS, UNHANDLED_CUDA, SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE } Result;
typedef enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 } Type;
typedef enum { SUM, PRODUCT, MAX, MIN, AVERAGE, FIRST_CUSTOM } Reduction;
typedef struct { char bytes[ID_BYTES]; } UniqueId;

typedef struct { /* a rank publishes it with each piece, so that the others can check that they are in the same call */
    int kind, type, root, spare;
    uint64_t bytes;
} Signature;
typedef struct { /* written by its owner only */
    int pid, device, joined, left;
    uint64_t posted, consumed; /* pieces of collectives */
    Signature signature;
} __attribute__((aligned(128))) Member;
typedef struct { uint64_t written, read; } __attribute__((aligned(128))) Pair; /* total bytes that went through a ring */
typedef struct {
    UniqueId id;
    int size, in_use;
    Member members[RANKS];
    Pair pairs[RANKS][RANKS]; /* [from][to] */
} Slot;

typedef struct { int used; double value; } Custom; /* ncclRedOpCreatePreMulSum */
typedef struct Comm {
    Slot *slot;
    char *mailboxes, *rings;
    int rank, size, device, aborted, busy, splits;
    size_t charged;
    uint64_t pieces; /* of collectives, so far */
    Result async_error;
    Custom custom[64];
} Comm;

typedef enum { JOIN, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECEIVE } Kind;
static const char *const NAMES[] = {"ncclCommInitRank", "ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter",
                                    "ncclAlltoAll", "ncclGather", "ncclScatter", "ncclSend", "ncclRecv"};
typedef struct {
    Kind kind;
    Comm *comm;
    const char *send;
    char *receive;
    size_t count; /* elements, as in the call */
    Type type;
    int reduction, root; /* root: also the peer of a message */
    int posted, done;
    size_t offset; /* completed elements of a collective, or bytes of a message */
} Call;

static __thread Call *calls;
static __thread size_t call_count, call_room;
static __thread int depth;
static char last_error[512];

static Result failed(Result result, const char *format, ...) __attribute__((format(printf, 2, 3)));
static Result failed(Result result, const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    vsnprintf(last_error, sizeof last_error, format, rest);
    va_end(rest);
    trace("nccl: %s", last_error);
    return result;
}

#define LOAD(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define STORE(place, value) __atomic_store_n(&(place), value, __ATOMIC_RELEASE)

static size_t width(Type type) {
    switch (type) {
    case INT8: case UINT8: case FLOAT8_E4M3: case FLOAT8_E5M2: return 1;
    case FLOAT16: case BFLOAT16: return 2;
    case INT64: case UINT64: case FLOAT64: return 8;
    default: return 4;
    }
}
static int moves(const Call *call) { return call->count * width(call->type) <= COPY_LIMIT || card_compute(); }

/* ---- arithmetic: integers in 64 bits, half precision in float with one rounding at the end, other floats in their own type */
static float half_to_float(uint16_t h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? ldexpf(1024 + (float)fraction, exponent - 25) : ldexpf((float)fraction, -24);
    return h >> 15 ? -value : value;
}
static uint16_t float_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    float size = fabsf(value);
    if (isnan(value)) return sign | 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < ldexpf(1, -14)) return sign | (uint16_t)lrintf(ldexpf(size, 24)); /* subnormal; rounds to even */
    int exponent;
    float fraction = frexpf(size, &exponent);                                    /* 0.5 to 1 */
    uint32_t scaled = (uint32_t)lrintf(ldexpf(fraction, 11));                    /* 1024 to 2048 */
    return sign | (uint16_t)(((uint32_t)(exponent + 14) << 10) + scaled - 1024);
}
static float brain_to_float(uint16_t b) { uint32_t bits = (uint32_t)b << 16; float value; memcpy(&value, &bits, 4); return value; }
static uint16_t float_to_brain(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (isnan(value)) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define COMBINE(a, b) (reduction == PRODUCT ? (a) * (b) : reduction == MAX ? ((b) > (a) || (b) != (b) ? (b) : (a)) : reduction == MIN ? ((b) < (a) || (b) != (b) ? (b) : (a)) : (a) + (b))
#define REDUCE_AS(stored, working, from_stored, to_stored) do { \
    for (size_t i = 0; i < count; i++) { \
        working sum = 0; \
        for (int r = 0; r < size; r++) { \
            working value = (working)from_stored(((const stored *)parts[r])[i]); \
            if (factor) value = (working)(value * *factor); \
            sum = r ? (working)COMBINE(sum, value) : value; \
        } \
        if (average) sum = (working)(sum / (working)size); \
        ((stored *)to)[i] = (stored)to_stored(sum); \
    } } while (0)
#define SAME(x) (x)

static Result reduce(char *to, const char **parts, int size, size_t count, Type type, int reduction, const Comm *comm) {
    int average = reduction == AVERAGE;
    const double *factor = NULL;
    if (reduction >= FIRST_CUSTOM) { factor = &comm->custom[reduction - FIRST_CUSTOM].value; reduction = SUM; }
    switch (type) {
    case INT8: REDUCE_AS(int8_t, int64_t, SAME, SAME); break;
    case UINT8: REDUCE_AS(uint8_t, uint64_t, SAME, SAME); break;
    case INT32: REDUCE_AS(int32_t, int64_t, SAME, SAME); break;
    case UINT32: REDUCE_AS(uint32_t, uint64_t, SAME, SAME); break;
    case INT64: REDUCE_AS(int64_t, int64_t, SAME, SAME); break;
    case UINT64: REDUCE_AS(uint64_t, uint64_t, SAME, SAME); break;
    case FLOAT16: REDUCE_AS(uint16_t, float, half_to_float, float_to_half); break;
    case BFLOAT16: REDUCE_AS(uint16_t, float, brain_to_float, float_to_brain); break;
    case FLOAT32: REDUCE_AS(float, float, SAME, SAME); break;
    case FLOAT64: REDUCE_AS(double, double, SAME, SAME); break;
    default: return failed(INVALID_ARGUMENT, "the emulated card does not reduce 8-bit floats");
    }
    return SUCCESS;
}

/* ---- slots */
typedef struct { Slot slots[SLOTS]; } Directory;
static size_t page_rounded(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
static const size_t SLOT_BUFFERS = RANKS * MAILBOX + (size_t)RANKS * RANKS * RING;

static int is_abandoned(const Slot *slot) { /* every rank that joined has left or died */
    for (int r = 0; r < slot->size; r++)
        if (slot->members[r].joined && !slot->members[r].left && is_running(slot->members[r].pid)) return 0;
    return 1;
}

static Result join(Comm *comm, const UniqueId *id) {
    size_t bytes;
    char *memory = session_memory(&bytes);
    if (!memory) return failed(INVALID_USAGE, "the emulated card has no session (BRIM_CARD_SHARED)");
    Directory *directory = (Directory *)memory;
    Slot *own = NULL, *unused = NULL;
    lock_session();
    for (int i = 0; i < SLOTS && !own; i++) {
        Slot *slot = &directory->slots[i];
        if (slot->in_use && !memcmp(&slot->id, id, sizeof *id)) own = slot;
        else if (!unused && (!slot->in_use || is_abandoned(slot))) unused = slot;
    }
    if (!own && unused) {
        memset(unused, 0, sizeof *unused);
        unused->id = *id;
        unused->size = comm->size;
        unused->in_use = 1;
        own = unused;
    }
    Result result = SUCCESS;
    if (!own) result = failed(SYSTEM, "more than %d communicators", SLOTS);
    else if (own->size != comm->size || own->members[comm->rank].joined)
        result = failed(INVALID_USAGE, "rank %d of %d: the communicator has %d ranks, or this one has joined", comm->rank, comm->size, own->size);
    if (!result) {
        char *buffers = memory + page_rounded(sizeof *directory) + (size_t)(own - directory->slots) * SLOT_BUFFERS;
        comm->slot = own;
        comm->mailboxes = buffers;
        comm->rings = buffers + RANKS * MAILBOX;
        Member *self = &own->members[comm->rank];
        self->pid = getpid();
        self->device = physical_device(comm->device);
        STORE(self->joined, 1);
    }
    unlock_session();
    return result;
}

static void leave(Comm *comm) {
    if (!comm->slot) return;
    lock_session();
    comm->slot->members[comm->rank].left = 1;
    int last = 1;
    for (int r = 0; r < comm->size; r++)
        if (!comm->slot->members[r].joined || !comm->slot->members[r].left) last = 0;
    if (last) {
        madvise(comm->mailboxes, SLOT_BUFFERS, MADV_REMOVE);
        comm->slot->in_use = 0;
    }
    unlock_session();
    comm->slot = NULL;
    if (comm->charged) give_back(comm->device, comm->charged);
    comm->charged = 0;
}

/* ---- progress: no function blocks; each returns 1 if it made progress */
static int check_joined(Call *call, Result *result) {
    Slot *slot = call->comm->slot;
    for (int r = 0; r < slot->size; r++)
        if (!LOAD(slot->members[r].joined)) return 0;
    for (int a = 0; a < slot->size; a++)
        for (int b = 0; b < a; b++)
            if (slot->members[a].device == slot->members[b].device)
                *result = failed(INVALID_USAGE, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d000", a, b, slot->members[a].device + 1);
    call->done = 1;
    return 1;
}

static char *mailbox(Comm *comm, int rank) { return comm->mailboxes + (size_t)rank * MAILBOX; }

static size_t elements_in_piece(const Call *call) {
    int parts = call->kind == REDUCE_SCATTER || call->kind == ALL_TO_ALL || call->kind == SCATTER ? call->comm->size : 1;
    size_t most = MAILBOX / (size_t)parts / 8 * 8 / width(call->type), left = call->count - call->offset;
    return left < most ? left : most;
}

static void post(Call *call, size_t n) {
    Comm *comm = call->comm;
    size_t bytes = n * width(call->type), at = call->offset * width(call->type), whole = call->count * width(call->type);
    char *to = mailbox(comm, comm->rank);
    int is_root = comm->rank == call->root;
    switch (call->kind) {
    case ALL_REDUCE: case REDUCE: case ALL_GATHER: case GATHER: memcpy(to, call->send + at, bytes); break;
    case BROADCAST: if (is_root) memcpy(to, call->send + at, bytes); break;
    case SCATTER: if (!is_root) break; /* fall through */
    case REDUCE_SCATTER: case ALL_TO_ALL:
        for (int r = 0; r < comm->size; r++) memcpy(to + (size_t)r * bytes, call->send + (size_t)r * whole + at, bytes);
        break;
    default: break;
    }
}

static Result collect(Call *call, size_t n) {
    Comm *comm = call->comm;
    size_t bytes = n * width(call->type), at = call->offset * width(call->type), whole = call->count * width(call->type);
    const char *parts[RANKS];
    int is_root = comm->rank == call->root;
    for (int r = 0; r < comm->size; r++)
        parts[r] = mailbox(comm, r) + (call->kind == REDUCE_SCATTER || call->kind == ALL_TO_ALL ? (size_t)comm->rank * bytes : 0);
    switch (call->kind) {
    case REDUCE: if (!is_root) break; /* fall through */
    case ALL_REDUCE: case REDUCE_SCATTER: return reduce(call->receive + at, parts, comm->size, n, call->type, call->reduction, comm);
    case BROADCAST: if (call->receive && (!is_root || call->receive != call->send)) memcpy(call->receive + at, parts[call->root], bytes); break;
    case GATHER: if (!is_root) break; /* fall through */
    case ALL_GATHER: case ALL_TO_ALL:
        for (int r = 0; r < comm->size; r++) memcpy(call->receive + (size_t)r * whole + at, parts[r], bytes);
        break;
    case SCATTER: memcpy(call->receive + at, parts[call->root] + (size_t)comm->rank * bytes, bytes); break;
    default: break;
    }
    return SUCCESS;
}

static Result compare(const Call *call, const Signature *own) {
    for (int r = 0; r < call->comm->size; r++) {
        const Signature *other = &call->comm->slot->members[r].signature;
        if (memcmp(own, other, sizeof *own))
            return failed(INVALID_USAGE, "ranks are in different collectives: rank %d in %s of %llu bytes (type %d, root %d), rank %d in %s of %llu bytes (type %d, root %d)",
                          call->comm->rank, NAMES[own->kind], (unsigned long long)own->bytes, own->type, own->root, r, NAMES[other->kind % 11],
                          (unsigned long long)other->bytes, other->type, other->root);
    }
    return SUCCESS;
}

static int only_sends(const Call *call) { /* as with NCCL, a rank that receives nothing does not wait for those that do */
    int is_root = call->comm->rank == call->root;
    return call->kind == BROADCAST ? is_root : call->kind == REDUCE || call->kind == GATHER ? !is_root : 0;
}

static int advance_collective(Call *call, Result *result) {
    Comm *comm = call->comm;
    Member *members = comm->slot->members, *self = &members[comm->rank];
    int real = moves(call);
    size_t n = real ? elements_in_piece(call) : call->count;
    if (!call->posted) {
        for (int r = 0; r < comm->size; r++)
            if (LOAD(members[r].consumed) < comm->pieces) return 0;
        if (real) post(call, n);
        self->signature = (Signature){(int)call->kind, (int)call->type, call->root, 0, call->count * width(call->type)};
        STORE(self->posted, comm->pieces + 1);
        call->posted = 1;
    }
    if (!real || !only_sends(call)) {
        for (int r = 0; r < comm->size; r++)
            if (LOAD(members[r].posted) <= comm->pieces) return 0;
        *result = compare(call, &self->signature);
    }
    if (!*result && real) *result = collect(call, n);
    if (!real && call->receive && call->receive != call->send && (call->kind == ALL_GATHER || call->kind == ALL_TO_ALL))
        fill(call->receive, 0, call->count * width(call->type) * (size_t)comm->size);
    call->posted = 0;
    call->offset += n;
    call->done = call->offset >= call->count;
    comm->pieces++;
    STORE(self->consumed, comm->pieces);
    return 1;
}

static int advance_message(Call *call) { /* a message that is not copied counts as one byte, so that the receiver waits for it */
    Comm *comm = call->comm;
    int from = call->kind == SEND ? comm->rank : call->root, to = call->kind == SEND ? call->root : comm->rank;
    Pair *pair = &comm->slot->pairs[from][to];
    char *ring = comm->rings + ((size_t)from * RANKS + (size_t)to) * RING;
    int real = moves(call);
    size_t bytes = real ? call->count * width(call->type) : 1, before = call->offset;
    while (call->offset < bytes) {
        uint64_t written = LOAD(pair->written), read = LOAD(pair->read);
        size_t ready = call->kind == SEND ? RING - (written - read) : written - read, at = (call->kind == SEND ? written : read) % RING;
        size_t n = bytes - call->offset;
        if (n > ready) n = ready;
        if (n > RING - at) n = RING - at;
        if (!n) break;
        if (real && call->kind == SEND) memcpy(ring + at, call->send + call->offset, n);
        if (real && call->kind == RECEIVE) memcpy(call->receive + call->offset, ring + at, n);
        if (call->kind == SEND) STORE(pair->written, written + n); else STORE(pair->read, read + n);
        call->offset += n;
    }
    call->done = call->offset >= bytes;
    return call->done || call->offset != before;
}

static int must_wait(size_t index) { /* for an earlier call of the group that uses the same mailbox or ring */
    const Call *call = &calls[index];
    for (size_t i = 0; i < index; i++) {
        const Call *earlier = &calls[i];
        if (earlier->done || earlier->comm != call->comm) continue;
        int messages = (call->kind >= SEND) + (earlier->kind >= SEND);
        if (messages == 0 || earlier->kind == JOIN) return 1;
        if (messages == 2 && earlier->kind == call->kind && earlier->root == call->root) return 1;
    }
    return 0;
}

static Result check_peers(const Call *call) {
    Comm *comm = call->comm;
    for (int r = 0; r < comm->size; r++) {
        const Member *member = &comm->slot->members[r];
        if (call->kind >= SEND && r != call->root) continue;
        if (LOAD(member->joined) && (member->left || !is_running(member->pid)))
            return failed(REMOTE, "%s: rank %d has exited (process %d)", NAMES[call->kind], r, member->pid);
    }
    return SUCCESS;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static Result charge(Comm *comm) { /* NCCL allocates its buffers when ranks first connect */
    size_t bytes = comm->size > 2 ? GROUP_BYTES : PAIR_BYTES;
    if (comm->charged || comm->size == 1) return SUCCESS;
    if (take(comm->device, bytes)) return failed(UNHANDLED_CUDA, "Cuda failure 2 'out of memory' (%zu bytes for the buffers of a communicator)", bytes);
    comm->charged = bytes;
    return SUCCESS;
}

static Result run_calls(void) {
    Result result = SUCCESS;
    size_t left = 0;
    double began = seconds(), checked = began, moved = began;
    for (size_t i = 0; i < call_count; i++) {
        if (calls[i].kind != JOIN && !result) result = charge(calls[i].comm);
        if (calls[i].kind != JOIN && calls[i].count == 0) calls[i].done = 1;
        left += !calls[i].done;
        __atomic_add_fetch(&calls[i].comm->busy, 1, __ATOMIC_ACQ_REL);
    }
    for (unsigned idle = 0; left && !result;) {
        int progress = 0;
        left = 0;
        for (size_t i = 0; i < call_count && !result; i++) {
            Call *call = &calls[i];
            if (call->done) continue;
            left++;
            if (LOAD(call->comm->aborted)) { result = failed(INTERNAL, "%s: the communicator was aborted", NAMES[call->kind]); break; }
            if (must_wait(i)) continue;
            progress |= call->kind == JOIN ? check_joined(call, &result) : call->kind >= SEND ? advance_message(call) : advance_collective(call, &result);
        }
        if (progress) { idle = 0; moved = seconds(); continue; }
        if (!left || result) break;
        usleep(idle++ < 100 ? 20 : 200);
        double now = seconds();
        if (now - checked < 0.2) continue;
        checked = now;
        for (size_t i = 0; i < call_count && !result; i++)
            if (!calls[i].done) result = check_peers(&calls[i]);
        if (!result && now - moved > GIVE_UP_SECONDS) result = failed(SYSTEM, "no rank has answered for %d s", GIVE_UP_SECONDS);
    }
    for (size_t i = 0; i < call_count; i++) {
        if (result && result != INVALID_ARGUMENT) calls[i].comm->async_error = result;
        __atomic_sub_fetch(&calls[i].comm->busy, 1, __ATOMIC_ACQ_REL);
    }
    call_count = 0;
    return result;
}

static Result add(Call call) {
    if (call.kind != JOIN) {
        if (!call.comm || !call.comm->slot) return failed(INVALID_ARGUMENT, "%s: no communicator", NAMES[call.kind]);
        if (call.root < 0 || call.root >= call.comm->size) return failed(INVALID_ARGUMENT, "%s: rank %d does not exist", NAMES[call.kind], call.root);
        trace("nccl: rank %d: %s of %zu bytes", call.comm->rank, NAMES[call.kind], call.count * width(call.type));
    }
    if (call_count == call_room) {
        call_room = call_room ? 2 * call_room : 16;
        calls = realloc(calls, call_room * sizeof *calls);
    }
    calls[call_count++] = call;
    return depth ? SUCCESS : run_calls();
}

/* ---- communicators */
Result ncclGetVersion(int *version) { /* that of the NCCL that is installed with torch: the next library in the search order */
    Result (*real)(int *) = (Result (*)(int *))dlsym(RTLD_NEXT, "ncclGetVersion");
    if (real && !real(version)) return SUCCESS;
    *version = 22707;
    return SUCCESS;
}
Result ncclGetUniqueId(UniqueId *id) { return getrandom(id, sizeof *id, 0) == sizeof *id ? SUCCESS : SYSTEM; }
const char *ncclGetErrorString(Result result) {
    static const char *const TEXTS[] = {"no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                                        "internal error - please report this issue to the NCCL developers", "invalid argument (run with NCCL_DEBUG=WARN for details)",
                                        "invalid usage (run with NCCL_DEBUG=WARN for details)", "remote process exited or there was a network error", "NCCL operation in progress"};
    return (unsigned)result < sizeof TEXTS / sizeof *TEXTS ? TEXTS[result] : "unknown result code";
}
const char *ncclGetLastError(const Comm *comm) { (void)comm; return last_error; }

static Result make_communicator(Comm **made, const UniqueId *id, int size, int rank) {
    if (size < 1 || size > RANKS || rank < 0 || rank >= size) return failed(INVALID_ARGUMENT, "rank %d of %d (at most %d)", rank, size, RANKS);
    if (make_context(current_device())) return failed(UNHANDLED_CUDA, "Cuda failure 2 'out of memory'");
    Comm *comm = calloc(1, sizeof *comm);
    comm->rank = rank;
    comm->size = size;
    comm->device = current_device();
    Result result = join(comm, id);
    if (!result) { *made = comm; result = add((Call){.kind = JOIN, .comm = comm}); }
    if (result) { leave(comm); if (!depth) free(comm); *made = NULL; }
    trace("nccl: rank %d of %d on device %d: %s", rank, size, current_device(), result ? last_error : "joined");
    return result;
}
Result ncclCommInitRankConfig(Comm **comm, int size, UniqueId id, int rank, void *config) { (void)config; return make_communicator(comm, &id, size, rank); }
Result ncclCommInitRank(Comm **comm, int size, UniqueId id, int rank) { return make_communicator(comm, &id, size, rank); }
Result ncclCommInitRankScalable(Comm **comm, int size, int rank, int ids, UniqueId *id, void *config) { (void)ids; (void)config; return make_communicator(comm, &id[0], size, rank); }
Result ncclGroupStart(void);
Result ncclGroupEnd(void);
Result ncclCommInitAll(Comm **comms, int size, const int *devices) {
    UniqueId id;
    int before = current_device();
    Result result = ncclGetUniqueId(&id);
    ncclGroupStart();
    for (int r = 0; r < size && !result; r++) {
        set_current_device(devices ? devices[r] : r);
        result = make_communicator(&comms[r], &id, size, r);
    }
    set_current_device(before);
    Result end = ncclGroupEnd();
    return result ? result : end;
}

static UniqueId derived_id(const Comm *comm, int serial, int part) { /* all ranks derive the same id */
    UniqueId id = comm->slot->id;
    uint64_t mixed[2] = {((uint64_t)serial << 32 | (uint32_t)part) * 0x9e3779b97f4a7c15u, 0};
    for (size_t i = 0; i < sizeof id.bytes; i++) mixed[1] = (mixed[1] ^ (unsigned char)id.bytes[i]) * 0x100000001b3u;
    for (size_t i = 0; i < sizeof mixed; i++) id.bytes[i] ^= ((char *)mixed)[i];
    return id;
}
Result ncclCommSplit(Comm *comm, int color, int key, Comm **made, void *config) {
    (void)config;
    if (!comm || !comm->slot) return failed(INVALID_ARGUMENT, "ncclCommSplit: no communicator");
    int own[2] = {color, key}, all[RANKS][2], rank = 0, size = 0, outer = depth;
    *made = NULL;
    depth = 0; /* the exchange must complete before the group ends */
    size_t kept = call_count;
    call_count = 0;
    Result result = SUCCESS;
    if (kept) result = failed(INVALID_USAGE, "ncclCommSplit in a group with other calls is not supported by the emulated card");
    size_t charged = comm->charged;
    comm->charged = 1; /* the exchange takes no device memory */
    if (!result) result = add((Call){ALL_GATHER, comm, (char *)own, (char *)all, 2, INT32, 0, 0, 0, 0, 0});
    comm->charged = charged;
    depth = outer;
    if (result) return result;
    int serial = ++comm->splits;
    if (color < 0) return SUCCESS; /* NCCL_SPLIT_NOCOLOR */
    for (int r = 0; r < comm->size; r++)
        if (all[r][0] == color) {
            size++;
            if (all[r][1] < key || (all[r][1] == key && r < comm->rank)) rank++;
        }
    UniqueId id = derived_id(comm, serial, color);
    return make_communicator(made, &id, size, rank);
}
Result ncclCommShrink(Comm *comm, int *excluded, int n, Comm **made, void *config, int flags) {
    (void)config; (void)flags;
    int rank = comm->rank, sum = 0;
    for (int i = 0; i < n; i++) { rank -= excluded[i] < comm->rank; sum = sum * 31 + excluded[i] + 1; }
    UniqueId id = derived_id(comm, ++comm->splits, ~sum);
    return make_communicator(made, &id, comm->size - n, rank);
}
Result ncclCommFinalize(Comm *comm) { (void)comm; return SUCCESS; }
Result ncclCommAbort(Comm *comm) { /* calls that wait in other threads return with an error first */
    if (!comm) return SUCCESS;
    STORE(comm->aborted, 1);
    for (int i = 0; i < 5000 && LOAD(comm->busy); i++) usleep(1000);
    leave(comm);
    if (!LOAD(comm->busy)) free(comm);
    return SUCCESS;
}
Result ncclCommDestroy(Comm *comm) { return ncclCommAbort(comm); }
Result ncclCommRevoke(Comm *comm, int flags) { (void)flags; STORE(comm->aborted, 1); return SUCCESS; }
Result ncclCommGetAsyncError(Comm *comm, Result *error) { *error = comm->async_error; return SUCCESS; }
Result ncclCommCount(const Comm *comm, int *count) { *count = comm->size; return SUCCESS; }
Result ncclCommCuDevice(const Comm *comm, int *device) { *device = comm->device; return SUCCESS; }
Result ncclCommUserRank(const Comm *comm, int *rank) { *rank = comm->rank; return SUCCESS; }
Result ncclCommMemStats(const Comm *comm, int which, uint64_t *value) { (void)which; *value = comm->charged; return SUCCESS; }
Result ncclCommSuspend(Comm *comm, int flags) { (void)comm; (void)flags; return SUCCESS; }
Result ncclCommResume(Comm *comm) { (void)comm; return SUCCESS; }

/* ---- memory: nothing to register, because the host makes the copies */
Result ncclCommRegister(const Comm *comm, void *buffer, size_t bytes, void **handle) { (void)comm; (void)bytes; *handle = buffer; return SUCCESS; }
Result ncclCommDeregister(const Comm *comm, void *handle) { (void)comm; (void)handle; return SUCCESS; }
Result ncclCommWindowRegister(Comm *comm, void *buffer, size_t bytes, void **window, int flags) { (void)comm; (void)bytes; (void)flags; *window = buffer; return SUCCESS; }
Result ncclCommWindowDeregister(Comm *comm, void *window) { (void)comm; (void)window; return SUCCESS; }
Result ncclMemAlloc(void **pointer, size_t bytes) {
    *pointer = device_malloc(current_device(), bytes);
    return *pointer ? SUCCESS : failed(UNHANDLED_CUDA, "Cuda failure 2 'out of memory'");
}
Result ncclMemFree(void *pointer) { return pointer && device_free(pointer) ? INVALID_ARGUMENT : SUCCESS; }

Result ncclRedOpCreatePreMulSum(int *op, void *scalar, Type type, int residence, Comm *comm) {
    (void)residence; /* the host reads both kinds of memory */
    for (int i = 0; i < (int)(sizeof comm->custom / sizeof *comm->custom); i++) {
        Custom *custom = &comm->custom[i];
        if (custom->used) continue;
        switch (type) {
        case FLOAT16: custom->value = half_to_float(*(uint16_t *)scalar); break;
        case BFLOAT16: custom->value = brain_to_float(*(uint16_t *)scalar); break;
        case FLOAT32: custom->value = *(float *)scalar; break;
        case FLOAT64: custom->value = *(double *)scalar; break;
        default: return failed(INVALID_ARGUMENT, "the emulated card multiplies floats only");
        }
        custom->used = 1;
        *op = FIRST_CUSTOM + i;
        return SUCCESS;
    }
    return failed(INVALID_USAGE, "too many reduction operators");
}
Result ncclRedOpDestroy(int op, Comm *comm) { if (op >= FIRST_CUSTOM) comm->custom[op - FIRST_CUSTOM].used = 0; return SUCCESS; }

/* ---- collectives and messages */
Result ncclGroupStart(void) { depth++; return SUCCESS; }
Result ncclGroupEnd(void) {
    if (!depth) return failed(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    return --depth ? SUCCESS : run_calls();
}
Result ncclGroupSimulateEnd(void *information) { (void)information; call_count = 0; if (depth) depth--; return SUCCESS; }

Result ncclAllReduce(const void *send, void *receive, size_t count, Type type, int op, Comm *comm, cudaStream_t stream) {
    (void)stream;
    return add((Call){.kind = ALL_REDUCE, .comm = comm, .send = send, .receive = receive, .count = count, .type = type, .reduction = op});
}
Result ncclReduce(const void *send, void *receive, size_t count, Type type, int op, int root, Comm *comm, cudaStream_t stream) {
    (void)stream;
    return add((Call){.kind = REDUCE, .comm = comm, .send = send, .receive = receive, .count = count, .type = type, .reduction = op, .root = root});
}
Result ncclBroadcast(const void *send, void *receive, size_t count, Type type, int root, Comm *comm, cudaStream_t stream) {
    (void)stream;
    return add((Call){.kind = BROADCAST, .comm = comm, .send = send, .receive = receive, .count = count, .type = type, .root = root});
}
Result ncclBcast(void *buffer, size_t count, Type type, int root, Comm *comm, cudaStream_t stream) { return ncclBroadcast(buffer, buffer, count, type, root, comm, stream); }
Result ncclAllGather(const void *send, void *receive, size_t count, Type type, Comm *comm, cudaStream_t stream) {
    (void)stream;
    return add((Call){.kind = ALL_GATHER, .comm = comm, .send = send, .receive = receive, .count = count, .type = type});
}
Result ncclReduceScatter(const void *send, void *receive, size_t count, Type type, int op, Comm *comm, cudaStream_t stream) {
    (void)stream;
    return add((Call){.kind = REDUCE_SCATTER, .comm = comm, .send = send, .receive = receive, .count = count, .type = type, .reduction = op});
}
Result ncclAlltoAll(const void *send, void *receive, size_t count, Type type, Comm *comm, cudaStream_t stream) {
    (void)stream;
    return add((Call){.kind = ALL_TO_ALL, .comm = comm, .send = send, .receive = receive, .count = count, .type = type});
}
Result ncclGather(const void *send, void *receive, size_t count, Type type, int root, Comm *comm, cudaStream_t stream) {
    (void)stream;
    return add((Call){.kind = GATHER, .comm = comm, .send = send, .receive = receive, .count = count, .type = type, .root = root});
}
Result ncclScatter(const void *send, void *receive, size_t count, Type type, int root, Comm *comm, cudaStream_t stream) {
    (void)stream;
    return add((Call){.kind = SCATTER, .comm = comm, .send = send, .receive = receive, .count = count, .type = type, .root = root});
}
Result ncclSend(const void *send, size_t count, Type type, int peer, Comm *comm, cudaStream_t stream) {
    (void)stream;
    return add((Call){.kind = SEND, .comm = comm, .send = send, .count = count, .type = type, .root = peer});
}
Result ncclRecv(void *receive, size_t count, Type type, int peer, Comm *comm, cudaStream_t stream) {
    (void)stream;
    return add((Call){.kind = RECEIVE, .comm = comm, .receive = receive, .count = count, .type = type, .root = peer});
}
