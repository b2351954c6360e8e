"""The live panel: core ipywidgets, drawn by one sampler thread while somebody looks at it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import ipywidgets as w

from jupyter_gpumem import nvml
from jupyter_gpumem.monitor import Monitor, Reading
from jupyter_gpumem.panel.actions import Actions
from jupyter_gpumem.panel.closing import close_all
from jupyter_gpumem.render import panel as draw
from jupyter_gpumem.render.chart import render_chart
from jupyter_gpumem.render.wire import wire_bytes
from jupyter_gpumem.sampler import Sampler
from jupyter_gpumem.sizes import format_bytes
from jupyter_gpumem.subshell import let_clicks_use_the_subshell

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from jupyter_gpumem.cells import CellRecorder

_WINDOWS = (("1 minute", 60.0), ("5 minutes", 300.0), ("15 minutes", 900.0), ("1 hour", 3600.0))
_MOST_DRAWS = 600  # of one window's length: a pixel of time or two
_NOT_STARTED_SECONDS = 5.0  # between two questions to NVML while CUDA is not started
_TICK_BYTES = 3072
_ENVELOPE_BYTES = 772  # of each message: its headers, and the names of what it changes
_QUICK_SECONDS = 0.1  # between ticks while a picture that somebody waits for is sent in parts
_QUICK_TICKS = 8


class PanelOptions(Protocol):
    """The options the panel follows."""

    interval: float
    """Seconds between samples."""
    scan_seconds: float
    """Seconds after which a search for holders is cut short."""


class Panel:
    """The panel of one shell; draws only while it is shown, and never writes a widget from two threads.

    The sampler thread alone writes the figures, the chart and the choosers' options; clicks write the rest.
    """

    def __init__(
        self,
        shell: "InteractiveShell",
        recorder: "CellRecorder",
        options: PanelOptions,
        *,
        monitor: Monitor | None = None,
        drawn: Callable[[], None] = lambda: None,
    ) -> None:
        self._shell = shell
        self._options = options
        self._monitor = monitor or Monitor(recorder)
        self._recorder = recorder
        self._after_drawing = drawn
        self._device: int | None = None
        self._drawn_device: int | None = None
        self._drawn: object = None
        self._shown = self._inline = self._seen_in_sidebar = False
        self._new_choice = self._figures_wait = False
        self._quick_ticks = 0
        self._left: set[w.Widget] = set()
        self._chart, self._chart_seen, self._chart_time = "", (-1, 0.0), 0.0
        self._places: list[w.Widget] = []
        self._open_places: set[w.Widget] = set()
        self._make_figures()
        self._actions = Actions(shell, recorder, self._poke, lambda: self._drawn_device, lambda: options.scan_seconds)
        self.widget = w.VBox([*self._parts(), *self._actions.widgets, self._neighbours])
        self.widget.add_class("gpumem-panel")
        for control in (self._devices, self._window, self._pause, *self._actions.controls):
            let_clicks_use_the_subshell(control)
        # pynvml is imported here, in a thread that may print, and not by the sampler
        nvml.device_count()
        self._sampler = Sampler(self._tick, options.interval)

    def _make_figures(self) -> None:
        self._head = w.HTML()
        self._names, self._live = w.HTML(), w.HTML()
        self._names.add_class("gm-names-box")
        self._neighbours, self._busy, self._lines = w.HTML(), w.HTML(), w.HTML()
        self._busy.add_class("gm-busy-box")
        self._devices = w.Dropdown(description="Device", layout={"display": "none"})
        self._window = w.Dropdown(description="Time shown", options=_WINDOWS, value=_WINDOWS[0][1])
        self._pause = w.ToggleButton(description="Pause", tooltip="Stop drawing; nothing is sent while paused")
        self._pause.add_class("gm-pause")
        self._pause.add_class("gm-small")
        self._devices.observe(self._device_chosen, "value")
        self._window.observe(lambda _change: self._choice_made(), "value")
        self._pause.observe(self._paused, "value")

    def _parts(self) -> list[w.Widget]:
        choose = w.HBox([self._window, self._pause])
        choose.add_class("gm-choose")
        live = w.Box([self._names, self._live])
        live.add_class("gm-live")
        return [w.HTML(draw.css()), self._head, self._devices, live, self._lines, choose, self._busy]

    def show(self, instead_of: str | None = None) -> None:
        """Show the panel below the running cell, or in place of the display of an id."""
        self._inline = True
        # a front end counts its views, and counts down when the output is cleared
        place = w.VBox([self.widget], _view_count=0)
        place.observe(self._views_counted, "_view_count")
        let_clicks_use_the_subshell(place)
        self._places.append(place)
        self._open_places.add(place)
        self._follow_viewers()
        data = {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": place.model_id,
            },
            "text/plain": "The GPU memory panel: live in a running notebook, not saved with it.",
        }
        shown = {} if instead_of is None else {"display_id": instead_of}
        self._shell.display_pub.publish(data, transient=shown, update=bool(shown))

    def _views_counted(self, change: dict[str, Any]) -> None:
        (self._open_places.add if change["new"] else self._open_places.discard)(change["owner"])
        self._follow_viewers()

    def moved_to_sidebar(self) -> None:
        """Leave the places below cells: a sidebar has answered, and shows the panel."""
        self._inline = False
        for place in self._places:
            place.children = (w.HTML(draw.render_moved()),)
        self._follow_viewers()

    def set_seen_in_sidebar(self, seen: bool) -> None:
        """Note whether a window shows the panel in its sidebar."""
        self._seen_in_sidebar = seen
        self._follow_viewers()

    def _follow_viewers(self) -> None:
        """Draw only while somebody looks; samples are taken from the first time on, so the chart has no gap."""
        shown = (self._inline and bool(self._open_places)) or self._seen_in_sidebar
        if shown and not self._shown:
            self._quick_ticks = _QUICK_TICKS
            self._sampler.start()
            self._poke()
        self._shown = shown

    def close(self) -> None:
        """Stop the thread and close every widget; safe to call twice."""
        self._sampler.stop()
        self._actions.close()
        for place in (*self._places, self.widget):
            close_all(place)

    def _poke(self) -> None:
        self._drawn = None
        self._sampler.poke()

    def _device_chosen(self, change: dict[str, Any]) -> None:
        self._device = change["new"]
        if self._device != self._drawn_device:
            self._choice_made()

    def _choice_made(self) -> None:
        """Draw once, also while paused: the picture is of what was chosen."""
        self._new_choice, self._quick_ticks = True, _QUICK_TICKS
        self._poke()

    def _paused(self, change: dict[str, Any]) -> None:
        self._pause.description = "Resume" if change["new"] else "Pause"
        self._poke()

    # what follows runs on the sampler thread

    def _tick(self) -> None:
        self._sampler.interval_seconds = self._options.interval
        reading = self._monitor.read()
        if not self._shown:
            return
        if self._pause.value and not self._new_choice:
            # a picture that stands still would not see the cell end
            self._busy.value = ""
            return
        if not reading.snapshots:
            self._new_choice, self._quick_ticks = False, 0
            running = self._recorder.current
            state: object = (self._monitor.clock() // _NOT_STARTED_SECONDS, running and running.started)
            if state != self._drawn:
                self._draw_not_started(reading)
                self._drawn = state
                self._after_drawing()
            return
        chosen = self._device
        device = chosen if chosen in reading.snapshots and chosen is not None else min(reading.snapshots)
        state = self._state(reading, device)
        if state != self._drawn:
            # a chart that is not due yet stays, and the next tick tries again
            self._drawn = state if self._draw(reading, device) else None
            self._after_drawing()
        if self._quick_ticks:
            self._quick_ticks -= 1
            self._sampler.interval_seconds = _QUICK_SECONDS

    def _state(self, reading: Reading, device: int) -> object:
        """Return everything the picture depends on, but for the passing of time."""
        use = self._monitor.use(device, reading.snapshots[device])
        running = self._recorder.current
        return (
            reading.rounded(),
            use,
            device,
            self._window.value,
            len(self._recorder.records),
            None if running is None else running.started,
            self._monitor.limit(device),
        )

    def _draw(self, reading: Reading, device: int) -> bool:
        """Write what one tick may send; return whether all of it is as new as the reading."""
        snapshot = reading.snapshots[device]
        self._drawn_device = device
        use = self._monitor.use(device, snapshot)
        parts = draw.live_parts(reading.kind, snapshot, use)
        if self._offer_devices(reading, device):
            return False
        texts = {
            self._busy: draw.render_busy(self._recorder.current),
            self._head: draw.render_head(reading, device),
            self._names: draw.render_names(parts),
            self._lines: draw.render_lines(reading.kind, self._monitor.limit(device)),
            self._neighbours: draw.render_neighbours(use.neighbours),
        }
        if self._write(texts):
            return False
        figures = draw.render_figures(parts) + draw.render_devices(reading, device)
        room = _TICK_BYTES - _ENVELOPE_BYTES - wire_bytes(figures)
        fresh = self._draw_chart(device, snapshot.total_bytes, room)
        self._live.value = figures + self._chart
        written = all(widget.value == text for widget, text in texts.items())
        if written:
            self._new_choice, self._quick_ticks = False, 0
        return fresh and written

    def _write(self, texts: dict[w.HTML, str]) -> bool:
        """Write the texts that changed, as many as one tick may send; return whether the figures have to wait.

        They wait for one tick at a time, or short cells one after the other would keep them from being drawn.
        """
        changed = [(widget, text) for widget, text in texts.items() if widget.value != text]
        # what found no room the last time goes first
        changed.sort(key=lambda pair: pair[0] not in self._left)
        self._figures_wait = bool(changed) and not self._figures_wait
        if self._figures_wait:
            room = _TICK_BYTES
            self._left = {widget for widget, _text in changed}
            for widget, text in changed:
                room -= _ENVELOPE_BYTES + wire_bytes(text)
                if room >= 0:
                    widget.value = text
                    self._left.discard(widget)
        return self._figures_wait

    def _draw_chart(self, device: int, total_bytes: int | None, max_bytes: int) -> bool:
        """Draw the chart, unless the last one differs by less than a line's width of time."""
        seen, now = (device, self._window.value), self._monitor.clock()
        if seen == self._chart_seen and now - self._chart_time < self._window.value / _MOST_DRAWS:
            return False
        self._chart = render_chart(self._monitor.chart(device, self._window.value, total_bytes), max_bytes)
        self._chart_seen, self._chart_time = seen, now
        return True

    def _draw_not_started(self, reading: Reading) -> None:
        devices = {}
        for device in range(nvml.device_count()):
            told = nvml.read_device(device)
            if told is not None:
                devices[f"GPU {device}"] = f"{told.name or ''} {format_bytes(told.total_bytes)}".strip()
        self._head.value = draw.render_not_started(devices, simulated=reading.simulated)
        self._names.value = self._live.value = self._lines.value = self._neighbours.value = ""
        self._busy.value = draw.render_busy(self._recorder.current)

    def _offer_devices(self, reading: Reading, device: int) -> bool:
        """Fill the device chooser where the devices have changed; return whether that was this tick's share."""
        options = [(reading.names[index][0], index) for index in reading.snapshots]
        if list(self._devices.options) == options:
            return False
        self._devices.options = options
        self._devices.value = device
        self._devices.layout.display = "" if len(options) > 1 else "none"
        self._quick_ticks = _QUICK_TICKS
        return True
