"""One row of the benchmark's table, and how rows are printed."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured, beside what, and the goal it has.

    ``ratio`` is measured over against, from the same rounds; None where a row has a figure of its own only.
    ``met`` is None where there is no goal, as beside a peer.
    """

    what: str
    measured: str
    against: str = ""
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None


HEAD = Row("what", "measured", "against", None, "goal")


def table(rows: Iterable[Row]) -> str:
    """Return the rows as aligned text, each goal with ``met`` or ``MISSED`` behind it."""
    cells = [_cells(HEAD, "ratio"), *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(_line(line, widths) for line in cells)


def median_ratio(measured: Sequence[float], against: Sequence[float]) -> float:
    """Return the median of the ratios of each round: a noisy round spoils both of its sides alike."""
    return statistics.median(mine / other for mine, other in zip(measured, against, strict=True))


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds with three digits."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _cells(row: Row, ratio: str = "") -> list[str]:
    verdict = "" if row.met is None else "met" if row.met else "MISSED"
    number = f"{row.ratio:.3f}" if row.ratio is not None else ratio
    return [row.what, row.measured, row.against, number, row.goal, verdict]


def _line(line: Sequence[str], widths: Sequence[int]) -> str:
    right = (1, 3)
    padded = (
        text.rjust(width) if column in right else text.ljust(width)
        for column, (text, width) in enumerate(zip(line, widths, strict=True))
    )
    return "  ".join(padded).rstrip()
