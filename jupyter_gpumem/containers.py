"""Steps of a path into containers and attributes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import local
from typing import Any

from jupyter_gpumem.attributes import attribute_of, type_name
from jupyter_gpumem.device import torch_module
from jupyter_gpumem.heap import type_mro, type_namespace
from jupyter_gpumem.literals import is_plain_name, literal
from jupyter_gpumem.trail import Step, Trail
from jupyter_gpumem.untracked import place_in_array

_MODULE_DICTS = ("_parameters", "_modules", "_buffers")


def mapping_step(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
    """Go from a dict to a value, or to a key."""
    parent, child = chain[at], chain[at + 1]
    for position, (key, value) in enumerate(dict.items(parent)):
        if value is child:
            text = literal(key)
            return (_item(trail, ".values()", position) if text is None else trail.then(f"[{text}]")), 1
        if key is child:
            code = trail.wrapped("list(", f")[{position}]")
            return replace(trail, text="a key", tail=f" of {trail.words}", code=code), 1
    return None


def _item(trail: Trail, call: str, position: int) -> Trail:
    return replace(trail, text=f"{trail.text}[…]", code=trail.wrapped("list(", f"{call})[{position}]"))


def sequence_step(base: Any) -> Callable[[Trail, Sequence[Any], int], Step | None]:
    """Return the step from a list, a tuple or a deque to an item."""

    def step(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
        for position, item in enumerate(base.__iter__(chain[at])):
            if item is chain[at + 1]:
                name = _field(type(chain[at]), position)
                return trail.then(f"[{position}]" if name is None else f".{name}"), 1
        return None

    return step


def _field(kind: type, position: int) -> str | None:
    """Return the name of a field of a named tuple."""
    fields = next((type_namespace(base)["_fields"] for base in type_mro(kind) if "_fields" in type_namespace(base)), ())
    if not issubclass(kind, tuple) or type(fields) is not tuple or position >= len(fields):
        return None
    return str(fields[position]) if is_plain_name(fields[position]) else None


def set_step(base: Any) -> Callable[[Trail, Sequence[Any], int], Step | None]:
    """Return the step from a set or a frozenset to a member."""

    def step(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
        for position, item in enumerate(base.__iter__(chain[at])):
            if item is chain[at + 1]:
                return _item(trail, "", position), 1
        return None

    return step


def view_step(trail: Trail, _chain: Sequence[Any], _at: int) -> Step:
    """Go from a read-only view to the dict it shows: what is typed after it is the same."""
    return trail, 1


def array_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a numpy array of objects to one of them, or to the array whose objects it shows."""
    place = place_in_array(chain[at], chain[at + 1])
    return builtin_step(trail, chain, at) if place is None else (trail.then(place), 1)


def thread_local_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a thread-local object to an attribute, past the tables of the threads."""
    for place in range(at + 1, len(chain) - 1):
        if type(chain[place]) is dict:
            name = next((key for key, value in chain[place].items() if value is chain[place + 1]), None)
            if is_plain_name(name):
                # a class of the user's would run its __init__ in this thread
                is_plain = type(chain[at]) is local
                is_here = is_plain and local.__getattribute__(chain[at], "__dict__") is chain[place]
                named = trail.then(f".{name}")
                return (named if is_here else named.at(named.text, tail=" of another thread")), place + 1 - at
    return builtin_step(trail, chain, at)


def class_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a class to one of its attributes."""
    if type(chain[at + 1]) is dict:
        return attribute_step(replace(trail, inside="class"), chain, at)
    if type(chain[at + 1]) is tuple:
        return trail.then(".__mro__"), 1
    return builtin_step(trail, chain, at)


def attribute_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from an object through the dict of its attributes to one of them."""
    in_dict = trail.then(".__dict__", trail.wrapped("vars(", ")"))
    if len(chain) - at < 3:
        # several attributes of the debugger: which dict they lie in tells a user nothing
        return (replace(in_dict, text=trail.text) if trail.source == trail.text else in_dict), 1
    owner, namespace, child = chain[at : at + 3]
    module = _module_child(trail, chain, at)
    if module is not None:
        return module
    for key, value in dict.items(namespace):
        if value is child:
            if not is_plain_name(key):
                break
            if issubclass(type(owner), type) and _is_descriptor(child):
                return trail.then(f".{key}", trail.wrapped("vars(", f")[{key!r}]")), 2
            return trail.then(f".{key}"), 2
    step = mapping_step(in_dict, chain, at + 1)
    return (in_dict, 1) if step is None else (step[0], 2)


def _is_descriptor(item: object) -> bool:
    """Tell whether a class gives something else for an attribute than what it has; functions are given as they are."""
    is_function = type_name(item) in ("function", "_lru_cache_wrapper")
    return not is_function and any("__get__" in type_namespace(base) for base in type_mro(type(item)))


def _module_child(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
    """Write ``model.layers[3]`` and ``model.weight`` for what an nn.Module keeps in dicts of its own."""
    torch = torch_module()
    if torch is None or len(chain) - at < 4 or not issubclass(type(chain[at]), torch.nn.Module):
        return None
    owner, namespace, table, child = chain[at : at + 4]
    name = next((name for name in _MODULE_DICTS if namespace.get(name) is table), None)
    key = next((key for key, value in dict.items(table) if value is child), None) if name else None
    if name is None or type(key) is not str:
        return None
    containers = torch.nn
    if is_plain_name(key):
        indexed = issubclass(type(owner), (containers.ModuleDict, containers.ParameterDict))
        return trail.then(f"[{key!r}]" if indexed else f".{key}"), 3
    if issubclass(type(owner), (containers.Sequential, containers.ModuleList, containers.ParameterList)):
        return trail.then(f"[{key}]"), 3
    call = {"_modules": "get_submodule", "_parameters": "get_parameter", "_buffers": "get_buffer"}[name]
    return trail.then(f".{call}({key!r})"), 3


def builtin_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from any object to what a slot or a C field of it is; by its type's name where there is no such."""
    name = attribute_of(chain[at], chain[at + 1])
    if name is not None:
        return trail.then(f".{name}"), 1
    words = f"{trail.text} ({type_name(chain[at])})" if trail.inside != "object" else trail.text
    return replace(trail.at(words, tail=trail.tail), inside="object"), 1
