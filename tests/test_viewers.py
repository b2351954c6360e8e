from dataclasses import dataclass, field
from typing import Any

import pytest

from jupyter_gpumem.cells import CellRecord
from jupyter_gpumem.viewers import Viewers


@dataclass
class Kernel:
    """A kernel whose clock, loop and cells are the test's; a question is answered by those who are there."""

    now: float = 1000.0
    there: set[str] = field(default_factory=set)
    questions: int = 0
    told: list[int] = field(default_factory=list)
    timers: list[tuple[float, Any]] = field(default_factory=list)
    records: list[CellRecord] = field(default_factory=list)
    running: bool = False
    blocked: bool = False

    def __post_init__(self) -> None:
        self.viewers = Viewers(self, self, self.ask, self.changed, clock=lambda: self.now)  # type: ignore[arg-type]  # a fake

    def add_callback(self, call: Any, *arguments: Any) -> None:
        self.call_later(0.0, call, *arguments)

    def call_later(self, seconds: float, call: Any, *arguments: Any) -> None:
        self.timers.append((self.now + seconds, lambda: call(*arguments)))

    def ask(self) -> None:
        self.questions += 1
        for client in self.there:
            self.viewers.came(client)

    def changed(self) -> None:
        self.told.append(len(self.viewers))

    def open(self, *clients: str) -> None:
        for client in clients:
            self.there.add(client)
            self.viewers.came(client)

    def wait(self, seconds: float, *, drawing: bool = True) -> None:
        """Let whole seconds pass, with the loop free unless it is blocked."""
        for _ in range(int(seconds)):
            self.now += 1.0
            if drawing:
                self.viewers.drawn()
            self.turn()

    def turn(self) -> None:
        if self.blocked:
            return
        due = [timer for timer in self.timers if timer[0] <= self.now]
        self.timers = [timer for timer in self.timers if timer[0] > self.now]
        for _when, call in due:
            call()

    def run_cell(self, seconds: float) -> None:
        """Run a cell that blocks the loop."""
        started, self.running, self.blocked = self.now, True, True
        self.wait(seconds)
        self.running = self.blocked = False
        self.records.append(CellRecord("cell", started, 0.0, ended=self.now))
        self.turn()


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_a_window_that_left_is_no_viewer(kernel: Kernel) -> None:
    kernel.open("a", "b")
    kernel.viewers.left("a")
    assert (len(kernel.viewers), bool(kernel.viewers)) == (1, True)
    kernel.viewers.left("b")
    assert (len(kernel.viewers), bool(kernel.viewers)) == (0, False)


def test_who_is_there_is_asked_once_a_minute(kernel: Kernel) -> None:
    kernel.open("a")
    kernel.wait(59)
    assert kernel.questions == 0
    kernel.wait(241)
    assert kernel.questions == 5
    assert (len(kernel.viewers), kernel.told) == (1, [])


def test_nothing_is_asked_while_nothing_is_drawn(kernel: Kernel) -> None:
    kernel.open("a")
    kernel.wait(3600, drawing=False)
    assert (kernel.questions, kernel.timers) == (0, [])
    kernel.wait(1)
    assert kernel.questions == 1


def test_nothing_is_asked_where_nobody_is(kernel: Kernel) -> None:
    kernel.wait(3600)
    assert (kernel.questions, kernel.timers) == (0, [])


def test_a_window_that_crashed_is_forgotten_twenty_seconds_after_the_question(kernel: Kernel) -> None:
    kernel.open("a", "b")
    kernel.there.remove("b")
    kernel.wait(79)
    assert (kernel.questions, len(kernel.viewers), kernel.told) == (1, 2, [])
    kernel.wait(1)
    assert (kernel.questions, len(kernel.viewers), kernel.told) == (1, 1, [1])


def test_the_last_window_is_forgotten_too_and_nothing_is_asked_from_then_on(kernel: Kernel) -> None:
    kernel.open("a")
    kernel.there.clear()
    kernel.wait(600)
    assert (kernel.questions, len(kernel.viewers), kernel.told) == (1, 0, [0])
    assert kernel.timers == []


def test_a_window_that_wakes_up_is_a_viewer_again(kernel: Kernel) -> None:
    kernel.open("a")
    kernel.there.clear()
    kernel.wait(80)
    kernel.open("a")
    kernel.wait(600)
    assert (len(kernel.viewers), kernel.told) == (1, [0])


def test_behind_a_long_cell_an_answer_is_waited_for(kernel: Kernel) -> None:
    kernel.open("a")
    kernel.there.clear()
    kernel.wait(65)
    kernel.run_cell(100)
    # the answer is read when the cell has ended
    kernel.wait(15)
    assert (len(kernel.viewers), kernel.told) == (1, [])
    kernel.open("a")
    kernel.wait(30)
    assert (len(kernel.viewers), kernel.told) == (1, [])


def test_behind_many_cells_an_answer_is_waited_for_until_they_are_done(kernel: Kernel) -> None:
    kernel.open("a")
    kernel.there.clear()
    kernel.wait(62)
    for _ in range(60):
        kernel.run_cell(7)
        kernel.wait(1)
    assert (kernel.questions, len(kernel.viewers)) == (1, 1)
    kernel.wait(41)
    assert (kernel.questions, len(kernel.viewers), kernel.told) == (1, 0, [0])


def test_behind_an_awaiting_cell_an_answer_is_waited_for(kernel: Kernel) -> None:
    kernel.open("a")
    kernel.there.clear()
    kernel.running = True
    kernel.wait(200)
    assert (kernel.questions, len(kernel.viewers)) == (1, 1)
    kernel.running = False
    kernel.wait(20)
    assert (len(kernel.viewers), kernel.told) == (0, [0])


def test_a_loop_that_was_blocked_by_no_cell_is_waited_for_once_more(kernel: Kernel) -> None:
    kernel.open("a")
    kernel.there.clear()
    kernel.wait(60)
    kernel.blocked = True
    kernel.wait(30)
    kernel.blocked = False
    kernel.wait(20)
    assert (len(kernel.viewers), kernel.told) == (1, [])
    kernel.wait(1)
    assert (len(kernel.viewers), kernel.told) == (0, [0])


def test_a_question_of_before_judges_nobody_who_is_asked_anew(kernel: Kernel) -> None:
    kernel.open("a")
    kernel.wait(60)
    # answered beside the blocked loop, which then asks again before it comes to the first timer
    kernel.blocked = True
    kernel.wait(70)
    kernel.there.clear()
    kernel.blocked = False
    kernel.turn()
    assert (kernel.questions, len(kernel.viewers), kernel.told) == (2, 1, [])
