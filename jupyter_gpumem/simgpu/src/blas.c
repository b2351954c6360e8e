/* The cuBLAS and cuBLASLt functions whose results torch reads; all others are generated and say "success".
 *
 * They are declared here and not included: their headers come with no package that torch always brings. The
 * arguments are pointers and ints, so the calling convention does not need their types.
 */
#include <stddef.h>
#include <string.h>

int cublasCreate_v2(void **handle) { *handle = (void *)0x10; return 0; }
int cublasGetMathMode(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
int cublasGetVersion_v2(void *handle, int *version) { (void)handle; *version = SIM_CUDA_MAJOR * 10000; return 0; }
size_t cublasLtGetVersion(void) { return SIM_CUDA_MAJOR * 10000; }
int cublasLtCreate(void **handle) { *handle = (void *)0x10; return 0; }

/* One algorithm that needs no workspace; the result is cublasLtMatmulHeuristicResult_t, 96 bytes since CUDA 11:
 * algorithm (64), workspace size (8), status (4), wave count (4), reserved (16). */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *results, int *found)
{
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted;
    memset(results, 0, 96);
    *found = 1;
    return 0;
}

int cublasLtMatmulAlgoCheck(void *handle, void *operation, void *a, void *b, void *c, void *d, void *algorithm,
                            void *result)
{
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)algorithm;
    memset(result, 0, 96);
    return 0;
}

/* The batched solvers report an invalid argument through a host integer, 0 when there is none. */
#define BATCHED(type)                                                                                            \
    int cublas##type##geqrfBatched(void *handle, int m, int n, void *a, int lda, void *tau, int *info, int count)  \
    {                                                                                                            \
        (void)handle, (void)m, (void)n, (void)a, (void)lda, (void)tau, (void)count;                              \
        *info = 0;                                                                                               \
        return 0;                                                                                                \
    }                                                                                                            \
    int cublas##type##getrsBatched(void *handle, int operation, int n, int columns, void *a, int lda, void *pivots, \
                                   void *b, int ldb, int *info, int count)                                       \
    {                                                                                                            \
        (void)handle, (void)operation, (void)n, (void)columns, (void)a, (void)lda, (void)pivots, (void)b,        \
            (void)ldb, (void)count;                                                                              \
        *info = 0;                                                                                               \
        return 0;                                                                                                \
    }                                                                                                            \
    int cublas##type##gelsBatched(void *handle, int operation, int m, int n, int columns, void *a, int lda, void *c, \
                                  int ldc, int *info, void *infos, int count)                                    \
    {                                                                                                            \
        (void)handle, (void)operation, (void)m, (void)n, (void)columns, (void)a, (void)lda, (void)c, (void)ldc,  \
            (void)infos, (void)count;                                                                            \
        *info = 0;                                                                                               \
        return 0;                                                                                                \
    }

BATCHED(S)
BATCHED(D)
BATCHED(C)
BATCHED(Z)
