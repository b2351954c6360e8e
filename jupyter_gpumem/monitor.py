"""What the panel knows: the last hour of each device, the cells, and who else is on the device."""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jupyter_gpumem import nvml
from jupyter_gpumem.cells import CellRecord, CellRecorder
from jupyter_gpumem.device import CudaProbe, current_probe, limit_bytes
from jupyter_gpumem.parts import Neighbour
from jupyter_gpumem.peaks import tracker
from jupyter_gpumem.processes import ProcessName, name_processes
from jupyter_gpumem.readings import DeviceSnapshot, MemoryProbe
from jupyter_gpumem.render.chart import CellMark, Chart
from jupyter_gpumem.sampler import History

_OTHERS_SECONDS = 5.0  # between two questions to NVML: they cost milliseconds on a real driver
_NAMES_SECONDS = 60.0  # between two questions about one process: a kernel may come to run another notebook
_HOST_STEP = 1024**2
_MAX_CELLS = 500
_STEPS = 120  # of the chart's end, in one window


@dataclass(frozen=True, slots=True)
class Use:
    """The whole device, as NVML told it last; ``neighbours`` is None where processes cannot be seen."""

    own_extra_bytes: int | None
    """What this process holds beside torch's reserved memory: context, libraries."""
    used_bytes: int | None
    """The whole device; the only figure of a device on which this process has no context."""
    neighbours: tuple[Neighbour, ...] | None


@dataclass(frozen=True, slots=True)
class Reading:
    """One tick: the devices that could be read, none where CUDA is not started."""

    kind: str
    simulated: bool
    names: Mapping[int, tuple[str, str]]
    """For each device how reports call it, and its model."""
    snapshots: Mapping[int, DeviceSnapshot]

    def rounded(self) -> object:
        """Return what must change before anything is drawn anew; a machine's RAM is never quite still."""
        if self.kind != "host":
            return self
        return [
            (s.allocated_bytes // _HOST_STEP, (s.used_bytes or 0) // (16 * _HOST_STEP)) for s in self.snapshots.values()
        ]


class Monitor:
    """Reads the devices once a tick; called by the sampler thread alone."""

    def __init__(
        self,
        recorder: CellRecorder,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        probe: Callable[[], MemoryProbe] = current_probe,
    ) -> None:
        self.recorder = recorder
        self.history = History()
        self.clock = clock
        self._wall = wall
        self._probe = probe
        self._names: dict[int, tuple[str, str]] = {}
        self._kind = ""
        self._out_of_memory: dict[int, int] = {}
        self._kills: dict[int, deque[float]] = {}
        self._uses: dict[int, tuple[float, Use]] = {}
        self._known: dict[int, tuple[float, ProcessName]] = {}

    def read(self) -> Reading:
        """Read every device that can be read without waking anything, and remember it."""
        probe, now = self._probe(), self.clock()
        if probe.kind != self._kind:
            # a simulated GPU switched on after load: another kind of figures
            self._kind, self.history = probe.kind, History()
            self._names.clear()
        snapshots = {}
        for device in probe.devices():
            snapshot = self._snapshot(probe, device, now)
            self.history.add(now, snapshot)
            snapshots[device] = snapshot
            if device not in self._names:
                self._names[device] = (probe.label(device), probe.name(device))
        return Reading(probe.kind, probe.simulated(), dict(self._names), snapshots)

    def _snapshot(self, probe: MemoryProbe, device: int, now: float) -> DeviceSnapshot:
        if not isinstance(probe, CudaProbe):
            return probe.snapshot(device)
        # the plain counters: merging the user's folded peaks into them would cost, and no peak is read here
        counters = tracker.raw(device)
        self._count_out_of_memory(device, counters, now)
        return probe.snapshot_of(device, counters)

    def _count_out_of_memory(self, device: int, counters: Mapping[str, Any], now: float) -> None:
        count = counters.get("num_ooms", 0)
        if count > self._out_of_memory.get(device, count):
            self._kills.setdefault(device, deque(maxlen=50)).append(now)
        self._out_of_memory[device] = count

    def use(self, device: int, snapshot: DeviceSnapshot) -> Use:
        """Return who is on a device, asked of NVML at most every few seconds."""
        asked, use = self._uses.get(device, (float("-inf"), Use(None, None, None)))
        if self.clock() - asked >= _OTHERS_SECONDS:
            use = self._ask(device, snapshot)
            self._uses[device] = (self.clock(), use)
        return use

    def _ask(self, device: int, snapshot: DeviceSnapshot) -> Use:
        told = nvml.read_device(device, has_context=snapshot.used_bytes is not None)
        if told is None:
            return Use(None, None, None)
        extra = None if told.own_bytes is None else max(told.own_bytes - snapshot.reserved_bytes, 0)
        if told.processes is None or not told.pids_visible:
            return Use(extra, told.used_bytes, None)
        others = [one for one in told.processes if one.pid != os.getpid()]
        self._name([one.pid for one in others])
        neighbours = [Neighbour(self._known[one.pid][1], one.used_bytes) for one in others]
        return Use(extra, told.used_bytes, tuple(sorted(neighbours, key=lambda one: -(one.used_bytes or 0))))

    def _name(self, pids: list[int]) -> None:
        """Look up the processes that are new, and the others now and then; a Jupyter server is asked only then."""
        now = self.clock()
        known = {pid: self._known[pid] for pid in pids if pid in self._known}
        self._known = {pid: one for pid, one in known.items() if now - one[0] < _NAMES_SECONDS}
        new = [pid for pid in pids if pid not in self._known]
        self._known.update((pid, (now, name)) for pid, name in zip(new, name_processes(new), strict=True))

    def chart(self, device: int, window_seconds: float, total_bytes: int | None = None) -> Chart:
        """Gather what the chart of a device shows; where a window begins before the first sample it is empty."""
        # the end moves in steps, so that columns do not shimmer
        step = window_seconds / _STEPS
        end = (self.clock() // step + 1) * step
        start = end - window_seconds
        to_wall = self._wall() - self.clock()
        return Chart(
            label=self._names[device][0],
            samples=self.history.since(device, start),
            cells=self._cells(device, start),
            start=start,
            end=end,
            total_bytes=total_bytes,
            limit_bytes=self.limit(device),
            start_text=_clock_text(start + to_wall),
            end_text=_clock_text(end + to_wall),
            memory_word="allocated" if self._kind == "cuda" else "held by this process",
            kills=tuple(self._kills.get(device, ())),
        )

    def _cells(self, device: int, start: float) -> tuple[CellMark, ...]:
        records = [r for r in self.recorder.records[-_MAX_CELLS:] if r.depth == 0 and (r.ended or start) >= start]
        running = self.recorder.current
        if running is not None and running.depth == 0:
            records.append(running)
        label = self._probe().label(device)
        return tuple(_mark(record, device, label) for record in records)

    def limit(self, device: int) -> int | None:
        """Return the cap on this process, where one is set."""
        return limit_bytes(device) if self._kind == "cuda" else None


def _mark(record: CellRecord, device: int, label: str) -> CellMark:
    # by its label: a simulated GPU may have been switched on since, and has the number that the host's RAM had
    change = next((c for c in record.devices if c.label == label and c.moved), None)
    return CellMark(
        record.started,
        record.ended,
        record.number,
        record.name,
        record.status,
        None if change is None else change.peak_allocated_bytes,
        record.status == "OutOfMemoryError" and device in record.out_of_memory,
    )


def _clock_text(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
