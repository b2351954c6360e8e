"""Advice: a few lines for each, most bytes first, with the code to change."""

from collections.abc import Iterator, Sequence

from jupyter_gpumem.advised import Advice
from jupyter_gpumem.render.layout import Block, Page, Row, Span, code, quiet, size


def advise_page(advice: Sequence[Advice]) -> Page:
    """Write all the advice there is, or that there is none."""
    if not advice:
        return Page((Block(((Span("nothing on the GPU that could be given back or made smaller"),),)),))
    return Page((Block(tuple(advice_rows(advice))),))


def advice_rows(advice: Sequence[Advice]) -> Iterator[Row]:
    """Write the bytes and the label of each, then the code and what else to know, on lines of their own."""
    for one in advice:
        yield size(one.nbytes), Span(one.label)
        for line in one.code.splitlines():
            yield "", code(line)
        if one.note:
            yield "", quiet(f"  {one.note}")
