"""The account: where every byte of a device is, in parts that sum to what the device has."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from jupyter_gpumem import nvml
from jupyter_gpumem.allocator import Layout, has_context, layout_of, read_layouts
from jupyter_gpumem.device import current_probe
from jupyter_gpumem.explain import Explained, RoleSum, explain
from jupyter_gpumem.next_step import NextStep, best_step
from jupyter_gpumem.processes import ProcessName, name_processes
from jupyter_gpumem.sizes import format_bytes
from jupyter_gpumem.snapshot import DeviceSnapshot, MemoryProbe
from jupyter_gpumem.tensors import Census, LiveStorage, take_census

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Level = Literal["allocated", "reserved", "process", "total"]

CUDA_NOT_STARTED = "CUDA not started: nothing of this process is on a GPU yet"
NO_BLOCKS = "this allocator does not show its blocks: what is in them is unknown"
NOT_APART = "the driver does not tell this process from the others here (container, MIG or WSL)"

# role of a storage -> key of its part, in the order of the account
_ROLES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer state": "optimizer_state",
    "buffer": "buffers",
    "saved for backward": "saved",
    "other": "other_tensors",
}


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


def take_account(
    shell: "InteractiveShell | None" = None, device: int | None = None, *, census: Census | None = None
) -> tuple[Account, ...]:
    """Account for the memory of the devices this process is on, or of one device.

    One scan of the heap, no device woken, nothing collected or synchronised. Without CUDA the account is of
    this process's RAM; before CUDA has started it tells what others hold, where NVML does.

    Parameters
    ----------
    shell
        The notebook's shell; reserved for what only it can tell.
    census
        A census already taken, to save the scan.
    """
    probe = current_probe()
    if probe.kind == "host":
        return (_host_account(probe, census or take_census(kind="host")),)
    devices = _devices(probe) if device is None else (device,)
    layouts = read_layouts()
    census = census or take_census(kind=probe.kind)
    return tuple(_device_account(probe, index, layouts, census) for index in devices) or _before_start(probe)


def _devices(probe: MemoryProbe) -> tuple[int, ...]:
    return tuple(device for device in probe.devices() if has_context(device))


def _before_start(probe: MemoryProbe) -> tuple[Account, ...]:
    """Return what NVML tells of each device while this process is on none."""
    found = [(index, nvml.read_device(index)) for index in range(max(nvml.device_count(), 1))]
    accounts = []
    for index, use in found:
        parts = () if use is None else _outer_parts(0, 0, use.used_bytes, use.total_bytes)
        accounts.append(
            Account(
                device=index,
                kind=probe.kind,
                label=probe.label(index),
                name="" if use is None else use.name or "",
                simulated=probe.simulated(),
                parts=parts,
                allocated_bytes=0,
                reserved_bytes=0,
                process_bytes=0,
                total_bytes=None if use is None else use.total_bytes,
                neighbours=_neighbours(use),
                notes=(CUDA_NOT_STARTED,),
            )
        )
    return tuple(accounts)


def _device_account(
    probe: MemoryProbe, device: int, layouts: Mapping[int, Layout] | None, census: Census
) -> Account:
    snapshot = probe.snapshot(device)
    notes = list(census.notes)
    layout = None
    if layouts is None:
        notes.append(NO_BLOCKS)
        inner = _parts_without_blocks(census, snapshot)
    else:
        layout = layouts.get(device, layout_of(()))
        # of the moment of the layout: another thread may have moved the counters since
        snapshot = replace(
            snapshot, allocated_bytes=layout.allocated_bytes, reserved_bytes=layout.reserved_bytes
        )
        explained = explain(layout.used, census.on(device))
        inner = _tensor_parts(explained) if census.complete else (_undivided(snapshot),)
        inner += _cache_parts(layout)
        notes += _outside_note(explained)
    use = nvml.read_device(device, has_context=has_context(device))
    return _whole_account(probe, snapshot, inner, layout, use, notes)


def _tensor_parts(explained: Explained) -> tuple[Part, ...]:
    parts = [_role_part(key, explained.roles.get(role)) for role, key in _ROLES.items()]
    workspaces, unexplained = explained.workspaces, explained.unexplained
    private = len([block for block in unexplained if block.pool != (0, 0)])
    return (
        *parts,
        Part("rounding", "allocated", explained.rounding_bytes),
        Part("workspaces", "allocated", explained.workspace_bytes, len(workspaces)),
        Part(
            "unexplained",
            "allocated",
            explained.unexplained_bytes,
            len(unexplained),
            f"{private} of {len(unexplained)} blocks in pools of CUDA graphs" if private else "",
        ),
    )


def _role_part(key: str, found: RoleSum | None) -> Part:
    if found is None:
        return Part(key, "allocated", 0, 0)
    # the classes of the optimizers; the kinds of graph nodes would be too many to read
    owners = ", ".join(sorted(found.owners)) if key == "optimizer_state" else ""
    return Part(key, "allocated", found.nbytes, found.count, owners)


def _undivided(snapshot: DeviceSnapshot) -> Part:
    return Part("tensors", "allocated", snapshot.allocated_bytes)


def _parts_without_blocks(census: Census, snapshot: DeviceSnapshot) -> tuple[Part, ...]:
    """Return what the tensors alone tell where the allocator shows no blocks."""
    cache = Part("cache", "reserved", snapshot.reserved_bytes - snapshot.allocated_bytes)
    sums = _sums_by_role(census.on(snapshot.device))
    rest = snapshot.allocated_bytes - sum(part.nbytes or 0 for part in sums)
    if not census.complete or rest < 0:
        return (_undivided(snapshot), cache)
    return (*sums, Part("rest", "allocated", rest), cache)


def _sums_by_role(storages: Iterable[LiveStorage]) -> tuple[Part, ...]:
    roles: dict[str, RoleSum] = {}
    for storage in storages:
        role = roles.setdefault(storage.role, RoleSum())
        role.nbytes += storage.nbytes
        role.count += 1
        role.owners |= {storage.owner} if storage.owner else set()
    return tuple(_role_part(key, roles.get(role)) for role, key in _ROLES.items())


def _cache_parts(layout: Layout) -> tuple[Part, ...]:
    pools = len(layout.private_pools)
    return (
        Part("waiting", "reserved", layout.waiting_bytes),
        Part("returnable", "reserved", layout.returnable_bytes),
        Part("fragmented", "reserved", layout.fragmented_bytes),
        Part("private_free", "reserved", layout.private_free_bytes, pools),
    )


def _outside_note(explained: Explained) -> list[str]:
    if not explained.outside_bytes:
        return []
    many = "a tensor's" if explained.outside_count == 1 else f"{explained.outside_count} tensors'"
    return [f"{many} {format_bytes(explained.outside_bytes)} were allocated by another library or process"]


def _whole_account(
    probe: MemoryProbe,
    snapshot: DeviceSnapshot,
    inner: tuple[Part, ...],
    layout: Layout | None,
    use: nvml.DeviceUse | None,
    notes: Sequence[str],
) -> Account:
    """Add to the parts of torch's memory what surrounds it on the device."""
    used, total = snapshot.used_bytes, snapshot.total_bytes
    if used is None and use is not None:
        used, total = use.used_bytes, use.total_bytes
    own = _own_bytes(snapshot, use, used)
    parts = (*inner, *_outer_parts(snapshot.reserved_bytes, own, used, total))
    neighbours = _neighbours(use)
    kernels = {one.name.notebook: one.used_bytes for one in neighbours or () if one.name.notebook is not None}
    return Account(
        device=snapshot.device,
        kind=probe.kind,
        label=probe.label(snapshot.device),
        name=probe.name(snapshot.device),
        simulated=probe.simulated(),
        parts=parts,
        allocated_bytes=snapshot.allocated_bytes,
        reserved_bytes=snapshot.reserved_bytes,
        process_bytes=own,
        total_bytes=total,
        largest_free_bytes=None if layout is None else layout.largest_free_bytes,
        neighbours=neighbours,
        next_step=best_step({part.key: part.nbytes for part in parts}, kernels),
        notes=(*notes, NOT_APART) if own is None and used is not None else tuple(notes),
    )


