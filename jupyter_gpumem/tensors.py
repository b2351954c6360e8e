"""The census of live storages: each piece of tensor memory once, and what it is for."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from jupyter_gpumem.attributes import plain_attribute, type_name
from jupyter_gpumem.device import current_probe, torch_module
from jupyter_gpumem.graph import LiveGraph, live_graph, plain_reads
from jupyter_gpumem.heap import (
    Clock,
    Heap,
    OutOfTimeError,
    is_exactly,
    scan,
    subclasses_of,
    type_namespace,
)

Role = Literal["parameter", "gradient", "buffer", "optimizer state", "saved for backward", "other"]
Reach = Literal["tensor", "gradient", "saved", "inner", "script"]

Key = tuple[int, int]
"""A storage: device and address."""


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """One storage; ``nbytes`` is its own size, not that of the allocator's block around it.

    ``role`` is what the memory is for, ``owner`` the class of the optimizer or of the graph node it belongs to.
    ``reached`` tells which tensor of it the C++ side refers to (as a gradient, saved for backward, inside a
    wrapper, in a script module); ``"tensor"`` is one that only Python refers to. ``tensors`` counts the tensors
    that share it.
    """

    device: int
    address: int
    nbytes: int
    role: Role
    owner: str | None
    reached: Reach
    tensors: int


@dataclass(frozen=True, slots=True)
class Census:
    """Every live storage, once, by device and address.

    ``kind`` is ``"cuda"`` or ``"host"``. ``complete`` is False where the time budget ended the search;
    ``notes`` say in words what could not be read.
    """

    kind: str
    storages: tuple[LiveStorage, ...]
    complete: bool
    notes: tuple[str, ...]

    def on(self, device: int) -> tuple[LiveStorage, ...]:
        """Return the storages of one device."""
        return tuple(storage for storage in self.storages if storage.device == device)


@dataclass(slots=True)
class Facts:
    """What is known of one storage while a scan is under way."""

    nbytes: int
    reached: Reach = "tensor"
    tensors: int = 0
    uses: int | None = None
    """How many C++ tensors share it, where torch tells."""
    role: Role = "other"
    owner: str | None = None


@dataclass(slots=True)
class LiveTensors:
    """The tensors of a heap with their storages. Holds every one of them: drop it before reporting."""

    kind: str
    graph: LiveGraph
    storages: dict[Key, Facts] = field(default_factory=dict)
    keys: dict[int, tuple[Key, ...]] = field(default_factory=dict)
    """The storage that a storage object is, by its address."""
    keys_of_tensors: dict[int, tuple[Key, ...]] = field(default_factory=dict)
    modules: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)

    def keys_of(self, address: int) -> tuple[Key, ...]:
        """Return the storages of a tensor or storage object."""
        return self.keys.get(address) or self.keys_of_tensors.get(address, ())

    def forget(self, keys: set[Key]) -> None:
        """Leave some storages out of what is searched for."""
        for table in (self.keys, self.keys_of_tensors):
            for address, found in list(table.items()):
                rest = tuple(key for key in found if key not in keys)
                table[address] = rest
                if not rest:
                    del table[address]
        for key in keys & self.storages.keys():
            del self.storages[key]

    def census(self) -> Census:
        """Return the storages as values that hold nothing."""
        storages = tuple(
            LiveStorage(device, address, facts.nbytes, facts.role, facts.owner, facts.reached, facts.tensors)
            for (device, address), facts in sorted(self.storages.items())
        )
        return Census(self.kind, storages, True, tuple(sorted(self.graph.unread)))


def take_census(*, kind: str | None = None, budget_seconds: float | None = 10.0) -> Census:
    """Find every live storage once, through Python's collector and through the autograd graph.

    Parameters
    ----------
    kind
        ``"cuda"`` for device memory, ``"host"`` for CPU tensors; by default what this process has.
    budget_seconds
        The search is cut short, and says so, after so many seconds.

    Notes
    -----
    Not seen: tensors held by C++ alone (they are blocks of the allocator that no storage explains). Nothing is
    held, collected, synchronised or initialised, and no code of the user runs.
    """
    kind = current_probe().kind if kind is None else kind
    torch = torch_module()
    if torch is None:
        return Census(kind, (), True, ())
    clock = Clock(budget_seconds)
    try:
        return scan(lambda: live_tensors(Heap(clock), torch, kind, clock).census())
    except OutOfTimeError as stop:
        return Census(kind, (), False, (f"the time budget ended the search ({stop})",))


def live_tensors(heap: Heap, torch: ModuleType, kind: str, clock: Clock) -> LiveTensors:
    """Find the tensors of a heap, read their storages, and tell what each storage is for."""
    live = LiveTensors(kind, live_graph(heap, torch, clock))
    reader = StorageReader(torch, kind)
    with plain_reads(torch):
        for address, item in live.graph.objects.items():
            found = reader.storages_of(item)
            if found:
                live.keys[address] = tuple(key for key, _nbytes, _uses in found)
                for key, nbytes, uses in found:
                    _count(live.storages, key, nbytes, uses)
    live.graph.unread |= reader.unread
    _count_tensors(live)
    live.modules = heap.of_kinds(subclasses_of(torch.nn.Module))
    live.optimizers = heap.of_kinds(subclasses_of(torch.optim.Optimizer))
    _assign_roles(live, torch)
    return live


def _count(storages: dict[Key, Facts], key: Key, nbytes: int, uses: int | None) -> None:
    facts = storages.get(key)
    if facts is None:
        storages[key] = Facts(nbytes, uses=uses)
    else:
        facts.nbytes = max(facts.nbytes, nbytes)
        if uses is not None:
            facts.uses = uses + (facts.uses or 0)


def _count_tensors(live: LiveTensors) -> None:
    """Give each tensor the key of its storage, and count the tensors of each storage."""
    reach = _reaches(live.graph)
    for address in live.graph.tensors:
        for child, how in live.graph.links.get(address, ()):
            if how == "storage":
                live.keys_of_tensors[address] = live.keys.get(id(child), ())
        for key in live.keys_of(address):
            facts = live.storages[key]
            facts.tensors += 1
            if facts.reached == "tensor":
                facts.reached = reach.get(address, "tensor")


def _reaches(graph: LiveGraph) -> dict[int, Reach]:
    """Return how the C++ side refers to each object, by address; a wrapper made by looking changes nothing."""
    names: dict[str, Reach] = {"gradient": "gradient", "saved": "saved", "script": "script", "inner": "inner"}
    return {id(child): names[how] for links in graph.links.values() for child, how in links if how in names}


class StorageReader:
    """Reads the memory of storage objects, through torch's own descriptors only."""

    def __init__(self, torch: ModuleType, kind: str) -> None:
        self.unread: set[str] = set()
        self._torch = torch
        self._device = "cpu" if kind == "host" else kind
        storage = type_namespace(torch._C.StorageBase)
        self._storages = subclasses_of(torch._C.StorageBase)
        self._address, self._nbytes = storage["data_ptr"], storage["nbytes"]
        self._device_of, self._cdata = storage["device"].__get__, storage["_cdata"].__get__
        self._use_count = getattr(torch._C, "_storage_Use_Count", None)

    def storages_of(self, item: Any) -> list[tuple[Key, int, int | None]]:
        """Return key, bytes and C++ users of the memory of a storage object, nothing for anything else."""
        if id(type(item)) not in self._storages:
            return []
        try:
            device = self._device_of(item)
            if device.type != self._device:
                return []
            address = self._address(item)
            if not address:  # empty, or resized to nothing
                return []
            uses = None if self._use_count is None else self._use_count(self._cdata(item)) - 1
            return [((device.index or 0, address), self._nbytes(item), uses)]
        except (ValueError, RuntimeError):
            return []  # so the storage of a wrapper says that it has no memory of its own
        except Exception as error:
            self.unread.add(f"a storage: {type(error).__name__}")
            return []


