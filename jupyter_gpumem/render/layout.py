"""The grid every report is written on, as aligned text and as the same HTML table."""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jupyter_gpumem.sizes import format_bytes, format_delta

WIDTH = 100
"""Columns of a terminal that a report fits in."""

_GAP = 3
_PLACE = re.compile(r".*?\(\) line \d+")
_LEAST_REST = 6
_WORD = 16  # characters that a narrow page does not break

Style = Literal["", "strong", "quiet", "warn", "code"]

# JupyterLab's own variables, each with a fall-back: an exported page and VS Code define none of them
_CSS = {
    "": "",
    "strong": "font-weight:600;",
    "quiet": "color:var(--jp-ui-font-color2,#757575);",
    "warn": "color:var(--jp-error-color1,#c62828);font-weight:600;",
    "code": "font-family:var(--jp-code-font-family,monospace);",
}
_TABLE_CSS = (
    "border-collapse:collapse;margin:2px 0;font-size:var(--jp-ui-font-size1,13px);"
    "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-variant-numeric:tabular-nums;"
    "color:var(--jp-ui-font-color1,inherit);"
)


@dataclass(frozen=True, slots=True)
class Span:
    """One cell of a report: its text, a tooltip, a style, and the side it is aligned to."""

    text: str
    title: str = ""
    style: Style = ""
    right: bool = False


Row = Sequence["Span | str"]


class Picture(Protocol):
    """What is drawn between the head of a block and its rows."""

    def to_text(self) -> str:
        """Draw it with characters."""

    def to_html(self) -> str:
        """Draw it as HTML that needs no script, every text escaped."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows whose columns line up; ``indent`` is in characters; above them ``head``, then ``picture``.

    With ``flow`` a row that is too long for a narrow page goes on in the next line instead of being squeezed.
    """

    rows: tuple[Row, ...]
    indent: int = 0
    picture: "Picture | None" = None
    head: Row = ()
    flow: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A stacked bar: ``(label, bytes, CSS colour, text mark)`` for each part, and the whole in bytes."""

    parts: tuple[tuple[str, int, str, str], ...]
    total_bytes: int
    width: int = 50

    def to_text(self) -> str:
        """Fill ``width`` characters in proportion, rounded on the running sum."""
        drawn, reached, marks = 0, 0, []
        for _label, nbytes, _colour, mark in self.parts:
            reached += nbytes
            end = round(reached / max(self.total_bytes, 1) * self.width)
            marks.append(mark * (end - drawn))
            drawn = max(drawn, end)
        return "".join(marks)

    def to_html(self) -> str:
        """Fill the page's width, up to a limit, in proportion."""
        parts = "".join(
            f'<span style="flex:{nbytes} 0 0;background:{colour}" title="{html.escape(label)}: '
            f'{format_bytes(nbytes)} ({exact(nbytes)})"></span>'
            for label, nbytes, colour, _mark in self.parts
            if nbytes > 0
        )
        label = html.escape(", ".join(f"{name} {format_bytes(n)}" for name, n, _c, _m in self.parts if n > 0))
        return (
            f'<div role="img" aria-label="{label}" style="display:flex;height:12px;max-width:640px;'
            f'margin:2px 0;overflow:hidden;border-radius:2px">{parts}</div>'
        )


@dataclass(frozen=True, slots=True)
class Page:
    """A report: blocks, parted by an empty line where ``spaced``."""

    blocks: tuple[Block, ...] = field(default=())
    spaced: bool = True


def size(nbytes: int | None, style: Style = "") -> Span:
    """Write a size, with the exact bytes as its tooltip."""
    return Span(format_bytes(nbytes), exact(nbytes), style, right=True)


def delta(nbytes: int | None, style: Style = "") -> Span:
    """Write a change of size, with the exact bytes as its tooltip."""
    return Span(format_delta(nbytes), exact(nbytes), style, right=True)


def code(text: str) -> Span:
    """Write code to run; in text it stands after an arrow."""
    return Span(text, style="code")


def quiet(text: str) -> Span:
    """Write a remark."""
    return Span(text, style="quiet")


def exact(nbytes: int | None) -> str:
    """Write the exact number of bytes."""
    return "" if nbytes is None else f"{nbytes:,} bytes"


def shorten(text: str, width: int) -> str:
    """Cut the middle out of a text longer than ``width``; both ends stay, since a path needs them."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def shorten_path(path: str, width: int) -> str:
    """Cut what follows the function and line out of a holder's path before anything else."""
    place = _PLACE.match(path)
    if len(path) <= width or place is None or place.end() > width - _LEAST_REST:
        return shorten(path, width)
    rest = width - place.end() - 1
    return f"{place[0]}…{path[len(path) - rest :]}"


