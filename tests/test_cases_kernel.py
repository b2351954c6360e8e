import pytest

from tests.conftest import Kernel

MIB = 1024**2
PREPARE = """
import torch, gc
from jupyter_gpumem.leak_report import find_leaks
def T(n=1 << 18): return torch.empty(n, device="cuda")
def held():
    return {holder.path: holder.keeps_bytes for holder in find_leaks(get_ipython()).holders}
class E(Exception): pass
"""


@pytest.fixture
def prepared(gpu_kernel: Kernel) -> Kernel:
    gpu_kernel.run("%gpumem off")
    gpu_kernel.run(PREPARE)
    return gpu_kernel


def value(kernel: Kernel, expression: str) -> object:
    outputs = kernel.run(f"print({expression})")
    assert outputs.error is None, outputs.traceback
    return eval(outputs.stdout)


def free_with(kernel: Kernel, cell: str) -> int:
    """Return what a cell of the user's gives back, in bytes."""
    before = value(kernel, "torch.cuda.memory_allocated(0)")
    assert kernel.run(cell).error is None
    kernel.run("gc.collect()", silent=True)
    after = value(kernel, "torch.cuda.memory_allocated(0)")
    assert isinstance(before, int)
    assert isinstance(after, int)
    return before - after


def remedies(kernel: Kernel) -> dict[str, str]:
    found = value(kernel, "{holder.path: holder.remedy for holder in find_leaks(get_ipython()).holders}")
    assert isinstance(found, dict)
    return found


def cell_number(kernel: Kernel) -> int:
    number = value(kernel, "get_ipython().execution_count")
    assert isinstance(number, int)
    return number


def test_a_failed_cell_is_named_and_freed(prepared: Kernel) -> None:
    prepared.run("def f():\n    x = T()\n    raise E")
    assert prepared.run("f()").error == "E"
    ((path, keeps),) = value(prepared, "held()").items()  # type: ignore[attr-defined]  # it is a dict
    assert path.startswith("local x of f() line 3, kept by the last error (E, cell ")
    assert keeps == MIB
    assert free_with(prepared, "%gpu_free -q") == MIB
    assert value(prepared, "held()") == {}


def test_the_whole_chain_of_an_error_is_named_and_freed(prepared: Kernel) -> None:
    prepared.run(
        "def g():\n    y = T()\n    raise E\ndef f():\n    x = T(2 << 18)\n    try: g()\n    except E: raise ValueError"
    )
    prepared.run("f()")
    ((path, keeps),) = value(prepared, "held()").items()  # type: ignore[attr-defined]
    assert path.startswith("local x of f() line 7, kept by the last error (ValueError")
    assert keeps == 3 * MIB
    parts = value(prepared, "[(part.path, part.nbytes) for part in find_leaks(get_ipython()).holders[0].parts]")
    assert [nbytes for _path, nbytes in parts] == [2 * MIB, MIB]  # type: ignore[attr-defined]
    assert free_with(prepared, "%gpu_free -q") == 3 * MIB


def test_an_output_and_its_copies_are_one_holder(prepared: Kernel) -> None:
    prepared.run("x = T()\nx")
    prepared.run("del x")
    report = prepared.run(
        "for holder in find_leaks(get_ipython()).holders: print(holder.path, holder.keeps_bytes, holder.note)"
    )
    (line,) = report.stdout.strip().splitlines()
    assert line.startswith("Out[")
    assert f" {MIB} also " in line
    assert free_with(prepared, "%gpu_free -q") == MIB


def test_the_ended_debugger_is_named_and_freed(prepared: Kernel) -> None:
    prepared.run("def f():\n    x = T()\n    raise E")
    prepared.run("f()")
    prepared.run(
        "ip = get_ipython()\n"
        "ip.InteractiveTB.pdb = ip.InteractiveTB.debugger_cls()\n"
        "import sys\n"
        "pdb = ip.InteractiveTB.pdb; pdb.reset(); pdb.setup(None, sys.last_traceback); pdb.botframe = pdb.curframe\n"
        "del pdb, ip"
    )
    prepared.run("raise ValueError")
    prepared.run("1")
    ((path, keeps),) = value(prepared, "held()").items()  # type: ignore[attr-defined]
    assert path == "local x of f() line 3, kept by the ended %debug session"
    assert keeps == MIB
    assert free_with(prepared, "%gpu_free -q") == MIB


