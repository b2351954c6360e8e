import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from jupyter_gpumem.device import HostProbe
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.freed import CACHE_WAITS, CAPTURE_KEEPS_CACHE, CELL_ALLOCATES, GRAPH_KEEPS_WORKSPACES
from jupyter_gpumem.holders import Holder, Release
from jupyter_gpumem.leak_report import find_leaks
from jupyter_gpumem.release import FreeReport, free, free_cache, free_running, release_holder
from jupyter_gpumem.stamps import stamp_holders
from tests.conftest import Kernel, Shell, empty_gpu

MIB = 1024**2
IMPORT = """
import torch, gc
def T(mib, device='cuda:0'): return torch.empty(mib << 20, dtype=torch.uint8, device=device)
"""


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    torch.empty(1, device="cuda:0")
    empty_gpu()
    yield
    empty_gpu()


@pytest.fixture
def gpu(shell: Shell) -> Shell:
    shell.run(IMPORT)
    return shell


def given_back(report: FreeReport, key: str, device: int = 0) -> tuple[int, int]:
    """Return what a step gave back of allocated and of reserved memory."""
    changes = [change for step in report.steps if step.key == key for change in step.changes]
    found = [change for change in changes if change.device == device]
    return -sum(one.allocated_bytes for one in found), -sum(one.reserved_bytes for one in found)


def items(report: FreeReport, key: str) -> tuple[str, ...]:
    return next((step.items for step in report.steps if step.key == key), ())


def note(report: FreeReport, key: str) -> str:
    return next((step.note for step in report.steps if step.key == key), "")


@pytest.mark.parametrize("value", ["None", "True", "7", "''", "()", "y"])
def test_a_name_goes_alone_whatever_else_is_bound_to_its_object(gpu: Shell, value: str) -> None:
    gpu.run(f"y = T(1); a = {value}; b = {value}; Out[99] = {value}")
    report = free(gpu.ip, ["a"], keep_outputs=value != "y")
    assert "a" not in gpu.ns
    assert gpu.ns["b"] is (gpu.ns["y"] if value == "y" else eval(value))
    assert items(report, "names") == ("a",)
    assert (99 in gpu.ns["Out"]) == (value != "y")
    assert report.other_names == ((("a", ("y", "b")),) if value == "y" else ())


def test_a_named_variable_goes_with_all_of_ipythons_copies(gpu: Shell) -> None:
    gpu.run("x = T(4)")
    gpu.run("x")
    gpu.run("x")
    reserved = torch.cuda.memory_reserved()
    report = free(gpu.ip, ["x"])
    assert given_back(report, "names") == (4 * MIB, 0)
    assert given_back(report, "cache") == (0, reserved)
    assert gpu.ns["Out"] == {}


def test_results_go_without_names_and_other_results_stay(gpu: Shell) -> None:
    gpu.run("1 + 1")
    gpu.run("[T(2)]")
    gpu.run("{'loss': T(1)}")
    report = free(gpu.ip)
    assert given_back(report, "outputs") == (3 * MIB, 0)
    assert items(report, "outputs")[:4] == ("Out[3]", "_3", "Out[4]", "_4")
    assert gpu.ns["Out"] == {2: 2}
    assert (gpu.ns["_2"], gpu.ns["_"], gpu.ns["__"], gpu.ns["___"]) == (2, "", "", 2)


def test_after_results_went_the_next_result_is_kept_as_ever(gpu: Shell) -> None:
    gpu.run("T(1)")
    free(gpu.ip)
    gpu.run("40 + 2")
    assert (gpu.ns["_"], gpu.ns["__"], gpu.ns["Out"]) == (42, "", {3: 42})
    gpu.run("43")
    assert (gpu.ns["_"], gpu.ns["__"]) == (43, 42)


def test_what_the_user_bound_to_the_underscore_stays(gpu: Shell) -> None:
    gpu.run("5")
    gpu.run("_ = T(1)")
    before = torch.cuda.memory_allocated()
    report = free(gpu.ip)
    assert (torch.cuda.memory_allocated(), items(report, "outputs")) == (before, ())
    assert gpu.ns["_"].numel() == MIB


