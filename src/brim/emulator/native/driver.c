/* The CUDA driver. Virtual memory (expandable segments) is real. Modules that are compiled at run time (nvrtc, Triton) are loaded; launching their
 * kernels has no effect. */
#define _GNU_SOURCE
#include "cuda_api.h"
#include "device.h"
#include "kernels.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The numbers of the driver's errors are those of the runtime. */
typedef cudaError_t CUresult;
#define OK return cudaSuccess
cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device);
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device);
cudaError_t cudaMemGetInfo(size_t *available, size_t *total);
cudaError_t cudaMalloc(void **pointer, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaMemset(void *to, int value, size_t bytes);
cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags);
const char *cudaGetErrorString(cudaError_t error);
const char *cudaGetErrorName(cudaError_t error);
#define SAME_AS(name, original) __typeof__(original) name __attribute__((alias(#original)))

/* ---- devices and contexts */
CUresult cuInit(unsigned flags) { (void)flags; return visible_count() ? cudaSuccess : cudaErrorNoDevice; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; OK; }
CUresult cuDeviceGetCount(int *n) { *n = visible_count(); OK; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal >= 0 && ordinal < visible_count() ? cudaSuccess : cudaErrorInvalidDevice; }
CUresult cuDeviceGetName(char *name, int length, int device) { (void)device; snprintf(name, (size_t)length, "%s", card()->name); OK; }
CUresult cuDeviceGetUuid(unsigned char *uuid, int device) { card_uuid(physical_device(device), uuid); OK; }
SAME_AS(cuDeviceGetUuid_v2, cuDeviceGetUuid);
CUresult cuDeviceTotalMem(size_t *bytes, int device) { (void)device; *bytes = card()->memory; OK; }
SAME_AS(cuDeviceTotalMem_v2, cuDeviceTotalMem);
CUresult cuDeviceComputeCapability(int *major, int *minor, int device) { (void)device; *major = card()->major; *minor = card()->minor; OK; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
CUresult cuDeviceGetPCIBusId(char *text, int length, int device) { return cudaDeviceGetPCIBusId(text, length, device); }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = cudaGetErrorString(error); OK; }
CUresult cuGetErrorName(CUresult error, const char **text) { /* only the most frequent error has the driver's spelling, CUDA_ERROR_... */
    *text = error == cudaErrorMemoryAllocation ? "CUDA_ERROR_OUT_OF_MEMORY" : error ? cudaGetErrorName(error) : "CUDA_SUCCESS";
    OK;
}

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(16 + device); }
static CUresult enter_context(CUcontext c) {
    if (!c) OK;
    int device = (int)(uintptr_t)c - 16;
    if (set_current_device(device)) return cudaErrorInvalidDevice;
    return make_context(device) ? cudaErrorMemoryAllocation : cudaSuccess;
}
CUresult cuCtxGetCurrent(CUcontext *c) { *c = visible_count() && has_context(current_device()) ? context_of(current_device()) : NULL; OK; }
CUresult cuCtxSetCurrent(CUcontext c) { return enter_context(c); }
CUresult cuCtxGetDevice(int *device) { *device = current_device(); OK; }
static __thread CUcontext stack[16];
static __thread unsigned depth;
CUresult cuCtxPushCurrent(CUcontext c) { stack[depth++ & 15] = context_of(current_device()); return enter_context(c); }
SAME_AS(cuCtxPushCurrent_v2, cuCtxPushCurrent);
CUresult cuCtxPopCurrent(CUcontext *c) {
    if (c) *c = context_of(current_device());
    return depth ? enter_context(stack[--depth & 15]) : cudaSuccess;
}
SAME_AS(cuCtxPopCurrent_v2, cuCtxPopCurrent);
CUresult cuCtxCreate_v2(CUcontext *c, unsigned flags, int device) { (void)flags; *c = context_of(device); return enter_context(*c); }
CUresult cuCtxDestroy(CUcontext c) { (void)c; OK; }
SAME_AS(cuCtxDestroy_v2, cuCtxDestroy);
CUresult cuCtxSynchronize(void) { OK; }
CUresult cuCtxGetApiVersion(CUcontext c, unsigned *version) { (void)c; *version = CUDA_VERSION; OK; }
CUresult cuCtxSetLimit(int limit, size_t value) { (void)limit; (void)value; OK; } /* called by Triton's launcher */
CUresult cuCtxGetLimit(size_t *value, int limit) { (void)limit; *value = 8 * MIB; OK; }
/* The driver's private tables do not exist. nvrtc ignores the error and reads the size of the table from its first word. */
CUresult cuGetExportTable(const void **table, const void *id) { static const size_t empty[1] = {sizeof empty}; (void)id; *table = empty; return cudaErrorNotSupported; }
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { if (least) *least = 0; if (greatest) *greatest = -5; OK; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, int device) { *c = context_of(device); return make_context(device) ? cudaErrorMemoryAllocation : cudaSuccess; }
CUresult cuDevicePrimaryCtxRelease(int device) { (void)device; OK; }
SAME_AS(cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease);
CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { if (flags) *flags = 0; *active = has_context(device); OK; }

