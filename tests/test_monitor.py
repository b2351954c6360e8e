import pytest
import torch

from jupyter_gpumem import nvml
from jupyter_gpumem.cells import CellRecord, CellRecorder, DeviceChange
from jupyter_gpumem.monitor import Monitor
from jupyter_gpumem.processes import ProcessName
from tests.conftest import DEVICES, Shell

MIB = 1024**2
GIB = 1024**3


class Clock:
    def __init__(self) -> None:
        self.now = 10_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def monitor(shell: Shell, clock: Clock) -> Monitor:
    torch.ones(1, device="cuda")
    return Monitor(CellRecorder(), clock=clock, wall=lambda: 0.0)


def test_a_reading_is_what_torch_counts(monitor: Monitor) -> None:
    held = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda:1")
    reading = monitor.read()
    assert tuple(reading.snapshots) == tuple(range(DEVICES))
    for device, snapshot in reading.snapshots.items():
        assert snapshot.allocated_bytes == torch.cuda.memory_allocated(device)
        assert snapshot.reserved_bytes == torch.cuda.memory_reserved(device)
    assert reading.snapshots[1].allocated_bytes >= held.nbytes
    assert reading.simulated


def test_reading_resets_no_counter_and_wakes_no_device(monitor: Monitor) -> None:
    del_me = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    peak = torch.cuda.max_memory_allocated()
    del del_me
    contexts = [torch._C._cuda_hasPrimaryContext(device) for device in range(DEVICES)]
    monitor.read()
    assert torch.cuda.max_memory_allocated() == peak
    assert [torch._C._cuda_hasPrimaryContext(device) for device in range(DEVICES)] == contexts


def test_an_out_of_memory_that_the_program_swallowed_is_noticed(monitor: Monitor, clock: Clock) -> None:
    monitor.read()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 * GIB, dtype=torch.uint8, device="cuda")
    clock.now += 1
    monitor.read()
    clock.now += 1
    monitor.read()
    assert monitor.chart(0, 60).kills == (10_001.0,)
    assert monitor.chart(1, 60).kills == ()


def test_the_chart_spans_the_window_chosen_from_the_first_sample_on(monitor: Monitor, clock: Clock) -> None:
    for seconds in (0, 59, 4000):
        clock.now += seconds
        monitor.read()
        for window in (60, 300, 900, 3600):
            chart = monitor.chart(0, window)
            assert chart.end > clock.now
            assert chart.end - chart.start == window


def test_the_chart_moves_on_in_steps(monitor: Monitor, clock: Clock) -> None:
    monitor.read()
    clock.now += 3600
    ends = {monitor.chart(0, 3600).end for clock.now in (13_600.0, 13_605.0, 13_610.0, 13_629.0)}
    assert ends == {13_620.0, 13_650.0}


def test_a_limit_of_the_process_is_told(monitor: Monitor) -> None:
    monitor.read()
    assert monitor.limit(0) is None
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        assert monitor.limit(0) == monitor.chart(0, 60).limit_bytes == 6 * GIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_cells_are_marked_with_the_peak_of_the_device_asked_for(monitor: Monitor, shell: Shell) -> None:
    monitor.read()
    recorder = monitor.recorder
    events = {"pre_run_cell": recorder.pre_run_cell, "post_run_cell": recorder.post_run_cell}
    for event, callback in events.items():
        shell.ip.events.register(event, callback)
    shell.run("import torch\nx = torch.empty(7 << 20, dtype=torch.uint8, device='cuda:2'); del x")
    shell.run("get_ipython().run_cell('1'); raise MemoryError('of the host')")
    for event, callback in events.items():
        shell.ip.events.unregister(event, callback)
    start = recorder.records[0].started
    marks = monitor._cells(2, start)
    assert [(mark.first_line, mark.status, mark.out_of_memory) for mark in marks] == [
        ("import torch", "ok", False),
        ("get_ipython().run_cell('1'); raise MemoryError('of the host')", "MemoryError", False),
    ]
    assert marks[0].peak_bytes == torch.cuda.memory_allocated(2) + 7 * MIB
    assert monitor._cells(0, start)[0].peak_bytes is None


