"""Exact peaks of nested scopes from the allocator's one set of counters, the user's own answers kept right.

torch keeps one peak per counter and device, since the last reset (pytorch issue 16266). A scope that wants
its own peak has to reset it; so before each reset the counters are *folded*: kept for every open scope and
for the user, whose reads are then answered with the maximum of what was folded and what the allocator says.
Every Python-level reader and resetter of torch ends in one of four functions of ``torch._C``, looked up at
each call; they are wrapped here and nowhere else.

Not seen: a thread that allocates in the microseconds between our reading and our reset, and a reset made in
the very cell that imports torch.
"""

import threading
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

Counters = dict[str, Any]

_READERS = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
_RESETTERS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
_MERGE_AT = 32  # folded readings kept before they are merged into one: bounds memory, amortises the cost


class _Folds:
    """Readings made before resets; merged only when somebody asks or many have gathered."""

    __slots__ = ("_readings",)

    def __init__(self) -> None:
        self._readings: list[Mapping[str, Any]] = []

    def add(self, reading: Mapping[str, Any]) -> None:
        if len(self._readings) >= _MERGE_AT:
            self._readings = [self._merged()]
        self._readings.append(reading)

    def clear(self) -> None:
        self._readings.clear()

    def raise_peaks(self, counters: Counters) -> Counters:
        """Raise every peak in ``counters``, in place, to the highest folded one of the same key."""
        for reading in self._readings:
            _raise_peaks(counters, reading)
        return counters

    def exceed(self, counters: Counters) -> bool:
        """Tell whether a folded peak is above the one in ``counters``."""
        return any(_raise_peaks(_copy(counters), reading) for reading in self._readings)

    def _merged(self) -> Counters:
        # keys come and go (private pools): the merged reading keeps the union
        merged: Counters = {}
        for reading in self._readings:
            _union_peaks(merged, reading)
        return merged

    def __bool__(self) -> bool:
        return bool(self._readings)


class Scope:
    """A span of the program whose peaks are wanted; made by :meth:`PeakTracker.open`."""

    __slots__ = ("__weakref__", "_after", "_folds", "_merged", "before", "exact")

    def __init__(self, before: dict[int, Counters], exact: bool) -> None:
        self.before = before
        """Raw counters of each device at the start; a device that had not started yet is absent."""
        self.exact = exact
        """False where resets are not ours to make (``GpuMem.peak = "observe"``)."""
        self._folds: dict[int, _Folds] = {}
        self._after: dict[int, Counters] = {}
        self._merged: dict[int, Counters] = {}

    def fold(self, device: int, reading: Counters) -> None:
        """Keep a reading made just before a reset."""
        self._folds.setdefault(device, _Folds()).add(reading)

    def end(self, after: dict[int, Counters]) -> None:
        """Take the counters the scope ends with."""
        self._after = after

    @property
    def after(self) -> dict[int, Counters]:
        """Raw counters of each device at the end."""
        return self._after

    def moved(self, device: int) -> bool:
        """Tell whether any counter of the device changed within the scope."""
        return device in self._folds or self.before.get(device) is not self._after[device]

    def ran_out(self, device: int) -> bool:
        """Tell whether an allocation on the device failed within the scope."""
        return bool(self._after[device]["num_ooms"] > self.before.get(device, {}).get("num_ooms", 0))

    def counters(self, device: int) -> Counters:
        """Return the counters at the end, every ``peak`` being the peak within the scope."""
        if device not in self._merged:
            merged = _copy(self._after[device])
            if device in self._folds:
                self._folds[device].raise_peaks(merged)
            self._merged[device] = merged
        return self._merged[device]

    def peak_is_exact(self, device: int, key: str = "allocated_bytes") -> bool:
        """Tell whether the peak is this scope's own; otherwise it is an upper bound."""
        if self.exact or device not in self.before:
            return True
        was, now = self.before[device][key]["all"], self.counters(device)[key]["all"]
        return bool(now["peak"] > was["peak"] or now["peak"] == max(was["current"], now["current"]))


