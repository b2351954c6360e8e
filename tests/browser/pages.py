"""What a person does in the browser: open a notebook, run cells, look at the panel."""

from dataclasses import dataclass

from playwright.sync_api import Locator, Page, expect

from tests.browser.server import Server

# not the indicator in the DOM: it says idle before the session is ready
_READY = """() => {
  const widget = window.jupyterapp && window.jupyterapp.shell.currentWidget;
  const session = widget && widget.sessionContext;
  const kernel = session && session.isReady && session.session && session.session.kernel;
  return !!kernel && kernel.status === 'idle';
}"""
_RUN = """index => {
  const panel = window.jupyterapp.shell.currentWidget;
  panel.content.activeCellIndex = index;
  void window.jupyterapp.commands.execute('notebook:run-cell');
}"""
_CELL_DONE = """index => {
  const cell = window.jupyterapp.shell.currentWidget.content.widgets[index];
  return cell.model.executionCount !== null && cell.model.executionState !== 'running'
    && cell.promptNode !== undefined && !cell.promptNode.textContent.includes('*');
}"""

SIMULATE = "from jupyter_gpumem import simgpu; simgpu.activate('24GiB', devices={devices})\nimport torch"
LOAD = "%load_ext jupyter_gpumem"


@dataclass
class Notebook:
    """One notebook in one browser page."""

    page: Page
    server: Server

    def open(self, name: str, *, reset: bool = True) -> "Notebook":
        route = "lab/tree" if self.server.app == "lab" else "notebooks"
        self.page.goto(f"{self.server.url}/{route}/{name}{'?reset' if reset else ''}")
        return self.ready()

    def ready(self) -> "Notebook":
        self.page.wait_for_function(_READY, timeout=60_000)
        return self

    def start(self, index: int) -> None:
        """Run a cell without waiting for it: the command's promise may never settle."""
        self.page.evaluate(_RUN, index)

    def run(self, *indices: int) -> None:
        """Run cells one after another and wait for each."""
        for index in indices:
            self.start(index)
            self.page.wait_for_function(_CELL_DONE, arg=index, timeout=60_000)

    def execute(self, code: str) -> None:
        """Run code in the notebook's kernel outside any cell, and wait for it."""
        self.page.evaluate(
            """async code => {
              const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
              await kernel.requestExecute({code, store_history: false}).done;
            }""",
            code,
        )

    def output(self, index: int) -> Locator:
        return self.page.locator(".jp-Cell").nth(index).locator(".jp-OutputArea")

    @property
    def panel(self) -> Locator:
        """The panel in the sidebar."""
        return self.page.locator("#jupyter-gpumem-sidebar .gpumem-panel:visible")

    @property
    def sidebar(self) -> Locator:
        return self.page.locator("#jupyter-gpumem-sidebar")

    def expect_panel(self) -> Locator:
        expect(self.panel).to_have_count(1, timeout=20_000)
        return self.panel
