/* The CUDA runtime: memory and copies are real, kernels are not run, and every stream is idle as soon as a call returns. */
#define _GNU_SOURCE
#include "cuda_api.h"
#include "device.h"
#include "kernels.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static __thread cudaError_t last_error;
static cudaError_t fail(cudaError_t error) { if (error != cudaSuccess) last_error = error; return error; }
#define OK return cudaSuccess
#define UNUSED(...) ((void)sizeof((const void *[]){__VA_ARGS__}))

/* ---- errors and versions */
cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
#define X(name, number, text) case cudaError##name: return text;
    CUDA_ERRORS(X)
#undef X
    default: return error == cudaSuccess ? "no error" : "unrecognized error code";
    }
}
const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define X(name, number, text) case cudaError##name: return "cudaError" #name;
    CUDA_ERRORS(X)
#undef X
    default: return error == cudaSuccess ? "cudaSuccess" : "unrecognized error code";
    }
}
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDA_VERSION; OK; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDA_VERSION; OK; }

/* ---- devices */
static cudaError_t check_device(int device) {
    if (!visible_count()) return fail(cudaErrorNoDevice);
    return device < 0 || device >= visible_count() ? fail(cudaErrorInvalidDevice) : cudaSuccess;
}
static cudaError_t use_device(int device) { /* the first use of a card by a process makes its context */
    cudaError_t error = check_device(device);
    if (error) return error;
    return make_context(device) ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *n) { *n = visible_count(); return *n ? cudaSuccess : fail(cudaErrorNoDevice); }
cudaError_t cudaGetDevice(int *device) { *device = current_device(); return visible_count() ? cudaSuccess : fail(cudaErrorNoDevice); }
cudaError_t cudaSetDevice(int device) {
    cudaError_t error = check_device(device);
    if (error) return error;
    set_current_device(device);
    return use_device(device);
}
cudaError_t cudaSetValidDevices(int *list, int n) { (void)list; (void)n; OK; }
cudaError_t cudaSetDeviceFlags(unsigned flags) { (void)flags; OK; }
cudaError_t cudaGetDeviceFlags(unsigned *flags) { *flags = 0; OK; }
cudaError_t cudaInitDevice(int device, unsigned device_flags, unsigned flags) { (void)device_flags; (void)flags; return use_device(device); }
cudaError_t cudaDeviceReset(void) { OK; }
cudaError_t cudaDeviceSynchronize(void) { return use_device(current_device()); }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { /* depends on the machine (NVLink, PCIe switches); assumed: no */
    cudaError_t error = check_device(device) ? check_device(device) : check_device(peer);
    *can = 0;
    return error;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { (void)flags; return check_device(peer); }
cudaError_t cudaDeviceDisablePeerAccess(int peer) { return check_device(peer); }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { if (least) *least = 0; if (greatest) *greatest = -5; OK; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    cudaError_t error = check_device(device);
    if (!error) snprintf(text, (size_t)length, "0000:%02X:00.0", physical_device(device) + 1);
    return error;
}
cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x", &domain, &bus) == 2)
        for (int d = 0; d < visible_count(); d++)
            if (physical_device(d) + 1 == (int)bus) { *device = d; OK; }
    return fail(cudaErrorInvalidDevice);
}
enum { STACK_LIMIT, PRINTF_LIMIT, HEAP_LIMIT };
static size_t limits[8] = {[STACK_LIMIT] = 1024, [PRINTF_LIMIT] = 7 << 20, [HEAP_LIMIT] = 8 << 20};
cudaError_t cudaDeviceGetLimit(size_t *value, int which) { *value = which >= 0 && which < 8 ? limits[which] : 0; OK; }
cudaError_t cudaDeviceSetLimit(int which, size_t value) { if (which >= 0 && which < 8) limits[which] = value; OK; }
cudaError_t cudaDeviceGetCacheConfig(int *config) { *config = 0; OK; }
cudaError_t cudaDeviceSetCacheConfig(int config) { (void)config; OK; }
cudaError_t cudaProfilerStart(void) { OK; }
cudaError_t cudaProfilerStop(void) { OK; }

