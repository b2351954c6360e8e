"""Tab completion of sub-commands, options and variable names."""

from typing import Any

from jupyter_gpumem.arguments import (
    gpu_fit_parser,
    gpu_free_parser,
    gpumem_cell_parser,
    gpumem_parser,
    subparsers_of,
    words_of,
)
from jupyter_gpumem.names import program_kind, user_variables

MAGICS = ("%gpumem", "%%gpumem", "%gpu_free", "%%gpu_fit")


def complete(shell: Any, event: Any) -> list[str]:
    """Return what may follow, for IPython's ``complete_command`` hook."""
    typed = event.text_until_cursor.split()
    words = typed[1:] if event.text_until_cursor[-1:].isspace() else typed[1:-1]
    if event.command == "%gpu_free":
        return [*words_of(gpu_free_parser()), *_variables(shell)]
    if event.command == "%%gpu_fit":
        return [*words_of(gpu_fit_parser()), *_variables(shell)]
    if event.command == "%%gpumem":
        return words_of(gpumem_cell_parser())
    if words[:1] == ["diff"]:
        return list(shell._jupyter_gpumem.magics.marks)
    parser = gpumem_parser()
    commands = subparsers_of(parser)
    return words_of(commands[words[0]]) if words and words[0] in commands else words_of(parser)


def _variables(shell: Any) -> list[str]:
    return [name for name, value in user_variables(shell) if program_kind(value) is None]
