"""The values that say what was given back."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jupyter_gpumem.holders import LeakReport
from jupyter_gpumem.readings import DeviceSnapshot

StepKey = Literal["names", "outputs", "error", "debugger", "code", "garbage", "workspaces", "cache"]

GRAPH_KEEPS_WORKSPACES = "kept: a CUDA graph may use them"
CAPTURE_KEEPS_CACHE = "kept: a CUDA graph is being captured"
CELL_ALLOCATES = "collected; the cell allocates too, so how much came of it is not known"
CACHE_WAITS = "returned when the cell ends: a CUDA graph may be under capture now"


@dataclass(frozen=True, slots=True)
class Change:
    """What one step changed on one device, in bytes; below zero was given back."""

    device: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class FreeStep:
    """One step: what was dropped, what that changed, and a reason where something was left alone.

    ``expected_bytes`` is what a dry run thinks would come back, on all devices.
    """

    key: StepKey
    items: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    note: str = ""
    expected_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FreeReport:
    """What was given back, step by step, on the devices this process is on; sizes in bytes.

    ``other_names`` lists ``(deleted name, further names of its object)``; ``kept_names`` the modules,
    classes and functions that hold memory and are never deleted. ``held`` says who holds what is left.
    With ``dry_run`` nothing was done, no step has changes, and ``held`` is of the moment. With
    ``while_running`` only what is safe beside a running cell was done.
    """

    before: tuple[DeviceSnapshot, ...]
    steps: tuple[FreeStep, ...]
    after: tuple[DeviceSnapshot, ...]
    other_names: tuple[tuple[str, tuple[str, ...]], ...] = ()
    kept_names: tuple[str, ...] = ()
    held: LeakReport | None = None
    dry_run: bool = False
    while_running: bool = False
    kind: str = "cuda"
    simulated: bool = False

    @property
    def freed_bytes(self) -> int:
        """Return what tensors gave back, on all devices together."""
        return -sum(change.allocated_bytes for step in self.steps for change in step.changes)

    @property
    def returned_bytes(self) -> int:
        """Return what went back to the devices, for every process to use."""
        return -sum(change.reserved_bytes for step in self.steps for change in step.changes)

    @property
    def host(self) -> bool:
        """Tell whether the figures are of this process's RAM."""
        return self.kind == "host"

    @property
    def cache_waits(self) -> bool:
        """Tell whether the cache is still to be returned, once the running cell has ended."""
        return any(step.note == CACHE_WAITS for step in self.steps)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what is to be said beside the table, as sentences."""
        return tuple(_notes(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the two sums as JSON values."""
        return {**asdict(self), "freed_bytes": self.freed_bytes, "returned_bytes": self.returned_bytes}


def _notes(report: FreeReport) -> Iterator[str]:
    dropped = {step.key for step in report.steps if step.items}
    if "error" in dropped and not report.dry_run:
        yield "%debug and %tb have nothing left to look at"
    for name, others in report.other_names:
        yield f"still held by {' and '.join(others)}, which is the same object as {name}"
    if report.kept_names:
        yield f"holds memory too, but is part of the program: {', '.join(report.kept_names)}"
