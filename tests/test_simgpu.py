"""The simulated GPU of this process: what torch, NVML and a program see of it."""

import ctypes
import os
from collections.abc import Callable, Iterator

import psutil
import pynvml
import pytest
import torch
from torch import nn

from jupyter_gpumem import simgpu
from jupyter_gpumem.errors import GpuMemError
from tests.conftest import DEVICE_BYTES, DEVICES, empty_gpu

MIB = 1024**2
GIB = 1024**3
CONTEXT = 512 * MIB


@pytest.fixture(autouse=True)
def healthy_device() -> Iterator[None]:
    empty_gpu()
    yield
    simgpu.configure(context_bytes=CONTEXT, other_processes=(), utilization=0, nvml_fault=None)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_on_the_device() -> Iterator[None]:
    yield
    empty_gpu()


@pytest.fixture
def handle() -> Iterator[object]:
    pynvml.nvmlInit()
    yield pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


# ---- the devices ----


def test_every_device_is_there_with_the_size_that_was_asked_for() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == DEVICES
    assert {torch.cuda.get_device_properties(i).total_memory for i in range(DEVICES)} == {DEVICE_BYTES}
    assert torch.cuda.get_device_name(2) == "Simulated GPU"


def test_the_other_properties_are_those_of_an_h100() -> None:
    properties = torch.cuda.get_device_properties(0)
    assert torch.cuda.get_device_capability() == (9, 0)
    assert properties.multi_processor_count == 132
    assert properties.L2_cache_size == 50 * MIB
    assert properties.max_threads_per_multi_processor == 2048
    assert properties.regs_per_multiprocessor == 65536
    assert properties.warp_size == 32


def test_driver_and_torch_agree_on_the_identity_of_a_device(handle: object) -> None:
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert pynvml.nvmlDeviceGetUUID(handle) == f"GPU-{uuid}"
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")) == 0


def test_a_second_activation_with_the_same_arguments_changes_nothing() -> None:
    kept = torch.ones(MIB, device="cuda")
    before = torch.cuda.memory_allocated()
    simgpu.activate("24GiB", devices=DEVICES)
    simgpu.activate(DEVICE_BYTES, devices=DEVICES)
    assert torch.cuda.memory_allocated() == before
    assert kept.is_cuda
    assert simgpu.is_active()


@pytest.mark.parametrize(("memory", "devices"), [("16GiB", DEVICES), ("24GiB", DEVICES + 1)])
def test_another_size_or_number_is_refused_while_active(memory: str, devices: int) -> None:
    with pytest.raises(GpuMemError, match=r"on already, 3 with 24\.0 GiB each; restart the kernel"):
        simgpu.activate(memory, devices=devices)


# ---- memory ----


