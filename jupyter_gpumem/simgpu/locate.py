"""Which torch would be imported, and what it was built for, learned without importing it."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from jupyter_gpumem.errors import GpuMemError

_OLDEST_CUDA = 12
_ASSIGNED = r"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """A torch with CUDA: its version, its CUDA version, its libraries and where CUDA's headers are."""

    version: str
    cuda: str
    libraries: Path
    includes: tuple[Path, ...]

    @property
    def cuda_major(self) -> int:
        """Return CUDA's major version."""
        return int(self.cuda.split(".")[0])


def find_torch() -> TorchBuild:
    """Find the torch that ``import torch`` would load.

    Raises
    ------
    GpuMemError
        When there is none, when it was built without CUDA or for another kind of device, and when the headers
        of its CUDA version are not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise GpuMemError("the simulated GPU needs PyTorch, which is not installed; run: pip install torch")
    package = Path(spec.submodule_search_locations[0])
    version_file = package / "version.py"
    text = version_file.read_text(encoding="utf-8") if version_file.exists() else ""
    version = _assigned(text, "__version__")
    cuda = _assigned(text, "cuda")
    if version is None or cuda is None or not (package / "lib/libtorch_cuda.so").exists():
        kind = "ROCm" if _assigned(text, "hip") else "CPU-only"
        raise GpuMemError(
            f"the simulated GPU needs a CUDA build of PyTorch, and the installed torch {version or ''} is a "
            f"{kind} build; run pip install --force-reinstall --index-url https://pypi.org/simple torch "
            "and restart the kernel"
        )
    return TorchBuild(version, cuda, package / "lib", _find_headers(package.parent, cuda))


def _assigned(text: str, name: str) -> str | None:
    found = re.search(_ASSIGNED.format(name=name), text, re.MULTILINE)
    return found.group(1) if found else None


def _find_headers(site: Path, cuda: str) -> tuple[Path, ...]:
    """Return the folders to search: first the wheel of torch's own CUDA version, then triton's copy.

    Both are needed: the first has the right version, but parts of its headers come with a compiler package
    that torch does not bring; triton carries those.
    """
    major = cuda.split(".")[0]
    if int(major) < _OLDEST_CUDA:
        raise GpuMemError(
            f"the simulated GPU needs a torch for CUDA {_OLDEST_CUDA} or newer, and the installed one is for "
            f"CUDA {cuda}; run: pip install --upgrade torch"
        )
    folders = (
        site / f"nvidia/cu{major}/include",
        site / "nvidia/cuda_runtime/include",
        site / "triton/backends/nvidia/include",
    )
    found = tuple(folder for folder in folders if (folder / "cuda_runtime_api.h").exists())
    if not found:
        raise GpuMemError(
            f"the headers of CUDA {cuda} are not beside torch; run: pip install triton nvidia-cuda-runtime"
            + ("" if int(major) >= 13 else f"-cu{major}")
        )
    return found
