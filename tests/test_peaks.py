import gc
from collections.abc import Iterator
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jupyter_gpumem.peaks import PeakTracker
from jupyter_gpumem.peaks import tracker as process_tracker
from tests.conftest import DEVICES

early_reader = torch.cuda.max_memory_allocated  # a name the user imported before the extension came

SIZES = st.sampled_from([1, 300, 512, 5_000, 600_000, 1 << 20, 3 << 20, 11 << 20, 40 << 20])
DEVICE = st.integers(0, DEVICES - 1)
OPERATION = st.one_of(
    st.tuples(st.just("alloc"), DEVICE, SIZES),
    st.tuples(st.just("alloc"), DEVICE, SIZES),
    st.tuples(st.just("free"), st.integers(0, 30)),
    st.tuples(st.just("open")),
    st.tuples(st.just("close")),
    st.tuples(st.just("reset"), DEVICE),
    st.tuples(st.just("accelerator_reset"), DEVICE),
    st.tuples(st.just("forget"), DEVICE),
    st.tuples(st.just("empty_cache")),
    st.tuples(st.just("oom"), DEVICE),
    st.tuples(st.just("stream"), DEVICE, SIZES),
    st.tuples(st.just("read"), DEVICE),
)
SEQUENCE = st.lists(OPERATION, min_size=4, max_size=60)


@pytest.fixture
def tracker() -> Iterator[PeakTracker]:
    # what a test before has left to the process's own tracker: a scope that is garbage, a peak it still answers for
    gc.collect()
    torch.cuda.init()
    for device in range(DEVICES):
        torch.cuda.reset_peak_memory_stats(device)
    process_tracker._scopes.clear()
    process_tracker.uninstall()
    assert isinstance(torch._C._cuda_memoryStats, BuiltinFunctionType)
    tracker = PeakTracker()
    tracker.stay()
    tracker.install(torch)
    yield tracker
    for device in range(DEVICES):
        torch.cuda.reset_peak_memory_stats(device)
    tracker.uninstall()


def from_nothing() -> None:
    for device in range(DEVICES):
        torch.empty(1, device=f"cuda:{device}")
    torch.cuda.empty_cache()
    for device in range(DEVICES):
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)


class Program:
    """Runs a sequence of operations; what opening, closing and resetting do is the caller's."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.side = [torch.cuda.Stream(device) for device in range(DEVICES)]
        self.answers: list[Any] = []
        self.user_resets = True

    def open(self) -> None: ...

    def close(self) -> None: ...

    def run(self, sequence: list[tuple[Any, ...]]) -> list[Any]:
        from_nothing()
        self.go(sequence)
        return self.answers

    def go(self, sequence: list[tuple[Any, ...]]) -> None:
        for operation, *arguments in sequence:
            getattr(self, f"do_{operation}")(*arguments)
        self.tensors.clear()

    def do_alloc(self, device: int, nbytes: int) -> None:
        self.tensors.append(torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}"))

    def do_free(self, index: int) -> None:
        if self.tensors:
            del self.tensors[index % len(self.tensors)]

    def do_open(self) -> None:
        self.open()

    def do_close(self) -> None:
        self.close()

    def do_reset(self, device: int) -> None:
        if self.user_resets:
            torch.cuda.reset_peak_memory_stats(device)

    def do_accelerator_reset(self, device: int) -> None:
        if self.user_resets and hasattr(torch.accelerator, "reset_peak_memory_stats"):
            torch.accelerator.reset_peak_memory_stats(device)

    def do_forget(self, device: int) -> None:
        torch.cuda.reset_accumulated_memory_stats(device)

    def do_empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def do_oom(self, device: int) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 45, dtype=torch.uint8, device=f"cuda:{device}")

    def do_stream(self, device: int, nbytes: int) -> None:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        tensor.record_stream(self.side[device])

    def do_read(self, device: int) -> None:
        self.answers.append(
            (
                early_reader(device),
                torch.cuda.max_memory_reserved(device),
                dict(torch.cuda.memory_stats(device)),
                torch.cuda.memory_summary(device),
                torch.cuda.memory_stats_as_nested_dict(device),
            )
        )
        if hasattr(torch.accelerator, "max_memory_allocated"):
            self.answers.append(
                (
                    torch.accelerator.max_memory_allocated(device),
                    torch.accelerator.max_memory_reserved(device),
                    dict(torch.accelerator.memory_stats(device)),
                )
            )


class Tracked(Program):
    """The same with our scopes open and closed as the sequence says."""

    def __init__(self, tracker: PeakTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.stack: list[tuple[int, Any]] = []
        self.opened = 0
        self.peaks: dict[int, dict[int, Any]] = {}

    def open(self) -> None:
        self.stack.append((self.opened, self.tracker.open(tuple(range(DEVICES)))))
        self.opened += 1

    def close(self) -> None:
        if self.stack:
            number, scope = self.stack.pop()
            self.tracker.close(scope, tuple(range(DEVICES)))
            self.peaks[number] = {device: peaks_of(scope.counters(device)) for device in range(DEVICES)}


class OnlyOne(Program):
    """The same where the scope of one number alone resets the counters, and the user never does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.user_resets = False
        self.number = number
        self.stack: list[int] = []
        self.opened = 0
        self.peaks: dict[int, Any] = {}

    def open(self) -> None:
        if self.opened == self.number:
            for device in range(DEVICES):
                torch.cuda.reset_peak_memory_stats(device)
        self.stack.append(self.opened)
        self.opened += 1

    def close(self) -> None:
        if self.stack and self.stack.pop() == self.number:
            self.peaks = {device: peaks_of(torch.cuda.memory_stats_as_nested_dict(device)) for device in range(DEVICES)}


