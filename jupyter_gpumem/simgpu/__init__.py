"""A simulated GPU under PyTorch's real CUDA allocator, for machines that have none.

Memory behaves as on a device: allocations, caching, peaks, fragmentation, private pools, out-of-memory
errors. Kernels do nothing, so computed values are not real.
"""

import _ctypes
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.sizes import format_bytes, parse_bytes

__all__ = ["NVML_FAULTS", "activate", "configure", "is_active", "sizes_read"]

NVML_FAULTS = ("not_supported", "no_permission", "gpu_lost", "unknown_memory", "no_processes")

_MAX_DEVICES = 16
_MIN_BYTES = 64 * 1024**2
_MAX_BYTES = 512 * 1024**3
_CONTEXT_BYTES = 512 * 1024**2  # about what a CUDA 12 or 13 context and torch's kernels take on an H100
_MAX_OTHERS = 16


@dataclass(frozen=True, slots=True)
class _Running:
    """The libraries that answer, and what they were asked to be."""

    libraries: tuple[ctypes.CDLL, ...]
    folder: Path
    memory_bytes: int
    devices: int
    sizes_read: Callable[[], int]

    @property
    def cuda(self) -> ctypes.CDLL:
        """Return the library that also takes the settings."""
        return self.libraries[0]


class _Other(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("device", ctypes.c_int), ("bytes", ctypes.c_ulonglong))


_running: _Running | None = None
_shown = 0  # numbers read in order to show a tensor
_integers_read = 0  # tensors of several integers that went to the host
_lock = threading.Lock()


def is_active() -> bool:
    """Tell whether the simulated GPU answers in this process."""
    return _running is not None


def activate(memory: str | int = "24GiB", devices: int = 1) -> None:
    """Put simulated GPUs under torch and import it; call this before anything imports torch.

    Each device has ``memory`` bytes in all and the other properties of an NVIDIA H100 SXM5. The first use of
    a device takes a context of 512 MiB (an eighth of a device smaller than 4 GiB), as on a real one. cuDNN
    and cuDNN's attention are turned off, because torch does not fall back from a cuDNN that finds no driver;
    so is the validation of arguments in ``torch.distributions``, because computed values are not real. The
    first call on a machine compiles for some seconds. A second call with the same arguments does nothing.

    Parameters
    ----------
    memory
        Bytes, or text such as ``"24GiB"``; from 64 MiB to 512 GiB.
    devices
        How many devices, from 1 to 16.

    Raises
    ------
    GpuMemError
        When it cannot be done: torch is imported already or has no CUDA build, this is not Linux, there is
        no C compiler, the arguments are not usable, or a simulated GPU of another size is on. Nothing is
        changed then.
    """
    global _running
    memory_bytes = _checked(memory, devices)
    with _lock:
        if _running is None:
            _check_process(devices)
            running = _start(memory_bytes, devices)
            _import_torch(running.folder)
            _running = running
        elif (_running.memory_bytes, _running.devices) != (memory_bytes, devices):
            raise GpuMemError(
                f"the simulated GPU is on already, {_running.devices} with "
                f"{format_bytes(_running.memory_bytes)} each; restart the kernel to choose another size"
            )


def configure(
    *,
    context_bytes: int | None = None,
    other_processes: Sequence[tuple[int, int] | tuple[int, int, int]] | None = None,
    utilization: int | None = None,
    nvml_fault: str | None = "unchanged",
) -> None:
    """Set what surrounds torch's allocator on the simulated devices; for tests.

    Parameters
    ----------
    context_bytes
        What the context takes on each device in use.
    other_processes
        ``(pid, bytes)`` on device 0 or ``(pid, bytes, device)``, at most 16; replaces those set before.
    utilization
        Per cent that NVML reports.
    nvml_fault
        One of ``NVML_FAULTS``, or None for a healthy NVML.
    """
    if _running is None:
        raise GpuMemError("the simulated GPU is not on; call activate() first")
    if (context_bytes or 0) < 0 or not 0 <= (utilization or 0) <= 100:
        raise GpuMemError("the context takes no negative number of bytes, and the utilization is a per cent")
    if context_bytes is not None:
        _running.cuda.sim_set_context(ctypes.c_ulonglong(context_bytes))
    if utilization is not None:
        _running.cuda.sim_set_utilization(ctypes.c_uint(utilization))
    if other_processes is not None:
        _set_others(_running, other_processes)
    if nvml_fault != "unchanged":
        if nvml_fault is not None and nvml_fault not in NVML_FAULTS:
            raise GpuMemError(f"{nvml_fault!r} is no NVML fault; choose from {', '.join(NVML_FAULTS)}")
        _running.cuda.sim_set_nvml_fault(0 if nvml_fault is None else 1 + NVML_FAULTS.index(nvml_fault))


def sizes_read() -> int:
    """Return how many numbers that may have decided a size the host has read from the devices so far.

    Every number read from a device is 0, so a size that comes from one is too small, and a loop that waits
    for "is it equal?" ends at once. Counted are the counts that torch itself reads (``nonzero``, ``x[mask]``,
    ``masked_select``, ``unique``, ``bincount``, coalescing a sparse tensor), every single integer the program
    reads (``.item()``, ``int()``), every tensor of integers that goes to the host (``.tolist()``, ``.cpu()``,
    ``.to("cpu")``) and every comparison for equality it branches on: whether the program makes a size of them
    cannot be seen. Not counted: floating-point numbers, other truth values, and what showing a tensor reads.
    """
    return 0 if _running is None else _running.sizes_read() - _shown + _integers_read


