"""Which cell something comes from."""

import ast
import re
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MOST_CELLS = 500


class CellFinder:
    """Finds the cells that set a name, defined a function or raised an error."""

    def __init__(self, shell: "InteractiveShell | None") -> None:
        self._sources: list[str] = []
        self._files: dict[str, int] = {}
        self._bound: dict[int, frozenset[str]] = {}
        if shell is not None:
            history: Any = shell.user_ns.get("_ih")
            self._sources = [str(source) for source in history] if type(history) is list else []
            self._files = dict(getattr(shell.compile, "_filename_map", {}))

    def that_set(self, name: str) -> int | None:
        """Return the newest cell that assigns a name, as far as the history goes."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        for number in range(len(self._sources) - 1, max(0, len(self._sources) - _MOST_CELLS), -1):
            if word.search(self._sources[number]) and name in self._names_bound(number):
                return number
        return None

    def of_file(self, filename: str) -> int | None:
        """Return the cell whose code has a file name of IPython's."""
        return self._files.get(filename)

    def of_traceback(self, traceback: TracebackType | None) -> int | None:
        """Return the cell that ran when an error was raised: the outermost one among its frames."""
        while traceback is not None:
            number = self.of_file(traceback.tb_frame.f_code.co_filename)
            if number is not None:
                return number
            traceback = traceback.tb_next
        return None

    def _names_bound(self, number: int) -> frozenset[str]:
        if number not in self._bound:
            self._bound[number] = _bound_names(self._sources[number])
        return self._bound[number]


def _bound_names(source: str) -> frozenset[str]:
    # magics and shell lines are not Python: a line of theirs must not hide the others
    plain = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
    try:
        tree = ast.parse(plain)
    except (SyntaxError, ValueError):
        return frozenset(re.findall(r"^\s*(\w+)\s*=[^=]", source, re.MULTILINE))
    names = set()
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        if not isinstance(node, ast.Lambda):
            stack.extend(ast.iter_child_nodes(node))
    return frozenset(names)
