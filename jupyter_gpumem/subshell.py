"""Clicks that arrive while a cell runs."""

from typing import Any


def let_clicks_use_the_subshell(owner: Any) -> None:
    """Take a click at once while a cell runs, where front end and ipykernel have subshells.

    ipykernel 7.4 sends what comes in on a comm to the shell that published on it last: the busy main one.
    The front end's own choice is kept instead. A private name: without it a click waits for the cell to end.
    """
    channel = getattr(owner, "comm", owner)
    if hasattr(channel, "_reply_subshell_for"):
        channel._reply_subshell_for = lambda _data, default: default
