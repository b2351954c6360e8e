"""Many variables that are named and hold alike are one line of a report, not one each."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jupyter_gpumem.holders import Holder, Part, Release

_MANY = 6
"""Fewer are told one by one."""
_MOST_WRITTEN = 20
"""More names than these are deleted by a loop, where they are numbered."""
_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d*)")


def group_alike(holders: Iterable[Holder], *, in_shell: bool) -> list[Holder]:
    """Join the variables of names such as ``x0``, ``x1`` or ``model_a``, ``model_b`` that keep equally much."""
    groups: dict[tuple[object, ...], list[Holder]] = {}
    for holder in holders:
        groups.setdefault(_sort_of(holder), []).append(holder)
    return [
        one
        for group in groups.values()
        for one in ([_joined(group, in_shell=in_shell)] if len(group) >= _MANY else group)
    ]


def _sort_of(holder: Holder) -> tuple[object, ...]:
    """Return what holders have in common that are one line; a holder that is not a whole variable is by itself."""
    names = [name for release in holder.releases if release.action == "variables" for name in release.names]
    if names != [holder.path] or len(holder.releases) != 1 or holder.shared_with or holder.at_most:
        return (id(holder),)
    parts = tuple((part.path, part.nbytes) for part in holder.parts)
    sizes = (holder.keeps_bytes, holder.shown_bytes, holder.count, parts)
    return (_stem(holder.path), holder.device, holder.section, holder.kind, sizes)


def _stem(name: str) -> str:
    numbered = _NUMBERED.fullmatch(name)
    return numbered[1] if numbered is not None else name.rpartition("_")[0] or name


def _joined(group: Sequence[Holder], *, in_shell: bool) -> Holder:
    names = sorted((holder.path for holder in group), key=_natural)
    first = group[0]
    cells = [holder.cell for holder in group if holder.cell is not None]
    return replace(
        first,
        path=f"{names[0]}, {names[1]} … {names[-1]}",
        keeps_bytes=sum(holder.keeps_bytes for holder in group),
        shown_bytes=sum(holder.shown_bytes for holder in group),
        count=sum(holder.count for holder in group),
        expression=None,
        cell=max(cells, default=None),
        note="; ".join(filter(None, (f"{len(names)} variables alike", first.note))),
        remedy=_deletion(names, in_shell=in_shell),
        releases=(Release("variables", names=tuple(names)),),
        parts=tuple(Part(part.path, part.nbytes * len(group)) for part in first.parts),
    )


def _natural(name: str) -> tuple[str, int]:
    numbered = _NUMBERED.fullmatch(name)
    return (name, 0) if numbered is None else (numbered[1], int(numbered[2]))


def _deletion(names: Sequence[str], *, in_shell: bool) -> str:
    if len(names) <= _MOST_WRITTEN or _NUMBERED.fullmatch(names[0]) is None:
        return f"%gpu_free {' '.join(names)}" if in_shell else f"del {', '.join(names)}"
    stem, numbers = _natural(names[0])[0], [_natural(name)[1] for name in names]
    first, last = numbers[0], numbers[-1]
    if numbers == list(range(first, last + 1)):
        wanted = f"range({first}, {last + 1})" if first else f"range({last + 1})"
    else:
        wanted = repr(numbers).replace("[", "(").replace("]", ")")
    return f'for i in {wanted}: del globals()[f"{stem}{{i}}"]'
