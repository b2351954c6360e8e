"""One tab, one panel, whatever happens around it."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Error, Page, expect

from tests.browser.pages import LOAD, Notebook
from tests.browser.server import Server

Open = Callable[..., Notebook]
SIDEBAR = "get_ipython()._jupyter_gpumem.magics.sidebar"
VIEWERS = f"len({SIDEBAR}._viewers)"


def test_a_kernel_without_the_extension_gets_a_hint_whose_button_loads_it(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(lab, "1 + 1")
    notebook.tab.click()
    expect(notebook.hint).to_contain_text("%load_ext jupyter_gpumem")
    notebook.hint.get_by_role("button", name="Load it in this notebook").click()
    notebook.expect_panel()
    expect(notebook.hint).to_be_hidden()
    notebook.run(0)
    expect(notebook.output(0)).to_have_text(re.compile(r"^\s*(\[1\]:)?\s*2\s*$"))


def test_the_hints_button_says_that_it_waits_for_the_running_cell(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(lab, "input()")
    notebook.start(0)
    notebook.page.locator(".jp-Stdin-input").wait_for()
    notebook.tab.click()
    notebook.hint.get_by_role("button", name="Load it in this notebook").click()
    expect(notebook.hint).to_contain_text("A cell is running: when it has ended, this runs")
    expect(notebook.hint.get_by_role("button")).to_be_disabled()
    notebook.page.locator(".jp-Stdin-input").press("Enter")
    notebook.expect_panel()


def test_a_load_that_fails_says_why(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(lab, "import sys; sys.modules['jupyter_gpumem.extension'] = None")
    notebook.run(0)
    notebook.tab.click()
    notebook.hint.get_by_role("button").click()
    expect(notebook.hint).to_contain_text("ModuleNotFoundError")
    expect(notebook.hint.get_by_role("button")).to_be_enabled()


def test_it_opens_by_itself_once_and_one_tab_survives_everything(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(lab, LOAD, "%reload_ext jupyter_gpumem", "import os; os._exit(1)")
    notebook.run(0)
    notebook.expect_panel()
    notebook.run(0)
    notebook.run(1)
    notebook.expect_panel()
    # the layout is saved after a moment of rest
    notebook.page.wait_for_timeout(1500)
    notebook.open(_name(notebook), reset=False)
    notebook.expect_panel()
    _restart(notebook)
    expect(notebook.hint).to_contain_text("%load_ext")
    notebook.run(0)
    notebook.expect_panel()
    # a crash: the server restarts the kernel
    notebook.start(2)
    expect(notebook.hint).to_contain_text("%load_ext", timeout=30_000)
    notebook.page.locator(".jp-Dialog button").click()
    notebook.ready()
    notebook.run(0)
    notebook.expect_panel()
    expect(notebook.tab).to_have_count(1)


def test_once_closed_by_the_user_a_restart_does_not_open_it_again(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(lab, LOAD)
    notebook.run(0)
    notebook.expect_panel()
    notebook.tab.click()
    expect(notebook.sidebar).to_be_hidden()
    _restart(notebook)
    notebook.run(0)
    expect(notebook.sidebar).to_be_hidden()


def test_with_open_sidebar_off_it_waits_to_be_opened(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(
        lab, "get_ipython().config.GpuMem.open_sidebar = False", LOAD, "%gpumem panel", "import time; time.sleep(6)"
    )
    notebook.run(0, 1)
    expect(notebook.tab).to_have_count(1)
    expect(notebook.sidebar).to_be_hidden()
    assert notebook.evaluate(f"{SIDEBAR}.panel") == "None"
    # opened while a cell runs, it is there before the cell ends
    notebook.start(3)
    notebook.tab.click()
    expect(notebook.panel.locator(".gm-busy")).to_contain_text("time.sleep(6)", timeout=5_000)
    expect(notebook.panel.locator(".gm-busy")).to_be_hidden(timeout=15_000)
    notebook.tab.click()
    expect(notebook.sidebar).to_be_hidden()
    notebook.run(2)
    notebook.expect_panel()
    expect(notebook.output(2)).to_contain_text("right sidebar")
    expect(notebook.page.locator(".jp-Notebook .gpumem-panel")).to_have_count(0)


def test_loaded_with_the_kernel_it_opens_by_itself_too(
    start_server: Callable[..., Server], open_notebook: Open, page: Page
) -> None:
    server = start_server()
    profile = server.root / "ipython" / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    (profile / "ipython_config.py").write_text("c.InteractiveShellApp.extensions = ['jupyter_gpumem']")
    notebook = open_notebook(server, "1 + 1")
    notebook.expect_panel()
    # once: who closed it finds it closed after a reload
    notebook.tab.click()
    expect(notebook.sidebar).to_be_hidden()
    page.wait_for_timeout(1500)
    notebook.open(_name(notebook), reset=False)
    notebook.run(0)
    expect(notebook.sidebar).to_be_hidden()


def test_the_panel_follows_the_current_notebook_and_leaves_with_it(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(lab, LOAD, "first = 1")
    notebook.run(0)
    notebook.expect_panel()
    lab.write("second.ipynb", LOAD, "second = 2")
    notebook.command("docmanager:open", path="second.ipynb")
    notebook.page.wait_for_function("() => window.jupyterapp.shell.currentWidget.context.path === 'second.ipynb'")
    notebook.ready()
    expect(notebook.hint).to_contain_text("%load_ext")
    notebook.run(0)
    notebook.expect_panel()
    expect(notebook.sidebar.locator(".gpumem-panel")).to_have_count(2)
    notebook.command("application:activate-previous-tab")
    notebook.page.wait_for_function("() => window.jupyterapp.shell.currentWidget.context.path !== 'second.ipynb'")
    notebook.expect_panel()
    # closed, its kernel goes on; opened again, its panel is back
    notebook.save()
    kernel = notebook.kernel_id()
    notebook.command("application:close")
    expect(notebook.sidebar.locator(".gpumem-panel")).to_have_count(1)
    assert notebook.evaluate(f"{SIDEBAR}.panel._shown", kernel=kernel) == "False"
    notebook.command("docmanager:open", path="test_the_panel_follows_the_current_notebook_and_leaves_with_it.ipynb")
    notebook.page.wait_for_function("() => window.jupyterapp.shell.currentWidget.context.path !== 'second.ipynb'")
    notebook.ready()
    notebook.expect_panel()
    expect(notebook.tab).to_have_count(1)


def test_two_notebooks_of_one_kernel_share_its_panel(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(lab, LOAD)
    notebook.run(0)
    notebook.expect_panel()
    lab.write("sharing.ipynb", "1 + 1", "import time; time.sleep(3)")
    notebook.command("docmanager:open", path="sharing.ipynb", kernel={"id": notebook.kernel_id()})
    notebook.page.wait_for_function("() => window.jupyterapp.shell.currentWidget.context.path === 'sharing.ipynb'")
    notebook.ready()
    notebook.run(0)
    notebook.start(1)
    expect(notebook.panel.locator(".gm-busy")).to_contain_text("time.sleep(3)")
    expect(notebook.sidebar.locator(".gpumem-panel")).to_have_count(1)
    # the first notebook has the one connection that hears of widgets: the second takes over when it is closed
    notebook.page.evaluate(
        """() => {
          const {shell} = window.jupyterapp;
          const first = [...shell.widgets('main')].find(widget => widget !== shell.currentWidget);
          void first.context.save().then(() => first.close());
        }"""
    )
    notebook.page.wait_for_function("() => [...window.jupyterapp.shell.widgets('main')].length === 1")
    notebook.expect_panel()
    expect(notebook.sidebar.locator(".gpumem-panel")).to_have_count(1)
    notebook.start(1)
    expect(notebook.panel.locator(".gm-busy")).to_contain_text("time.sleep(3)")
    notebook.button("Free memory").click()
    expect(notebook.answer).to_contain_text("left alone", timeout=3000)
    expect(notebook.panel.locator(".gm-busy")).to_be_hidden(timeout=15_000)


def test_where_no_window_with_the_sidebar_is_left_the_panel_is_shown_below_the_cell(
    lab: Server, open_notebook: Open, page: Page
) -> None:
    notebook = open_notebook(lab, LOAD, "%gpumem panel")
    notebook.run(0)
    notebook.expect_panel()
    notebook.run(1)
    # longer than it waits for an answer
    page.wait_for_timeout(2500)
    expect(notebook.output(1)).to_contain_text("The panel is in the right sidebar.")
    expect(notebook.output(1).locator(".gpumem-panel")).to_have_count(0)
    notebook.save()
    name = _name(notebook)
    page.goto("about:blank")
    page.route("**/lab/extensions/jupyter_gpumem/**", lambda route: route.abort())
    notebook.open(name)
    expect(notebook.tab).to_have_count(0)
    notebook.run(1)
    expect(notebook.output(1).locator(".gpumem-panel .gm-head b")).to_be_visible()


def test_two_windows_each_have_one_and_the_kernel_counts_them(lab: Server, open_notebook: Open, page: Page) -> None:
    notebook, second = two_windows(lab, open_notebook, page)
    second.page.close()
    notebook.page.wait_for_function("() => document.visibilityState === 'visible'")
    notebook.run(1)
    expect_value(notebook, VIEWERS, "1")
    notebook.expect_panel()


def test_a_window_that_crashed_is_counted_no_more(lab: Server, open_notebook: Open, page: Page) -> None:
    notebook, second = two_windows(lab, open_notebook, page)
    with second.page.expect_event("crash"), pytest.raises(Error, match="ERR_ABORTED"):
        second.page.goto("chrome://crash")
    notebook.run(1)
    expect_value(notebook, VIEWERS, "1")
    notebook.expect_panel()
    assert notebook.evaluate(f"{SIDEBAR}.panel._shown") == "True"


def two_windows(lab: Server, open_notebook: Open, page: Page) -> tuple[Notebook, Notebook]:
    """Open the panel of one kernel in two windows; the kernel soon finds out when one is gone without a word."""
    notebook = open_notebook(lab, LOAD, "changed = bytearray(1 << 28)")
    notebook.run(0)
    notebook.expect_panel()
    second = Notebook(page.context.new_page(), lab).open(f"{_name(notebook)}")
    second.tab.click()
    second.expect_panel()
    assert second.evaluate(VIEWERS) == "2"
    second.execute(
        "from jupyter_gpumem import viewers as asking; asking._ASK_SECONDS = 0.5; asking._ANSWER_SECONDS = 1.0"
    )
    return notebook, second


def test_the_kernel_draws_only_while_a_window_shows_it(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(lab, LOAD)
    notebook.run(0)
    notebook.expect_panel()
    shown = f"{SIDEBAR}.panel._shown"
    assert notebook.evaluate(shown) == "True"
    notebook.tab.click()
    expect(notebook.sidebar).to_be_hidden()
    expect_value(notebook, shown, "False")
    sent = notebook.page.evaluate(
        """async () => {
          const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
          let count = 0;
          const listen = (_, message) => { count += message.header.msg_type === 'comm_msg' ? 1 : 0 };
          kernel.iopubMessage.connect(listen);
          const code = 'import time; junk = bytearray(1 << 28); time.sleep(2)';
          await kernel.requestExecute({code, store_history: false}).done;
          kernel.iopubMessage.disconnect(listen);
          return count;
        }"""
    )
    assert sent == 0
    notebook.tab.click()
    notebook.expect_panel()
    expect_value(notebook, shown, "True")


def test_without_the_labextension_the_same_panel_is_shown_below_the_cell(
    start_server: Callable[..., Server], open_notebook: Open
) -> None:
    server = start_server(labextension=False)
    notebook = open_notebook(server, LOAD, "%gpumem panel")
    notebook.run(0, 1)
    inline = notebook.output(1).locator(".gpumem-panel")
    expect(inline).to_be_visible()
    inline.get_by_role("button", name="Free memory").click()
    expect(inline.locator(".gm-result")).to_contain_text("the system")
    expect_value(notebook, f"{SIDEBAR}.panel._shown", "True")
    notebook.command("notebook:clear-cell-output")
    expect_value(notebook, f"{SIDEBAR}.panel._shown", "False")
    notebook.run(1)
    expect(inline).to_be_visible()
    expect_value(notebook, f"{SIDEBAR}.panel._shown", "True")
    server.stop_kernels()


def _restart(notebook: Notebook) -> None:
    notebook.page.evaluate(
        "async () => { await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart() }"
    )
    notebook.ready()


def _name(notebook: Notebook) -> str:
    return str(notebook.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path"))


def expect_value(notebook: Notebook, code: str, value: str) -> None:
    """Ask the kernel until it answers so; playwright's own waiting does the waiting."""
    for _ in range(50):
        if notebook.evaluate(code) == value:
            return
        notebook.page.wait_for_timeout(100)
    raise AssertionError(f"{code} is {notebook.evaluate(code)}, not {value}")
