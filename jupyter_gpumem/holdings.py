"""How many bytes of device memory can be reached from some values."""

import gc
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.blocks import BlockFinder, read_blocks
from jupyter_gpumem.device import current_probe, torch_module
from jupyter_gpumem.graph import TorchReader, plain_reads
from jupyter_gpumem.heap import Clock, OutOfTimeError, scan
from jupyter_gpumem.reach import borders
from jupyter_gpumem.tensors import Key, StorageReader

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_BATCH = 256
# these are the program, not something that a value keeps
_PROGRAM = (type, ModuleType, CodeType)


@dataclass(frozen=True, slots=True)
class StorageMark:
    """One storage: the allocator's block it lies in, the block's bytes, and a reference that keeps nothing alive."""

    block: tuple[int, int]
    nbytes: int
    reference: "weakref.ref[Any]"


def bytes_held_by(
    values: Iterable[object], shell: "InteractiveShell | None" = None, *, budget_seconds: float = 1.0
) -> int:
    """Return the bytes of device memory reachable from some values, through containers, closures and graphs.

    Memory that others hold too is counted. What classes and modules hold is not, nor what the ``shell`` holds,
    to which a log handler or an event loop leads: it is not the value's. Bytes are those of the allocator's
    blocks; a search that takes longer than ``budget_seconds`` counts what it found.
    """
    found = storages_held_by(values, shell, budget_seconds=budget_seconds)
    return sum({mark.block: mark.nbytes for mark in found.values()}.values())


def storages_held_by(
    values: Iterable[object], shell: "InteractiveShell | None" = None, *, budget_seconds: float = 1.0
) -> dict[Key, StorageMark]:
    """Return the storages reachable from some values, as :func:`bytes_held_by` counts them."""
    torch = torch_module()
    if torch is None:
        return {}
    kind = current_probe().kind
    found: dict[Key, tuple[int, weakref.ref[Any]]] = {}

    def search() -> None:
        with plain_reads(torch), suppress(OutOfTimeError):
            seen = set(borders(shell))
            _gather(list(values), TorchReader(torch), StorageReader(torch, kind), Clock(budget_seconds), seen, found)

    scan(search)
    if not found:
        return {}
    finder = BlockFinder(read_blocks() if kind == "cuda" else ())
    marks = {}
    for key, (nbytes, reference) in found.items():
        block = finder.find(key)
        place, size = (key, nbytes) if block is None else ((block.device, block.address), block.size_bytes)
        marks[key] = StorageMark(place, size, reference)
    return marks


def _gather(
    stack: list[Any],
    reader: TorchReader,
    storages: StorageReader,
    clock: Clock,
    seen: set[int],
    found: dict[Key, tuple[int, "weakref.ref[Any]"]],
) -> None:
    kept: list[Any] = list(stack)  # so that no address is used twice while addresses tell what was seen
    seen.update(map(id, stack))
    while stack:
        batch = stack[-_BATCH:]
        del stack[-_BATCH:]
        clock.check("values")
        following = gc.get_referents(*batch)
        for item in batch:
            if type(item) is FunctionType:  # its globals are a program's, whether or not a module has them
                seen.add(id(item.__globals__))
            if reader.is_known(type(item)):
                following += [child for child, _how in reader.of(type(item))[1](item)]
                for key, nbytes, _uses in storages.storages_of(item):
                    found[key] = nbytes, weakref.ref(item)
        for item in following:
            if id(item) not in seen and (gc.is_tracked(item) or reader.is_known(type(item))):
                seen.add(id(item))
                if not issubclass(type(item), _PROGRAM):
                    kept.append(item)
                    stack.append(item)