/* ---- memory */
CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer) {
    enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, SYNC_MEMOPS = 6, BUFFER_ID = 7, IS_MANAGED = 8, ORDINAL = 9, START = 11, SIZE = 12, MAPPED = 13 };
    int device = device_of((void *)pointer);
    char *start = NULL;
    size_t bytes = 0;
    if (device < 0) return cudaErrorInvalidValue;
    if (allocation_of((void *)pointer, &start, &bytes)) return cudaErrorInvalidValue;
    switch (attribute) {
    case CONTEXT: *(CUcontext *)data = context_of(device); break;
    case MEMORY_TYPE: *(unsigned *)data = 2; break;
    case DEVICE_POINTER: *(CUdeviceptr *)data = pointer; break;
    case BUFFER_ID: *(unsigned long long *)data = (uintptr_t)start; break;
    case IS_MANAGED: case SYNC_MEMOPS: *(unsigned *)data = 0; break;
    case ORDINAL: *(int *)data = device; break;
    case START: *(char **)data = start; break;
    case SIZE: *(size_t *)data = bytes; break;
    case MAPPED: *(char *)data = 1; break;
    default: *(int *)data = 0;
    }
    OK;
}
CUresult cuPointerGetAttributes(unsigned n, int *attributes, void **data, CUdeviceptr pointer) {
    CUresult error = cudaSuccess;
    for (unsigned i = 0; i < n && !error; i++) error = cuPointerGetAttribute(data[i], attributes[i], pointer);
    return error;
}
CUresult cuMemGetInfo(size_t *available, size_t *total) { return cudaMemGetInfo(available, total); }
SAME_AS(cuMemGetInfo_v2, cuMemGetInfo);
CUresult cuMemAlloc(CUdeviceptr *p, size_t bytes) { return cudaMalloc((void **)p, bytes); }
SAME_AS(cuMemAlloc_v2, cuMemAlloc);
CUresult cuMemFree(CUdeviceptr p) { return cudaFree((void *)p); }
SAME_AS(cuMemFree_v2, cuMemFree);
CUresult cuMemAllocManaged(CUdeviceptr *p, size_t bytes, unsigned flags) { return cudaMallocManaged((void **)p, bytes, flags); }
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr p) {
    char *start;
    size_t size;
    if (allocation_of((void *)p, &start, &size)) return cudaErrorInvalidValue;
    if (base) *base = (CUdeviceptr)start;
    if (bytes) *bytes = size;
    OK;
}
SAME_AS(cuMemGetAddressRange_v2, cuMemGetAddressRange);
CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t n) { return cudaMemset((void *)to, value, n); }
SAME_AS(cuMemsetD8_v2, cuMemsetD8);
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, cudaStream_t s) { (void)s; return cudaMemset((void *)to, value, n); }
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t n, cudaStream_t s) {
    (void)s;
    if (!value) return cudaMemset((void *)to, 0, 4 * n);
    for (size_t i = 0; i < n; i++) ((unsigned *)to)[i] = value;
    OK;
}
CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t n) { return cuMemsetD32Async(to, value, n, NULL); }
SAME_AS(cuMemsetD32_v2, cuMemsetD32);
CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) { copy((void *)to, from, bytes); OK; }
SAME_AS(cuMemcpyHtoD_v2, cuMemcpyHtoD);
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) { copy(to, (void *)from, bytes); OK; }
SAME_AS(cuMemcpyDtoH_v2, cuMemcpyDtoH);
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) { copy((void *)to, (void *)from, bytes); OK; }
SAME_AS(cuMemcpyDtoD_v2, cuMemcpyDtoD);
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, cudaStream_t s) { (void)s; copy((void *)to, (void *)from, bytes); OK; }
CUresult cuStreamSynchronize(cudaStream_t s) { (void)s; OK; }
CUresult cuStreamWriteValue32(cudaStream_t s, CUdeviceptr to, unsigned value, unsigned flags) { (void)s; (void)flags; *(unsigned *)to = value; OK; }
SAME_AS(cuStreamWriteValue32_v2, cuStreamWriteValue32);

