"""What a remedy depends on: the facts about one share and where it is held, gathered from the held graph."""

import sys
from collections import deque
from collections.abc import Collection
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import cast

from jupyter_gpumem.attributes import type_name
from jupyter_gpumem.heap import is_exactly
from jupyter_gpumem.held import RootHolder
from jupyter_gpumem.hooks import table_on
from jupyter_gpumem.libraries import stands_in_library
from jupyter_gpumem.places import Place, Places
from jupyter_gpumem.remedies import Situation, joined
from jupyter_gpumem.shares import Share, Shares
from jupyter_gpumem.tensors import TensorFacts, tensor_facts
from jupyter_gpumem.trail import Trail
from jupyter_gpumem.trails import Trails


class Situations:
    """Gathers situations from one held graph. Holds its objects: drop it before reporting."""

    def __init__(self, shares: Shares, trails: Trails, places: Places, torch: ModuleType, *, in_shell: bool) -> None:
        self._shares = shares
        self._graph = shares.graph
        self._trails = trails
        self._places = places
        self._torch = torch
        self._in_shell = in_shell

    def of(self, share: Share, holder: RootHolder, cut: Trail, shown: Trail, end: int, alike: list[int]) -> Situation:
        """Return the situation of a share in one holder; ``cut`` leads to it, ``shown`` is said, ``end`` its node."""
        item = self._graph.objects[end]
        facts = tensor_facts(item, self._torch)
        members = [tensor_facts(self._graph.objects[member], self._torch) for member in alike[:1000]]
        variable = holder.slots[0].text if holder.kind == "variable" and holder.slots[0].code else None
        lead = facts or next((member for member in members if member is not None), None)
        keys = self._shares.live.keys_of(id(item))
        place, loose = self._place(share, holder) if cut.code is not None else (Place(None), ())
        unhook, hooks = self._unhook(share, holder)
        clearable = is_exactly(self._graph.objects[share.node], (list, dict, set, deque))
        if unhook is not None or clearable:
            loose = set(self._graph.successors[share.node]) if unhook is None else hooks
        return Situation(
            kind="inner" if share.inner else holder.kind,
            cut=shown.code or cut.code if shown.inside == "cache" else cut.code,
            shown=str(shown),
            inside=shown.inside,
            variable=variable,
            whole=variable is not None and cut.code == variable and not share.inner,
            in_shell=self._in_shell,
            outputs=tuple(sorted({slot.number for slot in holder.slots if slot.number is not None})),
            elements=None if lead is None else lead.elements,
            tensor_bytes=0 if facts is None else facts.nbytes,
            copy="" if facts is None else facts.copy,
            storage_bytes=self._shares.live.storages[keys[0]].nbytes if len(keys) == 1 else 0,
            node=None if lead is None else lead.node,
            alike=len(alike),
            scalars=self._keep_graphs(share, members),
            unhook=unhook,
            is_list=type(item) is list and end == share.node,
            keeps_graph=sum(share.count.values()) > max(1, len(members)),
            is_data=is_data(holder.slots[0].target),
            clearable=clearable,
            failed=None if cut.code is None else self._trails.only_traceback(holder, share, end),
            deletion=place.deletion,
            is_assignable=place.is_assignable and end == share.node,
            finalizer=self._finalizer(share),
            handle=self._trails.handle(holder),
            needs_collector=self._shares.needs_collector(loose),
            in_library=self._is_in_library(holder, share),
        )

    def _is_in_library(self, holder: RootHolder, share: Share) -> bool:
        """Tell whether a function that keeps a share is in a module or class of a library."""
        path = [self._graph.objects[step] for step in self._graph.path_to(share.node)]
        if holder.group[0] == "module":
            path.insert(0, sys.modules.get(holder.group[1]))
        return stands_in_library([item for item in path if item is not None and type(item) is not dict])

    def _place(self, share: Share, holder: RootHolder) -> tuple[Place, Collection[int]]:
        """Return how to let go of a share within its holder, every reference to it, and the nodes that lose one."""
        place = self._places.place(holder, share.node)
        removals = self._places.removals((holder,), share.node)
        is_one = len(removals) == 1 or (not removals and len(self._shares.outer_sources(share.node)) == 1)
        if is_one and place.deletion is not None:
            return place, (share.node,)
        if holder.kind == "variable" and set(removals) <= {f"del {slot.code}" for slot in holder.slots}:
            return Place(None), (holder.node,)  # the variable itself goes
        return Place(joined(removals) or None), set(removals.values())

    def _finalizer(self, share: Share) -> str | None:
        """Return the code for the ``weakref.finalize`` that keeps a share, empty where nobody has it."""
        finalizer = self._trails.finalizer(share)
        return None if finalizer is None else self._trails.code_of(finalizer) or ""

    def _keep_graphs(self, share: Share, members: list[TensorFacts | None]) -> bool:
        """Tell whether some scalars keep more than themselves: after backward() they do not."""
        if not members or not all(_is_scalar_with_graph(member) for member in members):
            return False
        return sum(share.count.values()) > len(members)

    def _unhook(self, share: Share, holder: RootHolder) -> tuple[str | None, Collection[int]]:
        """Return how to remove the hook that a share goes with, None where it goes with none; and the hook."""
        path = [step for step in self._graph.path_to(share.node) if self._graph.objects[step] is not None]
        place = table_on([self._graph.objects[step] for step in path], self._torch)
        if place is None or not self._shares.is_under(share.node, path[place]):
            return None, ()
        table = self._graph.objects[path[place]]
        code = self._trails.trail(holder, path[place]).code
        if code is not None and (place == len(path) - 1 or len(cast("dict[int, object]", table)) == 1):
            return f"{code}.clear()", set(self._graph.successors[path[place]])
        removals = self._places.removals((holder,), path[place + 1])
        return joined(removals) or None, set(removals.values())


def _is_scalar_with_graph(facts: TensorFacts | None) -> bool:
    return facts is not None and facts.elements == 1 and facts.node is not None


def is_data(item: object) -> bool:
    """Tell whether ``%gpu_free`` deletes a variable of such an object and sees what it holds."""
    program = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
    return not issubclass(type(item), program) and type_name(item) not in ("ndarray", "_lru_cache_wrapper")
