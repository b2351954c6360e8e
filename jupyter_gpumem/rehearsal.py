"""The kernel's side of ``fits``: the simulated GPU under the notebook, and one message after each cell."""

import json
from typing import TYPE_CHECKING, Any

from jupyter_gpumem import simgpu
from jupyter_gpumem.cells import CellRecord, CellRecorder
from jupyter_gpumem.device import CudaProbe, cuda_started, torch_module
from jupyter_gpumem.hostcopies import ReadCalls, watch_copies
from jupyter_gpumem.oom import OomReport, Watcher
from jupyter_gpumem.readouts import decisions, watch

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

CELL_MIME = "application/vnd.jupyter_gpumem.fits+json"
"""The type of the message that a cell's record travels in, among the cell's outputs."""


def start(shell: "InteractiveShell", memory_bytes: int, devices: int) -> None:
    """Turn the simulated GPU on, and from here on publish what each cell did."""
    simgpu.activate(memory_bytes, devices=devices)
    # a notebook that turns a simulated GPU on itself gets the one asked for on the command line
    simgpu.activate = _already_on
    torch = torch_module()
    if torch is not None:
        watch(torch)
        watch_copies(torch)
        shell.ast_transformers.append(ReadCalls())
    recorder = CellRecorder()
    reporter = _Reporter(shell)
    recorder.on_start.append(reporter.cell_started)
    recorder.on_end.append(reporter.cell_ended)
    shell.events.register("pre_run_cell", recorder.pre_run_cell)
    shell.events.register("post_run_cell", recorder.post_run_cell)


def _already_on(memory: str | int = "", devices: int = 1) -> None:
    """Do nothing: stands for ``simgpu.activate`` in a notebook that is tried."""


class _Reporter:
    def __init__(self, shell: "InteractiveShell") -> None:
        self._shell = shell
        self._watcher = Watcher(shell)
        self._failures_before = 0
        self._decisions_before = 0

    def cell_started(self, record: CellRecord, _raw_cell: str) -> None:
        self._failures_before = _failed_requests()
        self._decisions_before = decisions()
        self._watcher.cell_started(record)

    def cell_ended(self, record: CellRecord, result: object) -> None:
        report = self._watcher.report(record, result)
        if record.depth:
            return
        failed = _failed_requests() - self._failures_before
        failure = None if report is None or report.handled else _failure(report)
        decided = decisions() - self._decisions_before
        message = {**record.to_dict(), "failed_requests": failed, "decisions": decided, "failure": failure}
        self._shell.display_pub.publish({CELL_MIME: json.dumps(message)})


def _failure(report: OomReport) -> dict[str, Any]:
    moment = report.moment
    return {
        "where": report.where,
        "asked_bytes": moment.asked_bytes,
        "free_bytes": moment.free_bytes,
        "holders": [(holder.nbytes, holder.path) for holder in moment.holders],
    }


def _failed_requests() -> int:
    if not cuda_started():
        return 0
    probe = CudaProbe()
    return sum(int(probe.counters(device)["num_ooms"]) for device in probe.devices())
