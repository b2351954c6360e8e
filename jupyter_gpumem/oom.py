"""The moment the GPU ran out of memory: noted while it happens, reported when the cell has ended."""

import threading
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from jupyter_gpumem.accounts import Account, take_account
from jupyter_gpumem.advice import Advice, Shortage, advise
from jupyter_gpumem.allocator import read_layouts
from jupyter_gpumem.cells import CellRecord
from jupyter_gpumem.device import CudaProbe, cuda_started, current_probe, limit_bytes, torch_module
from jupyter_gpumem.failures import (
    asked_bytes,
    device_of,
    find_out_of_memory,
    free_bytes,
    total_bytes,
    worker_of,
)
from jupyter_gpumem.leak_report import find_leaks
from jupyter_gpumem.observer import observer
from jupyter_gpumem.where import Place, find_place, running_spots, traceback_spots

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_ACCOUNTS = 4  # moments of one cell that get an account: it costs a scan of the heap
_HOLDERS = 8

Cause = Literal["larger than the device", "fragmented", "limit", "other processes", "full", "unknown"]


@dataclass(frozen=True, slots=True)
class OomMoment:
    """A request for memory that failed; sizes in bytes, None where it cannot be known.

    ``free_bytes`` were free on the device, ``cached_bytes`` in torch's cache, in blocks of at most
    ``largest_free_bytes``. ``node`` is the step of ``backward()`` that asked, ``elsewhere`` the thread or
    worker process that did, where that is not the main thread. ``account`` is of the same moment.
    """

    device: int
    asked_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    allocated_bytes: int
    cached_bytes: int
    largest_free_bytes: int | None
    limit_bytes: int | None
    place: Place
    node: str | None = None
    elsewhere: str | None = None
    account: Account | None = None

    @property
    def others_bytes(self) -> int | None:
        """What other processes held."""
        part = None if self.account is None else self.account.part("others")
        return None if part is None else part.nbytes

    @property
    def cause(self) -> Cause:
        """Why the request failed."""
        if self.asked_bytes is None or self.free_bytes is None:
            return "unknown"
        asked, free = self.asked_bytes, self.free_bytes
        if self.total_bytes is not None and asked > self.total_bytes:
            return "larger than the device"
        if self.limit_bytes is not None and asked <= free:
            return "limit"
        if asked <= free + self.cached_bytes:
            return "fragmented"
        return "other processes" if asked <= free + self.cached_bytes + (self.others_bytes or 0) else "full"


@dataclass(frozen=True, slots=True)
class OomHolder:
    """One of those who held most when the cell had ended; no byte is told of two holders."""

    path: str
    nbytes: int
    in_use: bool


@dataclass(frozen=True, slots=True)
class OomReport:
    """Why a cell ran out of memory, and what would help.

    ``failed`` counts the requests that failed in the cell, ``moment`` is the last of them; ``handled`` tells
    that the cell went on. ``holders`` and ``advice`` are of the time the cell had ended, most bytes first.
    """

    cell: int | None
    failed: int
    handled: bool
    moment: OomMoment
    holders: tuple[OomHolder, ...]
    advice: tuple[Advice, ...]
    simulated: bool

    @property
    def where(self) -> str:
        """The place in words: cell, line, function, module."""
        text = self.moment.place.words(self.cell)
        if self.moment.node is not None:
            text += f", in backward ({self.moment.node})"
        return text if self.moment.elsewhere is None else f"{self.moment.elsewhere}, during {text}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "where": self.where, "cause": self.moment.cause}


