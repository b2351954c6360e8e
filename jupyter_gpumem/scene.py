"""What one scan of the heap found, by the names a user knows."""

import re
from collections.abc import Container, Iterable, Sequence
from types import ModuleType
from typing import Any

from jupyter_gpumem.activations import Activations
from jupyter_gpumem.attributes import plain_attribute
from jupyter_gpumem.frames import local_variables
from jupyter_gpumem.heap import is_exactly
from jupyter_gpumem.passes import parameters_of, read_activations, read_tensors
from jupyter_gpumem.tensors import Key, LiveTensors
from jupyter_gpumem.where import Spot, calls_of, is_recording, module_names

_BATCH_NAME = re.compile(r"bs|b|n|batch|.*batch.*", re.IGNORECASE)


class Scene:
    """What one scan found, by the names a user knows. Holds the heap: lives within one call."""

    def __init__(
        self,
        live: LiveTensors,
        torch: ModuleType,
        names: dict[str, Any],
        device: int | None,
        spots: Sequence[Spot] = (),
        notebook: Container[str] = (),
    ) -> None:
        self.live, self.torch, self.names, self.device = live, torch, names, device
        self.notebook = notebook
        """The names among them that are the notebook's own."""
        self.activations: Activations = read_activations(live, torch, device)
        passes = [one for one in self.activations.passes() if one.nbytes] or [self.activations]
        self.largest = max(passes, key=lambda one: one.nbytes)
        """The graph that saved most: one forward pass, where several are kept."""
        self.latest = passes[0]
        """The graph of the pass under way; without one what the running calls of a network hold."""
        if not self.activations.nbytes and spots:
            self.latest = self._held_by_calls(spots)
            if is_recording(spots, torch):
                self.largest = self.latest
        self.in_step = bool(calls_of(torch.optim.Optimizer, spots))
        """Whether an optimizer's step is under way."""
        self.modules = module_names((names,))
        self.roots = [(name, value) for name, value in names.items() if self.modules.get(id(value)) == name]

    @property
    def trained(self) -> list[tuple[str, Any]]:
        """Modules by name whose parameters the largest pass would give gradients."""
        return [(name, one) for name, one in self.roots if self.largest.trains(map(id, parameters_of(one)))]

    @property
    def is_evaluation(self) -> bool:
        """Whether every network of the largest pass is in evaluation mode."""
        modes = [plain_attribute(module, "training") for _name, module in self.trained]
        return bool(modes) and not any(modes)

    def role_bytes(self, role: str) -> int:
        """Return the bytes of the storages that serve as ``role``."""
        return sum(
            facts.nbytes
            for (index, _address), facts in self.live.storages.items()
            if facts.role == role and self.device in (None, index)
        )

    def name_of(self, kind: type) -> str | None:
        """Return the variable that is an instance of a class."""
        found = (name for name, value in self.names.items() if issubclass(type(value), kind))
        return next((name for name in found if not name.startswith("_")), None)

    def whole_number(self, dividing: int) -> str | None:
        """Return the variable that is, or divides, a number of samples, by the look of its name."""
        numbers = {name: value for name, value in self.names.items() if type(value) is int and value > 1}
        named = {name: value for name, value in numbers.items() if _BATCH_NAME.fullmatch(name)}
        equal = (name for name, value in named.items() if value == dividing)
        return next(equal, None) or next((name for name, value in named.items() if dividing % value == 0), None)

    def batch_size(self, samples: int) -> tuple[str, int]:
        """Return the variable that holds the batch size, with its value; a usual name where there is none."""
        name = self.whole_number(samples)
        return ("batch_size", samples) if name is None else (name, self.names[name])

    def tensors_in(self, value: object) -> list[Any]:
        """Return the tensors that a value is or directly contains."""
        if issubclass(type(value), dict):
            items: Iterable[Any] = tuple(dict.values(value))  # type: ignore[arg-type]  # asked above
        else:
            items = tuple(value) if is_exactly(value, (list, tuple)) else (value,)  # type: ignore[arg-type]
        return [item for item in items if id(item) in self.live.graph.tensors]

    def held_by_variables(self) -> set[Key]:
        """Return the storages of tensors without a graph that variables hold, such as a batch of inputs."""
        links = self.live.graph.links
        return {
            key
            for value in self.names.values()
            for tensor in self.tensors_in(value)
            if not any(how == "graph" for _node, how in links.get(id(tensor), ()))
            for key in self.live.keys_of(id(tensor))
        }

    def _held_by_calls(self, spots: Sequence[Spot]) -> Activations:
        """Return what the running calls of a network hold: under ``no_grad`` and in compiled code there is no graph."""
        values = (value for frame in calls_of(self.torch.nn.Module, spots) for _name, value in local_variables(frame))
        tensors = {id(one): one for value in values for one in self.tensors_in(value)}
        return read_tensors(self.live, self.torch, tensors.values(), self.device)

    def nbytes_of(self, tensors: Iterable[Any]) -> int:
        """Return the bytes of the storages of some tensors, each once."""
        keys = {key for tensor in tensors for key in self.live.keys_of(id(tensor))}
        return sum(self.live.storages[key].nbytes for key in keys)