def test_a_result_whose_number_was_deleted_goes_too(gpu: Shell) -> None:
    gpu.run("T(1)")
    gpu.run("del Out[2]; del _2, _, __, ___\n5")
    gpu.run("6"), gpu.run("7"), gpu.run("8")
    free(gpu.ip)
    assert torch.cuda.memory_allocated() == 0


def test_a_cpu_result_that_keeps_a_gpu_graph_goes(gpu: Shell) -> None:
    gpu.run("w = torch.ones(1 << 20, device='cuda', requires_grad=True); z = w.exp().sum().cpu()")
    gpu.run("z")
    gpu.run("del z")
    assert torch.cuda.memory_allocated() > 4 * MIB
    free(gpu.ip)
    assert torch.cuda.memory_allocated() == 4 * MIB


def test_keep_outputs_keeps_them(gpu: Shell) -> None:
    gpu.run("T(2)")
    report = free(gpu.ip, keep_outputs=True)
    assert (torch.cuda.memory_allocated(), items(report, "outputs")) == (2 * MIB, ())
    assert gpu.ns["Out"][2] is gpu.ns["_"]


CHAINED = """
def g():
    y = T(3)
    raise ValueError('inner')
def f():
    x = T(5)
    try:
        g()
    except ValueError:
        raise KeyError('outer')
"""


def test_the_last_error_goes_with_its_whole_chain(gpu: Shell) -> None:
    gpu.run(CHAINED)
    assert gpu.run("f()").error == "KeyError"
    assert torch.cuda.memory_allocated() == 8 * MIB
    report = free(gpu.ip)
    assert given_back(report, "error") == (8 * MIB, 0)
    assert items(report, "error") == ("KeyError in cell 3",)
    assert torch.cuda.memory_allocated() == 0
    assert "%debug and %tb have nothing left to look at" in report.notes
    assert not any(hasattr(sys, name) for name in ("last_type", "last_value", "last_traceback"))


def test_an_error_goes_in_any_traceback_mode_and_after_clear_frames(gpu: Shell) -> None:
    gpu.run(CHAINED)
    for mode in ("Plain", "Context", "Verbose", "Minimal"):
        gpu.run(f"%xmode {mode}")
        gpu.run("f()")
        gpu.run("import sys, traceback; traceback.clear_frames(sys.last_traceback)")
        free(gpu.ip)
        assert torch.cuda.memory_allocated() == 0


def test_an_error_that_keeps_its_object_is_dropped_whole(gpu: Shell) -> None:
    gpu.run("T(2).no_such_thing")
    free(gpu.ip)
    assert torch.cuda.memory_allocated() == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups")
def test_the_members_of_a_group_are_cut(gpu: Shell) -> None:
    gpu.run(CHAINED + "errors = []\ntry: f()\nexcept KeyError as e: errors.append(e)")
    gpu.run("raise ExceptionGroup('many', [errors.pop()])")
    assert torch.cuda.memory_allocated() == 8 * MIB
    free(gpu.ip)
    assert torch.cuda.memory_allocated() == 0


def test_keep_errors_keeps_what_debug_needs(gpu: Shell) -> None:
    gpu.run(CHAINED)
    gpu.run("f()")
    report = free(gpu.ip, keep_errors=True)
    assert (torch.cuda.memory_allocated(), items(report, "error")) == (8 * MIB, ())
    assert sys.last_traceback is not None
    assert report.notes == ()


def test_a_mistyped_name_stays_for_debug(gpu: Shell) -> None:
    gpu.run("kept = T(1)")
    gpu.run("prnt(kept)")
    error = sys.last_value
    report = free(gpu.ip)
    assert sys.last_value is error
    assert (items(report, "error"), report.notes) == ((), ())


def test_an_error_out_of_a_function_goes_whatever_it_holds(gpu: Shell) -> None:
    gpu.run("def f():\n    return prnt(1)")
    gpu.run("f()")
    assert items(free(gpu.ip), "error") == ("NameError in cell 3",)
    assert not hasattr(sys, "last_value")


