"""Which of the user's variables a cell created, replaced or deleted."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Change = Literal["created", "replaced", "deleted"]

_IPYTHON = ("In", "Out", "get_ipython", "exit", "quit", "open")


@dataclass(frozen=True, slots=True)
class VariableChange:
    """One variable and the bytes of GPU memory reachable from it, now and before the cell."""

    name: str
    change: Change
    holds_bytes: int
    held_bytes: int = 0


class Namespace:
    """What the user's names were bound to at one moment; keeps none of the objects alive.

    ``held_bytes`` tells how many bytes of GPU memory are reachable from a value.
    """

    def __init__(self, names: Mapping[str, Any], held_bytes: Callable[[Any], int]) -> None:
        self._held_bytes = held_bytes
        self._marks = {name: (_mark(value), held_bytes(value)) for name, value in _visible(names)}

    def changes(self, names: Mapping[str, Any]) -> tuple[VariableChange, ...]:
        """Compare with the names now, most bytes first; what neither holds nor held GPU memory is left out."""
        changes = []
        for name, value in _visible(names):
            same, held = self._marks.get(name, (None, 0))
            if same is None or not same(value):
                change: Change = "created" if same is None else "replaced"
                changes.append(VariableChange(name, change, self._held_bytes(value), held))
        gone = self._marks.keys() - names.keys()
        changes += [VariableChange(name, "deleted", 0, self._marks[name][1]) for name in gone]
        kept = [change for change in changes if change.holds_bytes or change.held_bytes]
        return tuple(sorted(kept, key=lambda change: (-(change.holds_bytes or change.held_bytes), change.name)))


def _visible(names: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in names.items() if not name.startswith("_") and name not in _IPYTHON]


def _mark(value: Any) -> Callable[[Any], bool]:
    """Return a test for being the same object; an address alone could be used again after a deletion."""
    try:
        reference = weakref.ref(value)
    except TypeError:
        address = id(value)
        return lambda other: id(other) == address
    return lambda other: reference() is other
