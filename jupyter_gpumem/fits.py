"""Would a notebook fit on a card: its cells run on the simulated GPU, in a kernel of their own."""

import contextlib
import json
import math
import os
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Any, Literal

from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.rehearsal import CELL_MIME
from jupyter_gpumem.sizes import format_bytes

if TYPE_CHECKING:
    from nbclient import NotebookClient
    from nbformat import NotebookNode

Verdict = Literal["fits", "fits at least", "does not fit", "could not be run"]

EXIT_CODES: dict[Verdict, int] = {"fits": 0, "could not be run": 2, "does not fit": 3, "fits at least": 4}

UNKNOWN = (
    "computed values and control flow that depends on them",
    "workspaces of cuDNN and other libraries",
    "the card's own CUDA context (512 MiB is assumed)",
)
"""What the simulation cannot know."""

_MARK = "JUPYTER_GPUMEM_FITS"
_STARTUP_SECONDS = 120
_END_SECONDS = 5
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class FitsDevice:
    """What one cell did to one device; sizes in bytes."""

    label: str
    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, slots=True)
class FitsCell:
    """One code cell that was run; ``number`` counts the notebook's code cells from 1.

    ``sizes_read`` counts the numbers read from the device that may have decided a size, ``decisions`` what else
    the cell decided by such numbers (a comparison, a whole number made of one), ``failed_requests`` the requests
    for memory that failed, handled by the cell or not.
    """

    number: int
    first_line: str
    status: str
    seconds: float
    devices: tuple[FitsDevice, ...]
    sizes_read: int
    failed_requests: int
    decisions: int = 0

    @property
    def depends_on_values(self) -> bool:
        """Whether the cell may do something else where numbers are real."""
        return bool(self.sizes_read or self.decisions)

    @property
    def peak_bytes(self) -> int:
        """The highest peak of any device."""
        return max((device.peak_bytes for device in self.devices), default=0)


@dataclass(frozen=True, slots=True)
class FitsFailure:
    """The moment it ran out: where, what was asked for and free, and the largest ``(bytes, holder)``."""

    cell: int
    where: str | None
    asked_bytes: int | None
    free_bytes: int | None
    holders: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class FitsReport:
    """Whether a notebook fits on ``devices`` cards of ``memory_bytes`` each; or why it was not run."""

    notebook: str
    memory_bytes: int
    devices: int
    verdict: Verdict
    cells: tuple[FitsCell, ...] = ()
    failure: FitsFailure | None = None
    reason: str | None = None

    @property
    def exit_code(self) -> int:
        """What the command exits with: 0 fits, 2 could not be run, 3 does not fit, 4 fits at least."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "exit_code": self.exit_code, "simulated": True, "unknown": list(UNKNOWN)}


class _NotRunError(GpuMemError):
    """The notebook could not be run to its end; the message says why."""


def rehearse(path: str | Path, memory_bytes: int, *, devices: int = 1, timeout_seconds: float = 600) -> FitsReport:
    """Run a notebook on simulated GPUs in its own kernel and tell whether it would fit.

    The cells really run, with their side effects, in the notebook's folder; the notebook file is not changed,
    and no process is left. It stops at the first cell that runs out of memory. ``timeout_seconds`` is for the
    whole notebook.
    """
    cells: list[FitsCell] = []
    failure, reason = None, None
    try:
        notebook = _read(Path(path))
        with _kernel(notebook, Path(path), memory_bytes, devices) as client:
            failure = _run_cells(client, notebook, cells, time.monotonic() + timeout_seconds, timeout_seconds)
    except GpuMemError as error:
        reason = str(error)
    return FitsReport(str(path), memory_bytes, devices, _verdict(cells, failure, reason), tuple(cells), failure, reason)


def _verdict(cells: list[FitsCell], failure: FitsFailure | None, reason: str | None) -> Verdict:
    if failure is not None:
        return "does not fit"
    if reason is not None:
        return "could not be run"
    # a cell that went on after an out-of-memory error did something else than it was written for
    return "fits at least" if any(cell.depends_on_values or cell.failed_requests for cell in cells) else "fits"


def _read(path: Path) -> "NotebookNode":
    import nbformat
    from nbformat.reader import NotJSONError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cells without an id: an older notebook
            notebook: NotebookNode = nbformat.read(path, 4)  # type: ignore[no-untyped-call]  # theirs
        language = _language(notebook)
        sources = [cell.source for cell in notebook.cells]
    except OSError as error:
        raise _NotRunError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (NotJSONError, UnicodeDecodeError):
        raise _NotRunError(f"{path} is not a notebook: it is not JSON") from None
    except (nbformat.ValidationError, ValueError, AttributeError, TypeError, KeyError):
        raise _NotRunError(f"{path} is not a notebook, though it is JSON") from None
    if language.lower() not in ("python", "ipython"):
        raise _NotRunError(f"{path} is written for {language}, not for Python")
    if not any(source.strip() for source in sources):
        raise _NotRunError(f"{path} has no cell to run")
    return notebook


def _language(notebook: "NotebookNode") -> str:
    """Return the language that the kernel's or the language's own entry names; Python where none does."""
    named = (
        notebook.metadata.get("kernelspec", {}).get("language"),
        notebook.metadata.get("language_info", {}).get("name"),
    )
    return next((str(name) for name in named if name), "python")


@contextlib.contextmanager
def _kernel(notebook: "NotebookNode", path: Path, memory_bytes: int, devices: int) -> Iterator["NotebookClient"]:
    """Start a kernel in the notebook's folder with the simulated GPU on; leave nothing running."""
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, DeadKernelError
    from nbformat.v4 import new_code_cell

    package = str(Path(__file__).parents[1])
    start = _START.format(package=package, memory=memory_bytes, devices=devices)
    notebook.cells.insert(0, new_code_cell(start))  # type: ignore[no-untyped-call]  # theirs
    mark = uuid.uuid4().hex
    manager = AsyncKernelManager(kernel_name="python3")
    if manager.kernel_spec is not None:
        manager.kernel_spec.argv[0] = sys.executable
    client = NotebookClient(notebook, km=manager, startup_timeout=_STARTUP_SECONDS, shutdown_kernel="immediate")
    try:
        with client.setup_kernel(cwd=str(path.resolve().parent), env=_environment(mark), stderr=DEVNULL):
            try:
                client.execute_cell(notebook.cells[0], 0, store_history=False)
            except CellExecutionError as error:
                raise _NotRunError(_first_line(error.evalue)) from None
            yield client
    except (DeadKernelError, RuntimeError) as error:
        raise _NotRunError(f"the kernel did not start: {_first_line(str(error))}") from None
    finally:
        _end_processes(mark)


