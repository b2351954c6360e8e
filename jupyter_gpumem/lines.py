"""Which source line of a cell took GPU memory, from the allocator's own trace of the cell."""

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
    ``peak_allocated_bytes``. ``since`` is the line at which the trace began, None when that was the cell's
    beginning; ``cut`` tells that it had grown too long and lost its beginning.
    """

    device: int
    label: str
    lines: tuple[LineUse, ...]
    before_bytes: int
    rounding_bytes: int
    peak_allocated_bytes: int
    since: int | None
    cut: bool


class LineLog:
    """Which line was running when, in microseconds of the allocator's clock; told only when the line changes."""

    def __init__(self, most: int = 2_000_000) -> None:
        self._times, self._lines = array("q"), array("q")
        self._most = most  # 16 bytes each

    def add(self, time_us: int, line: int) -> None:
        """Note that a line begins."""
        if len(self._times) < self._most:
            self._times.append(time_us)
            self._lines.append(line)

    def at(self, time_us: int) -> int | None:
        """Return the line that was running; None before the first, and after the last there was room for."""
        index = bisect_right(self._times, time_us)
        return self._lines[index - 1] if 0 < index < self._most else None


def lines_of(
    events: Sequence[Mapping[str, Any]],
    line_of: Callable[[Mapping[str, Any]], int | None],
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


def _live(
    events: Sequence[Mapping[str, Any]], line_of: Callable[[Mapping[str, Any]], int | None]
) -> tuple[dict[int | None, int], int]:
    """Return the bytes alive after the events, by line, and how many from before them were freed."""
    alive: dict[int, Mapping[str, Any]] = {}
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
