"""Giving memory back: names, results, errors, garbage, workspaces, caches; or one holder of a report."""

import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jupyter_gpumem import allocator, beside, cuts
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.freed import (
    CACHE_WAITS,
    CAPTURE_KEEPS_CACHE,
    GRAPH_KEEPS_WORKSPACES,
    Change,
    FreeReport,
    FreeStep,
    StepKey,
)
from jupyter_gpumem.holders import Holder, LeakReport, Release
from jupyter_gpumem.leak_report import find_leaks
from jupyter_gpumem.meter import Meter
from jupyter_gpumem.names import check_names, delete_names, names_holding, other_names
from jupyter_gpumem.reach import Reach
from jupyter_gpumem.stamps import check_unchanged

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Change", "FreeReport", "FreeStep", "free", "free_cache", "free_running", "release_holder"]

# which step of ours does what a holder's release asks for
_STEP_OF_ACTION: dict[str, StepKey] = {
    "variables": "names",
    "outputs": "outputs",
    "errors": "error",
    "debugger": "debugger",
    "collect": "garbage",
}


def free(
    shell: "InteractiveShell | None" = None,
    names: Iterable[str] = (),
    *,
    all_variables: bool = False,
    keep_outputs: bool = False,
    keep_errors: bool = False,
    dry_run: bool = False,
) -> FreeReport:
    """Give device memory back, measure each step, and say who holds what is left.

    First the named variables, then IPython's copies of results that hold device memory, the last error
    with its frames, the ended ``%debug`` session, garbage, library workspaces, caches. Nothing is deleted
    that was not asked for, no device is woken, and without a shell only what is not a notebook's goes.

    Raises
    ------
    GpuMemError
        When a name cannot be deleted; then nothing has been done.
    """
    meter = Meter(dry_run=dry_run)
    wanted = Reach(shell, meter.probe.kind).holds_memory
    chosen = check_names(shell, names)
    kept: tuple[str, ...] = ()
    if all_variables and shell is not None:
        holding, kept = names_holding(shell, wanted)
        chosen = tuple(dict.fromkeys([*chosen, *holding]))
    others: tuple[tuple[str, tuple[str, ...]], ...] = ()
    if not dry_run:
        # first, so that what each later step gives back is its own
        meter.step("garbage", _collect)
    if chosen and shell is not None:
        others = other_names(shell, [name for name in chosen if wanted(shell.user_ns[name])])
        meter.step("names", lambda: _free_names(shell, chosen, wanted, dry_run))
    if not keep_outputs:
        meter.step("outputs", lambda: cuts.cut_outputs(shell, wanted, dry_run=dry_run))
    if not keep_errors:
        if cuts.error_may_hold(shell, wanted):
            meter.step("error", lambda: _free_error(shell, dry_run))
        meter.step("debugger", lambda: _free_debugger(shell, dry_run))
    if not dry_run:
        _free_workspaces_and_cache(meter)
    report = replace(meter.report(), other_names=others, kept_names=kept, held=find_leaks(shell))
    return _with_expectations(report, chosen) if dry_run else report


def free_running() -> FreeReport:
    """Do what is safe while a cell runs, from any thread: garbage, and the cache where no CUDA graph can be.

    Names, results and errors are left alone. Where `FreeReport.cache_waits`, call `free_cache` once the
    cell has ended.
    """
    meter = Meter()
    if meter.probe.kind == "host":
        meter.step("garbage", _collect)
        return replace(meter.report(), while_running=True)
    meter.add(beside.collect(_collect))
    # freeing device memory breaks a capture in whatever thread it runs, and only its own thread can see it
    if allocator.graph_may_be_alive():
        meter.note("cache", CACHE_WAITS)
    else:
        meter.add(beside.return_cache())
    return replace(meter.report(), while_running=True)


def free_cache() -> FreeReport:
    """Give wholly free segments back to the devices, and nothing else."""
    meter = Meter()
    _free_cache(meter)
    return meter.report()


def release_holder(shell: "InteractiveShell | None", holder: Holder) -> FreeReport:
    """Make one holder of a leak report let go, and return to the devices what that left free.

    Raises
    ------
    GpuMemError
        When only the user can do it, or the notebook has changed since the report; then nothing more is done.
    """
    if not holder.releases:
        raise GpuMemError(f"{holder.path} cannot be released from here   → {holder.remedy}")
    meter = Meter()
    wanted = Reach(shell, meter.probe.kind).holds_memory
    for release in holder.releases:
        _check_release(shell, release, wanted)
    for release in holder.releases:
        key = _STEP_OF_ACTION.get(release.action, "code")
        meter.step(key, _release_action(shell, release, wanted))
    meter.step("garbage", _collect)
    _free_cache(meter)
    return meter.report()


def _check_release(shell: "InteractiveShell | None", release: Release, wanted: cuts.Wanted) -> None:
    check_unchanged(shell, release)
    if release.action != "variables" or shell is None:
        return
    for name in check_names(shell, release.names):
        if not wanted(shell.user_ns[name]):
            raise GpuMemError(f"{name} holds no GPU memory any more   → %gpumem leaks")


