"""The parts of the panel as HTML: figures, bar, result, holders, neighbours. Every text is escaped."""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

from jupyter_gpumem.cells import CellRecord
from jupyter_gpumem.holders import Holder
from jupyter_gpumem.monitor import Reading, Use
from jupyter_gpumem.parts import Account, Neighbour
from jupyter_gpumem.readings import DeviceSnapshot
from jupyter_gpumem.render.account import describe_part
from jupyter_gpumem.render.layout import exact, shorten
from jupyter_gpumem.render.wire import clip, wire_bytes
from jupyter_gpumem.sizes import format_bytes

_PATH_CHARACTERS = 160
_TITLE_BYTES = 200
_NEIGHBOURS_BYTES = 2000
_SIMULATED = '<span class=gm-badge title="Memory behaves as on a device; computed values are not real">simulated</span>'


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a device; ``style`` is the last letter of its CSS class."""

    name: str
    nbytes: int | None
    style: str
    meaning: str


def css() -> str:
    """Return the panel's style sheet, as an element."""
    return f"<style>{files('jupyter_gpumem.render').joinpath('panel.css').read_text(encoding='utf-8')}</style>"


def live_parts(kind: str, snapshot: DeviceSnapshot, use: Use) -> tuple[Part, ...]:
    """Split a device into parts that sum to its total, as far as it can be known from counters alone."""
    return _host_parts(snapshot) if kind == "host" else _gpu_parts(snapshot, use)


def _host_parts(snapshot: DeviceSnapshot) -> tuple[Part, ...]:
    own, used, total = snapshot.allocated_bytes, snapshot.used_bytes, snapshot.total_bytes
    others = None if used is None else max(used - own, 0)
    free = None if used is None or total is None else max(total - own - (others or 0), 0)
    return (
        Part("this process", own, "a", "RAM this process holds now (resident set size)"),
        Part("other processes", others, "o", "RAM that everything else on this machine holds"),
        Part("free", free, "f", "RAM the system can still give"),
    )


def _gpu_parts(snapshot: DeviceSnapshot, use: Use) -> tuple[Part, ...]:
    total = snapshot.total_bytes
    used = use.used_bytes if snapshot.used_bytes is None else snapshot.used_bytes
    rest = None if used is None else max(used - snapshot.reserved_bytes, 0)
    parts = [
        Part("allocated", snapshot.allocated_bytes, "a", "live tensors: torch.cuda.memory_allocated()"),
        Part(
            "cached",
            snapshot.reserved_bytes - snapshot.allocated_bytes,
            "r",
            "reserved by torch, holding no tensor: new tensors use it first, Free memory gives back what it can",
        ),
    ]
    if rest is None or use.own_extra_bytes is None:
        parts.append(
            Part(
                "outside torch", rest, "o", "CUDA context, libraries and other processes; NVML does not tell them apart"
            )
        )
    else:
        extra = min(use.own_extra_bytes, rest)
        parts += [
            Part("context", extra, "x", "CUDA context and libraries of this process: only a restart returns it"),
            Part("other processes", rest - extra, "o", "what everybody else holds on this device"),
        ]
    free = None if used is None or total is None else max(total - used, 0)
    parts.append(Part("free", free, "f", "free on the device, for everybody"))
    return tuple(parts)


def render_names(parts: Iterable[Part]) -> str:
    """Name the parts, each with its meaning as tooltip; sent once, the figures beside it change alone."""
    rows = (
        f'<div title="{html.escape(f"{part.name}: {part.meaning}")}">'
        f"<span class='gm-key gm-s{part.style}'></span>{html.escape(part.name)}</div>"
        for part in parts
    )
    return f"<div class=gm-names>{''.join(rows)}</div>"


def render_figures(parts: Sequence[Part]) -> str:
    """Draw the stacked bar and the figures of its parts, the exact bytes as tooltips."""
    bar = "".join(
        f'<i class=gm-s{part.style} style=flex:{_share(part, parts)} title="{part.name} {exact(part.nbytes)}"></i>'
        for part in parts
        if part.nbytes
    )
    words = ", ".join(f"{part.name} {format_bytes(part.nbytes)}" for part in parts)
    sizes = "".join(f'<div title="{exact(part.nbytes)}">{format_bytes(part.nbytes)}</div>' for part in parts)
    return f'<div class=gm-bar role=img aria-label="{words}">{bar}</div><div class=gm-sizes>{sizes}</div>'


