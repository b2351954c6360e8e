import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jupyter_gpumem.advice import advise
from jupyter_gpumem.advised import Advice
from jupyter_gpumem.render.advise import advise_page
from jupyter_gpumem.render.layout import to_html, to_text
from tests.conftest import Shell, empty_gpu
from tests.networks import CONV, ENCODER, GPT2, LLAMA, MODEL, STAGES, UPSAMPLING, recurrent

MIB = 1024**2


@pytest.fixture
def user(shell: Shell) -> Shell:
    empty_gpu()
    return shell


def find(shell: Shell, subject: str) -> Advice:
    found = [advice for advice in advise(shell.ip) if advice.subject == subject]
    assert len(found) == 1, found
    return found[0]


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


def growth(shell: Shell, code: str) -> int:
    """Run a cell and return what it added."""
    before = allocated()
    outputs = shell.run(code)
    assert outputs.error is None, outputs.stdout
    return allocated() - before


def subjects(shell: Shell) -> set[str]:
    return {advice.subject for advice in advise(shell.ip)}


def close_to(wanted: int) -> object:
    return pytest.approx(wanted, rel=0.1)


LOSS = "loss = loss_of(batch)"
IN_HALF = f"with torch.autocast('cuda', torch.bfloat16):\n    {LOSS}"


def difference(shell: Shell, subject: str, changed: str, between: str = "") -> tuple[Advice, int]:
    """Return the advice after a forward pass, and by how much less the changed one adds."""
    full = growth(shell, LOSS)
    advice = find(shell, subject)
    shell.run(f"del loss\n{between}")
    return advice, full - growth(shell, changed)


@pytest.mark.parametrize("model", [MODEL, CONV, GPT2])
def test_a_smaller_batch_gives_back_what_is_said(user: Shell, model: str) -> None:
    user.run(model)
    advice, less = difference(user, "gradient accumulation", "loss = loss_of(batch[: len(batch) // 2])")
    assert advice.nbytes == close_to(less)
    assert advice.code in ("batch_size = 16", "bs = 8", "batch_size = 8")
    assert "(loss / 2).backward()" in advice.note


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        CONV,
        GPT2,
        LLAMA,
        ENCODER,
        UPSAMPLING,
        recurrent("nn.LSTM(128, 256, num_layers=2, batch_first=True)"),
        recurrent("nn.GRU(128, 256, bidirectional=True, batch_first=True)"),
    ],
)
def test_autocast_gives_back_what_is_said_and_is_not_advised_twice(user: Shell, model: str) -> None:
    user.run(model)
    advice, less = difference(user, "mixed precision", IN_HALF)
    assert advice.nbytes == close_to(less)
    assert "mixed precision" not in subjects(user)


def test_autocast_is_not_advised_where_its_copies_of_weights_take_more(user: Shell) -> None:
    user.run(recurrent("nn.RNN(128, 256, batch_first=True)"))
    full = growth(user, LOSS)
    assert "mixed precision" not in subjects(user)
    user.run("del loss")
    assert growth(user, IN_HALF) > full


EACH_STAGE = "old = Stage.forward\nStage.forward = lambda self, x: checkpoint(old, self, x, use_reentrant=False)"


@pytest.mark.parametrize(
    ("model", "change", "path"),
    [
        (MODEL, "model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)", "model.blocks"),
        (CONV, EACH_STAGE, "model[1]"),
        (STAGES, EACH_STAGE, "stages"),
    ],
)
def test_checkpointing_gives_back_what_is_said(user: Shell, model: str, change: str, path: str) -> None:
    user.run(model)
    advice, less = difference(
        user, "activation checkpointing", LOSS, f"from torch.utils.checkpoint import checkpoint\n{change}"
    )
    assert advice.nbytes == close_to(less)
    assert f"for each block of {path}" in advice.note


def test_checkpointing_is_turned_on_by_the_models_own_method_and_not_advised_twice(user: Shell) -> None:
    user.run(GPT2)
    user.run(LOSS)
    code = find(user, "activation checkpointing").code
    assert code in ("model.activation_checkpointing_enable()", "model.gradient_checkpointing_enable()")
    user.run("del loss")
    advice, less = difference(user, "activation checkpointing", LOSS, code)
    assert advice.nbytes == close_to(less)
    assert "activation checkpointing" not in subjects(user)


