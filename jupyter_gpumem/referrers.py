"""Who refers to the memory: the graph from roots to storages, and what each of its nodes alone keeps."""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jupyter_gpumem.blocks import Block, BlockFinder
from jupyter_gpumem.device import torch_module
from jupyter_gpumem.dominators import immediate_dominators
from jupyter_gpumem.heap import Clock, Heap
from jupyter_gpumem.held import ROOT, HeldGraph, RootHolder
from jupyter_gpumem.roots import Roots, Slot
from jupyter_gpumem.tensors import Key, LiveTensors
from jupyter_gpumem.unreached import add_unreached, is_held_unseen
from jupyter_gpumem.untracked import add_untracked


def held_graph(heap: Heap, live: LiveTensors, roots: Roots, blocks: Sequence[Block], clock: Clock) -> HeldGraph:
    """Search backwards from all memory to the roots, then work out who alone keeps what."""
    heap.add(live.graph.made)
    graph = _graph(heap, live, roots, blocks, clock)
    torch = torch_module()
    while torch is not None and is_held_unseen(graph, live) and add_untracked(live.graph, heap, torch, graph.nodes):
        del graph  # its references would be counted
        graph = _graph(heap, live, roots, blocks, clock)
    graph.dominator = immediate_dominators(graph.successors, ROOT)
    graph.found_by = _recognised_paths(graph)
    return graph


def _graph(heap: Heap, live: LiveTensors, roots: Roots, blocks: Sequence[Block], clock: Clock) -> HeldGraph:
    cone, met, plain = _cone(heap, live, roots)
    clock.check("references")
    graph = HeldGraph()
    _add_holders(graph, roots.slots(cone, met))
    _add_objects(graph, cone)
    _add_references(graph, cone, live, plain)
    _add_memory(graph, live, blocks)
    clock.check("what each keeps")
    add_unreached(graph, live)
    return graph


def _cone(heap: Heap, live: LiveTensors, roots: Roots) -> tuple[dict[int, Any], set[int], set[int]]:
    """Return what leads to memory, the roots' containers that were met, and the addresses of plain classes.

    Also found is what leads to whatever lets memory go: finalizers and context variables. A class that goes by no
    name is let go by what refers to it: its instances, a class it is defined in, a variable.
    """
    parents = live.graph.parents()
    cone, met = heap.cone(map(live.graph.objects.__getitem__, live.keys), parents, roots.stops)
    handles = roots.handles(cone)
    if handles:
        more, also_met = heap.cone(handles, parents, roots.stops)
        cone.update(more)
        met |= also_met
    plain: set[int] = set()
    while True:
        found = [kind for kind in roots.plain_classes(cone) if id(kind) not in plain]
        if not found:
            break
        plain.update(map(id, found))
        above, also_met = heap.cone(found, parents, roots.stops, plain)
        cone.update(above)
        met |= also_met
    # references are counted soon: no frame that somebody looked at may hold any of these
    parents.clear()
    return cone, met, plain


def _add_holders(graph: HeldGraph, slots: Iterable[Slot]) -> None:
    groups: dict[tuple[Any, ...], RootHolder] = {}
    for slot in slots:
        holder = groups.get(slot.group)
        if holder is None:
            node = graph.add()
            holder = groups[slot.group] = graph.holders[node] = RootHolder(node, slot.kind, slot.group, [])
            graph.successors[ROOT].append(node)
        holder.slots.append(slot)


def _add_objects(graph: HeldGraph, cone: Mapping[int, Any]) -> None:
    # no name of the caller's may be left on an object: references are counted later
    for address, item in cone.items():
        graph.nodes[address] = graph.add(item)
    for holder in graph.holders.values():
        targets = {graph.nodes[id(slot.target)] for slot in holder.slots}
        graph.successors[holder.node] = sorted(targets)


def _add_references(graph: HeldGraph, cone: Mapping[int, Any], live: LiveTensors, plain: set[int]) -> None:
    nodes, links = graph.nodes, live.graph.links
    for address, item in cone.items():
        # classes with a name are roots: what refers to one is not asked to let go of what the class has
        targets = dict.fromkeys(
            nodes[id(held)]
            for held in gc.get_referents(item)
            if id(held) in nodes and (not issubclass(type(held), type) or id(held) in plain)
        )
        for held, _how in links.get(address, ()):
            if id(held) in nodes:
                targets[nodes[id(held)]] = None
        graph.successors[nodes[address]] = list(targets)


def _add_memory(graph: HeldGraph, live: LiveTensors, blocks: Sequence[Block]) -> None:
    """Hang each piece of memory on the tensor that has it, or on a node of its own where several have it.

    Storages that lie in one block of the allocator are one piece: the block goes when the last of them does.
    """
    finder = BlockFinder(blocks)
    owners: dict[tuple[int, int], set[int]] = {}
    pieces: dict[tuple[int, int], tuple[int, int, Key]] = {}
    for address, keys in live.keys.items():
        node = graph.nodes.get(address)
        if node is None:
            continue
        for key in keys:
            block = finder.find(key)
            piece = key if block is None else (block.device, block.address)
            nbytes = live.storages[key].nbytes if block is None else block.size_bytes
            owners.setdefault(piece, set()).add(node)
            pieces[piece] = (key[0], nbytes, key)
    for piece, owner in owners.items():
        if len(owner) == 1:
            (node,) = owner
        else:
            node = graph.add()
            for holder in owner:
                graph.successors[holder].append(node)
        graph.memory.setdefault(node, []).append(pieces[piece])


# how many steps longer a path from elsewhere may be before a user would rather read this one
_DETOUR = {"module": 4, "class": 2, "context": 2, "ipython": 6, "frame": 2, "unknown": 8}


def _recognised_paths(graph: HeldGraph) -> list[int]:
    """Return the node before each on the path to it that a user would recognise: a short one, from near at hand."""
    found_by = [-1] * len(graph.objects)
    waiting: dict[int, list[int]] = {}
    # a variable rather than an output, of two paths of one length
    for node, holder in sorted(graph.holders.items(), key=lambda item: item[1].kind == "output"):
        waiting.setdefault(_DETOUR.get(holder.kind, 0), []).append(node)
    level: list[tuple[int, int]] = []
    distance = 0
    while level or waiting:
        level += [(node, ROOT) for node in waiting.pop(distance, ())]
        following: list[tuple[int, int]] = []
        for node, source in level:
            if found_by[node] < 0:
                found_by[node] = source
                following += [(target, node) for target in graph.successors[node] if found_by[target] < 0]
        level = following
        distance += 1
    return found_by
