"""What the autograd graph saved for backward, as figures: by sample, by block, under autocast."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from jupyter_gpumem.attributes import plain_attribute, type_name
from jupyter_gpumem.graph import is_node_type, plain_reads
from jupyter_gpumem.heap import type_mro, type_namespace
from jupyter_gpumem.tensors import Key, LiveTensors

# what autocast runs in half precision, and what it keeps in float32 (torch.amp, "CUDA Ops"), by node
_HALF = frozenset(
    (
        "Addmm",
        "Mm",
        "Bmm",
        "Baddbmm",
        "Addbmm",
        "Addmv",
        "Mv",
        "Linear",
        "Convolution",
        "PreluKernel",
        "Matmul",
    )
)
_FULL = frozenset(
    (
        *(
            "NativeLayerNorm",
            "NativeGroupNorm",
            "FusedRmsNorm",
            "Softmax",
            "Softplus",
            "NllLoss",
            "NllLoss2D",
        ),
        *(
            "MseLoss",
            "L1Loss",
            "SmoothL1Loss",
            "HuberLoss",
            "BinaryCrossEntropyWithLogits",
            "KlDiv",
            "Pow",
            "Exp",
        ),
        *("Expm1", "Log", "Log1P", "Log2", "Log10", "Logsumexp", "Sum", "Prod", "Cumsum", "Cumprod", "Rsqrt"),
        *(
            "Reciprocal",
            "LinalgVectorNorm",
            "Norm",
            "CosineSimilarity",
            "Dist",
            "Cdist",
            "Sinh",
            "Cosh",
            "Tan",
        ),
    )
)
_RECURRENT = ("Lstm", "Gru", "Rnn")
_MOST_DIMENSIONS = 50
_STATISTICS = 0.05  # a part of the saved bytes that may have other leading dimensions: norms, indices


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor saved for backward; ``nbytes`` are its storage's."""

    key: Key
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    is_weight: bool


@dataclass(slots=True)
class Node:
    """A step of the graph, without the objects: what it saved, what it comes after, and its parameter."""

    kind: str
    saved: list[Saved] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)
    """Positions of the steps it comes after, with which of their results it takes."""
    result_bytes: tuple[int, ...] = ()
    sequence: int = 0
    """The order in which the steps were made."""
    parameter: int | None = None
    """The address of the tensor that gets the gradient, for the last step of backward."""

    @property
    def operation(self) -> str:
        """The name of the operation: ``Addmm`` of ``AddmmBackward0``."""
        return self.kind.rstrip("0123456789").removesuffix("Backward")


@dataclass(frozen=True, slots=True)
class Block:
    """A module of which the model has several in a row: its container's path, class, and parameters."""

    container: str
    kind: str
    number: int
    parameters: frozenset[int]