def test_a_hostile_exception_is_cut_without_running_its_code(gpu: Shell) -> None:
    gpu.run(
        "class E(Exception):\n"
        "    def __getattribute__(self, name): raise SystemError(name)\n"
        "    def __setattr__(self, name, value): raise SystemError(name)\n"
        "def h():\n    x = T(1)\n    raise E()"
    )
    gpu.run("h()")
    free(gpu.ip)
    assert torch.cuda.memory_allocated() == 0


def test_garbage_is_told_from_what_a_step_dropped(gpu: Shell) -> None:
    gc.collect()
    gc.disable()
    try:
        gpu.run("c = [T(2)]; c.append(c); d = [T(3)]; d.append(d); del c")
        report = free(gpu.ip, ["d"])
    finally:
        gc.enable()
    assert given_back(report, "garbage") == (2 * MIB, 0)
    assert given_back(report, "names") == (3 * MIB, 0)


def test_the_steps_sum_to_what_was_there_before_and_is_there_now(gpu: Shell) -> None:
    gpu.run(CHAINED)
    gpu.run("m = torch.nn.Linear(2000, 2000).cuda(); n = m(torch.ones(9, 2000, device='cuda'))")
    gpu.run("n")
    gpu.run("t = T(30, 'cuda:1')")
    gpu.run("f()")
    report = free(gpu.ip, ["n"])
    for before, after in zip(report.before, report.after, strict=True):
        device = before.device
        backs = [given_back(report, step.key, device) for step in report.steps]
        assert before.allocated_bytes - after.allocated_bytes == sum(back[0] for back in backs)
        assert before.reserved_bytes - after.reserved_bytes == sum(back[1] for back in backs)
        assert after.allocated_bytes == torch.cuda.memory_allocated(device)
        assert after.reserved_bytes == torch.cuda.memory_reserved(device)
    assert report.freed_bytes == sum(given_back(report, step.key, d)[0] for step in report.steps for d in range(3))


def test_names_may_be_parted_by_commas(gpu: Shell) -> None:
    gpu.run("a = T(1); b = T(1); c = T(1)")
    assert items(free(gpu.ip, ["a,", "b,c"]), "names") == ("a", "b", "c")
    assert torch.cuda.memory_allocated() == 0


def test_all_takes_every_variable_with_gpu_memory_and_no_other(gpu: Shell) -> None:
    gpu.run("x = T(1); m = {'a': [T(1)]}; k = 5; cpu = torch.ones(9); empty = torch.empty(0, device='cuda')")
    gpu.run("import numpy as np; here = globals(); ip = get_ipython()\ndef cached(t=T(1)): return t\nclass C: t = T(1)")
    report = free(gpu.ip, all_variables=True)
    assert items(report, "names") == ("x", "m")
    assert report.kept_names == ("cached", "C")
    assert {"k", "cpu", "empty", "here", "ip", "np", "torch", "cached", "C", "T"} <= set(gpu.ns)
    assert torch.cuda.memory_allocated() == 2 * MIB


def test_a_refused_name_stops_everything(gpu: Shell) -> None:
    gpu.run("x = T(1)\nclass C: pass")
    gpu.run("x")
    names = set(gpu.ns)
    ipythons = ["In", "Out", "get_ipython", "_", "__", "___", "_3", "_i", "_i3", "_ii", "_dh", "_oh", "_ih"]
    others = ["exit", "quit", "__name__", "torch", "T", "C", "nothing", "m.weight", "x[0]", "", "print", "1x"]
    for name in ipythons + others:
        with pytest.raises(GpuMemError):
            free(gpu.ip, ["x", name])
        assert set(gpu.ns) == names
    assert torch.cuda.memory_allocated() == MIB


def test_a_misspelt_name_is_told_the_nearest(gpu: Shell) -> None:
    gpu.run("model = T(1)")
    with pytest.raises(GpuMemError, match=r"no variable named 'modle'; did you mean 'model'\?"):
        free(gpu.ip, ["modle"])


