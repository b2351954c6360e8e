"""Marks in a cell's own syntax tree that tell the allocator's trace which line is running."""

import ast
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from jupyter_gpumem.allocator import active_devices
from jupyter_gpumem.cells import CellRecord, DeviceChange
from jupyter_gpumem.celltrace import CellTrace, Event, LineLog
from jupyter_gpumem.device import cuda_started, torch_module
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.observer import observer
from jupyter_gpumem.peaks import tracker

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_names = (f"_gpumem_line_{number}" for number in itertools.count())  # a marked cell may run another one
_MOST_EVENTS = 400_000  # about 100 MB in the allocator while they are kept
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BLOCKS = ("body", "orelse", "finalbody")
_OTHER_CODE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class LineMarks:
    """Marks one cell's lines while it runs; a call counts for the line of the cell that makes it.

    The allocator's history is recorded meanwhile, unless the user records it already: then theirs is read and
    left as it is.

    Raises
    ------
    GpuMemError
        When the cell starts or stops recording itself.
    """

    def __init__(self, shell: "InteractiveShell", raw_cell: str) -> None:
        if "_record_memory_history" in raw_cell:
            raise GpuMemError("--lines and --timeline read the allocator's history, and this cell records it itself")
        self._shell = shell
        self._source = raw_cell.splitlines()
        heads, self._offset = _above_the_code(self._source)
        # another magic runs what is below it as a program of its own, with lines counted from there
        self._to_skip = sum(not head.startswith("%%gpumem") for head in heads)
        self._name = next(_names)
        self._log = LineLog()
        self._line = 0
        self._since: int | None = None
        self._began = self._recording = self._ended = False
        self._get_metadata: Callable[[], str] = str
        self._set_metadata: Callable[[str], object] = str
        self._metadata_before = ""
        self._allocations: dict[int, int] = {}
        self._set_up_us = self._known_us = _now_us()
        self._failed_us: int | None = None
        self._show_traceback = vars(shell).get("showtraceback")
        vars(shell)["showtraceback"] = self._note_failure
        shell.user_ns[self._name] = self._mark
        self._transformers = cast("list[Any]", shell.ast_transformers)  # IPython calls nothing but visit()
        self._transformers.append(self)
        self._record()

    def visit(self, tree: ast.Module) -> ast.Module:
        """Mark the cell's tree (called by IPython); no other that is compiled while it runs."""
        self._to_skip -= 1
        if self._to_skip == -1:
            tree.body = _marked(tree.body, self._name, self._offset)
            ast.fix_missing_locations(tree)
        return tree

    def close(self) -> None:
        """Take all of it away although the cell may go on, as when it unloads the extension; safe to call twice."""
        if self._ended:
            return
        self._end()
        self._shell.user_ns[self._name] = abs  # the marks still to come need something to call

        def forget(_result: Any) -> None:
            self._shell.user_ns.pop(self._name, None)
            self._shell.events.unregister("post_run_cell", forget)

        self._shell.events.register("post_run_cell", forget)

    def read(self, record: CellRecord) -> tuple[CellTrace, ...]:
        """End with the cell; return what there is of each device on which torch did something."""
        # what it takes to show an error is not the cell's
        ended_us = (None if record.status == "ok" else self._failed_us) or _now_us()
        found = []
        if self._began:
            traces = _torch().cuda.memory._snapshot()["device_traces"]
            found = [self._device(change, traces[change.after.device], ended_us) for change in record.moved]
        self._end()
        self._shell.user_ns.pop(self._name, None)
        return tuple(trace for trace in found if trace.events)

    def _end(self) -> None:
        self._ended = True
        if self in self._transformers:
            self._transformers.remove(self)
        self._restore_traceback()
        if self._recording:
            self._note_metadata()
            self._set_metadata(self._metadata_before)
            _torch().cuda.memory._record_memory_history(enabled=None)

    def _note_failure(self, *args: Any, **options: Any) -> None:
        """Note when the cell failed, or one that it runs; the last to fail is the cell itself."""
        self._failed_us = _now_us()
        show = self._show_traceback or type(self._shell).showtraceback.__get__(self._shell)
        show(*args, **options)

    def _restore_traceback(self) -> None:
        own = vars(self._shell)
        if own.get("showtraceback") != self._note_failure:
            return  # the cell has put something else there
        if self._show_traceback is None:
            del own["showtraceback"]
        else:
            own["showtraceback"] = self._show_traceback

    def _mark(self, line: int) -> None:
        if line == self._line:
            return
        self._line = line
        self._log.add(_now_us(), line)
        if not self._began:
            self._record()
        if self._recording:
            self._note_metadata()
            self._set_metadata(f"{self._name} {line}")

    def _record(self) -> None:
        """Begin to record, as soon as CUDA has started."""
        if not cuda_started():
            return
        self._began = True
        self._since = self._line or None
        self._known_us = _now_us()
        self._allocations = {device: _allocations(device) for device in active_devices()}
        memory = _torch().cuda.memory
        # whoever records already has their own words for their events, too
        self._recording = not _torch()._C._cuda_isHistoryEnabled()
        if self._recording:
            # older versions of torch give a thread's events no words, and time alone tells
            self._get_metadata = getattr(_torch()._C, "_cuda_getMemoryMetadata", str)
            self._set_metadata = getattr(_torch()._C, "_cuda_setMemoryMetadata", str)
            memory._record_memory_history(enabled="all", context=None, max_entries=_MOST_EVENTS)

    def _note_metadata(self) -> None:
        """Keep the words that the user set meanwhile."""
        words = self._get_metadata()
        if not words.startswith(self._name):
            self._metadata_before = words

    def _line_of(self, event: Event) -> int | None:
        name, _space, line = str(event.get("user_metadata", "")).partition(" ")
        # the threads of backward carry no words: they work while a line of the cell waits for them
        return int(line) if name == self._name else self._log.at(event["time_us"])

    def _device(self, change: DeviceChange, trace: Sequence[Event], ended_us: int) -> CellTrace:
        counters = tracker.raw(change.after.device)
        # two clocks are compared: where the recording is ours, with all the time from the cell's beginning to spare
        first_us = self._set_up_us if self._recording else self._known_us
        events = [event for event in trace if event["time_us"] >= first_us]
        made = _allocations(change.after.device) - self._allocations.get(change.after.device, 0)
        began_us = self._log.first_us or self._known_us
        return CellTrace(
            change.after.device,
            change.label,
            events,
            self._log,
            self._line_of,
            self._source,
            began_us,
            self._known_us,
            ended_us,
            [pause for pause in observer.pauses_us if pause[0] >= began_us],
            counters["requested_bytes"]["all"]["current"],
            counters["reserved_bytes"]["all"]["current"],
            change.peak_allocated_bytes,
            change.peak_exact,
            self._since,
            made != sum(event["action"] == "alloc" for event in events),
        )


