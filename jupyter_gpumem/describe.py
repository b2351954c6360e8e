"""From shares of memory to holders: names, cells, remarks and remedies, as values that hold nothing."""

import sys
from collections import deque
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

from jupyter_gpumem.attributes import type_name
from jupyter_gpumem.contents import Contents
from jupyter_gpumem.cycles import garbage_words
from jupyter_gpumem.held import RootHolder
from jupyter_gpumem.holders import Holder, Kind, Release
from jupyter_gpumem.hooks import HOOK_TABLES, HookGroup
from jupyter_gpumem.joint import JointHolders
from jupyter_gpumem.machinery import Later, Machinery
from jupyter_gpumem.places import Places
from jupyter_gpumem.provenance import CellFinder
from jupyter_gpumem.remedies import Remedy, Situation, remedy_for, with_imports
from jupyter_gpumem.shares import Share, Shares
from jupyter_gpumem.situations import Situations
from jupyter_gpumem.tensors import tensor_facts
from jupyter_gpumem.trail import Trail
from jupyter_gpumem.trails import Trails

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MOST_OTHERS = 5
_HANDLES = "or remove() of each handle, where you kept them"
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


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
        self._variables = vars(sys.modules["__main__"]) if shell is None else shell.user_ns
        self._cells = CellFinder(shell)
        self._trails = Trails(shares, self._cells, torch)
        self._places = Places(shares, self._trails)
        self._situations = Situations(shares, self._trails, self._places, torch, in_shell=self._in_shell)
        self._machinery = Machinery(shares, self._trails)
        self._contents = Contents(shares, self._trails)
        self._joint_holders = JointHolders(
            shares, self._trails, self._places, self._situations, torch, in_shell=self._in_shell
        )
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
            parts=self._contents.parts(share, device, draft.parts),
            at_most=at_most,
        )

    # -- one holder -------------------------------------------------------------------------------------

    def _single(self, share: Share) -> _Draft:
        holder = self._trails.best(share)
        if share.members:
            return self._namespace(share, holder)
        if share.hooks is not None:
            return self._hooks(share.hooks, self._trails.trail(holder, share.node))
        cut = self._trails.trail(holder, share.node)
        end = self._trails.end(share.node)
        shown = self._trails.first_parameter(self._trails.trail(holder, end), end, share)
        item = self._graph.objects[end]
        if type_name(item) == "_lru_cache_wrapper":
            shown = replace(shown, text=f"cache of {shown.words} (lru_cache)", tail="", inside="cache")
        group, alike = self._trails.group(end, shown.text)
        situation = self._situations.of(share, holder, cut, shown, end, alike)
        later = self._later(share)
        remedy = remedy_for(situation) if later is None else _for_later(later)
        text = shown.text if shown.inside == "iterator" else group  # nobody can index an iterator
        path = ", ".join((text + shown.tail, *shown.via))
        note = self._note(holder, item, alike)
        return _Draft(
            path=path,
            kind=self._kind(holder, shown),
            expression=shown.code,
            cell=self._cell(holder, situation),
            remedy=remedy,
            note=note,
            parts=tuple(self._contents.places(share, holder)),
            hidden=share.in_use and ("._" in path or holder.kind != "variable"),
        )

    def _namespace(self, share: Share, holder: RootHolder) -> _Draft:
        """Describe the models and optimizers that one namespace has together."""
        trails = [self._trails.trail(holder, member) for member in share.members]
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

    def _hooks(self, group: HookGroup, model: Trail) -> _Draft:
        """Describe hooks that one line of code put on a model and the modules in it."""
        cell, line = self._cells.of_file(group.code.co_filename), group.code.co_firstlineno
        where = f"{group.code.co_name}() line {line}" if cell is None else f"cell {cell} line {line}"
        code = None if model.code is None else group.removal(model.code)
        remedy = Remedy("", ()) if code is None else Remedy(code, (Release("code", code=code),), _HANDLES)
        return _Draft(f"{group.count:,} {group.words} of {model}, from {where}", "hook", None, cell, remedy)

    def _later(self, share: Share) -> Later | None:
        return None if share.in_use else self._machinery.release(share)

    def _kind(self, holder: RootHolder, shown: Trail) -> Kind:
        if holder.kind in ("variable", "module"):
            if shown.inside == "cache":
                return "cache"
            if shown.code is not None and any(f".{table}" in shown.code for table in HOOK_TABLES):
                return "hook"
            if shown.inside == "class":
                return "class"
        return holder.kind

    def _cell(self, holder: RootHolder, situation: Situation) -> int | None:
        if situation.variable is not None:
            return self._cells.that_set(situation.variable)
        if situation.outputs:
            return situation.outputs[-1]
        return self._trails.error_cell(holder) if holder.kind == "error" else None

    def _note(self, holder: RootHolder, item: object, alike: list[int]) -> str:
        if holder.kind == "output":
            names = list(dict.fromkeys(slot.text for slot in holder.slots if slot.text.startswith("_")))
            also = f"also {', '.join(names)}" if names else ""
            facts = tensor_facts(item, self._torch)
            if facts is not None and facts.node is not None:
                also = "; ".join(filter(None, (also, f"{facts.nbytes} B that keep a graph ({facts.node})")))
            return also
        return f"{len(alike):,} items" if len(alike) > 1 else ""

    # -- several holders --------------------------------------------------------------------------------

    def _joint(self, share: Share) -> _Draft:
        later = self._later(share)
        if later is None:
            ways, remedy = self._joint_holders.release(share)
        else:
            ways = [later.what] if later.what else self._joint_holders.ways(share)
            remedy, share.keeps = _for_later(later), share.own
        variables = [holder.slots[0].text for holder in share.holders if holder.kind == "variable"]
        cells = [self._cells.that_set(name) for name in variables]
        return _Draft(
            path=", ".join(ways),
            kind="together",
            expression=None,
            cell=max((cell for cell in cells if cell is not None), default=None),
            remedy=remedy,
            note="" if share.in_use else "together",
        )

    def _shared(self, share: Share, device: int) -> tuple[int, tuple[str, ...]]:
        """Return what a single holder reaches and others too, told once for each holder."""
        # a class is told attribute by attribute: each gives back its own
        if len(share.holders) != 1 or share.holders[0].kind == "class":
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
        return shared, tuple(str(self._trails.trail(other, other.node)) for other in names[:_MOST_OTHERS])

    # -- garbage ----------------------------------------------------------------------------------------

    def _garbage(self, share: Share) -> _Draft:
        situation = Situation("garbage", None, "", "", None, whole=False, in_shell=self._in_shell)
        return _Draft(
            path=f"garbage: {garbage_words(self._graph, share.garbage)}",
            kind="garbage",
            expression=None,
            cell=None,
            remedy=remedy_for(situation),
        )

    def _cpp_too(self, share: Share) -> bool:
        """Tell whether C++ has more references to some storage than the tensors that were found."""
        storages = self._shares.live.storages
        return any(
            # what a sparse tensor is made of has aliases of its own
            storages[key].reached != "inner" and (storages[key].uses or 0) > storages[key].tensors
            for _device, _nbytes, key in self._shares.pieces(share)
        )


def _for_later(later: Later) -> Remedy:
    # only a cell can await: no program runs that
    is_code = bool(later.code) and not later.code.startswith("await ")
    return with_imports(later.code, later.note) if is_code else Remedy(later.code, (), later.note)
