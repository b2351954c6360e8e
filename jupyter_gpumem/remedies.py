"""What to do so that a holder lets go: code for people, and the same as steps for a program."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jupyter_gpumem.holders import Release
from jupyter_gpumem.names import is_ipythons
from jupyter_gpumem.sizes import format_bytes

_COLLECT = "; import gc; gc.collect();"
_ROUND_BYTES = 512  # what the caching allocator rounds small requests up to


@dataclass(slots=True)
class Situation:
    """What is known of a holder when its remedy is chosen.

    ``cut`` is the path to what is let go, ``shown`` the one to what it keeps in the end. ``variable`` is the
    user's variable it begins at; ``whole`` tells that the variable itself is what is let go. ``failed`` is an
    error whose traceback alone keeps it all. ``deletion`` removes the reference ``cut`` ends with, and
    ``is_assignable`` tells whether what is shown can be set to something else, ``copy`` is code for a copy of the
    tensor ``{0}``. ``finalizer`` is the path to a ``weakref.finalize`` that keeps it, empty where it has none;
    ``handle`` the one to a context variable or what cancels a task. ``in_library`` tells that it is a function in a
    library's module or class, ``unhook`` is the code that removes the hook it goes with. With ``needs_collector``
    a deletion gives back nothing until the collector runs.
    """

    kind: str
    cut: str | None
    shown: str
    inside: str
    variable: str | None
    whole: bool
    in_shell: bool
    outputs: tuple[int, ...] = ()
    elements: int | None = None
    tensor_bytes: int = 0
    copy: str = ""
    storage_bytes: int = 0
    node: str | None = None
    alike: int = 0
    scalars: bool = False
    type_name: str = ""
    unhook: str | None = None
    is_list: bool = False
    keeps_graph: bool = False
    clearable: bool = False
    is_data: bool = True
    failed: str | None = None
    deletion: str | None = None
    is_assignable: bool = False
    finalizer: str | None = None
    handle: str | None = None
    in_library: bool = False
    needs_collector: bool = False


@dataclass(frozen=True, slots=True)
class Remedy:
    """Code to run, the steps for a program, and a remark; ``less_bytes`` is what the code itself keeps."""

    code: str
    releases: tuple[Release, ...]
    note: str = ""
    less_bytes: int = 0


def remedy_for(situation: Situation) -> Remedy:
    """Choose the remedy of one holder."""
    special = _SPECIAL.get(situation.kind)
    if special is not None:
        return special(situation)
    if situation.inside == "cache" and situation.cut is not None:
        code = f"{situation.cut}.cache_clear()"
        return Remedy(code, (Release("code", code=code),), "an lru_cache keeps its arguments and results alive")
    if situation.unhook is not None:
        note = "or handle.remove(), where you kept the handle"
        return replace(deletion(situation.unhook, needs_collector=situation.needs_collector), note=note)
    if situation.in_library:
        return Remedy("", (), "it stands in a library: set back what was there, or delete it where nothing was")
    if situation.finalizer is not None:
        return _finalizer(situation.finalizer)
    if situation.failed is not None:
        return _kept_error(situation.failed)
    if situation.whole and situation.variable is not None:
        return _variable(situation)
    return _inner(situation)


def free(*names: str, in_shell: bool) -> str:
    """Return the code that deletes variables and what IPython keeps of them."""
    return f"%gpu_free {' '.join(names)}" if in_shell else f"del {', '.join(names)}"


def _drop(situation: Situation, name: str) -> tuple[str, tuple[Release, ...]]:
    """Return how a variable goes: ``%gpu_free`` deletes data only, and no name of IPython's."""
    code, release = f"del {name}", Release("code", code=f"del {name}")
    if situation.is_data and not (situation.in_shell and is_ipythons(name)):
        code, release = free(name, in_shell=situation.in_shell), Release("variables", names=(name,))
    collects = code.startswith("%gpu_free") or not situation.needs_collector
    return code if collects else code + _COLLECT, (release,)


def _collect(situation: Situation) -> Remedy:
    code = "%gpu_free" if situation.in_shell else "import gc; gc.collect()"
    return Remedy(code, (Release("collect"),), "no live holder: only the garbage collector frees a cycle")


def _output(situation: Situation) -> Remedy:
    note = "end the line with ; next time"
    if situation.node is not None and situation.elements == 1:
        note += ", or show .item()"
    return Remedy("%gpu_free", (Release("outputs", outputs=situation.outputs),), note)


def _error(situation: Situation) -> Remedy:
    code = "%gpu_free" if situation.in_shell else "import sys; sys.last_value = sys.last_traceback = None"
    return Remedy(code, (Release("errors"),))


def _debugger(situation: Situation) -> Remedy:
    return Remedy("%gpu_free", (Release("debugger"),))


def _handling(situation: Situation) -> Remedy:
    return Remedy("", (), "leave the except block, then try again: until then the failed frames are alive")


def _frame(situation: Situation) -> Remedy:
    return Remedy("", (), "let it return, or del the name there")


def _context(situation: Situation) -> Remedy:
    if situation.handle is None:
        return Remedy("", (), "set the context variable to None where it was set")
    return with_imports(f"{situation.handle}.set(None);", "a context variable keeps its value in this context")


def _task(situation: Situation) -> Remedy:
    if situation.handle is None:
        return Remedy("", (), "let it end, or cancel it")
    return with_imports(situation.handle, "or let it end; a cancelled task keeps its frame while something has it")


