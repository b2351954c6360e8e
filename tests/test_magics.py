import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError

from jupyter_gpumem.arguments import gpu_fit_parser, gpu_free_parser, gpumem_parser, subparsers_of
from jupyter_gpumem.cellmagic import detail_options, strip_magic_line
from tests.conftest import Kernel, Shell, empty_gpu

MIB = 1 << 20
TAKE = """
import torch
def take(mib, device=0):
    return torch.empty(mib << 20, dtype=torch.uint8, device=f"cuda:{device}")
"""


@pytest.fixture
def loaded(shell: Shell) -> Shell:
    torch.empty(1, device="cuda")
    empty_gpu()
    shell.run(TAKE)
    shell.run("%load_ext jupyter_gpumem")
    return shell


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("%gpumem leeks", "%gpumem: leeks: no such sub-command; did you mean leaks?"),
        ("%gpumem on off", "off: not understood"),
        ("%gpumem xyzzy", "%gpumem: xyzzy: no such sub-command   (%gpumem --help lists what it takes)"),
        ("%gpumem leaks --mim 3MiB", "--mim: not understood; did you mean --min?"),
        ("%gpumem leaks --min potatoes", "'potatoes' is not a size; write for example 24GiB"),
        ("%gpumem leaks -n 0", "'0' is not a whole number above zero"),
        ("%gpumem leaks --device gpu", "'gpu' is not a device index"),
        ("%gpumem mark", "the following arguments are required: NAME"),
        ("%gpumem diff never", "no mark named never   → %gpumem mark never"),
        ("%gpumem limit 120%", "'120%' is not a part of the device"),
        ("%gpumem limit lots", "'lots' is not a size"),
        ("%gpumem 'unclosed", "no closing quotation"),
        ("%gpu_free --al", "--al: not understood; did you mean --all?"),
        ("%%gpumem --lime\npass", "--lime: not understood"),
        ("%%gpumem -o 3x\npass", "'3x' is not a variable name"),
        ("%%gpumem -o get_ipython\npass", "'get_ipython' is not a variable name of yours"),
        ("%%gpumem -o class\npass", "'class' is not a variable name of yours"),
        ("%%gpumem -o _\npass", "'_' is not a variable name of yours"),
        ("%gpumem limit 50", "50 of what? write 50% or 50GiB"),
        ("%gpumem limit 100 GiB", "a limit of 100 GiB caps nothing: the device has 24.0 GiB"),
        ("%gpumem leaks --device 9", "there is no device 9: they are 0, 1, 2"),
        ("%%gpu_fit\npass", "the following arguments are required: NAME"),
        ("%%gpu_fit batch --factor 2\npass", "'2' is not a factor between 0 and 1"),
    ],
)
def test_a_mistake_gets_one_line(loaded: Shell, line: str, answer: str) -> None:
    outputs = loaded.run(line)
    assert outputs.error == "UsageError"
    assert len((outputs.stderr or outputs.stdout).strip().splitlines()) == 1
    assert answer in outputs.stderr + outputs.stdout


@pytest.mark.parametrize("magic", ["%gpumem", "%gpumem leaks", "%gpumem history", "%gpu_free", "%%gpumem", "%%gpu_fit"])
def test_help_is_shown_and_nothing_is_run(loaded: Shell, magic: str) -> None:
    alone = loaded.run(f"{magic} --help")
    outputs = loaded.run(f"{magic} --help" + ("\nran = True" if magic.startswith("%%") else ""))
    assert (alone.error, alone.stdout) == (None, outputs.stdout)
    assert outputs.error is None
    assert outputs.stdout.startswith(f"usage: {magic}")
    assert "ran" not in loaded.ns


@pytest.mark.parametrize("magic", ["%gpumem", "%gpu_free", "%%gpu_fit"])
def test_the_question_mark_shows_examples(loaded: Shell, magic: str) -> None:
    found = loaded.ip.object_inspect(magic)
    assert "Examples::" in found["docstring"]