def _checked(memory: str | int, devices: int) -> int:
    memory_bytes = parse_bytes(memory)
    if not _MIN_BYTES <= memory_bytes <= _MAX_BYTES:
        raise GpuMemError(
            f"a simulated GPU has from {format_bytes(_MIN_BYTES)} to {format_bytes(_MAX_BYTES)}, "
            f"not {format_bytes(memory_bytes)}"
        )
    if type(devices) is not int or not 1 <= devices <= _MAX_DEVICES:
        raise GpuMemError(f"the number of simulated GPUs is from 1 to {_MAX_DEVICES}, not {devices!r}")
    return memory_bytes


def _check_process(devices: int) -> None:
    if sys.platform != "linux":
        raise GpuMemError("the simulated GPU runs on Linux only; elsewhere the reports show this process's RAM")
    if "torch" in sys.modules:
        raise GpuMemError(
            "torch is imported already, and a simulated GPU must be there first; "
            "restart the kernel and simulate in the first cell, before import torch"
        )
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        if _is_loaded(name):
            raise GpuMemError(
                f"{name} is in use in this process already; restart the kernel and simulate in the first cell"
            )
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "cudaMallocAsync" in os.environ.get(name, ""):
            raise GpuMemError(
                f"{name} asks for cudaMallocAsync, which is not simulated; leave the backend out and try again"
            )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not _shows_all(visible, devices):
        raise GpuMemError(
            f"CUDA_VISIBLE_DEVICES={visible!r} would hide simulated GPUs; "
            'del os.environ["CUDA_VISIBLE_DEVICES"] and try again'
        )


def _is_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _shows_all(visible: str, devices: int) -> bool:
    return [part.strip() for part in visible.split(",")][:devices] == [str(device) for device in range(devices)]


def _start(memory_bytes: int, devices: int) -> _Running:
    from jupyter_gpumem.simgpu.build import build
    from jupyter_gpumem.simgpu.locate import find_torch

    libraries = build(find_torch())
    cuda = _load(libraries.cuda, ctypes.RTLD_LOCAL)
    context_bytes = min(_CONTEXT_BYTES, memory_bytes // 8)
    if cuda.sim_start(ctypes.c_int(devices), ctypes.c_ulonglong(memory_bytes), ctypes.c_ulonglong(context_bytes)):
        _ctypes.dlclose(cuda._handle)
        raise GpuMemError("this process may not reserve the address space of the simulated GPU; lift ulimit -v")
    # global, and before torch: the first definition of a symbol wins over the CUDA libraries torch brings
    paths = (libraries.cuda, libraries.nvml, libraries.nvrtc)
    loaded = (cuda, *(_load(path, ctypes.RTLD_GLOBAL) for path in paths))
    # read at every cell: a call that keeps the lock of the interpreter waits for no other thread
    sizes = ctypes.PYFUNCTYPE(ctypes.c_ulonglong)(("sim_sizes_read", cuda))
    return _Running(loaded, libraries.cuda.parent, memory_bytes, devices, sizes)


def _load(library: Path, mode: int) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library), mode=mode)
    except OSError as error:
        raise GpuMemError(
            f"the simulated GPU cannot be loaded ({error}); set XDG_CACHE_HOME to a folder from which programs may run"
        ) from error


def _import_torch(folder: Path) -> None:
    # what is "compiled" at run time here is empty, and must not be found by a later run on a device
    os.environ["USE_PYTORCH_KERNEL_CACHE"] = "0"
    # triton, under torch.compile, links what it compiles to the driver and looks for its file
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    try:
        import torch
    except ImportError as error:
        raise GpuMemError(f"torch cannot be imported ({error}); repair it and restart the kernel") from error
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    # a standard deviation is 0 like every number here, and would be refused
    torch.distributions.Distribution.set_default_validate_args(False)
    for method in ("tolist", "cpu", "to"):
        _count_integers_read(torch, method)
    _leave_shown_numbers_uncounted(torch)


def _count_integers_read(torch: ModuleType, method: str) -> None:
    """Count tensors of integers that a method brings to the host: a copy alone does not tell of what it is."""
    read = getattr(torch.Tensor, method)

    @functools.wraps(read)
    def read_counted(tensor: Any, *arguments: Any, **options: Any) -> Any:
        global _integers_read
        result = read(tensor, *arguments, **options)
        kind = tensor.dtype
        is_integer = not (kind.is_floating_point or kind.is_complex or kind is torch.bool)
        # one number alone is counted where it is copied
        if is_integer and tensor.is_cuda and not getattr(result, "is_cuda", False) and tensor.numel() > 1:
            _integers_read += 1
        return result

    setattr(torch.Tensor, method, read_counted)


def _leave_shown_numbers_uncounted(torch: ModuleType) -> None:
    """Count nothing while a tensor is shown: what its text reads decides no size of the program's."""
    show = torch._tensor_str._str

    @functools.wraps(show)
    def show_uncounted(*arguments: Any, **options: Any) -> str:
        global _shown
        before = sizes_read()
        try:
            text: str = show(*arguments, **options)
            return text
        finally:
            _shown += sizes_read() - before

    torch._tensor_str._str = show_uncounted


def _set_others(running: _Running, processes: Sequence[tuple[int, int] | tuple[int, int, int]]) -> None:
    entries = [(*process, 0)[:3] for process in processes]
    if len(entries) > _MAX_OTHERS or any(not 0 <= device < running.devices for _, _, device in entries):
        raise GpuMemError(f"at most {_MAX_OTHERS} other processes, on devices 0 to {running.devices - 1}")
    array = (_Other * len(entries))(*(_Other(pid, device, nbytes) for pid, nbytes, device in entries))
    running.cuda.sim_set_others(array, ctypes.c_int(len(entries)))
