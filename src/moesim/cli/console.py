"""Prints for all commands: text and tables on stdout, progress and messages on stderr."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.table import Table

    from moesim.simulator.planner.estimate import Estimate
    from moesim.simulator.predict.result import Result
    from moesim.simulator.run.report import RunReport


MOST_NUMBERS = 1_000_000
"""Most numbers that an option such as --ranks may list."""
QUIET_S = 2.0
"""Seconds of work before progress is shown."""

LEAST_WIDTH = 40
"""Columns that lines are wrapped to on an even narrower terminal."""
LEAST_TEXT = 20
"""Columns below which a column of words is not narrowed."""
MOST_LINES = 3
"""Lines that the words of one row may take beside its figures; longer words go below the row."""


def width() -> int:
    """Columns of a line: what COLUMNS says, else the terminal's, and 80 where there is no terminal."""
    return max(LEAST_WIDTH, shutil.get_terminal_size().columns)


def print_raw(text: str) -> None:
    """Print text unchanged, with a newline at its end."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_text(text: str) -> None:
    """Print lines of text, wrapped on words to the width of the terminal; control characters are escaped."""
    print_raw("\n".join(part for line in text.split("\n") for part in wrapped(line)))


def wrapped(line: str, indent: int | None = None) -> list[str]:
    """A line as lines of at most `width()` columns, broken between words but not between number and unit.

    `indent`: columns before the further lines; by default those of the text after a short label, such as
    "memory      66.9 of 80.0 GiB". A longer word, such as a path, stays whole.
    """
    line = printable(line)
    columns = width()
    if len(line) <= columns:
        return [line]
    if indent is None:
        label = re.match(r"\s*\S.*?\s{2,}(?=\S)", line)
        start = len(line) - len(line.lstrip())
        indent = len(label[0]) if label and len(label[0]) <= columns // 3 else start + 2
    bound = re.sub(r"(?<=\d) (?=(?:%|[A-Za-z]{1,3})(?![A-Za-z]))", NO_BREAK, line)
    lines = textwrap.wrap(
        bound, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return [text.replace(NO_BREAK, " ") for text in lines]


NO_BREAK = "\N{NO-BREAK SPACE}"


def printable(text: str) -> str:
    """Text of one line whose control characters, which may come from a file, are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_json(data: object) -> None:
    """Print a JSON value, indented."""
    print_raw(json.dumps(data, indent=2, allow_nan=False))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table without lines in the width of the terminal; see `table_lines`."""
    print_raw("\n".join(table_lines(headers, rows, right, console())))


def table_lines(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    shown_on: Console | None = None,
) -> list[str]:
    """The lines of a table of at most `width()` columns; the columns that `right` lists hold numbers.

    Numbers are aligned right and never broken. Words wrap in their column as long as that takes few lines.
    Columns for which there is no room stand below their row, with their names. `shown_on`: a console whose
    terminal may show bold headers.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    numbers = set(right)
    beside, below = _columns(headers, rows, numbers)
    widths = _widths(headers, rows, numbers, beside)
    page = shown_on or console(plain=True)
    lines: list[str] = []
    if not below:
        groups = [(any(headers), rows)] if rows or any(headers) else []
    else:
        groups = [(True, []), *((False, [row]) for row in rows)]
    for titled, group in groups:
        with page.capture() as captured:
            page.print(_grid(headers, group, numbers, widths, titled=titled))
        lines += [line.rstrip() for line in captured.get().splitlines()]
        for row in group if below else ():
            lines += _below(headers, row, numbers, below)
    return lines


