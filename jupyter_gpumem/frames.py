"""The local variables of frames, read so that the frame is left as it was."""

import gc
import sys
from collections.abc import Iterator
from types import AsyncGeneratorType, CellType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any

_OPTIMIZED = 0x1  # inspect.CO_OPTIMIZED: a function's frame, whose locals are no namespace of their own
_IN_C_SLOTS = sys.version_info >= (3, 13)  # PEP 667: reading f_locals leaves nothing in the frame

Suspended = (GeneratorType, CoroutineType, AsyncGeneratorType)
"""What holds a frame of its own while it waits."""


def frame_of(owner: object) -> FrameType | None:
    """Return the frame of a frame, generator or coroutine; None once that has ended."""
    kind = type(owner)
    if kind is FrameType:
        return owner  # type: ignore[return-value]  # its exact type was asked above
    for expected, attribute in zip(Suspended, ("gi_frame", "cr_frame", "ag_frame"), strict=True):
        if kind is expected:
            frame: FrameType | None = getattr(owner, attribute)
            return frame
    return None


def local_variables(owner: object) -> list[tuple[str, Any]]:
    """Return names and values of the locals of a frame, or of what waits in one.

    Up to Python 3.12 reading ``f_locals`` stores a dict in the frame that keeps its values alive, and reading
    it again empties what ``traceback.clear_frames`` left there. So a dict that is there is read as it is, and
    one that was not is emptied again.
    """
    frame = frame_of(owner)
    if frame is None:
        return []
    code = frame.f_code
    if not code.co_flags & _OPTIMIZED:
        namespace = frame.f_locals
        return list(namespace.items()) if type(namespace) is dict else []
    if _IN_C_SLOTS:
        return [(name, value) for name, value in dict(frame.f_locals).items()]
    held = gc.get_referents(owner)
    kept = _kept_dict(held, code)
    if kept:
        return list(kept.items())
    found = frame.f_locals
    values = list(found.items())
    if not _is_traced(frame):
        found.clear()
    return values


def name_of_local(owner: object, value: object) -> str | None:
    """Return the name of the local that is ``value``, or the cell around it."""
    wanted = value
    if type(value) is CellType:
        try:
            wanted = value.cell_contents
        except ValueError:
            return None
    return next((name for name, found in local_variables(owner) if found is wanted or found is value), None)


def is_kept_dict(owner: object, held: object) -> bool:
    """Tell whether ``held`` is the dict of locals that reading ``f_locals`` once left in a frame."""
    frame = frame_of(owner)
    if frame is None or type(held) is not dict or _IN_C_SLOTS:
        return False
    return _kept_dict(gc.get_referents(owner), frame.f_code) is held


def running_frames() -> Iterator[tuple[int, FrameType]]:
    """Give every frame of every thread, innermost first, with the thread's identifier."""
    frame: FrameType | None
    # no name is left on a frame: this generator's own is among them, and a cycle would keep every caller's locals
    for thread, frame in sys._current_frames().items():
        while frame is not None:
            yield thread, frame
            frame = frame.f_back


def _kept_dict(held: list[Any], code: CodeType) -> dict[str, Any] | None:
    """Find the dict of locals among what a frame refers to: it stands at a fixed place beside the code."""
    at = next((index for index, item in enumerate(held) if item is code), None)
    if at is None:
        return None
    at = at - 2 if sys.version_info >= (3, 11) else at + 3
    if not 0 <= at < len(held) or type(held[at]) is not dict:
        return None
    names = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    candidate: dict[str, Any] = held[at]
    return candidate if all(type(key) is str and key in names for key in candidate) else None


def _is_traced(frame: FrameType) -> bool:
    # a debugger writes the dict back into the frame: emptied, it would delete the user's variables
    return frame.f_trace is not None or sys.gettrace() is not None
