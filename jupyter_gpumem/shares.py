"""Which part of the memory stands or falls with whom: the held graph, cut into pieces a user can let go of."""

import gc
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.held import ROOT, HeldGraph, RootHolder
from jupyter_gpumem.tensors import Key, LiveTensors

if TYPE_CHECKING:
    from jupyter_gpumem.hooks import HookGroup

_IN_USE_ROLES = frozenset({"parameter", "buffer", "gradient", "optimizer state"})


@dataclass(slots=True)
class Share:
    """One piece of memory and who keeps it; sizes in bytes, by device.

    ``node`` is what keeps it alone; where it takes several holders to let go, ``node`` is the first thing that
    all of their paths come to and ``holders`` has them all. ``nodes`` are all such things, where several have
    the same holders. ``own`` is what no other share counts, ``keeps`` what comes back when the holders go.
    """

    node: int
    holders: tuple[RootHolder, ...]
    own: dict[int, int]
    keeps: dict[int, int]
    count: dict[int, int]
    nodes: list[int] = field(default_factory=list)
    in_use: bool = False
    garbage: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    """What lets go of it within ``node``, where that is a namespace with several models."""
    inner: bool = False
    """Whether one reference inside of the holders can be cut instead of all of them."""
    hooks: "HookGroup | None" = None
    """The hooks of one line of code under ``node``, a model, where it is these that keep it."""


class Shares:
    """The memory of a held graph, shared out among holders. Holds its objects: drop it before reporting."""

    def __init__(self, graph: HeldGraph, live: LiveTensors, torch: ModuleType) -> None:
        self.graph = graph
        self.live = live
        self._torch = torch
        self.children = graph.dominated()
        self._order = self._top_down()
        self.devices = sorted({device for pieces in graph.memory.values() for device, _nbytes, _key in pieces})
        self.under: dict[int, list[int]] = {}
        """Bytes that each node dominates, by device."""
        self.used: dict[int, list[int]] = {}
        """Of these, what models and optimizers work with."""
        self.count: dict[int, list[int]] = {}
        for device in self.devices:
            self._add_up(device)
        self._first, self._last = self._intervals()
        self._into: list[list[int]] | None = None
        self._sources = self._count_sources()
        self._top = self._tops()
        self.sharing = self._who_shares()

    def _top_down(self) -> list[int]:
        order = [ROOT]
        for node in order:
            order.extend(self.children[node])
        return order

    def _add_up(self, device: int) -> None:
        size = len(self.graph.objects)
        under, used, count = [0] * size, [0] * size, [0] * size
        for node, pieces in self.graph.memory.items():
            for where, nbytes, key in pieces:
                if where == device:
                    under[node] += nbytes
                    count[node] += 1
                    if self.live.storages[key].role in _IN_USE_ROLES:
                        used[node] += nbytes
        above = self.graph.dominator
        for node in reversed(self._order):
            if node != ROOT and under[node]:
                under[above[node]] += under[node]
                used[above[node]] += used[node]
                count[above[node]] += count[node]
        self.under[device], self.used[device], self.count[device] = under, used, count

    def total(self, node: int) -> int:
        """Return the bytes a node dominates on all devices."""
        return sum(self.under[device][node] for device in self.devices)

    def in_use_total(self, node: int) -> int:
        """Return the bytes of models and optimizers that a node dominates on all devices."""
        return sum(self.used[device][node] for device in self.devices)

    def _tops(self) -> list[int]:
        top = [-1] * len(self.graph.objects)
        for node in self._order:
            above = self.graph.dominator[node]
            top[node] = node if above == ROOT else top[above]
        return top

    def carriers(self, node: int) -> list[int]:
        """Return the nodes right under a node that have memory, the largest first."""
        found = [child for child in self.children[node] if self.total(child)]
        return sorted(found, key=lambda child: -self.total(child))

    def _who_shares(self) -> dict[int, frozenset[int]]:
        """Return the holders at the roots from which each node that no single holder keeps can be reached."""
        together = {node for node in self.children[ROOT] if node not in self.graph.holders and self.total(node)}
        into = self.entries(node for node in self.children[ROOT] if node not in self.graph.holders)
        holders: dict[int, frozenset[int]] = dict.fromkeys(into, frozenset())
        changed = True
        while changed:
            changed = False
            for node, sources in into.items():
                found = holders[node]
                for source in sources:
                    top = self._top[source]
                    found |= holders.get(top) or frozenset({top} if top in self.graph.holders else ())
                if len(found) != len(holders[node]):
                    holders[node] = found
                    changed = True
        return {node: found for node, found in holders.items() if node in together}

    def entries(self, nodes: Iterable[int]) -> dict[int, list[int]]:
        """Return, for some nodes, the reachable nodes that refer to them."""
        into: dict[int, list[int]] = {node: [] for node in nodes}
        if into:
            for source in self._order:
                for target in self.graph.successors[source]:
                    if target in into and source != ROOT:
                        into[target].append(source)
        return into

    def referred_once(self, node: int) -> set[int]:
        """Return what goes when one reference from a node goes: nothing else refers to it but what it keeps itself."""
        direct = Counter(map(id, gc.get_referents(self.graph.objects[node])))
        return {
            child
            for child in self.graph.successors[node]
            if self._sources[child] == 1 and direct[id(self.graph.objects[child])] == 1
        }

    def _count_sources(self) -> list[int]:
        """Count for each node those that refer to it and would stay without it."""
        sources = [0] * len(self.graph.objects)
        for source in self._order:
            for target in set(self.graph.successors[source]):
                if not self.is_under(source, target):
                    sources[target] += 1
        return sources

    def is_under(self, node: int, above: int) -> bool:
        """Tell whether a node is another one or goes with it."""
        return self._first[above] <= self._first[node] <= self._last[above]

    def outer_sources(self, node: int) -> list[int]:
        """Return what refers to a node and would stay without it."""
        sources = self.all_sources()[node]
        return [source for source in sources if self._is_reached(source) and not self.is_under(source, node)]

    def needs_collector(self, nodes: Collection[int]) -> bool:
        """Tell whether it takes the collector to free all memory under nodes that have lost their references."""
        into = self.all_sources()
        freed = [
            node
            for node in nodes
            if not any(self.is_under(source, node) or not self._is_reached(source) for source in into[node])
        ]
        if len(freed) < len(nodes) or any(issubclass(type(self.graph.objects[node]), type) for node in freed):
            return True
        left: dict[int, int] = {}
        for node in freed:
            for target in dict.fromkeys(self.graph.successors[node]):
                if target in nodes:
                    continue
                left[target] = left.get(target, len(into[target])) - 1
                if not left[target]:
                    freed.append(target)
        return sum(map(self._own_total, freed)) < sum(map(self.total, nodes))

    def _own_total(self, node: int) -> int:
        return sum(nbytes for _device, nbytes, _key in self.graph.memory.get(node, ()))

    def _is_reached(self, node: int) -> bool:
        """Tell whether anything alive leads to a node: garbage too refers to what is alive, until it is collected."""
        return self.graph.dominator[node] >= 0

    def all_sources(self) -> list[list[int]]:
        """Return for each node those that refer to it, but for the root of roots."""
        if self._into is None:
            self._into = [[] for _ in self.graph.objects]
            unreached = (node for node, above in enumerate(self.graph.dominator) if above < 0)
            for source in itertools.chain(self._order, unreached):
                for target in dict.fromkeys(self.graph.successors[source]) if source != ROOT else ():
                    self._into[target].append(source)
        return self._into

    def _intervals(self) -> tuple[list[int], list[int]]:
        """Return numbers such that what a node dominates lies between its first and its last one."""
        size = [1] * len(self.graph.objects)
        for node in reversed(self._order):
            if node != ROOT:
                size[self.graph.dominator[node]] += size[node]
        first = [0] * len(self.graph.objects)
        for node in self._order:
            place = first[node] + 1
            for child in self.children[node]:
                first[child] = place
                place += size[child]
        return first, [start + count - 1 for start, count in zip(first, size, strict=True)]

    def pieces(self, share: Share) -> Iterator[tuple[int, int, Key]]:
        """Give device, bytes and storage of everything that falls with a share's nodes."""
        stack = list(share.garbage or share.nodes or (share.node,))
        while stack:
            node = stack.pop()
            yield from self.graph.memory.get(node, ())
            if not share.garbage:
                stack.extend(self.children[node])

    def keeps(self, holders: Iterable[int]) -> dict[int, int]:
        """Return the bytes by device that come back when all of some holders let go."""
        wanted = frozenset(holders)
        return {
            device: sum(self.under[device][holder] for holder in wanted)
            + sum(self.under[device][node] for node, others in self.sharing.items() if others <= wanted)
            for device in self.devices
        }

    def share(self, node: int, holders: tuple[RootHolder, ...], less: Iterable[Share] = ()) -> Share:
        """Return what a node keeps, less some shares of it, as the share of some holders."""
        share = self.share_of([node], holders, less)
        share.nodes = []
        return share

    def share_of(self, nodes: list[int], holders: tuple[RootHolder, ...], less: Iterable[Share] = ()) -> Share:
        """Return what several nodes keep, none of them under another, less some shares of it."""
        own, count = dict.fromkeys(self.devices, 0), dict.fromkeys(self.devices, 0)
        less = list(less)
        for device in self.devices:
            own[device] = sum(self.under[device][node] for node in nodes) - sum(share.own[device] for share in less)
            count[device] = sum(self.count[device][node] for node in nodes) - sum(share.count[device] for share in less)
        return Share(nodes[0], holders, own, dict(own), count, nodes)

    def is_model(self, item: Any) -> bool:
        """Tell whether an object is a module or an optimizer."""
        return issubclass(type(item), (self._torch.nn.Module, self._torch.optim.Optimizer))