def with_imports(code: str, note: str = "") -> Remedy:
    """Return code as the remedy, its import written as a user would.

    It ends in a semicolon where the call returns what it lets go: the output cache would keep that.
    """
    release = (Release("code", code=code),)
    for module in ("sys", "asyncio", "threading"):
        if f"__import__('{module}')" in code:
            code = f"import {module}; " + code.replace(f"__import__('{module}')", module)
    return Remedy(code, release, note)


def joined(removals: Iterable[str]) -> str:
    """Return statements that remove references as one line, each ``del`` joined with the one before."""
    lines: list[str] = []
    for removal in removals:
        if lines and lines[-1].startswith("del ") and removal.startswith("del "):
            lines[-1] += f", {removal.removeprefix('del ')}"
        else:
            lines.append(removal)
    return "; ".join(lines)


def _unknown(situation: Situation) -> Remedy:
    return Remedy("", (), "held by C code (atexit and signal keep what they were given) or by a call under way")


_SPECIAL = {
    "garbage": _collect,
    "output": _output,
    "error": _error,
    "debugger": _debugger,
    "handling": _handling,
    "frame": _frame,
    "context": _context,
    "task": _task,
    "unknown": _unknown,
}


def _variable(situation: Situation) -> Remedy:
    name = situation.variable or ""
    code, release = _drop(situation, name)
    if situation.scalars and situation.is_list:
        items = f"{name}[:] = [item.item() for item in {name}]"
        return Remedy(items, (Release("code", code=items),), "append loss.item() instead of the loss")
    is_itself = situation.shown == name
    is_scalar = situation.node is not None and situation.elements == 1 and not situation.alike
    if is_itself and is_scalar and situation.keeps_graph:
        number = f"{name} = {name}.item()"
        return Remedy(number, (Release("code", code=number),), f"a {situation.tensor_bytes} B tensor and its graph")
    if is_itself and _is_small_view(situation):
        copy = f"{name} = {situation.copy.format(name)}"
        return Remedy(copy, (Release("code", code=copy),), _view_words(situation), _rounded(situation.tensor_bytes))
    note = ""
    if not situation.keeps_graph:
        return Remedy(code, release)
    if situation.alike and situation.node is not None:
        note = "they keep their graphs: compute under torch.no_grad(), or keep .detach().cpu()"
    elif situation.node is not None:
        note = f"with its graph ({situation.node})"
    return Remedy(code, release, note)


def _kept_error(error: str) -> Remedy:
    code = f"{error}.__traceback__ = None"
    return Remedy(code, (Release("code", code=code),), "a kept error keeps the frames it came through")


def _finalizer(path: str) -> Remedy:
    note = "a weakref.finalize keeps it until its object goes"
    return with_imports(f"{path}.detach();", note) if path else Remedy("", (), note)


def _is_small_view(situation: Situation) -> bool:
    return (
        0 < situation.tensor_bytes * 2 <= situation.storage_bytes
        and _rounded(situation.tensor_bytes) < situation.storage_bytes
        and situation.node is None
        and not situation.alike
    )


def _view_words(situation: Situation) -> str:
    view, storage = format_bytes(situation.tensor_bytes), format_bytes(situation.storage_bytes)
    return f"{view} view of a storage of {storage}"


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ROUND_BYTES) * _ROUND_BYTES


def _inner(situation: Situation) -> Remedy:
    """Cut one reference inside of something."""
    cut = situation.cut
    if cut is None:
        if situation.variable is None:
            return Remedy("", ())
        return Remedy(*_drop(situation, situation.variable))
    if situation.scalars and situation.is_list:
        code = f"{cut}[:] = [item.item() for item in {cut}]"
        return Remedy(code, (Release("code", code=code),), "append loss.item() instead of the loss")
    if situation.is_assignable and _is_small_view(situation) and cut == situation.shown:
        code = f"{cut} = {situation.copy.format(cut)}"
        return Remedy(code, (Release("code", code=code),), _view_words(situation), _rounded(situation.tensor_bytes))
    if situation.clearable:
        return deletion(f"{cut}.clear()", needs_collector=situation.needs_collector)
    if situation.deletion is None:
        if situation.variable is None or situation.kind == "inner":
            return Remedy("", ())
        return Remedy(*_drop(situation, situation.variable))
    return deletion(situation.deletion, needs_collector=situation.needs_collector)


def deletion(code: str, *, needs_collector: bool) -> Remedy:
    """Return the code that removes references as the remedy."""
    return with_imports(code + _COLLECT if needs_collector else code)


def together(names: Sequence[str], program: Sequence[str], others: Sequence[Remedy], *, in_shell: bool) -> Remedy:
    """Join the remedies of several holders that must all let go; ``program`` are functions and classes.

    What runs the collector comes last: functions and classes refer to themselves, and other holders to one another.
    """
    if not all(remedy.releases for remedy in others):
        return Remedy("", (), "; ".join(dict.fromkeys(other.note for other in others if other.note)))
    lines = [f"del {', '.join(program)}"] if program else []
    releases = [Release("variables", names=tuple(names))] if names else []
    releases += [Release("code", code=line) for line in lines]
    releases += [release for remedy in others for release in remedy.releases]
    lines += [remedy.code for remedy in others]
    if names:
        lines = [*(line for line in lines if line != "%gpu_free"), free(*names, in_shell=in_shell)]
    lines.sort(key=lambda line: line.startswith("%gpu_free"))
    if (program or names) and not lines[-1].startswith("%gpu_free"):
        lines[-1] = lines[-1].removesuffix(";") + _COLLECT
    return Remedy("\n".join(dict.fromkeys(lines)), tuple(dict.fromkeys(releases)))
