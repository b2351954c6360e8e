"""The numbers that come back from the simulated GPU, and the libraries that give none."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from jupyter_gpumem import simgpu


def noticed(work: Callable[[], object]) -> int:
    before = simgpu.sizes_read()
    work()
    return simgpu.sizes_read() - before


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.where(x > 0),
        lambda x: x.unique(),
        lambda x: x.unique(dim=0),
        lambda x: x.unique_consecutive(return_counts=True),
        lambda x: x.to_sparse(),
        lambda x: torch.empty(int(x.long().sum()), device="cuda"),
        lambda x: torch.empty(x.int().max().item(), device="cuda"),
        lambda x: range(x.argmax()),
        lambda x: x.argmax().item() == 3,
        lambda x: bool(x.max() == 0),
        lambda x: torch.repeat_interleave(x.long()),
        lambda x: max(x.long().tolist()),
        lambda x: x.int().cpu().numpy().max(),
        lambda x: range(x.short().to("cpu").max()),
    ],
)
def test_a_size_that_depends_on_values_is_noticed(work: Callable[[torch.Tensor], object]) -> None:
    # torch 2.15 reads the counts of repeat_interleave twice
    assert noticed(lambda: work(torch.ones(100, device="cuda"))) in (1, 2)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x.double().mean().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool((x > 0).any()),
        lambda x: bool((x > 0).all()),
        lambda x: bool(x.isnan().any()),
        lambda x: x.masked_fill_(x > 0, 1),
        lambda x: x.topk(3),
        lambda x: x.sort(),
        lambda x: x.cumsum(0)[-1].item(),
    ],
)
def test_numbers_that_are_no_sizes_are_not_noticed(work: Callable[[torch.Tensor], object]) -> None:
    assert noticed(lambda: work(torch.ones(100, device="cuda"))) == 0


def test_a_training_step_reads_no_size() -> None:
    net = nn.Linear(64, 10).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cuda")

    def step() -> None:
        with torch.autocast("cuda"):
            loss = nn.functional.cross_entropy(net(torch.randn(8, 64, device="cuda")), torch.zeros(8).long().cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        loss.item()

    step()
    assert noticed(step) == 0


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda x: x == 0, True),
        (lambda x: x != 0, False),
        (lambda x: x >= 0, True),
        (lambda x: x > 0, False),
        (lambda x: x > -1, True),
        (lambda x: x < 0.5, True),
        (lambda x: x.half() == 2, False),
        (lambda x: x.bfloat16() < 1, True),
        (lambda x: x.double() >= 1e-300, False),
        (lambda x: x.long() <= 5, True),
        (lambda x: x.int() < 3, True),
        (lambda x: x == x, True),
        (lambda x: x.isnan(), False),
        (lambda x: x.isfinite(), True),
        (lambda x: ~(x == 0), False),
        (lambda x: (x == 0) & (x >= 0), True),
        (lambda x: (x.expand(9) > 0).all(), True),
        (lambda x: (x.expand(9) > 0).any(), False),
    ],
)
def test_a_comparison_answers_as_zero_does(ask: Callable[[torch.Tensor], torch.Tensor], answer: bool) -> None:
    assert bool(ask(torch.full((1,), 7.0, device="cuda"))) is answer


def test_distributions_accept_their_arguments() -> None:
    normal = torch.distributions.Normal(torch.zeros(3, device="cuda"), torch.ones(3, device="cuda"))
    assert normal.log_prob(normal.rsample()).shape == (3,)
    assert torch.distributions.Normal(normal.loc[:1], normal.scale[:1]).sample().shape == (1,)
    assert torch.distributions.Categorical(logits=torch.randn(4, 5, device="cuda")).sample().shape == (4,)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("work", "library"),
    [
        (lambda x: torch.linalg.svd(x), "cuSOLVER"),
        (lambda x: torch.linalg.cholesky(x), "cuSOLVER"),
        (lambda x: torch.fft.fft(x), "cuFFT"),
        (lambda x: torch.stft(x[0], 8, window=x[0, :8], return_complex=True), "cuFFT"),
        (lambda x: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 16)).cuda() @ x[0], "cuSPARSE"),
    ],
)
def test_a_library_that_is_not_simulated_says_so(work: Callable[[torch.Tensor], object], library: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        work(torch.randn(16, 16, device="cuda"))
    remedy = "do this step on the CPU, with tensor.cpu(), or leave it out"
    expected = rf"{library} is not simulated \(cu\w+ was called\); {re.escape(remedy)}"
    assert re.fullmatch(expected, str(caught.value).splitlines()[0])
    assert torch.ones(1, device="cuda").is_cuda


def test_cudnn_turned_on_says_to_leave_it_off() -> None:
    convolution = nn.Conv2d(1, 1, 3).cuda()
    said = r"cuDNN is not simulated; leave torch\.backends\.cudnn\.enabled = False"
    with torch.backends.cudnn.flags(enabled=True), pytest.raises(RuntimeError, match=said):
        convolution(torch.ones(1, 1, 8, 8, device="cuda"))
    assert convolution(torch.ones(1, 1, 8, 8, device="cuda")).shape == (1, 1, 6, 6)


def test_sharing_a_tensor_with_another_process_is_refused_in_words() -> None:
    from multiprocessing.reduction import ForkingPickler

    torch.multiprocessing.get_context()
    with pytest.raises(RuntimeError, match="operation not supported by the simulated GPU"):
        ForkingPickler.dumps(torch.ones(1, device="cuda"))