@pytest.mark.parametrize(
    ("text", "advised"),
    [("model.head", True), ("losses[3]", True), ("3", False), ("f()", False), ("a b", False), ("\0", False)],
)
def test_del_is_advised_only_for_what_it_takes(gpu: Shell, text: str, advised: bool) -> None:
    with pytest.raises(GpuMemError, match="not a variable's name") as raised:
        free(gpu.ip, [text])
    assert (f"del {text} first" in str(raised.value)) is advised


def test_a_name_of_ipythons_that_the_user_took_over_is_the_users(gpu: Shell) -> None:
    gpu.run("%reset_selective -f nothing")
    gpu.ip.push({"hidden": 5}, interactive=False)
    with pytest.raises(GpuMemError, match="bound by IPython"):
        free(gpu.ip, ["hidden"])
    gpu.run("hidden = T(1)")
    free(gpu.ip, ["hidden"])
    assert torch.cuda.memory_allocated() == 0


def test_a_dry_run_changes_nothing_and_says_what_would_go(gpu: Shell) -> None:
    gpu.run(CHAINED)
    gpu.run("x = T(2); y = T(1)")
    gpu.run("y")
    gpu.run("f()")
    names, allocated = set(gpu.ns), torch.cuda.memory_allocated()
    report = free(gpu.ip, ["x"], dry_run=True)
    assert (set(gpu.ns), torch.cuda.memory_allocated()) == (names, allocated)
    assert hasattr(sys, "last_value")
    assert (report.freed_bytes, report.returned_bytes) == (0, 0)
    assert items(report, "names") == ("x",)
    assert items(report, "outputs")[:1] == ("Out[4]",)
    assert items(report, "error") == ("KeyError in cell 5",)


def test_a_device_without_a_context_is_not_woken(gpu: Shell) -> None:
    gpu.run("T(1, 'cuda:1')")
    woken = [bool(torch._C._cuda_hasPrimaryContext(index)) for index in range(3)]
    free(gpu.ip)
    free_running()
    assert [bool(torch._C._cuda_hasPrimaryContext(index)) for index in range(3)] == woken


def test_library_workspaces_go_when_no_graph_is_alive(gpu: Shell) -> None:
    gpu.run("a = torch.ones(64, 64, device='cuda'); b = a @ a; del b")
    tensors = 64 * 64 * 4
    workspaces = torch.cuda.memory_allocated() - tensors
    report = free(gpu.ip)
    assert given_back(report, "workspaces") == (workspaces, 0)
    assert torch.cuda.memory_allocated() == tensors


GRAPH = """
a = torch.ones(64, 64, device='cuda'); out = torch.empty_like(a); side = torch.cuda.Stream()
with torch.cuda.stream(side): torch.mm(a, a, out=out)
torch.cuda.synchronize()
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g, stream=side): {body}
"""


@pytest.mark.parametrize("body", ["torch.mm(a, a, out=out)", "kept = torch.mm(a, a)"])
def test_a_live_graph_keeps_its_workspaces(gpu: Shell, body: str) -> None:
    gpu.run(GRAPH.format(body=body))
    before = torch.cuda.memory_allocated()
    report = free(gpu.ip)
    assert note(report, "workspaces") == GRAPH_KEEPS_WORKSPACES
    assert torch.cuda.memory_allocated() == before
    gpu.run("g.replay(); kept = None")
    report = free(gpu.ip, ["g"])
    assert note(report, "workspaces") == ""


def test_nothing_is_returned_while_a_graph_is_captured(gpu: Shell) -> None:
    gpu.run("a = torch.ones(64, 64, device='cuda'); b = T(30); del b; g = torch.cuda.CUDAGraph(); reports = []")
    gpu.run("from jupyter_gpumem.release import free, free_running, free_cache")
    gpu.run(
        "with torch.cuda.graph(g):\n    b = a + 1\n    reports += [free(get_ipython()), free_running(), free_cache()]"
    )
    whole, running, cache = gpu.ns["reports"]
    assert note(whole, "cache") == note(cache, "cache") == CAPTURE_KEEPS_CACHE
    assert note(running, "cache") == CACHE_WAITS
    assert running.cache_waits
    assert gpu.run("g.replay()").error is None


