"""The panel at work: figures, chart, buttons, also while a cell runs."""

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import nbformat
from playwright.sync_api import Page, expect

from tests.browser.pages import LOAD, SIMULATE, Notebook
from tests.browser.server import Server

Open = Callable[..., Notebook]
START = SIMULATE.format(devices=1) + f"\n{LOAD}"
KEEP = "import time\nx = torch.ones(1 << 28, device='cuda')"
BUSY = """for step in range(30):
    y = torch.ones((step % 4 + 1) << 26, device='cuda'); time.sleep(0.2)
del y"""


_SPANS = """seconds => {
  const times = [...document.querySelectorAll('.gm-time span')].map(span => span.textContent.split(':').map(Number));
  const [start, end] = times.map(([h, m, s]) => h * 3600 + m * 60 + s);
  return Math.abs((end - start + 86400) % 86400 - seconds) <= 1;
}"""


def started(open_notebook: Open, server: Server, *cells: str) -> Notebook:
    notebook = open_notebook(server, START, KEEP, *cells)
    notebook.run(0)
    notebook.expect_panel()  # before the next cell: the chart begins with the first sample
    notebook.run(1)
    expect(notebook.panel.locator(".gm-sizes")).to_contain_text("1.00 GiB")
    return notebook


def chart(notebook: Notebook) -> str:
    return str(notebook.panel.locator(".gm-plot .gm-a").get_attribute("d"))


def test_the_figures_are_those_of_torch(lab: Server, open_notebook: Open) -> None:
    notebook = started(open_notebook, lab, "print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())")
    notebook.run(2)
    allocated, reserved = map(int, re.findall(r"\d{6,}", notebook.output(2).inner_text()))
    sizes = notebook.panel.locator(".gm-sizes div")
    expect(sizes.nth(0)).to_have_attribute("title", f"{allocated:,} bytes")
    expect(sizes.nth(1)).to_have_attribute("title", f"{reserved - allocated:,} bytes")
    expect(notebook.panel.locator(".gm-head")).to_contain_text("simulated")
    expect(notebook.panel.get_by_role("img").first).to_have_attribute(
        "aria-label", re.compile("^allocated 1.00 GiB, cached")
    )
    expect(notebook.panel.locator(".gm-cells [data-cell*='Cell 2: import time · peak 1.00 GiB']")).to_have_count(1)


def test_while_a_cell_runs_the_chart_moves_and_a_click_answers_at_once(lab: Server, open_notebook: Open) -> None:
    notebook = started(open_notebook, lab, "torch.ones(1 << 26, device='cuda')", BUSY)
    notebook.run(2)
    notebook.start(3)
    expect(notebook.panel.locator(".gm-busy")).to_contain_text("running: for step in range(30):")
    seen = set()
    for _ in range(6):
        seen.add(chart(notebook))
        notebook.page.wait_for_timeout(500)
    assert len(seen) >= 4
    notebook.button("Free memory").click()
    expect(notebook.answer).to_contain_text("names, outputs and errors are left alone", timeout=3000)
    expect(notebook.panel.locator(".gm-busy")).to_be_visible()
    assert notebook.page.locator(".jp-InputPrompt", has_text="[*]").count() == 1
    expect(notebook.panel.locator(".gm-busy")).to_be_hidden(timeout=20_000)
    notebook.button("Free memory").click()
    expect(notebook.answer).to_contain_text("outputs (Out[3]")
    assert notebook.evaluate("torch.cuda.memory_allocated() == x.nbytes") == "True"


