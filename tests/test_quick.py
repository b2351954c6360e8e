from collections.abc import Iterator

import pytest
import torch

from jupyter_gpumem import simgpu
from jupyter_gpumem.accounts import Account, quick_account
from jupyter_gpumem.quick import QuickAccounts
from tests.alone import run_alone
from tests.conftest import empty_gpu

MIB = 1024**2
GIB = 1024**3


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Cost:
    """A clock that says each look at the blocks took so long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        self.now += self.seconds
        return self.now


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    torch.empty(1, device="cuda:0")
    empty_gpu()
    yield
    simgpu.configure(other_processes=[], nvml_fault=None, context_bytes=512 * MIB)
    empty_gpu()


def sizes(account: Account) -> dict[str, int | None]:
    return {part.key: part.nbytes for part in account.parts}


def test_a_quick_account_sums_and_splits_the_cache() -> None:
    kept = [torch.empty(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    whole = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    del whole
    account = QuickAccounts(Clock(), Cost(0)).read(0)
    parts = sizes(account)
    assert (parts["tensors"], parts["returnable"], parts["fragmented"]) == (4 * MIB, 30 * MIB, 16 * MIB)
    assert (parts["context"], parts["others"]) == (512 * MIB, 0)
    assert sum(value or 0 for value in parts.values()) == account.total_bytes == 24 * GIB
    assert account.quick
    assert len(kept) == 2


def test_while_nothing_moves_the_same_account_comes_back() -> None:
    accounts = QuickAccounts(Clock(), Cost(0))
    first = accounts.read(0)
    assert accounts.read(0) is first
    kept = torch.empty(MIB, device="cuda")
    second = accounts.read(0)
    assert sizes(second)["tensors"] == kept.untyped_storage().nbytes()
    assert accounts.read(0) is second


def test_between_two_questions_to_nvml_the_context_stays_and_the_sums_hold() -> None:
    clock = Clock()
    accounts = QuickAccounts(clock, Cost(0))
    accounts.read(0)
    simgpu.configure(other_processes=[(4242, GIB)])
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    parts = sizes(accounts.read(0))
    assert (parts["context"], parts["others"]) == (512 * MIB, GIB)
    assert accounts.read(0).neighbours == ()
    clock.now = 6.0
    later = accounts.read(0)
    assert [one.used_bytes for one in later.neighbours or ()] == [GIB]
    assert kept.numel() == 64 * MIB


def test_a_costly_look_at_the_blocks_is_not_taken_each_time() -> None:
    clock, cost = Clock(), Cost(0.01)
    accounts = QuickAccounts(clock, cost)
    kept = [torch.empty(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    accounts.read(0)
    assert cost.looks == 2
    whole = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    del whole, kept[0]
    parts = sizes(accounts.read(0))
    assert cost.looks == 2
    # split as it was, exact in its sums
    assert parts["tensors"] == 2 * MIB
    assert parts["fragmented"] == 16 * MIB
    assert parts["returnable"] == torch.cuda.memory_reserved() - 18 * MIB
    clock.now = 3.0
    parts = sizes(accounts.read(0))
    assert (cost.looks, parts["fragmented"], parts["returnable"]) == (4, 18 * MIB, 30 * MIB)


def test_a_device_without_a_context_is_read_from_nvml_and_not_woken() -> None:
    # in a process of its own: here an earlier test may have woken the device
    code = """
        from jupyter_gpumem import simgpu
        simgpu.activate("24GiB", devices=2)
        simgpu.configure(other_processes=[(4242, 1 << 30, 1)])
        import torch
        from jupyter_gpumem.quick import quick_account
        torch.empty(1, device="cuda:0")
        account = quick_account(1)
        print(account.part("others").nbytes, account.process_bytes, torch._C._cuda_hasPrimaryContext(1))
    """
    assert run_alone(code) == f"{GIB} 0 False\n"


@pytest.mark.parametrize("fault", simgpu.NVML_FAULTS)
def test_faults_of_nvml_are_unknown_parts(fault: str) -> None:
    simgpu.configure(nvml_fault=fault)
    account = QuickAccounts(Clock(), Cost(0)).read(0)
    parts = sizes(account)
    assert (parts["context"], parts["others"], parts["undivided"]) == (None, None, 512 * MIB)


def test_the_panel_asks_one_shared_reader() -> None:
    assert quick_account(0) is quick_account(0)