def test_on_and_off_switch_the_line_but_not_the_history(loaded: Shell) -> None:
    loaded.run("%gpumem off")
    assert loaded.run("x = take(64)").text == ""
    loaded.run("%gpumem on")
    assert "(+32.0 MiB)" in loaded.run("y = take(32)").text
    records = loaded.ip._jupyter_gpumem.magics.recorder.records
    assert [r.devices[0].allocated_delta_bytes // MIB for r in records] == [0, 64, 0, 32]


def test_the_cell_in_detail_names_what_became_of_the_variables(loaded: Shell) -> None:
    loaded.run("a = take(64); b = take(32); same = take(16)")
    outputs = loaded.run("%%gpumem\ndel a\nb = take(8)\nnew = [take(4), take(2)]\ncount = 3")
    rows = [line.split() for line in outputs.text.splitlines()]
    assert rows[0] == ["GPU", "0", "before", "after", "delta", "peak"]
    assert rows[1] == ["allocated", "112", "MiB", "30.0", "MiB", "−82.0", "MiB", "112", "MiB"]
    assert rows[-3:] == [
        ["a", "64.0", "MiB", "deleted"],
        ["b", "8.00", "MiB", "replaced"],
        ["new", "6.00", "MiB", "created"],
    ]


def test_devices_at_rest_share_one_line_of_the_detail(loaded: Shell) -> None:
    loaded.run("a, b, c = take(4), take(4, 1), take(4, 2)")
    lines = loaded.run("%%gpumem\nd = take(4, 1)").text.splitlines()
    assert [line.split("   ")[0] for line in lines if "GPU" in line] == ["GPU 1", "GPU 0, GPU 2: unchanged"]
    quiet = loaded.run("%%gpumem\n1 / 0").text.splitlines()
    assert quiet[0] == "GPU 0 to GPU 2: unchanged"
    assert quiet[1].split("   ")[1:] == ["ZeroDivisionError", "simulated"]
    assert len(quiet) == 2


def test_a_variable_that_no_longer_holds_memory_says_what_it_held(loaded: Shell) -> None:
    loaded.run("a = take(64)")
    rows = [line.split() for line in loaded.run("%%gpumem\na = 5").text.splitlines()]
    assert ["a", "0", "B", "replaced,", "held", "64.0", "MiB"] in rows


def test_the_record_of_a_cell_can_be_kept_and_its_report_silenced(loaded: Shell) -> None:
    outputs = loaded.run("%%gpumem -q -o record\nx = take(64)")
    assert outputs.text == ""
    assert loaded.ns["record"].devices[0].peak_allocated_bytes == 64 * MIB


def test_the_body_of_a_detailed_cell_runs_natively(loaded: Shell) -> None:
    loaded.run("%%gpumem\nimport asyncio\nawait asyncio.sleep(0)\nvalue = 5\nvalue + 1")
    assert loaded.ns["_"] == 6
    assert loaded.ns["Out"][max(loaded.ns["Out"])] == 6
    outputs = loaded.run("%%gpumem\nx = 1\n\nraise ValueError")
    assert outputs.error == "ValueError"
    assert "line 4" in outputs.stdout


@pytest.mark.parametrize(
    "head", ["%%gpumem\n%%time", "%%time\n%%gpumem", "\n\n%%gpumem", "%%gpumem\n%%capture out", "%%gpumem\n\n%%time"]
)
def test_the_detail_works_above_and_below_other_cell_magics(loaded: Shell, head: str) -> None:
    outputs = loaded.run(f"{head}\nx = take(64)")
    assert outputs.error is None
    assert [line.split()[:3] for line in outputs.text.splitlines() if line.startswith("allocated")] == [
        ["allocated", "0", "B"]
    ]
    assert loaded.ns["x"].nbytes == 64 * MIB


def test_a_captured_detail_is_in_what_was_captured(loaded: Shell) -> None:
    assert loaded.run("%%capture out\n%%gpumem\nx = take(64)").text.count("variables") == 0
    assert "variables" in loaded.ns["out"].outputs[0].data["text/plain"]


def test_the_text_of_another_cell_magic_is_left_alone(loaded: Shell) -> None:
    loaded.run("%%writefile nowhere/at/all.txt\n%%gpumem\nx")
    assert detail_options("%%bash\n%%gpumem\nls") is None
    assert detail_options("%%time\n%%gpumem -q\nls").quiet
    assert strip_magic_line(["%%gpumem?"]) == ["%%gpumem?"]
    assert strip_magic_line(["%%gpumemory\n", "x"]) == ["%%gpumemory\n", "x"]
    assert strip_magic_line(["%%gpumem\n", "x"]) == ["\n", "x"]
    assert strip_magic_line(["%%gpumem\n", "%%time\n", "x"]) == ["%%time\n", "x"]
    assert strip_magic_line([]) == []


def test_the_magic_called_by_name_runs_its_cell(loaded: Shell) -> None:
    loaded.ip.run_cell_magic("gpumem", "-q -o record", "x = take(64)")
    assert loaded.ns["record"].devices[0].allocated_delta_bytes == 64 * MIB


def test_history_is_a_table_files_and_a_frame(loaded: Shell, tmp_path: Path) -> None:
    loaded.run("x = take(64)")
    loaded.run("y = take(32, 1)\n1 / 0")
    loaded.run(f"history = %gpumem history --csv {tmp_path / 'h.csv'} --json {tmp_path / 'h.json'}")
    history: Any = loaded.ns["history"]
    frame = history.to_pandas()
    assert frame["allocated_delta_bytes"].iloc[0] == 64 * MIB
    assert frame["status"].iloc[-1] == "ZeroDivisionError"
    assert {str(frame[name].dtype) for name in frame if name.endswith("_bytes")} == {"Int64"}
    saved = json.loads((tmp_path / "h.json").read_text())
    assert saved[0]["devices"][0]["peak_allocated_bytes"] == 64 * MIB
    header, *rows = (tmp_path / "h.csv").read_text().splitlines()
    assert header.split(",")[:3] == ["number", "name", "status"]
    assert len(rows) == len(frame)
    shown = loaded.ip.display_formatter.format(history)[0]
    assert "ZeroDivisionError" in shown["text/plain"]
    assert "<table" in shown["text/html"]


def test_a_semicolon_silences_the_table_of_the_history(loaded: Shell) -> None:
    assert "no cell recorded yet" in loaded.run("%gpumem history").stdout
    assert not loaded.run("%gpumem history;").stdout


def test_a_cell_in_detail_that_unloads_the_extension_says_that_it_has_no_report(loaded: Shell) -> None:
    outputs = loaded.run("%%gpumem\nx = take(64)\n%unload_ext jupyter_gpumem")
    assert "unloaded within this cell" in outputs.text


def test_a_file_that_cannot_be_written_is_one_line(loaded: Shell) -> None:
    outputs = loaded.run("%gpumem history --csv /nowhere/at/all.csv")
    assert outputs.error == "UsageError"
    assert "cannot write /nowhere/at/all.csv: No such file or directory" in outputs.stderr + outputs.stdout


def test_the_plot_is_a_figure_and_a_file(loaded: Shell, tmp_path: Path) -> None:
    assert "nothing to plot" in (lambda o: o.stderr + o.stdout)(loaded.run("%gpumem plot"))
    loaded.run("x = take(64)")
    outputs = loaded.run(f"%gpumem plot --save {tmp_path / 'plot.png'}")
    assert "image/png" in outputs.displays[0]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_device_there_is_nothing_to_limit(kernel: Kernel) -> None:
    kernel.run("import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n%load_ext jupyter_gpumem")
    assert "no CUDA device here, so there is nothing to limit" in kernel.run("%gpumem limit 3GiB").stderr


def test_a_limit_holds_to_the_byte_and_can_be_taken_off(loaded: Shell) -> None:
    loaded.run("x = take(2)")
    assert loaded.run("%gpumem limit 100MiB").text.split()[2:5] == ["limit", "100", "MiB"]
    assert loaded.run("y = take(80)").error is None
    assert loaded.run("z = take(40)").error == "OutOfMemoryError"
    assert "are reserved already: more fails" in loaded.run("%gpumem limit 10MiB").text
    assert "12.0 GiB" in loaded.run("%gpumem limit 50 %").text
    assert "none: the whole device" in loaded.run("%gpumem limit off").text
    assert loaded.run("z = take(40)").error is None


def test_a_warning_is_shown_once_per_crossing(loaded: Shell) -> None:
    loaded.run("x = take(20)")
    loaded.run("%gpumem limit 1000MiB")
    try:
        assert "peak 940 MiB, 94 % of 0.977 GiB" in loaded.run("y = take(920)").text
        assert "%gpumem advise" not in loaded.run("z = take(20)").text
        loaded.run("del y, z")
        loaded.run("w = take(20)")
        assert "%gpumem advise" in loaded.run("y = take(900)").text
    finally:
        loaded.run("%gpumem limit off")


def test_simulating_too_late_is_one_line_that_names_the_cause(loaded: Shell) -> None:
    outputs = loaded.run("%gpumem simulate 1GiB")
    assert outputs.error == "UsageError"
    assert "restart the kernel" in outputs.stderr + outputs.stdout


def test_an_echo_that_keeps_memory_is_said(loaded: Shell) -> None:
    outputs = loaded.run("x = take(64)\nx")
    number = max(loaded.ns["Out"])
    assert f"Out[{number}] now keeps 64.0 MiB, also after a del   → end the line with ; next time" in outputs.text
    assert "keeps" not in loaded.run("x.shape").text
    assert "keeps" not in loaded.run("x;").text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%gpumem le", "leaks"),
        ("%gpumem leaks --m", "--min"),
        ("%gpu_free big", "big_model"),
        ("%gpu_free --a", "--all"),
        ("%%gpu_fit bat", "batch_size"),
        ("%%gpumem -", "-o"),
    ],
)
def test_tab_completes_commands_options_and_names(loaded: Shell, line: str, expected: str) -> None:
    loaded.run("big_model = 1; batch_size = 2")
    _text, matches = loaded.ip.complete(line.split()[-1], line, len(line))
    assert expected in matches