/* ---- virtual memory */
typedef struct { size_t bytes; int device, uses; } Handle; /* uses: references of the creator and of each mapping */
typedef struct { CUdeviceptr start; size_t bytes; Handle *handle; } Mapping;
static Mapping *mappings;
static size_t mapping_count, mapping_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void drop(Handle *handle) { /* with the lock held */
    if (--handle->uses) return;
    give_back(handle->device, handle->bytes);
    free(handle);
}
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int which) { (void)prop; (void)which; *bytes = GRANULARITY; OK; }
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t bytes, size_t align, CUdeviceptr hint, unsigned long long flags) {
    (void)align; (void)hint; (void)flags;
    *p = (CUdeviceptr)reserve_addresses(current_device(), bytes);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes) { (void)bytes; free_addresses((void *)p); OK; }
CUresult cuMemCreate(uint64_t *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags) {
    enum { ON_DEVICE = 1 };
    (void)flags;
    if (prop->location.type != ON_DEVICE) return cudaErrorNotSupported;
    if (take(prop->location.id, bytes)) return cudaErrorMemoryAllocation;
    Handle *made = malloc(sizeof *made);
    *made = (Handle){bytes, prop->location.id, 1};
    *handle = (uintptr_t)made;
    OK;
}
CUresult cuMemRelease(uint64_t handle) {
    pthread_mutex_lock(&lock);
    drop((Handle *)(uintptr_t)handle);
    pthread_mutex_unlock(&lock);
    OK;
}
CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)offset; (void)flags;
    pthread_mutex_lock(&lock);
    if (mapping_count == mapping_room) {
        mapping_room = mapping_room ? 2 * mapping_room : 256;
        mappings = realloc(mappings, mapping_room * sizeof *mappings);
    }
    mappings[mapping_count++] = (Mapping){p, bytes, (Handle *)(uintptr_t)handle};
    ((Handle *)(uintptr_t)handle)->uses++;
    pthread_mutex_unlock(&lock);
    OK;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t bytes) {
    discard((void *)p, bytes);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < mapping_count;)
        if (mappings[i].start >= p && mappings[i].start < p + bytes) {
            drop(mappings[i].handle);
            mappings[i] = mappings[--mapping_count];
        } else {
            i++;
        }
    pthread_mutex_unlock(&lock);
    OK;
}
CUresult cuMemSetAccess(CUdeviceptr p, size_t bytes, const void *list, size_t n) { (void)p; (void)bytes; (void)list; (void)n; OK; }
CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *p) { (void)p; *handle = 0; return cudaErrorNotSupported; }

