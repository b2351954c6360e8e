"""Where a notebook keeps references: its variables, IPython's copies, the last error, modules, running code."""

import asyncio
import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.frames import Suspended, local_variables, running_frames
from jupyter_gpumem.heap import module_namespace, type_namespace
from jupyter_gpumem.holders import Kind
from jupyter_gpumem.loops import (
    Waiting,
    call_lists,
    current_contexts,
    event_loops,
    tables_of,
    waiting_calls,
    waiting_tasks,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_OWN_FOLDER = str(Path(__file__).parent)
_OUTPUT_NAME = re.compile(r"_{1,3}|_\d+")
_ERROR_NAMES = frozenset({"last_type", "last_value", "last_traceback", "last_exc"})
_TRACEBACK_PARTS = frozenset({"tb", "etype", "evalue"})
_RESULT_ERRORS = frozenset({"error_in_exec", "error_before_exec"})


_type_name: Callable[[type], str] = type.__dict__["__name__"].__get__
_type_qualname: Callable[[type], str] = type.__dict__["__qualname__"].__get__


@dataclass(frozen=True, slots=True)
class Slot:
    """One reference that a root keeps. Holds its target: drop it before reporting.

    Slots of one ``group`` are cut by one remedy. ``text`` is how the user names the slot, ``code`` Python that
    gives the target in the user's namespace, ``number`` the cell of an output.
    """

    target: Any
    group: tuple[Any, ...]
    kind: Kind
    text: str
    code: str | None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class _Container:
    """A namespace the search ends at, and how to describe what it holds under a name."""

    items: Callable[[], Iterable[tuple[Any, Any]]]
    describe: Callable[[Any, Any], Slot]
    always: bool


class Roots:
    """Every place the search backwards ends at; ``passed_over`` are frames, by address, that are none."""

    def __init__(self, shell: "InteractiveShell | None", passed_over: Container[int] = ()) -> None:
        self.stops: dict[int, Any] = {}
        """The containers to end at, by address."""
        self._containers: dict[int, _Container] = {}
        self._shell = shell
        self._passed_over = passed_over
        if shell is not None:
            self._add_shell(shell)
        self._add_modules()
        for context in current_contexts(shell):
            self._add_context(context)
        for loop in event_loops(shell):
            self._add_loop(loop)

    def user_namespace(self) -> dict[str, Any]:
        """Return the namespace the user's code runs in."""
        if self._shell is not None:
            namespace: dict[str, Any] = self._shell.user_ns
            return namespace
        main = sys.modules.get("__main__")
        return module_namespace(main) if isinstance(main, ModuleType) else {}

    def starts(self) -> list[Any]:
        """Return the namespaces from which everything in use can be reached."""
        return [container for container in self.stops.values() if container is not None]

    def slots(self, cone: Mapping[int, Any], met: Iterable[int]) -> list[Slot]:
        """Return every slot whose target is in ``cone``; ``met`` are the stops that hold something of it."""
        met = set(met)
        found: list[Slot] = []
        for address, container in self._containers.items():
            if container.always or address in met:
                found += [container.describe(name, value) for name, value in container.items() if id(value) in cone]
        found += _handled_errors(cone)
        found += self._running(cone)
        # a class that has a name is a root by itself: its variable is not another one
        classes = {id(slot.target): slot for slot in self._classes(cone) if slot.code is not None}
        return [*(slot for slot in found if id(slot.target) not in classes), *classes.values()]

    def plain_classes(self, cone: Mapping[int, Any]) -> list[Any]:
        """Return the classes in ``cone`` that go by no name of a module or of the user's: objects like any other."""
        return [slot.target for slot in self._classes(cone) if slot.code is None]

    def handles(self, cone: Mapping[int, Any]) -> list[Any]:
        """Return the context variables and finalizers whose values are in ``cone``: what lets go of those."""
        variables = [variable for variable, value in copy_context().items() if id(value) in cone]
        registry: dict[Any, Any] = type_namespace(weakref.finalize)["_registry"]
        return [*variables, *(finalizer for finalizer, info in list(registry.items()) if id(info) in cone)]

    def _add(
        self,
        container: object,
        items: Callable[[], Iterable[tuple[Any, Any]]],
        describe: Callable[[Any, Any], Slot],
        *,
        always: bool = False,
    ) -> None:
        if id(container) not in self._containers:
            self.stops[id(container)] = container
            self._containers[id(container)] = _Container(items, describe, always)

    def _add_namespace(self, namespace: dict[Any, Any], describe: Callable[[Any, Any], Slot]) -> None:
        self._add(namespace, lambda: list(namespace.items()), describe)

    def _add_object(self, owner: object, describe: Callable[[Any, Any], Slot]) -> None:
        """End at an object of IPython's and at its attributes."""
        attributes = vars(owner)
        self._add(owner, lambda: list(attributes.items()), describe, always=True)
        self.stops[id(attributes)] = attributes

    def _add_shell(self, shell: "InteractiveShell") -> None:
        self._add_namespace(shell.user_ns, partial(_variable, shell))
        self._add_namespace(shell.user_ns_hidden, _hidden)
        self._add_namespace(shell.user_ns.get("_oh", {}), _output)
        self._add_namespace(shell.history_manager.output_hist if shell.history_manager else {}, _output)
        self._add_object(shell.displayhook, _of_displayhook)
        self._add_object(shell.InteractiveTB, _of_traceback_formatter)
        if shell.last_execution_result is not None:
            self._add_object(shell.last_execution_result, _of_last_result)
        self._add_object(shell, _of_shell)

    def _add_context(self, context: Context) -> None:
        """End at the context variables of running code; their values lie in a tree of tables in C."""
        for table in tables_of(context):
            self._add(table, tuple, _context_variable)
        self._add(context, lambda: list(context.items()), _context_variable, always=True)

    def _add_loop(self, loop: Any) -> None:
        """End at what an event loop will go on with: all of a kernel hangs on its loop."""
        self._add_object(loop, _of_loop)
        for container in call_lists(loop):
            self._add(container, tuple, _of_loop)
        variables = self.user_namespace()
        for call in waiting_calls(loop, variables):
            self._add(call.item, partial(_kept_by, call.item), partial(_waiting, call))
        running = asyncio.current_task(loop) if asyncio._get_running_loop() is loop else None
        for task in waiting_tasks(loop, variables):
            # the frames of the one that runs are looked at as frames
            items = tuple if task.item is running else partial(_kept_by, task.item)
            self._add(task.item, items, partial(_waiting, task))

    def _add_modules(self) -> None:
        for name, module in list(sys.modules.items()):
            if issubclass(type(module), ModuleType):
                self._add_namespace(module_namespace(module), self._describer(name))

    def _describer(self, module: str) -> Callable[[Any, Any], Slot]:
        if module == "sys":
            return _of_sys
        if module == "__main__" and self._shell is None:
            return partial(_variable, None)

        def describe(name: object, value: object) -> Slot:
            text = f"{module}.{name}" if type(name) is str else f"{module}.…"
            code = f"__import__('sys').modules[{module!r}].{name}" if _is_name(name) else None
            return Slot(value, ("module", module, name), "module", text, code)

        return describe

    def _classes(self, cone: Mapping[int, Any]) -> Iterator[Slot]:
        for item in cone.values():
            if issubclass(type(item), type):
                text, code = self._name_of_class(item)
                yield Slot(item, ("class", id(item)), "class", text, code)

    def _name_of_class(self, kind: type) -> tuple[str, str | None]:
        name, qualified = _type_name(kind), _type_qualname(kind)
        if self.user_namespace().get(name) is kind:
            return name, name
        home = type_namespace(kind).get("__module__")
        module = sys.modules.get(home) if type(home) is str else None
        if issubclass(type(module), ModuleType) and module_namespace(module).get(name) is kind:  # type: ignore[arg-type]  # None is no module
            return f"{home}.{name}", f"__import__('sys').modules[{home!r}].{name}"
        return f"class {qualified}", None

    def _running(self, cone: Mapping[int, Any]) -> Iterator[Slot]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().ident
        for thread, frame in running_frames():
            code = frame.f_code
            if id(frame) in self._passed_over:
                continue
            # a thread's own frames hold the thread, which is in threading's table anyhow
            if code.co_filename.startswith((_OWN_FOLDER, threading.__file__)) or not code.co_flags & 0x1:
                continue
            where = f"{code.co_name}() line {frame.f_lineno}"
            if thread != main:
                where += f", in running thread {names.get(thread, thread)}"
            for name, value in local_variables(frame):
                if id(value) in cone:
                    group = ("frame", id(frame), name)
                    yield Slot(value, group, "frame", f"local {name} of {where}", None)


# no describer is a method of the roots: a cycle would keep the contexts until the next collection
def _variable(shell: "InteractiveShell | None", name: object, value: object) -> Slot:
    text = name if type(name) is str else "…"
    if shell is not None and _OUTPUT_NAME.fullmatch(text) and _is_output(shell, text, value):
        return _copy_of_output(text, value)
    return Slot(value, ("variable", text), "variable", text, text if _is_name(name) else None)


def _is_output(shell: "InteractiveShell", name: str, value: object) -> bool:
    """Tell IPython's copy of a result from a value that the user bound to its name: ``_, index = x.max(0)``."""
    copies = [shell.user_ns_hidden.get(name), getattr(shell.displayhook, name, None)]
    return any(value is copy for copy in copies)


def _is_name(name: object) -> bool:
    return type(name) is str and name.isidentifier()


def _hidden(name: Any, value: object) -> Slot:
    return (
        _copy_of_output(name, value)
        if _OUTPUT_NAME.fullmatch(str(name))
        else _ipython(f"user_ns_hidden[{name!r}]", value)
    )


def _output(number: Any, value: object) -> Slot:
    text = f"Out[{number}]" if type(number) is int else "Out[…]"
    return Slot(value, ("output", id(value)), "output", text, text, number if type(number) is int else None)


def _copy_of_output(name: str, value: object) -> Slot:
    number = int(name[1:]) if name[1:].isdigit() else None
    return Slot(value, ("output", id(value)), "output", name, name, number)


def _of_displayhook(name: Any, value: object) -> Slot:
    if name in ("_", "__", "___"):
        return _copy_of_output(name, value)
    return _ipython(f"displayhook.{name}", value)


def _of_traceback_formatter(name: Any, value: object) -> Slot:
    if name in _TRACEBACK_PARTS:
        return _error(value)
    if name == "pdb":
        return Slot(value, ("debugger",), "debugger", "the ended %debug session", "get_ipython().InteractiveTB.pdb")
    return _ipython(f"InteractiveTB.{name}", value)


def _of_last_result(name: Any, value: object) -> Slot:
    if name == "result":
        return Slot(value, ("output", id(value)), "output", "the last result", None)
    return _error(value) if name in _RESULT_ERRORS else _ipython(f"last_execution_result.{name}", value)


def _of_shell(name: Any, value: object) -> Slot:
    return _ipython(str(name), value)


def _of_sys(name: Any, value: object) -> Slot:
    if name in _ERROR_NAMES:
        return _error(value)
    return Slot(value, ("module", "sys", name), "module", f"sys.{name}", f"__import__('sys').{name}")


def _error(value: object) -> Slot:
    return Slot(value, ("error",), "error", "the last error", None)


def _context_variable(variable: Any, value: object) -> Slot:
    return Slot(value, ("context", variable), "context", f"context variable {variable.name}", None)


def _kept_by(item: object) -> list[tuple[Any, Any]]:
    return [("", held) for held in gc.get_referents(item)]


def _waiting(waiting: Waiting, _name: Any, value: object) -> Slot:
    code = waiting.code if issubclass(type(value), Suspended) else None
    return Slot(value, ("task", id(waiting.item), waiting.release), "task", waiting.text, code)


def _of_loop(name: Any, value: object) -> Slot:
    return Slot(value, ("loop", name), "module", f"{name} of the event loop", None)


def _ipython(attribute: str, value: object) -> Slot:
    text = f"get_ipython().{attribute}"
    return Slot(value, ("ipython", attribute), "ipython", text, text)


def _handled_errors(cone: Mapping[int, Any]) -> Iterator[Slot]:
    current: dict[int, Any] = sys._current_exceptions()
    for thread, error in current.items():
        # the triple of sys.exc_info() up to Python 3.11
        value = error[1] if isinstance(error, tuple) else error
        if value is not None and id(value) in cone:
            yield Slot(value, ("handling", thread), "handling", "the exception being handled", None)