def test_an_out_of_memory_is_marked_on_the_device_that_ran_out(monitor: Monitor, shell: Shell) -> None:
    recorder = monitor.recorder
    events = {"pre_run_cell": recorder.pre_run_cell, "post_run_cell": recorder.post_run_cell}
    for event, callback in events.items():
        shell.ip.events.register(event, callback)
    shell.run("import torch; x = torch.empty(9, device='cuda:1'); torch.empty(1 << 40, device='cuda:0')")
    for event, callback in events.items():
        shell.ip.events.unregister(event, callback)
    start = recorder.records[0].started
    assert recorder.records[0].status == "OutOfMemoryError"
    assert [monitor._cells(device, start)[0].out_of_memory for device in range(3)] == [True, False, False]


def test_neighbours_are_asked_for_every_few_seconds_and_named_once(
    monitor: Monitor, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, named = [], []
    uses = [nvml.ProcessUse(42, GIB)]

    def read_device(device: int, **_options: object) -> nvml.DeviceUse:
        asked.append(device)
        return nvml.DeviceUse("card", None, 4 * GIB, 24 * GIB, None, tuple(uses), True, 2 * GIB)

    def name_processes(pids: list[int]) -> tuple[ProcessName, ...]:
        named.extend(pids)
        return tuple(ProcessName(pid, f"process {pid}") for pid in pids)

    monkeypatch.setattr(nvml, "read_device", read_device)
    monkeypatch.setattr("jupyter_gpumem.monitor.name_processes", name_processes)
    snapshot = monitor.read().snapshots[0]
    for _ in range(20):
        use = monitor.use(0, snapshot)
        clock.now += 0.5
    assert asked == [0, 0]
    uses.append(nvml.ProcessUse(43, 2 * GIB))
    clock.now += 5
    use = monitor.use(0, snapshot)
    assert named == [42, 43]
    assert use.neighbours is not None
    assert [one.name.pid for one in use.neighbours] == [43, 42]
    assert use.own_extra_bytes == 2 * GIB - snapshot.reserved_bytes
    # a kernel may come to run another notebook
    clock.now += 60
    monitor.use(0, snapshot)
    assert sorted(named) == [42, 42, 43, 43]


def test_where_processes_cannot_be_seen_the_neighbours_are_unknown(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = nvml.DeviceUse("card", None, 4 * GIB, 24 * GIB, None, None, False, None)
    monkeypatch.setattr(nvml, "read_device", lambda _device, **_options: use)
    assert monitor.use(0, monitor.read().snapshots[0]).neighbours is None


def test_a_gpu_simulated_after_loading_begins_a_new_history(clock: Clock) -> None:
    from jupyter_gpumem.device import HostProbe, current_probe

    probes = [HostProbe(), current_probe()]
    monitor = Monitor(CellRecorder(), clock=clock, probe=lambda: probes[0])
    assert monitor.read().kind == "host"
    probes.pop(0)
    assert monitor.read().kind == "cuda"
    assert len(monitor.history.since(0, 0)) == 1
    assert monitor.read().names[0][0] == "GPU 0"


def test_a_peak_of_the_hosts_ram_is_none_of_the_gpu_simulated_since(clock: Clock) -> None:
    from jupyter_gpumem.device import HostProbe, current_probe

    recorder = CellRecorder()
    probes = [HostProbe(), current_probe()]
    monitor = Monitor(recorder, clock=clock, probe=lambda: probes[0])
    monitor.read()
    snapshot = probes[0].snapshot(0)
    changes = (DeviceChange("RAM", snapshot, snapshot, 5 * GIB, 5 * GIB, False, True),)
    recorder.records.append(CellRecord("x = [0] * 10**9", clock.now, 0.0, number=1, ended=clock.now, devices=changes))
    assert [mark.peak_bytes for mark in monitor.chart(0, 300.0).cells] == [5 * GIB]
    probes.pop(0)
    monitor.read()
    assert [mark.peak_bytes for mark in monitor.chart(0, 300.0).cells] == [None]
