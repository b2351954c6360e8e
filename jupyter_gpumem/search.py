"""The search for a number with which something fits on the GPU: smaller until it does, larger while it does."""

import gc
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jupyter_gpumem.cells import CellRecord, DeviceChange, track
from jupyter_gpumem.device import cuda_started, current_probe, limit_bytes, torch_module
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.failures import asked_bytes, find_out_of_memory
from jupyter_gpumem.sizes import format_bytes

_DOUBLINGS = 30  # a cell that still fits with a billion times the value does not depend on it

Outcome = Literal["fits", "out of memory", "too little left"]


@dataclass(frozen=True, slots=True)
class FitAttempt:
    """One run with one value; sizes in bytes, None where nothing was on a GPU or it cannot be known.

    ``device`` is the label of the device with the least room left at the peak, ``free_bytes`` that room:
    on the device, or under this process's own limit. ``asked_bytes`` is the request that failed.
    """

    value: int
    outcome: Outcome
    seconds: float
    device: str | None = None
    peak_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    asked_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FitReport:
    """What fitted: the runs in order, the last being the one whose results were kept.

    ``deleted`` names older variables that the cell rebound to values on the GPU, deleted between runs.
    ``without_effect`` is a larger value with which the cell did exactly the same, ending the search.
    ``dropped_error`` is the last error of an earlier cell, whose frames were let go.
    """

    name: str
    value: int
    attempts: tuple[FitAttempt, ...]
    smallest: int
    deleted: tuple[str, ...] = ()
    without_effect: int | None = None
    simulated: bool = False
    dropped_error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        runs = [{field: getattr(run, field) for field in FitAttempt.__slots__} for run in self.attempts]
        kept = {field: getattr(self, field) for field in self.__slots__ if field != "attempts"}
        return {**kept, "deleted": list(self.deleted), "attempts": runs}