static void describe(struct cudaDeviceProp *p, int device) {
    const Card *c = card();
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", c->name);
    card_uuid(physical_device(device), (unsigned char *)p->uuid);
    p->totalGlobalMem = c->memory;
    p->sharedMemPerBlock = 48 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = c->sm_registers;
    p->warpSize = 32;
    p->memPitch = 2147483647;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = c->major;
    p->minor = c->minor;
    p->textureAlignment = 512;
    p->texturePitchAlignment = 32;
    p->multiProcessorCount = c->sms;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
    p->globalL1CacheSupported = p->localL1CacheSupported = p->managedMemory = p->concurrentManagedAccess = 1;
    p->computePreemptionSupported = p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = 1;
    p->hostRegisterSupported = p->memoryPoolsSupported = p->unifiedFunctionPointers = 1;
    p->clusterLaunch = c->major >= 9;
    p->pciBusID = physical_device(device) + 1;
    p->asyncEngineCount = 2;
    p->memoryBusWidth = c->bus_bits;
    p->l2CacheSize = c->l2_bytes;
    p->maxThreadsPerMultiProcessor = c->sm_threads;
    p->sharedMemPerMultiprocessor = c->sm_shared;
    p->sharedMemPerBlockOptin = c->block_shared;
    p->maxBlocksPerMultiProcessor = c->sm_blocks;
    p->reservedSharedMemPerBlock = c->reserved_shared;
}
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int device) { /* the symbol's name in CUDA 12 */
    cudaError_t error = check_device(device);
    if (!error) describe(p, device);
    return error;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) { return cudaGetDeviceProperties_v2(p, device); }

cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
    struct cudaDeviceProp p;
    cudaError_t error = check_device(device);
    if (error) return error;
    describe(&p, device);
    switch (attribute) { /* numbers of cudaDeviceAttr, which are those of CUdevice_attribute */
#define IS(number, field) case number: *value = (int)p.field; break;
    IS(1, maxThreadsPerBlock) IS(2, maxThreadsDim[0]) IS(3, maxThreadsDim[1]) IS(4, maxThreadsDim[2]) IS(5, maxGridSize[0]) IS(6, maxGridSize[1])
    IS(7, maxGridSize[2]) IS(8, sharedMemPerBlock) IS(9, totalConstMem) IS(10, warpSize) IS(11, memPitch) IS(12, regsPerBlock) IS(14, textureAlignment)
    IS(15, asyncEngineCount) IS(16, multiProcessorCount) IS(18, integrated) IS(19, canMapHostMemory) IS(30, surfaceAlignment) IS(31, concurrentKernels)
    IS(32, ECCEnabled) IS(33, pciBusID) IS(34, pciDeviceID) IS(37, memoryBusWidth) IS(38, l2CacheSize) IS(39, maxThreadsPerMultiProcessor)
    IS(40, asyncEngineCount) IS(41, unifiedAddressing) IS(50, pciDomainID) IS(51, texturePitchAlignment) IS(75, major) IS(76, minor)
    IS(78, streamPrioritiesSupported) IS(79, globalL1CacheSupported) IS(80, localL1CacheSupported) IS(81, sharedMemPerMultiprocessor)
    IS(82, regsPerMultiprocessor) IS(83, managedMemory) IS(89, concurrentManagedAccess) IS(90, computePreemptionSupported)
    IS(91, canUseHostPointerForRegisteredMem) IS(95, cooperativeLaunch) IS(97, sharedMemPerBlockOptin) IS(99, hostRegisterSupported)
    IS(106, maxBlocksPerMultiProcessor) IS(111, reservedSharedMemPerBlock) IS(115, memoryPoolsSupported) IS(120, clusterLaunch)
    IS(129, unifiedFunctionPointers)
#undef IS
    case 13: *value = 1500000; break;                 /* clock in kHz: assumed; no time depends on it */
    case 36: *value = 7000000; break;                 /* memory clock in kHz: assumed */
    case 102: *value = 1; break;                      /* virtual memory management: expandable segments */
    case 134: *value = -1; break;                     /* no NUMA node */
    default: *value = 0; trace("device attribute %d: 0", attribute);
    }
    OK;
}

/* ---- memory of the host that CUDA tracks: pinned, registered and managed */
typedef struct { char *start; size_t bytes; enum cudaMemoryType type; int registered; } HostRange;
static HostRange *ranges;
static size_t range_count, range_room;
static pthread_mutex_t range_lock = PTHREAD_MUTEX_INITIALIZER;

