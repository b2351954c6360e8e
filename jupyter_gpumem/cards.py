"""Memory of well-known cards, as torch reports it (less than the name says: firmware and ECC take some)."""

import difflib
import re

from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.sizes import parse_bytes

_LEAST_BYTES = 1024**2  # a number without a unit is in bytes: who types 24 means something else

CARDS = {
    "T4": "14.56 GiB",
    "P100": "15.89 GiB",
    "V100-16": "15.75 GiB",
    "V100-32": "31.73 GiB",
    "L4": "22.03 GiB",
    "A10G": "22.06 GiB",
    "A30": "23.50 GiB",
    "L40S": "44.39 GiB",
    "A6000": "47.40 GiB",
    "RTX 3060": "11.75 GiB",
    "RTX 3090": "23.68 GiB",
    "RTX 4090": "23.52 GiB",
    "RTX 5090": "31.36 GiB",
    "A100-40": "39.38 GiB",
    "A100-80": "79.15 GiB",
    "H100": "79.10 GiB",
    "H200": "139.72 GiB",
    "B200": "178.35 GiB",
}
"""The smallest total of each card that torch shows in public: in out-of-memory messages, or as programs start."""


def card_bytes(text: str) -> int:
    """Read a size (``24GiB``) or the name of a card (``T4``, ``rtx4090``, ``A100-80``), in bytes.

    Raises
    ------
    GpuMemError
        When it is neither; the message lists the cards.
    """
    known = {_key(name): capacity for name, capacity in CARDS.items()}
    key = _key(text)
    if key in known:
        return parse_bytes(known[key])
    near = _nearest(text, key)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    try:
        nbytes = parse_bytes(text)
    except GpuMemError as error:
        if re.match(r"\s*[-+.\d]", text):
            raise
        raise GpuMemError(f"{text!r} is neither a size nor a known card{hint}   (cards: {', '.join(CARDS)})") from error
    if nbytes < _LEAST_BYTES:
        raise GpuMemError(f"{text!r} is {nbytes:,} bytes{hint or '; write for example 24GiB'}")
    return nbytes


def _nearest(text: str, key: str) -> list[str]:
    if not key:
        return []
    found = [name for name in CARDS if _key(name).startswith(key) or key.startswith(_key(name))]
    found = found or [name for name in CARDS if len(key) > 2 and key in _key(name)]
    return found or difflib.get_close_matches(text, CARDS, 1)


def _key(name: str) -> str:
    text = re.sub(r"[^a-z0-9]", "", re.sub(r"(?i)-?(sxm|hbm)\d\w?|-?pcie?", "", name).lower())
    return re.sub(r"^(nvidia|tesla|geforce)+|(gib|gb)$", "", text)
