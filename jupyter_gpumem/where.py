"""Where in the user's program something happened: the cell's line, the function, the module of a network."""

import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.attributes import plain_attribute
from jupyter_gpumem.device import torch_module
from jupyter_gpumem.frames import local_variables
from jupyter_gpumem.provenance import CellFinder

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# what IPython calls the body of %%time, %%timeit and %%prun, whose lines it counts from the body's first
_BODIES = ("<timed exec>", "<timed eval>", "<magic-timeit>", "<string>")
_MOST_MODULES = 20_000
_OURS = str(Path(__file__).parent)
_LIBRARIES = ("site-packages", "dist-packages", f"{Path(threading.__file__).parent}")

Spot = tuple[FrameType, int]
"""A frame and the line it was at."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the user's program, in words that hold nothing.

    ``line`` is that of the cell that ran (None outside a notebook); ``function`` the innermost function of
    the user's, with the cell (or file) and line it was at; ``module`` the path of the innermost nn.Module.
    """

    line: int | None
    function: str | None
    function_cell: int | None
    function_file: str | None
    function_line: int | None
    module: str | None

    def words(self, cell: int | None) -> str:
        """Write the place, for a cell of the number ``cell``."""
        text = "this cell" if cell is None else f"cell {cell}"
        if self.line is not None:
            text += f" line {self.line}"
        inner = self._inner()
        if self.module is not None:
            return f"{text}, in {self.module}" + (f" ({inner})" if inner else "")
        return f"{text}, in {self.function}()" + (f" ({inner})" if inner else "") if self.function else text

    def _inner(self) -> str:
        if self.function is None or self.function_line is None:
            return ""
        place = f"cell {self.function_cell}" if self.function_cell is not None else self.function_file or ""
        return f"{place} line {self.function_line}".strip()


def running_spots(thread: threading.Thread | None = None) -> list[Spot]:
    """Return where a thread is, outermost first: by default the main thread, which runs the cells.

    In a thread of torch's own, such as the one of ``backward()``, the main thread waits: then what that one runs,
    a forward pass once more for instance, comes last.

    Frames of this package are left out: one that held itself would be garbage that keeps the user's frames.
    """
    main, current = threading.main_thread().ident, threading.get_ident()
    threads = (current, main) if thread is None and current != main else ((thread or threading.main_thread()).ident,)
    spots: list[Spot] = []
    for wanted in threads:
        frame = sys._current_frames().get(wanted or 0)
        while frame is not None:
            if not _file(frame).startswith(_OURS):
                spots.append((frame, frame.f_lineno))
            frame = frame.f_back
    return spots[::-1]


def traceback_spots(errors: Iterable[BaseException]) -> list[Spot]:
    """Return where some errors were raised, outermost first."""
    spots: list[Spot] = []
    for error in errors:
        traceback: TracebackType | None = error.__traceback__
        while traceback is not None:
            spots.append((traceback.tb_frame, traceback.tb_lineno))
            traceback = traceback.tb_next
    return spots


def within_cell(shell: "InteractiveShell | None", spots: Sequence[Spot]) -> list[Spot]:
    """Leave out the frames that called the cell: IPython's and the kernel's."""
    cells = CellFinder(shell)
    start = next((at for at, (frame, _line) in enumerate(spots) if _is_cell(frame, cells)), 0)
    return list(spots[start:])


def frames_of_libraries(shell: "InteractiveShell | None", spots: Sequence[Spot]) -> frozenset[int]:
    """Return the addresses of the frames that run no code of the user's."""
    cells = CellFinder(shell)
    return frozenset(id(frame) for frame, _line in spots if not _is_users(frame, cells))


def find_place(shell: "InteractiveShell | None", spots: Sequence[Spot]) -> Place:
    """Tell in which line of the cell, function and module of a network a chain of frames is."""
    cells = CellFinder(shell)
    users = [(frame, line) for frame, line in spots if _is_users(frame, cells)]
    line = _line_of_cell(spots, cells)
    inner = next(((frame, line) for frame, line in reversed(users) if _is_function(frame)), None)
    module = _module_path(shell, spots, [frame for frame, _line in users])
    if inner is None:
        return Place(line, None, None, None, None, module)
    frame, inner_line = inner
    name, cell = frame.f_code.co_name, cells.of_file(_file(frame))
    return Place(line, name, cell, None if cell is not None else Path(_file(frame)).name, inner_line, module)


def _line_of_cell(spots: Sequence[Spot], cells: CellFinder) -> int | None:
    """Return the line of the cell: the last one, since the body of a magic comes after the magic's own line."""
    found: int | None = None
    above: int | None = None  # the lines above the body of a magic, which counts its own from the first
    runs_cell = False  # %%capture runs its body as a cell of its own; %%gpumem keeps the lines of the page
    for frame, line in spots:
        if frame.f_code.co_name == "run_cell_magic" and found is not None:
            above, runs_cell = found + _blank_lines(frame), False
        elif above is not None and frame.f_code.co_name == "run_cell":
            runs_cell = True
        elif _is_cell(frame, cells) and not _is_function(frame):
            found, above = line + (above if above is not None and runs_cell else 0), None
        elif above is not None and _file(frame) in _BODIES:
            found, above = above + line, None
    return found


def _blank_lines(frame: FrameType) -> int:
    """Return how many lines IPython takes away above the first line of a magic's body."""
    body = dict(local_variables(frame)).get("cell")
    lines = body.splitlines() if type(body) is str else []
    return next((number for number, line in enumerate(lines) if line.strip()), 0)


