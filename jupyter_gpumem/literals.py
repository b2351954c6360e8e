"""Keys as they are typed, without running any code of theirs."""

import keyword

_PLAIN = (int, float, bool, bytes, complex)
_LONGEST = 120


def literal(key: object) -> str | None:
    """Return the Python text of a key of a builtin type, None where only its own code could say."""
    kind = type(key)
    if key is None or key is ...:
        return repr(key)
    if kind is str:
        return repr(key) if len(str(key)) <= _LONGEST else None
    if any(kind is plain for plain in _PLAIN):
        text = repr(key)
        return text if len(text) <= _LONGEST and "nan" not in text and "inf" not in text else None
    if kind is tuple:
        return _tuple(key)  # type: ignore[arg-type]  # its exact type was asked above
    return None


def is_plain_name(key: object) -> bool:
    """Tell whether a key can be typed as a name or after a dot."""
    return type(key) is str and key.isidentifier() and not keyword.iskeyword(key)


def _tuple(key: tuple[object, ...]) -> str | None:
    parts = [literal(item) for item in key[:9]]
    if len(key) > 8 or None in parts:
        return None
    return f"({', '.join(part or '' for part in parts)}{',' if len(parts) == 1 else ''})"
