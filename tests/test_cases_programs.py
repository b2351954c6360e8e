from collections.abc import Callable
from typing import Any

import pytest
import torch

from jupyter_gpumem.leak_report import find_leaks
from tests.conftest import Shell


def gpt2(checkpointing: bool = False, reentrant: bool = False) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500)).cuda()
    return _language_step(model, checkpointing, reentrant)


def llama(checkpointing: bool = False, reentrant: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=500
    )
    return _language_step(LlamaForCausalLM(config).cuda(), checkpointing, reentrant)


def _language_step(model: Any, checkpointing: bool, reentrant: bool) -> Any:
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, 32, dtype=torch.long, device="cuda")
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    return model, optimizer, model(tokens, labels=tokens).loss


def resnet50() -> Any:
    import timm

    model = timm.create_model("resnet50").cuda()
    return model, model(torch.empty(1, 3, 64, 64, device="cuda")).sum()


def lstm() -> Any:
    model = torch.nn.LSTM(64, 64, num_layers=2).cuda()
    return model, model(torch.empty(10, 4, 64, device="cuda"))[0].sum()


PROGRAMS: dict[str, Callable[[], Any]] = {
    "GPT-2": gpt2,
    "GPT-2, checkpointing": lambda: gpt2(checkpointing=True),
    "GPT-2, reentrant checkpointing": lambda: gpt2(checkpointing=True, reentrant=True),
    "Llama": llama,
    "Llama, checkpointing": lambda: llama(checkpointing=True),
    "Llama, reentrant checkpointing": lambda: llama(checkpointing=True, reentrant=True),
    "resnet50": resnet50,
    "LSTM": lstm,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_byte_of_a_program_not_written_for_this_is_explained(program: str, shell: Shell) -> None:
    shell.ns["kept"] = PROGRAMS[program]()
    report = find_leaks(shell.ip, budget_seconds=None)
    device = report.devices[0]
    assert report.notes == ()
    assert device.unexplained_bytes == 0
    assert device.explained_bytes + device.normal_bytes == torch.cuda.memory_allocated(0)
    assert sum(holder.shown_bytes for holder in device.holders + device.in_use) == device.explained_bytes
    assert all(holder.path.startswith("kept") for holder in device.holders + device.in_use)
