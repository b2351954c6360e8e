"""Sizes in bytes, to and from the text people read and type."""

import re

from jupyter_gpumem.errors import GpuMemError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {
    "": 1,
    "b": 1,
    **{prefix + suffix: 1024**power for power, prefix in enumerate("kmgtp", 1) for suffix in ("", "b", "ib")},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def format_bytes(nbytes: int | None) -> str:
    """Write a size with three significant digits and a binary unit; ``None`` is ``unknown``."""
    if nbytes is None:
        return "unknown"
    if nbytes < 0:
        return "\N{MINUS SIGN}" + format_bytes(-nbytes)
    if nbytes < 1024:
        return f"{nbytes} B"
    value, unit = float(nbytes), 0
    # 1023.5 KiB would round to a fourth digit, so it is already 1.00 MiB
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 3 if value < 0.9995 else 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def format_delta(nbytes: int | None) -> str:
    """Write a change of size with its sign (``+512 MiB``, ``−1.20 GiB``, ``+0 B``)."""
    if nbytes is None:
        return "unknown"
    return format_bytes(nbytes) if nbytes < 0 else "+" + format_bytes(nbytes)


def parse_bytes(text: str | int) -> int:
    """Read a size such as ``24GiB``, ``512 MB`` or ``1.5g``; all units are powers of 1024.

    Raises
    ------
    GpuMemError
        When the text is no size, or is not above zero.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        nbytes = text
    else:
        match = _SIZE.fullmatch(str(text))
        factor = _FACTORS.get(match.group(2).lower()) if match else None
        if match is None or factor is None:
            raise GpuMemError(f"{text!r} is not a size; write for example 24GiB or 512MiB")
        nbytes = round(float(match.group(1)) * factor)
    if nbytes <= 0:
        raise GpuMemError(f"{text!r} is not a size above zero; write for example 24GiB or 512MiB")
    return nbytes
