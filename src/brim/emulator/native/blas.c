/* cuBLAS and cuBLASLt: handles, and one algorithm that needs no workspace. The functions that compute are stubs that build.py generates. The
 * functions that create a handle of cuSOLVER, cuSPARSE, cuFFT or cuDNN fail with an error code of that library, which torch raises. */
#include "cuda_api.h"
#include "device.h"
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define OK return 0
typedef struct { uint64_t algo[8]; size_t workspace; int state; float waves; int reserved[4]; } Heuristic; /* cublasLtMatmulHeuristicResult_t */

static int make(void **handle) { *handle = calloc(1, 64); OK; }

int cublasCreate_v2(void **h) { return make(h); }
int cublasDestroy_v2(void *h) { free(h); OK; }
int cublasGetVersion_v2(void *h, int *version) { (void)h; *version = CUDA_MAJOR * 10000 + 800; OK; }
int cublasGetMathMode(void *h, int *mode) { (void)h; *mode = 0; OK; }
int cublasGetPointerMode_v2(void *h, int *mode) { (void)h; *mode = 0; OK; }
int cublasGetStream_v2(void *h, void **stream) { (void)h; *stream = NULL; OK; }
int cublasGetSmCountTarget(void *h, int *count) { (void)h; *count = 0; OK; }
const char *cublasGetStatusString(int status) { return status ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_SUCCESS"; }
const char *cublasGetStatusName(int status) { return cublasGetStatusString(status); }
int cublasLtCreate(void **h) { return make(h); }
int cublasLtDestroy(void *h) { free(h); OK; }
size_t cublasLtGetVersion(void) { return CUDA_MAJOR * 10000 + 800; }
const char *cublasLtGetStatusString(int status) { return cublasGetStatusString(status); }
int cublasLtMatmulDescCreate(void **d, int compute, int scale) { (void)compute; (void)scale; return make(d); }
int cublasLtMatmulDescDestroy(void *d) { free(d); OK; }
int cublasLtMatrixLayoutCreate(void **l, int type, uint64_t rows, uint64_t cols, int64_t ld) { (void)type; (void)rows; (void)cols; (void)ld; return make(l); }
int cublasLtMatrixLayoutDestroy(void *l) { free(l); OK; }
int cublasLtMatrixTransformDescCreate(void **d, int scale) { (void)scale; return make(d); }
int cublasLtMatrixTransformDescDestroy(void *d) { free(d); OK; }
int cublasLtMatmulPreferenceCreate(void **p) { return make(p); }
int cublasLtMatmulPreferenceDestroy(void *p) { free(p); OK; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *preference, int wanted, Heuristic *results, int *count) {
    (void)h; (void)op; (void)a; (void)b; (void)c; (void)d; (void)preference;
    *count = wanted > 0;
    if (wanted > 0) memset(results, 0, sizeof *results);
    OK;
}

static int refuse(const char *library, const char *advice, int status) { refuse_feature(library, advice); return status; }
static const char *const ON_THE_CPU = "Run this operator on the CPU while BRIM_EMULATED=1 is set.";
int cusolverDnCreate(void **h) { *h = NULL; return refuse("cuSOLVER", ON_THE_CPU, 1); }
int cusparseCreate(void **h) { *h = NULL; return refuse("cuSPARSE", ON_THE_CPU, 1); }
int cufftCreate(int *plan) { *plan = 0; return refuse("cuFFT", ON_THE_CPU, 5); }
int cudnnCreate(void **h) { *h = NULL; return refuse("cuDNN", "Leave torch.backends.cudnn.enabled off while BRIM_EMULATED=1 is set.", 1001); }
