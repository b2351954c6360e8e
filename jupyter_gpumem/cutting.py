"""Cutting the held graph into the pieces a user can let go of one by one."""

from collections.abc import Iterator, Sequence
from types import ModuleType

from jupyter_gpumem.graph import is_node_type
from jupyter_gpumem.heap import is_exactly
from jupyter_gpumem.held import ROOT, RootHolder
from jupyter_gpumem.hooks import goes_with, hook_groups, structure_of, tensor_tables
from jupyter_gpumem.members import Members
from jupyter_gpumem.shares import Share, Shares

_COLLECTIONS = (dict, list, tuple)
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
        self._members = Members(shares, torch)

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
            members = (
                [] if node in self._shares.graph.memory else self._members.of_class(node) or self._members.of(node)
            )
            if len(members) != 1 or self._shares.total(members[0]) != self._shares.total(node):
                break
            node = members[0]
        else:
            # what lies so deep in containers goes with the outermost
            node, members = start, []
        if 0 < len(members) <= _MOST_PARTS and depth < _DEEPEST and self._members.is_namespace(node):
            yield from self._split_namespace(node, holder, members, depth)
        else:
            yield from self._split_collection(node, holder)

    def _split_collection(self, node: int, holder: RootHolder) -> Iterator[Share]:
        """Part what the models of a collection keep besides what they work with from the collection."""
        models = self._shares.carriers(node) if is_exactly(self._shares.graph.objects[node], _COLLECTIONS) else []
        extras = [extra for model in models[:_MOST_PARTS] for extra in self._extras(model, (holder,))]
        yield from extras
        yield from self._rest(node, holder, extras)

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
            for space in self._members.spaces(node)
            for child in self._shares.graph.successors[space]
            if self._shares.is_model(self._shares.graph.objects[child])
        }
        return list(found)

    def _has_more_than_once(self, node: int) -> bool:
        """Tell whether a namespace keeps a model that deleting one of its members does not let go of."""
        spaces = self._members.spaces(node)
        models = self._models_in(node) if self._members.is_namespace(node) else []
        mine = {model for model in models if self._shares.graph.dominator[model] in spaces}
        return bool(mine) and not mine <= {child for space in spaces for child in self._shares.referred_once(space)}

    def _at_work(self, node: int, holder: RootHolder, parts: list[Share], models: list[int]) -> Iterator[Share]:
        """Join the models and optimizers of one namespace, which share memory, apart from all else in it."""
        others = [share for share in parts if share.node not in models]
        yield from others
        rest = self._shares.share(node, (holder,), others)
        rest.members, rest.in_use = models, True
        if any(rest.own.values()):
            yield rest

    def _split_model(self, node: int, holder: RootHolder) -> Iterator[Share]:
        """Part what a model keeps besides its parameters and buffers from the model."""
        extras = self._extras(node, (holder,))
        yield from extras
        rest = self._shares.share(node, (holder,), extras)
        rest.keeps = {device: self._shares.under[device][node] for device in self._shares.devices}
        rest.in_use = True
        if any(rest.own.values()):
            yield rest

    def _extras(self, node: int, holders: tuple[RootHolder, ...]) -> list[Share]:
        """Give what a module keeps besides what it works with, and what its hooks do; nothing for an optimizer."""
        model = self._shares.graph.objects[node]
        if not issubclass(type(model), self._torch.nn.Module):
            return []
        extras = self._hooks(node, holders)
        told = {hook for share in extras for hook in share.nodes}
        structure = structure_of(model, self._torch)
        stack = [node]
        while stack:
            for child in self._shares.carriers(stack.pop()):
                if child in told:
                    continue
                if self._shares.in_use_total(child) or id(self._shares.graph.objects[child]) in structure:
                    stack.append(child)
                elif self._is_extra(child):
                    extras.append(self._shares.share(self._members.narrow(child), holders))
        for extra in extras:
            extra.inner = len(holders) > 1
        return extras

    def _hooks(self, node: int, holders: tuple[RootHolder, ...]) -> list[Share]:
        """Give what the hooks that one line of code registered keep together, one share for each such line."""
        found: list[Share] = []
        told: set[int] = set()
        for group in hook_groups(self._shares.graph.objects[node], self._torch):
            tops = goes_with(self._shares, node, group)
            if not tops or told & set(tops):
                continue
            told.update(tops)
            share = self._shares.share_of(tops, holders)
            share.node, share.hooks = node, group
            found.append(share)
        return found

    def _split_tensor(self, node: int, holder: RootHolder) -> Iterator[Share]:
        """Part what the hooks of a tensor keep from the tensor."""
        tables = tensor_tables(self._shares.graph.objects[node], self._torch)
        known = {id(table) for table in tables if table is not None}
        hooks = [child for child in self._shares.carriers(node) if id(self._shares.graph.objects[child]) in known]
        extras = [self._shares.share(self._members.narrow(child), (holder,)) for child in hooks]
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
            extras = [extra for node in nodes for extra in self._extras(node, owners)]
            yield from extras
            share = self._of_several(holders, owners, nodes, extras)
            if not any(share.own.values()):
                continue
            if not share.in_use and not all(owner.kind in _EASY for owner in owners):
                cuts = {node: self._members.inner_cut(node) for node in nodes}
                for node, cut in cuts.items():
                    if cut is not None:
                        own = self._shares.share(node, owners)
                        own.node, own.nodes, own.inner = cut, [node], True
                        yield own
                nodes = [node for node in nodes if cuts[node] is None]
                if not nodes:
                    continue
                share = self._of_several(holders, owners, nodes, extras)
            yield share

    def _of_several(
        self, holders: frozenset[int], owners: tuple[RootHolder, ...], nodes: list[int], less: Sequence[Share]
    ) -> Share:
        share = self._shares.share_of(nodes, owners, less)
        share.keeps = self._shares.keeps(holders)
        used = sum(self._shares.in_use_total(node) for node in nodes)
        share.in_use = used * 2 > sum(share.own.values())
        return share

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
