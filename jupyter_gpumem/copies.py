"""Models and checkpoints on the device that are copies of another model, by their shapes."""

from collections.abc import Iterable, Iterator
from typing import Any

from jupyter_gpumem.advised import Advice
from jupyter_gpumem.heap import type_namespace
from jupyter_gpumem.passes import parameters_of
from jupyter_gpumem.scene import Scene
from jupyter_gpumem.tensors import Key


def find_copies(scene: Scene) -> Iterator[Advice]:
    """Find modules and checkpoints with the very shapes of an earlier model."""
    known: dict[tuple[Any, ...], str] = {}
    taken: set[Key] = set()
    for name, module in scene.roots:
        own = list(parameters_of(module))
        keys = {key for tensor in own for key in scene.live.keys_of(id(tensor))}
        first = known.setdefault(_shapes(scene, own), name)
        # a wrapper, such as torch.compile's, has the parameters of the model it wraps
        if first != name and keys and not keys & taken:
            label = f"{name}: a model of the same shape as {first}"
            yield Advice("duplicate", label, scene.nbytes_of(own), f"{name}.cpu()", f"or del {name}")
        taken |= keys
    for name, value in scene.names.items():
        if not issubclass(type(value), dict) or name.startswith("_"):
            continue
        tensors = scene.tensors_in(value)
        shapes = _shapes(scene, tensors)
        model = next((known[wanted] for wanted in known if wanted and _covers(shapes, wanted)), None)
        nbytes = scene.nbytes_of(one for one in tensors if not taken.intersection(scene.live.keys_of(id(one))))
        if model is not None and nbytes:
            label = f"{name}: a checkpoint of {model}"
            code = f"{name} = {for_each(name, value, 'cpu()')}"
            yield Advice("duplicate", label, nbytes, code, 'torch.load(..., map_location="cpu") puts none on the GPU')


def _shapes(scene: Scene, tensors: Iterable[Any]) -> tuple[Any, ...]:
    shape = type_namespace(scene.torch._C.TensorBase)["shape"].__get__
    return tuple(sorted(tuple(shape(tensor)) for tensor in tensors))


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
