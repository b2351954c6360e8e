"""Old values that were alive while their replacements were built: what of a cell's peak that was."""

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.blocks import read_blocks
from jupyter_gpumem.device import cuda_started, current_probe
from jupyter_gpumem.holdings import StorageMark, storages_held_by
from jupyter_gpumem.peaks import Scope, tracker
from jupyter_gpumem.rebinding import is_in_loop, names_in_loops, rebound_names
from jupyter_gpumem.tensors import Key
from jupyter_gpumem.together import kept_by_names

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from jupyter_gpumem.variables import VariableChange


@dataclass(frozen=True, slots=True)
class Replaced:
    """Variables whose old values a cell kept until their replacements were there; ``nbytes`` of the peak.

    Had the old values gone before the cell, the peak of the device would have been lower by so much. Where it
    is not ``exact``, by so much at most.
    """

    names: tuple[str, ...]
    device: int
    nbytes: int
    exact: bool = True


@dataclass(slots=True)
class _Group:
    """Storages that the same variables held when the cell began, on one device."""

    names: frozenset[str]
    device: int
    nbytes: int = 0
    alive: int = 0
    gone_after: int | None = None
    """The interval at whose end the last of them went."""


@dataclass(slots=True)
class _Interval:
    """A time in which none of the groups went; ``floor`` is a peak it had at least, where ``peak`` may be too high."""

    peak: int
    floor: int


class Replacements:
    """Watches from a cell's beginning when the values of the user's variables go. Keeps none of them alive."""

    def __init__(self, shell: "InteractiveShell", source: str) -> None:
        self._groups: dict[tuple[frozenset[str], int], _Group] = {}
        self._watches: list[weakref.ref[Any]] = []
        self._intervals: dict[int, list[_Interval]] = {}
        self._scopes: dict[int, tuple[Scope, int]] = {}
        self._start: dict[int, int] = {}
        names = shell.user_ns
        # what a loop binds is alive beside its own replacement in every round
        rebound = rebound_names(source) - names_in_loops(source)
        if not rebound.intersection(names) or not cuda_started() or current_probe().kind != "cuda":
            return
        held = {name: storages_held_by((value,), shell) for name, value in names.items() if not name.startswith("_")}
        marks: dict[Key, StorageMark] = {}
        owners: dict[Key, set[str]] = {}
        for name, found in held.items():
            for key, mark in found.items():
                marks[key] = mark
                owners.setdefault(key, set()).add(name)
        for key, mark in marks.items():
            if owners[key] <= rebound:
                self._watch(frozenset(owners[key]), key[0], mark)
        for device in {group.device for group in self._groups.values()}:
            self._open(device, 0)
            self._start[device] = self._scopes[device][1]

    def found(self, changes: Iterable["VariableChange"]) -> tuple[Replaced, ...]:
        """Return what was replaced while the old value was alive, one value a device; ends the watch."""
        again = {change.name for change in changes if change.change == "replaced"}
        self.close()
        found = (self._on_device(device, again) for device in sorted(self._intervals))
        return tuple(one for one in found if one is not None)

    def close(self) -> None:
        """End the watch."""
        self._watches.clear()
        for device in self._scopes:
            self._close(device)
        self._scopes.clear()

    def _watch(self, names: frozenset[str], device: int, mark: StorageMark) -> None:
        group = self._groups.setdefault((names, device), _Group(names, device))
        group.nbytes += mark.nbytes
        group.alive += 1

        itself = weakref.ref(self)

        def gone(_reference: object) -> None:
            replacements = itself()
            group.alive -= 1
            if not group.alive and replacements is not None and not sys.is_finalizing():
                replacements._part(group, mark)

        storage = mark.reference()
        if storage is not None:
            self._watches.append(weakref.ref(storage, gone))

    def _part(self, group: _Group, last: StorageMark) -> None:
        """End one interval and begin the next at the moment a group has gone."""
        group.gone_after = self._close(group.device)
        # whether the storage's own memory is free by now is up to torch's version
        used = {(block.device, block.address) for block in read_blocks() if block.state == "active_allocated"}
        self._open(group.device, last.nbytes if last.block in used else 0)

    def _open(self, device: int, going_bytes: int) -> None:
        """Begin an interval; ``going_bytes`` are about to be freed and still counted."""
        scope = tracker.open((device,))
        self._scopes[device] = scope, scope.before[device]["allocated_bytes"]["all"]["current"] - going_bytes

    def _close(self, device: int) -> int:
        """End the interval of a device; return its number."""
        scope, start = self._scopes[device]
        allocated = tracker.close(scope, (device,)).counters(device)["allocated_bytes"]["all"]
        intervals = self._intervals.setdefault(device, [])
        before = scope.before[device]["allocated_bytes"]["all"]
        is_known = scope.exact and (allocated["peak"] > before["current"] or before["current"] == start)
        if scope.exact and allocated["allocated"] == before["allocated"]:
            intervals.append(_Interval(start, start))
        else:
            floor = allocated["peak"] if is_known else max(start, allocated["current"])
            intervals.append(_Interval(allocated["peak"], floor))
        return len(intervals) - 1

    def _on_device(self, device: int, again: set[str]) -> Replaced | None:
        intervals = self._intervals[device]
        groups = [
            group
            for group in self._groups.values()
            if group.device == device and group.gone_after is not None and group.names <= again
        ]
        if not groups or intervals[0].floor <= self._start[device]:
            return None
        saved = _saved_bytes(intervals, groups)
        for group in sorted(groups, key=lambda group: group.nbytes):
            rest = [other for other in groups if other is not group]
            if _saved_bytes(intervals, rest) == saved:
                groups = rest
        if not saved:
            return None
        names = tuple(sorted(frozenset[str]().union(*(group.names for group in groups))))
        exact = all(interval.peak == interval.floor for interval in intervals)
        return Replaced(names, device, saved, exact)


def _saved_bytes(intervals: list[_Interval], groups: list[_Group]) -> int:
    """Return by how much the peak were lower had some groups not been there from the start."""

    def old(place: int) -> int:
        return sum(group.nbytes for group in groups if group.gone_after is not None and group.gone_after >= place)

    peak = max(interval.floor for interval in intervals)
    return peak - max(interval.floor - old(place) for place, interval in enumerate(intervals))


@dataclass(frozen=True, slots=True)
class StillBound:
    """Variables that a cell which stopped was about to bind anew: what they keep in bytes, and how to let it go."""

    names: tuple[str, ...]
    nbytes: int
    code: str
    when: str

    @property
    def label(self) -> str:
        """Say why it is here."""
        them = "them" if len(self.names) > 1 else "it"
        return f"{', '.join(self.names)}: still bound while what replaces {them} is built"


def still_bound(shell: "InteractiveShell", cell: int | None, line: int | None, device: int) -> StillBound | None:
    """Return what a cell of the history that stopped at a line was about to bind anew, where that keeps memory."""
    history = shell.user_ns.get("_ih", ())
    if cell is None or line is None or cell >= len(history) or not cuda_started():
        return None
    source = str(history[cell])
    names, nbytes = kept_by_names(shell, rebound_names(source, line) & shell.user_ns.keys(), device)
    if not nbytes:
        return None
    if is_in_loop(source, line):
        return StillBound(names, nbytes, f"{' = '.join(names)} = None", f"in the cell, just before line {line}")
    return StillBound(names, nbytes, f"%gpu_free {' '.join(names)}", "then run the cell again")
