import time
from unittest.mock import patch
from xml.etree import ElementTree

import pytest

from jupyter_gpumem.celltrace import CellTrace, LineLog
from jupyter_gpumem.render.cells import detail_page
from jupyter_gpumem.render.layout import Page, to_html, to_text
from jupyter_gpumem.render.timeline import Curve, timeline_block
from jupyter_gpumem.timeline import COLUMNS, DeviceTimeline, timeline_of
from tests.conftest import Kernel, Shell

MIB = 1 << 20


def timeline(shell: Shell, body: str, device: int = 0) -> DeviceTimeline:
    shell.run(f"%%gpumem --timeline -q -o record\n{body}")
    (found,) = [each for each in shell.ns["record"].timeline if each.device == device]
    change = shell.ns["record"].devices[device]
    assert found.most_requested_bytes + found.rounding_bytes == change.peak_allocated_bytes
    assert found.moments[-1].reserved_bytes == change.after.reserved_bytes
    assert [moment.seconds for moment in found.moments] == sorted(moment.seconds for moment in found.moments)
    assert found.moments[-1].seconds <= found.seconds
    return found


def levels(found: DeviceTimeline) -> list[int]:
    """Return the levels one after another, in MiB."""
    seen = [moment.requested_bytes // MIB for moment in found.moments]
    return [level for index, level in enumerate(seen) if not index or level != seen[index - 1]]


def trace(events: list[tuple[int, str, int]], after: int = 0, reserved: int = 0, **changed: object) -> CellTrace:
    log = LineLog()
    log.add(0, 1)
    log.add(500, 2)
    values: dict[str, object] = {
        "events": [{"time_us": time, "action": action, "size": nbytes} for time, action, nbytes in events],
        "log": log,
        "line_of": lambda event: log.at(event["time_us"]),
        "source": ["first", "  second"],
        "began_us": 0,
        "known_us": 0,
        "ended_us": 1000,
        "pauses_us": (),
        "requested_after_bytes": after,
        "reserved_after_bytes": reserved,
        "peak_allocated_bytes": 100,
        "peak_exact": True,
        "since": None,
        "cut": False,
        **changed,
    }
    return CellTrace(0, "GPU 0", **values)  # type: ignore[arg-type]  # as the class names them


def test_each_rise_and_fall_of_a_cell_is_there(taking: Shell) -> None:
    found = timeline(taking, "a = take(64)\nb = take(32)\ndel a\nc = take(8)\ndel b")
    assert levels(found) == [0, 64, 96, 32, 40, 8]
    assert (found.peak_line, found.peak_source) == (3, "b = take(32)")


def test_it_begins_with_what_was_there_before(taking: Shell) -> None:
    taking.run("old = take(128)")
    assert levels(timeline(taking, "del old\nnew = take(64)")) == [128, 0, 64]


def test_a_peak_inside_backward_has_the_line_that_called_it(taking: Shell) -> None:
    taking.run("w = torch.ones(1 << 20, device='cuda', requires_grad=True)")
    found = timeline(taking, "loss = w.exp().sum()\npass\nloss.backward(torch.ones_like(loss))\npass")
    assert found.peak_source == "loss.backward(torch.ones_like(loss))"


def test_each_device_has_its_own_curve(taking: Shell) -> None:
    taking.run("%%gpumem --timeline -q -o record\na = take(64)\nb = take(32, 1)")
    assert [levels(found) for found in taking.ns["record"].timeline] == [[0, 64], [0, 32]]


def test_a_failing_cell_has_its_curve_too(taking: Shell) -> None:
    text = taking.run("%%gpumem --timeline\na = take(64)\nraise KeyError").text
    assert "GPU 0 over" in text
    assert "in line 2" in text


def test_both_reports_come_from_one_run(taking: Shell) -> None:
    text = taking.run("%%gpumem --lines --timeline\na = take(64)").text
    assert "GPU 0 by line" in text
    assert "GPU 0 over" in text


def test_without_the_option_nothing_is_traced(taking: Shell) -> None:
    taking.run("%%gpumem -q -o record\na = take(64)")
    assert taking.ns["record"].timeline == ()
    assert taking.ns["record"].to_dict()["timeline"] == []


def test_a_cell_that_starts_cuda_begins_at_nothing(kernel: object) -> None:
    run = kernel.run  # type: ignore[attr-defined]
    run("%load_ext jupyter_gpumem\n%gpumem simulate 1GiB")
    run(
        "%%gpumem --timeline -q -o record\nimport torch\na = torch.ones(1 << 20).cuda()\nb = torch.ones(1 << 20).cuda()"
    )
    found = run("[moment.requested_bytes >> 20 for moment in record.timeline[0].moments if moment.seconds == 0]")
    assert found.result == "[0]"
    assert run("record.timeline[0].moments[-1].requested_bytes >> 20").result == "8"


def test_reserved_bytes_follow_the_segments() -> None:
    found = timeline_of(
        trace([(10, "segment_alloc", 50), (20, "alloc", 40), (30, "segment_map", 20), (40, "segment_free", 50)], 40, 20)
    )
    assert [(m.requested_bytes, m.reserved_bytes) for m in found.moments] == [
        (0, 0),
        (0, 50),
        (40, 50),
        (40, 70),
        (40, 20),
    ]


def test_many_moments_are_thinned_to_their_extremes() -> None:
    events = [(time, "alloc" if time % 2 else "free_completed", 10) for time in range(1, 1000)]
    events += [(600, "alloc", 7), (600, "free_completed", 7)]
    found = timeline_of(trace(sorted(events), after=10))
    assert len(found.moments) <= 5 * (COLUMNS + 1)
    assert found.most_requested_bytes == 17
    assert found.moments[-1].requested_bytes == 10
    assert found.rounding_bytes == 83


def test_lines_are_told_by_the_time_they_took() -> None:
    found = timeline_of(trace([(600, "alloc", 10)], after=10))
    assert [(span.line, span.source, span.start_seconds, span.end_seconds) for span in found.lines] == [
        (1, "first", 0.0, 0.0005),
        (2, "second", 0.0005, 0.001),
    ]
    assert (found.peak_line, found.peak_seconds) == (2, 0.0006)


def test_a_trace_that_lost_its_beginning_says_so_and_begins_later() -> None:
    found = timeline_of(trace([(600, "alloc", 10)], after=10, cut=True))
    assert found.moments[0].seconds == 0.0006
    assert any("history was full" in span.text for row in timeline_block(found).rows for span in row)  # type: ignore[union-attr]


def test_an_upper_bound_is_not_called_the_peak_of_the_curve(taking: Shell) -> None:
    taking.run("%config GpuMem.peak = 'observe'")
    taking.run("a = take(100); b = take(100); del b")
    text = taking.run("%%gpumem --timeline --lines\nd = take(30)").text
    assert "peak 130 MiB after" in text
    assert "as requested; in blocks at most 200 MiB" in text
    assert text[text.index("rounding") :].splitlines()[:2] == [
        "rounding to blocks, at most   70.0 MiB",
        "peak, at most                    200 MiB",
    ]


def test_the_curve_in_characters_stands_as_high_as_the_memory() -> None:
    found = timeline_of(trace([(250, "alloc", 80), (500, "free_completed", 60), (750, "free_completed", 20)]))
    rows = [row[2:] for row in Curve(found).to_text().splitlines()]
    assert rows[0] == " " * 18 + "█" * 19
    assert rows[-1] == " " * 18 + "█" * 37


def test_the_curve_in_html_is_well_formed_and_escaped(taking: Shell) -> None:
    taking.run("%%gpumem --timeline -q -o record\na = take(64); '<script>'")
    page = to_html(detail_page(taking.ns["record"], ()))
    assert "<script>" not in page
    drawing = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert [title.text for title in drawing.iter("title")][-1] == "line 2: a = take(64); '<script>'"


def test_what_it_takes_to_show_an_error_is_not_in_the_curve(taking: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(taking.ip, "showtraceback", lambda *_args, **_options: shown.append(time.time_ns() // 1000))
    mine = taking.ip.showtraceback
    ended: list[int] = []
    monkeypatch.setattr("jupyter_gpumem.timeline.timeline_of", lambda trace: ended.append(trace.ended_us))
    taking.run("%%gpumem --timeline -q\na = take(64)\nraise KeyError")
    assert ended[0] <= shown[0]
    assert taking.ip.showtraceback is mine


def test_a_cell_that_goes_on_after_an_inner_one_failed_ends_with_itself(taking: Shell) -> None:
    inner = "%%gpumem --timeline -q -o inner\\na = take(4)\\nraise KeyError"
    found = timeline(taking, f"get_ipython().run_cell('{inner}')\nb = take(8)")
    assert levels(found)[-1] == 12
    assert found.moments[-1].seconds > taking.ns["inner"].timeline[0].seconds
    assert "showtraceback" not in vars(taking.ip)


def test_the_curve_begins_with_the_first_line(taking: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[CellTrace] = []
    monkeypatch.setattr("jupyter_gpumem.timeline.timeline_of", traces.append)
    taking.run("%%gpumem --timeline -q\n'a line'\na = take(64)")
    assert traces[0].began_us == traces[0].log.first_us
    assert traces[0].log.at(traces[0].began_us) == 2


def test_a_peak_that_may_be_lost_is_not_given_a_time_nor_called_rounding() -> None:
    block = timeline_block(timeline_of(trace([(600, "alloc", 10)], after=10, cut=True)))
    text = to_text(Page((block,)))
    assert "highest known 10 B after 0.6 ms, in line 2" in text
    assert "the peak of the whole cell, in blocks: 100 B" in text
    assert "rounding" not in text


def test_what_a_report_on_running_out_of_memory_took_is_not_the_cells_time() -> None:
    events = [(100, "alloc", 10), (300, "alloc", 10), (800, "free_completed", 20)]
    found = timeline_of(trace(events, pauses_us=[(200, 250), (350, 700)]))
    assert [moment.seconds for moment in found.moments] == [0.0, 0.0001, 0.00025, 0.0004]
    assert found.seconds == 0.0006
    # line 2 began at 500, while the second report was under way: 0.0003 s of the cell's own
    assert [(span.line, span.start_seconds, span.end_seconds) for span in found.lines] == [
        (1, 0.0, 0.0003),
        (2, 0.0003, 0.0006),
    ]


def test_a_cell_that_ran_out_of_memory_has_a_curve_of_its_own_time(taking: Shell) -> None:
    shown: list[CellTrace] = []
    with patch("jupyter_gpumem.timeline.timeline_of", shown.append):
        taking.run("%%gpumem --timeline -q\na = take(64)\nb = torch.empty(1 << 50, device='cuda')")
    (found,) = shown
    ((began, ended),) = found.pauses_us
    assert found.began_us <= began <= ended <= found.ended_us


def test_ram_has_no_curve_and_says_so(kernel: Kernel) -> None:
    kernel.run("import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n%load_ext jupyter_gpumem")
    outputs = kernel.run("%%gpumem --timeline\nx = bytearray(50 << 20)")
    assert "no lines and no curve: they are read from the allocator of a GPU, and this is RAM" in outputs.text
    assert "no lines and no curve" not in kernel.run("%%gpumem\nx = bytearray(50 << 20)").text


def test_a_cell_that_starts_cuda_in_its_last_line_is_to_be_run_again(kernel: Kernel) -> None:
    kernel.run("%load_ext jupyter_gpumem\n%gpumem simulate 1GiB\nimport torch")
    cell = "%%gpumem --timeline --lines\nx = torch.ones(1 << 20).cuda()"
    assert "run it again to see them" in kernel.run(cell).text
    text = kernel.run(cell).text
    assert "GPU 0 over" in text
    assert "run it again" not in text


def test_emptying_the_cache_has_a_curve_but_no_lines(taking: Shell) -> None:
    taking.run("a = take(64)\ndel a")
    taking.run("%%gpumem --timeline --lines -q -o record\ntorch.cuda.empty_cache()")
    (found,) = taking.ns["record"].timeline
    assert found.most_reserved_bytes - found.moments[-1].reserved_bytes == 64 * MIB
    assert taking.ns["record"].lines == ()