class Watcher:
    """Notes each request for GPU memory that fails while a cell runs, and reports when the cell has ended.

    Keeps numbers and words only. After :meth:`close` nothing is noted.
    """

    def __init__(self, shell: "InteractiveShell") -> None:
        self._shell = shell
        self._moment: OomMoment | None = None
        self._failed = 0
        observer.listen(self.note)
        observer.attach()

    def cell_started(self, record: CellRecord, _raw_cell: str = "") -> None:
        """Begin with nothing noted."""
        observer.attach()
        if not record.depth:
            self.forget()

    def forget(self) -> None:
        """Drop what was noted in this cell: somebody has dealt with it."""
        self._moment, self._failed = None, 0

    def report(self, record: CellRecord, result: object) -> OomReport | None:
        """Return what there is to say about a cell that has ended, where it ran out of memory."""
        if record.depth:
            return None
        try:
            raised = getattr(result, "error_in_exec", None)
            error = find_out_of_memory(raised)
            moment = self._moment
            if raised is not None and error is not None:
                moment = _completed(self._shell, moment, raised, error)
            if moment is None:
                return None
            return _report(self._shell, record, moment, max(self._failed, 1), handled=error is None)
        finally:
            self.forget()

    def close(self) -> None:
        """Stop noting."""
        observer.listen(None)

    def note(self, device: int, asked: int) -> None:
        """Note a request that has just failed: the device and the bytes asked for; on the thread that asked."""
        self._failed += 1
        thread = threading.current_thread()
        # threads of torch's own, such as autograd's, are no threading.Thread: there the main thread waits
        is_users = thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
        place = find_place(self._shell, running_spots(thread if is_users else None))
        moment = replace(
            _read(device, place),
            asked_bytes=asked,
            node=_backward_node(),
            elsewhere=f"thread {thread.name}" if is_users else None,
        )
        account = _account(self._shell, device) if self._failed <= _ACCOUNTS else None
        self._moment = replace(moment, account=account)


def _report(
    shell: "InteractiveShell", record: CellRecord, moment: OomMoment, failed: int, *, handled: bool
) -> OomReport:
    leaks = find_leaks(shell, device=moment.device) if cuda_started() else None
    holders = [] if leaks is None else [*leaks.holders, *leaks.in_use]
    largest = sorted(holders, key=lambda holder: -holder.shown_bytes)[:_HOLDERS]
    free = (moment.free_bytes or 0) + moment.cached_bytes
    shortage = None if moment.asked_bytes is None else Shortage(moment.asked_bytes, free)
    return OomReport(
        record.number,
        failed,
        handled,
        moment,
        tuple(OomHolder(one.path, one.shown_bytes, one.section == "in use") for one in largest),
        advise(shell, leaks=leaks, device=moment.device, shortage=shortage),
        current_probe().simulated(),
    )


def _completed(
    shell: "InteractiveShell", noted: OomMoment | None, raised: BaseException, error: BaseException
) -> OomMoment:
    """Return the moment, made up from the error's words and frames where nobody noted it."""
    worker = worker_of(error)
    if noted is None or worker is not None:
        place = find_place(shell, traceback_spots((raised,) if raised is error else (raised, error)))
        noted = replace(
            _read(device_of(error), place),
            asked_bytes=asked_bytes(error),
            free_bytes=free_bytes(error),
            total_bytes=total_bytes(error),
            elsewhere=worker,
        )
    return noted if noted.account is not None else replace(noted, account=_account(shell, noted.device))


def _read(device: int, place: Place) -> OomMoment:
    """Read what a device has at this moment."""
    if not cuda_started():
        return OomMoment(device, None, None, None, 0, 0, None, None, place)
    snapshot = CudaProbe().snapshot(device)
    layout = (read_layouts() or {}).get(device)
    total, used = snapshot.total_bytes, snapshot.used_bytes
    cached = snapshot.reserved_bytes - snapshot.allocated_bytes
    return OomMoment(
        device,
        None,
        None if total is None or used is None else total - used,
        total,
        snapshot.allocated_bytes,
        cached if layout is None else cached - layout.waiting_bytes,
        None if layout is None else layout.largest_free_bytes,
        limit_bytes(device),
        place,
    )


def _account(shell: "InteractiveShell", device: int) -> Account | None:
    accounts = take_account(shell, device) if cuda_started() else ()
    return accounts[0] if accounts else None


def _backward_node() -> str | None:
    torch = torch_module()
    current = getattr(getattr(torch, "_C", None), "_current_autograd_node", None)
    node = None if current is None else current()
    return None if node is None else str(node.name())
