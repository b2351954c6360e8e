import subprocess
import sys
from pathlib import Path

import pytest

from tests import gpu_check
from tests.gpu_check import PROGRAM, compare, run_program

GIB = 1024**3


@pytest.fixture(scope="module")
def simulated() -> list[dict[str, int]]:
    return run_program(24 * GIB)


def test_the_program_gives_the_same_figures_on_a_gpu_of_another_size(
    simulated: list[dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(run_program(80 * GIB), simulated) == 0
    assert capsys.readouterr().out.count("agrees") == len(PROGRAM)


def test_a_difference_is_named_and_counted(simulated: list[dict[str, int]], capsys: pytest.CaptureFixture[str]) -> None:
    other = [dict(figures) for figures in simulated]
    other[1]["peak_allocated_bytes"] += 512
    peak = simulated[1]["peak_allocated_bytes"]

    assert compare(other, simulated) == 1
    assert f"peak_allocated_bytes: {peak + 512} on the device, {peak} simulated" in capsys.readouterr().out


def test_a_difference_after_a_library_was_called_is_listed_but_not_counted(
    simulated: list[dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    other = [dict(figures) for figures in simulated]
    other[-1]["allocated_after_bytes"] += 512

    assert compare(other, simulated) == 0
    assert "differs, cuDNN allocates too" in capsys.readouterr().out


def test_every_cell_of_the_program_moves_memory(simulated: list[dict[str, int]]) -> None:
    still = [cell.source for cell, figures in zip(PROGRAM, simulated, strict=True) if not figures]

    assert still == []


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "_device_bytes", lambda: None)

    assert gpu_check.main() == 2
    assert capsys.readouterr().err == "gpu_check: no NVIDIA GPU that torch can use here, nothing was checked\n"


def test_the_question_for_a_device_starts_no_cuda_here() -> None:
    code = "from tests.gpu_check import _device_bytes; import sys; _device_bytes(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "False"
