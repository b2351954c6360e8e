"""Who held the device's memory when a request failed: names, the calls under way, and what went before them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jupyter_gpumem.holders import Holder
from jupyter_gpumem.leak_report import find_leaks
from jupyter_gpumem.where import Spot, frames_of_libraries

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MOST = 12
# what stands beside a name in the path of those who hold something together
_CALLS = re.compile(r", [^,]*a running call or C code [^,]*")
_ERROR = re.compile(r"the last error \([^)]*\)")
_LOCAL_OF_ERROR = re.compile(r"(?:the graph of )?local [^,]* of [^,]*, kept by (the last error \([^)]*\))")
_BUDGET_SECONDS = 10.0

Occupation = Literal["held", "in use", "running", "earlier", "handling"]


@dataclass(frozen=True, slots=True)
class OomHolder:
    """One of those who held most; no byte is told of two.

    ``state`` tells a holder from a model at work (``"in use"``), from the calls under way (``"running"``), from
    an error, garbage or debugger of before (``"earlier"``), and from the exception that an ``except`` block was
    handling.
    """

    path: str
    nbytes: int
    state: Occupation = "held"


def find_occupants(
    shell: "InteractiveShell | None",
    device: int,
    spots: Sequence[Spot],
    under_way: str | None,
    hidden_bytes: int = 0,
) -> tuple[OomHolder, ...]:
    """Say who holds the memory of a device now, the largest first, as numbers and words that hold nothing.

    Parameters
    ----------
    shell
        The shell whose variables are the user's.
    device
        torch's index.
    spots
        The running frames; what only a library's frames among them hold is told in one line, ``under_way``.
    under_way
        That line; None where no calls are under way any more.
    hidden_bytes
        What the calls under way hold in C++, which no Python object knows: a step of backward has its results.
    """
    libraries = frames_of_libraries(shell, spots)
    leaks = find_leaks(shell, device=device, budget_seconds=_BUDGET_SECONDS, passed_over=libraries)
    found = [_named(holder) for holder in (*leaks.holders, *leaks.in_use)]
    if under_way is not None:
        running = [one for one in found if one.state == "running"]
        found = [one for one in found if one.state != "running"]
        found.append(OomHolder(under_way, sum(one.nbytes for one in running) + hidden_bytes, "running"))
    found.sort(key=lambda one: -one.nbytes)
    return tuple(one for one in found if one.nbytes)[:_MOST]


def _named(holder: Holder) -> OomHolder:
    states: dict[str, Occupation] = {
        "unknown": "running",
        "error": "earlier",
        "debugger": "earlier",
        "garbage": "earlier",
        "handling": "handling",
    }
    state = "in use" if holder.section == "in use" else states.get(holder.kind, "held")
    path = recognised(holder.path)
    names = [part for part in path.split(", ") if not part.startswith("local ")]
    if path.startswith("a running call"):
        state = "running"
    return OomHolder(", ".join(names) if state == "in use" and names else path, holder.shown_bytes, state)


def recognised(path: str) -> str:
    """Leave out of a holder's path the variables of functions that an error or a running call keeps."""
    path = _LOCAL_OF_ERROR.sub(r"\1", _CALLS.sub("", path))
    errors = dict.fromkeys(_ERROR.findall(path))
    rest = [part for part in _ERROR.sub("", path).split(", ") if part]
    return ", ".join([*rest, *errors])


def kept_by(path: str) -> str:
    """Return the end of a holder's path that tells what keeps it, such as the last error."""
    return path.rpartition(", kept by ")[2].removeprefix("garbage: ")
