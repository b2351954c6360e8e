"""Who a process is: its command line and, for a Jupyter kernel of this user, its notebook."""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

_CONNECTION_FILE = re.compile(r"kernel-(.+)\.json")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SERVER_TIMEOUT_SECONDS = 0.5
_READ_ERRORS = (OSError, ValueError)


@dataclass(frozen=True, slots=True)
class ProcessName:
    """What may be said of a process; ``None`` where it cannot be read from here.

    ``notebook`` is the path of what a kernel runs, of a console its name.
    """

    pid: int
    command: str | None = None
    user: str | None = None
    notebook: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        if self.notebook is not None:
            return f"kernel of {self.notebook} (pid {self.pid})"
        return f"{self.command or 'process'} (pid {self.pid})"


def name_processes(pids: Sequence[int]) -> tuple[ProcessName, ...]:
    """Name processes, in the order given; one that has ended or is hidden keeps only its number.

    The notebook of a kernel is asked from the running Jupyter servers of this user, which know of
    renames, then read from the kernel's connection file, then from its environment.
    """
    return tuple(_with_notebooks([_name(pid) for pid in pids]))


def name_process(pid: int) -> ProcessName:
    """Name one process."""
    return name_processes((pid,))[0]


@dataclass(frozen=True, slots=True)
class _Found:
    name: ProcessName
    connection_file: Path | None = None
    session_name: str | None = None


def _name(pid: int) -> _Found:
    import psutil

    try:
        process = psutil.Process(pid)
        arguments = process.cmdline()
    except (psutil.Error, OSError):
        return _Found(ProcessName(pid))
    user = connection_file = session_name = None
    with contextlib.suppress(psutil.Error, OSError):
        user = process.username()
    with contextlib.suppress(psutil.Error, OSError):
        connection_file = _connection_file(arguments, process)
        if connection_file is not None:
            session_name = process.environ().get("JPY_SESSION_NAME")
    return _Found(ProcessName(pid, _command(arguments), user), connection_file, session_name)


def _command(arguments: Sequence[str]) -> str | None:
    """Write a command line as it was typed, the interpreter without its folder."""
    if not arguments:
        return None
    return " ".join([os.path.basename(arguments[0]), *arguments[1:]]).strip() or None


def _connection_file(arguments: Sequence[str], process: Any) -> Path | None:
    """Find the connection file among a kernel's arguments (``-f FILE``, ``--f=FILE``)."""
    for argument in arguments[1:]:
        path = Path(argument.rpartition("=")[2])
        if _CONNECTION_FILE.fullmatch(path.name):
            return path if path.is_absolute() else Path(process.cwd(), path)
    return None


def _with_notebooks(found: Sequence[_Found]) -> Iterator[ProcessName]:
    """Add the notebooks; the servers are asked only when there is a kernel to ask for."""
    sessions = _running_sessions() if any(one.connection_file for one in found) else {}
    for one in found:
        if one.connection_file is None:
            yield one.name
            continue
        match = _CONNECTION_FILE.fullmatch(one.connection_file.name)
        kernel_id = match.group(1) if match else ""
        started_for = _session_in_file(one.connection_file) or one.session_name
        notebook = sessions.get(kernel_id) or (_file_or_console(started_for) if started_for else None)
        yield ProcessName(one.name.pid, one.name.command, one.name.user, notebook)


def _file_or_console(path: str) -> str:
    """Return the path a kernel was started for; a console's ends in a long number instead of a file."""
    return path if Path(path).suffix else "a console"


def _session_in_file(path: Path) -> str | None:
    """Read the notebook a kernel was started for; nothing else of the file, which holds its key, is kept."""
    return _text(_read_json(path), "jupyter_session")


def _running_sessions() -> dict[str, str]:
    """Ask this user's Jupyter servers which kernel runs which notebook: ``{kernel id: path}``."""
    try:
        from jupyter_core.paths import jupyter_runtime_dir
    except ImportError:
        return {}
    sessions: dict[str, str] = {}
    with contextlib.suppress(*_READ_ERRORS):
        files = sorted(Path(jupyter_runtime_dir()).glob("jpserver-*.json"))
        for file in files:
            sessions.update(_sessions_of(_read_json(file)))
    return sessions


def _sessions_of(server: Any) -> dict[str, str]:
    """Ask one server on this machine; its token is sent to a loopback address and nowhere else."""
    url, token, root = (_text(server, key) for key in ("url", "token", "root_dir"))
    if url is None or urlsplit(url).hostname not in _LOOPBACK:
        return {}
    headers = {"Authorization": f"token {token}"} if token else {}
    request = Request(quote(url, safe=":/[]") + "api/sessions", headers=headers)
    # a proxy named in the environment must never see the token
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SERVER_TIMEOUT_SECONDS) as answer:
            listed = json.load(answer)
    except (URLError, *_READ_ERRORS):
        return {}
    sessions: dict[str, str] = {}
    for session in listed if isinstance(listed, list) else ():
        kernel = session.get("kernel") if isinstance(session, dict) else None
        kernel_id, path = _text(kernel, "id"), _text(session, "path")
        if not kernel_id or not path:
            continue
        if session.get("type") == "console":
            # a console beside a notebook shares its kernel
            sessions.setdefault(kernel_id, _text(session, "name") or "a console")
        else:
            sessions[kernel_id] = os.path.join(root or "", path)
    return sessions


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except _READ_ERRORS:
        return None


def _text(values: Any, key: str) -> str | None:
    value = values.get(key) if isinstance(values, dict) else None
    return value if isinstance(value, str) and value else None
