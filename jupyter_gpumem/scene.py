"""What one scan of the heap found, by the names a user knows."""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from types import FunctionType, ModuleType
from typing import Any

from jupyter_gpumem.activations import Activations
from jupyter_gpumem.attributes import plain_attribute
from jupyter_gpumem.frames import local_variables
from jupyter_gpumem.heap import is_exactly
from jupyter_gpumem.living import Living, find_living
from jupyter_gpumem.passes import parameters_of, read_activations, read_tensors
from jupyter_gpumem.tensors import Key, LiveTensors, sizes_of
from jupyter_gpumem.where import Spot, calls_of, forwards_of, is_recording, module_names, owner_of

_BATCH_NAME = re.compile(r"bs|b|n|batch|.*batch.*", re.IGNORECASE)
_FUNCTIONAL = ("torch/nn/functional.py", "torch\\nn\\functional.py")
_NOTHING = Activations(())
_CHECKPOINTS = "torch.utils.checkpoint"
_LITTLE = 16 * 1024**2
_ENGINE = "_engine_run_backward"  # where torch waits for its engine


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
        borders: Sequence[object] = (),
        hidden_bytes: int = 0,
    ) -> None:
        self.live, self.torch, self.names, self.device = live, torch, names, device
        self.notebook = notebook
        """The names among them that are the notebook's own."""
        self.hidden_bytes = hidden_bytes
        """What no Python object explains, at a failure: made by C++ code that still runs."""
        self.activations: Activations = read_activations(live, torch, device)
        calls = [frame for frame, _line in spots if frame.f_code.co_name != "<module>"]
        called = [value for frame in calls for _name, value in local_variables(frame)]
        # IPython's own names lead to IPython, which keeps the last error
        visible = [value for name, value in names.items() if not name.startswith("_")]
        self._living = find_living(called, visible, borders, live) if spots else Living()
        passes = [one for one in self.activations.passes() if one.nbytes and not self._living.is_dead(one.steps)]
        self.largest = max(passes, key=lambda one: one.nbytes, default=_NOTHING)
        """The graph that saved most: one forward pass, where several are kept; at a failure none of before."""
        self.latest = next((one for one in passes if self._living.is_under_way(one.steps)), _NOTHING)
        """The graph of the pass under way; without one what the running calls of a network hold."""
        self.forwards = forwards_of(spots, torch)
        """The networks whose forward pass is under way, outermost first."""
        in_calls = self._held_by_calls(spots)
        self._in_calls = set(map(id, in_calls))
        if not self.latest.nbytes and spots:
            self.latest = read_tensors(live, torch, in_calls, device)
            if is_recording(spots, torch):
                self.largest = self.latest
        self._all_passes = passes
        self.steps = {id(owner_of(frame)) for frame in calls_of(torch.optim.Optimizer, spots)[:1]}
        """The address of the optimizer whose step is under way."""
        self.in_backward = any(frame.f_code.co_name == _ENGINE for frame, _line in spots)
        """Whether a backward pass is under way."""
        engine = next((at for at, (frame, _line) in enumerate(spots) if frame.f_code.co_name == _ENGINE), len(spots))
        self.recomputes = bool(forwards_of(spots[engine:], torch)) or (self.in_backward and self._has_checkpoints())
        """Whether the backward pass runs a forward pass once more, as checkpointing does: no graph has all it keeps."""
        if self.recomputes:
            under_way = [one for key, one in live.graph.tensors.items() if self._living.is_under_way((key,))]
            self.latest = read_tensors(live, torch, under_way, device)
        losses = (str(frame.f_code.co_filename).endswith(_FUNCTIONAL) for frame, _line in spots)
        self._is_computing = bool(self.forwards) or any(losses)
        self.at_failure = bool(spots)
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

    def is_model(self, name: str) -> bool:
        """Tell whether a variable is a module or an optimizer."""
        return issubclass(type(self.names.get(name)), (self.torch.nn.Module, self.torch.optim.Optimizer))

    @cached_property
    def optimizers(self) -> dict[str, tuple[Any, list[Any]]]:
        """The optimizers by the code that names them, each once, with their parameters."""
        found: dict[str, tuple[Any, list[Any]]] = {}
        known = set[int]()
        for name, value in self.names.items():
            for code, one in _members(name, value):
                if issubclass(type(one), self.torch.optim.Optimizer) and id(one) not in known and name[:1] != "_":
                    known.add(id(one))
                    groups: Any = plain_attribute(one, "param_groups")
                    found[code] = (one, [own for group in groups or () for own in group["params"]])
        return found

    @cached_property
    def optimized(self) -> frozenset[int]:
        """The addresses of the parameters that an optimizer has."""
        return frozenset(id(one) for _optimizer, own in self.optimizers.values() for one in own)

    def gradients_of(self, parameters: Iterable[Any]) -> list[Any]:
        """Return the gradients that some parameters have."""
        links = self.live.graph.links
        return [grad for one in parameters for grad, how in links.get(id(one), ()) if how == "gradient"]

    def batch_name(self, samples: int) -> str | None:
        """Return the variable that is a number of samples, by the look of its name."""
        numbers = (name for name, value in self.names.items() if type(value) is int and value == samples)
        return next((name for name in numbers if _BATCH_NAME.fullmatch(name)), None)

    def tensors_in(self, value: object) -> list[Any]:
        """Return the tensors that a value is or directly contains."""
        if issubclass(type(value), dict):
            items: Iterable[Any] = tuple(dict.values(value))  # type: ignore[arg-type]  # asked above
        else:
            items = tuple(value) if is_exactly(value, (list, tuple)) else (value,)  # type: ignore[arg-type]
        return [item for item in items if id(item) in self.live.graph.tensors]

    def batch(self, one: Activations) -> tuple[int, int]:
        """Return the number of samples of a pass and the bytes that grow with it.

        Where no graph has all of them, because a forward pass is run once more or C++ code has them, they are
        told by the shapes of all tensors of the calls under way that have no other role. At a failure the results
        that the next step was about to take grow too, saved or not.
        """
        samples, nbytes = self._samples(one)
        is_hidden = self.in_forward and self.hidden_bytes > max(self.latest.nbytes, _LITTLE)
        if self.recomputes or is_hidden:
            samples, _nbytes = self._samples(self.latest)
            grown = self._grown(samples, self.live.graph.tensors)
            return samples, sum(self.live.storages[key].nbytes for key in grown) + self.hidden_bytes
        if self.in_forward and one is self.latest:
            saved = one.saved()
            results = self._grown(samples, self._results)
            nbytes += sum(self.live.storages[key].nbytes for key in results if key not in saved)
        return samples, nbytes

    def _grown(self, samples: int, addresses: Iterable[int]) -> set[Key]:
        """Return the storages of the calls under way, among tensors by address, whose shapes go with the batch."""
        return {
            key
            for address in addresses
            if samples > 1 and self._living.is_under_way((address,)) and address not in self._living.dead
            if any(rows and rows % samples == 0 for rows in sizes_of(self.live.graph.tensors[address], self.torch)[:2])
            for key in self.live.keys_of(address)
            if self.live.storages[key].role in ("other", "saved for backward") and self.device in (None, key[0])
        }

    @cached_property
    def _results(self) -> set[int]:
        """The addresses of what the pass under way has made and its calls still have, its inputs among them.

        A data set that a function holds is none: no step of the pass made it, no network is called with it.
        """
        links, steps = self.live.graph.links, self.latest.steps
        return self._in_calls | {
            address
            for address in self.live.graph.tensors
            if any(how == "graph" and id(node) in steps for node, how in links.get(address, ()))
            or not self._living.is_used(address)
        }

    def _samples(self, one: Activations) -> tuple[int, int]:
        """Return the samples of a pass; some layers take their batch as the second dimension by default."""
        if any(plain_attribute(module, "batch_first") is False for module in self.live.modules):
            samples, nbytes = one.batch(1)
            if samples > 1:
                return samples, nbytes
        return one.batch()

    @property
    def has_other_passes(self) -> bool:
        """Whether graphs of several passes are kept."""
        return len(self._all_passes) > 1

    @property
    def in_forward(self) -> bool:
        """Whether a forward pass, or the loss after it, is under way: what is asked for grows with its batch."""
        return not self.steps and (self.recomputes or (not self.in_backward and self._is_computing))

    def in_graph(self, parameters: Iterable[Any]) -> bool:
        """Tell whether a graph that is alive leads to one of some parameters."""
        return not self._in_graphs.isdisjoint(map(id, parameters))

    @cached_property
    def _in_graphs(self) -> frozenset[int]:
        return frozenset(node.parameter for node in self.activations.nodes if node.parameter is not None)

    def made_alike(self, parameters: set[int]) -> list[Activations]:
        """Return the graphs of some parameters, by address, that were made as the latest of them was.

        A network in evaluation mode may also have graphs that were made before, when it was trained.
        """
        own = [one for one in self._all_passes if one.trains(parameters)]
        steps = [Counter(node.kind for node in one.nodes) for one in own]
        alike = steps[:1]
        if self.at_failure and len(own) > 1 and steps[0] <= steps[1]:  # the latest is not complete
            alike = steps[:2]
        return [one for one, kinds in zip(own, steps, strict=True) if kinds in alike]

    def held_by_variables(self, *, with_graphs: bool = False) -> set[Key]:
        """Return the storages of tensors that variables hold, such as a batch of inputs; by default without graph."""
        links = self.live.graph.links
        return {
            key
            for value in self.names.values()
            for tensor in self.tensors_in(value)
            if with_graphs or not any(how == "graph" for _node, how in links.get(id(tensor), ()))
            for key in self.live.keys_of(id(tensor))
        }

    def _has_checkpoints(self) -> bool:
        hooks = (child for found in self.live.graph.links.values() for child, how in found if how == "hook")
        return any(type(one) is FunctionType and one.__globals__.get("__name__") == _CHECKPOINTS for one in hooks)

    def _held_by_calls(self, spots: Sequence[Spot]) -> list[Any]:
        """Return what the running calls of a network hold: under ``no_grad`` and in compiled code there is no graph."""
        calls = calls_of(self.torch.nn.Module, spots)
        if self.forwards and issubclass(type(self.forwards[-1]), self.torch.nn.RNNBase):
            # its initial states have the batch as their second dimension, whatever its input has
            calls = [frame for frame in calls if frame.f_code.co_name != "forward"]
        values = (value for frame in calls for _name, value in local_variables(frame))
        return list({id(one): one for value in values for one in self.tensors_in(value)}.values())

    def nbytes_of(self, tensors: Iterable[Any]) -> int:
        """Return the bytes on the device of the storages of some tensors, each once."""
        keys = {key for tensor in tensors for key in self.live.keys_of(id(tensor))}
        return sum(self.live.storages[key].nbytes for key in keys if self.device in (None, key[0]))


def _members(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Give a value, and what a list, tuple or dict directly contains, with the code that names it."""
    yield name, value
    if type(value) in (list, tuple):
        yield from ((f"{name}[{number}]", one) for number, one in enumerate(value))  # type: ignore[arg-type,var-annotated]
    elif type(value) is dict:
        yield from ((f"{name}[{key!r}]", one) for key, one in value.items() if type(key) in (str, int))
