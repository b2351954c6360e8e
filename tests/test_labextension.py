import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.server import LABEXTENSION, ROOT, share_folder

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]  # pytest brings it there


@pytest.fixture(scope="module")
def package() -> dict[str, object]:
    return json.loads((LABEXTENSION / "package.json").read_text())


def script() -> Path:
    (found,) = (LABEXTENSION / "static").iterdir()
    return found


def test_the_script_is_named_by_the_hash_of_its_content() -> None:
    digest = hashlib.sha256(script().read_bytes()).hexdigest()[:12]
    assert script().name == f"sidebar.{digest}.js", "rename it, or browsers keep the old one for a year"


def test_the_package_names_the_script_and_the_version_of_the_python_package(package: dict[str, object]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert package["jupyterlab"]["_build"]["load"] == f"static/{script().name}"  # type: ignore[index]
    assert package["version"] == project["version"]
    assert package["name"] == project["name"]


def test_the_wheel_places_it_where_jupyter_looks() -> None:
    shared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
        "shared-data"
    ]
    assert shared == {"jupyter_gpumem/labextension": "share/jupyter/labextensions/jupyter_gpumem"}


def test_jupyter_lists_it_as_ok(tmp_path: Path) -> None:
    share = share_folder(tmp_path, labextension=False)
    shutil.copytree(LABEXTENSION, share / "labextensions" / "jupyter_gpumem")
    listed = subprocess.run(
        [sys.executable, "-m", "jupyter", "labextension", "list"],
        env={"PATH": "/usr/bin:/bin", "JUPYTER_PATH": str(share), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", listed.stdout + listed.stderr)
    line = next(line for line in plain.splitlines() if "jupyter_gpumem v" in line)
    assert re.search(r"jupyter_gpumem v\S+ .*enabled.* OK", line)


def test_it_names_no_host_and_holds_no_secret() -> None:
    text = script().read_text()
    assert set(re.findall(r"https?://[^\s'\"]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\s*\(", text)


def test_the_script_talks_of_the_target_the_kernel_opens() -> None:
    from jupyter_gpumem.sidebar import TARGET

    assert f"const NAME = '{TARGET}';" in script().read_text()