def test_checkpointing_is_not_advised_where_each_block_keeps_only_what_enters_it(user: Shell) -> None:
    user.run(PLAIN)
    full = growth(user, LOSS)
    assert "activation checkpointing" not in subjects(user)
    user.run("del loss\nrun = lambda layer, x: checkpoint(layer, x, use_reentrant=False)")
    assert growth(user, LOSS) >= full


PLAIN = """
import torch
from torch.utils.checkpoint import checkpoint
layers = torch.nn.ModuleList([torch.nn.Linear(512, 512) for _ in range(6)]).cuda()
run = lambda layer, x: layer(x)
def loss_of(batch):
    x = batch + 1
    for layer in layers:
        x = run(layer, x)
    return x.sum()
batch = torch.ones(8192, 512, device="cuda")
loss_of(batch).backward()
"""


def test_outputs_collected_without_no_grad(user: Shell) -> None:
    user.run(MODEL)
    with_graphs = growth(user, "outs = [model(batch) for _ in range(3)]")
    advice = find(user, "no_grad")
    user.run("del outs")
    without = growth(user, "with torch.no_grad():\n    outs = [model(batch) for _ in range(3)]")
    assert advice.nbytes == close_to(with_graphs - without)
    assert advice.label.startswith("outs[0..2]")


def test_the_code_for_collected_outputs_works_when_pasted(user: Shell) -> None:
    user.run(MODEL)
    user.run("outs = [model(batch) for _ in range(3)]")
    advice = find(user, "no_grad")
    assert advice.nbytes == close_to(-growth(user, advice.code))


def test_a_model_in_evaluation_mode_that_keeps_activations(user: Shell) -> None:
    user.run(MODEL + "\nmodel.eval()")
    kept = growth(user, "result = loss_of(batch)")
    advice = next(one for one in advise(user.ip) if one.label.startswith("model is in evaluation mode"))
    user.run("del result")
    assert advice.nbytes == close_to(kept - growth(user, "with torch.no_grad():\n    result = loss_of(batch)"))


def test_kept_losses(user: Shell) -> None:
    user.run(MODEL)
    kept = growth(user, "losses = [loss_of(batch) for _ in range(3)]")
    advice = find(user, "kept loss")
    assert advice.nbytes == close_to(kept)
    assert -growth(user, advice.code) == close_to(advice.nbytes)
    assert "item()" in advice.code


def test_gradients_and_optimizer_state(user: Shell) -> None:
    user.run(MODEL)
    user.run("opt = torch.optim.AdamW(model.parameters()); loss_of(batch).backward(); opt.step()")
    gradients, state = find(user, "gradients"), find(user, "optimizer state")
    assert gradients.code == "opt.zero_grad(set_to_none=True)"
    assert -growth(user, gradients.code) == close_to(gradients.nbytes)
    assert -growth(user, state.code) == close_to(state.nbytes)
    assert "bitsandbytes.optim.AdamW8bit" in state.note
    user.run("opt.load_state_dict(opt.state_dict()); loss_of(batch).backward(); opt.step()")
    assert {"gradients", "optimizer state"} <= subjects(user)


def test_data_that_may_wait_on_the_cpu(user: Shell) -> None:
    user.run("import torch; data = [torch.empty(8 << 20, device='cuda') for _ in range(3)]")
    advice = find(user, "to the CPU")
    assert advice.nbytes == 96 * MIB
    assert growth(user, advice.code) == -96 * MIB
    assert advise(user.ip) == () or subjects(user) == {"cache"}


def test_a_checkpoint_and_a_copy_of_a_model(user: Shell) -> None:
    user.run(MODEL)
    user.run("import copy; best = copy.deepcopy(model); saved = copy.deepcopy(model.state_dict())")
    copies = {one.label: one for one in advise(user.ip) if one.subject == "duplicate"}
    assert set(copies) == {
        "best: a second model of the same shape as model, trained by nothing",
        "saved: a checkpoint of model",
    }
    for one in copies.values():
        assert -growth(user, one.code) == close_to(one.nbytes)
    assert "duplicate" not in subjects(user)


