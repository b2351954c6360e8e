import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import comm
import ipywidgets
import pytest
from ipywidgets.widgets.widget import _instances

from jupyter_gpumem import nvml
from jupyter_gpumem.cells import CellRecord
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.freed import CACHE_WAITS, CELL_ALLOCATES, Change, FreeReport, FreeStep
from jupyter_gpumem.holders import DeviceLeaks, Holder, LeakReport, Release
from jupyter_gpumem.monitor import Monitor, Use
from jupyter_gpumem.panel import Panel, actions
from jupyter_gpumem.parts import Neighbour
from jupyter_gpumem.processes import ProcessName
from jupyter_gpumem.readings import DeviceSnapshot
from jupyter_gpumem.render.panel_words import free_words
from jupyter_gpumem.render.wire import wire_bytes
from jupyter_gpumem.subshell import let_clicks_use_the_subshell

MIB = 1024**2
GIB = 1024**3


class Channel:
    """A comm that keeps what is sent."""

    def __init__(self, sent: list[dict[str, Any]], **_options: object) -> None:
        self.comm_id = f"fake-{len(sent)}-{id(self)}"
        self.sent = sent
        self.kernel = object()

    def send(self, data: dict[str, Any], **_options: object) -> None:
        self.sent.append(data)

    def on_msg(self, _callback: object) -> None: ...
    def on_close(self, _callback: object) -> None: ...
    def close(self, *_args: object, **_options: object) -> None: ...


@dataclass
class FakeProbe:
    kind: str = "fake"
    snapshots: dict[int, DeviceSnapshot] = field(default_factory=dict)
    is_simulated: bool = False

    def devices(self) -> tuple[int, ...]:
        return tuple(self.snapshots)

    def counters(self, device: int) -> dict[str, Any]:
        return {}

    def snapshot(self, device: int) -> DeviceSnapshot:
        return self.snapshots[device]

    def label(self, device: int) -> str:
        return f"GPU {device}"

    def name(self, device: int) -> str:
        return "A <card>"

    def simulated(self) -> bool:
        return self.is_simulated

    def put(self, allocated: int, reserved: int | None = None, device: int = 0, used: int | None = 8 * GIB) -> None:
        reserved = allocated if reserved is None else reserved
        self.snapshots[device] = DeviceSnapshot(device, allocated, reserved, used, 24 * GIB)


@dataclass
class FakeRecorder:
    records: list[CellRecord] = field(default_factory=list)
    on_start: list[Any] = field(default_factory=list)
    on_end: list[Any] = field(default_factory=list)
    current: CellRecord | None = None

    @property
    def running(self) -> bool:
        return self.current is not None


@dataclass
class Setup:
    """A panel whose clock, devices and cells are the test's, and whose thread never runs."""

    panel: Panel
    probe: FakeProbe
    recorder: FakeRecorder
    sent: list[dict[str, Any]]
    now: list[float]
    loop: list[Callable[[], None]]
    widgets_before: set[str]
    drawings: list[float]
    shares: list[list[dict[str, Any]]] = field(default_factory=list)
    """What each tick of the last call sent."""

    def tick(self, seconds: float = 0.5) -> list[dict[str, Any]]:
        """Let time pass, tick once, at once again while somebody waits for the picture, and return what was sent."""
        self.now[0] += seconds
        self.shares.clear()
        while not self.shares or self.panel._sampler.interval_seconds < 0.5:
            self.sent.clear()
            self.panel._sampler.step()
            assert self.panel._sampler.failure is None
            self.shares.append(list(self.sent))
        return [message for share in self.shares for message in share]

    def look(self) -> None:
        self.panel._sampler.start = lambda: None  # type: ignore[method-assign]  # ticks are the test's
        self.panel.set_seen_in_sidebar(True)

    @property
    def html(self) -> str:
        return "".join(widget.value for widget in walk(self.panel.widget) if isinstance(widget, ipywidgets.HTML))

    def button(self, text: str) -> Any:
        return next(b for b in walk(self.panel.widget) if getattr(b, "description", None) == text)

    def click(self, text: str) -> str:
        """Press a toggle button as a front end does, and return the answer."""
        self.button(text).set_state({"value": True})
        return next(w.value for w in walk(self.panel.widget) if "gm-answer" in w._dom_classes)


