"""What is known of a moment the GPU ran out of memory."""

import re

from jupyter_gpumem.device import torch_module
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.sizes import parse_bytes

_ASKED = re.compile(r"Tried to allocate (\d+(?:\.\d+)? ?(?:bytes|[KMGT]iB))")
# what CUDA's libraries and the driver say in place of torch's own error
_SAID = ("CUDA out of memory", "HIP out of memory", "CUDA error: out of memory", "HIP error: out of memory")
_LIBRARIES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def find_out_of_memory(error: BaseException | None) -> BaseException | None:
    """Return the out-of-memory error in a chain of causes, contexts and groups, if there is one."""
    pending, seen = [error], set[int]()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        if _is_out_of_memory(current):
            return current
        seen.add(id(current))
        pending += [current.__context__, current.__cause__, *getattr(current, "exceptions", ())]
    return None


def asked_bytes(error: BaseException) -> int | None:
    """Return what the failed request asked for, as torch's message words it (three digits)."""
    match = _ASKED.search(str(error))
    if match is None:
        return None
    try:
        return parse_bytes(match.group(1).replace("bytes", "B"))
    except GpuMemError:
        return None


def _is_out_of_memory(error: BaseException) -> bool:
    torch = torch_module()
    if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in (*_SAID, *_LIBRARIES))