def _share(part: Part, parts: Sequence[Part]) -> int:
    """Return a part in thousandths of the whole, at least one so that it can be seen and hovered."""
    whole = sum(other.nbytes or 0 for other in parts)
    return max(round((part.nbytes or 0) * 1000 / max(whole, 1)), 2)


def render_devices(reading: Reading, chosen: int) -> str:
    """Draw every device as a thin bar, where there are several."""
    if len(reading.snapshots) < 2:
        return ""
    bars, labels = [], []
    for device, snapshot in reading.snapshots.items():
        total = max(snapshot.total_bytes or 1, 1)
        allocated, reserved = (round(n * 100 / total) for n in (snapshot.allocated_bytes, snapshot.reserved_bytes))
        this = " class=gm-this" if device == chosen else ""
        label = html.escape(f"{reading.names[device][0]}: {format_bytes(snapshot.allocated_bytes)}")
        labels.append(label)
        bars.append(f'<i{this} style=--a:{allocated}%;--r:{reserved}% title="{label}"></i>')
    return f'<div class=gm-all role=img aria-label="{", ".join(labels)}">{"".join(bars)}</div>'


def render_head(reading: Reading, device: int) -> str:
    """Write the device's label, model and size, and whether it is simulated."""
    label, name = reading.names[device]
    total = reading.snapshots[device].total_bytes
    size = "" if total is None else f'<span title="{exact(total)}">{format_bytes(total)}</span>'
    badge = _SIMULATED if reading.simulated else ""
    return f"<div class=gm-head><b>{html.escape(label)}</b><span>{html.escape(name)}</span>{size}{badge}</div>"


def render_not_started(devices: Mapping[str, str], *, simulated: bool) -> str:
    """Say that CUDA is not started, and what is known of the devices all the same."""
    badge = _SIMULATED if simulated else ""
    rows = "".join(f"<div><span>{html.escape(k)}</span><span>{html.escape(v)}</span></div>" for k, v in devices.items())
    return (
        f"<div class=gm-head><b>CUDA not started</b>{badge}</div>"
        "<div class=gm-note>This kernel has put nothing on a GPU yet. "
        "The figures begin with its first tensor there.</div>"
        f"<div class='gm-detail gm-known'>{rows}</div>"
    )


def render_lines(kind: str, limit_bytes: int | None) -> str:
    """Explain the lines of the chart."""
    lines = [
        ("a", "allocated", ""),
        ("r", "reserved", "5 2"),
        ("u", "whole device", "1.5 2.5"),
        ("p", "peak of a cell", ""),
    ]
    if kind == "host":
        lines = [("a", "this process", ""), ("u", "whole machine", "1.5 2.5"), ("p", "peak of a cell", "")]
    if limit_bytes is not None:
        lines.append(("l", f"limit {format_bytes(limit_bytes)}", "4 2"))
    colours = {"a": "allocated", "r": "cached", "u": "others", "p": "text", "l": "alarm"}
    spans = (
        f'<span><svg aria-hidden=true viewBox="0 0 16 8"><path d="M0 4h16" fill="none" stroke-width="2" '
        f'stroke="var(--gm-{colours[key]})" stroke-dasharray="{dash}"/></svg>{word}</span>'
        for key, word, dash in lines
    )
    return f"<div class=gm-lines>{''.join(spans)}</div>"


def render_neighbours(neighbours: Sequence[Neighbour] | None) -> str:
    """List who else is on the device; nothing where nobody is, a sentence where it cannot be seen."""
    if neighbours is None:
        return ""
    rows: list[str] = []
    for one in neighbours[:10]:
        size = f'<b title="{exact(one.used_bytes)}">{format_bytes(one.used_bytes)}</b>'
        rows.append(f"<div>{size}<span>{_neighbour(one)}</span></div>")
        if wire_bytes("".join(rows)) > _NEIGHBOURS_BYTES:
            rows.pop()
            break
    left = len(neighbours) - len(rows)
    more = f"<div><b></b><span class=gm-quiet>{left} more</span></div>" if left else ""
    return f"<h3>Also on this device</h3><div class=gm-others>{''.join(rows)}{more}</div>" if rows else ""


