import gc
import json
import re
from typing import Any

import pytest
import torch

from jupyter_gpumem import oom, simgpu
from jupyter_gpumem.failures import asked_bytes, device_of, find_out_of_memory, free_bytes, total_bytes, worker_of
from jupyter_gpumem.leak_report import find_leaks
from jupyter_gpumem.moments import OomMoment, look_around
from jupyter_gpumem.oom import OomReport
from jupyter_gpumem.render.layout import to_html, to_text
from jupyter_gpumem.render.oom import oom_page
from jupyter_gpumem.where import Place
from tests.conftest import DEVICE_BYTES, Kernel, Outputs, Shell, empty_gpu

GIB = 1024**3
MIB = 1024**2

SETUP = """import torch
GIB = 1 << 30
def take(gib, device="cuda"): return torch.empty(int(gib * GIB), dtype=torch.uint8, device=device)
"""

MODEL = """class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
    def forward(self, x):
        extra = self.hungry(x)
        return self.down(torch.relu(self.up(x)))
    def hungry(self, x):
        return take(99) if len(x) == 3 else None
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
    def forward(self, x):
        return x + self.mlp(x)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(4)])
        self.heads = torch.nn.ModuleDict({"one": torch.nn.Sequential(torch.nn.Linear(64, 8))})
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.heads["one"](x)
model = Net().cuda()
"""


@pytest.fixture
def ready(shell: Shell) -> Shell:
    empty_gpu()
    shell.run("%load_ext jupyter_gpumem")
    shell.run("%gpumem off")
    shell.run(SETUP)
    return shell


def headline(outputs: Outputs) -> str:
    """Return the first line of the report: the only one about running out in what the cell showed."""
    found = [line for line in outputs.text.splitlines() if "ut of memory" in line]
    assert len(found) == 1, outputs.text
    return found[0]


def test_the_line_the_request_and_the_account_of_the_moment(ready: Shell) -> None:
    ready.run("kept = take(10)")
    shown = ready.run("a = 1\n\nmore = take(20)")
    assert shown.error == "OutOfMemoryError"
    assert headline(shown) == "Out of memory in cell 5 line 3, in take() (cell 3 line 3): asked for 20.0 GiB on GPU 0"
    lines = shown.text.splitlines()
    assert "  free on the device 13.5 GiB, free in torch's cache 0 B" in lines
    assert "  the device is full: 6.50 GiB too little" in lines
    assert any(line.split() == ["allocated", "10.0", "GiB"] for line in lines)
    assert any(line.split() == ["10.0", "GiB", "kept"] for line in lines)
    assert "             → kept = kept.cpu()" in lines


def test_the_users_error_and_traceback_are_untouched(gpu_kernel: Kernel) -> None:
    gpu_kernel.run(SETUP)
    shown = gpu_kernel.run("def train():\n    return take(99)\ntrain()")
    assert shown.error == "OutOfMemoryError"
    assert "CUDA out of memory. Tried to allocate 99.00 GiB" in shown.traceback
    assert "jupyter_gpumem" not in shown.traceback
    assert "Out of memory in cell" in shown.text
    assert "OutOfMemoryError" in gpu_kernel.run("%tb").traceback


def test_frames_and_locals_of_the_moment_are_let_go(ready: Shell) -> None:
    ready.run("def train():\n    batch = take(2)\n    take(99)")
    shown = ready.run("try:\n    train()\nexcept torch.OutOfMemoryError:\n    pass")
    assert headline(shown).startswith("Ran out of memory once and went on, in cell 5 line 2")
    gc.disable()
    try:
        assert torch.cuda.memory_allocated() == 0
    finally:
        gc.enable()


def test_a_handled_failure_is_told_with_its_place_and_the_account_of_its_moment(ready: Shell) -> None:
    ready.run("def train():\n    batch = take(2)\n    return take(99)")
    shown = ready.run(
        "for n in range(3):\n    try:\n        train()\n    except RuntimeError as e:\n        print('oh')"
    )
    assert shown.error is None
    assert headline(shown) == (
        "Ran out of memory 3 times and went on, the first time in cell 5 line 3, in take() (cell 3 line 3): "
        "asked for 99.0 GiB on GPU 0"
    )
    assert any(line.split() == ["other", "tensors", "2.00", "GiB", "1", "tensor"] for line in shown.text.splitlines())


