"""What the extension costs the cells it watches, beside the plain kernel and beside other cell meters."""

import os
import statistics
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jupyter_gpumem import __version__
from tests.bench_row import Row, median_ratio, milliseconds
from tests.conftest import Kernel

ROUNDS = 40
CELLS = 10  # a kernel's cells in a row within one round
LOADS = 7
OPERATIONS = 40_000

_DEVICE = """
from jupyter_gpumem import simgpu
simgpu.activate("24GiB", devices={devices})
import torch
held = [torch.empty(8, device=f"cuda:{{d}}") for d in range({devices})]
"""
_CELL_WITH_LINE = "more = torch.empty(1 << 20, device='cuda')"
_OPERATIONS = f"""
x = torch.ones(64, device="cuda")
for _ in range({OPERATIONS}):
    x + x
"""
_TIMED_LOAD = """
import sys, time
t = time.process_time()  # other programs of the machine do not count
get_ipython().run_line_magic("load_ext", "{extension}")
t = time.process_time() - t
print(t, "torch" in sys.modules)
"""
_OURS = ("%load_ext jupyter_gpumem",)
_PEERS = {
    "ipyexperiments": (
        "from ipyexperiments import IPyExperimentsPytorch\n"
        "experiment = IPyExperimentsPytorch(exp_enable=False, cl_compact=True)",
    ),
    "jumper_extension": ("%load_ext jumper_extension", "%perfmonitor_start"),
}


def rows() -> Iterable[Row]:
    """Measure and yield each row as soon as it is known."""
    yield from _load_rows()
    kernels = _start_kernels()
    try:
        yield from _cell_rows(kernels, "pass", "an empty cell")
        yield from _cell_rows(kernels, _CELL_WITH_LINE, "a cell with a line", goal=None)
        yield _operations_row(kernels)
    finally:
        for kernel in kernels.values():
            kernel.shutdown()
    yield _many_cells_row()


def _kernel() -> Kernel:
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    # as installed, with byte code: a load that compiles every module measures the compiler
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return Kernel(environment)


def _kernel_with(*cells: str, devices: int = 1) -> Kernel:
    kernel = _kernel()
    for cell in (_DEVICE.format(devices=devices), *cells, "pass"):
        outputs = kernel.run(cell)
        if outputs.error:
            kernel.shutdown()
            raise RuntimeError(outputs.traceback)
    return kernel


def _start_kernels() -> dict[str, Kernel]:
    kernels = {
        "plain": _kernel_with(),
        "ours": _kernel_with(*_OURS),
        "plain, 8 GPUs": _kernel_with(devices=8),
        "ours, 8 GPUs": _kernel_with(*_OURS, devices=8),
    }
    for peer, cells in _PEERS.items():
        if _version(peer):
            kernels[peer] = _kernel_with(*cells)
    return kernels


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _load_rows() -> Iterable[Row]:
    extensions = ["jupyter_gpumem", *filter(_version, ["jumper_extension"])]
    seconds: dict[str, list[float]] = {extension: [] for extension in extensions}
    torch_came = False
    for _ in range(LOADS):
        for extension in extensions:
            kernel = _kernel()
            elapsed, torch_there = kernel.run(_TIMED_LOAD.format(extension=extension)).stdout.split()[-2:]
            kernel.shutdown()
            seconds[extension].append(float(elapsed))
            torch_came |= extension == "jupyter_gpumem" and torch_there == "True"
    ours = statistics.median(seconds["jupyter_gpumem"])
    met = ours < 0.030 and not torch_came
    yield Row(
        "%load_ext, processor time",
        milliseconds(ours),
        "no torch import" if not torch_came else "imports torch!",
        None,
        "< 30 ms",
        met,
    )
    for peer in extensions[1:]:
        yield Row(
            "%load_ext, processor time",
            milliseconds(ours),
            f"{peer} {milliseconds(statistics.median(seconds[peer]))}",
            median_ratio(seconds["jupyter_gpumem"], seconds[peer]),
        )
    if "jumper_extension" not in extensions:
        yield Row("%load_ext, processor time", milliseconds(ours), "jumper_extension: not installed")


def _cell_rows(kernels: dict[str, Kernel], cell: str, what: str, goal: float | None = 1.1) -> Iterable[Row]:
    seconds = _rounds(kernels, cell)
    for ours, plain in (("ours", "plain"), ("ours, 8 GPUs", "plain, 8 GPUs")):
        ratio = median_ratio(seconds[ours], seconds[plain])
        yield Row(
            what + ours.removeprefix("ours"),
            milliseconds(statistics.median(seconds[ours])),
            f"plain kernel {milliseconds(statistics.median(seconds[plain]))}",
            ratio,
            "" if goal is None else f"<= {goal}",
            None if goal is None else ratio <= goal,
        )
    for peer in _PEERS:
        if peer not in seconds:
            yield Row(f"{what}, {peer}", "not installed", "install the extra `peers`")
            continue
        yield Row(
            f"{what}, {peer} {_version(peer)}",
            milliseconds(statistics.median(seconds[peer])),
            f"plain kernel {milliseconds(statistics.median(seconds['plain']))}",
            median_ratio(seconds[peer], seconds["plain"]),
        )


def _rounds(kernels: dict[str, Kernel], cell: str) -> dict[str, list[float]]:
    """Return each kernel's median time of a cell in each round; the order turns from round to round."""
    names = list(kernels)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(statistics.median(_time(kernels[name], cell) for _ in range(CELLS)))
    return seconds


def _time(kernel: Kernel, cell: str) -> float:
    started = time.perf_counter()
    kernel.run(cell)
    return time.perf_counter() - started


def _operations_row(kernels: dict[str, Kernel]) -> Row:
    plain, ours = [], []
    for turn in range(ROUNDS // 2):
        for into, name in ((plain, "plain"), (ours, "ours"))[:: 1 if turn % 2 else -1]:
            into.append(_time(kernels[name], _OPERATIONS))
    ratio = median_ratio(ours, plain)
    return Row(
        f"{OPERATIONS:,} small torch operations",
        milliseconds(statistics.median(ours)),
        f"plain kernel {milliseconds(statistics.median(plain))}",
        ratio,
        "<= 1.02",
        ratio <= 1.02,
    )


def _many_cells_row() -> Row:
    """Compare the last cells of a long kernel with its first, each beside a plain kernel of the same age."""
    kernels = {"plain": _kernel_with(), "ours": _kernel_with(*_OURS)}
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    try:
        for _ in range(1000 // CELLS):
            for name, kernel in kernels.items():
                seconds[name].append(statistics.median(_time(kernel, _CELL_WITH_LINE) for _ in range(CELLS)))
    finally:
        for kernel in kernels.values():
            kernel.shutdown()
    end = 200 // CELLS
    first = median_ratio(seconds["ours"][:end], seconds["plain"][:end])
    last = median_ratio(seconds["ours"][-end:], seconds["plain"][-end:])
    return Row(
        "ours over plain, cells 801 to 1,000",
        f"{last:.3f}",
        f"cells 1 to 200 {first:.3f}",
        last / first,
        "flat (<= 1.05)",
        last <= 1.05 * first,
    )


def versions() -> str:
    """Return the versions that the figures stand for."""
    packages = ["torch", "ipykernel", "ipython", *_PEERS]
    python = ".".join(str(part) for part in sys.version_info[:3])
    return "   ".join(
        [
            f"jupyter_gpumem {__version__}",
            f"python {python}",
            *(f"{name} {_version(name) or 'not installed'}" for name in packages),
        ]
    )
