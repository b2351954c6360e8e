"""Hooks of a model that one line of code registered many times: found together, removed together."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from jupyter_gpumem.attributes import instance_dict, plain_attribute, type_name
from jupyter_gpumem.heap import type_mro, type_namespace
from jupyter_gpumem.shares import Shares

MODULE_TABLES = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
    "_state_dict_hooks": "state_dict hooks",
    "_state_dict_pre_hooks": "state_dict pre-hooks",
    "_load_state_dict_pre_hooks": "load_state_dict pre-hooks",
    "_load_state_dict_post_hooks": "load_state_dict post-hooks",
}
"""The attributes of an ``nn.Module`` that keep hooks, and what torch's documentation calls them."""

TENSOR_TABLES = {
    "_backward_hooks": "hooks of parameters",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hooks of parameters",
}
"""The same of tensors."""

_MOST_MODULES = 20_000


@dataclass(frozen=True, slots=True)
class HookGroup:
    """Hooks of a model that share their code; ``count`` is how often they are registered, in ``table`` each time.

    ``name`` is the function's qualified name. With ``alone`` no other hook is in any of these tables.
    """

    hooks: tuple[object, ...]
    count: int
    table: str
    of_tensors: bool
    code: CodeType
    name: str
    alone: bool

    @property
    def words(self) -> str:
        """Say what they are, in torch's terms."""
        return (TENSOR_TABLES if self.of_tensors else MODULE_TABLES)[self.table]

    def removal(self, model: str) -> str:
        """Return the code that removes them, ``model`` being the code of the model."""
        table = f"(one.{self.table} or {{}})" if self.of_tensors else f"one.{self.table}"
        owners = f"for one in {model}.{'parameters' if self.of_tensors else 'modules'}()"
        # a comprehension leaves no name behind, and a semicolon no output
        if self.alone:
            return f"[{table}.clear() {owners}];"
        test = f"getattr(h, '__qualname__', '') == {self.name!r}"
        return f"[one.{self.table}.__delitem__(key) {owners} for key, h in list({table}.items()) if {test}];"


def hook_groups(model: object, torch: ModuleType) -> Iterator[HookGroup]:
    """Yield the hooks under a model that were registered more than once with the same code."""
    for table, of_tensors, found in _tables(model, torch):
        by_code: dict[CodeType, list[object]] = {}
        for hook in found:
            code = code_of(hook)
            if code is not None:
                by_code.setdefault(code, []).append(hook)
        names = [_name(hook) for hook in found]
        for code, hooks in by_code.items():
            name = _name(hooks[0])
            alone = len(hooks) == len(found)
            if len(hooks) > 1 and (alone or (name is not None and names.count(name) == len(hooks))):
                distinct = tuple({id(hook): hook for hook in hooks}.values())
                yield HookGroup(distinct, len(hooks), table, of_tensors, code, name or "", alone)


def structure_of(model: object, torch: ModuleType) -> set[int]:
    """Return the ids of the modules under a model and of the dicts that make it up."""
    known: set[int] = set()
    for module in _modules(model, torch):
        attributes = instance_dict(module) or {}
        known.update((id(module), id(attributes)))
        known.update(id(attributes.get(name)) for name in ("_modules", "_parameters", "_buffers", *MODULE_TABLES))
        known.update(id(table) for one in _values(attributes.get("_parameters")) for table in _of_tensor(one, torch))
    return known - {id(None)}


def goes_with(shares: Shares, above: int, nodes: Sequence[int]) -> list[int]:
    """Return what goes, of what a node keeps, when some nodes under it go: they, and what only they together keep."""
    removed = set(nodes)
    stays, stack = {above}, [above]
    while stack:
        for target in shares.graph.successors[stack.pop()]:
            if target not in stays and target not in removed and shares.is_under(target, above):
                stays.add(target)
                stack.append(target)
    found, stack = [], list(shares.children[above])
    while stack:
        node = stack.pop()
        if not shares.total(node):
            continue
        if node in stays:
            stack.extend(shares.children[node])
        else:
            found.append(node)
    return found


def code_of(hook: object) -> CodeType | None:
    """Return the code a hook runs; the program of a callable object is its class's."""
    for _layer in range(8):
        if type(hook) is FunctionType:
            return hook.__code__
        if type(hook) is MethodType:
            hook = hook.__func__
        elif issubclass(type(hook), functools.partial):
            hook = functools.partial.func.__get__(hook)
        elif type_name(hook) in ("_WrappedHook", "_WrappedTensorHook"):
            hook = plain_attribute(hook, "hook")
        else:
            spaces = map(type_namespace, type_mro(type(hook)))
            call = next((space["__call__"] for space in spaces if "__call__" in space), None)
            return call.__code__ if type(call) is FunctionType else None
    return None


def _name(hook: object) -> str | None:
    """Return what ``getattr(hook, "__qualname__", "")`` answers, None where asking could run code of the user's."""
    if type_name(hook) == "_WrappedHook":
        hook = plain_attribute(hook, "hook")
    if type(hook) is FunctionType:
        return hook.__qualname__
    return hook.__func__.__qualname__ if type(hook) is MethodType and type(hook.__func__) is FunctionType else None


def _modules(model: object, torch: ModuleType) -> list[object]:
    """Return the modules under a model by reading their dicts: no code of the user's runs."""
    found: dict[int, object] = {id(model): model}
    stack = [model]
    while stack and len(found) < _MOST_MODULES:
        children = (instance_dict(stack.pop()) or {}).get("_modules")
        for child in _values(children):
            if issubclass(type(child), torch.nn.Module) and id(child) not in found:
                found[id(child)] = child
                stack.append(child)
    return list(found.values())


def _tables(model: object, torch: ModuleType) -> Iterator[tuple[str, bool, list[object]]]:
    modules = _modules(model, torch)
    for table in MODULE_TABLES:
        yield table, False, [hook for module in modules for hook in _values((instance_dict(module) or {}).get(table))]
    parameters = {
        id(one): one for module in modules for one in _values((instance_dict(module) or {}).get("_parameters"))
    }
    for place, table in enumerate(TENSOR_TABLES):
        yield table, True, [hook for one in parameters.values() for hook in _values(_of_tensor(one, torch)[place])]


def _of_tensor(item: object, torch: ModuleType) -> tuple[object, ...]:
    """Return the tables of a tensor's hooks, None where it has none."""
    fields = type_namespace(torch._C.TensorBase)
    found: list[Any] = [fields.get(table) for table in TENSOR_TABLES]
    if not issubclass(type(item), torch._C.TensorBase):
        return (None,) * len(found)
    return tuple(None if field is None else field.__get__(item) for field in found)


def _values(table: object) -> list[object]:
    return list(dict.values(cast("dict[Any, object]", table))) if issubclass(type(table), dict) else []
