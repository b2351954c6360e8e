"""Recognising an out-of-memory error, however it comes, and reading what its message tells."""

import re

from jupyter_gpumem.device import torch_module
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.sizes import parse_bytes

_SIZE = r"(\d+(?:\.\d+)? ?(?:bytes|[KMGT]iB))"
_ASKED = re.compile(f"Tried to allocate {_SIZE}")
_TOTAL = re.compile(f"total capacity of {_SIZE}")
_FREE = re.compile(f"of which {_SIZE} is free")
_DEVICE = re.compile(r"GPU (\d+) has a total capacity")
_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+|pin memory thread for device \d+)")
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
    return _size(_ASKED, error)


def total_bytes(error: BaseException) -> int | None:
    """Return what the device has in all, as torch's message words it."""
    return _size(_TOTAL, error)


def free_bytes(error: BaseException) -> int | None:
    """Return what was free on the device, as torch's message words it."""
    return _size(_FREE, error)


def device_of(error: BaseException) -> int:
    """Return torch's index of the device; 0 where the message names none."""
    match = _DEVICE.search(str(error))
    return 0 if match is None else int(match.group(1))


def worker_of(error: BaseException) -> str | None:
    """Return which worker of a DataLoader the error comes from, in torch's words."""
    match = _WORKER.search(str(error))
    return None if match is None else match.group(1)


def _size(pattern: re.Pattern[str], error: BaseException) -> int | None:
    match = pattern.search(str(error))
    try:
        return None if match is None else parse_bytes(match.group(1).replace("bytes", "B"))
    except GpuMemError:  # 0 bytes
        return 0


def _is_out_of_memory(error: BaseException) -> bool:
    torch = torch_module()
    if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in (*_SAID, *_LIBRARIES))
