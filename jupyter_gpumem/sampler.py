"""One stoppable thread that calls at an interval, and a bounded history of what it read."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jupyter_gpumem.snapshot import DeviceSnapshot

SPAN_SECONDS = 3600.0
"""How far back a history reaches."""

_MAX_SAMPLES = 7200  # an hour at 2 Hz, were every one of them different


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
    """The samples of each device over the last hour; a level that does not change costs two of them."""

    def __init__(self, span_seconds: float = SPAN_SECONDS, max_samples: int = _MAX_SAMPLES) -> None:
        self._span_seconds = span_seconds
        self._max_samples = max_samples
        self._samples: dict[int, deque[Sample]] = {}

    def add(self, seconds: float, snapshot: DeviceSnapshot) -> None:
        """Append one reading, and drop what is older than the span."""
        samples = self._samples.setdefault(snapshot.device, deque(maxlen=self._max_samples))
        sample = Sample(seconds, snapshot.allocated_bytes, snapshot.reserved_bytes, snapshot.used_bytes)
        if len(samples) > 1 and samples[-2].sizes == samples[-1].sizes == sample.sizes:
            samples[-1] = replace(samples[-1], seconds=seconds)
        else:
            samples.append(sample)
        # the newest sample before the span stays: it is the level at its start
        while len(samples) > 1 and samples[1].seconds <= seconds - self._span_seconds:
            samples.popleft()

    def since(self, device: int, seconds: float) -> Sequence[Sample]:
        """Return the samples from a moment on, and the last one before it, oldest first."""
        samples = list(self._samples.get(device, ()))
        first = 0
        for index, sample in enumerate(samples):
            if sample.seconds > seconds:
                break
            first = index
        return samples[first:]

    def latest(self, device: int) -> Sample | None:
        """Return the newest sample of a device."""
        samples = self._samples.get(device)
        return samples[-1] if samples else None

    def __len__(self) -> int:
        return sum(len(samples) for samples in self._samples.values())


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
        except Exception as error:  # noqa: BLE001 - see the class
            self.failure = error.with_traceback(None)
        else:
            self.failure = None

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            self.step()
            self._wake.wait(self.interval_seconds)
