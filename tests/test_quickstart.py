import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Kernel

NOTEBOOK = Path(__file__).parents[1] / "notebooks/quickstart.ipynb"

READ = """
import json, torch
print(json.dumps([torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated(),
                  torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]]))
"""
RESET = "import torch; torch.cuda.reset_peak_memory_stats() if torch.cuda.is_initialized() else None"
# what `%gpu_free` has to come to, in plain words
FREE = """
import gc, sys, torch
sys.last_type = sys.last_value = sys.last_traceback = sys.last_exc = None
get_ipython().InteractiveTB.tb = get_ipython().InteractiveTB.evalue = None
gc.collect()
torch.cuda.empty_cache()
"""


@dataclass
class Figures:
    """What torch's own counters said around one cell, without the extension; in bytes."""

    allocated: int
    reserved: int
    peak: int
    used: int


@dataclass
class Said:
    """What one cell of the committed notebook says: words with the exact bytes of their tooltips."""

    source: str
    reports: list[list[tuple[str, list[int]]]] = field(default_factory=list)

    def line(self) -> dict[str, list[int]]:
        """Return the figures of the line after the cell, by word."""
        (line,) = (report for report in self.reports if any(text.startswith("peak") for text, _ in report))
        return {re.match("peak|reserved|device|", text)[0] or "allocated": numbers for text, numbers in line if numbers}

    def row(self, head: str) -> list[int]:
        """Return the figures that follow a word in a table."""
        (report,) = (report for report in self.reports if any(text == head for text, _ in report))
        start = [text for text, _ in report].index(head) + 1
        found = []
        for _text, numbers in report[start:]:
            if not numbers:
                break
            found += numbers
        return found


def reports(cell: dict[str, Any]) -> Iterator[list[tuple[str, list[int]]]]:
    for output in cell["outputs"]:
        html = "".join(output.get("data", {}).get("text/html", []))
        if html:
            found = re.findall(r'<(?:td|span)[^>]*?(?: title="([^"]*)")?(?: colspan="\d+")?>(.*?)</(?:td|span)>', html)
            yield [
                (re.sub("<[^>]+>", "", text), [int(n.replace(",", "")) for n in re.findall(r"[\d,]{4,}|\d+", title)])
                for title, text in found
            ]


@pytest.fixture(scope="module")
def said() -> list[Said]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return [Said("".join(c["source"]), list(reports(c))) for c in cells if c["cell_type"] == "code"]


@pytest.fixture(scope="module")
def figures(said: list[Said], kernel_env: dict[str, str]) -> list[Figures]:
    """Run the notebook's cells in a kernel that never loads the extension, and read torch's counters."""
    kernel = Kernel({**kernel_env, "SIMULATE_GPU": "1"})
    read = []
    for index, cell in enumerate(said):
        source = cell.source.removeprefix("%%gpumem\n")
        if source.startswith(("%load_ext", "%gpumem", "# NBVAL")):
            source = "pass"
        if index:
            kernel.run(RESET, silent=True)
        kernel.run(FREE if source.startswith("%gpu_free") else source)
        numbers = json.loads(kernel.run(READ, silent=True).stdout) if index else [0, 0, 0, 0]
        read.append(Figures(*numbers))
    kernel.shutdown()
    return read


def index_of(said: list[Said], start: str) -> int:
    return next(index for index, cell in enumerate(said) if cell.source.startswith(start))


@pytest.mark.parametrize(
    "start",
    [
        "import torch",
        "from pydoc_data",
        "eval_losses = []",
        "eval_losses[:]",
        "@torch.no_grad",
        "settings =",
    ],
)
def test_each_line_equals_the_counters_of_a_run_without_the_extension(
    said: list[Said], figures: list[Figures], start: str
) -> None:
    index = index_of(said, start)
    line, now, before = said[index].line(), figures[index], figures[index - 1]

    assert line["allocated"] == [now.allocated, abs(now.allocated - before.allocated)]
    assert line["reserved"] == [now.reserved, abs(now.reserved - before.reserved)]
    assert line["peak"] == [now.peak]
    assert line["device"][0] == now.used


def test_the_cell_in_detail_equals_the_counters(said: list[Said], figures: list[Figures]) -> None:
    index = index_of(said, "%%gpumem")
    now, before = figures[index], figures[index - 1]

    assert said[index].row("allocated") == [
        before.allocated,
        now.allocated,
        now.allocated - before.allocated,
        now.peak,
    ]
    assert said[index].row("reserved")[:2] == [before.reserved, now.reserved]


def test_the_account_sums_to_the_counters(said: list[Said], figures: list[Figures]) -> None:
    index = index_of(said, "%gpumem")
    now = figures[index - 1]

    assert said[index].row("allocated")[0] == now.allocated
    assert said[index].row("reserved")[0] == now.reserved


def test_the_leak_report_promises_what_its_remedy_gives_back(said: list[Said], figures: list[Figures]) -> None:
    report = said[index_of(said, "%gpumem leaks")].reports[0]
    fixed = index_of(said, "eval_losses[:]")
    promised = next(numbers for (_, numbers), (text, _) in itertools.pairwise(report) if "eval" in text)

    assert promised == [figures[fixed - 1].allocated - figures[fixed].allocated]


def test_what_gpu_free_says_is_left_is_what_is_left(said: list[Said], figures: list[Figures]) -> None:
    index = index_of(said, "%gpu_free")

    assert said[index].row("now")[:2] == [figures[index].allocated, figures[index].reserved]


def test_no_figure_in_the_notebook_belongs_to_a_library(said: list[Said]) -> None:
    assert not [text for cell in said for report in cell.reports for text, _ in report if "workspace" in text]