def namespace_of(shell: "InteractiveShell | None") -> dict[str, Any]:
    """Return the user's variables: the shell's, without one those of ``__main__``."""
    return vars(sys.modules["__main__"]) if shell is None else shell.user_ns


def variables_at(shell: "InteractiveShell | None", spots: Sequence[Spot]) -> dict[str, Any]:
    """Return the variables a user knows at a place: the notebook's, and over them those of the functions that run.

    What a network's own code calls something is left out: that is not where one changes the batch.
    """
    cells = CellFinder(shell)
    names = dict(namespace_of(shell))
    torch = torch_module()
    inside = set[int]() if torch is None else set(map(id, calls_of(torch.nn.Module, spots)))
    for frame, _line in spots:
        if _is_function(frame) and id(frame) not in inside and _is_users(frame, cells):
            names.update((name, value) for name, value in local_variables(frame) if name != "self")
    return names


def calls_of(kind: type, spots: Sequence[Spot]) -> list[FrameType]:
    """Return the frames from the outermost call of a method of some class inwards."""
    frames = [frame for frame, _line in spots]
    start = (at for at, frame in enumerate(frames) if _may_be_method(frame) and owner_of(frame, kind) is not None)
    return frames[next(start, len(frames)) :]


def forwards_of(spots: Sequence[Spot], torch: ModuleType) -> list[Any]:
    """Return the networks that are being called, outermost first."""
    calls = [frame for frame, _line in spots if frame.f_code.co_name == "_call_impl" and _may_be_method(frame)]
    return [own for frame in calls if (own := owner_of(frame, torch.nn.Module)) is not None]


def is_recording(spots: Sequence[Spot], torch: ModuleType) -> bool:
    """Tell whether an ``autograd.Function`` runs, as in compiled code: what it makes is kept for backward."""
    held = (value for frame, _line in spots for _name, value in local_variables(frame))
    return any(issubclass(type(value), torch._C._FunctionBase) for value in held)


def module_names(namespaces: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Return the path of each ``nn.Module`` that the variables of some namespaces lead to, by its address."""
    torch = torch_module()
    names: dict[int, str] = {}
    if torch is None:
        return names
    for namespace in namespaces:
        for name, value in list(namespace.items()):
            if not name.startswith("_") and _is_module(value, torch):
                _name_tree(value, name, torch, names)
    return names


def _name_tree(root: object, name: str, torch: ModuleType, names: dict[int, str]) -> None:
    """Name a module and all below it, as one would type them."""
    stack = [(root, name)]
    while stack and len(names) < _MOST_MODULES:
        module, path = stack.pop()
        if names.setdefault(id(module), path) != path:
            continue
        children = plain_attribute(module, "_modules")
        indexed = issubclass(type(module), (torch.nn.Sequential, torch.nn.ModuleList))
        keyed = issubclass(type(module), torch.nn.ModuleDict)
        # the last on the stack comes first: the order is that of the definition
        for key, child in reversed(list(children.items())) if isinstance(children, dict) else ():
            if child is not None:
                stack.append((child, _child_path(path, str(key), indexed=indexed, keyed=keyed)))


def _child_path(path: str, key: str, *, indexed: bool, keyed: bool) -> str:
    if key == "_orig_mod":  # torch.compile's wrapper hands attributes on
        return path
    if keyed:
        return f"{path}[{key!r}]"
    return f"{path}[{key}]" if indexed and key.isdecimal() else f"{path}.{key}"


def _module_path(shell: "InteractiveShell | None", spots: Sequence[Spot], users: Sequence[FrameType]) -> str | None:
    torch = torch_module()
    if torch is None:
        return None
    calls = [frame for frame, _line in spots if _may_be_method(frame)]
    inner = [own for frame in calls if (own := owner_of(frame, torch.nn.Module)) is not None]
    if not inner:
        return None
    namespaces = [] if shell is None else [shell.user_ns]
    namespaces += [dict(local_variables(frame)) for frame in users if _is_function(frame)]
    names = module_names(namespaces)
    known = [names[id(module)] for module in inner if id(module) in names]
    if known:
        return known[-1]
    # what torch.compile generates has a class that nobody wrote
    classes = [type(one) for one in inner if not issubclass(type(one), torch.fx.GraphModule)]
    return str(type.__dict__["__name__"].__get__(classes[-1])) if classes else "compiled code"


def owner_of(frame: FrameType, kind: type = object) -> object | None:
    """Return the object whose method a frame runs, where it is of some class."""
    own = dict(local_variables(frame)).get("self")
    return own if issubclass(type(own), kind) else None


def _may_be_method(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_argcount > 0 and code.co_varnames[0] == "self"


def _is_module(value: object, torch: ModuleType) -> bool:
    return issubclass(type(value), torch.nn.Module)


def _is_cell(frame: FrameType, cells: CellFinder) -> bool:
    return cells.of_file(_file(frame)) is not None


def _is_function(frame: FrameType) -> bool:
    return frame.f_code.co_name != "<module>"


def _is_users(frame: FrameType, cells: CellFinder) -> bool:
    file = _file(frame)
    if _is_cell(frame, cells):
        return True
    return not is_of_library(file)


def is_of_library(file: str) -> bool:
    """Tell whether a file is of Python, of an installed package or of this one."""
    return file.startswith(("<", _OURS)) or any(part in file for part in _LIBRARIES)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename
