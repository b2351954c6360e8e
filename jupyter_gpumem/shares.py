"""Which part of the memory stands or falls with whom: the held graph, cut into pieces a user can let go of."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from jupyter_gpumem.attributes import type_name
from jupyter_gpumem.graph import is_node_type
from jupyter_gpumem.heap import is_exactly, is_made_by_class, type_namespace
from jupyter_gpumem.held import ROOT, HeldGraph, RootHolder
from jupyter_gpumem.tensors import Key, LiveTensors

_PLAIN = (dict, list, tuple, set, frozenset, deque)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_EASY = ("variable", "output", "error", "debugger")
"""Holders that let go by themselves without harm to anything else."""
_MOST_PARTS = 8
"""A namespace with more members that hold memory is one line, not one line each."""
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

    def all(self) -> list[Share]:
        """Share out all memory: every piece is the own memory of exactly one share."""
        found: list[Share] = []
        for node in self.children[ROOT]:
            if self.total(node) and node in self.graph.holders:
                found += self._of_holder(self.graph.holders[node])
        found += self._together()
        at_work = [share for share in found if share.in_use]
        found = [share for share in found if not share.in_use]
        found += self._clusters(at_work)
        found += self._garbage()
        return found

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

    def _clusters(self, shares: list[Share]) -> Iterator[Share]:
        """Join the models and optimizers that share memory: only together do they give it back."""
        clusters: list[list[Share]] = []
        for share in shares:
            mine = {holder.node for holder in share.holders}
            touching = [group for group in clusters if any(mine & _holder_nodes(other) for other in group)]
            clusters = [group for group in clusters if group not in touching]
            clusters.append([share, *(other for group in touching for other in group)])
        for group in clusters:
            yield self._joined(group)

    def _joined(self, group: list[Share]) -> Share:
        in_use = any(self._has_module(share) for share in group)
        if len(group) == 1:
            group[0].in_use = in_use
            return group[0]
        nodes = [node for share in group for node in (share.nodes or [share.node])]
        holders = {holder.node: holder for share in group for holder in share.holders}
        own = {device: sum(share.own[device] for share in group) for device in self.devices}
        count = {device: sum(share.count[device] for share in group) for device in self.devices}
        owners = tuple(holders[node] for node in sorted(holders))
        keeps = self.keeps(holders) if len(owners) > 1 else own
        return Share(nodes[0], owners, own, keeps, count, nodes, in_use)

    def _has_module(self, share: Share) -> bool:
        """Tell whether a module is among what a share keeps or on the way to it."""
        base = self._torch.nn.Module
        nodes = share.nodes or share.members or [share.node]
        return any(issubclass(type(self.graph.objects[node]), base) for node in nodes) or (
            len(share.holders) > 1 and self._through_module(nodes[0])
        )

    def _share(self, node: int, holders: tuple[RootHolder, ...], less: Iterable[Share] = ()) -> Share:
        less = list(less)
        own = {device: self.under[device][node] - sum(share.own[device] for share in less) for device in self.devices}
        count = {
            device: self.count[device][node] - sum(share.count[device] for share in less) for device in self.devices
        }
        return Share(node, holders, own, dict(own), count)

    def _of_holder(self, holder: RootHolder) -> Iterator[Share]:
        targets = self.graph.successors[holder.node]
        if len(targets) == 1 and holder.kind in ("variable", "module", "ipython", "class"):
            yield from self._split(targets[0] if self._dominates(holder.node, targets[0]) else holder.node, holder)
        else:
            yield self._share(holder.node, (holder,))

    def _dominates(self, holder: int, target: int) -> bool:
        return self.graph.dominator[target] == holder and self.total(target) == self.total(holder)

    def _split(self, node: int, holder: RootHolder) -> Iterator[Share]:
        """Cut what a variable holds into the members that can be let go one by one."""
        item = self.graph.objects[node]
        if self.is_model(item):
            yield from self._split_model(node, holder)
            return
        if issubclass(type(item), self._torch._C.TensorBase):
            yield from self._split_tensor(node, holder)
            return
        members = self._class_members(node) or self._members(node)
        if not members or node in self.graph.memory:
            yield self._share(node, (holder,))
        elif len(members) == 1 and self.total(members[0]) == self.total(node):
            yield from self._split(members[0], holder)
        elif len(members) <= _MOST_PARTS and self._is_namespace(node):
            parts = [share for member in members for share in self._split(member, holder)]
            models = self._models_in(node)
            if models:
                yield from self._at_work(node, holder, parts, models)
                return
            yield from parts
            rest = self._share(node, (holder,), parts)
            if any(rest.own.values()):
                yield rest
        else:
            yield self._share(node, (holder,))

    def _models_in(self, node: int) -> list[int]:
        """Return the modules and optimizers among the attributes or values of a namespace, if it has several."""
        spaces = [node, *(child for child in self.graph.successors[node] if self._is_attributes(node, child))]
        found = {
            child: None
            for space in spaces
            for child in self.graph.successors[space]
            if self.is_model(self.graph.objects[child])
        }
        return list(found) if len(found) > 1 else []

    def _is_attributes(self, node: int, child: int) -> bool:
        return not is_exactly(self.graph.objects[node], _PLAIN) and type(self.graph.objects[child]) is dict

    def _at_work(self, node: int, holder: RootHolder, parts: list[Share], models: list[int]) -> Iterator[Share]:
        """Join the models and optimizers of one namespace, which share memory, apart from all else in it."""
        others = [share for share in parts if share.node not in models]
        yield from others
        rest = self._share(node, (holder,), others)
        rest.members, rest.in_use = models, True
        if any(rest.own.values()):
            yield rest

    def _members(self, node: int) -> list[int]:
        """Return the members of a plain container or instance that hold memory and that it refers to itself."""
        item = self.graph.objects[node]
        # what lies in a tuple, a set or a dict's keys cannot be taken out by itself
        if not self._is_plain(item) or issubclass(type(item), (tuple, set, frozenset)):
            return []
        direct = set(self.graph.successors[node])
        members = [child for child in self.carriers(node) if child in direct]
        if issubclass(type(item), dict):
            values = set(map(id, dict.values(item)))
            if any(id(self.graph.objects[child]) not in values for child in members):
                return []
        # an instance's attributes may lie in a dict of their own
        if len(members) == 1 and not is_exactly(item, _PLAIN) and type(self.graph.objects[members[0]]) is dict:
            return self._members(members[0])
        return members

    def _is_namespace(self, node: int) -> bool:
        item = self.graph.objects[node]
        if issubclass(type(item), dict):
            return all(type(key) is str for key in list(dict.keys(item))[: _MOST_PARTS * 8])
        return not is_exactly(item, _PLAIN)

    def _is_plain(self, item: Any) -> bool:
        kind = type(item)
        if issubclass(kind, _PLAIN) or kind is type(None):
            return item is not None
        if issubclass(kind, (type, BaseException, self._torch._C.TensorBase)) or is_node_type(kind):
            return False
        return is_made_by_class(kind) and not self.is_model(item) and not _has_frame(item)

    def is_model(self, item: Any) -> bool:
        """Tell whether an object is a module or an optimizer."""
        return issubclass(type(item), (self._torch.nn.Module, self._torch.optim.Optimizer))

    def _split_model(self, node: int, holder: RootHolder) -> Iterator[Share]:
        """Part what a model keeps besides its parameters and buffers from the model."""
        extras: list[Share] = []
        stack = [node] if issubclass(type(self.graph.objects[node]), self._torch.nn.Module) else []
        while stack:
            for child in self.carriers(stack.pop()):
                if self.in_use_total(child):
                    stack.append(child)
                elif self._is_extra(child):
                    extras.append(self._share(self._narrow(child), (holder,)))
        yield from extras
        rest = self._share(node, (holder,), extras)
        rest.keeps = {device: self.under[device][node] for device in self.devices}
        rest.in_use = True
        if any(rest.own.values()):
            yield rest

    def _split_tensor(self, node: int, holder: RootHolder) -> Iterator[Share]:
        """Part what the hooks of a tensor keep from the tensor."""
        fields = type_namespace(self._torch._C.TensorBase)
        tables = [fields[name].__get__(self.graph.objects[node]) for name in _TENSOR_HOOKS if name in fields]
        known = {id(table) for table in tables if table is not None}
        hooks = [child for child in self.carriers(node) if id(self.graph.objects[child]) in known]
        extras = [self._share(self._narrow(child), (holder,)) for child in hooks]
        yield from extras
        rest = self._share(node, (holder,), extras)
        rest.keeps = {device: self.under[device][node] for device in self.devices}
        if any(rest.own.values()):
            yield rest

    def _is_extra(self, node: int) -> bool:
        """Tell whether something under a model is more than a tensor it has as an attribute."""
        item = self.graph.objects[node]
        if not issubclass(type(item), self._torch._C.TensorBase):
            return True
        return any(is_node_type(type(self.graph.objects[child])) for child in self.carriers(node))

    def _narrow(self, node: int) -> int:
        """Go on to the only member that has memory, as long as there is just one."""
        while True:
            members = self._members(node)
            if len(members) != 1 or self.total(members[0]) != self.total(node):
                return node
            node = members[0]

    def _together(self) -> Iterator[Share]:
        """Give what several holders keep together, one share for each set of holders."""
        sets: dict[frozenset[int], list[int]] = {}
        for node, holders in self.sharing.items():
            sets.setdefault(holders, []).append(node)
        for holders, nodes in sets.items():
            owners = tuple(self.graph.holders[holder] for holder in sorted(holders))
            share = self._share(nodes[0], owners)
            for node in nodes[1:]:
                for device in self.devices:
                    share.own[device] += self.under[device][node]
                    share.count[device] += self.count[device][node]
            share.nodes = nodes
            share.keeps = self.keeps(holders)
            used = sum(self.in_use_total(node) for node in nodes)
            share.in_use = used * 2 > sum(share.own.values())
            if len(nodes) == 1 and not share.in_use and not all(owner.kind in _EASY for owner in owners):
                cut = self._inner_cut(nodes[0])
                if cut is not None:
                    share.node, share.inner, share.keeps = cut, True, dict(share.own)
            yield share

    def _inner_cut(self, node: int) -> int | None:
        """Find one reference to cut below the thing that many share, an item rather than an attribute."""
        found: int | None = None
        from_item = False
        while True:
            members = self._members(node)
            if len(members) != 1 or self.total(members[0]) != self.total(node):
                return found
            is_item = issubclass(type(self.graph.objects[node]), (list, dict, deque))
            if is_item or not from_item:
                found, from_item = members[0], is_item
            node = members[0]

    def _class_members(self, node: int) -> list[int]:
        """Return the attributes of a class that hold memory."""
        if not issubclass(type(self.graph.objects[node]), type):
            return []
        spaces = [child for child in self.carriers(node) if type(self.graph.objects[child]) is dict]
        return [member for space in spaces for member in self.carriers(space)]

    def _through_module(self, node: int) -> bool:
        """Tell whether one of the ways to a node leads through a module."""
        return any(
            issubclass(type(self.graph.objects[step]), self._torch.nn.Module)
            for source in self.entries([node])[node]
            for step in self.graph.path_to(source)
        )

    def _garbage(self) -> Iterator[Share]:
        for members in self.graph.garbage:
            share = Share(members[0], (), {}, {}, {}, garbage=members)
            for device in self.devices:
                pieces = [
                    nbytes
                    for member in members
                    for where, nbytes, _key in self.graph.memory.get(member, ())
                    if where == device
                ]
                share.own[device] = share.keeps[device] = sum(pieces)
                share.count[device] = len(pieces)
            yield share


def _holder_nodes(share: Share) -> set[int]:
    return {holder.node for holder in share.holders}


def _has_frame(item: object) -> bool:
    return type_name(item) in ("Task", "Thread", "Future")
