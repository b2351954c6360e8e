"""The words for a place in a held graph: from the root where a user would begin to what is held there."""

import itertools
from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from jupyter_gpumem.attributes import plain_attribute, type_module, type_name
from jupyter_gpumem.frames import Suspended
from jupyter_gpumem.graph import is_node_type
from jupyter_gpumem.held import RootHolder
from jupyter_gpumem.holders import Kind
from jupyter_gpumem.paths import walk
from jupyter_gpumem.provenance import CellFinder
from jupyter_gpumem.roots import Slot
from jupyter_gpumem.shares import Share, Shares
from jupyter_gpumem.trail import Trail

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


class Trails:
    """Names places in one held graph. Holds its objects: drop it before reporting."""

    def __init__(self, shares: Shares, cells: CellFinder, torch: ModuleType) -> None:
        self._shares = shares
        self._graph = shares.graph
        self._cells = cells
        self._torch = torch

    def best(self, share: Share) -> RootHolder:
        """Return the holder the shortest path begins at."""
        first = self._graph.path_to(share.node)[0]
        return self._graph.holders.get(first, share.holders[0])

    def start_words(self, holder: RootHolder) -> str:
        """Return the phrase that the words for a frame's variable end with: ``kept by the last error``."""
        return f"{_verb(holder.kind)} {self._start(holder, holder.slots[0])}"

    def trail(self, holder: RootHolder, node: int) -> Trail:
        """Return the words and the code for a node, from the holder at its root."""
        path = self._graph.path_to(node)
        chain = [self._graph.objects[step] for step in path[1:] if self._graph.objects[step] is not None]
        slot = self._slot(holder, chain[0] if chain else None)
        return walk(self._begin(holder, slot), chain) if chain else self._begin(holder, slot)

    def _begin(self, holder: RootHolder, slot: Slot) -> Trail:
        text = self._start(holder, slot)
        # which of the debugger's own attributes it is tells a user nothing
        source = text if holder.kind in ("debugger", "task") else ""
        return Trail(text, slot.code, source, verb=_verb(holder.kind))

    def _slot(self, holder: RootHolder, target: object) -> Slot:
        slots = [slot for slot in holder.slots if slot.target is target] or holder.slots
        return next((slot for slot in slots if slot.text.startswith("Out[")), slots[0])

    def _start(self, holder: RootHolder, slot: Slot) -> str:
        if holder.kind == "error":
            return f"the last error{self._error_words(holder)}"
        if holder.kind == "handling":
            return f"the exception being handled ({type_name(slot.target)})"
        if holder.kind == "unknown":
            return _unknown_words(slot.target)
        return slot.text

    def _error_words(self, holder: RootHolder) -> str:
        error = next((slot.target for slot in holder.slots if issubclass(type(slot.target), BaseException)), None)
        words = [] if error is None else [type_name(error)]
        cell = self.error_cell(holder)
        if cell is not None:
            words.append(f"cell {cell}")
        return f" ({', '.join(words)})" if words else ""

    def error_cell(self, holder: RootHolder) -> int | None:
        """Return the cell whose error a holder is, None where it is no error or from elsewhere."""
        for slot in holder.slots:
            trace = slot.target
            if issubclass(type(trace), BaseException):
                trace = BaseException.__dict__["__traceback__"].__get__(trace)
            if type_name(trace) == "traceback":
                return self._cells.of_traceback(trace)
        return None

    def only_traceback(self, holder: RootHolder, share: Share, end: int) -> str | None:
        """Return the code of the error on the way to ``end`` whose traceback alone keeps all of a share."""
        path = self._graph.path_to(end)
        error = next((step for step in path if issubclass(type(self._graph.objects[step]), BaseException)), None)
        if error is None:
            return None
        traceback = BaseException.__dict__["__traceback__"].__get__(self._graph.objects[error])
        seen, stack = {share.node}, [share.node]
        while stack:
            node = stack.pop()
            if node in self._graph.memory:
                return None
            for target in self._graph.successors[node]:
                is_cut = node == error and self._graph.objects[target] is traceback
                if target not in seen and not is_cut:
                    seen.add(target)
                    stack.append(target)
        return self.trail(holder, error).code

    def finalizer(self, share: Share) -> object:
        """Return the ``weakref.finalize`` whose registry is on the way to a share, None where none is."""
        objects = [self._graph.objects[step] for step in self._graph.path_to(share.node)]
        for above, item in itertools.pairwise(objects):
            if type_name(item) == "_Info" and type_module(item) == "weakref" and type(above) is dict:
                return next((key for key, value in above.items() if value is item), None)
        return None

    def handle(self, holder: RootHolder) -> str | None:
        """Return the code for a context variable, or the code that cancels a task."""
        if holder.kind == "task":
            release: str | None = holder.group[2]
            return release
        return self.code_of(holder.group[1]) if holder.kind == "context" else None

    def code_of(self, item: object) -> str | None:
        """Return the code for an object that the search met, None where no root leads to it by a path of its own."""
        node = self._graph.nodes.get(id(item))
        holder = None if node is None else self._graph.holders.get(self._graph.path_to(node)[0])
        if node is None or holder is None or holder.kind not in ("variable", "module"):
            return None
        return self.trail(holder, node).code

    def end(self, node: int) -> int:
        """Go on from what is let go to what it keeps, as long as there is one thing to name."""
        while True:
            item = self._graph.objects[node]
            if item is None and node not in self._graph.holders:
                return self._graph.dominator[node]
            if node in self._graph.memory or self.is_end(item):
                return node
            carriers = self._shares.carriers(node)
            if not carriers or (len(carriers) > 1 and self.is_collection(item)):
                return node
            if self._graph.objects[carriers[0]] is None:
                return node
            node = carriers[0]

    def is_end(self, item: object) -> bool:
        """Tell whether a path is best ended at an object: a tensor, a model, a graph node or a cache."""
        kind = type(item)
        ends = (self._torch._C.TensorBase, self._torch.nn.Module, self._torch.optim.Optimizer)
        return issubclass(kind, ends) or is_node_type(kind) or type_name(item) == "_lru_cache_wrapper"

    def is_collection(self, item: object) -> bool:
        """Tell whether an object is more than a step on the way, such as a frame or a closure."""
        transparent = (BaseException, *Suspended)
        words = ("traceback", "frame", "cell", "function", "NoneType", "Task", "Future", "Thread", "method")
        return not issubclass(type(item), transparent) and type_name(item) not in words

    def group(self, node: int, text: str) -> tuple[str, list[int]]:
        """Write a collection as ``losses[0..99]``; also return its members that hold memory."""
        item = self._graph.objects[node]
        if not issubclass(type(item), _CONTAINERS):
            return text, []
        direct = set(self._graph.successors[node])
        members = [child for child in self._shares.carriers(node) if child in direct]
        if len(members) < 2 or not issubclass(type(item), (list, tuple, deque)):
            return text, members
        wanted = {id(self._graph.objects[member]) for member in members}
        places = [place for place, value in enumerate(_plain_items(item)) if id(value) in wanted]
        return f"{text}[{places[0]}..{places[-1]}]", members

    def first_parameter(self, trail: Trail, node: int, share: Share) -> Trail:
        """Go on from an optimizer whose model is gone to the parameters it still has."""
        optimizer = self._graph.objects[node]
        if share.in_use or not issubclass(type(optimizer), self._torch.optim.Optimizer):
            return trail
        groups = plain_attribute(optimizer, "param_groups")
        if type(groups) is list and groups and type(groups[0]) is dict and groups[0].get("params"):
            return trail.then(".param_groups[0]['params'][0]")
        return trail

    def way(self, entry: int, node: int) -> str:
        """Return the words for reaching a node through one of the nodes that refer to it."""
        path = self._graph.path_to(entry)
        holder = self._graph.holders[path[0]]
        steps = [*path[1:], node]
        chain = [self._graph.objects[step] for step in steps if self._graph.objects[step] is not None]
        slot = self._slot(holder, chain[0] if chain else None)
        return str(walk(self._begin(holder, slot), chain))


def _verb(kind: Kind) -> str:
    if kind in ("error", "debugger"):
        return "kept by"
    return "in" if kind in ("handling", "unknown", "frame", "task") else "through"


def _unknown_words(target: object) -> str:
    name = type_name(target)
    if issubclass(type(target), Suspended):
        return f"the {name.replace('_', ' ')} {target.__name__}() of a running call"  # type: ignore[attr-defined]  # all three have it
    return f"a running call or C code ({name})"


def _plain_items(item: Any) -> Iterator[Any]:
    base = next(base for base in (list, tuple, deque) if issubclass(type(item), base))
    return iter(base.__iter__(item))
