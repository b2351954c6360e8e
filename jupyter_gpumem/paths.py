"""From a chain of objects to the path a user would type."""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import replace
from types import CellType, FrameType, FunctionType, MappingProxyType, MethodType, TracebackType
from typing import Any

from jupyter_gpumem.attributes import instance_dict, is_instance_dict, type_module, type_name
from jupyter_gpumem.calls import (
    CACHE,
    cache_step,
    cell_step,
    debugger_step,
    error_step,
    frame_step,
    function_step,
    future_step,
    method_step,
    partial_step,
    result_step,
    suspended_step,
    traceback_step,
    wrapper_step,
)
from jupyter_gpumem.containers import (
    array_step,
    attribute_step,
    builtin_step,
    class_step,
    mapping_step,
    sequence_step,
    set_step,
    thread_local_step,
    view_step,
)
from jupyter_gpumem.device import torch_module
from jupyter_gpumem.frames import Suspended
from jupyter_gpumem.graph import is_node_type
from jupyter_gpumem.heap import is_exactly, is_made_by_class, type_mro, type_namespace
from jupyter_gpumem.hooks import TENSOR_TABLES, tensor_tables
from jupyter_gpumem.trail import Step, Trail
from jupyter_gpumem.untracked import is_array

_MOST_STEPS = 60  # a list in a list a thousand times over has no path worth reading
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def walk(trail: Trail, chain: Sequence[Any]) -> Trail:
    """Follow a chain of objects, each referring to the next, from the one that ``trail`` names."""
    at = 0
    while at < len(chain) - 1:
        if at >= _MOST_STEPS and len(chain) - at > 4:
            trail = replace(trail.at(f"{trail.words} … {len(chain) - at - 1:,} steps …"), inside="object")
            at = len(chain) - 2
        trail, taken = _step(_landmark(trail, chain[at]), chain, at)
        at += taken
    return _landmark(trail, chain[-1]) if chain else trail


def _step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    parent = chain[at]
    for kind, step in _STEPS:
        if issubclass(type(parent), kind):
            return step(trail, chain, at) or _instance(trail, chain, at)
    return _torch(trail, chain, at) or _instance(trail, chain, at)


def _iterator(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from an iterator in C past the iterators and containers it works through: no code reaches into those."""
    place = at + 1
    while place < len(chain) - 1 and (is_exactly(chain[place], _CONTAINERS) or _is_iterator(chain[place])):
        place += 1
    if trail.inside == "iterator":
        return trail, place - at
    within = "in " if trail.text.startswith("local ") else ""
    named = trail.at(f"the iterator {within}{trail.text} ({type_name(chain[at])})", tail=trail.tail)
    return replace(named, inside="iterator"), place - at


def _is_iterator(item: object) -> bool:
    """Tell whether an object is an iterator that no Python code makes up."""
    kind = type(item)
    has_next = any("__next__" in type_namespace(base) for base in type_mro(kind))
    # what tee() shares between its iterators
    return (
        (has_next or type_name(item) == "_tee_dataobject")
        and not is_made_by_class(kind)
        and not issubclass(kind, Suspended)
    )


def _landmark(trail: Trail, item: object) -> Trail:
    """Name a task or a thread by itself when the path came to it through the library's own tables."""
    if not trail.text.startswith(("asyncio.", "_asyncio.", "threading.", "a running call", "concurrent.")):
        return trail
    if type_name(item) == "Task" and "asyncio" in type_module(item):
        return Trail(f"asyncio task {item.get_name()}", None)  # type: ignore[attr-defined]  # it is a Task
    namespace = instance_dict(item) if type_name(item) == "Thread" else None
    name = None if namespace is None else namespace.get("_name")
    return Trail(f"thread {name}", None) if type(name) is str else trail


def _torch(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
    """Go from a tensor or a graph node into what its C++ side refers to."""
    torch = torch_module()
    parent, child = chain[at], chain[at + 1]
    if torch is None:
        return None
    if issubclass(type(child), torch._C.StorageBase):
        return trail, 1
    if issubclass(type(parent), torch._C.TensorBase):
        if issubclass(type(child), torch._C.TensorBase) and trail.inside != "graph":
            fields = type_namespace(torch._C.TensorBase)
            with torch._C.DisableTorchFunction():
                is_base = fields["_base"].__get__(parent) is child
                is_gradient = not is_base and fields["is_leaf"].__get__(parent)
            return (trail.then(".grad") if is_gradient else trail.at(f"the base of {trail.words}", "._base")), 1
        if is_node_type(type(child)):
            return replace(trail.at(f"the graph of {trail.words}", ".grad_fn"), inside="graph"), 1
        for name, table in zip(TENSOR_TABLES, tensor_tables(parent, torch), strict=True):
            if table is child:
                return trail.then(f".{name}"), 1
        return None
    if is_node_type(type(parent)):
        words = trail.words if trail.inside == "graph" else f"the graph of {trail.words}"
        return replace(trail.at(words), inside="graph"), 1
    return None


def _context(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a context to the value of one of its variables, past the tables between."""
    places = {id(item): place for place, item in enumerate(chain) if place > at}
    owner = "" if trail.code is None else f" of {trail.words}"
    for variable, value in Context.items(chain[at]):
        if id(value) in places:
            return trail.at(f"context variable {variable.name}", tail=owner), places[id(value)] - at
    return trail.at(f"context variables{owner}"), len(chain) - at - 1


def _instance(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    parent, child = chain[at], chain[at + 1]
    if any(type_namespace(base).get("__module__") == "bdb" for base in type_mro(type(parent))):
        found = debugger_step(trail, chain, at)
        if found is not None:
            return found
    if type_name(parent) == "ExecutionResult":
        result = result_step(trail, chain, at)
        if result is not None:
            return result
    if is_array(parent):
        return array_step(trail, chain, at)
    if _is_iterator(parent):
        return _iterator(trail, chain, at)
    if type(parent) is Context:
        return _context(trail, chain, at)
    if type_name(parent) == "_local":
        return thread_local_step(trail, chain, at)
    if type_name(parent) in ("Task", "Future") and "asyncio" in type_module(parent):
        return future_step(trail, chain, at)
    if child is type(parent):
        return replace(trail.at(f"type({trail.words})"), code=trail.wrapped("type(", ")")), 1
    if is_instance_dict(parent, child):
        return attribute_step(trail, chain, at)
    return builtin_step(trail, chain, at)


_STEPS: tuple[tuple[type, Callable[[Trail, Sequence[Any], int], Step | None]], ...] = (
    (dict, mapping_step),
    (list, sequence_step(list)),
    (tuple, sequence_step(tuple)),
    (deque, sequence_step(deque)),
    (set, set_step(set)),
    (frozenset, set_step(frozenset)),
    (MappingProxyType, view_step),
    (FunctionType, function_step),
    (CellType, cell_step),
    (MethodType, method_step),
    (staticmethod, wrapper_step),
    (classmethod, wrapper_step),
    (functools.partial, partial_step),
    (CACHE, cache_step),
    (BaseException, error_step),
    (TracebackType, traceback_step),
    (FrameType, frame_step),
    *((kind, suspended_step) for kind in Suspended),
    (type, class_step),
)
