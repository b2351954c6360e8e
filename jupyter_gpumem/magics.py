"""The magics: parse the line, call what does the work, show what it returns."""

import functools
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    cell_magic,
    line_cell_magic,
    line_magic,
    magics_class,
    no_var_expand,
)

from jupyter_gpumem import simgpu
from jupyter_gpumem.after_cell import CellReports, show
from jupyter_gpumem.arguments import (
    HelpShown,
    did_you_mean,
    gpu_fit_parser,
    gpu_free_parser,
    gpumem_cell_parser,
    gpumem_parser,
)
from jupyter_gpumem.cells import CellRecorder
from jupyter_gpumem.config import GpuMemConfig
from jupyter_gpumem.device import check_device, current_probe, limit_bytes, set_limit, torch_module
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.heap import collector_paused
from jupyter_gpumem.history import History
from jupyter_gpumem.peaks import tracker
from jupyter_gpumem.render.layout import Block, Page, Span, code, quiet, size
from jupyter_gpumem.sidebar import Sidebar
from jupyter_gpumem.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Magic = Callable[..., Any]


def _answers(method: Magic) -> Magic:
    """Show a mistake as IPython's one line, and nothing after ``--help``."""

    @functools.wraps(method)
    def answered(self: "GpuMem", *args: str) -> Any:
        try:
            return method(self, *args)
        except HelpShown:
            return None
        except GpuMemError as error:
            mistake = str(error)
        # raised out here, since an error keeps the one it was raised in, and that one our frames
        raise UsageError(mistake)

    return answered


