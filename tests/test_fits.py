import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from jupyter_gpumem.__main__ import main
from jupyter_gpumem.cards import CARDS, card_bytes
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.fits import FitsCell, FitsDevice, FitsFailure, FitsReport, rehearse
from jupyter_gpumem.render.fits import fits_page
from jupyter_gpumem.render.layout import to_text

GIB = 1024**3
MIB = 1024**2


def notebook(folder: Path, *cells: str, name: str = "train.ipynb") -> Path:
    path = folder / name
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells]), path)
    return path


def left_running(marker: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(marker in word for word in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * GIB),
        ("512 MiB", 512 * MIB),
        ("T4", card_bytes("14.56GiB")),
        ("rtx4090", card_bytes("RTX 4090")),
        ("NVIDIA A100-SXM4-80GB", card_bytes("A100-80")),
        ("Tesla V100-SXM2-16GB", card_bytes("V100-16")),
    ],
)
def test_memory_is_a_size_or_a_card(text: str, nbytes: int) -> None:
    assert card_bytes(text) == nbytes


@pytest.mark.parametrize("name", CARDS)
def test_every_card_is_found_by_name_with_less_than_the_name_says(name: str) -> None:
    assert card_bytes(name.upper()) == card_bytes(f"nvidia {name.lower()}")
    digits = name.replace("A100-", "").split("-")[-1]
    if digits.isdecimal():
        assert card_bytes(name) < int(digits) * GIB


def test_an_unknown_card_gets_the_nearest_ones() -> None:
    with pytest.raises(GpuMemError, match="did you mean A100-40 or A100-80"):
        card_bytes("A100")
    with pytest.raises(GpuMemError, match="neither a size nor a known card"):
        card_bytes("toaster")
    with pytest.raises(GpuMemError, match="not a size"):
        card_bytes("24XiB")
    with pytest.raises(GpuMemError, match=r"'3090' is 3,090 bytes; did you mean RTX 3090\?"):
        card_bytes("3090")
    with pytest.raises(GpuMemError, match="'24' is 24 bytes; write for example 24GiB"):
        card_bytes("24")
    with pytest.raises(GpuMemError, match=r"did you mean H100\?"):
        card_bytes("NVIDIA H100 80GB HBM3")
    with pytest.raises(GpuMemError, match=r"'' is neither a size nor a known card   \(cards: "):
        card_bytes("")


def test_a_notebook_that_fits_shows_each_cells_exact_peak(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        "import torch",
        "a = torch.empty(256 << 20, dtype=torch.uint8, device='cuda')",
        "b = a.clone(); del a, b",
    )
    report = rehearse(path, 2 * GIB)
    assert (report.verdict, report.exit_code, report.reason) == ("fits", 0, None)
    assert [cell.peak_bytes for cell in report.cells] == [0, 256 * MIB, 512 * MIB]
    assert [cell.devices[0].allocated_bytes for cell in report.cells[1:]] == [256 * MIB, 0]
    assert "fits: the peak is 512 MiB, in cell 3" in to_text(fits_page(report))


@pytest.mark.parametrize("magic", ["", "%%capture\n"])
def test_the_first_cell_that_runs_out_is_named_and_the_rest_is_not_run(tmp_path: Path, magic: str) -> None:
    path = notebook(
        tmp_path,
        "import torch; kept = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')",
        f"{magic}more = kept.clone()",
        "open('ran', 'w').close()",
    )
    report = rehearse(path, 2 * GIB)
    assert report.exit_code == 3
    assert report.failure is not None
    assert (report.failure.cell, report.failure.asked_bytes) == (2, GIB)
    assert not (tmp_path / "ran").exists()
    assert "does not fit: out of memory in cell 2" in to_text(fits_page(report))


def test_a_size_that_depends_on_values_never_reads_as_plain_fits(tmp_path: Path) -> None:
    path = notebook(tmp_path, "import torch; x = torch.ones(1000, device='cuda')", "y = x[x > 0]")
    report = rehearse(path, 2 * GIB)
    text = to_text(fits_page(report))
    assert report.exit_code == 4
    assert [cell.sizes_read > 0 for cell in report.cells] == [False, True]
    assert "at least" in text
    assert "in cell 2 a size depends on values" in text
    assert "fits" not in text