def test_every_parser_explains_every_option() -> None:
    for parser in (gpumem_parser(), gpu_free_parser(), gpu_fit_parser()):
        assert parser.description
        for each in (parser, *subparsers_of(parser).values()):
            assert all(action.help for action in each._actions)
    with pytest.raises(UsageError, match="lists what it takes"):
        gpumem_parser().parse_line("nonsense")


def test_a_refused_name_keeps_nothing_alive(loaded: Shell) -> None:
    loaded.run("def fn(a=take(64)): pass")
    assert loaded.run("%gpu_free fn").error == "UsageError"
    loaded.run("del fn")
    gc.collect()
    assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize("mistake", ["x = = 1", "%nosuchmagic", "%gpu_free typo", "%%nosuch\nx"])
def test_an_error_that_a_mistake_came_after_can_still_be_freed(loaded: Shell, mistake: str) -> None:
    loaded.run("def g():\n    big = take(64)\n    raise RuntimeError\ng()")
    loaded.run(mistake)
    assert torch.cuda.memory_allocated() == 64 * MIB
    loaded.run("%gpu_free")
    assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize(
    "line", ["%gpumem", "%gpumem leaks", "%gpumem advise", "%gpumem mark m", "%gpu_free --dry-run"]
)
def test_looking_frees_no_garbage(loaded: Shell, line: str) -> None:
    loaded.run(line)  # its modules are imported
    loaded.run("class N: pass\na = N(); a.me = a; a.t = take(64); del a")
    loaded.run(line)
    assert torch.cuda.memory_allocated() == 64 * MIB
    gc.collect()
    assert torch.cuda.memory_allocated() == 0


