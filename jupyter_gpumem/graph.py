"""What torch's C++ side refers to: gradients, autograd nodes, saved tensors, script modules."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from jupyter_gpumem.attributes import plain_attribute
from jupyter_gpumem.guarded import PythonRefusedError, is_profiled, without_python
from jupyter_gpumem.heap import Clock, Heap, subclasses_of, type_mro, type_namespace

Link = Literal["gradient", "graph", "next", "saved", "hook", "variable", "inner", "base", "storage", "script"]
"""How the C++ side refers to something."""

_STACK_BYTES_PER_NODE = 250
_USUAL_STACK_BYTES = 6 * 1024**2
_LARGEST_STACK_BYTES = 112 * 1024**2  # Linux keeps 128 MiB free below a stack that was small at start

_Getter = Callable[[Any], Any]


@dataclass(slots=True)
class LiveGraph:
    """Every tensor, storage, script module and autograd node that can be reached; holds them all.

    ``links`` gives, by the address of an object, what it refers to on the C++ side and how. ``made`` are the
    wrappers that had to be made to look: no Python object referred to them before.
    """

    objects: dict[int, Any] = field(default_factory=dict)
    tensors: dict[int, Any] = field(default_factory=dict)
    links: dict[int, list[tuple[Any, Link]]] = field(default_factory=dict)
    made: list[Any] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    """Why something was not looked at, in words."""

    def parents(self) -> dict[int, list[Any]]:
        """Return the links backwards: holders by the address of what they hold."""
        parents: dict[int, list[Any]] = {}
        for address, links in self.links.items():
            holder = self.objects[address]
            for child, _how in links:
                parents.setdefault(id(child), []).append(holder)
        return parents


@contextmanager
def plain_reads(torch: ModuleType) -> Iterator[None]:
    """Read tensors as they are: no subclass, mode or dispatch code of the user runs within."""
    with ExitStack() as guards:
        guards.enter_context(torch._C.DisableTorchFunction())
        guards.enter_context(torch._C._DisableTorchDispatch())
        yield


def live_graph(heap: Heap, torch: ModuleType, clock: Clock) -> LiveGraph:
    """Find every tensor and walk the autograd graph forward from all of them and from every node Python knows."""
    reader = TorchReader(torch)
    seeds = heap.of_kinds(reader.kinds())
    graph = LiveGraph()
    with plain_reads(torch):
        _walk(seeds, reader, graph, clock)
    known = set(map(id, seeds))
    graph.made = [item for address, item in graph.objects.items() if address not in known]
    graph.unread |= reader.unread
    return graph


def leave_room_to_free(nodes: int) -> bool:
    """Let the stack grow so far that a chain of so many graph nodes can be freed; tell whether it can.

    A node that Python has looked at is freed by recursion in torch (seen with 2.14: 100,000 nodes in a row
    overflow 8 MiB), so looking must not be what makes the user's next ``del`` crash. The main thread's stack
    grows up to its soft limit, which may be raised at any time.
    """
    needed = nodes * _STACK_BYTES_PER_NODE
    if needed <= _USUAL_STACK_BYTES:
        return True
    try:
        import resource
    except ImportError:  # Windows fixes the stack at start
        return False
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = needed + _USUAL_STACK_BYTES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return True
    if wanted > _LARGEST_STACK_BYTES or (hard != resource.RLIM_INFINITY and hard < wanted):
        return False
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    return True


def _walk(seeds: Iterable[Any], reader: "TorchReader", graph: LiveGraph, clock: Clock) -> None:
    stack = list(seeds)
    objects, links = graph.objects, graph.links
    nodes = 0
    while stack:
        item = stack.pop()
        address = id(item)
        if address in objects:
            continue
        objects[address] = item
        is_tensor, read = reader.of(type(item))
        if is_tensor:
            graph.tensors[address] = item
        found = read(item)
        nodes += not is_tensor
        if (len(objects) + 1) % 4096 == 0:
            clock.check("autograd graph")
            if not leave_room_to_free(nodes):
                graph.unread.add(f"a graph of more than {nodes:,} nodes: those beyond")
                return
        if found:
            links[address] = found
            stack.extend(child for child, how in found if how != "hook" and reader.is_known(type(child)))


class TorchReader:
    """Reads the C++ references of each type of torch object, through torch's own descriptors only."""

    def __init__(self, torch: ModuleType) -> None:
        base = torch._C.TensorBase
        self.unread: set[str] = set()
        self._torch = torch
        self._tensors = subclasses_of(base)
        self._storages = subclasses_of(torch._C.StorageBase)
        script = getattr(getattr(torch.jit, "_script", None), "RecursiveScriptModule", None)
        self._scripts = {} if script is None else subclasses_of(script)
        self._nodes = subclasses_of(torch._C._FunctionBase)
        # C++ nodes have no common base but object
        for kind in type.__subclasses__(object):
            if "next_functions" in type_namespace(kind):
                self._nodes[id(kind)] = kind
        fields = type_namespace(base)
        self._is_leaf: _Getter = fields["is_leaf"].__get__
        self._retains: _Getter = fields["retains_grad"].__get__
        self._grad: _Getter = fields["grad"].__get__
        self._grad_fn: _Getter = fields["grad_fn"].__get__
        self._base: _Getter = fields["_base"].__get__
        self._storage_of: _Getter = fields["untyped_storage"]
        self._layout: _Getter = fields["layout"].__get__
        self._is_nested: _Getter = fields["is_nested"].__get__
        self._fields = fields
        self._saved_type: type = torch._C._autograd.SavedTensor
        self._saved_readable = "data" in type_namespace(self._saved_type)
        self._readers: dict[int, tuple[bool, Callable[[Any], list[tuple[Any, Link]]]]] = {}

    def kinds(self) -> dict[int, type]:
        """Return every type worth looking at."""
        return {**self._tensors, **self._nodes, **self._storages, **self._scripts}

    def is_known(self, kind: type) -> bool:
        """Tell whether objects of a type have C++ references to follow."""
        address = id(kind)
        known = address in self._tensors or address in self._storages or address in self._nodes
        return known or self._learn_node(kind)

    def of(self, kind: type) -> tuple[bool, Callable[[Any], list[tuple[Any, Link]]]]:
        """Return whether a type is a tensor's and how to read its references."""
        found = self._readers.get(id(kind))
        if found is None:
            found = self._readers[id(kind)] = self._make(kind)
        return found

    def _make(self, kind: type) -> tuple[bool, Callable[[Any], list[tuple[Any, Link]]]]:
        if id(kind) in self._tensors:
            return True, self._tensor
        if id(kind) in self._scripts:
            return False, self._script
        if id(kind) in self._storages:
            return False, lambda _storage: []
        return False, self._node_reader(kind)

    def _learn_node(self, kind: type) -> bool:
        # a node type of a C++ extension comes to Python when its first node does
        if is_node_type(kind):
            self._nodes[id(kind)] = kind
            return True
        return False

    def _tensor(self, tensor: Any) -> list[tuple[Any, Link]]:
        links: list[tuple[Any, Link]] = []
        try:
            # asking any other tensor for its gradient prints a warning
            if self._is_leaf(tensor) or self._retains(tensor):
                gradient = self._grad(tensor)
                if gradient is not None:
                    links.append((gradient, "gradient"))
            # a view whose base was changed in place may refuse
            node = self._grad_fn(tensor)
            if node is not None:
                links.append((node, "graph"))
            base = self._base(tensor)
            if base is not None:
                links.append((base, "base"))
        except Exception as error:
            self.unread.add(f"the graph of a tensor: {type(error).__name__}")
        try:
            # the storage's Python object stays with it once it was asked for: its holder is the tensor
            links.append((self._storage_of(tensor), "storage"))
        except Exception:  # sparse, lazy, wrapped or what a user's class makes of it
            links.extend((inner, "inner") for inner in self._wrapped(tensor))
        return links

    def _wrapped(self, tensor: Any) -> list[Any]:
        """Return the tensors inside one that has no storage: functorch's, functional, sparse or nested ones."""
        try:
            if self._torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                return [self._torch._C._functorch.get_unwrapped(tensor)]
            if self._torch._is_functional_tensor(tensor):
                return [self._torch._from_functional_tensor(tensor)]
            with self._torch.no_grad():
                names = _PARTS.get(str(self._layout(tensor)), ("values",) if self._is_nested(tensor) else ())
                return [self._fields[name](tensor) for name in names]
        except (ValueError, RuntimeError):
            pass  # so a lazy parameter says that it has nothing; a wrapper's inner tensors are seen by Python anyhow
        except Exception as error:
            self.unread.add(f"a wrapped tensor: {type(error).__name__}")
        return []

    def _node_reader(self, kind: type) -> Callable[[Any], list[tuple[Any, Link]]]:
        fields: dict[str, Any] = {}
        for base in reversed(type_mro(kind)):
            # only torch's own types: a custom Function's class may define the same names
            if base is self._torch._C._FunctionBase or (type(base) is type and not _is_user_class(base)):
                fields.update(type_namespace(base))
        follow = fields["next_functions"].__get__ if "next_functions" in fields else None
        variable = fields["variable"].__get__ if "variable" in fields else None
        read_saved = self._saved if self._saved_readable else self._unpacked
        saved = [fields[name].__get__ for name in self._saved_names(fields)]

        def read(node: Any) -> list[tuple[Any, Link]]:
            links: list[tuple[Any, Link]] = []
            if follow is not None:
                with suppress(RuntimeError):  # a Function whose forward still runs has none yet (torch 2.6)
                    links.extend((child, "next") for child, _input in follow(node) if child is not None)
            if variable is not None and (leaf := variable(node)) is not None:
                links.append((leaf, "variable"))
            for getter in saved:
                read_saved(node, getter, links)
            return links

        return read

    def _saved_names(self, fields: Mapping[str, Any]) -> list[str]:
        names = [name for name in fields if name.startswith("_raw_saved_")]
        if self._saved_readable:
            return names
        # a custom Function calls them saved_tensors, every other node _saved_...
        plain = [(name.removeprefix("_raw"), name.removeprefix("_raw_")) for name in names]
        return [own if own in fields else custom for own, custom in plain]

    def _saved(self, node: Any, getter: _Getter, links: list[tuple[Any, Link]]) -> None:
        try:
            value = getter(node)
        except RuntimeError:  # backward has freed it
            return
        saved: Any  # a SavedTensor, whose class has no annotations
        several: Iterable[Any] = value if issubclass(type(value), (tuple, list)) else (value,)
        for saved in several:
            if id(type(saved)) != id(self._saved_type):
                continue
            # `.data` runs no hook, where the `_saved_…` attributes run the user's forward again under checkpointing
            data = saved.data
            if data is not None:
                links.append((data, "saved"))
            hook = saved.unpack_hook
            if hook is not None:
                links.append((hook, "hook"))

    def _unpacked(self, node: Any, getter: _Getter, links: list[tuple[Any, Link]]) -> None:
        """Read saved tensors where a SavedTensor does not show its data (torch 2.6), or else what its hook holds."""
        if is_profiled():
            self.unread.add("tensors saved for backward: this torch shows them only while no profiler is running")
            return
        try:
            value = without_python(getter, node)
        except RuntimeError:  # backward has freed it
            return
        except PythonRefusedError as refused:  # a hook of the user's would have run
            links.extend((held, "hook") for held in refused.args if gc.is_tracked(held))
            return
        several: Iterable[Any] = value if issubclass(type(value), (tuple, list)) else (value,)
        links.extend((tensor, "saved") for tensor in several if id(type(tensor)) in self._tensors)

    def _script(self, module: Any) -> list[tuple[Any, Link]]:
        """Return the parameters and buffers of a ScriptModule, which live in C++ only."""
        try:
            cpp = plain_attribute(module, "_c")
            if cpp is None:
                return []
            native = self._torch._C
            tensors = [*native.ParameterDict(cpp).items(), *native.BufferDict(cpp).items()]
            return [(tensor, "script") for _name, tensor in tensors]
        except Exception as error:
            self.unread.add(f"a script module: {type(error).__name__}")
            return []


_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.sparse_csr": _COMPRESSED_ROWS,
    "torch.sparse_bsr": _COMPRESSED_ROWS,
    "torch.sparse_csc": _COMPRESSED_COLUMNS,
    "torch.sparse_bsc": _COMPRESSED_COLUMNS,
}


def is_node_type(kind: type) -> bool:
    """Tell whether a type is that of an autograd node: they have no common base class."""
    return any("next_functions" in type_namespace(base) for base in type_mro(kind))


def _is_user_class(kind: type) -> bool:
    """Tell whether a class was made by a ``class`` statement: only those carry ``__module__`` of their own."""
    return "__module__" in type_namespace(kind)