def test_while_a_cell_runs_only_garbage_and_cache_go(gpu: Shell) -> None:
    gpu.run(CHAINED)
    gpu.run("f()")
    gpu.run("x = T(1)")
    gpu.run("x")
    gpu.run("c = [T(30)]; c.append(c); del c")
    reports: list[FreeReport] = []
    thread = threading.Thread(target=lambda: reports.append(free_running()))
    thread.start()
    thread.join()
    (report,) = reports
    assert report.while_running
    assert [step.key for step in report.steps] == ["garbage", "cache"]
    assert given_back(report, "cache") == (0, 30 * MIB)
    assert gpu.ns["Out"][5] is gpu.ns["x"]
    assert hasattr(sys, "last_value")


def test_what_the_running_cell_takes_and_frees_meanwhile_is_not_given_back(gpu: Shell) -> None:
    gpu.run("c = [T(30)]; c.append(c); del c")

    def take_and_free(_phase: str, _info: object) -> None:
        # in the middle of the collection, as a cell's thread would
        gpu.ns["kept"] = torch.empty(1000, device="cuda")

    gc.callbacks.append(take_and_free)
    report = free_running()
    gc.callbacks.remove(take_and_free)
    assert note(report, "garbage") == CELL_ALLOCATES
    assert given_back(report, "garbage") == (0, 0)
    assert report.returned_bytes == given_back(report, "cache")[1] == 30 * MIB


def test_beside_a_cell_that_allocates_nothing_garbage_is_counted(gpu: Shell) -> None:
    gpu.run("kept = T(5); c = [T(30)]; c.append(c); del c")
    report = free_running()
    assert note(report, "garbage") == ""
    assert given_back(report, "garbage") == (30 * MIB, 0)
    assert given_back(report, "cache") == (0, 30 * MIB)


def test_beside_a_cell_the_hosts_ram_is_measured_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_gpumem.meter.current_probe", HostProbe)
    garbage: list[object] = [bytearray(200 * MIB)]
    garbage.append(garbage)
    del garbage
    report = free_running()
    assert (report.host, report.while_running) == (True, True)
    assert 150 * MIB < report.returned_bytes < 250 * MIB


def test_the_cache_alone(gpu: Shell) -> None:
    gpu.run("x = T(30); del x")
    report = free_cache()
    assert (report.freed_bytes, report.returned_bytes) == (0, 30 * MIB)


def test_a_program_without_a_shell_frees_garbage_and_cache() -> None:
    cycle: list[Any] = [torch.empty(MIB, device="cuda")]
    cycle.append(cycle)
    del cycle
    free()
    assert torch.cuda.memory_reserved() == 0
    with pytest.raises(GpuMemError, match="in a program: del x"):
        free(names=["x"])


def test_what_is_left_is_reported_with_its_holder(gpu: Shell) -> None:
    gpu.run("kept = T(4)")
    report = free(gpu.ip)
    assert report.held is not None
    assert [(holder.path, holder.keeps_bytes) for holder in report.held.holders] == [("kept", 4 * MIB)]
    json.dumps(report.to_dict())


def make_holder(path: str, *releases: Release) -> Holder:
    return Holder(
        path=path,
        kind="variable",
        section="gives back",
        device=0,
        keeps_bytes=0,
        shown_bytes=0,
        shared_bytes=0,
        shared_with=(),
        count=1,
        expression=None,
        cell=None,
        note="",
        remedy=f"del {path}",
        releases=releases,
    )


@pytest.mark.parametrize(
    "release",
    [
        Release("variables", names=("x",)),
        Release("code", code="del x"),
    ],
)
def test_one_holder_lets_go_and_nothing_else_does(gpu: Shell, release: Release) -> None:
    gpu.run("x = T(30); y = T(1)")
    gpu.run("y;")
    report = release_holder(gpu.ip, make_holder("x", release))
    assert (report.freed_bytes, report.returned_bytes) == (30 * MIB, 30 * MIB)
    assert "x" not in gpu.ns
    assert torch.cuda.memory_allocated() == MIB


