from jupyter_gpumem.freed import GRAPH_KEEPS_WORKSPACES, Change, FreeReport, FreeStep
from jupyter_gpumem.holders import DeviceLeaks, Holder, LeakReport
from jupyter_gpumem.readings import DeviceSnapshot
from jupyter_gpumem.render.free import free_page
from jupyter_gpumem.render.layout import to_html, to_text

MIB = 1024**2
GIB = 1024**3


def snapshot(device: int, allocated: int, reserved: int) -> DeviceSnapshot:
    return DeviceSnapshot(device, allocated, reserved, reserved, 24 * GIB)


def holder(path: str, nbytes: int, remedy: str) -> Holder:
    return Holder(
        path=path,
        kind="variable",
        section="gives back",
        device=0,
        keeps_bytes=nbytes,
        shown_bytes=nbytes,
        shared_bytes=0,
        shared_with=(),
        count=1,
        expression=None,
        cell=None,
        note="",
        remedy=remedy,
        releases=(),
    )


def held(*holders: Holder) -> LeakReport:
    total = sum(one.shown_bytes for one in holders)
    device = DeviceLeaks(0, "GPU 0", total, total, 0, 0, holders, (), ())
    return LeakReport("cuda", (device,), 0.1, True, True, ())


def report() -> FreeReport:
    return FreeReport(
        before=(snapshot(0, 9 * GIB, 10 * GIB), snapshot(1, MIB, 2 * MIB), snapshot(2, 0, 0)),
        steps=(
            FreeStep("names", ("model", "<opt>"), (Change(0, -5 * GIB, 0), Change(1, 0, 0), Change(2, 0, 0))),
            FreeStep("outputs", ("Out[9]", "_9", "_"), (Change(0, 0, 0), Change(1, 0, 0), Change(2, 0, 0))),
            FreeStep("error", ("ValueError in cell 12",), (Change(0, -GIB, 0), Change(1, -MIB, 0), Change(2, 0, 0))),
            FreeStep("debugger", (), (Change(0, 0, 0), Change(1, 0, 0), Change(2, 0, 0))),
            FreeStep("garbage", (), (Change(0, -64 * MIB, 0), Change(1, 0, 0), Change(2, 0, 0))),
            FreeStep("workspaces", note=GRAPH_KEEPS_WORKSPACES),
            FreeStep("cache", (), (Change(0, 0, -7 * GIB), Change(1, 0, -2 * MIB), Change(2, 0, 0))),
        ),
        after=(snapshot(0, 3 * GIB - 64 * MIB, 3 * GIB), snapshot(1, 0, 0), snapshot(2, 0, 0)),
        other_names=(("model", ("net", "best")),),
        kept_names=("forward",),
        held=held(holder("losses[0..99]", 2 * GIB, "losses.clear()"), holder("x", GIB, "%gpu_free x")),
        simulated=True,
    )


def test_each_step_has_its_line_and_its_bytes() -> None:
    assert to_text(free_page(report())).splitlines() == [
        "GPU 0                                 allocated    reserved   simulated",
        "before                                 9.00 GiB    10.0 GiB",
        "  deleted model, <opt>                −5.00 GiB",
        "  outputs: Out[9] and its copies",
        "  last error: ValueError in cell 12   −1.00 GiB",
        "  garbage                             −64.0 MiB",
        f"  library workspaces                                          {GRAPH_KEEPS_WORKSPACES}",
        "  cache                                           −7.00 GiB",
        "now                                    2.94 GiB    3.00 GiB",
        "",
        "GPU 1                                 allocated    reserved   simulated",
        "before                                 1.00 MiB    2.00 MiB",
        "  last error: ValueError in cell 12   −1.00 MiB",
        "  cache                                           −2.00 MiB",
        "now                                         0 B         0 B",
        "",
        "%debug and %tb have nothing left to look at",
        "still held by net and best, which is the same object as model",
        "holds memory too, but is part of the program: forward",
        "",
        "still held on GPU 0: 3.00 GiB",
        "  2.00 GiB   losses[0..99]   → losses.clear()",
        "  1.00 GiB   x               → %gpu_free x",
    ]


def test_names_are_escaped_in_html() -> None:
    page = to_html(free_page(report()))
    assert "<opt>" not in page
    assert "&lt;opt&gt;" in page


def test_each_row_of_the_table_has_as_many_cells() -> None:
    table = free_page(report()).blocks[0]
    assert {len(row) for row in table.rows} == {4}


def test_many_holders_are_cut_short_and_small_ones_not_listed() -> None:
    many = FreeReport((), (), (), held=held(*(holder(f"x{i}", MIB, "del x") for i in range(11))))
    assert to_text(free_page(many)).splitlines()[-1] == "             3 more   → %gpumem leaks"
    few = FreeReport((), (), (), held=held(holder("x", 4096, "del x")))
    assert "still held" not in to_text(free_page(few))


def test_where_no_device_is_in_use_one_sentence_says_so() -> None:
    nothing = FreeReport((), (FreeStep("names", ("a",)), FreeStep("garbage")), ())
    assert to_text(free_page(nothing)).splitlines() == [
        "deleted a",
        "CUDA not started: there is no GPU memory to give back",
    ]


def test_a_dry_run_says_what_would_go() -> None:
    dry = FreeReport(
        (snapshot(0, GIB, GIB),),
        (
            FreeStep("names", ("x",), expected_bytes=4 * MIB),
            FreeStep("outputs", ("Out[3]", "_3", "Out[4]"), expected_bytes=0),
            FreeStep("error", ()),
            FreeStep("garbage", expected_bytes=MIB),
        ),
        (snapshot(0, GIB, GIB),),
        dry_run=True,
    )
    assert to_text(free_page(dry)).splitlines() == [
        "would delete x                                        4.00 MiB",
        "would drop outputs: Out[3], Out[4] and their copies",
        "would collect garbage                                 1.00 MiB",
    ]


def test_ram_has_one_column() -> None:
    ram = FreeReport(
        (DeviceSnapshot(0, 2 * GIB, 2 * GIB, None, None),),
        (FreeStep("garbage", (), (Change(0, -GIB, -GIB),)),),
        (DeviceSnapshot(0, GIB, GIB, None, None),),
        kind="host",
    )
    assert to_text(free_page(ram)).splitlines() == [
        "RAM          resident",
        "before       2.00 GiB",
        "  garbage   −1.00 GiB",
        "now          1.00 GiB",
    ]
