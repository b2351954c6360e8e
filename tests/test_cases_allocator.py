"""The cases about the allocator and the device, and what must never be accused."""

import os
from collections.abc import Iterator

import pytest
import torch

from jupyter_gpumem import simgpu
from jupyter_gpumem.accounts import take_account
from jupyter_gpumem.leak_report import find_leaks
from tests.conftest import Kernel, Shell, empty_gpu

MIB, GIB = 1024**2, 1024**3
PREPARE = """
import torch, gc
def T(mib=1): return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
"""


@pytest.fixture
def user(shell: Shell) -> Iterator[Shell]:
    empty_gpu()
    shell.run("%load_ext jupyter_gpumem")
    shell.run("%gpumem off")
    shell.run(PREPARE)
    yield shell
    simgpu.configure(other_processes=[], nvml_fault=None, context_bytes=512 * MIB)


def parts(shell: Shell) -> dict[str, int | None]:
    return {part.key: part.nbytes for part in take_account(shell.ip, 0)[0].parts}


def test_case_5_a_retry_within_except_holds_both_and_outside_it_does_not(user: Shell) -> None:
    user.ns["find_leaks"] = find_leaks
    user.run("def f(n):\n    x = T(n)\n    if n > 1: raise ValueError\n    return torch.cuda.memory_allocated()")
    user.run("try: f(2)\nexcept ValueError: inside, report = f(1), find_leaks(get_ipython())")
    (holder,) = user.ns["report"].holders
    assert holder.path == "local x of f() line 3, in the exception being handled (ValueError)"
    assert (holder.keeps_bytes, holder.remedy) == (2 * MIB, "")
    assert holder.note.startswith("leave the except block, then try again")
    user.run("failed = False\ntry: f(2)\nexcept ValueError: failed = True\nif failed: outside = f(1)")
    assert user.ns["inside"] - user.ns["outside"] == holder.keeps_bytes


def test_case_12_what_a_loop_in_a_cell_leaves_is_named_with_its_cell(user: Shell) -> None:
    user.run("w = torch.ones(1 << 18, device='cuda', requires_grad=True)")
    user.run("for batch in (T(3).float() for _ in range(3)):\n    out = w * 2\n    loss = (out * 2).sum()")
    holders = {holder.path: holder for holder in find_leaks(user.ip).holders}
    cells = {path: holder.cell for path, holder in holders.items() if "," not in path}
    assert cells == {"batch": 5, "out": 5, "loss": 5}
    assert holders["batch"].keeps_bytes == 12 * MIB
    user.run("%gpu_free -q batch out loss")
    assert torch.cuda.memory_allocated() == MIB
    assert {holder.path for holder in find_leaks(user.ip).holders} == {"w"}


def test_case_23_a_workspace_is_normal_and_goes_with_gpu_free(user: Shell) -> None:
    user.run("a = torch.empty(512, 512, device='cuda'); b = a @ a; del a, b; gc.collect();")
    left = torch.cuda.memory_allocated()
    report = find_leaks(user.ip)
    (device, *_others) = report.devices
    assert (device.normal_bytes, device.unexplained_bytes, report.holders) == (left, 0, ())
    assert parts(user)["workspaces"] == left
    assert ("cuBLAS workspace" in user.run("%gpumem leaks").text) == bool(left)
    user.run("%gpu_free -q")
    assert torch.cuda.memory_allocated() == 0


def test_case_24_the_pool_of_a_captured_graph_goes_with_the_graph(user: Shell) -> None:
    user.run("graph = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph):\n    kept = T(3); T(5);\ndel kept")
    segments = torch.cuda.memory_snapshot()
    private = [segment for segment in segments if segment["segment_pool_id"] != (0, 0)]
    held = sum(segment["total_size"] for segment in private)
    assert held
    assert parts(user)["private_free"] == held - sum(segment["active_size"] for segment in private)
    user.run("%gpu_free -q")
    # some versions of torch keep the graph's random state beside its pool
    beside = [segment for segment in segments if segment not in private and segment["active_size"]]
    assert torch.cuda.memory_reserved() == held + sum(segment["total_size"] for segment in beside)
    user.run("del graph")
    user.run("%gpu_free -q")
    assert torch.cuda.memory_reserved() == 0


def test_cases_25_and_26_every_layer_up_to_the_other_processes_sums(user: Shell) -> None:
    simgpu.configure(other_processes=[(os.getppid(), 3 * GIB), (2**30, GIB)], context_bytes=460 * MIB)
    user.run("x = torch.empty(700, device='cuda'); y = T(30); del y")
    found = parts(user)
    assert (found["other_tensors"], found["rounding"]) == (2800, 3072 - 2800)
    assert (found["context"], found["others"]) == (460 * MIB, 4 * GIB)
    assert sum(nbytes or 0 for nbytes in found.values()) == torch.cuda.mem_get_info()[1]
    assert "4.00 GiB" in user.run("%gpumem").text
    simgpu.configure(nvml_fault=simgpu.NVML_FAULTS[0])
    hidden = parts(user)
    assert (hidden["context"], hidden["others"]) == (None, None)
    assert "unknown" in user.run("%gpumem").text


def test_case_27_freeing_one_device_wakes_no_other(kernel: Kernel) -> None:
    kernel.run("from jupyter_gpumem import simgpu; simgpu.activate('24GiB', devices=3); import torch")
    kernel.run("%load_ext jupyter_gpumem")
    kernel.run("x = torch.empty(1 << 20, device='cuda:1')\nx")
    kernel.run("%gpumem\n%gpumem leaks\n%gpu_free x")
    outputs = kernel.run(
        "print([torch._C._cuda_hasPrimaryContext(d) for d in range(3)], torch.cuda.memory_reserved(1))"
    )
    assert outputs.stdout.strip() == "[False, True, False] 0"


def test_case_28_out_of_memory_with_gigabytes_in_pieces_is_no_leak_and_says_what_helps(user: Shell) -> None:
    user.run("large = [T(1000) for _ in range(23)]; del large")
    user.run("halves = [T(500) for _ in range(46)]\npieces = halves[::2]; del halves")
    assert parts(user)["fragmented"] == 23 * 500 * MIB
    outputs = user.run("T(1500)")
    assert outputs.error == "OutOfMemoryError"
    assert "no block over 500 MiB" in outputs.text
    assert "expandable_segments:True" in outputs.text
    (holder,) = find_leaks(user.ip).holders
    assert (holder.path, holder.keeps_bytes) == ("pieces[0..22]", 23 * 500 * MIB)
    user.run("%gpu_free -q pieces")
    assert torch.cuda.memory_reserved() == 0
    assert user.run("T(1500);").error is None


def test_what_is_never_accused(user: Shell) -> None:
    user.run("net = torch.nn.Linear(512, 512).cuda(); w = torch.ones(1 << 18, device='cuda', requires_grad=True)")
    user.run("losses = []\nfor _ in range(3):\n    loss = (w * 2).exp().sum(); loss.backward(); losses.append(loss)")
    user.run("del loss\nx = T(4); print(x.shape); text = f'{x[:2]}'; text")
    user.run("a = torch.empty(64, 64, device='cuda'); a @ a;")
    user.run("del a, x")
    for _ in range(2):
        report = find_leaks(user.ip)
        assert {holder.path for holder in report.in_use} == {"net"}
        kept = {one.path: (one.keeps_bytes, one.remedy) for one in report.holders if "," not in one.path}
        assert kept == {"losses[0..2]": (3 * 512, "%gpu_free losses")}
        assert report.unexplained_bytes == 0
