import gc

import pytest
import torch

from jupyter_gpumem.rebinding import is_in_loop, names_in_loops, rebound_names
from jupyter_gpumem.replaced import StillBound, still_bound
from tests.conftest import Shell, empty_gpu

MIB = 1024**2
PREPARE = """
import torch
def T(mib): return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
class Net(torch.nn.Module):
    def __init__(self, mib=10):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(mib << 17, dtype=torch.float64, device="cuda"))
        self.more = torch.nn.Linear(512, 512, device="cuda")
"""
NET = 11 * MIB + 2048


@pytest.fixture
def ready(shell: Shell) -> Shell:
    empty_gpu()
    shell.run("%load_ext jupyter_gpumem")
    shell.run("%gpumem off")
    shell.run(PREPARE)
    return shell


def peak(shell: Shell) -> int:
    record = shell.ip._jupyter_gpumem.magics.recorder.records[-1]
    peak_bytes: int = record.devices[0].peak_allocated_bytes
    return peak_bytes


# what ran before, the cell, what it says was still bound, and the bytes of the peak
OVERLAPS: dict[str, tuple[str, str, str, int]] = {
    "a model": ("net = Net()", "net = Net()", "net", NET),
    "a model and its optimizer": (
        "net = Net(); opt = torch.optim.SGD(net.parameters())",
        "net = Net()\nopt = torch.optim.SGD(net.parameters())",
        "net opt",
        NET,
    ),
    "a list of models": ("nets = [Net(), Net(4)]", "nets = [Net(), Net(4)]", "nets", 2 * NET - 6 * MIB),
    "a dict": ("held = {'a': T(8)}", "held = {'a': T(5)}", "held", 8 * MIB),
    "several": ("a, b = T(8), T(4)", "a, b = T(8), T(4)", "a b", 12 * MIB),
    "a smaller one": ("x = T(8)", "x = T(3)", "x", 8 * MIB),
    "a larger one": ("x = T(3)", "x = T(8)", "x", 3 * MIB),
    "the one that the peak is about": ("x = T(8); y = T(2)", "y = T(2); x = T(8)", "x", 8 * MIB),
    "two that share the peak": ("x = T(8); net = Net()", "net = Net(); x = T(8)", "net x", NET),
    "a timed one": ("x = T(8)", "%%time\nx = T(8)", "x", 8 * MIB),
    "one used after": ("net = Net()", "net = Net()\nshape = net.weight.shape", "net", NET),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_what_was_still_bound_is_named_and_freeing_it_first_lowers_the_peak(case: str, ready: Shell) -> None:
    before, cell, names, nbytes = OVERLAPS[case]
    ready.run(before)
    outputs = ready.run(f"%%gpumem\n{cell}")
    line = next(line for line in outputs.text.splitlines() if "still bound" in line)
    assert f"→ %gpu_free {names}   before this cell" in line
    assert f"{nbytes:,} bytes on GPU 0" in outputs.html
    with_old = peak(ready)
    ready.run("%reset -f")
    ready.run(PREPARE)
    empty_gpu()
    ready.run(before)
    ready.run(f"%gpu_free -q {names}")
    again = ready.run(f"%%gpumem\n{cell}")
    assert with_old - peak(ready) == nbytes
    assert "still bound" not in again.text


@pytest.mark.parametrize(
    ("before", "cell"),
    [
        ("net = Net()", "del net\nnet = Net()"),
        ("net = Net()", "net = None\nnet = Net()"),
        ("net = Net()", "net = Net(); y = T(30); del y"),
        ("x = T(8)", "x = x.clone()"),
        ("x = T(8)", "x += 1\nx = T(8)"),
        ("x = T(8); y = x", "x = T(8)"),
        ("x = T(8)", "for _ in range(3): x = T(8)"),
        ("x = T(8)", "x = torch.ones(3)"),
        ("x = T(8)", "x.add_(1)"),
        ("x = 3", "x = T(8)"),
        ("x = T(8)", "def f(): x = T(8)\nf()"),
    ],
)
def test_what_made_no_difference_or_could_not_go_first_is_not_accused(before: str, cell: str, ready: Shell) -> None:
    ready.run(before)
    assert "still bound" not in ready.run(f"%%gpumem\n{cell}").text


def test_a_bound_that_may_be_lower_is_said_as_one(ready: Shell) -> None:
    ready.run("x = T(10)")
    assert "up to 10.0 MiB of the peak" in ready.run("%%gpumem\nx = T(10); y = T(4); del y").text


def test_watching_keeps_nothing_alive_and_leaves_the_users_own_peak_right(ready: Shell) -> None:
    ready.run("x = T(10); torch.cuda.reset_peak_memory_stats()")
    gc.disable()
    try:
        ready.run("%%gpumem\nx = T(10); seen = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()")
    finally:
        gc.enable()
    assert ready.ns["seen"] == (20 * MIB, 10 * MIB)
    ready.run("del x")
    assert torch.cuda.memory_allocated() == 0


def stopped(shell: Shell, cell: str, line: int) -> StillBound | None:
    shell.ns["_ih"].append(cell)
    return still_bound(shell.ip, len(shell.ns["_ih"]) - 1, line, 0)


def test_a_cell_that_stopped_names_what_it_was_about_to_replace(ready: Shell) -> None:
    ready.run("net = Net(); opt = torch.optim.SGD(net.parameters()); other = T(3); x = T(8)\nx")
    cell = "y = 1\nnet = Net()\nopt = torch.optim.SGD(net.parameters())\nx = T(8)\nother = other + 1"
    found = stopped(ready, cell, 2)
    assert found is not None
    assert (found.names, found.nbytes) == (("net", "opt", "x"), NET + 8 * MIB)
    before = torch.cuda.memory_allocated()
    ready.run(found.code)
    assert before - torch.cuda.memory_allocated() == found.nbytes
    assert stopped(ready, cell, 2) is None


def test_in_a_loop_the_old_value_goes_within_it(ready: Shell) -> None:
    ready.run("x = T(8)")
    found = stopped(ready, "for size in sizes:\n    x = T(size)", 2)
    assert found is not None
    assert (found.code, found.when) == ("x = None", "in the cell, just before line 2")


def test_a_model_whose_optimizer_stays_gives_nothing_back(ready: Shell) -> None:
    ready.run("net = Net(); opt = torch.optim.SGD(net.parameters())")
    assert stopped(ready, "net = Net()", 1) is None


@pytest.mark.parametrize(
    ("source", "line", "names"),
    [
        ("net = Net()", 1, "net"),
        ("y = net(x)\nnet = Net()", 1, "y"),
        ("y = net(x)\nnet = Net()", 2, "net"),
        ("a, (b, *c) = 1, (2, 3)", 1, "a b c"),
        ("with open(f) as g:\n    h = g", 1, "g h"),
        ("for i in j:\n    k = i", 1, "i k"),
        ("if (n := f()):\n    m = n", 1, "n m"),
        ("def f():\n    return x\nx = f()", 1, "f x"),
        ("x = [x for x in y]", 1, ""),
        ("try:\n    x = f()\nexcept E:\n    z = x", 2, "x z"),
        ("x: int = f()\nx += 1\ny += 1", 1, "x"),
        ("class C:\n    z = 1\nC()", 1, "C"),
        ("match v:\n    case 1:\n        w = v", 1, "w"),
        ("not Python", 1, ""),
    ],
)
def test_names_bound_before_they_are_used(source: str, line: int, names: str) -> None:
    assert rebound_names(source, line) == frozenset(names.split())


def test_what_a_loop_runs_again() -> None:
    source = "x = 1\nfor i in y:\n    a = 1\n    while a:\n        b = 2\nc = 3"
    assert names_in_loops(source) == {"i", "a", "b"}
    assert [is_in_loop(source, line) for line in range(1, 7)] == [False, False, True, True, True, False]


def test_a_model_cell_that_runs_out_the_second_time_is_told_to_free_the_first_model(ready: Shell) -> None:
    cell = "net = Net(14 << 10)\nopt = torch.optim.SGD(net.parameters())"
    assert ready.run(cell).error is None
    first = torch.cuda.memory_allocated()
    outputs = ready.run(cell)
    assert outputs.error == "OutOfMemoryError"
    lines = [line.strip() for line in outputs.text.splitlines()]
    (place,) = (place for place, line in enumerate(lines) if "still bound while what replaces them is built" in line)
    assert lines[place].startswith("14.0 GiB   net, opt: still bound")
    assert lines[place + 1].startswith("→ %gpu_free net opt")
    ready.run("%gpu_free -q net opt")
    assert torch.cuda.memory_allocated() == 0 < first
    assert ready.run(cell).error is None
