"""``python -m tests.gpu_check``: on a machine with an NVIDIA GPU, is the simulated one right about memory?

Runs the tests marked ``gpu``, then one fixed program cell by cell on the device and on a simulated GPU of the same
size, each in a kernel of its own with the extension loaded, and compares what the cells report. Allocated, reserved and
peak have to agree to the byte in every cell that calls no library; where a library asks for memory of its own the
differences are only listed. Takes less than four minutes.

Exit code: 0 all agree, 1 something does not, 2 there is no GPU here.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS_SECONDS = 120
CELL_SECONDS = 60
FIGURES = (
    "allocated_before_bytes",
    "allocated_after_bytes",
    "peak_allocated_bytes",
    "reserved_after_bytes",
    "peak_reserved_bytes",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the program; ``library`` says whose own memory may differ in it and the cells after it."""

    source: str
    library: str = ""


PROGRAM = (
    Cell("import torch\nfrom torch import nn\ntorch.manual_seed(0)\nx = torch.ones(1 << 24, device='cuda')"),
    Cell("y = (x * 2 + 1).relu()"),
    Cell(
        "many = [torch.empty(3 * size + 1, device='cuda') for size in (1, 100, 3_000, 90_000, 2_000_000, 30_000_000)]"
    ),
    Cell("del many[1::2]\nmany.append(torch.empty(5_000_000, dtype=torch.float16, device='cuda'))"),
    Cell("torch.cuda.empty_cache()"),
    # nothing here reduces, sorts or normalises: how much those take for themselves depends on the card
    Cell(
        "model = nn.Sequential(nn.Embedding(1000, 512), nn.GELU(), nn.Dropout(0.1)).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)"
    ),
    Cell(
        "for _ in range(3):\n"
        "    out = model(torch.randint(1000, (8, 256), device='cuda'))\n"
        "    optimizer.zero_grad()\n"
        "    out.backward(torch.ones_like(out))\n"
        "    optimizer.step()"
    ),
    Cell("kept = [model(torch.randint(1000, (8, 256), device='cuda')).square() for _ in range(5)]"),
    Cell("kept[:] = [out.shape for out in kept]"),
    Cell(
        "stream = torch.cuda.Stream()\n"
        "with torch.cuda.stream(stream):\n"
        "    z = torch.empty(1 << 22, device='cuda') + 1\n"
        "torch.cuda.synchronize()"
    ),
    Cell(
        "def fail():\n    held = torch.empty(1 << 26, device='cuda')\n    raise KeyError('held')\nfail()",
    ),
    Cell("%gpu_free z"),
    Cell(
        "torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.get_device_properties(0).total_memory)\n"
        "try:\n    torch.empty(3 * 2**30, dtype=torch.uint8, device='cuda')\n"
        "except torch.OutOfMemoryError:\n    pass\n"
        "torch.cuda.set_per_process_memory_fraction(1.0)"
    ),
    Cell(
        "graph, static = torch.cuda.CUDAGraph(), torch.ones(1 << 20, device='cuda')\n"
        "with torch.cuda.graph(graph):\n    captured = static * 2 + 1"
    ),
    Cell("del graph, static, captured\ntorch.cuda.empty_cache()"),
    Cell("order = torch.randn(1 << 20, device='cuda').sort().indices", library="CUB"),
    Cell("nn.LayerNorm(512).cuda()(out.detach()).square().mean().backward()", library="a reduction"),
    Cell("product = torch.randn(512, 512, device='cuda') @ torch.randn(512, 512, device='cuda')", library="cuBLAS"),
    Cell(
        "heads = torch.randn(2, 8, 256, 64, device='cuda', dtype=torch.bfloat16, requires_grad=True)\n"
        "nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()",
        library="the attention kernel",
    ),
    Cell("pixels = nn.Conv2d(3, 64, 7).cuda()(torch.randn(8, 3, 224, 224, device='cuda'))", library="cuDNN"),
)


def main() -> int:
    """Run the check; return the exit code."""
    total = _device_bytes()
    if total is None:
        sys.stderr.write("gpu_check: no NVIDIA GPU that torch can use here, nothing was checked\n")
        return 2
    tests = _run_tests()
    real, simulated = run_program(None), run_program(total)
    wrong = compare(real, simulated)
    print(f"tests marked gpu: {'passed' if tests else 'FAILED'}; cells that disagree: {wrong}")
    return 0 if tests and not wrong else 1


def run_program(simulated_bytes: int | None) -> list[dict[str, Any]]:
    """Run the program in a kernel of its own and return the report of device 0 for each cell.

    On a simulated GPU of so many bytes, or on the machine's own where ``simulated_bytes`` is None.
    """
    os.environ["GPUMEM_TEST_DEVICE"] = "real"  # this process takes no device; the kernel takes its own
    from tests.conftest import Kernel

    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "IPYTHONDIR": folder,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
        kernel = Kernel(env)
        try:
            if simulated_bytes is not None:
                _run(kernel, f"from jupyter_gpumem import simgpu; simgpu.activate({simulated_bytes})")
            _run(kernel, "%load_ext jupyter_gpumem")
            for cell in PROGRAM:
                _run(kernel, cell.source, may_fail="fail()" in cell.source)
            _run(kernel, f"%gpumem history --json {folder}/history.json")
            history = json.loads(Path(folder, "history.json").read_text())
        finally:
            kernel.shutdown()
    return [_figures(record) for record in history[-len(PROGRAM) :]]


def compare(real: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> int:
    """Print each cell and where the two disagree; return how many cells disagree that should not."""
    wrong, library = 0, ""
    for cell, ours, theirs in zip(PROGRAM, real, simulated, strict=True):
        library = cell.library or library
        differing = [name for name in FIGURES if ours.get(name) != theirs.get(name)]
        verdict = "agrees" if not differing else f"differs, {library} allocates too" if library else "DIFFERS"
        wrong += bool(differing and not library)
        print(f"{verdict:<12}  {cell.source.splitlines()[-1].strip()[:80]}")
        for name in differing:
            print(f"              {name}: {ours.get(name)} on the device, {theirs.get(name)} simulated")
    return wrong


def _run(kernel: Any, source: str, *, may_fail: bool = False) -> None:
    outputs = kernel.run(source, timeout=CELL_SECONDS)
    if outputs.error and not may_fail:
        raise RuntimeError(f"{source}\n{outputs.traceback}")


def _figures(record: dict[str, Any]) -> dict[str, Any]:
    return next((device for device in record["devices"] if device["device"] == 0), {})


def _device_bytes() -> int | None:
    """Return the size of device 0, asked in a process of its own: CUDA must not start in this one."""
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.stdout.strip() else None


def _run_tests() -> bool:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:nbval",
        "--override-ini=addopts=--strict-markers",
        "tests",
    ]
    environment = {**os.environ, "GPUMEM_TEST_DEVICE": "real"}
    try:
        done = subprocess.run(
            command, env=environment, cwd=Path(__file__).parents[1], timeout=TESTS_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
