"""Drawing a garbage cycle by the names its author knows."""

from collections import deque
from collections.abc import Sequence
from types import FunctionType, TracebackType

from jupyter_gpumem.attributes import class_name, type_name
from jupyter_gpumem.heap import is_exactly, is_made_by_class, type_namespace
from jupyter_gpumem.held import HeldGraph


def garbage_words(graph: HeldGraph, members: Sequence[int]) -> str:
    """Name some garbage: an error or a class by itself, anything else as the shortest cycle in it."""
    error = _earlier_error(graph, members)
    if error is not None:
        return f"an earlier error ({error}) that nothing refers to"
    kind = next((item for item in map(graph.objects.__getitem__, members) if issubclass(type(item), type)), None)
    if kind is not None:
        return f"class {class_name(kind)}, which nothing refers to"
    return " → ".join(_cycle_words(graph, members)) or "unreachable objects"


def _cycle_words(graph: HeldGraph, members: Sequence[int]) -> list[str]:
    """Return the shortest cycle among some nodes as the names of their types, the first one last again."""
    inside = set(members)
    for start in members:
        if graph.objects[start] is None:
            continue
        before = {start: start}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for target in graph.successors[node]:
                if target == start:
                    path = [node]
                    while path[-1] != start:
                        path.append(before[path[-1]])
                    return _words(graph, [*path[::-1], start])
                if target in inside and target not in before:
                    before[target] = node
                    queue.append(target)
    return []


def _earlier_error(graph: HeldGraph, members: Sequence[int]) -> str | None:
    """Return the type of the error whose frames some garbage is, the outermost of a chain; None for other garbage."""
    items = [graph.objects[node] for node in members]
    if not any(type(item) is TracebackType for item in items):
        return None
    errors = {id(item): item for item in items if issubclass(type(item), BaseException)}
    fields = type_namespace(BaseException)
    inner = {id(fields[link].__get__(error)) for error in errors.values() for link in ("__cause__", "__context__")}
    outer = [error for address, error in errors.items() if address not in inner] or list(errors.values())
    return type_name(outer[0]) if outer else None


def _words(graph: HeldGraph, nodes: list[int]) -> list[str]:
    """Name a cycle as its author would: from an object of the user's, by functions and closures."""
    items = [graph.objects[node] for node in nodes[:-1]]
    first = next((place for place, item in enumerate(items) if is_made_by_class(type(item))), 0)
    words: list[str] = []
    for item in (*items[first:], *items[:first]):
        word = _cycle_word(item)
        if word is not None and words[-1:] != [word]:
            words.append(word)
    return [*words, words[0]] if words else []


def _cycle_word(item: object) -> str | None:
    """Return a word for one object of a cycle, None for the tables between an object and its attributes."""
    if type(item) is FunctionType:
        return "lambda" if item.__name__ == "<lambda>" else item.__name__
    if type_name(item) == "cell":
        return "closure"
    return None if is_exactly(item, (dict, tuple)) else type_name(item)