def test_the_next_cell_says_nothing_any_more(ready: Shell) -> None:
    ready.run("take(99)")
    assert ready.run("x = 1").text == ""


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    take(99)\nexcept RuntimeError as error:\n    raise ValueError('wrapped') from error",
        "try:\n    take(99)\nexcept RuntimeError:\n    raise KeyError('wrapped')",
        "try:\n    take(99)\nexcept RuntimeError as error:\n    other = error\nraise Wrapper('many', [other])",
    ],
)
def test_an_error_around_it_is_seen_through(ready: Shell, code: str) -> None:
    ready.run(
        "class Wrapper(Exception):\n    def __init__(self, text, found):\n"
        "        super().__init__(text)\n        self.exceptions = found"
    )
    assert headline(ready.run(code)).startswith("Out of memory in cell 5 line 2, in take()")


def test_the_module_path_in_forward(ready: Shell) -> None:
    ready.run(MODEL)
    shown = ready.run("x = torch.ones(3, 64, device='cuda')\ny = model(x)")
    assert headline(shown).startswith("Out of memory in cell 5 line 2, in model.layers[0].mlp (cell 3 line 3)")


def test_the_module_path_through_a_local_model_and_dict_and_sequential(ready: Shell) -> None:
    ready.run(MODEL)
    ready.run("def train(net):\n    return net(torch.ones(5, 64, device='cuda'))")
    ready.run("model.heads['one'][0].weight.data = torch.empty(1 << 28, 64, device='meta')")
    ready.run("model.heads['one'][0].forward = take.__get__(99) if False else (lambda x: take(99))")
    shown = ready.run("net = model; del model\ntrain(net)")
    assert headline(shown).startswith("Out of memory in cell 8 line 2, in net.heads['one']")


def test_a_compiled_model_is_named_as_the_user_does(ready: Shell) -> None:
    ready.run(MODEL)
    ready.run("torch._dynamo.config.suppress_errors = False\nfast = torch.compile(model, backend='eager')\ndel model")
    shown = ready.run("fast(torch.ones(3, 64, device='cuda'))")
    assert shown.error is not None
    assert "in fast" in headline(shown)
    assert "_orig_mod" not in headline(shown)


def test_backward_names_the_step_of_the_graph(ready: Shell) -> None:
    ready.run("w = torch.ones(1 << 30, device='cuda', requires_grad=True)\ny = (w * 2).exp()\nz = take(13)")
    shown = ready.run("total = y.sum()\ntotal.backward()")
    assert shown.error == "OutOfMemoryError"
    assert headline(shown).startswith("Out of memory in cell 5 line 2, in backward (")
    assert "Backward0)" in headline(shown)


def test_a_forward_run_again_in_backward_is_named(ready: Shell) -> None:
    ready.run(MODEL)
    ready.run(
        "from torch.utils.checkpoint import checkpoint\n"
        "ran = []\n"
        "def hungry(self, x):\n    ran.append(1)\n    return take(99) if len(ran) > 1 else None\n"
        "Mlp.hungry = hungry\n"
        "out = checkpoint(model.layers[2], torch.ones(2, 64, device='cuda'), use_reentrant=False).sum()"
    )
    shown = ready.run("out.backward()")
    assert shown.error == "OutOfMemoryError"
    assert "in backward (" in headline(shown)


def test_another_thread_is_named(ready: Shell) -> None:
    shown = ready.run(
        "import threading\ndef work():\n    try:\n        take(99)\n    except RuntimeError:\n        pass\n"
        "thread = threading.Thread(target=work, name='loader-7')\nthread.start()\nthread.join()"
    )
    assert "thread loader-7, during" in headline(shown)
    assert "in take() (cell 3 line 3)" in headline(shown)


