import gc
import sys
from typing import Any

import pytest
import torch

from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.fitting import FitAttempt, FitReport, fit
from jupyter_gpumem.render.fit import fit_page
from jupyter_gpumem.render.layout import to_html, to_text
from tests.conftest import DEVICE_BYTES, Outputs, Shell, empty_gpu

GIB = 1024**3
MIB = 1024**2
CONTEXT = 512 * MIB
SETUP = "import torch; GIB = 1 << 30\ndef take(n): return torch.empty(int(n), dtype=torch.uint8, device='cuda')"


@pytest.fixture(autouse=True)
def empty_device() -> None:
    empty_gpu()


@pytest.fixture
def ready(shell: Shell) -> Shell:
    shell.run("%load_ext jupyter_gpumem")
    shell.run("%gpumem off")
    shell.run(SETUP)
    return shell


def one_line(outputs: Outputs) -> str:
    """Return the one line that a mistake got."""
    lines = (outputs.stdout + outputs.stderr).strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_the_variable_is_halved_until_the_cell_fits(ready: Shell) -> None:
    ready.run("batch_size = 64")
    shown = ready.run("%%gpu_fit batch_size\nx = take(batch_size * GIB)\nx.shape[0]")
    assert ready.ns["batch_size"] == 16
    assert torch.cuda.memory_allocated() == 16 * GIB
    assert shown.error is None
    assert f"{16 * GIB}" in shown.stdout
    assert shown.text.splitlines() == [
        "batch_size = 16 fits   peak 16.0 GiB   7.50 GiB of GPU 0 left free (31 %)   simulated",
        "  64   out of memory   asked for 64.0 GiB",
        "  32   out of memory   asked for 32.0 GiB",
        "  16   fits            16.0 GiB   7.50 GiB of GPU 0 left free (31 %)",
    ]


def test_a_cell_that_never_runs_out_runs_once_as_it_is(ready: Shell) -> None:
    ready.run("runs = []; n = 8")
    shown = ready.run("%%gpu_fit n\nruns.append(n)\ny = n * 2;\nn + 1;")
    assert (ready.ns["runs"], ready.ns["n"], ready.ns["y"]) == ([8], 8, 16)
    assert shown.text == "n = 8 fits   nothing was on a GPU   simulated\n"
    assert shown.stdout == ""


def test_the_failed_frames_tensors_are_gone_before_the_next_run(ready: Shell) -> None:
    ready.run("n = 12; seen = []\ndef step():\n    a = take(n * GIB)\n    b = take(n * GIB)\n    return b")
    ready.run("%%gpu_fit n --factor 0.9\nseen.append(torch.cuda.memory_allocated())\nx = step()")
    assert ready.ns["seen"] == [0, 0]
    assert ready.ns["n"] == 10
    assert torch.cuda.memory_reserved() == 20 * GIB


def test_garbage_cycles_of_a_failed_run_are_collected_before_the_next(ready: Shell) -> None:
    ready.run("n = 16; seen = []")
    gc.disable()
    try:
        ready.run(
            "%%gpu_fit n\nseen.append(torch.cuda.memory_allocated())\n"
            "def step():\n    keep = [take(n * GIB)]\n    keep.append(keep)\n    take(n * GIB)\nstep()"
        )
    finally:
        gc.enable()
    assert ready.ns["seen"] == [0, 0]


def test_names_a_failed_run_created_are_deleted_and_plain_ones_it_rebound_are_restored(ready: Shell) -> None:
    ready.run("n = 32; log = ['old']; label = 'old'; table = {'a': [1, 2.5, None]}; seen = []")
    ready.run(
        "%%gpu_fit n\nseen.append((log, label, 'made' in globals(), table))\n"
        "log = []; label = 'new'; made = 1; table = 3\nx = take(n * GIB)"
    )
    assert ready.ns["seen"] == [(["old"], "old", False, {"a": [1, 2.5, None]})] * 2
    assert (ready.ns["log"], ready.ns["label"], ready.ns["made"], ready.ns["n"]) == ([], "new", 1, 16)


def test_a_rebound_name_on_the_gpu_is_deleted_and_listed_and_no_old_value_is_held(ready: Shell) -> None:
    ready.run("n = 16; x = take(10 * GIB)")
    shown = ready.run("%%gpu_fit n\nx = take(1)\nx = take(n * GIB)\ny = take(8 * GIB)")
    assert ready.ns["n"] == 8
    assert torch.cuda.memory_allocated() == 16 * GIB
    assert "deleted between the runs, because the cell rebinds them: x" in shown.text


