"""What no root reaches: garbage, and what C code or a running call holds."""

import gc
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jupyter_gpumem.device import torch_module
from jupyter_gpumem.graph import is_node_type
from jupyter_gpumem.heap import type_namespace
from jupyter_gpumem.held import ROOT, HeldGraph, RootHolder, reach
from jupyter_gpumem.roots import Slot
from jupyter_gpumem.tensors import LiveTensors
from jupyter_gpumem.untracked import is_array

_CHUNK = 256


def add_unreached(graph: HeldGraph, live: LiveTensors) -> None:
    """Give what no root reaches a holder of its own, and what nothing at all holds a place among the garbage."""
    reached = reach(graph.successors, [ROOT])
    unreached = [node for node in graph.nodes.values() if node not in reached]
    if not unreached:
        return
    starts = _fewest(graph, _held_from_outside(graph, live, unreached), reached)
    for node in starts:
        target = graph.objects[node]
        holder = RootHolder(graph.add(), "unknown", ("unknown", id(target)), [])
        holder.slots.append(Slot(target, holder.group, "unknown", "", None))
        graph.holders[holder.node] = holder
        graph.successors[ROOT].append(holder.node)
        graph.successors[holder.node] = [node]
    reached |= reach(graph.successors, starts)
    graph.garbage = _components(graph, reached)


def is_held_unseen(graph: HeldGraph, live: LiveTensors) -> bool:
    """Tell whether some tensor has more references than were found, or something is held by nobody known."""
    if any(holder.kind == "unknown" for holder in graph.holders.values()):
        return True
    addresses = {address for address in live.graph.tensors if address in graph.nodes}
    python, native = _known_references(graph, live, addresses, graph.nodes)
    for holder in graph.holders.values():
        for slot in holder.slots:
            if id(slot.target) in python:
                python[id(slot.target)] += 2  # the slot's own and the one it tells of
    return bool(_with_more(graph, live, map(graph.nodes.__getitem__, addresses), python, native, lists=2))


def _fewest(graph: HeldGraph, outside: Sequence[int], known: set[int]) -> list[int]:
    """Leave out what another one reaches anyhow, and what leads to no memory but known one."""
    starts: dict[int, None] = {}
    reached: set[int] = set()
    for node in outside:
        if node in reached:
            continue
        reached.add(node)
        stack, has_memory = [node], False
        while stack:
            step = stack.pop()
            has_memory = has_memory or step in graph.memory
            for target in graph.successors[step]:
                if target in starts and target != node:
                    del starts[target]
                    has_memory = True
                if target not in reached and target not in known:
                    reached.add(target)
                    stack.append(target)
        if has_memory:
            starts[node] = None
    return list(starts)


def _components(graph: HeldGraph, reached: set[int]) -> list[list[int]]:
    """Return the connected parts of what is not reached, those with memory only."""
    rest = [node for node in range(1, len(graph.objects)) if node not in reached and node not in graph.holders]
    neighbours: dict[int, list[int]] = {node: [] for node in rest}
    for node in rest:
        for target in graph.successors[node]:
            if target in neighbours:
                neighbours[node].append(target)
                neighbours[target].append(node)
    components = []
    seen: set[int] = set()
    for node in rest:
        if node not in seen:
            part = [node]
            seen.add(node)
            for member in part:
                new = [other for other in neighbours[member] if other not in seen]
                seen.update(new)
                part.extend(dict.fromkeys(new))
            components.append(part)
    return [part for part in components if any(member in graph.memory for member in part)]


def _held_from_outside(graph: HeldGraph, live: LiveTensors, unreached: Sequence[int]) -> list[int]:
    """Return the nodes with more references than Python objects and this scan account for."""
    addresses = {id(graph.objects[node]) for node in unreached}
    python, native = _known_references(graph, live, addresses, addresses)
    # the heap's list, the cone and the graph's list
    return _with_more(graph, live, unreached, python, native, lists=3)


def _with_more(
    graph: HeldGraph,
    live: LiveTensors,
    nodes: Iterable[int],
    python: Mapping[int, int],
    native: Mapping[int, int],
    *,
    lists: int,
) -> list[int]:
    """Return the nodes with more references than those counted and those of so many lists of this scan."""
    users = _Users(live)
    outside = []
    for node in nodes:
        item = graph.objects[node]
        # the name `item` and the call's own argument
        extra = sys.getrefcount(item) - 2 - lists - python[id(item)]
        known = native.get(id(item), 0)
        if extra > 0 and known and is_node_type(type(item)):
            extra -= 1  # a node of a graph may keep its own Python object; who keeps the node is known
        extra = _correct(extra, users.of(item), known)
        if extra > 0:
            outside.append(node)
        del item
    return outside


class _Users:
    """Counts the C++ users of tensors and storages, their Python object not among them."""

    def __init__(self, live: LiveTensors) -> None:
        self._live = live
        self._torch = torch_module()

    def of(self, item: Any) -> int:
        """Return how many C++ owners an object has besides its Python object; 0 for what is no tensor."""
        torch = self._torch
        if torch is None:
            return 0
        if id(item) in self._live.graph.tensors:
            return int(type_namespace(torch._C.TensorBase)["_use_count"](item)) - 1
        if issubclass(type(item), torch._C.StorageBase) and hasattr(torch._C, "_storage_Use_Count"):
            return int(torch._C._storage_Use_Count(item._cdata)) - 1
        return 0


def _correct(extra: int, native: int, known_native: int) -> int:
    """Count C++ users that are not known as one reference each; their own one to the Python object as none."""
    if native > 0 and extra > 0:
        extra -= 1
    return extra + max(0, native - known_native)


def _known_references(
    graph: HeldGraph, live: LiveTensors, addresses: Collection[int], sources: Iterable[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Count references to some objects: by some others and by the lists of this scan; by C++ links."""
    python = dict.fromkeys(addresses, 0)
    native: dict[int, int] = {}
    items = [graph.objects[graph.nodes[address]] for address in sources]
    for start in range(0, len(items), _CHUNK):
        for held in gc.get_referents(*items[start : start + _CHUNK]):
            if id(held) in python:
                python[id(held)] += 1
    for item in items:
        links = live.graph.links.get(id(item), ())
        counts = python if links and is_array(item) else native
        for held, _how in links:
            if id(held) in python:
                counts[id(held)] = counts.get(id(held), 0) + 1
    for held in _kept_by_scan(live):
        if id(held) in python:
            python[id(held)] += 1
    return python, native


def _kept_by_scan(live: LiveTensors) -> Iterable[Any]:
    """Give each object once for every reference that the lists of tensors, modules and links have to it."""
    yield from live.graph.objects.values()
    yield from live.graph.tensors.values()
    yield from live.graph.made
    yield from live.modules
    yield from live.optimizers
    for links in live.graph.links.values():
        for child, _how in links:
            yield child