def test_a_data_loaders_worker_is_named(ready: Shell) -> None:
    ready.run(
        "class Far(torch.utils.data.Dataset):\n    def __len__(self): return 4\n"
        "    def __getitem__(self, i):\n"
        "        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 3.00 GiB.')\n"
        "loader = torch.utils.data.DataLoader(Far(), num_workers=1)"
    )
    shown = ready.run("import warnings\nfor batch in loader:\n    pass")
    assert shown.error == "OutOfMemoryError"
    assert headline(shown).startswith("Out of memory in DataLoader worker process 0, during cell 5 line 2")
    assert "asked for 3.00 GiB" in headline(shown)


def test_fragmentation_is_told_with_the_largest_block(ready: Shell) -> None:
    ready.run("rows = [take(4) for _ in range(5)]; del rows; rows = [take(2.5) for _ in range(5)]")
    shown = ready.run("take(4)")
    assert "  free on the device 3.50 GiB, free in torch's cache 7.50 GiB but no block over 1.50 GiB" in (
        shown.text.splitlines()
    )
    assert "  fragmented: there is enough free memory, in pieces that are too small" in shown.text.splitlines()
    assert "expandable_segments:True" in shown.text


def test_a_limit_of_this_process_is_told(ready: Shell) -> None:
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        shown = ready.run("take(7)")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "  this process may take 6.00 GiB at most: its own limit" in shown.text.splitlines()
    assert "→ %gpumem limit off" in shown.text


@pytest.mark.parametrize("gib", [99, 23.75])
def test_of_more_than_the_empty_device_has_no_freeing_is_advised(ready: Shell, gib: float) -> None:
    ready.run("rows = [take(1) for _ in range(8)]\ndel rows[::2]\nkept = take(2)")
    simgpu.configure(other_processes=[(4242, GIB)])
    try:
        shown = ready.run(f"take({gib})")
    finally:
        simgpu.configure(other_processes=[])
    assert (
        "  more than the whole empty device has (23.5 GiB): no freeing helps, only a smaller tensor, dtype or batch"
    ) in shown.text.splitlines()
    assert "→" not in shown.text
    assert "largest holders" not in shown.text


def test_other_processes_are_told(ready: Shell) -> None:
    simgpu.configure(other_processes=[(4242, 12 * GIB)])
    try:
        shown = ready.run("take(18)")
    finally:
        simgpu.configure(other_processes=[])
    assert "  other processes hold 12.0 GiB: without them it would have fitted" in shown.text.splitlines()
    assert "4242" in shown.text


def test_the_device_that_ran_out_is_reported(ready: Shell) -> None:
    ready.run("far = take(1, 'cuda:1')")
    shown = ready.run("take(99, 'cuda:1')")
    assert headline(shown).endswith("asked for 99.0 GiB on GPU 1")
    assert "GPU 0" not in shown.text


def test_fit_leaves_nothing_to_report(ready: Shell) -> None:
    ready.run("n = 64")
    assert "ut of memory in" not in ready.run("%%gpu_fit n\nx = take(n)").text


def test_nothing_is_noted_after_unloading(ready: Shell) -> None:
    ready.run("%unload_ext jupyter_gpumem")
    assert ready.run("take(99)").text == ""
    ready.run("%load_ext jupyter_gpumem")
    assert "Out of memory in" in ready.run("take(99)").text


def test_cuda_that_starts_and_runs_out_in_one_cell(kernel: Kernel) -> None:
    kernel.run("from jupyter_gpumem import simgpu; simgpu.activate('2GiB')\n%load_ext jupyter_gpumem")
    shown = kernel.run("import torch\ntry:\n    torch.empty(9 << 30, device='cuda')\nexcept RuntimeError:\n    pass")
    assert "Ran out of memory once and went on, in cell 2 line 3: asked for 36.0 GiB on GPU 0" in shown.text


MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.64 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 1.00 GiB memory in use."
)


def test_what_a_message_tells() -> None:
    error = torch.OutOfMemoryError(MESSAGE)
    assert (asked_bytes(error), free_bytes(error), device_of(error)) == (2 * GIB, 512 * MIB, 1)
    assert total_bytes(error) == round(23.64 * GIB)
    assert worker_of(error) is None
    wrapped = torch.OutOfMemoryError("Caught OutOfMemoryError in DataLoader worker process 3.\nOriginal ...")
    assert worker_of(wrapped) == "DataLoader worker process 3"
    bare = RuntimeError("CUDA error: out of memory")
    assert (asked_bytes(bare), device_of(bare)) == (None, 0)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("HIP out of memory. Tried to allocate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (MemoryError(), False),
        (None, False),
    ],
)
def test_which_errors_count(error: Any, found: bool) -> None:
    assert (find_out_of_memory(error) is error) is (found or error is None)


