"""The outputs of commands on docs/tutorial.md and docs/cookbook.md; `make pages` writes them.

A command stands in a block of its own below a comment that names the lines of its output that the page shows:

    <!-- shows step time+1 | memory; exit 3 -->
    ```
    $ moesim simulate job.yaml
    ```

Each name is the beginning of a line, and `+1` adds the line after it; `exit 3` is the exit code where it is
not 0. Commands of a page run one after the other in a folder that holds `examples`, a `config.json` of
Qwen3-30B-A3B, expert counts, and every YAML file that the page prints below its name.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moesim.cli import main as command_line

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(ROOT / "docs" / f"{name}.md" for name in ("tutorial", "cookbook"))
CONFIG = ROOT / "tests" / "golden" / "models" / "qwen3-30b-a3b.json"
COLUMNS = "100"
LEFT_OUT = "..."

_BLOCK = re.compile(r"<!-- shows (.*?) -->\n```\n\$ (moesim .*?[^\\])\n(.*?)```", re.DOTALL)
_FILE = re.compile(r"`([\w-]+\.yaml)`:\n\n```yaml\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A command of a page, the lines that it shows, and what shall stand there."""

    names: tuple[str, ...]
    exit_code: int
    command: str
    shown: str

    @property
    def arguments(self) -> list[str]:
        """The command's words after `moesim`."""
        return shlex.split(self.command.replace("\\\n", " "))[1:]


def blocks(page: str) -> list[Block]:
    """The commands of a page in order."""
    return [_block(*found) for found in _BLOCK.findall(page)]


def _block(names: str, command: str, shown: str) -> Block:
    names, _, code = names.partition("; exit ")
    return Block(tuple(name.strip() for name in names.split(" | ")), int(code or 0), command, shown)


def prepare(folder: Path, page: str) -> None:
    """Write the files that a page's commands read."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("*.py", "*.out"))
    shutil.copy(CONFIG, folder / "config.json")
    counts = ",".join(str(64 + 8 * (n % 7)) for n in range(256))
    (folder / "counts.csv").write_text(counts + "\n")
    for name, text in _FILE.findall(page):
        (folder / name).write_text(text)


def current(block: Block) -> str:
    """The lines that a block should show, from a run of its command in the current folder."""
    lines = output_of(block)
    places: list[int] = []
    for name in block.names:
        name, _, more = name.partition("+")
        first = next((n for n, line in enumerate(lines) if line.strip().startswith(name)), None)
        if first is None:
            raise SystemExit(f"moesim {' '.join(block.arguments)}: no line begins with {name!r}")
        places += range(first, first + int(more or 0) + 1)
    shown: list[str] = []
    for before, place in zip([-1, *places], places, strict=False):
        if place > before + 1 and shown:
            shown.append(LEFT_OUT)
        shown.append(lines[place])
    return "\n".join([*shown, *([LEFT_OUT] if places[-1] + 1 < len(lines) else [])]) + "\n"


def output_of(block: Block) -> list[str]:
    """Lines of a command's output and errors, without empty ones and without its progress."""
    shown, errors = io.StringIO(), io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    code: object = 0
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
        try:
            command_line(block.arguments)
        except SystemExit as end:
            code = end.code or 0
        finally:
            os.environ.pop("COLUMNS")
            if before is not None:
                os.environ["COLUMNS"] = before
    if code != block.exit_code:
        words = " ".join(block.arguments)
        raise SystemExit(f"moesim {words}: exit code {code}, not {block.exit_code}: {errors.getvalue()}")
    said = [line for line in errors.getvalue().splitlines() if not line.endswith("...")]
    return [line.rstrip() for line in [*shown.getvalue().splitlines(), *said] if line.strip()]


def filled(page: str, folder: Path) -> str:
    """The page with what its commands show now; `folder` is an empty folder to run them in."""
    prepare(folder, page)
    with contextlib.chdir(folder):
        outputs: Iterator[str] = iter([current(block) for block in blocks(page)])
    return _BLOCK.sub(lambda m: m[0].removesuffix(m[3] + "```") + next(outputs) + "```", page)


def current_pages() -> dict[Path, str]:
    """Both pages with what their commands print now."""
    pages = {}
    for path in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            pages[path] = filled(path.read_text("utf-8"), Path(folder))
    return pages
