import json
import os
from collections.abc import Iterator

import pytest
import torch

from jupyter_gpumem import simgpu
from jupyter_gpumem.accounts import NO_BLOCKS, Account, take_account
from jupyter_gpumem.blocks import Block
from jupyter_gpumem.explain import explain
from jupyter_gpumem.next_step import best_step
from jupyter_gpumem.parts import outer_parts
from jupyter_gpumem.tensors import Census, LiveStorage
from tests.alone import run_alone
from tests.conftest import Shell, empty_gpu

MIB = 1024**2
GIB = 1024**3
LEVELS = ("allocated", "reserved", "process", "total")


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    torch.empty(1, device="cuda:0")
    empty_gpu()
    yield
    simgpu.configure(other_processes=[], nvml_fault=None, context_bytes=512 * MIB)
    empty_gpu()


def account_of(device: int) -> Account:
    (account,) = take_account(device=device)
    return account


def part_bytes(account: Account, key: str) -> int | None:
    part = account.part(key)
    assert part is not None
    return part.nbytes


def up_to(account: Account, level: str) -> int:
    inner = LEVELS[: LEVELS.index(level) + 1]
    return sum(part.nbytes or 0 for part in account.parts if part.level in inner)


def check_sums(account: Account) -> None:
    device = account.device
    assert up_to(account, "allocated") == account.allocated_bytes == torch.cuda.memory_allocated(device)
    assert up_to(account, "reserved") == account.reserved_bytes == torch.cuda.memory_reserved(device)
    assert up_to(account, "process") == account.process_bytes
    assert up_to(account, "total") == account.total_bytes == torch.cuda.mem_get_info(device)[1]
    assert part_bytes(account, "free") == torch.cuda.mem_get_info(device)[0]


def test_the_parts_of_a_training_program_sum_to_the_byte() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    account = account_of(0)
    check_sums(account)
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert part_bytes(account, "parameters") == weights
    assert part_bytes(account, "gradients") == weights
    assert part_bytes(account, "optimizer_state") == 2 * weights
    assert part_bytes(account, "buffers") == sum(b.untyped_storage().nbytes() for b in model.buffers())
    assert part_bytes(account, "unexplained") == 0
    state = account.part("optimizer_state")
    assert state is not None
    assert state.note == "AdamW"


def test_a_gradient_nobody_looked_at_is_a_gradient() -> None:
    weight = torch.nn.Linear(256, 256, bias=False).cuda()
    weight(torch.ones(1, 256, device="cuda")).sum().backward()
    assert part_bytes(account_of(0), "gradients") == 256 * 256 * 4


def test_a_kept_loss_shows_what_backward_would_need() -> None:
    big = torch.ones(MIB, device="cuda", requires_grad=True)
    loss = big.exp().sum()
    account = account_of(0)
    check_sums(account)
    assert part_bytes(account, "saved") == 4 * MIB
    assert loss.grad_fn is not None


def test_rounding_is_block_less_storage_bytes() -> None:
    kept = [torch.empty(700, dtype=torch.uint8, device="cuda") for _ in range(3)]
    account = account_of(0)
    check_sums(account)
    assert part_bytes(account, "other_tensors") == 2100
    assert part_bytes(account, "rounding") == 3 * 1024 - 2100
    assert len(kept) == 3


def test_a_view_adds_nothing() -> None:
    base = torch.empty(MIB, device="cuda")
    views = [base[:1], base[10:], base.view(1024, 1024).t()]
    assert part_bytes(account_of(0), "other_tensors") == base.untyped_storage().nbytes()
    assert len(views) == 3


def test_an_imported_array_inside_a_block_counts_once() -> None:
    base = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    imported = torch.from_dlpack(torch.utils.dlpack.to_dlpack(base[4096:8192]))
    account = account_of(0)
    check_sums(account)
    assert part_bytes(account, "other_tensors") == MIB
    del base
    account = account_of(0)
    check_sums(account)
    # the block is the importer's to keep alive, though it shows a part only
    assert part_bytes(account, "other_tensors") + part_bytes(account, "unexplained") == MIB
    assert imported.numel() == 4096


def test_memory_another_stream_still_uses_is_waiting() -> None:
    stream = torch.cuda.Stream()
    lent = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    lent.record_stream(stream)
    before = torch.cuda.memory_allocated()
    del lent
    account = account_of(0)
    assert before - torch.cuda.memory_allocated() == 8 * MIB
    check_sums(account)
    assert part_bytes(account, "waiting") == 8 * MIB


