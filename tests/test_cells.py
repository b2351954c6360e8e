import asyncio
import gc
import threading

import pytest
import torch

from jupyter_gpumem import cells
from jupyter_gpumem.cells import CellRecord, CellRecorder, track
from jupyter_gpumem.device import HostProbe
from jupyter_gpumem.peaks import tracker
from tests.conftest import Kernel, Shell, empty_gpu

MIB = 1 << 20
TAKE = """
import torch
def take(mib, device=0):
    return torch.empty(mib << 20, dtype=torch.uint8, device=f"cuda:{device}")
"""


@pytest.fixture(autouse=True)
def _clean_gpu() -> None:
    torch.empty(1, device="cuda")
    empty_gpu()


def recorder_of(shell: Shell) -> CellRecorder:
    return shell.ip._jupyter_gpumem.magics.recorder


def last(shell: Shell) -> CellRecord:
    return recorder_of(shell).records[-1]


@pytest.fixture
def loaded(shell: Shell) -> Shell:
    shell.run(TAKE)
    shell.run("%load_ext jupyter_gpumem")
    return shell


def test_the_loading_cell_itself_is_not_recorded(loaded: Shell) -> None:
    assert recorder_of(loaded).records == []
    assert not recorder_of(loaded).running


def test_a_cell_is_recorded_with_its_exact_peak(loaded: Shell) -> None:
    loaded.run("x = take(10)\ny = take(90)\ndel y")
    change = last(loaded).devices[0]
    assert (change.before.allocated_bytes, change.after.allocated_bytes) == (0, 10 * MIB)
    assert (change.peak_allocated_bytes, change.peak_exact) == (100 * MIB, True)
    assert change.after.reserved_bytes == torch.cuda.memory_reserved()
    assert change.after.used_bytes == change.after.total_bytes - torch.cuda.mem_get_info(0)[0]
    assert (last(loaded).number, last(loaded).status, last(loaded).simulated) == (3, "ok", True)


def test_only_the_devices_that_moved_are_shown_a_line_each(loaded: Shell) -> None:
    outputs = loaded.run("x = take(64); y = take(32, 2)")
    lines = outputs.text.strip().splitlines()
    assert [line.split("   ")[0] for line in lines] == ["GPU 0", "GPU 2"]
    assert "64.0 MiB (+64.0 MiB)   peak 64.0 MiB   reserved 64.0 MiB (+64.0 MiB)" in lines[0]
    assert all(line.rstrip().endswith("simulated") for line in lines)
    assert loaded.run("1 + 1").text == ""


def test_a_cell_that_gave_everything_back_still_shows_its_peak(loaded: Shell) -> None:
    loaded.run("take(64); None")
    assert "peak 64.0 MiB" in loaded.run("take(64); None").text


def test_a_move_below_min_delta_bytes_gets_no_line(loaded: Shell) -> None:
    loaded.run("%config GpuMem.min_delta_bytes = 50 << 20")
    assert loaded.run("x = take(40)").text == ""
    assert loaded.run("y = take(60)").text != ""


def test_no_other_device_is_woken(loaded: Shell) -> None:
    awake = [torch._C._cuda_hasPrimaryContext(d) for d in range(torch.cuda.device_count())]
    loaded.run("x = take(64)")
    assert [torch._C._cuda_hasPrimaryContext(d) for d in range(torch.cuda.device_count())] == awake


@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt", "SystemExit"])
def test_a_failing_cell_is_recorded_and_shown_with_its_error(loaded: Shell, error: str) -> None:
    outputs = loaded.run(f"x = take(8)\nraise {error}")
    assert (last(loaded).status, last(loaded).devices[0].allocated_delta_bytes) == (error, 8 * MIB)
    assert error in outputs.text


def test_a_cell_that_runs_out_of_memory_is_recorded(loaded: Shell) -> None:
    loaded.run("x = take(8)\ny = take(1 << 20)")
    assert (last(loaded).status, last(loaded).devices[0].after.allocated_bytes) == ("OutOfMemoryError", 8 * MIB)


def test_a_cell_with_a_syntax_error_is_recorded_without_a_number_of_bytes(loaded: Shell) -> None:
    loaded.run("x = = 3")
    assert (last(loaded).status, last(loaded).moved) == ("SyntaxError", ())


