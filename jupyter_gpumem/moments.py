"""The moment a request for GPU memory fails: where, what was free, and what the device held."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from jupyter_gpumem.accounts import Account, take_account
from jupyter_gpumem.advice import advise_at_failure
from jupyter_gpumem.advised import Advice, Shortage
from jupyter_gpumem.allocator import read_layouts
from jupyter_gpumem.device import CudaProbe, cuda_started, limit_bytes, torch_module
from jupyter_gpumem.occupants import OomHolder, find_occupants
from jupyter_gpumem.where import Place, Spot, find_place

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Cause = Literal["larger than the device", "fragmented", "limit", "other processes", "full", "unknown"]


@dataclass(frozen=True, slots=True)
class OomMoment:
    """A request for memory that failed; sizes in bytes, None where it cannot be known.

    ``free_bytes`` were free on the device, ``cached_bytes`` in torch's cache, in blocks of at most
    ``largest_free_bytes``. ``node`` is the step of ``backward()`` that asked, ``elsewhere`` the thread or
    worker process that did, where that is not the main thread. ``account``, ``holders`` and ``changes``, what to
    change in the code that ran, are of the same moment, or of the end of the cell where it is ``seen_late``.
    """

    device: int
    asked_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    allocated_bytes: int
    cached_bytes: int
    largest_free_bytes: int | None
    limit_bytes: int | None
    place: Place
    node: str | None = None
    elsewhere: str | None = None
    account: Account | None = None
    holders: tuple[OomHolder, ...] = ()
    changes: tuple[Advice, ...] | None = None
    seen_late: bool = False

    @property
    def others_bytes(self) -> int | None:
        """What other processes held."""
        part = None if self.account is None else self.account.part("others")
        return None if part is None else part.nbytes

    @property
    def hidden_bytes(self) -> int:
        """What no Python object explains, while calls are under way: their C++ code has it."""
        part = None if self.account is None or self.seen_late else self.account.part("unexplained")
        return 0 if part is None else part.nbytes or 0

    @property
    def earlier(self) -> tuple[OomHolder, ...]:
        """Errors and garbage from before the attempt that failed: what they held stood in its way."""
        return () if self.seen_late else tuple(one for one in self.holders if one.state in ("earlier", "handling"))

    @property
    def is_in_worker(self) -> bool:
        """Tell whether a worker process of a ``DataLoader`` asked."""
        return self.elsewhere is not None and not self.elsewhere.startswith("thread ")

    @property
    def most_bytes(self) -> int | None:
        """What this process could take with nothing else on the device."""
        context = None if self.account is None else self.account.part("context")
        if self.total_bytes is None or context is None or context.nbytes is None:
            return self.total_bytes
        return self.total_bytes - context.nbytes

    @property
    def shortage(self) -> Shortage | None:
        """The request against what was free, where both are known."""
        if self.asked_bytes is None or self.free_bytes is None:
            return None
        return Shortage(self.asked_bytes, self.free_bytes, self.cached_bytes, self.most_bytes, self.limit_bytes)

    @property
    def cause(self) -> Cause:
        """Why the request failed."""
        short = self.shortage
        if short is None:
            return "unknown"
        if short.is_too_large:
            return "larger than the device"
        if short.is_over_limit:
            return "limit"
        if short.is_fragmented:
            return "fragmented"
        return "other processes" if short.asked_bytes <= short.room_bytes + (self.others_bytes or 0) else "full"


def read_moment(shell: "InteractiveShell", device: int, spots: Sequence[Spot]) -> OomMoment:
    """Read what a device has at this moment, and where the program is."""
    place = find_place(shell, spots)
    if not cuda_started():
        return OomMoment(device, None, None, None, 0, 0, None, None, place)
    snapshot = CudaProbe().snapshot(device)
    layout = (read_layouts() or {}).get(device)
    total, used = snapshot.total_bytes, snapshot.used_bytes
    cached = snapshot.reserved_bytes - snapshot.allocated_bytes
    return OomMoment(
        device,
        None,
        None if total is None or used is None else total - used,
        total,
        snapshot.allocated_bytes,
        cached if layout is None else cached - layout.waiting_bytes,
        None if layout is None else layout.largest_free_bytes,
        limit_bytes(device),
        place,
    )


def look_around(shell: "InteractiveShell", moment: OomMoment, spots: Sequence[Spot]) -> OomMoment:
    """Add what takes scans of the heap: the account, who holds how much, and what to change in the code that ran."""
    if not cuda_started():
        return replace(moment, changes=())
    account = next(iter(take_account(shell, moment.device)), None)
    moment = replace(moment, account=account)
    short = moment.shortage
    if short is None or not short.is_too_large:
        under_way = None if moment.seen_late else _words_under_way(moment)
        moment = replace(moment, holders=find_occupants(shell, moment.device, spots, under_way, moment.hidden_bytes))
    if short is not None:
        # what failed before and is still there says nothing of how large this attempt may be
        earlier_bytes = sum(one.nbytes for one in moment.earlier)
        short = replace(short, free_bytes=short.free_bytes + earlier_bytes, hidden_bytes=moment.hidden_bytes)
    changes = () if short is None else advise_at_failure(shell, spots, moment.device, short)
    return replace(moment, changes=changes)


def _words_under_way(moment: OomMoment) -> str:
    if moment.node is not None:
        return "the backward pass under way"
    module = moment.place.module
    return "the calls under way" if module is None else f"the forward pass under way, in {module}"


def backward_node() -> str | None:
    """Return the step of ``backward()`` that runs on this thread, if one does."""
    torch = torch_module()
    current = getattr(getattr(torch, "_C", None), "_current_autograd_node", None)
    node = None if current is None else current()
    return None if node is None else str(node.name())
