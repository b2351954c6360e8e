"""Telling whether what a release speaks of is still the same object, without keeping it alive."""

import ast
import itertools
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jupyter_gpumem import cuts
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.holders import Holder, Release

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_DEPTH = 4  # of containers in containers

_known: dict[int, tuple["weakref.ref[Any]", int]] = {}
_numbers = itertools.count()


def stamp_holders(shell: "InteractiveShell | None", holders: list[Holder]) -> list[Holder]:
    """Return the holders with what each release speaks of, as numbers."""
    for address in [address for address, (alive, _number) in _known.items() if alive() is None]:
        del _known[address]
    return [
        replace(holder, releases=tuple(replace(one, seen=tuple(_seen(shell, one))) for one in holder.releases))
        for holder in holders
    ]


def check_unchanged(shell: "InteractiveShell | None", release: Release) -> None:
    """Refuse a release whose objects were replaced since the report.

    Raises
    ------
    GpuMemError
        When one of them is another object now, or gone.
    """
    now = dict(_seen(shell, release))
    changed = next((what for what, stamp in release.seen if now.get(what) != stamp), None)
    if changed is not None:
        raise GpuMemError(f"{changed} has changed since: press Find leaks again   → %gpumem leaks")


def _seen(shell: "InteractiveShell | None", release: Release) -> Iterator[tuple[str, int]]:
    namespace: dict[str, Any] = vars(sys.modules["__main__"]) if shell is None else shell.user_ns
    for name in release.names:
        if name in namespace:
            yield name, _stamp(namespace[name])
    for number in release.outputs:
        for address in cuts.output_ids(shell, (number,)):
            yield f"Out[{number}]", address
    if release.action == "errors":
        yield "the last error", _stamp(getattr(sys, "last_value", None))
    if release.action == "debugger":
        yield "the ended %debug session", _stamp(getattr(getattr(shell, "InteractiveTB", None), "pdb", None))
    if release.code:
        yield from _seen_by_code(release.code, namespace)


def _seen_by_code(code: str, namespace: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Stamp every variable, attribute and item that the code of a remedy names."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError:
        return  # it says so itself when it is run
    loops = [node.target for node in nodes if isinstance(node, ast.comprehension | ast.For)]
    own = {name.id for target in loops for name in ast.walk(target) if isinstance(name, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            try:
                value = _look_up(node, namespace, own)
            except (LookupError, AttributeError, TypeError):
                continue
            yield ast.unparse(node), _stamp(value)


def _look_up(node: ast.AST, namespace: dict[str, Any], own: set[str]) -> Any:
    """Return what an expression names, where that can be told without running anybody's code."""
    if isinstance(node, ast.Name) and node.id not in own:
        return namespace[node.id]
    if isinstance(node, ast.Attribute):
        return object.__getattribute__(_look_up(node.value, namespace, own), "__dict__")[node.attr]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        holder = _look_up(node.value, namespace, own)
        return holder[node.slice.value] if type(holder) in (list, tuple, dict) else _unknown()
    return _unknown()


def _unknown() -> Any:
    raise LookupError


def _stamp(value: object, depth: int = _DEPTH) -> int:
    """Return a number that no later object has, where the object can be told from one at the same address."""
    found = _known.get(id(value))
    if found is not None and found[0]() is value:
        return found[1]
    try:
        alive = weakref.ref(value)
    except TypeError:
        # a list that comes to stand where one was deleted is known by what is first in it
        return hash((id(value), id(type(value)), *(_stamp(one, depth - 1) for one in _first(value, depth))))
    _known[id(value)] = alive, next(_numbers)
    return _known[id(value)][1]


def _first(value: object, depth: int) -> list[Any]:
    if depth == 0 or type(value) not in (list, tuple, dict):
        return []
    items = value.values() if isinstance(value, dict) else value
    return list(itertools.islice(items, 1))  # type: ignore[call-overload]  # one of the three, as told above
