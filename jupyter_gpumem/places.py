"""Where references lie, and the code that removes them."""

import gc
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any, cast

from jupyter_gpumem.attributes import attribute_of, instance_dict, is_guarded
from jupyter_gpumem.heap import is_made_by_class, type_mro, type_namespace
from jupyter_gpumem.held import RootHolder
from jupyter_gpumem.hooks import HOOK_TABLES
from jupyter_gpumem.libraries import is_private_to_library
from jupyter_gpumem.literals import is_plain_name, literal
from jupyter_gpumem.shares import Shares
from jupyter_gpumem.trails import Trails

_FIXED = (tuple, set, frozenset)
_NAMED = ("variable", "module", "class")
"""Holders whose own reference goes with one name; IPython has copies of a result that no name gives."""
SHELLS_OWN = ("output", "error", "debugger")
"""Holders that bare ``%gpu_free`` lets go of, whatever else it is given."""
_MOST_REMOVALS = 8
"""More references than these are no remedy that anybody would type."""
_MOST_STEPS = 200


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reference lies: the code that removes it, None where none does, and whether it can be set anew."""

    deletion: str | None
    is_assignable: bool = False


class Places:
    """Tells how to remove references of one held graph. Holds its objects: drop it before reporting."""

    def __init__(self, shares: Shares, trails: Trails) -> None:
        self._shares = shares
        self._graph = shares.graph
        self._trails = trails

    def place(self, holder: RootHolder, node: int) -> Place:
        """Return what can be done to the one reference that a path to a node ends with."""
        path = self._seen(node)
        code = self._trails.trail(holder, node).code
        if code is None or len(path) < 2:
            is_name = code is not None and is_plain_name(code.rsplit(".", 1)[-1])
            return Place(f"del {code}" if is_name else None, is_assignable=is_name)
        above, item = self._graph.objects[path[-2]], self._graph.objects[node]
        owner = self._graph.objects[path[-3]] if len(path) > 2 else None
        if type(above) is dict and issubclass(type(owner), type):
            return _place_in_class(owner, self._trails.trail(holder, path[-3]).code, above, item)
        if type(above) is dict and owner is not None and instance_dict(owner) is above:
            return _place_in_instance(owner, code)
        if self._is_private(path[:-1]):
            return Place(None)
        if issubclass(type(above), dict):
            return _place_in_dict(self._trails.trail(holder, path[-2]).code, above, item, code)
        if issubclass(type(above), (list, deque)):
            return Place(f"del {code}", is_assignable=True)
        if issubclass(type(above), _FIXED):
            return Place(None)
        return _place_in_instance(above, code)

    def removals(self, holders: Collection[RootHolder], node: int) -> dict[str, int]:
        """Return the code that takes a node out of everything some holders have: the nearest references that can go.

        Each is given with the node that loses the reference, in an order in which they can be run. Empty where some
        reference lies where no code can remove it, or where there are too many. What IPython alone has is left
        to ``%gpu_free``.
        """
        roots = {holder.node for holder in holders}
        found: dict[str, int] = {}
        waiting, seen = [node], {node}
        while waiting:
            target = waiting.pop()
            for source in self._shares.outer_sources(target):
                holder = self._graph.holders.get(self._graph.path_to(source)[0])
                if holder is None or holder.node not in roots:
                    return {}
                if holder.kind in SHELLS_OWN and self._shares.is_under(source, holder.node):
                    continue
                removals = self._references(holder, source, target)
                if not removals and source == holder.node:
                    return {}
                found.update(dict.fromkeys(removals, target))
                if not removals and source not in seen:
                    seen.add(source)
                    waiting.append(source)
            if len(found) > _MOST_REMOVALS or len(seen) > _MOST_STEPS:
                return {}
        return dict(sorted(found.items(), key=lambda item: _order(item[0])))

    def _references(self, holder: RootHolder, source: int, target: int) -> Sequence[str]:
        """Return the code that removes each reference from one node to another, none where that cannot be done."""
        item = self._graph.objects[target]
        if source == holder.node:
            if holder.kind not in _NAMED:
                return []
            names = [slot.code for slot in holder.slots if slot.target is item]
            return [] if None in names else [f"del {name}" for name in names if name is not None]
        above = self._graph.objects[source]
        if self._is_private(self._seen(source)):
            return []
        if issubclass(type(above), dict):
            return self._in_dict(holder, source, above, item)
        code = self._trails.trail(holder, source).code
        if above is None or code is None:
            return []
        if issubclass(type(above), (list, deque)):
            places = [place for place, value in enumerate(above) if value is item]
            return [f"del {code}[{place}]" for place in reversed(places)]
        if not is_made_by_class(type(above)) or issubclass(type(above), (*_FIXED, type, BaseException)):
            return []
        found = [_place_in_instance(above, f"{code}.{name}").deletion for name in _names_of(above, item)]
        return [] if None in found else [place for place in found if place is not None]

    def _seen(self, node: int) -> list[int]:
        """Return what Python sees of the path to a node."""
        return [step for step in self._graph.path_to(node)[1:] if self._graph.objects[step] is not None]

    def _is_private(self, path: Sequence[int]) -> bool:
        """Tell whether a path ends with a collection that a library's class keeps for itself."""
        item = self._graph.objects[path[-1]]
        if not issubclass(type(item), (dict, list, deque)):
            return False
        for owner in map(self._graph.objects.__getitem__, path[-3:-1]):  # a dict of attributes may lie between
            if issubclass(type(owner), type):
                names = [key for key, value in type_namespace(cast("type", owner)).items() if value is item]
            elif owner is None or not is_made_by_class(type(owner)):
                continue
            else:
                name = attribute_of(owner, item)
                names = [] if name is None else [name]
            # a hook's handle removes it in the same way
            if any(is_private_to_library(owner, name) for name in names if name not in HOOK_TABLES):
                return True
        return False

    def _in_dict(self, holder: RootHolder, source: int, above: dict[Any, Any], item: object) -> Sequence[str]:
        path = self._graph.path_to(source)
        keys = [key for key, value in dict.items(above) if value is item]
        owner = self._graph.objects[path[-2]] if len(path) > 2 else None
        if any(key is item for key in dict.keys(above)) or not keys:
            return []
        if type(above) is dict and issubclass(type(owner), type):
            code = self._trails.trail(holder, path[-2]).code
            found = [_place_in_class(owner, code, {key: item}, item).deletion for key in keys]
        elif type(above) is dict and owner is not None and instance_dict(owner) is above:
            code = self._trails.trail(holder, path[-2]).code
            found = [None if code is None else _place_in_instance(owner, f"{code}.{key}").deletion for key in keys]
        else:
            code, texts = self._trails.trail(holder, source).code, [literal(key) for key in keys]
            found = [None if code is None or text is None else f"del {code}[{text}]" for text in texts]
        return [] if None in found else [place for place in found if place is not None]


