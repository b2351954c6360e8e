"""What the autograd graph saved for backward, as figures: by sample and by block."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from jupyter_gpumem.tensors import Key

_MOST_DIMENSIONS = 50
_STATISTICS = 0.05  # a part of the saved bytes that may have other leading dimensions: norms, indices


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor saved for backward; ``nbytes`` are its storage's.

    ``operand`` tells which operand of the step it is, for operations that save what they take; else it is None.
    """

    key: Key
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    is_weight: bool
    operand: int | None = None


@dataclass(slots=True)
class Node:
    """A step of the graph, without the objects: what it saved, what it comes after, and its parameter."""

    kind: str
    saved: list[Saved] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)
    """Positions of the steps it comes after, with which of their results it takes."""
    operands: tuple[int | None, ...] = ()
    """The position of the step that made each operand, None for one that needs no gradient."""
    result_bytes: tuple[int, ...] = ()
    sequence: int = 0
    """The order in which the steps were made."""
    parameter: int | None = None
    """The address of the tensor that gets the gradient, for the last step of backward."""
    address: int = 0
    """Where the step's object was while the graph was read."""

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

    @property
    def steps(self) -> frozenset[int]:
        """Where the objects of the steps were, those left out that end in a parameter: several passes share them."""
        return frozenset(node.address for node in self.nodes if node.parameter is None)

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
            operands = tuple(None if one is None else position.get(one) for one in self.nodes[index].operands)
            nodes.append(replace(self.nodes[index], after=after, operands=operands))
        return Activations(tuple(nodes))

    def trains(self, parameters: Iterable[int]) -> bool:
        """Tell whether a gradient would go to one of some parameters, by address."""
        wanted = set(parameters)
        return any(node.parameter in wanted for node in self.nodes if node.parameter is not None)

    def batch(self, dimension: int = 0) -> tuple[int, int]:
        """Return the number of samples, as far as shapes tell, and the bytes that grow with it.

        It is the largest number that divides the leading dimension, or the one given of three and more, of nearly
        all that is saved: a layer that flattens ``(batch, time, …)`` saves ``batch * time`` rows.
        """
        saved = self.saved().values()
        total = sum(one.nbytes for one in saved)
        leading: dict[int, int] = {}
        for one in saved:
            if len(one.shape) > 1:
                rows = one.shape[dimension if len(one.shape) > 2 else 0]
                leading[rows] = leading.get(rows, 0) + one.nbytes
        largest = sorted(leading, key=lambda rows: -leading[rows])[:_MOST_DIMENSIONS]
        for size in sorted({math.gcd(a, b) for a in largest for b in largest}, reverse=True):
            growing = sum(nbytes for rows, nbytes in leading.items() if size and rows % size == 0)
            if size > 1 and growing >= (1 - _STATISTICS) * total:
                return size, growing
        return 1, total

    def checkpointed_bytes(self, blocks: Iterable[Block], held: Container[Key] = ()) -> tuple[int, int]:
        """Return what checkpointing each of some blocks would give back, and the largest of them, in bytes.

        A step belongs to the last block whose parameters it depends on; it comes after all blocks where it
        takes a parameter of no block. What enters a block stays, as do the storages in ``held``.
        """
        levels = self._levels(blocks)
        self._move_first_steps(levels)
        inside: dict[int, dict[Key, int]] = {}
        outside: set[Key] = set()
        entering: dict[tuple[int, int], int] = {}
        for index, node in enumerate(self.nodes):
            level = levels[index]
            for one in node.saved:
                if one.is_weight or one.key in held:
                    continue
                if level is None:
                    outside.add(one.key)
                else:
                    inside.setdefault(level, {})[one.key] = one.nbytes
            entering.update({edge: self._result_bytes(edge) for edge in self._entering(index, levels)})
        outside |= self._first_inputs(levels)
        everything = {key: nbytes for found in inside.values() for key, nbytes in found.items()}
        freed = {key: nbytes for key, nbytes in everything.items() if key not in outside}
        largest = max((sum(found.values()) for found in inside.values()), default=0)
        return max(sum(freed.values()) - sum(entering.values()), 0), largest

    def _first_inputs(self, levels: list[int | None]) -> set[Key]:
        """Return what enters a block that no step leads to: a batch of inputs, which no step has made."""
        led_to = {levels[index] for index in range(len(levels)) if any(True for _edge in self._entering(index, levels))}
        found: set[Key] = set()
        of_weights: list[bool] = []  # whether a step makes something of weights alone
        for level, node in zip(levels, self.nodes, strict=True):
            own = {one.key for one in node.saved if not one.is_weight}
            is_first = all(of_weights[before] for before, _result in node.after)
            of_weights.append(is_first and not own)
            if is_first and level is not None and level not in led_to:
                found |= own
        return found

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
