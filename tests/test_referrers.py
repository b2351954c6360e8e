import gc
from itertools import count, pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpumem.cutting import Cutter
from jupyter_gpumem.dominators import immediate_dominators
from jupyter_gpumem.graph import LiveGraph
from jupyter_gpumem.heap import Clock, Heap, subclasses_of
from jupyter_gpumem.held import ROOT, HeldGraph, RootHolder, reach
from jupyter_gpumem.referrers import _recognised_paths
from jupyter_gpumem.roots import Slot
from jupyter_gpumem.shares import Shares
from jupyter_gpumem.tensors import Facts, LiveTensors


@st.composite
def held_graphs(draw: st.DrawFn) -> tuple[HeldGraph, LiveTensors]:
    """Make a graph of up to four holders and ten objects, some of which have memory."""
    graph = HeldGraph()
    live = LiveTensors("cuda", LiveGraph())
    holders, size = draw(st.integers(1, 4)), draw(st.integers(1, 10))
    for index in range(holders):
        node = graph.add()
        slot = Slot(None, ("variable", index), "variable", f"v{index}", f"v{index}")
        graph.holders[node] = RootHolder(node, "variable", slot.group, [slot])
        graph.successors[ROOT].append(node)
    nodes = [graph.add(object()) for _ in range(size)]
    for node in (*graph.holders, *nodes):
        graph.successors[node] = sorted(draw(st.sets(st.sampled_from(nodes), max_size=4)))
    for node in draw(st.sets(st.sampled_from(nodes), min_size=1)):
        key = (0, node)
        live.storages[key] = Facts(512 * node)
        graph.memory[node] = [(0, 512 * node, key)]
    graph.dominator = immediate_dominators(graph.successors, ROOT)
    graph.found_by = _recognised_paths(graph)
    return graph, live


def held_without(graph: HeldGraph, cut: frozenset[int]) -> int:
    starts = [node for node in graph.holders if node not in cut]
    kept = reach(graph.successors, starts)
    return sum(nbytes for node in kept for _device, nbytes, _key in graph.memory.get(node, ()))


@settings(max_examples=2000, deadline=None)
@given(held_graphs())
def test_what_each_share_keeps_is_what_cutting_its_holders_frees(made: tuple[HeldGraph, LiveTensors]) -> None:
    graph, live = made
    total = held_without(graph, frozenset())
    shares = Cutter(Shares(graph, live, torch), torch).all()
    assert sum(sum(share.own.values()) for share in shares) == total
    for share in shares:
        cut = frozenset(holder.node for holder in share.holders)
        assert total - held_without(graph, cut) == sum(share.keeps.values())
        # and no smaller set of holders gives back the memory that is the share's own
        for holder in cut:
            less = total - held_without(graph, cut - {holder})
            assert less < sum(share.keeps.values())


@settings(max_examples=500, deadline=None)
@given(held_graphs())
def test_paths_are_shortest_ones(made: tuple[HeldGraph, LiveTensors]) -> None:
    graph, _live = made
    distance = dict.fromkeys(graph.holders, 1)
    level = list(distance)
    for steps in count(2):
        level = list(dict.fromkeys(t for node in level for t in graph.successors[node] if t not in distance))
        distance.update(dict.fromkeys(level, steps))
        if not level:
            break
    for node in range(1, len(graph.objects)):
        assert (graph.found_by[node] >= 0) == (node in distance)
        if node in distance:
            path = graph.path_to(node)
            assert len(path) == distance[node]
            assert path[0] in graph.holders
            assert all(after in graph.successors[before] for before, after in pairwise(path))


class Target:
    pass


def cone_of(seed: object, stops: dict[int, Any]) -> dict[int, Any]:
    gc.disable()
    try:
        return Heap(Clock()).cone([seed], {}, stops)[0]
    finally:
        gc.enable()


def test_the_search_backwards_finds_every_holder_and_ends_at_the_stops() -> None:
    target = Target()
    inner = [target]
    holders: list[Any] = [{"a": inner}, (1, inner), {2: {3: inner}}]
    outer = {"holders": holders}
    found = cone_of(target, {id(outer): outer})
    for held in (target, inner, holders, *holders, holders[2][2]):
        assert found[id(held)] is held
    assert id(outer) not in found


def test_a_chain_longer_than_any_number_of_passes_is_followed() -> None:
    target = Target()
    links: list[Any] = [[target]]
    for _ in range(300):
        links.append([links[-1]])
    found = cone_of(target, {id(links): links})
    assert all(id(link) in found for link in links)


def test_objects_are_found_by_their_exact_types() -> None:
    targets = [Target() for _ in range(1000)]
    heap = Heap(Clock())
    assert set(map(id, targets)) <= set(map(id, heap.of_kinds(subclasses_of(Target))))
    assert all(type(item) is Target for item in heap.of_kinds({id(Target): Target}))