@dataclass(frozen=True, slots=True)
class Activations:
    """The graph as plain figures; every step stands after those it depends on."""

    nodes: tuple[Node, ...]

    def saved(self) -> dict[Key, Saved]:
        """Return what is saved, by storage, without parameters and buffers."""
        return {one.key: one for node in self.nodes for one in node.saved if not one.is_weight}

    @property
    def nbytes(self) -> int:
        """The bytes that are saved, parameters and buffers left out."""
        return sum(one.nbytes for one in self.saved().values())

    def passes(self) -> list["Activations"]:
        """Return the graphs that have no step in common, such as those of several losses, the latest first."""
        group = list(range(len(self.nodes)))

        def root(index: int) -> int:
            while group[index] != index:
                group[index] = group[group[index]]
                index = group[index]
            return index

        for index, node in enumerate(self.nodes):
            for other, _result in node.after:
                if self.nodes[other].parameter is None:
                    group[root(index)] = root(other)
        members: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            if node.parameter is None:
                members.setdefault(root(index), []).append(index)
        found = [self._part(indices) for indices in members.values()]
        return sorted(found, key=lambda part: -max(node.sequence for node in part.nodes))

    def _part(self, indices: list[int]) -> "Activations":
        """Return some steps by themselves, with the parameters they take."""
        wanted = set(indices)
        wanted.update(other for index in indices for other, _result in self.nodes[index].after)
        order = sorted(wanted)
        position = {index: place for place, index in enumerate(order)}
        nodes = []
        for index in order:
            after = [(position[other], result) for other, result in self.nodes[index].after if other in position]
            nodes.append(replace(self.nodes[index], after=after))
        return Activations(tuple(nodes))

    def trains(self, parameters: Iterable[int]) -> bool:
        """Tell whether a gradient would go to one of some parameters, by address."""
        wanted = set(parameters)
        return any(node.parameter in wanted for node in self.nodes if node.parameter is not None)

    def batch(self) -> tuple[int, int]:
        """Return the number of samples, as far as shapes tell, and the bytes that grow with it.

        It is the largest number that divides the leading dimension of nearly all that is saved: a layer that
        flattens ``(batch, time, …)`` saves ``batch * time`` rows.
        """
        saved = self.saved().values()
        total = sum(one.nbytes for one in saved)
        leading: dict[int, int] = {}
        for one in saved:
            if len(one.shape) > 1:
                leading[one.shape[0]] = leading.get(one.shape[0], 0) + one.nbytes
        largest = sorted(leading, key=lambda rows: -leading[rows])[:_MOST_DIMENSIONS]
        for size in sorted({math.gcd(a, b) for a in largest for b in largest}, reverse=True):
            growing = sum(nbytes for rows, nbytes in leading.items() if size and rows % size == 0)
            if size > 1 and growing >= (1 - _STATISTICS) * total:
                return size, growing
        return 1, total

    def under_autocast_bytes(self, held: Container[Key]) -> int | None:
        """Return what would be saved had the forward pass run under ``torch.autocast``, in bytes.

        Storages in ``held`` stay whatever is saved: only a copy of theirs counts. None for recurrent layers,
        whose copies depend on the library that runs them.
        """
        if any(name in node.kind for node in self.nodes for name in _RECURRENT):
            return None
        is_half: list[bool] = []
        kept: dict[tuple[Key, int | None], int] = {}
        for index, node in enumerate(self.nodes):
            half_inside = self._runs_in_half(node, is_half)
            is_half.append(half_inside)
            before = [is_half[other] for other, _result in node.after if self.nodes[other].parameter is None]
            # autocast keeps its copies of weights for the next use, of nothing else
            copy = index if _is_cast(node) and not (before and all(before)) else -1
            for one in node.saved:
                if one.dtype == "torch.float32" and half_inside and not _is_statistic(node, one):
                    if not one.is_weight or _is_cast(node):
                        kept[one.key, -1 if one.is_weight else copy] = one.nbytes // 2
                elif not one.is_weight and one.key not in held:
                    kept[one.key, None] = one.nbytes
        return sum(kept.values())

    def _runs_in_half(self, node: Node, is_half: list[bool]) -> bool:
        """Tell whether a step's result has half precision under autocast: as what it takes has."""
        if _is_cast(node):
            return True
        inputs = [index for index, _result in node.after]
        if "BatchNorm" in node.kind:  # its weights do not widen its result
            inputs = [index for index in inputs if self.nodes[index].parameter is None]
        return node.operation not in _FULL and bool(inputs) and all(is_half[index] for index in inputs)

    def checkpointed_bytes(self, blocks: Iterable[Block]) -> tuple[int, int]:
        """Return what checkpointing each of some blocks would give back, and the largest of them, in bytes.

        A step belongs to the last block whose parameters it depends on; it comes after all blocks where it
        takes a parameter of no block. What enters a block stays.
        """
        levels = self._levels(blocks)
        self._move_first_steps(levels)
        inside: dict[int, dict[Key, int]] = {}
        outside: set[Key] = set()
        entering: dict[tuple[int, int], int] = {}
        for index, node in enumerate(self.nodes):
            level = levels[index]
            for one in node.saved:
                if one.is_weight:
                    continue
                if level is None:
                    outside.add(one.key)
                else:
                    inside.setdefault(level, {})[one.key] = one.nbytes
            entering.update({edge: self._result_bytes(edge) for edge in self._entering(index, levels)})
        everything = {key: nbytes for found in inside.values() for key, nbytes in found.items()}
        freed = {key: nbytes for key, nbytes in everything.items() if key not in outside}
        largest = max((sum(found.values()) for found in inside.values()), default=0)
        return max(sum(freed.values()) - sum(entering.values()), 0), largest

    def _levels(self, blocks: Iterable[Block]) -> list[int | None]:
        """Return the block of each step, None for what comes before all of them or behind the last."""
        numbers = {parameter: block.number for block in blocks for parameter in block.parameters}
        levels: list[int | None] = []
        steps: list[list[int]] = [[] for _number in range(max(numbers.values(), default=-1) + 1)]
        behind: set[int] = set()
        for index, node in enumerate(self.nodes):
            if node.parameter is not None:
                levels.append(numbers.get(node.parameter))
                continue
            before = [levels[other] for other, _result in node.after]
            level = max((one for one in before if one is not None), default=None)
            strange = any(self._is_strange(other, numbers) for other, _result in node.after)
            if (level is not None and strange) or any(other in behind for other, _result in node.after):
                behind.add(index)
                level = None
            if level is not None:
                steps[level].append(index)
            levels.append(level)
        # a loss without parameters hangs on the last block: alike blocks have as many steps
        for index in steps[-1][max(map(len, steps[:-1]), default=0) :] if len(steps) > 1 else ():
            levels[index] = None
        return levels

    def _is_strange(self, index: int, numbers: Mapping[int, int]) -> bool:
        parameter = self.nodes[index].parameter
        return parameter is not None and parameter not in numbers

    def _entering(self, index: int, levels: list[int | None]) -> Iterator[tuple[int, int]]:
        """Give what a step of a block takes from steps that are not the block's."""
        if levels[index] is not None and self.nodes[index].parameter is None:
            for before, result in self.nodes[index].after:
                if self.nodes[before].parameter is None and levels[before] != levels[index]:
                    yield before, result

    def _result_bytes(self, edge: tuple[int, int]) -> int:
        before, result = edge
        sizes = self.nodes[before].result_bytes
        return sizes[result] if result < len(sizes) else 0

    def _move_first_steps(self, levels: list[int | None]) -> None:
        """Give each block the steps that come before its first parameter: all from what enters it anyway."""
        entering: dict[int, set[int]] = {}
        for index, level in enumerate(levels):
            if level is not None:
                entering.setdefault(level, set()).update(before for before, _r in self._entering(index, levels))
        for level, found in entering.items():
            for index in sorted(found, reverse=True):
                for step in self._made_of(index, found - {index}):
                    levels[step] = level

    def _made_of(self, index: int, wanted: set[int]) -> set[int]:
        """Return the steps from some others to this one, where no parameter and nothing else goes in."""
        stack, met = [index], set[int]()
        while stack:
            step = stack.pop()
            if step in met or step in wanted:
                continue
            before = [other for other, _result in self.nodes[step].after]
            if not before or any(self.nodes[other].parameter is not None for other in before):
                return set()
            met.add(step)
            stack += before
        return met


