import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import Kernel

PACKAGE = Path(__file__).parents[1] / "jupyter_gpumem"

# a module imports from its own layer and from those before it, never from a later one
LAYERS = {
    "values": "advised errors sizes readings cards holders freed",
    "sources": """
        allocator attributes blocks device failures frames graph guarded heap nvml observer peaks processes reach
        references simgpu simgpu.build simgpu.locate tensors untracked
    """,
    "work": """
        accounts activations advice alike attachments autocast beside calls cells celltrace changes containers contents
        copies cuts cutting cycles describe dominators explain fits fitting held history holdings hooks
        hostcopies joint leak_report libraries linemarks lines literals living loops machinery members meter moments
        names next_step occupants oom parts passes paths places provenance quick readouts rebinding referrers
        rehearsal release remedies replaced rerun roots scene search shares situations stamps surroundings
        timeline together trail trails unreached variables where
    """,
    "show": """
        monitor panel panel.actions panel.closing panel.holders panel.live plot render render.account render.advise
        render.cells render.chart render.fit render.fits render.free render.layout render.leaks render.lines render.oom
        render.panel render.panel_words render.timeline render.wire sampler sidebar subshell viewers
    """,
    "shell": "__init__ __main__ after_cell arguments cellmagic completion config extension magics",
}
LAYER_OF = {module: depth for depth, names in enumerate(LAYERS.values()) for module in names.split()}

# who may import what at run time, inside a function or not; typing does not count
OUTSIDE = {
    "torch": {"simgpu"},
    "IPython": {"arguments", "cellmagic", "magics", "panel.live"},
    "ipywidgets": {"panel.actions", "panel.closing", "panel.holders", "panel.live"},
    "comm": {"sidebar"},
    "matplotlib": {"plot"},
    "numpy": {"heap", "hostcopies", "references", "untracked"},
    "pandas": {"history"},
    "psutil": {"device", "fits", "processes"},
    "pynvml": {"nvml"},
    "nbclient": {"fits"},
}
HEAVY = sorted((*OUTSIDE, "nbformat", "jupyter_client"))
# our own engines too: a kernel pays for them when somebody asks
LATE = [
    *(name for name in HEAVY if name not in ("IPython", "comm")),
    *(f"jupyter_gpumem.{name}" for name in ("holders", "leak_report", "oom", "panel", "tensors")),
]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the full names that a tree imports at run time."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        for child in node.orelse:
            yield from imported(child)
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative import"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def own_imports(module: str) -> set[str]:
    found = set()
    for name in imported(ast.parse(MODULES[module].read_text())):
        if name.split(".")[0] != "jupyter_gpumem":
            continue
        parts = name.split(".")[1:]
        # the longest part of the name that is a module: the rest is what was taken from it
        while parts and ".".join(parts) not in MODULES:
            parts.pop()
        found.add(".".join(parts) or "__init__")
    return found - {module}


def outside_imports(module: str) -> set[str]:
    tree = ast.parse(MODULES[module].read_text())
    return {name.split(".")[0] for name in imported(tree)} & OUTSIDE.keys()


def test_every_module_has_a_layer() -> None:
    assert MODULES.keys() - LAYER_OF.keys() == set()


@pytest.mark.parametrize("module", sorted(MODULES.keys() & LAYER_OF.keys()))
def test_imports_go_from_values_to_shell_and_never_back(module: str) -> None:
    depth = LAYER_OF[module]
    later = {other for other in own_imports(module) if LAYER_OF.get(other, depth) > depth}

    assert later == set()


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    graph = {module: own_imports(module) - {"__init__"} for module in MODULES}

    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", MODULES)
def test_only_the_named_modules_know_a_library(module: str) -> None:
    strangers = {library for library in outside_imports(module) if module not in OUTSIDE[library]}

    assert strangers == set()


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return done.stdout.strip()


def test_importing_the_package_imports_no_library() -> None:
    code = f"import sys, jupyter_gpumem; print([name for name in {HEAVY} if name in sys.modules])"

    assert run_python(code) == "[]"


def test_importing_the_package_starts_no_thread() -> None:
    assert run_python("import threading, jupyter_gpumem; print(threading.active_count())") == "1"


def test_loading_the_extension_imports_no_library_and_starts_no_thread(kernel: Kernel) -> None:
    kernel.run("import sys, threading; modules, threads = set(sys.modules), threading.active_count()")
    outputs = kernel.run(
        "get_ipython().run_line_magic('load_ext', 'jupyter_gpumem')\n"
        f"print([name for name in {LATE} if name in set(sys.modules) - modules])\n"
        "print(threading.active_count() - threads)"
    )

    assert outputs.error is None
    assert outputs.stdout.split() == ["[]", "0"]


def test_loading_the_extension_after_torch_starts_no_cuda(kernel: Kernel) -> None:
    kernel.run("from jupyter_gpumem import simgpu; simgpu.activate('24GiB', devices=2); import torch")
    kernel.run("%load_ext jupyter_gpumem")
    kernel.run("on_the_host = torch.ones(10)")
    outputs = kernel.run("print(torch.cuda.is_initialized(), [torch._C._cuda_hasPrimaryContext(d) for d in (0, 1)])")

    assert outputs.stdout.strip() == "False [False, False]"
