"""What the live panel costs while it draws at 2 Hz: processor time, bytes, and a slower user loop."""

import json
import statistics
from collections.abc import Iterable
from typing import Any

from tests.bench_cells import OPERATIONS, _kernel_with
from tests.bench_row import Row, median_ratio, milliseconds
from tests.conftest import Kernel

ROUNDS = 16
SECONDS = 6.0  # of one round of processor time
REPEATS = 10  # of the user's loop in one round, so that several ticks fall into it

_OPEN = "%gpumem panel"
_PANEL = "panel = get_ipython()._jupyter_gpumem.magics.sidebar.panel"
_CHANGING = f"""
import time
started, processor = time.monotonic(), time.process_time()
while time.monotonic() - started < {SECONDS}:
    kept = torch.empty(int(time.monotonic() * 1e3) % 1000 << 20, dtype=torch.uint8, device="cuda"); time.sleep(0.05)
print(time.process_time() - processor)
"""
_LOOP = f"""
import time
started = time.perf_counter()
x = torch.ones(64, device="cuda")
for _ in range({OPERATIONS * REPEATS}):
    x + x
print(time.perf_counter() - started)
"""


def rows() -> Iterable[Row]:
    """Measure and yield each row as soon as it is known."""
    kernel = _kernel_with("%load_ext jupyter_gpumem", _OPEN, _PANEL)
    try:
        yield _processor_row(kernel)
        yield _bytes_row(kernel)
        yield _loop_row(kernel)
        yield _imports_row(kernel)
    finally:
        kernel.shutdown()


def _compare(kernel: Kernel, cell: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return what a cell printed with the panel drawing and with its thread stopped, in turns.

    One kernel for both: two of them differ by more than the panel costs.
    """
    drawing: list[float] = []
    stopped: list[float] = []
    for turn in range(rounds):
        for on in (True, False)[:: 1 if turn % 2 else -1]:
            kernel.run(f"panel._sampler.{'start' if on else 'stop'}()")
            (drawing if on else stopped).append(float(kernel.run(cell).stdout))
    kernel.run("panel._sampler.start()")
    return drawing, stopped


def _processor_row(kernel: Kernel) -> Row:
    drawing, stopped = _compare(kernel, _CHANGING, 4)
    share = (statistics.median(drawing) - statistics.median(stopped)) / SECONDS
    return Row("panel at 2 Hz, share of one core", f"{share:.2%}", "", None, "<= 1 %", share <= 0.01)


def _bytes_row(kernel: Kernel) -> Row:
    """Count the bytes of all widget messages of a tick, their headers included."""
    ticks: dict[int, int] = {}
    messages = 0

    def take(message: dict[str, Any]) -> None:
        if message["msg_type"] == "comm_msg":
            nonlocal messages
            messages += 1
            parts = (message[part] for part in ("header", "parent_header", "metadata", "content"))
            nbytes = sum(len(json.dumps(part, default=str, ensure_ascii=False).encode()) for part in parts)
            # the messages of a tick leave within milliseconds, ticks are half a second apart
            tick = round(message["header"]["date"].timestamp() * 4)
            ticks[tick] = ticks.get(tick, 0) + nbytes

    for cell in range(30):
        kernel.run(f"more_{cell} = torch.empty({cell} << 20, dtype=torch.uint8, device='cuda')  # {'text ' * 20}")
    kernel.client.execute_interactive(_CHANGING, output_hook=take, timeout=60)
    largest = max(ticks.values())
    return Row(
        "panel, largest tick with its headers",
        f"{largest:,} B",
        f"{messages} messages",
        None,
        "<= 3 KB",
        largest <= 3072,
    )


def _loop_row(kernel: Kernel) -> Row:
    drawn, plain = _compare(kernel, _LOOP, ROUNDS)
    ratio = median_ratio(drawn, plain)
    return Row(
        f"{OPERATIONS:,} small torch operations, panel open",
        milliseconds(statistics.median(drawn) / REPEATS),
        f"panel closed {milliseconds(statistics.median(plain) / REPEATS)}",
        ratio,
        "<= 1.03",
        ratio <= 1.03,
    )


def _imports_row(kernel: Kernel) -> Row:
    there = kernel.run("import sys; 'matplotlib' in sys.modules").result == "True"
    return Row("panel, matplotlib imported", "yes" if there else "no", "", None, "no", not there)