def _is_cast(node: Node) -> bool:
    """Tell whether autocast casts what a step takes, weights included, to half precision."""
    return node.operation in _HALF or node.kind.startswith("ScaledDotProduct")


def _is_statistic(node: Node, one: Saved) -> bool:
    # the log-sum-exp of attention stays in float32
    return node.kind.startswith("ScaledDotProduct") and len(one.shape) == 3


def read_activations(live: LiveTensors, torch: ModuleType, device: int | None = None) -> Activations:
    """Read the graph of a scan as figures that hold nothing."""
    order = _in_order(live)
    positions = {id(item): index for index, item in enumerate(order)}
    with plain_reads(torch):
        reader = _Reader(live, torch, device)
        return Activations(tuple(reader.read(item, positions) for item in order))


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
        self._shape, self._dtype = fields["shape"].__get__, fields["dtype"].__get__
        self._sizes: dict[str, int] = {str(dtype): dtype.itemsize for dtype in _dtypes(torch)}

    def read(self, item: Any, positions: Mapping[int, int]) -> Node:
        node = Node(type_name(item))
        for child, how in self._live.graph.links.get(id(item), ()):
            if how == "saved":
                node.saved += self._saved(child)
            elif how == "variable":
                node.parameter = id(child)
        node.after = [
            (positions[id(child)], number)
            for child, number in _native(item, "next_functions") or ()
            if id(child) in positions
        ]
        number = _native(item, "_sequence_nr")
        # the steps that end in a parameter have the highest number there is
        node.sequence = 0 if number is None or node.parameter is not None else int(number())
        node.result_bytes = tuple(self._bytes_of(one) for one in _native(item, "_input_metadata") or ())
        return node

    def _saved(self, tensor: Any) -> Iterator[Saved]:
        for key in self._live.keys_of(id(tensor))[:1]:
            if self._device is None or key[0] == self._device:
                facts = self._live.storages[key]
                shape = tuple(self._shape(tensor))
                is_weight = facts.role in ("parameter", "buffer")
                yield Saved(key, facts.nbytes, str(self._dtype(tensor)), shape, is_weight)

    def _bytes_of(self, metadata: Any) -> int:
        if str(metadata.device)[:4] != "cuda":
            return 0
        elements = math.prod(int(size) for size in metadata.shape)
        return elements * self._sizes.get(str(metadata.dtype), 4)


def _native(node: Any, name: str) -> Any:
    """Read a field of a node that torch defines; a user's ``autograd.Function`` may define the same name."""
    for base in type_mro(type(node)):
        space = type_namespace(base)
        if name in space and "__module__" not in space:
            return space[name].__get__(node)
    return None


def _dtypes(torch: ModuleType) -> list[Any]:
    return [value for value in vars(torch).values() if type(value) is torch.dtype]


def find_blocks(live: LiveTensors, torch: ModuleType, names: Mapping[int, str]) -> dict[str, tuple[Block, ...]]:
    """Return the blocks that stand in a row in a ``ModuleList`` or ``Sequential``, by the row's path."""
    found: dict[str, tuple[Block, ...]] = {}
    for module in live.modules:
        path = names.get(id(module))
        if path is None or not issubclass(type(module), (torch.nn.ModuleList, torch.nn.Sequential)):
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
