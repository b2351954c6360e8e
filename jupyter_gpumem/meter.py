"""Running steps one by one and measuring what each gives back."""

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from jupyter_gpumem import allocator
from jupyter_gpumem.device import current_probe
from jupyter_gpumem.freed import Change, FreeReport, FreeStep, StepKey
from jupyter_gpumem.readings import DeviceSnapshot

_ORDER: tuple[StepKey, ...] = (
    "names",
    "outputs",
    "error",
    "debugger",
    "code",
    "garbage",
    "workspaces",
    "cache",
)


class Meter:
    """Reads the devices this process is on before the first step and after each."""

    def __init__(self, *, dry_run: bool = False) -> None:
        self.probe = current_probe()
        self.dry_run = dry_run
        self._devices = (0,) if self.probe.kind == "host" else allocator.active_devices()
        self._steps: dict[StepKey, FreeStep] = {}
        self._before = self._now = self._read()

    def step(self, key: StepKey, action: Callable[[], Iterable[str]]) -> None:
        """Run one step, which returns what it dropped, and add what that changed; run twice it is one row."""
        items = tuple(action())
        if items and not self.dry_run:
            # what a step drops may sit in cycles with itself; those are its own bytes
            gc.collect()
        now = self._read()
        known = self._steps.get(key, FreeStep(key))
        changes = () if self.dry_run else _add(known.changes, _differences(self._now, now))
        self._steps[key] = replace(known, items=known.items + items, changes=changes)
        self._now = now

    def add(self, step: FreeStep) -> None:
        """Add a step that was measured elsewhere."""
        self._steps[step.key] = step
        self._now = self._read()

    def note(self, key: StepKey, reason: str) -> None:
        """Say why a step, or the rest of it, was left out."""
        self._steps[key] = replace(self._steps.get(key, FreeStep(key)), note=reason)

    def report(self) -> FreeReport:
        """Return what was done so far."""
        return FreeReport(
            before=self._before,
            steps=tuple(self._steps[key] for key in _ORDER if key in self._steps),
            after=self._now,
            dry_run=self.dry_run,
            kind=self.probe.kind,
            simulated=self.probe.simulated(),
        )

    def _read(self) -> tuple[DeviceSnapshot, ...]:
        return tuple(self.probe.snapshot(device) for device in self._devices)


def _differences(before: Sequence[DeviceSnapshot], after: Sequence[DeviceSnapshot]) -> tuple[Change, ...]:
    return tuple(
        Change(
            new.device,
            new.allocated_bytes - old.allocated_bytes,
            new.reserved_bytes - old.reserved_bytes,
        )
        for old, new in zip(before, after, strict=True)
    )


def _add(known: Sequence[Change], fresh: tuple[Change, ...]) -> tuple[Change, ...]:
    if not known:
        return fresh
    return tuple(
        Change(
            new.device,
            old.allocated_bytes + new.allocated_bytes,
            old.reserved_bytes + new.reserved_bytes,
        )
        for old, new in zip(known, fresh, strict=True)
    )
