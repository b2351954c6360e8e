"""The line after a cell, the table of one cell in detail, and the history."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jupyter_gpumem.cells import CellRecord, DeviceChange
from jupyter_gpumem.render.layout import Block, Page, Row, Span, code, delta, exact, quiet, shorten, size
from jupyter_gpumem.sizes import format_bytes, format_delta
from jupyter_gpumem.variables import VariableChange

if TYPE_CHECKING:
    from jupyter_gpumem.replaced import Replaced


def line_page(record: CellRecord, changes: Sequence[DeviceChange]) -> Page:
    """Write the quiet line after a cell: one row for each device that moved."""
    rows = tuple(_line(record, change, first=index == 0) for index, change in enumerate(changes))
    return Page((Block(rows, flow=True), Block(_sizes_note(record), flow=True)), spaced=False)


def detail_page(record: CellRecord, variables: Sequence[VariableChange], replaced: "Sequence[Replaced]" = ()) -> Page:
    """Write one cell in detail: a table a device that moved, the variables, what could have gone before."""
    blocks = [_detail(record, change) for change in record.moved]
    still = [change for change in record.devices if not change.moved and change.after.reserved_bytes]
    if still:
        blocks.append(_unchanged(record, still))
    if not blocks:
        blocks = [Block(((quiet("no GPU memory moved: CUDA has not started, or nothing is on the device"),),))]
    elif variables:
        blocks.append(_variables(variables))
        blocks += [_replaced(one) for one in replaced]
    blocks += _within(record)
    note = _sizes_note(record)
    return Page((*blocks, Block(note)) if note else tuple(blocks))


def _within(record: CellRecord) -> Iterator[Block]:
    """Write what is told of the cell's lines and time, where it was asked for."""
    if record.lines or record.timeline:
        from jupyter_gpumem.render.lines import lines_block
        from jupyter_gpumem.render.timeline import timeline_block

        yield from map(lines_block, record.lines)
        yield from map(timeline_block, record.timeline)


def history_page(records: Sequence[CellRecord]) -> Page:
    """Write a row for each cell and device: number, status, seconds, before, after, delta, peak, reserved."""
    head = ("cell", "", "before", "after", "delta", "peak", "reserved", "time", "status", "first line")
    rows: list[Row] = [tuple(Span(name, style="quiet", right=name in head[2:8]) for name in head)]
    for record in records:
        shown = record.moved or record.devices[:1]
        for index, change in enumerate(shown):
            rows.append(_history_row(record, change, first=index == 0))
        if not shown:
            rows.append(_empty_row(record))
    if len(rows) == 1:
        return Page((Block(((quiet("no cell recorded yet"),),)),))
    return Page((Block(tuple(rows)),))


def _line(record: CellRecord, change: DeviceChange, *, first: bool) -> Row:
    after = change.after
    return (
        Span(change.label, style="quiet"),
        _with_delta("", after.allocated_bytes, change.allocated_delta_bytes),
        _peak(change),
        *(
            ()
            if change.label == "RAM"
            else (_with_delta("reserved ", after.reserved_bytes, change.reserved_delta_bytes),)
        ),
        _device_use(change),
        Span(f"{record.seconds or 0:.1f} s" if first else "", style="quiet", right=True),
        *_flags(record, first=first),
    )


def _with_delta(word: str, nbytes: int, change: int) -> Span:
    text = f"{word}{format_bytes(nbytes)}"
    if change:
        text += f" ({format_delta(change)})"
    return Span(text, f"{word}{exact(nbytes)}, {'+' if change >= 0 else ''}{exact(change)}")


def _peak(change: DeviceChange) -> Span:
    mark, why = "", ""
    if not change.peak_exact:
        sampled = change.label == "RAM"
        mark, why = ("~", ", sampled") if sampled else ("≤ ", ', an upper bound (GpuMem.peak = "observe")')
    text = f"peak {mark}{format_bytes(change.peak_allocated_bytes)}"
    return Span(text, exact(change.peak_allocated_bytes) + why)


def _device_use(change: DeviceChange) -> Span:
    used, total = change.after.used_bytes, change.after.total_bytes
    word = "machine" if change.label == "RAM" else "device"
    if used is None or total is None:
        return Span(f"{word} unknown", "neither the driver nor NVML tells", "quiet")
    # one unit for both: 3.41 of 23.6 GiB
    whole = format_bytes(total)
    part = _in_unit_of(used, total)
    return Span(f"{word} {part} of {whole}", f"{used:,} of {total:,} bytes", "quiet")


def _in_unit_of(used: int, total: int) -> str:
    unit = format_bytes(total).split()[1]
    power = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5}[unit]
    value = used / 1024**power
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _flags(record: CellRecord, *, first: bool) -> tuple[Span, ...]:
    words = []
    if first and record.status != "ok":
        words.append(Span(record.status, style="warn"))
    if record.simulated:
        words.append(Span("simulated", "the simulated GPU: real allocator, no real values", "quiet"))
    return tuple(words)


