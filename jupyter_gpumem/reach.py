"""Whether a value keeps device memory alive: a forward search from it, cut short at the first find."""

import gc
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.device import torch_module

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
        torch = torch_module()
        self._device_type = "cpu" if kind == "host" else kind
        self._tensor: Any = getattr(torch, "Tensor", None)
        self._storage: Any = getattr(torch, "UntypedStorage", None)
        self._barren = set(_borders(shell))

    def holds_memory(self, value: object) -> bool:
        """Tell whether a value reaches a tensor with memory on the device, through its graph too."""
        if self._tensor is None or not gc.is_tracked(value):
            return False
        # what was met is kept until the search ends, so that no address is used twice
        met = [value]
        seen = {id(value)}
        for found in met:
            if self._is_memory(found):
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

    def _is_memory(self, value: object) -> bool:
        kind = type(value)
        if issubclass(kind, self._tensor):
            # the class's own slots: a subclass may run the user's code behind its attributes
            return self._tensor.device.__get__(value).type == self._device_type and _has_bytes(
                self._tensor, value
            )
        if issubclass(kind, self._storage):
            storage: Any = value
            return bool(storage.device.type == self._device_type and storage.nbytes())
        return False

    def _referents(self, value: object) -> Iterator[object]:
        yield from gc.get_referents(value)
        if issubclass(type(value), self._tensor):
            # a graph node has no Python object until somebody asks for it
            yield self._tensor.grad_fn.__get__(value)
        elif any("next_functions" in vars(kind) for kind in type(value).__mro__):
            yield from _node_referents(value)


def _borders(shell: "InteractiveShell | None") -> Iterator[int]:
    """Return the addresses of module globals and of IPython's own keeping places."""
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            yield id(vars(module))
    if shell is not None:
        yield from map(id, (shell, shell.user_ns, shell.user_ns_hidden, shell.user_ns.get("_oh")))
        yield from map(id, (shell.displayhook, shell.InteractiveTB, shell.last_execution_result))


def _has_bytes(tensor: Any, value: Any) -> bool:  # noqa: ANN401 - torch is not imported here
    try:
        return bool(tensor.untyped_storage(value).nbytes())
    except (NotImplementedError, RuntimeError):
        # sparse and strided nested tensors have several storages and answer for none
        return True


def _node_referents(node: Any) -> Iterator[object]:  # noqa: ANN401 - graph nodes have no common class
    for following, _index in node.next_functions:
        yield following
    yield getattr(node, "variable", None)
