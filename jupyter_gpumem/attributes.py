"""Attributes of any object, read without running any code of the user's."""

from collections.abc import Callable
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from jupyter_gpumem.heap import type_mro, type_namespace

_type_name: Callable[[type], str] = type.__dict__["__name__"].__get__
_type_module: Callable[[type], object] = type.__dict__["__module__"].__get__


def type_name(item: object) -> str:
    """Return the name of an object's exact type, without asking the object."""
    return _type_name(type(item))


def class_name(kind: type) -> str:
    """Return the name of a class, without asking its metaclass."""
    return _type_name(kind)


def type_module(item: object) -> str:
    """Return the module that an object's exact type says it is from, without asking the object."""
    module = _type_module(type(item))
    return module if type(module) is str else ""


def attribute_of(parent: object, child: object) -> str | None:
    """Return the attribute of ``parent`` that is ``child``: a slot, a C field, or one in no dict yet.

    The attributes of an instance whose ``__dict__`` nobody has asked for lie in the instance itself, and
    asking would make the dict. The names to try are those the class's own methods use; one that the class
    defines is left out, since reading it could run the user's code. Where none fits the dict is asked for.
    """
    return _slot(parent, child) or _inline(parent, child) or _in_dict(parent, child)


def plain_attribute(item: object, name: str) -> object:
    """Return an attribute that lies in the instance itself, None where there is none or its class defines one."""
    if any(name in type_namespace(base) for base in type_mro(type(item))):
        return None
    try:
        return object.__getattribute__(item, name)
    except (AttributeError, TypeError):
        return None


def instance_dict(item: object) -> dict[str, Any] | None:
    """Return the dict of an instance's attributes, None where it has none; makes one that was not there."""
    for base in type_mro(type(item)):
        field = type_namespace(base).get("__dict__")
        # modules and simple namespaces have it as a member
        if isinstance(field, (GetSetDescriptorType, MemberDescriptorType)):
            try:
                found = field.__get__(item)
            except (AttributeError, TypeError):
                continue
            return found if issubclass(type(found), dict) else None
    return None


def is_instance_dict(parent: object, child: object) -> bool:
    """Tell whether ``child`` is the dict of the attributes of ``parent``."""
    if not issubclass(type(child), dict) or _inline(parent, child) is not None:
        return False
    return instance_dict(parent) is child


def is_part_of(owner: object, above: object, item: object) -> bool:
    """Tell whether ``item`` is the dict of an owner's attributes, or one of them, ``above`` being what leads to it."""
    return owner is not None and (above is owner or is_instance_dict(owner, above) or is_instance_dict(owner, item))


def is_guarded(owner: object) -> bool:
    """Tell whether deleting an attribute runs code of the user's, or is refused as by a frozen dataclass."""
    bases = [type_namespace(base) for base in type_mro(type(owner))]
    for method in ("__setattr__", "__delattr__"):
        function = next((base[method] for base in bases if method in base), None)
        # torch's own does what one expects
        if type(function) is FunctionType and not str(function.__globals__.get("__name__")).startswith("torch."):
            return True
    return False


def _slot(parent: object, child: object) -> str | None:
    for base in type_mro(type(parent)):
        for name, field in type_namespace(base).items():
            if type(field) is MemberDescriptorType and name != "__dict__":
                try:
                    value = field.__get__(parent)
                except (AttributeError, TypeError):
                    continue
                if value is child:
                    return str(name)
    return None


def _inline(parent: object, child: object) -> str | None:
    names: dict[str, None] = {}
    taken: set[str] = set()
    for base in type_mro(type(parent)):
        for name, field in type_namespace(base).items():
            taken.add(name)
            if type(field) is FunctionType:
                names.update(dict.fromkeys(field.__code__.co_names))
    for name in names:
        if name not in taken:
            try:
                if object.__getattribute__(parent, name) is child:
                    return name
            except (AttributeError, TypeError):
                continue
    return None


def _in_dict(parent: object, child: object) -> str | None:
    for key, value in (instance_dict(parent) or {}).items():
        if value is child and type(key) is str and key.isidentifier():
            return key
    return None
