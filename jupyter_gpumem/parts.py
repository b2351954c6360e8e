"""The values of the account, and the parts that lie around torch's memory."""

import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jupyter_gpumem import nvml
from jupyter_gpumem.allocator import Layout, has_context
from jupyter_gpumem.device import cuda_started
from jupyter_gpumem.next_step import NextStep
from jupyter_gpumem.processes import ProcessName, name_processes
from jupyter_gpumem.readings import DeviceSnapshot, MemoryProbe

Level = Literal["allocated", "reserved", "process", "total"]

CUDA_NOT_STARTED = "CUDA not started: nothing of this process is on a GPU yet"
NOT_APART = "the driver does not tell this process from the others here (container, MIG or WSL)"
NOT_RESIDENT = "some of the tensors' memory was never written, so it is not in RAM"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an account; ``nbytes`` is ``None`` where it cannot be known, and then it is in no sum.

    ``level`` is the sum that the part completes: ``allocated``, ``reserved``, ``process`` and ``total`` each
    contain the one before. ``count`` is of storages, where the part has some.
    """

    key: str
    level: Level
    nbytes: int | None
    count: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another process on the device; ``used_bytes`` is ``None`` where the driver does not tell."""

    name: ProcessName
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Account:
    """Where the memory of one device is; all sizes in bytes, ``None`` where unknown.

    The known parts up to a level sum to that level's figure. In host-memory mode ``allocated_bytes`` is what
    CPU tensors hold, and there is no reserved memory. ``quick`` accounts do not look for tensors: their
    allocated memory is one part. ``largest_free_bytes`` is the largest free block in torch's cache.
    ``notes`` are sentences.
    """

    device: int
    kind: str
    label: str
    name: str
    simulated: bool
    parts: tuple[Part, ...]
    allocated_bytes: int | None
    reserved_bytes: int | None
    process_bytes: int | None
    total_bytes: int | None
    largest_free_bytes: int | None = None
    neighbours: tuple[Neighbour, ...] | None = None
    next_step: NextStep | None = None
    notes: tuple[str, ...] = ()
    quick: bool = False

    def part(self, key: str) -> Part | None:
        """Return the part with this key, if the account has it."""
        return next((part for part in self.parts if part.key == key), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def cache_parts(layout: Layout) -> tuple[Part, ...]:
    """Return the parts of reserved memory that no tensor uses."""
    return (
        Part("waiting", "reserved", layout.waiting_bytes),
        Part("returnable", "reserved", layout.returnable_bytes),
        Part("fragmented", "reserved", layout.fragmented_bytes),
        Part("private_free", "reserved", layout.private_free_bytes, len(layout.private_pools)),
    )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What lies around torch's memory on a device: other memory of this process, other processes."""

    use: nvml.DeviceUse | None
    neighbours: tuple[Neighbour, ...] | None


def look_around(device: int) -> Surroundings:
    """Ask NVML who else is on a device, and who that is."""
    use = nvml.read_device(device, has_context=has_context(device))
    return Surroundings(use, _neighbours(use))


def whole_account(
    probe: MemoryProbe,
    snapshot: DeviceSnapshot,
    inner: tuple[Part, ...],
    around: Surroundings,
    own: int | None,
    notes: tuple[str, ...] = (),
) -> Account:
    """Complete the parts of torch's memory to an account of the whole device.

    ``own`` is what this process holds in all; where the figures contradict each other it is unknown.
    """
    used, total = snapshot.used_bytes, snapshot.total_bytes
    if used is None and around.use is not None:
        used, total = around.use.used_bytes, around.use.total_bytes
    if own is not None and (own < snapshot.reserved_bytes or (used is not None and own > used)):
        own = None
    hidden = own is None and used is not None
    return Account(
        device=snapshot.device,
        kind=probe.kind,
        label=probe.label(snapshot.device),
        name=probe.name(snapshot.device),
        simulated=probe.simulated(),
        parts=(*inner, *outer_parts(snapshot.reserved_bytes, own, used, total)),
        allocated_bytes=snapshot.allocated_bytes,
        reserved_bytes=snapshot.reserved_bytes,
        process_bytes=own,
        total_bytes=total,
        neighbours=around.neighbours,
        notes=(*notes, NOT_APART) if hidden else notes,
    )


def account_before_start(probe: MemoryProbe, device: int, around: Surroundings) -> Account:
    """Return what NVML tells of a device that this process is not on."""
    use = around.use
    return Account(
        device=device,
        kind=probe.kind,
        label=probe.label(device),
        name="" if use is None else use.name or "",
        simulated=probe.simulated(),
        parts=() if use is None else outer_parts(0, 0, use.used_bytes, use.total_bytes),
        allocated_bytes=0,
        reserved_bytes=0,
        process_bytes=0,
        total_bytes=None if use is None else use.total_bytes,
        neighbours=around.neighbours,
        notes=() if cuda_started() else (CUDA_NOT_STARTED,),
    )


def host_account(
    probe: MemoryProbe, snapshot: DeviceSnapshot, inner: tuple[Part, ...], notes: tuple[str, ...] = ()
) -> Account:
    """Complete what is known of this process's RAM to an account of the machine."""
    own, used, total = snapshot.allocated_bytes, snapshot.used_bytes, snapshot.total_bytes
    held = sum(part.nbytes or 0 for part in inner)
    if held > own:
        notes = (*notes, NOT_RESIDENT)
    parts = (
        *inner,
        Part("rest", "process", own - held if own >= held else None),
        Part("others", "total", used - own if used is not None and used >= own else None),
        Part("free", "total", total - used if used is not None and total is not None else None),
    )
    return Account(
        device=snapshot.device,
        kind=probe.kind,
        label=probe.label(snapshot.device),
        name=probe.name(snapshot.device),
        simulated=probe.simulated(),
        parts=parts,
        allocated_bytes=held,
        reserved_bytes=None,
        process_bytes=own,
        total_bytes=total,
        notes=notes,
    )


def outer_parts(reserved: int, own: int | None, used: int | None, total: int | None) -> tuple[Part, ...]:
    """Return what lies around torch's memory; where own and others cannot be told apart, their sum too."""
    context = None if own is None else own - reserved
    others = None if own is None or used is None else used - own
    free = None if used is None or total is None else total - used
    parts = [Part("context", "process", context), Part("others", "total", others)]
    if own is None and used is not None:
        parts.append(Part("undivided", "total", used - reserved))
    return (*parts, Part("free", "total", free))


def _neighbours(use: nvml.DeviceUse | None) -> tuple[Neighbour, ...] | None:
    """Name the other processes; where the numbers are another namespace's, none is looked up."""
    if use is None or use.processes is None:
        return None
    others = [process for process in use.processes if process.pid != os.getpid()]
    pids = [process.pid for process in others]
    names = name_processes(pids) if use.pids_visible else tuple(map(ProcessName, pids))
    return tuple(Neighbour(name, process.used_bytes) for name, process in zip(names, others, strict=True))
