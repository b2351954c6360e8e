import pytest
import torch

from jupyter_gpumem.holders import Holder
from jupyter_gpumem.leak_report import find_leaks
from tests.conftest import Shell, empty_gpu

MIB = 1 << 20
SETUP = """
import functools, torch
from torch import nn
def T(mib=1): return torch.ones(mib << 18, device="cuda")
def blocks(count=3): return nn.Sequential(*[nn.Linear(256, 256) for _ in range(count)]).cuda()
def keeping():
    kept = T()
    return lambda *_: kept
"""


@pytest.fixture
def loaded(shell: Shell) -> Shell:
    torch.empty(1, device="cuda")
    empty_gpu()
    shell.run("%load_ext jupyter_gpumem")
    shell.run(SETUP)
    return shell


def hooks(shell: Shell) -> list[Holder]:
    return [holder for holder in find_leaks(shell.ip).holders if holder.kind == "hook"]


def remedied(shell: Shell, holder: Holder) -> int:
    """Return the bytes that come back when the remedy is typed, which leaves no name that holds any."""
    before = torch.cuda.memory_allocated()
    assert shell.run(holder.remedy).error is None
    return before - torch.cuda.memory_allocated()


REGISTERED = {
    "a loop over layers": ("for x in net: x.register_forward_hook(keeping())", "3 forward hooks of net"),
    "before forward": ("for x in net: x.register_forward_pre_hook(keeping())", "3 forward pre-hooks of net"),
    "in backward": ("for x in net: x.register_full_backward_hook(keeping())", "3 backward hooks of net"),
    "before backward": (
        "for x in net: x.register_full_backward_pre_hook(keeping())",
        "3 backward pre-hooks of net",
    ),
    "of state_dict": ("for x in net: x._register_state_dict_hook(keeping())", "3 state_dict hooks of net"),
    "of tensors": ("for x in net.parameters(): x.register_hook(keeping())", "6 hooks of parameters of net"),
    "after gradients": (
        "for x in net.parameters(): x.register_post_accumulate_grad_hook(keeping())",
        "6 post-accumulate-grad hooks of parameters of net",
    ),
    "deep in a model": (
        "net = nn.Sequential(nn.Sequential(blocks(2)), net)\n"
        "for x in net.modules():\n    if type(x) is nn.Linear: x.register_forward_hook(keeping())",
        "5 forward hooks of net",
    ),
    "bound methods": (
        "class Keeper:\n    def __init__(self): self.kept = T()\n    def hook(self, *_): pass\n"
        "for x in net: x.register_forward_hook(Keeper().hook)",
        "3 forward hooks of net",
    ),
    "partials": (
        "def hook(kept, *_): pass\nfor x in net: x.register_forward_hook(functools.partial(hook, T()))",
        "3 forward hooks of net",
    ),
    "callable objects": (
        "class Keeper:\n    def __init__(self): self.kept = T()\n    def __call__(self, *_): pass\n"
        "for x in net: x.register_forward_hook(Keeper())",
        "3 forward hooks of net",
    ),
    "one function on each": (
        "hook = keeping()\nfor x in net: x.register_forward_hook(hook)\ndel hook",
        "3 forward hooks of net",
    ),
    "on a model without memory": (
        "net = nn.Sequential(nn.ReLU(), nn.ReLU())\nfor x in net: x.register_forward_hook(keeping())",
        "2 forward hooks of net",
    ),
    "in a list of models": (
        "nets = [blocks(), net]; del net\nfor x in nets[1]: x.register_forward_hook(keeping())",
        "3 forward hooks of nets[1]",
    ),
    "on a model that an object has too": (
        "from types import SimpleNamespace\ntrainer = SimpleNamespace(model=net)\n"
        "for x in net: x.register_forward_hook(keeping())",
        "3 forward hooks of net",
    ),
}


@pytest.mark.parametrize(("code", "path"), REGISTERED.values(), ids=REGISTERED.keys())
def test_hooks_of_one_line_are_one_holder_and_go_together(loaded: Shell, code: str, path: str) -> None:
    loaded.run(f"net = blocks()\n{code}\nx = None")
    (holder,) = hooks(loaded)
    assert holder.path.startswith(f"{path}, from cell ")
    kept = 1 if "hook = keeping()" in code else int(path.split()[0])
    assert holder.keeps_bytes == kept * MIB
    assert remedied(loaded, holder) == kept * MIB
    assert hooks(loaded) == []


