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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extend.md"
RECIPES = ROOT / "tests" / "extend" / "recipes"
PACKAGES = ("simulator", "hwmodels", "kernels", "app")

_STATED = re.compile(r"\*\*(\d+) files? and a test\.\*\*")
_TEST = re.compile(r"`(tests/extend/test_add_\w+\.py)`")
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


def carry_out(recipe: Recipe, folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The run of the recipe's test in a copy of the tree with the recipe's files.

    Style and layers of imports are checked before; the run is theirs where one of them fails.
    """
    copy = folder / "tree"
    for package in PACKAGES:  # compiled modules are copied too: their files keep their times
        shutil.copytree(root / package, copy / package)
    shutil.copytree(root / "src", copy / "src", symlinks=True)
    shutil.copy(root / "pyproject.toml", copy)
    for block in recipe.blocks:
        path = copy / block.path
        assert block.is_change == path.exists(), f"{block.path} is there already, or is not there to change"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = changed(path.read_text("utf-8"), block) if block.is_change else block.text
        path.write_text(text, encoding="utf-8")
    python = [name for name in (*recipe.files, *recipe.tests) if name.endswith(".py")]
    checks = (
        ["-m", "ruff", "check", *python],
        ["-m", "ruff", "format", "--diff", *python],
        ["-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"],
    )
    for command in checks:
        checked = _run(command, copy)
        if checked.returncode:
            return checked
    return _run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *recipe.tests], copy)


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


def check(title: str, folder: Path) -> None:
    """Carry out the recipe of this title, and hold it to what it states."""
    recipe = recipes()[title]
    assert len(recipe.files) == recipe.stated_files, recipe.files
    assert len(recipe.files) <= 3 and len(recipe.tests) == 1
    run = carry_out(recipe, folder)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert re.search(r"\d+ passed", run.stdout), run.stdout
