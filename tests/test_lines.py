from unittest.mock import patch

import pytest
import torch

from jupyter_gpumem.celltrace import LineLog
from jupyter_gpumem.lines import lines_of
from tests.conftest import Shell

MIB = 1 << 20


def lines(shell: Shell, body: str, device: int = 0) -> dict[int | None, tuple[int, int, int]]:
    shell.run(f"%%gpumem --lines -q -o record\n{body}")
    (found,) = [each for each in shell.ns["record"].lines if each.device == device]
    at_peak = sum(use.at_peak_bytes for use in found.lines)
    assert found.before_bytes + at_peak + found.rounding_bytes == found.peak_allocated_bytes
    assert found.peak_allocated_bytes == shell.ns["record"].devices[device].peak_allocated_bytes
    return {use.line: (use.at_peak_bytes, use.kept_bytes, use.allocated_bytes) for use in found.lines}


def test_each_line_has_its_bytes_at_the_peak_kept_and_in_all(taking: Shell) -> None:
    body = "a = take(64)\nfor step in range(3):\n    b = take(32)\n    c = take(8)\ndel a"
    assert lines(taking, body) == {
        2: (64 * MIB, 0, 64 * MIB),
        4: (64 * MIB, 32 * MIB, 96 * MIB),  # the old one is alive while the new one is made
        5: (8 * MIB, 8 * MIB, 24 * MIB),
    }


def test_what_is_freed_from_before_the_cell_counts_as_from_before(taking: Shell) -> None:
    taking.run("old = take(128)")
    assert lines(taking, "del old\nnew = take(64)") == {3: (0, 64 * MIB, 64 * MIB)}
    (device,) = taking.ns["record"].lines
    assert device.before_bytes == 128 * MIB


def test_memory_of_backward_counts_for_the_line_that_runs_it(taking: Shell) -> None:
    taking.run("w = torch.ones(1 << 20, device='cuda', requires_grad=True)")
    body = "loss = (w * 2).sum()\npass\nloss.backward(torch.ones_like(loss))\npass"
    assert lines(taking, body)[4][1] == 4 * MIB


def test_the_next_item_of_a_loop_counts_for_the_line_of_the_loop(taking: Shell) -> None:
    body = "for item in (take(16) for _ in range(2)):\n    small = take(1)\n    if True:\n        continue"
    found = lines(taking, body)
    assert found[3][2] == 2 * MIB
    assert found[2][2] + found[5][2] == 32 * MIB


@pytest.mark.parametrize("head", ["%%gpumem --lines -o record\n%%time", "%%time\n%%gpumem --lines -o record"])
def test_lines_are_those_of_the_cell_below_another_magic_too(taking: Shell, head: str) -> None:
    outputs = taking.run(f"{head}\nx = take(16)\ny = take(32)")
    assert [(use.line, use.kept_bytes) for use in taking.ns["record"].lines[0].lines] == [(3, 16 * MIB), (4, 32 * MIB)]
    assert "4  y = take(32)" in outputs.text


@pytest.mark.parametrize(
    ("head", "below"),
    [
        ("%%time\n\n%%gpumem", ""),
        ("\n\n%%gpumem", "\n\n"),
        ("%%gpumem", "\n%%time\n\n"),
        ("%%time\n%%gpumem", "\n"),
        ("  %%gpumem", ""),
    ],
)
def test_empty_lines_at_the_head_of_a_cell_shift_nothing(taking: Shell, head: str, below: str) -> None:
    indent = " " * (len(head) - len(head.lstrip(" ")))  # IPython takes that of a whole cell off
    cell = f"{head} --lines -o record\n{below}{indent}x = take(16)\n{indent}y = take(32)"
    assert taking.run(cell).error is None
    assert [use.source for use in taking.ns["record"].lines[0].lines] == ["x = take(16)", "y = take(32)"]
    assert [use.line for use in taking.ns["record"].lines[0].lines] == [
        number for number, line in enumerate(cell.splitlines(), 1) if "take" in line
    ]


def test_the_table_sums_to_the_peak(taking: Shell) -> None:
    text = taking.run(
        "%%gpumem --lines\nx = take(16)\nwith torch.no_grad():\n    y = take(32)\n    raise KeyError"
    ).text
    table = text[text.index("GPU 0 by line") :].splitlines()
    assert [row.split()[:1] for row in table[1:3]] == [["2"], ["4"]]
    assert table[-1].split() == ["peak", "48.0", "MiB"]