static void add_range(void *start, size_t bytes, enum cudaMemoryType type, int registered) {
    pthread_mutex_lock(&range_lock);
    if (range_count == range_room) {
        range_room = range_room ? 2 * range_room : 64;
        ranges = realloc(ranges, range_room * sizeof *ranges);
    }
    ranges[range_count++] = (HostRange){start, bytes, type, registered};
    pthread_mutex_unlock(&range_lock);
}
static int find_range(const void *pointer, HostRange *range, int remove) {
    int status = -1;
    pthread_mutex_lock(&range_lock);
    for (size_t i = 0; i < range_count; i++)
        if ((char *)pointer >= ranges[i].start && (char *)pointer < ranges[i].start + ranges[i].bytes) {
            if (remove && ranges[i].start != pointer) continue;
            *range = ranges[i];
            if (remove) ranges[i] = ranges[--range_count];
            status = 0;
            break;
        }
    pthread_mutex_unlock(&range_lock);
    return status;
}
static cudaError_t host_alloc(void **pointer, size_t bytes, enum cudaMemoryType type) {
    cudaError_t error = use_device(current_device());
    if (error) return error;
    if (posix_memalign(pointer, PAGE, bytes ? bytes : 1)) return fail(cudaErrorMemoryAllocation);
    add_range(*pointer, bytes ? bytes : 1, type, 0);
    OK;
}
static cudaError_t host_free(void *pointer) {
    HostRange range;
    if (!pointer) OK;
    if (find_range(pointer, &range, 1)) return fail(cudaErrorInvalidValue);
    free(pointer);
    OK;
}
cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) { (void)flags; return host_alloc(pointer, bytes, cudaMemoryTypeManaged); }
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) { (void)flags; return host_alloc(pointer, bytes, cudaMemoryTypeHost); }
cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return host_alloc(pointer, bytes, cudaMemoryTypeHost); }
cudaError_t cudaFreeHost(void *pointer) { return host_free(pointer); }
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    HostRange range;
    (void)flags;
    cudaError_t error = use_device(current_device());
    if (error) return error;
    if (!bytes) return fail(cudaErrorInvalidValue);
    if (!find_range(pointer, &range, 0)) return fail(cudaErrorHostMemoryAlreadyRegistered);
    add_range(pointer, bytes, cudaMemoryTypeHost, 1);
    OK;
}
cudaError_t cudaHostUnregister(void *pointer) {
    HostRange range;
    return find_range(pointer, &range, 1) ? fail(cudaErrorHostMemoryNotRegistered) : cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { (void)flags; *device = host; OK; }
cudaError_t cudaHostGetFlags(unsigned *flags, void *host) { (void)host; *flags = 0; OK; }

/* ---- memory of the card */
cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    cudaError_t error = use_device(current_device());
    *pointer = NULL;
    if (error || !bytes) return error;
    *pointer = device_malloc(current_device(), bytes);
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *pointer) {
    if (!pointer) return use_device(current_device());
    if (device_of(pointer) < 0) return host_free(pointer); /* managed */
    return device_free(pointer) ? fail(cudaErrorInvalidValue) : cudaSuccess;
}
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) { (void)stream; return cudaMalloc(pointer, bytes); }
cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
    (void)pool; (void)stream;
    return cudaMalloc(pointer, bytes);
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { (void)stream; return cudaFree(pointer); }
cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + 511) / 512 * 512;
    return cudaMalloc(pointer, *pitch * height);
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    cudaError_t error = use_device(current_device());
    if (error) return error;
    *total = card()->memory;
    *available = *total - bytes_held(physical_device(current_device()));
    OK;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *pointer) {
    int device = device_of(pointer);
    HostRange range;
    memset(a, 0, sizeof *a);
    a->device = -2; /* cudaInvalidDeviceId */
    if (device >= 0) {
        a->type = cudaMemoryTypeDevice;
        a->device = device;
        a->devicePointer = (void *)pointer;
    } else if (!find_range(pointer, &range, 0)) {
        a->type = range.type;
        a->device = current_device();
        a->devicePointer = a->hostPointer = (void *)pointer;
    } else {
        a->hostPointer = (void *)pointer;
    }
    OK;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { (void)kind; copy(to, from, bytes); OK; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, cudaStream_t stream) { (void)kind; (void)stream; copy(to, from, bytes); OK; }
cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes) {
    (void)to_device; (void)from_device;
    copy(to, from, bytes);
    OK;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t stream) {
    (void)stream;
    return cudaMemcpyPeer(to, to_device, from, from_device, bytes);
}
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind) {
    (void)kind;
    for (size_t row = 0; row < height; row++) copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    OK;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, cudaStream_t stream) {
    (void)stream;
    return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, int kind) {
    (void)symbol; (void)from; (void)bytes; (void)offset; (void)kind; /* only kernels read these variables */
    OK;
}
cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t bytes, size_t offset, int kind, cudaStream_t stream) {
    (void)stream;
    return cudaMemcpyToSymbol(symbol, from, bytes, offset, kind);
}
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { *address = (void *)symbol; OK; }
cudaError_t cudaMemset(void *to, int value, size_t bytes) { fill(to, value, bytes); OK; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) { (void)stream; fill(to, value, bytes); OK; }
/* The other arguments differ between CUDA 12 and 13; none is used. */
cudaError_t cudaMemPrefetchAsync(const void *p, size_t bytes) { (void)p; (void)bytes; OK; }
cudaError_t cudaMemAdvise(const void *p, size_t bytes) { (void)p; (void)bytes; OK; }

