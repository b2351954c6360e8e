"""The account: where every byte of a device is, in parts that sum to what the device has."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from jupyter_gpumem import cuts, nvml
from jupyter_gpumem.allocator import Layout, has_context, layout_of, read_layouts
from jupyter_gpumem.device import current_probe
from jupyter_gpumem.explain import Explained, RoleSum, explain
from jupyter_gpumem.next_step import best_step
from jupyter_gpumem.parts import (
    Account,
    Neighbour,
    Part,
    account_before_start,
    cache_parts,
    host_account,
    look_around,
    whole_account,
)
from jupyter_gpumem.quick import quick_account
from jupyter_gpumem.reach import Reach
from jupyter_gpumem.readings import DeviceSnapshot, MemoryProbe
from jupyter_gpumem.sizes import format_bytes
from jupyter_gpumem.tensors import Census, LiveStorage, take_census

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Account", "Neighbour", "Part", "quick_account", "take_account"]

NO_BLOCKS = "this allocator does not show its blocks: what is in them is known from the tensors alone"

# role of a storage -> key of its part, in the order of the account
_ROLES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer state": "optimizer_state",
    "buffer": "buffers",
    "saved for backward": "saved",
    "other": "other_tensors",
}


def take_account(shell: "InteractiveShell | None" = None, device: int | None = None) -> tuple[Account, ...]:
    """Account for the memory of the devices this process is on, or of one device.

    One scan of the heap; no device is woken, nothing collected or synchronised. Without CUDA the account is
    of this process's RAM; before CUDA has started it tells what others hold, where NVML does.
    """
    probe = current_probe()
    if probe.kind == "host":
        census = take_census(kind="host")
        account = host_account(probe, probe.snapshot(0), _sums_by_role(census.storages), census.notes)
        return (_advised(account, _keepers(shell, "host")),)
    started = [index for index in probe.devices() if has_context(index)]
    every = started or range(max(nvml.device_count(), 1))
    found = take_census(kind=probe.kind) if started else None
    layouts = read_layouts()
    keepers = _keepers(shell, probe.kind) if started else ()
    return tuple(
        _advised(_device_account(probe, index, layouts, found), keepers)
        if found is not None and index in started
        else account_before_start(probe, index, look_around(index))
        for index in (every if device is None else (device,))
    )


def _device_account(probe: MemoryProbe, device: int, layouts: Mapping[int, Layout] | None, census: Census) -> Account:
    snapshot, around = probe.snapshot(device), look_around(device)
    own = None if around.use is None else around.use.own_bytes
    if layouts is None:
        inner = _parts_without_blocks(census, snapshot)
        return whole_account(probe, snapshot, inner, around, own, (*census.notes, NO_BLOCKS))
    layout = layouts.get(device, layout_of(()))
    # of the moment of the layout: another thread may have moved the counters since
    allocated, reserved = layout.allocated_bytes, layout.reserved_bytes
    snapshot = replace(snapshot, allocated_bytes=allocated, reserved_bytes=reserved)
    explained = explain(layout.used, census.on(device))
    tensors = _tensor_parts(explained) if census.complete else (_undivided(snapshot),)
    notes = (*census.notes, *_outside_note(explained))
    account = whole_account(probe, snapshot, (*tensors, *cache_parts(layout)), around, own, notes)
    return replace(account, largest_free_bytes=layout.largest_free_bytes)


def _tensor_parts(explained: Explained) -> tuple[Part, ...]:
    workspaces, unexplained = explained.workspaces, explained.unexplained
    private = len([block for block in unexplained if block.pool != (0, 0)])
    note = f"{private} of {len(unexplained)} blocks in private pools" if private else ""
    return (
        *(_role_part(key, explained.roles.get(role)) for role, key in _ROLES.items()),
        Part("rounding", "allocated", explained.rounding_bytes),
        Part("workspaces", "allocated", explained.workspace_bytes, len(workspaces)),
        Part("unexplained", "allocated", explained.unexplained_bytes, len(unexplained), note),
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
    """Return what the tensors alone tell, and the rest of allocated and of reserved memory undivided."""
    cache = Part("cache", "reserved", snapshot.reserved_bytes - snapshot.allocated_bytes)
    sums = _sums_by_role(census.on(snapshot.device))
    rest = snapshot.allocated_bytes - sum(part.nbytes or 0 for part in sums)
    if not census.complete or rest < 0:
        return (_undivided(snapshot), cache)
    return (*sums, Part("unmatched", "allocated", rest), cache)


def _sums_by_role(storages: Iterable[LiveStorage]) -> tuple[Part, ...]:
    roles: dict[str, RoleSum] = {}
    for storage in storages:
        roles.setdefault(storage.role, RoleSum()).add(storage.nbytes, storage.owner)
    return tuple(_role_part(key, roles.get(role)) for role, key in _ROLES.items())


def _outside_note(explained: Explained) -> tuple[str, ...]:
    if not explained.outside_bytes:
        return ()
    whose = "a tensor" if explained.outside_count == 1 else f"{explained.outside_count} tensors"
    return (f"{format_bytes(explained.outside_bytes)} of {whose} came from another library or process",)


def _advised(account: Account, keepers: tuple[str, ...]) -> Account:
    kernels = {one.name.notebook: one.used_bytes for one in account.neighbours or () if one.name.notebook is not None}
    sizes = {part.key: part.nbytes for part in account.parts}
    return replace(account, next_step=best_step(sizes, kernels, account.total_bytes, keepers))


def _keepers(shell: "InteractiveShell | None", kind: str) -> tuple[str, ...]:
    """Name what IPython keeps by itself that holds memory: results, the last error, the debugger."""
    if shell is None:
        return ()
    wanted = Reach(shell, kind).holds_memory
    outputs = [name for name in cuts.cut_outputs(shell, wanted, dry_run=True) if name.startswith("Out[")]
    names = [f"{outputs[0]} and others" if len(outputs) > 1 else outputs[0]] if outputs else []
    if cuts.error_holds(shell, wanted):
        names.append("the last error")
    if wanted(getattr(shell.InteractiveTB, "pdb", None)):
        names.append("the ended %debug session")
    return tuple(names)
