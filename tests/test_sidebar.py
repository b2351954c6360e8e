from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import comm
import pytest

from jupyter_gpumem import panel, viewers
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.sidebar import TARGET, Sidebar


@dataclass
class Channel:
    options: dict[str, Any] = field(default_factory=dict)
    sent: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False

    def on_msg(self, callback: Any) -> None:
        self.receive = lambda **data: callback({"content": {"data": data}})

    def on_close(self, callback: Any) -> None:
        self.lose = lambda: callback({})

    def send(self, data: dict[str, Any]) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True


class FakePanel:
    def __init__(self, *_arguments: object, drawn: Any) -> None:
        self.drawn = drawn
        self.widget = SimpleNamespace(model_id="the model")
        self.seen: list[bool] = []
        self.log: list[str] = []

    def set_seen_in_sidebar(self, seen: bool) -> None:
        self.seen.append(seen)

    def moved_to_sidebar(self) -> None:
        self.log.append("moved")

    def show(self, instead_of: str | None = None) -> None:
        self.log.append("shown inline" if instead_of is None else f"shown instead of {instead_of}")

    def close(self) -> None:
        self.log.append("closed")


@dataclass
class FakeShell:
    """A shell of a kernel whose loop is the test's; ``asked_by`` is the content of the running request."""

    asked_by: dict[str, Any] = field(default_factory=dict)
    published: list[tuple[str, str]] = field(default_factory=list)
    soon: list[Any] = field(default_factory=list)
    later: list[Any] = field(default_factory=list)

    @property
    def kernel(self) -> Any:
        loop = SimpleNamespace(
            add_callback=lambda call, *arguments: self.soon.append(lambda: call(*arguments)),
            call_later=lambda _seconds, call, *arguments: self.later.append(lambda: call(*arguments)),
        )
        return SimpleNamespace(io_loop=loop, get_parent=lambda _channel: {"content": self.asked_by})

    @property
    def display_pub(self) -> Any:
        return SimpleNamespace(
            publish=lambda data, transient: self.published.append((data["text/plain"], transient.get("display_id", "")))
        )


@dataclass
class Setup:
    sidebar: Sidebar
    channel: Channel
    shell: FakeShell

    @property
    def panel(self) -> Any:
        return self.sidebar.panel


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    monkeypatch.setattr(comm, "create_comm", lambda **options: Channel(options))
    monkeypatch.setattr(panel, "Panel", FakePanel)
    shell = FakeShell()
    sidebar = _sidebar(shell)
    sidebar.start()
    yield Setup(sidebar, sidebar._comms[0], shell)
    sidebar.close()


def _sidebar(shell: Any) -> Sidebar:
    options = SimpleNamespace(interval=0.5, scan_seconds=10.0, open_sidebar=True)
    recorder = SimpleNamespace(running=False, records=[])
    return Sidebar(shell, recorder, options)  # type: ignore[arg-type]  # fakes


def test_loading_offers_the_panel_and_makes_nothing(setup: Setup) -> None:
    assert setup.channel.options == {"target_name": TARGET, "data": {"reveal": True}}
    assert setup.panel is None


def test_a_window_that_only_says_hello_costs_no_panel(setup: Setup) -> None:
    setup.channel.receive(method="hello", client="a")
    assert setup.panel is None
    assert setup.sidebar.in_sidebar


def test_the_first_window_alone_is_told_to_open_it(setup: Setup) -> None:
    for client in "ab":
        setup.channel.receive(method="hello", client=client)
    assert setup.channel.sent == [{"method": "first"}]


def test_the_first_window_that_shows_it_gets_the_panel(setup: Setup) -> None:
    setup.channel.receive(method="shown", client="a")
    assert setup.channel.sent == [{"model_id": "the model"}]
    assert setup.panel.seen == [True]


def test_it_is_seen_until_the_last_window_hides_it(setup: Setup) -> None:
    for method, client in (("shown", "a"), ("shown", "b"), ("hidden", "a"), ("hidden", "b"), ("shown", "a")):
        setup.channel.receive(method=method, client=client)
    assert setup.panel.seen == [True, True, True, False, True]


def test_a_window_that_is_gone_without_a_word_is_found_out_by_a_question(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "_ASK_SECONDS", 0.0)
    for client in "ab":
        setup.channel.receive(method="shown", client=client)
    setup.panel.drawn()
    setup.shell.soon.pop()()
    assert setup.channel.sent[-1] == {"method": "who"}
    setup.channel.receive(method="shown", client="a")
    setup.shell.later.pop()()
    assert setup.panel.seen == [True, True, True, True]
    setup.panel.drawn()
    setup.shell.soon.pop()()
    setup.shell.later.pop()()
    assert setup.panel.seen[-1] is False


def test_a_front_end_without_a_sidebar_closes_the_comm_and_gets_it_inline(setup: Setup) -> None:
    setup.channel.lose()
    assert not setup.sidebar.in_sidebar
    setup.sidebar.show()
    assert setup.panel.log == ["shown inline"]


