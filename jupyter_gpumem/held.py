"""The graph from roots to memory, as the search leaves it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jupyter_gpumem.holders import Kind
from jupyter_gpumem.roots import Slot
from jupyter_gpumem.tensors import Key

ROOT = 0


@dataclass(slots=True)
class RootHolder:
    """One holder at a root: the slots that one remedy cuts."""

    node: int
    kind: Kind
    group: tuple[Any, ...]
    slots: list[Slot]


@dataclass(slots=True)
class HeldGraph:
    """The part of the heap from which memory can be reached. Holds its objects: drop it before reporting.

    Node 0 is the root of roots, the next ones are the holders at the roots, then come the objects (``objects``
    gives them by node, None for a node that is none) and the pieces of memory that several tensors share.
    """

    objects: list[Any] = field(default_factory=lambda: [None])
    successors: list[list[int]] = field(default_factory=lambda: [[]])
    memory: dict[int, list[tuple[int, int, Key]]] = field(default_factory=dict)
    """Device, bytes and storage of the memory that stands or falls with a node."""
    holders: dict[int, RootHolder] = field(default_factory=dict)
    garbage: list[list[int]] = field(default_factory=list)
    """Components of objects that nothing reaches any more."""
    dominator: list[int] = field(default_factory=list)
    found_by: list[int] = field(default_factory=list)
    """The node before each on the path to it that is shown, -1 where there is none."""
    nodes: dict[int, int] = field(default_factory=dict)
    """The node of an object, by its address."""

    def add(self, item: object = None) -> int:
        """Add a node."""
        self.objects.append(item)
        self.successors.append([])
        return len(self.objects) - 1

    def dominated(self) -> list[list[int]]:
        """Return the nodes that each node immediately dominates."""
        children: list[list[int]] = [[] for _ in self.objects]
        for node, above in enumerate(self.dominator):
            if node != ROOT and above >= 0:
                children[above].append(node)
        return children

    def path_to(self, node: int) -> list[int]:
        """Return a shortest path from the holder at its root to a node."""
        path = [node]
        while self.found_by[path[-1]] > ROOT:
            path.append(self.found_by[path[-1]])
        return path[::-1]


def reach(successors: Sequence[Sequence[int]], starts: Iterable[int]) -> set[int]:
    """Return every node that can be reached from some, themselves included."""
    reached = set(starts)
    stack = list(reached)
    while stack:
        for target in successors[stack.pop()]:
            if target not in reached:
                reached.add(target)
                stack.append(target)
    return reached
