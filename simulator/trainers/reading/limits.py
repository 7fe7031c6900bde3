"""Limits of everything that is read from a launch file, whose text may be hostile."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError

MOST_BYTES = 300_000
"""Most bytes of one file; the longest of the published scripts that were tried has 60,000."""
MOST_LINE = 30_000
"""Most characters of one text after its variables are expanded."""
MOST_EXPANDED = 3_000_000
"""Most characters of all texts whose variables are expanded."""
MOST_STEPS = 20_000
"""Most statements that are followed, each turn of a loop counted."""
MOST_DEPTH = 40
"""Most levels of nested statements, calls, substitutions and files."""
MOST_WORDS = 5_000
"""Most words of one command or array."""
MOST_WORK = 400_000
"""Most parts of values, characters of patterns and variables of branches that are looked at: a second."""
MOST_PARTS = 100_000
"""Most elements and characters of one value, those that it holds several times counted each time."""
MOST_BITS = 512
"""Most bits of a whole number."""
MOST_FILES = 20
"""Most files that one launch file may include."""


class Budget:
    """Counts the work of one reading and raises InputError where it exceeds a limit."""

    def __init__(self, file: str) -> None:
        """Takes the name of the file, for messages."""
        self.file = file
        self._characters, self._steps, self._files = MOST_EXPANDED, MOST_STEPS, MOST_FILES
        self._work = MOST_WORK

    def text(self, size: int, name: str) -> None:
        """Count an expanded text of `size` characters; `name` says what was expanded."""
        self._characters -= size
        if size > MOST_LINE or self._characters < 0:
            raise InputError(
                f"{self.file}: {name[:80]!r} makes a text of more than {MOST_LINE:,} characters, or all "
                f"variables together more than {MOST_EXPANDED:,}; write the arguments out"
            )

    def step(self, place: str) -> None:
        """Count one statement at `place`."""
        self._steps -= 1
        if self._steps < 0:
            raise InputError(
                f"{place}: more than {MOST_STEPS:,} statements were followed, the limit; shorten the loops "
                "of the script or write the arguments out"
            )

    def work(self, count: int, place: str) -> None:
        """Count the parts that one operation at `place` looks at."""
        self._work -= count
        if self._work < 0:
            raise InputError(
                f"{place}: to read the file takes more than {MOST_WORK:,} steps, the limit; write the "
                "arguments out"
            )

    def words(self, count: int, place: str) -> None:
        """Check the number of words of a command or an array at `place`."""
        if count > MOST_WORDS:
            raise InputError(f"{place}: {count:,} words are more than the limit of {MOST_WORDS:,}")

    def depth(self, levels: int, place: str) -> None:
        """Check the levels of nesting at `place`."""
        if levels > MOST_DEPTH:
            raise InputError(
                f"{place}: nested more than {MOST_DEPTH} levels deep, the limit; a function or file that "
                "calls itself cannot be read"
            )

    def may_read_file(self) -> bool:
        """Count one more file; False where that is more than the limit."""
        self._files -= 1
        return self._files >= 0
