import html.parser
import re
from collections.abc import Sequence

import pytest

from jupyter_gpumem.render.chart import CellMark, Chart, render_chart, scale_of
from jupyter_gpumem.sampler import Sample

MIB = 1024**2
GIB = 1024**3


def flat(*levels: int, every: float = 1.0) -> list[Sample]:
    return [Sample(index * every, level, level, None) for index, level in enumerate(levels)]


def chart(samples: Sequence[Sample], cells: Sequence[CellMark] = (), **options: object) -> Chart:
    options = {"start": 0.0, "end": 60.0, "start_text": "12:00:00", "end_text": "12:01:00", **options}
    return Chart("GPU 0", samples, cells, **options)  # type: ignore[arg-type]  # passed on


def path(drawn: str, name: str) -> str:
    found = re.search(rf'class=gm-{name} d="([^"]*)"', drawn)
    return found.group(1) if found else ""


def lowest_y(steps: str) -> int:
    """Follow a path of M, h and v and return the highest point it reaches: the smallest y."""
    y = lowest = int(steps[1:].split("h")[0].split("v")[0].split(" ")[1])
    for move in re.findall(r"v(-?\d+)", steps):
        y += int(move)
        lowest = min(lowest, y)
    return lowest


class Titles(html.parser.HTMLParser):
    def __init__(self, drawn: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.feed(drawn)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.titles += [value or "" for name, value in attrs if name in ("title", "data-cell")]


def test_the_top_is_a_round_size_above_everything_drawn() -> None:
    assert scale_of(chart(flat(MIB))) == 3 * MIB // 2
    assert scale_of(chart(flat(5 * GIB))) == 6 * GIB
    assert scale_of(chart(flat(5 * GIB), [CellMark(1, 2, 1, "x", peak_bytes=7 * GIB)])) == 8 * GIB


def test_the_top_is_never_above_the_device() -> None:
    assert scale_of(chart(flat(23 * GIB), total_bytes=24 * GIB)) == 24 * GIB


@pytest.mark.parametrize("used", [MIB, 4 * GIB])
def test_a_limit_is_drawn_however_far_above_what_is_used(used: int) -> None:
    limited = chart(flat(used), limit_bytes=8 * GIB)
    assert scale_of(limited) == 12 * GIB
    assert path(render_chart(limited), "l") == "M0 34h300"
    assert not path(render_chart(chart(flat(used))), "l")


def test_a_spike_of_one_sample_among_thousands_is_drawn_at_its_height() -> None:
    samples = [Sample(i / 100, GIB, GIB, None) for i in range(6000)]
    plain = lowest_y(path(render_chart(chart(samples, total_bytes=8 * GIB)), "r"))
    samples[3001] = Sample(30.01, 8 * GIB, 8 * GIB, None)
    assert plain == 34
    assert lowest_y(path(render_chart(chart(samples, total_bytes=8 * GIB)), "r")) == 1


def test_the_peak_of_a_cell_is_marked_though_no_sample_saw_it() -> None:
    drawn = render_chart(
        chart(flat(*[GIB] * 60), [CellMark(10, 20, 3, "f()", peak_bytes=8 * GIB)], total_bytes=8 * GIB)
    )
    assert path(drawn, "p") == "M50 1h50"


def test_a_cell_too_short_to_see_gets_a_mark_wide_enough() -> None:
    drawn = render_chart(chart(flat(GIB), [CellMark(59.99, 60, 3, "f()", peak_bytes=GIB)]))
    assert path(drawn, "p").endswith("h5")


def test_an_unknown_whole_device_draws_no_line() -> None:
    assert path(render_chart(chart(flat(1, 2, 3))), "u") == ""


def test_a_cell_is_named_by_number_and_first_line_with_its_peak() -> None:
    cells = [CellMark(1, 2, 4, "model = Net()", peak_bytes=512 * MIB)]
    assert Titles(render_chart(chart(flat(1), cells))).titles == ["Cell 4: model = Net() · peak 512 MiB"]


def test_a_running_and_a_failed_cell_say_so() -> None:
    cells = [CellMark(10, 20, 4, "f()", status="KeyError"), CellMark(40, None, None, "g()")]
    assert Titles(render_chart(chart(flat(1), cells))).titles == ["Cell 4: f() — KeyError", "Cell (running): g()"]


def test_cells_too_close_to_tell_apart_share_one_region() -> None:
    cells = [CellMark(10 + i / 100, 10 + i / 100, i, f"line {i}", peak_bytes=i * MIB) for i in range(1, 6)]
    (title,) = Titles(render_chart(chart(flat(1), cells))).titles
    assert title.split("\n") == [f"Cell {i}: line {i} · peak {i}.00 MiB" for i in range(1, 6)]


def test_a_cell_that_is_only_counted_keeps_its_number() -> None:
    cells = [CellMark(10, 10, number, "x", peak_bytes=MIB) for number in range(3, 20)]
    (title,) = Titles(render_chart(chart(flat(1), cells))).titles
    assert title.split("\n")[:2] == ["Cell 3 · peak 1.00 MiB", "Cell 4: x · peak 1.00 MiB"]


def test_of_many_cells_in_one_region_the_last_are_told_and_the_others_counted() -> None:
    cells = [CellMark(10 + i / 100, 10 + i / 100, i, f"line {i}", peak_bytes=i * MIB) for i in range(1, 41)]
    (title,) = Titles(render_chart(chart(flat(1), cells))).titles
    first, *others = title.split("\n")
    assert first == "Cells 1 to 24 · peak 24.0 MiB"
    assert [line.split(":")[0] for line in others] == [f"Cell {i}" for i in range(25, 41)]


def test_a_few_cells_are_told_apart_a_second_from_each_other_and_many_are_gathered() -> None:
    few = [CellMark(10 + i, 11 + i, i, f"line {i}") for i in range(1, 6)]
    assert [title[:6] for title in Titles(render_chart(chart(flat(1), few))).titles] == [
        f"Cell {i}" for i in range(1, 6)
    ]
    many = [CellMark(i, 1 + i, i, f"line {i}") for i in range(1, 51)]
    assert len(Titles(render_chart(chart(flat(1), many))).titles) <= 16


def test_cells_before_the_window_are_not_drawn() -> None:
    cells = [CellMark(1, 2, 1, "early"), CellMark(50, 51, 2, "late")]
    assert Titles(render_chart(chart(flat(1), cells, start=10.0))).titles == ["Cell 2: late"]


def test_running_out_of_memory_is_marked_at_its_moment() -> None:
    cells = [CellMark(10, 30, 7, "big()", status="OutOfMemoryError", out_of_memory=True)]
    drawn = render_chart(chart(flat(1), cells))
    assert '<u style=left:50% title="Out of memory in cell 7">' in drawn


def test_a_swallowed_out_of_memory_is_marked_once() -> None:
    drawn = render_chart(chart(flat(1), kills=(15.0, 15.1)))
    assert drawn.count("<u ") == 1
    assert 'left:25% title="Out of memory"' in drawn


def test_the_sample_that_sees_a_failed_cell_s_trouble_adds_no_second_mark() -> None:
    cells = [CellMark(10, 30, 7, "big()", status="OutOfMemoryError", out_of_memory=True)]
    assert render_chart(chart(flat(1), cells, kills=(30.4,))).count("<u ") == 1


def test_every_name_is_escaped() -> None:
    evil = "<script>alert(1)</script>\" onmouseover='x' <img src=x onerror=y>"
    drawn = render_chart(
        Chart(evil, flat(1), [CellMark(1, 2, 1, evil, status=evil)], 0, 60, start_text=evil, end_text=evil), 10_000
    )
    parsed = Titles(drawn)
    assert set(parsed.tags) == {"div", "svg", "path", "b", "i", "span"}
    assert parsed.titles[0].startswith('Cell 1: <script>alert(1)</script>" onmouseover=')


def test_the_picture_is_described_in_words() -> None:
    drawn = render_chart(chart(flat(GIB, 2 * GIB), [CellMark(1, 2, 1, "x", peak_bytes=3 * GIB)]))
    words = "GPU 0 from 12:00:00 to 12:01:00: 2.00 GiB allocated now, 3.00 GiB at most"
    assert f'role=img aria-label="{words}"' in drawn


@pytest.mark.parametrize("max_bytes", [1500, 1800, 2200])
def test_a_busy_hour_fits_the_bytes_allowed(max_bytes: int) -> None:
    samples = [
        Sample(i / 2, (i * 7919) % 2000 * 8 * MIB, (i * 104729) % 2000 * 8 * MIB, (i * 1299709) % 2500 * 8 * MIB)
        for i in range(7200)
    ]
    cells = [
        CellMark(i * 36, i * 36 + 30, i, f"step({i}) & 'quoted' <text> " * 4, peak_bytes=i * GIB) for i in range(100)
    ]
    drawn = render_chart(chart(samples, cells, end=3600.0, total_bytes=24 * GIB), max_bytes)
    assert len(drawn.encode()) <= max_bytes


def test_no_samples_draw_an_empty_picture() -> None:
    drawn = render_chart(chart([]))
    assert path(drawn, "a") == ""
    assert 'aria-label="GPU 0: no samples yet"' in drawn
