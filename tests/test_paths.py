"""Holders of many kinds: the path works when typed, the bytes are exact, the remedy returns them."""

import gc
import sys
from typing import Any

import pytest
import torch

from jupyter_gpumem import release
from jupyter_gpumem.leak_report import find_leaks
from tests.conftest import Shell, empty_gpu

MIB = 1024**2
PREPARE = """
import collections, contextvars, dataclasses, functools, queue, threading, types, typing, weakref
from concurrent.futures import Future
import torch
N = 1 << 18
def T(n=N): return torch.empty(n, device="cuda")
class E(Exception): pass
class S: pass
def f():
    x = T()
    raise E
def caught(function):
    try: function()
    except BaseException as error: return error
def make():
    big = T()
    return lambda *_: big
"""
GROUP = """
def g():
    errors = [caught(f), caught(f)]
    raise ExceptionGroup('g', errors)
err = caught(g)
"""

# a cell, the holder's path, the code of the path (None where there is none), the bytes, the remedy
KINDS: dict[str, tuple[str, str, str | None, int, str]] = {
    "array of two dimensions": (
        "import numpy; arr = numpy.empty((2, 2), dtype=object); arr[1, 0] = T()",
        "arr[1, 0]",
        "arr[1, 0]",
        MIB,
        "del arr",
    ),
    "cache of a class method": (
        "class K:\n    @classmethod\n    @functools.lru_cache\n    def g(cls): return T()\nK.g();",
        "cache of K.g (lru_cache)",
        "vars(K)['g'].__func__",
        MIB,
        "vars(K)['g'].__func__.cache_clear()",
    ),
    "small view that is trained": (
        "w = torch.nn.Parameter(T()[:8])",
        "w",
        "w",
        MIB - 512,
        "w = type(w)(w.detach().clone(), requires_grad=True)",
    ),
    "key": ("d = {(T(), 1): 2}", "a key[0] of d", "list(d)[0][0]", MIB, "%gpu_free d"),
    "key with an attribute": (
        "@dataclasses.dataclass(frozen=True, eq=False)\nclass K: t: object\nd = {K(T()): 2}",
        "a key.t of d",
        "list(d)[0].t",
        MIB,
        "%gpu_free d",
    ),
    "named tuple": ("P = collections.namedtuple('P', 'a b'); p = P(1, T())", "p.b", "p.b", MIB, "%gpu_free p"),
    "typed named tuple": (
        "class P(typing.NamedTuple):\n    a: object\np = P([T()])",
        "p.a[0]",
        "p.a[0]",
        MIB,
        "%gpu_free p",
    ),
    "default of a static method": (
        "class K:\n    @staticmethod\n    def g(x=T()): return x",
        "default argument x of K.g",
        "vars(K)['g'].__func__.__defaults__[0]",
        MIB,
        "del K.g",
    ),
    "default of a class method": (
        "class K:\n    @classmethod\n    def g(cls, *, x=T()): return x",
        "default argument x of K.g",
        "vars(K)['g'].__func__.__kwdefaults__['x']",
        MIB,
        "del K.g",
    ),
    "partial method": (
        "class K:\n    def g(self, x): return x\n    h = functools.partialmethod(g, T())",
        "K.h.args[0]",
        "vars(K)['h'].args[0]",
        MIB,
        "del vars(K)['h'].args",
    ),
    "closure with a path behind it": (
        "def mk():\n    held = {'k': [T()]}\n    return lambda: held\ncb = mk()",
        "held['k'][0] in the closure of cb",
        "cb.__closure__[0].cell_contents['k'][0]",
        MIB,
        "del cb",
    ),
    "closure in a class": ("class K: p = property(make())", "big in the closure of K.p.fget", None, MIB, "del K.p"),
    "result of a future": ("fut = Future(); fut.set_result(T())", "fut._result", "fut._result", MIB, "%gpu_free fut"),
    "error of a future": (
        "fut = Future(); fut.set_exception(caught(f))",
        "local x of f() line 10, through fut._exception",
        None,
        MIB,
        "fut._exception.__traceback__ = None",
    ),
    "dataclass with slots": (
        "@dataclasses.dataclass(slots=True)\nclass B: y: object\nb = B(T())",
        "b.y",
        "b.y",
        MIB,
        "del b.y",
    ),
    "default dict": (
        "d = collections.defaultdict(list); d['a'] += T(), T()",
        "d['a'][0..1]",
        "d['a']",
        2 * MIB,
        "d['a'].clear()",
    ),
    "factory of a default dict": (
        "d = collections.defaultdict(functools.partial(print, T()))",
        "d.default_factory.args[0]",
        "d.default_factory.args[0]",
        MIB,
        "%gpu_free d",
    ),
    "chain map": (
        "c = collections.ChainMap({}, {'a': T()})",
        "c.maps[1]['a']",
        "c.maps[1]['a']",
        MIB,
        "del c.maps[1]['a']",
    ),
    "ordered dict": ("o = collections.OrderedDict(k=T())", "o['k']", "o['k']", MIB, "del o['k']"),
    "cached property": (
        "class K:\n    @functools.cached_property\n    def big(self): return T()\nk = K(); k.big;",
        "k.big",
        "k.big",
        MIB,
        "del k.big",
    ),
    "callback of a weak reference": (
        "s = S(); s.r = weakref.ref(S, make())",
        "big in the closure of s.r.__callback__",
        "s.r.__callback__.__closure__[0].cell_contents",
        MIB,
        "del s.r",
    ),
    "value of a weak key": (
        "s = S(); w = weakref.WeakKeyDictionary(); w[s] = T()",
        "w.data[…]",
        "list(w.data.values())[0]",
        MIB,
        "del w.data[list(w.data)[0]]",
    ),
    "generators": (
        "def gg():\n    t = T()\n    yield\ngs = [gg() for _ in range(3)]\nfor g in gs: next(g)\ndel g",
        "gs[0..2]",
        "gs",
        3 * MIB,
        "%gpu_free gs",
    ),
    "queue": ("q = queue.Queue(); q.put(T()); q.put(T())", "q.queue[0..1]", "q.queue", 2 * MIB, "q.queue.clear()"),
    "thread-local": ("s = S(); s.l = threading.local(); s.l.x = T()", "s.l.x", "s.l.x", MIB, "del s.l"),
    "thread-local of another thread": (
        "l = threading.local(); go, stop = threading.Event(), threading.Event()\n"
        "def work():\n    l.x = T(); go.set(); stop.wait()\n"
        "thread = threading.Thread(target=work, daemon=True); thread.start(); go.wait();",
        "l.x of another thread",
        None,
        MIB,
        "%gpu_free l",
    ),
    "module made by hand": ("m = types.ModuleType('m'); m.big = T()", "m.big", "m.big", MIB, "del m"),
    "simple namespace": ("n = types.SimpleNamespace(a=(1, T()))", "n.a[1]", "n.a[1]", MIB, "%gpu_free n"),
    "read-only view": ("m = types.MappingProxyType({'a': T()})", "m['a']", "m['a']", MIB, "%gpu_free m"),
    "context variable": (
        "cv = contextvars.ContextVar('cv'); cv.set(T());",
        "context variable cv",
        None,
        MIB,
        "cv.set(None);",
    ),
    "context variable at the end of a path": (
        "s = S(); s.cvs = {'a': contextvars.ContextVar('cv')}; s.cvs['a'].set([T()]);",
        "context variable cv[0]",
        None,
        MIB,
        "s.cvs['a'].set(None);",
    ),
    "one of several context variables": (
        "a, b = contextvars.ContextVar('a'), contextvars.ContextVar('b'); a.set(T()); b.set(T(2 * N));",
        "context variable a",
        None,
        MIB,
        "a.set(None);",
    ),
    "a kept context": (
        "cv = contextvars.ContextVar('cv'); ctx = contextvars.copy_context(); ctx.run(cv.set, T());",
        "context variable cv of ctx",
        None,
        MIB,
        "%gpu_free ctx",
    ),
    "finalizer at the end of a path": (
        "s = S(); s.fins = [weakref.finalize(s, print, T())]; s.fins[0].atexit = False",
        "weakref.finalize._registry[…].args[0]",
        None,
        MIB,
        "s.fins[0].detach();",
    ),
    "dead class": ("class K: big = T()\ndel K", "garbage: class K, which nothing refers to", None, MIB, "%gpu_free"),
    "earlier error": (
        "def g():\n    error = caught(f)\n    error.me = error\ng()",
        "garbage: an earlier error (E) that nothing refers to",
        None,
        MIB,
        "%gpu_free",
    ),
    "many numbered variables": (
        "for i in range(50): globals()[f'x{i}'] = T()",
        "x0, x1 … x49",
        None,
        50 * MIB,
        'for i in range(50): del globals()[f"x{i}"]',
    ),
    "many lettered variables": (
        "for i in 'abcdef': globals()[f't_{i}'] = T()",
        "t_a, t_b … t_f",
        None,
        6 * MIB,
        "%gpu_free t_a t_b t_c t_d t_e t_f",
    ),
    "a tensor deep in lists": ("x = T()\nfor _ in range(100): x = [x]", "x[0][0]", None, MIB, "%gpu_free x"),
}
if sys.version_info >= (3, 11):
    KINDS["group of errors"] = (
        GROUP,
        "local x of f() line 10, through err through its E",
        None,
        2 * MIB,
        "%gpu_free err",
    )


