"""Advice, and the request for memory that it answers, as values."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change: what, the bytes it is about, the code, and what else to know.

    ``nbytes`` is what is given back, now or from the next step on. ``subject`` names the kind of advice.
    """

    subject: str
    label: str
    nbytes: int
    code: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {field: getattr(self, field) for field in self.__slots__}


@dataclass(frozen=True, slots=True)
class Shortage:
    """A request that failed: what it asked for, and what was free on the device and in torch's cache, in bytes.

    ``most_bytes`` is what this process could take with nothing else on the device, ``limit_bytes`` its own limit.
    ``hidden_bytes`` are those that no Python object explains: C++ code that still runs has made them.
    """

    asked_bytes: int
    free_bytes: int
    cached_bytes: int
    most_bytes: int | None = None
    limit_bytes: int | None = None
    hidden_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        """What was free in all."""
        return self.free_bytes + self.cached_bytes

    @property
    def is_too_large(self) -> bool:
        """Tell whether no freeing helps: not even the empty device has so much."""
        return self.most_bytes is not None and self.asked_bytes > self.most_bytes

    @property
    def is_over_limit(self) -> bool:
        """Tell whether it was this process's own limit that stood in the way."""
        return self.limit_bytes is not None and self.asked_bytes <= self.free_bytes

    @property
    def is_fragmented(self) -> bool:
        """Tell whether enough was free, in pieces that are too small."""
        return not self.is_over_limit and self.asked_bytes <= self.room_bytes