def test_a_ring_of_causes_ends() -> None:
    first, second = ValueError(1), ValueError(2)
    first.__context__, second.__context__ = second, first
    assert find_out_of_memory(first) is None


def test_a_report_is_json_and_escaped() -> None:
    place = Place(3, "<f>", None, "a.py", 9, None)
    moment = OomMoment(0, GIB, 0, DEVICE_BYTES, 20 * GIB, 0, None, None, place)
    report = OomReport(7, 1, False, moment, (), True)
    values = json.loads(json.dumps(report.to_dict()))
    assert (values["where"], values["cause"]) == ("cell 7 line 3, in <f>() (a.py line 9)", "full")
    assert "<f>" not in to_html(oom_page(report))
    assert to_text(oom_page(report)).splitlines() == [
        "Out of memory in cell 7 line 3, in <f>() (a.py line 9): asked for 1.00 GiB on GPU 0",
        "  free on the device 0 B, free in torch's cache 0 B",
        "  the device is full: 1.00 GiB too little",
    ]


def test_the_batch_that_would_have_got_past_is_estimated(ready: Shell) -> None:
    ready.run(
        "layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Tanh()) "
        "for _ in range(16)]).cuda()\n"
        "def forward(): return layers(torch.ones(batch_size, 1024, device='cuda'))\n"
        "batch_size = 8\nforward()\nbatch_size = 512 << 10"
    )
    shown = ready.run("out = forward()")
    found = re.search(r"no batch over (\d+) would have got past this \(524288 was asked\)", shown.text)
    assert found is not None
    assert "→ %%gpu_fit batch_size" in shown.text
    failed_at = int(re.search(r"layers\[(\d+)\]", headline(shown))[1])
    ready.run("%gpu_free")
    better = ready.run(f"batch_size = {int(found[1]) * 95 // 100}\nout = forward()")
    assert int(re.search(r"layers\[(\d+)\]", headline(better))[1]) > failed_at
    assert 0.8 * 524288 < int(found[1]) < 524288


TRAIN = """import torch
from torch.nn import Linear, Sequential, Tanh
net = Sequential(*[Sequential(Linear(1024, 1024), Tanh(), Linear(1024, 1024), Tanh()) for _ in range(8)]).cuda()
def inputs(n): return torch.ones(n, 1024, device="cuda")
def train(net, size): net(inputs(size)).sum().backward()
def attempt(size):
    try:
        train(net, size)
    except torch.OutOfMemoryError:
        print("too much")
"""


def advised(outputs: Outputs) -> list[str]:
    """Return the first line of each piece of advice in a report."""
    lines = outputs.text.splitlines()
    lines = lines[lines.index("what would help, most first") + 1 :]
    return [found[1] for line in lines if (found := re.fullmatch(r" *[\d.]+ .iB   (.*)", line)) is not None]


def test_advice_after_a_failure_that_was_handled_is_that_of_a_raised_one(ready: Shell) -> None:
    ready.run(TRAIN)
    raised = advised(ready.run("train(net, 524288)"))
    ready.run("%gpu_free")
    handled = ready.run("attempt(524288)")
    assert handled.error is None
    assert advised(handled) == [line for line in raised if "kept by the last error" not in line]
    assert any("checkpoint net: 8 x Sequential" in line for line in advised(handled))
    assert any("gradient accumulation: each of 524288 samples takes" in line for line in advised(handled))
    assert torch.cuda.memory_allocated() < GIB