def test_a_state_dict_that_shares_the_models_memory_is_no_copy(user: Shell) -> None:
    user.run(MODEL + "\nstate = model.state_dict()")
    assert "duplicate" not in subjects(user)


def test_nothing_is_said_of_what_is_not_there(user: Shell) -> None:
    user.run("import torch; model = torch.nn.Linear(1024, 1024).cuda(); x = torch.ones(8, 1024, device='cuda')")
    user.run("with torch.no_grad():\n    y = model(x)")
    assert subjects(user) <= {"cache"}
    assert to_text(advise_page(())) == "nothing on the GPU that could be given back or made smaller"


FRAGMENTS = """
def take(mib): return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
rows = [take(400) for _ in range(8)]
del rows
rows = [take(260) for _ in range(8)]
"""


def test_fragments_are_what_expandable_segments_give_back(user: Shell) -> None:
    user.run("import torch" + FRAGMENTS)
    advice = find(user, "fragmentation")
    program = (
        f"import os; {advice.code}\n"
        "from jupyter_gpumem import simgpu; simgpu.activate('8GiB'); import torch"
        f"{FRAGMENTS}\n"
        "torch.cuda.empty_cache(); print(torch.cuda.memory_reserved())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        timeout=60,
    )
    torch.cuda.empty_cache()
    assert advice.nbytes == close_to(torch.cuda.memory_reserved() - int(done.stdout))


def test_advice_is_sorted_json_and_escaped(user: Shell) -> None:
    user.run("import torch; a = torch.empty(1 << 20, device='cuda'); b = torch.empty(4 << 20, device='cuda')")
    given = [one for one in advise(user.ip) if one.subject == "to the CPU"]
    assert [one.nbytes for one in given] == [16 * MIB, 4 * MIB]
    assert given[0].to_dict()["code"] == "b = b.cpu()"
    shown = to_html(advise_page((Advice("x", "<b>", 1, "<i>"),)))
    assert "<b>" not in shown
    assert "<i>" not in shown


def test_advising_holds_nothing_and_changes_nothing(user: Shell) -> None:
    user.run(MODEL)
    user.run("loss = loss_of(batch); outs = [model(batch)]")
    first = advise(user.ip)
    before = allocated()
    second = advise(user.ip)
    assert [one.to_dict() for one in first] == [one.to_dict() for one in second]
    assert allocated() == before
    user.run("del loss, outs, model, batch, loss_of, GPT, Block")
    user.run("import gc; gc.collect()")
    torch._C._cuda_clearCublasWorkspaces()
    assert allocated() == 0


def test_a_compiled_wrapper_is_no_copy_and_pinned_memory_is_ram(user: Shell) -> None:
    user.run(MODEL + "\nfast = torch.compile(model, backend='eager')")
    user.run(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.zeros(4096, 1024)), batch_size=4096, pin_memory=True)\n"
        "one, = next(iter(loader))"
    )
    assert "duplicate" not in subjects(user)
    read = getattr(torch.cuda, "host_memory_stats", None)  # torch 2.6 does not tell
    told = [read()["allocated_bytes.current"]] if read is not None else []
    pinned = [one for one in advise(user.ip) if one.subject == "pinned memory"]
    assert [one.nbytes for one in pinned] == told
    assert all(nbytes == close_to(16 * MIB) for nbytes in told)
    assert all("none of it is on the GPU" in one.label for one in pinned)


PAIR = """import torch, gc
def row(n=4): return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(n)]).cuda()
G, D = row(), row(2)
og, optimizers = torch.optim.Adam(G.parameters()), [torch.optim.SGD(D.parameters(), momentum=0.9)]
free = row(3)
out = D(G(torch.zeros(4, 1024, device="cuda"))).mean() + free(torch.zeros(4, 1024, device="cuda")).mean()
out.backward(); og.step(); optimizers[0].step(); del out
"""


