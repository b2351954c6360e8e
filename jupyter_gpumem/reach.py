"""Whether a value keeps device memory alive: a forward search from it, cut short at the first find."""

import gc
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from jupyter_gpumem.device import torch_module
from jupyter_gpumem.graph import TorchReader, plain_reads
from jupyter_gpumem.heap import module_namespace
from jupyter_gpumem.tensors import StorageReader

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# these are the program itself, not something that a value keeps
_PROGRAM = (type, ModuleType, CodeType)


class Reach:
    """Answers for many values; what was searched in vain for one is not searched again for the next.

    ``kind`` is the probe's: ``"cuda"`` counts tensors on CUDA devices, ``"host"`` those in RAM. Not seen is
    what only C++ holds. It remembers addresses, so it serves one request and is thrown away.
    """

    def __init__(self, shell: "InteractiveShell | None", kind: str = "cuda") -> None:
        self._torch = torch_module()
        self._barren = set(borders(shell))
        if self._torch is not None:
            self._reader = TorchReader(self._torch)
            self._kinds = frozenset(self._reader.kinds())
            self._storages = StorageReader(self._torch, kind)

    def holds_memory(self, value: object) -> bool:
        """Tell whether a value reaches a tensor with memory on the device, through its graph too."""
        if self._torch is None or id(value) in self._barren or not gc.is_tracked(value):
            return False
        with plain_reads(self._torch):
            return self._search(value)

    def _search(self, value: object) -> bool:
        # what was met is kept until the search ends, so that no address is used twice
        met = [value]
        seen = {id(value)}
        for found in met:
            if any(nbytes for _key, nbytes, _uses in self._storages.storages_of(found)):
                return True
            for referent in self._referents(found):
                key = id(referent)
                if key in seen or key in self._barren or not gc.is_tracked(referent):
                    continue
                if not issubclass(type(referent), _PROGRAM):
                    seen.add(key)
                    met.append(referent)
        self._barren |= seen
        return False

    def _referents(self, value: object) -> Iterator[object]:
        yield from gc.get_referents(value)
        kind = type(value)
        if id(kind) in self._kinds or self._reader.is_known(kind):
            _is_tensor, read = self._reader.of(kind)
            yield from (child for child, _how in read(value))


def borders(shell: "InteractiveShell | None") -> Iterator[int]:
    """Yield the addresses of module globals and of IPython's own keeping places: no value keeps what those hold."""
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            yield id(module_namespace(module))
    if shell is not None:
        yield from map(id, (shell, shell.user_ns, shell.user_ns_hidden, shell.user_ns.get("_oh")))
        yield from map(id, (shell.displayhook, shell.InteractiveTB, shell.last_execution_result))
