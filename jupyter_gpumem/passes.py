"""Reading the autograd graph of a scan, and the rows of blocks in a model, as figures that hold nothing."""

import math
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from jupyter_gpumem.activations import Activations, Block, Node, Saved
from jupyter_gpumem.attributes import plain_attribute, type_name
from jupyter_gpumem.graph import is_node_type, plain_reads
from jupyter_gpumem.heap import type_mro, type_namespace
from jupyter_gpumem.tensors import LiveTensors, sizes_of

_OPERANDS = ("_raw_saved_self", "_raw_saved_other")


def read_activations(live: LiveTensors, torch: ModuleType, device: int | None = None) -> Activations:
    """Read the graph of a scan as figures that hold nothing."""
    order = _in_order(live)
    positions = {id(item): index for index, item in enumerate(order)}
    with plain_reads(torch):
        reader = _Reader(live, torch, device)
        return Activations(tuple(reader.read(item, positions) for item in order))


def read_tensors(live: LiveTensors, torch: ModuleType, tensors: Iterable[Any], device: int | None) -> Activations:
    """Read tensors that have no graph as one step that saved them, without weights and what else has a role."""
    with plain_reads(torch):
        reader = _Reader(live, torch, device)
        saved = [one for tensor in tensors for one in reader.saved(tensor, None)]
    return Activations((Node("", [one for one in saved if live.storages[one.key].role == "other"]),))


def _in_order(live: LiveTensors) -> list[Any]:
    """Return the graph's nodes, each after those it depends on; without recursion, graphs are deep."""
    ready: list[Any] = []
    state: dict[int, bool] = {}
    for item in live.graph.objects.values():
        stack = [item] if is_node_type(type(item)) else []
        while stack:
            top = stack[-1]
            done = state.get(id(top))
            if done is None:
                state[id(top)] = False
                stack += [
                    child
                    for child, how in live.graph.links.get(id(top), ())
                    if how == "next" and id(child) not in state
                ]
                continue
            stack.pop()
            if not done:
                state[id(top)] = True
                ready.append(top)
    return ready


class _Reader:
    """Reads nodes and tensors through torch's own descriptors: no property of a user's class runs."""

    def __init__(self, live: LiveTensors, torch: ModuleType, device: int | None) -> None:
        self._live, self._device = live, device
        fields = type_namespace(torch._C.TensorBase)
        self._torch, self._dtype = torch, fields["dtype"].__get__
        self._sizes: dict[str, int] = {str(dtype): dtype.itemsize for dtype in _dtypes(torch)}

    def read(self, item: Any, positions: Mapping[int, int]) -> Node:
        """Read one node of the graph."""
        node = Node(type_name(item), address=id(item))
        following = _native(item, "next_functions")
        if following is None:  # a Function whose forward failed or still runs: torch 2.6 crashes where the rest is read
            return node
        links = self._live.graph.links.get(id(item), ())
        operands = _operands(item) or _operands_in_order(item, [child for child, how in links if how == "saved"])
        for child, how in links:
            if how == "saved":
                node.saved += self.saved(child, operands.get(id(child)))
            elif how == "variable":
                node.parameter = id(child)
        node.operands = tuple(positions.get(id(child)) for child, _number in following)
        node.after = [(positions[id(child)], number) for child, number in following if id(child) in positions]
        number = _native(item, "_sequence_nr")
        # the steps that end in a parameter have the highest number there is
        node.sequence = 0 if number is None or node.parameter is not None else int(number())
        node.result_bytes = tuple(self._bytes_of(one) for one in _native(item, "_input_metadata") or ())
        return node

    def saved(self, tensor: Any, operand: int | None) -> Iterator[Saved]:
        """Give what is saved with a tensor on the device."""
        for key in self._live.keys_of(id(tensor))[:1]:
            if self._device is None or key[0] == self._device:
                facts = self._live.storages[key]
                shape = sizes_of(tensor, self._torch)
                is_weight = facts.role in ("parameter", "buffer")
                yield Saved(key, facts.nbytes, str(self._dtype(tensor)), shape, is_weight, operand)

    def _bytes_of(self, metadata: Any) -> int:
        if str(metadata.device)[:4] != "cuda":
            return 0
        try:
            shape = tuple(metadata.shape)
        except RuntimeError:  # a nested tensor, of which each part has a shape
            return 0
        elements = [size for size in shape if type(size) is int]
        # the symbols of a jagged one tell nothing either
        return math.prod(elements) * self._sizes.get(str(metadata.dtype), 4) if len(elements) == len(shape) else 0


def _operands(node: Any) -> dict[int, int]:
    """Return which operand a saved tensor is, by its address."""
    found = {}
    for number, name in enumerate(_OPERANDS):
        data = getattr(_native(node, name), "data", None)
        if data is not None:
            found[id(data)] = number
    return found


def _operands_in_order(node: Any, saved: list[Any]) -> dict[int, int]:
    """Return the same where a SavedTensor does not show its data (torch 2.6): all of them, in the type's order."""
    names = [name for name in type_namespace(type(node)) if name.startswith("_raw_saved_")]
    if len(names) != len(saved):
        return {}
    pairs = zip(names, saved, strict=True)
    return {id(one): _OPERANDS.index(name) for name, one in pairs if name in _OPERANDS}


def _native(node: Any, name: str) -> Any:
    """Read a field of a node that torch defines; a user's ``autograd.Function`` may define the same name."""
    for base in type_mro(type(node)):
        space = type_namespace(base)
        if name in space and "__module__" not in space:
            try:
                return space[name].__get__(node)
            except RuntimeError:  # backward has freed it, or the forward pass of a Function still runs (torch 2.6)
                return None
    return None


def _dtypes(torch: ModuleType) -> list[Any]:
    return [value for value in vars(torch).values() if type(value) is torch.dtype]


def find_blocks(live: LiveTensors, torch: ModuleType, names: Mapping[int, str]) -> dict[str, tuple[Block, ...]]:
    """Return the blocks that stand in a row in a ``ModuleList`` or ``Sequential``, by the row's path.

    The rows come in the order of ``names``, that of the model's definition; the heap knows none.
    """
    found: dict[str, tuple[Block, ...]] = {}
    live_modules = {id(module): module for module in live.modules}
    for address, path in names.items():
        module = live_modules.get(address)
        if module is None or not issubclass(type(module), (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        children = plain_attribute(module, "_modules")
        row = [child for child in children.values() if child is not None] if isinstance(children, dict) else []
        if len(row) > 1 and len({type(child) for child in row}) == 1:
            blocks = (
                Block(path, type_name(child), number, frozenset(id(tensor) for tensor in parameters_of(child)))
                for number, child in enumerate(row)
            )
            found[path] = tuple(blocks)
    return found


def parameters_of(module: object) -> Iterator[Any]:
    """Give the parameters of a module and all below it."""
    stack, seen = [module], set[int]()
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        parameters, children = plain_attribute(current, "_parameters"), plain_attribute(current, "_modules")
        if isinstance(parameters, dict):
            yield from (one for one in parameters.values() if one is not None)
        if isinstance(children, dict):
            stack += [one for one in children.values() if one is not None]