def test_a_rebound_list_on_the_gpu_is_told_from_the_old_one_at_the_same_address(ready: Shell) -> None:
    ready.run("n = 16; outs = [take(GIB)]; untouched = [take(GIB)]; seen = []")
    ready.run(
        "%%gpu_fit n\nseen.append('outs' in globals())\n"
        "for _ in range(5):\n    outs = [take(MIB) for MIB in (1 << 20,)]\nboth = take(n * GIB), take(n * GIB)"
    )
    assert ready.ns["seen"] == [True, False]
    assert ready.ns["untouched"][0].nbytes == GIB


def test_a_name_bound_again_to_the_same_object_stays(ready: Shell) -> None:
    ready.run("n = 32; model = torch.nn.Linear(1024, 1024).cuda(); same = id(model)")
    ready.run("%%gpu_fit n\nmodel = model.cuda()\nx = take(n * GIB)")
    assert id(ready.ns["model"]) == ready.ns["same"]
    assert ready.ns["n"] == 16


def test_a_rebound_name_off_the_gpu_stays_as_it_is(ready: Shell) -> None:
    ready.run("n = 32\nclass Config: pass\nconfig = Config()")
    ready.run("%%gpu_fit n\nconfig = Config()\nconfig.n = n\nx = take(n * GIB)")
    assert ready.ns["config"].n == 16


@pytest.mark.parametrize("wrapped", ["raise ValueError('mine') from error", "raise KeyError('mine')"])
def test_an_out_of_memory_error_wrapped_in_another_counts(ready: Shell, wrapped: str) -> None:
    ready.run("n = 32")
    ready.run(f"%%gpu_fit n\ntry:\n    x = take(n * GIB)\nexcept RuntimeError as error:\n    {wrapped}")
    assert ready.ns["n"] == 16


def test_an_out_of_memory_error_in_backward_counts(ready: Shell) -> None:
    ready.run("n = 16; w = torch.ones(1, device='cuda', requires_grad=True)")
    ready.run("%%gpu_fit n\ny = (w * torch.ones(n << 28, device='cuda')).exp()\ny.sum().backward()")
    assert ready.ns["n"] in (4, 8)


def test_another_error_comes_out_unchanged_with_its_own_line(gpu_kernel: Any) -> None:
    gpu_kernel.run("batch = 4")
    shown = gpu_kernel.run("%%gpu_fit batch\nok = 1\nraise KeyError('mine')")
    assert shown.error == "KeyError"
    assert "line 3" in shown.traceback
    assert "raise KeyError('mine')" in shown.traceback
    assert "_attempt" not in shown.traceback
    assert gpu_kernel.run("ok, batch").result == "(1, 4)"


def test_another_error_in_a_later_run_says_which_and_what_was_deleted(ready: Shell) -> None:
    ready.run("n = 32; x = take(1)")
    shown = ready.run("%%gpu_fit n\nx = x.repeat(2)\ny = take(n * GIB)")
    assert shown.error == "NameError"
    assert "this was run 2, with n = 16 (before it 32: out of memory); deleted before it: x" in shown.stdout


def test_interrupt_ends_it_at_once(ready: Shell) -> None:
    ready.run("n = 32; runs = []")
    shown = ready.run("%%gpu_fit n\nruns.append(n)\nraise KeyboardInterrupt")
    assert (shown.error, ready.ns["runs"]) == ("KeyboardInterrupt", [32])


def test_step_rounds_down_and_min_ends_it(ready: Shell) -> None:
    ready.run("n = 60; runs = []")
    shown = ready.run("%%gpu_fit n --step 8 --min 20\nruns.append(n)\ntake(99 * GIB)")
    assert ready.ns["runs"] == [60, 24]
    assert ready.ns["n"] == 60
    line = one_line(shown)
    assert "nothing fits: with n = 24 it still runs out of memory (asked for 99.0 GiB)" in line
    assert "does the code use n?" in line
    assert shown.error == "UsageError"
    assert torch.cuda.memory_reserved() == 0


