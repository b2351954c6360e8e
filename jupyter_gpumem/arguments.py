"""The words each magic takes, as argparse parsers whose mistakes are one line."""

import argparse
import ast
import difflib
import keyword
import shlex
from collections.abc import Callable
from typing import NoReturn

from IPython.core.error import UsageError

from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.sizes import parse_bytes


class HelpShown(Exception):  # noqa: N818 - no error: the way out of argparse
    """``--help`` was asked for and has been printed: nothing else is to be done."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that never exits: a mistake is a UsageError, which IPython shows as one line."""

    def error(self, message: str) -> NoReturn:
        """Raise the mistake, with the nearest right word where there is one."""
        raise UsageError(f"{self.prog}: {_nearest(message, self)}   ({self.prog} --help lists what it takes)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Leave after ``--help``."""
        raise HelpShown

    def parse_line(self, line: str) -> argparse.Namespace:
        """Parse what follows the magic's name.

        Raises
        ------
        UsageError
            When the words are not the magic's.
        HelpShown
            After printing the help.
        """
        try:
            words = shlex.split(line.rstrip().removesuffix(";"), comments=True)
        except ValueError as error:
            raise UsageError(f"{self.prog}: {error}".replace("No closing", "no closing")) from None
        return self.parse_args(words)


def gpumem_parser() -> Parser:
    """Return the parser of ``%gpumem``."""
    parser = _parser("%gpumem", "Where GPU memory is now, as an account that sums.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser, help="one of")
    _command(commands, "on", "show a line after each cell that moved GPU memory")
    _command(commands, "off", "show none")
    history = _command(commands, "history", "a row a cell; returns an object with to_pandas()")
    history.add_argument("--csv", metavar="FILE", help="write the rows as CSV")
    history.add_argument("--json", metavar="FILE", help="write the records as JSON")
    plot = _command(commands, "plot", "allocated, reserved and peak over the cells, as a figure")
    plot.add_argument("--save", metavar="FILE", help="write the figure too (png, svg or pdf, by the file's ending)")
    leaks = _command(commands, "leaks", "who holds what, by path, with the fix; frees nothing")
    leaks.add_argument("-n", type=_count, default=20, metavar="N", help="lines to show (default 20)")
    leaks.add_argument("--device", type=_index, metavar="D", help="this device only (torch's index)")
    leaks.add_argument("--min", type=_size, default=0, metavar="SIZE", help="leave out holders under this size")
    _command(commands, "advise", "what would give memory back or make the next step fit, with the code to change")
    mark = _command(commands, "mark", "remember what is on the GPU now")
    mark.add_argument("name", metavar="NAME", help="how to call the mark")
    diff = _command(commands, "diff", "what is new on the GPU since the mark, by holder")
    diff.add_argument("name", metavar="NAME", help="a mark made before")
    _command(commands, "panel", "open the live panel: in the sidebar, else below this cell")
    limit = _command(commands, "limit", "cap this process: a size, a part of the device, or off")
    limit.add_argument("amount", metavar="8GiB|50%|off", nargs="*", help="without it, the limit in force is shown")
    simulate = _command(commands, "simulate", "a simulated GPU of this size; before torch is imported")
    simulate.add_argument("size", metavar="SIZE", nargs="*", help="memory of each (default 24GiB)")
    simulate.add_argument("--devices", type=_count, default=1, metavar="N", help="how many (default 1)")
    return parser


def gpumem_cell_parser(*, with_help: bool = True) -> Parser:
    """Return the parser of ``%%gpumem``; without help, ``--help`` is a mistake like any other."""
    text = "This cell in detail: a table for each device, and what became of the variables."
    parser = _parser("%%gpumem", text, with_help=with_help)
    parser.add_argument("--lines", action="store_true", help="also what each source line of the cell took")
    parser.add_argument("--timeline", action="store_true", help="also the memory over the time of the cell")
    parser.add_argument("-o", metavar="NAME", type=_identifier, dest="output", help="store the record in NAME")
    parser.add_argument("-q", action="store_true", dest="quiet", help="show nothing (with -o)")
    return parser


def gpu_free_parser() -> Parser:
    """Return the parser of ``%gpu_free``."""
    parser = _parser(
        "%gpu_free", "Give GPU memory back: names, outputs, the last error, garbage, caches; then what is still held."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="variables to delete first")
    parser.add_argument("--all", action="store_true", dest="all_variables", help="every variable that holds GPU memory")
    parser.add_argument("--keep-outputs", action="store_true", help="leave Out and its copies alone")
    parser.add_argument("--keep-errors", action="store_true", help="leave the last error to %%debug and %%tb")
    parser.add_argument("--dry-run", action="store_true", help="say what would go; change nothing")
    parser.add_argument("-q", action="store_true", dest="quiet", help="show nothing")
    return parser


def gpu_fit_parser() -> Parser:
    """Return the parser of ``%%gpu_fit``."""
    parser = _parser("%%gpu_fit", "Run the cell; on out-of-memory clean up, shrink the variable NAME and run again.")
    parser.add_argument("name", metavar="NAME", type=_identifier, help="a whole-number variable, such as batch_size")
    parser.add_argument("--min", type=_count, default=1, dest="minimum", metavar="M", help="not below M (default 1)")
    parser.add_argument("--factor", type=_fraction, default=0.5, metavar="F", help="multiply by F (default 0.5)")
    parser.add_argument("--step", type=_count, metavar="S", help="round down to a multiple of S")
    parser.add_argument("--search", action="store_true", help="find the largest value that fits")
    parser.add_argument(
        "--margin", type=_percent, default=0.0, metavar="P", help="part of the device left free at the peak (5%%)"
    )
    return parser


def did_you_mean(word: str, known: list[str]) -> str:
    """Return ``; did you mean X?`` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def words_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the sub-commands and options a parser takes, for Tab completion."""
    words = [option for action in parser._actions for option in action.option_strings]
    return [*(name for name in subparsers_of(parser)), *words]


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the sub-commands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _parser(prog: str, description: str, *, with_help: bool = True) -> Parser:
    return Parser(prog=prog, description=description, allow_abbrev=False, add_help=with_help)


def _command(commands: "argparse._SubParsersAction[Parser]", name: str, text: str) -> Parser:
    return commands.add_parser(name, help=text, description=text, prog=f"%gpumem {name}", allow_abbrev=False)


def _nearest(message: str, parser: argparse.ArgumentParser) -> str:
    """Turn argparse's message into ours."""
    if "invalid choice: " in message:
        word = ast.literal_eval(message.split("invalid choice: ")[1].rsplit(" (choose from", 1)[0])
        return f"{word}: no such sub-command{did_you_mean(word, list(subparsers_of(parser)))}"
    if message.startswith("unrecognized arguments: "):
        word = message.split(": ", 1)[1].split()[0]
        known = [option for each in (parser, *subparsers_of(parser).values()) for option in words_of(each)]
        return f"{word}: not understood{did_you_mean(word, [each for each in known if each != word])}"
    return message.replace("argument ", "")


def _checked(text: str, accept: Callable[[str], bool], what: str) -> str:
    if not accept(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return text


def _identifier(text: str) -> str:
    return _checked(text, _is_free_name, "a variable name of yours")


def _is_free_name(text: str) -> bool:
    # IPython's own names all begin with an underscore, but for these
    taken = keyword.iskeyword(text) or text in ("In", "Out", "get_ipython", "exit", "quit", "open")
    return text.isidentifier() and not taken and not text.startswith("_")


def _count(text: str) -> int:
    return int(_checked(text, lambda t: t.isdecimal() and int(t) > 0, "a whole number above zero"))


def _index(text: str) -> int:
    return int(_checked(text, str.isdecimal, "a device index, such as 0"))


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except GpuMemError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _fraction(text: str) -> float:
    return float(_checked(text, lambda t: _is_number(t) and 0 < float(t) < 1, "a factor between 0 and 1"))


def _percent(text: str) -> float:
    number = text.removesuffix("%")
    _checked(text, lambda t: _is_number(number) and 0 <= float(number) < 100, "a part of the device, such as 5%")
    return float(number) / 100 if text.endswith("%") or float(number) >= 1 else float(number)
