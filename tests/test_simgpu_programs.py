"""Programs of all kinds run on the simulated GPU and give their memory back."""

import gc
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.conftest import empty_gpu

MIB = 1024**2


@pytest.fixture(scope="module", autouse=True)
def clean_device() -> Iterator[None]:
    empty_gpu()
    yield
    empty_gpu()


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def train(net: nn.Module, *inputs: Tensor) -> None:
    output = net.cuda()(*inputs)
    (output[0] if isinstance(output, tuple) else output).sum().backward()


def attend(backend: SDPBackend, dtype: torch.dtype) -> None:
    query = make(2, 4, 64, 64, dtype=dtype)
    with sdpa_kernel(backend):
        functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()


def between_devices() -> None:
    source = torch.randn(1000, device="cuda:0")
    there = source.to("cuda:1", non_blocking=True)
    source.copy_(there.to("cuda:2"))
    assert torch.cuda.can_device_access_peer(0, 1)
    for device in range(3):
        torch.cuda.synchronize(device)


def in_parallel() -> None:
    nn.DataParallel(nn.Linear(32, 32).cuda(), [0, 1, 2])(make(9, 32)).sum().backward()


def traced() -> None:
    torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).cuda(), backend="aot_eager")(make(2, 8)).sum().backward()
    torch._dynamo.reset()


def offloaded() -> None:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        (make(100) ** 2).sum().backward()


