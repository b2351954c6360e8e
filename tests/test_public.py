import importlib
import json
import pkgutil
from collections.abc import Callable

import pytest
import torch

import jupyter_gpumem
from tests.conftest import empty_gpu

MIB = 1 << 20


@pytest.fixture
def kept() -> torch.Tensor:
    empty_gpu()
    return torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")


def test_the_public_names_stay_functions_whatever_modules_are_imported() -> None:
    for module in pkgutil.walk_packages(jupyter_gpumem.__path__, "jupyter_gpumem."):
        if "__main__" not in module.name:
            importlib.import_module(module.name)
    for name in ("account", "advise", "fit", "free", "leaks", "snapshot", "track"):
        assert callable(getattr(jupyter_gpumem, name)), name


def test_all_names_what_is_public() -> None:
    assert sorted(jupyter_gpumem.__all__) == jupyter_gpumem.__all__
    assert all(hasattr(jupyter_gpumem, name) for name in jupyter_gpumem.__all__)


def test_a_program_without_ipython_gets_values(kept: torch.Tensor) -> None:
    first = jupyter_gpumem.snapshot()[0]
    assert (first.device, first.allocated_bytes) == (0, kept.nbytes)
    (account,) = jupyter_gpumem.account(device=0)
    assert account.allocated_bytes == kept.nbytes
    report = jupyter_gpumem.leaks(device=0)
    assert json.loads(json.dumps(report.to_dict()))
    assert isinstance(jupyter_gpumem.advise(), tuple)
    assert jupyter_gpumem.free(dry_run=True).dry_run


def test_free_gives_back_what_nothing_holds(kept: torch.Tensor) -> None:
    cycle: list[object] = [torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")]
    cycle.append(cycle)
    del cycle
    jupyter_gpumem.free()
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == kept.nbytes


def test_fit_finds_what_fits() -> None:
    empty_gpu()
    result = jupyter_gpumem.fit(
        lambda batch_size: torch.empty(batch_size << 30, dtype=torch.uint8, device="cuda"), batch_size=64
    )
    assert (result.value, result.result.nbytes, result.peak_bytes) == (16, 16 << 30, 16 << 30)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jupyter_gpumem.account(9), "there is no device 9: they are 0, 1, 2"),
        (lambda: jupyter_gpumem.leaks(device=9), "there is no device 9: they are 0, 1, 2"),
        (lambda: jupyter_gpumem.free("mod"), "only a notebook's variables go by name; in a program: del mod"),
    ],
)
def test_what_is_not_there_is_one_clear_error(
    kept: torch.Tensor, call: Callable[[], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jupyter_gpumem, "running_shell", lambda: None)
    with pytest.raises(jupyter_gpumem.GpuMemError, match=words):
        call()
