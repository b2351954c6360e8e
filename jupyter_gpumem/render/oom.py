"""After an out-of-memory error: where, why, what the device held at that moment, and what would help."""

from collections.abc import Iterator

from jupyter_gpumem.moments import OomMoment
from jupyter_gpumem.occupants import OomHolder, kept_by
from jupyter_gpumem.oom import OomReport
from jupyter_gpumem.render.account import account_page
from jupyter_gpumem.render.advise import advice_rows
from jupyter_gpumem.render.layout import Block, Page, Row, Span, exact, quiet, shorten_path, size
from jupyter_gpumem.sizes import format_bytes

_HOLDERS = 5
_PATH_WIDTH = 70
_MIN_BYTES = 1024**2
# what held memory before the attempt began, and how one lets go of it
_EARLIER = {
    "earlier": "%gpu_free before the cell runs again gives that back",
    "handling": "try again after the except block, where the error and its frames are gone",
}


def oom_page(report: OomReport) -> Page:
    """Write the report: why, the account and the largest holders, and what would help."""
    moment = report.moment
    blocks = [Block(((Span(_headline(report), style="warn"),), *_why(moment)))]
    if moment.account is not None:
        blocks += account_page((moment.account,)).blocks[:1]
    holders = [holder for holder in moment.holders if holder.nbytes >= _MIN_BYTES][:_HOLDERS]
    if holders:
        when = "now that the cell has ended" if moment.seen_late else "at that moment"
        when = f"largest holders, {when}"
        blocks.append(Block(tuple(_holder(holder) for holder in holders), indent=2, head=(quiet(when),)))
    if report.advice:
        rows = tuple(advice_rows(report.advice))
        blocks.append(Block(rows, indent=2, head=(Span("what would help, most first", style="strong"),)))
    return Page(tuple(blocks))


def _headline(report: OomReport) -> str:
    moment = report.moment
    asked = "" if moment.asked_bytes is None else f": asked for {format_bytes(moment.asked_bytes)}"
    where = f"{report.where}{asked} on {_label(moment)}"
    if not report.handled:
        return f"Out of memory in {where}"
    if report.failed == 1:
        return f"Ran out of memory once and went on, in {where}"
    return f"Ran out of memory {report.failed} times and went on, the first time in {where}"


def _label(moment: OomMoment) -> str:
    return f"GPU {moment.device}" if moment.account is None else moment.account.label


def _why(moment: OomMoment) -> Iterator[Row]:
    free = f"free on the device {format_bytes(moment.free_bytes)}"
    cached = f"free in torch's cache {format_bytes(moment.cached_bytes)}"
    if moment.largest_free_bytes is not None and moment.cached_bytes:
        cached += f" but no block over {format_bytes(moment.largest_free_bytes)}"
    yield (Span(f"  {free}, {cached}", exact(moment.free_bytes)),)
    yield (Span(f"  {_cause(moment)}", style="strong"),)
    for state, then in _EARLIER.items():
        earlier = [holder for holder in moment.earlier if holder.state == state]
        nbytes = sum(holder.nbytes for holder in earlier)
        if nbytes >= _MIN_BYTES:
            names = " and ".join(dict.fromkeys(kept_by(holder.path) for holder in earlier))
            held = f"  {format_bytes(nbytes)} of it were still held by {names}: {then}"
            yield (Span(held, exact(nbytes), style="strong"),)


def _cause(moment: OomMoment) -> str:
    others = moment.others_bytes
    return {
        "larger than the device": f"more than the whole empty device has ({format_bytes(moment.most_bytes)}): "
        "no freeing helps, only a smaller tensor, dtype or batch",
        "fragmented": "fragmented: there is enough free memory, in pieces that are too small",
        "limit": f"this process may take {format_bytes(moment.limit_bytes)} at most: its own limit",
        "other processes": f"other processes hold {format_bytes(others)}: without them it would have fitted",
        "unknown": "the error does not say how much was asked for and was free",
        "full": f"the device is full: {format_bytes(_missing(moment))} too little",
    }[moment.cause]


def _missing(moment: OomMoment) -> int | None:
    if moment.asked_bytes is None or moment.free_bytes is None:
        return None
    return moment.asked_bytes - moment.free_bytes - moment.cached_bytes


def _holder(holder: OomHolder) -> Row:
    words = [quiet("in use")] if holder.state == "in use" else []
    return size(holder.nbytes), Span(shorten_path(holder.path, _PATH_WIDTH), holder.path), *words
