"""Running the body of a cell more than once, each run undone before the next."""

import ast
import dis
import inspect
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import CodeType
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.holdings import bytes_held_by

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_CONTAINERS = (list, tuple, set, frozenset, dict)
_PLAIN = (str, bytes, bool, type(None))


class CellBody:
    """A cell's body, compiled once as IPython would, run by ``exec`` and undone name by name.

    A nested ``run_cell`` would print each failure, fire cell events and keep the failed frames.

    Raises
    ------
    GpuMemError
        When the body awaits at top level: there is no event loop to give it to.
    SyntaxError
        When the body is not Python.
    """

    def __init__(self, shell: "InteractiveShell", body: str) -> None:
        self._shell = shell
        self._steps, self._last = _compile(shell, body)
        self._silent = _ends_in_semicolon(shell, body)
        self._value: Any = None
        self._bindings = Bindings({})

    @property
    def binds(self) -> frozenset[str]:
        """The names that top-level statements of the body bind."""
        return _bound_names(self._steps)

    def run(self) -> None:
        """Run the body; an error leaves it as the user's own."""
        __tracebackhide__ = True
        names = self._shell.user_ns
        self._bindings = Bindings(names, self._shell.user_ns_hidden)
        local = _Local(names, self._bindings.written)
        exec(self._steps, names, local)  # the user's own cell
        if self._last is not None:
            self._value = eval(self._last, names, local)

    def undo(self, keep: Iterable[str]) -> tuple[str, ...]:
        """Undo what the run bound, but for ``keep``; return the older names that were deleted."""
        self._value = None
        return self._bindings.undo(self._shell.user_ns, frozenset(keep))

    def show(self) -> None:
        """Show the value of the last expression, as the cell would have."""
        value, self._value = self._value, None
        if self._last is not None and not self._silent:
            self._shell.displayhook(value)


class Bindings:
    """What names were bound to before a run; keeps no value alive but plain ones.

    Holding the others would take the memory that the next run needs.
    """

    def __init__(self, names: dict[str, Any], hidden: Iterable[str] = ()) -> None:
        self.written: set[str] = set()
        """Names that the run has bound or deleted by a statement of its own."""
        self._hidden = hidden
        self._plain: dict[str, Any] = {}
        self._is_same: dict[str, Callable[[Any], bool]] = {}
        for name, value in self._visible(names):
            if is_plain(value):
                self._plain[name] = value
            else:
                self._is_same[name] = _same_object_test(value, name, self.written)

    def undo(self, names: dict[str, Any], keep: frozenset[str]) -> tuple[str, ...]:
        """Delete what is new, restore plain values, delete rebound names that hold GPU memory now."""
        deleted = []
        for name, value in self._visible(names):
            if name in keep or name in self._plain:
                continue
            same = self._is_same.get(name)
            if same is None:
                del names[name]
            elif not same(value) and bytes_held_by((value,)) > 0:
                del names[name]
                deleted.append(name)
        names.update((name, value) for name, value in self._plain.items() if name not in keep)
        return tuple(deleted)

    def _visible(self, names: dict[str, Any]) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in names.items() if name not in self._hidden]


class _Local(MutableMapping[str, Any]):
    """The namespace of the user's cell, noting which names its statements bind.

    An address alone does not tell: a list freed and made anew often has the old one's.
    """

    def __init__(self, names: dict[str, Any], written: set[str]) -> None:
        self._names, self._written = names, written

    def __getitem__(self, name: str) -> object:
        return self._names[name]

    def __setitem__(self, name: str, value: object) -> None:
        self._written.add(name)
        self._names[name] = value

    def __delitem__(self, name: str) -> None:
        del self._names[name]
        self._written.add(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_plain(value: object) -> bool:
    """Tell whether a value is a number, a string, None, or a container of nothing else."""
    pending: list[Any] = [value]
    seen = set[int]()
    while pending:
        current = pending.pop()
        kind = type(current)
        if kind in _PLAIN or issubclass(kind, (str, numbers.Number)):
            continue
        if kind not in _CONTAINERS:
            return False
        if id(current) not in seen:
            seen.add(id(current))
            pending.extend(current)
            if kind is dict:
                pending.extend(current.values())
    return True


def _same_object_test(value: object, name: str, written: set[str]) -> Callable[[Any], bool]:
    try:
        reference = weakref.ref(value)
    except TypeError:
        address = id(value)
        return lambda other: id(other) == address and name not in written
    # `model = model.cuda()` binds the very same object: nothing new
    return lambda other: reference() is other


def _compile(shell: "InteractiveShell", body: str) -> tuple[CodeType, CodeType | None]:
    """Compile all but the last expression as statements, and that expression by itself."""
    # the empty line stands for the magic's own: line numbers are those on the page
    source = "\n" + str(shell.transform_cell(body))  # type: ignore[no-untyped-call]  # IPython's own
    filename = shell.compile.cache(source, _cell_number(shell), raw_code=body)
    parsed = shell.compile.ast_parse(source, filename=filename)
    tree = shell.transform_ast(parsed)  # type: ignore[no-untyped-call]  # IPython's own
    statements, last = list(tree.body), None
    if statements and isinstance(statements[-1], ast.Expr):
        last = ast.Expression(statements.pop().value)
    flags = shell.compile.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    codes = [
        compile(part, filename, mode, flags=flags, dont_inherit=True)
        for part, mode in ((ast.Module(statements, []), "exec"), (last, "eval"))
        if part is not None
    ]
    if any(code.co_flags & inspect.CO_COROUTINE for code in codes):
        raise GpuMemError("the cell awaits at top level and cannot be run again here; move that to another cell")
    return codes[0], codes[1] if last is not None else None


def _cell_number(shell: "InteractiveShell") -> int:
    """Return the number of the running cell; ``execution_count`` is already the next one's in IPython 9."""
    numbers_by_file = getattr(shell.compile, "_filename_map", {})
    frame = inspect.currentframe()
    while frame is not None:
        number = numbers_by_file.get(frame.f_code.co_filename)
        if number is not None:
            return int(number)
        frame = frame.f_back
    return int(shell.execution_count)


def _ends_in_semicolon(shell: "InteractiveShell", body: str) -> bool:
    test = getattr(shell.displayhook, "semicolon_at_end_of_expression", None)
    return test is not None and bool(test(body))


def _bound_names(code: CodeType) -> frozenset[str]:
    return frozenset(
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("STORE_NAME", "STORE_GLOBAL")
    )
