"""Loading and unloading: everything that ``%load_ext`` ties to the shell, and ``%unload_ext`` unties."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from traitlets import TraitError

from jupyter_gpumem.after_cell import show
from jupyter_gpumem.cellmagic import strip_magic_line
from jupyter_gpumem.completion import MAGICS, complete
from jupyter_gpumem.config import GpuMemConfig
from jupyter_gpumem.device import cuda_possible, cuda_started, current_probe, torch_module
from jupyter_gpumem.history import History
from jupyter_gpumem.magics import GpuMem
from jupyter_gpumem.peaks import tracker
from jupyter_gpumem.render.cells import history_page
from jupyter_gpumem.render.layout import Block, Page, Row, Span, code, to_html, to_text
from jupyter_gpumem.sizes import format_bytes

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_ATTRIBUTE = "_jupyter_gpumem"


class Extension:
    """The extension in one shell."""

    def __init__(self, shell: "InteractiveShell") -> None:
        self._shell = shell
        dropped = _drop_invalid_options(shell)
        self.magics = GpuMem(shell)
        recorder, reports = self.magics.recorder, self.magics.reports
        recorder.on_start.append(reports.cell_started)
        recorder.on_end.append(reports.cell_ended)
        self._events = {
            "pre_run_cell": self._guarded(recorder.pre_run_cell),
            "post_run_cell": self._guarded(recorder.post_run_cell),
        }
        self._tie()
        self.magics.sidebar.start()
        show(shell, Page((Block((*dropped, *_greeting()), flow=True),)))

    def _tie(self) -> None:
        tracker.stay()
        self._shell.register_magics(self.magics)
        for event, callback in self._events.items():
            self._shell.events.register(event, callback)
        self._shell.input_transformer_manager.cleanup_transforms.append(strip_magic_line)
        for magic in MAGICS:
            self._shell.set_hook("complete_command", complete, str_key=magic)  # type: ignore[no-untyped-call]  # IPython
        formatters = self._formatters()
        formatters["text/plain"].for_type(
            History, lambda value, p, _cycle: p.text(to_text(history_page(value.records)))
        )
        formatters["text/html"].for_type(History, lambda value: to_html(history_page(value.records)))

    def _formatters(self) -> dict[str, Any]:
        formatter = self._shell.display_formatter
        return {} if formatter is None else formatter.formatters

    def untie(self) -> None:
        """Take back everything; safe to call twice."""
        shell = self._shell
        for event, callback in self._events.items():
            with contextlib.suppress(ValueError):
                shell.events.unregister(event, callback)
        with contextlib.suppress(ValueError):
            shell.input_transformer_manager.cleanup_transforms.remove(strip_magic_line)
        for kind, names in self.magics.magics.items():
            for name in names:
                shell.magics_manager.magics[kind].pop(name, None)
        shell.magics_manager.registry.pop(type(self.magics).__name__, None)
        with contextlib.suppress(ValueError):
            shell.configurables.remove(self.magics)  # type: ignore[arg-type]  # IPython says only shells are in it
        for magic in MAGICS:
            shell.strdispatchers["complete_command"].strs.pop(magic, None)
        for mime in ("text/plain", "text/html"):
            self._formatters()[mime].pop(History, None)
        self.magics.reports.close()
        self.magics.sidebar.close()
        self.magics.recorder.stop()
        tracker.uninstall()

    def _guarded(self, callback: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a callback that can never spoil a cell: it unties the extension and says so once."""

        def guarded(argument: Any) -> None:
            try:
                callback(argument)
            except KeyboardInterrupt:
                show(self._shell, Page((Block(((Span("the report was interrupted", style="quiet"),),)),)))
            except Exception as error:
                self.untie()
                text = f"jupyter_gpumem stopped recording: {type(error).__name__}: {error}"
                show(self._shell, Page((Block(((Span(text, style="warn"), code("%reload_ext jupyter_gpumem")),)),)))

        return guarded


def load(shell: "InteractiveShell") -> None:
    """Load the extension into a shell; a second call changes nothing."""
    if getattr(shell, _ATTRIBUTE, None) is None:
        setattr(shell, _ATTRIBUTE, Extension(shell))


def unload(shell: "InteractiveShell") -> None:
    """Take the extension out of a shell; safe to call twice."""
    extension: Extension | None = getattr(shell, _ATTRIBUTE, None)
    if extension is not None:
        extension.untie()
        delattr(shell, _ATTRIBUTE)


def _greeting() -> tuple[Row, ...]:
    """Say what a person cannot guess: no GPU here, or memory that was there before."""
    if not cuda_possible() and not cuda_started():
        torch = torch_module()
        text = "jupyter_gpumem: no CUDA device here. Cells report this process's RAM."
        then = "%gpumem simulate 24GiB   # before importing torch"
        if torch is not None:
            then = "restart the kernel, then %gpumem simulate 24GiB before importing torch"
        return ((Span(text), Span(f"→ {then}", style="quiet")),)
    probe = current_probe()
    held = sum(probe.snapshot(device).allocated_bytes for device in probe.devices())
    if not held:
        return ()
    text = f"jupyter_gpumem: {format_bytes(held)} are allocated by earlier cells; the history starts now."
    return ((Span(text, f"{held:,} bytes"), code("%gpumem leaks")),)


def _drop_invalid_options(shell: "InteractiveShell") -> tuple[Row, ...]:
    """Drop options from the configuration that no longer validate: an invalid ``%config`` value stays in it."""
    section, rows = shell.config.get("GpuMem", {}), []
    for name, value in list(section.items()):
        try:
            setattr(GpuMemConfig(), name, value)
        except TraitError as error:
            del section[name]
            rows.append((Span(f"GpuMem.{name} = {value!r} is not used: {error}", style="warn"),))
    return tuple(rows)
