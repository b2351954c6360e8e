"""Functions that a program set in place of a library's own: deleting one breaks the library."""

import functools
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

from jupyter_gpumem.heap import module_namespace, type_namespace

_INSTALLED = ("site-packages", "dist-packages")
_PROGRAMS = (FunctionType, MethodType, functools.partial, staticmethod, classmethod, property)
_MOST_BYTES = 4_000_000


def is_replaced(home: object, value: object) -> bool:
    """Tell whether a function of a module or class stands where the library that this is of defines one."""
    if issubclass(type(home), type):
        namespace: Mapping[Any, Any] = type_namespace(cast("type", home))
        module = sys.modules.get(str(namespace.get("__module__")))
    else:
        module = cast("ModuleType", home) if issubclass(type(home), ModuleType) else None
        namespace = {} if module is None else module_namespace(module)
    name = next((name for name, held in list(namespace.items()) if held is value), None)
    source = None if module is None or type(name) is not str else _source_of_library(module_namespace(module))
    return source is not None and re.search(rf"\b{re.escape(str(name))}\b", source) is not None


def stands_in_library(path: Sequence[object]) -> bool:
    """Tell whether a path leads through a function that stands in a module or class for one of a library's own."""
    for home, item in itertools.pairwise(path):
        if issubclass(type(item), _PROGRAMS):
            return is_replaced(home, item)
    return False


def _source_of_library(namespace: Mapping[str, Any]) -> str | None:
    """Return the text of a library's module, empty where it is not written in Python; None for the user's own."""
    module, file = namespace.get("__name__"), namespace.get("__file__")
    installed = type(file) is str and any(part in _INSTALLED for part in Path(file).parts)
    if not installed and str(module).partition(".")[0] not in sys.stdlib_module_names:
        return None
    try:
        with open(str(file), encoding="utf-8", errors="replace") as text:
            return text.read(_MOST_BYTES)
    except OSError:
        return ""
