"""Which storage each byte of the allocator's blocks belongs to."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jupyter_gpumem.blocks import Block, library_workspaces
from jupyter_gpumem.tensors import LiveStorage


@dataclass(slots=True)
class RoleSum:
    """What the storages of one role take of the blocks."""

    nbytes: int = 0
    count: int = 0
    owners: set[str] = field(default_factory=set)

    def add(self, nbytes: int, owner: str | None) -> None:
        """Count one storage in."""
        self.nbytes += nbytes
        self.count += 1
        if owner is not None:
            self.owners.add(owner)


@dataclass(slots=True)
class Explained:
    """The bytes of one device's used blocks; roles, rounding, workspaces and unexplained sum to their sizes.

    ``outside_bytes`` are of storages that lie in no block: another library or process allocated them.
    """

    roles: dict[str, RoleSum] = field(default_factory=dict)
    rounding_bytes: int = 0
    workspaces: list[Block] = field(default_factory=list)
    unexplained_bytes: int = 0
    unexplained: list[Block] = field(default_factory=list)
    outside_bytes: int = 0
    outside_count: int = 0

    @property
    def workspace_bytes(self) -> int:
        """Return what the library workspaces take."""
        return sum(block.size_bytes for block in self.workspaces)


def explain(used: Sequence[Block], storages: Iterable[LiveStorage]) -> Explained:
    """Match the storages of one device with its used blocks, given by address.

    A storage belongs to the block that contains its address, since an imported array may begin inside one;
    where several lie over one another, each byte counts for the first.
    """
    explained = Explained()
    starts = [block.address for block in used]
    inside: dict[int, list[LiveStorage]] = {}
    for storage in storages:
        index = bisect_right(starts, storage.address) - 1
        if index >= 0 and storage.address < used[index].address + used[index].size_bytes:
            inside.setdefault(index, []).append(storage)
        else:
            explained.outside_bytes += storage.nbytes
            explained.outside_count += 1
    for index, storages_inside in inside.items():
        _explain_block(explained, used[index], storages_inside)
    bare = [block for index, block in enumerate(used) if index not in inside]
    explained.workspaces = library_workspaces(bare)
    known = set(explained.workspaces)
    others = [block for block in bare if block not in known]
    explained.unexplained += others
    explained.unexplained_bytes += sum(block.size_bytes for block in others)
    return explained


def _explain_block(explained: Explained, block: Block, storages: list[LiveStorage]) -> None:
    storages.sort(key=lambda storage: (storage.address, -storage.nbytes))
    end, reached, covered = block.address + block.size_bytes, block.address, 0
    for storage in storages:
        stop = min(storage.address + storage.nbytes, end)
        fresh = max(0, stop - max(storage.address, reached))
        reached = max(reached, stop)
        covered += fresh
        explained.roles.setdefault(storage.role, RoleSum()).add(fresh, storage.owner)
    # a block asked for by torch begins with its storage; before an imported one lies something unseen
    if storages[0].address == block.address:
        explained.rounding_bytes += block.size_bytes - covered
    else:
        explained.unexplained_bytes += block.size_bytes - covered
        explained.unexplained.append(block)