def test_the_allocator_rounds_caches_and_gives_back_as_on_a_device() -> None:
    tensor = torch.empty(3 * MIB + 1, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 3 * MIB + 512
    assert torch.cuda.memory_reserved() == 20 * MIB
    del tensor
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_reserved() == 20 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_free_and_used_are_context_and_segments_on_each_device() -> None:
    for device in range(DEVICES):
        kept = torch.empty(100 * MIB, dtype=torch.uint8, device=f"cuda:{device}")
        free, total = torch.cuda.mem_get_info(device)
        assert (total - free, total) == (CONTEXT + 100 * MIB, DEVICE_BYTES)
        del kept


def test_out_of_memory_is_torchs_own_error_with_its_own_figures() -> None:
    kept = torch.empty(20 * GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    message = str(caught.value)
    assert "Tried to allocate 4.00 GiB" in message
    assert "GPU 0 has a total capacity of 24.00 GiB of which 3.50 GiB is free" in message
    assert "this process has 20.50 GiB memory in use" in message
    assert "20.00 GiB is allocated by PyTorch" in message
    assert torch.cuda.memory_allocated() == kept.nbytes


def test_out_of_memory_names_the_other_processes() -> None:
    simgpu.configure(other_processes=[(os.getppid(), 6 * GIB)])
    with pytest.raises(torch.OutOfMemoryError, match=f"Process {os.getppid()} has 6.00 GiB memory in use"):
        torch.empty(20 * GIB, dtype=torch.uint8, device="cuda")
    kept = torch.empty(20 * GIB, dtype=torch.uint8, device="cuda:1")
    assert kept.is_cuda


def test_the_last_page_of_a_device_can_be_used_and_not_one_more() -> None:
    torch.ones(1, device="cuda")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    kept = torch.empty(free, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] == 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="cuda")
    del kept


def test_a_memory_fraction_is_kept() -> None:
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"6\.00 GiB allowed"):
            torch.empty(7 * GIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_filling_and_copying_touch_no_memory_of_the_machine() -> None:
    before = resident_bytes()
    source = torch.zeros(4 * GIB, dtype=torch.uint8, device="cuda:0")
    copies = [source.clone(), source.to("cuda:1"), torch.ones_like(source), source + 1]
    copies[0].copy_(copies[2])
    copies[1].fill_(7)
    torch.cuda.synchronize()
    assert resident_bytes() - before < GIB


def test_a_copy_to_the_host_is_zeros_every_time() -> None:
    tensor = torch.full((1000,), 3.0, device="cuda")
    host = torch.ones(1000)
    host.copy_(tensor)
    assert host.eq(0).all()
    assert tensor.sum().item() == 0.0
    assert torch.randn(5, device="cuda").tolist() == [0.0] * 5


def test_pinned_memory_is_known_as_such() -> None:
    plain = torch.ones(1000)
    pinned = plain.pin_memory()
    assert not plain.is_pinned()
    assert pinned.is_pinned()
    assert pinned[100:].is_pinned()
    assert torch.equal(pinned, plain)
    assert pinned.cuda(non_blocking=True).is_cuda


def test_the_address_of_a_tensor_leads_to_its_device() -> None:
    for device in range(DEVICES):
        with torch.cuda.device(device):
            tensor = torch.ones(1000, device="cuda")
            assert torch.from_dlpack(tensor[500:]).device == torch.device("cuda", device)


def test_traces_and_snapshots_name_every_block() -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        kept = torch.ones(5 * MIB, device="cuda")
        events = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert [event["size"] for event in events if event["action"] == "alloc"] == [kept.nbytes]
    segments = torch.cuda.memory_snapshot()
    blocks = [block for segment in segments for block in segment["blocks"]]
    assert kept.data_ptr() in {block["address"] for block in blocks if block["state"] == "active_allocated"}


def test_sixteen_thousand_segments_are_quick_and_all_come_back() -> None:
    before = torch.cuda.mem_get_info()[0]
    kept = [torch.empty(1_500_000, dtype=torch.uint8, device="cuda") for _ in range(15_000)]
    assert torch.cuda.mem_get_info()[0] < before
    kept = kept[::2]
    torch.cuda.empty_cache()
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == before


# ---- streams, events, graphs ----


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def test_a_graph_keeps_a_private_pool_until_it_is_deleted() -> None:
    source = torch.ones(MIB, device="cuda")
    kept: list[torch.Tensor] = []
    before = torch.cuda.memory_reserved()
    graph = capture(lambda: kept.append(source * 2 + 1))
    graph.replay()
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    assert len(pools) == 2
    assert torch.cuda.memory_reserved() > before
    del graph
    kept.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_a_stream_that_waits_for_an_event_of_a_capture_joins_it() -> None:
    first, second, alone = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    seen: list[bool] = []

    def body() -> None:
        main = torch.cuda.current_stream()
        first.wait_stream(main)
        second.wait_stream(first)
        for stream in (first, second, alone):
            with torch.cuda.stream(stream):
                seen.append(torch.cuda.is_current_stream_capturing())
        with torch.cuda.stream(second):
            torch.ones(10, device="cuda")
        main.wait_stream(second)

    capture(body).replay()
    assert seen == [True, True, False]
    with torch.cuda.stream(second):
        assert not torch.cuda.is_current_stream_capturing()


def test_several_captures_at_once_do_not_disturb_each_other() -> None:
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in graphs]
    for graph, stream in zip(graphs, streams, strict=True):
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            torch.ones(10, device="cuda")
    assert not torch.cuda.is_current_stream_capturing()
    for graph, stream in zip(reversed(graphs), reversed(streams), strict=True):
        with torch.cuda.stream(stream):
            assert torch.cuda.is_current_stream_capturing()
            graph.capture_end()
    for graph in graphs:
        graph.replay()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty", "ignore:The AccumulateGrad node's stream")
