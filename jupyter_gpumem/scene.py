"""What one scan of the heap found, by the names a user knows."""

import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from jupyter_gpumem.activations import Activations
from jupyter_gpumem.passes import read_activations
from jupyter_gpumem.tensors import Key, LiveTensors
from jupyter_gpumem.where import module_names

_BATCH_NAME = re.compile(r"bs|b|n|batch|.*batch.*", re.IGNORECASE)


class Scene:
    """What one scan found, by the names a user knows. Holds the heap: lives within one call."""

    def __init__(self, live: LiveTensors, torch: ModuleType, names: dict[str, Any], device: int | None) -> None:
        self.live, self.torch, self.names, self.device = live, torch, names, device
        self.activations: Activations = read_activations(live, torch, device)
        passes = self.activations.passes()
        self.largest = max(passes, key=lambda one: one.nbytes, default=self.activations)
        """The graph that saved most: one forward pass, where several are kept."""
        self.latest = passes[0] if passes else self.activations
        self.modules = module_names((names,))
        self.roots = [(name, value) for name, value in names.items() if self.modules.get(id(value)) == name]

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
        if isinstance(value, dict):
            value = list(value.values())
        items = value if type(value) in (list, tuple) else (value,)
        return [item for item in items if id(item) in self.live.graph.tensors]  # type: ignore[attr-defined]

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

    def nbytes_of(self, tensors: Iterable[Any]) -> int:
        """Return the bytes of the storages of some tensors, each once."""
        keys = {key for tensor in tensors for key in self.live.keys_of(id(tensor))}
        return sum(self.live.storages[key].nbytes for key in keys)