def _release_action(
    shell: "InteractiveShell | None", release: Release, wanted: cuts.Wanted
) -> Callable[[], Iterable[str]]:
    """Return the step that does what a holder asks for."""

    def outputs() -> tuple[str, ...]:
        numbers = frozenset(release.outputs)
        same = cuts.output_ids(shell, numbers)
        return cuts.cut_outputs(shell, lambda value: id(value) in same and wanted(value))

    def variables() -> tuple[str, ...]:
        if shell is None:
            delete_names(vars(sys.modules["__main__"]), release.names)
            return release.names
        return _free_names(shell, release.names, wanted, dry_run=False)

    def collect() -> tuple[str, ...]:
        return ()

    actions: dict[str, Callable[[], Iterable[str]]] = {
        "variables": variables,
        "outputs": outputs,
        "errors": lambda: _free_error(shell, dry_run=False),
        "debugger": lambda: _free_debugger(shell, dry_run=False),
        "collect": collect,
        "code": lambda: _run_code(shell, release.code),
    }
    return actions[release.action]


def _run_code(shell: "InteractiveShell | None", source: str) -> tuple[str, ...]:
    """Run a remedy in the user's namespace, as if typed there."""
    namespace: dict[str, Any] = vars(sys.modules["__main__"]) if shell is None else shell.user_ns
    try:
        exec(compile(source, "<gpumem release>", "exec"), namespace)
    except Exception as error:
        raise GpuMemError(f"{source} failed: {type(error).__name__}: {error}") from None
    return (source,)


def _free_names(
    shell: "InteractiveShell", names: tuple[str, ...], wanted: cuts.Wanted, dry_run: bool
) -> tuple[str, ...]:
    """Delete names, and IPython's own copies of what they held where that is device memory."""
    if dry_run:
        return names
    # small numbers, None and strings are shared by everybody: only what holds memory is looked for elsewhere
    same = {id(value) for value in map(shell.user_ns.get, names) if wanted(value)}
    cuts.cut_outputs(shell, lambda value: id(value) in same)
    delete_names(shell.user_ns, names)
    return names


def _free_error(shell: "InteractiveShell | None", dry_run: bool) -> tuple[str, ...]:
    description = cuts.describe_error(shell) if dry_run else cuts.cut_error(shell)
    return () if description is None else (description,)


def _free_debugger(shell: "InteractiveShell | None", dry_run: bool) -> tuple[str, ...]:
    found = cuts.has_debugger(shell) if dry_run else cuts.cut_debugger(shell)
    return ("the ended %debug session",) if found else ()


def _collect() -> tuple[str, ...]:
    # what a finalizer lets go may be garbage in its turn
    for _round in range(3):
        if gc.collect() == 0:
            break
    allocator.collect_shared()
    return ()


def _free_workspaces_and_cache(meter: Meter) -> None:
    if not allocator.is_capturing():
        alive = allocator.graph_may_be_alive()
        if alive:
            # the pool of a graph that is gone counts until its segments are returned
            meter.step("cache", _return_cache)
            alive = allocator.graph_may_be_alive()
        if alive:
            meter.note("workspaces", GRAPH_KEEPS_WORKSPACES)
        else:
            meter.step("workspaces", _release_workspaces)
    _free_cache(meter)


def _free_cache(meter: Meter) -> None:
    if allocator.is_capturing():
        meter.note("cache", CAPTURE_KEEPS_CACHE)
    else:
        meter.step("cache", _return_cache)


def _release_workspaces() -> tuple[str, ...]:
    allocator.release_workspaces()
    return ()


def _return_cache() -> tuple[str, ...]:
    allocator.return_cache()
    return ()


def _with_expectations(report: FreeReport, names: tuple[str, ...]) -> FreeReport:
    """Add to the steps of a dry run what the holders they cut keep."""
    expected = _expected_bytes(report.held, frozenset(names))
    steps = tuple(replace(step, expected_bytes=expected.get(step.key, 0)) for step in report.steps)
    layouts = allocator.read_layouts() or {}
    normal = 0 if report.held is None else sum(device.normal_bytes for device in report.held.devices)
    rest: tuple[tuple[StepKey, int], ...] = (
        ("garbage", expected.get("garbage", 0)),
        ("workspaces", 0 if allocator.graph_may_be_alive() else normal),
        # at least: what the steps before give back empties further segments
        ("cache", sum(layout.returnable_bytes for layout in layouts.values())),
    )
    steps += tuple(FreeStep(key, expected_bytes=nbytes) for key, nbytes in rest if nbytes)
    return replace(report, steps=steps)


def _expected_bytes(held: LeakReport | None, names: frozenset[str]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for holder in () if held is None else (*held.holders, *held.in_use):
        # what needs several cuts is counted for the last of them
        keys = [
            _STEP_OF_ACTION.get(release.action, "code")
            for release in holder.releases
            if release.action != "variables" or names.issuperset(release.names)
        ]
        if keys and len(keys) == len(holder.releases):
            sums[keys[-1]] = sums.get(keys[-1], 0) + holder.keeps_bytes
    return sums
