"""Carries out the recipes that docs/extend.md names: writes the files that a recipe prints into a copy of the
tree, applies its changes to files that are there, and runs the test that it prints.

A recipe is a page of tests/extend/recipes. It states how many files it touches ("**2 files and a test.**");
every code block after a line with a path in backticks that ends in a colon is that file, and a block of kind
diff changes it: lines that begin with a space must be there, exactly once and in this order.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extend.md"
RECIPES = ROOT / "tests" / "extend" / "recipes"
PACKAGES = ("simulator", "hwmodels", "kernels", "app")

_STATED = re.compile(r"\*\*(\d+) files? and a test\.\*\*")
_TEST = re.compile(r"`(tests/extend/test_\w+\.py)`")
_BLOCK = re.compile(r"^[^\n]*`([\w./-]+)`:\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One file that a recipe writes, or changes where `is_change`."""

    path: str
    text: str
    is_change: bool


@dataclass(frozen=True)
class Recipe:
    """One page of the folder: what it says that it touches, what it touches, and the test that runs it."""

    title: str
    stated_files: int | None
    run_by: str | None
    blocks: tuple[Block, ...]

    @property
    def files(self) -> list[str]:
        """Paths outside of the tests, each once."""
        return list(dict.fromkeys(b.path for b in self.blocks if not b.path.startswith("tests/")))

    @property
    def tests(self) -> list[str]:
        """Paths of tests, each once."""
        return list(dict.fromkeys(b.path for b in self.blocks if b.path.startswith("tests/")))


def recipes(folder: Path = RECIPES) -> dict[str, Recipe]:
    """Every recipe of the folder by its title."""
    found = (_recipe(*page.read_text("utf-8").split("\n", 1)) for page in sorted(folder.glob("*.md")))
    return {recipe.title: recipe for recipe in found}


def _recipe(title: str, text: str) -> Recipe:
    stated, run_by = _STATED.search(text), _TEST.search(text)
    return Recipe(
        title.removeprefix("# ").strip(),
        int(stated[1]) if stated else None,
        run_by[1] if run_by else None,
        tuple(Block(path, body, kind == "diff") for path, kind, body in _BLOCK.findall(text)),
    )


@dataclass(frozen=True)
class Outcome:
    """What became of all recipes in one copy of the tree: style and layers, and each printed test."""

    checks: str
    """Empty, or what the first failing check said."""
    report: str
    """What pytest said of the printed tests."""

    def passed(self, recipe: Recipe) -> bool:
        """Whether the recipe's test ran and passed."""
        return all(
            f"PASSED {path}::" in self.report
            and f"FAILED {path}" not in self.report
            and f"ERROR {path}" not in self.report
            for path in recipe.tests
        )


def carry_out(found: Iterable[Recipe], folder: Path, root: Path = ROOT) -> Outcome:
    """Write the files of all recipes into one copy of the tree, check style and layers, run their tests."""
    copy, kept = folder / "tree", tuple(found)
    for package in PACKAGES:  # compiled modules are copied too: their files keep their times
        shutil.copytree(root / package, copy / package)
    shutil.copytree(root / "src", copy / "src", symlinks=True)
    shutil.copy(root / "pyproject.toml", copy)
    for block in (block for recipe in kept for block in recipe.blocks):
        path = copy / block.path
        assert block.is_change == path.exists(), f"{block.path} is there already, or is not there to change"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = changed(path.read_text("utf-8"), block) if block.is_change else block.text
        path.write_text(text, encoding="utf-8")
    files = sorted({name for recipe in kept for name in (*recipe.files, *recipe.tests)})
    python = [name for name in files if name.endswith(".py")]
    checks = (
        ["-m", "ruff", "check", *python],
        ["-m", "ruff", "format", "--diff", *python],
        ["-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"],
    )
    failed = [ran.stdout + ran.stderr for command in checks if (ran := _run(command, copy)).returncode]
    tests = sorted({name for recipe in kept for name in recipe.tests})
    ran = _run(["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *tests], copy)
    return Outcome(failed[0] if failed else "", ran.stdout + ran.stderr)


def _run(arguments: list[str], copy: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(copy / "src"),
        "MOESIM_CACHE": "off",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # none is needed, and they take a second to load
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def changed(text: str, block: Block) -> str:
    """The text of a file with the hunks of a change, which are separated by lines that begin with @@."""
    for hunk in re.split(r"^@@.*\n", block.text, flags=re.MULTILINE):
        lines = [line or " " for line in hunk.splitlines()]
        assert all(line[0] in " +-" for line in lines), f"{block.path}: a line of a change begins with ' +-'"
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        assert text.count(before) == 1, f"{block.path} has {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    return text
