"""Every option, as traits that ``%config GpuMem`` and ipython_kernel_config.py set."""

from traitlets import Bool, Enum, Float, Int
from traitlets.config import Configurable

_MIB = 1024**2


class GpuMemConfig(Configurable):
    """The options of the extension; sizes in bytes, times in seconds."""

    auto = Bool(True, help="Show a line after each cell that moved GPU memory (%gpumem on / off).").tag(config=True)
    min_delta_bytes = Int(
        _MIB, min=0, help="Bytes a cell must have moved, or have needed at its peak, to get a line."
    ).tag(config=True)
    peak = Enum(
        ["exact", "observe"],
        "exact",
        help="exact: each cell's own peak, by resetting torch's peak counters; your reads of them stay right. "
        "observe: touch no counter; a peak that cannot be known is given as an upper bound (≤).",
    ).tag(config=True)
    echo_bytes = Int(
        _MIB, min=0, help="Say so when the echo of a value keeps at least this many bytes in Out; 0: never."
    ).tag(config=True)
    warn_fraction = Float(
        0.9, min=0.0, max=1.0, help="Warn once when a cell's peak passes this part of the device (0 to 1); 0: never."
    ).tag(config=True)
    scan_seconds = Float(10.0, min=0.1, help="Seconds after which a leak report stops searching and says so.").tag(
        config=True
    )
    interval = Float(0.5, min=0.05, help="Seconds between samples of the panel.").tag(config=True)
    open_sidebar = Bool(True, help="Open the sidebar by itself the first time the extension is loaded.").tag(
        config=True
    )