def test_what_the_user_bound_to_an_underscore_is_theirs(loaded: Shell) -> None:
    loaded.run("_, index = take(64), 1")
    text = loaded.run("%gpumem leaks").text
    assert "64.0 MiB   _\n" in text
    assert "→ del _\n" in text
    loaded.run("del _")
    assert torch.cuda.memory_allocated() == 0


def test_the_attributes_of_a_class_are_let_go_one_by_one(loaded: Shell) -> None:
    loaded.run("class Kept:\n    first = take(64)\n    others = [take(32), take(16)]\nother = take(8)")
    text = loaded.run("%gpumem leaks").text
    assert "64.0 MiB   Kept.first\n" in text
    assert "→ del Kept.first\n" in text
    assert "48.0 MiB   Kept.others[0..1]\n" in text
    loaded.run("del Kept.first")
    assert torch.cuda.memory_allocated() == 56 * MIB


@pytest.mark.parametrize("options", ["--help;", "-qh", "-hq", "-h"])
def test_help_in_any_spelling_leaves_the_extension_at_work(loaded: Shell, options: str) -> None:
    outputs = loaded.run(f"%%gpumem {options}\nran = True")
    assert outputs.stdout.startswith("usage: %%gpumem")
    assert "ran" not in loaded.ns
    assert "(+64.0 MiB)" in loaded.run("x = take(64)").text


def test_only_a_cell_that_is_gpu_free_and_nothing_else_goes_without_its_line(loaded: Shell) -> None:
    loaded.run("x = take(64)")
    assert "peak" not in loaded.run("%gpu_free x").text
    assert "(+64.0 MiB)" in loaded.run("%gpu_free\nx = take(64)").text
    assert "(−64.0 MiB)" in loaded.run("%gpu_free -q x").text


def test_looking_at_limits_and_setting_them_leaves_the_current_device(loaded: Shell) -> None:
    loaded.run("x, y = take(2), take(2, 1)")
    for line in ("%gpumem limit", "%gpumem limit 50%", "%gpumem limit off"):
        loaded.run(line)
        assert torch.cuda.current_device() == 0, line
