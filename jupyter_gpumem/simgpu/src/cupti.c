/* CUPTI, the profiler's source of GPU activity: it starts and has nothing to report; the real one crashes here.
 *
 * Its header comes with no package that torch always brings; CUptiResult is an int. What is not here is generated and
 * says "success".
 */
#include <stddef.h>
#include <stdint.h>

enum { SUCCESS = 0, MAX_LIMIT_REACHED = 12, NOT_INITIALIZED = 15 };

int cuptiGetVersion(uint32_t *version) { *version = SIM_CUDA_MAJOR * 10000; return SUCCESS; }
int cuptiSubscribe(void **subscriber, void *callback, void *data)
{
    (void)callback, (void)data;
    *subscriber = (void *)0x10;
    return SUCCESS;
}

int cuptiGetResultString(int result, const char **text)
{
    *text = result ? "not available on the simulated GPU" : "success";
    return SUCCESS;
}

int cuptiGetCallbackName(int domain, uint32_t callback, const char **name)
{
    (void)domain, (void)callback;
    *name = "";
    return NOT_INITIALIZED;
}

int cuptiActivityGetNextRecord(uint8_t *buffer, size_t bytes, void **record)
{
    (void)buffer, (void)bytes;
    *record = NULL;
    return MAX_LIMIT_REACHED;
}

int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped)
{
    (void)context, (void)stream;
    *dropped = 0;
    return SUCCESS;
}

int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *last)
{
    (void)kind;
    if (last)
        *last = 0;
    return SUCCESS;
}
