"""Giving memory back: names, results, the last error, garbage, workspaces, caches, each step measured."""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from jupyter_gpumem import allocator, cuts
from jupyter_gpumem.device import current_probe
from jupyter_gpumem.names import check_names, delete_names, names_holding, other_names
from jupyter_gpumem.reach import Reach
from jupyter_gpumem.snapshot import DeviceSnapshot

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

StepKey = Literal["names", "outputs", "error", "debugger", "garbage", "workspaces", "cache"]
_ORDER: tuple[StepKey, ...] = ("names", "outputs", "error", "debugger", "garbage", "workspaces", "cache")

GRAPH_KEEPS_WORKSPACES = "kept: a captured CUDA graph may still use them"
CAPTURE_KEEPS_CACHE = "kept: a CUDA graph is being captured"
CACHE_WAITS = "returned when the cell ends: a CUDA graph may be under capture now"


@dataclass(frozen=True, slots=True)
class Change:
    """What one step changed on one device, in bytes; below zero was given back."""

    device: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class FreeStep:
    """One step: what was dropped, what that changed, and a reason where something was left alone."""

    key: StepKey
    items: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class FreeReport:
    """What was given back, step by step, on the devices this process is on; sizes in bytes.

    ``other_names`` lists ``(deleted name, further names of its object)``; ``kept_names`` the modules,
    classes and functions that hold memory and are never deleted. With ``dry_run`` nothing was done and
    no step has changes. With ``while_running`` only what is safe beside a running cell was done.
    """

    before: tuple[DeviceSnapshot, ...]
    steps: tuple[FreeStep, ...]
    after: tuple[DeviceSnapshot, ...]
    other_names: tuple[tuple[str, tuple[str, ...]], ...] = ()
    kept_names: tuple[str, ...] = ()
    dry_run: bool = False
    while_running: bool = False
    kind: str = "cuda"
    simulated: bool = False

    @property
    def freed_bytes(self) -> int:
        """Return what tensors gave back, on all devices together."""
        return sum(one.allocated_bytes for one in self.before) - sum(
            one.allocated_bytes for one in self.after
        )

    @property
    def returned_bytes(self) -> int:
        """Return what went back to the devices, for every process to use."""
        return -sum(change.reserved_bytes for step in self.steps for change in step.changes)

    @property
    def host(self) -> bool:
        """Tell whether the figures are of this process's RAM."""
        return self.kind == "host"

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what is to be said beside the table, as sentences."""
        return tuple(_notes(self))

    @property
    def cache_waits(self) -> bool:
        """Tell whether the cache is still to be returned, once the running cell has ended."""
        return any(step.note == CACHE_WAITS for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the two sums as JSON values."""
        return {**asdict(self), "freed_bytes": self.freed_bytes, "returned_bytes": self.returned_bytes}


def _notes(report: FreeReport) -> Iterator[str]:
    done = {step.key for step in report.steps if step.items}
    if done & {"error", "debugger"} and not report.dry_run:
        yield "%debug and %tb have nothing left to look at"
    for name, others in report.other_names:
        yield f"{name} was one name of its object: still held by {', '.join(others)}"
    if report.kept_names:
        yield f"holds memory too, but is part of the program: {', '.join(report.kept_names)}"


def free(
    shell: "InteractiveShell | None" = None,
    names: Iterable[str] = (),
    *,
    all_variables: bool = False,
    keep_outputs: bool = False,
    keep_errors: bool = False,
    dry_run: bool = False,
) -> FreeReport:
    """Give device memory back and measure each step.

    First the named variables, then IPython's copies of results that hold device memory, the last error
    with its frames, the ended ``%debug`` session, garbage, library workspaces, caches. Nothing is deleted
    that was not asked for, no device is woken, and without a shell only what is not a notebook's goes.

    Raises
    ------
    GpuMemError
        When a name cannot be deleted; then nothing has been done.
    """
    meter = _Meter(dry_run=dry_run)
    wanted = Reach(shell, meter.probe.kind).holds_memory
    chosen = check_names(shell, names)
    kept: tuple[str, ...] = ()
    if all_variables and shell is not None:
        holding, kept = names_holding(shell, wanted)
        chosen = tuple(dict.fromkeys([*chosen, *holding]))
    others: tuple[tuple[str, tuple[str, ...]], ...] = ()
    if not dry_run:
        # first, so that what each later step gives back is its own, its reference cycles included
        meter.step("garbage", _collect)
    if chosen and shell is not None:
        others = other_names(shell, [name for name in chosen if wanted(shell.user_ns[name])])
        meter.step("names", lambda: _free_names(shell, chosen, wanted, dry_run))
    if not keep_outputs:
        meter.step("outputs", lambda: cuts.cut_outputs(shell, wanted, dry_run=dry_run))
    if not keep_errors:
        meter.step("error", lambda: _free_error(shell, dry_run))
        meter.step("debugger", lambda: _free_debugger(shell, dry_run))
    if not dry_run:
        _free_workspaces_and_cache(meter)
    return meter.report(other_names=others, kept_names=kept)


