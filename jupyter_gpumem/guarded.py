"""Calls into C code that must not come back into Python."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class PythonRefusedError(Exception):
    """A Python function was about to be called where none may run; ``args`` are its arguments and its closure's."""


def is_profiled() -> bool:
    """Tell whether a profiler watches this thread: its place is the one needed here."""
    return sys.getprofile() is not None


def without_python(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a function of C code; no Python function that it would call gets to run.

    Raises
    ------
    PythonRefusedError
        Instead of such a call.
    """
    sys.setprofile(_refuse)
    try:
        return function(argument)
    finally:
        sys.setprofile(None)


def _refuse(frame: FrameType, event: str, _argument: Any) -> None:
    if event == "call":  # its first instruction has not run yet
        raise PythonRefusedError(*frame.f_locals.values())
