import gc
from collections import Counter
from typing import Any

import pytest
import torch

from jupyter_gpumem.tensors import Census, take_census
from tests.conftest import empty_gpu

FLOATS = 1 << 18
MIB = 1024**2


@pytest.fixture(autouse=True)
def clean_gpu() -> Any:
    empty_gpu()
    yield
    empty_gpu()


def tensor(**options: Any) -> torch.Tensor:
    return torch.empty(FLOATS, device="cuda", **options)


def roles(census: Census) -> dict[str, int]:
    found: Counter[str] = Counter()
    for storage in census.storages:
        found[storage.role] += storage.nbytes
    return dict(found)


def test_a_view_adds_nothing() -> None:
    whole = tensor()
    views = [whole[:10], whole.view(512, 512), whole.detach()]
    (storage,) = take_census().storages
    assert (storage.nbytes, storage.tensors, storage.address) == (MIB, 1 + len(views), whole.data_ptr())


def test_parts_of_a_training_step_are_told_apart() -> None:
    net = torch.nn.Linear(512, 512).cuda()
    net.register_buffer("mean", tensor())
    optimizer = torch.optim.Adam(net.parameters())
    net(tensor().view(512, 512)).sum().backward()
    optimizer.step()
    kept = net(tensor().view(512, 512)).exp()
    model = MIB + 2048
    assert roles(take_census()) == {
        "parameter": model,
        "gradient": model,
        "buffer": MIB,
        "optimizer state": 2 * model,
        "saved for backward": 2 * MIB,
    }
    assert kept.requires_grad


def test_a_gradient_nobody_looked_at_is_found() -> None:
    weight = tensor(requires_grad=True)
    (weight * 2).sum().backward()
    assert roles(take_census()) == {"other": MIB, "gradient": MIB}


def test_sparse_and_nested_tensors_are_counted_by_their_parts() -> None:
    indices = torch.zeros(2, FLOATS, dtype=torch.long, device="cuda")
    sparse = torch.sparse_coo_tensor(indices, tensor(), (4, 4), check_invariants=False)
    del indices
    assert sum(storage.nbytes for storage in take_census().storages) == 5 * MIB
    del sparse
    nested = torch.nested.nested_tensor([torch.ones(512, 256)] * 2, device="cuda")
    assert sum(storage.nbytes for storage in take_census().storages) == MIB
    assert nested.is_nested


def test_a_graph_a_hundred_thousand_nodes_deep_is_walked() -> None:
    value = torch.ones(1, device="cuda", requires_grad=True)
    for _ in range(100_000):
        value = value * 1.5
    census = take_census(budget_seconds=None)
    assert census.complete
    assert torch.cuda.memory_allocated() >= sum(storage.nbytes for storage in census.storages) > 0


def test_cpu_tensors_are_the_census_of_host_mode() -> None:
    value = torch.empty(1_234_567, dtype=torch.uint8)
    assert [storage for storage in take_census(kind="host").storages if storage.nbytes == 1_234_567]
    assert take_census().storages == ()
    assert value.is_cpu


def test_from_the_second_on_a_census_leaves_everything_as_it_was() -> None:
    net = torch.nn.Linear(512, 512).cuda()
    loss = net(tensor().view(512, 512)).exp().sum()
    loss.backward(retain_graph=True)
    first = take_census()
    gc.collect()
    before = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
    second = take_census()
    gc.collect()
    assert sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()) == before
    assert first == second
    del net, loss
    gc.collect()
    assert take_census().storages == ()


def test_no_code_of_a_tensor_subclass_or_of_a_mode_runs() -> None:
    class Strict(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_args: Any, **_kwargs: Any) -> Any:
            raise AssertionError

    strict = tensor().as_subclass(Strict)
    with torch.device("cuda"):
        assert [storage.nbytes for storage in take_census().storages] == [MIB]
    assert type(strict) is Strict


def test_saved_tensors_are_read_without_running_a_hook() -> None:
    runs: list[int] = []

    def unpack(packed: Any) -> Any:
        runs.append(1)
        return packed[0]

    weight = tensor(requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: (saved.detach(), "packed"), unpack):
        result = (weight * tensor()).sum()
    assert sum(storage.nbytes for storage in take_census().storages) == 2 * MIB + 4
    assert runs == []
    assert result.requires_grad


def test_a_lazy_module_and_an_empty_tensor_hold_nothing() -> None:
    lazy = torch.nn.LazyLinear(4).cuda()
    empty = torch.empty(0, device="cuda")
    assert take_census().storages == ()
    assert lazy.weight is not None
    assert empty.numel() == 0
