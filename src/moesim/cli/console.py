"""Prints for all commands: text and tables on stdout, progress and messages on stderr."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.summary_text import percent, short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

__all__ = [
    "chosen_numbers",
    "note",
    "percent",
    "print_json",
    "print_pairs",
    "print_raw",
    "print_table",
    "print_text",
    "say_written",
    "short",
    "working",
]

MOST_NUMBERS = 1_000_000
"""Most numbers that an option such as --ranks may list."""
QUIET_S = 2.0
"""Seconds of work before progress is shown."""

COLOUR_VARIABLES = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Environment variables that make Rich treat any output like a terminal."""
PIPED_WIDTH = 10_000
"""Columns of a table that does not go to a terminal, so that each row stays on one line."""


def print_raw(text: str) -> None:
    """Print text unchanged, with a newline at its end."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_text(text: str) -> None:
    """Print lines of text without wrapping; on a terminal, numbers are coloured."""
    if _needs_rich(text):
        _console().print(text, markup=False, emoji=False, soft_wrap=True)
    else:
        sys.stdout.write(text + "\n")


def _needs_rich(text: str) -> bool:
    """Whether Rich would print anything but the text itself: colours, or characters that it replaces."""
    coloured = sys.stdout.isatty() or any(os.environ.get(name) for name in COLOUR_VARIABLES)
    return coloured or not all(line.isprintable() and not line.endswith(" ") for line in text.split("\n"))


def print_json(data: object) -> None:
    """Print a JSON value, indented."""
    print_raw(json.dumps(data, indent=2, allow_nan=False))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table without lines; the columns whose numbers are in `right` are aligned right."""
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(headers))
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = _console(width=None if terminal else PIPED_WIDTH)
    if terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    print_raw("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_pairs(pairs: Mapping[str, str]) -> None:
    """Print names and values in two columns."""
    print_table(("", ""), list(pairs.items()))


def say_written(what: str, hint: str) -> None:
    """Print on stderr that a file was written, with a hint on its use."""
    _say(_console(stderr=True), f"wrote {what} ({hint})")


def note(text: str) -> None:
    """Print a remark on stderr."""
    _say(_console(stderr=True), f"moesim: {text}")


def _console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console of Rich, which is imported here because most commands print nothing that needs it."""
    from rich.console import Console

    return Console(stderr=stderr, width=width)


def _say(console: Console, text: str) -> None:
    from rich.text import Text

    console.print(Text(text), soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what runs, once it has run for two seconds; yields a function that updates the text."""
    shown = _Progress(what)
    timer = threading.Timer(QUIET_S, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield shown.say
    finally:
        timer.cancel()
        timer.join()
        shown.stop()


class _Progress:
    """A text on stderr that changes: a spinner on a terminal, else a line for every change."""

    def __init__(self, what: str) -> None:
        self._now = what
        self._lock = threading.Lock()
        self._console: Console | None = None
        self._status: Status | None = None

    def start(self) -> None:
        """Show the text that is current from now on."""
        console = _console(stderr=True)
        with self._lock:
            self._console = console
            if console.is_terminal:
                from rich.text import Text

                self._status = console.status(Text(self._now), refresh_per_second=4)
                self._status.start()
            else:
                _say(console, f"moesim: {self._now} ...")

    def say(self, text: str) -> None:
        """Replace the text."""
        with self._lock:
            self._now = text
            if self._status is not None:
                from rich.text import Text

                self._status.update(Text(text))
            elif self._console is not None:
                _say(self._console, f"moesim: {text} ...")

    def stop(self) -> None:
        """Remove the spinner."""
        if self._status is not None:
            self._status.stop()


def chosen_numbers(option: str, text: str) -> list[int] | None:
    """The numbers in a text such as "0,3,5-7"; None for "all". Raises InputError, naming `option`."""
    if text.strip() == "all":
        return None
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() and len(end) < 7 for end in ends) or int(ends[0]) > int(
            ends[1]
        ):
            raise InputError(f"{option} {text!r}: write numbers such as 0,3 or 0-3, or all")
        numbers.extend(range(int(ends[0]), int(ends[1]) + 1))
        if len(numbers) > MOST_NUMBERS:
            raise InputError(
                f"{option} {text[:60]!r}: more than {MOST_NUMBERS:,} numbers; write all for every one"
            )
    return numbers