/* ---- memory pools: one for each device; freed memory is returned to the card at once */
static int pool_device(cudaMemPool_t pool) { return (int)(uintptr_t)pool - 16; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = (cudaMemPool_t)(uintptr_t)(16 + device); return check_device(device); }
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool) { (void)pool; return check_device(device); }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) { (void)pool; (void)keep; OK; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, int attribute, void *value) { (void)pool; (void)attribute; (void)value; OK; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const void *list, size_t n) { (void)pool; (void)list; (void)n; OK; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, int attribute, void *value) {
    enum { RESERVED = 5, RESERVED_HIGH, USED, USED_HIGH };
    switch (attribute) {
    case RESERVED: case USED: *(uint64_t *)value = bytes_in_use(pool_device(pool)); OK;
    case RESERVED_HIGH: case USED_HIGH: *(uint64_t *)value = most_bytes_in_use(pool_device(pool)); OK;
    case 4: *(uint64_t *)value = 0; OK; /* release threshold */
    default: *(int *)value = 1; OK;
    }
}

/* ---- streams and events */
typedef struct { unsigned long long id; int priority; unsigned flags; int device; } Stream;
typedef struct { struct timespec when; int recorded, timed; } Event;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    static unsigned long long made;
    cudaError_t error = use_device(current_device());
    if (error) return error;
    Stream *stream = malloc(sizeof *stream);
    *stream = (Stream){__atomic_add_fetch(&made, 1, __ATOMIC_RELAXED) + 2, priority, flags, current_device()};
    *s = (cudaStream_t)stream;
    OK;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
