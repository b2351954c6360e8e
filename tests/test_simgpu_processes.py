"""The simulated GPU in processes of its own: what is refused, other sizes, forks, first use."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MIB = 1024**2
TRY = """
from jupyter_gpumem import simgpu
from jupyter_gpumem.errors import GpuMemError
try:
    simgpu.activate({arguments})
except GpuMemError as error:
    print(error)
maps = open("/proc/self/maps").read()
assert not simgpu.is_active() and "/simgpu-" not in maps, "half active"
"""


def start(code: str, *options: str, env: dict[str, str] | None = None, path: str = str(ROOT)) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *options, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def run(code: str, *options: str, env: dict[str, str] | None = None, path: str = str(ROOT)) -> str:
    return finish(start(code, *options, env=env, path=path))


def fake_torch(folder: Path, version: str) -> str:
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (package / "version.py").write_text(version)
    return f"{folder}{os.pathsep}{ROOT}"


# ---- refusals: one sentence, and nothing is on ----


def test_after_torch_was_imported_it_is_too_late() -> None:
    assert run("import torch" + TRY.format(arguments="")) == (
        "torch is imported already, and a simulated GPU must be there first; "
        "restart the kernel and simulate in the first cell, before import torch"
    )


def test_without_torch_it_says_how_to_get_it() -> None:
    # -S leaves the installed packages out
    assert run(TRY.format(arguments=""), "-S") == (
        "the simulated GPU needs PyTorch, which is not installed; run: pip install torch"
    )


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            "__version__ = '2.14.1+cpu'\ncuda: str | None = None\nhip = None\n",
            "torch 2.14.1+cpu is a CPU-only build",
        ),
        ("__version__ = '2.14.1'\ncuda = None\nhip: str | None = '6.3'\n", "torch 2.14.1 is a ROCm build"),
        ("", "torch  is a CPU-only build"),
    ],
)
def test_a_torch_without_cuda_is_named(tmp_path: Path, version: str, said: str) -> None:
    out = run(TRY.format(arguments=""), path=fake_torch(tmp_path, version))
    assert out.startswith("the simulated GPU needs a CUDA build of PyTorch, and the installed " + said)
    assert out.endswith("restart the kernel")


def test_a_torch_for_an_old_cuda_is_named(tmp_path: Path) -> None:
    path = fake_torch(tmp_path, "__version__ = '2.6.0+cu118'\ncuda = '11.8'\n")
    (tmp_path / "torch/lib").mkdir()
    (tmp_path / "torch/lib/libtorch_cuda.so").touch()
    assert run(TRY.format(arguments=""), path=path) == (
        "the simulated GPU needs a torch for CUDA 12 or newer, and the installed one is for CUDA 11.8; "
        "run: pip install --upgrade torch"
    )


def test_missing_headers_are_named(tmp_path: Path) -> None:
    path = fake_torch(tmp_path, "__version__ = '2.14.1'\ncuda = '13.0'\n")
    (tmp_path / "torch/lib").mkdir()
    (tmp_path / "torch/lib/libtorch_cuda.so").touch()
    assert run(TRY.format(arguments=""), path=path) == (
        "the headers of CUDA 13.0 are not beside torch; run: pip install triton nvidia-cuda-runtime"
    )


def test_without_a_compiler_it_says_how_to_get_one(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert run(TRY.format(arguments=""), env=env) == (
        "the simulated GPU is compiled on first use, and 'cc' was not found; "
        "install a C compiler (apt install gcc, dnf install gcc, conda install gcc) and try again"
    )


def test_a_compiler_that_fails_is_one_sentence_and_leaves_no_file(tmp_path: Path) -> None:
    for tool in ("cc", "nm"):
        (tmp_path / tool).write_text("#!/bin/sh\necho 'x.c:1: error: no such machine' >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert run(TRY.format(arguments=""), env=env) == (
        "the simulated GPU does not compile with this compiler: x.c:1: error: no such machine"
    )
    assert list((tmp_path / "cache/jupyter_gpumem").iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    out = run(TRY.format(arguments=""), env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert out.startswith(f"the simulated GPU cannot be written to {tmp_path}/cache/jupyter_gpumem (")
    assert out.endswith("set XDG_CACHE_HOME to a folder that can be written")


def test_off_linux_it_says_what_there_is_instead() -> None:
    assert run("import sys; sys.platform = 'darwin'" + TRY.format(arguments="")) == (
        "the simulated GPU runs on Linux only; elsewhere the reports show this process's RAM"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("'lots'", "'lots' is not a size; write for example 24GiB or 512MiB"),
        ("'0GiB'", "'0GiB' is not a size above zero; write for example 24GiB or 512MiB"),
        ("-5", "-5 is not a size above zero; write for example 24GiB or 512MiB"),
        ("'1MiB'", "a simulated GPU has from 64.0 MiB to 512 GiB, not 1.00 MiB"),
        ("'2TiB'", "a simulated GPU has from 64.0 MiB to 512 GiB, not 2.00 TiB"),
        ("devices=0", "the number of simulated GPUs is from 1 to 16, not 0"),
        ("devices=17", "the number of simulated GPUs is from 1 to 16, not 17"),
        ("devices=True", "the number of simulated GPUs is from 1 to 16, not True"),
        ("devices='2'", "the number of simulated GPUs is from 1 to 16, not '2'"),
    ],
)
def test_a_bad_size_or_number_is_refused(arguments: str, said: str) -> None:
    assert run(TRY.format(arguments=arguments), "-S") == said


@pytest.mark.parametrize("visible", ["", "1", "0", "GPU-42"])
def test_hidden_devices_are_refused(visible: str) -> None:
    out = run(TRY.format(arguments="devices=2"), "-S", env={"CUDA_VISIBLE_DEVICES": visible})
    assert out.startswith(f"CUDA_VISIBLE_DEVICES={visible!r} would hide simulated GPUs; ")


def test_an_allocator_that_is_not_simulated_is_refused() -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    assert run(TRY.format(arguments=""), "-S", env=env).startswith("PYTORCH_CUDA_ALLOC_CONF asks for cudaMallocAsync")


# ---- first use ----


def test_two_processes_that_build_at_once_both_work(tmp_path: Path) -> None:
    code = """
