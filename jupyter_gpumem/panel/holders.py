"""The table of who holds what, with a Release button on each row that can be released."""

from collections.abc import Callable
from typing import Any

import ipywidgets as w


class Holders:
    """The rows of the last leak report; empty until it is asked for."""

    def __init__(self, release: Callable[[Any], None]) -> None:
        self._release = release
        self._title = w.HTML()
        self._rows = w.VBox()
        self.widget = w.VBox([self._title, self._rows])

    def clear(self) -> None:
        """Forget the rows: they speak of memory that may be gone."""
        self._rows.children = ()
        self._title.value = ""

    def show(self, report: Any) -> None:
        """Show the holders of a report, the largest first."""
