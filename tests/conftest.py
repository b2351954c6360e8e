"""The simulated GPU for the whole process, and shells and kernels to run cells in."""

import atexit
import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpumem import simgpu

DEVICES = 3
DEVICE_BYTES = 24 * 1024**3

# torch writes a line to stderr at each out-of-memory error, of which the tests make many
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# before anything imports torch; a machine with a GPU runs the same tests on the simulated one
if os.environ.get("GPUMEM_TEST_DEVICE") != "real":
    simgpu.activate(DEVICE_BYTES, devices=DEVICES)


# These fill their process with objects of transformers, timm and torch.compile, among which every search for holders
# and every collection after them takes several times as long: last. A browser loads both cores: one at a time.
_ORDER = {
    "test_panel_browser.py": "",
    "test_sidebar_browser.py": "test_gpu.py",
    "test_looks_browser.py": "test_peaks.py",
    "test_oom.py": "z1",
    "test_advice.py": "z2",
    "test_cases_programs.py": "z3",
    "test_simgpu_programs.py": "z4",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files in an order that keeps both processes quick and busy to the end."""
    items.sort(key=lambda item: _ORDER.get(item.path.name, item.path.name))


@dataclass
class Outputs:
    """What one cell showed."""

    text: str = ""
    html: str = ""
    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    traceback: str = ""
    result: str | None = None
    displays: list[dict[str, Any]] = field(default_factory=list)


class Kernel:
    """A real ipykernel, driven cell by cell."""

    def __init__(self, env: dict[str, str], python: str = sys.executable) -> None:
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = python
        self.manager.start_kernel(env=env)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(
        self,
        code: str,
        *,
        timeout: float = 120,
        store_history: bool = True,
        silent: bool = False,
        answers: Sequence[str] = (),
    ) -> Outputs:
        """Run one cell and gather its outputs; ``answers`` are typed where it asks for input."""
        outputs = Outputs()
        left = iter(answers)

        def take(message: dict[str, Any]) -> None:
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                setattr(outputs, content["name"], getattr(outputs, content["name"]) + content["text"])
            elif kind in ("display_data", "execute_result"):
                outputs.displays.append(content["data"])
                if kind == "execute_result":
                    outputs.result = content["data"].get("text/plain")
                else:
                    outputs.text += content["data"].get("text/plain", "") + "\n"
                    outputs.html += content["data"].get("text/html", "")
            elif kind == "error":
                outputs.error = content["ename"]
                outputs.traceback = "\n".join(content["traceback"])

        self.client.execute_interactive(
            code,
            output_hook=take,
            stdin_hook=lambda _message: self.client.input(next(left)),
            allow_stdin=True,  # as a front end does; a program that runs notebooks takes no panel
            timeout=timeout,
            store_history=store_history,
            silent=silent,
            stop_on_error=False,
        )
        return outputs

    def interrupt(self) -> None:
        """Send the interrupt of the stop button."""
        self.manager.interrupt_kernel()

    def shutdown(self) -> None:
        """Stop the kernel and its channels."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="session")
def kernel_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a kernel that touches none of the user's folders."""
    root = tmp_path_factory.mktemp("home")
    # coverage of a user's IPython profile is not wanted here: extensions there would answer too
    return {
        **os.environ,
        "IPYTHONDIR": str(root / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(root / "runtime"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }


@pytest.fixture
def kernel(kernel_env: dict[str, str]) -> Iterator[Kernel]:
    """Give a real kernel with nothing loaded and no GPU activated."""
    kernel = Kernel(kernel_env)
    yield kernel
    kernel.shutdown()


@pytest.fixture
def gpu_kernel(kernel: Kernel) -> Kernel:
    """Give a real kernel whose simulated GPUs are on and in which the extension is loaded."""
    kernel.run(f"from jupyter_gpumem import simgpu; simgpu.activate({DEVICE_BYTES}, devices={DEVICES}); import torch")
    kernel.run("%load_ext jupyter_gpumem")
    return kernel


class Shell:
    """An IPython shell in this process; cells are strings, outputs are gathered per cell."""

    def __init__(self, ipython: Any) -> None:
        self.ip = ipython

    def run(self, code: str, **options: Any) -> Outputs:
        """Run one cell and gather its outputs; its error stays inside the shell."""
        from IPython.utils.capture import capture_output

        options.setdefault("store_history", True)
        self.ip.display_pub.outputs.clear()
        with capture_output(display=False) as captured:
            result = self.ip.run_cell(code, **options)
        outputs = Outputs(stdout=captured.stdout, stderr=captured.stderr)
        for published in self.ip.display_pub.outputs:
            outputs.displays.append(published["data"])
            outputs.text += published["data"].get("text/plain", "") + "\n"
            outputs.html += published["data"].get("text/html", "")
        error = result.error_before_exec or result.error_in_exec
        outputs.error = None if error is None else type(error).__name__
        return outputs

    @property
    def ns(self) -> dict[str, Any]:
        """Return the user's namespace."""
        return self.ip.user_ns


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """Give a fresh shell without history on disk, and empty the GPU afterwards."""
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    ipython = InteractiveShell.instance(config=config, display_pub_class=CapturingDisplayPublisher)
    yield Shell(ipython)
    if "jupyter_gpumem" in ipython.extension_manager.loaded:
        ipython.run_line_magic("unload_ext", "jupyter_gpumem")
    # what `%reset -f` clears, without its three collections
    ipython.user_ns.clear()
    ipython.user_ns_hidden.clear()
    ipython.displayhook._ = ipython.displayhook.__ = ipython.displayhook.___ = None
    ipython.InteractiveTB.tb = None
    ipython.InteractiveTB.pdb = None
    ipython.last_execution_result = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    atexit.unregister(ipython.atexit_operations)
    ipython.atexit_operations()
    InteractiveShell.clear_instance()
    empty_gpu()


def empty_gpu() -> None:
    """Let go of every block, cached ones too, so that a test starts from nothing.

    Garbage is collected only where it holds GPU memory: a collection of all that torch imports is most of a short test.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.set_device(0)  # a limit set on another device leaves that one current in torch 2.6
    awake = [device for device in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(device)]
    if any(torch.cuda.memory_allocated(device) for device in awake):
        gc.collect()
    for device in awake:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


@pytest.fixture
def taking(shell: Shell) -> Shell:
    """Give a shell with the extension on an empty simulated GPU, in which ``take(mib, device)`` is a tensor."""
    import torch

    torch.empty(1, device="cuda")
    empty_gpu()
    shell.run(
        "import torch\ndef take(mib, device=0):\n    return torch.empty(mib << 20, dtype=torch.uint8).cuda(device)"
    )
    shell.run("%load_ext jupyter_gpumem")
    return shell


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the test after which a thread of ours is still running."""
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("gpumem")]
    assert not left, f"threads left running: {left}"
