import gc
from typing import Any

import pytest
import torch

from jupyter_gpumem.holders import Holder
from jupyter_gpumem.leak_report import find_leaks
from tests.conftest import Shell

MIB = 1024**2
PREPARE = (
    "%load_ext jupyter_gpumem\n"
    'import torch, sys, threading\ndef T(): return torch.empty(1 << 18, device="cuda")\nclass K: pass\nclass L: pass'
)


def run_remedy(shell: Shell, **wanted: Any) -> tuple[Holder, int]:
    """Run the remedy of the only holder that is as wanted; return it and the bytes that came back."""
    (holder,) = (
        one for one in find_leaks(shell.ip).holders if all(getattr(one, key) == value for key, value in wanted.items())
    )
    gc.collect()
    before = torch.cuda.memory_allocated()
    assert shell.run(holder.remedy).error is None
    return holder, before - torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    ("cell", "remedy"),
    [
        ("K.x = K.y = T()", "del K.x, K.y"),
        ("K.x = T(); K.kept = [K.x, K]", "del K.kept[0], K.x"),
        ("class Inner: pass\nK.Inner = Inner; Inner.x = K.x = T(); del Inner", "del K.Inner.x, K.x"),
        ("K.f = lambda a=T(): a\nK.g = K.f", "del K.f, K.g"),
        ("K.a, K.b = L(), L()\nK.a.t = K.b.t = T()", None),
        ("K.x = T(); K.y = K.x[:10]", None),
        ("K.x = L.x = T()", None),
        ("k = K(); k.q = K.z = T()", None),
        ("x = T(); K.x = x", "del K.x\n%gpu_free x"),
    ],
)
def test_what_a_class_has_twice_is_taken_out_of_every_place(shell: Shell, cell: str, remedy: str | None) -> None:
    shell.run(PREPARE)
    shell.run(cell)
    holder, freed = run_remedy(shell, keeps_bytes=MIB)
    assert freed == MIB
    assert remedy in (None, holder.remedy)