def free_running() -> FreeReport:
    """Do what is safe while a cell runs, from any thread: garbage, and the cache where no CUDA graph can be.

    Names, results and errors are left alone. Where `FreeReport.cache_waits`, call `free_cache` once the
    cell has ended.
    """
    meter = _Meter(while_running=True)
    meter.step("garbage", _collect)
    # freeing device memory breaks a capture in whatever thread it runs, and only its own thread can see it
    if allocator.graph_may_be_alive():
        meter.note("cache", CACHE_WAITS)
    else:
        meter.step("cache", _return_cache)
    return meter.report()


def free_cache() -> FreeReport:
    """Give wholly free segments back to the devices, and nothing else."""
    meter = _Meter()
    if allocator.is_capturing():
        meter.note("cache", CAPTURE_KEEPS_CACHE)
    else:
        meter.step("cache", _return_cache)
    return meter.report()


class _Meter:
    """Runs the steps and keeps what each changed."""

    def __init__(self, *, dry_run: bool = False, while_running: bool = False) -> None:
        self.probe = current_probe()
        self._dry_run, self._while_running = dry_run, while_running
        self._devices = (0,) if self.probe.kind == "host" else allocator.active_devices()
        self._steps: dict[StepKey, FreeStep] = {}
        self._before = self._now = self._read()

    def step(self, key: StepKey, action: Callable[[], Iterable[str]]) -> None:
        """Run one step and add what it changed; a step run twice is one row."""
        items = tuple(action())
        if items and not self._dry_run:
            gc.collect()
        now = self._read()
        known = self._steps.get(key, FreeStep(key))
        changes = _add(known.changes, _differences(self._now, now))
        self._steps[key] = FreeStep(key, known.items + items, () if self._dry_run else changes)
        self._now = now

    def note(self, key: StepKey, reason: str) -> None:
        """Say why a step, or the rest of it, was left out."""
        known = self._steps.get(key, FreeStep(key))
        self._steps[key] = FreeStep(key, known.items, known.changes, reason)

    def report(
        self,
        other_names: tuple[tuple[str, tuple[str, ...]], ...] = (),
        kept_names: tuple[str, ...] = (),
    ) -> FreeReport:
        """Return what was done so far."""
        return FreeReport(
            self._before,
            tuple(self._steps[key] for key in _ORDER if key in self._steps),
            self._now,
            other_names,
            kept_names,
            self._dry_run,
            self._while_running,
            self.probe.kind,
            self.probe.simulated(),
        )

    def _read(self) -> tuple[DeviceSnapshot, ...]:
        return tuple(self.probe.snapshot(device) for device in self._devices)


def _differences(before: tuple[DeviceSnapshot, ...], after: tuple[DeviceSnapshot, ...]) -> tuple[Change, ...]:
    return tuple(
        Change(new.device, new.allocated_bytes - old.allocated_bytes, new.reserved_bytes - old.reserved_bytes)
        for old, new in zip(before, after, strict=True)
    )


def _add(first: tuple[Change, ...], second: tuple[Change, ...]) -> tuple[Change, ...]:
    known = {change.device: change for change in first}
    sums = []
    for change in second:
        old = known.get(change.device, Change(change.device, 0, 0))
        allocated = old.allocated_bytes + change.allocated_bytes
        sums.append(Change(change.device, allocated, old.reserved_bytes + change.reserved_bytes))
    return tuple(sums)


def _free_names(
    shell: "InteractiveShell", names: tuple[str, ...], wanted: cuts.Wanted, dry_run: bool
) -> tuple[str, ...]:
    """Delete names, and IPython's own copies of what they held where that is device memory."""
    if dry_run:
        return names
    # small numbers, None and strings are shared by everybody: only what holds memory is looked for elsewhere
    same = {id(value) for value in map(shell.user_ns.get, names) if wanted(value)}
    cuts.cut_outputs(shell, lambda value: id(value) in same)
    delete_names(shell.user_ns, names)
    return names


def _free_error(shell: "InteractiveShell | None", dry_run: bool) -> tuple[str, ...]:
    description = cuts.describe_error(shell) if dry_run else cuts.cut_error(shell)
    return () if description is None else (description,)


def _free_debugger(shell: "InteractiveShell | None", dry_run: bool) -> tuple[str, ...]:
    found = cuts.has_debugger(shell) if dry_run else cuts.cut_debugger(shell)
    return ("the ended %debug session",) if found else ()


def _collect() -> tuple[str, ...]:
    # what a finalizer lets go may be garbage in its turn
    for _round in range(3):
        if gc.collect() == 0:
            break
    allocator.collect_shared()
    return ()


def _free_workspaces_and_cache(meter: _Meter) -> None:
    if allocator.is_capturing():
        meter.note("cache", CAPTURE_KEEPS_CACHE)
        return
    if allocator.graph_may_be_alive():
        # the pool of a graph that is gone counts until its segments are returned
        meter.step("cache", _return_cache)
    if allocator.graph_may_be_alive():
        meter.note("workspaces", GRAPH_KEEPS_WORKSPACES)
    else:
        meter.step("workspaces", _release_workspaces)
    meter.step("cache", _return_cache)


def _release_workspaces() -> tuple[str, ...]:
    allocator.release_workspaces()
    return ()


def _return_cache() -> tuple[str, ...]:
    allocator.return_cache()
    return ()
