import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

BINDER = Path(__file__).parents[1] / "binder"


def test_binder_reads_only_files_it_knows() -> None:
    known = {"apt.txt", "environment.yml", "postBuild", "requirements.txt", "runtime.txt", "start"}

    assert {path.name for path in BINDER.iterdir()} <= known


def test_the_python_is_one_that_current_ipython_runs_on() -> None:
    name, version = (BINDER / "runtime.txt").read_text().strip().split("-")

    assert name == "python"
    assert tuple(map(int, version.split("."))) >= (3, 11)


def test_an_error_in_post_build_stops_the_build() -> None:
    lines = (BINDER / "postBuild").read_text().splitlines()

    assert lines[0] == "#!/bin/bash"
    assert "set -e" in lines
    assert os.access(BINDER / "postBuild", os.X_OK)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run postBuild in an environment that has this one's packages; return the environment and its home."""
    environment = tmp_path_factory.mktemp("binder") / "env"
    venv.create(environment, with_pip=True, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # pip finds the demo extra, which is 5 GB, installed already
    (packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (packages / "triton").mkdir()
    (packages / "nvidia/cudnn/lib").mkdir(parents=True)
    for library in ("libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_engines_precompiled.so.9"):
        (packages / "nvidia/cudnn/lib" / library).touch()
    home = tmp_path_factory.mktemp("home")
    subprocess.run(
        [BINDER / "postBuild"],
        check=True,
        cwd=BINDER.parent,
        env={
            **{name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "PYTHONPATH")},
            "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
    )
    return environment, home


def test_post_build_installs_the_package_and_its_sidebar(built: tuple[Path, Path]) -> None:
    environment, _home = built
    code = "import jupyter_gpumem, sys; print(jupyter_gpumem.__file__.startswith(sys.prefix))"
    command = [environment / "bin/python", "-E", "-c", code]  # whatever PYTHONPATH says here
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "True"
    assert (environment / "share/jupyter/labextensions/jupyter_gpumem/package.json").is_file()


def test_post_build_leaves_out_what_a_simulated_gpu_never_opens(built: tuple[Path, Path]) -> None:
    environment, _home = built
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))

    assert not (packages / "triton").exists()
    assert sorted(path.name for path in (packages / "nvidia/cudnn/lib").iterdir()) == [
        "libcudnn.so.9",
        "libcudnn_graph.so.9",
    ]


def test_post_build_leaves_the_compiled_gpu_in_the_home_folder(built: tuple[Path, Path]) -> None:
    _environment, home = built

    assert list(home.rglob("*.so*"))