def _own_bytes(snapshot: DeviceSnapshot, use: nvml.DeviceUse | None, used: int | None) -> int | None:
    """Return what this process holds in all; figures that contradict each other are unknown."""
    if not has_context(snapshot.device):
        return snapshot.reserved_bytes
    own = None if use is None else use.own_bytes
    if own is None or own < snapshot.reserved_bytes or (used is not None and own > used):
        return None
    return own


def _outer_parts(reserved: int, own: int | None, used: int | None, total: int | None) -> tuple[Part, ...]:
    """Return what lies around torch's memory; where own and others cannot be told apart, their sum too."""
    context = None if own is None else own - reserved
    others = None if own is None or used is None else used - own
    free = None if used is None or total is None else total - used
    parts = [Part("context", "process", context), Part("others", "total", others)]
    if own is None and used is not None:
        parts.append(Part("undivided", "total", used - reserved))
    return (*parts, Part("free", "total", free))


def _neighbours(use: nvml.DeviceUse | None) -> tuple[Neighbour, ...] | None:
    """Name the other processes; in a container that shows foreign numbers none is looked up."""
    if use is None or use.processes is None:
        return None
    others = [process for process in use.processes if process.pid != os.getpid()]
    pids = [process.pid for process in others]
    names = name_processes(pids) if use.pids_visible else tuple(map(ProcessName, pids))
    return tuple(Neighbour(name, process.used_bytes) for name, process in zip(names, others, strict=True))


def _host_account(probe: MemoryProbe, census: Census) -> Account:
    snapshot = probe.snapshot(0)
    own, used, total = snapshot.allocated_bytes, snapshot.used_bytes, snapshot.total_bytes
    tensors = _sums_by_role(census.storages)
    held = sum(part.nbytes or 0 for part in tensors)
    notes = list(census.notes)
    if held > own:
        notes.append("some of the tensors' memory was never written, so it is not in RAM")
    parts = (
        *tensors,
        Part("rest", "process", own - held if own >= held else None),
        Part("others", "total", used - own if used is not None and used >= own else None),
        Part("free", "total", total - used if used is not None and total is not None else None),
    )
    return Account(
        device=snapshot.device,
        kind=probe.kind,
        label=probe.label(0),
        name=probe.name(0),
        simulated=False,
        parts=parts,
        allocated_bytes=held,
        reserved_bytes=None,
        process_bytes=own,
        total_bytes=total,
        next_step=best_step({part.key: part.nbytes for part in parts}, {}),
        notes=tuple(notes),
    )
