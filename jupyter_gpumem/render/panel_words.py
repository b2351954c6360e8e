"""What the panel's buttons answer, in words."""

from typing import TYPE_CHECKING

from jupyter_gpumem.sizes import format_bytes, format_delta

if TYPE_CHECKING:
    from jupyter_gpumem.release import FreeReport

_STEPS = {
    "names": "names",
    "outputs": "outputs",
    "error": "last error",
    "debugger": "%debug session",
    "garbage": "garbage",
    "workspaces": "library workspaces",
    "cache": "cache",
}


def free_words(report: "FreeReport") -> tuple[str, ...]:
    """Say what came back: the bytes first, then each step that did something, then the notes."""
    to = "the system" if report.kind == "host" else "the device"
    returned, freed = max(report.returned_bytes, 0), max(report.freed_bytes, 0)
    first = f"{format_bytes(returned)} given back to {to}" if returned else f"Nothing to give back to {to}"
    if freed and freed != returned:
        first += f", {format_bytes(freed)} of it from tensors" if returned > freed else f"; tensors freed {format_bytes(freed)}"
    return (first, *_step_words(report), *_name_words(report))


def _step_words(report: "FreeReport") -> list[str]:
    words = []
    for step in report.steps:
        moved = sum(c.reserved_bytes if step.key == "cache" else c.allocated_bytes for c in step.changes)
        if moved or step.note:
            what = f" ({', '.join(step.items)})" if step.items else ""
            size = f" {format_delta(moved)}" if moved else ""
            note = f" {step.note}" if step.note else ""
            words.append(f"{_STEPS[step.key]}{what}{size}{note}")
    return words


def _name_words(report: "FreeReport") -> list[str]:
    return [f"{name}: its object is still held by {', '.join(others)}" for name, others in report.other_names]


def leak_words(report: object) -> tuple[str, ...]:
    """Say how much is held."""
    return ("",)
