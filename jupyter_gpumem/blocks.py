"""What torch's caching allocator says of each piece of device memory it handed out."""

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jupyter_gpumem.device import cuda_started, torch_module

# what torch asks of its own allocator for cuBLAS and cuBLASLt, by compute capability and version
_WORKSPACE_BYTES = frozenset({8_519_680, 32 << 20, 4 << 20, 1 << 20})
_MOST_WORKSPACES = 8  # one for each thread that uses a library on a stream


@dataclass(frozen=True, slots=True)
class Block:
    """One block of the caching allocator; sizes in bytes.

    ``requested_bytes`` is what was asked for, ``size_bytes`` what it takes. ``pool`` is the id of the private
    pool the block's segment belongs to, ``(0, 0)`` for the ordinary one. ``place`` is the innermost Python line
    that made the block, as ``file:line``, where torch records allocation history. ``small_pool`` and
    ``expandable`` speak of the segment.
    """

    device: int
    address: int
    size_bytes: int
    requested_bytes: int
    state: str
    pool: tuple[int, int]
    segment: int
    stream: int
    place: str | None
    small_pool: bool = False
    expandable: bool = False


def shows_blocks() -> bool:
    """Tell whether the allocator in use shows its blocks; cudaMallocAsync and pluggable ones do not."""
    torch = torch_module()
    return torch is not None and cuda_started() and torch.cuda.get_allocator_backend() == "native"


def read_blocks() -> tuple[Block, ...]:
    """Read every block of every CUDA device, by device and address; none before torch has started CUDA."""
    torch = torch_module()
    if torch is None or not shows_blocks():
        return ()
    blocks = [_block(segment, block) for segment in _segments(torch) for block in segment["blocks"]]
    return tuple(sorted(blocks, key=lambda block: (block.device, block.address)))


class BlockFinder:
    """Finds the allocator's block that contains an address."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = [block for block in blocks if block.state == "active_allocated"]
        self._starts = [(block.device, block.address) for block in self._blocks]

    def find(self, key: tuple[int, int]) -> Block | None:
        """Return the block in use that contains a storage."""
        at = bisect_right(self._starts, key) - 1
        if at < 0:
            return None
        block = self._blocks[at]
        inside = block.device == key[0] and key[1] < block.address + block.size_bytes
        return block if inside else None


def library_workspaces(unexplained: Iterable[Block]) -> list[Block]:
    """Return which of the blocks that no tensor explains are taken for cuBLAS workspaces; torch does not tell.

    The sizes are the ones torch asks for (``CUBLAS_WORKSPACE_CONFIG``, ``CUBLASLT_WORKSPACE_SIZE`` and the
    defaults in ATen/cuda/CublasHandlePool.cpp). Of blocks that are far too many on one stream, made by other
    code, only one is.
    """
    sizes = _WORKSPACE_BYTES | _configured_workspaces()
    groups: dict[tuple[int, int, int], list[Block]] = {}
    for block in unexplained:
        if block.requested_bytes in sizes:
            groups.setdefault((block.device, block.stream, block.requested_bytes), []).append(block)
    return [block for alike in groups.values() for block in alike[: 1 if len(alike) > _MOST_WORKSPACES else None]]


def _segments(torch: Any) -> list[dict[str, Any]]:
    try:
        # the trace of a recorded history can be a hundred times larger than the blocks
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # torch before 2.11 gives the blocks alone
        segments = torch.cuda.memory_snapshot()
    return segments


def _block(segment: dict[str, Any], block: dict[str, Any]) -> Block:
    first, second = segment.get("segment_pool_id", (0, 0))
    return Block(
        segment["device"],
        block["address"],
        block["size"],
        block.get("requested_size", block["size"]),
        block["state"],
        (first, second),
        segment["address"],
        segment.get("stream", 0),
        _place(block.get("frames", ())),
        segment.get("segment_type") == "small",
        bool(segment.get("is_expandable", False)),
    )


def _place(frames: Any) -> str | None:
    for frame in frames:
        name = str(frame.get("filename", ""))
        if name and name != "??" and f"{os.sep}torch{os.sep}" not in name and not name.endswith((".cpp", ".h", ".cu")):
            return f"{name}:{frame.get('line', 0)}"
    return None


def _configured_workspaces() -> frozenset[int]:
    sizes = set()
    text = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "").strip(":")
    parts = text.split(":") if text else []
    if len(parts) % 2 == 0 and all(part.isdigit() for part in parts):
        sizes.add(sum(int(size) * int(count) * 1024 for size, count in zip(parts[::2], parts[1::2], strict=True)))
    lt = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    if lt.isdigit():
        sizes.add(int(lt) * 1024)
    return frozenset(sizes)