def test_each_optimizer_has_its_own_state_and_gradients(user: Shell) -> None:
    user.run(PAIR)
    found = {one.code: one for one in advise(user.ip) if one.subject in ("gradients", "optimizer state")}
    assert sum("state.values()" in code for code in found) == 2
    assert {code for code in found if "zero_grad" in code} == {
        f"{name}.zero_grad(set_to_none=True)" for name in ("og", "optimizers[0]", "free")
    }
    for code, one in found.items():
        assert -growth(user, code) == close_to(one.nbytes)
    assert not subjects(user) & {"gradients", "optimizer state"}


def test_two_models_of_one_shape_that_are_both_trained_are_no_copies(user: Shell) -> None:
    user.run(PAIR.replace("row(2)", "row()").replace("row(3)", "row()"))
    assert "duplicate" not in subjects(user)
    user.run("import copy; ema = copy.deepcopy(G).requires_grad_(False); ema.zero_grad()")
    assert find(user, "duplicate").code == "ema.cpu()"


def test_graphs_of_training_are_not_promised_to_an_evaluation(user: Shell) -> None:
    user.run(MODEL + "\nlosses = sum(model(batch).square().mean() for _ in range(3)); model.eval()")
    kept = growth(user, "result = model(batch)")
    advice = next(one for one in advise(user.ip) if one.label.startswith("model is in evaluation mode"))
    user.run("del result")
    assert advice.nbytes == close_to(kept - growth(user, "with torch.no_grad():\n    result = model(batch)"))


def test_results_that_take_as_much_without_their_graphs_are_to_be_let_go(user: Shell) -> None:
    user.run("import torch; w = torch.ones(4 << 20, device='cuda', requires_grad=True); keep = []")
    kept = growth(user, "for _ in range(4): keep.append((w * 2).exp())")
    advice = next(one for one in advise(user.ip) if one.label.startswith("keep"))
    assert advice.nbytes == close_to(kept)
    assert advice.subject == "holder"


def test_one_call_that_checkpoints_several_rows_is_one_line(user: Shell) -> None:
    user.run(MULTI_STAGE)
    advice, less = difference(user, "activation checkpointing", LOSS, "net.set_grad_checkpointing()")
    assert advice.nbytes == close_to(less)
    assert advice.code == "net.set_grad_checkpointing()"


MULTI_STAGE = """import torch
from torch.utils.checkpoint import checkpoint
class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
    def forward(self, x): return torch.relu(x + self.down(torch.relu(self.up(x))))
class Net(torch.nn.Module):
    by_parts = False
    def __init__(self):
        super().__init__()
        for number in range(4):
            setattr(self, f"layer{number}", torch.nn.Sequential(*[Block(64) for _ in range(3)]))
        self.head = torch.nn.Linear(64, 8)
    def set_grad_checkpointing(self): self.by_parts = True
    def forward(self, x):
        for number in range(4):
            for block in getattr(self, f"layer{number}"):
                x = checkpoint(block, x, use_reentrant=False) if self.by_parts else block(x)
        return self.head(x)
net = Net().cuda()
batch = torch.ones(8192, 64, device="cuda")
def loss_of(batch): return net(batch).square().mean()
loss_of(batch)
"""


def test_each_byte_is_offered_once_and_no_model_for_what_it_shares(user: Shell) -> None:
    user.run("import torch; net = torch.nn.Linear(512, 512).cuda(); opt = torch.optim.SGD(net.parameters(), lr=1.0)")
    user.run("def T(mib): return torch.empty(mib << 20, dtype=torch.uint8, device='cuda')")
    user.run("a = T(40); b = [a, T(2)]; c = (b[1], a); net.last = T(3); d = {'x': net.last}")
    offered = [one for one in advise(user.ip) if one.subject in ("holder", "to the CPU")]
    codes = [one.code for one in offered]
    assert len(codes) == len(set(codes))
    assert not any("%gpu_free" in code and "net" in code.split() for code in codes)
    assert sum(one.nbytes for one in offered) == 45 * 1024**2


def test_code_of_several_lines_is_shown_line_by_line() -> None:
    text = to_text(advise_page([Advice("holder", "x, net.kept", 5 << 20, "net.kept.clear()\n%gpu_free x", "")]))
    assert [line.strip() for line in text.splitlines()][1:] == ["→ net.kept.clear()", "→ %gpu_free x"]
