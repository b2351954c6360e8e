"""matplotlib figures; matplotlib is imported only when one is asked for."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jupyter_gpumem.cells import CellRecord, DeviceChange
from jupyter_gpumem.errors import GpuMemError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 1024**3
# Okabe and Ito's palette: told apart by colour-blind readers
_ALLOCATED, _RESERVED, _PEAK = "#0072B2", "#E69F00", "#D55E00"


def history_figure(records: Sequence[CellRecord]) -> "Figure":
    """Draw allocated, reserved and peak over the cells, one panel a device, in GiB.

    Raises
    ------
    GpuMemError
        When no recorded cell has any device.
    """
    from matplotlib.figure import Figure

    cells = [record for record in records if record.devices]
    labels = sorted({change.label for record in cells for change in record.devices})
    if not labels:
        raise GpuMemError("no cell with GPU memory is recorded yet, so there is nothing to plot")
    figure = Figure(figsize=(8, 2.6 * len(labels)), layout="constrained")
    axes = figure.subplots(len(labels), squeeze=False, sharex=True)[:, 0]
    for label, ax in zip(labels, axes, strict=True):
        _draw(ax, label, cells)
    axes[-1].set_xlabel("cell")
    return figure


def png(figure: "Figure") -> bytes:
    """Return a figure as PNG bytes."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def _draw(ax: "Axes", label: str, cells: Sequence[CellRecord]) -> None:
    changes: list[DeviceChange | None] = [
        next((c for c in record.devices if c.label == label), None) for record in cells
    ]
    at = range(len(cells))
    ax.step(at, [_gib(c.after.reserved_bytes if c else None) for c in changes], where="mid", color=_RESERVED,
            label="reserved")  # fmt: skip
    ax.step(at, [_gib(c.after.allocated_bytes if c else None) for c in changes], where="mid", color=_ALLOCATED,
            label="allocated")  # fmt: skip
    ax.plot(at, [_gib(c.peak_allocated_bytes if c else None) for c in changes], "v", color=_PEAK, label="peak")
    ax.set_xticks(list(at), [str(record.number or "") for record in cells])
    ax.set_ylim(bottom=0)
    simulated = "  simulated" if any(record.simulated for record in cells) else ""
    ax.set_title(f"{label}{simulated}", loc="left", fontsize="medium")
    ax.set_ylabel("GiB")
    ax.legend(frameon=False, ncols=3, fontsize="small", loc="lower right", bbox_to_anchor=(1, 1))


def _gib(nbytes: int | None) -> float:
    return float("nan") if nbytes is None else nbytes / _GIB
