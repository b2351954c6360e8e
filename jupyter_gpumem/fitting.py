"""Finding the value of one number, such as a batch size, with which a cell or a function fits on the GPU."""

import difflib
import inspect
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from jupyter_gpumem.cuts import cut_error, running_shell
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.rerun import CellBody
from jupyter_gpumem.search import FitAttempt, FitReport, Plan, find_fit

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["FitAttempt", "FitReport", "FitResult", "fit", "fit_cell"]


class FitResult(NamedTuple):
    """What :func:`fit` found: the value, what the function returned with it, and its peak in bytes."""

    value: int
    result: Any
    peak_bytes: int | None


def fit(
    function: Callable[..., Any],
    *args: object,
    minimum: int = 1,
    factor: float = 0.5,
    step: int | None = None,
    search: bool = False,
    margin: float = 0.0,
    **variable: int,
) -> FitResult:
    """Call a function with a smaller and smaller number until it does not run out of GPU memory.

    Side effects of the calls that failed are the caller's: a model that took half a step has taken it.

    Parameters
    ----------
    function
        Called as ``function(*args, batch_size=value)``, or as ``function(value, *args)`` where it has no
        parameter of that name.
    *args
        Passed on.
    minimum, factor, step
        The value is multiplied by ``factor`` and rounded down to a multiple of ``step``, down to ``minimum``.
    search
        Find the largest value that fits, by doubling and bisection.
    margin
        Part of the device, from 0 to 1, that must be free at the peak.
    **variable
        Exactly one name and its first value, such as ``batch_size=512``.

    Raises
    ------
    GpuMemError
        When nothing down to ``minimum`` fits.

    Examples
    --------
    >>> fit(train, batch_size=512)
    FitResult(value=128, result=..., peak_bytes=21260926976)
    """
    if len(variable) != 1:
        raise GpuMemError("fit() varies one number: fit(train, batch_size=512); bind the rest beforehand")
    ((name, start),) = variable.items()
    trial = _FunctionTrial(function, args, name)
    plan = Plan(name, _whole_number(name, start), minimum, factor, step or 1, search, margin)
    report = find_fit(trial, plan)
    return FitResult(report.value, trial.take_result(), report.attempts[-1].peak_bytes)


def fit_cell(
    shell: "InteractiveShell",
    body: str,
    name: str,
    *,
    minimum: int = 1,
    factor: float = 0.5,
    step: int | None = None,
    search: bool = False,
    margin: float = 0.0,
) -> FitReport:
    """Run a cell's body, with a smaller value of the variable ``name`` after each out-of-memory error.

    Between runs, names that the run created are deleted, and names it rebound get their old value back where
    that was a plain number, string or container of those, else are deleted when they hold GPU memory. Side
    effects of a body that ran twice, and changes it made in place, are the user's.

    Raises
    ------
    GpuMemError
        When the variable cannot be varied, or nothing down to ``minimum`` fits: the variable then has its
        first value again.
    """
    __tracebackhide__ = True
    cell = CellBody(shell, body)
    if name in cell.binds:
        raise GpuMemError(f"the cell sets {name} itself: set it in a cell above, so that it can be varied")
    if name not in shell.user_ns:
        raise GpuMemError(f"no variable named {name!r}: set it in a cell above{_nearest_name(name, shell)}")
    start = shell.user_ns[name]
    plan = Plan(name, _whole_number(name, start), minimum, factor, step or 1, search, margin)
    trial = _CellTrial(shell, cell, name, start)
    report = replace(find_fit(trial, plan), dropped_error=trial.dropped_error)
    cell.show()
    return report


class _FunctionTrial:
    def __init__(self, function: Callable[..., Any], args: tuple[object, ...], name: str) -> None:
        self._function, self._args = function, args
        self._keyword = name if _takes_keyword(function, name) else None
        self._result: Any = None

    def run(self, value: int) -> None:
        __tracebackhide__ = True
        if self._keyword is None:
            self._result = self._function(value, *self._args)
        else:
            self._result = self._function(*self._args, **{self._keyword: value})

    def undo(self) -> tuple[str, ...]:
        self._result = None
        cut_error(running_shell())  # as in a cell: see below
        return ()

    def restore(self) -> None:
        self._result = None

    def take_result(self) -> object:
        result, self._result = self._result, None
        return result


class _CellTrial:
    def __init__(self, shell: "InteractiveShell", cell: CellBody, name: str, start: object) -> None:
        self._shell, self._cell, self._name, self._start = shell, cell, name, start
        self.dropped_error: str | None = None

    def run(self, value: int) -> None:
        __tracebackhide__ = True
        self._shell.user_ns[self._name] = value
        self._cell.run()

    def undo(self) -> tuple[str, ...]:
        # the last error is mostly the very one that brought the user here: its frames keep what did not fit
        self.dropped_error = cut_error(self._shell) or self.dropped_error
        return self._cell.undo(keep=(self._name,))

    def restore(self) -> None:
        self._shell.user_ns[self._name] = self._start


def _whole_number(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # a TypeError is the answer
    except TypeError:
        raise GpuMemError(f"{name} is not a whole number but {_describe(value)}") from None


def _describe(value: object) -> str:
    return repr(value) if type(value) in (float, str, bool, type(None)) else f"of type {type(value).__name__}"


def _nearest_name(name: str, shell: "InteractiveShell") -> str:
    known = [key for key in shell.user_ns if key not in shell.user_ns_hidden]
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _takes_keyword(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    kinds = {parameter.kind for parameter in parameters.values()}
    named = parameters.get(name)
    if named is not None:
        return named.kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return inspect.Parameter.VAR_KEYWORD in kinds
