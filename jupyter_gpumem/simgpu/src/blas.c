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
