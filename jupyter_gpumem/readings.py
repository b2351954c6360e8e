"""What one device holds at one moment, and what a source of such readings must offer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """One device at one moment; sizes in bytes, ``None`` where it cannot be known.

    ``allocated_bytes`` and ``reserved_bytes`` speak of this process and torch's allocator;
    ``used_bytes`` and ``total_bytes`` of the whole device and every process on it.
    In host-memory mode both of the first are the resident set size of this process.
    """

    device: int
    allocated_bytes: int
    reserved_bytes: int
    used_bytes: int | None
    total_bytes: int | None


class MemoryProbe(Protocol):
    """A source of readings. Reading never starts CUDA, wakes a device, synchronises or allocates on it."""

    kind: str
    """``"cuda"`` or ``"host"``."""

    def devices(self) -> tuple[int, ...]:
        """Return the devices that can be read now without waking anything."""

    def counters(self, device: int) -> Mapping[str, Any]:
        """Return the raw allocator counters, as ``torch.cuda.memory_stats_as_nested_dict``."""

    def snapshot(self, device: int) -> DeviceSnapshot:
        """Read one device."""

    def label(self, device: int) -> str:
        """Return how reports call the device: ``GPU 0`` or ``RAM``."""

    def name(self, device: int) -> str:
        """Return the model name of the device."""

    def simulated(self) -> bool:
        """Tell whether the figures come from the simulated GPU."""