def test_a_loop_that_tries_a_hundred_times_is_looked_at_once(ready: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(oom, "look_around", lambda *args: looks.append(args[1]) or look_around(*args))
    ready.run("def attempt(gib):\n    try:\n        take(gib)\n    except RuntimeError:\n        pass")
    shown = ready.run("for n in range(100):\n    attempt(23.5 - n / 1000)\nattempt(1)".replace("23.5", "24.5"))
    assert headline(shown).startswith("Ran out of memory 100 times and went on, the first time in cell 5 line 2")
    assert "asked for 24.5 GiB" in headline(shown)
    assert len(looks) == 1


def test_the_report_of_a_cell_that_ends_in_a_later_failure_is_of_that_one(ready: Shell) -> None:
    ready.run(TRAIN)
    shown = ready.run("attempt(1 << 23)\ntrain(net, 524288)")
    assert headline(shown).startswith("Out of memory in cell 5 line 2, in net[")
    assert any("524288 samples" in line for line in advised(shown))


@pytest.mark.parametrize(
    "before", ["", "try: train(fast, batch_size)\nexcept RuntimeError: pass\nelse: raise SystemExit"]
)
def test_compiled_code_without_a_graph_is_judged_by_what_its_calls_hold(ready: Shell, before: str) -> None:
    ready.run(TRAIN + "batch_size = 524288; fast = torch.compile(net, backend='aot_eager')\ntrain(fast, 8)")
    shown = ready.run(before or "train(fast, batch_size)")
    found = re.search(r"no batch over (\d+) would have got past this \(524288 was asked\)", shown.text)
    assert found is not None
    assert 0.8 * 524288 < int(found[1]) < 524288
    assert any("gradient accumulation: each of 524288 samples takes" in line for line in advised(shown))
    assert "→ batch_size = 262144" in shown.text


def test_a_batch_of_an_evaluation_without_a_graph_is_estimated(ready: Shell) -> None:
    ready.run(TRAIN + "wide = torch.nn.Sequential(torch.nn.Linear(1024, 8192), torch.nn.Linear(8192, 8)).cuda()")
    ready.run("@torch.no_grad()\ndef evaluate(model, rows, bs):\n    return [model(inputs(bs)) for _ in range(rows)]")
    shown = ready.run("evaluate(wide, 1, 800 << 10)")
    found = int(re.search(r"no batch over (\d+) would have got past this \(819200 was asked\)", shown.text)[1])
    assert f"→ bs = {found}\n" in shown.text
    assert "gradient accumulation" not in shown.text
    ready.run("%gpu_free")
    # a library takes 32 MiB of its own
    assert ready.run(f"evaluate(wide, 1, {found * 99 // 100})").error is None
    ready.run("%gpu_free")
    assert ready.run(f"evaluate(wide, 1, {found * 101 // 100})").error == "OutOfMemoryError"


def promised(outputs: Outputs, start: str) -> float:
    """Return the bytes of one piece of advice in a report."""
    found = re.search(rf"([\d.]+) (.iB)   {start}", outputs.text)
    return float(found[1]) * {"MiB": MIB, "GiB": GIB}[found[2]]


UNSAVED = """
net = Sequential(*[Linear(1024, 1024) for _ in range(4)], Linear(1024, 16384), torch.nn.Softmax(-1)).cuda()
everything = inputs(65536)
def epoch(size, net=net):
    rows = everything
    return net(rows[:size].clone())
"""


def test_results_that_no_step_has_saved_yet_go_with_the_batch_but_a_data_set_does_not(ready: Shell) -> None:
    ready.run(TRAIN + UNSAVED + "epoch(8)")
    before = torch.cuda.memory_allocated()
    ready.run("out = epoch(65536, net[:-1])")
    needed = torch.cuda.memory_allocated() - before
    ready.run("del out")
    empty_gpu()
    spare = (torch.cuda.mem_get_info()[0] - needed) / GIB - 1
    shown = ready.run(f"spare = take({spare}); out = epoch(65536)")
    assert "in net[5]" in headline(shown)
    assert promised(shown, "gradient accumulation: each of 65536 samples") == pytest.approx(needed / 2, rel=0.02)


def test_a_model_and_a_batch_size_that_only_a_function_knows_are_named_as_there(ready: Shell) -> None:
    ready.run(TRAIN + "def main():\n    mlp, bs = net, 524288\n    del globals()['net']\n    train(mlp, bs)")
    shown = ready.run("main()")
    assert "→ bs = 262144" in shown.text
    assert any("checkpoint mlp: 8 x Sequential" in line for line in advised(shown))


def test_what_a_network_calls_its_batch_is_no_variable_to_change(ready: Shell) -> None:
    ready.run(
        TRAIN + "class Net(torch.nn.Module):\n    def forward(self, x):\n        b, n = x.shape\n        return net(x)"
    )
    shown = ready.run("Net()(inputs(524288)).sum().backward()")
    assert "→ for part in batch.split(262144): ..." in shown.text
    assert re.search(
        r"→ for part in batch.split\(\d+\): ...\n +%%gpu_fit and jupyter_gpumem.fit\(\) find the largest", shown.text
    )


def test_a_network_that_is_evaluated_gets_no_advice_for_training(ready: Shell) -> None:
    ready.run(TRAIN + "net.eval()")
    lines = advised(ready.run("outputs = [net(inputs(65536)) for _ in range(100)]"))
    assert lines[0] == "net is in evaluation mode, yet its activations are kept for backward"
    assert not [line for line in lines if "accumulation" in line or "checkpoint" in line]


def test_an_optimizers_first_step_is_told_with_what_all_of_its_state_will_take(ready: Shell) -> None:
    ready.run(
        "import torch\nshape = dict(bias=False, device='cuda')\n"
        "wide = torch.nn.Sequential(*[torch.nn.Linear(16384, 16384, **shape) for _ in range(7)])"
    )
    ready.run("opt = torch.optim.Adam(wide.parameters())\nwide(take(0).float().expand(0, 16384))")
    ready.run("for one in wide.parameters(): one.grad = torch.empty_like(one)")
    shown = ready.run("opt.step()")
    assert shown.error == "OutOfMemoryError"
    assert "10.5 GiB   state of opt (Adam), made in its first step: 14.0 GiB in all" in shown.text
    assert "→ opt = bitsandbytes.optim.Adam8bit(...)" in shown.text
    assert "zero_grad" not in shown.text


def test_a_model_too_large_for_the_device_fits_in_half_precision_as_is_said(ready: Shell) -> None:
    ready.run("import torch\nmeta = dict(bias=False, device='meta')\nwide = torch.nn.Sequential()")
    ready.run("for _ in range(30): wide.append(torch.nn.Linear(16384, 16384, **meta))")
    shown = ready.run("wide.to_empty(device='cuda')")
    assert shown.error == "OutOfMemoryError"
    before = torch.cuda.memory_allocated()
    assert before == 23 * GIB
    assert "11.5 GiB   wide: 23.0 GiB of parameters in float32" in shown.text
    ready.run("wide.to(torch.bfloat16)")
    assert torch.cuda.memory_allocated() == before // 2


def test_in_backward_neither_a_batch_nor_gradients_of_this_very_pass_are_advised(ready: Shell) -> None:
    ready.run(
        "wide = torch.nn.Sequential(*[torch.nn.Linear(16384, 16384, bias=False, device='cuda') for _ in range(15)])\n"
        "batch_size = 128\nopt = torch.optim.SGD(wide.parameters())\n"
        "def train(): wide(torch.ones(batch_size, 16384, device='cuda')).sum().backward()"
    )
    shown = ready.run("train()")
    assert shown.error == "OutOfMemoryError"
    assert "in backward" in headline(shown)
    assert "no batch over" not in shown.text
    assert "made anew by the next backward" not in "\n".join(advised(shown)[:-1])


def test_at_its_own_limit_a_process_is_not_told_to_end_another(ready: Shell) -> None:
    simgpu.configure(other_processes=[(4242, 2 * GIB)])
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        shown = ready.run("take(7)")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        simgpu.configure(other_processes=[])
    assert "→ %gpumem limit off" in shown.text
    assert "!kill" not in shown.text


def test_a_network_that_is_trained_is_not_advised_for_evaluation_only(ready: Shell) -> None:
    ready.run("wide = torch.nn.Linear(16384, 16384, device='cuda'); x = torch.empty(1 << 17, 16384, device='cuda')")
    shown = ready.run("rest = take(8)\nwith torch.no_grad(): wide(x)")
    assert "in wide" in headline(shown)
    assert "only evaluated" not in shown.text


def test_nothing_that_fits_is_said_once(ready: Shell) -> None:
    ready.run("batch_size = 64")
    shown = ready.run("%%gpu_fit batch_size\ntake(99)")
    assert "Ran out of memory" not in shown.text


def test_the_plain_retry_is_told_what_the_first_error_still_holds(ready: Shell) -> None:
    ready.run(TRAIN + "batch_size = 524288")
    first = ready.run("train(net, batch_size)")
    held = torch.cuda.memory_allocated()
    shown = ready.run("train(net, batch_size)")
    lines = shown.text.splitlines()
    found = next(line for line in lines if "of it were still held by the last error (OutOfMemoryError, cell" in line)
    assert found.endswith("%gpu_free before the cell runs again gives that back")
    assert float(found.split()[0]) == pytest.approx((held - 16 * 4 * (1 << 20) - 32 * MIB) / GIB, abs=0.2)
    assert any("the last error (OutOfMemoryError, cell" in line for line in holders(shown))
    # the graph of the first attempt is no advice for this one
    assert not [line for line in advised(shown) if "checkpoint" in line or "no batch over" in line]
    assert [line for line in advised(first) if "checkpoint" in line]
    ready.run("%gpu_free")
    assert torch.cuda.memory_allocated() < GIB


def test_a_failure_in_backward_that_is_run_again_becomes_garbage_and_no_call_under_way(ready: Shell) -> None:
    ready.run(TRAIN + "def step(n): h = net(inputs(n)); loss = h.square().mean(); loss.backward()")
    for _attempt in range(3):
        shown = ready.run("step(340_000)")
        assert "running call or C code" not in shown.text
        report = find_leaks(ready.ip)
        assert {one.kind for one in report.holders} <= {"error", "garbage", "variable"}
    assert any("garbage: an earlier error" in line for line in holders(shown))
    garbage = sum(one.keeps_bytes for one in report.holders if one.kind == "garbage")
    assert garbage > 20 * GIB
    before = torch.cuda.memory_allocated()
    ready.run("import gc; gc.collect()")
    assert before - torch.cuda.memory_allocated() == garbage


def holders(outputs: Outputs) -> list[str]:
    """Return the rows of the largest holders in a report."""
    lines = outputs.text.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("largest holders"))
    return lines[start + 1 : lines.index("", start)]


