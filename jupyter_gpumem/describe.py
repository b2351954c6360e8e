"""From shares of memory to holders: names, cells, remarks and remedies, as values that hold nothing."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.attributes import plain_attribute, type_name
from jupyter_gpumem.frames import Suspended
from jupyter_gpumem.graph import is_node_type
from jupyter_gpumem.heap import is_exactly, is_made_by_class
from jupyter_gpumem.held import RootHolder
from jupyter_gpumem.holders import Holder, Kind, Part, Release
from jupyter_gpumem.paths import Trail, walk
from jupyter_gpumem.provenance import CellFinder
from jupyter_gpumem.remedies import Remedy, Situation, remedy_for, together
from jupyter_gpumem.roots import Slot
from jupyter_gpumem.shares import Share, Shares
from jupyter_gpumem.tensors import TensorFacts, tensor_facts

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MOST_PARTS = 5
_MOST_WAYS = 4
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_post_accumulate_grad_hooks",
)


@dataclass(frozen=True, slots=True)
class _Draft:
    """What is said of a share, the same on every device."""

    path: str
    kind: Kind
    expression: str | None
    cell: int | None
    remedy: Remedy
    note: str = ""
    parts: tuple[tuple[str, int], ...] = ()
    hidden: bool = False


class Describer:
    """Names the shares of one held graph."""

    def __init__(self, shares: Shares, shell: "InteractiveShell | None", torch: ModuleType) -> None:
        self._shares = shares
        self._graph = shares.graph
        self._torch = torch
        self._in_shell = shell is not None
        self._cells = CellFinder(shell)
        self._shared_told: set[int] = set()

    def holders(self, share: Share) -> list[Holder]:
        """Return a share as one holder for each device where it has memory."""
        if share.garbage:
            draft = self._garbage(share)
        elif len(share.holders) == 1 or share.inner:
            draft = self._single(share)
        else:
            draft = self._joint(share)
        at_most = self._cpp_too(share)
        return [self._holder(share, draft, device, at_most) for device in self._shares.devices if share.own[device]]

    def _holder(self, share: Share, draft: _Draft, device: int, at_most: bool) -> Holder:
        shared, others = self._shared(share, device)
        return Holder(
            path=draft.path,
            kind=draft.kind,
            section="in use" if share.in_use and not draft.hidden else "gives back",
            device=device,
            keeps_bytes=max(0, share.keeps[device] - draft.remedy.less_bytes),
            shown_bytes=share.own[device],
            shared_bytes=shared,
            shared_with=others,
            count=share.count[device],
            expression=draft.expression,
            cell=draft.cell,
            note="; ".join(part for part in (draft.note, draft.remedy.note) if part),
            remedy=draft.remedy.code,
            releases=draft.remedy.releases,
            parts=self._parts(share, device, draft),
            at_most=at_most,
        )

    # -- one holder -------------------------------------------------------------------------------------

    def _single(self, share: Share) -> _Draft:
        holder = self._best(share)
        if share.members:
            return self._namespace(share, holder)
        cut = self._trail(holder, share.node)
        end = self._end(share.node)
        shown = self._first_parameter(self._trail(holder, end), end, share)
        item = self._graph.objects[end]
        if type_name(item) == "_lru_cache_wrapper":
            shown = replace(shown, text=f"cache of {shown.text} (lru_cache)", inside="cache")
        group, alike = self._group(end, shown.text)
        situation = self._situation(share, holder, cut, shown, end, alike)
        remedy = remedy_for(situation)
        path = ", ".join((group, *shown.via))
        note = self._note(holder, item, alike)
        return _Draft(
            path=path,
            kind=self._kind(holder, shown),
            expression=shown.code,
            cell=self._cell(holder, situation),
            remedy=remedy,
            note=note,
            parts=tuple(self._locals(share, holder)),
            hidden=share.in_use and ("._" in path or holder.kind != "variable"),
        )

    def _namespace(self, share: Share, holder: RootHolder) -> _Draft:
        """Describe the models and optimizers that one namespace has together."""
        trails = [self._trail(holder, member) for member in share.members]
        codes = [trail.code for trail in trails if trail.code is not None]
        code = f"del {', '.join(codes)}"
        releases = (Release("code", code=code),) if len(codes) == len(trails) else ()
        name = holder.slots[0].text
        return _Draft(
            path=", ".join(map(str, trails)),
            kind=holder.kind,
            expression=None,
            cell=self._cells.that_set(name) if holder.kind == "variable" else None,
            remedy=Remedy(code if releases else "", releases),
        )

    def _best(self, share: Share) -> RootHolder:
        """Return the holder the shortest path begins at."""
        first = self._graph.path_to(share.node)[0]
        return self._graph.holders.get(first, share.holders[0])

    def _first_parameter(self, trail: Trail, node: int, share: Share) -> Trail:
        """Go on from an optimizer whose model is gone to the parameters it still has."""
        optimizer = self._graph.objects[node]
        if share.in_use or not issubclass(type(optimizer), self._torch.optim.Optimizer):
            return trail
        groups = plain_attribute(optimizer, "param_groups")
        if type(groups) is list and groups and type(groups[0]) is dict and groups[0].get("params"):
            return trail.then(".param_groups[0]['params'][0]")
        return trail

    def _trail(self, holder: RootHolder, node: int) -> Trail:
        path = self._graph.path_to(node)
        chain = [self._graph.objects[step] for step in path[1:] if self._graph.objects[step] is not None]
        slot = self._slot(holder, chain[0] if chain else None)
        return walk(self._begin(holder, slot), chain) if chain else self._begin(holder, slot)

    def _begin(self, holder: RootHolder, slot: Slot) -> Trail:
        text = self._start(holder, slot)
        # which of the debugger's own attributes it is tells a user nothing
        source = text if holder.kind == "debugger" else ""
        return Trail(text, slot.code, source, verb=_verb(holder.kind))

    def _slot(self, holder: RootHolder, target: object) -> Slot:
        slots = [slot for slot in holder.slots if slot.target is target] or holder.slots
        return next((slot for slot in slots if slot.text.startswith("Out[")), slots[0])

    def _start(self, holder: RootHolder, slot: Slot) -> str:
        if holder.kind == "error":
            return f"the last error{self._error_words(holder)}"
        if holder.kind == "handling":
            return f"the exception being handled ({type_name(slot.target)})"
        if holder.kind == "unknown":
            return _unknown_words(slot.target)
        return slot.text

    def _error_words(self, holder: RootHolder) -> str:
        error = next((slot.target for slot in holder.slots if issubclass(type(slot.target), BaseException)), None)
        words = [] if error is None else [type_name(error)]
        cell = self._error_cell(holder)
        if cell is not None:
            words.append(f"cell {cell}")
        return f" ({', '.join(words)})" if words else ""

    def _error_cell(self, holder: RootHolder) -> int | None:
        for slot in holder.slots:
            trace = slot.target
            if issubclass(type(trace), BaseException):
                trace = BaseException.__dict__["__traceback__"].__get__(trace)
            if type_name(trace) == "traceback":
                return self._cells.of_traceback(trace)
        return None

    def _end(self, node: int) -> int:
        """Go on from what is let go to what it keeps, as long as there is one thing to name."""
        while True:
            item = self._graph.objects[node]
            if item is None and node not in self._graph.holders:
                return self._graph.dominator[node]
            if node in self._graph.memory or self._is_end(item):
                return node
            carriers = self._shares.carriers(node)
            if not carriers or (len(carriers) > 1 and self._is_collection(item)):
                return node
            if self._graph.objects[carriers[0]] is None:
                return node
            node = carriers[0]

    def _is_end(self, item: object) -> bool:
        kind = type(item)
        ends = (self._torch._C.TensorBase, self._torch.nn.Module, self._torch.optim.Optimizer)
        return issubclass(kind, ends) or is_node_type(kind) or type_name(item) == "_lru_cache_wrapper"

    def _is_collection(self, item: object) -> bool:
        transparent = (BaseException, *Suspended)
        words = ("traceback", "frame", "cell", "function", "NoneType", "Task", "Future", "Thread", "method")
        return not issubclass(type(item), transparent) and type_name(item) not in words

    def _group(self, node: int, text: str) -> tuple[str, list[int]]:
        """Write a collection as ``losses[0..99]``; also return its members that hold memory."""
        item = self._graph.objects[node]
        if not issubclass(type(item), _CONTAINERS):
            return text, []
        direct = set(self._graph.successors[node])
        members = [child for child in self._shares.carriers(node) if child in direct]
        if len(members) < 2 or not issubclass(type(item), (list, tuple, deque)):
            return text, members
        wanted = {id(self._graph.objects[member]) for member in members}
        places = [place for place, value in enumerate(_plain_items(item)) if id(value) in wanted]
        return f"{text}[{places[0]}..{places[-1]}]", members

    def _situation(
        self, share: Share, holder: RootHolder, cut: Trail, shown: Trail, end: int, alike: list[int]
    ) -> Situation:
        item = self._graph.objects[end]
        facts = tensor_facts(item, self._torch)
        members = [tensor_facts(self._graph.objects[member], self._torch) for member in alike[:1000]]
        variable = holder.slots[0].text if holder.kind == "variable" and holder.slots[0].code else None
        lead = facts or next((member for member in members if member is not None), None)
        keys = self._shares.live.keys_of(id(item))
        return Situation(
            kind="inner" if share.inner and holder.kind == "variable" else holder.kind,
            cut=cut.code,
            shown=str(shown),
            inside=shown.inside,
            variable=variable,
            whole=variable is not None and cut.code == variable and not share.inner,
            in_shell=self._in_shell,
            outputs=tuple(sorted({slot.number for slot in holder.slots if slot.number is not None})),
            elements=None if lead is None else lead.elements,
            tensor_bytes=0 if facts is None else facts.nbytes,
            storage_bytes=self._shares.live.storages[keys[0]].nbytes if len(keys) == 1 else 0,
            node=None if lead is None else lead.node,
            alike=len(alike),
            scalars=self._keep_graphs(share, members),
            hook_table=self._hook_table(cut),
            is_list=type(item) is list and end == share.node,
            keeps_graph=sum(share.count.values()) > max(1, len(members)),
            is_data=_is_data(holder.slots[0].target),
            clearable=is_exactly(self._graph.objects[share.node], (list, dict, set, deque)),
        )

    def _keep_graphs(self, share: Share, members: list[TensorFacts | None]) -> bool:
        """Tell whether some scalars keep more than themselves: after backward() they do not."""
        if not members or not all(_is_scalar_with_graph(member) for member in members):
            return False
        return sum(share.count.values()) > len(members)

    def _hook_table(self, cut: Trail) -> str | None:
        for table in _HOOK_TABLES:
            if cut.code is not None and f".{table}" in cut.code:
                return cut.code[: cut.code.index(f".{table}")] + f".{table}"
        return None

    def _kind(self, holder: RootHolder, shown: Trail) -> Kind:
        if holder.kind in ("variable", "module"):
            if shown.inside == "cache":
                return "cache"
            if shown.code is not None and any(f".{table}" in shown.code for table in _HOOK_TABLES):
                return "hook"
            if shown.inside == "class":
                return "class"
        return holder.kind

    def _cell(self, holder: RootHolder, situation: Situation) -> int | None:
        if situation.variable is not None:
            return self._cells.that_set(situation.variable)
        if situation.outputs:
            return situation.outputs[-1]
        return self._error_cell(holder) if holder.kind == "error" else None

    def _note(self, holder: RootHolder, item: object, alike: list[int]) -> str:
        if holder.kind == "output":
            names = list(dict.fromkeys(slot.text for slot in holder.slots if slot.text.startswith("_")))
            also = f"also {', '.join(names)}" if names else ""
            facts = tensor_facts(item, self._torch)
            if facts is not None and facts.node is not None:
                also = "; ".join(filter(None, (also, f"{facts.nbytes} B that keep a graph ({facts.node})")))
            return also
        return f"{len(alike):,} items" if len(alike) > 1 else ""

    def _locals(self, share: Share, holder: RootHolder) -> Iterator[tuple[str, int]]:
        """Name the several things that frames keep."""
        if holder.kind not in ("error", "debugger", "handling", "unknown"):
            return
        found = []
        stack = [share.node]
        while stack:
            node = stack.pop()
            item = self._graph.objects[node]
            named = item is not None and (self._is_end(item) or self._is_collection(item))
            if node in self._graph.memory or (named and not self._is_frame_dict(node)):
                found.append(node)
            else:
                stack.extend(self._shares.carriers(node))
        if len(found) > 1:
            found.sort(key=lambda node: -self._shares.total(node))
            for node in found[:_MOST_PARTS]:
                place = node if self._graph.objects[node] is not None else self._graph.dominator[node]
                # the line above says already what keeps them all
                start = f", {_verb(holder.kind)} {self._start(holder, holder.slots[0])}"
                yield str(self._trail(holder, place)).replace(start, "", 1), node

    def _is_frame_dict(self, node: int) -> bool:
        above = self._graph.found_by[node]
        return type(self._graph.objects[node]) is dict and type_name(self._graph.objects[above]) == "frame"

    def _parts(self, share: Share, device: int, draft: _Draft) -> tuple[Part, ...]:
        if draft.parts:
            return tuple(Part(text, self._shares.under[device][node]) for text, node in draft.parts)
        model = self._graph.objects[share.node]
        if not share.in_use and not (model is not None and self._shares.is_model(model)):
            return ()
        return self._roles(share, device)

    def _roles(self, share: Share, device: int) -> tuple[Part, ...]:
        roles: dict[str, int] = {}
        for where, nbytes, key in self._shares.pieces(share):
            if where == device:
                facts = self._shares.live.storages[key]
                name = _ROLE_WORDS.get(facts.role, "other")
                roles[name] = roles.get(name, 0) + nbytes
        # what is told as a holder of its own is no part of the model
        extra = sum(roles.values()) - share.own[device]
        for name in ("other", "saved for backward"):
            less = min(extra, roles.get(name, 0))
            extra -= less
            if less:
                roles[name] -= less
        roles = {name: nbytes for name, nbytes in roles.items() if nbytes}
        return tuple(Part(name, nbytes) for name, nbytes in sorted(roles.items(), key=lambda role: -role[1]))

    # -- several holders --------------------------------------------------------------------------------

    def _joint(self, share: Share) -> _Draft:
        ways = self._ways(share)
        variables = [holder for holder in share.holders if holder.kind == "variable"]
        names = [holder.slots[0].text for holder in variables if _is_data(holder.slots[0].target)]
        program = [holder.slots[0].text for holder in variables if not _is_data(holder.slots[0].target)]
        others = [
            remedy_for(self._situation(share, holder, Trail("", None), Trail("", None), share.node, []))
            for holder in share.holders
            if holder.kind != "variable"
        ]
        remedy = together(names, program, others, in_shell=self._in_shell)
        cells = [self._cells.that_set(name) for name in (*names, *program)]
        kinds = {holder.kind for holder in share.holders}
        return _Draft(
            path=", ".join(ways),
            kind="together",
            expression=None,
            cell=max((cell for cell in cells if cell is not None), default=None),
            remedy=remedy,
            note="together" if len(kinds) and not share.in_use else "",
        )

    def _ways(self, share: Share) -> list[str]:
        """Name the holders by where in each the memory is, when there is one thing to find, else by themselves."""
        if len(share.nodes) == 1 and not share.in_use:
            entries = self._shares.entries(share.nodes)[share.nodes[0]]
            firsts = [self._graph.path_to(entry)[0] for entry in entries]
            if len(entries) <= _MOST_WAYS and {*firsts} == {holder.node for holder in share.holders}:
                return list(dict.fromkeys(self._way(entry, share.nodes[0]) for entry in entries))
        owners = [holder for holder in share.holders if not share.in_use or self._leads_to_model(holder, share)]
        names = [str(self._trail(holder, holder.node)) for holder in owners or share.holders]
        names.sort(key=lambda name: "." in name)
        more = len(names) - _MOST_WAYS
        return names if more < 2 else [*names[:_MOST_WAYS], f"and {more} more"]

    def _leads_to_model(self, holder: RootHolder, share: Share) -> bool:
        """Tell whether a holder has a model or optimizer that has what is shared, not a graph that uses it."""
        seen = {holder.node}
        stack = [holder.node]
        while stack:
            for target in self._graph.successors[stack.pop()]:
                item = self._graph.objects[target]
                if item is not None and self._shares.is_model(item):
                    return True
                if target not in seen and item is not None and self._is_collection(item) and not self._is_end(item):
                    seen.add(target)
                    stack.append(target)
        return False

    def _way(self, entry: int, node: int) -> str:
        path = self._graph.path_to(entry)
        holder = self._graph.holders[path[0]]
        steps = [*path[1:], node]
        chain = [self._graph.objects[step] for step in steps if self._graph.objects[step] is not None]
        slot = self._slot(holder, chain[0] if chain else None)
        return str(walk(self._begin(holder, slot), chain))

    def _shared(self, share: Share, device: int) -> tuple[int, tuple[str, ...]]:
        """Return what a single holder reaches and others too, told once for each holder."""
        if len(share.holders) != 1:
            return 0, ()
        holder = share.holders[0].node
        if holder in self._shared_told and not share.in_use:
            return 0, ()
        self._shared_told.add(holder)
        shared = 0
        others: set[int] = set()
        for node, owners in self._shares.sharing.items():
            if holder in owners and self._shares.under[device][node]:
                shared += self._shares.under[device][node]
                others |= owners - {holder}
        names = [self._graph.holders[other] for other in sorted(others)]
        return shared, tuple(str(self._trail(other, other.node)) for other in names[:_MOST_PARTS])

    # -- garbage ----------------------------------------------------------------------------------------

    def _garbage(self, share: Share) -> _Draft:
        cycle = self._cycle(share.garbage)
        words = " → ".join(cycle) if cycle else "unreachable objects"
        situation = Situation("garbage", None, "", "", None, whole=False, in_shell=self._in_shell)
        return _Draft(
            path=f"garbage: {words}",
            kind="garbage",
            expression=None,
            cell=None,
            remedy=remedy_for(situation),
        )

    def _cycle(self, members: Sequence[int]) -> list[str]:
        """Return the shortest cycle among some nodes as the names of their types, the first one last again."""
        inside = set(members)
        for start in members:
            if self._graph.objects[start] is None:
                continue
            before = {start: start}
            queue = deque([start])
            while queue:
                node = queue.popleft()
                for target in self._graph.successors[node]:
                    if target == start:
                        path = [node]
                        while path[-1] != start:
                            path.append(before[path[-1]])
                        return self._cycle_words([*path[::-1], start])
                    if target in inside and target not in before:
                        before[target] = node
                        queue.append(target)
        return []

    def _cycle_words(self, nodes: list[int]) -> list[str]:
        """Name a cycle as its author would: from an object of the user's, by functions and closures."""
        items = [self._graph.objects[node] for node in nodes[:-1]]
        first = next((place for place, item in enumerate(items) if is_made_by_class(type(item))), 0)
        words: list[str] = []
        for item in (*items[first:], *items[:first]):
            word = _cycle_word(item)
            if word is not None and words[-1:] != [word]:
                words.append(word)
        return [*words, words[0]] if words else []

    def _cpp_too(self, share: Share) -> bool:
        """Tell whether C++ has more references to some storage than the tensors that were found."""
        storages = self._shares.live.storages
        return any(
            # what a sparse tensor is made of has aliases of its own
            storages[key].reached != "inner" and (storages[key].uses or 0) > storages[key].tensors
            for _device, _nbytes, key in self._shares.pieces(share)
        )


