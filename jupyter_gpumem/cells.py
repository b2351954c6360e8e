"""What each cell did to GPU memory: one record a cell, taken by IPython's own cell events."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jupyter_gpumem import simgpu
from jupyter_gpumem.device import CudaProbe, HostProbe, current_probe, torch_module
from jupyter_gpumem.peaks import Scope, tracker
from jupyter_gpumem.readings import DeviceSnapshot, MemoryProbe

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult

    from jupyter_gpumem.lines import DeviceLines
    from jupyter_gpumem.timeline import DeviceTimeline

_HEADS = ("%%gpumem", "%%time", "%%capture", "%%prun")  # lines that say how a cell is run, not what it is
_RSS_INTERVAL = 0.01  # seconds between samples of the resident set size, in host-memory mode only


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """What one scope did to one device; sizes in bytes.

    ``before`` is None where torch started CUDA within the scope. A peak that is not ``peak_exact`` is an upper
    bound on a GPU (``GpuMem.peak = "observe"``) and the highest sample in host-memory mode.
    """

    label: str
    before: DeviceSnapshot | None
    after: DeviceSnapshot
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_exact: bool
    moved: bool

    @property
    def allocated_delta_bytes(self) -> int:
        """Allocated now, less what was allocated before."""
        return self.after.allocated_bytes - (self.before.allocated_bytes if self.before else 0)

    @property
    def reserved_delta_bytes(self) -> int:
        """Reserved now, less what was reserved before."""
        return self.after.reserved_bytes - (self.before.reserved_bytes if self.before else 0)

    @property
    def swing_bytes(self) -> int:
        """The largest change of any kind within the scope: what decides whether it is worth a line."""
        start = self.before.allocated_bytes if self.before else 0
        return max(abs(self.allocated_delta_bytes), abs(self.reserved_delta_bytes), self.peak_allocated_bytes - start)


@dataclass(slots=True)
class CellRecord:
    """One cell, or one span of :func:`track`; complete once ``seconds`` is set.

    ``started`` and ``ended`` are in seconds of ``time.monotonic()``, ``started_at`` of ``time.time()``.
    ``number`` is the one in ``In[...]``, None for a cell outside the history. ``status`` is ``"ok"`` or the
    name of the error. ``depth`` counts the cells it ran inside.
    """

    name: str
    started: float
    started_at: float
    depth: int = 0
    number: int | None = None
    status: str = "ok"
    ended: float | None = None
    seconds: float | None = None
    devices: tuple[DeviceChange, ...] = ()
    simulated: bool = False
    out_of_memory: tuple[int, ...] = ()
    """The devices on which an allocation failed, whoever caught the error."""
    sizes_read: int = 0
    """How many sizes came to depend on values that the simulated GPU does not compute."""
    lines: "tuple[DeviceLines, ...]" = ()
    """What each source line took, with ``%%gpumem --lines``."""
    timeline: "tuple[DeviceTimeline, ...]" = ()
    """The memory over the cell's time, with ``%%gpumem --timeline``."""

    @property
    def moved(self) -> tuple[DeviceChange, ...]:
        """The devices on which anything happened."""
        return tuple(change for change in self.devices if change.moved)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values, one entry a device."""
        return {
            "number": self.number,
            "name": self.name,
            "status": self.status,
            "started_at": self.started_at,
            "seconds": self.seconds,
            "depth": self.depth,
            "simulated": self.simulated,
            "sizes_read": self.sizes_read,
            "devices": [_change_dict(change) for change in self.devices],
            "lines": [asdict(device) for device in self.lines],
            "timeline": [asdict(device) for device in self.timeline],
        }


def _change_dict(change: DeviceChange) -> dict[str, Any]:
    before = change.before
    return {
        "device": change.after.device,
        "label": change.label,
        "allocated_before_bytes": before.allocated_bytes if before else 0,
        "allocated_after_bytes": change.after.allocated_bytes,
        "allocated_delta_bytes": change.allocated_delta_bytes,
        "peak_allocated_bytes": change.peak_allocated_bytes,
        "peak_reserved_bytes": change.peak_reserved_bytes,
        "peak_exact": change.peak_exact,
        "reserved_before_bytes": before.reserved_bytes if before else 0,
        "reserved_after_bytes": change.after.reserved_bytes,
        "reserved_delta_bytes": change.reserved_delta_bytes,
        "device_used_bytes": change.after.used_bytes,
        "device_total_bytes": change.after.total_bytes,
    }


class _HostPeak:
    """The highest resident set size seen while a scope is open, sampled by a thread of its own."""

    def __init__(self, probe: HostProbe) -> None:
        self._probe = probe
        self.before = probe.snapshot(0)
        self.peak_bytes = self.before.allocated_bytes
        self._stop = threading.Event()
        # the thread holds no strong reference: it ends with the scope, however that ended
        self._thread = threading.Thread(target=_sample, args=(weakref.ref(self), self._stop), daemon=True)
        self._thread.name = "gpumem-rss"
        self._thread.start()

    def sample(self) -> DeviceSnapshot:
        """Read once, and keep the highest."""
        now = self._probe.snapshot(0)
        self.peak_bytes = max(self.peak_bytes, now.allocated_bytes)
        return now

    def end(self) -> DeviceSnapshot:
        """Stop sampling; return the last reading."""
        self._stop.set()
        self._thread.join()
        return self.sample()


def _sample(owner: "weakref.ref[_HostPeak]", stop: threading.Event) -> None:
    while not stop.wait(_RSS_INTERVAL):
        peak = owner()
        if peak is None:
            return
        peak.sample()
        del peak


class _Open:
    """A scope under way.

    Interrupts come between any two steps: whatever was begun belongs to this object alone, and ends with it.
    """

    def __init__(self, record: CellRecord, raw_cell: str = "") -> None:
        self.record = record
        self.raw_cell = raw_cell
        self._scope: Scope | None = None
        self._host: _HostPeak | None = None
        self._sizes_read = 0

    def begin(self, *, exact: bool) -> None:
        """Take the readings before."""
        probe = current_probe()
        torch = torch_module()
        if torch is not None and probe.kind == "cuda":
            tracker.install(torch)
        if isinstance(probe, HostProbe):
            self._host = _HostPeak(probe)
        devices = probe.awake_devices() if isinstance(probe, CudaProbe) else ()
        self._sizes_read = simgpu.sizes_read()
        self._scope = tracker.open(devices, exact=exact)

    def end(self) -> CellRecord:
        """Take the readings after, and complete the record."""
        record, ended = self.record, time.monotonic()
        probe = current_probe()
        cuda = probe if isinstance(probe, CudaProbe) else None
        if self._scope is not None:
            scope = tracker.close(self._scope, cuda.awake_devices() if cuda else ())
            if cuda is not None:
                record.devices = tuple(_gpu_change(cuda, scope, device) for device in scope.after)
                record.out_of_memory = tuple(device for device in scope.after if scope.ran_out(device))
        if self._host is not None:
            after = self._host.end()
            if cuda is None:
                record.devices = (_host_change(probe, self._host, after),)
        record.simulated = probe.simulated()
        record.sizes_read = simgpu.sizes_read() - self._sizes_read
        record.ended, record.seconds = ended, ended - record.started
        return record


def _gpu_change(probe: CudaProbe, scope: Scope, device: int) -> DeviceChange:
    before = scope.before.get(device)
    allocated, reserved = (0, 0) if before is None else _current(before)
    if before is not None and not scope.moved(device):
        # nothing happened here: no merge of the counters, no question to the driver
        return _idle(probe.label(device), device, allocated, reserved)
    counters = scope.counters(device)
    return DeviceChange(
        probe.label(device),
        None if before is None else DeviceSnapshot(device, allocated, reserved, None, None),
        probe.snapshot_of(device, counters),
        counters["allocated_bytes"]["all"]["peak"],
        counters["reserved_bytes"]["all"]["peak"],
        scope.peak_is_exact(device),
        before is not None or counters["allocation"]["all"]["allocated"] > 0,
    )


def _current(counters: dict[str, Any]) -> tuple[int, int]:
    return counters["allocated_bytes"]["all"]["current"], counters["reserved_bytes"]["all"]["current"]


@lru_cache(maxsize=64)  # a device at rest gives the same value cell after cell
def _idle(label: str, device: int, allocated_bytes: int, reserved_bytes: int) -> DeviceChange:
    was = DeviceSnapshot(device, allocated_bytes, reserved_bytes, None, None)
    return DeviceChange(label, was, was, allocated_bytes, reserved_bytes, peak_exact=True, moved=False)


def _host_change(probe: MemoryProbe, host: _HostPeak, after: DeviceSnapshot) -> DeviceChange:
    moved = {after.allocated_bytes, host.peak_bytes} != {host.before.allocated_bytes}
    return DeviceChange(
        probe.label(0), host.before, after, host.peak_bytes, host.peak_bytes, peak_exact=False, moved=moved
    )


class CellRecorder:
    """Records every cell between ``start()`` and ``stop()``; only cells of the main thread."""

    def __init__(self, *, exact: Callable[[], bool] = lambda: True) -> None:
        self.records: list[CellRecord] = []
        """Every recorded cell, in order of its end."""
        self.on_start: list[Callable[[CellRecord, str], None]] = []
        """Called with the record under way and the cell's raw source."""
        self.on_end: list[Callable[[CellRecord, Any], None]] = []
        """Called with the complete record and IPython's ExecutionResult."""
        self._exact = exact
        self._stack: list[_Open] = []

    @property
    def running(self) -> bool:
        """Tell whether a cell of the main thread is open, an awaiting one included."""
        return bool(self._stack)

    @property
    def current(self) -> CellRecord | None:
        """The innermost cell under way."""
        return self._stack[-1].record if self._stack else None

    def pre_run_cell(self, info: "ExecutionInfo") -> None:
        """Open the scope of a cell."""
        # ipykernel runs subshell cells in threads of their own while the main cell is under way
        if threading.current_thread() is not threading.main_thread():
            return
        raw = str(info.raw_cell or "")
        record = CellRecord(_first_line(raw), time.monotonic(), time.time(), len(self._stack))
        self._stack.append(_Open(record, raw))
        self._stack[-1].begin(exact=self._exact())
        for listener in self.on_start:
            listener(record, raw)
        record.started = time.monotonic()  # what the listeners took is not the cell's

    def post_run_cell(self, result: "ExecutionResult | None") -> None:
        """Close the scope of a cell; the cell that loaded the extension has none, nor has a blank one."""
        if threading.current_thread() is not threading.main_thread() or not self._stack:
            return
        raw = self._stack[-1].raw_cell if result is None or result.info is None else str(result.info.raw_cell or "")
        if raw not in (opened.raw_cell for opened in self._stack):
            return
        # a cell that died without its post event is closed with the one around it
        while self._stack[-1].raw_cell != raw:
            self._stack.pop().end()
        record = self._stack.pop().end()
        record.status, record.number = _status(result), _number(result)
        self.records.append(record)
        for listener in self.on_end:
            listener(record, result)

    def stop(self) -> None:
        """Close what is open without recording it."""
        while self._stack:
            self._stack.pop().end()


def _status(result: "ExecutionResult | None") -> str:
    error = None if result is None else result.error_before_exec or result.error_in_exec
    return "ok" if error is None else type(error).__name__


def _number(result: "ExecutionResult | None") -> int | None:
    # without history IPython 9 repeats the next number here and IPython 8 gives None
    if result is None or result.info is None or not result.info.store_history:
        return None
    return result.execution_count


def _first_line(source: str) -> str:
    lines = (line.strip() for line in source.splitlines())
    return next((line for line in lines if line and not line.startswith(_HEADS)), "")[:120]


@contextmanager
def track(name: str = "track", *, exact: bool = True) -> Iterator[CellRecord]:
    """Measure a span of a program as a cell is measured; nests, also within cells.

    Yields the record, complete when the span ends. With ``exact=False`` no counter is touched and a peak may
    be an upper bound.

    Examples
    --------
    >>> with track("epoch") as record:
    ...     train()
    >>> record.devices[0].peak_allocated_bytes
    """
    record = CellRecord(name, time.monotonic(), time.time())
    opened = _Open(record)
    opened.begin(exact=exact)
    try:
        yield record
    except BaseException as error:
        record.status = type(error).__name__
        raise
    finally:
        opened.end()