/* ---- modules compiled at run time */
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = (CUmodule)load_image(image); return *m ? cudaSuccess : cudaErrorInvalidKernelImage; }
CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, int *options, void **values) { (void)n; (void)options; (void)values; return cuModuleLoadData(m, image); }
CUresult cuModuleLoad(CUmodule *m, const char *path) { (void)path; *m = NULL; return cudaErrorNotSupported; }
CUresult cuModuleUnload(CUmodule m) { (void)m; OK; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { *f = (CUfunction)image_function(m, name); return *f ? cudaSuccess : cudaErrorSymbolNotFound; }
CUresult cuModuleGetGlobal(CUdeviceptr *p, size_t *bytes, CUmodule m, const char *name) { (void)m; (void)name; if (p) *p = 0; if (bytes) *bytes = 0; return cudaErrorSymbolNotFound; }
SAME_AS(cuModuleGetGlobal_v2, cuModuleGetGlobal);
CUresult cuLibraryLoadData(CUlibrary *l, const void *image, int *jit, void **jit_values, unsigned n, int *options, void **values, unsigned m) {
    (void)jit; (void)jit_values; (void)n; (void)options; (void)values; (void)m;
    return cuModuleLoadData((CUmodule *)l, image);
}
CUresult cuLibraryUnload(CUlibrary l) { (void)l; OK; }
CUresult cuLibraryGetModule(CUmodule *m, CUlibrary l) { *m = (CUmodule)l; OK; }
CUresult cuLibraryGetKernel(CUfunction *f, CUlibrary l, const char *name) { return cuModuleGetFunction(f, (CUmodule)l, name); }
CUresult cuKernelGetFunction(CUfunction *f, CUfunction kernel) { *f = kernel; OK; }
cudaError_t cudaLibraryLoadData(CUlibrary *l, const void *image, int *jit, void **jit_values, unsigned n, int *options, void **values, unsigned m) {
    return cuLibraryLoadData(l, image, jit, jit_values, n, options, values, m);
}
cudaError_t cudaLibraryUnload(CUlibrary l) { (void)l; OK; }
cudaError_t cudaLibraryGetKernel(CUfunction *f, CUlibrary l, const char *name) { return cuLibraryGetKernel(f, l, name); }
CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction f) {
    Kernel k = kernel_attributes(f);
    const int values[] = {k.max_threads, k.static_shared, k.constant, k.local, k.registers, k.arch, k.arch, 0, k.dynamic_shared, -1};
    *value = attribute >= 0 && attribute < (int)(sizeof values / sizeof *values) ? values[attribute] : 0;
    OK;
}
CUresult cuFuncSetAttribute(CUfunction f, int attribute, int value) { return kernel_set_attribute(f, attribute, value) ? cudaErrorInvalidValue : cudaSuccess; }
CUresult cuFuncSetCacheConfig(CUfunction f, int config) { (void)f; (void)config; OK; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int threads, size_t shared) {
    Kernel k = kernel_attributes(f);
    *blocks = occupancy(&k, threads, shared);
    OK;
}
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction f, const CUlaunchConfig *config) {
    (void)f; (void)config;
    *clusters = card()->major >= 9 ? card()->sms / 2 : 0;
    OK;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, cudaStream_t s, void **params,
                        void **extra) {
    (void)s; (void)params; (void)extra;
    if (tracing > 1) trace("kernel %s <<<(%u, %u, %u), (%u, %u, %u), %u>>>", kernel_name(f), gx, gy, gz, bx, by, bz, shared);
    return shared > card()->block_shared ? cudaErrorInvalidValue : cudaSuccess;
}
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, cudaStream_t s,
                                   void **params) {
    return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, s, params, NULL);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
    return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, c->hStream, params, extra);
}
CUresult cuTensorMapEncodeTiled(void *map) { (void)map; OK; } /* only kernels read the map */

CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    char versioned[128];
    (void)version; (void)flags;
    snprintf(versioned, sizeof versioned, "%s_v2", symbol);
    *function = dlsym(RTLD_DEFAULT, versioned);
    if (!*function) *function = dlsym(RTLD_DEFAULT, symbol);
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    CUresult error = cuGetProcAddress(symbol, function, version, flags);
    if (status) *status = error ? 1 : 0;
    return error;
}
