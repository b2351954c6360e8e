"""From a chain of objects to the path a user would type, in words and as code."""

import builtins
import functools
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from types import CellType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any

from jupyter_gpumem.attributes import (
    attribute_of,
    instance_dict,
    is_instance_dict,
    plain_attribute,
    type_module,
    type_name,
)
from jupyter_gpumem.device import torch_module
from jupyter_gpumem.frames import Suspended, frame_of, is_kept_dict, name_of_local
from jupyter_gpumem.graph import is_node_type
from jupyter_gpumem.heap import is_exactly, type_mro, type_namespace
from jupyter_gpumem.literals import is_plain_name, literal

_CACHE: type = type(functools.lru_cache(lambda: None))
_GROUP: type | None = getattr(builtins, "BaseExceptionGroup", None)
_MODULE_DICTS = ("_parameters", "_modules", "_buffers")
_FRAMES = {"generator": "gi_frame", "coroutine": "cr_frame", "async_generator": "ag_frame"}


@dataclass(frozen=True, slots=True)
class Trail:
    """A path under way: what stands there in words (``text``) and in Python (``code``, None where none does).

    ``source`` is what the user would name while the path runs through tracebacks and frames, ``via`` the
    phrases that follow a local variable: ``through err``. ``verb`` begins such a phrase. ``inside`` tells
    what kind of thing the path last went into: a closure, a cache, the hooks of a module, a graph.
    """

    text: str
    code: str | None
    source: str = ""
    via: tuple[str, ...] = ()
    verb: str = "through"
    inside: str = ""

    def __str__(self) -> str:
        return ", ".join((self.text, *self.via))

    def then(self, suffix: str, code: str | None = None) -> "Trail":
        """Append what is typed the same in words and in code, unless the code is given."""
        if code is None and self.code is not None:
            code = self.code + suffix
        return replace(self, text=self.text + suffix, code=code)

    def at(self, text: str, suffix: str | None = None) -> "Trail":
        """Go on under other words; ``suffix`` is what the code goes on with, None where it ends."""
        return replace(self, text=text, code=None if suffix is None or self.code is None else self.code + suffix)

    @property
    def origin(self) -> str:
        """What the user would name as the start of the part that has no name."""
        return self.source or self.text


_MOST_STEPS = 60  # a list in a list a thousand times over has no path worth reading

Step = tuple[Trail, int]
"""The path after a step, and how many objects the step went on."""


def walk(trail: Trail, chain: Sequence[Any]) -> Trail:
    """Follow a chain of objects, each referring to the next, from the one that ``trail`` names."""
    at = 0
    while at < len(chain) - 1:
        if at >= _MOST_STEPS and len(chain) - at > 4:
            trail, at = (
                replace(trail.at(f"{trail.text} … {len(chain) - at - 1:,} steps …"), inside="object"),
                len(chain) - 2,
            )
        trail, taken = _step(_landmark(trail, chain[at]), chain, at)
        at += taken
    return _landmark(trail, chain[-1]) if chain else trail


def _step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    parent = chain[at]
    for kind, step in _STEPS:
        if issubclass(type(parent), kind):
            return step(trail, chain, at)
    return _torch(trail, chain, at) or _instance(trail, chain, at)


def _landmark(trail: Trail, item: object) -> Trail:
    """Name a task or a thread by itself when the path came to it through the library's own tables."""
    if not trail.text.startswith(("asyncio.", "_asyncio.", "threading.", "a running call", "concurrent.")):
        return trail
    if type_name(item) == "Task" and "asyncio" in type_module(item):
        return Trail(f"asyncio task {item.get_name()}", None)  # type: ignore[attr-defined]  # it is a Task
    namespace = instance_dict(item) if type_name(item) == "Thread" else None
    name = None if namespace is None else namespace.get("_name")
    return Trail(f"thread {name}", None) if type(name) is str else trail


