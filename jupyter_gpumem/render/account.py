"""The account of each device: a bar, the parts with their sums, and the next step."""

from collections.abc import Iterator, Sequence

from jupyter_gpumem.parts import CUDA_NOT_STARTED, Account, Neighbour, Part
from jupyter_gpumem.render.layout import Bar, Block, Page, Row, Span, code, exact, quiet, shorten, size
from jupyter_gpumem.sizes import format_bytes

_NOTE_WIDTH = 64
_MAX_NEIGHBOURS = 5

# key of a part: its name, what that means, its colour (after Okabe and Ito, for every eye), its mark in text
_PARTS = {
    "parameters": ("parameters", "of live nn.Modules", "#0072B2", "█"),
    "gradients": ("gradients", ".grad of parameters and other tensors", "#56B4E9", "█"),
    "optimizer_state": ("optimizer state", "what optimizers keep for each parameter", "#009E73", "█"),
    "buffers": ("buffers", "of live nn.Modules", "#2A9D9D", "█"),
    "saved": ("saved for backward", "what the autograd graph needs for backward()", "#E69F00", "▓"),
    "other_tensors": ("other tensors", "every other tensor that Python can reach", "#CC79A7", "▓"),
    "rounding": ("rounding", "the allocator's blocks are larger than what was asked for", "#B8A000", "▓"),
    "workspaces": ("library workspaces", "scratch memory of cuBLAS, held through torch", "#8C7A5B", "▓"),
    "unexplained": ("unexplained", "blocks that belong to no Python object", "#D55E00", "▓"),
    "unmatched": ("rounding and others", "allocated memory that no tensor accounts for", "#D55E00", "▓"),
    "tensors": ("tensors and others", "all that is allocated, not told apart", "#0072B2", "█"),
    "waiting": (
        "waiting for a stream",
        "freed, but another stream may still use it (record_stream)",
        "#A0A0A0",
        "▒",
    ),
    "returnable": ("cached, returnable", "wholly free segments: empty_cache() returns them", "#BDBDBD", "▒"),
    "fragmented": ("cached, in used parts", "free pieces of segments that are in use", "#8F8F8F", "▒"),
    "private_free": ("free in private pools", "idle memory of CUDA graphs and MemPools", "#777777", "▒"),
    "cache": ("cached", "reserved by torch, holding no tensor", "#BDBDBD", "▒"),
    "context": ("context, libraries", "the CUDA context and other libraries of this process", "#5D6D7E", "░"),
    "rest": ("rest of this process", "code, Python objects, files in memory", "#5D6D7E", "░"),
    "others": ("other processes", "everybody else on the device", "#34495E", "░"),
    "undivided": ("both together", "context and other processes, which cannot be told apart", "#5D6D7E", "░"),
    "free": ("free", "free for every process", "var(--jp-layout-color3,#e0e0e0)", "─"),
}
# said even when it is nothing: that is what people come to see
_ALWAYS = ("unexplained", "others", "free")
_SUMS = {"allocated": "allocated", "reserved": "reserved", "process": "this process"}
_HOST_SUMS = {"allocated": "tensors", "process": "this process"}


def describe_part(key: str) -> tuple[str, str, str]:
    """Return the name of a part, what it means, and its colour."""
    name, meaning, colour, _mark = _PARTS[key]
    return name, meaning, colour


def account_page(accounts: Sequence[Account]) -> Page:
    """Write the accounts, one device after another."""
    if accounts and all(_is_idle(account) for account in accounts):
        return Page((Block(((Span(accounts[0].notes[0]),),)), *_idle_blocks(accounts)))
    return Page(tuple(block for account in accounts for block in _blocks(account)))


def _is_idle(account: Account) -> bool:
    """Tell whether CUDA has not started, so that all there is to tell is what others hold."""
    return account.kind == "cuda" and CUDA_NOT_STARTED in account.notes


def _idle_blocks(accounts: Sequence[Account]) -> Iterator[Block]:
    """Write what others hold; a device with nobody on it is not worth a line."""
    for account in accounts:
        others = account.part("others")
        if others is not None and others.nbytes:
            rows = [row for part in account.parts if part.level == "total" for row in _rows(account, part)]
            yield Block(tuple(rows), head=_head(account))


