"""Steps of a path into functions, errors, frames and what waits in one."""

import builtins
import functools
import gc
from collections.abc import Sequence
from dataclasses import replace
from types import CellType, FrameType, TracebackType
from typing import Any

from jupyter_gpumem.attributes import is_instance_dict, plain_attribute, type_name
from jupyter_gpumem.containers import attribute_step, builtin_step
from jupyter_gpumem.frames import frame_of, is_kept_dict, name_of_local
from jupyter_gpumem.heap import is_exactly, type_namespace
from jupyter_gpumem.trail import Step, Trail

CACHE: type = type(functools.lru_cache(lambda: None))
_GROUP: type | None = getattr(builtins, "BaseExceptionGroup", None)
_FRAMES = {"generator": "gi_frame", "coroutine": "cr_frame", "async_generator": "ag_frame"}


def function_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a function into its closure, its default arguments or its attributes."""
    function, child = chain[at], chain[at + 1]
    if child is function.__closure__:
        return _closure(trail, chain, at)
    if child is function.__defaults__ or child is function.__kwdefaults__:
        return _default(trail, chain, at)
    if type(child) is dict and child is function.__dict__:
        return attribute_step(trail, chain, at)
    return builtin_step(trail, chain, at)


def _closure(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    function, closure = chain[at], chain[at + 1]
    rest = len(chain) - at - 1
    trail = replace(trail, inside="closure")
    if rest < 2:
        return trail.at(f"closure of {trail.words}", ".__closure__"), 1
    index = next((index for index, cell in enumerate(closure) if cell is chain[at + 2]), 0)
    name = function.__code__.co_freevars[index]
    suffix = f".__closure__[{index}]" + (".cell_contents" if rest > 2 else "")
    return trail.at(name, suffix, f" in the closure of {trail.words}"), min(rest, 3)


def _default(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    function, values = chain[at], chain[at + 1]
    if len(chain) - at < 3:
        return trail.at(f"default arguments of {trail.words}"), 1
    code = function.__code__
    value = chain[at + 2]
    if type(values) is dict:
        name = next((name for name, item in values.items() if item is value), "…")
        suffix = f".__kwdefaults__[{name!r}]"
    else:
        index = next((index for index, item in enumerate(values) if item is value), 0)
        names = code.co_varnames[: code.co_argcount][-len(values) :]
        name = names[index] if index < len(names) else "…"
        suffix = f".__defaults__[{index}]"
    return trail.at(f"default argument {name}", suffix, f" of {trail.words}"), 2


def cell_step(trail: Trail, _chain: Sequence[Any], _at: int) -> Step:
    """Go from the cell of a variable to its value."""
    return trail.on(".cell_contents"), 1


def method_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a bound method to its object or its function."""
    return trail.then(".__self__" if chain[at + 1] is chain[at].__self__ else ".__func__"), 1


def wrapper_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a static or class method to its function, which a user names the same."""
    if type_namespace(type(chain[at]))["__func__"].__get__(chain[at]) is chain[at + 1]:
        return trail.on(".__func__"), 1
    return builtin_step(trail, chain, at)


def partial_step(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
    """Go from a partial to its function or its arguments."""
    fields = type_namespace(functools.partial)
    for name in ("func", "args", "keywords"):
        if fields[name].__get__(chain[at]) is chain[at + 1]:
            return trail.then(f".{name}"), 1
    return None


def cache_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from an lru_cache to what it caches."""
    if chain[at + 1] is type_namespace(CACHE)["__dict__"].__get__(chain[at]):
        return attribute_step(trail, chain, at)
    # what it caches comes in an order of its own that no code can give
    return replace(trail.at(f"cache of {trail.words} (lru_cache)"), inside="cache"), len(chain) - at - 1


