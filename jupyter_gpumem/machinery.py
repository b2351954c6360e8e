"""Work that Python's own libraries keep for later, and the call that makes each let go of it."""

from collections.abc import Callable
from typing import Any

from jupyter_gpumem.attributes import attribute_of, is_instance_dict, plain_attribute, type_module, type_name
from jupyter_gpumem.shares import Share, Shares
from jupyter_gpumem.trails import Trails

_MOST_STEPS = 60


class Machinery:
    """Finds what will run or be taken later. Holds the graph's objects: drop it before reporting."""

    def __init__(self, shares: Shares, trails: Trails) -> None:
        self._shares = shares
        self._graph = shares.graph
        self._trails = trails

    def release(self, share: Share) -> tuple[str, str] | None:
        """Return the code that makes whatever keeps memory for later let go, and a remark on it.

        None where something else keeps the memory too; no code where nobody has a name for what keeps it.
        """
        found: dict[str, str] = {}
        waiting = self._memory(share)
        below = dict.fromkeys(waiting, -1)
        while waiting:
            at = waiting.pop()
            rule, note = _RULES.get((type_module(self._graph.objects[at]), type_name(self._graph.objects[at])), _NONE)
            code = rule(self, at) if self._is_for_later(at, below) else None
            if code is not None:
                found[code] = note
                continue
            sources = self._shares.outer_sources(at)
            if not sources or at in self._graph.holders or len(below) > 4 * _MOST_STEPS:
                return None
            new = [source for source in sources if source not in below]
            below.update(dict.fromkeys(new, at))
            waiting += new
        if "" in found:
            return "", "let it run: nobody has what cancels it"
        return ("; ".join(found), "; ".join(dict.fromkeys(found.values()))) if found else None

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

    def _nothing(self, node: int) -> None:
        return None

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

_Rule = Callable[[Machinery, int], str | None]
_LATER, _TAKEN, _RUN = "or let it run", "takes all out of the queue", "runs what was registered"
_NONE: tuple[_Rule, str] = (Machinery._nothing, "")
_RULES: dict[tuple[str, str], tuple[_Rule, str]] = {
    ("threading", "Timer"): (Machinery._timer, _LATER),
    ("asyncio.events", "Handle"): (Machinery._call, _LATER),
    ("asyncio.events", "TimerHandle"): (Machinery._call, _LATER),
    ("asyncio.queues", "Queue"): (Machinery._queue, _TAKEN),
    ("asyncio.queues", "LifoQueue"): (Machinery._queue, _TAKEN),
    ("asyncio.queues", "PriorityQueue"): (Machinery._queue, _TAKEN),
    ("contextlib", "AsyncExitStack"): (Machinery._stack, _RUN),
    ("contextlib", "ExitStack"): (Machinery._stack, _RUN),
    ("concurrent.futures.thread", "_WorkItem"): (Machinery._work, _LATER),
}
