"""Compiles the simulated GPU for one torch, once, into the user's cache folder."""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.simgpu.locate import TorchBuild

_SOURCE = Path(__file__).parent / "src"
# exceptions pass through: what is not simulated raises out of C
_FLAGS = ("-O1", "-std=gnu11", "-Wall", "-Wextra", "-fPIC", "-fexceptions")
_LIBRARIES = (
    "libtorch_cpu.so",
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libc10_cuda.so",
    "libtorch_python.so",
    "libcaffe2_nvrtc.so",
)
_WANTED = re.compile(r"(__cuda|cuda[A-Z]|cu(?!File)[A-Z]|cublas|cusolver|cufft|cusparse(?!Lt)|nccl|cupti)\w+")
_CALLED = re.compile(r"\b(cu[A-Z]\w+)\(")
_LOOKED_UP = re.compile(rb"\x00((?:cu|nvml)[A-Z]\w+)(?=\x00)")

# what a function that nobody wrote answers, by the start of its name; the rest of cu*: not supported
_SUCCEEDS = ("cublas", "nccl", "cupti")
_RAISES = ("cusolver", "cufft", "cusparse")
_CUDA, _NVML, _NVRTC = "libcuda.so.1", "libnvidia-ml.so.1", "libnvrtc.so"
_ABANDONED_AFTER = 3600  # seconds; a build takes a few
_CU_NOT_SUPPORTED = 801
_NVML_NOT_SUPPORTED = 3


@dataclass(frozen=True, slots=True)
class Libraries:
    """The libraries to load, in this order."""

    cuda: Path
    nvml: Path
    nvrtc: Path


