"""The table of a cell's source lines: what each took at the peak, and what of it is still there."""

from jupyter_gpumem.lines import DeviceLines, LineUse
from jupyter_gpumem.render.layout import Block, Row, Span, quiet, shorten, size

_SHOWN = 20
_SOURCE_WIDTH = 44
_BLANK = Span("", right=True)


def lines_block(device: DeviceLines) -> Block:
    """Write a row for each line, in the order of the source; those that matter least are summed up."""
    most = sorted(device.lines, key=lambda use: -max(use.at_peak_bytes, use.kept_bytes))
    shown, rest = set(map(id, most[:_SHOWN])), most[_SHOWN:]
    rows: list[Row] = [
        (
            Span(f"{device.label} by line", style="strong"),
            *(Span(word, style="quiet", right=True) for word in ("at peak", "kept", "allocated")),
        ),
        *(_line(use) for use in device.lines if id(use) in shown),
    ]
    if rest:
        rows.append(_sum(f"  {len(rest)} more lines", rest))
    before = "  from before" if device.since is None else f"  from before line {device.since}, when CUDA started"
    rows.append((quiet(before), size(device.before_bytes), _BLANK, _BLANK))
    rows.append((quiet(_rounding(device)), size(device.rounding_bytes), _BLANK, _BLANK))
    peak = "peak" if device.peak_exact else "peak, at most"
    rows.append((Span(peak), size(device.peak_allocated_bytes), _BLANK, _BLANK))
    if device.cut:
        rows.append((quiet("the allocator's history was full: what is older counts as from before"),))
    return Block(tuple(rows))


def _rounding(device: DeviceLines) -> str:
    if device.cut:
        return "  rounding to blocks, or higher before"
    return "  rounding to blocks" if device.peak_exact else "  rounding to blocks, at most"


def _line(use: LineUse) -> Row:
    name = "elsewhere" if use.line is None else f"{use.line:>3}  {shorten(use.source, _SOURCE_WIDTH)}"
    return (Span(f"  {name}", use.source), *_sizes(use))


def _sizes(use: LineUse) -> tuple[Span, ...]:
    return tuple(size(n) if n else _BLANK for n in (use.at_peak_bytes, use.kept_bytes, use.allocated_bytes))


def _sum(name: str, uses: list[LineUse]) -> Row:
    total = LineUse(
        None,
        "",
        sum(use.at_peak_bytes for use in uses),
        sum(use.kept_bytes for use in uses),
        sum(use.allocated_bytes for use in uses),
    )
    return (quiet(name), *_sizes(total))
