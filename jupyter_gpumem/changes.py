"""What to change in the training code, in the bytes that one scan of the heap found."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jupyter_gpumem.activations import Block
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
_BY_HAND = "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
_ROUNDING_BYTES = 2 * 1024**2  # of a large segment
# of transformers, newer name first, and of timm
_BUILT_IN = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "set_grad_checkpointing")


def _smaller_batch(scene: Scene) -> Iterator[Advice]:
    samples, nbytes = scene.batch(scene.largest)
    if samples < 2 or not nbytes or scene.is_evaluation:
        return
    half = samples // 2
    steps = -(-samples // half)
    yield Advice(
        "gradient accumulation",
        f"gradient accumulation: each of {samples} samples takes {format_bytes(nbytes // samples)} of activations",
        nbytes - nbytes * half // samples,
        _code_for_batch(scene.batch_name(samples), half),
        f"(loss / {steps}).backward(), and a step every {steps} batches",
    )


def _code_for_batch(name: str | None, samples: int) -> str:
    return f"for part in batch.split({samples}): ..." if name is None else f"{name} = {samples}"


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
    for code, paths in _rows_by_code(scene, rows).items():
        found = {path: scene.largest.checkpointed_bytes(rows[path], held) for path in paths}
        worth = {path: rows[path] for path in paths if found[path][0]}
        if worth:
            largest = max(found[path][1] for path in worth)
            nbytes = scene.largest.checkpointed_bytes(_in_a_row(worth), held)[0]
            yield _about_rows(worth, _BY_HAND if code in rows else code, nbytes, largest)


def _rows_by_code(scene: Scene, rows: Mapping[str, Sequence[Block]]) -> dict[str, list[str]]:
    """Return the paths of the outermost rows of blocks by the code that checkpoints them, by hand by their own."""
    # a row inside a block of another row goes with that block
    outermost = [path for path in rows if not any(path.startswith(f"{other}[") for other in rows)]
    by_code: dict[str, list[str]] = {}
    for path in outermost:
        root = path.split(".")[0].split("[")[0]
        built_in = next((name for name in _BUILT_IN if hasattr(type(scene.names.get(root)), name)), None)
        # a method of the model's own is for all of its rows at once
        by_code.setdefault(path if built_in is None else f"{root}.{built_in}()", []).append(path)
    return by_code


def _in_a_row(rows: Mapping[str, Sequence[Block]]) -> list[Block]:
    """Return the blocks of several rows as one: what leaves one row enters the next, by themselves both keep it."""
    blocks = [block for row in rows.values() for block in row]
    return [replace(block, number=number) for number, block in enumerate(blocks)]


def _about_rows(rows: Mapping[str, Sequence[Block]], code: str, nbytes: int, largest_bytes: int) -> Advice:
    blocks, where = _in_a_row(rows), ", ".join(rows)
    kinds = " and ".join(sorted({block.kind for block in blocks}))
    return Advice(
        "activation checkpointing",
        f"checkpoint {where}: {len(blocks)} x {kinds}, {format_bytes(largest_bytes)} of activations each",
        nbytes,
        code,
        f"for each block of {where}, which is computed once more in backward",
    )


def _evaluation(scene: Scene) -> Iterator[Advice]:
    for name, module in scene.roots:
        if plain_attribute(module, "training") is not False:
            continue
        graphs = scene.made_alike({id(tensor) for tensor in parameters_of(module)})
        stays = scene.held_by_variables(with_graphs=True)
        kept = {key: one.nbytes for graph in graphs for key, one in graph.saved().items() if key not in stays}
        yield Advice(
            "no_grad",
            f"{name} is in evaluation mode, yet its activations are kept for backward",
            sum(kept.values()),
            f"with torch.no_grad(): output = {name}(batch)",
        )


def _gradients(scene: Scene) -> Iterator[Advice]:
    if scene.steps:  # a step needs them
        return
    owners = {name: parameters for name, (_optimizer, parameters) in scene.optimizers.items()}
    owners |= {
        name: [one for one in parameters_of(module) if id(one) not in scene.optimized] for name, module in scene.roots
    }
    told = set[int]()
    for name, parameters in owners.items():
        # those of the backward pass under way would be made again
        own = [one for one in parameters if id(one) not in told and not (scene.in_backward and scene.in_graph([one]))]
        told.update(map(id, own))
        nbytes = scene.nbytes_of(scene.gradients_of(own))
        code = f"{name}.zero_grad(set_to_none=True)"
        yield Advice("gradients", "gradients, made anew by the next backward", nbytes, code)


def _optimizer_state(scene: Scene) -> Iterator[Advice]:
    for name, (optimizer, _parameters) in scene.optimizers.items():
        state: Any = plain_attribute(optimizer, "state")
        values = list(dict.values(state)) if issubclass(type(state), dict) else []
        nbytes = scene.nbytes_of(one for kept in values for one in scene.tensors_in(kept))
        if nbytes:
            yield _about_state(scene, name, optimizer, nbytes)


def _about_state(scene: Scene, name: str, optimizer: object, nbytes: int) -> Advice:
    kind = type_name(optimizer)
    label = f"state of {name} ({kind})"
    in_step = id(optimizer) in scene.steps
    whole = max(_whole_state_bytes(scene, optimizer), nbytes)
    if in_step and whole > nbytes:
        label += f", made in its first step: {format_bytes(whole)} in all"
    moving = "{k: v.cpu() if torch.is_tensor(v) else v for k, v in s.items()}"
    smaller = f"bitsandbytes.optim.{kind}8bit keeps {format_bytes(whole // 4)}" if kind.startswith("Adam") else ""
    if in_step:
        # it is needed right now: only an optimizer that keeps less helps
        code = f"{name} = bitsandbytes.optim.{kind}8bit(...)" if smaller else f"{name} = torch.optim.SGD(...)"
        note = f"{smaller}; fused=True needs no room for results on the way" if smaller else ""
        return Advice("optimizer state", label, whole - whole // 4 if smaller else whole, code, note)
    note = "while you do not train; load_state_dict(state_dict()) brings it back"
    code = f"for s in {name}.state.values(): s.update({moving})"
    return Advice("optimizer state", label, nbytes, code, f"{note}; {smaller}" if smaller else note)


def _whole_state_bytes(scene: Scene, optimizer: object) -> int:
    """Return the bytes of the state once every parameter with a gradient has one."""
    state: Any = plain_attribute(optimizer, "state")
    groups: Any = plain_attribute(optimizer, "param_groups")
    if not issubclass(type(state), dict) or type(groups) is not list:
        return 0
    kept = {id(one): scene.nbytes_of(scene.tensors_in(values)) for one, values in dict.items(state)}
    own = {id(one): scene.nbytes_of([one]) for group in groups for one in group["params"]}
    ratio = max((kept[key] / nbytes for key, nbytes in own.items() if kept.get(key) and nbytes), default=0.0)
    graded = [one for group in groups for one in group["params"] if scene.gradients_of([one])]
    return round(ratio * sum(own[id(one)] for one in graded))


def lighter_weights(scene: Scene) -> Iterator[Advice]:
    """Say what models that do not train would take in half precision."""
    if scene.in_backward or scene.role_bytes("gradient") or scene.optimizers or scene.activations.nbytes:
        return
    if any(plain_attribute(module, "training") for module in scene.forwards):
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
    """Say which batch is certainly too large, where the request that failed belongs to the only pass there is."""
    samples, growing = scene.batch(scene.latest)
    if not scene.in_forward or (scene.has_other_passes and not scene.recomputes) or samples < 2:
        return
    under_way = growing if scene.recomputes else max(scene.latest.nbytes, growing)
    # what torch still has cached lies in pieces of segments that are in use, and a new segment is rounded up
    needed, room = under_way + shortage.asked_bytes + _ROUNDING_BYTES, under_way + shortage.free_bytes
    fitting = samples * room // needed
    if not 0 < fitting < samples:
        return
    name = scene.batch_name(samples)
    label = f"no batch over {fitting} would have got past this ({samples} was asked)"
    if name in scene.notebook:
        code, note = f"%%gpu_fit {name}", f"as the first line of the cell: finds the largest {_FINDS}"
    else:
        code = _code_for_batch(name, fitting)
        note = f"%%gpu_fit and jupyter_gpumem.fit() find the largest {_FINDS}"
    yield Advice("batch", label, needed - room, code, note)


_SUBJECTS: tuple[Callable[[Scene], Iterator[Advice]], ...] = (
    _smaller_batch,
    _autocast,
    _checkpointing,
    _evaluation,
    _gradients,
    _optimizer_state,
    find_copies,
)
