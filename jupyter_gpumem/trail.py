"""A path under way from a root to what is held there, in words and as code."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Trail:
    """What stands at the end of a path: in words (``text``, then ``tail``) and in Python (``code``, None for none).

    ``tail`` stays behind what is appended: the closure of a function, whose variable ``text`` is. ``source`` is
    what the user would name while the path runs through tracebacks and frames, ``via`` the phrases that follow a
    local variable: ``through err``. ``verb`` begins such a phrase. ``inside`` tells what kind of thing the path
    last went into: a closure, a cache, the hooks of a module, a graph.
    """

    text: str
    code: str | None
    source: str = ""
    via: tuple[str, ...] = ()
    verb: str = "through"
    inside: str = ""
    tail: str = ""

    def __str__(self) -> str:
        return ", ".join((self.words, *self.via))

    @property
    def words(self) -> str:
        """What stands at the end, without how a local variable is kept."""
        return self.text + self.tail

    def then(self, suffix: str, code: str | None = None) -> "Trail":
        """Append what is typed the same in words and in code, unless the code is given."""
        if code is None and self.code is not None:
            code = self.code + suffix
        return replace(self, text=self.text + suffix, code=code)

    def at(self, text: str, suffix: str | None = None, tail: str = "") -> "Trail":
        """Go on under other words; ``suffix`` is what the code goes on with, None where it ends."""
        code = None if suffix is None or self.code is None else self.code + suffix
        return replace(self, text=text, tail=tail, code=code)

    def on(self, suffix: str | None = None) -> "Trail":
        """Go on under the same words."""
        return self.at(self.text, suffix, self.tail)

    def wrapped(self, before: str, after: str) -> str | None:
        """Return the code within other code."""
        return None if self.code is None else f"{before}{self.code}{after}"

    @property
    def origin(self) -> str:
        """What the user would name as the start of the part that has no name."""
        return self.source or self.words


Step = tuple[Trail, int]
"""The path after a step, and how many objects the step went on."""
