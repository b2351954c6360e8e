"""Closing widgets with everything that belongs to them."""

import ipywidgets as w


def close_all(widget: w.Widget) -> None:
    """Close a widget, what is in it, and the models of their layout and style; safe to call twice."""
    for child in getattr(widget, "children", ()):
        close_all(child)
    for name in ("layout", "style"):
        own = getattr(widget, name, None)
        if isinstance(own, w.Widget):
            own.close()
    widget.close()
