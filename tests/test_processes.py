import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from jupyter_gpumem.processes import ProcessName, name_process, name_processes

KERNEL_ID = "0123abcd-4567"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def kernel_process(runtime: Path) -> Iterator[int]:
    file = runtime / f"kernel-{KERNEL_ID}.json"
    process = subprocess.Popen(
        [sys.executable, "-c", "input()", "-f", str(file)],
        stdin=subprocess.PIPE,
        env={**os.environ, "JPY_SESSION_NAME": "/home/me/started.ipynb"},
    )
    yield process.pid
    process.communicate(b"\n")


def test_this_process_is_named_by_its_command_and_user() -> None:
    name = name_process(os.getpid())
    assert name.command is not None
    assert name.user is not None
    assert name.notebook is None
    assert str(os.getpid()) in str(name)


def test_a_process_that_is_gone_keeps_only_its_number() -> None:
    assert name_process(2**30) == ProcessName(2**30)
    assert str(ProcessName(2**30)) == f"process (pid {2**30})"


def test_a_kernel_is_named_by_the_notebook_in_its_connection_file(runtime: Path, kernel_process: int) -> None:
    content = {"key": "secret", "jupyter_session": "/home/me/train.ipynb"}
    (runtime / f"kernel-{KERNEL_ID}.json").write_text(json.dumps(content))
    name = name_process(kernel_process)
    assert name.notebook == "/home/me/train.ipynb"
    assert str(name) == f"kernel of /home/me/train.ipynb (pid {kernel_process})"
    assert "secret" not in json.dumps(name.to_dict())


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"jupyter_session": 3}', '{"jupyter_session": ""}'])
def test_without_a_readable_file_the_kernel_environment_tells(
    runtime: Path, kernel_process: int, content: str | None
) -> None:
    if content is not None:
        (runtime / f"kernel-{KERNEL_ID}.json").write_text(content)
    assert name_process(kernel_process).notebook == "/home/me/started.ipynb"


@pytest.fixture
def sessions() -> list[object]:
    return [{"path": "renamed.ipynb", "type": "notebook", "kernel": {"id": KERNEL_ID}}, {"path": 3}, None]


@pytest.fixture
def server(runtime: Path, sessions: list[object]) -> Iterator[list[str | None]]:
    seen: list[str | None] = []

    class Sessions(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            body = json.dumps(sessions)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_arguments: object) -> None:
            return

    http = HTTPServer(("127.0.0.1", 0), Sessions)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    info = {"url": f"http://127.0.0.1:{http.server_port}/", "token": "tok", "root_dir": "/home/me"}
    (runtime / "jpserver-1.json").write_text(json.dumps(info))
    yield seen
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_running_server_knows_of_renames(server: list[str | None], kernel_process: int) -> None:
    names = name_processes((kernel_process, os.getpid()))
    assert [name.notebook for name in names] == ["/home/me/renamed.ipynb", None]
    assert server == ["token tok"]


@pytest.mark.usefixtures("server")
def test_a_console_is_no_notebook_and_gives_way_to_one(sessions: list[object], kernel_process: int) -> None:
    console = {"path": "console-1-8cc0", "name": "Console 1", "type": "console", "kernel": {"id": KERNEL_ID}}
    sessions.insert(0, console)
    assert name_process(kernel_process).notebook == "/home/me/renamed.ipynb"
    sessions[:] = [sessions[1], console]
    assert name_process(kernel_process).notebook == "/home/me/renamed.ipynb"
    sessions[:] = [console]
    assert name_process(kernel_process).notebook == "Console 1"


def test_a_kernel_started_for_a_console_is_one_of_a_console(runtime: Path, kernel_process: int) -> None:
    started_for = {"jupyter_session": "/home/me/console-1-8cc0"}
    (runtime / f"kernel-{KERNEL_ID}.json").write_text(json.dumps(started_for))
    assert str(name_process(kernel_process)) == f"kernel of a console (pid {kernel_process})"


def test_no_server_is_asked_where_no_kernel_is_listed(server: list[str | None]) -> None:
    name_process(os.getpid())
    assert server == []


@pytest.mark.parametrize("url", ["http://example.org/", "http://127.0.0.1:1/", "not a url", None])
def test_a_server_elsewhere_or_gone_is_no_error(
    runtime: Path, kernel_process: int, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9/")
    (runtime / "jpserver-1.json").write_text(json.dumps({"url": url, "token": "tok"}))
    assert name_process(kernel_process).notebook == "/home/me/started.ipynb"