def test_asked_for_where_there_is_a_sidebar_it_opens_that(setup: Setup) -> None:
    setup.channel.receive(method="hello", client="a")
    setup.sidebar.show()
    assert setup.channel.sent[-1] == {"method": "reveal"}
    ((words, _place),) = setup.shell.published
    assert words == "The panel is in the right sidebar."


def test_a_window_that_answers_keeps_it_in_the_sidebar(setup: Setup) -> None:
    setup.channel.receive(method="hello", client="a")
    setup.sidebar.show()
    setup.shell.soon.pop()()
    setup.channel.receive(method="hello", client="a")
    setup.shell.later.pop()()
    assert setup.panel is None
    assert setup.sidebar.in_sidebar


def test_where_the_window_with_the_sidebar_is_gone_it_is_shown_below_the_cell(setup: Setup) -> None:
    setup.channel.receive(method="shown", client="a")
    setup.channel.receive(method="hello", client="a")
    setup.sidebar.show()
    setup.shell.soon.pop()()
    setup.shell.later.pop()()
    ((_words, place),) = setup.shell.published
    assert setup.panel.log[-1] == f"shown instead of {place}"
    assert not setup.sidebar.in_sidebar
    setup.sidebar.show()
    assert setup.panel.log[-1] == "shown inline"


def test_a_program_that_runs_notebooks_is_sent_no_comm_and_a_front_end_may_open_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comm, "create_comm", lambda **_options: pytest.fail("nobody can take it"))
    sidebar = _sidebar(FakeShell({"allow_stdin": False}))
    sidebar.start()
    assert comm.get_comm_manager().targets[TARGET] == sidebar._opened
    sidebar.close()


def test_a_program_that_runs_notebooks_keeps_no_panel_in_them(setup: Setup) -> None:
    setup.shell.asked_by["allow_stdin"] = False
    setup.sidebar.show()
    assert setup.panel is None
    ((words, _place),) = setup.shell.published
    assert words.startswith("The panel is live: it shows where somebody has the notebook open")


def test_a_sidebar_that_answers_late_takes_the_panel_over(setup: Setup) -> None:
    setup.sidebar.show()
    setup.channel.receive(method="hello", client="a")
    assert setup.panel.log == ["shown inline", "moved"]


def test_a_front_end_may_open_the_comm_itself(setup: Setup) -> None:
    setup.channel.lose()
    second = Channel()
    comm.get_comm_manager().targets[TARGET](second, {})
    second.receive(method="shown", client="a")
    assert second.sent == [{"model_id": "the model"}]


def test_closing_takes_everything_back_and_twice_is_once(setup: Setup) -> None:
    setup.channel.receive(method="shown", client="a")
    setup.sidebar.close()
    setup.sidebar.close()
    assert setup.channel.closed
    assert setup.panel.log == ["closed"]
    assert TARGET not in comm.get_comm_manager().targets


def test_in_a_terminal_there_is_no_comm_and_asking_is_a_clear_error() -> None:
    sidebar = _sidebar(SimpleNamespace())
    sidebar.start()
    with pytest.raises(GpuMemError, match="the panel needs a notebook"):
        sidebar.show()
    sidebar.close()


def test_loading_in_a_kernel_imports_no_widgets_and_asks_a_lab_to_open(kernel: Any) -> None:
    kernel.run("%load_ext jupyter_gpumem")
    assert kernel.run("import sys; [m for m in ('ipywidgets', 'pynvml', 'torch') if m in sys.modules]").result == "[]"
    kernel.run("import comm; before = len(comm.get_comm_manager().comms)")
    kernel.run("%unload_ext jupyter_gpumem")
    assert kernel.run("before, len(comm.get_comm_manager().comms)").result == "(1, 0)"


def test_reloading_opens_one_comm_for_the_old_one(kernel: Any) -> None:
    kernel.run("%load_ext jupyter_gpumem")
    kernel.run("%reload_ext jupyter_gpumem")
    assert kernel.run("import comm; len(comm.get_comm_manager().comms)").result == "1"


def test_the_panel_below_a_cell_draws_in_a_real_kernel(gpu_kernel: Any) -> None:
    shown = gpu_kernel.run("%gpumem panel").displays[-1]
    assert set(shown) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    gpu_kernel.run("x = torch.ones(1 << 20, device='cuda')")
    gpu_kernel.run("panel = get_ipython()._jupyter_gpumem.magics.sidebar.panel")
    # what has just been opened is sent in parts
    gpu_kernel.run("for _part in range(3): panel._sampler.step()")
    assert gpu_kernel.run("panel._sampler.failure").result is None
    assert gpu_kernel.run("'4.00 MiB' in panel._live.value").result == "True"
    gpu_kernel.run("%unload_ext jupyter_gpumem")
    assert (
        gpu_kernel.run("import threading; [t.name for t in threading.enumerate() if 'gpumem' in t.name]").result == "[]"
    )
