"""What the panel's buttons answer, in words."""

from typing import TYPE_CHECKING

from jupyter_gpumem.freed import CELL_ALLOCATES
from jupyter_gpumem.render.layout import shorten
from jupyter_gpumem.sizes import format_bytes, format_delta

if TYPE_CHECKING:
    from jupyter_gpumem.holders import LeakReport
    from jupyter_gpumem.release import FreeReport

_STEPS = {
    "names": "names",
    "outputs": "outputs",
    "error": "last error",
    "debugger": "%debug session",
    "code": "ran",
    "garbage": "garbage",
    "workspaces": "library workspaces",
    "cache": "cache",
}


def free_words(report: "FreeReport") -> tuple[str, ...]:
    """Say what came back: the bytes first, then each step that did something, then the notes."""
    return (_came_back(report), *_step_words(report), *report.notes)


def _came_back(report: "FreeReport") -> str:
    to = "the system" if report.host else "the device"
    freed, returned = format_bytes(report.freed_bytes), format_bytes(report.returned_bytes)
    if report.returned_bytes > 0:
        more = f"{freed} free for new tensors, " if report.freed_bytes > report.returned_bytes else ""
        return f"{more}{returned} given back to {to}"
    if report.cache_waits:
        more = f"{freed} free for new tensors; the" if report.freed_bytes > 0 else "The"
        return f"{more} cache goes back to {to} when the cell ends"
    if report.freed_bytes > 0:
        return f"{freed} free for new tensors; the rest of its segments is in use"
    if any(step.note == CELL_ALLOCATES for step in report.steps):
        return f"Nothing of the cache to give back to {to}"
    return f"Nothing to give back to {to}"


def _step_words(report: "FreeReport") -> list[str]:
    words = []
    for step in report.steps:
        moved = sum(c.reserved_bytes if step.key == "cache" else c.allocated_bytes for c in step.changes)
        # a cell running beside it may have allocated meanwhile
        if moved < 0 or step.note:
            what = f" ({shorten(', '.join(step.items), 80)})" if step.items else ""
            size = f" {format_delta(moved)}" if moved < 0 else ""
            note = f": {step.note}" if step.note else ""
            words.append(f"{_STEPS[step.key]}{what}{size}{note}")
    return words


def leak_words(report: "LeakReport") -> tuple[str, ...]:
    """Say how much can come back and how much nobody explains, device by device."""
    words = []
    held = [device for device in report.devices if device.allocated_bytes]
    for device in held:
        back = sum(holder.shown_bytes for holder in device.holders)
        allocated = format_bytes(device.allocated_bytes)
        first = f"{format_bytes(back)} of {allocated} can be given back" if back else f"All {allocated} are in use"
        unexplained = f", {format_bytes(device.unexplained_bytes)} unexplained" if device.unexplained_bytes else ""
        prefix = f"{device.label}: " if len(held) > 1 else ""
        words.append(f"{prefix}{first}{unexplained}")
    searched = "" if report.complete else "; the search was cut short"
    return (*(words or ["Nothing is on a device"]), f"searched in {report.seconds:.2f} s{searched}", *report.notes)
