"""How torch's caching allocator lays out its memory, and giving back what it can spare."""

import gc
from dataclasses import dataclass
from itertools import groupby

from jupyter_gpumem.blocks import Block, read_blocks, shows_blocks
from jupyter_gpumem.device import cuda_started, torch_module

_DEFAULT_POOL = (0, 0)
# the pages an expandable segment is mapped in (kSmallBuffer and kLargeBuffer of CUDACachingAllocator.cpp)
_SMALL_PAGE_BYTES, _LARGE_PAGE_BYTES = 2 * 1024**2, 20 * 1024**2


@dataclass(frozen=True, slots=True)
class Layout:
    """How one device's reserved memory is split; all sizes in bytes.

    ``used`` are the blocks in use, by address. ``waiting_bytes`` were freed but wait for another stream
    (``record_stream``). ``returnable_bytes`` are what ``empty_cache`` gives back: segments, or pages of an
    expandable one, that are wholly free. ``fragmented_bytes`` are free parts of segments in use.
    ``private_free_bytes`` are free parts of the private pools of CUDA graphs and MemPools, which hold
    ``private_bytes`` in all.
    """

    used: tuple[Block, ...]
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
    """Read how the memory of each device with segments is laid out.

    ``None`` with an allocator that does not show it (cudaMallocAsync, a pluggable one).
    """
    if not shows_blocks():
        return None
    return {
        device: layout_of(tuple(blocks)) for device, blocks in groupby(read_blocks(), key=lambda block: block.device)
    }


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


def layout_of(blocks: tuple[Block, ...]) -> Layout:
    """Sum up the blocks of one device, given by address."""
    used = tuple(block for block in blocks if block.state == "active_allocated")
    waiting = sum(block.size_bytes for block in blocks if block.state == "active_pending_free")
    free = [block for block in blocks if block.state == "inactive"]
    ordinary = [block for block in free if block.pool == _DEFAULT_POOL]
    returnable = _returnable_bytes(blocks)
    fragmented = sum(block.size_bytes for block in ordinary) - returnable
    private = [block for block in blocks if block.pool != _DEFAULT_POOL]
    return Layout(
        used=used,
        allocated_bytes=sum(block.size_bytes for block in used),
        waiting_bytes=waiting,
        returnable_bytes=returnable,
        fragmented_bytes=fragmented,
        private_free_bytes=sum(block.size_bytes for block in free if block.pool != _DEFAULT_POOL),
        private_bytes=sum(block.size_bytes for block in private),
        private_pools=tuple(sorted({block.pool for block in private})),
        largest_free_bytes=max((block.size_bytes for block in ordinary), default=0),
    )


def _returnable_bytes(blocks: tuple[Block, ...]) -> int:
    """Return what ``empty_cache`` would give back to the driver from the ordinary pool."""
    ordinary = (block for block in blocks if block.pool == _DEFAULT_POOL)
    total = 0
    for segment, group in groupby(ordinary, key=lambda block: block.segment):
        members = list(group)
        if members[0].expandable:
            total += sum(_whole_pages(block, segment) for block in members if block.state == "inactive")
        elif all(block.state == "inactive" for block in members):
            total += sum(block.size_bytes for block in members)
    return total


def _whole_pages(block: Block, segment: int) -> int:
    """Return the bytes of the pages that lie within a block of an expandable segment."""
    page = _SMALL_PAGE_BYTES if block.small_pool else _LARGE_PAGE_BYTES
    begin = block.address - segment
    return max(0, (begin + block.size_bytes) // page - -(-begin // page)) * page


def _any_instance(base: type) -> bool:
    """Tell whether the collector knows an instance of a class; types are compared by address alone."""
    kinds = [base]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    alive = set(map(id, map(type, gc.get_objects())))
    return any(id(kind) in alive for kind in kinds)
