"""How many bytes a text takes on its way to the front end, and cutting it to so many."""

import html
import json


def wire_bytes(text: str) -> int:
    """Return the bytes of a text in a message: UTF-8, with what JSON escapes."""
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")) - 2


def clip(text: str, nbytes: int) -> str:
    """Return a text escaped for HTML, its end cut off where it would take more than ``nbytes``."""
    # no character takes less than a byte
    pieces = [html.escape(character) for character in text[: nbytes + 1]]
    sizes = [wire_bytes(piece) for piece in pieces]
    if sum(sizes) <= nbytes and len(text) <= nbytes:
        return "".join(pieces)
    room, kept = nbytes - wire_bytes("…"), 0
    for size in sizes:
        room -= size
        if room < 0:
            break
        kept += 1
    return "".join(pieces[:kept]) + "…"