def _sizes_note(record: CellRecord) -> tuple[Row, ...]:
    if not record.sizes_read:
        return ()
    text = "perhaps a size here depends on values: the real figure can be larger"
    why = f"{record.sizes_read} numbers that may decide a size were read from the simulated GPU, which computes none"
    return ((Span(text, why, "quiet"),),)


def _detail(record: CellRecord, change: DeviceChange) -> Block:
    before, after = change.before, change.after
    ram = change.label == "RAM"
    title = f"{change.label}   {'this process' if ram else ''}".rstrip()
    allocated = (
        Span("resident" if ram else "allocated"),
        size(before.allocated_bytes if before else 0),
        size(after.allocated_bytes),
        delta(change.allocated_delta_bytes),
        Span(_peak(change).text.removeprefix("peak "), _peak(change).title, right=True),
    )
    reserved = (
        Span("reserved"),
        size(before.reserved_bytes if before else 0),
        size(after.reserved_bytes),
        delta(change.reserved_delta_bytes),
        size(change.peak_reserved_bytes),
    )
    head = (
        Span(title, style="strong"),
        *(Span(word, style="quiet", right=True) for word in ("before", "after", "delta", "peak")),
    )
    rows: list[Row] = [head, allocated] if ram else [head, allocated, reserved]
    return Block((*rows, _foot(record, _device_use(change))))


def _foot(record: CellRecord, *words: Span) -> Row:
    """Join what is true of the cell into one sentence, which widens no column of a table."""
    spans = (Span(f"{record.seconds or 0:.2f} s"), *words, *_flags(record, first=True))
    return (Span("   ".join(span.text for span in spans), style="warn" if record.status != "ok" else "quiet"),)


def _unchanged(record: CellRecord, still: Sequence[DeviceChange]) -> Block:
    """Name the devices at rest in one line, a run of three and more by its ends."""
    runs: list[list[DeviceChange]] = []
    for change in still:
        if runs and change.after.device == runs[-1][-1].after.device + 1:
            runs[-1].append(change)
        else:
            runs.append([change])
    named = [f"{run[0].label} to {run[-1].label}" if len(run) > 2 else ", ".join(c.label for c in run) for run in runs]
    row: Row = (quiet(f"{', '.join(named)}: unchanged"),)
    return Block((row,) if record.moved else (row, _foot(record)))


def _variables(variables: Sequence[VariableChange]) -> Block:
    rows: list[Row] = [(Span("variables", style="strong"), Span("holds", style="quiet", right=True), Span(""))]
    for variable in variables:
        gone = variable.change == "deleted"
        nbytes, words = variable.held_bytes if gone else variable.holds_bytes, str(variable.change)
        if not nbytes:
            words += f", held {format_bytes(variable.held_bytes)}"
        rows.append((Span(f"  {shorten(variable.name, 40)}"), size(nbytes), quiet(words)))
    return Block(tuple(rows))


def _replaced(replaced: "Replaced") -> Block:
    plural = len(replaced.names) > 1
    was, built = ("were", "their replacements were") if plural else ("was", "its replacement was")
    most = "" if replaced.exact else "up to "
    names = ", ".join(replaced.names)
    text = f"{names} {was} still bound while {built} built: {most}{format_bytes(replaced.nbytes)} of the peak"
    title = f"{replaced.nbytes:,} bytes on GPU {replaced.device}"
    return Block(
        ((Span(text, title), code(f"%gpu_free {' '.join(replaced.names)}"), quiet("before this cell")),), flow=True
    )


def _history_row(record: CellRecord, change: DeviceChange, *, first: bool) -> Row:
    return (
        Span(_cell_number(record) if first else ""),
        Span(change.label, style="quiet"),
        size(change.before.allocated_bytes if change.before else 0),
        size(change.after.allocated_bytes),
        delta(change.allocated_delta_bytes),
        Span(_peak(change).text.removeprefix("peak "), _peak(change).title, right=True),
        size(change.after.reserved_bytes),
        *_history_tail(record, first=first),
    )


def _empty_row(record: CellRecord) -> Row:
    blank = Span("", right=True)
    return (Span(_cell_number(record)), Span("", style="quiet"), *[blank] * 5, *_history_tail(record, first=True))


def _history_tail(record: CellRecord, *, first: bool) -> tuple[Span, ...]:
    if not first:
        return ()
    status = Span(record.status, style="quiet" if record.status == "ok" else "warn")
    return (
        Span(f"{record.seconds or 0:.1f} s", style="quiet", right=True),
        status,
        Span(shorten(record.name, 40), record.name, "quiet"),
    )


def _cell_number(record: CellRecord) -> str:
    number = "" if record.number is None else str(record.number)
    return f"{number} nested".strip() if record.depth else number
