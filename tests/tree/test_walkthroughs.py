"""Every command of the tutorial and the cookbook runs, and the page shows what it prints now."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {"tutorial": 5, "cookbook": 21}
"""Commands of each page, which a test below counts."""


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    return importlib.import_module("lab.writers.walkthroughs")


@pytest.fixture(scope="module")
def folders(writer: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each page, with what its commands read; a command may read what an earlier one wrote."""
    places = {name: tmp_path_factory.mktemp(name) for name in COMMANDS}
    for name, place in places.items():
        writer.prepare(place, (ROOT / "docs" / f"{name}.md").read_text("utf-8"))
    return places


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, count in COMMANDS.items() for number in range(count)]
)
def test_a_command_prints_what_the_page_shows(
    name: str, number: int, writer: ModuleType, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders[name])
    block = writer.blocks((ROOT / "docs" / f"{name}.md").read_text("utf-8"))[number]
    assert writer.current(block) == block.shown, "run: make pages"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_of_a_page_is_left_out(name: str, writer: ModuleType) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    assert len(writer.blocks(page)) == page.count("$ moesim") == COMMANDS[name]


def test_a_line_that_nobody_prints_is_noticed(
    writer: ModuleType, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders["cookbook"])
    text = "<!-- shows no such line -->\n```\n$ moesim schedule 1f1b --pp 2 --microbatches 2\n```\n"
    (block,) = writer.blocks(text)
    with pytest.raises(SystemExit, match="no line begins with 'no such line'"):
        writer.current(block)
