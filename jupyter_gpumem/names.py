"""Which of the user's names may be deleted, and deleting exactly those."""

import ast
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.errors import GpuMemError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# what IPython binds, also where user_ns_hidden no longer says so
_IPYTHON = re.compile(r"In|Out|get_ipython|exit|quit|open|__\w+__|_{1,3}|_\d+|_i\d*|_ii|_iii|_dh|_oh|_ih")
_PROGRAM: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("module", (ModuleType,)),
    ("class", (type,)),
    ("function", (FunctionType, BuiltinFunctionType, MethodType)),
)


def check_names(shell: "InteractiveShell | None", names: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names once each, after all of them were found deletable; ``a,b`` are two.

    Raises
    ------
    GpuMemError
        When one is not a variable of the user's, is IPython's, or is a module, class or function; then
        none has been touched.
    """
    names = [names] if isinstance(names, str) else names  # and not its letters
    parted = [part for name in names for part in (name.rstrip(",").split(",") if "," in name else [name])]
    checked = tuple(dict.fromkeys(parted))
    if shell is None and checked:
        raise GpuMemError(f"only a notebook's variables go by name; in a program: del {', '.join(checked)}")
    if shell is not None:
        for name in checked:
            _check(shell, name)
    return checked


def _is_deletable(target: str) -> bool:
    """Tell whether ``del`` takes an expression: ``model.head`` and ``losses[3]``, not ``f()`` or ``3``."""
    try:
        ast.parse(f"del {target}")
    except (SyntaxError, ValueError):
        return False
    return True


def _check(shell: "InteractiveShell", name: str) -> None:
    if not name.isidentifier():
        then = f"; del {name} first, then %gpu_free" if _is_deletable(name) else ""
        raise GpuMemError(f"{name!r} is not a variable's name{then}")
    if is_ipythons(name):
        raise GpuMemError(
            f"{name} belongs to IPython; %gpu_free without names lets its GPU results go. If you bound it: del {name}"
        )
    if name not in shell.user_ns:
        known = [other for other, _value in user_variables(shell)]
        near = difflib.get_close_matches(name, known, 1)
        raise GpuMemError(f"no variable named {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    value = shell.user_ns[name]
    if name in shell.user_ns_hidden and shell.user_ns_hidden[name] is value:
        raise GpuMemError(f"{name} was bound by IPython, not by you; it stays")
    kind = program_kind(value)
    if kind is not None:
        raise GpuMemError(f"{name} is a {kind}; only data is deleted here   → del {name}")


def user_variables(shell: "InteractiveShell") -> list[tuple[str, Any]]:
    """Return what the user bound, in the order it was bound; IPython's own names are left out."""
    hidden = shell.user_ns_hidden
    return [
        (name, value)
        for name, value in list(shell.user_ns.items())
        if not is_ipythons(name) and not (name in hidden and hidden[name] is value)
    ]


def is_ipythons(name: str) -> bool:
    """Tell whether a name is one that IPython binds, whoever bound it last."""
    return _IPYTHON.fullmatch(name) is not None


def program_kind(value: object) -> str | None:
    """Return ``module``, ``class`` or ``function`` for a part of the program, ``None`` for data."""
    # type(), as an object may claim any __class__
    return next((kind for kind, types in _PROGRAM if issubclass(type(value), types)), None)


def other_names(shell: "InteractiveShell", names: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return each name whose object has further names of the user's, with those."""
    variables = user_variables(shell)
    found = []
    for name in names:
        others = tuple(other for other, value in variables if value is shell.user_ns[name] and other not in names)
        found += [(name, others)] if others else []
    return tuple(found)


def names_holding(
    shell: "InteractiveShell", holds: Callable[[object], bool]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the user's variables that hold memory: those that may be deleted, and the program's own."""
    data: list[str] = []
    program: list[str] = []
    for name, value in user_variables(shell):
        kind = program_kind(value)
        if kind != "module" and holds(value):
            (data if kind is None else program).append(name)
    return tuple(data), tuple(program)


def delete_names(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Delete exactly these names; ``shell.del_var`` would delete every other name of the same object."""
    for name in names:
        namespace.pop(name, None)
