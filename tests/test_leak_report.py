import gc
import json
import sys
import threading
import weakref
from typing import Any

import pytest
import torch

from jupyter_gpumem.leak_report import bytes_held_by, diff, find_leaks, mark
from jupyter_gpumem.tensors import LiveTensors, live_tensors
from tests.conftest import Shell, empty_gpu

MIB = 1024**2
FLOATS = 1 << 18
PREPARE = "import torch\ndef T(n=1 << 18): return torch.empty(n, device='cuda')"


@pytest.fixture(autouse=True)
def clean_gpu() -> Any:
    empty_gpu()
    yield
    empty_gpu()


def tensor() -> torch.Tensor:
    return torch.empty(FLOATS, device="cuda")


def paths(shell: Shell) -> dict[str, int]:
    report = find_leaks(shell.ip)
    return {holder.path: holder.keeps_bytes for holder in (*report.holders, *report.in_use)}


def test_a_model_and_its_optimizer_are_in_use_and_give_back_all_together(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("net = torch.nn.Linear(512, 512).cuda(); opt = torch.optim.Adam(net.parameters())")
    shell.run("net(T().view(512, 512)).sum().backward(); opt.step()")
    report = find_leaks(shell.ip)
    assert report.holders == ()
    (holder,) = report.in_use
    assert holder.path == "net, opt"
    assert holder.keeps_bytes == holder.shown_bytes == 4 * (MIB + 2048)
    assert {part.path: part.nbytes for part in holder.parts} == {
        "parameters": MIB + 2048,
        "gradients": MIB + 2048,
        "optimizer state": 2 * (MIB + 2048),
    }
    assert holder.remedy == "%gpu_free net opt"


def test_two_names_of_one_tensor_give_it_back_only_together(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("x = T(); y = [x[:10]]")
    assert paths(shell) == {"x, y[0]": MIB}
    shell.run("del x")
    (holder,) = find_leaks(shell.ip).holders
    assert (holder.path, holder.keeps_bytes) == ("y[0]", MIB - 512)
    assert (holder.remedy, holder.shown_bytes) == ("y[0] = y[0].clone()", MIB)


def test_what_is_shared_is_said_with_whom(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("a = T(); losses = [(a * torch.ones(1 << 18, device='cuda', requires_grad=True)).sum()]")
    report = find_leaks(shell.ip)
    losses = next(holder for holder in report.holders if holder.path.startswith("losses"))
    assert losses.shared_bytes == MIB
    assert losses.shared_with == ("a",)
    together = next(holder for holder in report.holders if holder.kind == "together")
    assert together.keeps_bytes == losses.keeps_bytes + MIB
    assert together.shown_bytes == MIB


def test_losses_after_backward_are_not_accused(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("w = torch.ones(1 << 18, device='cuda', requires_grad=True); losses = []")
    shell.run("def step():\n    loss = (w * T()).exp().sum(); loss.backward(); losses.append(loss)")
    shell.run("for _ in range(3): step()")
    losses = next(holder for holder in find_leaks(shell.ip).holders if holder.path.startswith("losses"))
    assert losses.keeps_bytes == 3 * 512
    assert ".item" not in losses.remedy + losses.note


def test_printing_a_shape_or_a_string_of_a_tensor_keeps_nothing(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("x = T(); print(x.shape); text = f'{x[:2]}'; text")
    shell.run("del x")
    assert paths(shell) == {}


def test_a_cublas_workspace_is_normal(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("a = T().view(512, 512); b = a @ a; del a, b")
    (device, *_others) = find_leaks(shell.ip).devices
    assert device.unexplained_bytes == 0
    assert device.normal_bytes == torch.cuda.memory_allocated(0)


def test_many_blocks_of_a_workspaces_size_on_one_stream_are_of_other_code(shell: Shell) -> None:
    addresses = [torch.cuda.caching_allocator_alloc(MIB) for _ in range(9)]
    try:
        (device, *_others) = find_leaks(shell.ip).devices
        assert (device.normal_bytes, device.unexplained_bytes) == (MIB, 8 * MIB)
    finally:
        for address in addresses:
            torch.cuda.caching_allocator_delete(address)


def test_the_error_being_handled_is_named(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.ns["find_leaks"] = find_leaks
    shell.run("def f(n):\n    x = T()\n    if n > 1: raise ValueError\n    return find_leaks(get_ipython())")
    shell.run("try: f(2)\nexcept ValueError: report = f(1)")
    found = {holder.path: holder.keeps_bytes for holder in shell.ns["report"].holders}
    assert found["local x of f() line 3, in the exception being handled (ValueError)"] == MIB
    assert found["local x of f() line 4"] == MIB


def test_a_running_thread_is_named(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("import threading\nstart, stop = threading.Event(), threading.Event()")
    shell.run("def work():\n    t = T()\n    start.set(); stop.wait()")
    shell.run("thread = threading.Thread(target=work, name='Thread-5'); thread.start(); start.wait()")
    try:
        assert paths(shell) == {"local t of work() line 3, in running thread Thread-5": MIB}
    finally:
        shell.run("stop.set(); thread.join(); del thread")
    assert paths(shell) == {}


def test_two_devices_have_a_section_each(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("x = T(); y = torch.empty(1 << 19, device='cuda:1')")
    shell.run("both = [T(), torch.empty(10, device='cuda:1')]")
    first, second, *_others = find_leaks(shell.ip).devices
    assert {holder.path: holder.keeps_bytes for holder in first.holders} == {"x": MIB, "both[0..1]": MIB}
    assert {holder.path: holder.keeps_bytes for holder in second.holders} == {"y": 2 * MIB, "both[0..1]": 512}
    assert [device.device for device in find_leaks(shell.ip, device=1).devices] == [1]


def test_a_hostile_heap_is_survived_and_named(shell: Shell) -> None:
    shell.run(PREPARE)
    names = "eq hash repr len bool getattr iter class dict".split()  # noqa: SIM905 - a list of strings is no clearer
    body = "\n".join(f"    @property\n    def __{name}__(self, *_): raise SystemExit" for name in names)
    shell.run(f"class Evil:\n{body}\n    __slots__ = ('held',)")
    shell.run("class Meta(type):\n    def __hash__(c): raise SystemExit\n    def __eq__(c, o): raise SystemExit")
    shell.run("class Odd(metaclass=Meta):\n    def __init__(self): self.held = T()\nodd = Odd()")
    shell.run("evil = Evil(); Evil.held.__set__(evil, T()); several = [evil]")
    shell.run("import weakref\nclass Dead: pass\ndead = weakref.proxy(Dead())")
    assert paths(shell) == {"odd.held": MIB, "evil, several[0]": MIB}


def test_the_report_keeps_nothing_alive_and_is_json(shell: Shell) -> None:
    value = tensor()
    shell.ns["held"] = value
    reference = weakref.ref(value)
    del value
    report = find_leaks(shell.ip)
    assert json.loads(json.dumps(report.to_dict()))["devices"][0]["holders"][0]["path"] == "held"
    del shell.ns["held"]
    assert reference() is None
    assert torch.cuda.memory_allocated(0) == 0


def test_a_program_without_a_shell_is_searched_from_its_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "kept", [tensor()], raising=False)
    (holder,) = find_leaks().holders
    assert (holder.path, holder.keeps_bytes, holder.remedy) == ("kept[0]", MIB, "del kept[0]")


def test_a_frozen_heap_is_walked_from_the_variables(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("x = [T(), T()]")
    gc.freeze()
    try:
        report = find_leaks(shell.ip, budget_seconds=None)
    finally:
        gc.unfreeze()
    assert [(holder.path, holder.keeps_bytes) for holder in report.holders] == [("x[0..1]", 2 * MIB)]
    assert any("freeze" in note for note in report.notes)


def test_a_spent_budget_cuts_the_report_short_and_says_so(shell: Shell) -> None:
    shell.ns["x"] = tensor()
    report = find_leaks(shell.ip, budget_seconds=0)
    assert not report.complete
    assert "time budget" in report.notes[0]
    assert gc.isenabled()


def test_an_interrupt_leaves_the_collector_as_it_was(shell: Shell) -> None:
    def interrupt(_stage: str, _seconds: float) -> None:
        raise KeyboardInterrupt

    from jupyter_gpumem import heap

    class Slow(heap.Clock):
        @property
        def seconds(self) -> float:
            return 2.0

    shell.ns["x"] = tensor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jupyter_gpumem.leak_report.Clock", Slow)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            find_leaks(shell.ip, progress=interrupt)
    assert gc.isenabled()
    assert paths(shell) == {"x": MIB}
    # the kept error must not keep what the search had in hand
    del shell.ns["x"]
    assert torch.cuda.memory_allocated(0) == 0
    assert interrupted.type is KeyboardInterrupt


def test_threads_that_free_tensors_meanwhile_do_no_harm(shell: Shell) -> None:
    stop = threading.Event()
    kept: list[Any] = [None] * 50

    def churn() -> None:
        count = 0
        while not stop.is_set():
            kept[count % 50] = [torch.empty(1000, device="cuda")]
            count += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(3):
            assert find_leaks(shell.ip).complete
    finally:
        stop.set()
        thread.join()


def test_a_difference_names_who_holds_what_is_new(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("old = T(); gone = T()")
    since = mark(shell.ip)
    shell.run("del gone; new = [T(), T()]")
    difference = diff(since, shell.ip)
    assert [(holder.path, holder.keeps_bytes) for holder in difference.new.holders] == [("new[0..1]", 2 * MIB)]
    assert difference.gone_bytes == MIB
    json.dumps(difference.to_dict())


def test_bytes_are_counted_through_containers_closures_and_graphs() -> None:
    weight = torch.ones(FLOATS, device="cuda", requires_grad=True)
    loss = (weight * tensor()).exp().sum()
    assert bytes_held_by(({"a": [weight]},)) == MIB
    assert bytes_held_by((loss,)) == 3 * MIB + 512
    assert bytes_held_by((lambda: loss,)) == 3 * MIB + 512
    assert bytes_held_by((weight, loss, "text", 3)) == 3 * MIB + 512
    assert bytes_held_by((torch, find_leaks, dict)) == 0


@pytest.mark.parametrize(
    ("cell", "path", "remedy"),
    [
        ("class A: w = T()\na = A(); del A", "type(a).w", "del type(a).w"),
        ("class Outer:\n    class Inner: w = T()", "Outer.Inner.w", "del Outer.Inner.w"),
        ("def f():\n    class L: w = T()\n    return L\nK = f()", "K.w", "del K.w"),
        ("class Cache: pass\nx = T(); Cache.x = x", "x, Cache.x", "del Cache.x\n%gpu_free x"),
    ],
)
def test_a_class_without_a_name_is_what_its_instances_or_its_owner_hold(
    shell: Shell, cell: str, path: str, remedy: str
) -> None:
    shell.run(PREPARE)
    shell.run(cell)
    (holder,) = find_leaks(shell.ip).holders
    assert (holder.path, holder.remedy) == (path, remedy)
    shell.run(remedy.replace("%gpu_free", "del"))
    gc.collect()
    assert torch.cuda.memory_allocated() == 0


def test_a_module_whose_class_was_made_for_it_alone_is_one_holder_in_use(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("net = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(512, 512)).cuda()")
    (holder,) = find_leaks(shell.ip).in_use
    assert (holder.path, holder.remedy) == ("net", "%gpu_free net")


def test_what_another_thread_allocates_meanwhile_is_not_unexplained(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []

    def count(*arguments: Any) -> LiveTensors:
        live = live_tensors(*arguments)
        made.append(tensor())
        return live

    monkeypatch.setattr("jupyter_gpumem.leak_report.live_tensors", count)
    report = find_leaks(shell.ip)
    assert report.unexplained_bytes == 0
    assert "1.00 MiB were allocated by other threads while this report was made" in report.notes