@pytest.fixture(autouse=True)
def collector() -> Any:
    empty_gpu()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.parametrize("kind", KINDS)
def test_the_path_can_be_typed_and_the_remedy_returns_the_bytes(kind: str, shell: Shell) -> None:
    cell, path, code, nbytes, remedy = KINDS[kind]
    shell.run("%load_ext jupyter_gpumem")
    shell.run("%gpumem off")
    shell.run(PREPARE)
    assert shell.run(cell).error is None
    report = find_leaks(shell.ip)
    assert report == find_leaks(shell.ip) or report.to_dict()["devices"] == find_leaks(shell.ip).to_dict()["devices"]
    for other in report.holders:
        if other.expression is not None:
            eval(other.expression, shell.ns)
    holder = next(holder for holder in report.holders if holder.path.startswith(path))
    assert code is None or holder.expression == code
    assert (holder.keeps_bytes, holder.remedy) == (nbytes, remedy)
    before = torch.cuda.memory_allocated(0)
    assert shell.run(remedy).error is None
    gc.collect()
    assert before - torch.cuda.memory_allocated(0) == nbytes
    shell.run("stop.set(); thread.join()")
    shell.run("b.set(None);")


def test_few_alike_or_unequal_ones_stay_apart(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("for i in range(5): globals()[f'x{i}'] = T()\nfor i in range(7): globals()[f'y{i}'] = T((i + 1) * N)")
    assert len(find_leaks(shell.ip).holders) == 12


def test_a_released_group_goes_whole(shell: Shell) -> None:
    shell.run(PREPARE)
    shell.run("for i in (1, 2, 4, 7, 8, 9): globals()[f'x{i}'] = T()")
    (holder,) = find_leaks(shell.ip).holders
    assert holder.remedy == "%gpu_free x1 x2 x4 x7 x8 x9"
    release.release_holder(shell.ip, holder)
    assert torch.cuda.memory_allocated(0) == 0


def test_a_programs_many_variables_are_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        monkeypatch.setattr(sys.modules["__main__"], f"x{number}", torch.empty(8, device="cuda"), raising=False)
    (holder,) = find_leaks().holders
    assert holder.remedy == 'for i in range(30): del globals()[f"x{i}"]'


# what one deletion does not let go of, and what lets go of more than its own row
ALIASED = [
    "a = S(); a.x = a.y = T()",
    "a = {}; a['x'] = a['y'] = T()",
    "v = T(); a = [v, v]; del v",
    "a = S(); a.x = a.y = (lambda v=T(): v)",
    "a = S(); a.x = T(); a.y = [a.x]",
    "a = S(); a.x = a.y = T(); a.z = T(2 * N)",
    "a = S(); a.best = a.last = torch.nn.Linear(256, 256, device='cuda')",
    "p = S(); p.a = T(N); p.b = T(2 * N); a = {'k0': p, 'k1': {'k0': p.b}}; del p",
    "v = T(); a = [{'k0': (T(N), v), 'k1': T(2 * N), 'k2': [v]}]; del v",
]


@pytest.mark.parametrize("cell", ALIASED)
def test_each_remedy_gives_back_what_its_row_promises(shell: Shell, cell: str) -> None:
    shell.run("%load_ext jupyter_gpumem")
    shell.run("%gpumem off")
    shell.run(PREPARE)
    shell.run(cell)
    while torch.cuda.memory_allocated(0):
        report = find_leaks(shell.ip)
        holder = (*report.holders, *report.in_use)[0]
        before = torch.cuda.memory_allocated(0)
        assert not shell.run(holder.remedy).stderr
        gc.collect()
        assert before - torch.cuda.memory_allocated(0) == holder.keeps_bytes > 0
