"""Numbers that a program reads off the simulated GPU and decides something by: their true values are not known."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jupyter_gpumem import simgpu
from jupyter_gpumem.where import is_of_library

_KEEPING = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ "
    "__neg__ __pos__ __abs__"
)
_DECIDING = (
    "__lt__ __le__ __gt__ __ge__ __eq__ __ne__ __bool__ __int__ __floor__ __ceil__ __trunc__ "
    "__floordiv__ __rfloordiv__ __mod__ __rmod__ __divmod__"
)
_COPIES = "jupyter_gpumem.hostcopies"
_decisions = 0


def decisions() -> int:
    """Return how often the program has decided something by a number from a device since :func:`watch`.

    Counted is what code of the user's does: a whole number made of a floating-point one, a comparison, a truth
    value; of numbers that went to the host in a tensor or an array too.
    """
    return _decisions


class Readout(float):
    """A number from a device: a float that counts what is decided by it, and by what is computed from it."""

    __slots__ = ()
    __hash__ = float.__hash__

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """Be saved as a plain float."""
        return float, (float(self),)

    def __round__(self, digits: Any = None) -> Any:
        """Decide something as a whole number; rounded to digits it is only shown."""
        if digits is not None:
            return Readout(float.__round__(self, digits))
        note_decision(1)
        return float.__round__(self)


def _keeping(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def kept(*operands: Any) -> Any:
        result = operation(*operands)
        return marked_number(result)

    return kept


def _deciding(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def decided(*operands: Any) -> Any:
        note_decision(1)
        return operation(*operands)

    return decided


for _name in _KEEPING.split():
    setattr(Readout, _name, _keeping(getattr(float, _name)))
for _name in _DECIDING.split():
    setattr(Readout, _name, _deciding(getattr(float, _name)))


def is_users(depth: int) -> bool:
    """Tell whether code of the user's called the function that is ``depth`` calls above the one that asks.

    torch's own code, and that of other libraries, branches for its own sake: on overflows, on masks.
    """
    return not is_of_library(sys._getframe(depth + 1).f_code.co_filename)


def note_decision(depth: int) -> None:
    """Count something that is decided by a number, where the user's code does it; see :func:`is_users`."""
    global _decisions
    _decisions += is_users(depth + 1)


def marked_number(value: Any) -> Any:
    """Return a number from a device so that it counts what is decided by it."""
    return Readout(value) if type(value) is float else value


def watch(torch: ModuleType) -> None:
    """Count from here on what is decided by numbers from a device."""
    # a saved number of ours is the call float(0.0), which torch.load must know to be harmless
    torch.serialization.add_safe_globals([float])
    tensor = torch.Tensor
    tensor.item = _marking(tensor.item)
    tensor.tolist = _marking(tensor.tolist)
    for name in ("__bool__", "__int__", "__index__"):
        setattr(tensor, name, _reading(getattr(tensor, name)))


def _marking(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def marked(tensor: Any) -> Any:
        value = read(tensor)
        return _mark(value) if tensor.is_cuda else value

    return marked


def _mark(value: Any) -> Any:
    if type(value) is list:
        return [_mark(one) for one in value]
    return marked_number(value)


def _reading(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def counted(tensor: Any) -> Any:
        before = simgpu.sizes_read()
        value = read(tensor)
        # what the device itself has counted is not counted twice; a class of its own marks what was copied from one
        is_read = tensor.is_cuda or type(tensor).__module__ == _COPIES
        if is_read and simgpu.sizes_read() == before:
            note_decision(1)
        return value

    return counted