from jupyter_gpumem import simgpu
simgpu.activate("1GiB")
import torch
print(torch.ones(1).cuda().device)
"""
    processes = [start(code, env={"XDG_CACHE_HOME": str(tmp_path)}) for _ in range(2)]
    assert [finish(process) for process in processes] == ["cuda:0", "cuda:0"]
    (built,) = (tmp_path / "jupyter_gpumem").iterdir()
    assert sorted(path.name for path in built.iterdir()) == [
        "libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1", "libnvrtc.so",
    ]  # fmt: skip
    age = built.stat().st_mtime_ns
    assert run(code, env={"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}) == "cuda:0"
    assert built.stat().st_mtime_ns == age


def test_a_start_that_was_refused_can_be_made_good(tmp_path: Path) -> None:
    limit = "import resource as r; s, h = r.getrlimit(r.RLIMIT_AS); r.setrlimit(r.RLIMIT_AS, (12 << 30, h))"
    again = (
        "r.setrlimit(r.RLIMIT_AS, (s, h)); simgpu.activate('8GiB'); import torch; print(torch.ones(1).cuda().device)"
    )
    out = run(f"{limit}{TRY.format(arguments='')}{again}").splitlines()
    assert out == ["this process may not reserve the address space of the simulated GPU; lift ulimit -v", "cuda:0"]


def test_what_a_killed_build_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    old, young = tmp_path / "jupyter_gpumem/simgpu-0.abc", tmp_path / "jupyter_gpumem/simgpu-0.xyz"
    old.mkdir(parents=True)
    young.mkdir()
    os.utime(old, (0, 0))
    run("from jupyter_gpumem import simgpu; simgpu.activate()", env={"XDG_CACHE_HOME": str(tmp_path)})
    assert not old.exists()
    assert young.exists()


# ---- captures that fail; torch 2.6 captures no more in a process after one ----


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("side.wait_stream(torch.cuda.current_stream()); record(side)", "capturing stream has unjoined work"),
        ("source.sum().item()", "operation not permitted when stream is capturing"),
        ("torch.cuda.synchronize()", "operation not permitted when stream is capturing"),
        ("torch.empty(8 << 30, dtype=torch.uint8, device='cuda')", "Tried to allocate 8.00 GiB"),
    ],
)
def test_what_a_capture_forbids_is_an_error_and_the_device_lives_on(body: str, error: str) -> None:
    code = f"""
from jupyter_gpumem import simgpu
simgpu.activate("4GiB")
import torch
def record(stream):
    with torch.cuda.stream(stream):
        source + 1
source, side, graph = torch.ones(10, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
said = ""
try:
    with torch.cuda.graph(graph):
        {body}
except RuntimeError as failure:
    said = f"{{failure}} {{failure.__context__}}"
assert {error!r} in said, said
torch.cuda.synchronize()
print((torch.ones(1, device="cuda") + 1).device)
"""
    assert run(code) == "cuda:0"


# ---- other sizes, contexts, forks ----


def test_a_device_sleeps_until_it_is_used() -> None:
    code = """
import json
from jupyter_gpumem import simgpu
simgpu.activate("8GiB", devices=3)
import pynvml, torch
pynvml.nvmlInit()
def state():
    used = [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(i)).used >> 20 for i in range(3)]
    return [torch._C._cuda_hasPrimaryContext(i) for i in range(3)], used
