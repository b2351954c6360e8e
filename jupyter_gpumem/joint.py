"""What several holders share: what it is called, and how to let go of it with as little else as can be."""

from collections import deque
from collections.abc import Iterable, Sequence
from types import ModuleType

from jupyter_gpumem.attachments import Attachments
from jupyter_gpumem.heap import is_exactly
from jupyter_gpumem.held import RootHolder
from jupyter_gpumem.places import SHELLS_OWN, Places
from jupyter_gpumem.remedies import Remedy, deletion, joined, remedy_for, together
from jupyter_gpumem.shares import Share, Shares
from jupyter_gpumem.situations import Situations, is_data
from jupyter_gpumem.trail import Trail
from jupyter_gpumem.trails import Trails

_MOST_WAYS = 4


class JointHolders:
    """Describes shares that have several holders. Holds the graph's objects: drop it before reporting."""

    def __init__(
        self,
        shares: Shares,
        trails: Trails,
        places: Places,
        situations: Situations,
        torch: ModuleType,
        *,
        in_shell: bool,
    ) -> None:
        self._shares = shares
        self._graph = shares.graph
        self._trails = trails
        self._places = places
        self._situations = situations
        self._attachments = Attachments(shares, torch)
        self._in_shell = in_shell

    def release(self, share: Share) -> tuple[list[str], Remedy]:
        """Return what the holders are called and how to let go; the share then keeps, in bytes, what that returns."""
        remedy = self._all_of(share, share.holders)
        if share.in_use:
            return self.ways(share), remedy
        around = self._around_models(share)
        if around is not None:
            return around
        stays = any(owner.kind == "class" or self._attachments.has_models(owner) for owner in share.holders)
        if stays or not remedy.releases:
            remedy = self._nearest(share) or remedy
        return self.ways(share), remedy

    def _all_of(self, share: Share, holders: Iterable[RootHolder], more: Sequence[Remedy] = ()) -> Remedy:
        """Join the remedies of some holders of a share, and more."""
        slots = [holder.slots[0] for holder in holders if holder.kind == "variable"]
        nothing = Trail("", None)
        others = [
            remedy_for(self._situations.of(share, holder, nothing, nothing, share.node, []))
            for holder in holders
            if holder.kind != "variable"
        ]
        data = [slot.text for slot in slots if is_data(slot.target)]
        program = [slot.text for slot in slots if not is_data(slot.target)]
        return together(data, program, [*others, *more], in_shell=self._in_shell)

    def _nearest(self, share: Share) -> Remedy | None:
        """Return how to take the one thing that is shared out of everything that has it."""
        removals = self._places.removals(share.holders, share.node) if len(share.nodes) == 1 else {}
        if not removals:
            return None
        variables = [holder.slots[0] for holder in share.holders if holder.kind == "variable"]
        whole = [slot.text for slot in variables if is_data(slot.target) and f"del {slot.text}" in removals]
        rest = [removal for removal in removals if removal.removeprefix("del ") not in whole]
        collects = not whole and self._shares.needs_collector(set(removals.values()))
        others = [deletion(joined(rest), needs_collector=collects)] if rest else []
        shells = [holder for holder in share.holders if holder.kind in SHELLS_OWN]
        if shells:
            others.append(self._all_of(share, shells))
        # what goes whole takes along what else it keeps
        gone = {
            holder.node for holder in share.holders if f"del {holder.slots[0].code}" in removals or holder in shells
        }
        keeps = self._shares.keeps(gone)
        rest_bytes = dict.fromkeys(share.own, 0) if len(gone) == len(share.holders) else share.own
        share.keeps = {device: nbytes + rest_bytes[device] for device, nbytes in keeps.items()}
        return together(whole, [], others, in_shell=self._in_shell)

    def _around_models(self, share: Share) -> tuple[list[str], Remedy] | None:
        """Let models among the holders keep all but what leads to the share; None where that cannot be done."""
        cuts = self._attachments.on(share.holders, share.nodes)
        whole = [holder for holder in share.holders if holder.node not in cuts]
        inner = [(holder, node) for holder in share.holders for node in cuts.get(holder.node, ())]
        codes = [self._removal(holder, node) for holder, node in inner]
        if not inner or None in codes:
            return None
        keeps = self._attachments.returned_without({*(holder.node for holder in whole), *(node for _, node in inner)})
        if any(keeps[device] < share.own[device] for device in self._shares.devices):
            return None
        collects = not any(holder.kind == "variable" for holder in whole)
        more = [deletion(code, needs_collector=collects) for code in codes if code is not None]
        share.keeps = keeps
        places = [(holder, holder.node) for holder in whole] + inner
        ways = _shortest_first({str(self._trails.trail(holder, node)) for holder, node in places})
        return ways, self._all_of(share, whole, more)

    def _removal(self, holder: RootHolder, node: int) -> str | None:
        """Return the code that lets go of something a holder has: empties a collection, which may be needed again."""
        if self._graph.path_to(node)[0] != holder.node:
            return None
        code = self._places.place(holder, node).deletion
        if code is not None and is_exactly(self._graph.objects[node], (list, dict, set, deque)):
            return f"{self._trails.trail(holder, node).code}.clear()"
        return code if len(self._shares.outer_sources(node)) == 1 else None

    def ways(self, share: Share) -> list[str]:
        """Name the holders by where in each the memory is, when there is one thing to find, else by themselves."""
        if all(holder.kind in ("handling", "frame") for holder in share.holders) and len(share.nodes) == 1:
            # the error and the name it goes by in its except block: what is in it says more
            return [str(self._trails.trail(self._trails.best(share), self._trails.end(share.node)))]
        if len(share.nodes) == 1 and not share.in_use:
            entries = self._shares.entries(share.nodes)[share.nodes[0]]
            firsts = [self._graph.path_to(entry)[0] for entry in entries]
            if len(entries) <= _MOST_WAYS and {*firsts} == {holder.node for holder in share.holders}:
                return _shortest_first({self._trails.way(entry, share.nodes[0]) for entry in entries})
        owners = [holder for holder in share.holders if not share.in_use or self._leads_to_model(holder, share)]
        names = [str(self._trails.trail(holder, holder.node)) for holder in owners or share.holders]
        names.sort(key=lambda name: "." in name)
        more = len(names) - _MOST_WAYS
        return names if more < 2 else [*names[:_MOST_WAYS], f"and {more} more"]

    def _leads_to_model(self, holder: RootHolder, share: Share) -> bool:
        """Tell whether a holder has a model or optimizer that has what is shared, not a graph that uses it."""
        seen = {holder.node}
        stack = [holder.node]
        while stack:
            for target in self._graph.successors[stack.pop()]:
                item = self._graph.objects[target]
                if item is not None and self._shares.is_model(item):
                    return True
                if (
                    target not in seen
                    and item is not None
                    and self._trails.is_collection(item)
                    and not self._trails.is_end(item)
                ):
                    seen.add(target)
                    stack.append(target)
        return False


def _shortest_first(ways: Iterable[str]) -> list[str]:
    # not as they were found: looking at an object can change the order of what it refers to
    return sorted(ways, key=lambda way: (len(way), way))
