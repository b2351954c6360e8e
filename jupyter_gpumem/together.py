"""What some of the user's variables keep together, and which of them it takes."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from jupyter_gpumem.blocks import read_blocks
from jupyter_gpumem.device import current_probe, torch_module
from jupyter_gpumem.graph import plain_reads
from jupyter_gpumem.heap import Clock, Heap, OutOfTimeError, scan
from jupyter_gpumem.places import SHELLS_OWN
from jupyter_gpumem.referrers import held_graph
from jupyter_gpumem.roots import Roots
from jupyter_gpumem.shares import Shares
from jupyter_gpumem.tensors import live_tensors

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def kept_by_names(
    shell: "InteractiveShell", names: Collection[str], device: int, *, budget_seconds: float = 10.0
) -> tuple[tuple[str, ...], int]:
    """Return the fewest of some variables that keep what all of them keep, and the bytes ``%gpu_free`` would return.

    0 bytes where the time budget ends before that is known.
    """
    torch = torch_module()
    if torch is None or not names:
        return (), 0
    clock = Clock(budget_seconds)

    def search() -> tuple[tuple[str, ...], int]:
        kind = current_probe().kind
        with plain_reads(torch):
            roots = Roots(shell)
            heap = Heap(clock, roots.starts())
            live = live_tensors(heap, torch, kind, clock)
            graph = held_graph(heap, live, roots, read_blocks() if kind == "cuda" else (), clock)
            return _fewest(Shares(graph, live, torch), names, device)

    try:
        return scan(search)
    except OutOfTimeError:
        return (), 0


def _fewest(shares: Shares, names: Collection[str], device: int) -> tuple[tuple[str, ...], int]:
    holders = shares.graph.holders.values()
    others = {holder.node for holder in holders if holder.kind in SHELLS_OWN}
    nodes = {
        holder.slots[0].text: holder.node
        for holder in holders
        if holder.kind == "variable" and holder.slots[0].text in names
    }

    def keeps(chosen: Collection[str]) -> int:
        return shares.keeps({*others, *(nodes[name] for name in chosen)}).get(device, 0)

    wanted = sorted(nodes)
    whole = keeps(wanted)
    for name in sorted(nodes):
        rest = [other for other in wanted if other != name]
        if keeps(rest) == whole:
            wanted = rest
    return tuple(wanted), whole - keeps(())
