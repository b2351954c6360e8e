"""The memory of a device within one cell, moment by moment, from the allocator's own trace of the cell."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jupyter_gpumem.celltrace import CellTrace, Event

COLUMNS = 200
"""Into so many parts the time of a cell is divided; of each the extremes are kept."""

# what an event does to the requested and to the reserved bytes
_REQUESTED = {"alloc": 1, "free_completed": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True)
class Moment:
    """What a device held from ``seconds`` after the first line's beginning on; sizes in bytes."""

    seconds: float
    requested_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class LineSpan:
    """A line of the cell, and when it ran, in seconds after the first line's beginning."""

    line: int
    source: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class DeviceTimeline:
    """One device over the ``seconds`` from a cell's first line to its end, or its error, less what our reports took.

    ``moments`` are exact and in order; where there were many, the extremes of each 200th of the time. Sizes are
    as they were requested: at the highest moment ``rounding_bytes`` more were in use, ``peak_allocated_bytes``
    in all; where that is not ``peak_exact``, both are upper bounds. ``peak_line`` is None where no line of the
    cell was running. ``since`` and ``cut`` are those of :class:`~jupyter_gpumem.lines.DeviceLines`; where it is
    ``cut``, the highest moment is the highest of those that are known, while ``peak_allocated_bytes`` is that
    of the whole cell and ``rounding_bytes`` the difference.
    """

    device: int
    label: str
    seconds: float
    moments: tuple[Moment, ...]
    lines: tuple[LineSpan, ...]
    peak_seconds: float
    peak_line: int | None
    peak_source: str
    peak_allocated_bytes: int
    peak_exact: bool
    rounding_bytes: int
    since: int | None
    cut: bool

    @property
    def most_requested_bytes(self) -> int:
        """The highest level of the curve."""
        return max(moment.requested_bytes for moment in self.moments)

    @property
    def most_reserved_bytes(self) -> int:
        """The most that torch had reserved."""
        return max(moment.reserved_bytes for moment in self.moments)


def timeline_of(trace: CellTrace) -> DeviceTimeline:
    """Follow a device through a cell, of which the trace has an event at least."""
    seconds = max(_seconds(trace, trace.ended_us), 1e-6)
    moments = [*_beginning(trace), *_after_each_event(trace)]
    peak = max(range(len(moments)), key=lambda index: moments[index].requested_bytes)
    event = peak - (len(moments) - len(trace.events))
    line = trace.line_of(trace.events[event]) if event >= 0 else trace.since
    return DeviceTimeline(
        trace.device,
        trace.label,
        seconds,
        tuple(_thinned(moments, seconds)),
        tuple(_spans(trace, seconds)),
        moments[peak].seconds,
        line,
        trace.text_of(line),
        trace.peak_allocated_bytes,
        trace.peak_exact,
        trace.peak_allocated_bytes - moments[peak].requested_bytes,
        trace.since,
        trace.cut,
    )


def _seconds(trace: CellTrace, time_us: int) -> float:
    """Return how long the cell itself had run by then."""
    time_us = min(max(time_us, trace.began_us), trace.ended_us)
    waited_us = sum(min(end, time_us) - begin for begin, end in trace.pauses_us if begin < time_us)
    return (time_us - trace.began_us - waited_us) / 1e6


def _time_us(trace: CellTrace, seconds: float) -> int:
    """Return by when the cell itself had run so long."""
    time_us = trace.began_us + int(seconds * 1e6)
    for begin, end in trace.pauses_us:
        time_us += end - begin if begin < time_us else 0
    return time_us


def _beginning(trace: CellTrace) -> Iterator[Moment]:
    """Yield the level before the first event, from when on it is known."""
    if trace.since is not None:
        yield Moment(0.0, 0, 0)  # before CUDA started nothing can have been there
    known_us = trace.events[0]["time_us"] if trace.cut else trace.known_us
    yield Moment(_seconds(trace, known_us), *_start_levels(trace))


def _after_each_event(trace: CellTrace) -> Iterator[Moment]:
    requested, reserved = _start_levels(trace)
    for event in trace.events:
        requested += _change(event, _REQUESTED)
        reserved += _change(event, _RESERVED)
        yield Moment(_seconds(trace, event["time_us"]), requested, reserved)


def _start_levels(trace: CellTrace) -> tuple[int, int]:
    """Return the requested and the reserved bytes before the first event, told from those after the last."""
    return (
        trace.requested_after_bytes - sum(_change(event, _REQUESTED) for event in trace.events),
        trace.reserved_after_bytes - sum(_change(event, _RESERVED) for event in trace.events),
    )


def _change(event: Event, signs: dict[str, int]) -> int:
    return signs.get(event["action"], 0) * int(event["size"])


def _thinned(moments: Sequence[Moment], seconds: float) -> Iterator[Moment]:
    """Keep of each column its first, lowest, highest and last moment, in their order."""
    if len(moments) <= 4 * COLUMNS:
        yield from moments
        return
    for _column, group in itertools.groupby(moments, lambda moment: int(moment.seconds * COLUMNS / seconds)):
        column = list(group)
        levels = [moment.requested_bytes for moment in column]
        reserved = [moment.reserved_bytes for moment in column]
        kept = {0, levels.index(min(levels)), levels.index(max(levels)), reserved.index(max(reserved)), len(column) - 1}
        yield from (column[index] for index in sorted(kept))


def _spans(trace: CellTrace, seconds: float) -> Iterator[LineSpan]:
    """Yield which line ran in the middle of each column, neighbours that are alike as one."""
    running = [trace.log.at(_time_us(trace, (column + 0.5) * seconds / COLUMNS)) for column in range(COLUMNS)]
    column = 0
    for line, group in itertools.groupby(running):
        start, column = column, column + sum(1 for _ in group)
        if line is not None:
            yield LineSpan(line, trace.text_of(line), start * seconds / COLUMNS, column * seconds / COLUMNS)