def test_run_all_shows_the_panel_while_the_first_long_cell_runs(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(lab, "%load_ext jupyter_gpumem", "import time\ntime.sleep(60)")
    notebook.start(0)
    notebook.start(1)
    notebook.expect_panel()
    assert notebook.page.locator(".jp-InputPrompt", has_text="[*]").count() == 1


def test_without_subshells_a_click_is_visibly_queued_and_two_run_once(lab: Server, open_notebook: Open) -> None:
    notebook = started(
        open_notebook, lab, "import gc\ncalls = []\ngc.callbacks.append(lambda phase, info: calls.append(1))", BUSY
    )
    notebook.page.evaluate(
        "() => { window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.commsOverSubshells = 'disabled' }"
    )
    notebook.run(2)
    notebook.start(3)
    expect(notebook.panel.locator(".gm-busy")).to_be_visible()
    free = notebook.button("Free memory")
    free.click()
    expect(free).to_have_class(re.compile("mod-active"))
    assert "queued" in free.evaluate("node => getComputedStyle(node, '::after').content")
    free.click()
    free.click()
    notebook.page.wait_for_timeout(700)
    expect(notebook.answer).to_have_count(0)
    expect(notebook.answer).to_contain_text("given back to the device", timeout=20_000)
    expect(free).not_to_have_class(re.compile("mod-active"))
    assert notebook.evaluate("get_ipython()._jupyter_gpumem.magics.sidebar.panel._actions.answers") == "1"


def test_a_click_in_the_middle_of_an_async_cell_is_safe(lab: Server, open_notebook: Open) -> None:
    body = "import asyncio\nz = torch.ones(1 << 26, device='cuda')\nawait asyncio.sleep(4)\nprint('still', z.nbytes)"
    notebook = started(open_notebook, lab, body)
    notebook.start(2)
    expect(notebook.panel.locator(".gm-busy")).to_be_visible()
    notebook.button("Free memory").click()
    expect(notebook.answer).to_contain_text("left alone", timeout=3000)
    expect(notebook.output(2)).to_contain_text("still 268435456", timeout=20_000)


def test_pause_stops_the_picture_and_the_window_and_device_can_be_chosen(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(
        lab,
        SIMULATE.format(devices=8) + f"\n{LOAD}",
        "x = [torch.ones(1 << (20 + i), device=i) for i in range(8)]",
        "y = x[0] + 1",
    )
    notebook.run(0, 1)
    notebook.expect_panel()
    notebook.panel.get_by_label("Device").select_option("GPU 7")
    expect(notebook.panel.locator(".gm-head b")).to_have_text("GPU 7")
    expect(notebook.panel.locator(".gm-sizes")).to_contain_text("512 MiB")
    expect(notebook.panel.locator(".gm-all i")).to_have_count(8)
    notebook.panel.get_by_label("Time shown").select_option("1 hour")
    notebook.panel.get_by_label("Device").select_option("GPU 0")
    expect(notebook.panel.locator(".gm-sizes div").first).to_have_attribute("title", "4,194,304 bytes")
    notebook.button("Pause").click()
    expect(notebook.button("Resume")).to_be_visible()
    notebook.run(2)
    notebook.page.wait_for_timeout(1200)
    expect(notebook.panel.locator(".gm-sizes div").first).to_have_attribute("title", "4,194,304 bytes")
    notebook.button("Resume").click()
    expect(notebook.panel.locator(".gm-sizes div").first).to_have_attribute("title", "8,388,608 bytes")


def test_running_out_of_memory_is_marked_and_names_are_escaped(lab: Server, open_notebook: Open) -> None:
    evil = "'<img src=x onerror=\"window.hacked=1\">'; big = [torch.ones(1 << 30, device='cuda') for _ in range(40)]"
    notebook = started(open_notebook, lab, evil)
    notebook.start(2)
    expect(notebook.panel.locator(".gm-plot u")).to_have_attribute("title", "Out of memory in cell 3", timeout=20_000)
    expect(notebook.panel.locator(".gm-cells [data-cell*='onerror']")).to_have_count(1)
    expect(notebook.sidebar.locator("img")).to_have_count(0)
    assert notebook.page.evaluate("() => window.hacked") is None


def test_a_forgotten_kernel_is_named_by_its_notebook(lab: Server, open_notebook: Open, page: Page) -> None:
    lab.write("forgotten <b>run & co.ipynb", "1")
    forgotten = Notebook(page, lab).open("forgotten <b>run & co.ipynb")
    pid = forgotten.evaluate("__import__('os').getpid()")
    notebook = started(open_notebook, lab)
    notebook.execute(f"simgpu.configure(other_processes=[({pid}, 9 << 30)])")
    others = notebook.panel.locator(".gm-others > div")
    # NVML is asked every few seconds
    expect(others).to_have_text(f"9.00 GiBkernel of forgotten <b>run & co.ipynb pid {pid}", timeout=15_000)
    expect(others.locator("b")).to_have_attribute("title", "9,663,676,416 bytes")
    expect(others.locator(".gm-quiet")).to_have_attribute("title", re.compile("^python.* -m ipykernel_launcher -f "))
    expect(notebook.panel.locator(".gm-sizes div").nth(3)).to_have_attribute("title", "9,663,676,416 bytes")


# asked anew until it is so: the chart may be drawn again while somebody looks
_TOLD = """words => {
  const told = [...document.querySelectorAll('.gm-cells .gm-c')].map(node => getComputedStyle(node, '::after').content);
  return told.filter(content => content && content !== 'none').join() === JSON.stringify(words);
}"""


def test_the_chart_shows_the_limit_each_cell_and_the_time_chosen(lab: Server, open_notebook: Open) -> None:
    notebook = started(open_notebook, lab, "time.sleep(1.5)", "time.sleep(1.5)  # <i>4</i>", "%gpumem limit 18GiB")
    notebook.run(2, 3, 4)
    expect(notebook.panel.locator(".gm-plot .gm-l")).to_have_count(1)
    expect(notebook.panel.locator(".gm-lines")).to_contain_text("limit 18.0 GiB")
    last = notebook.panel.locator(".gm-cells .gm-c").last
    expect(last).to_have_attribute("data-cell", "Cell 5: %gpumem limit 18GiB")
    fourth = notebook.panel.locator(".gm-cells [data-cell='Cell 4: time.sleep(1.5)  # <i>4</i>']")
    fourth.hover()
    notebook.page.wait_for_function(_TOLD, arg="Cell 4: time.sleep(1.5)  # <i>4</i>")
    for choice, seconds in (("1 minute", 60), ("15 minutes", 900), ("1 hour", 3600)):
        notebook.panel.get_by_label("Time shown").select_option(choice)
        expect(notebook.panel.locator(".gm-time")).to_have_text(re.compile(r"^(\d\d:){2}\d\d(\d\d:){2}\d\d$"))
        notebook.page.wait_for_function(_SPANS, arg=seconds)


def test_holders_are_listed_and_released_from_their_row(lab: Server, open_notebook: Open) -> None:
    notebook = started(
        open_notebook,
        lab,
        "w = torch.ones(1 << 20, device='cuda', requires_grad=True)\nlosses = [(w * w).sum() for _ in range(64)]",
        "w.detach() + 1",
    )
    notebook.run(2, 3)
    before = int(notebook.evaluate("torch.cuda.memory_allocated()"))
    notebook.button("Find leaks").click()
    row = notebook.panel.locator(".gm-row", has_text="Out[4]")
    expect(row).to_contain_text("4.00 MiB", timeout=20_000)
    row.get_by_role("button", name="Release").click()
    expect(notebook.answer).to_contain_text("outputs", timeout=20_000)
    expect(row).to_have_count(0)
    assert int(notebook.evaluate("torch.cuda.memory_allocated()")) == before - (4 << 20)


def test_the_saved_notebook_holds_no_panel_and_its_export_reads_without_javascript(
    lab: Server, open_notebook: Open, page: Page, tmp_path: Any
) -> None:
    notebook = started(open_notebook, lab, "%gpumem", "%gpumem history")
    notebook.run(2, 3)
    notebook.save()
    saved = lab.folder / f"{_name(notebook)}"
    text = saved.read_text()
    assert "widget" not in text
    assert "gm-plot" not in text
    nbformat.validate(nbformat.read(saved, as_version=4))
    exported = tmp_path / "export.html"
    subprocess.run(
        [sys.executable, "-m", "nbconvert", "--to", "html", str(saved), "--output", str(exported)],
        check=True,
        capture_output=True,
    )
    plain = page.context.browser.new_context(java_script_enabled=False).new_page()  # type: ignore[union-attr]  # launched
    plain.goto(exported.as_uri())
    expect(plain.locator("body")).to_contain_text("GPU 0")
    expect(plain.locator(".jp-OutputArea").nth(0)).to_contain_text("1.00 GiB (+1.00 GiB)")
    plain.context.close()


def test_notebook_7_opens_the_panel_beside_the_notebook(notebook7: Server, open_notebook: Open) -> None:
    notebook = started(open_notebook, notebook7, BUSY)
    notebook.start(2)
    expect(notebook.panel.locator(".gm-busy")).to_be_visible()
    notebook.button("Free memory").click()
    expect(notebook.answer).to_contain_text("left alone", timeout=3000)
    # open before a reload it is open after it; closed it stays closed
    notebook.page.reload()
    notebook.expect_panel()
    notebook.ready()
    notebook.command("application:toggle-panel", side="right", id="jupyter-gpumem-sidebar")
    expect(notebook.sidebar).to_be_hidden()
    notebook.page.reload()
    notebook.ready()
    notebook.execute("pass")
    expect(notebook.sidebar).to_be_hidden()
    notebook.command("application:toggle-panel", side="right", id="jupyter-gpumem-sidebar")
    notebook.expect_panel()


def test_the_oldest_supported_jupyterlab_shows_it_too(lab40: Server, open_notebook: Open) -> None:
    notebook = open_notebook(lab40, START, KEEP)
    notebook.tab.click()
    expect(notebook.hint).to_contain_text("%load_ext jupyter_gpumem")
    notebook.run(0, 1)
    notebook.expect_panel()
    expect(notebook.panel.locator(".gm-sizes")).to_contain_text("1.00 GiB")
    notebook.button("Free memory").click()
    expect(notebook.answer).to_contain_text("device", timeout=20_000)
    assert notebook.page.evaluate("() => window.jupyterapp.version").startswith("4.0.")


def _name(notebook: Notebook) -> str:
    return str(notebook.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path"))