@pytest.mark.parametrize("answers", [["p z", "q"], ["up", "p x", "q"], ["up", "up", "q"]])
def test_the_locals_of_a_debugging_session_that_was_quit_are_named_and_freed(
    prepared: Kernel, answers: list[str]
) -> None:
    prepared.run("def g():\n    y, z = T(2 << 18), [T()]\n    raise E\ndef f():\n    x = T(3 << 18)\n    g()")
    prepared.run("f()")
    assert "ipdb" not in prepared.run("%debug", answers=answers).stderr
    prepared.run("raise ValueError")
    prepared.run("1")
    ((path, keeps),) = value(prepared, "held()").items()  # type: ignore[attr-defined]
    assert path.endswith("the ended %debug session")
    assert keeps == 6 * MIB
    parts = value(prepared, "[(part.path, part.nbytes) for part in find_leaks(get_ipython()).holders[0].parts]")
    assert parts == [
        ("local x of f() line 6", 3 * MIB),
        ("local y of g() line 3", 2 * MIB),
        ("local z of g() line 3", MIB),
    ]
    assert free_with(prepared, "%gpu_free -q") == 6 * MIB


def test_a_running_thread_and_a_widget_callback_are_named(prepared: Kernel) -> None:
    prepared.run("import threading\nstart, stop = threading.Event(), threading.Event()")
    prepared.run("def work():\n    t = T()\n    start.set(); stop.wait()")
    prepared.run("thread = threading.Thread(target=work, name='Thread-5'); thread.start(); start.wait()")
    prepared.run("import ipywidgets\ndef make():\n    big = T(2 << 18)\n    return lambda _: big")
    prepared.run("button = ipywidgets.Button(); button.on_click(make())")
    found = value(prepared, "held()")
    assert found == {
        "big in the closure of button._click_handlers._trait_values['callbacks'][0]": 2 * MIB,
        "local t of work() line 3, in running thread Thread-5": MIB,
    }
    assert free_with(prepared, "stop.set(); thread.join()") == MIB


def test_the_report_of_the_magic_reads_well(prepared: Kernel) -> None:
    prepared.run("losses = [(T() * torch.ones(1 << 18, device='cuda', requires_grad=True)).sum() for _ in range(3)]")
    outputs = prepared.run("%gpumem leaks")
    assert "losses[0..2]" in outputs.text
    assert "→ losses[:] = [item.item() for item in losses]" in outputs.text
    assert "all of it explained" in outputs.text
    assert "<table" in outputs.html


def test_callbacks_of_two_widgets_are_two_holders_and_freed_one_by_one(prepared: Kernel) -> None:
    prepared.run(
        "import functools, ipywidgets\n"
        "b = ipywidgets.Button(); b.on_click(functools.partial(print, T()))\n"
        "s = ipywidgets.IntSlider(); s.observe(functools.partial(print, T()), 'value')"
    )
    found = remedies(prepared)
    assert found == {
        "b._click_handlers._trait_values['callbacks'][0].args[0]": (
            "del b._click_handlers._trait_values['callbacks'][0]"
        ),
        "s._trait_notifiers['value']['change'][0].args[0]": "del s._trait_notifiers['value']['change'][0]",
    }
    for remedy in found.values():
        assert free_with(prepared, remedy) == MIB


def test_a_context_variable_is_one_holder_and_let_go_of(prepared: Kernel) -> None:
    prepared.run("import contextvars\ncv = contextvars.ContextVar('cv'); cv.set(T());")
    assert remedies(prepared) == {"context variable cv": "cv.set(None);"}
    assert free_with(prepared, "cv.set(None);") == MIB


def test_a_waiting_task_is_one_holder_with_and_without_a_name_and_cancelled(prepared: Kernel) -> None:
    prepared.run("import asyncio\nasync def c():\n    t = T()\n    await asyncio.sleep(900)")
    for forget in ("pass", "del task"):
        prepared.run("task = asyncio.create_task(c(), name='bg'); await asyncio.sleep(0)")
        prepared.run(forget)
        ((path, remedy),) = remedies(prepared).items()
        assert path == "local t of c() line 4, in asyncio task bg"
        assert free_with(prepared, remedy) == MIB


def test_a_call_that_the_event_loop_will_make_is_one_holder_and_cancelled(prepared: Kernel) -> None:
    prepared.run("import asyncio\nhandle = asyncio.get_running_loop().call_later(900, print, T())")
    ((path, remedy),) = remedies(prepared).items()
    assert path.startswith("a call scheduled in the event loop")
    assert free_with(prepared, remedy) == MIB
