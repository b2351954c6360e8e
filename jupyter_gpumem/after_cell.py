"""What is said after a cell: the quiet line, the cell in detail, the echo that keeps memory, the warning."""

from argparse import Namespace as Options
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.cellmagic import detail_options, without_magic_lines
from jupyter_gpumem.cells import CellRecord, DeviceChange
from jupyter_gpumem.config import GpuMemConfig
from jupyter_gpumem.device import cuda_started, limit_bytes
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.failures import find_out_of_memory
from jupyter_gpumem.observer import observer
from jupyter_gpumem.render.cells import detail_page, line_page
from jupyter_gpumem.render.layout import Block, Page, Span, code, quiet, to_html, to_text
from jupyter_gpumem.sizes import format_bytes
from jupyter_gpumem.variables import Namespace

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from jupyter_gpumem.celltrace import CellTrace
    from jupyter_gpumem.linemarks import LineMarks
    from jupyter_gpumem.oom import Watcher
    from jupyter_gpumem.replaced import Replacements

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type)


@dataclass(slots=True)
class _Request:
    """What ``%%gpumem`` asked for, and what was noted when its cell began."""

    raw_cell: str
    options: Options
    names: Namespace
    replaced: "Replacements"
    marks: "LineMarks | None" = None

    def close(self) -> None:
        """Leave nothing of it in the shell."""
        self.replaced.close()
        if self.marks is not None:
            self.marks.close()


def show(shell: "InteractiveShell", page: Page) -> None:
    """Show a report below the running cell, as HTML where the front end can and as text elsewhere."""
    if any(block.rows for block in page.blocks):
        shell.display_pub.publish({"text/plain": to_text(page), "text/html": to_html(page)})