def test_a_cell_that_starts_cuda_says_from_which_line_on_it_is_known(kernel: object) -> None:
    run = kernel.run  # type: ignore[attr-defined]
    run("%load_ext jupyter_gpumem\n%gpumem simulate 1GiB")
    text = run("%%gpumem --lines\nimport torch\na = torch.ones(1 << 20).cuda()\nb = torch.ones(1 << 20).cuda()").text
    assert "from before line 4, when CUDA started   4.00 MiB" in text


def test_nothing_stays_behind(taking: Shell) -> None:
    before = set(taking.ns)
    taking.run("%%gpumem --lines -q\nx = take(16)", store_history=False)
    assert set(taking.ns) - before == {"x"}
    assert taking.ip.ast_transformers == []
    assert not torch._C._cuda_isHistoryEnabled()


def test_words_that_the_user_gives_the_trace_are_kept(taking: Shell) -> None:
    words: list[str] = []  # torch 2.6 has no such words
    with patch.multiple(
        torch._C,
        create=True,
        _cuda_setMemoryMetadata=words.append,
        _cuda_getMemoryMetadata=lambda: words[-1] if words else "",
    ):
        lines(taking, "x = take(16)\ntorch._C._cuda_setMemoryMetadata('mine')\ny = take(32)")
    assert words[-1] == "mine"


def test_a_history_that_the_user_records_is_read_and_goes_on(taking: Shell) -> None:
    torch.cuda.memory._record_memory_history(context=None)
    try:
        assert lines(taking, "x = take(16)\ny = take(32)") == {
            2: (16 * MIB, 16 * MIB, 16 * MIB),
            3: (32 * MIB, 32 * MIB, 32 * MIB),
        }
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def test_a_history_of_the_users_that_is_too_short_is_said(taking: Shell) -> None:
    torch.cuda.memory._record_memory_history(context=None, max_entries=5)
    try:
        text = taking.run("%%gpumem --lines\nx = [take(2) for _ in range(10)]\ny = take(4)").text
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert "history was full" in text
    assert "rounding to blocks, or higher before" in text
    assert "history was full" not in taking.run("%%gpumem --lines\nx = [take(2) for _ in range(10)]").text


def test_a_marked_cell_may_run_another_one(taking: Shell) -> None:
    inner = "%%gpumem --lines -o inner\\nv = take(4)\\nw = take(8)"
    outputs = taking.run(f"%%gpumem --lines -o outer\nget_ipython().run_cell('{inner}')\nx = take(16)")
    assert outputs.error is None
    kept = {name: [use.kept_bytes // MIB for use in taking.ns[name].lines[0].lines] for name in ("inner", "outer")}
    assert kept == {"inner": [4, 8], "outer": [12, 16]}


def test_a_cell_that_records_the_history_itself_gets_one_line(taking: Shell) -> None:
    outputs = taking.run("%%gpumem --lines\ntorch.cuda.memory._record_memory_history(enabled=None)\nx = take(16)")
    assert "this cell records it itself" in outputs.text
    assert "by line" not in outputs.text


def test_a_cell_that_unloads_the_extension_runs_to_its_end(taking: Shell) -> None:
    outputs = taking.run("%%gpumem --lines\nx = take(16)\n%unload_ext jupyter_gpumem\nfor i in range(3):\n    y = i")
    assert outputs.error is None
    assert taking.ns["y"] == 2
    assert [name for name in taking.ns if name.startswith("_gpumem")] == []


def test_functions_keep_no_mark_of_the_cell_that_defined_them(taking: Shell) -> None:
    assert lines(taking, "def f():\n    return take(16)\nx = f()\ny = f()") == {
        4: (16 * MIB, 16 * MIB, 16 * MIB),
        5: (16 * MIB, 16 * MIB, 16 * MIB),
    }
    assert taking.run("z = f()").error is None


def test_a_block_that_lives_on_at_an_address_used_before_is_counted_once() -> None:
    def event(action: str, address: int, nbytes: int, line: int) -> dict[str, object]:
        return {"action": action, "addr": address, "size": nbytes, "line": line}

    events = [
        event("alloc", 1, 10, 1),
        event("free_completed", 1, 10, 1),
        event("alloc", 1, 4, 2),
        event("free_completed", 9, 3, 2),
    ]
    uses, before = lines_of(events, lambda e: e["line"], requested_after_bytes=101)
    assert uses == {1: (10, 0, 10), 2: (0, 4, 4)}
    assert before == 100


def test_a_log_that_is_full_does_not_guess() -> None:
    log = LineLog(most=3)
    for time, line in ((10, 1), (20, 2), (30, 3), (40, 4)):
        log.add(time, line)
    assert [log.at(time) for time in (5, 10, 25, 35, 99)] == [None, 1, 2, None, None]
