"""GPU memory in notebooks: what each cell took, who holds it, and how to get it back.

``%load_ext jupyter_gpumem`` in a notebook; the same as functions here. Importing this costs next to nothing:
torch, numpy, ipywidgets, matplotlib, psutil and pynvml are imported by what needs them, when it needs them.
"""

from typing import TYPE_CHECKING

from jupyter_gpumem.cells import CellRecord, track
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.sizes import format_bytes

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"
__all__ = ["CellRecord", "GpuMemError", "format_bytes", "track"]


def load_ipython_extension(ipython: "InteractiveShell") -> None:
    """Load the magics and begin to record cells (``%load_ext jupyter_gpumem``)."""
    from jupyter_gpumem.extension import load

    load(ipython)


def unload_ipython_extension(ipython: "InteractiveShell") -> None:
    """Take the magics and every hook back (``%unload_ext jupyter_gpumem``)."""
    from jupyter_gpumem.extension import unload

    unload(ipython)