def error_step(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
    """Go from an error to its traceback, to the error before it, or to what it carries."""
    error, child = chain[at], chain[at + 1]
    fields = type_namespace(BaseException)
    if child is fields["__traceback__"].__get__(error):
        return replace(trail.on(".__traceback__"), source=trail.origin, inside="error"), 1
    for name in ("cause", "context"):
        if child is fields[f"__{name}__"].__get__(error):
            source = f"{trail.origin} through its {name} ({type_name(child)})"
            return replace(trail.on(f".__{name}__"), source=source, inside="error"), 1
    if child is fields["args"].__get__(error):
        return _in_group(trail, chain, at) or (trail.then(".args"), 1)
    if is_instance_dict(error, child):
        return attribute_step(trail, chain, at)
    return _in_group(trail, chain, at)


def _in_group(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
    if _GROUP is None or not issubclass(type(chain[at]), _GROUP) or not is_exactly(chain[at + 1], (tuple, list)):
        return None
    member = next((item for item in chain[at + 1 : at + 4] if issubclass(type(item), BaseException)), None)
    named = "one of its group" if member is None else f"its {type_name(member)}"
    taken = 1 if member is None else list(map(id, chain[at:])).index(id(member))
    return replace(trail.on(), source=f"{trail.origin} through {named}", inside="error"), taken


def traceback_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a traceback to its frame or to the next one."""
    suffix = ".tb_frame" if chain[at + 1] is chain[at].tb_frame else ".tb_next"
    return replace(trail.on(suffix), source=trail.origin), 1


def frame_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a frame to its caller's or to a local variable."""
    if chain[at + 1] is chain[at].f_back:
        return replace(trail.on(".f_back"), source=trail.origin), 1
    return _local(trail, chain, at, ".f_locals")


def suspended_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from a generator or a coroutine to a local variable of its frame."""
    owner = chain[at]
    attribute = _FRAMES[type_name(owner)]
    if frame_of(owner) is None:
        return builtin_step(trail, chain, at)
    if not trail.source and trail.code is not None:
        trail = replace(trail, source=f"the suspended {type_name(owner).replace('_', ' ')} {trail.words}", verb="in")
    return _local(trail, chain, at, f".{attribute}.f_locals")


def _local(trail: Trail, chain: Sequence[Any], at: int, suffix: str) -> Step:
    """Go from a frame to one of its local variables, past the cell or the dict it may lie in."""
    owner, child, taken = chain[at], chain[at + 1], 1
    rest = len(chain) - at - 1
    if rest > 1 and (type(child) is CellType or is_kept_dict(owner, child)):
        child, taken = chain[at + 2], 2
    frame = frame_of(owner)
    where = "" if frame is None else f" of {frame.f_code.co_name}() line {frame.f_lineno}"
    name = name_of_local(owner, child)
    text = "a value" if name is None else f"local {name}"
    code = None if name is None or trail.code is None else f"{trail.code}{suffix}[{name!r}]"
    phrase = f"{trail.verb} {trail.origin}"
    return Trail(text, code, "", (phrase, *trail.via), "through", trail.inside or "frame", where), taken


def future_step(trail: Trail, chain: Sequence[Any], at: int) -> Step:
    """Go from an asyncio task or a future to what it has been given or has run into."""
    owner = chain[at]
    words = "asyncio task" if type_name(owner) == "Task" else "future"
    source = trail.source or (trail.words if trail.text.startswith("asyncio task") else f"{words} {trail.words}")
    if issubclass(type(chain[at + 1]), (BaseException, TracebackType)):
        return replace(trail.on(), source=source, inside="task"), 1
    if type_name(chain[at + 1]) == "coroutine":
        return replace(trail.on(), source=source), 1
    if is_instance_dict(owner, chain[at + 1]):
        return attribute_step(trail, chain, at)
    return builtin_step(trail, chain, at)


def result_step(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
    """Go from IPython's result of a cell, met in a frame of IPython's, to the error: what keeps one keeps both."""
    if not trail.via or not issubclass(type(chain[at + 1]), BaseException):
        return None
    return Trail("the error", None, trail.via[0].removeprefix("kept by "), trail.via[1:], "kept by", "error"), 1


def debugger_step(trail: Trail, chain: Sequence[Any], at: int) -> Step | None:
    """Go from a debugger to a local variable of the frame it stood at, of which it has the dict."""
    frame, namespace = (plain_attribute(chain[at], name) for name in ("curframe", "curframe_locals"))
    place = next((place for place in range(at + 1, min(at + 3, len(chain) - 1)) if chain[place] is namespace), None)
    if type(namespace) is not dict or place is None:
        return None
    if type(frame) is not FrameType:
        # a session that was quit has let go of the frame; an error may have it still
        frame = next((one for one in gc.get_referrers(namespace) if is_kept_dict(one, namespace)), None)
        trail = trail.on()
    if frame is not None:
        named, taken = _local(trail, (frame, *chain[place + 1 :]), 0, ".curframe.f_locals")
        return named, place - at + taken
    name = next((name for name, value in namespace.items() if value is chain[place + 1]), "…")
    code = trail.wrapped("", f".curframe_locals[{name!r}]")
    via = (f"{trail.verb} {trail.origin}", *trail.via)
    return Trail(f"local {name}", code, "", via, "through", "frame"), place + 1 - at