def _assign_roles(live: LiveTensors, torch: ModuleType) -> None:
    """Tell what each storage is for; of several uses the first of: parameter, buffer, gradient, state, saved."""
    objects, links = live.graph.objects, live.graph.links
    for address, found in links.items():
        for child, how in found:
            if how == "saved":
                _mark(live, (child,), "saved for backward", type_name(objects[address]))
    for optimizer in live.optimizers:
        _mark(live, _nested_values(plain_attribute(optimizer, "param_groups")), "parameter", None)
        state = plain_attribute(optimizer, "state")
        _mark(live, _nested_values(state), "optimizer state", type_name(optimizer))
    for found in links.values():
        _mark(live, (child for child, how in found if how == "gradient"), "gradient", None)
    for attribute, role in (("_buffers", "buffer"), ("_parameters", "parameter")):
        for module in live.modules:
            values: Any = plain_attribute(module, attribute)
            if issubclass(type(values), dict):
                _mark(live, tuple(dict.values(values)), role, None)
    _mark_scripts(live, torch)


def _mark_scripts(live: LiveTensors, torch: ModuleType) -> None:
    for found in live.graph.links.values():
        for child, how in found:
            if how == "script":
                is_parameter = type_namespace(torch._C.TensorBase)["requires_grad"].__get__(child)
                _mark(live, (child,), "parameter" if is_parameter else "buffer", None)


