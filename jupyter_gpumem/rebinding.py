"""Which names a cell binds anew without using what they were bound to: their old values could go first."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a name by a statement that ends on ``end``."""

    name: str
    binds: bool
    end: int


def rebound_names(source: str, line: int = 1) -> frozenset[str]:
    """Return the names that a cell's statements bind, from the one at ``line`` on, before they use them."""
    first: dict[str, bool] = {}
    for use in _uses(_parsed(source)):
        if use.end >= line:
            first.setdefault(use.name, use.binds)
    return frozenset(name for name, binds in first.items() if binds)


def names_in_loops(source: str) -> frozenset[str]:
    """Return the names that a loop of the cell's own binds, over and over again."""
    loops = [node for node in ast.walk(ast.Module(_parsed(source), [])) if isinstance(node, _LOOPS)]
    return frozenset(use.name for use in _uses(loops) if use.binds)


def is_in_loop(source: str, line: int) -> bool:
    """Tell whether a line of a cell is run again by a loop of the cell's own."""
    return any(
        node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        for node in ast.walk(ast.Module(_parsed(source), []))
        if isinstance(node, _LOOPS)
    )


def _parsed(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError):
        return []


def _uses(body: Iterable[ast.stmt]) -> Iterator[_Use]:
    """Give the uses of names by some statements, roughly in the order in which they happen."""
    for statement in body:
        blocks = [] if isinstance(statement, _DEFINITIONS) else _blocks(statement)
        inner = {id(node) for block in blocks for node in block}
        end = statement.end_lineno or 0
        if blocks:
            end = max(statement.lineno, blocks[0][0].lineno - 1)
        names = list(_names(statement, inner))
        yield from (_Use(name, False, end) for name, binds in names if not binds)
        yield from (_Use(name, True, end) for name, binds in names if binds)
        for block in blocks:
            yield from _uses(block)


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the lists of statements inside of a compound one."""
    parts: list[ast.AST] = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    fields = ("body", "orelse", "finalbody")
    blocks = [getattr(part, field, None) for part in parts for field in fields]
    return [block for block in blocks if isinstance(block, list) and block]


def _names(statement: ast.stmt, inner: set[int]) -> Iterator[tuple[str, bool]]:
    """Give the names a statement itself uses, and whether it binds them; what a ``def`` does, its calls do."""
    if isinstance(statement, _DEFINITIONS):
        yield statement.name, True
        return
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name):
            # an augmented assignment reads first, and so does a deletion
            if isinstance(node.ctx, ast.Store) and not isinstance(statement, ast.AugAssign):
                yield node.id, True
            else:
                yield node.id, False
        stack.extend(child for child in ast.iter_child_nodes(node) if id(child) not in inner)
