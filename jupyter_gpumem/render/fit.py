"""What fitted, and every run that led there."""

import math

from jupyter_gpumem.render.layout import Block, Page, Row, Span, Style, exact, quiet, size
from jupyter_gpumem.search import FitAttempt, FitReport
from jupyter_gpumem.sizes import format_bytes

_TENTHS_BELOW = 10


def fit_page(report: FitReport) -> Page:
    """Write the value that fitted with its peak and what was left, then a row for each run."""
    blocks = [Block((_headline(report),))]
    if len(report.attempts) > 1:
        blocks.append(Block(tuple(_run(report, attempt) for attempt in report.attempts), indent=2))
    notes = tuple((quiet(note),) for note in _notes(report))
    return Page((*blocks, Block(notes, indent=2)) if notes else tuple(blocks), spaced=False)


def _headline(report: FitReport) -> Row:
    last = report.attempts[-1]
    row = [Span(f"{report.name} = {report.value} fits", style="strong"), *_peak_and_room(last)]
    if report.simulated:
        row.append(quiet("simulated"))
    return row


def _peak_and_room(attempt: FitAttempt) -> list[Span]:
    if attempt.peak_bytes is None:
        return [quiet("nothing was on a GPU")]
    peak = Span(f"peak {format_bytes(attempt.peak_bytes)}", exact(attempt.peak_bytes))
    return [peak, Span(_room(attempt), exact(attempt.free_bytes))]


def _room(attempt: FitAttempt) -> str:
    if attempt.free_bytes is None or not attempt.total_bytes:
        return f"left free on {attempt.device}: unknown"
    percent = 100 * attempt.free_bytes / attempt.total_bytes
    # never rounded up: what is short of a margin must not read as the margin
    shown = math.floor(percent) if percent >= _TENTHS_BELOW else math.floor(10 * percent) / 10
    return f"{format_bytes(attempt.free_bytes)} of {attempt.device} left free ({shown:g} %)"


def _run(report: FitReport, attempt: FitAttempt) -> Row:
    value = Span(f"{attempt.value}", right=True)
    if attempt.outcome == "out of memory":
        asked = [] if attempt.asked_bytes is None else [quiet(f"asked for {format_bytes(attempt.asked_bytes)}")]
        return value, Span("out of memory", style="warn"), *asked
    style: Style = "strong" if attempt.value == report.value else ""
    cells: list[Span] = [value, Span(attempt.outcome, style=style)]
    if attempt.peak_bytes is not None:
        cells += [size(attempt.peak_bytes), quiet(_room(attempt))]
    return cells


def _notes(report: FitReport) -> list[str]:
    notes = []
    if report.without_effect is not None:
        notes.append(f"{report.without_effect} did exactly the same: larger values make no difference here")
    if report.deleted:
        notes.append(f"deleted between the runs, because the cell rebinds them: {', '.join(report.deleted)}")
    if report.dropped_error is not None:
        notes.append(f"the last error ({report.dropped_error}) was let go: %debug and %tb have nothing left")
    if report.value <= report.smallest:
        notes.append(f"{report.value} is already the smallest value that may be tried")
    return notes
