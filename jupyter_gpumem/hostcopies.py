"""Tensors and arrays on the host that came from the simulated GPU: what is computed from them is marked too."""

import ast
import builtins
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jupyter_gpumem.readouts import Readout, is_users, marked_number, note_decision

_CALL = "__gpumem_read__"  # in ``builtins``: the cells of a notebook call it
_MAKING = ("float", "array", "asarray")
# of these numpy gives a plain number even where the array is of a class of its user's
_ARRAY_METHODS = "sum mean prod min max std var argmin argmax any all item tolist __getitem__"
_DECIDING = ("__bool__", "__int__")


class ReadCalls(ast.NodeTransformer):
    """Rewrites the calls in a cell that would lose a mark: ``float(x)``, ``np.array(x)``, ``np.asarray(x)``."""

    def visit_Call(self, node: ast.Call) -> ast.AST:  # ast looks for this name
        """Return ``__gpumem_read__(float, x)`` for ``float(x)``."""
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None)
        if name not in _MAKING or not node.args:
            return node
        reader = ast.copy_location(ast.Name(_CALL, ast.Load()), node)
        return ast.copy_location(ast.Call(reader, [node.func, *node.args], node.keywords), node)


def watch_copies(torch: ModuleType) -> None:
    """Mark from here on what code of the user's copies from a device to the host."""
    marks = _Marks(torch)
    setattr(builtins, _CALL, marks.read_call)
    for name in ("cpu", "to", "numpy"):
        setattr(torch.Tensor, name, marks.copying(getattr(torch.Tensor, name)))


class _Marks:
    """Marks tensors, arrays and numbers by classes of their own, that of arrays made once numpy is in use."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._tensor = _tensor_class(torch, self.mark)
        self._array: Any = None

    def copying(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        """Mark what a method copies from a device, where the user's code calls it."""

        @functools.wraps(copy)
        def copied(tensor: Any, *arguments: Any, **options: Any) -> Any:
            result = copy(tensor, *arguments, **options)
            return self.mark(result) if tensor.is_cuda and is_users(1) else result

        return copied

    def read_call(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """Call a function that makes a number or an array, and mark what it makes of something read."""
        result = function(*arguments, **options)
        return self.mark(result) if self._is_read(arguments[0]) else result

    def _is_read(self, value: Any) -> bool:
        if type(value) in (list, tuple):
            return any(map(self._is_read, value))
        is_on_device = isinstance(value, self._torch.Tensor) and value.is_cuda
        return is_on_device or type(value) in (Readout, self._tensor, self._array)

    def mark(self, value: Any) -> Any:
        """Return a value, and what a list or tuple contains, so that it tells when something is decided by it."""
        kind = type(value)
        if kind in (list, tuple) or kind.__module__ == "torch.return_types":
            return kind(map(self.mark, value))
        if isinstance(value, self._torch.Tensor):
            return value if value.is_cuda or kind is self._tensor else value.as_subclass(self._tensor)
        if kind.__module__ == "numpy":
            return self._mark_array(value)
        return marked_number(value)

    def _mark_array(self, value: Any) -> Any:
        import numpy

        if self._array is None:
            self._array = _array_class(numpy, self.mark)
        if isinstance(value, numpy.ndarray):
            return value.view(self._array)
        # a number: an array without dimensions counts and shows as one
        return numpy.asarray(value).view(self._array) if isinstance(value, numpy.number | numpy.bool_) else value


def _tensor_class(torch: ModuleType, mark: Callable[[Any], Any]) -> type:
    """Make the class of tensors that were read; what is computed from them is of it too, unless it is on a device."""

    def torch_function(_class: Any, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return mark(function(*arguments, **(options or {})))

    def bare(name: str) -> Callable[..., Any]:  # saved and copied as a plain tensor
        return lambda tensor, argument: getattr(tensor.as_subclass(torch.Tensor), name)(argument)

    own: dict[str, Any] = {name: bare(name) for name in ("__reduce_ex__", "__deepcopy__")}
    own |= {"__torch_function__": classmethod(torch_function), "__module__": __name__}
    return type("Tensor", (torch.Tensor,), own)


def _array_class(numpy: ModuleType, mark: Callable[[Any], Any]) -> type:
    """Make the class of arrays that were read; what is computed from them is of it too."""
    plain = numpy.ndarray

    def bare(value: Any) -> Any:
        return value.view(plain) if isinstance(value, plain) else value

    def ufunc(_array: Any, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if "out" in options:
            options["out"] = tuple(map(bare, options["out"]))
        return mark(getattr(function, method)(*map(bare, inputs), **options))

    def marking(name: str) -> Callable[..., Any]:
        def marked(array: Any, *arguments: Any, **options: Any) -> Any:
            return mark(getattr(bare(array), name)(*arguments, **options))

        return marked

    def deciding(name: str) -> Callable[..., Any]:
        def decided(array: Any) -> Any:
            note_decision(1)
            return getattr(bare(array), name)()

        return decided

    own: dict[str, Any] = {name: marking(name) for name in _ARRAY_METHODS.split()}
    own |= {name: deciding(name) for name in _DECIDING}
    own |= {
        "__module__": __name__,
        "__array_ufunc__": ufunc,
        "__reduce__": lambda array: bare(array).__reduce__(),  # saved as a plain array
        "__round__": lambda array, *digits: round(array.item(), *digits),
        "__hash__": lambda array: hash(bare(array).item()),
    }
    return type("ndarray", (plain,), own)
