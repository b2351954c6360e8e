"""What an event loop keeps: its waiting tasks, the calls it will make, and the contexts a kernel runs cells in."""

import asyncio
import gc
from collections.abc import Iterator, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_CALLS = ("_scheduled", "_ready")


@dataclass(frozen=True, slots=True)
class Waiting:
    """Something that an event loop will go on with, its name in words, and code that makes it let go, None for none.

    ``code`` gives a task's coroutine.
    """

    item: Any
    text: str
    release: str | None
    code: str | None = None


def event_loops(shell: "InteractiveShell | None") -> list[Any]:
    """Return the loop that runs in this thread and the one that a kernel runs cells in."""
    io_loop = getattr(getattr(shell, "kernel", None), "io_loop", None)
    loops = (asyncio._get_running_loop(), getattr(io_loop, "asyncio_loop", None))
    return list({id(loop): loop for loop in loops if loop is not None}.values())


def waiting_tasks(loop: Any, variables: Mapping[str, Any]) -> Iterator[Waiting]:
    """Give the tasks of a loop that are not done, but for the one that runs: its frames are looked at anyhow."""
    for task in asyncio.all_tasks(loop):
        name, variable = task.get_name(), _variable(task, variables)
        code = f"next(task for task in __import__('asyncio').all_tasks() if task.get_name() == {name!r})"
        # a cancelled task keeps the error that ended it, and that keeps the frames
        release = f"{code}.cancel();" if variable is None else f"{variable}.cancel(); del {variable}"
        yield Waiting(task, f"asyncio task {name}", release, f"{variable or code}.get_coro()")


def waiting_calls(loop: Any, variables: Mapping[str, Any]) -> Iterator[Waiting]:
    """Give the calls that a loop is to make, now or later."""
    for handle in [handle for name in _CALLS for handle in getattr(loop, name, ())]:
        variable = _variable(handle, variables)
        release = None if variable is None else f"{variable}.cancel();"
        yield Waiting(handle, "a call scheduled in the event loop", release)


def call_lists(loop: Any) -> list[Any]:
    """Return the containers of a loop's calls."""
    return [getattr(loop, name) for name in _CALLS if hasattr(loop, name)]


def current_contexts(shell: "InteractiveShell | None") -> list[Context]:
    """Return a copy of this thread's context and the one that a kernel copied when this cell began."""
    begun = getattr(getattr(shell, "kernel", None), "_shell_context", None)
    return [copy_context(), *([begun] if type(begun) is Context else [])]


def tables_of(context: Context) -> list[Any]:
    """Return the tables in C that the values of a context lie in; unchanged contexts share them."""
    tables = [table for table in gc.get_referents(context) if type(table).__name__ == "hamt"]
    for table in tables:
        tables += [child for child in gc.get_referents(table) if type(child).__name__.startswith("hamt_")]
    return tables


def _variable(item: object, variables: Mapping[str, Any]) -> str | None:
    names = (name for name, value in list(variables.items()) if value is item and not name.startswith("_"))
    return next((name for name in names if name.isidentifier()), None)
