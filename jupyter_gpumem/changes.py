"""What to change in the training code, in the bytes that one scan of the heap found."""

from collections.abc import Callable, Iterator
from typing import Any

from jupyter_gpumem.advised import Advice, Shortage
from jupyter_gpumem.attributes import plain_attribute, type_name
from jupyter_gpumem.autocast import bytes_under_autocast
from jupyter_gpumem.copies import find_copies
from jupyter_gpumem.heap import type_namespace
from jupyter_gpumem.passes import find_blocks, parameters_of
from jupyter_gpumem.scene import Scene
from jupyter_gpumem.sizes import format_bytes

_WORTH_A_CHANGE = 0.02
_FINDS = "that fits by itself with --search"
_ROUNDING_BYTES = 2 * 1024**2  # of a large segment
# of transformers, newer name first, and of timm
_BUILT_IN = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "set_grad_checkpointing")


def _smaller_batch(scene: Scene) -> Iterator[Advice]:
    samples, nbytes = scene.largest.batch()
    if samples < 2 or not nbytes or scene.is_evaluation:
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


def _autocast(scene: Scene) -> Iterator[Advice]:
    held = scene.held_by_variables()
    saved = [one for key, one in scene.largest.saved().items() if key not in held]
    now = sum(one.nbytes for one in saved)
    # of transformers, whose losses are taken in float32
    own_loss = any(hasattr(type(module), "loss_function") for _name, module in scene.trained)
    after = bytes_under_autocast(scene.largest, held, loss_in_float=own_loss)
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
    if scene.is_evaluation:
        return
    held = scene.held_by_variables()
    rows = find_blocks(scene.live, scene.torch, scene.modules)
    # a row inside a block of another row goes with that block
    outermost = [path for path in rows if not any(path.startswith(f"{other}[") for other in rows)]
    for path in outermost:
        nbytes, largest = scene.largest.checkpointed_bytes(rows[path], held)
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
    # a step needs them
    if owner is not None and not scene.in_step:
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
    label = f"state of {name} ({kind})"
    whole = max(_whole_state_bytes(scene, scene.names[name]), nbytes)
    if scene.in_step and whole > nbytes:
        label += f", made in its first step: {format_bytes(whole)} in all"
    moving = "{k: v.cpu() if torch.is_tensor(v) else v for k, v in s.items()}"
    smaller = f"bitsandbytes.optim.{kind}8bit keeps {format_bytes(whole // 4)}" if kind.startswith("Adam") else ""
    if scene.in_step:
        # it is needed right now: only an optimizer that keeps less helps
        code = f"{name} = bitsandbytes.optim.{kind}8bit(...)" if smaller else f"{name} = torch.optim.SGD(...)"
        note = f"{smaller}; fused=True needs no room for results on the way" if smaller else ""
        yield Advice("optimizer state", label, whole - whole // 4 if smaller else whole, code, note)
        return
    note = "while you do not train; load_state_dict(state_dict()) brings it back"
    yield Advice(
        "optimizer state",
        label,
        nbytes,
        f"for s in {name}.state.values(): s.update({moving})",
        f"{note}; {smaller}" if smaller else note,
    )


def _whole_state_bytes(scene: Scene, optimizer: object) -> int:
    """Return the bytes of the state once every parameter with a gradient has one."""
    state: Any = plain_attribute(optimizer, "state")
    groups: Any = plain_attribute(optimizer, "param_groups")
    if not issubclass(type(state), dict) or type(groups) is not list:
        return 0
    kept = {id(one): scene.nbytes_of(scene.tensors_in(values)) for one, values in dict.items(state)}
    own = {id(one): scene.nbytes_of([one]) for group in groups for one in group["params"]}
    ratio = max((kept[key] / nbytes for key, nbytes in own.items() if kept.get(key) and nbytes), default=0.0)
    graded = (nbytes for key, nbytes in own.items() if _has_gradient(scene, key))
    return round(ratio * sum(graded))


def _has_gradient(scene: Scene, address: int) -> bool:
    return any(how == "gradient" for _tensor, how in scene.live.graph.links.get(address, ()))


def lighter_weights(scene: Scene) -> Iterator[Advice]:
    """Say what models that do not train would take in half precision."""
    if scene.role_bytes("gradient") or scene.name_of(scene.torch.optim.Optimizer) or scene.activations.nbytes:
        return
    dtype_of = type_namespace(scene.torch._C.TensorBase)["dtype"].__get__
    for name, module in scene.roots:
        full = [one for one in parameters_of(module) if dtype_of(one) is scene.torch.float32]
        nbytes = scene.nbytes_of(full)
        yield Advice(
            "weights",
            f"{name}: {format_bytes(nbytes)} of parameters in float32",
            nbytes // 2,
            f"{name}.to(torch.bfloat16)",
            "before it goes to the GPU, where it is only evaluated",
        )


def what_to_change(scene: Scene) -> Iterator[Advice]:
    """Say what would make the next step smaller."""
    for advise_on in _SUBJECTS:
        yield from advise_on(scene)


def fitting_batch(scene: Scene, shortage: Shortage) -> Iterator[Advice]:
    """Estimate the batch that would have got past the request that failed, from the pass under way."""
    under_way = scene.latest.nbytes
    samples, _growing = scene.latest.batch()
    name, value = scene.batch_size(samples)
    # what torch still has cached lies in pieces of segments that are in use, and a new segment is rounded up
    needed, room = under_way + shortage.asked_bytes + _ROUNDING_BYTES, under_way + shortage.free_bytes
    fitting = value * room // needed
    if samples > 1 and 0 < fitting < value:
        yield Advice(
            "batch",
            f"a batch of at most {fitting} would have got past this ({value} was asked)",
            needed - room,
            f"%%gpu_fit {name}" if name in scene.notebook else f"{name} = {fitting}",
            f"as the first line of the cell: finds the largest {_FINDS}"
            if name in scene.notebook
            else f"%%gpu_fit and jupyter_gpumem.fit() find the largest {_FINDS}",
        )


_SUBJECTS: tuple[Callable[[Scene], Iterator[Advice]], ...] = (
    _smaller_batch,
    _autocast,
    _checkpointing,
    _evaluation,
    _gradients,
    _optimizer_state,
    find_copies,
)