def test_what_is_decided_by_a_number_of_the_device_is_said_and_what_only_shows_one_is_not(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        "import torch; x = torch.ones(1000, 4, device='cuda'); best = 1.0",
        "rows = int(x.sum().float().item())",
        "if x.sum() > 3:\n    pass",
        "for batch in range(3):\n    seen = x.mean().item()\nprint(f'{seen / 3:.3f}')",
        "if seen / 3 < best:\n    best = seen",
        "rows = x.nonzero().shape[0]",
        "torch.nn.utils.clip_grad_norm_([x], 1.0); x.mean().tolist(), repr(x)",
        "rows = int(x[0, 0])",
        "import json, io\nkept = io.BytesIO()\ntorch.save([seen, x[0].tolist()], kept)\nkept.seek(0)\n"
        "assert json.dumps(torch.load(kept)) == '[0.0, [0.0, 0.0, 0.0, 0.0]]'",
    )
    report = rehearse(path, 2 * GIB)
    assert report.exit_code == 4, report.reason
    assert [cell.number for cell in report.cells if cell.depends_on_values] == [2, 3, 5, 6, 8]
    lines = to_text(fits_page(report)).splitlines()
    assert "in cell 6 a size depends on values: the real figure can be larger" in lines
    assert "in cells 2, 3, 5, 8 a branch or a size may depend on values: the real figure can be larger" in lines


READ_TO_THE_HOST = "import torch, numpy as np; x = torch.ones(1000, device='cuda'); best = 1.0"


@pytest.mark.parametrize(
    "cell",
    [
        "y = torch.ones(int(float(x.sum())) + 1, device='cuda')",
        "if float(x.mean()) < best:\n    best = 0",
        "for step in range(int(sum(float(part) for part in x[:3]))):\n    pass",
        "if x.cpu().mean() > 0.5:\n    pass",
        "rows = int(x.sum().cpu().numpy())",
        "seen = np.asarray(x.detach().cpu())\nif seen.mean() > 0.5:\n    pass",
        "rows = int(np.asarray([float(x[0]), 2.0]).sum() * 3)",
        "seen = x.to('cpu').numpy() * 2\nrows = round(float(np.percentile(seen, 90)))",
        "rows = torch.stack([x.cpu(), x.cpu()]).max(0).values.sum().item()\nwhile rows > 0:\n    pass",
        "if np.isnan(x.cpu().numpy()).any():\n    pass",
    ],
)
def test_what_is_decided_by_values_that_went_to_the_host_is_said(tmp_path: Path, cell: str) -> None:
    report = rehearse(notebook(tmp_path, READ_TO_THE_HOST, cell), 2 * GIB)
    assert report.exit_code == 4, report.reason
    assert report.cells[1].depends_on_values


def test_values_that_went_to_the_host_only_to_be_shown_or_kept_decide_nothing(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        READ_TO_THE_HOST + "; log = []",
        "print(x); print(f'{float(x[0]):.2f}', '%.2f' % x[0].item(), x.cpu(), x.cpu().numpy())",
        "log.append(float(x.mean())); seen = x.cpu().numpy()",
        "print(round(sum(log) / len(log), 3), round(x.mean().item(), 2), np.mean(log), seen.std(), hash(seen[0]))",
        "import copy, io, json, pickle\n"
        "kept = io.BytesIO(); state = {'x': x.cpu()}; torch.save(state, kept); kept.seek(0)\n"
        "again = torch.load(kept)['x'], pickle.loads(pickle.dumps(state))['x'], copy.deepcopy(state)['x']\n"
        "assert [type(one) for one in again] == [torch.Tensor] * 3\n"
        "assert type(pickle.loads(pickle.dumps(seen))) is np.ndarray; json.dumps(log)",
        "weight = torch.nn.Parameter(x.cpu()); step = torch.optim.SGD([weight], lr=0.1)\n"
        "(weight * 2).sum().backward(); step.step(); assert type(x.cpu().cuda()) is torch.Tensor",
        "class Meter:\n    last: float = 0.0\n    def show(self): return isinstance(float(x[0]), float), float('nan')\n"
        "assert Meter().show()[0]",
    )
    report = rehearse(path, 2 * GIB)
    assert report.exit_code == 0, (report.reason, [cell for cell in report.cells if cell.depends_on_values])


