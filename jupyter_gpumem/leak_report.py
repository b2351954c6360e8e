"""Who holds the memory: the leak report, marks and their differences, and what some values hold."""

import weakref
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.alike import group_alike
from jupyter_gpumem.blocks import Block, BlockFinder, library_workspaces, read_blocks
from jupyter_gpumem.cutting import Cutter
from jupyter_gpumem.describe import Describer
from jupyter_gpumem.device import current_probe, torch_module
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.graph import plain_reads
from jupyter_gpumem.heap import Clock, Heap, OutOfTimeError, scan
from jupyter_gpumem.holders import DeviceLeaks, Holder, LeakReport, Unexplained
from jupyter_gpumem.holdings import bytes_held_by
from jupyter_gpumem.readings import MemoryProbe
from jupyter_gpumem.referrers import held_graph
from jupyter_gpumem.roots import Roots
from jupyter_gpumem.shares import Shares
from jupyter_gpumem.sizes import format_bytes
from jupyter_gpumem.stamps import stamp_holders
from jupyter_gpumem.tensors import Key, LiveTensors, live_tensors

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["LeakDiff", "Mark", "bytes_held_by", "diff", "find_leaks", "mark"]

Progress = Callable[[str, float], None]


@dataclass(slots=True)
class _Findings:
    """What a search has found so far, as values that hold nothing."""

    holders: list[Holder]
    explained: dict[int, int]
    blocks: list[Unexplained]
    complete: bool
    notes: list[str]


def find_leaks(
    shell: "InteractiveShell | None" = None,
    *,
    device: int | None = None,
    min_bytes: int = 0,
    budget_seconds: float | None = 10.0,
    progress: Progress | None = None,
    passed_over: Container[int] = (),
) -> LeakReport:
    """Say who holds each byte of device memory, and what gives it back. Frees nothing and keeps nothing alive.

    Parameters
    ----------
    shell
        The shell whose variables are the user's; without one they are those of ``__main__``.
    device
        torch's index of the only device to report; by default all.
    min_bytes
        Holders that show less are left out.
    budget_seconds
        The search is cut short, and the report says so, after so many seconds; None is no limit.
    progress
        Called with the stage and the seconds so far, past one second.
    passed_over
        Running frames, by address, whose locals name no holder: those of a library's code.

    Returns
    -------
    LeakReport
        All sizes in bytes. Without CUDA it speaks of CPU tensors.
    """
    clock = Clock(budget_seconds, progress)
    return _report(shell, device, min_bytes, clock, None, passed_over)


@dataclass(frozen=True, slots=True)
class Mark:
    """What was on the devices at one moment. Keeps nothing alive: it has addresses and weak references only."""

    storages: dict[Key, tuple[int, "weakref.ref[Any]"]]

    def still_there(self) -> set[Key]:
        """Return the storages that have been there all the time since the mark."""
        return {key for key, (_nbytes, alive) in self.storages.items() if alive() is not None}


@dataclass(frozen=True, slots=True)
class LeakDiff:
    """What became of the devices since a mark; ``gone_bytes`` is what was there then and is no more."""

    new: LeakReport
    gone_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        return {"new": self.new.to_dict(), "gone_bytes": self.gone_bytes}


def mark(shell: "InteractiveShell | None" = None, *, budget_seconds: float | None = 10.0) -> Mark:
    """Remember which storages there are, so that :func:`diff` can tell who holds the new ones.

    Raises
    ------
    GpuMemError
        When the time budget ends before all are seen.
    """
    torch = torch_module()
    if torch is None:
        return Mark({})
    clock = Clock(budget_seconds)

    def search() -> Mark:
        live = live_tensors(Heap(clock, Roots(shell).starts()), torch, current_probe().kind, clock)
        return Mark(
            {
                key: (live.storages[key].nbytes, weakref.ref(live.graph.objects[address]))
                for address, keys in live.keys.items()
                for key in keys
            }
        )

    try:
        return scan(search)
    except OutOfTimeError:
        raise GpuMemError(f"too many objects to look at in {budget_seconds} s; nothing is marked") from None


def diff(since: Mark, shell: "InteractiveShell | None" = None, *, budget_seconds: float | None = 10.0) -> LeakDiff:
    """Say who holds what has come to the devices since a mark, and how much of what was there then is gone."""
    old = since.still_there()
    gone = sum(nbytes for key, (nbytes, _alive) in since.storages.items() if key not in old)
    return LeakDiff(_report(shell, None, 0, Clock(budget_seconds), old), gone)