def _grid(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: set[int],
    widths: Mapping[int, int],
    *,
    titled: bool,
) -> Table:
    """A table of Rich with the columns of `widths`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", show_header=titled)
    for n, columns in widths.items():
        justify: Literal["left", "right"] = "right" if n in numbers else "left"
        table.add_column(Text(headers[n]), justify=justify, overflow="fold", width=columns)
    for row in rows:
        table.add_row(*(Text(_broken(row[n], columns)) for n, columns in widths.items()))
    return table


def _broken(cell: str, columns: int) -> str:
    """A cell whose words that are wider than their column are broken after a dot, dash or the like."""
    words = []
    for word in cell.split(" "):
        lines = [""]
        for piece in re.findall(r"[^._/=-]*[._/=-]*", word) if len(word) > columns else [word]:
            if len(lines[-1]) + len(piece) <= columns:
                lines[-1] += piece
            else:
                lines.append(piece)
        words.append("\n".join(line for line in lines if line))
    return " ".join(words)


def _columns(
    headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[int]
) -> tuple[list[int], list[int]]:
    """The columns that fit beside one another, and those that go below each row: the widest words first."""
    beside, below = list(range(len(headers))), []
    natural = [_natural(headers, rows, n) for n in beside]
    least = [_least(headers, rows, n, n in numbers) for n in beside]
    while len(beside) > 1:
        room = width() - 2 * (len(beside) - 1)
        words = [n for n in beside if n not in numbers]
        room_of_words = room - sum(least[n] for n in beside if n in numbers)
        narrowed = sum(natural[n] for n in words) > room_of_words
        if sum(least[n] for n in beside) <= room and not (
            narrowed and sum(natural[n] for n in words) > MOST_LINES * room_of_words
        ):
            break
        moved = max((n for n in words if n > 0), key=lambda n: natural[n], default=beside[-1])
        beside.remove(moved)
        below.append(moved)
    return beside, sorted(below)


def _natural(headers: Sequence[str], rows: Sequence[Sequence[str]], column: int) -> int:
    return max(len(text) for text in (headers[column], *(row[column] for row in rows)))


def _least(headers: Sequence[str], rows: Sequence[Sequence[str]], column: int, is_number: bool) -> int:
    """The least width of a column: whole numbers, and words of headers and text up to half a line."""
    cells = [row[column] for row in rows]
    if is_number:
        whole = [*headers[column].split(), *cells]
    else:
        whole = [word for text in (headers[column], *cells) for word in text.split()]
    longest = max(map(len, whole), default=0)
    if is_number:
        return longest
    return min(max(longest, LEAST_TEXT), _natural(headers, rows, column), width() // 2)


def _widths(
    headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[int], beside: Sequence[int]
) -> dict[int, int]:
    """Widths of the columns beside one another: the least ones, and what is left where it is needed most."""
    natural = {n: _natural(headers, rows, n) for n in beside}
    widths = {n: min(_least(headers, rows, n, n in numbers), width()) for n in beside}
    for _ in range(width() - 2 * (len(beside) - 1) - sum(widths.values())):
        narrow = [n for n in beside if widths[n] < natural[n]]
        if not narrow:
            break
        widths[max(narrow, key=lambda n: natural[n] / max(widths[n], 1))] += 1
    return widths


def _below(headers: Sequence[str], row: Sequence[str], numbers: set[int], below: Sequence[int]) -> list[str]:
    """The cells below a row with the names of their columns, as many on a line as fit."""
    named = {n: f"{headers[n]}: {row[n]}" if headers[n] else row[n] for n in below if row[n]}
    lines: list[str] = []
    for n in sorted(named, key=lambda n: n not in numbers):
        joined = f"{lines[-1]}; {named[n]}" if lines else ""
        if lines and len(joined) <= width():
            lines[-1] = joined
        else:
            lines.append(f"    {named[n]}")
    return [part for line in lines for part in wrapped(line, 6)]


def print_pairs(pairs: Mapping[str, str]) -> None:
    """Print names and values in two columns, the values wrapped."""
    indent = max(map(len, pairs)) + 2
    for name, value in pairs.items():
        print_raw("\n".join(wrapped(f"{name:<{indent}}{value}", indent)))


def say_written(what: str, hint: str) -> None:
    """Print on stderr that a file was written, with a hint on its use."""
    _say(console(stderr=True), f"wrote {what} ({hint})")


def note(text: str) -> None:
    """Print a remark on stderr."""
    _say(console(stderr=True), f"moesim: {text}")


def console(*, stderr: bool = False, plain: bool = False) -> Console:
    """A console of Rich; with NO_COLOR, or if it is to be `plain`, nothing but text is written to it."""
    from rich.console import Console  # here, because most commands print nothing that needs it

    no_escapes = plain or bool(os.environ.get("NO_COLOR"))
    return Console(
        stderr=stderr, width=width(), highlight=False, force_terminal=False if no_escapes else None
    )


def _say(shown_on: Console, text: str) -> None:
    """Print a message: wrapped on a terminal, on one line in a log."""
    from rich.text import Text

    shown_on.print(Text(text), soft_wrap=not shown_on.is_terminal)


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
        page = console(stderr=True)
        with self._lock:
            self._console = page
            if page.is_terminal:
                from rich.text import Text

                self._status = page.status(Text(self._now), refresh_per_second=4)
                self._status.start()
            else:
                _say(page, f"moesim: {self._now} ...")

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


def check_new(output: Path | None, force: bool, yaml_of: str = "") -> None:
    """Raise InputError for an output file that cannot be written, or that exists and is not to be replaced.

    `yaml_of`: what the file describes, where it must be YAML.
    """
    if output is None:
        return
    from moesim.hwmodels.files import check_writable

    if yaml_of and output.suffix.lower() not in (".yaml", ".yml"):
        raise InputError(f"output file {output}: a {yaml_of} file ends in .yaml or .yml")
    check_writable(output, "output file")
    if output.exists() and not force:
        raise InputError(f"output file {output}: exists already; give another name, or --force to replace it")


def default_lines(result: Result | Estimate | RunReport) -> list[str]:
    """The keys that the scenario left out, one on each line, with their values and the reasons."""
    if not result.defaults:
        return []
    from moesim.simulator.scenario.defaults import is_answer

    alone = [item for item in result.defaults if not is_answer(item)]
    wide = max(len(item.key) for item in alone or result.defaults)
    lines = [f"defaults, stated by nobody ({len(result.defaults)}):"]
    lines += [f"  {item.key:<{wide}} = {item.text}: {item.why}" for item in alone]
    answers: dict[str, list[str]] = {}
    for item in result.defaults:
        if is_answer(item):
            answers.setdefault(item.why, []).append(f"{item.key.removeprefix('software.')} {item.text}")
    return lines + [f"  software, {why}: {', '.join(texts)}" for why, texts in answers.items()]


# -- options -----------------------------------------------------------------------------------------
# Options and arguments that several commands share.

ScenarioName = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A preset name, or a YAML or JSON file.")
]


Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Replace a scenario key, such as parallel.ep=32; repeatable."
    ),
]


Seed = Annotated[int | None, typer.Option(help="Seed of routing and jitter; short for --set seed=N.")]


EngineDraws = Annotated[
    int,
    typer.Option(
        "--engine-draws",
        metavar="N",
        help="Add bands from N engine runs with all uncertain inputs off together (20 to 10,000; 0: none).",
    ),
]


Scheduler = Annotated[
    str | None,
    typer.Option("--scheduler", metavar="tcp://HOST:PORT", help="A Dask cluster instead of local processes."),
]


Resolution = Annotated[
    str | None,
    typer.Option(metavar="folded|full", help="Simulate one group of GPUs for all (folded), or every GPU."),
]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
