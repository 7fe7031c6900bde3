"""docs/extend.md, "A trainer release": the files that the page prints are enough."""

from __future__ import annotations

from pathlib import Path

from recipes import check


def test_the_recipe_works_as_printed(tmp_path: Path) -> None:
    check("A trainer release", tmp_path)
