"""Device-wide and per-process figures from NVML; every fault of it is ``None``, that is unknown."""

import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from jupyter_gpumem import simgpu
from jupyter_gpumem.device import cuda_started, torch_module


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process holds on a device; ``used_bytes`` is ``None`` where the driver does not tell."""

    pid: int
    used_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A whole device, every process on it included; sizes in bytes, ``None`` where unknown.

    ``processes`` is ``None`` where the driver does not list them. ``pids_visible`` is False where
    the list cannot be of this container's process numbers, because this process is missing from it:
    then no number in it may be looked up here.
    """

    name: str | None
    uuid: str | None
    used_bytes: int | None
    total_bytes: int | None
    utilization_percent: int | None
    processes: tuple[ProcessUse, ...] | None
    pids_visible: bool
    own_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def device_count() -> int:
    """Return how many devices this process may use, as far as NVML and the environment tell; else 0."""
    return len(_state.get().visible())


def read_device(device: int, *, has_context: bool = False) -> DeviceUse | None:
    """Read everything NVML tells of one device, named by torch's index; ``None`` without NVML.

    ``has_context`` says that this process surely is on the device, so a list without it is a list
    of another namespace's process numbers.
    """
    library = _state.get()
    handle = library.handle(device)
    if handle is None:
        return None
    memory = library.call("nvmlDeviceGetMemoryInfo", handle)
    rates = library.call("nvmlDeviceGetUtilizationRates", handle)
    processes = library.processes(handle)
    visible, own = _own_share(processes, has_context)
    return DeviceUse(
        name=_as_text(library.call("nvmlDeviceGetName", handle)),
        uuid=_as_text(library.call("nvmlDeviceGetUUID", handle)),
        used_bytes=None if memory is None else int(memory.used),
        total_bytes=None if memory is None else int(memory.total),
        utilization_percent=None if rates is None else int(rates.gpu),
        processes=processes,
        pids_visible=visible,
        own_bytes=own,
    )


def own_bytes(device: int) -> int | None:
    """Return what this process holds on a device it has a context on: tensors, cache, context, libraries."""
    library = _state.get()
    handle = library.handle(device)
    return None if handle is None else _own_share(library.processes(handle), has_context=True)[1]


def close() -> None:
    """Let NVML go; the next reading starts it again."""
    _state.close()


def _own_share(processes: tuple[ProcessUse, ...] | None, has_context: bool) -> tuple[bool, int | None]:
    """Return whether the process numbers are ours to read, and what this process holds."""
    if processes is None:
        return False, None
    own = [process for process in processes if process.pid == os.getpid()]
    if own:
        return True, own[0].used_bytes
    return (False, None) if has_context else (True, 0)