def test_a_failure_that_was_swallowed_names_the_holders_of_its_moment(ready: Shell) -> None:
    ready.run(TRAIN + "kept = take(3)")
    shown = ready.run("def run():\n    batch = take(2)\n    attempt(400000)\nrun()")
    assert shown.error is None
    assert "largest holders, at that moment" in shown.text.splitlines()
    rows = [line.split(None, 2)[2] for line in holders(shown)]
    assert rows[0].startswith("the forward pass under way, in net[")
    assert "kept" in rows
    assert "net   in use" in rows
    assert any(row.startswith("local batch of run() line 3") for row in rows)
    ready.run("kept = None")
    assert torch.cuda.memory_allocated() < GIB


def test_what_holders_of_the_moment_are_told_sums_to_the_tensors_there(ready: Shell) -> None:
    ready.run(TRAIN)
    ready.run("kept = take(1)")
    shown = ready.run("attempt(524288)")
    told = sum(float(line.split()[0]) * (1 if "GiB" in line else 1 / 1024) for line in holders(shown))
    allocated = next(line for line in shown.text.splitlines() if line.startswith("allocated"))
    assert told == pytest.approx(float(allocated.split()[1]), abs=0.1)


CHECKPOINTED = """from torch.utils.checkpoint import checkpoint
class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        up, down = (lambda: torch.nn.Linear(512, 4096)), (lambda: torch.nn.Linear(4096, 512))
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(up(), torch.nn.GELU(), down()) for _ in range(4)])
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x
stack = Stack().cuda()
def train(model, batch_size):
    x = torch.ones(batch_size, 512, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
train(stack, 8)
"""


