"""Servers for the session, and a fresh page of Debian's chromium for each test."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.pages import Notebook
from tests.browser.server import Server

OLDEST_LAB = "4.0.13"
_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


def chromium() -> str:
    found = os.environ.get("GPUMEM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium here: install Debian's chromium or name one in GPUMEM_CHROMIUM")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Give one browser to a file: playwright keeps an event loop running, beside which no other can start."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(**options: object) -> Server:
        server = Server(tmp_path_factory.mktemp("server"), **options)  # type: ignore[arg-type]  # passed on
        started.append(server.start())
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def lab(start_server: Callable[..., Server]) -> Server:
    return start_server()


@pytest.fixture(scope="session")
def notebook7(start_server: Callable[..., Server]) -> Server:
    return start_server(app="notebook")


@pytest.fixture(scope="session")
def lab40(start_server: Callable[..., Server]) -> Server:
    """Give the oldest JupyterLab that is supported, in an environment of its own that is kept for the next time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "jupyter_gpumem" / "tests" / f"jupyterlab-{OLDEST_LAB}"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", f"jupyterlab=={OLDEST_LAB}"]
        subprocess.run(install, check=True)
        (folder / "complete").touch()
    return start_server(python=str(folder / "bin" / "python"))


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(20_000)
    yield page
    context.close()


@pytest.fixture
def open_notebook(page: Page, request: pytest.FixtureRequest) -> Iterator[Callable[..., Notebook]]:
    """Write a notebook of the given cells and open it in the test's page."""
    used: list[Server] = []

    def open_it(server: Server, *cells: str) -> Notebook:
        used.append(server)
        return Notebook(page, server).open(server.write(f"{request.node.name}.ipynb", *cells))

    yield open_it
    for server in used:
        server.stop_kernels()
