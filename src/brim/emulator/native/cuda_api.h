/* The part of CUDA's public binary interface that the card implements, declared here so that no CUDA toolkit is needed to compile it.
 * Layouts are those of driver_types.h and cuda.h; cudaDeviceProp changed between CUDA 12 and 13 (CUDA_MAJOR is that of torch's build). */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifndef CUDA_MAJOR
#define CUDA_MAJOR 13
#endif
#ifndef CUDA_VERSION
#define CUDA_VERSION (CUDA_MAJOR * 1000)
#endif

/* Name, number and text of the errors that the card returns or whose text a program may look up. The driver uses the same numbers. */
#define CUDA_ERRORS(X) \
    X(InvalidValue, 1, "invalid argument") \
    X(MemoryAllocation, 2, "out of memory") \
    X(InitializationError, 3, "initialization error") \
    X(InvalidConfiguration, 9, "invalid configuration argument") \
    X(InvalidDevicePointer, 17, "invalid device pointer") \
    X(InvalidMemcpyDirection, 21, "invalid copy direction for memcpy") \
    X(InsufficientDriver, 35, "CUDA driver version is insufficient for CUDA runtime version") \
    X(InvalidDeviceFunction, 98, "invalid device function") \
    X(NoDevice, 100, "no CUDA-capable device is detected") \
    X(InvalidDevice, 101, "invalid device ordinal") \
    X(InvalidKernelImage, 200, "device kernel image is invalid") \
    X(NoKernelImageForDevice, 209, "no kernel image is available for execution on the device") \
    X(InvalidResourceHandle, 400, "invalid resource handle") \
    X(SymbolNotFound, 500, "named symbol not found") \
    X(NotReady, 600, "device not ready") \
    X(IllegalAddress, 700, "an illegal memory access was encountered") \
    X(LaunchOutOfResources, 701, "too many resources requested for launch") \
    X(PeerAccessAlreadyEnabled, 704, "peer access is already enabled") \
    X(HostMemoryAlreadyRegistered, 712, "part or all of the requested memory range is already mapped") \
    X(HostMemoryNotRegistered, 713, "pointer does not correspond to a registered memory region") \
    X(CooperativeLaunchTooLarge, 720, "too many blocks in cooperative launch") \
    X(NotPermitted, 800, "operation not permitted") \
    X(NotSupported, 801, "operation not supported") \
    X(StreamCaptureUnsupported, 900, "operation not permitted when stream is capturing") \
    X(Unknown, 999, "unknown error")

typedef enum cudaError {
    cudaSuccess = 0,
#define X(name, number, text) cudaError##name = number,
    CUDA_ERRORS(X)
#undef X
} cudaError_t;

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
typedef struct CUmemPoolHandle_st *cudaMemPool_t;
typedef struct { char reserved[64]; } cudaIpcMemHandle_t;
typedef struct { char reserved[64]; } cudaIpcEventHandle_t;
typedef struct { unsigned x, y, z; } Dim3; /* dim3 and uint3 */

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1, cudaStreamCaptureStatusInvalidated = 2 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeThreadLocal = 1, cudaStreamCaptureModeRelaxed = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };

struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
#if CUDA_MAJOR >= 13
    long reserved[8];
#endif
};

struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes, preferredShmemCarveout;
    int clusterDimMustBeSet, requiredClusterWidth, requiredClusterHeight, requiredClusterDepth, clusterSchedulingPolicyPreference;
    int nonPortableClusterSizeAllowed, reserved[16];
};

typedef struct { Dim3 gridDim, blockDim; size_t dynamicSmemBytes; cudaStream_t stream; void *attrs; unsigned numAttrs; } cudaLaunchConfig_t;

#if CUDA_MAJOR >= 13
#define BEFORE_13(field)
#else
#define BEFORE_13(field) int field;
#endif

struct cudaDeviceProp {
    char name[256], uuid[16], luid[8];
    unsigned luidDeviceNodeMask;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    size_t memPitch;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
    BEFORE_13(clockRate)
    size_t totalConstMem;
    int major, minor;
    size_t textureAlignment, texturePitchAlignment;
    BEFORE_13(deviceOverlap)
    int multiProcessorCount;
    BEFORE_13(kernelExecTimeoutEnabled)
    int integrated, canMapHostMemory;
    BEFORE_13(computeMode)
    int maxTexture1D, maxTexture1DMipmap;
    BEFORE_13(maxTexture1DLinear)
    int maxTexture2D[2], maxTexture2DMipmap[2], maxTexture2DLinear[3], maxTexture2DGather[2], maxTexture3D[3], maxTexture3DAlt[3];
    int maxTextureCubemap, maxTexture1DLayered[2], maxTexture2DLayered[3], maxTextureCubemapLayered[2];
    int maxSurface1D, maxSurface2D[2], maxSurface3D[3], maxSurface1DLayered[2], maxSurface2DLayered[3], maxSurfaceCubemap, maxSurfaceCubemapLayered[2];
    size_t surfaceAlignment;
    int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount, unifiedAddressing;
    BEFORE_13(memoryClockRate)
    int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor;
    int streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
    BEFORE_13(singleToDoublePrecisionPerfRatio)
    int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem, cooperativeLaunch;
    BEFORE_13(cooperativeMultiDeviceLaunch)
    size_t sharedMemPerBlockOptin;
    int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor, accessPolicyMaxWindowSize;
    size_t reservedSharedMemPerBlock;
    int hostRegisterSupported, sparseCudaArraySupported, hostRegisterReadOnlySupported, timelineSemaphoreInteropSupported, memoryPoolsSupported;
    int gpuDirectRDMASupported;
    unsigned gpuDirectRDMAFlushWritesOptions;
    int gpuDirectRDMAWritesOrdering;
    unsigned memoryPoolSupportedHandleTypes;
    int deferredMappingCudaArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers;
    int later[63]; /* unused fields, and room for those of newer versions */
};

/* ---- the driver */
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUlib_st *CUlibrary;
typedef uint64_t CUdeviceptr;
typedef struct { int type, id; } CUmemLocation;
typedef struct { int type, requestedHandleTypes; CUmemLocation location; void *win32; unsigned char flags[8]; } CUmemAllocationProp;
typedef struct {
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    cudaStream_t hStream;
    void *attrs;
    unsigned numAttrs;
} CUlaunchConfig;
