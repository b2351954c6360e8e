"""What of a container, an instance or a class can be let go of member by member."""

from collections import deque
from types import ModuleType
from typing import Any

from jupyter_gpumem.attributes import attribute_of, is_guarded, type_name
from jupyter_gpumem.graph import is_node_type
from jupyter_gpumem.heap import is_exactly, is_made_by_class
from jupyter_gpumem.libraries import is_private_to_library
from jupyter_gpumem.shares import Shares

_PLAIN = (dict, list, tuple, set, frozenset, deque)
_MOST_KEYS = 64
"""Keys of a dict that are looked at: where these are names, the others are taken to be."""


class Members:
    """Tells the members of a held graph's objects. Holds those: drop it before reporting."""

    def __init__(self, shares: Shares, torch: ModuleType) -> None:
        self._shares = shares
        self._torch = torch

    def of(self, node: int) -> list[int]:
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
            members = self.of(members[0])
        return (
            members if is_exactly(item, _PLAIN) else [child for child in members if not self._is_private(item, child)]
        )

    def _is_private(self, owner: object, member: int) -> bool:
        """Tell whether a member is a library's own, and nothing below it can be let go of by itself."""
        item = self._shares.graph.objects[member]
        name = attribute_of(owner, item)
        if name is None or not is_private_to_library(owner, name):
            return False
        if type(item) is dict:  # where traitlets has the values of attributes
            return not any(self.of(value) for value in self.of(member))
        return is_exactly(item, _PLAIN) or not self.of(member)

    def of_class(self, node: int) -> list[int]:
        """Return the attributes of a class that hold memory."""
        if not issubclass(type(self._shares.graph.objects[node]), type):
            return []
        spaces = [child for child in self._shares.carriers(node) if type(self._shares.graph.objects[child]) is dict]
        return [member for space in spaces for member in self._shares.carriers(space)]

    def narrow(self, node: int) -> int:
        """Go on to the only member that has memory, as long as there is just one."""
        while True:
            members = self.of(node)
            if len(members) != 1 or self._shares.total(members[0]) != self._shares.total(node):
                return node
            node = members[0]

    def inner_cut(self, node: int) -> int | None:
        """Find one reference to cut below the thing that many share, an item rather than an attribute."""
        found: int | None = None
        from_item = False
        while True:
            members = self.of(node)
            if len(members) != 1 or self._shares.total(members[0]) != self._shares.total(node):
                return found
            is_item = issubclass(type(self._shares.graph.objects[node]), (list, dict, deque))
            if is_item or not from_item:
                found, from_item = members[0], is_item
            node = members[0]

    def is_namespace(self, node: int) -> bool:
        """Tell whether the members have names, as attributes and the values of a dict with strings as keys do."""
        item = self._shares.graph.objects[node]
        if issubclass(type(item), dict):
            return all(type(key) is str for key in list(dict.keys(item))[:_MOST_KEYS])
        return not is_exactly(item, _PLAIN)

    def spaces(self, node: int) -> list[int]:
        """Return a namespace, and the dict its attributes lie in."""
        return [node, *(child for child in self._shares.graph.successors[node] if self._is_attributes(node, child))]

    def _is_attributes(self, node: int, child: int) -> bool:
        return (
            not is_exactly(self._shares.graph.objects[node], _PLAIN) and type(self._shares.graph.objects[child]) is dict
        )

    def _is_plain(self, item: Any) -> bool:
        kind = type(item)
        if issubclass(kind, _PLAIN) or kind is type(None):
            return item is not None
        if issubclass(kind, (type, BaseException, self._torch._C.TensorBase)) or is_node_type(kind):
            return False
        if not is_made_by_class(kind) or self._shares.is_model(item) or _has_frame(item):
            return False
        return not is_guarded(item)


def _has_frame(item: object) -> bool:
    return type_name(item) in ("Task", "Thread", "Future")
