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
# idle may be the word of the kernel that has just died
_ANSWERS = """async () => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const late = new Promise(resolve => setTimeout(() => resolve(false), 3000));
  return await Promise.race([kernel.requestKernelInfo().then(() => true, () => false), late]);
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
        self.page.wait_for_function(_ANSWERS, timeout=60_000)
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

    def kernel_id(self) -> str:
        return str(self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.id"))

    def evaluate(self, code: str, kernel: str | None = None) -> str:
        """Return the text of an expression in the notebook's kernel, or another, outside any cell."""
        return str(
            self.page.evaluate(
                """async ([code, id]) => {
                  const {kernels} = window.jupyterapp.serviceManager;
                  const kernel = id
                    ? kernels.connectTo({model: {id, name: 'python3'}, handleComms: false})
                    : window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                  const future = kernel.requestExecute({code: '', user_expressions: {x: code}, store_history: false});
                  const answer = (await future.done).content.user_expressions.x;
                  if (id) kernel.dispose();
                  return answer.data ? answer.data['text/plain'] : answer.ename + ': ' + answer.evalue;
                }""",
                [code, kernel],
            )
        )

    def command(self, name: str, **arguments: object) -> None:
        """Run a command of the application without waiting for its promise."""
        self.page.evaluate(
            "([name, args]) => { void window.jupyterapp.commands.execute(name, args) }", [name, arguments]
        )

    def save(self) -> None:
        """Save the notebook and wait until it is clean."""
        self.command("docmanager:save")
        self.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")

    def output(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook:visible .jp-Cell").nth(index).locator(".jp-OutputArea")

    @property
    def sidebar(self) -> Locator:
        return self.page.locator("#jupyter-gpumem-sidebar")

    @property
    def tab(self) -> Locator:
        """The sidebar's tabs of ours: there must be one."""
        return self.page.locator(".jp-SideBar.jp-mod-right [data-id='jupyter-gpumem-sidebar']")

    @property
    def panel(self) -> Locator:
        """The panels of the sidebar that can be seen."""
        return self.sidebar.locator(".gpumem-panel:visible")

    @property
    def hint(self) -> Locator:
        return self.sidebar.locator(".gm-hint")

    @property
    def answer(self) -> Locator:
        """The last result of a button."""
        return self.panel.locator(".gm-result")

    def button(self, name: str) -> Locator:
        return self.panel.get_by_role("button", name=name)

    def expect_panel(self) -> Locator:
        """Wait for the one panel, drawn."""
        expect(self.panel).to_have_count(1, timeout=20_000)
        expect(self.panel.locator(".gm-head").first).to_be_visible(timeout=20_000)
        return self.panel
