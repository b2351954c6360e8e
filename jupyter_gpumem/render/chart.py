"""The live chart: a few minutes of one device as a small SVG with the cells laid over it."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jupyter_gpumem.render.wire import clip, wire_bytes
from jupyter_gpumem.sampler import Sample
from jupyter_gpumem.sizes import format_bytes

WIDTH, HEIGHT = 300, 100
"""The SVG's own units; it is stretched to the panel's width, lines keep their thickness."""

_COLUMNS = 100
_DETAIL = ((1, 16, 60), (2, 14, 48), (2, 10, 32), (4, 8, 24), (4, 5, 20), (5, 3, 16), (10, 2, 12))
"""Columns drawn as one, cells, characters of a cell's first line: the first that fits the bytes allowed is drawn."""

_NARROWEST = 5
"""Units of width below which a mark is hard to see and to hover."""

_SAMPLE_SECONDS = 1.0

Column = tuple[int, int, int, int, int]
"""Where on the chart, and the first, lowest, highest and last size there."""


@dataclass(frozen=True, slots=True)
class CellMark:
    """One cell on the chart; times in seconds of ``time.monotonic()``, ``ended`` is None while it runs."""

    started: float
    ended: float | None
    number: int | None
    first_line: str
    status: str = "ok"
    peak_bytes: int | None = None
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn, between ``start`` and ``end`` in seconds of ``time.monotonic()``; sizes in bytes."""

    label: str
    samples: Sequence[Sample]
    cells: Sequence[CellMark]
    start: float
    end: float
    total_bytes: int | None = None
    limit_bytes: int | None = None
    start_text: str = ""
    end_text: str = ""
    memory_word: str = "allocated"
    kills: Sequence[float] = ()
    """When the allocator ran out of memory outside any cell that failed of it."""


def render_chart(chart: Chart, max_bytes: int = 2200) -> str:
    """Draw a chart as HTML of at most ``max_bytes`` where the least detail allows; every text is escaped."""
    lines = [
        _columns(chart, [(s.seconds, s.used_bytes) for s in chart.samples]),
        _columns(chart, [(s.seconds, s.reserved_bytes) for s in chart.samples]),
        _columns(chart, [(s.seconds, s.allocated_bytes) for s in chart.samples]),
    ]
    fitting, low, high = "", 0, len(_DETAIL) - 1
    while low <= high:
        middle = (low + high) // 2
        together, cells, characters = _DETAIL[middle]
        drawn = _draw(chart, [_merge(line, together) for line in lines], cells, characters)
        if wire_bytes(drawn) <= max_bytes:
            fitting, high = drawn, middle - 1
        else:
            low = middle + 1
    return fitting or drawn


def scale_of(chart: Chart) -> int:
    """Return the bytes at the top of the chart: the next round size above all that is drawn."""
    sizes = [max(sample.allocated_bytes, sample.reserved_bytes, sample.used_bytes or 0) for sample in chart.samples]
    peaks = [cell.peak_bytes or 0 for cell in chart.cells]
    highest = max([*sizes, *peaks, chart.limit_bytes or 0, 1024**2])
    top = _round_up(highest + highest // 20)
    if chart.total_bytes is None or chart.total_bytes < highest:
        return top
    return min(top, chart.total_bytes)


def _round_up(nbytes: int) -> int:
    """Return the smallest of 1, 1.5, 2, 3, 4, 6, 8, … MiB that is not below a size."""
    step = 1024**2
    while step < nbytes:
        if step * 3 // 2 >= nbytes:
            return step * 3 // 2
        step *= 2
    return step


def _draw(chart: Chart, columns: Sequence[Sequence[Column]], cells: int, characters: int) -> str:
    top = scale_of(chart)
    used, reserved, allocated = columns
    lines = [_path("u", used, top), _path("r", reserved, top), _area("a", allocated, top), _peaks(chart, top)]
    if chart.limit_bytes is not None:
        lines.append(f'<path class=gm-l d="M0 {_y(chart.limit_bytes, top)}h{WIDTH}"/>')
    return (
        f'<div class=gm-plot role=img aria-label="{html.escape(_summary(chart))}">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio=none aria-hidden=true>{"".join(lines)}</svg>'
        f"<b>{format_bytes(top)}</b><b>{format_bytes(top // 2)}</b>{_over(chart, cells, characters)}</div>"
        f"<div class=gm-time><span>{html.escape(chart.start_text)}</span>"
        f"<span>{html.escape(chart.end_text)}</span></div>"
    )


def _summary(chart: Chart) -> str:
    """Say in words what the chart shows, for who cannot see it."""
    if not chart.samples:
        return f"{chart.label}: no samples yet"
    highest = max([s.allocated_bytes for s in chart.samples] + [cell.peak_bytes or 0 for cell in chart.cells])
    now = chart.samples[-1].allocated_bytes
    return (
        f"{chart.label} from {chart.start_text} to {chart.end_text}: {format_bytes(now)} {chart.memory_word} now, "
        f"{format_bytes(highest)} at most"
    )


def _columns(chart: Chart, points: Iterable[tuple[float, int | None]]) -> list[Column]:
    """Thin points to one entry a column, so that every spike stays visible."""
    scale = _COLUMNS / max(chart.end - chart.start, 1e-9)
    thinned: list[Column] = []
    for seconds, nbytes in points:
        if nbytes is None:
            continue
        at = min(max(int((seconds - chart.start) * scale), 0), _COLUMNS)
        if thinned and thinned[-1][0] == at:
            _at, first, low, high, _last = thinned[-1]
            thinned[-1] = (at, first, min(low, nbytes), max(high, nbytes), nbytes)
        else:
            thinned.append((at, nbytes, nbytes, nbytes, nbytes))
    return thinned


def _merge(columns: Sequence[Column], together: int) -> Sequence[Column]:
    if together == 1:
        return columns
    merged: list[Column] = []
    for at, first, low, high, last in columns:
        at -= at % together
        if merged and merged[-1][0] == at:
            _at, first, lowest, highest, _last = merged[-1]
            merged[-1] = (at, first, min(low, lowest), max(high, highest), last)
        else:
            merged.append((at, first, low, high, last))
    return merged


def _y(nbytes: int, top: int) -> int:
    return HEIGHT - min(max(round(nbytes * (HEIGHT - 2) / top), 0), HEIGHT - 2) - 1


def _steps(columns: Sequence[Column], top: int) -> tuple[int, str]:
    """Write columns as relative steps from the first one's x: a level holds until the next one."""
    if not columns:
        return 0, ""
    start = x = columns[0][0] * WIDTH // _COLUMNS
    y = _y(columns[0][1], top)
    parts = [f"M{x} {y}"]
    for at, _first, low, high, last in columns:
        # of the two extremes, the one that is not simply the end of the column
        other = high if last != high else low
        heights = (_y(other, top), _y(last, top))
        if heights[0] == heights[1] == y:
            continue
        at = at * WIDTH // _COLUMNS
        parts.append(f"h{at - x}" if at != x else "")
        x = at
        for height in heights:
            parts.append(f"v{height - y}" if height != y else "")
            y = height
    parts.append(f"h{WIDTH - x}" if x != WIDTH else "")
    return start, "".join(parts)


