"""Cutting what IPython and Python keep of results, errors and debugging sessions."""

import builtins
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from inspect import CO_NEWLOCALS
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_UNDERSCORES = ("_", "__", "___")
# the first exists from Python 3.12 on
_LAST = ("last_exc", "last_type", "last_value", "last_traceback")
_ERROR_ATTRIBUTES = ("tb", "etype", "evalue")
# whose frames stand below and above the user's own
_MACHINERY = frozenset({"IPython", "ipykernel", "traitlets", "decorator", "jupyter_gpumem"})
_RESULT_ERRORS = ("error_before_exec", "error_in_exec")

# the interpreter's own slots: a class may override the attribute, and its code is not ours to run
_CAUSE, _CONTEXT, _TRACEBACK = (vars(BaseException)[name] for name in ("__cause__", "__context__", "__traceback__"))
# Python 3.10 has no groups
_GROUP: type | None = getattr(builtins, "BaseExceptionGroup", None)

Wanted = Callable[[object], bool]


def running_shell() -> "InteractiveShell | None":
    """Return the shell of a notebook or an IPython terminal, None in a plain program; imports nothing."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def cut_outputs(shell: "InteractiveShell | None", wanted: Wanted, *, dry_run: bool = False) -> tuple[str, ...]:
    """Drop IPython's copies of the results that ``wanted`` says yes to; return their names.

    The copies are ``Out``, ``_N``, ``_``, ``__``, ``___``, those of the display hook, the hidden
    ones, and the result of the cell before. What the user bound to such a name stays.
    """
    if shell is None:
        return ()
    names: list[str] = []
    outputs = shell.user_ns.get("_oh")
    for number, value in list(outputs.items() if isinstance(outputs, dict) else ()):
        if wanted(value):
            names.append(f"Out[{number}]")
            names += _cut_numbered(shell, number, value, dry_run)
            if not dry_run:
                outputs.pop(number, None)
        del value
    names += _cut_orphans(shell, wanted, dry_run)
    names += _cut_underscores(shell, wanted, dry_run)
    if _cut_last_result(shell, wanted, dry_run):
        names.append("the last cell's result")
    return tuple(names)


def output_ids(shell: "InteractiveShell | None", numbers: Collection[int]) -> frozenset[int]:
    """Return the addresses of the results that IPython keeps of some cells."""
    if shell is None:
        return frozenset()
    outputs = shell.user_ns.get("_oh", {})
    kept = [outputs.get(number, shell.user_ns_hidden.get(f"_{number}")) for number in numbers]
    return frozenset(id(value) for value in kept if value is not None)


def _cut_numbered(shell: "InteractiveShell", number: int, value: object, dry_run: bool) -> list[str]:
    """Drop ``_N`` where it is still IPython's copy of ``Out[N]``."""
    name = f"_{number}"
    found = [space for space in (shell.user_ns, shell.user_ns_hidden) if space.get(name) is value]
    for space in () if dry_run else found:
        space.pop(name, None)
    return [name] if found else []


def _cut_orphans(shell: "InteractiveShell", wanted: Wanted, dry_run: bool) -> list[str]:
    """Drop copies under ``_N`` whose ``Out[N]`` is gone already (``del Out[3]`` leaves two behind)."""
    outputs = shell.user_ns.get("_oh", {})
    names = []
    for name, value in list(shell.user_ns_hidden.items()):
        if name[:1] == "_" and name[1:].isdecimal() and int(name[1:]) not in outputs and wanted(value):
            names.append(name)
            if not dry_run:
                shell.user_ns_hidden.pop(name, None)
                if shell.user_ns.get(name) is value:
                    shell.user_ns.pop(name, None)
        del value
    return names


def _cut_underscores(shell: "InteractiveShell", wanted: Wanted, dry_run: bool) -> list[str]:
    names = []
    for name in _UNDERSCORES:
        ours = [getattr(shell.displayhook, name, None), shell.user_ns_hidden.get(name)]
        value = shell.user_ns.get(name)
        bound_by_user = not any(value is copy for copy in ours)
        if any(wanted(copy) for copy in ours):
            names.append(name)
            if not dry_run:
                # all three alike, or the display hook takes the name for the user's and stops setting it
                setattr(shell.displayhook, name, "")
                shell.user_ns_hidden[name] = ""
                if not bound_by_user:
                    shell.user_ns[name] = ""
        del ours, value
    return names


def _cut_last_result(shell: "InteractiveShell", wanted: Wanted, dry_run: bool) -> bool:
    result = shell.last_execution_result
    if result is None or not wanted(result.result):
        return False
    if not dry_run:
        result.result = None
    return True


