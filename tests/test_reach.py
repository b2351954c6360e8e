import asyncio
import functools
import gc
import io
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from jupyter_gpumem.reach import Reach


def tensor() -> torch.Tensor:
    return torch.empty(8, device="cuda")


class Slots:
    __slots__ = ("t",)

    def __init__(self) -> None:
        self.t = tensor()


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value

    def method(self) -> None:
        return None


def closure() -> Callable[[], object]:
    kept = tensor()
    return lambda: kept


def generator() -> Iterator[None]:
    _kept = tensor()
    yield
    yield


def started() -> Iterator[None]:
    running = generator()
    next(running)
    return running


async def coroutine(_kept: torch.Tensor) -> None:
    await asyncio.sleep(0)


def error() -> BaseException:
    def fail() -> None:
        _kept = tensor()
        raise ValueError

    try:
        fail()
    except ValueError as caught:
        return caught
    raise AssertionError


def graph_only() -> object:
    return torch.ones(8, device="cuda", requires_grad=True).exp().sum().cpu()


def node_only() -> object:
    return torch.ones(8, device="cuda", requires_grad=True).exp().grad_fn


def gradient_only() -> object:
    leaf = torch.ones(8, device="cuda", requires_grad=True)
    leaf.sum().backward()
    return types.SimpleNamespace(leaf=leaf)


def scripted() -> object:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(4, 4).cuda()), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def sparse() -> object:
    return torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0]), (4,), device="cuda")


HOLDING = [
    tensor,
    lambda: [1, ({"a": tensor()},)],
    lambda: {tensor(): 1},
    lambda: {tensor()},
    lambda: deque([tensor()]),
    lambda: Plain([tensor()]),
    lambda: Plain(tensor()).method,
    Slots,
    closure,
    lambda: functools.partial(print, tensor()),
    started,
    lambda: coroutine(tensor()),
    error,
    graph_only,
    node_only,
    gradient_only,
    scripted,
    sparse,
    lambda: torch.nn.Linear(2, 2).cuda(),
    lambda: tensor().untyped_storage(),
    lambda: torch.optim.SGD([tensor().requires_grad_()]),
]


@pytest.mark.parametrize("make", HOLDING)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning", "ignore:Sparse")
def test_what_holds_memory_is_found(make: Callable[[], Any]) -> None:
    assert Reach(None).holds_memory(make())


NOT_HOLDING = [
    lambda: None,
    lambda: 7,
    lambda: "text",
    lambda: torch.ones(8),
    lambda: torch.empty(0, device="cuda"),
    lambda: torch.empty(8, device="meta"),
    lambda: torch,
    lambda: Plain,
    lambda: Plain(print),
    lambda: test_what_holds_memory_is_found,
    lambda: torch.ones(2, requires_grad=True).exp(),
]


@pytest.mark.parametrize("make", NOT_HOLDING)
def test_what_holds_none_is_not_accused(make: Callable[[], Any]) -> None:
    assert not Reach(None).holds_memory(make())


def test_one_reach_answers_for_many_values() -> None:
    reach, shared = Reach(None), [1, [2, [3]]]
    first, second = [shared], [shared, tensor()]
    assert not reach.holds_memory(first)
    assert reach.holds_memory(second)
    assert not reach.holds_memory(shared)
    assert reach.holds_memory([second])


def test_a_search_keeps_nothing_alive() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    value = [tensor(), graph_only()]
    reach = Reach(None)
    assert reach.holds_memory(value)
    del value
    gc.collect()
    assert torch.cuda.memory_allocated() == before


class Hostile:
    @property
    def __class__(self) -> type:  # type: ignore[override]  # that is what makes it hostile
        raise SystemError

    def __eq__(self, other: object) -> bool:
        raise SystemError

    __hash__ = None  # type: ignore[assignment]  # likewise

    def __getattr__(self, name: str) -> object:
        raise SystemError


def test_hostile_objects_are_passed_by() -> None:
    hostile = Hostile()
    hostile.kept = tensor()
    assert Reach(None).holds_memory([hostile])


def test_ram_counts_tensors_in_ram() -> None:
    reach = Reach(None, "host")
    assert reach.holds_memory([torch.ones(8)])
    assert not reach.holds_memory([tensor()])