def _path(name: str, columns: Sequence[Column], top: int) -> str:
    _start, steps = _steps(columns, top)
    return f'<path class=gm-{name} d="{steps}"/>' if steps else ""


def _area(name: str, columns: Sequence[Column], top: int) -> str:
    """Draw a line and fill what is under it; the outline runs outside the picture except on top."""
    start, steps = _steps(columns, top)
    return f'<path class=gm-{name} d="{steps}h9V{HEIGHT + 9}H{start}z"/>' if steps else ""


def _x(chart: Chart, seconds: float) -> int:
    return round(min(max((seconds - chart.start) / max(chart.end - chart.start, 1e-9), 0), 1) * WIDTH)


def _peaks(chart: Chart, top: int) -> str:
    """Mark each cell's peak, known from the counters even where no sample saw it."""
    marks: dict[tuple[int, int], None] = {}
    for cell in chart.cells:
        if cell.peak_bytes and cell.ended is not None and cell.ended >= chart.start:
            left, right = _x(chart, cell.started), _x(chart, cell.ended)
            width = max(right - left, _NARROWEST)
            marks[min(left, WIDTH - width) * 1000 + width, _y(cell.peak_bytes, top)] = None
    steps = "".join(f"M{at // 1000} {y}h{at % 1000}" for at, y in list(marks)[-40:])
    return f'<path class=gm-p d="{steps}"/>' if steps else ""