def _blocks(account: Account) -> Iterator[Block]:
    yield Block(tuple(_table(account)), picture=_bar(account), head=_head(account))
    yield Block(tuple(_footer(account)))


def _head(account: Account) -> Row:
    return (
        Span(account.label, style="strong"),
        Span(account.name, style="quiet"),
        Span(format_bytes(account.total_bytes), exact(account.total_bytes), "strong"),
        *((Span("simulated", "the simulated GPU: real allocator, no real values", "quiet"),) * account.simulated),
    )


def _bar(account: Account) -> Bar | None:
    """Draw the parts in proportion; a bar with a hole in it would mislead."""
    known = [part for part in account.parts if part.nbytes is not None]
    if not account.total_bytes or sum(part.nbytes or 0 for part in known) != account.total_bytes:
        return None
    drawn = ((*_PARTS[part.key], part.nbytes or 0) for part in known)
    parts = tuple((name, nbytes, colour, mark) for name, _meaning, colour, mark, nbytes in drawn)
    return Bar(parts, account.total_bytes)


def _table(account: Account) -> Iterator[Row]:
    """Write the parts, each level followed by its sum."""
    sums = _HOST_SUMS if account.kind == "host" else _SUMS
    for level in ("allocated", "reserved", "process", "total"):
        parts = [part for part in account.parts if part.level == level]
        for part in parts:
            if part.nbytes != 0 or part.key in _ALWAYS:
                yield from _rows(account, part)
        if level in sums and parts:
            yield Span(sums[level], style="strong"), size(_sum(account, level), "strong"), ""


def _sum(account: Account, level: str) -> int | None:
    figures = {
        "allocated": account.allocated_bytes,
        "reserved": account.reserved_bytes,
        "process": account.process_bytes,
    }
    return figures[level]


def _rows(account: Account, part: Part) -> Iterator[Row]:
    if part.key == "tensors":
        return
    name, meaning, _colour, _mark = _PARTS[part.key]
    yield Span(f"  {name}", meaning), size(part.nbytes), quiet(_note(account, part))
    holds_neighbours = part.key == "undivided" or (part.key == "others" and part.nbytes is not None)
    if holds_neighbours and account.neighbours:
        yield from _neighbour_rows(account.neighbours)


def _note(account: Account, part: Part) -> str:
    if part.note:
        return part.note if part.key != "optimizer_state" else f"{part.note}, {_counted(part, 'tensor')}"
    if part.key == "workspaces":
        return "cuBLAS, normal"
    if part.key == "fragmented" and account.largest_free_bytes:
        return f"largest block {format_bytes(account.largest_free_bytes)}"
    if part.key == "others" and part.nbytes and account.kind != "host" and not account.neighbours:
        return "by processes not visible from here"
    if part.key in ("unexplained", "private_free"):
        return _counted(part, "block" if part.key == "unexplained" else "pool")
    return _counted(part, "tensor")


def _counted(part: Part, word: str) -> str:
    if not part.count:
        return ""
    return f"{part.count:,} {word}" + ("s" if part.count > 1 else "")


def _neighbour_rows(neighbours: Sequence[Neighbour]) -> Iterator[Row]:
    for one in neighbours[:_MAX_NEIGHBOURS]:
        yield (
            Span(""),
            size(one.used_bytes, "quiet"),
            Span(shorten(str(one.name), _NOTE_WIDTH), str(one.name), "quiet"),
        )
    more = len(neighbours) - _MAX_NEIGHBOURS
    if more > 0:
        yield Span(""), Span(""), quiet(f"{more} more")


def _footer(account: Account) -> Iterator[Row]:
    for note in account.notes:
        yield (quiet(note),)
    if account.next_step is not None:
        yield Span(account.next_step.text), code(account.next_step.code)
    context = account.part("context")
    if context is not None and context.nbytes:
        yield (quiet(f"only a restart gives back the context: {format_bytes(context.nbytes)}"),)
