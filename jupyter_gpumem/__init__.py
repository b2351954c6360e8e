"""GPU memory in notebooks: what each cell took, who holds it, and how to get it back.

``%load_ext jupyter_gpumem`` in a notebook; the same as functions here. Importing this costs next to nothing:
torch, numpy, ipywidgets, matplotlib, psutil and pynvml are imported by what needs them, when it needs them.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.cells import CellRecord, track
from jupyter_gpumem.cuts import running_shell
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.readings import DeviceSnapshot
from jupyter_gpumem.sizes import format_bytes

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from jupyter_gpumem.accounts import Account
    from jupyter_gpumem.advised import Advice
    from jupyter_gpumem.fitting import FitResult
    from jupyter_gpumem.freed import FreeReport
    from jupyter_gpumem.holders import LeakReport

__version__ = "0.1.0"
__all__ = [
    "CellRecord",
    "DeviceSnapshot",
    "GpuMemError",
    "account",
    "advise",
    "fit",
    "format_bytes",
    "free",
    "leaks",
    "snapshot",
    "track",
]


def snapshot() -> tuple[DeviceSnapshot, ...]:
    """Read every device that torch has started, in bytes; the host's memory where there is no CUDA device."""
    from jupyter_gpumem.device import current_probe

    probe = current_probe()
    return tuple(probe.snapshot(device) for device in probe.devices())


def account(device: int | None = None) -> "tuple[Account, ...]":
    """Say what the memory of each device is used for: parts in bytes that sum to what the device has.

    Raises
    ------
    GpuMemError
        When there is no such device.
    """
    from jupyter_gpumem.accounts import take_account
    from jupyter_gpumem.device import check_device

    check_device(device)
    return take_account(running_shell(), device)


def leaks(*, device: int | None = None, min_bytes: int = 0, budget_seconds: float = 10.0) -> "LeakReport":
    """Say who holds what, by path, with the code that gives it back; frees nothing.

    Holders that keep less than ``min_bytes`` are left out; after ``budget_seconds`` the search stops and says so.

    Raises
    ------
    GpuMemError
        When there is no such device.
    """
    from jupyter_gpumem.device import check_device
    from jupyter_gpumem.leak_report import find_leaks

    check_device(device)
    return find_leaks(running_shell(), device=device, min_bytes=min_bytes, budget_seconds=budget_seconds)


def advise() -> "tuple[Advice, ...]":
    """Say what would give memory back or make the next step fit, most bytes first, with the code to change."""
    from jupyter_gpumem.advice import advise as find_advice

    return find_advice(running_shell())


def free(
    names: str | Iterable[str] = (),
    *,
    all_variables: bool = False,
    keep_outputs: bool = False,
    keep_errors: bool = False,
    dry_run: bool = False,
) -> "FreeReport":
    """Give memory back as ``%gpu_free`` does, and say what each step gave, in bytes.

    Raises
    ------
    GpuMemError
        When a name may not be deleted; nothing has been touched then.
    """
    from jupyter_gpumem.release import free as release

    return release(
        running_shell(),
        names,
        all_variables=all_variables,
        keep_outputs=keep_outputs,
        keep_errors=keep_errors,
        dry_run=dry_run,
    )


def fit(function: Callable[..., Any], *arguments: object, **options: Any) -> "FitResult":
    """Call a function with a smaller and smaller number until it fits on the GPU.

    ``fit(train, batch_size=512)`` calls ``train(batch_size=512)``, and after each out-of-memory error cleans up
    and halves the number. Returns the number that fitted, the function's result and the peak in bytes. A function
    that ran twice did its side effects twice. The options ``minimum``, ``factor``, ``step``, ``search`` and
    ``margin`` are those of ``%%gpu_fit``.

    Raises
    ------
    GpuMemError
        When nothing fits, or there is not exactly one number to vary. Every other error comes out unchanged.
    """
    from jupyter_gpumem.fitting import fit as fit_function

    return fit_function(function, *arguments, **options)


def load_ipython_extension(ipython: "InteractiveShell") -> None:
    """Load the magics and begin to record cells (``%load_ext jupyter_gpumem``)."""
    from jupyter_gpumem.extension import load

    load(ipython)


def unload_ipython_extension(ipython: "InteractiveShell") -> None:
    """Take the magics and every hook back (``%unload_ext jupyter_gpumem``)."""
    from jupyter_gpumem.extension import unload

    unload(ipython)