def _neighbour(one: Neighbour) -> str:
    name = one.name
    command = clip(name.command, 90) if name.command else "not visible from here"
    title = clip(name.command or "", _TITLE_BYTES)
    if name.notebook is not None:
        return (
            f'kernel of <strong title="{clip(name.notebook, _TITLE_BYTES)}">'
            f"{clip(PurePath(name.notebook).name, _TITLE_BYTES)}</strong> "
            f'<span class=gm-quiet title="{title}">pid {name.pid}</span>'
        )
    return f'<code title="{title}">{command}</code> <span class=gm-quiet>pid {name.pid}</span>'


def render_result(words: Sequence[str]) -> str:
    """Write the last result, its first sentence strong; announced by a screen reader."""
    first, rest = (words[0], words[1:]) if words else ("", ())
    more = "".join(f"<p><small>{html.escape(line)}</small></p>" for line in rest)
    return f"<div class=gm-result role=status aria-live=polite><p><strong>{html.escape(first)}</strong></p>{more}</div>"


def render_busy(record: CellRecord | None) -> str:
    """Say that a cell is running, and what a click does meanwhile."""
    if record is None:
        return ""
    line = clip(record.name, 100)
    return (
        f'<div class=gm-busy title="Free memory frees what is safe now, the rest after the cell">running: {line}</div>'
    )


def render_account(account: Account, when: str) -> str:
    """Write what torch's memory is made of, as it was at ``when``: a bar, and the parts that are not empty."""
    parts = [part for part in account.parts if part.level in ("allocated", "reserved") and part.nbytes]
    whole = sum(part.nbytes or 0 for part in parts)
    if not whole:
        return ""
    bar, rows = [], []
    for part in parts:
        name, meaning, colour = describe_part(part.key)
        size, note = format_bytes(part.nbytes), f" · {part.note}" if part.note else ""
        title = html.escape(f"{name}: {meaning}{note}")
        share = max(round((part.nbytes or 0) * 1000 / whole), 2)
        bar.append(f'<i style="flex:{share};background:{colour}" title="{title} · {size}"></i>')
        rows.append(
            f'<div><span title="{title}"><span class=gm-key style="background:{colour}"></span>'
            f"{html.escape(name)}</span>"
            f'<span title="{exact(part.nbytes)}">{size}</span></div>'
        )
    owner = "Tensors" if account.kind == "host" else f"Torch on {account.label}"
    label = html.escape(", ".join(f"{describe_part(part.key)[0]} {format_bytes(part.nbytes)}" for part in parts))
    return (
        f"{render_heading(f'{owner} at {when}')}"
        f'<div class=gm-bar role=img aria-label="{label}">{"".join(bar)}</div>'
        f"<div class=gm-detail>{''.join(rows)}</div>"
    )


def render_heading(text: str) -> str:
    """Write the heading of a section."""
    return f"<h3>{html.escape(text)}</h3>"


def render_holder(holder: Holder, several_devices: bool) -> str:
    """Write one row of the holders table: size, path, where it came from, the code that gives it back."""
    nbytes = holder.keeps_bytes or holder.shown_bytes
    at_most = "≤ " if holder.at_most else ""
    remedy = f"<div><code>→ {html.escape(holder.remedy)}</code></div>" if holder.remedy else ""
    facts = html.escape(" · ".join(_facts(holder, several_devices)))
    return (
        f'<div class=gm-holder><b title="{exact(nbytes)}">{at_most}{format_bytes(nbytes)}</b>'
        f'<div title="{html.escape(holder.path)}">{html.escape(shorten(holder.path, _PATH_CHARACTERS))}</div>'
        f"<div class=gm-quiet>{facts}</div>{remedy}</div>"
    )


def _facts(holder: Holder, several_devices: bool) -> Iterator[str]:
    if holder.section == "in use":
        yield "in use"
    if several_devices:
        yield f"GPU {holder.device}"
    if holder.cell is not None:
        yield f"cell {holder.cell}"
    if holder.note:
        yield holder.note
    if holder.shared_bytes:
        yield f"shares {format_bytes(holder.shared_bytes)} with {', '.join(holder.shared_with[:3]) or 'others'}"


def render_more(rest: Sequence[Holder]) -> str:
    """Say how many rows are left out, and what they hold together."""
    if not rest:
        return ""
    together = sum(holder.shown_bytes for holder in rest)
    return f"<div class=gm-quiet>{len(rest)} more, {format_bytes(together)} together: <code>%gpumem leaks</code></div>"


def render_moved() -> str:
    """Say where the panel went."""
    return '<span style="color:var(--jp-ui-font-color2,#616161)">The panel is in the right sidebar.</span>'
