import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jupyter_gpumem.observer import Observer, observer
from tests.conftest import Kernel, Shell, empty_gpu


def traces(shell: Shell) -> dict[str, Any]:
    ip = shell.ip
    return {
        "events": {name: list(callbacks) for name, callbacks in ip.events.callbacks.items()},
        "transforms": list(ip.input_transformer_manager.cleanup_transforms),
        "magics": {kind: set(names) for kind, names in ip.magics_manager.magics.items()},
        # IPython makes its own magics configurable on their first use
        "configurables": [c for c in ip.configurables if type(c).__module__.startswith("jupyter_gpumem")],
        "completers": set(ip.strdispatchers["complete_command"].strs),
        "formatters": {m: set(f.type_printers) for m, f in ip.display_formatter.formatters.items()},
        "names": {name for name in ip.user_ns if not name.startswith("_")},
        "hidden": {name for name in ip.user_ns_hidden if not name.startswith("_")},
        "attributes": {name for name in vars(ip) if "gpumem" in name},
        "threads": {thread.name for thread in threading.enumerate()},
        "torch": [
            getattr(torch._C, name)
            for name in ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats", "_accelerator_getDeviceStats")
            if hasattr(torch._C, name)
        ],
        "meta_path": list(sys.meta_path),
    }


@pytest.fixture
def emptied(shell: Shell) -> Shell:
    torch.empty(1, device="cuda")
    empty_gpu()
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)  # a peak that an earlier test left to the extension alone
    return shell


@pytest.mark.parametrize("reloads", [0, 1, 3])
def test_unloading_leaves_no_trace(emptied: Shell, reloads: int) -> None:
    emptied.run("1")
    before = traces(emptied)
    emptied.run("%load_ext jupyter_gpumem")
    emptied.run("%%gpumem\npass")
    for _ in range(reloads):
        emptied.run("%reload_ext jupyter_gpumem")
        emptied.run("pass")
    assert traces(emptied) != before
    emptied.run("%unload_ext jupyter_gpumem")
    assert traces(emptied) == before


def test_loading_twice_ties_it_once(emptied: Shell) -> None:
    emptied.run("%load_ext jupyter_gpumem")
    before = traces(emptied)
    sys.modules["jupyter_gpumem"].load_ipython_extension(emptied.ip)
    assert traces(emptied) == before


def test_unloading_twice_is_harmless(emptied: Shell) -> None:
    emptied.run("%load_ext jupyter_gpumem")
    for _ in range(2):
        sys.modules["jupyter_gpumem"].unload_ipython_extension(emptied.ip)
    emptied.ip.extension_manager.loaded.discard("jupyter_gpumem")


def test_the_observer_that_torch_keeps_knows_nothing_after_unloading(emptied: Shell) -> None:
    emptied.run("%load_ext jupyter_gpumem")
    emptied.run("import torch; torch.empty(1 << 50, device='cuda')")
    ours = [weakref.ref(one) for one in (emptied.ip._jupyter_gpumem, emptied.ip._jupyter_gpumem.magics.reports)]
    emptied.run("%unload_ext jupyter_gpumem")
    gc.collect()
    assert [one() for one in ours] == [None, None]
    assert [value for value in vars(observer).values() if value not in (None, True, deque())] == []
    assert emptied.run("torch.empty(1 << 50, device='cuda')").text == ""


def test_unloaded_before_cuda_starts_no_observer_is_attached_until_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starting: list[Callable[[], None]] = []
    attached: list[Callable[..., None]] = []
    told: list[int] = []
    fake = SimpleNamespace(
        cuda=SimpleNamespace(_lazy_call=starting.append),
        _C=SimpleNamespace(_cuda_attach_out_of_memory_observer=attached.append),
    )
    monkeypatch.setattr("jupyter_gpumem.observer.torch_module", lambda: fake)
    one = Observer()
    one.listen(lambda _device, asked: told.append(asked))
    one.attach()
    one.listen(None)
    starting.pop()()
    assert attached == []
    one.listen(lambda _device, asked: told.append(asked))
    one.attach()
    one.attach()
    starting.pop()()
    assert starting == []
    attached[0](0, 5, 0, 0)
    one.listen(None)
    attached[0](0, 6, 0, 0)
    assert (len(attached), told) == (1, [5])


def test_loaded_late_it_says_that_history_starts_now(emptied: Shell) -> None:
    emptied.run("import torch; x = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')")
    assert emptied.run("%load_ext jupyter_gpumem").text.strip() == (
        "jupyter_gpumem: 64.0 MiB are allocated by earlier cells; the history starts now.   → %gpumem leaks"
    )


def test_an_error_of_ours_spoils_no_cell_and_is_said_once(emptied: Shell) -> None:
    emptied.run("%load_ext jupyter_gpumem")
    recorder = emptied.ip._jupyter_gpumem.magics.recorder
    recorder.on_end.append(lambda record, result: 1 / 0)
    outputs = emptied.run("x = 5")
    assert outputs.text.startswith("jupyter_gpumem stopped recording: ZeroDivisionError")
    assert (outputs.stdout, outputs.error) == ("", None)
    assert emptied.run("y = x").text == ""


def test_a_bad_option_is_refused_and_the_next_reload_still_works(emptied: Shell) -> None:
    emptied.run("%load_ext jupyter_gpumem")
    emptied.run("%config GpuMem.interval = -1")
    outputs = emptied.run("%reload_ext jupyter_gpumem")
    assert outputs.error is None
    assert "GpuMem.interval = -1 is not used" in outputs.text
    assert emptied.ip._jupyter_gpumem.magics.interval == 0.5


def test_every_option_is_listed_by_config_with_its_help(emptied: Shell) -> None:
    emptied.run("%load_ext jupyter_gpumem")
    shown = emptied.run("%config GpuMem").stdout
    for name in ("auto", "min_delta_bytes", "peak", "interval", "open_sidebar", "echo_bytes", "warn_fraction"):
        assert f"GpuMem.{name}=" in shown


def test_a_kernel_without_torch_in_use_loads_in_silence_where_a_gpu_may_be(kernel: Kernel) -> None:
    kernel.run("import os; from jupyter_gpumem import device; device.cuda_possible = lambda: True")
    outputs = kernel.run("%load_ext jupyter_gpumem\nprint('torch' in __import__('sys').modules)")
    assert (outputs.text, outputs.stdout, outputs.stderr) == ("", "False\n", "")


def test_a_restarted_kernel_starts_clean(gpu_kernel: Kernel) -> None:
    gpu_kernel.run("x = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')")
    gpu_kernel.manager.restart_kernel(now=True)
    gpu_kernel.client.wait_for_ready(timeout=60)
    outputs = gpu_kernel.run("import threading; print([t.name for t in threading.enumerate() if 'gpumem' in t.name])")
    assert outputs.stdout == "[]\n"


def test_a_forked_worker_runs_without_us(gpu_kernel: Kernel) -> None:
    gpu_kernel.run("x = torch.ones(4, device='cuda')")
    outputs = gpu_kernel.run(
        "from torch.utils.data import DataLoader\n"
        "print([batch.tolist() for batch in DataLoader([1, 2, 3, 4], batch_size=2, num_workers=2)])"
    )
    assert (outputs.stdout, outputs.error) == ("[[1, 2], [3, 4]]\n", None)
