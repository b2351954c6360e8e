"""What a holder has besides the models it works with: that can go, and the models stay."""

from collections.abc import Collection, Container, Iterable, Sequence
from functools import cached_property
from types import ModuleType

from jupyter_gpumem.held import ROOT, RootHolder
from jupyter_gpumem.hooks import structure_of
from jupyter_gpumem.shares import Shares

_MOST_CUTS = 4
"""More places than these are no remedy that anybody would type."""
_MOST_WALKS = 50
"""What comes back is worked out by a walk over the graph: more of them are not worth their time."""


class Attachments:
    """Finds them in one held graph. Holds its objects: drop it before reporting."""

    def __init__(self, shares: Shares, torch: ModuleType) -> None:
        self._shares = shares
        self._graph = shares.graph
        self._torch = torch
        self._walks = 0

    def has_models(self, holder: RootHolder) -> bool:
        """Tell whether a variable is a model or leads to one."""
        return holder.kind == "variable" and holder.node in self._to_models

    def on(self, holders: Iterable[RootHolder], nodes: Iterable[int]) -> dict[int, Sequence[int]]:
        """Return, for the holders that have models, the nearest of what else they have that leads to some nodes.

        Without those that have it in too many places, and empty once the graph has been walked too often.
        """
        owners = [holder for holder in holders if self.has_models(holder)] if self._walks < _MOST_WALKS else []
        if not owners:
            return {}
        wanted = self._sources(nodes)
        found = {holder.node: self._outside_models(holder, wanted) for holder in owners}
        return {node: cuts for node, cuts in found.items() if 0 < len(cuts) <= _MOST_CUTS}

    def _outside_models(self, holder: RootHolder, wanted: Container[int]) -> Sequence[int]:
        """Return the wanted nodes that are met first on the way down through models and what leads to them."""
        structure: set[int] = set()
        found = []
        seen, stack = {holder.node}, [holder.node]
        while stack:
            for child in self._graph.successors[stack.pop()]:
                if child in seen:
                    continue
                seen.add(child)
                item = self._graph.objects[child]
                if self._shares.is_model(item) and id(item) not in structure:
                    structure |= structure_of(item, self._torch)
                if child in self._to_models or id(item) in structure:
                    stack.append(child)
                elif child in wanted:
                    found.append(child)
        return found

    def returned_without(self, nodes: Collection[int]) -> dict[int, int]:
        """Return the bytes by device that come back when some nodes are let go."""
        self._walks += 1
        reached, stack = {ROOT}, [ROOT]
        while stack:
            for target in self._graph.successors[stack.pop()]:
                if target not in reached and target not in nodes:
                    reached.add(target)
                    stack.append(target)
        returned = dict.fromkeys(self._shares.devices, 0)
        for node, pieces in self._graph.memory.items():
            # garbage is not kept by any of them
            if node not in reached and self._graph.dominator[node] >= 0:
                for device, nbytes, _key in pieces:
                    returned[device] += nbytes
        return returned

    @cached_property
    def _to_models(self) -> set[int]:
        models = (node for node in self._graph.nodes.values() if self._shares.is_model(self._graph.objects[node]))
        return self._sources(models)

    def _sources(self, nodes: Iterable[int]) -> set[int]:
        """Return the nodes from which some can be reached, themselves included."""
        found = set(nodes)
        stack = list(found)
        while stack:
            for source in self._shares.all_sources()[stack.pop()]:
                if source not in found:
                    found.add(source)
                    stack.append(source)
        return found
