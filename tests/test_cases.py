import gc
import sys
from typing import Any

import pytest
import torch

from jupyter_gpumem import release
from jupyter_gpumem.holders import Holder, LeakReport
from jupyter_gpumem.leak_report import find_leaks
from jupyter_gpumem.paths import walk
from jupyter_gpumem.trail import Trail
from tests.conftest import Shell

MIB = 1024**2
PREPARE = """
import torch, gc, functools
N = 1 << 18
def T(n=N): return torch.empty(n, device="cuda")
class E(Exception): pass
"""

FAIL = """def f():
    x = T()
    raise E
def caught(function):
    try: function()
    except Exception as error: return error
"""

# cells, part of the holder's path, bytes it keeps, part of its remedy
SINGLE: dict[str, tuple[list[str], str, int, str]] = {
    "1 error": (
        [
            ("def f():\n    x = T()\n    raise E"),
            "f()",
        ],
        "local x of f() line 3, kept by the last error (E, cell 3)",
        MIB,
        "%gpu_free",
    ),
    "2 clear_frames": (
        [
            ("def f():\n    x = T()\n    raise E"),
            "f()",
            "import traceback, sys; traceback.clear_frames(sys.last_traceback)",
        ],
        "local x of f() line 3, kept by the last error (E, cell 3)",
        MIB if sys.version_info < (3, 13) else 0,
        "%gpu_free",
    ),
    "3 interrupt": (
        [
            ("def train():\n    b = T()\n    raise KeyboardInterrupt"),
            "train()",
        ],
        "local b of train() line 3, kept by the last error (KeyboardInterrupt, cell 3)",
        MIB,
        "%gpu_free",
    ),
    "4 context": (
        [
            ("def g():\n    y = T()\n    raise E\ndef f():\n    try: g()\n    except E: raise ValueError"),
            "f()",
        ],
        "local y of g() line 3, kept by the last error (ValueError, cell 3) through its context (E)",
        MIB,
        "%gpu_free",
    ),
    "4 cause": (
        [
            ("def g():\n    y = T()\n    raise E\ndef f():\n    try: g()\n    except E as e: raise ValueError from e"),
            "f()",
        ],
        "local y of g() line 3, kept by the last error (ValueError, cell 3) through its cause (E)",
        MIB,
        "%gpu_free",
    ),
    "6 kept error": (
        [
            ("def f():\n    x = T()\n    raise E"),
            ("try: f()\nexcept E as e: err = e"),
        ],
        "local x of f() line 3, through err",
        MIB,
        "err.__traceback__ = None",
    ),
    "6 kept errors": (
        [
            ("def f():\n    x = T()\n    raise E\nl = []"),
            ("for i in range(3):\n    try: f()\n    except E as e: l.append(e)"),
        ],
        "l[0..2]",
        3 * MIB,
        "%gpu_free l",
    ),
    "6 kept error with a context": (
        [FAIL, "def g():\n    y = T()\n    try: f()\n    except E: raise ValueError", "err = caught(g)"],
        "local y of g() line 4, through err",
        2 * MIB,
        "%gpu_free err",
    ),
    "6 kept error that hides its context": (
        [FAIL, "def g():\n    y = T()\n    try: f()\n    except E: raise ValueError from None", "l = [caught(g)]"],
        "local y of g() line 4, through l[0]",
        2 * MIB,
        "del l[0]",
    ),
    "6 kept error in a partial": (
        [FAIL, "p = functools.partial(print, caught(f))"],
        "local x of f() line 3, through p.args[0]",
        MIB,
        "p.args[0].__traceback__ = None",
    ),
    "6 kept error in a set": (
        [FAIL, "s = {caught(f)}"],
        "local x of f() line 3, through s[…]",
        MIB,
        "list(s)[0].__traceback__ = None",
    ),
    "6 kept traceback": (
        [FAIL, "tb = caught(f).__traceback__"],
        "local x of f() line 3, through tb",
        MIB,
        "%gpu_free tb",
    ),
    "6 log record": (
        [
            (
                "import logging, logging.handlers\n"
                "def f():\n"
                "    x = T()\n"
                "    raise E\n"
                "log = logging.getLogger('gpumem-case'); log.propagate = False\n"
                "mh = logging.handlers.MemoryHandler(100, flushLevel=100); log.addHandler(mh)"
            ),
            ("try: f()\nexcept E: log.exception('bad')\nlog.removeHandler(mh); del log"),
        ],
        "local x of f() line 4, through mh.buffer[0].exc_info",
        MIB,
        "mh.buffer[0]",
    ),
    "6 task": (
        [
            (
                "import asyncio\n"
                "async def work():\n"
                "    x = T()\n"
                "    raise E\n"
                "async def main():\n"
                "    global bg\n"
                "    bg = asyncio.ensure_future(work())\n"
                "    await asyncio.wait([bg])\n"
                "loop = asyncio.new_event_loop(); loop.set_exception_handler(lambda *_: None); "
                "loop.run_until_complete(main()); loop.close()"
            ),
        ],
        "local x of work() line 4, through asyncio task bg",
        MIB,
        "%gpu_free bg",
    ),
    "8 output": (
        [
            ("x = T()\nx"),
            "del x",
        ],
        "Out[2]",
        MIB,
        "%gpu_free",
    ),
    "8 older output": (
        [
            ("x = T()\nx"),
            "1",
            "2",
            "3",
            "del x",
        ],
        "Out[2]",
        MIB,
        "%gpu_free",
    ),
    "10 scalar output": (
        [
            "x = torch.ones(N, device='cuda', requires_grad=True); W = T()",
            ("loss = (x * W).sum()\nloss"),
            "del x, loss, W",
        ],
        "Out[3]",
        2 * MIB + 512,
        "%gpu_free",
    ),
    "13 losses": (
        [
            ("w = torch.ones(N, device='cuda', requires_grad=True)\nlosses = []"),
            ("for i in range(3):\n    losses.append(((w * T()).exp() * 2).sum())"),
        ],
        "losses[0..2]",
        3 * (2 * MIB + 512),
        ".item()",
    ),
    "13 total": (
        [
            ("w = torch.ones(N, device='cuda', requires_grad=True)\ntot = 0"),
            ("for i in range(3):\n    tot = tot + (w * T()).exp().sum()"),
        ],
        "tot",
        6 * MIB + 512,
        "tot = tot.item()",
    ),
    "14 outputs of an evaluation": (
        [
            ("net = torch.nn.Linear(512, 512).cuda()\nouts = [net(T().view(512, 512)).relu() for _ in range(3)]"),
        ],
        "outs[0..2]",
        6 * MIB,
        "%gpu_free outs",
    ),
    "16 module cycle": (
        [
            (
                "class M(torch.nn.Module):\n"
                "    def __init__(self):\n"
                "        super().__init__(); self.w = torch.nn.Parameter(T()); self.f = lambda: self.w"
            ),
            ("gc.disable()\nm = M(); del m"),
        ],
        "garbage: ",
        MIB,
        "%gpu_free",
    ),
    "16 object cycle": (
        [
            ("class L:\n    def __init__(self): self.w, self.me = T(), self"),
            ("gc.disable()\nm = L(); del m"),
        ],
        "garbage: L → L",
        MIB,
        "%gpu_free",
    ),
    "18 cache of a method": (
        [
            ("class L:\n    def __init__(self): self.w = T()\n    @functools.lru_cache\n    def g(self): return 1"),
            "m = L(); m.g(); del m",
        ],
        "cache of L.g (lru_cache)",
        MIB,
        "L.g.cache_clear()",
    ),
    "18 cache of a function": (
        [
            ("@functools.lru_cache(maxsize=None)\ndef mask(n): return T(n)"),
            "mask(N); mask(2 * N); None",
        ],
        "cache of mask (lru_cache)",
        3 * MIB,
        "mask.cache_clear()",
    ),
    "19 optimizer": (
        [
            (
                "net = torch.nn.Linear(512, 512).cuda()\n"
                "opt = torch.optim.Adam(net.parameters())\n"
                "net(T().view(512, 512)).sum().backward(); opt.step()"
            ),
            "del net",
        ],
        "opt.param_groups[0]['params'][0]",
        4 * (MIB + 2048),
        "%gpu_free opt",
    ),
    "19 scheduler": (
        [
            (
                "net = torch.nn.Linear(512, 512).cuda()\n"
                "opt = torch.optim.SGD(net.parameters())\n"
                "sch = torch.optim.lr_scheduler.StepLR(opt, 1)"
            ),
            "del net, opt",
        ],
        "sch.optimizer.param_groups[0]['params'][0]",
        MIB + 2048,
        "sch.optimizer",
    ),
    "19 a list of models": (
        [
            ("class Acc:\n    def __init__(self): self._models = []\nacc = Acc()"),
            "net = torch.nn.Linear(512, 512).cuda(); acc._models.append(net)",
            "del net",
        ],
        "acc._models[0]",
        MIB + 2048,
        "del acc._models[0]",
    ),
    "21 small view": (
        [
            ("x = T(100_000)\nx = x[:1]"),
        ],
        "x",
        400384 - 512,
        "x = x.clone()",
    ),
    "closure": (
        [
            ("def make():\n    big = T()\n    return lambda: big\nhook = make()"),
        ],
        "big in the closure of hook",
        MIB,
        "del hook",
    ),
    "default argument": (
        [
            "def f(a, b=T()): return a",
        ],
        "default argument b of f",
        MIB,
        "del f",
    ),
    "keyword default": (
        [
            "def f(*, z=T()): return z",
        ],
        "default argument z of f",
        MIB,
        "del f",
    ),
    "partial": (
        [
            "p = functools.partial(print, T())",
        ],
        "p.args[0]",
        MIB,
        "%gpu_free p",
    ),
    "slot": (
        [
            ("class S:\n    __slots__ = ('a',)\ns = S(); s.a = T()"),
        ],
        "s.a",
        MIB,
        "del s.a",
    ),
    "attribute": (
        [
            ("class S: pass\ns = S(); s.a = T()"),
        ],
        "s.a",
        MIB,
        "del s.a",
    ),
    "nested containers": (
        [
            "d = {'k': {'z': [1, [T(), 2]]}}",
        ],
        "d['k']['z'][1][0]",
        MIB,
        "del d['k']['z'][1][0]",
    ),
    "tuple": (
        [
            "d = {'k': (1, T())}",
        ],
        "d['k'][1]",
        MIB,
        "del d['k']",
    ),
    "set": (
        [
            "s = {T()}",
        ],
        "s[…]",
        MIB,
        "%gpu_free s",
    ),
    "dict key": (
        [
            "d = {T(): 1}",
        ],
        "a key of d",
        MIB,
        "%gpu_free d",
    ),
    "value of a key that cannot be typed": (
        ["d = {torch.device('cuda', 0): (1, T())}"],
        "d[…][1]",
        MIB,
        "del d[list(d)[0]]",
    ),
    "view in a tuple": (
        ["t = (T(100_000)[:1],)"],
        "t[0]",
        400384,
        "%gpu_free t",
    ),
    "view in a frozen dataclass": (
        ["import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Batch: x: object\nb = Batch(T(100_000)[:1])"],
        "b.x",
        400384,
        "%gpu_free b",
    ),
    "loss in a tuple": (
        ["w = torch.ones(N, device='cuda', requires_grad=True)\nt = ((w * T()).exp().sum(), 1)"],
        "t[0]",
        2 * MIB + 512,
        "%gpu_free t",
    ),
    "attribute of a class that cannot be typed": (
        ["class K: pass\nsetattr(K, 'a b', T())"],
        "K.__dict__['a b']",
        MIB,
        "delattr(K, 'a b')",
    ),
    "finalizer": (
        ["import weakref\nclass S: pass\ns = S(); fin = weakref.finalize(s, print, T()); fin.atexit = False"],
        "weakref.finalize._registry[…].args[0]",
        MIB,
        "fin.detach();",
    ),
    "deque": (
        [
            ("from collections import deque\nq = deque([T() for _ in range(3)])"),
        ],
        "q[0..2]",
        3 * MIB,
        "%gpu_free q",
    ),
    "generator": (
        [
            ("def gg():\n    t = T()\n    yield 1\n    yield t\nit = gg(); next(it)"),
        ],
        "local t of gg() line 3, in the suspended generator it",
        MIB,
        "%gpu_free it",
    ),
    "class attribute": (
        [
            ("class K: big = T()\nk = K()"),
        ],
        "K.big",
        MIB,
        "del K.big",
    ),
    "thread-local": (
        [
            ("import threading\nloc = threading.local(); loc.x = T()"),
        ],
        "loc.x",
        MIB,
        "%gpu_free loc",
    ),
    "module global": (
        [
            (
                "import types, sys\n"
                "mm = types.ModuleType('gpumem_case'); sys.modules['gpumem_case'] = mm; mm.big = T(); del mm"
            ),
        ],
        "gpumem_case.big",
        MIB,
        "gpumem_case",
    ),
    "forward hook": (
        [
            (
                "net = torch.nn.Linear(512, 512).cuda()\n"
                "def make():\n"
                "    big = T()\n"
                "    return lambda m, i, o: big.mean()\n"
                "net.register_forward_hook(make())\n"
                "None"
            ),
        ],
        "big in the closure of net._forward_hooks[",
        MIB,
        "net._forward_hooks.clear()",
    ),
    "tensor hook": (
        [
            (
                "def make():\n"
                "    big = T()\n"
                "    return lambda g: g * big.mean()\n"
                "x = torch.ones(N, device='cuda', requires_grad=True); x.register_hook(make())\n"
                "None"
            ),
        ],
        "big in the closure of x._backward_hooks[",
        MIB,
        "x._backward_hooks.clear()",
    ),
    "activations kept by a model": (
        [
            (
                "class M(torch.nn.Module):\n"
                "    def __init__(self):\n"
                "        super().__init__(); self.l = torch.nn.Linear(512, 512); self.cache = []\n"
                "    def forward(self, x):\n"
                "        self.cache.append(self.l(x)); return 1"
            ),
            "m = M().cuda(); m(T().view(512, 512)); m(T().view(512, 512)); None",
        ],
        "m.cache[0..1]",
        4 * MIB,
        "m.cache.clear()",
    ),
    "graph node": (
        [
            ("x = torch.ones(N, device='cuda', requires_grad=True)\nn = (x * T()).exp().sum().grad_fn"),
        ],
        "n",
        2 * MIB,
        "%gpu_free n",
    ),
    "storage": (
        [
            "s = T().untyped_storage()",
        ],
        "s",
        MIB,
        "%gpu_free s",
    ),
    "custom function": (
        [
            (
                "class F(torch.autograd.Function):\n"
                "    @staticmethod\n"
                "    def forward(ctx, a):\n"
                "        ctx.save_for_backward(a * 2); ctx.z = a * 3; return a * 4\n"
                "    @staticmethod\n"
                "    def backward(ctx, g): return g\n"
                "a = torch.ones(N, device='cuda', requires_grad=True); o = F.apply(a)"
            ),
        ],
        "o",
        3 * MIB,
        "%gpu_free o",
    ),
    "checkpoint not run": (
        [
            (
                "import torch.utils.checkpoint as cp\n"
                "w = torch.ones(N, device='cuda', requires_grad=True)\n"
                "y = cp.checkpoint(lambda x: (x * w).exp(), T(), use_reentrant=False).sum()"
            ),
        ],
        "y",
        MIB + 512,
        "y = y.item()",
    ),
    "array of objects": (
        [
            ("import numpy as np\narr = np.empty(2, object); arr[0] = T()"),
        ],
        "arr[0]",
        MIB,
        "del arr",
    ),
    "sparse": (
        [
            (
                "sp = torch.sparse_coo_tensor(torch.zeros(2, N, dtype=torch.long, device='cuda'), T(), (4, "
                "4), check_invariants=False)"
            ),
        ],
        "sp",
        5 * MIB,
        "%gpu_free sp",
    ),
    "jagged": (
        [
            (
                "nj = torch.nested.nested_tensor([torch.ones(512, 256), torch.ones(512, 256)], "
                "device='cuda', layout=torch.jagged)"
            ),
        ],
        "nj",
        MIB + 512,
        "%gpu_free nj",
    ),
    "widget callback": (
        [
            (
                "import ipywidgets\n"
                "b = ipywidgets.Button()\n"
                "def make():\n"
                "    big = T()\n"
                "    return lambda _: big\n"
                "b.on_click(make())"
            ),
        ],
        "big in the closure of b._click_handlers",
        MIB,
        "del b._click_handlers",
    ),
}