def _over(chart: Chart, count: int, characters: int) -> str:
    """Lay the cells over the chart: a line at each start, its number and first line on hover."""
    groups = _groups(chart, count)
    if not groups:
        return _out_of_memory(chart)
    edges = [_x(chart, group[0].started) for group in groups]
    # where there are few groups each can tell of several cells in the same bytes
    lines = max(count // len(groups), 1)
    regions = [f"<i style=flex:{edges[0]}></i>"] if edges[0] > 0 else []
    for group, left, right in zip(groups, edges, [*edges[1:], WIDTH], strict=True):
        regions.append(f'<i class=gm-c style=flex:{right - left} data-cell="{_title(group, lines, characters)}"></i>')
    return f"<div class=gm-cells>{''.join(regions)}</div>{_out_of_memory(chart)}"


def _groups(chart: Chart, count: int) -> list[list[CellMark]]:
    """Gather cells that would be drawn too close to tell apart, closer still where they are more than ``count``."""
    shown = [cell for cell in chart.cells if cell.ended is None or cell.ended >= chart.start]
    groups: list[list[CellMark]] = []
    for room in (_NARROWEST, WIDTH / (count + 1)):
        groups = []
        for cell in shown:
            if groups and _x(chart, cell.started) - _x(chart, groups[-1][0].started) < room:
                groups[-1].append(cell)
            else:
                groups.append([cell])
        if len(groups) <= count:
            break
    return groups


def _title(group: Sequence[CellMark], lines: int, characters: int) -> str:
    """Write a line for each of the last cells of a group, and one for all before them."""
    gathered, told = group[:-lines], [_cell_text(cell, characters) for cell in group[-lines:]]
    if gathered:
        numbers = [str(cell.number) for cell in gathered if cell.number is not None]
        first, last = numbers[0] if numbers else "", numbers[-1] if numbers else ""
        which = f"Cells {first} to {last}" if first != last else f"Cell {first}".strip()
        told.insert(0, which + _peak_text(max((cell.peak_bytes or 0) for cell in gathered)))
    return "\n".join(told)


def _cell_text(cell: CellMark, characters: int) -> str:
    line = clip(cell.first_line, characters)
    name = "Cell" if cell.number is None else f"Cell {cell.number}"
    failed = "" if cell.status == "ok" else f" — {clip(cell.status, 40)}"
    running = " (running)" if cell.ended is None else ""
    return f"{name}{running}: {line}{_peak_text(cell.peak_bytes)}{failed}"


def _peak_text(nbytes: int | None) -> str:
    return f" · peak {format_bytes(nbytes)}" if nbytes else ""


def _out_of_memory(chart: Chart) -> str:
    """Mark where memory ran out; at most one mark for each hundredth of the width."""
    marks: dict[int, str] = {}
    failed = [cell for cell in chart.cells if cell.out_of_memory and cell.ended is not None]
    for cell in failed:
        if cell.ended is not None and cell.ended >= chart.start:
            which = "a cell" if cell.number is None else f"cell {cell.number}"
            marks[_x(chart, cell.ended) * 100 // WIDTH] = f"Out of memory in {which}"
    for seconds in chart.kills:
        # seen by a sample soon after: the cell that failed of it is marked already
        in_cell = any(cell.started <= seconds <= (cell.ended or seconds) + _SAMPLE_SECONDS for cell in failed)
        if seconds >= chart.start and not in_cell:
            marks.setdefault(_x(chart, seconds) * 100 // WIDTH, "Out of memory")
    return "".join(f'<u style=left:{at}% title="{html.escape(text)}">✕</u>' for at, text in sorted(marks.items())[-8:])
