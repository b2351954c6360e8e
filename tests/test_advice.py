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

MIB = 1024**2

MODEL = """
import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))

class GPT(nn.Module):
    def __init__(self, width=256, depth=4, words=1000):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)
        self.run = lambda block, x: block(x)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))

model = GPT().cuda()
batch_size = 32
tokens = torch.zeros(batch_size, 128, dtype=torch.long, device="cuda")

def loss_of(tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

loss_of(tokens).backward()  # the library workspaces are there from here on
model.zero_grad()
"""

CONV = """
import torch, torch.nn as nn, torch.nn.functional as F

class Stage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))

model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Sequential(*[Stage(32) for _ in range(4)])).cuda()
bs = 16
images = torch.zeros(bs, 3, 64, 64, device="cuda")

def loss_of(images):
    return model(images).square().mean()

loss_of(images).backward()
model.zero_grad()
"""


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


@pytest.mark.parametrize(("model", "batch"), [(MODEL, "tokens"), (CONV, "images")])
def test_a_smaller_batch_gives_back_what_is_said(user: Shell, model: str, batch: str) -> None:
    user.run(model)
    full = growth(user, f"loss = loss_of({batch})")
    advice = find(user, "gradient accumulation")
    user.run("del loss")
    half = growth(user, f"loss = loss_of({batch}[: len({batch}) // 2])")
    assert advice.nbytes == close_to(full - half)
    assert advice.code in ("batch_size = 16", "bs = 8")
    assert "(loss / 2).backward()" in advice.note


@pytest.mark.parametrize(("model", "batch"), [(MODEL, "tokens"), (CONV, "images")])
def test_autocast_gives_back_what_is_said_and_is_not_advised_twice(user: Shell, model: str, batch: str) -> None:
    user.run(model)
    full = growth(user, f"loss = loss_of({batch})")
    advice = find(user, "mixed precision")
    user.run("del loss")
    half = growth(user, f"with torch.autocast('cuda', torch.bfloat16):\n    loss = loss_of({batch})")
    assert advice.nbytes == close_to(full - half)
    assert "mixed precision" not in subjects(user)


def test_checkpointing_gives_back_what_is_said(user: Shell) -> None:
    user.run(MODEL)
    full = growth(user, "loss = loss_of(tokens)")
    advice = find(user, "activation checkpointing")
    user.run("del loss")
    user.run("from torch.utils.checkpoint import checkpoint")
    user.run("model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)")
    small = growth(user, "loss = loss_of(tokens)")
    assert advice.nbytes == close_to(full - small)
    assert "model.blocks" in advice.note
    assert "activation checkpointing" not in subjects(user)


def test_checkpointing_stages_of_a_convolutional_net_gives_back_what_is_said(user: Shell) -> None:
    user.run(CONV)
    full = growth(user, "loss = loss_of(images)")
    advice = find(user, "activation checkpointing")
    user.run("del loss\nfrom torch.utils.checkpoint import checkpoint\nold = Stage.forward")
    user.run("Stage.forward = lambda self, x: checkpoint(old, self, x, use_reentrant=False)")
    assert advice.nbytes == close_to(full - growth(user, "loss = loss_of(images)"))


def test_outputs_collected_without_no_grad(user: Shell) -> None:
    user.run(MODEL)
    with_graphs = growth(user, "outs = [model(tokens) for _ in range(3)]")
    advice = find(user, "no_grad")
    user.run("del outs")
    without = growth(user, "with torch.no_grad():\n    outs = [model(tokens) for _ in range(3)]")
    assert advice.nbytes == close_to(with_graphs - without)
    assert advice.label.startswith("outs[0..2]")


def test_the_code_for_collected_outputs_works_when_pasted(user: Shell) -> None:
    user.run(MODEL)
    user.run("outs = [model(tokens) for _ in range(3)]")
    advice = find(user, "no_grad")
    assert advice.nbytes == close_to(-growth(user, advice.code))


