"""What the program still uses, and what only an error of before keeps: found forward from its variables and frames."""

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import Any

from jupyter_gpumem.heap import Clock, OutOfTimeError
from jupyter_gpumem.tensors import LiveTensors

_BATCH = 256
_BUDGET_SECONDS = 1.0
# the program, and the frames of an error: what those hold is of an attempt that has failed before
_BARRIERS = (type, ModuleType, CodeType, TracebackType)


@dataclass(frozen=True, slots=True)
class Living:
    """Addresses of tensors and graph nodes: those that running calls lead to, calls or variables, only old errors."""

    called: frozenset[int] = frozenset()
    used: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()

    def is_dead(self, addresses: Iterable[int]) -> bool:
        """Tell whether only an error of before, or garbage it left, keeps some of these."""
        addresses = frozenset(addresses)
        return not addresses.isdisjoint(self.dead) and addresses.isdisjoint(self.used)

    def is_used(self, address: int) -> bool:
        """Tell whether running calls or variables lead to it."""
        return address in self.used

    def is_under_way(self, addresses: Iterable[int]) -> bool:
        """Tell whether a running call has some of these; what only its stack has is seen by nobody."""
        addresses = frozenset(addresses)
        return not addresses.isdisjoint(self.called) or addresses.isdisjoint(self.used)


def find_living(called: list[Any], variables: list[Any], borders: Sequence[object], live: LiveTensors) -> Living:
    """Tell apart what running calls hold, what variables do, and what the tracebacks of this heap alone keep."""
    try:
        in_calls = _reached(called, borders, live)
        used = in_calls | _reached(variables, borders, live)
        frames = [traceback.tb_frame for traceback in gc.get_objects() if type(traceback) is TracebackType]
        dead = _reached(frames, borders, live) - used
    except OutOfTimeError:
        return Living()
    return Living(in_calls, used, dead)


def _reached(starts: Iterable[Any], borders: Iterable[object], live: LiveTensors) -> frozenset[int]:
    """Return the addresses of the tensors and graph nodes that some values lead to.

    Nobody looks behind ``borders``, nor behind the traceback of an error.
    """
    clock = Clock(_BUDGET_SECONDS)
    seen = set(map(id, borders))
    stack = [item for item in starts if id(item) not in seen]
    kept: list[Any] = list(stack)  # so that no address is used twice while addresses tell what was seen
    seen.update(map(id, stack))
    while stack:
        clock.check("what is in use")
        batch = stack[-_BATCH:]
        del stack[-_BATCH:]
        for item in _referents(batch, seen, live):
            if id(item) not in seen and not issubclass(type(item), _BARRIERS):
                seen.add(id(item))
                if gc.is_tracked(item) or id(item) in live.graph.objects:
                    kept.append(item)
                    stack.append(item)
    return frozenset(id(item) for item in kept if id(item) in live.graph.objects)


def _referents(items: list[Any], seen: set[int], live: LiveTensors) -> list[Any]:
    found: list[Any] = gc.get_referents(*items)
    for item in items:
        if type(item) is FunctionType:  # its globals are a program's, not something that a value keeps
            seen.add(id(item.__globals__))
        found += [child for child, _how in live.graph.links.get(id(item), ())]
    return found
