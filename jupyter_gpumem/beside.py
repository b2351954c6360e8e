"""Giving memory back beside a running cell, measured so that what the cell takes and frees meanwhile does not count."""

from collections.abc import Callable

from jupyter_gpumem import allocator
from jupyter_gpumem.freed import CELL_ALLOCATES, Change, FreeStep
from jupyter_gpumem.peaks import tracker


def collect(action: Callable[[], object]) -> FreeStep:
    """Collect garbage; what that freed is known where the cell allocated nothing meanwhile."""
    devices = allocator.active_devices()
    before = _Totals(devices)
    action()
    after = _Totals(devices)
    if before.allocations != after.allocations:
        # the collector lets other threads run, whose tensors come and go in the same counters
        return FreeStep("garbage", note=CELL_ALLOCATES)
    changes = zip(devices, before.freed_bytes, after.freed_bytes, strict=True)
    return FreeStep("garbage", changes=tuple(Change(device, old - new, 0) for device, old, new in changes))


def return_cache() -> FreeStep:
    """Give wholly free segments back to the devices; a running cell returns none by itself."""
    devices = allocator.active_devices()
    before = _Totals(devices)
    allocator.return_cache()
    changes = zip(devices, before.returned_bytes, _Totals(devices).returned_bytes, strict=True)
    return FreeStep("cache", changes=tuple(Change(device, 0, old - new) for device, old, new in changes))


class _Totals:
    """What was ever allocated and freed on each device: no allocation takes anything away from what was freed."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        counters = [tracker.raw(device) for device in devices]
        self.allocations = [one["allocation"]["all"]["allocated"] for one in counters]
        self.freed_bytes = [one["allocated_bytes"]["all"]["freed"] for one in counters]
        self.returned_bytes = [one["reserved_bytes"]["all"]["freed"] for one in counters]