static int is_default(cudaStream_t s) { return (uintptr_t)s <= 2; } /* NULL, legacy, per thread */
cudaError_t cudaStreamDestroy(cudaStream_t s) { if (!is_default(s)) free(s); OK; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = is_default(s) ? 0 : ((Stream *)s)->priority; OK; }
cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned *flags) { *flags = is_default(s) ? 0 : ((Stream *)s)->flags; OK; }
cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long *id) { *id = is_default(s) ? (uintptr_t)s : ((Stream *)s)->id; OK; }
cudaError_t cudaStreamGetDevice(cudaStream_t s, int *device) { *device = is_default(s) ? current_device() : ((Stream *)s)->device; OK; }
cudaError_t cudaStreamQuery(cudaStream_t s) { (void)s; OK; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { (void)s; return use_device(current_device()); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { (void)s; (void)e; (void)flags; OK; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, void (*call)(cudaStream_t, cudaError_t, void *), void *data, unsigned flags) {
    (void)flags;
    call(s, cudaSuccess, data);
    OK;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, void (*call)(void *), void *data) { (void)s; call(data); OK; }
cudaError_t cudaStreamAttachMemAsync(cudaStream_t s, void *p, size_t bytes, unsigned flags) { (void)s; (void)p; (void)bytes; (void)flags; OK; }
cudaError_t cudaCtxResetPersistingL2Cache(void) { OK; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    enum { DISABLE_TIMING = 2 };
    cudaError_t error = use_device(current_device());
    if (error) return error;
    Event *event = calloc(1, sizeof *event);
    event->timed = !(flags & DISABLE_TIMING);
    *e = (cudaEvent_t)event;
    OK;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); OK; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
    Event *event = (Event *)e;
    (void)s; (void)flags;
    clock_gettime(CLOCK_MONOTONIC, &event->when);
    event->recorded = 1;
    OK;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
cudaError_t cudaEventQuery(cudaEvent_t e) { (void)e; OK; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { (void)e; OK; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { /* the host's time between the records */
    Event *a = (Event *)from, *b = (Event *)to;
    *ms = 0;
    if (!a || !b || !a->recorded || !b->recorded || !a->timed || !b->timed) return fail(cudaErrorInvalidResourceHandle);
    *ms = (float)((double)(b->when.tv_sec - a->when.tv_sec) * 1e3 + (double)(b->when.tv_nsec - a->when.tv_nsec) * 1e-6);
    OK;
}
cudaError_t cudaEventElapsedTime_v2(float *ms, cudaEvent_t from, cudaEvent_t to) { return cudaEventElapsedTime(ms, from, to); }

/* ---- graphs: not supported, because the calls that a graph would record have no effect to replay */
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) { (void)s; *status = cudaStreamCaptureStatusNone; OK; }
#if CUDA_MAJOR >= 13
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph, const void **nodes,
                                     const void **edges, size_t *n) {
    (void)edges;
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                        const void **nodes, size_t *n) {
#endif
    (void)s; (void)graph; (void)nodes;
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (n) *n = 0;
    OK;
}
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                        const void **nodes, const void **edges, size_t *n) {
    (void)s; (void)graph; (void)nodes; (void)edges;
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (n) *n = 0;
    OK;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { (void)mode; OK; }
static cudaError_t no_graphs(void) {
    refuse_feature("CUDA graphs", "Run without them while BRIM_EMULATED=1 is set.");
    return fail(cudaErrorNotSupported);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) { (void)s; (void)mode; return no_graphs(); }
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t g, const void *nodes, const void *edges, size_t n, enum cudaStreamCaptureMode mode) {
    (void)s; (void)g; (void)nodes; (void)edges; (void)n; (void)mode;
    return no_graphs();
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { (void)s; *g = NULL; return no_graphs(); }
cudaError_t cudaGraphCreate(cudaGraph_t *g, unsigned flags) { (void)flags; *g = NULL; return no_graphs(); }

/* ---- memory of other processes: not supported, because each process has its own address space for the card */
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p) { (void)handle; (void)p; return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags) { (void)handle; (void)flags; *p = NULL; return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcCloseMemHandle(void *p) { (void)p; return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t e) { (void)handle; (void)e; return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t handle) { (void)handle; *e = NULL; return fail(cudaErrorNotSupported); }

/* ---- kernels: launches are checked and have no effect */
typedef struct { Dim3 grid, block; size_t shared; cudaStream_t stream; } Launch;
static __thread Launch pushed[16];
static __thread unsigned depth;

static cudaError_t launch(const void *function, Dim3 grid, Dim3 block, size_t shared) {
    cudaError_t error = use_device(current_device());
    if (error) return error;
    unsigned long threads = (unsigned long)block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || !threads || threads > 1024 || block.z > 64 || grid.y > 65535 || grid.z > 65535)
        return fail(cudaErrorInvalidConfiguration);
    if (shared > card()->block_shared) return fail(cudaErrorInvalidValue);
    if (tracing > 1) trace("kernel %s <<<(%u, %u, %u), (%u, %u, %u), %zu>>>", kernel_name(function), grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
    OK;
}
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, cudaStream_t stream) {
    pushed[depth++ & 15] = (Launch){grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, cudaStream_t *stream) {
    Launch *top = &pushed[--depth & 15];
    *grid = top->grid;
    *block = top->block;
    *shared = top->shared;
    *stream = top->stream;
    OK;
}
cudaError_t __cudaGetKernel(const void **kernel, const void *function) { *kernel = function; OK; }
cudaError_t cudaGetKernel(const void **kernel, const void *function) { *kernel = function; OK; }
cudaError_t __cudaLaunchKernel(const void *kernel, Dim3 grid, Dim3 block, void **args, size_t shared, cudaStream_t stream) {
    (void)args; (void)stream;
    return launch(kernel, grid, block, shared);
}
cudaError_t cudaLaunchKernel(const void *function, Dim3 grid, Dim3 block, void **args, size_t shared, cudaStream_t stream) {
    (void)args; (void)stream;
    return launch(function, grid, block, shared);
}
cudaError_t cudaLaunchCooperativeKernel(const void *function, Dim3 grid, Dim3 block, void **args, size_t shared, cudaStream_t stream) {
    (void)args; (void)stream;
    return launch(function, grid, block, shared);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **args) {
    (void)args;
    return launch(function, config->gridDim, config->blockDim, config->dynamicSmemBytes);
}
cudaError_t cudaFuncSetCacheConfig(const void *function, int config) { (void)function; (void)config; OK; }
cudaError_t cudaFuncGetName(const char **name, const void *function) { *name = kernel_name(function); OK; }
cudaError_t cudaFuncSetAttribute(const void *function, int attribute, int value) {
    return kernel_set_attribute(function, attribute, value) ? fail(cudaErrorInvalidValue) : cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int device) { (void)device; return cudaFuncSetAttribute(kernel, attribute, value); }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
    Kernel k = kernel_attributes(function);
    memset(a, 0, sizeof *a);
    a->sharedSizeBytes = (size_t)k.static_shared;
    a->constSizeBytes = (size_t)k.constant;
    a->localSizeBytes = (size_t)k.local;
    a->maxThreadsPerBlock = k.max_threads;
    a->numRegs = k.registers;
    a->ptxVersion = a->binaryVersion = k.arch;
    a->maxDynamicSharedSizeBytes = k.dynamic_shared;
    a->preferredShmemCarveout = -1;
    OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared, unsigned flags) {
    (void)flags;
    Kernel k = kernel_attributes(function);
    *blocks = occupancy(&k, threads, shared);
    OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, const void *function, int blocks, int threads) {
    Kernel k = kernel_attributes(function);
    for (*bytes = card()->block_shared; *bytes && occupancy(&k, threads, *bytes) < blocks; *bytes -= card()->shared_unit) {}
    OK;
}
cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *function, const cudaLaunchConfig_t *config) {
    (void)function; (void)config;
    *clusters = card()->major >= 9 ? card()->sms / 2 : 0;
    OK;
}
cudaError_t cudaOccupancyMaxPotentialClusterSize(int *size, const void *function, const cudaLaunchConfig_t *config) {
    (void)function; (void)config;
    *size = card()->major >= 9 ? 8 : 1;
    OK;
}

/* ---- entry points of the driver: functions of cuda.h, looked up in this library */
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags, int *status) {
    char versioned[128];
    (void)version; (void)flags;
    snprintf(versioned, sizeof versioned, "%s_v2", symbol);
    *function = dlsym(RTLD_DEFAULT, versioned);
    if (!*function) *function = dlsym(RTLD_DEFAULT, symbol);
    if (status) *status = *function ? 0 : 1; /* 1: symbol not found */
    if (!*function) trace("no driver function %s", symbol);
    OK;
}
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, CUDA_VERSION, flags, status);
}

/* ---- threads of torch at the end of the program
 * CPython before 3.14 ends a thread that asks for the GIL during finalization with pthread_exit. If torch's autograd thread is just releasing
 * the last graph, the unwinding calls std::terminate, and a script that ends right after backward exits with SIGABRT (pytorch#38228). On this
 * card, backward takes so little time that this is frequent. Such a thread sleeps instead, as in CPython 3.14, until the process exits. */
void pthread_exit(void *value) {
    static void (*next)(void *) __attribute__((noreturn));
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    while (!strncmp(name, "pt_", 3)) pause();
    if (!next) next = (void (*)(void *))dlsym(RTLD_NEXT, "pthread_exit");
    next(value);
}
