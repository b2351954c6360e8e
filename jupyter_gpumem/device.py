"""Reading what torch's allocator and the device hold, without importing torch or starting CUDA."""

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jupyter_gpumem import simgpu
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.readings import DeviceSnapshot, MemoryProbe
from jupyter_gpumem.sizes import format_bytes

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/proc/driver/nvidia/version")
_HIDDEN = ("", "-1", "none", "NoDevFiles")


def torch_module() -> ModuleType | None:
    """Return torch where the user has imported it whole, else ``None``; never imports it."""
    torch = sys.modules.get("torch")
    # while `import torch` is still running the module is there but half filled
    spec = getattr(torch, "__spec__", None)
    return None if torch is None or getattr(spec, "_initializing", False) else torch


def cuda_started() -> bool:
    """Tell whether torch has started CUDA in this process (a forked child counts as not started)."""
    torch = torch_module()
    return torch is not None and hasattr(torch, "cuda") and bool(torch.cuda.is_initialized())


def cuda_possible() -> bool:
    """Guess in microseconds whether this process could use a CUDA or ROCm device; opens no driver."""
    if simgpu.is_active():
        return True
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in _HIDDEN:
        return False
    torch = torch_module()
    if (
        torch is not None
        and getattr(torch.version, "cuda", None) is None
        and getattr(torch.version, "hip", None) is None
    ):
        return False
    if os.name == "nt":
        return Path(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32", "nvcuda.dll").exists()
    return any(Path(path).exists() for path in _DEVICE_FILES)


def current_probe() -> MemoryProbe:
    """Return the source of readings for this process as it is now."""
    return CudaProbe() if cuda_started() or cuda_possible() else HostProbe()


def check_device(device: int | None) -> None:
    """Check that a device that somebody named is there.

    Raises
    ------
    GpuMemError
        When it is not.
    """
    there = current_probe().devices()
    if device is not None and there and device not in there:
        raise GpuMemError(f"there is no device {device}: they are {', '.join(map(str, there))}")


class CudaProbe:
    """torch's CUDA (or ROCm) caching allocator."""

    kind = "cuda"

    def devices(self) -> tuple[int, ...]:
        """Return every visible device once torch has started CUDA, else none."""
        torch = torch_module()
        if torch is None or not cuda_started():
            return ()
        return tuple(range(torch.cuda.device_count()))

    def awake_devices(self) -> tuple[int, ...]:
        """Return the devices on which this process has a context: on the others nothing can have happened."""
        torch = torch_module()
        if torch is None:
            return ()
        return tuple(device for device in self.devices() if torch._C._cuda_hasPrimaryContext(device))

    def counters(self, device: int) -> Mapping[str, Any]:
        """Read the allocator's raw counters; this starts no context and costs about 12 µs."""
        torch = torch_module()
        stats: Mapping[str, Any] = torch._C._cuda_memoryStats(device)  # type: ignore[union-attr]  # devices() named it
        return stats

    def snapshot(self, device: int) -> DeviceSnapshot:
        """Read one device."""
        return self.snapshot_of(device, self.counters(device))

    def snapshot_of(self, device: int, counters: Mapping[str, Any]) -> DeviceSnapshot:
        """Complete counters already read with the figures of the whole device."""
        used, total = self._whole_device(device)
        return DeviceSnapshot(
            device,
            counters["allocated_bytes"]["all"]["current"],
            counters["reserved_bytes"]["all"]["current"],
            used,
            total,
        )

    def _whole_device(self, device: int) -> tuple[int | None, int | None]:
        """Return used and total bytes; a device without a context of ours is not asked for its use."""
        torch = torch_module()
        if torch is None:
            return None, None
        total: int | None = None
        with contextlib.suppress(RuntimeError, AssertionError):
            total = int(torch.cuda.get_device_properties(device).total_memory)
            if torch._C._cuda_hasPrimaryContext(device):
                free, total = torch.cuda.mem_get_info(device)
                return total - free, total
        return None, total

    def label(self, device: int) -> str:
        """Return ``GPU`` and torch's index."""
        return f"GPU {device}"

    def name(self, device: int) -> str:
        """Return the model name, as torch gives it."""
        torch = torch_module()
        return "" if torch is None else str(torch.cuda.get_device_name(device))

    def simulated(self) -> bool:
        """Tell whether the simulated GPU answers."""
        return simgpu.is_active()


class HostProbe:
    """The resident memory of this process, where there is no CUDA device."""

    kind = "host"

    def devices(self) -> tuple[int, ...]:
        """Return the one device there is, the host."""
        return (0,)

    def counters(self, device: int) -> Mapping[str, Any]:
        """Return nothing: the host keeps no allocator counters."""
        return {}

    def snapshot(self, device: int) -> DeviceSnapshot:
        """Read the resident set size of this process and the memory of the machine."""
        import psutil

        rss = int(psutil.Process().memory_info().rss)
        machine = psutil.virtual_memory()
        return DeviceSnapshot(device, rss, rss, int(machine.total - machine.available), int(machine.total))

    def label(self, device: int) -> str:
        """Return ``RAM``."""
        return "RAM"

    def name(self, device: int) -> str:
        """Return what the figures speak of."""
        return "memory of this process"

    def simulated(self) -> bool:
        """Return False: these figures are real."""
        return False


def limit_bytes(device: int) -> int | None:
    """Return the cap on this process set by ``set_per_process_memory_fraction``, or None where there is none."""
    torch = torch_module()
    if torch is None or not cuda_started() or not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return None
    with _current_device_kept(torch):
        fraction = float(torch.cuda.get_per_process_memory_fraction(device))
    if fraction >= 1.0:
        return None
    return int(fraction * torch.cuda.get_device_properties(device).total_memory)


@contextlib.contextmanager
def _current_device_kept(torch: ModuleType) -> Iterator[None]:
    """Return to the current device afterwards: in torch 2.6 asking for a device's limit changes it."""
    current = torch.cuda.current_device()
    try:
        yield
    finally:
        if torch.cuda.current_device() != current:
            # wakes no device, as entering torch.cuda.device(current) would
            torch.cuda._maybe_exchange_device(current)


def set_limit(amount: int | float | None) -> tuple[tuple[int, int], ...]:
    """Cap this process on every device it uses: bytes (int), a part of the device (float), or None for no cap.

    Returns the device and its cap in bytes, for each.

    Raises
    ------
    GpuMemError
        While CUDA has not started: there is nothing to cap yet; when no device has as much.
    """
    torch = torch_module()
    if not cuda_started() and not cuda_possible():
        raise GpuMemError("no CUDA device here, so there is nothing to limit")
    if torch is None or not cuda_started():
        raise GpuMemError("CUDA has not started, so there is no device to limit yet; put something on the GPU first")
    awake = [d for d in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(d)]
    totals = {
        device: int(torch.cuda.get_device_properties(device).total_memory)
        for device in awake or [torch.cuda.current_device()]
    }
    largest = max(totals.values())
    if isinstance(amount, int) and amount > largest:
        raise GpuMemError(f"a limit of {format_bytes(amount)} caps nothing: the device has {format_bytes(largest)}")
    limits = []
    for device, total in totals.items():
        fraction = _fraction(amount, total)
        with _current_device_kept(torch):
            torch.cuda.set_per_process_memory_fraction(fraction, device)
        limits.append((device, int(fraction * total)))
    return tuple(limits)


def _fraction(amount: int | float | None, total: int) -> float:
    if amount is None:
        return 1.0
    if isinstance(amount, float):
        return amount
    fraction = min(amount / total, 1.0)
    # the allocator multiplies back and rounds down: 8 GiB asked must not become 8 GiB less one byte
    while int(fraction * total) < min(amount, total):
        fraction = math.nextafter(fraction, 2.0)
    return min(fraction, 1.0)