def test_80_gib_can_be_filled_on_a_small_host(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        "import torch",
        "a = [torch.zeros(1 << 30, dtype=torch.uint8, device='cuda') for _ in range(70)]",
    )
    report = rehearse(path, card_bytes("80GiB"))
    assert report.exit_code == 0
    assert report.cells[1].peak_bytes == 70 * GIB


def test_several_devices_are_counted_each(tmp_path: Path) -> None:
    path = notebook(tmp_path, "import torch; a = torch.empty(1 << 20, dtype=torch.uint8, device='cuda:1')")
    report = rehearse(path, 2 * GIB, devices=2)
    assert [(device.label, device.peak_bytes) for device in report.cells[0].devices] == [("GPU 1", MIB)]
    assert "--devices gives more" in (rehearse(path, 2 * GIB).reason or "")


def test_a_handled_failure_is_said_and_the_notebook_goes_on(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        "import torch\ntry:\n    torch.empty(9 << 30, device='cuda')\nexcept torch.OutOfMemoryError: pass",
        "x = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')",
    )
    report = rehearse(path, 2 * GIB)
    assert (report.exit_code, report.cells[0].failed_requests > 0, report.cells[1].peak_bytes) == (
        4,
        True,
        MIB,
    )
    assert "ran out of memory and went on" in to_text(fits_page(report))


