"""What would give memory back or make the next step fit, in bytes, with the code to change.

Each figure is read from what is on the device at that moment; advice that does not apply is not given.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.accounts import take_account
from jupyter_gpumem.advised import Advice, Shortage
from jupyter_gpumem.changes import fitting_batch, lighter_weights, what_to_change
from jupyter_gpumem.copies import for_each
from jupyter_gpumem.device import cuda_started, torch_module
from jupyter_gpumem.heap import Clock, Heap, OutOfTimeError, collector_paused
from jupyter_gpumem.holders import Holder, LeakReport
from jupyter_gpumem.leak_report import find_leaks
from jupyter_gpumem.occupants import kept_by, recognised
from jupyter_gpumem.roots import Roots
from jupyter_gpumem.scene import Scene
from jupyter_gpumem.surroundings import about_cache, about_fragments, about_host, about_limit, about_processes
from jupyter_gpumem.tensors import live_tensors
from jupyter_gpumem.where import Spot, namespace_of, variables_at

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MIN_BYTES = 1024**2
_FREES = "%gpu_free"
_BUDGET_SECONDS = 10.0


def advise(shell: "InteractiveShell | None" = None) -> tuple[Advice, ...]:
    """Say what would give GPU memory back or make the next step fit, most bytes first.

    Parameters
    ----------
    shell
        The shell whose variables are the user's; without one they are those of ``__main__``.

    Notes
    -----
    Figures of different lines do not add up: several may be about the same bytes.
    """
    torch = torch_module()
    if torch is None or not cuda_started():
        return ()
    leaks, names = find_leaks(shell), namespace_of(shell)
    found = _on_scene(shell, names, (), None, lambda scene: _all_of(scene, leaks))
    if found is None:
        found = _from_holders(leaks.holders)
    accounts = take_account(shell)
    around = (*about_fragments(accounts), *about_cache(accounts), *about_processes(accounts))
    return _sorted([*found, *around, *about_host(names, torch)])


def advise_at_failure(
    shell: "InteractiveShell | None", spots: Sequence[Spot], device: int, shortage: Shortage
) -> tuple[Advice, ...]:
    """Say at the moment a request fails what to change in the code that runs, from what its calls hold then."""
    names = variables_at(shell, spots)
    if shortage.is_too_large:
        found = _on_scene(
            shell, names, spots, device, lambda scene: list(fitting_batch(scene, shortage)), shortage.hidden_bytes
        )
    else:
        found = _on_scene(
            shell,
            names,
            spots,
            device,
            lambda scene: [*what_to_change(scene), *fitting_batch(scene, shortage), *lighter_weights(scene)],
            shortage.hidden_bytes,
        )
    return tuple(found or ())


def advise_after(
    shell: "InteractiveShell | None",
    leaks: LeakReport,
    device: int,
    shortage: Shortage | None,
    changes: Sequence[Advice],
) -> tuple[Advice, ...]:
    """Say what would have helped a request that failed, with the changes found at that moment."""
    if shortage is not None and shortage.is_too_large:
        return _sorted(changes)
    holding = _on_scene(shell, namespace_of(shell), (), device, lambda scene: _about_holders(scene, leaks, changes))
    accounts = take_account(shell, device)
    # what others give back is nothing to a process at its own limit
    around = [] if shortage is not None and shortage.is_over_limit else [*about_processes(accounts)]
    if shortage is not None:
        around += about_limit(shortage)
        around += about_fragments(accounts, shortage) if shortage.is_fragmented else ()
    return _sorted([*changes, *(_from_holders(leaks.holders) if holding is None else holding), *around])


def _sorted(found: Iterable[Advice]) -> tuple[Advice, ...]:
    return tuple(sorted((one for one in found if one.nbytes >= _MIN_BYTES), key=lambda one: -one.nbytes))


def _in_one_line(holders: Sequence[Holder]) -> Iterator[Advice]:
    """Say once what lets go of errors and garbage: one command does for all of them."""
    kept = [holder for holder in holders if holder.remedy == _FREES]
    if kept:
        names = " and ".join(dict.fromkeys(kept_by(holder.path) for holder in kept))
        nbytes = kept[0].keeps_bytes if len(kept) == 1 else sum(holder.shown_bytes for holder in kept)
        yield Advice("holder", f"kept by {names}", nbytes, _FREES, kept[0].note)


def _on_scene(
    shell: "InteractiveShell | None",
    names: dict[str, Any],
    spots: Sequence[Spot],
    device: int | None,
    advise_on: Callable[[Scene], list[Advice]],
    hidden_bytes: int = 0,
) -> list[Advice] | None:
    """Return the advice that one scan of the heap gives, None where time ran out; drops the scan before returning."""
    torch: ModuleType | None = torch_module()
    if torch is None:
        return None
    roots = Roots(shell)
    clock = Clock(_BUDGET_SECONDS)
    with collector_paused():
        try:
            live = live_tensors(Heap(clock, roots.starts()), torch, "cuda", clock)
        except OutOfTimeError:
            return None
        own = namespace_of(shell)
        scene = Scene(live, torch, names, device, spots, own.keys(), (own, shell), hidden_bytes)
        found = advise_on(scene)
        del scene, live
    return found


def _all_of(scene: Scene, leaks: LeakReport) -> list[Advice]:
    changes = list(what_to_change(scene))
    return [*changes, *_about_holders(scene, leaks, changes)]


def _about_holders(scene: Scene, leaks: LeakReport, changes: Iterable[Advice]) -> list[Advice]:
    """Say what each holder gives back, but for copies of a model, of which more is known."""
    copies = {advice.label.split(":")[0] for advice in changes if advice.subject == "duplicate"}
    others = [holder for holder in leaks.holders if holder.remedy != _FREES and holder.expression not in copies]
    # what others keep together with a model is no reason to let go of the model
    others = [holder for holder in others if not any(map(scene.is_model, _joint_names(holder)))]
    found = [_with_values(scene, holder) or _from_holder(holder) for holder in _each_byte_once(others)]
    return [*(advice for advice in found if advice is not None), *_in_one_line(leaks.holders)]


def _from_holders(holders: Sequence[Holder]) -> list[Advice]:
    others = _each_byte_once([holder for holder in holders if holder.remedy != _FREES])
    found = [advice for holder in others if (advice := _from_holder(holder)) is not None]
    return [*found, *_in_one_line(holders)]


def _joint_names(holder: Holder) -> frozenset[str]:
    return _names_of(holder) if holder.kind == "together" else frozenset()


def _names_of(holder: Holder) -> frozenset[str]:
    """Return the variables that a holder's remedy deletes."""
    return frozenset(name for release in holder.releases for name in release.names)


