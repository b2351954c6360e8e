"""What was given back: a row for each step, and what is to be said of it."""

from collections.abc import Iterable, Iterator

from jupyter_gpumem.freed import FreeReport, FreeStep
from jupyter_gpumem.holders import Holder, LeakReport
from jupyter_gpumem.readings import DeviceSnapshot
from jupyter_gpumem.render.layout import Block, Page, Row, Span, code, delta, exact, quiet, shorten, shorten_path, size
from jupyter_gpumem.sizes import format_bytes

_ITEMS_WIDTH = 36
_PATH_WIDTH = 50
_MAX_HELD = 8
_MIN_HELD_BYTES = 1024**2
_NOTHING_TO_FREE = "CUDA not started: there is no GPU memory to give back"

# what a step did, and what it would do; {} stands for what it did it to
_STEPS = {
    "names": ("deleted {}", "would delete {}"),
    "outputs": ("outputs: {}", "would drop outputs: {}"),
    "error": ("last error: {}", "would drop the last error: {}"),
    "debugger": ("{}", "would drop {}"),
    "code": ("{}", "would run {}"),
    "garbage": ("garbage", "would collect garbage"),
    "workspaces": ("library workspaces", "would release library workspaces"),
    "cache": ("cache", "would return the cache, at least"),
}


def free_page(report: FreeReport) -> Page:
    """Write a table for each device that held something, then the notes."""
    if report.dry_run:
        return _dry_page(report)
    blocks = [_table(report, index) for index in range(len(report.before)) if _has_news(report, index)]
    if not blocks:
        text = _NOTHING_TO_FREE if not report.before else "nothing to give back"
        blocks = [Block((*_deeds(report), (quiet(text),)))]
    notes = tuple((quiet(note),) for note in report.notes)
    return Page((*blocks, Block(notes), *_held_blocks(report.held)))


def _held_blocks(held: LeakReport | None) -> Iterator[Block]:
    """Write who holds what is left, and how to let it go."""
    for device in () if held is None else held.devices:
        total = sum(holder.shown_bytes for holder in device.holders)
        if total >= _MIN_HELD_BYTES:
            rows = [_holder_row(holder) for holder in device.holders[:_MAX_HELD]]
            more = len(device.holders) - len(rows)
            if more > 0:
                rows.append((Span(""), quiet(f"{more} more"), code("%gpumem leaks")))
            head = Span(f"still held on {device.label}: {format_bytes(total)}", exact(total), "strong")
            yield Block(tuple(rows), indent=2, head=(head,))


def _holder_row(holder: Holder) -> Row:
    remedy = (code(holder.remedy),) if holder.remedy else ()
    return (size(holder.shown_bytes), Span(shorten_path(holder.path, _PATH_WIDTH), holder.path), *remedy)


def _has_news(report: FreeReport, index: int) -> bool:
    """Tell whether a device held anything before; one that holds nothing needs no table."""
    return bool(report.before[index].reserved_bytes)


def _table(report: FreeReport, index: int) -> Block:
    before, after = report.before[index], report.after[index]
    words = ("resident", "") if report.host else ("allocated", "reserved")
    label = "RAM" if report.host else f"GPU {before.device}"
    heads = [Span(word, style="quiet", right=True) for word in words]
    simulated = quiet("simulated" if report.simulated else "")
    rows: list[Row] = [(Span(label, style="strong"), *heads, simulated)]
    rows.append(_figures("before", before, report.host))
    rows += _step_rows(report, index)
    rows.append(_figures("now", after, report.host))
    return Block(tuple(rows))


def _figures(word: str, snapshot: DeviceSnapshot, host: bool) -> Row:
    reserved = Span("") if host else size(snapshot.reserved_bytes, "strong")
    # as many cells as every other row, or HTML would stretch the last one
    return (Span(word, style="strong"), size(snapshot.allocated_bytes, "strong"), reserved, "")


def _step_rows(report: FreeReport, index: int) -> Iterator[Row]:
    """Write the steps that did something; what was dropped without giving back a byte is said once."""
    for step in report.steps:
        change = step.changes[index] if step.changes else None
        allocated = 0 if change is None else change.allocated_bytes
        reserved = 0 if change is None or report.host else change.reserved_bytes
        if allocated or reserved or (index == 0 and (step.items or step.note)):
            yield (
                Span("  " + _words(step, 0), ", ".join(step.items)),
                delta(allocated) if allocated else Span(""),
                delta(reserved) if reserved else Span(""),
                quiet(step.note),
            )


def _deeds(report: FreeReport) -> tuple[Row, ...]:
    """Name what was dropped where no device has a table."""
    return tuple((Span(_words(step, 0), ", ".join(step.items)),) for step in report.steps if step.items)


def _dry_page(report: FreeReport) -> Page:
    rows = tuple(_dry_row(step) for step in report.steps if step.items or step.expected_bytes)
    rest = tuple((quiet(note),) for note in report.notes)
    nothing: tuple[Row, ...] = ((quiet("nothing of yours would go; garbage and caches would"),),)
    return Page((Block(rows or nothing), Block(rest)))


def _dry_row(step: FreeStep) -> Row:
    expected = size(step.expected_bytes) if step.expected_bytes else Span("")
    return (Span(_words(step, 1), ", ".join(step.items)), expected)


def _words(step: FreeStep, tense: int) -> str:
    items = _output_words(step.items) if step.key == "outputs" else ", ".join(step.items)
    return _STEPS[step.key][tense].format(shorten(items, _ITEMS_WIDTH))


def _output_words(items: Iterable[str]) -> str:
    """Write ``Out[3], Out[9] and their copies``; the copies alone by their names."""
    names = list(items)
    outputs = [name for name in names if name.startswith("Out[")]
    if not outputs:
        return ", ".join(names)
    copies = "" if len(names) == len(outputs) else " and its copies" if len(outputs) == 1 else " and their copies"
    return ", ".join(outputs) + copies