def test_memory_that_only_the_hooks_share_comes_back_with_them(loaded: Shell) -> None:
    loaded.run("def sharing(kept): return lambda *_: kept")
    loaded.run("net = blocks(); kept = T(8)\nfor x in net: x.register_forward_hook(sharing(kept))\ndel x, kept")
    (holder,) = hooks(loaded)
    assert holder.keeps_bytes == 8 * MIB
    assert remedied(loaded, holder) == 8 * MIB


def test_hooks_that_a_list_has_too_are_let_go_one_by_one(loaded: Shell) -> None:
    loaded.run("net = blocks(); net.also = [keeping() for _ in net]")
    loaded.run("for x, f in zip(net, net.also): x.register_forward_hook(f)\ndel x, f")
    for left in (3, 2, 1):
        found = list(find_leaks(loaded.ip).holders)
        assert [holder.keeps_bytes for holder in found] == [MIB] * left
        assert remedied(loaded, found[0]) == MIB


def test_a_function_that_hooks_of_two_kinds_run_is_taken_out_of_both(loaded: Shell) -> None:
    loaded.run("net = blocks(); f = keeping()")
    loaded.run("for x in net: x.register_forward_hook(f), x.register_forward_pre_hook(f)\ndel x, f")
    (holder,) = find_leaks(loaded.ip).holders
    assert remedied(loaded, holder) == holder.keeps_bytes == MIB


def test_a_hook_that_keeps_nothing_stays_beside_one_that_goes(loaded: Shell) -> None:
    loaded.run("ran = []; net = blocks(1)")
    loaded.run("net[0].register_forward_hook(keeping()), net[0].register_forward_hook(lambda *_: ran.append(1)); None")
    (holder,) = hooks(loaded)
    assert remedied(loaded, holder) == holder.keeps_bytes == MIB
    loaded.run("net(torch.ones(1, 256, device='cuda')); None")
    assert loaded.ns["ran"] == [1]


def test_models_that_share_all_are_told_once_beside_their_extras(loaded: Shell) -> None:
    loaded.run(
        "import types, sys\nclass A: pass\na, b = A(), types.ModuleType('gpumem_b'); sys.modules['gpumem_b'] = b\n"
        "a.net = b.net = nn.ReLU(); a.net.extra = T(4); a.box = b.box = [T(3)]\ndel b"
    )
    try:
        report = find_leaks(loaded.ip)
        assert sum(one.shown_bytes for one in (*report.holders, *report.in_use)) == torch.cuda.memory_allocated()
        assert sorted(one.shown_bytes for one in report.holders) == [3 * MIB, 4 * MIB]
    finally:
        loaded.run("del sys.modules['gpumem_b']")


def test_hooks_of_another_line_stay(loaded: Shell) -> None:
    loaded.run("def other():\n    kept = T(2)\n    return lambda *_: kept")
    loaded.run(
        "net = blocks()\nfor x in net: x.register_forward_hook(keeping()), x.register_forward_hook(other())\ndel x"
    )
    found = sorted(hooks(loaded), key=lambda holder: holder.keeps_bytes)
    assert [holder.keeps_bytes for holder in found] == [3 * MIB, 6 * MIB]
    assert remedied(loaded, found[0]) == 3 * MIB
    assert [holder.keeps_bytes for holder in hooks(loaded)] == [6 * MIB]


def test_a_hook_by_itself_is_named_by_where_it_is(loaded: Shell) -> None:
    loaded.run("net = blocks(); net[1].register_forward_hook(keeping()); None")
    (holder,) = hooks(loaded)
    assert holder.path.startswith("kept in the closure of net[1]._forward_hooks[")
    assert remedied(loaded, holder) == holder.keeps_bytes == MIB


def test_the_remedy_leaves_no_name_that_holds_a_part_of_the_model(loaded: Shell) -> None:
    loaded.run("net = blocks()\nfor x in net: x.register_forward_hook(keeping())\ndel x")
    before = set(loaded.ns)
    remedied(loaded, hooks(loaded)[0])
    left = {name: loaded.ns[name] for name in set(loaded.ns) - before if not name.startswith("_")}
    assert left == {}


def test_no_code_of_a_hook_runs(loaded: Shell) -> None:
    loaded.run(
        "asked = []\n"
        "class Hook:\n"
        "    def __init__(self): object.__setattr__(self, 'kept', T())\n"
        "    def __getattribute__(self, name): asked.append(name); return object.__getattribute__(self, name)\n"
        "    def __call__(self, *_): pass\n"
        "net = blocks()\nfor x in net: x.register_forward_hook(Hook())\ndel x\nasked.clear()"
    )
    (holder,) = hooks(loaded)
    assert holder.keeps_bytes == 3 * MIB
    assert loaded.ns["asked"] == []