def _mark(live: LiveTensors, tensors: Iterable[Any], role: Any, owner: str | None) -> None:
    stack, seen = list(tensors), set()
    while stack:
        item = stack.pop()
        if id(item) in seen or id(item) not in live.graph.objects:
            continue
        seen.add(id(item))
        for key in live.keys_of(id(item)):
            live.storages[key].role, live.storages[key].owner = role, owner
        stack.extend(_inner_tensors(live, item))


def _inner_tensors(live: LiveTensors, tensor: Any) -> Iterator[Any]:
    """Give the tensors inside a wrapper: attributes of a subclass, or what functorch wraps."""
    yield from (child for child, how in live.graph.links.get(id(tensor), ()) if how == "inner")
    if "__module__" in type_namespace(type(tensor)) and not live.keys_of(id(tensor)):
        import gc

        for held in gc.get_referents(tensor):
            for inner in held.values() if type(held) is dict else (held,):
                if id(inner) in live.graph.tensors:
                    yield inner


def _nested_values(state: Any) -> Iterator[Any]:
    """Give what an optimizer keeps: its state is a dict a parameter, with tensors or lists of them in it."""
    stack = [state]
    depth = {id(state): 0}
    while stack:
        item = stack.pop()
        level = depth.get(id(item), 0)
        values: Iterable[Any] = ()
        if issubclass(type(item), dict):
            values = tuple(dict.values(item))
        elif is_exactly(item, (list, tuple)):
            values = tuple(item)
        else:
            yield item
        if level < 4:
            for value in values:
                depth[id(value)] = level + 1
                stack.append(value)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a report says of one tensor; ``nbytes`` are its own elements, not its storage."""

    nbytes: int
    elements: int
    node: str | None
    """The graph node that made it, None for a tensor without a graph."""
    copy: str
    """Code for a copy of the tensor ``{0}`` that is as ready to be trained and has no graph that keeps the original."""


def sizes_of(tensor: object, torch: ModuleType) -> tuple[int, ...]:
    """Return the shape of a tensor by torch's own descriptor; empty where it has none of numbers, as a nested one."""
    try:
        shape = tuple(type_namespace(torch._C.TensorBase)["shape"].__get__(tensor))
    except RuntimeError:
        return ()
    return shape if all(type(size) is int for size in shape) else ()


def tensor_facts(tensor: object, torch: ModuleType) -> TensorFacts | None:
    """Read size and graph of a tensor, None for anything else and for what does not tell."""
    if not issubclass(type(tensor), torch._C.TensorBase):
        return None
    fields = type_namespace(torch._C.TensorBase)
    try:
        with plain_reads(torch):
            elements = fields["numel"](tensor)
            node = fields["grad_fn"].__get__(tensor)
            nbytes = elements * fields["element_size"](tensor)
            wants_gradient = fields["requires_grad"].__get__(tensor)
            copy = "{0}.detach().clone().requires_grad_()" if wants_gradient else "{0}.clone()"
            if issubclass(type(tensor), torch.nn.Parameter):
                copy = f"type({{0}})({{0}}.detach().clone(), requires_grad={wants_gradient})"
            return TensorFacts(nbytes, elements, node and type_name(node), copy)
    except Exception:
        return None
