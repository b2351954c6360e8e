"""What the collector does not see: saved tensors that Python code keeps, and what numpy arrays of objects hold."""

from collections.abc import Collection
from types import ModuleType
from typing import Any, cast

from jupyter_gpumem.graph import Link, LiveGraph
from jupyter_gpumem.heap import Heap, subclasses_of

_MOST_ITEMS = 1_000_000


def add_untracked(graph: LiveGraph, heap: Heap, torch: ModuleType, wanted: Collection[int]) -> bool:
    """Add what holds some objects, by address, though the collector does not see it; tell whether there is any new."""
    import numpy as np

    saved = torch._C._autograd.SavedTensor
    arrays = subclasses_of(np.ndarray)
    # a subclass of arrays is tracked, and the collector does not see its items either
    waiting = [*heap.referents_of_kinds({id(saved): saved, **arrays}), *heap.of_kinds(arrays)]
    items: dict[int, Any] = {}
    links: dict[int, list[tuple[Any, Link]]] = {}
    holders: dict[int, list[int]] = {}
    while waiting:
        item = waiting.pop()
        if id(item) in items:
            continue
        items[id(item)] = item
        if type(item) is saved:
            found: list[tuple[Any, Link]] = [(item.data, "saved")] if getattr(item, "data", None) is not None else []
        else:
            found = _array_links(item)
        links[id(item)] = found
        for held, _how in found:
            holders.setdefault(id(held), []).append(id(item))
            if id(type(held)) in arrays:
                waiting.append(held)
    leading, stack = set[int](), list(wanted)
    while stack:
        new = [address for address in holders.get(stack.pop(), ()) if address not in leading]
        leading.update(new)
        stack += new
    leading -= {address for address in leading if address in graph.objects}
    for address in leading:
        graph.objects[address] = items[address]
        graph.links[address] = links[address]
    return bool(leading)


def _array_links(array: Any) -> list[tuple[Any, Link]]:
    """Return the objects that a numpy array holds: its items, or the array whose items it shows."""
    import numpy as np

    base = np.ndarray.base.__get__(array)
    if issubclass(type(base), np.ndarray):
        return [(base, "base")] if np.ndarray.dtype.__get__(base).hasobject else []
    plain = np.ndarray.view(array, np.ndarray)
    if not plain.dtype.hasobject or plain.size > _MOST_ITEMS:
        return []
    return [(held, "inner") for held in _items(plain)]


def _items(array: Any) -> list[Any]:
    """Return the objects in a plain numpy array, in all of its fields where it has some."""
    if array.dtype.names is None:
        return cast("list[Any]", array.ravel().tolist()) if array.dtype == object else []
    fields = [name for name in array.dtype.names if array.dtype[name].hasobject]
    return [item for name in fields for item in _items(array[name])]


def is_array(item: object) -> bool:
    """Tell whether an object is a numpy array."""
    import numpy as np

    return issubclass(type(item), np.ndarray)


def place_in_array(array: Any, item: object) -> str | None:
    """Return the code that follows an array's name to give one of its objects, None where it is no item of it."""
    import numpy as np

    if np.ndarray.base.__get__(array) is item:
        return ".base"
    return _place(np.ndarray.view(array, np.ndarray), item)


def _place(array: Any, item: object) -> str | None:
    for name in array.dtype.names or ():
        within = _place(array[name], item) if array.dtype[name].hasobject else None
        if within is not None:
            return f"[{name!r}]{within}"
    place = next((place for place, one in enumerate(_items(array)) if one is item), None)
    if array.dtype.names is not None or place is None:
        return None
    index: tuple[int, ...] = ()
    for length in reversed(array.shape):
        place, here = divmod(place, length)
        index = (here, *index)
    return f"[{', '.join(map(str, index)) or '()'}]"
