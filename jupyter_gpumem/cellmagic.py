"""How ``%%gpumem`` runs its body as an ordinary cell: its line is taken out before IPython compiles the rest."""

import itertools
import re
from argparse import Namespace

from IPython.core.error import UsageError

from jupyter_gpumem.arguments import gpumem_cell_parser

_ASKS_FOR_HELP = re.compile(r"%%(gpumem|gpu_fit)\s(.*\s)?(-h|--help)\s*$")
_LINE = re.compile(r"%%gpumem(?:\s+(?P<options>.*))?\s*$")
# these run the cell below them in place; others (%%bash, %%writefile) only take it as text
_TRANSPARENT = ("%%time", "%%timeit", "%%prun", "%%capture")


def strip_magic_line(lines: list[str]) -> list[str]:
    """Take the line ``%%gpumem`` off a cell (an IPython cleanup transform: no side effects).

    A blank line stays in its place, so that tracebacks keep their line numbers, unless a cell magic follows. A
    line with a mistake, ``--help`` or ``?`` is left to the registered magic, which answers it; for help it gets a
    body, without which IPython would not call it.
    """
    if len(lines) == 1 and _ASKS_FOR_HELP.match(lines[0]):
        return [*lines, "\n"]
    if not lines or _options_of(lines[0]) is None:
        return lines
    below = list(itertools.dropwhile(lambda line: not line.strip(), lines[1:]))
    return below if below and below[0].startswith("%%") else ["\n", *lines[1:]]


def detail_options(raw_cell: str) -> Namespace | None:
    """Return the options of the ``%%gpumem`` line at a cell's head, or None when the cell has none."""
    for line in raw_cell.splitlines():
        if not line.strip():
            continue
        options = _options_of(line.lstrip())  # IPython takes a whole cell's indentation off
        if options is not None:
            return options
        if line.split()[0] not in _TRANSPARENT:
            return None
    return None


def without_magic_lines(raw_cell: str) -> str:
    """Return the body of a cell below the magics at its head, each of which runs it in place."""
    lines = raw_cell.splitlines(keepends=True)
    return "".join(itertools.dropwhile(lambda line: not line.strip() or line.lstrip().startswith("%%"), lines))


def _options_of(line: str) -> Namespace | None:
    match = _LINE.match(line)
    if match is None:
        return None
    try:
        return gpumem_cell_parser(with_help=False).parse_line(match["options"] or "")
    except UsageError:
        return None