def quantised() -> None:
    left = torch.ones(32, 32, dtype=torch.int8, device="cuda")
    torch._int_mm(left, left)
    one = torch.ones((), device="cuda")
    small = left.to(torch.float8_e4m3fn)
    torch._scaled_mm(small, small.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def profiled() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        torch.ones(10, device="cuda") + 1
    assert profile.key_averages()


def saved_and_loaded() -> None:
    file = io.BytesIO()
    torch.save(nn.Linear(4, 4).cuda().state_dict(), file)
    file.seek(0)
    assert torch.load(file, map_location="cuda:1")["weight"].device.index == 1


PROGRAMS: dict[str, Callable[[], object]] = {
    "convolution 1d": lambda: train(nn.Conv1d(4, 8, 3), make(2, 4, 10)),
    "convolution 2d": lambda: train(nn.Conv2d(4, 8, 3, groups=2), make(2, 4, 10, 10)),
    "convolution 3d": lambda: train(nn.Conv3d(4, 8, 3), make(2, 4, 10, 10, 10)),
    "transposed convolution": lambda: train(nn.ConvTranspose2d(4, 8, 3), make(2, 4, 10, 10)),
    "LSTM": lambda: train(nn.LSTM(8, 16, 2, dropout=0.1, bidirectional=True), make(7, 3, 8)),
    "GRU": lambda: train(nn.GRU(8, 16, 2), make(7, 3, 8)),
    "embedding": lambda: train(nn.Embedding(100, 16), torch.zeros(4, 7).long().cuda()),
    "embedding bag": lambda: train(nn.EmbeddingBag(100, 16), torch.zeros(4, 7).long().cuda()),
    "encoder layer": lambda: train(nn.TransformerEncoderLayer(32, 4, batch_first=True), make(2, 8, 32)),
    "batch norm": lambda: train(nn.BatchNorm2d(4), make(2, 4, 8, 8)),
    "group norm": lambda: train(nn.GroupNorm(2, 4), make(2, 4, 8, 8)),
    "pooling": lambda: train(nn.MaxPool2d(2), make(2, 4, 8, 8)),
    "math attention": lambda: attend(SDPBackend.MATH, torch.float32),
    "flash attention": lambda: attend(SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "efficient attention": lambda: attend(SDPBackend.EFFICIENT_ATTENTION, torch.float16),
    "reentrant checkpoint": lambda: checkpoint(nn.Linear(8, 8).cuda(), make(2, 8), use_reentrant=True).sum().backward(),
    "checkpoint": lambda: checkpoint(nn.Linear(8, 8).cuda(), make(2, 8), use_reentrant=False).sum().backward(),
    "several devices": between_devices,
    "data parallel": in_parallel,
    "compiled without inductor": traced,
    "activations on the host": offloaded,
    "small integers": quantised,
    "profiler": profiled,
    "save and load": saved_and_loaded,
    "topk": lambda: make(100, 1000).topk(5),
    "sort": lambda: (make(100, 1000).sort(), make(200_000).sort(stable=True)),
    "cumulative sums": lambda: (
        make(10, 1000).cumsum(1),
        make(10, 1000).cummax(1),
        make(10, 1000).logcumsumexp(1),
    ),
    "multinomial": lambda: torch.multinomial(make(10, 100).detach().abs(), 5, replacement=True),
    "histogram": lambda: torch.histc(make(1000).detach(), 10, -1, 1),
    "order statistics": lambda: (
        make(100, 100).median(),
        make(100, 100).kthvalue(3),
        make(100).quantile(0.5),
    ),
    "indexing": lambda: make(10, 4).detach().index_add(0, torch.zeros(3).long().cuda(), make(3, 4).detach()),
    "jitted kernels": lambda: (
        torch.special.erfcx(make(3).detach()),
        make(3, 4).prod(1),
        torch.lgamma(make(3)),
    ),
    "random numbers": lambda: (torch.randperm(10_000, device="cuda"), torch.poisson(make(3).detach().abs())),
    "complex numbers": lambda: make(4, 4, dtype=torch.complex64) @ make(4, 4, dtype=torch.complex64),
    "batched solvers": lambda: (
        torch.linalg.lu_factor(make(4, 8, 8).detach()),
        torch.linalg.det(make(4, 8, 8)),
    ),
    "vmap": lambda: torch.func.vmap(torch.func.grad(lambda x: (x**2).sum()))(make(4, 3)),
    "jagged": lambda: torch.nested.nested_tensor([make(3, 4), make(5, 4)], layout=torch.jagged).sum(),
    "CTC": lambda: functional.ctc_loss(
        make(50, 4, 20).log_softmax(2),
        torch.ones(4, 10).long().cuda(),
        torch.full((4,), 50),
        torch.full((4,), 10),
    ).backward(),
    "printing": lambda: repr(make(100, 100)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_gives_its_memory_back(name: str) -> None:
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    PROGRAMS[name]()
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_keeps_the_state_it_keeps_on_a_device(optimizer: type[torch.optim.Optimizer], kind: str) -> None:
    empty_gpu()
    weight = nn.Parameter(torch.ones(MIB, device="cuda"))
    states = {torch.optim.AdamW: 2, torch.optim.SGD: 1}[optimizer]
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    steps = optimizer([weight], lr=0.1, **{kind: True}, **options)
    for _ in range(2):
        weight.pow(2).sum().backward()
        steps.step()
        steps.zero_grad()
    counter = 512 if kind == "fused" and states == 2 else 0
    assert torch.cuda.memory_allocated() == (1 + states) * weight.nbytes + counter


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_halves_what_the_graph_keeps(dtype: torch.dtype) -> None:
    empty_gpu()
    net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
    data = torch.ones(4096, 1024, device="cuda")

    def kept_bytes(enabled: bool) -> int:
        torch._C._cuda_clearCublasWorkspaces()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype, enabled=enabled):
            output = net(data)
        torch._C._cuda_clearCublasWorkspaces()
        kept = torch.cuda.memory_allocated() - before
        assert output.requires_grad
        return kept

    full = kept_bytes(False)
    assert full == 4 * data.nbytes
    # the input and four outputs at half the size, and the three cast weights that gradients pass through
    assert kept_bytes(True) == 5 * data.nbytes // 2 + 3 * 1024 * 1024 * 2


def test_checkpointing_lowers_the_peak() -> None:
    empty_gpu()
    net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8))).cuda()
    data = torch.ones(8192, 512, device="cuda", requires_grad=True)

    def peak_bytes(run: Callable[[nn.Module, Tensor], Tensor]) -> int:
        net.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        value = data
        for layer in net:
            value = run(layer, value)
        value.sum().backward()
        return torch.cuda.max_memory_allocated()

    plain = peak_bytes(lambda layer, value: layer(value))
    saved = peak_bytes(lambda layer, value: checkpoint(layer, value, use_reentrant=False))
    assert plain - saved > 4 * data.nbytes
