import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from jupyter_gpumem import nvml, simgpu
from jupyter_gpumem.nvml import ProcessUse
from tests.alone import run_alone

GIB = 1024**3
CONTEXT_BYTES = 512 * 1024**2


@pytest.fixture(autouse=True)
def quiet_device() -> Iterator[None]:
    torch.empty(1, device="cuda:0")
    yield
    simgpu.configure(other_processes=[], nvml_fault=None, utilization=0, context_bytes=CONTEXT_BYTES)
    nvml.close()


def test_a_device_is_read_whole() -> None:
    simgpu.configure(other_processes=[(4242, 3 * GIB)], utilization=37)
    use = nvml.read_device(0, has_context=True)
    assert use is not None
    own = CONTEXT_BYTES + torch.cuda.memory_reserved(0)
    assert (use.own_bytes, use.used_bytes, use.total_bytes) == (own, own + 3 * GIB, 24 * GIB)
    assert use.utilization_percent == 37
    assert use.processes == (ProcessUse(4242, 3 * GIB), ProcessUse(os.getpid(), own))
    assert nvml.own_bytes(0) == own


def test_a_device_this_process_is_not_on_tells_what_the_others_hold() -> None:
    # in a process of its own: here an earlier test may have used the device
    code = """
        from jupyter_gpumem import nvml, simgpu
        simgpu.activate("24GiB", devices=2)
        simgpu.configure(other_processes=[(4242, 1 << 30, 1)])
        use = nvml.read_device(1)
        print(use.own_bytes, use.used_bytes, use.pids_visible)
    """
    assert run_alone(code) == f"0 {GIB} True\n"


@pytest.mark.parametrize("fault", simgpu.NVML_FAULTS)
def test_no_fault_raises_or_becomes_a_number(fault: str) -> None:
    simgpu.configure(other_processes=[(4242, GIB)], nvml_fault=fault)
    use = nvml.read_device(0, has_context=True)
    assert nvml.own_bytes(0) is None
    assert use is None or use.own_bytes is None


def test_a_list_without_this_process_is_not_read_as_ours() -> None:
    simgpu.configure(other_processes=[(4242, GIB)], nvml_fault="no_processes")
    use = nvml.read_device(0, has_context=True)
    assert use is not None
    assert (use.pids_visible, use.own_bytes) == (False, None)


def test_torch_devices_are_matched_by_uuid_whatever_the_order() -> None:
    uses = [nvml.read_device(index) for index in range(3)]
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(3)]
    assert [use.uuid for use in uses if use is not None] == uuids


def test_a_device_that_does_not_exist_is_unknown() -> None:
    assert nvml.read_device(17) is None
    assert nvml.own_bytes(17) is None


def test_without_the_library_everything_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.close()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert nvml.read_device(0) is None
    assert nvml.device_count() == 0
    nvml.close()


@pytest.mark.parametrize(
    ("listed", "order"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1", [1]),
        ("", []),
        ("-1", []),
        ("0,9,1", [0]),
        ("1,1", []),
        ("{2},{0}", [2, 0]),
        ("GPU-nothing", []),
        ("MIG-0", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, order: list[int]
) -> None:
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(3)]
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed.format(*uuids))
    assert nvml.device_count() == len(order)
    assert nvml._state.get().visible() == order


def test_unlike_cards_in_cuda_order_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = nvml._state.get()
    names = iter(["A100", "T4", "A100"] * 4)
    monkeypatch.setattr(library, "_name", lambda _index: next(names))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert library.visible() == []
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert library.visible() == [0, 1, 2]


def test_a_process_in_both_lists_counts_once_and_an_unknown_size_stays_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = nvml._state.get()
    compute = [SimpleNamespace(pid=7, usedGpuMemory=100), SimpleNamespace(pid=8, usedGpuMemory=None)]
    lists = {
        "nvmlDeviceGetComputeRunningProcesses": compute,
        "nvmlDeviceGetGraphicsRunningProcesses": [compute[0], SimpleNamespace(pid=9, usedGpuMemory=300)],
    }
    monkeypatch.setattr(library, "call", lambda name, *_arguments: lists[name])
    assert library.processes(None) == (ProcessUse(9, 300), ProcessUse(7, 100), ProcessUse(8, None))


def test_the_users_own_shutdown_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    assert nvml.own_bytes(0) is not None
    started, real = [False], pynvml.nvmlDeviceGetMemoryInfo

    def memory(handle: object) -> object:
        if not started[0]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        return real(handle)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: started.__setitem__(0, True))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    use = nvml.read_device(0)
    assert use is not None
    assert use.total_bytes == 24 * GIB


def test_a_forked_child_starts_its_own_library() -> None:
    assert nvml.read_device(0) is not None
    before = nvml._state.get()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"other" if nvml._state.get() is not before else b"same")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 16) == b"other"
    os.close(reader)
    os.close(writer)
