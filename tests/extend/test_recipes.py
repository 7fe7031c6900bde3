"""docs/extend.md as a whole: every kind of extension has a recipe that keeps within its limits."""

from __future__ import annotations

import runpy

import pytest
from recipes import PAGE, RECIPES, ROOT, Block, Outcome, carry_out, changed, recipes

KINDS = (
    "A schedule",
    "An accelerator",
    "An attention kind",
    "A topology",
    "A collective",
    "A dispatcher",
    "An engine",
    "A model family",
    "A scenario key",
    "A calibration importer",
    "A trainer",
    "A trainer release",
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """All recipes carried out in one copy of the tree: they touch different lines, as additions should."""
    return carry_out(recipes().values(), tmp_path_factory.mktemp("recipes"))


def test_every_kind_of_extension_has_a_recipe() -> None:
    assert sorted(recipes()) == sorted(KINDS)
    page = PAGE.read_text("utf-8")
    assert [
        path.name for path in RECIPES.glob("*.md") if f"../tests/extend/recipes/{path.name}" not in page
    ] == []


@pytest.mark.parametrize("title", KINDS)
def test_a_recipe_states_what_it_touches_and_which_test_runs_it(title: str) -> None:
    recipe = recipes()[title]
    assert recipe.stated_files == len(recipe.files) <= 3
    assert len(recipe.tests) == 1
    assert recipe.run_by is not None
    assert (ROOT / recipe.run_by).is_file()


def test_the_printed_files_have_the_style_and_the_layers_of_the_tree(outcome: Outcome) -> None:
    assert not outcome.checks, outcome.checks[-4000:]


@pytest.mark.parametrize("title", KINDS)
def test_a_recipe_works_as_printed(title: str, outcome: Outcome) -> None:
    assert outcome.passed(recipes()[title]), outcome.report[-6000:]


def test_the_page_lists_what_is_registered() -> None:
    filled = runpy.run_path(str(ROOT / "lab" / "writers" / "extend_page.py"))["filled"]
    page = PAGE.read_text("utf-8")
    assert filled(page) == page, "run make pages"


def test_a_change_must_fit_its_file_exactly_once() -> None:
    text = "one\n\ntwo\ntwo\n"
    assert changed(text, Block("f.py", " one\n+half\n\n", True)) == "one\nhalf\n\ntwo\ntwo\n"
    assert (
        changed(text, Block("f.py", "-one\n+1\n@@\n two\n two\n+three\n", True)) == "1\n\ntwo\ntwo\nthree\n"
    )
    for change in (" two\n+more\n", " three\n", "-one\n two\n"):
        with pytest.raises(AssertionError, match=r"f\.py has \d times"):
            changed(text, Block("f.py", change, True))
    with pytest.raises(AssertionError, match="begins with"):
        changed(text, Block("f.py", "one\n", True))
