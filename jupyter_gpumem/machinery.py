"""Work that Python's own libraries keep for later, and the call that makes each let go of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jupyter_gpumem.attributes import attribute_of, is_instance_dict, plain_attribute, type_module, type_name
from jupyter_gpumem.shares import Share, Shares
from jupyter_gpumem.trails import Trails

_MOST_STEPS = 60


@dataclass(frozen=True, slots=True)
class Later:
    """The code that lets go, empty where nobody has a name for it; a remark; and what keeps it, where no path tells."""

    code: str
    note: str
    what: str


class Machinery:
    """Finds what will run or be taken later. Holds the graph's objects: drop it before reporting."""

    def __init__(self, shares: Shares, trails: Trails) -> None:
        self._shares = shares
        self._graph = shares.graph
        self._trails = trails

    def release(self, share: Share) -> Later | None:
        """Return what makes whatever keeps memory for later let go, None where something else keeps it too."""
        found: dict[str, _Rule] = {}
        waiting = self._memory(share)
        below = dict.fromkeys(waiting, -1)
        while waiting:
            at = waiting.pop()
            rule = _RULES.get((type_module(self._graph.objects[at]), type_name(self._graph.objects[at])))
            code = rule.code(self, at) if rule is not None and self._is_for_later(at, below) else None
            if rule is not None and code is not None:
                found[code] = rule
                continue
            sources = self._shares.outer_sources(at)
            if not sources or at in self._graph.holders or len(below) > 4 * _MOST_STEPS:
                return None
            new = [source for source in sources if source not in below]
            below.update(dict.fromkeys(new, at))
            waiting += new
        if "" in found:
            return Later("", "let it run: nobody has what cancels it", found[""].what)
        if not found:
            return None
        notes = dict.fromkeys(rule.note for rule in found.values())
        return Later("; ".join(found), "; ".join(notes), _WORK.what if _WORK in found.values() else "")

    def _is_for_later(self, node: int, below: dict[int, int]) -> bool:
        """Tell whether something is what an object keeps for later, not another attribute that a program gave it."""
        if below[node] < 0:
            return False
        owner, item = self._graph.objects[node], self._graph.objects[below[node]]
        if is_instance_dict(owner, item):
            item = self._graph.objects[below[below[node]]]
        return attribute_of(owner, item) in _FIELDS

    def _memory(self, share: Share) -> list[int]:
        nodes = list(share.nodes or [share.node])
        for node in nodes:
            nodes += self._shares.carriers(node) if len(nodes) <= _MOST_STEPS else ()
        return [node for node in nodes if node in self._graph.memory]

    def _timer(self, node: int) -> str:
        timer = self._graph.objects[node]
        code = self._trails.code_of(timer)
        if code is not None and not code.startswith("__import__"):
            return f"{code}.cancel(); {code}.join(); del {code}"
        name = plain_attribute(timer, "_name")
        if type(name) is not str:
            return ""
        every = "__import__('threading').enumerate()"
        return f"[(timer.cancel(), timer.join()) for timer in {every} if timer.name == {name!r}];"

    def _call(self, node: int) -> str:
        code = self._trails.code_of(self._graph.objects[node])
        return "" if code is None or code.startswith("__import__") else f"{code}.cancel()"

    def _stack(self, node: int) -> str | None:
        code = self._trails.code_of(self._graph.objects[node])
        close = "{}.close()" if type_name(self._graph.objects[node]) == "ExitStack" else "await {}.aclose()"
        return None if code is None else close.format(code)

    def _queue(self, node: int) -> str | None:
        code = self._trails.code_of(self._graph.objects[node])
        return None if code is None else f"[{code}.get_nowait() for _ in range({code}.qsize())];"

    def _work(self, node: int) -> str:
        for queue in self._shares.outer_sources(node):
            for source in self._shares.outer_sources(queue):
                for item in (source, *self._shares.outer_sources(source)):
                    executor: Any = self._graph.objects[item]
                    if type_name(executor) == "ThreadPoolExecutor":
                        code = self._trails.code_of(executor)
                        return "" if code is None else f"{code}.shutdown(wait=False, cancel_futures=True)"
        return ""


_FIELDS = ("args", "kwargs", "function", "_args", "_callback", "_context", "fn", "task", "_queue", "_exit_callbacks")
"""Where the objects below have what they keep for later."""


@dataclass(frozen=True, slots=True)
class _Rule:
    code: Callable[[Machinery, int], str | None]
    what: str
    note: str = "or let it run"


_CALL = _Rule(Machinery._call, "a call that an event loop is to make")
_WORK = _Rule(Machinery._work, "work that waits in a pool of threads")
_QUEUE = _Rule(Machinery._queue, "", "takes all out of the queue")
_STACK = _Rule(Machinery._stack, "", "runs what was registered")
_RULES = {
    ("threading", "Timer"): _Rule(Machinery._timer, "a timer"),
    ("asyncio.events", "Handle"): _CALL,
    ("asyncio.events", "TimerHandle"): _CALL,
    ("asyncio.queues", "Queue"): _QUEUE,
    ("asyncio.queues", "LifoQueue"): _QUEUE,
    ("asyncio.queues", "PriorityQueue"): _QUEUE,
    ("contextlib", "AsyncExitStack"): _STACK,
    ("contextlib", "ExitStack"): _STACK,
    ("concurrent.futures.thread", "_WorkItem"): _WORK,
}