def _mapping(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    parent, child = chain[at], chain[at + 1]
    for position, (key, value) in enumerate(dict.items(parent)):
        if value is child:
            text = literal(key)
            return (_item(trail, ".values()", position) if text is None else trail.then(f"[{text}]")), 1
        if key is child:
            return _item(trail, "", position, f"a key of {trail.text}"), 1
    return _instance(trail, chain, at)


def _item(trail: Trail, call: str, position: int, text: str | None = None) -> Trail:
    code = None if trail.code is None else f"list({trail.code}{call})[{position}]"
    return replace(trail, text=text or f"{trail.text}[…]", code=code)


def _sequence(base: Any) -> Callable[[Trail, Sequence[Any], int], Step]:
    def step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
        for position, item in enumerate(base.__iter__(chain[at])):
            if item is chain[at + 1]:
                return trail.then(f"[{position}]"), 1
        return _instance(trail, chain, at)

    return step


def _set(base: Any) -> Callable[[Trail, Sequence[Any], int], Step]:
    def step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
        for position, item in enumerate(base.__iter__(chain[at])):
            if item is chain[at + 1]:
                return _item(trail, "", position), 1
        return _instance(trail, chain, at)

    return step


def _function(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    function, child = chain[at], chain[at + 1]
    if child is function.__closure__:
        return _closure(trail, chain, at)
    if child is function.__defaults__ or child is function.__kwdefaults__:
        return _default(trail, chain, at)
    if type(child) is dict and child is function.__dict__:
        return _attributes(trail, chain, at)
    return _builtin(trail, chain, at)


def _closure(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    function, closure = chain[at], chain[at + 1]
    rest = len(chain) - at - 1
    trail = replace(trail, inside="closure")
    if rest < 2:
        return trail.at(f"closure of {trail.text}", ".__closure__"), 1
    index = next((index for index, cell in enumerate(closure) if cell is chain[at + 2]), 0)
    name = function.__code__.co_freevars[index]
    suffix = f".__closure__[{index}]" + (".cell_contents" if rest > 2 else "")
    return trail.at(f"{name} in the closure of {trail.text}", suffix), min(rest, 3)


def _default(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    function, values = chain[at], chain[at + 1]
    if len(chain) - at < 3:
        return trail.at(f"default arguments of {trail.text}"), 1
    code = function.__code__
    value = chain[at + 2]
    if type(values) is dict:
        name = next((name for name, item in values.items() if item is value), "…")
        return trail.at(f"default argument {name} of {trail.text}", f".__kwdefaults__[{name!r}]"), 2
    index = next((index for index, item in enumerate(values) if item is value), 0)
    names = code.co_varnames[: code.co_argcount][-len(values) :]
    name = names[index] if index < len(names) else "…"
    return trail.at(f"default argument {name} of {trail.text}", f".__defaults__[{index}]"), 2


def _cell(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    return trail.at(trail.text, ".cell_contents"), 1


def _method(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    return trail.then(".__self__" if chain[at + 1] is chain[at].__self__ else ".__func__"), 1


def _partial(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    fields = type_namespace(functools.partial)
    for name in ("func", "args", "keywords"):
        if fields[name].__get__(chain[at]) is chain[at + 1]:
            return trail.then(f".{name}"), 1
    return _instance(trail, chain, at)


def _cache(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    if chain[at + 1] is type_namespace(_CACHE)["__dict__"].__get__(chain[at]):
        return _attributes(trail, chain, at)
    # what it caches comes in an order of its own that no code can give
    return replace(trail.at(f"cache of {trail.text} (lru_cache)"), inside="cache"), len(chain) - at - 1


def _class(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    if type(chain[at + 1]) is dict:
        return _attributes(replace(trail, inside="class"), chain, at)
    if type(chain[at + 1]) is tuple:
        return trail.then(".__mro__"), 1
    return _builtin(trail, chain, at)


def _attributes(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from an object through the dict of its attributes to one of them."""
    if len(chain) - at < 3:
        named = trail.then(".__dict__", _wrap(trail, "vars(", ")"))
        # several attributes of the debugger: which dict they lie in tells a user nothing
        return (replace(named, text=trail.text) if trail.source == trail.text else named), 1
    owner, namespace, child = chain[at : at + 3]
    module = _module_child(trail, chain, at)
    if module is not None:
        return module
    for key, value in dict.items(namespace):
        if value is child:
            if not is_plain_name(key):
                break
            if is_exactly(child, (staticmethod, classmethod, property)) and issubclass(type(owner), type):
                return trail.then(f".{key}", _wrap(trail, "vars(", f")[{key!r}]")), 2
            return trail.then(f".{key}"), 2
    return _mapping(trail.then(".__dict__", _wrap(trail, "vars(", ")")), chain, at + 1)[0], 2


def _wrap(trail: Trail, before: str, after: str) -> str | None:
    return None if trail.code is None else f"{before}{trail.code}{after}"


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


def _error(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    error, child = chain[at], chain[at + 1]
    fields = type_namespace(BaseException)
    if child is fields["__traceback__"].__get__(error):
        return replace(trail.at(trail.text, ".__traceback__"), source=trail.origin, inside="error"), 1
    for name in ("cause", "context"):
        if child is fields[f"__{name}__"].__get__(error):
            source = f"{trail.origin} through its {name} ({type_name(child)})"
            return replace(trail.at(trail.text, f".__{name}__"), source=source, inside="error"), 1
    if child is fields["args"].__get__(error):
        return _in_group(trail, chain, at) or (trail.then(".args"), 1)
    if is_instance_dict(error, child):
        return _attributes(trail, chain, at)
    return _in_group(trail, chain, at) or _instance(trail, chain, at)


def _in_group(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
    if _GROUP is None or not issubclass(type(chain[at]), _GROUP) or not is_exactly(chain[at + 1], (tuple, list)):
        return None
    member = next((item for item in chain[at + 1 : at + 4] if issubclass(type(item), BaseException)), None)
    named = "one of its group" if member is None else f"its {type_name(member)}"
    taken = 1 if member is None else list(map(id, chain[at:])).index(id(member))
    return replace(trail.at(trail.text), source=f"{trail.origin} through {named}", inside="error"), taken


def _traceback(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    suffix = ".tb_frame" if chain[at + 1] is chain[at].tb_frame else ".tb_next"
    return replace(trail.at(trail.text, suffix), source=trail.origin), 1


def _frame(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    if chain[at + 1] is chain[at].f_back:
        return replace(trail.at(trail.text, ".f_back"), source=trail.origin), 1
    return _local(trail, chain, at, ".f_locals")


def _suspended(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    owner = chain[at]
    attribute = _FRAMES[type_name(owner)]
    if frame_of(owner) is None:
        return _builtin(trail, chain, at)
    if not trail.source and trail.code is not None:
        trail = replace(trail, source=f"the suspended {type_name(owner).replace('_', ' ')} {trail.text}", verb="in")
    return _local(trail, chain, at, f".{attribute}.f_locals")


def _local(trail: Trail, chain: Sequence[Any], at: int, suffix: str) -> Step:
    """Go from a frame to one of its local variables, past the cell or the dict it may lie in."""
    owner, child, taken = chain[at], chain[at + 1], 1
    rest = len(chain) - at - 1
    if rest > 1 and (type(child) is CellType or is_kept_dict(owner, child)):
        child, taken = chain[at + 2], 2
    frame = frame_of(owner)
    where = "" if frame is None else f"{frame.f_code.co_name}() line {frame.f_lineno}"
    name = name_of_local(owner, child)
    text = f"a value in {where}" if name is None else f"local {name} of {where}"
    code = None if name is None or trail.code is None else f"{trail.code}{suffix}[{name!r}]"
    phrase = f"{trail.verb} {trail.origin}"
    return Trail(text, code, "", (phrase, *trail.via), "through", trail.inside or "frame"), taken


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
            words = f"{trail.text}.grad" if is_gradient else f"the base of {trail.text}"
            return trail.at(words, ".grad" if is_gradient else "._base"), 1
        if is_node_type(type(child)):
            return replace(trail.at(f"the graph of {trail.text}", ".grad_fn"), inside="graph"), 1
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            field = type_namespace(torch._C.TensorBase).get(name)
            if field is not None and field.__get__(parent) is child:
                return trail.then(f".{name}"), 1
        return None
    if is_node_type(type(parent)):
        words = trail.text if trail.inside == "graph" else f"the graph of {trail.text}"
        return replace(trail.at(words), inside="graph"), 1
    return None


def _context(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a context to the value of one of its variables, past the tables between."""
    places = {id(item): place for place, item in enumerate(chain) if place > at}
    for variable, value in Context.items(chain[at]):
        if id(value) in places:
            return trail.at(f"context variable {variable.name}"), places[id(value)] - at
    return trail.at("context variables"), len(chain) - at - 1


def _array(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a numpy array of objects to one of them."""
    items = chain[at].ravel().tolist()
    place = next((place for place, item in enumerate(items) if item is chain[at + 1]), None)
    if place is None:
        return _builtin(trail, chain, at)
    return replace(trail.then(f"[{place}]"), code=_wrap(trail, "", f".flat[{place}]")), 1


def _thread_local(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a thread-local object to an attribute, past the tables of the threads."""
    for place in range(at + 1, len(chain) - 1):
        if type(chain[place]) is dict:
            name = next((key for key, value in chain[place].items() if value is chain[place + 1]), None)
            if is_plain_name(name):
                return trail.then(f".{name}"), place + 1 - at
    return _builtin(trail, chain, at)


def _future(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from an asyncio task or a future to what it has been given or has run into."""
    owner = chain[at]
    words = "asyncio task" if type_name(owner) == "Task" else "future"
    source = trail.source or (trail.text if trail.text.startswith("asyncio task") else f"{words} {trail.text}")
    if issubclass(type(chain[at + 1]), (BaseException, TracebackType)):
        return replace(trail.at(trail.text), source=source, inside="task"), 1
    if type_name(chain[at + 1]) == "coroutine":
        return replace(trail.at(trail.text), source=source), 1
    if is_instance_dict(owner, chain[at + 1]):
        return _attributes(trail, chain, at)
    return _builtin(trail, chain, at)


def _debugger(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
    """Go from a debugger to a local variable of the frame it stood at, of which it has the dict."""
    frame, namespace = (plain_attribute(chain[at], name) for name in ("curframe", "curframe_locals"))
    place = next((place for place in range(at + 1, min(at + 3, len(chain) - 1)) if chain[place] is namespace), None)
    if type(namespace) is not dict or place is None:
        return None
    if type(frame) is FrameType:
        named, taken = _local(trail, (frame, *chain[place + 1 :]), 0, ".curframe.f_locals")
        return named, place - at + taken
    # a session that has ended has let go of the frame
    name = next((name for name, value in namespace.items() if value is chain[place + 1]), "…")
    code = _wrap(trail, "", f".curframe_locals[{name!r}]")
    via = (f"{trail.verb} {trail.origin}", *trail.via)
    return Trail(f"local {name}", code, "", via, "through", "frame"), place + 1 - at


def _instance(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    parent, child = chain[at], chain[at + 1]
    if any(type_namespace(base).get("__module__") == "bdb" for base in type_mro(type(parent))):
        found = _debugger(trail, chain, at)
        if found is not None:
            return found
    if type_name(parent) == "ndarray":
        return _array(trail, chain, at)
    if type(parent) is Context:
        return _context(trail, chain, at)
    if type_name(parent) == "_local":
        return _thread_local(trail, chain, at)
    if type_name(parent) in ("Task", "Future") and "asyncio" in type_module(parent):
        return _future(trail, chain, at)
    if child is type(parent):
        return replace(trail, text=f"type({trail.text})", code=_wrap(trail, "type(", ")")), 1
    if is_instance_dict(parent, child):
        return _attributes(trail, chain, at)
    return _builtin(trail, chain, at)


def _builtin(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    name = attribute_of(chain[at], chain[at + 1])
    if name is not None:
        return trail.then(f".{name}"), 1
    words = f"{trail.text} ({type_name(chain[at])})" if trail.inside != "object" else trail.text
    return replace(trail.at(words), inside="object"), 1


_STEPS: tuple[tuple[type, Callable[[Trail, Sequence[Any], int], Step]], ...] = (
    (dict, _mapping),
    (list, _sequence(list)),
    (tuple, _sequence(tuple)),
    (deque, _sequence(deque)),
    (set, _set(set)),
    (frozenset, _set(frozenset)),
    (FunctionType, _function),
    (CellType, _cell),
    (MethodType, _method),
    (functools.partial, _partial),
    (_CACHE, _cache),
    (BaseException, _error),
    (TracebackType, _traceback),
    (FrameType, _frame),
    *((kind, _suspended) for kind in Suspended),
    (type, _class),
)