def test_a_model_in_evaluation_mode_that_keeps_activations(user: Shell) -> None:
    user.run(MODEL + "\nmodel.eval()")
    kept = growth(user, "result = loss_of(tokens)")
    advice = next(one for one in advise(user.ip) if one.label.startswith("model is in evaluation mode"))
    user.run("del result")
    assert advice.nbytes == close_to(kept - growth(user, "with torch.no_grad():\n    result = loss_of(tokens)"))


def test_kept_losses(user: Shell) -> None:
    user.run(MODEL)
    kept = growth(user, "losses = [loss_of(tokens) for _ in range(3)]")
    advice = find(user, "kept loss")
    assert advice.nbytes == close_to(kept)
    assert -growth(user, advice.code) == close_to(advice.nbytes)
    assert "item()" in advice.code


def test_gradients_and_optimizer_state(user: Shell) -> None:
    user.run(MODEL)
    user.run("opt = torch.optim.AdamW(model.parameters()); loss_of(tokens).backward(); opt.step()")
    gradients, state = find(user, "gradients"), find(user, "optimizer state")
    assert gradients.code == "opt.zero_grad(set_to_none=True)"
    assert -growth(user, gradients.code) == close_to(gradients.nbytes)
    assert -growth(user, state.code) == close_to(state.nbytes)
    assert "bitsandbytes.optim.AdamW8bit" in state.note
    user.run("opt.load_state_dict(opt.state_dict()); loss_of(tokens).backward(); opt.step()")
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
    assert set(copies) == {"best: a model of the same shape as model", "saved: a checkpoint of model"}
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
    user.run("loss = loss_of(tokens); outs = [model(tokens)]")
    first = advise(user.ip)
    before = allocated()
    second = advise(user.ip)
    assert [one.to_dict() for one in first] == [one.to_dict() for one in second]
    assert allocated() == before
    user.run("del loss, outs, model, tokens, loss_of, GPT, Block")
    user.run("import gc; gc.collect()")
    torch._C._cuda_clearCublasWorkspaces()
    assert allocated() == 0


GPT2 = """
import torch, warnings
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=256, n_head=4, vocab_size=512, bos_token_id=0, eos_token_id=0))
model = model.cuda()
model.config.use_cache = False
batch_size = 16
tokens = torch.zeros(batch_size, 128, dtype=torch.long, device="cuda")
def loss_of(tokens): return model(input_ids=tokens, labels=tokens).loss
loss_of(tokens).backward()
model.zero_grad()
"""


def test_a_model_of_transformers_gives_back_what_is_said(user: Shell) -> None:
    user.run(GPT2)
    full = growth(user, "loss = loss_of(tokens)")
    advice = {one.subject: one for one in advise(user.ip)}
    user.run("del loss")
    half = growth(user, "loss = loss_of(tokens[:8])")
    assert advice["gradient accumulation"].nbytes == close_to(full - half)
    user.run("del loss")
    cast = growth(user, "with torch.autocast('cuda', torch.bfloat16):\n    loss = loss_of(tokens)")
    assert advice["mixed precision"].nbytes == close_to(full - cast)
    user.run("del loss")
    assert advice["activation checkpointing"].code in (
        "model.activation_checkpointing_enable()",
        "model.gradient_checkpointing_enable()",
    )
    small = growth(user, advice["activation checkpointing"].code + "\nloss = loss_of(tokens)")
    assert advice["activation checkpointing"].nbytes == close_to(full - small)


def test_a_compiled_wrapper_is_no_copy_and_pinned_memory_is_ram(user: Shell) -> None:
    user.run(MODEL + "\nfast = torch.compile(model, backend='eager')")
    user.run(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.zeros(4096, 1024)), batch_size=4096, pin_memory=True)\n"
        "one, = next(iter(loader))"
    )
    assert "duplicate" not in subjects(user)
    pinned = find(user, "pinned memory")
    assert pinned.nbytes == close_to(16 * MIB)
    assert "none of it is on the GPU" in pinned.label