@magics_class
class GpuMem(Magics, GpuMemConfig):
    """GPU memory of each cell, who holds it, and how to get it back."""

    shell: "InteractiveShell"

    def __init__(self, shell: "InteractiveShell", **options: Any) -> None:
        super().__init__(shell=shell, **options)
        self.recorder = CellRecorder(exact=lambda: self.peak == "exact")
        self.reports = CellReports(shell, self)
        self.marks: dict[str, Any] = {}
        self.sidebar = Sidebar(shell, self.recorder, self)

    @no_var_expand
    @line_cell_magic
    @_answers
    def gpumem(self, line: str, cell: str | None = None) -> Any:
        """Show where GPU memory is; as a cell magic, one cell in detail.

        Examples::

            %gpumem                       where the memory is now, as an account that sums
            %gpumem leaks                 who holds what, by path, with the fix; frees nothing
            %gpumem advise                what would give memory back, with the code to change
            %gpumem on                    a line after each cell that moved GPU memory (off: none)
            %gpumem history --csv f.csv   a row a cell; the value has to_pandas()
            %gpumem plot --save f.png     allocated, reserved and peak over the cells
            %gpumem mark before           remember what is there ...
            %gpumem diff before           ... and say what is new since
            %gpumem panel                 the live panel
            %gpumem limit 8GiB            cap this process (50%, off)
            %gpumem simulate 24GiB        a simulated GPU, before torch is imported

            %%gpumem -o record            this cell: a table for each device, and the variables
            train()                       (--lines: what each source line took; --timeline: when)
        """
        if cell is not None:
            # an ordinary `%%gpumem` cell never comes here: its line was taken out. This is a call by name, a
            # mistake in the options, or --help
            gpumem_cell_parser().parse_line(line)
            self.shell.run_cell(f"%%gpumem {line}\n{cell}")
            return None
        # looking frees nothing: what this allocates must not set off the collector
        with collector_paused():
            options = gpumem_parser().parse_line(line)
            command: Callable[[Namespace], Any] = getattr(self, f"_{options.command or 'account'}")
            value = command(options)
        # IPython's own way of silencing a magic reads its words as Python, and fails on 8GiB
        return None if line.rstrip().endswith(";") else value

    @no_var_expand
    @line_magic
    @_answers
    def gpu_free(self, line: str) -> None:
        """Give GPU memory back, and say what is still held, by whom.

        Without names: IPython's copies of results, the frames of the last error, the ended %debug session,
        garbage, library workspaces, caches. With names: these variables first.

        Examples::

            %gpu_free                     everything but your variables
            %gpu_free model opt           these two, then everything else
            %gpu_free --all               every variable that holds GPU memory
            %gpu_free --dry-run           say what would go; change nothing
            %gpu_free --keep-outputs      leave Out alone
            %gpu_free --keep-errors       leave the last error to %debug and %tb
        """
        options = vars(gpu_free_parser().parse_line(line))
        from jupyter_gpumem.release import free
        from jupyter_gpumem.render.free import free_page

        be_quiet = options.pop("quiet")
        report = free(self.shell, **options)
        if not be_quiet:
            show(self.shell, free_page(report))
            self.reports.leave_out_line("%gpu_free")

    @no_var_expand
    @cell_magic
    @_answers
    def gpu_fit(self, line: str, cell: str) -> None:
        """Run the cell; on out-of-memory clean up, shrink a variable and run it again.

        A cell that ran twice did its side effects twice (files written, counters raised): that is yours to mind.

        Examples::

            %%gpu_fit batch_size                  halve batch_size until the cell fits
            %%gpu_fit batch_size --min 8 --step 8
            %%gpu_fit batch_size --search --margin 5%
        """
        options = gpu_fit_parser().parse_line(line)
        from jupyter_gpumem.fitting import fit_cell
        from jupyter_gpumem.render.fit import fit_page

        try:
            report = fit_cell(self.shell, cell, **vars(options))
        except GpuMemError:  # it says by itself that nothing fits
            self.reports.forget_failures()
            raise
        self.reports.forget_failures()
        show(self.shell, fit_page(report))

    def _account(self, _options: Namespace) -> None:
        from jupyter_gpumem.accounts import take_account
        from jupyter_gpumem.render.account import account_page

        show(self.shell, account_page(take_account(self.shell)))

    def _on(self, _options: Namespace) -> None:
        self.auto = True
        show(self.shell, _sentence("cells that move GPU memory end with a line", "%gpumem off"))

    def _off(self, _options: Namespace) -> None:
        self.auto = False
        show(self.shell, _sentence("no line after cells; %gpumem history goes on recording", "%gpumem on"))

    def _history(self, options: Namespace) -> History:
        history = History(tuple(self.recorder.records))
        if options.csv:
            _write(options.csv, history.to_csv())
        if options.json:
            _write(options.json, history.to_json())
        return history

    def _plot(self, options: Namespace) -> None:
        from jupyter_gpumem.plot import history_figure, png

        figure = history_figure(self.recorder.records)
        if options.save:
            try:
                figure.savefig(options.save)
            except (OSError, ValueError) as error:
                raise GpuMemError(f"cannot write {options.save}: {error}") from None
        text = "GPU memory over the cells" + (f", written to {options.save}" if options.save else "")
        self.shell.display_pub.publish({"text/plain": text, "image/png": png(figure)})

    def _leaks(self, options: Namespace) -> None:
        from jupyter_gpumem.leak_report import find_leaks
        from jupyter_gpumem.render.leaks import leaks_page

        check_device(options.device)
        report = find_leaks(self.shell, device=options.device, min_bytes=options.min, budget_seconds=self.scan_seconds)
        show(self.shell, leaks_page(report, limit=options.n))

    def _advise(self, _options: Namespace) -> None:
        from jupyter_gpumem.advice import advise
        from jupyter_gpumem.render.advise import advise_page

        show(self.shell, advise_page(advise(self.shell)))

    def _mark(self, options: Namespace) -> None:
        from jupyter_gpumem.leak_report import mark

        self.marks[options.name] = mark(self.shell)
        show(self.shell, _sentence(f"marked {options.name}", f"%gpumem diff {options.name}"))

    def _diff(self, options: Namespace) -> None:
        from jupyter_gpumem.leak_report import diff
        from jupyter_gpumem.render.leaks import diff_page

        known = self.marks.get(options.name)
        if known is None:
            near = did_you_mean(options.name, list(self.marks))
            raise GpuMemError(f"no mark named {options.name}{near}   → %gpumem mark {options.name}")
        show(self.shell, diff_page(diff(known, self.shell)))

    def _panel(self, _options: Namespace) -> None:
        self.sidebar.show()

    def _limit(self, options: Namespace) -> None:
        if options.amount:
            set_limit(_amount(" ".join(options.amount)))
            self.reports.forget_warnings()
        probe = current_probe()
        rows = []
        for device in probe.devices() if probe.kind == "cuda" else ():
            limit = limit_bytes(device)
            what = quiet("none: the whole device") if limit is None else size(limit)
            held = probe.snapshot(device).reserved_bytes
            over = f"{format_bytes(held)} are reserved already: more fails" if limit and held > limit else ""
            rows.append((Span(probe.label(device), style="quiet"), Span("limit"), what, Span(over, style="warn")))
        show(self.shell, Page((Block(tuple(rows) or ((quiet("CUDA has not started: no limit is set"),),)),)))

    def _simulate(self, options: Namespace) -> None:
        memory = " ".join(options.size) or "24GiB"
        simgpu.activate(memory, devices=options.devices)
        torch = torch_module()
        if torch is not None:
            tracker.install(torch)
        many = f"{options.devices} simulated GPUs of" if options.devices > 1 else "a simulated GPU of"
        text = f"{many} {format_bytes(parse_bytes(memory))}: memory behaves as on a device, values are not real"
        show(self.shell, Page((Block(((Span(text),),)),)))


def _amount(text: str) -> int | float | None:
    """Read ``8GiB`` (bytes), ``50%`` (a part of the device) or ``off``."""
    if text.lower() == "off":
        return None
    if not text.endswith("%"):
        if text.isdecimal() and int(text):
            raise GpuMemError(f"{text} of what? write {text}% or {text}GiB")
        return parse_bytes(text)
    try:
        part = float(text[:-1]) / 100
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise GpuMemError(f"{text!r} is not a part of the device; write for example 50%")
    return part


def _sentence(text: str, then: str) -> Page:
    return Page((Block(((Span(text), code(then)),)),))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise GpuMemError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
