"""What the pages of frozen predictions share: the check of their blocks, freezing, and the command line.

A page is a module with its sections, the runs' names and their predictions of today (mlperf_page.py,
own_runs_page.py).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic

from lab.scoring.frozen_predictions import DATA, Freezes, LineT, digest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class FrozenPage(Generic[LineT]):
    """A page, its frozen predictions, and how today's predictions are made."""

    path: Path
    freezes: Freezes[LineT]
    held_in: str
    """The module that holds the digests, which `--freeze` names."""
    names: Callable[[], Sequence[str]]
    """Names of the runs."""
    today: Callable[[str], Mapping[str, Any]]
    """Columns of a run's line as predicted today, without name, date and commit."""

    def checked_lines(self) -> tuple[LineT, ...]:
        """The frozen lines; exits where one was changed."""
        lines = self.freezes.lines()
        changed = self.freezes.changed(lines)
        if changed:
            sys.exit(
                f"{self.freezes.file}: the freezes of {', '.join(changed)} are not those that were frozen"
            )
        return lines

    def freeze(self) -> None:
        """Append today's predictions of all runs, and print the digest that goes into the code."""
        date = datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M")
        data = DATA / self.freezes.file
        new = not data.exists() or not data.read_text("utf-8")
        if not new and self.freezes.changed(self.freezes.lines()):
            sys.exit(f"{self.freezes.file}: an earlier freeze was changed; restore it first")
        commit = subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        block = [
            self.freezes.line.model_validate(
                {"name": name, "date": date, "commit": commit, **self.today(name)}
            )
            for name in self.names()
        ]
        with data.open("a", encoding="utf-8") as file:
            file.write(self.freezes.as_csv(block, header=new))
        print(f'add to FREEZES in {self.held_in}:\n    "{date}": "{digest(block)}",')

    def main(self, page: Callable[[], str], about: str) -> None:
        """Write the page, or freeze."""
        parser = argparse.ArgumentParser(description=about.splitlines()[0])
        parser.add_argument(
            "--freeze", action="store_true", help="append today's predictions to the frozen ones"
        )
        if parser.parse_args().freeze:
            self.freeze()
        else:
            self.path.write_text(page(), encoding="utf-8")