class Trial(Protocol):
    """Something that can be run with a value, and undone."""

    def run(self, value: int) -> None:
        """Run; out-of-memory and every other error come out as they are."""

    def undo(self) -> tuple[str, ...]:
        """Undo the last run; return the older names it had to delete."""

    def restore(self) -> None:
        """Leave things as before the first run, where nothing fits."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which values to try."""

    name: str
    start: int
    minimum: int
    factor: float
    step: int
    search: bool
    margin: float

    def __post_init__(self) -> None:
        if self.start < 1:
            raise GpuMemError(f"{self.name} is {self.start}: it must be at least 1 to be varied")
        if not (0 < self.factor < 1 and self.step >= 1 and self.minimum >= 1 and 0 <= self.margin < 1):
            raise GpuMemError("factor and margin lie between 0 and 1, step and minimum are at least 1")

    @property
    def smallest(self) -> int:
        """The smallest value that may be tried after the first."""
        return -(-self.minimum // self.step) * self.step

    def below(self, value: int) -> int | None:
        """Return the next smaller value, None when there is none."""
        smaller = int(value * self.factor) // self.step * self.step
        smaller = max(smaller, self.smallest)
        return smaller if smaller < value else None

    def between(self, low: int, high: int, guess: int | None = None) -> int | None:
        """Return the value between two that is nearest to a guess, by default to the middle; None if there is none."""
        first, last = (low // self.step + 1) * self.step, (high - 1) // self.step * self.step
        wanted = (low + high) // 2 if guess is None else guess
        return None if first > last else min(max(wanted // self.step * self.step, first), last)


class _Runs:
    """The runs of one search; each is undone before the next."""

    def __init__(self, trial: Trial, plan: Plan) -> None:
        self.attempts: list[FitAttempt] = []
        self.deleted: dict[str, None] = {}
        self._trial, self._plan = trial, plan
        self._volumes: list[tuple[int, ...]] = []

    def run(self, value: int) -> bool:
        """Run with a value and tell whether it fits."""
        __tracebackhide__ = True
        if self.attempts:
            self.deleted.update(dict.fromkeys(self._trial.undo()))
        _settle()
        before = _allocated_so_far()
        try:
            attempt = _attempt(self._trial, value, self._plan.margin)
        except Exception as error:
            if self.attempts:
                _add_note(error, self._history(value))
            raise
        after = _allocated_so_far()
        self._volumes.append(tuple(now - then for now, then in zip(after, before, strict=False)))
        self.attempts.append(attempt)
        return attempt.outcome == "fits"

    def guess(self) -> int | None:
        """Return the value with which the room would be used up, were it a straight line through the last two."""
        by_value = {run.value: run.free_bytes for run in self.attempts if run.outcome != "out of memory"}
        known = sorted((value, free) for value, free in by_value.items() if free is not None)[-2:]
        if len(known) < 2:
            return None
        (smaller, more), (larger, free) = known
        spare = free - self._plan.margin * max(run.total_bytes or 0 for run in self.attempts)
        return larger + int(spare * (larger - smaller) / (more - free)) if more > free else None

    def did_the_same_again(self) -> bool:
        """Tell whether the last two runs asked the allocator for exactly the same."""
        return len(self._volumes) > 1 and self._volumes[-1] == self._volumes[-2]

    def _history(self, value: int) -> str:
        name, runs = self._plan.name, self.attempts
        gone = f"; deleted before it: {', '.join(self.deleted)}" if self.deleted else ""
        before = ", ".join(f"{run.value}: {run.outcome}" for run in runs)
        return f"this was run {len(runs) + 1}, with {name} = {value} (before it {before}){gone}"


def find_fit(trial: Trial, plan: Plan) -> FitReport:
    """Run with one value after another; the last run is the one that fits.

    Raises
    ------
    GpuMemError
        When nothing fits.
    """
    __tracebackhide__ = True
    runs = _Runs(trial, plan)
    value, without_effect = _descend(runs, plan), None
    if value is not None and plan.search:
        value, without_effect = _ascend(runs, plan, value)
        if runs.attempts[-1].value != value and not runs.run(value):
            value = None
    if value is None:
        trial.undo()
        trial.restore()
        _settle()
        raise GpuMemError(_nothing_fits(runs, plan))
    simulated = current_probe().simulated()
    return FitReport(
        plan.name, value, tuple(runs.attempts), plan.smallest, tuple(runs.deleted), without_effect, simulated
    )


def _descend(runs: _Runs, plan: Plan) -> int | None:
    """Return the first value that fits, going down."""
    __tracebackhide__ = True
    value: int | None = plan.start
    while value is not None and not runs.run(value):
        value = plan.below(value)
    return value


def _ascend(runs: _Runs, plan: Plan, low: int) -> tuple[int, int | None]:
    """Return the largest value that fits, and a larger one that made no difference, if the search met one."""
    __tracebackhide__ = True
    high = min((run.value for run in runs.attempts if run.outcome != "fits"), default=None)
    for _doubling in range(_DOUBLINGS if high is None else 0):
        above = max(low * 2 // plan.step * plan.step, low + 1)
        if not runs.run(above):
            high = above
            break
        if runs.did_the_same_again():
            return low, above
        low = above
    tries = 0
    while high is not None:
        # where it is no straight line after all, every third try halves what is left
        value = plan.between(low, high, None if tries % 3 == 2 else runs.guess())
        if value is None:
            break
        low, high = (value, high) if runs.run(value) else (low, value)
        tries += 1
    return low, None


def _attempt(trial: Trial, value: int, margin: float) -> FitAttempt:
    __tracebackhide__ = True
    failed, asked = False, None
    with track("fit") as record:
        try:
            trial.run(value)
        except Exception as error:
            out_of_memory = find_out_of_memory(error)
            if out_of_memory is None:
                raise
            failed, asked = True, asked_bytes(out_of_memory)
            del out_of_memory
    # only out here are the failed frames, and the tensors in them, gone
    seconds = record.seconds or 0.0
    outcome: Outcome = "out of memory" if failed else "fits"
    tightest, free = _tightest(record)
    if tightest is None:
        return FitAttempt(value, outcome, seconds, asked_bytes=asked)
    total = tightest.after.total_bytes
    if not failed and free is not None and free < margin * (total or 0):
        outcome = "too little left"
    return FitAttempt(value, outcome, seconds, tightest.label, tightest.peak_allocated_bytes, free, total, asked)


def _tightest(record: CellRecord) -> tuple[DeviceChange | None, int | None]:
    """Return the device with the smallest part of it left at the peak, and what was left."""
    moved = [change for change in record.devices if change.moved and change.label != "RAM"]
    rooms = [(change, free) for change in moved if (free := _free_at_peak(change)) is not None]
    if rooms:
        return min(rooms, key=lambda room: room[1] / (room[0].after.total_bytes or 1))
    return (moved[0], None) if moved else (None, None)


def _free_at_peak(change: DeviceChange) -> int | None:
    after = change.after
    if after.total_bytes is None:
        return None
    others = 0 if after.used_bytes is None else max(after.used_bytes - after.reserved_bytes, 0)
    limit = limit_bytes(after.device) or after.total_bytes
    return max(min(after.total_bytes - others, limit) - change.peak_reserved_bytes, 0)


def _settle() -> None:
    """Collect garbage and return every cached block of the devices in use."""
    gc.collect()
    torch = torch_module()
    if torch is not None and cuda_started():
        torch.cuda.empty_cache()


def _allocated_so_far() -> tuple[int, ...]:
    """Return what each device's allocator has handed out since the start, in bytes."""
    if not cuda_started():
        return ()
    probe = current_probe()
    return tuple(probe.counters(device)["allocated_bytes"]["all"]["allocated"] for device in probe.devices())


def _add_note(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)


def _nothing_fits(runs: _Runs, plan: Plan) -> str:
    last = runs.attempts[-1]
    if last.outcome == "too little left":
        what = f"leaves less than {plan.margin:.0%} of {last.device} free"
    elif last.asked_bytes is not None:
        what = f"runs out of memory (asked for {format_bytes(last.asked_bytes)})"
    else:
        what = "runs out of memory"
    if len(runs.attempts) == 1:
        text = f"{plan.name} is already {last.value}, nothing smaller may be tried, and it {what}"
    else:
        text = f"nothing fits: with {plan.name} = {last.value} it still {what}"
    asked = {run.asked_bytes for run in runs.attempts}
    if len(runs.attempts) > 1 and len(asked) == 1 and None not in asked:
        text += f"; every run asked for the same, so does the code use {plan.name}?"
    gone = f"; deleted: {', '.join(runs.deleted)}" if runs.deleted else ""
    return text + gone
