"""The table of who holds what, with a Release button on each row that can be released."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import ipywidgets as w

from jupyter_gpumem.panel.closing import close_all
from jupyter_gpumem.render import panel as draw
from jupyter_gpumem.subshell import let_clicks_use_the_subshell

if TYPE_CHECKING:
    from jupyter_gpumem.holders import Holder, LeakReport

_MOST_ROWS = 20
_TOO_SOON_SECONDS = 0.4  # a double click must not confirm what its first half asked
_TOO_LATE_SECONDS = 10.0


class Holders:
    """The rows of the last leak report; empty until it is asked for."""

    def __init__(
        self, release: "Callable[[w.ToggleButton, Holder], None]", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._release = release
        self._clock = clock
        self._rows = w.VBox()
        self._heading = w.HTML()
        self._title = ""
        self._more = w.HTML()
        self.widget = w.VBox([self._heading, self._rows, self._more])

    @property
    def rows(self) -> Sequence[w.Widget]:
        """The rows shown, the largest first."""
        return tuple(self._rows.children)

    def clear(self) -> None:
        """Forget the rows: they speak of memory that may be gone."""
        old, self._rows.children = self._rows.children, ()
        for row in old:
            close_all(row)
        self._heading.value = self._more.value = self._title = ""

    def mark_old(self) -> None:
        """Say in the heading that memory was freed since the rows were measured."""
        if self._title:
            self._heading.value = draw.render_heading(f"{self._title}, before Free memory")

    def show(self, report: "LeakReport") -> None:
        """Show who can give memory back, the largest first, then what is in use."""
        self.clear()
        found = [*report.holders, *report.in_use]
        several = sum(device.allocated_bytes > 0 for device in report.devices) > 1
        self._rows.children = [self._row(holder, several) for holder in found[:_MOST_ROWS]]
        self._title = time.strftime("Held by, at %H:%M:%S") if found else ""
        self._heading.value = draw.render_heading(self._title) if found else ""
        self._more.value = draw.render_more(found[_MOST_ROWS:])

    def _row(self, holder: "Holder", several_devices: bool) -> w.HBox:
        text = w.HTML(draw.render_holder(holder, several_devices))
        row = w.HBox([text, *([self._button(holder)] if holder.can_release else [])])
        row.add_class("gm-row")
        return row

    def _button(self, holder: "Holder") -> w.ToggleButton:
        # the name a screen reader reads has to tell one row's button from another's
        button = w.ToggleButton(description="Release", tooltip=f"Release {holder.path}: {holder.remedy}")
        button.add_class("gm-queue")
        button.add_class("gm-small")
        asked = [float("-inf")]
        must_ask = holder.section == "in use"

        def pressed(_change: object) -> None:
            waited = self._clock() - asked[0]
            if not button.value or not must_ask or _TOO_SOON_SECONDS < waited < _TOO_LATE_SECONDS:
                self._release(button, holder)
                return
            if waited >= _TOO_LATE_SECONDS:
                asked[0] = self._clock()
                button.description = "In use: really?"
            button.value = False

        button.observe(pressed, "value")
        let_clicks_use_the_subshell(button)
        return button
