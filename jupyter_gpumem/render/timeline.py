"""The curve of a cell's memory over its time, drawn as characters and as SVG."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jupyter_gpumem.render.layout import Block, Row, Span, exact, quiet, shorten
from jupyter_gpumem.sizes import format_bytes
from jupyter_gpumem.timeline import DeviceTimeline, Moment

_COLUMNS, _ROWS = 72, 4  # characters
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT = 640, 96  # pixels; the width gives way on a narrow page
_SOURCE_WIDTH = 48
_ALLOCATED = "var(--jp-brand-color1,#1976d2)"
_RESERVED = "var(--jp-ui-font-color2,#757575)"


def timeline_block(timeline: DeviceTimeline) -> Block:
    """Write the curve of one device, and below it when and where it was highest."""
    head = Span(f"{timeline.label} over {_time(timeline.seconds)}", style="strong")
    top = Span(f"0 to {format_bytes(timeline.most_requested_bytes)} allocated", exact(timeline.most_requested_bytes))
    remarks = [_remark(timeline)]
    if timeline.since is not None:
        remarks.append(f"the history begins at line {timeline.since}, when CUDA had started")
    if timeline.cut:
        remarks.append("the allocator's history was full: the beginning is missing, and may have been higher")
    rows = (_peak(timeline), *((quiet(remark),) for remark in remarks))
    return Block(rows, picture=Curve(timeline), head=(head, top), flow=True)


def _remark(timeline: DeviceTimeline) -> str:
    if timeline.cut:
        return f"as requested; the peak of the whole cell, in blocks: {format_bytes(timeline.peak_allocated_bytes)}"
    rounding = f"rounding to blocks adds {format_bytes(timeline.rounding_bytes)} at the peak"
    if not timeline.peak_exact:
        rounding = f"in blocks at most {format_bytes(timeline.peak_allocated_bytes)}"
    return f"as requested; {rounding}; torch reserved {format_bytes(timeline.most_reserved_bytes)} at most"


def _peak(timeline: DeviceTimeline) -> Row:
    word, nbytes = "peak", timeline.peak_allocated_bytes
    if timeline.cut or not timeline.peak_exact:
        word, nbytes = "highest known" if timeline.cut else "peak", timeline.most_requested_bytes
    text, title = f"{word} {format_bytes(nbytes)} after {_time(timeline.peak_seconds)}", exact(nbytes)
    if timeline.peak_line is None:
        return (Span(text, title),)
    where = Span(f"{text}, in line {timeline.peak_line}", title)
    return (where, Span(shorten(timeline.peak_source, _SOURCE_WIDTH), timeline.peak_source, "quiet"))


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


@dataclass(frozen=True, slots=True)
class Curve:
    """The allocated bytes over the time of a cell; as SVG the reserved bytes too, and the lines on hover."""

    timeline: DeviceTimeline

    def to_text(self) -> str:
        """Draw columns of eighths of a character, each as high as its time's highest level."""
        top = max(self.timeline.most_requested_bytes, 1)
        heights = [round(level * 8 * _ROWS / top) for level in self._highest()]
        rows = [
            "".join(_EIGHTHS[min(max(height - 8 * row, 0), 8)] for height in heights) for row in reversed(range(_ROWS))
        ]
        return "\n".join(f"  {row}".rstrip() for row in rows)

    def _highest(self) -> list[int]:
        """Return the highest level in each column, of 0 where nothing is known yet."""
        highest, level = [0] * _COLUMNS, 0
        at = 0
        for moment in self.timeline.moments:
            column = min(int(moment.seconds * _COLUMNS / self.timeline.seconds), _COLUMNS - 1)
            # the level before holds until this moment
            for between in range(at, column + 1):
                highest[between] = max(highest[between], level)
            at, level = column, moment.requested_bytes
            highest[column] = max(highest[column], level)
        for between in range(at, _COLUMNS):
            highest[between] = max(highest[between], level)
        return highest

    def to_html(self) -> str:
        """Draw an SVG that a page without JavaScript shows too; a line's source appears on hover."""
        timeline = self.timeline
        top = max(timeline.most_requested_bytes, timeline.most_reserved_bytes, 1)
        allocated = self._path([moment.requested_bytes for moment in timeline.moments], top)
        reserved = self._path([moment.reserved_bytes for moment in timeline.moments], top)
        first = self._x(timeline.moments[0].seconds)
        label = html.escape(
            f"{timeline.label} over {_time(timeline.seconds)}: {format_bytes(timeline.most_requested_bytes)} at most"
        )
        line = 'fill="none" vector-effect="non-scaling-stroke"'
        ends = (
            "0 s",
            f"dashed: reserved, to {format_bytes(timeline.most_reserved_bytes)}",
            _time(timeline.seconds),
        )
        return (
            f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
            f'style="display:block;width:100%;max-width:{_WIDTH}px;height:{_HEIGHT}px;margin:2px 0;overflow:visible">'
            f'<path d="{allocated}V{_HEIGHT}H{first}z" style="fill:{_ALLOCATED};fill-opacity:.25;stroke:none"/>'
            f'<path d="{allocated}" {line} style="stroke:{_ALLOCATED};stroke-width:1.5"/>'
            f'<path d="{reserved}" {line} style="stroke:{_RESERVED};stroke-dasharray:3 3"/>'
            f"{''.join(self._bands())}</svg>"
            f'<div style="display:flex;justify-content:space-between;max-width:{_WIDTH}px;font-size:11px;'
            f'color:{_RESERVED}">{"".join(f"<span>{text}</span>" for text in ends)}</div>'
        )

    def _path(self, levels: Sequence[int], top: int) -> str:
        """Return a path of steps: a level holds until the next moment."""
        moments: Sequence[Moment] = self.timeline.moments
        heights = [round(_HEIGHT - level / top * (_HEIGHT - 2), 1) for level in levels]
        steps = [f"M{self._x(moments[0].seconds)} {heights[0]}"]
        for moment, height, before in zip(moments[1:], heights[1:], heights[:-1], strict=True):
            if height != before:
                steps.append(f"H{self._x(moment.seconds)}V{height}")
        return "".join(steps) + f"H{_WIDTH}"

    def _x(self, seconds: float) -> float:
        return round(seconds / self.timeline.seconds * _WIDTH, 1)

    def _bands(self) -> Iterator[str]:
        """Lay an invisible field over the time of each line; it tells the line on hover."""
        for span in self.timeline.lines:
            x = self._x(span.start_seconds)
            title = html.escape(f"line {span.line}: {span.source}")
            yield (
                f'<rect x="{x}" y="0" width="{round(self._x(span.end_seconds) - x, 1)}" height="{_HEIGHT}" '
                f'style="fill:transparent"><title>{title}</title></rect>'
            )