def test_what_is_called_returnable_is_what_empty_cache_returns() -> None:
    whole = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    pieces = [torch.empty(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
    del whole, pieces[0]
    account = account_of(0)
    check_sums(account)
    assert part_bytes(account, "returnable") == 30 * MIB
    assert part_bytes(account, "fragmented") == 16 * MIB
    assert account.largest_free_bytes == 30 * MIB
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert reserved - torch.cuda.memory_reserved() == 30 * MIB
    assert len(pieces) == 2


def test_private_pools_of_graphs_and_users_are_told_apart_from_the_cache() -> None:
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.MemPool()
    with torch.cuda.graph(graph):
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    with torch.cuda.use_mem_pool(pool):
        torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    account = account_of(0)
    check_sums(account)
    private = account.part("private_free")
    assert private is not None
    assert private.count == 2
    segments = [one for one in torch.cuda.memory_snapshot() if one["segment_pool_id"] != (0, 0)]
    assert private.nbytes == sum(one["total_size"] - one["active_size"] for one in segments)
    assert part_bytes(account, "returnable") == 0
    assert kept is not None


def test_a_block_only_an_extension_holds_is_unexplained() -> None:
    address = torch.cuda.caching_allocator_alloc(7 * MIB, 0)
    account = account_of(0)
    check_sums(account)
    assert part_bytes(account, "unexplained") == 8 * MIB - MIB
    torch.cuda.caching_allocator_delete(address)


def test_each_device_in_use_has_an_account_and_no_other() -> None:
    # in a process of its own: here an earlier test may have woken the third device
    code = """
        from jupyter_gpumem import simgpu
        simgpu.activate("24GiB", devices=3)
        import torch
        from jupyter_gpumem.accounts import take_account
        tensors = [torch.empty(1 << 20, device=f"cuda:{device}") for device in range(2)]
        (idle,) = take_account(device=2)
        print([account.device for account in take_account()], idle.process_bytes, idle.part("free").nbytes)
        print(torch._C._cuda_hasPrimaryContext(2))
    """
    assert run_alone(code) == f"[0, 1] 0 {24 * GIB}\nFalse\n"


def test_the_account_of_every_device_sums() -> None:
    second = torch.empty(MIB, device="cuda:1")
    for account in take_account():
        check_sums(account)
    assert second.device.index == 1


def test_the_others_on_the_device_are_named() -> None:
    simgpu.configure(other_processes=[(os.getppid(), 3 * GIB), (2**30, GIB)])
    account = account_of(0)
    check_sums(account)
    assert part_bytes(account, "others") == 4 * GIB
    assert account.neighbours is not None
    assert [(one.name.pid, one.used_bytes) for one in account.neighbours] == [
        (os.getppid(), 3 * GIB),
        (2**30, GIB),
    ]


@pytest.mark.parametrize("fault", simgpu.NVML_FAULTS)
def test_what_nvml_does_not_tell_is_unknown_and_the_rest_still_sums(fault: str) -> None:
    kept = torch.empty(MIB, device="cuda")
    simgpu.configure(other_processes=[(4242, 2 * GIB)], nvml_fault=fault)
    account = account_of(0)
    assert (part_bytes(account, "context"), part_bytes(account, "others")) == (None, None)
    assert account.process_bytes is None
    assert part_bytes(account, "undivided") == 512 * MIB + 2 * GIB
    assert up_to(account, "total") == account.total_bytes
    assert up_to(account, "reserved") == torch.cuda.memory_reserved()
    assert kept is not None


def test_an_allocator_that_shows_no_blocks_leaves_the_cache_undivided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jupyter_gpumem.allocator.shows_blocks", lambda: False)
    kept = torch.nn.Linear(300, 300, bias=False).cuda()
    account = account_of(0)
    check_sums(account)
    assert part_bytes(account, "parameters") == 360_000
    assert part_bytes(account, "unmatched") == torch.cuda.memory_allocated() - 360_000
    assert part_bytes(account, "cache") == torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert account.notes == (NO_BLOCKS,)
    assert kept.in_features == 300


def test_a_scan_cut_short_leaves_allocated_memory_undivided(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Census("cuda", (), False, ("the time budget ended the search (heap)",))
    monkeypatch.setattr("jupyter_gpumem.accounts.take_census", lambda **_options: cut)
    kept = torch.empty(MIB, device="cuda")
    account = account_of(0)
    check_sums(account)
    assert part_bytes(account, "tensors") == 4 * MIB
    assert account.part("unexplained") is None
    assert account.notes == cut.notes
    assert kept.numel() == MIB


def test_figures_that_contradict_each_other_are_unknown() -> None:
    assert [part.nbytes for part in outer_parts(100, None, 300, 1000)] == [None, None, 200, 700]
    assert [part.nbytes for part in outer_parts(100, None, None, None)] == [None, None, None]
    assert [part.nbytes for part in outer_parts(100, 150, 300, 1000)] == [50, 150, 700]


def test_an_account_is_json() -> None:
    simgpu.configure(other_processes=[(4242, GIB)])
    torch.ones(MIB, device="cuda", requires_grad=True).exp()
    json.dumps([account.to_dict() for account in take_account()])


def test_an_account_keeps_nothing_alive() -> None:
    kept = torch.empty(MIB, device="cuda")
    accounts = take_account()
    before = torch.cuda.memory_allocated()
    del kept
    assert before - torch.cuda.memory_allocated() == 4 * MIB
    assert accounts[0].allocated_bytes == before


def test_the_next_step_knows_what_ipython_keeps(shell: Shell) -> None:
    shell.run("import torch\nmine = torch.empty(5 << 20, dtype=torch.uint8, device='cuda')")
    shell.run("def f():\n    1 / 0")
    shell.run("f()")
    shell.run("1 + 1")
    steps = [take_account(shell.ip)[0].next_step]
    shell.run("def f():\n    x = torch.ones(9, device='cuda')\n    1 / 0")
    shell.run("f()")
    steps.append(take_account(shell.ip)[0].next_step)
    shell.run("mine")
    steps.append(take_account(shell.ip)[0].next_step)
    assert [step.code for step in steps if step is not None] == ["%gpumem leaks"] * 3
    assert steps[1] is not None
    assert steps[1].text.endswith("some kept by the last error: %gpu_free lets go of that")
    assert steps[2] is not None
    assert steps[2].text.endswith("some kept by Out[7] and the last error: %gpu_free lets go of that")


SIMULATED = "from jupyter_gpumem import simgpu; simgpu.activate('24GiB', devices=2); import torch\n"
TAKE = "from jupyter_gpumem.accounts import take_account; accounts = take_account()\n"


def test_before_cuda_starts_nothing_is_started_and_the_others_are_told() -> None:
    code = "simgpu.configure(other_processes=[(4242, 1 << 30, 1)])\n" + TAKE
    code += "others = accounts[1].part('others').nbytes\n"
    code += "print(torch.cuda.is_initialized(), [a.notes[0] for a in accounts], others)"
    told = "CUDA not started: nothing of this process is on a GPU yet"
    assert run_alone(SIMULATED + code) == f"False {[told, told]} {GIB}\n"


def test_pages_of_expandable_segments_are_returnable_where_empty_cache_returns_them() -> None:
    code = """
kept = [torch.empty(10 << 20, dtype=torch.uint8, device='cuda') for _ in range(8)]
del kept[1:4]
before = torch.cuda.memory_reserved()
"""
    code += TAKE + "sizes = {p.key: p.nbytes for p in accounts[0].parts}; torch.cuda.empty_cache()\n"
    code += "print(sizes['returnable'] == before - torch.cuda.memory_reserved() > 0, accounts[0].notes)"
    out = run_alone(SIMULATED + code, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert out == "True ()\n"


def test_without_a_gpu_the_account_is_of_ram() -> None:
    code = "import torch; x = torch.ones(1 << 20); m = torch.nn.Linear(1000, 1000)\n" + TAKE
    code += """
(a,) = accounts
sizes = {p.key: p.nbytes for p in a.parts}
print(a.kind, sizes['parameters'], sizes['other_tensors'] >= 4 << 20, a.reserved_bytes)
print(sum(sizes.values()) == a.total_bytes)
"""
    assert run_alone(code, CUDA_VISIBLE_DEVICES="") == f"host {1001 * 4000} True None\nTrue\n"


def test_without_torch_the_account_is_of_ram_too() -> None:
    code = TAKE + "import sys; print([a.kind for a in accounts], 'torch' in sys.modules)"
    assert run_alone(code, CUDA_VISIBLE_DEVICES="") == "['host'] False\n"


def storage(address: int, nbytes: int, role: str = "other") -> LiveStorage:
    return LiveStorage(0, address, nbytes, role, None, "tensor", 1)  # type: ignore[arg-type]  # a test's role


def block(address: int, nbytes: int) -> Block:
    return Block(0, address, nbytes, nbytes, "active_allocated", (0, 0), address, 0, None)


def test_storages_over_one_another_count_each_byte_once() -> None:
    over = [storage(100, 50), storage(120, 60), storage(90, 5, "buffer"), storage(300, 7)]
    found = explain([block(100, 100), block(200, 50)], over)
    assert found.roles["other"].nbytes == 80
    assert found.rounding_bytes == 20
    assert found.unexplained_bytes == 50
    assert (found.outside_bytes, found.outside_count) == (12, 2)


def test_a_storage_longer_than_its_block_counts_to_the_end_of_it() -> None:
    found = explain([block(100, 100)], [storage(150, 90)])
    assert (found.roles["other"].nbytes, found.unexplained_bytes) == (50, 50)


def test_the_next_step_is_the_one_about_most_bytes() -> None:
    sizes = {
        "returnable": 3 * GIB,
        "gradients": 2 * GIB,
        "saved": GIB,
        "other_tensors": GIB,
        "parameters": 9 * GIB,
    }
    step = best_step(sizes, {}, 24 * GIB)
    assert step is not None
    assert (step.code, step.nbytes) == ("%gpu_free", 3 * GIB)
    step = best_step(sizes, {"/home/me/old.ipynb": 5 * GIB}, 24 * GIB)
    assert step is not None
    assert step.text == "5.00 GiB held by the kernel of /home/me/old.ipynb"


def test_ordinary_fragmentation_and_crumbs_are_no_step() -> None:
    assert best_step({"fragmented": GIB, "other_tensors": 4000}, {}, 24 * GIB) is None
    step = best_step({"fragmented": 2 * GIB}, {}, 24 * GIB)
    assert step is not None
    assert "expandable_segments" in step.code