_START = (
    "(__import__('sys').path.append({package!r}),"
    " __import__('jupyter_gpumem.rehearsal', fromlist=['start'])"
    ".start(get_ipython(), {memory}, {devices}))[0]"
)


def _environment(mark: str) -> dict[str, str]:
    # hidden devices would hide the simulated ones; torch's warnings beside its errors say nothing more
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**kept, _MARK: mark, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _end_processes(mark: str) -> None:
    """End what the notebook started and left behind: every process that inherited the mark."""
    import psutil

    ended = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark:
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, timeout=_END_SECONDS)


def _run_cells(
    client: "NotebookClient", notebook: "NotebookNode", cells: list[FitsCell], deadline: float, limit: float
) -> FitsFailure | None:
    """Run the code cells, adding a record of each to ``cells``; return the failure that ended it, if any."""
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    number = 0
    for index, cell in enumerate(notebook.cells[1:], start=1):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        number += 1
        client.timeout = max(math.ceil(deadline - time.monotonic()), 1)
        error: CellExecutionError | None = None
        try:
            client.execute_cell(cell, index)
        except CellTimeoutError:
            raise _NotRunError(
                f"cell {number} was not done after {limit:g} s in all; --timeout sets the limit"
            ) from None
        except DeadKernelError:
            raise _NotRunError(f"the kernel died in cell {number}{_host_memory_hint()}") from None
        except CellExecutionError as raised:
            error = raised
        message = _take_message(cell)
        if message is not None:
            cells.append(_cell(number, message))
            if message["failure"] is not None:
                return _failure(number, message["failure"])
        if error is not None:
            raise _NotRunError(_why(number, error.ename, error.evalue))
    return None


def _take_message(cell: "NotebookNode") -> dict[str, Any] | None:
    for output in cell.outputs:
        if CELL_MIME in output.get("data", {}):
            content = output["data"][CELL_MIME]
            message: dict[str, Any] = json.loads(content) if isinstance(content, str) else content
            return message
    return None


def _cell(number: int, message: dict[str, Any]) -> FitsCell:
    devices = tuple(
        FitsDevice(
            change["label"],
            change["peak_allocated_bytes"],
            change["allocated_after_bytes"],
            change["reserved_after_bytes"],
            change["peak_reserved_bytes"],
        )
        for change in message["devices"]
        if change["peak_reserved_bytes"]
    )
    return FitsCell(
        number,
        message["name"],
        message["status"],
        message["seconds"],
        devices,
        message["sizes_read"],
        message["failed_requests"],
        message["decisions"],
    )


def _failure(number: int, failure: dict[str, Any]) -> FitsFailure:
    holders = tuple((int(nbytes), str(holder)) for nbytes, holder in failure["holders"])
    return FitsFailure(number, failure["where"], failure["asked_bytes"], failure["free_bytes"], holders)


def _why(number: int, ename: str, evalue: str) -> str:
    text = _first_line(evalue)
    if ename == "ModuleNotFoundError":
        return f"cell {number} needs a package that is not installed here: {text}"
    if ename == "StdinNotImplementedError":
        return f"cell {number} waits for input, and nobody is there to give it"
    if "invalid device ordinal" in text:
        return f"cell {number} uses a device that is not there: --devices gives more"
    return f"cell {number} failed: {ename}: {text}" if text else f"cell {number} failed: {ename}"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:_LONGEST_REASON] if lines else ""


def _host_memory_hint() -> str:
    import psutil

    free = psutil.virtual_memory().available
    return f" (this machine has {format_bytes(free)} of RAM free)"
