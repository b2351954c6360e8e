"""Models and checkpoints on the device that are copies of another model, by their shapes."""

from collections.abc import Iterable, Iterator
from typing import Any

from jupyter_gpumem.advised import Advice
from jupyter_gpumem.passes import parameters_of
from jupyter_gpumem.scene import Scene
from jupyter_gpumem.tensors import Key, sizes_of


def find_copies(scene: Scene) -> Iterator[Advice]:
    """Find modules that nothing trains, and checkpoints, with the very shapes of another model."""
    known: dict[tuple[Any, ...], list[tuple[str, list[Any]]]] = {}
    taken: set[Key] = set()
    for name, module in scene.roots:
        own = list(parameters_of(module))
        keys = {key for tensor in own for key in scene.live.keys_of(id(tensor))}
        # a wrapper, such as torch.compile's, has the parameters of the model it wraps
        if keys and not keys & taken:
            known.setdefault(_shapes(scene, own), []).append((name, own))
        taken |= keys
    for models in known.values():
        idle = [(name, own) for name, own in models if not _is_at_work(scene, own)]
        at_work = [name for name, own in models if _is_at_work(scene, own)]
        first = at_work[0] if at_work else models[0][0]
        for name, own in idle if at_work else idle[1:]:
            label = f"{name}: a second model of the same shape as {first}, trained by nothing"
            yield Advice("duplicate", label, scene.nbytes_of(own), f"{name}.cpu()", "if it is only a copy")
    for name, value in scene.names.items():
        if not issubclass(type(value), dict) or name.startswith("_"):
            continue
        tensors = scene.tensors_in(value)
        shapes = _shapes(scene, tensors)
        model = next((known[wanted][0][0] for wanted in known if wanted and _covers(shapes, wanted)), None)
        nbytes = scene.nbytes_of(one for one in tensors if not taken.intersection(scene.live.keys_of(id(one))))
        if model is not None and nbytes:
            label = f"{name}: a checkpoint of {model}"
            code = f"{name} = {for_each(name, value, 'cpu()')}"
            yield Advice("duplicate", label, nbytes, code, 'torch.load(..., map_location="cpu") puts none on the GPU')


def _is_at_work(scene: Scene, parameters: list[Any]) -> bool:
    """Tell whether an optimizer, a gradient or a graph has to do with a model."""
    optimized = not scene.optimized.isdisjoint(map(id, parameters))
    return optimized or scene.in_graph(parameters) or bool(scene.gradients_of(parameters))


def _shapes(scene: Scene, tensors: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(sizes_of(tensor, scene.torch) for tensor in tensors))


def _covers(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    rest = list(found)
    for shape in wanted:
        if shape not in rest:
            return False
        rest.remove(shape)
    return True


def for_each(name: str, value: object, call: str) -> str:
    """Return code that calls a method on a tensor, or on each tensor of a container."""
    if issubclass(type(value), dict):
        return f"{{key: value.{call} for key, value in {name}.items()}}"
    if type(value) is list:
        return f"[item.{call} for item in {name}]"
    return f"tuple(item.{call} for item in {name})" if type(value) is tuple else f"{name}.{call}"
