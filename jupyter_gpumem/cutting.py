"""Cutting the held graph into the pieces a user can let go of one by one."""

from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from jupyter_gpumem.attributes import is_guarded, type_name
from jupyter_gpumem.graph import is_node_type
from jupyter_gpumem.heap import is_exactly, is_made_by_class, type_namespace
from jupyter_gpumem.held import ROOT, RootHolder
from jupyter_gpumem.shares import Share, Shares

_PLAIN = (dict, list, tuple, set, frozenset, deque)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_EASY = ("variable", "output", "error", "debugger", "context")
"""Holders that let go by themselves without harm to anything else."""
_MOST_PARTS = 8
"""A namespace with more members that hold memory is one line, not one line each."""
_DEEPEST = 4
"""Namespaces within namespaces, as far as a report tells their members apart."""
_MOST_STEPS = 40


class Cutter:
    """Shares out the memory of a held graph. Holds its objects: drop it before reporting."""

    def __init__(self, shares: Shares, torch: ModuleType) -> None:
        self._shares = shares
        self._torch = torch

    def all(self) -> list[Share]:
        """Share out all memory: every piece is the own memory of exactly one share."""
        found: list[Share] = []
        for node in self._shares.children[ROOT]:
            if self._shares.total(node) and node in self._shares.graph.holders:
                found += self._of_holder(self._shares.graph.holders[node])
        found += self._together()
        at_work = [share for share in found if share.in_use]
        found = [share for share in found if not share.in_use]
        found += self._clusters(at_work)
        found += self._garbage()
        return found

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
        own = {device: sum(share.own[device] for share in group) for device in self._shares.devices}
        count = {device: sum(share.count[device] for share in group) for device in self._shares.devices}
        owners = tuple(holders[node] for node in sorted(holders))
        keeps = self._shares.keeps(holders) if len(owners) > 1 else own
        return Share(nodes[0], owners, own, keeps, count, nodes, in_use)

    def _has_module(self, share: Share) -> bool:
        """Tell whether a module is among what a share keeps or on the way to it."""
        base = self._torch.nn.Module
        nodes = share.nodes or share.members or [share.node, *self._models_in(share.node)]
        return any(issubclass(type(self._shares.graph.objects[node]), base) for node in nodes) or (
            len(share.holders) > 1 and self._through_module(nodes[0])
        )

    def _of_holder(self, holder: RootHolder) -> Iterator[Share]:
        targets = self._shares.graph.successors[holder.node]
        if len(targets) == 1 and holder.kind in ("variable", "module", "ipython", "class"):
            yield from self._split(targets[0] if self._dominates(holder.node, targets[0]) else holder.node, holder)
        else:
            yield self._shares.share(holder.node, (holder,))

    def _dominates(self, holder: int, target: int) -> bool:
        return self._shares.graph.dominator[target] == holder and self._shares.total(target) == self._shares.total(
            holder
        )

    def _split(self, node: int, holder: RootHolder, depth: int = 0) -> Iterator[Share]:
        """Cut what a variable holds into the members that can be let go one by one."""
        members: list[int] = []
        start = node
        for _step in range(_MOST_STEPS):
            item = self._shares.graph.objects[node]
            if self._shares.is_model(item):
                yield from self._split_model(node, holder)
                return
            if issubclass(type(item), self._torch._C.TensorBase):
                yield from self._split_tensor(node, holder)
                return
            members = [] if node in self._shares.graph.memory else self._class_members(node) or self._members(node)
            if len(members) != 1 or self._shares.total(members[0]) != self._shares.total(node):
                break
            node = members[0]
        else:
            # what lies so deep in containers goes with the outermost
            node, members = start, []
        if 0 < len(members) <= _MOST_PARTS and depth < _DEEPEST and self._is_namespace(node):
            yield from self._split_namespace(node, holder, members, depth)
        else:
            share = self._shares.share(node, (holder,))
            share.in_use = self._has_more_than_once(node)
            yield share

    def _split_namespace(self, node: int, holder: RootHolder, members: list[int], depth: int) -> Iterator[Share]:
        parts = [share for member in members for share in self._split(member, holder, depth + 1)]
        models = self._models_in(node)
        if len(models) > 1 and not self._has_more_than_once(node):
            yield from self._at_work(node, holder, parts, models)
            return
        yield from parts
        yield from self._rest(node, holder, parts)

    def _rest(self, node: int, holder: RootHolder, parts: list[Share]) -> Iterator[Share]:
        """Give what is not told as a part; letting go of it lets go of the parts too."""
        rest = self._shares.share(node, (holder,), parts)
        rest.keeps = {device: self._shares.under[device][node] for device in self._shares.devices}
        rest.in_use = self._has_more_than_once(node)
        if any(rest.own.values()):
            yield rest

    def _models_in(self, node: int) -> list[int]:
        """Return the modules and optimizers among the attributes or values of a namespace."""
        found = {
            child: None
            for space in self._spaces(node)
            for child in self._shares.graph.successors[space]
            if self._shares.is_model(self._shares.graph.objects[child])
        }
        return list(found)

    def _spaces(self, node: int) -> list[int]:
        return [node, *(child for child in self._shares.graph.successors[node] if self._is_attributes(node, child))]

    def _has_more_than_once(self, node: int) -> bool:
        """Tell whether a namespace keeps a model that deleting one of its members does not let go of."""
        spaces = self._spaces(node)
        models = self._models_in(node) if self._is_namespace(node) else []
        mine = {model for model in models if self._shares.graph.dominator[model] in spaces}
        return bool(mine) and not mine <= {child for space in spaces for child in self._shares.referred_once(space)}

    def _is_attributes(self, node: int, child: int) -> bool:
        return (
            not is_exactly(self._shares.graph.objects[node], _PLAIN) and type(self._shares.graph.objects[child]) is dict
        )

    def _at_work(self, node: int, holder: RootHolder, parts: list[Share], models: list[int]) -> Iterator[Share]:
        """Join the models and optimizers of one namespace, which share memory, apart from all else in it."""
        others = [share for share in parts if share.node not in models]
        yield from others
        rest = self._shares.share(node, (holder,), others)
        rest.members, rest.in_use = models, True
        if any(rest.own.values()):
            yield rest

    def _members(self, node: int) -> list[int]:
        """Return the members of a plain container or instance that hold memory and that it refers to itself."""
        item = self._shares.graph.objects[node]
        # what lies in a tuple, a set or a dict's keys cannot be taken out by itself
        if not self._is_plain(item) or issubclass(type(item), (tuple, set, frozenset)):
            return []
        direct = set(self._shares.graph.successors[node])
        # one deletion lets go only of what has no other reference
        once = self._shares.referred_once(node)
        members = [child for child in self._shares.carriers(node) if child in direct and child in once]
        if issubclass(type(item), dict):
            values = set(map(id, dict.values(item)))
            if any(id(self._shares.graph.objects[child]) not in values for child in members):
                return []
        # an instance's attributes may lie in a dict of their own
        if len(members) == 1 and not is_exactly(item, _PLAIN) and type(self._shares.graph.objects[members[0]]) is dict:
            return self._members(members[0])
        return members

    def _is_namespace(self, node: int) -> bool:
        item = self._shares.graph.objects[node]
        if issubclass(type(item), dict):
            return all(type(key) is str for key in list(dict.keys(item))[: _MOST_PARTS * 8])
        return not is_exactly(item, _PLAIN)

    def _is_plain(self, item: Any) -> bool:
        kind = type(item)
        if issubclass(kind, _PLAIN) or kind is type(None):
            return item is not None
        if issubclass(kind, (type, BaseException, self._torch._C.TensorBase)) or is_node_type(kind):
            return False
        if not is_made_by_class(kind) or self._shares.is_model(item) or _has_frame(item):
            return False
        return not is_guarded(item)

    def _split_model(self, node: int, holder: RootHolder) -> Iterator[Share]:
        """Part what a model keeps besides its parameters and buffers from the model."""
        extras: list[Share] = []
        stack = [node] if issubclass(type(self._shares.graph.objects[node]), self._torch.nn.Module) else []
        while stack:
            for child in self._shares.carriers(stack.pop()):
                if self._shares.in_use_total(child):
                    stack.append(child)
                elif self._is_extra(child):
                    extras.append(self._shares.share(self._narrow(child), (holder,)))
        yield from extras
        rest = self._shares.share(node, (holder,), extras)
        rest.keeps = {device: self._shares.under[device][node] for device in self._shares.devices}
        rest.in_use = True
        if any(rest.own.values()):
            yield rest

    def _split_tensor(self, node: int, holder: RootHolder) -> Iterator[Share]:
        """Part what the hooks of a tensor keep from the tensor."""
        fields = type_namespace(self._torch._C.TensorBase)
        tables = [fields[name].__get__(self._shares.graph.objects[node]) for name in _TENSOR_HOOKS if name in fields]
        known = {id(table) for table in tables if table is not None}
        hooks = [child for child in self._shares.carriers(node) if id(self._shares.graph.objects[child]) in known]
        extras = [self._shares.share(self._narrow(child), (holder,)) for child in hooks]
        yield from extras
        rest = self._shares.share(node, (holder,), extras)
        rest.keeps = {device: self._shares.under[device][node] for device in self._shares.devices}
        if any(rest.own.values()):
            yield rest

    def _is_extra(self, node: int) -> bool:
        """Tell whether something under a model is more than a tensor it has as an attribute."""
        item = self._shares.graph.objects[node]
        if not issubclass(type(item), self._torch._C.TensorBase):
            return True
        return any(is_node_type(type(self._shares.graph.objects[child])) for child in self._shares.carriers(node))

    def _narrow(self, node: int) -> int:
        """Go on to the only member that has memory, as long as there is just one."""
        while True:
            members = self._members(node)
            if len(members) != 1 or self._shares.total(members[0]) != self._shares.total(node):
                return node
            node = members[0]

    def _together(self) -> Iterator[Share]:
        """Give what several holders keep together, one share for each set of holders."""
        sets: dict[frozenset[int], list[int]] = {}
        for node, holders in self._shares.sharing.items():
            sets.setdefault(holders, []).append(node)
        for holders, nodes in sets.items():
            owners = tuple(self._shares.graph.holders[holder] for holder in sorted(holders))
            classes = [owner for owner in owners if owner.kind == "class"]
            if classes and len(nodes) == 1 and issubclass(type(self._shares.graph.objects[nodes[0]]), type):
                # names come and go, a class hardly ever: its attributes are let go one by one
                yield from self._split(nodes[0], classes[0])
                continue
            share = self._of_several(holders, owners, nodes)
            if not share.in_use and not all(owner.kind in _EASY for owner in owners):
                cuts = {node: self._inner_cut(node) for node in nodes}
                for node, cut in cuts.items():
                    if cut is not None:
                        own = self._shares.share(node, owners)
                        own.node, own.nodes, own.inner = cut, [node], True
                        yield own
                nodes = [node for node in nodes if cuts[node] is None]
                if not nodes:
                    continue
                share = self._of_several(holders, owners, nodes)
            yield share

    def _of_several(self, holders: frozenset[int], owners: tuple[RootHolder, ...], nodes: list[int]) -> Share:
        share = self._shares.share(nodes[0], owners)
        for node in nodes[1:]:
            for device in self._shares.devices:
                share.own[device] += self._shares.under[device][node]
                share.count[device] += self._shares.count[device][node]
        share.nodes = nodes
        share.keeps = self._shares.keeps(holders)
        used = sum(self._shares.in_use_total(node) for node in nodes)
        share.in_use = used * 2 > sum(share.own.values())
        return share

    def _inner_cut(self, node: int) -> int | None:
        """Find one reference to cut below the thing that many share, an item rather than an attribute."""
        found: int | None = None
        from_item = False
        while True:
            members = self._members(node)
            if len(members) != 1 or self._shares.total(members[0]) != self._shares.total(node):
                return found
            is_item = issubclass(type(self._shares.graph.objects[node]), (list, dict, deque))
            if is_item or not from_item:
                found, from_item = members[0], is_item
            node = members[0]

    def _class_members(self, node: int) -> list[int]:
        """Return the attributes of a class that hold memory."""
        if not issubclass(type(self._shares.graph.objects[node]), type):
            return []
        spaces = [child for child in self._shares.carriers(node) if type(self._shares.graph.objects[child]) is dict]
        return [member for space in spaces for member in self._shares.carriers(space)]

    def _through_module(self, node: int) -> bool:
        """Tell whether one of the ways to a node leads through a module."""
        return any(
            issubclass(type(self._shares.graph.objects[step]), self._torch.nn.Module)
            for source in self._shares.entries([node])[node]
            for step in self._shares.graph.path_to(source)
        )

    def _garbage(self) -> Iterator[Share]:
        for members in self._shares.graph.garbage:
            share = Share(members[0], (), {}, {}, {}, garbage=members)
            for device in self._shares.devices:
                pieces = [
                    nbytes
                    for member in members
                    for where, nbytes, _key in self._shares.graph.memory.get(member, ())
                    if where == device
                ]
                share.own[device] = share.keeps[device] = sum(pieces)
                share.count[device] = len(pieces)
            yield share


def _holder_nodes(share: Share) -> set[int]:
    return {holder.node for holder in share.holders}


def _has_frame(item: object) -> bool:
    return type_name(item) in ("Task", "Thread", "Future")