def to_text(page: Page) -> str:
    """Write a page as aligned text, without a final newline."""
    blocks = ["\n".join(_text_lines(block)) for block in page.blocks]
    return ("\n\n" if page.spaced else "\n").join(block for block in blocks if block)


def to_html(page: Page) -> str:
    """Write a page as HTML tables; every text is escaped, no script, no network."""
    return "".join(_html_block(block, page.spaced) for block in page.blocks)


def _text_lines(block: Block) -> Iterable[str]:
    if block.head:
        yield (" " * _GAP).join(_plain(_as_span(cell)) for cell in block.head).rstrip()
    if block.picture is not None:
        yield from (" " * block.indent + line for line in block.picture.to_text().splitlines())
    rows = [[_as_span(cell) for cell in row] for row in block.rows]
    widths = _column_widths(rows)
    for row in rows:
        cells = []
        for width, span in zip(widths, row, strict=False):
            text = _plain(span)
            cells.append(text.rjust(width) if span.right else text.ljust(width))
        yield (" " * block.indent + (" " * _GAP).join(cells)).rstrip()


def _column_widths(rows: list[list[Span]]) -> list[int]:
    """Return the width of each column; a row's last cell may run on and widens nothing."""
    widths: list[int] = []
    for row in rows:
        for column, span in enumerate(row):
            if column == len(widths):
                widths.append(0)
            if column < len(row) - 1 or span.right:
                widths[column] = max(widths[column], len(_plain(span)))
    return widths


def _plain(span: Span) -> str:
    return f"→ {span.text}" if span.style == "code" else span.text


def _as_span(cell: "Span | str") -> Span:
    return Span(cell) if isinstance(cell, str) else cell


def _html_block(block: Block, spaced: bool) -> str:
    columns = max((len(row) for row in block.rows), default=1)
    head = _html_row(block.head, len(block.head), 0) if block.head else ""
    above = f'<table style="{_TABLE_CSS}">{head}</table>' if head else ""
    above += "" if block.picture is None else block.picture.to_html()
    if block.flow:
        return above + _html_flow(block)
    rows = "".join(_html_row(row, columns, block.indent) for row in block.rows)
    margin = "margin-bottom:8px;" if spaced else ""
    return f'{above}<table style="{_TABLE_CSS}{margin}">{rows}</table>' if rows else above


def _html_row(row: Row, columns: int, indent: int) -> str:
    cells = []
    for column, cell in enumerate(row):
        span = _as_span(cell)
        rest = columns - column if column == len(row) - 1 else 1
        left = f"padding-left:{indent}ch;" if column == 0 and indent else ""
        css = (
            f"text-align:{'right' if span.right else 'left'};padding:1px 1.2em 1px 0;border:none;"
            f"background:none;white-space:{_html_wrap(span)};vertical-align:top;"
            f"{left}{_CSS[span.style]}"
        )
        colspan = f' colspan="{rest}"' if rest > 1 else ""
        cells.append(f'<td style="{css}"{_html_title(span)}{colspan}>{_html_text(span)}</td>')
    return f'<tr style="background:none">{"".join(cells)}</tr>'


def _html_flow(block: Block) -> str:
    rows = [[_as_span(cell) for cell in row] for row in block.rows]
    widths = _column_widths(rows)
    lines = []
    for row in rows:
        spans = "".join(
            f'<span style="min-width:min(100%,{width if len(rows) > 1 else 0}ch);'
            f'white-space:{_html_wrap(span)};{_CSS[span.style]}"'
            f"{_html_title(span)}>{_html_text(span)}</span>"
            for width, span in zip(widths, row, strict=False)
            if span.text or len(rows) > 1
        )
        lines.append(f'<div style="display:flex;flex-wrap:wrap;column-gap:1.5em">{spans}</div>')
    return f'<div style="{_TABLE_CSS}">{"".join(lines)}</div>'


def _html_wrap(span: Span) -> str:
    return "pre" if span.right or len(span.text) <= _WORD else "pre-wrap"


def _html_title(span: Span) -> str:
    return f' title="{html.escape(span.title)}"' if span.title else ""


def _html_text(span: Span) -> str:
    text = html.escape(span.text)
    return f'→ <code style="background:none;color:inherit">{text}</code>' if span.style == "code" else text