_ROLE_WORDS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "buffer": "buffers",
    "optimizer state": "optimizer state",
    "saved for backward": "saved for backward",
}


def _verb(kind: Kind) -> str:
    return {"error": "kept by", "debugger": "kept by", "handling": "in", "unknown": "in", "frame": "in"}.get(
        kind, "through"
    )


def _unknown_words(target: object) -> str:
    name = type_name(target)
    if issubclass(type(target), Suspended):
        return f"the {name.replace('_', ' ')} {target.__name__}() of a running call"  # type: ignore[attr-defined]  # all three have it
    return f"a running call or C code ({name})"


def _is_scalar_with_graph(facts: TensorFacts | None) -> bool:
    return facts is not None and facts.elements == 1 and facts.node is not None


def _cycle_word(item: object) -> str | None:
    """Return a word for one object of a cycle, None for the tables between an object and its attributes."""
    if type(item) is FunctionType:
        return "lambda" if item.__name__ == "<lambda>" else item.__name__
    if type_name(item) == "cell":
        return "closure"
    return None if is_exactly(item, (dict, tuple)) else type_name(item)


def _is_data(item: object) -> bool:
    """Tell whether ``%gpu_free`` deletes a variable of such an object and sees what it holds."""
    program = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
    return not issubclass(type(item), program) and type_name(item) not in ("ndarray", "_lru_cache_wrapper")


def _plain_items(item: Any) -> Iterator[Any]:
    base = next(base for base in (list, tuple, deque) if issubclass(type(item), base))
    return iter(base.__iter__(item))
