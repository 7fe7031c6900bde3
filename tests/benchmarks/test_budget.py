"""The budget of time: noise is repeated, a slower tree fails, and the changelog names the baseline."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def budget() -> ModuleType:
    spec = importlib.util.spec_from_file_location("budget", ROOT / "benchmarks" / "budget.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_noise_is_repeated_and_a_slower_tree_fails(budget: ModuleType) -> None:
    turns: dict[object, int] = {}

    def measured(tree: str, key: tuple[str, str], slow: float) -> float:
        turns[tree, key] = turn = turns.get((tree, key), 0) + 1
        busy = 2.0 if tree == "now" and turn < 6 else 1.0
        return (
            busy
            * (0.1 if key[1] == "compiled" else 1.0)
            * (slow if (tree, *key[:1]) == ("now", "home") else 1.0)
        )

    same = budget.ratios(lambda tree, key: measured(tree, key, 1.1))
    assert budget.report(same)[1] == []
    assert turns["now", ("home", "compiled")] == 6
    turns.clear()
    _, past = budget.report(budget.ratios(lambda tree, key: measured(tree, key, 1.2)))
    assert [line.split(" takes")[0] for line in past] == ["home by compiled", "home by simpy"]
    assert turns["now", ("home", "compiled")] == budget.TURNS["compiled"][1]


def test_a_compiled_engine_that_is_as_slow_as_simpy_fails(budget: ModuleType) -> None:
    alike = budget.ratios(lambda tree, key: 1.0)
    assert budget.report(alike)[1] == []
    lame = {key: (2.0, 2.0) if key[1] == "compiled" else one for key, one in alike.items()}
    assert len(budget.report(lame)[1]) == len(budget.SCENARIOS)


def test_the_changelog_names_the_baseline() -> None:
    commit = (ROOT / "benchmarks" / "baseline").read_text().split()[0]
    assert len(commit) == 40
    assert commit[:8] in (ROOT / "CHANGELOG.md").read_text()
