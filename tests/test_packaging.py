import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import jupyter_gpumem

ROOT = Path(__file__).parents[1]
SOURCES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jupyter_gpumem").rglob("*") if path.is_file()}
SHIPPED = {path for path in SOURCES if not re.search(r"(^|/)(__pycache__|\.)", path)}  # caches are nobody's source
DATA = "jupyter_gpumem-{version}.data/data/share/jupyter/labextensions/jupyter_gpumem/"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def requirements(metadata: Message, extra: str = "") -> dict[str, Requirement]:
    found = map(Requirement, metadata.get_all("Requires-Dist") or [])
    return {
        requirement.name: requirement
        for requirement in found
        if (requirement.marker.evaluate({"extra": extra}) if requirement.marker else not extra)
    }


def test_the_wheel_ships_every_source_the_types_and_the_c_files(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())

    assert names >= SHIPPED
    assert "jupyter_gpumem/py.typed" in names
    assert any(name.startswith("jupyter_gpumem/simgpu/src/") and name.endswith(".c") for name in names)


def test_the_wheel_ships_nothing_but_the_package(wheel: zipfile.ZipFile) -> None:
    version = jupyter_gpumem.__version__
    strangers = {
        name
        for name in set(wheel.namelist()) - SHIPPED
        if not name.startswith((f"jupyter_gpumem-{version}.dist-info/", DATA.format(version=version)))
    }

    assert strangers == set()


def test_the_wheel_puts_the_sidebar_where_jupyter_looks(wheel: zipfile.ZipFile) -> None:
    extension = ROOT / "jupyter_gpumem/labextension"
    expected = {path.relative_to(extension).as_posix() for path in extension.rglob("*") if path.is_file()}
    data = DATA.format(version=jupyter_gpumem.__version__)

    assert {name.removeprefix(data) for name in wheel.namelist() if name.startswith(data)} == expected


def test_the_source_archive_can_be_tested(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}

    assert names >= SHIPPED
    assert {
        "README.md",
        "pyproject.toml",
        "tests/conftest.py",
        "binder/postBuild",
        "notebooks/quickstart.ipynb",
    } <= names
    assert not {name for name in names if "__pycache__" in name or ".ipynb_checkpoints" in name}


def test_the_version_is_said_once(metadata: Message) -> None:
    assert metadata["Version"] == jupyter_gpumem.__version__


def test_python_3_10_is_enough(metadata: Message) -> None:
    assert metadata["Requires-Python"] == ">=3.10"


def test_a_plain_install_brings_no_torch(metadata: Message) -> None:
    assert sorted(requirements(metadata)) == [
        "ipykernel",
        "ipython",
        "ipywidgets",
        "matplotlib",
        "nbclient",
        "numpy",
        "nvidia-ml-py",
        "psutil",
    ]


def test_the_ipykernel_whose_threads_cannot_display_is_excluded(metadata: Message) -> None:
    allowed = requirements(metadata)["ipykernel"].specifier

    assert "7.0.1" not in allowed
    assert "6.30" in allowed
    assert "7.1.0" in allowed


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("torch", {"torch"}),
        ("demo", {"torch", "jupyterlab"}),
        (
            "test",
            {
                "torch",
                "jupyterlab",
                "notebook",
                "pytest",
                "nbval",
                "hypothesis",
                "playwright",
                "ruff",
                "mypy",
            },
        ),
        ("peers", {"ipyexperiments", "jumper-extension", "pytorch-memlab", "objgraph"}),
    ],
)
def test_each_extra_brings_what_it_is_for(metadata: Message, extra: str, packages: set[str]) -> None:
    assert packages <= requirements(metadata, extra).keys()


def test_no_extra_takes_a_torch_older_than_the_oldest_supported(metadata: Message) -> None:
    for extra in ("torch", "demo", "test"):
        assert "2.5.1" not in requirements(metadata, extra)["torch"].specifier
        assert "2.6.0" in requirements(metadata, extra)["torch"].specifier


def test_what_is_installed_here_satisfies_the_dependencies(metadata: Message) -> None:
    for name, requirement in requirements(metadata).items():
        assert importlib.metadata.version(name) in requirement.specifier