def _each_byte_once(holders: Sequence[Holder]) -> list[Holder]:
    """Leave out what goes with the variables of a larger holder, and count for the rest what is new with each."""
    found: dict[frozenset[str], int] = {}
    kept = []
    for holder in sorted(holders, key=lambda holder: -holder.shown_bytes):
        names = _names_of(holder)
        if names:
            if any(names <= other for other in found):
                continue
            less = sum(nbytes for other, nbytes in found.items() if other < names)
            holder = replace(holder, keeps_bytes=max(holder.keeps_bytes - less, holder.shown_bytes))
            found[names] = holder.keeps_bytes
        kept.append(holder)
    return kept


def _from_holder(holder: Holder) -> Advice | None:
    """Turn a line of the leak report that gives something back into advice."""
    if not holder.remedy:
        return None
    subject = "kept loss" if "item()" in holder.remedy else "holder"
    return Advice(subject, recognised(holder.path), holder.keeps_bytes, holder.remedy, holder.note)


def _with_values(scene: Scene, holder: Holder) -> Advice | None:
    """Look at the variable of a holder: outputs that keep graphs, or data that may wait on the CPU."""
    name = holder.expression
    if holder.kind != "variable" or name is None or not name.isidentifier() or name not in scene.names:
        return None
    value = scene.names[name]
    tensors = scene.tensors_in(value)
    if not tensors or "item()" in holder.remedy:
        return None
    if any(how == "graph" for one in tensors for _node, how in scene.live.graph.links.get(id(one), ())):
        nbytes = holder.keeps_bytes - scene.nbytes_of(tensors)
        if nbytes < _MIN_BYTES:  # without their graphs they take as much: only letting go helps
            return None
        return Advice(
            "no_grad",
            f"{holder.path} keeps graphs that no backward has used",
            nbytes,
            f"{name} = {for_each(name, value, 'detach()')}",
            "or compute it under torch.no_grad()",
        )
    code = f"{name} = {for_each(name, value, 'cpu()')}"
    return Advice("to the CPU", holder.path, holder.keeps_bytes, code, holder.note)