def describe_error(shell: "InteractiveShell | None") -> str | None:
    """Name the last error and its cell (``ValueError in cell 12``); ``None`` where nothing is kept."""
    errors, stale = _last_errors(shell), _stale_tracebacks(shell)
    names = [(type(error).__name__, _TRACEBACK.__get__(error)) for error in errors[:1]]
    names += [("an earlier error", trace) for trace in stale[:1]]
    cells = [(name, _cell_of(shell, trace)) for name, trace in names]
    return " and ".join(name + ("" if cell is None else f" in cell {cell}") for name, cell in cells) or None


def cut_error(shell: "InteractiveShell | None") -> str | None:
    """Drop the last error: its frames along the whole chain, and every place that keeps it.

    The text on the page stays; ``%tb`` and ``%debug`` have nothing left. Returns what
    `describe_error` said before.
    """
    description = describe_error(shell)
    for error in _chain(_last_errors(shell)):
        # clear_frames() would leave the dict that f_locals made (Python up to 3.12)
        _TRACEBACK.__set__(error, None)
    for name in _LAST:
        if hasattr(sys, name):
            delattr(sys, name)
    if shell is not None:
        for name in _ERROR_ATTRIBUTES:
            if getattr(shell.InteractiveTB, name, None) is not None:
                setattr(shell.InteractiveTB, name, None)
        for name in _RESULT_ERRORS:
            if shell.last_execution_result is not None:
                setattr(shell.last_execution_result, name, None)
    return description


def error_holds(shell: "InteractiveShell | None", wanted: Wanted) -> bool:
    """Tell whether the last error, with its frames and chain, holds what ``wanted`` says yes to."""
    return any(map(wanted, [*_last_errors(shell), *_stale_tracebacks(shell)]))


def error_may_hold(shell: "InteractiveShell | None", wanted: Wanted) -> bool:
    """Tell whether dropping the last error could free anything.

    A mistyped name in a cell keeps nothing and stays for ``%debug``. An error out of a function may hold
    what only C++ knows of.
    """
    traces = [_TRACEBACK.__get__(error) for error in _chain(_last_errors(shell))]
    return error_holds(shell, wanted) or any(map(_has_user_frame, [*traces, *_stale_tracebacks(shell)]))


def _has_user_frame(trace: TracebackType | None) -> bool:
    """Tell whether a traceback goes through a function that is neither IPython's nor ours."""
    while trace is not None:
        frame = trace.tb_frame
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_flags & CO_NEWLOCALS and package not in _MACHINERY:
            return True
        trace = trace.tb_next
    return False


def has_debugger(shell: "InteractiveShell | None") -> bool:
    """Tell whether IPython keeps a debugger, as it does after ``%debug``."""
    return shell is not None and getattr(shell.InteractiveTB, "pdb", None) is not None


def cut_debugger(shell: "InteractiveShell | None") -> bool:
    """Drop the debugger that IPython keeps after ``%debug``; the next ``%debug`` makes a new one."""
    if shell is None or not has_debugger(shell):
        return False
    shell.InteractiveTB.pdb = None
    return True


def _last_errors(shell: "InteractiveShell | None") -> list[BaseException]:
    """Return the errors kept as the last one, the newest first, each once."""
    kept: list[object] = []
    if shell is not None:
        kept += [getattr(shell.last_execution_result, name, None) for name in reversed(_RESULT_ERRORS)]
    kept += [getattr(sys, name, None) for name in _LAST]
    if shell is not None:
        kept.append(getattr(shell.InteractiveTB, "evalue", None))
    errors: dict[int, BaseException] = {}
    for error in kept:
        if isinstance(error, BaseException):
            errors.setdefault(id(error), error)
    return list(errors.values())


def _stale_tracebacks(shell: "InteractiveShell | None") -> list[TracebackType]:
    """Return tracebacks kept for errors that are kept no more.

    A syntax or usage error replaces the last error, and leaves the traceback of the one before with IPython.
    """
    kept = [getattr(sys, "last_traceback", None)]
    if shell is not None:
        kept.append(getattr(shell.InteractiveTB, "tb", None))
    known = {id(_TRACEBACK.__get__(error)) for error in _chain(_last_errors(shell))}
    return [trace for trace in kept if isinstance(trace, TracebackType) and id(trace) not in known]


def _chain(errors: Sequence[BaseException]) -> Iterator[BaseException]:
    """Yield the errors with their causes, contexts and the members of their groups, each once."""
    waiting, seen = list(errors), set[int]()
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        linked: list[Any] = [_CAUSE.__get__(error), _CONTEXT.__get__(error)]
        if _GROUP is not None and issubclass(type(error), _GROUP):
            linked += vars(_GROUP)["exceptions"].__get__(error)
        waiting += [other for other in linked if other is not None]
        yield error


def _cell_of(shell: "InteractiveShell | None", trace: TracebackType | None) -> int | None:
    """Return the number of the cell an error came from, where IPython still knows its file."""
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    while trace is not None:
        number = numbers.get(trace.tb_frame.f_code.co_filename)
        if number is not None:
            return int(number)
        trace = trace.tb_next
    return None
