"""Prints for all commands: text and tables on stdout, progress and messages on stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.summary_text import percent, short

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

PIPED_WIDTH = 10_000
"""Columns of a table that does not go to a terminal, so that each row stays on one line."""


def print_raw(text: str) -> None:
    """Print text unchanged, with a newline at its end."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_text(text: str) -> None:
    """Print lines of text without wrapping; on a terminal, numbers are coloured."""
    Console().print(text, markup=False, emoji=False, soft_wrap=True)


def print_json(data: object) -> None:
    """Print a JSON value, indented."""
    print_raw(json.dumps(data, indent=2, allow_nan=False))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table without lines; the columns whose numbers are in `right` are aligned right."""
    terminal = sys.stdout.isatty()
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(headers))
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(width=None if terminal else PIPED_WIDTH)
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
    Console(stderr=True).print(Text(f"wrote {what} ({hint})"), soft_wrap=True)


def note(text: str) -> None:
    """Print a remark on stderr."""
    Console(stderr=True).print(Text(f"moesim: {text}"), soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what runs, once it has run for two seconds; yields a function that updates the text."""
    console = Console(stderr=True)
    status = console.status(Text(what), refresh_per_second=4)
    started = threading.Event()
    now = what

    def start() -> None:
        started.set()
        status.start() if console.is_terminal else console.print(Text(f"moesim: {now} ..."), soft_wrap=True)

    def say(text: str) -> None:
        nonlocal now
        now = text
        status.update(Text(text))
        if started.is_set() and not console.is_terminal:
            console.print(Text(f"moesim: {text} ..."), soft_wrap=True)

    timer = threading.Timer(QUIET_S, start)
    timer.daemon = True
    timer.start()
    try:
        yield say
    finally:
        timer.cancel()
        timer.join()
        status.stop()


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
