"""Which windows of the front end show the panel, also when one is gone without a word."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jupyter_gpumem.cells import CellRecorder

_ASK_SECONDS = 60.0
_ANSWER_SECONDS = 20.0
_LATE_SECONDS = 1.0  # of the loop, beyond which it was blocked


class Viewers:
    """The windows that say they show the panel; one that crashed or fell asleep is found out by a question.

    The kernel asks, and only after it has drawn: a heartbeat of the windows would keep an idle kernel from being
    culled. ``ask`` has to reach every window, and each that shows the panel to answer by :meth:`came`.
    """

    def __init__(
        self,
        loop: Any,
        recorder: "CellRecorder",
        ask: Callable[[], None],
        changed: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._recorder = recorder
        self._ask = ask
        self._changed = changed
        self._clock = clock
        self._clients: set[str] = set()
        self._silent: set[str] = set()
        self._asked = float("-inf")

    def __bool__(self) -> bool:
        return bool(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def came(self, client: str) -> None:
        """Note a window that shows the panel, newly or still."""
        if not self._clients:
            self._asked = self._clock()
        self._clients.add(client)
        self._silent.discard(client)

    def left(self, client: str) -> None:
        """Note a window that no longer shows the panel."""
        self._clients.discard(client)
        self._silent.discard(client)

    def clear(self) -> None:
        """Forget every window."""
        self._clients.clear()
        self._silent.clear()

    def drawn(self) -> None:
        """Ask who is still there, once in a while; called by the thread that draws."""
        if self._clients and not self._silent and self._clock() - self._asked >= _ASK_SECONDS:
            self._asked = self._clock()
            self._loop.add_callback(self._question)

    # what follows runs on the kernel's loop

    def _question(self) -> None:
        self._silent = set(self._clients)
        self._ask()
        self._wait(self._silent)

    def _wait(self, silent: set[str]) -> None:
        since = self._clock()
        self._loop.call_later(_ANSWER_SECONDS, self._judge, silent, since)

    def _judge(self, silent: set[str], since: float) -> None:
        """Forget who has not answered; while an answer may still lie behind a cell, wait anew."""
        if not silent or silent is not self._silent:
            return
        if self._busy_since(since):
            self._wait(silent)
            return
        self._clients -= silent
        self._silent = set()
        self._changed()

    def _busy_since(self, since: float) -> bool:
        """Tell whether messages may have waited: behind a cell, or because the loop was blocked."""
        records = self._recorder.records
        ended = records[-1].ended if records else None
        late = self._clock() > since + _ANSWER_SECONDS + _LATE_SECONDS
        return late or self._recorder.running or (ended is not None and ended > since)
