"""The values of the leak report: who holds what, what it gives back, and the code that gives it back."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "variable",
    "output",
    "error",
    "handling",
    "debugger",
    "frame",
    "task",
    "module",
    "class",
    "ipython",
    "cache",
    "hook",
    "garbage",
    "context",
    "unknown",
    "together",
]
Section = Literal["gives back", "in use"]
Action = Literal["variables", "outputs", "errors", "debugger", "collect", "code"]


@dataclass(frozen=True, slots=True)
class Release:
    """One thing to do so that a holder lets go; a holder's releases are all needed, then a collection.

    ``variables`` deletes ``names`` from the user's namespace; ``outputs`` removes IPython's copies of the
    outputs of the cells ``outputs``; ``errors`` drops the last error, ``debugger`` the ended debugging session;
    ``collect`` collects garbage; ``code`` runs ``code`` in the user's namespace. ``seen`` tells by numbers which
    objects that was about.
    """

    action: Action
    names: tuple[str, ...] = ()
    outputs: tuple[int, ...] = ()
    code: str = ""
    seen: tuple[tuple[str, int], ...] = dataclasses.field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Part:
    """One of several things a holder keeps; sizes in bytes."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Holder:
    """Who keeps device memory alive; sizes in bytes.

    Parameters
    ----------
    path
        How the user would name it, ``losses[0..99]`` or ``local x of f() line 7, kept by the last error``.
    expression
        Python that gives the held object in the user's namespace, where there is any.
    keeps_bytes
        What comes back when the remedy has run and garbage is collected.
    shown_bytes
        Its share of the device's memory in this report: over all holders these sum to what is explained.
    shared_bytes, shared_with
        What it reaches and others reach too, and who they are; its remedy does not give this back.
    count
        How many storages it keeps.
    parts
        The largest things it keeps, where there are several to name.
    at_most
        True where C++ may hold some of it too, so that less may come back.
    releases
        What a program does instead of the remedy; empty where only the user can do it.
    """

    path: str
    kind: Kind
    section: Section
    device: int
    keeps_bytes: int
    shown_bytes: int
    shared_bytes: int
    shared_with: tuple[str, ...]
    count: int
    expression: str | None
    cell: int | None
    note: str
    remedy: str
    releases: tuple[Release, ...]
    parts: tuple[Part, ...] = ()
    at_most: bool = False

    @property
    def can_release(self) -> bool:
        """Tell whether a program can make it let go."""
        return bool(self.releases)


@dataclass(frozen=True, slots=True)
class Unexplained:
    """Blocks of the allocator that no storage explains, alike in size; sizes in bytes.

    ``normal`` is what they are where it is known to be harmless (``"cuBLAS workspace"``), else None. ``place``
    is the line that made them, where torch records allocation history.
    """

    device: int
    nbytes: int
    count: int
    normal: str | None
    place: str | None


@dataclass(frozen=True, slots=True)
class DeviceLeaks:
    """One device: ``allocated_bytes`` are the explained ones, the normal ones and the unexplained ones.

    ``holders`` and ``in_use`` are sorted by size, the largest first.
    """

    device: int
    label: str
    allocated_bytes: int
    explained_bytes: int
    unexplained_bytes: int
    normal_bytes: int
    holders: tuple[Holder, ...]
    in_use: tuple[Holder, ...]
    blocks: tuple[Unexplained, ...]


@dataclass(frozen=True, slots=True)
class LeakReport:
    """Who holds the memory of each device. Holds no tensor and keeps no object alive.

    ``seconds`` is what the search took; ``complete`` is False where it was cut short; ``notes`` say in words
    what could not be read.
    """

    kind: str
    devices: tuple[DeviceLeaks, ...]
    seconds: float
    complete: bool
    simulated: bool
    notes: tuple[str, ...]

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Every holder that can give memory back, on any device, the largest first."""
        return _by_size(holder for device in self.devices for holder in device.holders)

    @property
    def in_use(self) -> tuple[Holder, ...]:
        """The models and optimizers at work, on any device, the largest first."""
        return _by_size(holder for device in self.devices for holder in device.in_use)

    @property
    def unexplained_bytes(self) -> int:
        """Bytes that no Python object explains, on all devices; library workspaces are not among them."""
        return sum(device.unexplained_bytes for device in self.devices)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)


def _by_size(holders: Any) -> tuple[Holder, ...]:
    return tuple(sorted(holders, key=lambda holder: -holder.shown_bytes))
