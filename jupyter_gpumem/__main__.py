"""The command line: ``python -m jupyter_gpumem fits NOTEBOOK --memory 24GiB``."""

import argparse
import json
import math
import re
import signal
import sys
from typing import NoReturn

from jupyter_gpumem.cards import card_bytes
from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.fits import EXIT_CODES, rehearse
from jupyter_gpumem.render.fits import fits_page
from jupyter_gpumem.render.layout import to_text


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(_with_equals(sys.argv[1:] if arguments is None else arguments))
    # leave by an exception, so that the notebook's kernel is ended too
    signal.signal(signal.SIGTERM, _leave)
    try:
        report = rehearse(options.notebook, options.memory, devices=options.devices, timeout_seconds=options.timeout)
    except KeyboardInterrupt:
        sys.stderr.write("jupyter_gpumem fits: interrupted\n")
        return 130
    if options.json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    elif report.reason is not None:
        sys.stderr.write(f"jupyter_gpumem fits: {report.reason}\n")
    else:
        sys.stdout.write(to_text(fits_page(report)) + "\n")
    return report.exit_code


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave."""
        self.exit(EXIT_CODES["could not be run"], f"{self.prog}: error: {message}   (--help shows how)\n")


def _with_equals(arguments: list[str]) -> list[str]:
    """Join a negative size to its option: argparse would take ``-1GiB`` for an option itself."""
    joined: list[str] = []
    for word in arguments:
        if re.match(r"-\.?\d", word) and joined and joined[-1].startswith("--"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m jupyter_gpumem", description="GPU memory in notebooks, from the command line.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fits = commands.add_parser(
        "fits",
        help="would a notebook fit on a card: runs it on a simulated GPU",
        description="Run a notebook on a simulated GPU and tell whether it would fit. Its cells really run, "
        "with their side effects; the computed values are not real.",
        epilog="exit code: " + ", ".join(f"{code} {verdict}" for verdict, code in EXIT_CODES.items()),
    )
    fits.add_argument("notebook", metavar="NOTEBOOK")
    fits.add_argument(
        "--memory",
        required=True,
        type=_card,
        metavar="SIZE|CARD",
        help="memory of the card: 24GiB, T4, A100-80",
    )
    fits.add_argument("--devices", type=_count, default=1, metavar="N", help="how many such cards (default 1)")
    fits.add_argument("--json", action="store_true", help="print the report as JSON")
    fits.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="seconds for the whole notebook (default 600)",
    )
    return parser


def _card(text: str) -> int:
    try:
        return card_bytes(text)
    except GpuMemError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above zero")
    return seconds


def _leave(_signal: int, _frame: object) -> NoReturn:
    sys.exit(143)


if __name__ == "__main__":
    sys.exit(main())
