"""The account without a look at the tensors, cheap enough for a live panel."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jupyter_gpumem.allocator import Layout, has_context, layout_of, read_layouts
from jupyter_gpumem.device import current_probe
from jupyter_gpumem.parts import (
    Account,
    Part,
    Surroundings,
    account_before_start,
    cache_parts,
    host_account,
    look_around,
    whole_account,
)
from jupyter_gpumem.readings import DeviceSnapshot, MemoryProbe

_AROUND_SECONDS = 5.0  # between two questions to NVML: they cost milliseconds on a real driver
_CHEAP_SECONDS = 0.001  # a layout read in less is read whenever memory has moved
_DUTY = 200  # any other is read again after so many times its cost

_Moment = tuple[DeviceSnapshot, int]
"""Figures of a device and the bytes of its active blocks."""


@dataclass(slots=True)
class _Known:
    """What was read of one device last, and when it may be read again."""

    around: Surroundings = field(default_factory=lambda: Surroundings(None, None))
    context_bytes: int | None = None
    around_until: float = float("-inf")
    layout: Layout | None = None
    layout_until: float = float("-inf")
    moment: _Moment | None = None
    exact: bool = False
    account: Account | None = None


class QuickAccounts:
    """Accounts of devices for a panel that asks often; the same object comes back while nothing has moved.

    Allocated and reserved memory and the whole device are exact each time. How the cache is split is read
    from the allocator's blocks; with many thousands of them it may be the split of a moment ago.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cost: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._known: dict[int, _Known] = {}

    def read(self, device: int) -> Account:
        """Return the account of a device as it is now."""
        probe = current_probe()
        if probe.kind == "host":
            return replace(host_account(probe, probe.snapshot(0), ()), quick=True)
        known = self._known.setdefault(device, _Known())
        moment = _moment(probe, device) if has_context(device) else None
        asked = self._look_around(known, device, 0 if moment is None else moment[0].reserved_bytes)
        if known.account is None or asked or moment != known.moment or not known.exact:
            known.account = replace(self._account(probe, known, device, moment), quick=True)
            known.moment = moment
        return known.account

    def _look_around(self, known: _Known, device: int, reserved: int) -> bool:
        """Ask NVML where it is time to; what the process holds beside torch's memory is remembered."""
        now = self._clock()
        if now < known.around_until:
            return False
        known.around, known.around_until = look_around(device), now + _AROUND_SECONDS
        use = known.around.use
        own = None if use is None else use.own_bytes
        known.context_bytes = None if own is None or own < reserved else own - reserved
        return True

    def _account(self, probe: MemoryProbe, known: _Known, device: int, moment: _Moment | None) -> Account:
        if moment is None:
            known.exact = True
            return account_before_start(probe, device, known.around)
        self._read_layout(known, device, moment)
        snapshot, active = moment
        tensors = Part("tensors", "allocated", snapshot.allocated_bytes)
        inner = (tensors, *_split(known, snapshot, active))
        own = None if known.context_bytes is None else snapshot.reserved_bytes + known.context_bytes
        account = whole_account(probe, snapshot, inner, known.around, own)
        largest = None if known.layout is None else known.layout.largest_free_bytes
        return replace(account, largest_free_bytes=largest)

    def _read_layout(self, known: _Known, device: int, moment: _Moment) -> None:
        """Read the layout where its last cost allows; note whether it is of this moment."""
        if moment == known.moment and known.exact:
            return
        known.exact = False
        if self._clock() < known.layout_until:
            return
        begun = self._cost()
        layouts = read_layouts()
        cost = self._cost() - begun
        known.layout = None if layouts is None else layouts.get(device, layout_of(()))
        known.layout_until = self._clock() + (0.0 if cost < _CHEAP_SECONDS else _DUTY * cost)
        known.exact = True


def _moment(probe: MemoryProbe, device: int) -> _Moment:
    counters = probe.counters(device)
    return probe.snapshot(device), counters["active_bytes"]["all"]["current"]


def _split(known: _Known, snapshot: DeviceSnapshot, active: int) -> tuple[Part, ...]:
    """Split the cache as the layout tells, or as it told last; the parts sum to what is reserved now."""
    layout, waiting = known.layout, active - snapshot.allocated_bytes
    cached = snapshot.reserved_bytes - active
    if layout is None:
        return (Part("waiting", "reserved", waiting), Part("cache", "reserved", cached))
    private = min(layout.private_free_bytes, cached)
    fragmented = min(layout.fragmented_bytes, cached - private)
    now = replace(
        layout,
        waiting_bytes=waiting,
        private_free_bytes=private,
        fragmented_bytes=fragmented,
        returnable_bytes=cached - private - fragmented,
    )
    return cache_parts(now)


_accounts = QuickAccounts()


def quick_account(device: int = 0) -> Account:
    """Return one device's account without a look at the tensors, in microseconds while nothing moves.

    Its allocated memory is the one part ``tensors``; before CUDA has started it tells what NVML does.
    """
    return _accounts.read(device)