seen = [state()]
torch.cuda.init(); torch.cuda.device_count(); torch.cuda.get_device_properties(2); torch.cuda.memory_stats(1)
torch.cuda.memory_allocated(2); torch.cuda.memory_summary(1); torch.cuda.get_device_name(1)
seen.append(state())
kept = torch.ones(1, device="cuda:1")
seen.append(state())
torch.cuda.mem_get_info(2)
seen.append(state())
print(json.dumps(seen))
"""
    assert json.loads(run(code)) == [
        [[False, False, False], [0, 0, 0]],
        [[False, False, False], [0, 0, 0]],
        [[False, True, False], [0, 514, 0]],
        [[False, True, True], [0, 514, 512]],
    ]


def test_expandable_segments_agree_with_the_device_and_come_back() -> None:
    code = """
import random
from jupyter_gpumem import simgpu
simgpu.activate("2GiB", devices=2)
import torch
rng, live, errors = random.Random(1), [], 0
for step in range(1500):
    device = rng.randrange(2)
    if live and rng.random() < 0.5:
        live.pop(rng.randrange(len(live)))
        continue
    try:
        nbytes = rng.choice([100, 5000, 1 << 20, 5 << 20, 100 << 20, 300 << 20])
        live.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError:
        errors, live = errors + 1, live[::2]
    if torch._C._cuda_hasPrimaryContext(device):
        free, total = torch.cuda.mem_get_info(device)
        assert total - free == torch.cuda.memory_reserved(device) + (256 << 20)
kept = []
for stream in [torch.cuda.Stream() for _ in range(20)]:
    with torch.cuda.stream(stream):
        kept.append(torch.ones(3 << 20, device="cuda"))
assert errors and all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
live, kept = [], []
for device in range(2):
    torch.cuda.set_device(device)
    torch.cuda.empty_cache()
print([torch.cuda.memory_reserved(device) for device in range(2)])
"""
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    assert run(code, env=env) == "[0, 0]"


def test_every_run_gives_the_same_numbers_and_addresses() -> None:
    code = """
import hashlib, random
from jupyter_gpumem import simgpu
simgpu.activate("2GiB")
import torch
rng, live, series = random.Random(5), [], []
for step in range(3000):
    if live and rng.random() < 0.45:
        live.pop(rng.randrange(len(live)))
    else:
        try:
            live.append(torch.empty(int(2 ** rng.uniform(5, 28.5)), dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            live = live[::3]
    if rng.random() < 0.002:
        torch.cuda.empty_cache()
    addresses = [tensor.data_ptr() for tensor in live[-1:]]
    series.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), addresses))
print(torch.cuda.memory_stats()["num_ooms"] > 0, hashlib.sha256(repr(series).encode()).hexdigest())
"""
    processes = [start(code, env={"TORCH_CPP_LOG_LEVEL": "ERROR"}) for _ in range(2)]
    first, second = (finish(process) for process in processes)
    assert first == second
    assert first.startswith("True ")


def test_cards_far_larger_than_the_machine_fill_no_memory() -> None:
    code = """
import resource
from jupyter_gpumem import simgpu
simgpu.activate("512GiB", devices=16)
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kept = [torch.zeros(200 << 30, dtype=torch.uint8, device=device) for device in range(16)]
kept += [kept[0].clone(), kept[1].to("cuda:2")]
torch.cuda.synchronize()
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10
print(torch.cuda.memory_allocated(2) >> 30)
"""
    assert run(code) == "400"


def test_workers_and_other_forks_leave_the_parents_device_alone() -> None:
    code = """
import os
from jupyter_gpumem import simgpu
simgpu.activate("4GiB")
import pynvml, torch
from torch.utils.data import DataLoader, TensorDataset
pynvml.nvmlInit()
net = torch.nn.Linear(10, 10).cuda()
loader = DataLoader(TensorDataset(torch.randn(40, 10)), batch_size=10, num_workers=2, pin_memory=True)
for (batch,) in loader:
    assert batch.is_pinned()
    net(batch.cuda(non_blocking=True)).sum().backward()
before = torch.cuda.mem_get_info()
child = os.fork()
if child == 0:
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    assert [process.pid for process in processes] == [os.getppid()]
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        os._exit(0 if "forked subprocess" in str(error) else 2)
    os._exit(3)
assert os.waitpid(child, 0)[1] == 0
print(before == torch.cuda.mem_get_info())
"""
    assert run(code) == "True"


def test_a_program_is_compiled_by_inductor_and_runs(tmp_path: Path) -> None:
    code = """
from jupyter_gpumem import simgpu
simgpu.activate("4GiB")
import torch
net = torch.compile(torch.nn.GELU())
net(torch.randn(8, 32, device="cuda"))
torch.special.erfcx(torch.ones(3, device="cuda"))
print(torch.cuda.max_memory_allocated() > 0)
"""
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTORCH_KERNEL_CACHE_PATH": str(tmp_path / "kernels"),
    }
    assert run(code, env=env) == "True"
    # what was compiled to nothing must not be found by a run on a device
    assert not (tmp_path / "kernels").exists()
