"""The moment the GPU ran out of memory: noted while it happens, reported when the cell has ended."""

import threading
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.advice import advise_after
from jupyter_gpumem.advised import Advice
from jupyter_gpumem.cells import CellRecord
from jupyter_gpumem.device import cuda_started, current_probe
from jupyter_gpumem.failures import asked_bytes, device_of, find_out_of_memory, free_bytes, total_bytes, worker_of
from jupyter_gpumem.leak_report import find_leaks
from jupyter_gpumem.moments import OomMoment, backward_node, look_around, read_moment
from jupyter_gpumem.observer import observer
from jupyter_gpumem.replaced import still_bound
from jupyter_gpumem.surroundings import about_worker
from jupyter_gpumem.where import running_spots, traceback_spots, within_cell

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


@dataclass(frozen=True, slots=True)
class OomReport:
    """Why a cell ran out of memory, and what would help.

    ``failed`` counts the requests that failed in the cell. ``handled`` tells that the cell went on: ``moment`` is
    then that of the first request, else of the one that ended the cell. ``advice`` is of the time the cell had ended,
    but for what to change in the code that ran.
    """

    cell: int | None
    failed: int
    handled: bool
    moment: OomMoment
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
        self._first: OomMoment | None = None
        self._last: OomMoment | None = None
        self._failed = 0
        self._ended_inner: OomMoment | None = None
        observer.listen(self.note)
        observer.attach()

    def cell_started(self, record: CellRecord, _raw_cell: str = "") -> None:
        """Begin with nothing noted."""
        observer.attach()
        if not record.depth:
            self.forget()

    def forget(self) -> None:
        """Drop what was noted in this cell: somebody has dealt with it."""
        self._first, self._last, self._failed = None, None, 0
        self._ended_inner = None

    def report(self, record: CellRecord, result: object) -> OomReport | None:
        """Return what there is to say about a cell that has ended, where it ran out of memory; not of one within it.

        The body of ``%%capture`` is a cell within the cell, whose error goes no further: the whole ended by it.
        """
        raised = getattr(result, "error_in_exec", None)
        error = find_out_of_memory(raised)
        ended = None
        if raised is not None and error is not None:
            ended = _completed(self._shell, self._last, raised, error)
        if record.depth:
            self._ended_inner = ended
            return None
        try:
            if raised is None and _is_magic(result):
                ended = self._ended_inner
            moment = self._first if ended is None else ended
            if moment is None:
                return None
            return _report(self._shell, record, moment, max(self._failed, 1), handled=ended is None)
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
        spots = within_cell(self._shell, running_spots(thread if is_users else None))
        moment = replace(
            read_moment(self._shell, device, spots),
            asked_bytes=asked,
            node=backward_node(),
            elsewhere=f"thread {thread.name}" if is_users else None,
        )
        self._last = moment
        if self._first is None:
            # a loop that tries again and again is not to be slowed: this scans the heap
            self._first = self._last = look_around(self._shell, moment, spots)


def _is_magic(result: object) -> bool:
    """Tell whether all of a cell is the body of a cell magic."""
    return str(getattr(getattr(result, "info", None), "raw_cell", "") or "").lstrip().startswith("%%")


def _report(
    shell: "InteractiveShell", record: CellRecord, moment: OomMoment, failed: int, *, handled: bool
) -> OomReport:
    leaks = find_leaks(shell, device=moment.device) if cuda_started() else None
    short, changes = moment.shortage, moment.changes or ()
    if leaks is not None and (short is None or not short.is_too_large):
        old = still_bound(shell, record.number, moment.place.line, moment.device)
        if old is not None:
            changes = (*changes, Advice("replaced", old.label, old.nbytes, old.code, old.when))
    advice = () if leaks is None else advise_after(shell, leaks, moment.device, short, changes)
    simulated = current_probe().simulated()
    if moment.is_in_worker:
        advice = (about_worker(moment.asked_bytes or 0), *advice)
    return OomReport(record.number, failed, handled, moment, advice, simulated)


def _completed(
    shell: "InteractiveShell", noted: OomMoment | None, raised: BaseException, error: BaseException
) -> OomMoment:
    """Return the moment, made up from the error's words and frames where nobody noted it."""
    worker = worker_of(error)
    spots = within_cell(shell, traceback_spots((raised,) if raised is error else (raised, error)))
    if noted is None or worker is not None:
        noted = replace(
            read_moment(shell, device_of(error), spots),
            asked_bytes=asked_bytes(error),
            free_bytes=free_bytes(error),
            total_bytes=total_bytes(error),
            elsewhere=worker,
        )
    return noted if noted.changes is not None else look_around(shell, replace(noted, seen_late=True), spots)
