"""What the allocator's own history tells of one cell: the events, and which line ran at each."""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
"""An entry of ``torch.cuda.memory._snapshot()["device_traces"]``."""


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

    @property
    def first_us(self) -> int | None:
        """When the first line began; None as long as none has."""
        return self._times[0] if self._times else None

    def at(self, time_us: int) -> int | None:
        """Return the line that was running; None before the first, and after the last there was room for."""
        index = bisect_right(self._times, time_us)
        return self._lines[index - 1] if 0 < index < self._most else None


@dataclass(frozen=True, slots=True)
class CellTrace:
    """One device while the lines of a cell ran; sizes in bytes, times in microseconds of the allocator's clock.

    ``requested_after_bytes`` and ``reserved_after_bytes`` are the allocator's after the last event, and
    ``peak_allocated_bytes`` the cell's peak, in whole blocks, or more where it is not ``peak_exact``. ``since``
    is the line at which the trace began, None when that was the cell's beginning, and ``known_us`` when;
    ``cut`` tells that it had grown too long and lost its beginning. In the ``pauses_us`` the cell waited for a
    report of ours on an out-of-memory error.
    """

    device: int
    label: str
    events: Sequence[Event]
    log: LineLog
    line_of: Callable[[Event], int | None]
    source: Sequence[str]
    began_us: int
    known_us: int
    ended_us: int
    pauses_us: Sequence[tuple[int, int]]
    requested_after_bytes: int
    reserved_after_bytes: int
    peak_allocated_bytes: int
    peak_exact: bool
    since: int | None
    cut: bool

    @property
    def allocations(self) -> list[Event]:
        """The events that took memory or gave it back; the others are about the driver's segments."""
        return [event for event in self.events if event["action"] in ("alloc", "free_completed")]

    def text_of(self, line: int | None) -> str:
        """Return a source line as written, without its indentation."""
        return self.source[line - 1].strip() if line is not None and line <= len(self.source) else ""