def test_search_finds_the_largest_value_upwards(ready: Shell) -> None:
    ready.run("n = 3; runs = []")
    ready.run("%%gpu_fit n --search\nruns.append(n)\nx = take(n * GIB)")
    assert ready.ns["runs"] == [3, 6, 12, 24, 23]
    assert ready.ns["n"] == 23
    assert torch.cuda.memory_allocated() == 23 * GIB


def test_search_ends_with_the_namespace_of_one_run_with_the_value(ready: Shell) -> None:
    ready.run("n = 40; runs = []")
    shown = ready.run("%%gpu_fit n --search --step 4\nruns.append(n)\nx = take(n * GIB)\nlen(x) // GIB")
    assert ready.ns["runs"] == [40, 20, 28, 24, 20]
    assert (ready.ns["n"], len(ready.ns["x"])) == (20, 20 * GIB)
    assert "20" in shown.stdout.splitlines()[0]


def test_margin_leaves_that_part_of_the_device_free_at_the_peak(ready: Shell) -> None:
    ready.run("n = 1")
    shown = ready.run("%%gpu_fit n --search --margin 25%\nx = take(n * GIB)\ndel x")
    assert ready.ns["n"] == 17
    free = DEVICE_BYTES - CONTEXT - 17 * GIB
    assert free >= DEVICE_BYTES / 4 > free - GIB
    assert "too little left" in shown.text
    assert "6.50 GiB of GPU 0 left free (27 %)" in shown.text


@pytest.mark.parametrize(("free", "words"), [(4_960, "(4.9 %)"), (5_000, "(5 %)"), (31_900, "(31 %)")])
def test_what_is_short_of_a_margin_does_not_read_as_the_margin(free: int, words: str) -> None:
    attempt = FitAttempt(8, "too little left", 0.1, "GPU 0", 1, free, 100_000)
    report = FitReport("n", 4, (attempt, attempt), 1)
    assert to_text(fit_page(report)).count(words) == 3


def test_a_process_limit_counts_for_the_margin(ready: Shell) -> None:
    ready.run("n = 1; torch.cuda.set_per_process_memory_fraction(0.5)")
    try:
        ready.run("%%gpu_fit n --search\nx = take(n * GIB)")
        assert ready.ns["n"] == 12
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_search_stops_where_the_value_makes_no_difference(ready: Shell) -> None:
    ready.run("n = 3; runs = []")
    shown = ready.run("%%gpu_fit n --search\nruns.append(n)\nx = take(min(n, 10) * GIB)")
    assert ready.ns["runs"] == [3, 6, 12, 24, 12]
    assert "24 did exactly the same: larger values make no difference here" in shown.text


@pytest.mark.parametrize(
    ("setup", "cell", "message"),
    [
        (
            "batch_size = 4",
            "%%gpu_fit batch_sise\npass",
            "no variable named 'batch_sise': set it in a cell above; did",
        ),
        ("n = 1.5", "%%gpu_fit n\npass", "n is not a whole number but 1.5"),
        ("n = True", "%%gpu_fit n\npass", "n is not a whole number but True"),
        ("n = [4]", "%%gpu_fit n\npass", "n is not a whole number but of type list"),
        ("n = 0", "%%gpu_fit n\npass", "n is 0: it must be at least 1"),
        ("n = 4", "%%gpu_fit n\nn = 8\ntake(n * GIB)", "the cell sets n itself: set it in a cell above"),
        ("n = 4", "%%gpu_fit n\nimport asyncio\nawait asyncio.sleep(0)", "the cell awaits at top level"),
        (
            "n = 1",
            "%%gpu_fit n\ntake(99 * GIB)",
            "n is already 1, nothing smaller may be tried, and it runs out",
        ),
    ],
)
def test_a_mistake_gets_one_line(ready: Shell, setup: str, cell: str, message: str) -> None:
    ready.run(setup)
    before = dict(ready.ns)
    shown = ready.run(cell)
    assert message in one_line(shown)
    assert shown.error == "UsageError"
    assert before["n" if "n" in before else "batch_size"] == ready.ns["n" if "n" in before else "batch_size"]


def test_numpy_whole_numbers_are_whole_numbers(ready: Shell) -> None:
    ready.run("import numpy as np; n = np.int64(32)")
    ready.run("%%gpu_fit n\nx = take(n * GIB)")
    assert ready.ns["n"] == 16


