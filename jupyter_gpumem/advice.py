"""What would give memory back or make the next step fit, in bytes, with the code to change.

Each figure is read from what is on the device now; advice that does not apply is not given.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.accounts import Account, take_account
from jupyter_gpumem.attributes import plain_attribute, type_name
from jupyter_gpumem.blocks import read_blocks
from jupyter_gpumem.device import cuda_started, torch_module
from jupyter_gpumem.heap import Clock, Heap, OutOfTimeError, collector_paused, type_namespace
from jupyter_gpumem.holders import Holder, LeakReport
from jupyter_gpumem.leak_report import find_leaks
from jupyter_gpumem.passes import find_blocks, parameters_of
from jupyter_gpumem.roots import Roots
from jupyter_gpumem.scene import Scene
from jupyter_gpumem.sizes import format_bytes
from jupyter_gpumem.tensors import Key, live_tensors

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MIN_BYTES = 1024**2
_FRAGMENTED_PART = 0.1  # below this part of what is reserved it is ordinary
_WORTH_A_CHANGE = 0.02
# of transformers, newer name first, and of timm
_BUILT_IN = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "set_grad_checkpointing")
_PAGE_BYTES = 20 * 1024**2
_BUDGET_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change: what, the bytes it is about, the code, and what else to know.

    ``nbytes`` is what is given back, now or from the next step on. ``subject`` names the kind of advice.
    """

    subject: str
    label: str
    nbytes: int
    code: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {field: getattr(self, field) for field in self.__slots__}


@dataclass(frozen=True, slots=True)
class Shortage:
    """A request that failed: what it asked for and what was free, on the device and in torch's cache, in bytes."""

    asked_bytes: int
    free_bytes: int


def advise(
    shell: "InteractiveShell | None" = None,
    *,
    leaks: LeakReport | None = None,
    device: int | None = None,
    shortage: Shortage | None = None,
) -> tuple[Advice, ...]:
    """Say what would give GPU memory back or make the next step fit, most bytes first.

    Parameters
    ----------
    shell
        The shell whose variables are the user's; without one they are those of ``__main__``.
    leaks
        A leak report of this moment, where there is one already.
    device
        torch's index of the only device to speak of.
    shortage
        The request for memory that has just failed, where one has.

    Notes
    -----
    Figures of different lines do not add up: several may be about the same bytes.
    """
    torch = torch_module()
    if torch is None or not cuda_started():
        return ()
    if leaks is None:
        leaks = find_leaks(shell, device=device)
    found = _about_tensors(shell, torch, leaks, device, shortage)
    found += _about_allocator(take_account(shell, device))
    if shortage is None:
        found += _about_host(shell, torch)
    worth = [one for one in found if one.nbytes >= _MIN_BYTES]
    return tuple(sorted(worth, key=lambda one: -one.nbytes))


def _about_tensors(
    shell: "InteractiveShell | None",
    torch: ModuleType,
    leaks: LeakReport,
    device: int | None,
    shortage: Shortage | None,
) -> list[Advice]:
    """Return the advice that one scan of the heap gives; the scan is dropped before returning."""
    roots = Roots(shell)
    clock = Clock(_BUDGET_SECONDS)
    with collector_paused():
        try:
            live = live_tensors(Heap(clock, roots.starts()), torch, "cuda", clock)
        except OutOfTimeError:
            return [advice for holder in leaks.holders if (advice := _from_holder(holder)) is not None]
        scene = Scene(live, torch, _namespace(shell), device)
        found = [advice for advise_on in _SUBJECTS for advice in advise_on(scene)]
        found += () if shortage is None else _fitting_batch(scene, shortage)
        copies = {advice.label.split(":")[0] for advice in found if advice.subject == "duplicate"}
        for holder in leaks.holders:
            advice = _with_values(scene, holder) or _from_holder(holder)
            if advice is not None and holder.expression not in copies:
                found.append(advice)
        del scene, live
    return found