def _order(removal: str) -> tuple[int, int]:
    """Sort removals so that none takes away what another one goes through: the deepest, and the last item, first."""
    index = re.search(r"\[(\d+)\]$", removal)
    return -len(re.findall(r"[.\[]", removal)), 0 if index is None else -int(index[1])


def _names_of(owner: object, item: object) -> list[str]:
    """Return the attributes of an instance without a dict that are an item, none unless all are known."""
    count = sum(held is item for held in gc.get_referents(owner))
    name = attribute_of(owner, item)
    if name is None or count < 2:  # none where the search has made the dict since
        return [] if name is None else [name]
    names = dict.fromkeys(
        name for name, value in (*_slots(owner), *(instance_dict(owner) or {}).items()) if value is item
    )
    return list(names) if len(names) == count else []


def _slots(owner: object) -> Iterator[tuple[str, Any]]:
    for base in type_mro(type(owner)):
        for name, field in type_namespace(base).items():
            if type(field) is MemberDescriptorType and name != "__dict__":
                try:
                    yield name, field.__get__(owner)
                except AttributeError:
                    continue


def _place_in_class(owner: object, code: str | None, namespace: dict[Any, Any], item: object) -> Place:
    key = next((key for key, value in namespace.items() if value is item), None)
    if code is None or type(key) is not str or is_guarded(owner) or is_private_to_library(owner, key):
        return Place(None)
    return Place(f"del {code}.{key}" if is_plain_name(key) else f"delattr({code}, {key!r})")


def _place_in_instance(owner: object, code: str) -> Place:
    name = code.rsplit(".", 1)[-1]
    if not is_plain_name(name):
        return Place(f"del {code}" if code.endswith("]") and not code.startswith("list(") else None)
    if is_guarded(owner) or is_private_to_library(owner, name):
        return Place(None)
    field = next(
        (namespace[name] for namespace in map(type_namespace, type_mro(type(owner))) if name in namespace), None
    )
    return Place(f"del {code}", is_assignable=type(field) in (type(None), MemberDescriptorType))


def _place_in_dict(owner: str | None, items: dict[Any, Any], item: object, code: str) -> Place:
    for position, (key, value) in enumerate(dict.items(items)):
        if value is item:
            if literal(key) is not None:
                return Place(f"del {code}", is_assignable=True)
            return Place(None if owner is None else f"del {owner}[list({owner})[{position}]]")
    return Place(None)