class CellReports:
    """Listens to the recorder and shows what there is to say; shows nothing when there is nothing."""

    def __init__(self, shell: "InteractiveShell", config: GpuMemConfig) -> None:
        self._shell = shell
        self._config = config
        self._requests: dict[int, _Request] = {}
        self._above: set[int] = set()
        self._watcher: Watcher | None = None
        self._told_by = ""
        observer.listen(self._out_of_memory)

    def cell_started(self, record: CellRecord, raw_cell: str) -> None:
        """Note what the cell asked for; with ``%%gpumem`` also what the variables are bound to."""
        observer.attach()
        if self._watcher is not None:
            self._watcher.cell_started(record)
        if not record.depth:
            self._forget_requests()
        options = detail_options(raw_cell)
        if options is None:
            return
        # `%%capture` above `%%gpumem` runs the rest as a cell of its own: that one reports
        for key, outer in list(self._requests.items()):
            if outer.raw_cell.rstrip().endswith(raw_cell.strip()) and outer.raw_cell.lstrip().startswith("%%"):
                self._requests.pop(key).close()
        from jupyter_gpumem.replaced import Replacements

        names = self._shell.user_ns
        body = self._shell.transform_cell(without_magic_lines(raw_cell))  # type: ignore[no-untyped-call]  # IPython's
        request = _Request(raw_cell, options, Namespace(names, self._held_bytes), Replacements(self._shell, str(body)))
        self._requests[id(record)] = request
        if options.lines or options.timeline:
            self._mark_lines(request)

    def cell_ended(self, record: CellRecord, result: Any) -> None:
        """Show the cell's report."""
        request = self._requests.pop(id(record), None)
        if request is not None:
            self._show_detail(record, request)
        elif record.depth:
            self._show_out_of_memory(record, result)  # for the cell around it, which shows what there is to show
            return
        elif self._config.auto and not self._is_told(result):
            self._show_line(record)
        self._told_by = ""
        self._show_out_of_memory(record, result)
        self._show_echo(record, result)
        self._warn(record)

    def forget_warnings(self) -> None:
        """Warn anew: what a warning compares with has changed."""
        self._above.clear()

    def leave_out_line(self, magic: str) -> None:
        """Show no line after a cell that is this magic and nothing else: its table has said the same."""
        self._told_by = magic

    def _is_told(self, result: Any) -> bool:
        source = str(getattr(getattr(result, "info", None), "raw_cell", "") or "").strip()
        return bool(self._told_by) and source.startswith(self._told_by) and "\n" not in source

    def close(self) -> None:
        """Hear of no further out-of-memory error; a cell in detail that is under way learns that it has no report."""
        observer.listen(None)
        if self._requests:
            self._forget_requests()
            text = "%%gpumem: the extension was unloaded within this cell, so there is nothing to show for it"
            show(self._shell, Page((Block(((quiet(text),),)),)))

    def _forget_requests(self) -> None:
        while self._requests:
            self._requests.popitem()[1].close()

    def forget_failures(self) -> None:
        """Leave the failures of the cell under way unreported: ``%%gpu_fit`` has dealt with them."""
        if self._watcher is not None:
            self._watcher.forget()

    def _watch(self) -> "Watcher":
        """Return the watcher; what it imports is imported when memory first runs out, not in every kernel."""
        if self._watcher is None:
            from jupyter_gpumem.oom import Watcher

            self._watcher = Watcher(self._shell)
        return self._watcher

    def _out_of_memory(self, device: int, asked: int) -> None:
        self._watch().note(device, asked)

    def _show_out_of_memory(self, record: CellRecord, result: Any) -> None:
        raised = getattr(result, "error_in_exec", None)
        if self._watcher is None and (raised is None or find_out_of_memory(raised) is None):
            return
        report = self._watch().report(record, result)
        if report is not None:
            from jupyter_gpumem.render.oom import oom_page

            show(self._shell, oom_page(report))

    def _show_line(self, record: CellRecord) -> None:
        changes = [c for c in record.moved if c.swing_bytes >= self._config.min_delta_bytes]
        if changes:
            show(self._shell, line_page(record, changes))

    def _mark_lines(self, request: "_Request") -> None:
        from jupyter_gpumem.linemarks import LineMarks

        try:
            request.marks = LineMarks(self._shell, request.raw_cell)
        except GpuMemError as error:
            show(self._shell, Page((Block(((quiet(str(error)),),)),)))

    def _read_marks(self, record: CellRecord, traces: "Sequence[CellTrace]", options: Options) -> None:
        from jupyter_gpumem.lines import device_lines
        from jupyter_gpumem.timeline import timeline_of

        if options.lines:
            record.lines = tuple(device_lines(trace) for trace in traces if trace.allocations)
        if options.timeline:
            record.timeline = tuple(timeline_of(trace) for trace in traces)

    def _show_detail(self, record: CellRecord, request: "_Request") -> None:
        try:
            if request.marks is not None:
                self._read_marks(record, request.marks.read(record), request.options)
            if not request.options.quiet:
                changes = request.names.changes(self._shell.user_ns)
                show(self._shell, detail_page(record, changes, request.replaced.found(changes)))
                self._show_why_not(record, request)
        finally:
            request.close()
        if request.options.output:
            self._shell.user_ns[request.options.output] = record

    def _show_why_not(self, record: CellRecord, request: "_Request") -> None:
        """Say why there are no lines and no curve of a cell that moved memory."""
        if request.marks is None or not record.moved or record.lines or record.timeline:
            return
        text = "no lines and no curve: they are read from the allocator of a GPU, and this is RAM"
        if record.moved[0].label != "RAM":
            started = any(change.before is None for change in record.moved)
            if not started:
                return
            text = "no lines and no curve: CUDA started in this cell, and nothing moved after; run it again to see them"
        show(self._shell, Page((Block(((quiet(text),),)),)))

    def _show_echo(self, record: CellRecord, result: Any) -> None:
        """Say that ``Out`` now keeps GPU memory; a plain value costs nothing to tell."""
        value = getattr(result, "result", None)
        if type(value) in _PLAIN or record.number is None or not self._config.echo_bytes or not cuda_started():
            return
        if self._shell.user_ns.get("Out", {}).get(record.number) is not value:
            return
        kept = self._held_bytes(value)
        if kept >= self._config.echo_bytes:
            text = f"Out[{record.number}] now keeps {format_bytes(kept)}, also after a del"
            then = quiet("→ end the line with ; next time")
            show(self._shell, Page((Block(((Span(text, f"{kept:,} bytes"), then),), flow=True),)))

    def _held_bytes(self, value: Any) -> int:
        """Return the bytes of GPU memory reachable from a value; 0 while CUDA has not started."""
        if not cuda_started() or type(value) in _PLAIN:
            return 0
        from jupyter_gpumem.holdings import bytes_held_by

        return bytes_held_by((value,), self._shell)

    def _warn(self, record: CellRecord) -> None:
        """Warn once when a peak passes the part of the device that the user set, until it falls below again."""
        if not self._config.warn_fraction:
            return
        over = []
        for change in record.moved:
            total = _usable_bytes(change)
            above = total is not None and change.peak_allocated_bytes > self._config.warn_fraction * total
            if above and change.after.device not in self._above:
                over.append((change, total or 0))
            (self._above.add if above else self._above.discard)(change.after.device)
        if over:
            show(self._shell, _warning_page(over))


def _usable_bytes(change: DeviceChange) -> int | None:
    if change.label == "RAM":
        return None
    return limit_bytes(change.after.device) or change.after.total_bytes


def _warning_page(over: Sequence[tuple[DeviceChange, int]]) -> Page:
    rows = []
    for change, total in over:
        part = round(100 * change.peak_allocated_bytes / total)
        text = f"peak {format_bytes(change.peak_allocated_bytes)}, {part} % of {format_bytes(total)}"
        rows.append((Span(change.label, style="quiet"), Span(text, style="warn"), code("%gpumem advise")))
    return Page((Block(tuple(rows)),))
