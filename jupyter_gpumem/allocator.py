"""torch's caching allocator as it stands: its blocks and pools, and giving back what it can spare."""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jupyter_gpumem.device import cuda_started, torch_module

_DEFAULT_POOL = (0, 0)
# the pages an expandable segment is mapped in (kSmallBuffer and kLargeBuffer of CUDACachingAllocator.cpp)
_PAGE_BYTES = {"small": 2 * 1024**2, "large": 20 * 1024**2}


@dataclass(frozen=True, slots=True)
class UsedBlock:
    """One block in use, at an address of the device; ``pool`` is ``(0, 0)`` outside private pools."""

    address: int
    nbytes: int
    pool: tuple[int, int]
    stream: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How one device's reserved memory is split; all sizes in bytes.

    ``waiting_bytes`` were freed but wait for another stream (``record_stream``). ``returnable_bytes``
    are what ``empty_cache`` gives back: segments, or pages of an expandable one, that are wholly free.
    ``fragmented_bytes`` are free parts of segments in use. ``private_free_bytes`` are free parts of the
    private pools of CUDA graphs and MemPools, which hold ``private_bytes`` in all.
    """

    blocks: tuple[UsedBlock, ...]
    allocated_bytes: int
    waiting_bytes: int
    returnable_bytes: int
    fragmented_bytes: int
    private_free_bytes: int
    private_bytes: int
    private_pools: tuple[tuple[int, int], ...]
    largest_free_bytes: int

    @property
    def reserved_bytes(self) -> int:
        """Return the sum of the parts."""
        free = self.returnable_bytes + self.fragmented_bytes + self.private_free_bytes
        return self.allocated_bytes + self.waiting_bytes + free


def has_context(device: int) -> bool:
    """Tell whether this process is on a device; asking puts it on none."""
    torch = torch_module()
    return torch is not None and cuda_started() and bool(torch._C._cuda_hasPrimaryContext(device))


def active_devices() -> tuple[int, ...]:
    """Return the devices this process is on, by torch's index."""
    torch = torch_module()
    if torch is None or not cuda_started():
        return ()
    return tuple(device for device in range(torch.cuda.device_count()) if has_context(device))


def read_layouts() -> dict[int, Layout] | None:
    """Read the segments of every device that has some.

    ``None`` with an allocator that shows no segments (cudaMallocAsync, a pluggable one).
    """
    segments = _segments()
    if segments is None:
        return None
    by_device: dict[int, list[Mapping[str, Any]]] = {}
    for segment in segments:
        by_device.setdefault(segment["device"], []).append(segment)
    return {device: _layout(found) for device, found in by_device.items()}


def no_layout() -> Layout:
    """Return the layout of a device without segments."""
    return _layout([])


def graph_may_be_alive() -> bool:
    """Tell whether a captured CUDA graph may still be replayed, or one be under capture.

    A graph that allocated nothing has no pool to show, so the Python objects are looked for too. Pools
    that nobody uses any more count until ``empty_cache`` has returned them.
    """
    torch = torch_module()
    if torch is None or not cuda_started():
        return False
    graph: type | None = getattr(torch._C, "_CUDAGraph", None)
    if graph is not None and _any_instance(graph):
        return True
    # the pool of a graph is (n, 0); (0, n) is a user's MemPool, or one that graphs share
    hidden = gc.get_freeze_count() > 0
    pools = [pool for layout in (read_layouts() or {}).values() for pool in layout.private_pools]
    return any(pool[0] or hidden for pool in pools)


def is_capturing() -> bool:
    """Tell whether the current stream of this thread is recording a CUDA graph."""
    torch = torch_module()
    return torch is not None and cuda_started() and bool(torch.cuda.is_current_stream_capturing())


def return_cache() -> None:
    """Give wholly free segments back to the driver, on the devices this process is on already."""
    torch = torch_module()
    for device in active_devices():
        # called on a device without a context, empty_cache would give it one (pytorch issue 25752)
        with torch.cuda.device(device):  # type: ignore[union-attr]  # a device was found, so torch is there
            torch.cuda.empty_cache()  # type: ignore[union-attr]


def release_workspaces() -> bool:
    """Drop cuBLAS's workspaces, where this torch can; made anew at the next matrix product."""
    torch = torch_module()
    release = getattr(getattr(torch, "_C", None), "_cuda_clearCublasWorkspaces", None)
    if release is None or not cuda_started():
        return False
    release()
    return True


def collect_shared() -> None:
    """Drop memory that another process was given through CUDA IPC and has let go."""
    torch = torch_module()
    if torch is not None and active_devices():
        torch.cuda.ipc_collect()


def _any_instance(base: type) -> bool:
    """Tell whether the collector knows an instance of a class; types are compared by address alone."""
    kinds = [base]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    alive = set(map(id, map(type, gc.get_objects())))
    return any(id(kind) in alive for kind in kinds)


def _segments() -> list[Mapping[str, Any]] | None:
    torch = torch_module()
    if torch is None or not cuda_started() or torch.cuda.get_allocator_backend() != "native":
        return None
    try:
        segments: list[Mapping[str, Any]] = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:
        # an older torch copies the recorded traces along, whoever asks
        segments = torch.cuda.memory_snapshot()
    return segments


def _layout(segments: list[Mapping[str, Any]]) -> Layout:
    blocks: list[UsedBlock] = []
    waiting = returnable = fragmented = private_free = private = largest = 0
    pools = set()
    for segment in segments:
        pool = tuple(segment.get("segment_pool_id", _DEFAULT_POOL))
        free = 0
        for address, block in _blocks_of(segment):
            nbytes = block["size"]
            if block["state"] == "active_allocated":
                blocks.append(UsedBlock(address, nbytes, pool, segment["stream"]))
            elif block["state"] == "inactive":
                free += nbytes
                largest = max(largest, nbytes)
            else:
                waiting += nbytes
        if pool != _DEFAULT_POOL:
            pools.add(pool)
            private += segment["total_size"]
            private_free += free
        else:
            whole = _wholly_free(segment)
            returnable += whole
            fragmented += free - whole
    allocated = sum(block.nbytes for block in blocks)
    blocks.sort(key=lambda block: block.address)
    return Layout(
        tuple(blocks),
        allocated,
        waiting,
        returnable,
        fragmented,
        private_free,
        private,
        tuple(sorted(pools)),
        largest,
    )


def _blocks_of(segment: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the blocks with their addresses; they follow one another without gaps."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield address, block
        address += block["size"]


def _wholly_free(segment: Mapping[str, Any]) -> int:
    """Return what ``empty_cache`` would give back of a segment, in bytes."""
    if not segment.get("is_expandable"):
        return (
            0 if any(block["state"] != "inactive" for block in segment["blocks"]) else segment["total_size"]
        )
    page = _PAGE_BYTES[segment["segment_type"]]
    pages = 0
    for address, block in _blocks_of(segment):
        if block["state"] == "inactive":
            begin = address - segment["address"]
            pages += max(0, (begin + block["size"]) // page - -(-begin // page))
    return pages * page