HOLDINGS = {
    "variable": ["x = T(2)"],
    "two names": ["x = T(2); y = x"],
    "output": ["T(2)", "5;"],
    "error": [CHAINED, "f()", "5;"],
    "losses": [
        "w = torch.ones(1 << 20, device='cuda', requires_grad=True)",
        "losses = [(w * i).exp().sum() for i in range(3)]",
    ],
    "garbage": ["gc.disable(); c = [T(2)]; c.append(c); del c"],
    "cache": ["import functools", "@functools.lru_cache\ndef mask(n): return T(n)\nmask(3);"],
}


@pytest.mark.parametrize("cells", HOLDINGS.values(), ids=HOLDINGS)
def test_a_holder_of_a_report_gives_back_what_it_said(gpu: Shell, cells: list[str]) -> None:
    for cell in cells:
        gpu.run(cell)
    try:
        holder = find_leaks(gpu.ip).holders[0]
        before = torch.cuda.memory_allocated()
        report = release_holder(gpu.ip, holder)
    finally:
        gc.enable()
    assert holder.keeps_bytes > 0
    assert before - torch.cuda.memory_allocated() == report.freed_bytes == holder.keeps_bytes


def test_outputs_errors_and_debugger_can_be_released_alone(gpu: Shell) -> None:
    gpu.run(CHAINED)
    gpu.run("T(1)")
    gpu.run("T(2)")
    gpu.run("f()")
    gpu.run("5;")
    report = release_holder(gpu.ip, make_holder("Out[3]", Release("outputs", outputs=(3,))))
    assert report.freed_bytes == MIB
    assert list(gpu.ns["Out"]) == [4]
    assert release_holder(gpu.ip, make_holder("error", Release("errors"))).freed_bytes == 8 * MIB
    gpu.ip.InteractiveTB.pdb = [torch.empty(MIB, device="cuda")]
    assert release_holder(gpu.ip, make_holder("pdb", Release("debugger"))).freed_bytes == 4 * MIB


def test_a_holder_that_changed_since_is_left_alone(gpu: Shell) -> None:
    gpu.run("x = 5")
    holder = make_holder("x", Release("variables", names=("x",)))
    with pytest.raises(GpuMemError, match="no GPU memory any more"):
        release_holder(gpu.ip, holder)
    assert gpu.ns["x"] == 5
    with pytest.raises(GpuMemError, match="cannot be released from here"):
        release_holder(gpu.ip, make_holder("x"))
    with pytest.raises(GpuMemError, match="ZeroDivisionError"):
        release_holder(gpu.ip, make_holder("x", Release("code", code="1 / 0")))


REPLACED = {
    "a name": ("x = T(8)", "x = torch.nn.Linear(9, 9).cuda()", "x"),
    "deleted, then made anew": ("x = T(8)", "del x; x = T(8)", "x"),
    "a list at the same address": ("x = [T(8)]", "x = [T(3)]; x = [T(4)]", r"x\[0\]"),
    "gone": ("x = T(8)", "del x", "x"),
    "one of two names": ("x = T(8); y = x", "y = torch.nn.Linear(9, 9).cuda()", "y"),
    "a view": ("x = T(8)[:1]", "x = torch.ones(9, device='cuda')[:5]", "x"),
    "a list of losses": (
        "w = torch.ones(9, device='cuda', requires_grad=True); x = [w.exp().sum() for i in range(3)]; del w",
        "x = [torch.nn.Linear(9, 9).cuda()]",
        "x",
    ),
}


@pytest.mark.parametrize(("cell", "then", "name"), REPLACED.values(), ids=REPLACED)
def test_what_was_replaced_since_the_report_is_not_released(gpu: Shell, cell: str, then: str, name: str) -> None:
    gpu.run(cell)
    holder = find_leaks(gpu.ip).holders[0]
    gpu.run(then)
    names, held = dict(gpu.ns), torch.cuda.memory_allocated()
    with pytest.raises(GpuMemError, match=rf"{name} has changed since: press Find leaks again"):
        release_holder(gpu.ip, holder)
    assert (dict(gpu.ns), torch.cuda.memory_allocated()) == (names, held)


