"""Advice on what is around the tensors: the allocator's cache, other processes, pinned RAM."""

import multiprocessing
from collections.abc import Iterable, Iterator
from itertools import groupby
from types import ModuleType
from typing import Any

from jupyter_gpumem.accounts import Account
from jupyter_gpumem.advised import Advice, Shortage
from jupyter_gpumem.attributes import plain_attribute
from jupyter_gpumem.blocks import read_blocks
from jupyter_gpumem.sizes import format_bytes

_FRAGMENTED_PART = 0.1  # below this part of what is reserved it is ordinary
_PAGE_BYTES = 20 * 1024**2


def about_fragments(accounts: Iterable[Account], failed: Shortage | None = None) -> Iterator[Advice]:
    """Say what lies in pieces that only small requests can use, always where a request failed for it."""
    lost = _lost_bytes()
    for account in accounts:
        if failed is not None:
            missing = failed.asked_bytes - failed.free_bytes
            pieces = lost.get(account.device, 0)
            lost[account.device] = pieces if pieces >= missing else failed.cached_bytes
        if failed is not None or lost.get(account.device, 0) > _FRAGMENTED_PART * (account.reserved_bytes or 0):
            largest = format_bytes(account.largest_free_bytes)
            yield Advice(
                "fragmentation",
                f"free pieces of used segments on {account.label}, none over {largest}",
                lost[account.device],
                'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
                "in the first cell, before torch is imported",
            )


def about_cache(accounts: Iterable[Account]) -> Iterator[Advice]:
    """Say what torch keeps for itself alone: before a request of its own fails, it has returned all that."""
    for account in accounts:
        cached = account.part("returnable")
        if cached is not None and cached.nbytes:
            label = f"torch's cache on {account.label}"
            yield Advice("cache", label, cached.nbytes, "torch.cuda.empty_cache()", "for other processes")


def about_processes(accounts: Iterable[Account]) -> Iterator[Advice]:
    """Say what other processes have on the devices."""
    for account in accounts:
        for neighbour in account.neighbours or ():
            yield _about_process(neighbour.name.pid, str(neighbour.name), neighbour.used_bytes or 0)


def _lost_bytes() -> dict[int, int]:
    """Return what expandable segments would give back on each device: they are mapped in pages of 20 MiB."""
    lost: dict[int, int] = {}
    for (device, _segment), blocks in groupby(read_blocks(), key=lambda block: (block.device, block.segment)):
        segment = list(blocks)
        in_use = any(block.state != "inactive" for block in segment)
        if in_use and not segment[0].expandable and segment[0].pool == (0, 0):
            whole = sum(block.size_bytes // _PAGE_BYTES for block in segment if block.state == "inactive")
            lost[device] = lost.get(device, 0) + whole * _PAGE_BYTES
    return lost


def _about_process(pid: int, name: str, nbytes: int) -> Advice:
    if pid in {child.pid for child in multiprocessing.active_children()}:
        return about_worker(nbytes, f"a worker process of this one holds memory: {name}")
    return Advice("other process", f"another process: {name}", nbytes, f"!kill {pid}", "if it is yours and idle")


def about_worker(nbytes: int, label: str = "a worker process asked for GPU memory") -> Advice:
    """Say how a ``DataLoader`` does without GPU memory in its workers."""
    note = "a data set should give CPU tensors: the batch goes to the GPU in the training loop"
    return Advice("worker", label, nbytes, "DataLoader(..., num_workers=0)", note)


def about_limit(shortage: Shortage) -> Iterator[Advice]:
    """Say what this process's own limit keeps from it."""
    if shortage.is_over_limit:
        label = f"this process may take {format_bytes(shortage.limit_bytes)} at most, more is free"
        yield Advice("limit", label, shortage.free_bytes, "%gpumem limit off")


def about_host(names: dict[str, Any], torch: ModuleType) -> Iterator[Advice]:
    """Say what is pinned in RAM for a loader, where somebody looks for it on the GPU."""
    read = getattr(torch.cuda, "host_memory_stats", None)
    loader = torch.utils.data.DataLoader
    loaders = [
        name
        for name, value in names.items()
        if issubclass(type(value), loader) and plain_attribute(value, "pin_memory") is True
    ]
    if read is not None and loaders:
        nbytes = int(read().get("allocated_bytes.current", 0))
        label = f"RAM pinned for {loaders[0]}: none of it is on the GPU"
        yield Advice("pinned memory", label, nbytes, "DataLoader(..., pin_memory=False)")