class _Library:
    """NVML as started by one process; without it every question is answered by ``None``."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.simulated = simgpu.is_active()
        self._module = _start()
        self._handles: dict[tuple[int, bool], Any] = {}

    def call(self, name: str, *arguments: object) -> Any:
        """Call NVML by name; ``None`` where it, the driver or the card cannot answer."""
        return None if self._module is None else _guarded(self._module, name, *arguments)

    def handle(self, device: int) -> Any:
        """Return NVML's handle of torch's device, remembered once found."""
        key = (device, cuda_started())
        if self._module is not None and self._handles.get(key) is None:
            self._handles[key] = self._find(device)
        return self._handles.get(key)

    def _find(self, device: int) -> Any:
        """Match by UUID, then by PCI address, then by the environment's list of visible devices."""
        properties = _properties(device)
        uuid = getattr(properties, "uuid", None)
        if uuid is not None:
            # NVML tells a slice of a card (MIG) from a whole one by the prefix
            for prefix in ("GPU-", "MIG-"):
                handle = self.call("nvmlDeviceGetHandleByUUID", f"{prefix}{uuid}".encode())
                if handle is not None:
                    return handle
        if hasattr(properties, "pci_bus_id"):
            place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
            address = "{:08x}:{:02x}:{:02x}.0".format(*place)
            handle = self.call("nvmlDeviceGetHandleByPciBusId", address.encode())
            if handle is not None:
                return handle
        visible = self.visible()
        return self.call("nvmlDeviceGetHandleByIndex", visible[device]) if device < len(visible) else None

    def visible(self) -> list[int]:
        """Return NVML's index of each device that CUDA_VISIBLE_DEVICES leaves, in torch's order.

        Without a list by UUID, CUDA's own order is by speed unless CUDA_DEVICE_ORDER says otherwise:
        among unlike cards it cannot be told, and the answer is empty.
        """
        count = self.call("nvmlDeviceGetCount") or 0
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        if listed is not None and listed.strip().startswith(("GPU-", "MIG-")):
            return _indices_of_uuids(listed, [self._uuid(index) for index in range(count)])
        alike = len({self._name(index) for index in range(count)}) <= 1
        if not alike and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return []
        return list(range(count)) if listed is None else _listed_indices(listed, count)

    def _uuid(self, index: int) -> str:
        return self._text_of(index, "nvmlDeviceGetUUID")

    def _name(self, index: int) -> str:
        return self._text_of(index, "nvmlDeviceGetName")

    def _text_of(self, index: int, question: str) -> str:
        handle = self.call("nvmlDeviceGetHandleByIndex", index)
        return "" if handle is None else _as_text(self.call(question, handle)) or ""

    def processes(self, handle: Any) -> tuple[ProcessUse, ...] | None:
        """List the processes on a device, most bytes first; ``None`` where the driver does not tell."""
        compute = self.call("nvmlDeviceGetComputeRunningProcesses", handle)
        if compute is None:
            return None
        graphics = self.call("nvmlDeviceGetGraphicsRunningProcesses", handle) or []
        used: dict[int, int | None] = {}
        # a process that does both is in both lists, with the same figure
        for process in [*graphics, *compute]:
            nbytes = process.usedGpuMemory
            used[int(process.pid)] = None if nbytes is None else int(nbytes)
        ranked = sorted(used.items(), key=lambda item: (-(item[1] or 0), item[0]))
        return tuple(ProcessUse(pid, nbytes) for pid, nbytes in ranked)

    def close(self) -> None:
        if self.pid == os.getpid():
            self.call("nvmlShutdown")


class _State:
    """The library of this process: started once, again after a fork or when the simulation starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: _Library | None = None

    def get(self) -> _Library:
        library = self._library
        if library is None or library.pid != os.getpid() or library.simulated != simgpu.is_active():
            with self._lock:
                library = self._library = _Library()
        return library

    def close(self) -> None:
        with self._lock:
            library, self._library = self._library, None
        if library is not None:
            library.close()


_state = _State()


def _start() -> ModuleType | None:
    try:
        import pynvml
    except (ImportError, OSError):
        return None
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        return None
    return pynvml  # type: ignore[no-any-return]  # untyped


def _guarded(module: ModuleType, name: str, *arguments: object) -> Any:
    # an old pynvml lacks a name, an old driver a symbol
    try:
        function: Callable[..., Any] = getattr(module, name)
        try:
            return function(*arguments)
        except module.NVMLError_Uninitialized:
            # the user's own nvmlShutdown() ended it for everybody
            module.nvmlInit()
            return function(*arguments)
    except (module.NVMLError, AttributeError, TypeError, ValueError, OSError):
        return None


def _properties(device: int) -> Any:
    """Return torch's properties of a device; asking before CUDA runs would start it."""
    torch = torch_module()
    if torch is None or not cuda_started() or device >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_properties(device)


def _as_text(value: str | bytes | None) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _indices_of_uuids(listed: str, uuids: list[str]) -> list[int]:
    """Return the index of each UUID, or unambiguous beginning of one.

    CUDA stops at the first it cannot find, and takes a list that repeats a device for empty.
    """
    indices: list[int] = []
    for wanted in (item.strip() for item in listed.split(",")):
        matches = [index for index, uuid in enumerate(uuids) if wanted and uuid.startswith(wanted)]
        if len(matches) != 1:
            break
        indices += matches
    return indices if len(set(indices)) == len(indices) else []


def _listed_indices(listed: str, count: int) -> list[int]:
    """Return the numbers of a list such as ``2,0``, read as CUDA reads it (see above)."""
    indices: list[int] = []
    for text in (item.strip() for item in listed.split(",")):
        if not text.isdecimal() or int(text) >= count:
            break
        indices.append(int(text))
    return indices if len(set(indices)) == len(indices) else []