def test_an_attribute_replaced_since_the_report_is_not_released(gpu: Shell) -> None:
    gpu.run("class Box: pass\nbox = Box(); box.kept = T(8)")
    holder = make_holder("box.kept", Release("code", code="box.kept = None"))
    (stamped,) = stamp_holders(gpu.ip, [holder])
    gpu.run("box.kept = torch.nn.Linear(9, 9).cuda()")
    with pytest.raises(GpuMemError, match=r"box\.kept has changed since"):
        release_holder(gpu.ip, stamped)
    assert gpu.ns["box"].kept is not None


def test_code_that_cannot_be_read_is_refused_by_python(gpu: Shell) -> None:
    (holder,) = stamp_holders(gpu.ip, [make_holder("x", Release("code", code="del ("))])
    with pytest.raises(GpuMemError, match="SyntaxError"):
        release_holder(gpu.ip, holder)


def test_a_list_that_grew_since_the_report_is_released(gpu: Shell) -> None:
    gpu.run("x = [T(4), T(4)]")
    holder = find_leaks(gpu.ip).holders[0]
    gpu.run("x.append(T(1))")
    assert release_holder(gpu.ip, holder).freed_bytes == 9 * MIB


def test_an_output_replaced_since_the_report_is_not_released(gpu: Shell) -> None:
    gpu.run("T(2)")
    holder = find_leaks(gpu.ip).holders[0]
    gpu.run("Out[2] = T(1);")
    with pytest.raises(GpuMemError, match=r"Out\[2\] has changed since"):
        release_holder(gpu.ip, holder)
    assert gpu.ns["Out"][2].numel() == MIB


def test_a_report_keeps_nothing_alive(gpu: Shell) -> None:
    gpu.run("x = T(8); y = [T(1)]")
    reports = [find_leaks(gpu.ip)]
    json.dumps([report.to_dict() for report in reports])
    gpu.run("del x, y")
    assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize("run", [free, lambda shell: free(shell, all_variables=True)])
def test_host_memory_mode_drops_results_that_hold_tensors(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], FreeReport]
) -> None:
    from jupyter_gpumem.device import HostProbe

    monkeypatch.setattr("jupyter_gpumem.meter.current_probe", HostProbe)
    shell.run("import torch")
    shell.run("torch.ones(5)")
    shell.run("x = torch.ones(5)")
    report = run(shell.ip)
    assert (report.host, shell.ns["Out"]) == (True, {})
    assert ("x" in shell.ns) == (items(report, "names") == ())


def test_a_real_kernel_gives_everything_back_after_debug(gpu_kernel: Kernel) -> None:
    gpu_kernel.run(IMPORT)
    gpu_kernel.run(CHAINED)
    gpu_kernel.run("f()")
    gpu_kernel.run(
        "ip = get_ipython(); cls = ip.InteractiveTB.debugger_cls\n"
        "ip.InteractiveTB.debugger_cls = lambda *a, **k: _quits(cls(*a, **k))\n"
        "def _quits(p): p.cmdqueue = ['up', 'q']; return p\n"
        "del ip"
    )
    gpu_kernel.run("%debug")
    gpu_kernel.run("import sys\nfor n in ('last_type', 'last_value', 'last_traceback'): delattr(sys, n)")
    held = gpu_kernel.run("gc.collect(); torch.cuda.memory_allocated()").result
    assert held == str(8 * MIB)
    gpu_kernel.run("from jupyter_gpumem.release import free\nr = free(get_ipython())")
    assert gpu_kernel.run("torch.cuda.memory_allocated()").result == "0"
    assert gpu_kernel.run("[s.items for s in r.steps if s.key == 'debugger']").result == (
        "[('the ended %debug session',)]"
    )