def test_graphed_callables_train() -> None:
    net = nn.Linear(64, 64).cuda()
    graphed = torch.cuda.make_graphed_callables(net, (torch.randn(8, 64, device="cuda", requires_grad=True),))
    graphed(torch.randn(8, 64, device="cuda", requires_grad=True)).sum().backward()
    assert net.weight.grad is not None


def test_memory_used_on_another_stream_is_held_until_it_is_done() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = torch.ones(MIB, device="cuda")
    tensor.record_stream(torch.cuda.current_stream())
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record(side)
    side.synchronize()
    assert side.query()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    del tensor
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["active_bytes.all.current"] >= 0


def test_a_memory_pool_of_the_programs_own_is_given_back() -> None:
    before = torch.cuda.memory_reserved()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.ones(5 * MIB, device="cuda")
    assert torch.cuda.memory_reserved() > before
    del tensor, pool
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


# ---- NVML ----


def test_nvml_agrees_with_the_runtime(handle: object) -> None:
    kept = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    simgpu.configure(context_bytes=300 * MIB, other_processes=[(4242, GIB), (4343, 2 * GIB, 1)], utilization=37)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    free, total = torch.cuda.mem_get_info()
    assert memory.used == 300 * MIB + kept.nbytes + GIB
    assert (memory.free, memory.total) == (free, total)
    assert pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used == memory.used
    assert torch.cuda.device_memory_used() == memory.used
    assert torch.cuda.utilization() == 37
    processes = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    assert processes == {os.getpid(): 300 * MIB + kept.nbytes, 4242: GIB}
    assert torch.cuda.mem_get_info(1)[0] == DEVICE_BYTES - 300 * MIB - 2 * GIB - torch.cuda.memory_reserved(1)


def test_torchs_own_readings_of_the_card_answer() -> None:
    torch.ones(1, device="cuda")
    assert torch.cuda.temperature() == 30
    assert torch.cuda.power_draw() == 70_000
    assert torch.cuda.clock_rate() == 1980
    assert f"process{os.getpid():>11d} uses" in torch.cuda.list_gpu_processes()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("not_supported", "NVMLError_NotSupported"),
        ("no_permission", "NVMLError_NoPermission"),
        ("gpu_lost", "NVMLError_GpuIsLost"),
    ],
)
def test_a_fault_of_nvml_can_be_switched_on_and_off(handle: object, fault: str, error: str) -> None:
    kind = getattr(pynvml, error)
    simgpu.configure(nvml_fault=fault)
    for read in (
        pynvml.nvmlDeviceGetMemoryInfo,
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetUtilizationRates,
    ):
        with pytest.raises(kind):
            read(handle)
    assert torch.ones(1, device="cuda").is_cuda
    simgpu.configure(nvml_fault=None)
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).total == DEVICE_BYTES


def test_processes_can_hide_their_memory_or_themselves(handle: object) -> None:
    torch.ones(1, device="cuda")
    simgpu.configure(other_processes=[(4242, GIB)], nvml_fault="unknown_memory")
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert [(p.pid, p.usedGpuMemory) for p in processes] == [(os.getpid(), None), (4242, None)]
    simgpu.configure(nvml_fault="no_processes")
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle) == []
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).used >= GIB


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(GpuMemError, match="'broken' is no NVML fault; choose from not_supported"):
        simgpu.configure(nvml_fault="broken")
    with pytest.raises(GpuMemError, match="on devices 0 to 2"):
        simgpu.configure(other_processes=[(1, GIB, 3)])
    with pytest.raises(GpuMemError, match="at most 16"):
        simgpu.configure(other_processes=[(pid, MIB) for pid in range(17)])


def test_other_processes_larger_than_the_card_fill_it(handle: object) -> None:
    simgpu.configure(other_processes=[(4242, 100 * GIB)])
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).free == 0
    assert torch.cuda.mem_get_info()[0] == 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="cuda")


# ---- what activation leaves ----


def test_cudnn_is_off() -> None:
    assert not torch.backends.cudnn.enabled
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_the_libraries_are_found_by_the_names_that_others_open() -> None:
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        assert ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)._name == name