def build(torch: TorchBuild) -> Libraries:
    """Return the libraries for this torch, compiled now where the cache has none.

    Two processes may do it at once: each compiles in a folder of its own and renames it into place; the loser
    uses the winner's.

    Raises
    ------
    GpuMemError
        When there is no C compiler, when it fails, or when the cache folder cannot be written.
    """
    target = cache_folder() / f"simgpu-{_fingerprint(torch)}"
    libraries = Libraries(target / _CUDA, target / _NVML, target / _NVRTC)
    if target.is_dir():  # renamed into place, so it is whole
        return libraries
    for tool in ("cc", "nm"):
        if shutil.which(tool) is None:
            raise GpuMemError(
                f"the simulated GPU is compiled on first use, and {tool!r} was not found; "
                "install a C compiler (apt install gcc, dnf install gcc, conda install gcc) and try again"
            )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix=target.name + ".", dir=target.parent) as made:
            folder = Path(made, "new")
            folder.mkdir()
            _compile(torch, folder)
            _move(folder, target)
    except OSError as error:
        raise GpuMemError(
            f"the simulated GPU cannot be written to {target.parent} ({error.strerror or error}); "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return libraries


def cache_folder() -> Path:
    """Return the user's cache folder for this package."""
    # the specification of that variable says that a relative path is to be ignored
    root = Path(os.environ.get("XDG_CACHE_HOME", "")).expanduser()
    root = root if root.is_absolute() else Path.home() / ".cache"
    return Path(root, "jupyter_gpumem")


def _sweep(cache: Path) -> None:
    """Remove the folders of builds that were killed, once they are too old to be under way."""
    for folder in cache.glob("simgpu-*.*"):
        with contextlib.suppress(FileNotFoundError):  # its own build has just ended
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(folder, ignore_errors=True)


def _fingerprint(torch: TorchBuild) -> str:
    digest = hashlib.sha256(f"{torch.version} {torch.cuda} {os.uname().machine}".encode())
    for file in (*sorted(_SOURCE.iterdir()), Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _move(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError:
        # another process was first; anything else in the way is an error
        if not target.is_dir():
            raise


def _compile(torch: TorchBuild, folder: Path) -> None:
    options = [*_FLAGS, f"-DSIM_CUDA_MAJOR={torch.cuda_major}"]
    options += [option for include in torch.includes for option in ("-isystem", str(include))]
    with tempfile.TemporaryDirectory(dir=folder.parent) as objects:
        _run_compiler([*options, "-c", *map(str, sorted(_SOURCE.glob("*.c")))], Path(objects))
        nvml, nvrtc = Path(objects, "nvml.o"), Path(objects, "nvrtc.o")
        cuda = sorted({*Path(objects).glob("*.o")} - {nvml, nvrtc})
        stubs, nvml_stubs = Path(objects, "stubs.c"), Path(objects, "nvml_stubs.c")
        looked_up = _looked_up(torch.libraries / "libc10_cuda.so")
        stubs.write_text(_cuda_stubs(torch, looked_up, _symbols(cuda, "--defined-only")))
        nvml_stubs.write_text(_nvml_stubs(looked_up, _symbols([nvml], "--defined-only")))
        # the sonames are what torch and pynvml open by name; older triton asks the linker for -lcuda
        (folder / "libcuda.so").symlink_to(_CUDA)
        _link(_CUDA, [*cuda, stubs], folder / _CUDA)
        _link(_NVML, [nvml, nvml_stubs], folder / _NVML)
        nvrtc_name = f"libnvrtc.so.{torch.cuda_major}"
        # torch is linked to this one too, and the loader insists on the version of each symbol
        versions = Path(objects, "nvrtc.map")
        versions.write_text(f"{nvrtc_name} {{ global: *; }};\n")
        _link(nvrtc_name, [nvrtc], folder / _NVRTC, f"-Wl,--version-script={versions}")


def _cuda_stubs(torch: TorchBuild, looked_up: set[str], defined: set[str]) -> str:
    """Return C source for all that torch's libraries need of CUDA and nobody wrote."""
    needed = _symbols((torch.libraries / name for name in _LIBRARIES), "--undefined-only", "-D")
    needed |= {name for name in looked_up if name.startswith("cu")} | _triton_needs(torch)
    missing = {name for name in needed if _WANTED.fullmatch(name)} - defined
    return "int sim_not_simulated(const char *, int);\n" + "".join(map(_stub, sorted(missing)))


def _triton_needs(torch: TorchBuild) -> set[str]:
    """Return the driver functions in the C code that triton compiles when torch.compile needs it."""
    source = torch.libraries.parents[1] / "triton/backends/nvidia/driver.c"
    return set(_CALLED.findall(source.read_text(encoding="utf-8"))) if source.exists() else set()


def _nvml_stubs(looked_up: set[str], defined: set[str]) -> str:
    missing = {name for name in looked_up if name.startswith("nvml")} - defined
    return "".join(f"int {name}(void) {{ return {_NVML_NOT_SUPPORTED}; }}\n" for name in sorted(missing))


def _stub(name: str) -> str:
    # a destructor must not throw, and there is nothing to destroy
    if name.startswith(_SUCCEEDS) or "Destroy" in name:
        return f"int {name}(void) {{ return 0; }}\n"
    if name.startswith(_RAISES):
        return f'int {name}(void) {{ return sim_not_simulated("{name}", 1); }}\n'
    return f"int {name}(void) {{ return {_CU_NOT_SUPPORTED}; }}\n"


def _link(soname: str, inputs: list[Path], output: Path, *options: str) -> None:
    arguments = ["-shared", "-fPIC", "-fexceptions", f"-Wl,-soname,{soname}", *options]
    _run_compiler([*arguments, *map(str, inputs), "-o", str(output), "-lpthread", "-ldl"], output.parent)


def _run_compiler(arguments: list[str], folder: Path) -> None:
    done = subprocess.run(["cc", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise GpuMemError(f"the simulated GPU does not compile with this compiler: {' '.join(lines[:1])}")


def _symbols(files: Iterable[Path], *options: str) -> set[str]:
    present = [str(file) for file in files if file.exists()]
    done = subprocess.run(["nm", *options, *present], capture_output=True, text=True, check=False)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if line and not line.endswith(":")}


def _looked_up(library: Path) -> set[str]:
    """Return the driver and NVML functions that torch asks for by name at run time.

    It needs all of them or uses none.
    """
    return {name.decode() for name in _LOOKED_UP.findall(library.read_bytes())}