def _smaller_batch(scene: Scene) -> Iterator[Advice]:
    samples, nbytes = scene.largest.batch()
    if samples < 2 or not nbytes:
        return
    name, value = scene.batch_size(samples)
    each = format_bytes(nbytes // value)
    half = value // 2
    yield Advice(
        "gradient accumulation",
        f"gradient accumulation: each of {value} samples takes {each} of activations",
        nbytes - nbytes * half // value,
        f"{name} = {half}",
        f"(loss / {-(-value // half)}).backward(), and a step every {-(-value // half)} batches",
    )


def _fitting_batch(scene: Scene, shortage: Shortage) -> Iterator[Advice]:
    """Estimate the batch that would have got past the request that failed, from the pass under way."""
    under_way = scene.latest.nbytes
    samples, _growing = scene.latest.batch()
    name, value = scene.batch_size(samples)
    needed, room = under_way + shortage.asked_bytes, under_way + shortage.free_bytes
    fitting = value * room // needed
    if samples > 1 and 0 < fitting < value:
        yield Advice(
            "batch",
            f"a batch of at most {fitting} would have got past this ({value} was asked)",
            needed - room,
            f"%%gpu_fit {name}",
            "as the first line of the cell: finds the largest that fits by itself with --search",
        )


def _autocast(scene: Scene) -> Iterator[Advice]:
    held = scene.held_by_variables()
    saved = [one for key, one in scene.largest.saved().items() if key not in held]
    now, after = sum(one.nbytes for one in saved), scene.largest.under_autocast_bytes(held)
    # what is small beside the whole is within the error of the estimate
    if after is not None and now - after > _WORTH_A_CHANGE * now:
        full = sum(one.nbytes for one in saved if one.dtype == "torch.float32")
        yield Advice(
            "mixed precision",
            f"mixed precision: {format_bytes(full)} of activations are in float32",
            now - after,
            'with torch.autocast("cuda", torch.bfloat16): ...',
            f"around the forward pass and the loss: {format_bytes(after)} instead of {format_bytes(now)}",
        )


def _checkpointing(scene: Scene) -> Iterator[Advice]:
    rows = find_blocks(scene.live, scene.torch, scene.modules)
    # a row inside a block of another row goes with that block
    outermost = [path for path in rows if not any(path.startswith(f"{other}[") for other in rows)]
    for path in outermost:
        nbytes, largest = scene.largest.checkpointed_bytes(rows[path])
        root = path.split(".")[0].split("[")[0]
        built_in = next((name for name in _BUILT_IN if hasattr(type(scene.names.get(root)), name)), None)
        by_hand = "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
        yield Advice(
            "activation checkpointing",
            f"checkpoint {path}: {len(rows[path])} x {rows[path][0].kind}, {format_bytes(largest)} of activations each",
            nbytes,
            by_hand if built_in is None else f"{root}.{built_in}()",
            f"for each block of {path}, which is computed once more in backward",
        )


def _evaluation(scene: Scene) -> Iterator[Advice]:
    for name, module in scene.roots:
        parameters = [id(tensor) for tensor in parameters_of(module)]
        if plain_attribute(module, "training") is False and scene.activations.trains(parameters):
            yield Advice(
                "no_grad",
                f"{name} is in evaluation mode, yet its activations are kept for backward",
                scene.activations.nbytes,
                f"with torch.no_grad(): output = {name}(batch)",
            )


def _gradients(scene: Scene) -> Iterator[Advice]:
    optimizer = scene.name_of(scene.torch.optim.Optimizer)
    owner = optimizer or next((name for name, _module in scene.roots), None)
    if owner is not None:
        yield Advice(
            "gradients",
            "gradients, made anew by the next backward",
            scene.role_bytes("gradient"),
            f"{owner}.zero_grad(set_to_none=True)",
        )


def _optimizer_state(scene: Scene) -> Iterator[Advice]:
    name = scene.name_of(scene.torch.optim.Optimizer)
    nbytes = scene.role_bytes("optimizer state")
    if name is None or not nbytes:
        return
    kind = type_name(scene.names[name])
    moving = "{k: v.cpu() if torch.is_tensor(v) else v for k, v in s.items()}"
    note = "while you do not train; load_state_dict(state_dict()) brings it back"
    if kind.startswith("Adam"):
        note += f"; bitsandbytes.optim.{kind}8bit would keep {format_bytes(nbytes // 4)}"
    yield Advice(
        "optimizer state",
        f"state of {name} ({kind})",
        nbytes,
        f"for s in {name}.state.values(): s.update({moving})",
        note,
    )


def _duplicates(scene: Scene) -> Iterator[Advice]:
    """Find modules and checkpoints with the very shapes of an earlier model."""
    known: dict[tuple[Any, ...], str] = {}
    taken: set[Key] = set()
    for name, module in scene.roots:
        own = list(parameters_of(module))
        keys = {key for tensor in own for key in scene.live.keys_of(id(tensor))}
        first = known.setdefault(_shapes(scene, own), name)
        # a wrapper, such as torch.compile's, has the parameters of the model it wraps
        if first != name and keys and not keys & taken:
            label = f"{name}: a model of the same shape as {first}"
            yield Advice("duplicate", label, scene.nbytes_of(own), f"{name}.cpu()", f"or del {name}")
        taken |= keys
    for name, value in scene.names.items():
        if not isinstance(value, dict) or name.startswith("_"):
            continue
        tensors = scene.tensors_in(value)
        shapes = _shapes(scene, tensors)
        model = next((known[wanted] for wanted in known if wanted and _covers(shapes, wanted)), None)
        nbytes = scene.nbytes_of(one for one in tensors if not taken.intersection(scene.live.keys_of(id(one))))
        if model is not None and nbytes:
            label = f"{name}: a checkpoint of {model}"
            code = f"{name} = {_each(name, value, 'cpu()')}"
            yield Advice("duplicate", label, nbytes, code, 'torch.load(..., map_location="cpu") puts none on the GPU')


def _shapes(scene: Scene, tensors: Iterable[Any]) -> tuple[Any, ...]:
    shape = type_namespace(scene.torch._C.TensorBase)["shape"].__get__
    return tuple(sorted(tuple(shape(tensor)) for tensor in tensors))


def _covers(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    rest = list(found)
    for shape in wanted:
        if shape not in rest:
            return False
        rest.remove(shape)
    return True


_SUBJECTS: tuple[Callable[[Scene], Iterator[Advice]], ...] = (
    _smaller_batch,
    _autocast,
    _checkpointing,
    _evaluation,
    _gradients,
    _optimizer_state,
    _duplicates,
)


def _from_holder(holder: Holder) -> Advice | None:
    """Turn a line of the leak report that gives something back into advice."""
    if not holder.remedy or holder.kind == "together":
        return None
    subject = "kept loss" if "item()" in holder.remedy else "holder"
    return Advice(subject, holder.path, holder.keeps_bytes, holder.remedy, holder.note)


def _with_values(scene: Scene, holder: Holder) -> Advice | None:
    """Look at the variable of a holder: outputs that keep graphs, or data that may wait on the CPU."""
    name = holder.expression
    if holder.kind != "variable" or name is None or not name.isidentifier() or name not in scene.names:
        return None
    value = scene.names[name]
    tensors = scene.tensors_in(value)
    if not tensors or "item()" in holder.remedy:
        return None
    if any(how == "graph" for one in tensors for _node, how in scene.live.graph.links.get(id(one), ())):
        return Advice(
            "no_grad",
            f"{holder.path} keeps graphs that no backward has used",
            holder.keeps_bytes - scene.nbytes_of(tensors),
            f"{name} = {_each(name, value, 'detach()')}",
            "or compute it under torch.no_grad()",
        )
    code = f"{name} = {_each(name, value, 'cpu()')}"
    return Advice("to the CPU", holder.path, holder.keeps_bytes, code, holder.note)


def _each(name: str, value: object, call: str) -> str:
    """Return code that calls a method on a tensor, or on each tensor of a container."""
    if isinstance(value, dict):
        return f"{{key: value.{call} for key, value in {name}.items()}}"
    if type(value) is list:
        return f"[item.{call} for item in {name}]"
    return f"tuple(item.{call} for item in {name})" if type(value) is tuple else f"{name}.{call}"


def _about_allocator(accounts: Iterable[Account]) -> Iterator[Advice]:
    lost = _lost_bytes()
    for account in accounts:
        if lost.get(account.device, 0) > _FRAGMENTED_PART * (account.reserved_bytes or 0):
            largest = format_bytes(account.largest_free_bytes)
            yield Advice(
                "fragmentation",
                f"free pieces of used segments on {account.label}, none over {largest}",
                lost[account.device],
                'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
                "in the first cell, before torch is imported",
            )
        cached = account.part("returnable")
        if cached is not None and cached.nbytes:
            label = f"torch's cache on {account.label}"
            yield Advice("cache", label, cached.nbytes, "torch.cuda.empty_cache()", "for other processes")
        for neighbour in account.neighbours or ():
            yield _about_process(neighbour.name.pid, str(neighbour.name), neighbour.used_bytes or 0)


def _lost_bytes() -> dict[int, int]:
    """Return what expandable segments would give back on each device: they are mapped in pages of 20 MiB."""
    lost: dict[int, int] = {}
    for (device, _segment), blocks in groupby(read_blocks(), key=lambda block: (block.device, block.segment)):
        segment = list(blocks)
        in_use = any(block.state != "inactive" for block in segment)
        if in_use and not segment[0].expandable and segment[0].pool == (0, 0):
            whole = sum(block.size_bytes // _PAGE_BYTES for block in segment if block.state == "inactive")
            lost[device] = lost.get(device, 0) + whole * _PAGE_BYTES
    return lost


def _about_process(pid: int, name: str, nbytes: int) -> Advice:
    if pid in {child.pid for child in multiprocessing.active_children()}:
        label = f"a worker process of this one holds memory: {name}"
        note = "a data set should give CPU tensors: the batch goes to the GPU in the training loop"
        return Advice("worker", label, nbytes, "DataLoader(..., num_workers=0)", note)
    return Advice("other process", f"another process: {name}", nbytes, f"!kill {pid}", "if it is yours and idle")


def _about_host(shell: "InteractiveShell | None", torch: ModuleType) -> Iterator[Advice]:
    read = getattr(torch.cuda, "host_memory_stats", None)
    loader = torch.utils.data.DataLoader
    names = [
        name
        for name, value in _namespace(shell).items()
        if issubclass(type(value), loader) and plain_attribute(value, "pin_memory") is True
    ]
    if read is not None and names:
        nbytes = int(read().get("allocated_bytes.current", 0))
        label = f"RAM pinned for {names[0]}: none of it is on the GPU"
        yield Advice("pinned memory", label, nbytes, "DataLoader(..., pin_memory=False)")


def _namespace(shell: "InteractiveShell | None") -> dict[str, Any]:
    import sys

    return shell.user_ns if shell is not None else vars(sys.modules["__main__"])
