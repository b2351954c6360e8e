"""The error a caller may want to catch."""


class GpuMemError(Exception):
    """A request that cannot be met; the message names the cause and the remedy in one line."""