def test_what_a_module_has_twice_is_taken_out_of_both_places(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run(
        "import types\nmine = types.ModuleType('mine'); sys.modules['mine'] = mine\nmine.a = mine.b = T(); del mine"
    )
    holder, freed = run_remedy(shell)
    shell.run("del sys.modules['mine']")
    assert holder.keeps_bytes == freed == MIB


def test_a_tensor_set_on_two_submodules_is_taken_off_both(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("m = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())\nm[0].seen = m[1].seen = [T()]")
    _holder, freed = run_remedy(shell)
    assert freed == MIB


def test_attributes_of_a_frozen_object_go_with_it(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass D:\n    a: object\n    b: object\n"
        "d = D(T(), T())"
    )
    holder, freed = run_remedy(shell)
    assert (holder.path, holder.keeps_bytes, freed) == ("d", 2 * MIB, 2 * MIB)


def test_a_timer_is_cancelled_and_not_taken_apart(shell: Shell) -> None:
    shell.run(PREPARE)
    for cell in (
        "timer = threading.Timer(900, print, (T(),)); timer.start()",
        "threading.Timer(900, print, (T(),)).start()",
    ):
        shell.run(cell)
        holder, freed = run_remedy(shell)
        assert "cancel()" in holder.remedy
        assert holder.keeps_bytes == freed == MIB


def test_work_that_waits_in_a_pool_of_threads_is_cancelled(shell: Shell) -> None:
    shell.run(PREPARE + "\nfrom concurrent.futures import ThreadPoolExecutor\nevent = threading.Event()")
    shell.run("pool = ThreadPoolExecutor(1)\npool.submit(event.wait);\nfor _ in range(3): pool.submit(print, T());")
    holder, freed = run_remedy(shell)
    shell.run("event.set(); pool.shutdown()")
    assert holder.path == "work that waits in a pool of threads"
    assert holder.keeps_bytes == freed == 3 * MIB


KEPT_BY_LIBRARIES = {
    "an asyncio queue": ("q = asyncio.Queue(); q.put_nowait(T())", "[q.get_nowait() for _ in range(q.qsize())];"),
    "a queue of an object": (
        "k = K(); k.q = asyncio.LifoQueue(); k.q.put_nowait(T())",
        "[k.q.get_nowait() for _ in range(k.q.qsize())];",
    ),
    "what a program gave a queue": ("q = asyncio.Queue(); q.mine = T()", "del q.mine"),
    "a queue of a class of the user's": (
        "class Mine(asyncio.Queue): pass\nq = Mine(); q.put_nowait(T())",
        "%gpu_free q",
    ),
    "a queue in a list": ("found = [asyncio.Queue()]; found[0].put_nowait(T())", None),
    "a queue of threads": ("q = queue.Queue(); q.put(T())", "del q.queue[0]"),
    "a scheduler": ("s = sched.scheduler(); s.enter(900, 1, print, (T(),));", "%gpu_free s"),
    "clean-ups": ("stack = contextlib.ExitStack(); stack.callback(repr, T());", "stack.close()"),
    "clean-ups to await": (
        "stack = contextlib.AsyncExitStack(); stack.callback(repr, T());",
        "await stack.aclose()",
    ),
    "a member of an enum": ("class E(enum.Enum):\n    A = T()\n    B = 1", "del E; import gc; gc.collect();"),
    "a private attribute of the user's own": ("k = K(); k._mine = T()", "del k._mine"),
}


@pytest.mark.parametrize(("cell", "remedy"), KEPT_BY_LIBRARIES.values(), ids=KEPT_BY_LIBRARIES.keys())
def test_no_private_attribute_of_a_library_is_taken_apart(shell: Shell, cell: str, remedy: str | None) -> None:
    shell.run(PREPARE + "\nimport asyncio, contextlib, enum, queue, sched")
    shell.run(cell)
    holder, freed = run_remedy(shell)
    assert holder.keeps_bytes == freed == MIB
    assert remedy in (None, holder.remedy)


def test_clean_ups_run_when_a_stack_is_closed(shell: Shell) -> None:
    shell.run(PREPARE + "\nimport contextlib\nran = []")
    shell.run("stack = contextlib.ExitStack(); stack.callback(lambda x: ran.append(1), T());")
    holder, freed = run_remedy(shell)
    assert (holder.note, freed, shell.ns["ran"]) == ("runs what was registered", MIB, [1])


@pytest.mark.parametrize(
    ("cell", "remedy"),
    [
        ("k = K(); k.x = K(); k.x.me = k.x; k.x.t = T()", "del k.x.t"),
        ("k = K(); k.x = loop()", "del k.x; import gc; gc.collect();"),
        ("k = K(); k.many = [loop(), loop()]", "k.many.clear(); import gc; gc.collect();"),
        ("K.x = K.y = loop()", "del K.x, K.y; import gc; gc.collect();"),
        ("k = K(); k.x = SimpleNamespace(t=T(), u=T())", "del k.x"),
        ("k = K(); k.x = [[T()], (T(), {'a': T()})]", "k.x.clear()"),
        ("def make(t):\n    def f(): return t, f\n    return f\nf = make(T())", "del f; import gc; gc.collect();"),
        ("def f(t=T()): return t", "del f"),
        ("x = T()\ndef f(t=x): return t\nclass A: kept = f", "del A.kept, f\n%gpu_free x"),
        ("def f(t=T()): return t\nfs = [f]\ndef g(): pass\ng.f = f", "del f, g\n%gpu_free fs"),
    ],
)
def test_only_what_refers_to_itself_needs_the_collector(shell: Shell, cell: str, remedy: str | None) -> None:
    shell.run(PREPARE + "\nfrom types import SimpleNamespace")
    shell.run("def loop():\n    it = SimpleNamespace(t=T(), u=T())\n    it.me = it\n    return it")
    shell.run(cell)
    gc.disable()
    try:
        holder, freed = run_remedy(shell)
    finally:
        gc.enable()
    assert holder.keeps_bytes == freed
    assert remedy in (None, holder.remedy)


def test_what_garbage_refers_to_needs_the_collector(shell: Shell) -> None:
    shell.run(PREPARE + "\nk = K(); k.f = lambda t=T(): t\ngo = K(); go.me = go; go.f = k.f")
    gc.disable()
    try:
        shell.run("del go")
        (holder,) = find_leaks(shell.ip).holders
    finally:
        gc.enable()
    assert holder.remedy == "del k.f; import gc; gc.collect();"


@pytest.mark.parametrize(
    ("cells", "remedy"),
    [
        (["f = lambda t=T(): t\ng = [f, f]\nK.y = f", "0"], "del g[1], g[0], K.y, f"),
        (["def f(t=T()): return t\nf.z = [f]\nclass A: x = f", "0"], None),
        (["p = functools.partial(print, T())\ns = L(); s.p = p\nclass A: x = y = s", "p"], "del s.p\n%gpu_free p"),
    ],
)
def test_removals_come_in_an_order_in_which_they_can_be_run(shell: Shell, cells: list[str], remedy: str | None) -> None:
    shell.run(PREPARE + "\nimport functools")
    for cell in cells:
        shell.run(cell)
    holder, freed = run_remedy(shell)
    assert holder.keeps_bytes == freed == MIB
    assert remedy in (None, holder.remedy)


def test_what_goes_whole_gives_back_what_else_it_keeps(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("x = T(); pair = (x, T()); K.x = x")
    holder, freed = run_remedy(shell, kind="together")
    assert holder.remedy == "del K.x\n%gpu_free x pair"
    assert holder.keeps_bytes == freed == 2 * MIB


def test_an_output_beside_a_class_is_cut_within(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("k = K(); k.t = T(); K.k = k")
    shell.run("k", store_history=True)
    holder, freed = run_remedy(shell)
    assert (holder.path, holder.remedy, freed) == ("k.t", "del k.t", MIB)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("zip([T()], [1])", "the iterator held (zip)"),
        ("map(abs, iter([T()]))", "the iterator held (map)"),
        ("iter({1: T()}.values())", "the iterator held (dict_valueiterator)"),
        ("enumerate(x for x in [T()])", "local .0 of <genexpr>() line 1, through the iterator held (enumerate)"),
    ],
)
def test_what_an_iterator_is_to_give_is_in_the_iterator(shell: Shell, value: str, path: str) -> None:
    shell.run(PREPARE)
    shell.run(f"held = {value}")
    holder, freed = run_remedy(shell)
    assert (holder.path, holder.keeps_bytes, freed) == (path, MIB, MIB)


def test_what_an_error_handled_in_a_thread_keeps_is_named_by_the_frame_it_came_from(shell: Shell) -> None:
    shell.run(PREPARE + "\nstart, end = threading.Event(), threading.Event()")
    shell.run("def f():\n    x = T()\n    raise ValueError")
    shell.run(
        "def work():\n    try: f()\n    except ValueError as error:\n        start.set(); end.wait()\n"
        "thread = threading.Thread(target=work); thread.start(); start.wait();"
    )
    (holder,) = find_leaks(shell.ip).holders
    shell.run("end.set(); thread.join()")
    assert holder.path == "local x of f() line 3, in the exception being handled (ValueError)"
    assert holder.keeps_bytes == MIB


MODEL = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.kept = torch.nn.Linear(512, 512), []
    def forward(self, x):
        x = x * self.first.weight
        self.kept.append(x)
        return x
net = Net().cuda(); opt = torch.optim.SGD(net.parameters(), lr=1.0)
"""


@pytest.mark.parametrize(
    ("cell", "path", "remedy"),
    [
        ("out = net(torch.ones(512, 512, device='cuda'))", "out, net.kept", "net.kept.clear()\n%gpu_free out"),
        ("net.last = T(); outs = {'x': net.last}", "net.last, outs['x']", None),
        ("net.last = T(); f = lambda t=net.last: t", "net.last, default argument t of f", None),
    ],
)
def test_a_model_at_work_stays_where_what_it_shares_can_go_without_it(
    shell: Shell, cell: str, path: str, remedy: str | None
) -> None:
    shell.run(PREPARE + MODEL)
    shell.run(cell)
    holder, freed = run_remedy(shell, kind="together", section="gives back")
    assert holder.path == path
    assert remedy in (None, holder.remedy)
    assert holder.keeps_bytes == freed >= MIB
    assert "net" in shell.ns
