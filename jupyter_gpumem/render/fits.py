"""Whether a notebook fits: a row for each cell, the verdict, and what the simulation cannot know."""

from pathlib import Path

from jupyter_gpumem.fits import UNKNOWN, FitsCell, FitsFailure, FitsReport
from jupyter_gpumem.render.layout import Block, Page, Row, Span, quiet, shorten, size
from jupyter_gpumem.sizes import format_bytes

_HOLDERS = 5
_LINE_WIDTH = 44


def fits_page(report: FitsReport) -> Page:
    """Write the rows of the cells, the verdict under them, and the largest holders where it does not fit."""
    blocks = [Block(((_title(report),),))]
    if report.cells:
        blocks.append(Block((_HEAD, *(row for cell in report.cells for row in _cell_rows(cell)))))
    blocks.append(Block(((Span(verdict(report), style="strong"),), *_after_verdict(report))))
    if report.failure is not None and report.failure.holders:
        blocks.append(Block(tuple(_holder(*holder) for holder in report.failure.holders[:_HOLDERS]), indent=2))
    unknown = tuple((quiet(f"not known: {what}"),) for what in UNKNOWN)
    blocks.append(Block(((quiet("simulated"),), *unknown)))
    return Page(tuple(blocks))


_HEAD: Row = (
    Span("cell", style="quiet", right=True),
    Span("peak", style="quiet", right=True),
    Span("allocated", style="quiet", right=True),
    Span("reserved", style="quiet", right=True),
    Span("first line", style="quiet"),
)


def verdict(report: FitsReport) -> str:
    """Return the verdict in one line."""
    if report.failure is not None:
        return f"does not fit: out of memory in {report.failure.where or f'cell {report.failure.cell}'}"
    if report.verdict == "could not be run":
        return f"could not be run: {report.reason}"
    failed = [str(cell.number) for cell in report.cells if cell.failed_requests]
    if failed:
        return (
            f"ran to its end, but out of memory on the way: cell {', '.join(failed)} went on without what it asked for"
        )
    top = max(report.cells, key=lambda cell: cell.peak_bytes, default=None)
    if top is None or not top.peak_bytes:
        return "nothing was put on a GPU" if report.verdict == "fits" else "at least nothing was put on a GPU"
    need = f"{format_bytes(top.peak_bytes)}, in cell {top.number}"
    return f"fits: the peak is {need}" if report.verdict == "fits" else f"at least {need}, and that much is there"


def _title(report: FitsReport) -> str:
    cards = f"{report.devices} cards of " if report.devices > 1 else "a card of "
    return f"{shorten(Path(report.notebook).name, 60)} on {cards}{format_bytes(report.memory_bytes)}"


def _cell_rows(cell: FitsCell) -> list[Row]:
    number = Span(f"{cell.number}", right=True)
    line = Span(shorten(cell.first_line, _LINE_WIDTH), cell.first_line)
    if not cell.devices:
        return [(number, "", "", "", line, *_flags(cell))]
    several = len(cell.devices) > 1
    rows: list[Row] = []
    for index, device in enumerate(cell.devices):
        label = [quiet(device.label)] if several else []
        figures = (size(device.peak_bytes), size(device.allocated_bytes), size(device.reserved_bytes))
        first = index == 0
        rows.append(
            (
                number if first else "",
                *figures,
                line if first else "",
                *label,
                *(_flags(cell) if first else ()),
            )
        )
    return rows


def _flags(cell: FitsCell) -> list[Span]:
    flags = []
    if cell.status != "ok":
        flags.append(Span(cell.status, style="warn"))
    elif cell.failed_requests:
        flags.append(Span("ran out of memory and went on", style="warn"))
    if cell.sizes_read:
        flags.append(quiet("a size here depends on values"))
    elif cell.decisions:
        flags.append(quiet("a branch or a size here may depend on values"))
    return flags


def _after_verdict(report: FitsReport) -> list[Row]:
    rows: list[Row] = []
    if report.failure is not None:
        rows += [(text,) for text in _request(report.failure)]
    for what, cells in (
        ("a size depends on values", [cell for cell in report.cells if cell.sizes_read]),
        ("a branch or a size may depend on values", [c for c in report.cells if c.decisions and not c.sizes_read]),
    ):
        if cells:
            where = f"cell{'s' if len(cells) > 1 else ''} {', '.join(str(cell.number) for cell in cells)}"
            rows.append((quiet(f"in {where} {what}: the real figure can be larger"),))
    return rows


def _request(failure: FitsFailure) -> list[str]:
    if failure.asked_bytes is None:
        return []
    free = "" if failure.free_bytes is None else f" with {format_bytes(failure.free_bytes)} free"
    return [f"asked for {format_bytes(failure.asked_bytes)}{free}"]


def _holder(nbytes: int, holder: str) -> Row:
    return size(nbytes), Span(shorten(holder, 80), holder)