def walk(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    sent: list[dict[str, Any]] = []
    now, loop = [1000.0], []
    monkeypatch.setattr(comm, "create_comm", lambda **options: Channel(sent, **options))
    monkeypatch.setattr(nvml, "read_device", lambda _device, **_options: None)
    monkeypatch.setattr(nvml, "device_count", lambda: 0)
    probe, recorder = FakeProbe(), FakeRecorder()
    probe.put(GIB)
    shell = SimpleNamespace(
        kernel=SimpleNamespace(io_loop=SimpleNamespace(add_callback=lambda f, *a: loop.append(lambda: f(*a))))
    )
    monitor = Monitor(recorder, clock=lambda: now[0], wall=lambda: 0.0, probe=lambda: probe)  # type: ignore[arg-type]  # fakes
    widgets_before = set(_instances)
    options = SimpleNamespace(interval=0.5, scan_seconds=10.0)
    drawings: list[float] = []
    panel = Panel(shell, recorder, options, monitor=monitor, drawn=lambda: drawings.append(now[0]))  # type: ignore[arg-type]  # fakes
    panel._actions._clock = lambda: now[0]
    yield Setup(panel, probe, recorder, sent, now, loop, widgets_before, drawings)
    panel.close()


def share_bytes(sent: list[dict[str, Any]]) -> int:
    """Return the bytes of the messages of one tick, each with its headers."""
    return sum(wire_bytes(str(message["state"].get("value", ""))) + 772 for message in sent)


def content_bytes(sent: list[dict[str, Any]]) -> int:
    import json

    return sum(len(json.dumps(message, ensure_ascii=False).encode()) for message in sent)


def record(number: int, started: float, ended: float | None, name: str = "x = f()") -> CellRecord:
    return CellRecord(
        name, started, 0.0, number=number, ended=ended, seconds=None if ended is None else ended - started
    )


def free_report(returned: int, **options: Any) -> FreeReport:
    steps = (
        FreeStep("garbage", ("2 cycles",), (Change(0, -returned, 0),)),
        FreeStep("cache", (), (Change(0, 0, -returned),)),
    )
    before, after = (
        DeviceSnapshot(0, GIB, GIB, None, None),
        DeviceSnapshot(0, GIB - returned, GIB - returned, None, None),
    )
    return FreeReport((before,), steps, (after,), **options)


def test_nothing_is_drawn_and_no_thread_runs_before_anybody_looks(setup: Setup) -> None:
    assert not setup.panel._sampler.running
    assert setup.tick() == []


def test_a_tick_draws_the_figures_of_the_device(setup: Setup) -> None:
    setup.look()
    setup.probe.put(GIB, 3 * GIB)
    setup.tick()
    for text in ("GPU 0", "1.00 GiB", "2.00 GiB", "24.0 GiB", "outside torch", "5.00 GiB", "16.0 GiB"):
        assert text in setup.html
    assert 'title="allocated 1,073,741,824 bytes"' in setup.html
    assert '<div title="1,073,741,824 bytes">1.00 GiB</div>' in setup.html


def test_a_limit_is_drawn_and_said_beside_the_lines(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.look()
    setup.tick()
    assert "limit" not in setup.html
    monkeypatch.setattr(Monitor, "limit", lambda _self, _device: 18 * GIB)
    setup.tick()
    setup.tick()
    assert "</svg>limit 18.0 GiB</span>" in setup.html
    assert "<path class=gm-l " in setup.html


def test_nothing_is_sent_while_nothing_has_changed(setup: Setup) -> None:
    setup.look()
    setup.tick()
    setup.tick()
    drawings = list(setup.drawings)
    assert [setup.tick() for _ in range(50)] == [[]] * 50
    assert setup.drawings == drawings


def test_each_drawing_is_told_of(setup: Setup) -> None:
    setup.look()
    setup.tick()
    setup.probe.put(2 * GIB)
    setup.tick()
    assert sorted(set(setup.drawings)) == [1000.5, 1001.0]
    setup.probe.snapshots.clear()
    setup.tick()
    assert setup.drawings[-1] == 1001.5


def test_a_change_is_one_small_message(setup: Setup) -> None:
    setup.look()
    setup.tick()
    for step in range(300):
        setup.probe.put((step * 7919) % 23 * GIB + step * MIB, 23 * GIB, used=23 * GIB + step)
        setup.recorder.records.append(
            record(step, setup.now[0], setup.now[0] + 0.4, "model = Net(width=4096)  # " + "x" * 80)
        )
        sent = setup.tick()
        assert len(sent) == 1
        assert content_bytes(sent) <= 2600


def test_eight_busy_devices_fit_the_same_budget(setup: Setup) -> None:
    setup.look()
    for device in range(8):
        setup.probe.put(device * GIB, device=device)
    setup.tick()
    for step in range(100):
        for device in range(8):
            setup.probe.put((step * 7919 + device) % 23 * GIB, 23 * GIB, device, used=23 * GIB)
        assert content_bytes(setup.tick()) <= 2600


def test_no_tick_sends_more_than_three_kilobytes_whatever_the_texts(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [ProcessName(pid, 'python "' + "显存" * 900, None, None) for pid in range(20)]
    monkeypatch.setattr("jupyter_gpumem.monitor.Monitor._name", lambda *_: None)
    uses = [Use(0, GIB, tuple(Neighbour(name, GIB) for name in names[:count])) for count in (2, 9, 20)]
    for device in range(8):
        setup.probe.put(GIB, device=device)
    setup.look()
    setup.tick()
    for turn in range(60):
        setup.recorder.records.append(record(turn, setup.now[0] - 0.4, setup.now[0], '# 训练循环的注释 "\\' * 90))
        setup.recorder.current = record(turn, setup.now[0], None, f'# {turn} 训练循环的注释 "\\' * 90)
        monkeypatch.setattr(setup.panel._monitor, "use", lambda *_, turn=turn: uses[turn // 7 % 3])
        setup.probe.put((turn % 5 + 1) * GIB, device=turn % 8)
        sent = setup.tick(2.0)
        assert sent
        assert max(map(share_bytes, setup.shares)) <= 3072
    setup.recorder.current = None
    setup.tick()
    setup.tick()
    assert "running:" not in setup.html
    assert re.search(r">1[0-9] more</span>", setup.html)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_picture_that_was_opened_or_chosen_comes_in_parts_of_three_kilobytes(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    name = ProcessName(7, "python " + "x" * 900, "notebooks/old.ipynb", None)
    monkeypatch.setattr(Monitor, "use", lambda *_: Use(GIB, 9 * GIB, (Neighbour(name, GIB),) * 9))
    for turn in range(40):
        setup.recorder.records.append(record(turn, 990.0 + turn / 8, 990.1 + turn / 8, "x = f()  # " + "y" * 80))
    for device in range(devices):
        setup.probe.put(GIB, 3 * GIB, device=device)
    setup.look()
    assert "2.00 GiB" in "".join(str(message["state"].get("value")) for message in setup.tick())
    assert max(map(share_bytes, setup.shares)) <= 3072
    for choose, index in ((setup.panel._window, 3), (setup.panel._devices, devices - 1)):
        setup.sent.clear()
        choose.set_state({"index": index})
        setup.tick()
        assert max(map(share_bytes, setup.shares)) <= 3072
        assert len(setup.shares) <= 6
        assert setup.tick() == []


def test_pause_stops_drawing_and_resume_shows_what_was_missed(setup: Setup) -> None:
    setup.look()
    setup.tick()
    setup.button("Pause").set_state({"value": True})
    setup.probe.put(5 * GIB)
    assert setup.tick() == []
    setup.probe.put(2 * GIB)
    setup.tick()
    setup.button("Resume").set_state({"value": False})
    setup.tick()
    assert "2.00 GiB" in setup.html
    assert "5.00 GiB at most" in setup.html


def test_paused_within_a_cell_it_does_not_go_on_calling_it_running(setup: Setup) -> None:
    setup.look()
    setup.recorder.current = record(7, 0.0, None)
    setup.tick()
    assert "gm-busy" in setup.panel._busy.value
    setup.button("Pause").set_state({"value": True})
    setup.tick()
    assert setup.panel._busy.value == ""
    assert setup.tick() == []


def test_a_device_chosen_while_paused_is_drawn_once(setup: Setup) -> None:
    setup.probe.put(7 * GIB, device=3)
    setup.look()
    setup.tick()
    setup.button("Pause").set_state({"value": True})
    setup.panel._devices.set_state({"index": 1})
    assert setup.tick() != []
    assert "<b>GPU 3</b>" in setup.html
    setup.probe.put(5 * GIB, device=3)
    assert setup.tick() == []


def test_nothing_is_sent_while_no_front_end_shows_it_but_samples_go_on(setup: Setup) -> None:
    setup.look()
    setup.tick()
    setup.panel.set_seen_in_sidebar(False)
    setup.probe.put(6 * GIB)
    assert setup.tick() == []
    setup.probe.put(GIB)
    assert setup.tick() == []
    setup.panel.set_seen_in_sidebar(True)
    setup.tick()
    assert "6.00 GiB at most" in setup.html


def test_nothing_is_sent_once_the_output_that_shows_it_is_cleared(setup: Setup) -> None:
    setup.panel._sampler.start = lambda: None  # type: ignore[method-assign]  # ticks are the test's
    setup.panel._shell.display_pub = SimpleNamespace(publish=lambda _data, **_options: None)  # type: ignore[misc]  # a fake
    setup.panel.show()
    assert setup.tick() != []
    (place,) = setup.panel._places
    place.set_state({"_view_count": 1})
    setup.probe.put(5 * GIB)
    assert setup.tick() != []
    place.set_state({"_view_count": 0})
    setup.probe.put(6 * GIB)
    assert setup.tick() == []
    place.set_state({"_view_count": 1})
    assert setup.tick() != []


def test_several_devices_can_be_chosen_from_and_one_needs_no_choice(setup: Setup) -> None:
    setup.look()
    setup.tick()
    chooser = setup.panel._devices
    assert chooser.layout.display == "none"
    setup.probe.put(7 * GIB, device=3)
    setup.tick()
    assert [label for label, _device in chooser.options] == ["GPU 0", "GPU 3"]
    assert 'role=img aria-label="GPU 0: 1.00 GiB, GPU 3: 7.00 GiB"' in setup.html
    assert chooser.layout.display == ""
    chooser.value = 3
    setup.tick()
    assert "<b>GPU 3</b>" in setup.html


def test_the_simulated_gpu_is_called_simulated(setup: Setup) -> None:
    setup.look()
    setup.tick()
    assert ">simulated<" not in setup.html
    setup.probe.is_simulated = True
    setup.tick()
    assert ">simulated<" in setup.html


def test_before_cuda_has_started_it_says_so_and_names_what_nvml_knows(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "device_count", lambda: 1)
    use = nvml.DeviceUse("NVIDIA <L4>", None, 0, 24 * GIB, None, None, False, None)
    monkeypatch.setattr(nvml, "read_device", lambda _device, **_options: use)
    setup.look()
    setup.probe.snapshots.clear()
    setup.tick()
    assert "CUDA not started" in setup.html
    assert "NVIDIA &lt;L4&gt; 24.0 GiB" in setup.html
    assert setup.tick() == []
    setup.probe.put(GIB)
    setup.tick()
    assert "CUDA not started" not in setup.html


def test_the_neighbours_are_named_with_their_notebook(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_gpumem import monitor

    uses = (nvml.ProcessUse(4242, 3 * GIB), nvml.ProcessUse(77, None))
    use = nvml.DeviceUse("card", None, 8 * GIB, 24 * GIB, None, uses, True, 2 * GIB)
    names = {4242: ProcessName(4242, "python -m ipykernel", "me", "<b>old</b>.ipynb"), 77: ProcessName(77)}
    monkeypatch.setattr(nvml, "read_device", lambda _device, **_options: use)
    monkeypatch.setattr(monitor, "name_processes", lambda pids: tuple(names[pid] for pid in pids))
    setup.look()
    setup.tick()
    for text in ("&lt;b&gt;old&lt;/b&gt;.ipynb", "pid 4242", "3.00 GiB", "not visible from here", "unknown"):
        assert text in setup.html
    assert "context" in setup.html


def test_a_running_cell_is_named_and_its_text_is_escaped(setup: Setup) -> None:
    setup.look()
    setup.recorder.current = record(3, setup.now[0], None, "<script>bad()</script>")
    setup.tick()
    assert "running: &lt;script&gt;bad()&lt;/script&gt;" in setup.html
    setup.recorder.current = None
    setup.tick()
    assert "running:" not in setup.html


def test_a_cell_that_has_ended_is_named_no_more_while_cuda_is_not_started(setup: Setup) -> None:
    setup.probe.snapshots.clear()
    setup.look()
    setup.recorder.current = record(4, 999.0, None, "time.sleep(9)")
    setup.tick()
    assert "running: time.sleep(9)" in setup.html
    setup.recorder.current = None
    setup.tick()
    assert "running:" not in setup.html
    assert setup.tick() == []


def test_in_host_mode_the_chart_stands_still_for_a_few_bytes(setup: Setup) -> None:
    setup.probe.kind = "host"
    setup.probe.put(100 * MIB + 5)
    setup.look()
    setup.tick()
    setup.tick()
    setup.probe.put(100 * MIB + 4097)
    assert setup.tick() == []
    assert "this process" in setup.html


def test_free_memory_answers_in_words_with_the_bytes(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_gpumem.release.free", lambda _shell: free_report(512 * MIB))
    answer = setup.click("Free memory")
    assert "512 MiB given back to the device" in answer
    assert "garbage (2 cycles) −512 MiB" in answer
    assert setup.button("Free memory").value is False


def test_beside_a_running_cell_only_what_is_safe_is_freed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_gpumem.release.free", lambda _shell: pytest.fail("a cell is running"))
    monkeypatch.setattr("jupyter_gpumem.release.free_running", lambda: free_report(MIB, while_running=True))
    setup.recorder.current = record(1, 0.0, None)
    assert "names, outputs and errors are left alone" in setup.click("Free memory")


def test_a_cache_that_has_to_wait_is_returned_when_the_cell_ends(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = FreeReport((), (FreeStep("cache", (), (), CACHE_WAITS),), (), while_running=True)
    monkeypatch.setattr("jupyter_gpumem.release.free_running", lambda: waiting)
    monkeypatch.setattr("jupyter_gpumem.release.free_cache", lambda: free_report(3 * MIB))
    setup.recorder.current = cell = record(1, 0.0, None)
    setup.click("Free memory")
    setup.recorder.current = None
    for listener in setup.recorder.on_end:
        listener(cell, None)
    assert len(setup.loop) == 1
    setup.loop.pop()()
    assert "3.00 MiB given back" in setup.html


def test_two_queued_clicks_free_once_and_a_later_one_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("jupyter_gpumem.release.free", lambda _shell: (calls.append(1), free_report(MIB))[1])
    setup.click("Free memory")
    setup.click("Free memory")
    assert len(calls) == 1
    assert setup.button("Free memory").value is False
    setup.now[0] += 1
    setup.click("Free memory")
    assert len(calls) == 2


def test_a_click_on_a_subshell_is_handed_to_the_main_thread_unless_a_cell_runs(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    note = threading.current_thread
    monkeypatch.setattr("jupyter_gpumem.release.free", lambda _shell: (threads.append(note()), free_report(MIB))[1])
    monkeypatch.setattr("jupyter_gpumem.release.free_running", lambda: (threads.append(note()), free_report(MIB))[1])
    for cell in (None, record(1, 0.0, None)):
        setup.recorder.current = cell
        subshell = threading.Thread(target=setup.click, args=("Free memory",))
        subshell.start()
        subshell.join()
        if cell is None:
            assert setup.button("Free memory").value is True
            assert threads == []
            setup.loop.pop()()
        assert setup.button("Free memory").value is False
        setup.now[0] += 1
    assert threads == [threading.main_thread(), subshell]


def test_a_click_within_a_click_does_nothing(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def free(_shell: object) -> FreeReport:
        calls.append(1)
        setup.now[0] += 5
        setup.click("Find leaks")
        return free_report(MIB)

    monkeypatch.setattr("jupyter_gpumem.release.free", free)
    assert "1.00 MiB given back" in setup.click("Free memory")
    assert calls == [1]


@pytest.mark.parametrize(
    ("error", "words"),
    [(GpuMemError("no such name"), "no such name"), (KeyError("<k>"), "That failed: KeyError: &#x27;&lt;k&gt;&#x27;")],
)
def test_a_click_that_fails_says_so_in_the_panel(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def free(_shell: object) -> FreeReport:
        raise error

    monkeypatch.setattr("jupyter_gpumem.release.free", free)
    assert words in setup.click("Free memory")


def test_find_leaks_waits_for_the_running_cell_and_looks_queued(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.recorder.current = cell = record(1, 0.0, None)
    assert "waits for the running cell" in setup.click("Find leaks")
    assert setup.button("Find leaks").value is True
    monkeypatch.setattr(actions.Actions, "_look", lambda _self: leak_report(holder("found", MIB)))
    setup.recorder.current = None
    # the cell may end a moment after the click
    for listener in setup.recorder.on_end:
        listener(cell, None)
    setup.loop.pop()()
    assert setup.button("Find leaks").value is False
    assert "1.00 MiB of 1.00 GiB can be given back" in setup.html


def test_find_leaks_pressed_again_while_it_waits_is_taken_back(setup: Setup) -> None:
    setup.recorder.current = cell = record(1, 0.0, None)
    setup.click("Find leaks")
    setup.button("Find leaks").set_state({"value": False})
    assert "waits for the running cell" not in setup.html
    setup.recorder.current = None
    for listener in setup.recorder.on_end:
        listener(cell, None)
    assert setup.loop == []


def test_find_leaks_taken_back_leaves_what_another_button_answered(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jupyter_gpumem.release.free_running", lambda: free_report(MIB, while_running=True))
    setup.recorder.current = record(1, 0.0, None)
    setup.click("Find leaks")
    setup.click("Free memory")
    setup.button("Find leaks").set_state({"value": False})
    assert "1.00 MiB given back to the device" in setup.html


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([("outputs", 128, 0), ("cache", 0, 2)], "128 MiB free for new tensors, 2.00 MiB given back to the device"),
        ([("outputs", 2, 0), ("cache", 0, 128)], "128 MiB given back to the device"),
        ([("outputs", 2, 0)], "2.00 MiB free for new tensors; the rest of its segments is in use"),
        ([("cache", 0, 0, CACHE_WAITS)], "The cache goes back to the device when the cell ends"),
        (
            [("garbage", 3, 0), ("cache", 0, 0, CACHE_WAITS)],
            "3.00 MiB free for new tensors; the cache goes back to the device when the cell ends",
        ),
        ([("garbage", 0, 0, CELL_ALLOCATES)], "Nothing of the cache to give back to the device"),
        ([("garbage", 0, 0)], "Nothing to give back to the device"),
    ],
)
def test_the_first_line_of_an_answer_says_what_came_back_and_what_is_still_to_come(
    steps: list[Any], words: str
) -> None:
    made = [
        FreeStep(key, (), (Change(0, -freed * MIB, -returned * MIB),), *note) for key, freed, returned, *note in steps
    ]
    assert free_words(FreeReport((), tuple(made), ()))[0] == words


def holder(path: str, nbytes: int, **options: Any) -> Holder:
    values: dict[str, Any] = {
        "kind": "variable",
        "section": "gives back",
        "device": 0,
        "shared_bytes": 0,
        "shared_with": (),
        "count": 1,
        "expression": path,
        "cell": 12,
        "note": "",
        "remedy": f"%gpu_free {path}",
        "releases": (Release("variables", (path,)),),
    }
    return Holder(path, keeps_bytes=nbytes, shown_bytes=nbytes, **{**values, **options})


def leak_report(*holders: Holder, in_use: tuple[Holder, ...] = ()) -> LeakReport:
    device = DeviceLeaks(0, "GPU 0", GIB, GIB, 0, 0, holders, in_use, ())
    return LeakReport("cuda", (device,), 0.25, True, True, ())


@pytest.fixture
def looked(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Setup]:
    """Press Find leaks, and let it find what the test gives."""
    monkeypatch.setattr("jupyter_gpumem.accounts.take_account", lambda _shell: ())

    def look(report: LeakReport) -> Setup:
        monkeypatch.setattr("jupyter_gpumem.leak_report.find_leaks", lambda _shell, **_options: report)
        setup.click("Find leaks")
        return setup

    return look


def test_holders_are_listed_with_path_bytes_cell_and_remedy(looked: Callable[..., Setup]) -> None:
    setup = looked(
        leak_report(holder("<b>x</b>", 3 * GIB), holder("y", MIB, at_most=True, shared_bytes=5, shared_with=("z",)))
    )
    for text in (
        "&lt;b&gt;x&lt;/b&gt;",
        "3.00 GiB",
        "cell 12",
        "→ %gpu_free y",
        "≤ 1.00 MiB",
        "shares 5 B with z",
        "0.25 s",
    ):
        assert text in setup.html
    assert "<b>x</b>" not in setup.html


def test_rows_from_before_a_free_beside_a_running_cell_are_called_old(
    looked: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = looked(leak_report(holder("a", MIB)))
    monkeypatch.setattr("jupyter_gpumem.release.free_running", lambda: free_report(MIB, while_running=True))
    setup.recorder.current = record(1, setup.now[0], None)
    assert "before Free memory" not in setup.html
    setup.click("Free memory")
    assert re.search(r"<h3>Held by, at [\d:]{8}, before Free memory</h3>", setup.html)
    assert len(setup.panel._actions._holders.rows) == 1
    setup.recorder.current = None
    setup.click("Find leaks")
    assert "before Free memory" not in setup.html


def test_of_many_holders_twenty_are_shown_and_the_rest_are_summed(looked: Callable[..., Setup]) -> None:
    setup = looked(leak_report(*(holder(f"x{n}", MIB) for n in range(23))))
    assert len(setup.panel._actions._holders.rows) == 20
    assert "3 more, 3.00 MiB together" in setup.html


def test_only_what_a_program_can_release_has_a_button(looked: Callable[..., Setup]) -> None:
    setup = looked(leak_report(holder("a", MIB), holder("b", MIB, releases=())))
    assert [len(row.children) for row in setup.panel._actions._holders.rows] == [2, 1]


def press(setup: Setup, row: int) -> None:
    setup.panel._actions._holders.rows[row].children[1].set_state({"value": True})


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Release nothing, and give the paths that were to be."""
    paths: list[str] = []

    def release(_shell: object, one: Holder) -> FreeReport:
        paths.append(one.path)
        return free_report(MIB)

    monkeypatch.setattr("jupyter_gpumem.release.release_holder", release)
    return paths


def test_release_acts_on_its_row_and_looks_again(
    looked: Callable[..., Setup], released: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = looked(leak_report(holder("a", MIB), holder("b", MIB)))
    monkeypatch.setattr(
        "jupyter_gpumem.leak_report.find_leaks", lambda _shell, **_options: leak_report(holder("a", MIB))
    )
    press(setup, 1)
    assert released == ["b"]
    assert len(setup.panel._actions._holders.rows) == 1
    assert "1.00 MiB given back to the device" in setup.html


def test_a_click_on_the_row_that_moved_up_is_taken_for_a_double_click(
    looked: Callable[..., Setup], released: list[str]
) -> None:
    setup = looked(leak_report(holder("a", MIB), holder("b", MIB)))
    press(setup, 0)
    press(setup, 1)
    assert released == ["a"]
    setup.now[0] += 0.5
    press(setup, 1)
    assert released == ["a", "b"]


def test_what_is_in_use_is_released_only_after_a_question(
    looked: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    monkeypatch.setattr(
        "jupyter_gpumem.release.release_holder", lambda _shell, one: (released.append(one.path), free_report(MIB))[1]
    )
    setup = looked(leak_report(in_use=(holder("model", MIB, section="in use"),)))
    setup.panel._actions._holders._clock = lambda: setup.now[0]
    press(setup, 0)
    press(setup, 0)
    assert released == []
    assert setup.button("In use: really?") is not None
    setup.now[0] += 1
    press(setup, 0)
    assert released == ["model"]


def test_release_looks_queued_until_it_is_answered(
    looked: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jupyter_gpumem.release.release_holder", lambda *_: free_report(MIB))
    setup = looked(leak_report(holder("a", MIB)))
    button = setup.panel._actions._holders.rows[0].children[1]
    thread = threading.Thread(target=lambda: button.set_state({"value": True}))
    thread.start()
    thread.join()
    assert (button.value, "gm-queue" in button._dom_classes, len(setup.loop)) == (True, True, 1)
    setup.loop.pop()()
    assert "1.00 MiB given back to the device" in setup.html
    assert button.value is False


def test_beside_a_running_cell_no_row_is_released(
    looked: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jupyter_gpumem.release.release_holder", lambda *_: pytest.fail("a cell is running"))
    setup = looked(leak_report(holder("a", MIB)))
    setup.recorder.current = record(1, 0.0, None)
    press(setup, 0)
    assert "names are left alone" in setup.html
    assert not setup.panel._actions._holders.rows[0].children[1].value


def test_closing_leaves_no_widget_no_thread_and_no_listener(setup: Setup) -> None:
    setup.panel.set_seen_in_sidebar(True)
    setup.panel.close()
    setup.panel.close()
    assert not setup.panel._sampler.running
    assert setup.recorder.on_end == []
    assert set(_instances) <= setup.widgets_before


def test_the_subshell_override_is_a_no_op_without_the_private_name() -> None:
    class Old:
        comm = SimpleNamespace()

    class New:
        comm = SimpleNamespace(_reply_subshell_for=lambda data, default: "main")

    let_clicks_use_the_subshell(Old)
    let_clicks_use_the_subshell(New)
    assert not vars(Old.comm)
    assert New.comm._reply_subshell_for({}, "the front end's") == "the front end's"


def test_neither_matplotlib_nor_torch_is_imported_by_it(kernel: Any) -> None:
    kernel.run("from jupyter_gpumem.cells import CellRecorder; import types, sys")
    kernel.run("from jupyter_gpumem.panel import Panel")
    kernel.run("options = types.SimpleNamespace(interval=0.5, scan_seconds=10.0)")
    kernel.run("p = Panel(get_ipython(), CellRecorder(), options); p.show(); p._sampler.step()")
    assert kernel.run("[m for m in ('torch', 'matplotlib', 'pandas') if m in sys.modules]").result == "[]"
    assert kernel.run("p._sampler.failure").result is None
    assert kernel.run("p.close(); p._sampler.running").result == "False"
