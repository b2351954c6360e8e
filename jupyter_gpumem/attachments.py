"""What a holder has besides the models it works with: that can go, and the models stay."""

from collections.abc import Collection, Iterable, Sequence
from types import ModuleType

from jupyter_gpumem.held import ROOT, RootHolder
from jupyter_gpumem.hooks import structure_of
from jupyter_gpumem.shares import Shares

_MOST_CUTS = 4
"""More places than these are no remedy that anybody would type."""


class Attachments:
    """Finds them in one held graph. Holds its objects: drop it before reporting."""

    def __init__(self, shares: Shares, torch: ModuleType) -> None:
        self._shares = shares
        self._graph = shares.graph
        self._torch = torch
        models = [node for node in self._graph.nodes.values() if shares.is_model(self._graph.objects[node])]
        self._to_models = self._sources(models)
        self.asked = 0
        """How often what comes back has been worked out: each time a walk over the graph."""

    def has_models(self, holder: RootHolder) -> bool:
        """Tell whether a variable is a model or leads to one."""
        return holder.kind == "variable" and holder.node in self._to_models

    def on(self, holder: RootHolder, nodes: Iterable[int]) -> Sequence[int]:
        """Return the nearest of what a holder has besides its models from which some nodes can be reached.

        Empty where the holder has no model, or has them in too many places.
        """
        if not self.has_models(holder):
            return ()
        wanted = self._sources(nodes)
        structure: set[int] = set()
        found: dict[int, None] = {}
        seen, stack = {holder.node}, [holder.node]
        while stack:
            for child in self._graph.successors[stack.pop()]:
                if child in seen:
                    continue
                seen.add(child)
                item = self._graph.objects[child]
                if self._shares.is_model(item):
                    structure |= structure_of(item, self._torch)
                if child in self._to_models or id(item) in structure:
                    stack.append(child)
                elif child in wanted:
                    found[child] = None
        return tuple(found) if len(found) <= _MOST_CUTS else ()

    def returned_without(self, nodes: Collection[int]) -> dict[int, int]:
        """Return the bytes by device that come back when some nodes are let go."""
        self.asked += 1
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