def test_a_checkpointed_model_that_fails_in_backward_is_told_the_batch(ready: Shell) -> None:
    ready.run(CHECKPOINTED)
    shown = ready.run("train(stack, 450_000)")
    assert shown.error == "OutOfMemoryError"
    assert "in backward" in headline(shown)
    found = re.search(r"no batch over (\d+) would have got past this \(450000 was asked\)", shown.text)
    assert found is not None
    assert any("gradient accumulation: each of 450000 samples takes" in line for line in advised(shown))
    ready.run("%gpu_free")
    assert ready.run(f"train(stack, {int(found[1]) * 105 // 100})").error == "OutOfMemoryError"
    ready.run("%gpu_free")
    assert ready.run("train(stack, 225_000)").error is None


@pytest.mark.parametrize("layout", ["jagged", "strided"])
def test_tensors_without_sizes_of_numbers_disturb_no_report(ready: Shell, layout: str) -> None:
    ready.run(
        "parts = [torch.ones(n, 64, device='cuda') for n in (3, 5)]\n"
        f"nested = torch.nested.nested_tensor(parts, layout=torch.{layout}, requires_grad=True)\n"
        "kept = (nested * 2).sin()"
    )
    ready.run(CHECKPOINTED)
    shown = ready.run("train(stack, 450_000)")
    assert "in backward" in headline(shown)
    assert advised(shown)