def run(shell: Shell, cells: list[str]) -> None:
    for cell in (PREPARE, *cells):
        shell.run(cell)


def find(report: LeakReport, path: str) -> Holder:
    holders = [holder for holder in (*report.holders, *report.in_use) if holder.path.startswith(path)]
    assert holders, [holder.path for holder in (*report.holders, *report.in_use)]
    return holders[0]


def told(report: LeakReport) -> dict[str, Any]:
    return {name: value for name, value in report.to_dict().items() if name != "seconds"}


@pytest.fixture(autouse=True)
def nothing_else() -> Any:
    yield
    gc.enable()
    sys.modules.pop("gpumem_case", None)


@pytest.mark.parametrize("case", SINGLE)
def test_the_holder_is_named_and_its_remedy_gives_back_what_it_says(case: str, shell: Shell) -> None:
    cells, path, keeps_bytes, remedy = SINGLE[case]
    run(shell, cells)
    report = find_leaks(shell.ip)
    assert told(report) == told(find_leaks(shell.ip))
    if not keeps_bytes:
        assert report.holders == ()
        return
    device = report.devices[0]
    assert device.allocated_bytes == torch.cuda.memory_allocated(0)
    assert device.unexplained_bytes == 0
    assert sum(holder.shown_bytes for holder in device.holders + device.in_use) == device.explained_bytes
    for other in report.holders:
        if other.expression is not None:
            eval(other.expression, shell.ns)  # raises where the path is wrong
    holder = find(report, path)
    assert holder.keeps_bytes == keeps_bytes
    assert remedy in holder.remedy
    before = torch.cuda.memory_allocated(0)
    workspaces = device.normal_bytes
    release.release_holder(shell.ip, holder)
    gc.collect()
    after = find_leaks(shell.ip).devices[0]
    given_back = before - workspaces - (torch.cuda.memory_allocated(0) - after.normal_bytes)
    assert given_back == keeps_bytes


def test_the_base_of_a_view_and_a_gradient_are_told_apart() -> None:
    base = torch.empty(4)
    view = base[:2]
    weight = torch.empty(2, requires_grad=True)
    weight.grad = torch.empty(2)
    to_base = walk(Trail("v", "v"), [view, base])
    to_gradient = walk(Trail("w", "w"), [weight, weight.grad])
    assert (to_base.text, to_base.code) == ("the base of v", "v._base")
    assert (to_gradient.text, to_gradient.code) == ("w.grad", "w.grad")
