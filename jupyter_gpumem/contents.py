"""What a holder keeps, part by part."""

from collections.abc import Iterator, Sequence

from jupyter_gpumem.attributes import is_part_of, type_name
from jupyter_gpumem.held import RootHolder
from jupyter_gpumem.holders import Part
from jupyter_gpumem.shares import Share, Shares
from jupyter_gpumem.trails import Trails

_MOST_PARTS = 5
_ROLE_WORDS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "buffer": "buffers",
    "optimizer state": "optimizer state",
    "saved for backward": "saved for backward",
}


class Contents:
    """Tells the parts of shares. Holds the graph's objects: drop it before reporting."""

    def __init__(self, shares: Shares, trails: Trails) -> None:
        self._shares = shares
        self._graph = shares.graph
        self._trails = trails

    def places(self, share: Share, holder: RootHolder) -> Iterator[tuple[str, int]]:
        """Name the several things that frames keep, and give their nodes."""
        if holder.kind not in ("error", "debugger", "handling", "unknown"):
            return
        found = []
        stack = [share.node]
        while stack:
            node = stack.pop()
            item = self._graph.objects[node]
            named = item is not None and (self._trails.is_end(item) or self._trails.is_collection(item))
            if node in self._graph.memory or (named and not self._is_on_the_way(holder, node)):
                found.append(node)
            else:
                stack.extend(self._shares.carriers(node))
        if len(found) > 1:
            found.sort(key=lambda node: -self._shares.total(node))
            for node in found[:_MOST_PARTS]:
                place = node if self._graph.objects[node] is not None else self._graph.dominator[node]
                # the line above says already what keeps them all
                start = f", {self._trails.start_words(holder)}"
                yield str(self._trails.trail(holder, place)).replace(start, "", 1), node

    def _is_on_the_way(self, holder: RootHolder, node: int) -> bool:
        """Tell whether something is the debugger, a cell's result, or the dict of a frame's variables."""
        item = self._graph.objects[node]
        debugger = holder.slots[0].target if holder.kind == "debugger" else None
        if item is debugger or type_name(item) == "ExecutionResult":
            return True
        above = self._graph.objects[self._graph.found_by[node]]
        is_dict = type(item) is dict or type_name(item) == "FrameLocalsProxy"
        return is_dict and (type_name(above) == "frame" or is_part_of(debugger, above, item))

    def parts(self, share: Share, device: int, places: Sequence[tuple[str, int]]) -> tuple[Part, ...]:
        """Return the parts of a share on one device: at the places in frames, or by what a model uses them for."""
        if places:
            return tuple(Part(text, self._shares.under[device][node]) for text, node in places)
        if share.hooks is not None:
            return ()
        model = self._graph.objects[share.node]
        if not share.in_use and not (model is not None and self._shares.is_model(model)):
            return ()
        return self._roles(share, device)

    def _roles(self, share: Share, device: int) -> tuple[Part, ...]:
        # in this order where they are of one size: the pieces come in no order
        roles = dict.fromkeys((*_ROLE_WORDS.values(), "other"), 0)
        for where, nbytes, key in self._shares.pieces(share):
            if where == device:
                facts = self._shares.live.storages[key]
                roles[_ROLE_WORDS.get(facts.role, "other")] += nbytes
        # what is told as a holder of its own is no part of the model
        extra = sum(roles.values()) - share.own[device]
        for name in ("other", "saved for backward"):
            less = min(extra, roles[name])
            extra -= less
            roles[name] -= less
        roles = {name: nbytes for name, nbytes in roles.items() if nbytes}
        return tuple(Part(name, nbytes) for name, nbytes in sorted(roles.items(), key=lambda role: -role[1]))