def _report(
    shell: "InteractiveShell | None",
    device: int | None,
    min_bytes: int,
    clock: Clock,
    old: set[Key] | None,
    passed_over: Container[int] = (),
) -> LeakReport:
    probe = current_probe()
    torch = torch_module()
    found = _Findings([], {}, [], True, [])
    if torch is not None:
        scan(lambda: _search(shell, torch, probe, clock, found, old, passed_over))
    devices = [index for index in probe.devices() if device is None or index == device]
    return LeakReport(
        kind=probe.kind,
        devices=tuple(_device_leaks(probe, index, found, min_bytes) for index in devices),
        seconds=clock.seconds,
        complete=found.complete,
        simulated=probe.simulated(),
        notes=tuple(found.notes),
    )


def _search(
    shell: "InteractiveShell | None",
    torch: ModuleType,
    probe: MemoryProbe,
    clock: Clock,
    found: _Findings,
    old: set[Key] | None,
    passed_over: Container[int],
) -> None:
    try:
        with plain_reads(torch):
            roots = Roots(shell, passed_over)
            before = read_blocks() if probe.kind == "cuda" else ()
            # from here on the heap keeps alive what there is: what another thread makes is not in it
            heap = Heap(clock, roots.starts())
            live = live_tensors(heap, torch, probe.kind, clock)
            blocks = read_blocks() if probe.kind == "cuda" else ()
            if old is not None:
                live.forget(old)
            _explain(live, blocks, {(block.device, block.address) for block in before if _is_used(block)}, found)
            if old is not None:
                found.blocks = []  # nobody can tell which of them are new
            if heap.frozen:
                found.notes.append("gc.freeze() hides objects from the collector: they were found from the variables")
            graph = held_graph(heap, live, roots, blocks, clock)
            shares = Shares(graph, live, torch)
            describer = Describer(shares, shell, torch)
            for share in Cutter(shares, torch).all():
                found.holders += describer.holders(share)
                clock.check("names")
            found.holders = group_alike(found.holders, in_shell=shell is not None)
            found.holders = stamp_holders(shell, found.holders)
            found.notes += sorted(live.graph.unread)
    except OutOfTimeError as stop:
        found.complete = False
        found.notes.append(f"cut short by the time budget while looking at: {stop}")


def _is_used(block: Block) -> bool:
    return block.state == "active_allocated"


def _explain(live: LiveTensors, blocks: Iterable[Block], before: Collection[tuple[int, int]], found: _Findings) -> None:
    """Match storages with the allocator's blocks; gather the blocks that no storage explains.

    A block that was not there ``before`` the tensors were counted is another thread's, made meanwhile.
    """
    used = [block for block in blocks if _is_used(block)]
    finder = BlockFinder(used)
    matched: set[tuple[int, int]] = set()
    for key, facts in live.storages.items():
        block = finder.find(key)
        if block is None:
            found.explained[key[0]] = found.explained.get(key[0], 0) + facts.nbytes
        elif (block.device, block.address) not in matched:
            matched.add((block.device, block.address))
            found.explained[key[0]] = found.explained.get(key[0], 0) + block.size_bytes
    alike: dict[tuple[int, int, str | None, str | None], int] = {}
    bare = [block for block in used if (block.device, block.address) not in matched]
    known = [block for block in bare if (block.device, block.address) in before]
    workspaces = set(library_workspaces(known))
    for block in known:
        kind = (block.device, block.size_bytes, "cuBLAS workspace" if block in workspaces else None, block.place)
        alike[kind] = alike.get(kind, 0) + 1
    meanwhile = sum(block.size_bytes for block in bare) - sum(block.size_bytes for block in known)
    if meanwhile:
        found.notes.append(f"{format_bytes(meanwhile)} were allocated by other threads while this report was made")
    found.blocks = [
        Unexplained(device, nbytes, count, normal, place)
        for (device, nbytes, normal, place), count in sorted(alike.items(), key=lambda item: -item[0][1])
    ]


def _device_leaks(probe: MemoryProbe, device: int, found: _Findings, min_bytes: int) -> DeviceLeaks:
    blocks = tuple(block for block in found.blocks if block.device == device)
    unexplained = sum(block.nbytes * block.count for block in blocks if block.normal is None)
    normal = sum(block.nbytes * block.count for block in blocks if block.normal is not None)
    explained = found.explained.get(device, 0)
    mine = [holder for holder in found.holders if holder.device == device and holder.shown_bytes >= min_bytes]
    mine.sort(key=lambda holder: (-holder.shown_bytes, holder.path))
    return DeviceLeaks(
        device=device,
        label=probe.label(device),
        allocated_bytes=explained + normal + unexplained,
        explained_bytes=explained,
        unexplained_bytes=unexplained,
        normal_bytes=normal,
        holders=tuple(holder for holder in mine if holder.section == "gives back"),
        in_use=tuple(holder for holder in mine if holder.section == "in use"),
        blocks=blocks,
    )