def test_a_notebook_that_turns_a_simulated_gpu_on_gets_the_card_asked_for(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        "from jupyter_gpumem import simgpu; simgpu.activate('4GiB')",
        "import torch; total = torch.cuda.get_device_properties(0).total_memory; assert total == 2 << 30",
    )
    assert rehearse(path, 2 * GIB).exit_code == 0


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("import no_such_package_here", "cell 1 needs a package that is not installed here"),
        ("input('name?')", "cell 1 waits for input"),
        ("import os; os._exit(3)", "the kernel died in cell 1"),
        ("1 / 0", "cell 1 failed: ZeroDivisionError: division by zero"),
        ("def (", "cell 1 failed: SyntaxError"),
    ],
)
def test_a_notebook_that_cannot_be_run_says_why_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cell: str, reason: str
) -> None:
    path = notebook(tmp_path, cell)
    assert main(["fits", str(path), "--memory", "2GiB"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"jupyter_gpumem fits: {reason}")
    assert shown.err.count("\n") == 1


def test_a_notebook_that_never_ends_is_ended_with_all_it_started(tmp_path: Path) -> None:
    marker = f"gpumem-{os.getpid()}-never"
    spawn = f"[sys.executable, '-c', 'import time; time.sleep(600)  # {marker}']"
    path = notebook(
        tmp_path,
        f"import subprocess, sys; subprocess.Popen({spawn}, start_new_session=True)",
        "while True: pass",
    )
    report = rehearse(path, 2 * GIB, timeout_seconds=4)
    assert (report.exit_code, [cell.number for cell in report.cells]) == (2, [1])
    assert report.reason == "cell 2 was not done after 4 s in all; --timeout sets the limit"
    assert left_running(marker) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file or directory"),
        ("nothing", "it is not JSON"),
        ('{"a": 1}', "is not a notebook, though it is JSON"),
        ("[]", "is not a notebook, though it is JSON"),
        ('{"nbformat": 99, "nbformat_minor": 0, "cells": [], "metadata": {}}', "is not a notebook"),
        ('{"nbformat": 4, "nbformat_minor": 5, "cells": [], "metadata": {}}', "has no cell to run"),
        (
            '{"nbformat": 4, "nbformat_minor": 5, "cells": [], "metadata": {"kernelspec": {"language": "R",'
            ' "name": "ir", "display_name": "R"}}}',
            "is written for R, not for Python",
        ),
        (
            '{"nbformat": 4, "nbformat_minor": 5, "cells": [], "metadata": {"kernelspec": {"name": "ir",'
            ' "display_name": "R"}, "language_info": {"name": "R"}}}',
            "is written for R, not for Python",
        ),
    ],
)
def test_a_file_that_is_no_python_notebook_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, reason: str
) -> None:
    path = tmp_path / "x.ipynb"
    if content is not None:
        path.write_text(content)
    assert main(["fits", str(path), "--memory", "T4"]) == 2
    shown = capsys.readouterr()
    assert reason in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "lots"], "'lots' is neither a size nor a known card"),
        (["--memory", "-1GiB"], "'-1GiB' is not a size"),
        (["--memory", "0"], "'0' is not a size above zero"),
        (["--memory", "1e999GiB"], "'1e999GiB' is not a size"),
        (["--memory", "nan"], "'nan' is neither a size nor a known card"),
        (["--memory"], "expected one argument"),
        (["--memory", "2GiB", "--devices", "0"], "'0' is not a whole number above zero"),
        (["--memory", "2GiB", "--devices", "-1"], "'-1' is not a whole number above zero"),
        (["--memory", "2GiB", "--timeout", "-1"], "'-1' is not a number of seconds above zero"),
        (["--memory", "2GiB", "--timeout", "inf"], "'inf' is not a number of seconds above zero"),
        ([], "the following arguments are required: --memory"),
    ],
)
def test_wrong_words_get_one_line_and_exit_with_2(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["fits", "x.ipynb", *words])
    assert exit_info.value.code == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    "cell",
    [
        "for i in range(50000): print('x' * 1000)",
        "import os\nfor i in range(50000): os.write(2, b'x' * 200)",
        "%%bash\necho done",
        "!true",
    ],
)
def test_what_a_cell_prints_or_calls_is_no_matter(tmp_path: Path, cell: str) -> None:
    path = notebook(tmp_path, cell, "import torch; x = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')")
    report = rehearse(path, 2 * GIB)
    assert (report.exit_code, [one.peak_bytes for one in report.cells]) == (0, [0, MIB])


def test_the_command_prints_json(tmp_path: Path) -> None:
    path = notebook(tmp_path, "import torch; x = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')")
    command = [sys.executable, "-m", "jupyter_gpumem", "fits", str(path), "--memory", "2GiB", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert done.stderr == ""
    assert (answer["verdict"], answer["exit_code"], answer["memory_bytes"]) == ("fits", 0, 2 * GIB)
    assert answer["cells"][0]["devices"][0]["peak_bytes"] == MIB


def test_a_page_names_the_holders_of_what_is_there_when_it_runs_out() -> None:
    device = FitsDevice("GPU 0", 3 * GIB, 2 * GIB, 3 * GIB, 3 * GIB)
    cell = FitsCell(1, "train()", "OutOfMemoryError", 1.5, (device,), 0, 2)
    failure = FitsFailure(1, "cell 1 line 1, in model.layers[3]", GIB, 512 * MIB, ((2 * GIB, "losses[0..99]"),))
    report = FitsReport("a.ipynb", 4 * GIB, 1, "does not fit", (cell,), failure)
    assert to_text(fits_page(report)).splitlines()[:10] == [
        "a.ipynb on a card of 4.00 GiB",
        "",
        "cell       peak   allocated   reserved   first line",
        "   1   3.00 GiB    2.00 GiB   3.00 GiB   train()   OutOfMemoryError",
        "",
        "does not fit: out of memory in cell 1 line 1, in model.layers[3]",
        "asked for 1.00 GiB with 512 MiB free",
        "",
        "  2.00 GiB   losses[0..99]",
        "",
    ]
