"""The leak report and the difference to a mark, as pages."""

import textwrap
from collections.abc import Iterator, Sequence

from jupyter_gpumem.holders import DeviceLeaks, Holder, LeakReport, Part, Unexplained
from jupyter_gpumem.leak_report import LeakDiff
from jupyter_gpumem.render.layout import Block, Page, Row, Span, code, exact, quiet, shorten, shorten_path
from jupyter_gpumem.sizes import format_bytes

_SIZE_WIDTH = 10
_TEXT_WIDTH = 86


def leaks_page(report: LeakReport, *, limit: int = 20) -> Page:
    """Write who holds what, the largest first, at most ``limit`` holders a device that give memory back."""
    blocks: list[Block] = []
    for index, device in enumerate(report.devices):
        head = _head(report, device, seconds=index == 0)
        blocks.append(Block((head,)))
        rows = tuple(_sections(device, limit))
        if rows:
            blocks.append(Block(rows))
    notes = tuple((Span(note, style="warn" if not report.complete else "quiet"),) for note in report.notes)
    if not report.devices:
        blocks.append(Block(((quiet("no GPU memory: CUDA has not started"),),)))
    return Page((*blocks, Block(notes)) if notes else tuple(blocks))


def diff_page(difference: LeakDiff, *, limit: int = 20) -> Page:
    """Write who holds what is new since a mark."""
    blocks = []
    for device in difference.new.devices:
        if device.explained_bytes:
            title = f"{format_bytes(device.explained_bytes)} new since the mark"
            blocks.append(Block(((Span(device.label, style="strong"), Span(title)),)))
            blocks.append(Block(tuple(_sections(device, limit))))
    if not blocks:
        blocks.append(Block(((quiet("nothing new since the mark"),),)))
    if difference.gone_bytes:
        gone = Span(f"{format_bytes(difference.gone_bytes)} that were there are gone", exact(difference.gone_bytes))
        blocks.append(Block(((gone,),)))
    notes = tuple((quiet(note),) for note in difference.new.notes)
    return Page((*blocks, Block(notes)) if notes else tuple(blocks))


def _head(report: LeakReport, device: DeviceLeaks, *, seconds: bool) -> Row:
    held = format_bytes(device.allocated_bytes)
    word = "allocated" if report.kind == "cuda" else "in CPU tensors"
    if not report.complete:
        text = f"{held} {word}, not all of it searched"
    elif device.unexplained_bytes:
        text = f"{held} {word}, {format_bytes(device.unexplained_bytes)} of it not explained by any Python object"
    else:
        text = f"{held} {word}, all of it explained" if device.allocated_bytes else f"nothing {word}"
    tail = [quiet(f"{report.seconds:.2f} s")] if seconds else []
    if report.simulated:
        tail.append(quiet("simulated"))
    return (Span(device.label, style="strong"), Span(text, exact(device.allocated_bytes)), *tail)


def _sections(device: DeviceLeaks, limit: int) -> Iterator[Row]:
    if device.holders:
        yield (_column("gives back"), quiet("held by"))
        for holder in device.holders[:limit]:
            yield from _holder(holder)
        yield from _rest(device.holders, limit)
    if device.in_use:
        yield (quiet("in use"),)
        for holder in device.in_use[:limit]:
            yield from _in_use(holder)
        yield from _rest(device.in_use, limit)
    normal = [block for block in device.blocks if block.normal is not None]
    if normal:
        yield (quiet("normal"),)
        for block in normal:
            yield (_bytes(block.nbytes * block.count), Span(_block_words(block)))
    strange = [block for block in device.blocks if block.normal is None]
    if strange:
        yield (quiet("not explained by any Python object"),)
        for block in strange[:limit]:
            yield (_bytes(block.nbytes * block.count), Span(_block_words(block)))


def _holder(holder: Holder) -> Iterator[Row]:
    words = shorten_path(holder.path, _TEXT_WIDTH)
    yield (_bytes(holder.shown_bytes, at_most=holder.at_most), Span(words, holder.path if words != holder.path else ""))
    facts = "; ".join(_facts(holder))
    for line in textwrap.wrap(facts, _TEXT_WIDTH):
        yield (_column(""), quiet(line))
    for part in holder.parts if holder.kind != "together" else ():
        yield (_column(""), quiet(f"{format_bytes(part.nbytes)}  {shorten_path(part.path, _TEXT_WIDTH - 12)}"))
    for line in holder.remedy.splitlines():
        yield (_column(""), code(line))


def _facts(holder: Holder) -> Iterator[str]:
    if holder.kind == "together" and holder.keeps_bytes != holder.shown_bytes:
        yield f"all of them together give back {format_bytes(holder.keeps_bytes)}"
    elif holder.kind == "together":
        yield "only together do they give it back"
    if holder.cell is not None and f"cell {holder.cell}" not in holder.path and holder.kind != "output":
        yield f"set in cell {holder.cell}"
    if holder.note and holder.note != "together":
        yield holder.note.removeprefix("together; ")
    if holder.shared_bytes:
        others = ", ".join(holder.shared_with[:3])
        yield f"shares {format_bytes(holder.shared_bytes)} more with {others}"


def _in_use(holder: Holder) -> Iterator[Row]:
    parts = _part_words(holder.parts)
    yield (_bytes(holder.shown_bytes), Span(shorten(holder.path + (f"  ({parts})" if parts else ""), _TEXT_WIDTH)))
    for line in holder.remedy.splitlines()[:1]:
        yield (_column(""), code(line))


def _part_words(parts: Sequence[Part]) -> str:
    return ", ".join(f"{part.path} {format_bytes(part.nbytes)}" for part in parts)


def _rest(holders: Sequence[Holder], shown: int) -> Iterator[Row]:
    rest = holders[shown:]
    if rest:
        nbytes = sum(holder.shown_bytes for holder in rest)
        yield (_bytes(nbytes), quiet(f"{len(rest):,} more, %gpumem leaks -n {len(holders)} shows them"))


def _block_words(block: Unexplained) -> str:
    many = f"{block.count} blocks of {format_bytes(block.nbytes)}" if block.count > 1 else "one block"
    where = f", made at {block.place}" if block.place else ""
    if block.normal is not None:
        return f"{block.normal}, one per handle and stream{where}"
    return f"{many} held by C++ alone{where}"


def _bytes(nbytes: int, *, at_most: bool = False) -> Span:
    text = ("≤ " if at_most else "") + format_bytes(nbytes)
    return Span(text.rjust(_SIZE_WIDTH), exact(nbytes), right=True)


def _column(text: str) -> Span:
    return Span(text.rjust(_SIZE_WIDTH) if text else "", style="quiet", right=True)
