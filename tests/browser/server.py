"""A real Jupyter server on 127.0.0.1 that touches none of the user's folders."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parents[2]
LABEXTENSION = ROOT / "jupyter_gpumem" / "labextension"


def share_folder(root: Path, *, labextension: bool = True) -> Path:
    """Make a Jupyter data folder with the kernel of this Python and, where wanted, the labextension."""
    kernel = root / "share" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
    }
    (kernel / "kernel.json").write_text(json.dumps(spec))
    if labextension:
        (root / "share" / "labextensions").mkdir()
        (root / "share" / "labextensions" / "jupyter_gpumem").symlink_to(LABEXTENSION)
    return root / "share"


@dataclass
class Server:
    """JupyterLab or Notebook 7, started for a test session."""

    root: Path
    app: str = "lab"
    labextension: bool = True
    python: str = sys.executable
    extra_env: dict[str, str] = field(default_factory=dict)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        return self.root / "notebooks"

    def start(self) -> "Server":
        self.folder.mkdir(parents=True)
        (self.root / "config" / "labconfig").mkdir(parents=True)
        disabled = {"@jupyterlab/apputils-extension:announcements": True}
        (self.root / "config" / "labconfig" / "page_config.json").write_text(
            # where the package is installed, its labextension lies in a folder that every server looks into
            json.dumps({"disabledExtensions": {**disabled, "jupyter_gpumem": not self.labextension}})
        )
        share = share_folder(self.root, labextension=self.labextension)
        self.port = _free_port()
        self._log = (self.root / "server.log").open("w")
        self._process = subprocess.Popen(
            [
                *(self.python, "-m", "jupyter", self.app, "--allow-root", "--no-browser", "--ServerApp.ip=127.0.0.1"),
                *(f"--ServerApp.port={self.port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="),
                *(
                    f"--ServerApp.root_dir={self.folder}",
                    "--expose-app-in-browser",
                    "--ServerApp.disable_check_xsrf=True",
                ),
            ],
            env=self._environment(share),
            stdout=self._log,
            stderr=self._log,
            cwd=self.folder,
        )
        self._wait()
        return self

    def _environment(self, share: Path) -> dict[str, str]:
        folders = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        return {
            **os.environ,
            **{name: str(self.root / folder) for name, folder in folders.items()},
            "JUPYTER_PATH": os.pathsep.join([str(share), str(Path(sys.prefix) / "share" / "jupyter")]),
            # `jupyter lab` is looked for there, whatever environment the tests are run from
            "PATH": os.pathsep.join([str(Path(self.python).parent), os.environ.get("PATH", "")]),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **self.extra_env,
        }

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.log()
            try:
                urllib.request.urlopen(self.url + "/api", timeout=1)
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"the server did not answer: {self.log()}")

    def log(self) -> str:
        return (self.root / "server.log").read_text()[-3000:]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(15)
        self._log.close()

    def stop_kernels(self) -> None:
        for kernel in self.get("/api/kernels"):
            request = urllib.request.Request(f"{self.url}/api/kernels/{kernel['id']}", method="DELETE")
            urllib.request.urlopen(request, timeout=20)

    def get(self, path: str) -> Any:
        return json.load(urllib.request.urlopen(self.url + path, timeout=20))

    def write(self, name: str, *cells: str) -> str:
        """Write a notebook and return its name."""
        v4 = nbformat.v4
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel})
        nbformat.write(notebook, self.folder / name)
        return name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
