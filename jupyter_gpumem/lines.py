"""Which source line of a cell took GPU memory, from the allocator's own trace of the cell."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jupyter_gpumem.celltrace import CellTrace, Event


@dataclass(frozen=True, slots=True)
class LineUse:
    """What one line of a cell asked of the allocator; sizes in bytes as they were requested, before rounding.

    ``line`` is None for what was allocated while no line of the cell ran.
    """

    line: int | None
    source: str
    at_peak_bytes: int
    kept_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceLines:
    """The lines of a cell on one device.

    At the peak of the cell ``before_bytes``, those of all ``lines`` and ``rounding_bytes`` sum to
    ``peak_allocated_bytes``; where that is not ``peak_exact``, both are upper bounds. ``since`` is the line at
    which the trace began, None when that was the cell's beginning; ``cut`` tells that it had grown too long and
    lost its beginning: then the lines are those of the highest moment that is known, and ``rounding_bytes`` is
    what the peak of the whole cell has more.
    """

    device: int
    label: str
    lines: tuple[LineUse, ...]
    before_bytes: int
    rounding_bytes: int
    peak_allocated_bytes: int
    peak_exact: bool
    since: int | None
    cut: bool


def device_lines(trace: CellTrace) -> DeviceLines:
    """Divide the peak of a cell, and what it left, among its lines."""
    events = trace.allocations
    uses, before = lines_of(events, trace.line_of, trace.requested_after_bytes)
    lines = [LineUse(line, trace.text_of(line), *uses[line]) for line in sorted(uses, key=lambda line: line or 0)]
    at_peak = before + sum(line.at_peak_bytes for line in lines)
    return DeviceLines(
        trace.device,
        trace.label,
        tuple(lines),
        before,
        trace.peak_allocated_bytes - at_peak,
        trace.peak_allocated_bytes,
        trace.peak_exact,
        trace.since,
        trace.cut,
    )


def lines_of(
    events: Sequence[Event],
    line_of: Callable[[Event], int | None],
    requested_after_bytes: int,
) -> tuple[dict[int | None, tuple[int, int, int]], int]:
    """Give each line its bytes at the peak, kept at the end, and allocated in all; then those from before the cell.

    ``events`` are those of one device's trace within the cell, and ``requested_after_bytes`` the allocator's
    requested bytes after the last of them.
    """
    changes = [(event, event["size"] if event["action"] == "alloc" else -event["size"]) for event in events]
    start = now = highest = requested_after_bytes - sum(change for _event, change in changes)
    peak = 0  # events until the peak
    for index, (_event, change) in enumerate(changes, 1):
        now += change
        if now > highest:
            highest, peak = now, index
    at_peak, before = _live(events[:peak], line_of)
    kept, _before = _live(events, line_of)
    asked: defaultdict[int | None, int] = defaultdict(int)
    for event in events:
        if event["action"] == "alloc":
            asked[line_of(event)] += event["size"]
    uses = {line: (at_peak.get(line, 0), kept.get(line, 0), nbytes) for line, nbytes in asked.items()}
    return uses, start - before


def _live(events: Sequence[Event], line_of: Callable[[Event], int | None]) -> tuple[dict[int | None, int], int]:
    """Return the bytes alive after the events, by line, and how many from before them were freed."""
    alive: dict[int, Event] = {}
    freed_before = 0
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif alive.pop(event["addr"], None) is None:
            freed_before += event["size"]
    by_line: defaultdict[int | None, int] = defaultdict(int)
    for event in alive.values():
        by_line[line_of(event)] += event["size"]
    return by_line, freed_before
