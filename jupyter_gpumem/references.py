"""Who refers to some objects: every reference of a heap as an address, looked up in bulk."""

import ctypes
import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from jupyter_gpumem.heap import Clock

    Addresses = NDArray[np.int64]

# one call of gc.get_referents for so many objects: fewer calls cost less, more cost refining
_CHUNK = 256
_PART = 16
_TABLE_BITS = 20


class References:
    """Every reference between the objects of a heap, as addresses; the source is known to a chunk of objects."""

    def __init__(self, objects: list[Any], clock: "Clock") -> None:
        import numpy as np

        self._objects = objects
        parts: list[Addresses] = []
        for start in range(0, len(objects), _CHUNK):
            referents = gc.get_referents(*objects[start : start + _CHUNK])
            parts.append(addresses_of(referents, len(referents)))
            del referents
            if start % (_CHUNK * 512) == 0:
                clock.check("references")
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self._targets = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        self._hashes = hashes_of(self._targets)
        self._order: Addresses | None = None
        self._sorted = self._targets

    def holders_of(self, addresses: list[int], *, sort: bool) -> list[Any]:
        """Return the objects that refer to one of the addresses."""
        import numpy as np

        wanted = np.sort(np.array(addresses, np.int64))
        if sort or self._order is not None:
            positions = self._positions_by_order(wanted)
        else:
            positions = members(self._targets, wanted, self._hashes)
        return self._sources(np.sort(positions), set(addresses))

    def _positions_by_order(self, wanted: "Addresses") -> "Addresses":
        import numpy as np

        if self._order is None:
            self._order = np.argsort(self._targets)
            self._sorted = self._targets[self._order]
        first = np.searchsorted(self._sorted, wanted, side="left").tolist()
        last = np.searchsorted(self._sorted, wanted, side="right").tolist()
        spans = [self._order[a:b] for a, b in zip(first, last, strict=True) if b > a]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)

    def _sources(self, positions: "Addresses", wanted: set[int]) -> list[Any]:
        import numpy as np

        if not len(positions):
            return []
        chunks = np.searchsorted(self._ends, positions, side="right")
        firsts = np.nonzero(np.diff(chunks, prepend=-1))[0].tolist()
        chunk_of = chunks[firsts].tolist()
        lasts = [*firsts[1:], len(positions)]
        found: list[Any] = []
        for chunk, first, last in zip(chunk_of, firsts, lasts, strict=True):
            end = int(self._ends[chunk])
            start = int(self._ends[chunk - 1]) if chunk else 0
            objects = self._objects[chunk * _CHUNK : (chunk + 1) * _CHUNK]
            found += _locate(objects, (positions[first:last] - start).tolist(), end - start, wanted)
        return found


def _locate(objects: list[Any], offsets: list[int], total: int, wanted: set[int]) -> list[Any]:
    """Return the objects whose references stand at ``offsets`` in the joint list of all their references."""
    parts = [objects[start : start + _PART] for start in range(0, len(objects), _PART)]
    lengths = [len(gc.get_referents(*part)) for part in parts]
    if sum(lengths) != total:  # another thread changed something here since: look at each object
        return [item for item in objects if any(id(held) in wanted for held in gc.get_referents(item))]
    found: list[Any] = []
    index, begin = 0, 0
    for part, length in zip(parts, lengths, strict=True):
        inside = begin + length
        if index < len(offsets) and offsets[index] < inside:
            for item in part:
                after = begin + len(gc.get_referents(item))
                if index < len(offsets) and offsets[index] < after:
                    found.append(item)
                while index < len(offsets) and offsets[index] < after:
                    index += 1
                begin = after
        begin = inside
    return found


def addresses_of(items: Iterable[Any], count: int) -> "Addresses":
    """Return the addresses of ``count`` objects: what ``id`` gives, without making an int of each."""
    import numpy as np

    # an array of objects is an array of their addresses
    held = np.fromiter(items, object, count)
    raw = (ctypes.c_char * (8 * count)).from_address(held.ctypes.data)
    return np.frombuffer(memoryview(raw), np.int64).copy()


def hashes_of(addresses: "Addresses") -> "NDArray[np.uint32]":
    """Return the place of each address in a table of all that are looked for."""
    import numpy as np

    # objects are aligned to 16 bytes
    return ((addresses >> 4) & ((1 << _TABLE_BITS) - 1)).astype(np.uint32)


def members(addresses: "Addresses", wanted: "Addresses", hashes: "NDArray[np.uint32]") -> "Addresses":
    """Return the positions of ``addresses`` that are among the sorted ``wanted``."""
    import numpy as np

    if not len(wanted) or not len(addresses):
        return np.zeros(0, np.int64)
    table = np.zeros(1 << _TABLE_BITS, bool)
    table[hashes_of(wanted)] = True
    maybe = np.nonzero(table[hashes])[0]
    at = np.searchsorted(wanted, addresses[maybe])
    at[at == len(wanted)] = 0
    found: Addresses = maybe[wanted[at] == addresses[maybe]]
    return found
