"""What a program must not delete: a library's functions, and the private attributes that a library's class uses."""

import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import cast

from jupyter_gpumem.heap import module_namespace, type_mro, type_namespace

_INSTALLED = ("site-packages", "dist-packages")
_PROGRAMS = (FunctionType, MethodType, functools.partial, staticmethod, classmethod, property)


def stands_in_library(path: Sequence[object]) -> bool:
    """Tell whether a path leads through a function that is in a module or class of a library.

    Whether the library had one of its own there cannot be known: many names are set from C, or in a loop.
    """
    for home, item in itertools.pairwise(path):
        if issubclass(type(item), _PROGRAMS):
            return _is_of_library(home)
    return False


def is_private_to_library(owner: object, name: str) -> bool:
    """Tell whether an attribute is one that a library's class keeps for itself: its methods use the name."""
    if not name.startswith("_"):
        return False
    return any(
        type(method) is FunctionType and name in method.__code__.co_names
        for base in type_mro(type(owner))
        if _is_of_library(base)
        for method in type_namespace(base).values()
    )


def _is_of_library(home: object) -> bool:
    module: object = home
    if issubclass(type(home), type):
        module = sys.modules.get(str(type_namespace(cast("type", home)).get("__module__")))
    if not issubclass(type(module), ModuleType):
        return False
    namespace = module_namespace(cast("ModuleType", module))
    file, name = namespace.get("__file__"), str(namespace.get("__name__"))
    installed = type(file) is str and any(part in _INSTALLED for part in Path(file).parts)
    return installed or name.partition(".")[0] in sys.stdlib_module_names