def peaks_of(counters: dict[str, Any], prefix: str = "") -> dict[str, int]:
    found = {}
    for key, value in counters.items():
        if isinstance(value, dict):
            found.update(peaks_of(value, f"{prefix}{key}."))
        elif key == "peak":
            found[f"{prefix}{key}"] = value
    return found


relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@relaxed
@given(sequence=SEQUENCE)
def test_the_user_gets_the_same_answers_with_and_without_scopes(tracker: PeakTracker, sequence: list[Any]) -> None:
    tracker_free = Program().run(sequence)
    program = Tracked(tracker)
    assert program.run(sequence) == tracker_free
    while program.stack:
        program.close()


@relaxed
@given(sequence=SEQUENCE)
def test_every_peak_of_every_scope_is_what_its_own_reset_alone_would_give(
    tracker: PeakTracker, sequence: list[Any]
) -> None:
    program = Tracked(tracker)
    program.run(sequence)
    for number, peaks in program.peaks.items():
        alone = OnlyOne(number)
        alone.run(sequence)
        assert alone.peaks == peaks
    while program.stack:
        program.close()


@relaxed
@given(sequence=SEQUENCE)
def test_the_requested_peak_of_a_scope_is_the_one_replayed_from_the_allocator_trace(
    tracker: PeakTracker, sequence: list[Any]
) -> None:
    from_nothing()
    program = Tracked(tracker)
    marks: dict[int, list[Any]] = {}

    def events() -> list[int]:
        return [len(trace) for trace in torch.cuda.memory._snapshot()["device_traces"]]

    opened, closed = program.open, program.close

    def open_marked() -> None:
        marks[program.opened] = [events(), None]
        opened()

    def close_marked() -> None:
        if program.stack:
            number = program.stack[-1][0]
            closed()
            marks[number][1] = events()

    program.open, program.close = open_marked, close_marked  # type: ignore[method-assign]
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=100_000)
    try:
        program.go(sequence)
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(None)
    for number, peaks in program.peaks.items():
        start, end = marks[number]
        for device in range(DEVICES):
            assert peaks[device]["requested_bytes.all.peak"] == replay(traces[device], start[device], end[device])
    while program.stack:
        program.close()


def replay(trace: list[dict[str, Any]], start: int, end: int) -> int:
    now = peak = 0
    for index, event in enumerate(trace[:end]):
        if index == start:
            peak = now
        if event["action"] == "alloc":
            now += event["size"]
        elif event["action"] == "free_completed":
            now -= event["size"]
        peak = max(peak, now) if index >= start else now
    return max(peak, now) if start >= len(trace[:end]) else peak


def test_folded_readings_stay_few_over_thousands_of_scopes(tracker: PeakTracker) -> None:
    from_nothing()
    torch.empty(40 << 20, device="cuda")
    for _ in range(2_000):
        scope = tracker.open((0,))
        torch.empty(1 << 20, device="cuda")
        tracker.close(scope, (0,))
    assert len(tracker._user[0]._readings) <= 33
    assert torch.cuda.max_memory_allocated() == 160 << 20


def test_an_idle_device_is_neither_folded_nor_reset(tracker: PeakTracker) -> None:
    from_nothing()
    calls = []
    original = tracker._originals["_cuda_resetPeakMemoryStats"]
    tracker._originals["_cuda_resetPeakMemoryStats"] = lambda device: calls.append(device) or original(device)
    torch.empty(1 << 20, device="cuda:1")
    tracker.close(tracker.open(tuple(range(DEVICES))), tuple(range(DEVICES)))
    assert calls == [1]
    tracker.close(tracker.open(tuple(range(DEVICES))), tuple(range(DEVICES)))
    assert calls == [1]
    tracker._originals["_cuda_resetPeakMemoryStats"] = original


def test_uninstalling_gives_torch_its_own_functions_back() -> None:
    from_nothing()
    reader, resetter = torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
    tracker = PeakTracker()
    tracker.install(torch)
    assert torch._C._cuda_memoryStats is not reader
    tracker.uninstall()
    assert torch._C._cuda_memoryStats is reader
    assert torch._C._cuda_resetPeakMemoryStats is resetter


def test_a_peak_known_only_here_outlives_the_uninstall_until_the_user_resets_it() -> None:
    from_nothing()
    reader = torch._C._cuda_memoryStats
    tracker = PeakTracker()
    tracker.install(torch)
    torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
    tracker.close(tracker.open((0,)), (0,))
    tracker.uninstall()
    assert torch.cuda.max_memory_allocated() == 10 << 20
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    assert torch._C._cuda_memoryStats is reader


def test_observing_touches_no_counter_and_says_when_a_peak_is_only_a_bound(tracker: PeakTracker) -> None:
    from_nothing()
    torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    below = tracker.open((0,), exact=False)
    torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
    tracker.close(below, (0,))
    above = tracker.open((0,), exact=False)
    torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
    tracker.close(above, (0,))
    assert (below.peak_is_exact(0), above.peak_is_exact(0)) == (False, True)
    assert below.counters(0)["allocated_bytes"]["all"]["peak"] == 30 << 20
    assert above.counters(0)["allocated_bytes"]["all"]["peak"] == 50 << 20
    assert not tracker._user
