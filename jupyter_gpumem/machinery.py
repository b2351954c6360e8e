"""Work that Python's own libraries keep for later, and the call that makes each let go of it."""

from collections.abc import Callable
from typing import Any

from jupyter_gpumem.attributes import plain_attribute, type_module, type_name
from jupyter_gpumem.shares import Share, Shares
from jupyter_gpumem.trails import Trails

_MOST_STEPS = 60


class Machinery:
    """Finds timers, scheduled calls and work that waits in a pool. Holds its objects: drop it before reporting."""

    def __init__(self, shares: Shares, trails: Trails) -> None:
        self._shares = shares
        self._graph = shares.graph
        self._trails = trails

    def release(self, share: Share) -> str | None:
        """Return the code that makes whatever keeps memory for later let go, None where something else keeps it too.

        Empty where nobody has a name for it.
        """
        found: dict[str, None] = {}
        waiting = self._memory(share)
        seen = set(waiting)
        while waiting:
            at = waiting.pop()
            rule = _RULES.get((type_module(self._graph.objects[at]), type_name(self._graph.objects[at])))
            if rule is not None:
                found[rule(self, at)] = None
                continue
            sources = self._shares.outer_sources(at)
            if not sources or at in self._graph.holders or len(seen) > 4 * _MOST_STEPS:
                return None
            new = [source for source in sources if source not in seen]
            seen.update(new)
            waiting += new
        return None if not found else "" if "" in found else "; ".join(found)

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

    def _work(self, node: int) -> str:
        for queue in self._shares.outer_sources(node):
            for source in self._shares.outer_sources(queue):
                for item in (source, *self._shares.outer_sources(source)):
                    executor: Any = self._graph.objects[item]
                    if type_name(executor) == "ThreadPoolExecutor":
                        code = self._trails.code_of(executor)
                        return "" if code is None else f"{code}.shutdown(wait=False, cancel_futures=True)"
        return ""


_RULES: dict[tuple[str, str], Callable[[Machinery, int], str]] = {
    ("threading", "Timer"): Machinery._timer,
    ("asyncio.events", "Handle"): Machinery._call,
    ("asyncio.events", "TimerHandle"): Machinery._call,
    ("concurrent.futures.thread", "_WorkItem"): Machinery._work,
}