def test_nested_cells_have_their_own_exact_peaks(loaded: Shell) -> None:
    loaded.run(
        "a = take(30); del a\n"
        "get_ipython().run_cell('b = take(20); del b')\n"
        "c = take(10)\n"
        "get_ipython().run_cell('d = take(5); del d; get_ipython().run_cell(\"e = take(70)\")')"
    )
    records = recorder_of(loaded).records
    assert [(r.depth, r.devices[0].peak_allocated_bytes // MIB) for r in records] == [
        (1, 20),
        (2, 80),
        (1, 80),
        (0, 80),
    ]
    assert last(loaded).devices[0].allocated_delta_bytes == 80 * MIB


def test_a_nested_cell_shows_no_line_of_its_own(loaded: Shell) -> None:
    assert loaded.run("get_ipython().run_cell('b = take(20)')").text.count("GPU 0") == 1


def test_capture_time_and_cells_outside_the_history_are_measured_once(loaded: Shell) -> None:
    loaded.run("%%capture\nx = take(20)")
    assert [r.depth for r in recorder_of(loaded).records] == [1, 0]
    loaded.run("%%time\ny = take(30)")
    assert last(loaded).devices[0].allocated_delta_bytes == 30 * MIB
    loaded.run("z = take(40)", store_history=False)
    assert (last(loaded).number, last(loaded).devices[0].allocated_delta_bytes) == (None, 40 * MIB)


def test_blank_cells_leave_no_record_and_close_no_other_cell(loaded: Shell) -> None:
    loaded.run("")
    loaded.run("  \n ")
    loaded.run("get_ipython().run_cell('')\nx = take(4)")
    assert [r.devices[0].allocated_delta_bytes for r in recorder_of(loaded).records] == [4 * MIB]


def test_a_cell_in_another_thread_is_left_alone(loaded: Shell) -> None:
    info = type("Info", (), {"raw_cell": "x"})()
    recorder = recorder_of(loaded)
    thread = threading.Thread(target=recorder.pre_run_cell, args=(info,))
    thread.start()
    thread.join()
    assert not recorder.running


def test_an_awaiting_cell_is_measured(loaded: Shell) -> None:
    loaded.run("import asyncio\nx = take(16)\nawait asyncio.sleep(0)\ny = take(16); del y")
    change = last(loaded).devices[0]
    assert (change.allocated_delta_bytes, change.peak_allocated_bytes) == (16 * MIB, 32 * MIB)


def test_the_users_own_counters_answer_as_if_nobody_measured(loaded: Shell) -> None:
    torch.cuda.reset_peak_memory_stats()
    loaded.run("take(50); None")
    loaded.run("take(10); None")
    assert torch.cuda.max_memory_allocated() == 50 * MIB
    loaded.run("torch.cuda.reset_peak_memory_stats()\ntake(20); None")
    assert torch.cuda.max_memory_allocated() == 20 * MIB
    loaded.run("%reload_ext jupyter_gpumem")
    loaded.run("take(10); None")
    assert torch.cuda.max_memory_allocated() == 20 * MIB
    loaded.run("%unload_ext jupyter_gpumem")
    assert torch.cuda.max_memory_allocated() == 20 * MIB


def test_a_bound_is_marked_when_counters_are_only_observed(loaded: Shell) -> None:
    loaded.run("%config GpuMem.peak = 'observe'")
    loaded.run("take(50); None")
    assert "peak ≤ 50.0 MiB" in loaded.run("x = take(10)").text
    assert "peak 70.0 MiB" in loaded.run("y = take(60)").text


def test_track_measures_a_span_and_nests() -> None:
    with track("outer") as outer:
        torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        with track("inner") as inner:
            kept = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
    assert [r.devices[0].peak_allocated_bytes // MIB for r in (outer, inner)] == [30, 10]
    assert (outer.name, outer.status, outer.devices[0].allocated_delta_bytes) == ("outer", "ok", kept.nbytes)
    assert outer.seconds >= inner.seconds


def test_track_records_the_error_and_lets_it_pass() -> None:
    with pytest.raises(KeyError), track() as record:
        raise KeyError
    assert record.status == "KeyError"
    assert not tracker._scopes


def test_track_works_in_threads_and_tasks() -> None:
    async def span() -> CellRecord:
        with track() as record:
            torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
            await asyncio.sleep(0)
        return record

    async def both() -> list[CellRecord]:
        return list(await asyncio.gather(span(), span()))

    assert [r.devices[0].peak_allocated_bytes for r in asyncio.run(both())] == [10 * MIB, 10 * MIB]
    assert not tracker._scopes


def test_a_record_is_json_and_flat_rows(loaded: Shell) -> None:
    loaded.run("x = take(10)")
    entry = last(loaded).to_dict()
    assert (entry["number"], entry["devices"][0]["peak_allocated_bytes"]) == (3, 10 * MIB)
    assert entry["devices"][0]["label"] == "GPU 0"


def test_a_real_kernel_shows_the_line_under_the_cell_also_when_interrupted(gpu_kernel: Kernel) -> None:
    outputs = gpu_kernel.run("x = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')")
    assert outputs.text.startswith("GPU 0   64.0 MiB (+64.0 MiB)   peak 64.0 MiB")
    assert ">peak 64.0 MiB<" in outputs.html
    assert (outputs.stdout, outputs.stderr) == ("", "")
    threading.Timer(0.5, gpu_kernel.interrupt).start()
    outputs = gpu_kernel.run("import time\ny = torch.empty(32 << 20, dtype=torch.uint8, device='cuda')\ntime.sleep(60)")
    assert outputs.error == "KeyboardInterrupt"
    assert "KeyboardInterrupt" in outputs.text
    outputs = gpu_kernel.run(
        "import asyncio\nawait asyncio.sleep(0)\nz = torch.empty(8 << 20, dtype=torch.uint8, device='cuda')"
    )
    assert "(+8.00 MiB)" in outputs.text


def test_without_a_gpu_a_kernel_reports_the_memory_of_the_process(kernel: Kernel) -> None:
    greeting = kernel.run("%load_ext jupyter_gpumem").text
    assert greeting.strip() == (
        "jupyter_gpumem: no CUDA device here. Cells report this process's RAM.   "
        "→ %gpumem simulate 24GiB   # before importing torch"
    )
    outputs = kernel.run("data = bytearray(b'x') * (256 << 20)")
    assert outputs.text.startswith("RAM   ")
    assert "peak ~" in outputs.text
    assert kernel.run("%gpumem simulate 8GiB").text.startswith("a simulated GPU of 8.00 GiB")
    outputs = kernel.run("import torch; x = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')")
    assert outputs.text.startswith("GPU 0   64.0 MiB (+64.0 MiB)")
    assert "of 8.00 GiB" in outputs.text


def test_a_size_that_depends_on_a_value_is_said_and_showing_a_tensor_is_not_one(loaded: Shell) -> None:
    loaded.run("x = take(64)")
    assert "depends on values" in loaded.run("y = x[x > 0]; z = take(64)").text
    assert last(loaded).sizes_read > 0
    assert "depends on values" not in loaded.run("print(x[:3]); z = take(80)").text
    assert last(loaded).sizes_read == 0


@pytest.mark.parametrize("where", ["sizes_read", "awake_devices"])
def test_an_interrupt_inside_a_hook_leaves_no_scope_behind(
    loaded: Shell, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    strikes = [KeyboardInterrupt, None, KeyboardInterrupt]
    owner = cells.simgpu if where == "sizes_read" else cells.CudaProbe
    original = getattr(owner, where)

    def struck(*arguments: object) -> object:
        strike = strikes.pop(0) if strikes else None
        if strike is not None:
            raise strike
        return original(*arguments)

    monkeypatch.setattr(owner, where, struck)
    for _ in range(4):
        loaded.run("x = take(20); del x")
    gc.collect()
    assert not recorder_of(loaded).running
    assert not list(tracker._scopes)
    assert last(loaded).devices[0].peak_allocated_bytes == 20 * MIB


def test_a_host_mode_interrupt_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "current_probe", HostProbe)
    monkeypatch.setattr(cells.tracker, "open", interrupted)
    with pytest.raises(KeyboardInterrupt), track():
        pass
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "gpumem-rss":
            thread.join(timeout=5)


def test_track_outside_the_extension_wraps_torch_only_while_it_runs() -> None:
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)
    reader = torch._C._cuda_memoryStats
    with track():
        assert torch._C._cuda_memoryStats is not reader
    assert torch._C._cuda_memoryStats is reader