def _allocations(device: int) -> int:
    """Return how many allocations there have been on a device."""
    return int(tracker.raw(device)["allocation"]["all"]["allocated"])


def _now_us() -> int:
    """Return the time by the allocator's clock."""
    return time.time_ns() // 1000


def _torch() -> Any:
    return torch_module()


def _above_the_code(source: Sequence[str]) -> tuple[list[str], int]:
    """Return the magics at a cell's head, and how many lines are above the first that is compiled.

    IPython drops the empty lines at the head of what each magic runs; the line ``%%gpumem`` is compiled as an
    empty one unless another magic follows.
    """
    heads: list[str] = []
    above = 0
    for number, line in enumerate(map(str.lstrip, source)):  # IPython takes a whole cell's indentation off
        if line.startswith("%%"):
            heads.append(line)
            above = number if line.startswith("%%gpumem") else number + 1
        elif line:
            return heads, above if heads and heads[-1].startswith("%%gpumem") else number
    return heads, above


def _marked(statements: list[ast.stmt], name: str, offset: int) -> list[ast.stmt]:
    """Return statements with a mark before each; functions and classes are left as they are."""
    marked: list[ast.stmt] = []
    for statement in statements:
        if not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            marked.append(_mark_of(statement, name, offset))
        if not isinstance(statement, _OTHER_CODE):
            for inner in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                for block in _BLOCKS:
                    if getattr(inner, block, None):
                        setattr(inner, block, _marked(getattr(inner, block), name, offset))
            if isinstance(statement, _LOOPS):  # the next item is fetched by the line of the loop
                statement.body.append(_mark_of(statement, name, offset))
        marked.append(statement)
    return marked


def _mark_of(statement: ast.stmt, name: str, offset: int) -> ast.stmt:
    line = ast.Constant(statement.lineno + offset)
    call = ast.Expr(ast.Call(ast.Name(name, ast.Load()), [line], []))
    ast.copy_location(call, statement)
    return call
