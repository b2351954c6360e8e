"""One stoppable thread that calls at an interval, and a bounded history of what it read."""

import bisect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jupyter_gpumem.readings import DeviceSnapshot

SPAN_SECONDS = 3600.0
"""How far back a history reaches."""

_FINE_SECONDS = 300.0
"""How far back every sample is kept; before that a few stand for each bucket."""

_BUCKET_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One device at one moment, in seconds of ``time.monotonic()``; sizes in bytes."""

    seconds: float
    allocated_bytes: int
    reserved_bytes: int
    used_bytes: int | None

    @property
    def sizes(self) -> tuple[int, int, int | None]:
        """The three sizes, without the time."""
        return self.allocated_bytes, self.reserved_bytes, self.used_bytes


class History:
    """The samples of each device over the last hour: all of the last minutes, the extremes of what is older.

    Its size is bounded by the span, and a level that does not change costs two samples.
    """

    def __init__(self) -> None:
        self._series: dict[int, _Series] = {}

    def add(self, seconds: float, snapshot: DeviceSnapshot) -> None:
        """Append one reading, and drop what is older than the span."""
        sample = Sample(seconds, snapshot.allocated_bytes, snapshot.reserved_bytes, snapshot.used_bytes)
        self._series.setdefault(snapshot.device, _Series()).add(sample)

    def since(self, device: int, seconds: float) -> Sequence[Sample]:
        """Return the samples from a moment on, and the last one before it, oldest first."""
        series = self._series.get(device)
        samples = [] if series is None else series.samples()
        first = bisect.bisect_right(samples, seconds, key=lambda sample: sample.seconds)
        return samples[max(first - 1, 0) :]

    def __len__(self) -> int:
        return sum(len(series.samples()) for series in self._series.values())


class _Series:
    """The samples of one device."""

    def __init__(self) -> None:
        self._coarse: deque[Sample] = deque()
        self._bucket: list[Sample] = []
        self._fine: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        fine = self._fine
        if len(fine) > 1 and fine[-2].sizes == fine[-1].sizes == sample.sizes:
            fine[-1] = sample
        else:
            fine.append(sample)
        # the newest sample before the span stays: it is the level at its start
        while len(fine) > 1 and fine[1].seconds <= sample.seconds - _FINE_SECONDS:
            self._settle(fine.popleft())
        while len(self._coarse) > 1 and self._coarse[1].seconds <= sample.seconds - SPAN_SECONDS:
            self._coarse.popleft()

    def _settle(self, sample: Sample) -> None:
        """Gather samples of one bucket, and keep of a full one its extremes and its end."""
        if self._bucket and sample.seconds // _BUCKET_SECONDS != self._bucket[0].seconds // _BUCKET_SECONDS:
            self._coarse.extend(_extremes(self._bucket))
            self._bucket = []
        self._bucket.append(sample)

    def samples(self) -> list[Sample]:
        return [*self._coarse, *self._bucket, *self._fine]


def _extremes(bucket: Sequence[Sample]) -> list[Sample]:
    if len(bucket) < 4:
        return list(bucket)
    start, last = bucket[0].seconds, bucket[-1]
    columns = list(zip(*(sample.sizes for sample in bucket), strict=True))
    known = [[size for size in column if size is not None] or [None] for column in columns]
    return [
        Sample(start, *(min(column) for column in known)),
        Sample(start, *(max(column) for column in known)),
        last,
    ]


class Sampler:
    """A daemon thread that calls ``tick`` every ``interval_seconds`` until it is stopped.

    An error in ``tick`` ends neither the thread nor the notebook's peace: nothing is printed (ipykernel would
    show it under whichever cell ran last), it is kept in ``failure``.
    """

    def __init__(self, tick: Callable[[], None], interval_seconds: float) -> None:
        self.interval_seconds = interval_seconds
        self.failure: Exception | None = None
        self._tick = tick
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Tell whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if self.running:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpumem-sampler")
        self._thread.start()

    def poke(self) -> None:
        """Call ``tick`` soon, on the thread, whatever the interval."""
        self._wake.set()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """End the thread and wait for it; safe to call twice."""
        thread, self._thread = self._thread, None
        self._stop.set()
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)

    def step(self) -> None:
        """Call ``tick`` once, in the calling thread, as the thread does."""
        try:
            self._tick()
        except Exception as error:
            self.failure = error.with_traceback(None)
        else:
            self.failure = None

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            self.step()
            self._wake.wait(self.interval_seconds)
