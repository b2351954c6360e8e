"""The one thing to do next, read off an account."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jupyter_gpumem.sizes import format_bytes

_MIN_BYTES = 1024**2
# free parts of used segments are ordinary; they matter when they are this part of the device
_FRAGMENTED_PART = 0.05

_LOOK = "%gpumem leaks"
# key of a part, what is said of it, what to run; of equal sizes the first is taken
_STEPS = (
    ("returnable", "in torch's cache, free for others once returned", "%gpu_free"),
    ("tensors", "in tensors that are no part of a model", _LOOK),
    ("gradients", "of gradients, made anew by the next backward", "optimizer.zero_grad(set_to_none=True)"),
    ("private_free", "idle in private pools of CUDA graphs", "torch.compiler.reset(), or del the graph"),
    (
        "fragmented",
        "lost to fragmentation",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the kernel starts",
    ),
)


@dataclass(frozen=True, slots=True)
class NextStep:
    """What to do next: a sentence, the code to run, and the bytes it is about."""

    text: str
    code: str
    nbytes: int


def best_step(
    sizes: Mapping[str, int | None],
    kernels: Mapping[str, int | None],
    total_bytes: int | None,
    keepers: Sequence[str] = (),
) -> NextStep | None:
    """Return the step that is about most bytes; ``None`` where none is about a mebibyte.

    Parameters
    ----------
    sizes
        Bytes by part; what a model needs to run is no part of any step.
    kernels
        Bytes by notebook of this user's other kernels on the device.
    total_bytes
        What the device has.
    keepers
        What IPython keeps by itself that holds memory: ``Out[3]``, the last error.
    """
    tensors = (sizes.get("saved") or 0) + (sizes.get("other_tensors") or 0)
    fragmented = sizes.get("fragmented") or 0
    if total_bytes is None or fragmented < _FRAGMENTED_PART * total_bytes:
        fragmented = 0
    known = {**sizes, "tensors": tensors, "fragmented": fragmented}
    steps = [_step(known.get(key) or 0, text, code) for key, text, code in _STEPS]
    steps += [
        _step(nbytes or 0, f"held by the kernel of {notebook}", "shut that kernel down")
        for notebook, nbytes in kernels.items()
    ]
    best = max(steps, key=lambda step: step.nbytes)
    if keepers and best.code == _LOOK:
        # whether a variable keeps it too, only the report can tell
        text = f"{best.text}, some kept by {' and '.join(keepers)}: %gpu_free lets go of that"
        best = NextStep(text, _LOOK, best.nbytes)
    return best if best.nbytes >= _MIN_BYTES else None


def _step(nbytes: int, text: str, code: str) -> NextStep:
    return NextStep(f"{format_bytes(nbytes)} {text}", code, nbytes)
