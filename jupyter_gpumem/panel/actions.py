"""The panel's buttons: Free memory, Find leaks, Release, and what they answer."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.panel.holders import Holders
from jupyter_gpumem.render import panel as draw
from jupyter_gpumem.render.panel_words import free_words, leak_words

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from jupyter_gpumem.cells import CellRecord, CellRecorder
    from jupyter_gpumem.holders import Holder, LeakReport

_SAME_CLICK_SECONDS = 0.4
"""A click that arrives this soon after the last answer was made before the answer could be seen."""

_WAITS = "Find leaks waits for the running cell to end."
_BUSY = "A cell is running, so names, outputs and errors are left alone: click again after it for the rest."


class Actions:
    """The buttons and the last result; one action at a time, whichever thread a click arrives on.

    The buttons are toggles, pressed from the click until the answer: where the kernel is too busy to take
    the click, the front end alone shows that it is queued.
    """

    def __init__(
        self,
        shell: "InteractiveShell",
        recorder: "CellRecorder",
        changed: Callable[[], None],
        device: Callable[[], int | None],
        budget_seconds: Callable[[], float],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shell = shell
        self._recorder = recorder
        self._changed = changed
        self._device = device
        self._budget_seconds = budget_seconds
        self._clock = clock
        self._one_at_a_time = threading.Lock()
        self._answered: tuple[object, float] = (None, float("-inf"))
        self.answers = 0
        """How many clicks have been acted on."""
        self._waiting = False
        self._cache_waits = False
        self._free = _button("Free memory", "What %gpu_free does: outputs, last error, garbage, caches")
        self._free.add_class("gm-main")
        self._leaks = _button("Find leaks", "Who holds what, and how to get it back; frees nothing")
        self._free.observe(lambda _change: self._clicked(self._free, self._free_memory), "value")
        self._leaks.observe(lambda _change: self._clicked(self._leaks, self._find_leaks), "value")
        self._result = w.HTML()
        self._result.add_class("gm-answer")
        self._account = w.HTML()
        self._holders = Holders(self._release)
        recorder.on_end.append(self._cell_ended)

    @property
    def controls(self) -> tuple[w.Widget, ...]:
        """The widgets a person clicks."""
        return self._free, self._leaks

    @property
    def widgets(self) -> tuple[w.Widget, ...]:
        """The widgets in their order from top to bottom."""
        buttons = w.HBox([self._free, self._leaks])
        buttons.add_class("gm-buttons")
        return buttons, self._result, self._account, self._holders.widget

    def close(self) -> None:
        """Let the recorder go."""
        if self._cell_ended in self._recorder.on_end:
            self._recorder.on_end.remove(self._cell_ended)

    def _clicked(self, button: w.ToggleButton, act: Callable[[], Sequence[str] | None]) -> None:
        """Act once for a button that was pressed, and let it go."""
        if not button.value:
            self._take_back(button)
            return
        if self._handed_over(lambda: self._clicked(button, act)):
            return
        waits = False
        try:
            # rows move up after a release: the second half of a double click may hit another one
            waits = self._answer(button if button in self.controls else self._holders, act)
        finally:
            if not waits:
                button.value = False

    def _take_back(self, button: w.ToggleButton) -> None:
        """Forget what waits for the running cell when its button is pressed again."""
        if button is self._leaks and self._waiting:
            self._waiting = False
            if self._result.value == draw.render_result((_WAITS,)):
                self._result.value = ""

    def _handed_over(self, call: Callable[[], None]) -> bool:
        """Hand a click to the main thread, where no cell can start in the middle of it.

        Not where a cell is running: then only what is safe beside it is done, at once, on this thread.
        """
        loop = self._loop
        if threading.current_thread() is threading.main_thread() or loop is None or self._recorder.running:
            return False
        loop.add_callback(call)
        return True

    @property
    def _loop(self) -> Any:
        return getattr(getattr(self._shell, "kernel", None), "io_loop", None)

    def _answer(self, asked: object, act: Callable[[], Sequence[str] | None]) -> bool:
        """Act and show the answer, unless something is under way or this just done; return whether it has to wait."""
        last, when = self._answered
        again = last == asked and self._clock() - when <= _SAME_CLICK_SECONDS
        if again or not self._one_at_a_time.acquire(blocking=False):
            return False
        words: Sequence[str] | None = ()
        try:
            words = self._words(act)
        finally:
            if words is not None:
                self._answered = (asked, self._clock())
                self.answers += 1
            self._one_at_a_time.release()
        if words is None:
            return True
        self._result.value = draw.render_result(words)
        self._changed()
        return False

    def _words(self, act: Callable[[], Sequence[str] | None]) -> Sequence[str] | None:
        try:
            return act()
        except GpuMemError as error:
            return (str(error),)
        except Exception as error:
            return (f"That failed: {type(error).__name__}: {error}",)

    def _free_memory(self) -> Sequence[str]:
        from jupyter_gpumem import release

        if self._recorder.running:
            report = release.free_running()
            self._cache_waits = self._cache_waits or report.cache_waits
            # names are untouched, so the rows are worth keeping; the account's cache is not
            self._account.value = ""
            self._holders.mark_old()
            return (*free_words(report), _BUSY)
        report = release.free(self._shell)
        self._account.value = ""
        if report.held is None:
            self._holders.clear()
        else:
            self._holders.show(report.held)
        return free_words(report)

    def _find_leaks(self) -> Sequence[str] | None:
        if self._recorder.running:
            # a scan beside running code would stall it; the button stays pressed until the cell ends
            self._waiting = True
            self._result.value = draw.render_result((_WAITS,))
            return None
        return leak_words(self._look())

    def _look(self) -> "LeakReport":
        """Search, and show the account of the chosen device and the holders of all."""
        from jupyter_gpumem.accounts import take_account
        from jupyter_gpumem.leak_report import find_leaks

        report = find_leaks(self._shell, budget_seconds=self._budget_seconds())
        device = self._device()
        accounts = [one for one in take_account(self._shell) if device is None or one.device == device]
        when = time.strftime("%H:%M:%S")
        self._account.value = "".join(draw.render_account(account, when) for account in accounts[:1])
        self._holders.show(report)
        return report

    def _release(self, button: w.ToggleButton, holder: "Holder") -> None:
        """Release one holder, then look again."""

        def act() -> Sequence[str]:
            from jupyter_gpumem import release

            if self._recorder.running:
                return ("A cell is running, so names are left alone: click again when it has ended.",)
            words = free_words(release.release_holder(self._shell, holder))
            self._look()
            return words

        self._clicked(button, act)

    def _cell_ended(self, record: "CellRecord", _result: Any) -> None:
        """Do what waited, once IPython is done with the cell."""
        loop = self._loop
        if record.depth > 0 or loop is None:
            return
        if self._cache_waits:
            self._cache_waits = False
            loop.add_callback(self._return_cache)
        if self._waiting:
            self._waiting = False
            loop.add_callback(self._clicked, self._leaks, self._find_leaks)

    def _return_cache(self) -> None:
        """Return the cache that a click during the cell could not."""
        from jupyter_gpumem import release

        words = self._words(lambda: free_words(release.free_cache()))
        self._result.value = draw.render_result(words or ())
        self._changed()


def _button(text: str, tooltip: str) -> w.ToggleButton:
    button = w.ToggleButton(description=text, tooltip=tooltip)
    button.add_class("gm-queue")
    return button
