"""Hooks of a model that one line of code registered many times: found together, removed together."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, cast

from jupyter_gpumem.attributes import instance_dict, plain_attribute, type_name
from jupyter_gpumem.heap import type_mro, type_namespace

if TYPE_CHECKING:
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

HOOK_TABLES = tuple({**MODULE_TABLES, **TENSOR_TABLES})
"""The attributes of modules and tensors that keep hooks."""

_MOST_MODULES = 20_000


@dataclass(frozen=True, slots=True)
class HookGroup:
    """Hooks of a model that share their code; ``count`` is how often they are registered, in ``table`` each time.

    ``tables`` are these dicts by address: what is in nothing else goes with them. ``name`` is the function's
    qualified name. With ``alone`` no other hook is in any of these tables.
    """

    hooks: tuple[object, ...]
    tables: frozenset[int]
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
    for table, of_tensors, tables in _tables(model, torch):
        addresses = frozenset(map(id, tables))
        found = [hook for one in tables for hook in _values(one)]
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
                yield HookGroup(distinct, addresses, len(hooks), table, of_tensors, code, name or "", alone)


def structure_of(model: object, torch: ModuleType) -> set[int]:
    """Return the ids of the modules under a model and of the dicts that make it up."""
    known: set[int] = set()
    for module in _modules(model, torch):
        attributes = instance_dict(module) or {}
        known.update((id(module), id(attributes)))
        known.update(id(attributes.get(name)) for name in ("_modules", "_parameters", "_buffers", *MODULE_TABLES))
        known.update(id(table) for one in _values(attributes.get("_parameters")) for table in tensor_tables(one, torch))
    return known - {id(None)}


def goes_with(shares: "Shares", above: int, group: HookGroup) -> list[int]:
    """Return what goes, of what a model keeps, when a group of hooks goes: they, and what only they together keep.

    Nothing where one of them is elsewhere too: it would stay.
    """
    nodes = [shares.graph.nodes.get(id(hook)) for hook in group.hooks]
    removed = {node for node in nodes if node is not None and shares.is_under(node, above)}
    sources = {id(shares.graph.objects[source]) for node in removed for source in shares.outer_sources(node)}
    if len(removed) < len(nodes) or not sources <= group.tables:
        return []
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


def table_on(path: Sequence[object], torch: ModuleType) -> int | None:
    """Return where on a path of references a table of hooks lies, None where none does."""
    for place, owner in enumerate(path):
        if issubclass(type(owner), torch.nn.Module):
            attributes = instance_dict(owner) or {}
            tables = [attributes.get(table) for table in MODULE_TABLES]
        else:
            tables = list(tensor_tables(owner, torch))
        for later in range(place + 1, min(place + 3, len(path))):  # a module's dict may lie between
            if any(path[later] is table for table in tables if table is not None):
                return later
    return None


def code_of(hook: object) -> CodeType | None:
    """Return the code a hook runs; the program of a callable object is its class's."""
    for _layer in range(8):
        if type(hook) is FunctionType:
            return hook.__code__
        if type(hook) is MethodType:
            hook = hook.__func__
        elif issubclass(type(hook), functools.partial):
            hook = functools.partial.func.__get__(hook)
        elif type_name(hook) == "_WrappedHook":
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
    """Yield each kind of table, whether it is one of tensors, and all of that kind that are under a model."""
    attributes = [instance_dict(module) or {} for module in _modules(model, torch)]
    for table in MODULE_TABLES:
        yield table, False, [one.get(table) for one in attributes]
    parameters = {id(parameter): parameter for one in attributes for parameter in _values(one.get("_parameters"))}
    for place, table in enumerate(TENSOR_TABLES):
        yield table, True, [tensor_tables(one, torch)[place] for one in parameters.values()]


def tensor_tables(item: object, torch: ModuleType) -> tuple[object, ...]:
    """Return the tables of a tensor's hooks, None where it has none."""
    if not issubclass(type(item), torch._C.TensorBase):
        return (None,) * len(TENSOR_TABLES)
    fields: list[Any] = [type_namespace(torch._C.TensorBase).get(table) for table in TENSOR_TABLES]
    return tuple(None if field is None else field.__get__(item) for field in fields)


def _values(table: object) -> list[object]:
    return list(dict.values(cast("dict[Any, object]", table))) if issubclass(type(table), dict) else []