class PeakTracker:
    """The open scopes, what was folded for the user, and torch's four functions while they are wrapped."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._originals: dict[str, Callable[..., Any]] = {}
        self._module: Any = None
        # weak: a scope that an interrupt tore away from its owner is forgotten with it
        self._scopes: weakref.WeakSet[Scope] = weakref.WeakSet()
        self._user: dict[int, _Folds] = {}
        self._at_rest: dict[int, Counters] = {}
        """A reading of each device whose peaks all were its current values: comparing costs less than looking."""
        self._staying = False

    def install(self, torch: ModuleType) -> None:
        """Wrap torch's readers and resetters; does nothing when they are wrapped already."""
        with self._lock:
            if self._originals:
                return
            self._module = torch._C
            for name in _READERS:
                if hasattr(self._module, name):
                    self._wrap(name, self._read_for_user)
            for name in _RESETTERS:
                if hasattr(self._module, name):
                    self._wrap(name, self._reset_for_user)

    def stay(self) -> None:
        """Keep the functions wrapped between scopes too, until :meth:`uninstall`."""
        self._staying = True

    def uninstall(self) -> None:
        """Give torch its functions back; where a peak of the user's is known only here, after their next reset.

        Taking it away at once would make ``max_memory_allocated()`` answer too little.
        """
        with self._lock:
            self._staying = False
            self._leave_if_done()

    def open(self, devices: tuple[int, ...], *, exact: bool = True) -> Scope:
        """Begin a scope; where ``exact`` the peaks of ``devices`` are folded, then reset."""
        with self._lock:
            exact = exact and bool(self._originals)
            scope = Scope({device: self._reading_at_start(device, exact=exact) for device in devices}, exact)
            self._scopes.add(scope)
            return scope

    def close(self, scope: Scope, devices: tuple[int, ...]) -> Scope:
        """End a scope, with the devices that are there now; needs no reset."""
        with self._lock:
            scope.end({device: self._unless_same(device, scope.before.get(device)) for device in devices})
            self._scopes.discard(scope)
            self._leave_if_done()
            return scope

    def _reading_at_start(self, device: int, *, exact: bool) -> Counters:
        reading = self._unless_same(device, self._at_rest.get(device))
        if not exact or reading is self._at_rest.get(device):
            return reading
        if _at_peak(reading):
            self._at_rest[device] = reading
            return reading
        self._fold_and_reset(device, reading)
        return self.raw(device)  # so that a scope in which nothing happens ends as it began

    def _unless_same(self, device: int, known: Counters | None) -> Counters:
        """Read a device; return the reading already there where it says the same, so that one is kept, not many."""
        reading = self.raw(device)
        return known if known is not None and known == reading else reading

    def raw(self, device: int) -> Counters:
        """Read the allocator's own counters, without what was folded for the user; about 12 µs."""
        read = self._originals.get("_cuda_memoryStats") or self._bound_module()._cuda_memoryStats
        counters: Counters = read(device)
        return counters

    def _bound_module(self) -> Any:
        from jupyter_gpumem.device import torch_module

        torch = torch_module()
        return torch._C if torch is not None else None

    def _fold_and_reset(self, device: int, reading: Counters) -> None:
        for scope in self._scopes:
            scope.fold(device, reading)
        self._user.setdefault(device, _Folds()).add(reading)
        self._originals["_cuda_resetPeakMemoryStats"](device)

    def _wrap(self, name: str, answer: Callable[[Callable[..., Any], int], Any]) -> None:
        original = getattr(self._module, name)
        self._originals[name] = original

        def wrapped(device: int) -> Any:
            return answer(original, device)

        wrapped.__name__, wrapped.__doc__ = name, original.__doc__
        setattr(self._module, name, wrapped)

    def _read_for_user(self, original: Callable[..., Any], device: int) -> Any:
        counters = original(device)
        with self._lock:
            folds = self._user.get(device)
            return folds.raise_peaks(counters) if folds else counters

    def _reset_for_user(self, original: Callable[..., Any], device: int) -> Any:
        with self._lock:
            if self._scopes:
                reading = self._originals["_cuda_memoryStats"](device)
                for scope in self._scopes:
                    scope.fold(device, reading)
            result = original(device)
            self._user.pop(device, None)
            self._leave_if_done()
            return result

    def _leave_if_done(self) -> None:
        if self._originals and not self._staying and not self._scopes and not self._user_needs_us():
            self._restore()

    def _user_needs_us(self) -> bool:
        return any(folds.exceed(self.raw(device)) for device, folds in self._user.items())

    def _restore(self) -> None:
        for name, original in self._originals.items():
            setattr(self._module, name, original)
        self._originals.clear()
        self._user.clear()
        self._module = None


tracker = PeakTracker()
"""The one tracker of this process: torch's counters are one per process too."""


def _at_peak(counters: Mapping[str, Any]) -> bool:
    """Tell whether every peak equals its current value, so that a reset would change nothing."""
    for value in counters.values():
        if type(value) is dict:
            peak = value.get("peak")
            if peak is None:
                if not _at_peak(value):
                    return False
            elif peak != value["current"]:
                return False
    return True


def _raise_peaks(target: Counters, reading: Mapping[str, Any]) -> bool:
    """Raise the peaks of ``target``, in place; tell whether any rose. Keys only in ``reading`` are left out."""
    rose = False
    for key, value in target.items():
        other = reading.get(key)
        if type(value) is dict and type(other) is dict:
            if "peak" in value and "peak" in other:
                if other["peak"] > value["peak"]:
                    value["peak"] = other["peak"]
                    rose = True
            else:
                rose |= _raise_peaks(value, other)
    return rose


def _union_peaks(target: Counters, reading: Mapping[str, Any]) -> None:
    for key, value in reading.items():
        if type(value) is not dict:
            continue
        if "peak" in value:
            known = target.setdefault(key, {"peak": value["peak"]})
            known["peak"] = max(known["peak"], value["peak"])
        else:
            _union_peaks(target.setdefault(key, {}), value)


def _copy(counters: Mapping[str, Any]) -> Counters:
    return {key: _copy(value) if type(value) is dict else value for key, value in counters.items()}
