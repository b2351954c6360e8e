"""What only a real device can show; `python -m tests.gpu_check` runs these."""

import subprocess
import sys

import pytest

from jupyter_gpumem import simgpu, track
from jupyter_gpumem.device import CudaProbe

pytestmark = pytest.mark.gpu


def test_the_device_is_not_the_simulated_one() -> None:
    assert not simgpu.is_active()


def test_the_peak_of_a_span_is_exact_and_the_users_own_stays_right() -> None:
    import torch

    first = torch.empty(1 << 24, device="cuda")
    del first
    users = torch.cuda.max_memory_allocated()
    with track("span") as record:
        before = torch.cuda.memory_allocated()
        second = torch.empty(1 << 20, device="cuda")
        del second
    change = record.devices[0]

    assert change.peak_allocated_bytes == before + (4 << 20)
    assert torch.cuda.max_memory_allocated() == users


def test_the_whole_device_is_what_the_driver_says() -> None:
    import torch

    torch.ones(1, device="cuda")
    reading = CudaProbe().snapshot(torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info()

    assert reading.total_bytes == total
    assert reading.used_bytes == total - free


def test_loading_and_recording_start_no_context() -> None:
    code = (
        "import torch\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'jupyter_gpumem')\n"
        "shell.run_cell('1 + 1')\n"
        "print(torch.cuda.is_initialized(), torch._C._cuda_hasPrimaryContext(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split()[-2:] == ["False", "False"]


def test_a_kernel_that_is_still_running_does_not_change_what_is_read() -> None:
    import torch

    x = torch.ones(4096, 4096, device="cuda")
    with track("span") as record:
        for _ in range(50):
            y = x @ x
    allocated = torch.cuda.memory_allocated()
    torch.cuda.synchronize()

    assert record.devices[0].after.allocated_bytes == allocated == torch.cuda.memory_allocated()
    assert y.shape == x.shape