def test_already_one_and_fitting_says_so(ready: Shell) -> None:
    ready.run("n = 1")
    shown = ready.run("%%gpu_fit n\nx = take(n * GIB)")
    assert "1 is already the smallest value that may be tried" in shown.text


def test_fit_returns_value_result_and_peak() -> None:
    def train(batch_size: int) -> str:
        torch.empty(batch_size * GIB, dtype=torch.uint8, device="cuda")
        return f"trained with {batch_size}"

    assert fit(train, batch_size=512) == (16, "trained with 16", 16 * GIB)
    found = fit(train, batch_size=512, search=True, step=2)
    assert (found.value, found.result, found.peak_bytes) == (22, "trained with 22", 22 * GIB)


@pytest.mark.parametrize(
    ("mib", "start", "largest", "most"),
    [
        (lambda n: 4 * n, 512, 6016, 8),  # bisection alone would take 17 runs
        (lambda n: 2048 + 4 * n, 512, 5504, 8),
        (lambda n: n * n, 100, 155, 8),
        (lambda n: 64 * (n // 100) ** 2, 50, 1999, 20),  # in steps
    ],
)
def test_search_finds_the_largest_of_all_in_few_runs(mib: Any, start: int, largest: int, most: int) -> None:
    ran: list[int] = []

    def take(n: int) -> None:
        ran.append(n)
        torch.empty(mib(n) * MIB, dtype=torch.uint8, device="cuda")

    assert fit(take, n=start, search=True).value == largest
    assert largest + 1 in ran
    assert len(ran) <= most


def test_fit_passes_the_number_first_where_the_function_has_no_such_parameter() -> None:
    assert fit(lambda n, scale: n * scale, 10, batch_size=8).result == 80
    assert fit(lambda scale, *, rows: rows * scale, 10, rows=8).result == 80


def test_fit_works_inside_a_handler_and_after_a_kept_error() -> None:
    def step(n: int) -> int:
        first = torch.empty(n * GIB, dtype=torch.uint8, device="cuda")
        second = torch.empty(n * GIB, dtype=torch.uint8, device="cuda")
        return len(first) + len(second)

    assert fit(step, n=20).value == 10
    assert sys.exc_info() == (None, None, None)
    assert torch.cuda.memory_allocated() == 0


def test_fit_raises_any_other_error_as_it_is() -> None:
    def broken(n: int) -> None:
        raise LookupError(n)

    with pytest.raises(LookupError, match="4") as raised:
        fit(broken, n=4)
    assert not hasattr(raised.value, "__notes__")


def test_fit_refuses_two_numbers_none_and_nothing_that_fits() -> None:
    with pytest.raises(GpuMemError, match="varies one number"):
        fit(print, a=1, b=2)
    with pytest.raises(GpuMemError, match="varies one number"):
        fit(print)
    with pytest.raises(GpuMemError, match="nothing fits: with n = 3 it still runs out of memory"):
        fit(lambda n: torch.empty(n << 40, dtype=torch.uint8, device="cuda"), n=12, minimum=3)


def test_fit_on_the_host_alone_calls_the_function() -> None:
    assert fit(lambda n: n + 1, n=4) == (4, 5, None)


def test_a_report_is_json_and_escaped() -> None:
    run = FitAttempt(4, "fits", 0.5, "GPU <0>", GIB, 2 * GIB, 8 * GIB)
    report = FitReport("n", 4, (FitAttempt(8, "out of memory", 0.1, asked_bytes=GIB), run), 1, ("<x>",))
    assert report.to_dict()["attempts"][1]["peak_bytes"] == GIB
    assert "<x>" not in to_html(fit_page(report))
    assert to_text(fit_page(report)).splitlines()[0] == (
        "n = 4 fits   peak 1.00 GiB   2.00 GiB of GPU <0> left free (25 %)"
    )


def test_the_error_of_an_earlier_cell_is_let_go_so_that_it_cannot_keep_what_does_not_fit(ready: Shell) -> None:
    ready.run("n = 16\ndef step(n):\n    first = take(n * GIB)\n    return first, take(n * GIB)")
    assert ready.run("x = step(n)").error == "OutOfMemoryError"
    shown = ready.run("%%gpu_fit n\nx = step(n)")
    assert ready.ns["n"] == 8
    assert "the last error (OutOfMemoryError in cell 5) was let go: %debug and %tb have nothing left" in shown.text