@pytest.mark.parametrize(("kind", "first"), [("LSTM", True), ("LSTM", False), ("GRU", True)])
def test_a_recurrent_layer_that_is_running_is_told_its_samples(ready: Shell, kind: str, first: bool) -> None:
    shape = "batch_size, 50, 512" if first else "50, batch_size, 512"
    ready.run(
        f"rnn = torch.nn.{kind}(512, 512, num_layers=2, batch_first={first}).cuda()\n"
        f"def run(batch_size): return rnn(torch.ones({shape}, device='cuda'))[0].sum()\nkept = run(8); del kept"
    )
    shown = ready.run("run(20_000)")
    assert shown.error == "OutOfMemoryError"
    found = re.search(r"gradient accumulation: each of 20000 samples takes ([\d.]+) MiB", shown.text)
    assert found is not None
    ready.run("%gpu_free")
    before = torch.cuda.memory_allocated()
    ready.run("loss = run(2_000)")
    whole = (torch.cuda.memory_allocated() - before) / 2_000
    # what was there when it failed is a part of what one sample takes in the end
    assert 0.3 * whole < float(found[1]) * MIB < 1.1 * whole
    assert any("the forward pass under way, in rnn" in line for line in holders(shown))


@pytest.mark.parametrize(
    ("magic", "line"),
    [
        ("%%time\n", 3),
        ("%%time\n\n\n", 5),
        ("%%timeit -n1 -r1\n", 3),
        ("%%prun -q\n", 3),
        ("%%capture\n", 3),
        ("%%capture\n\n", 4),
        ("%%capture\n%%time\n", 4),
        ("", 2),
    ],
)
def test_the_line_below_a_cell_magic_is_that_on_the_page(ready: Shell, magic: str, line: int) -> None:
    assert f"Out of memory in cell 4 line {line}, in take()" in headline(ready.run(f"{magic}a = 1\ntake(99)"))


@pytest.mark.parametrize(
    "code",
    [
        "%%capture\ntry: take(99)\nexcept torch.OutOfMemoryError: pass",
        "get_ipython().run_cell('take(99)')\na = 1",
        "%%capture\nget_ipython().run_cell('take(99)')\na = 1",
    ],
)
def test_a_cell_that_goes_on_is_told_so_whatever_ran_in_it(ready: Shell, code: str) -> None:
    assert headline(ready.run(code)).startswith("Ran out of memory once and went on, in cell ")


def test_a_compiled_function_is_not_called_by_a_class_that_nobody_wrote(ready: Shell) -> None:
    ready.run("fast = torch.compile(lambda x: x + x.new_empty(99 << 30), backend='eager')")
    shown = ready.run("fast(torch.ones(1, device='cuda'))")
    assert "in compiled code" in headline(shown)
    assert "GraphModule" not in shown.text
