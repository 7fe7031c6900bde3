from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COUNTS = "8,2,1,1,1,1,1,1\n2,2,2,2,2,2,2,2\n"

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def counts(tmp_path: Path) -> None:
    (tmp_path / "counts.csv").write_text(COUNTS)


def test_a_plan_for_people_and_programs(run: Run) -> None:
    shown = run("eplb", "counts.csv", "--ranks", "4", "--redundant", "4", "--top-k", "2")
    assert shown.code == 0 and shown.err == ""
    assert "2 layers, 8 experts, 4 ranks of 3 slots" in shown.out and "0x4" in shown.out
    told = json.loads(run("eplb", "counts.csv", "--ranks", "4", "--redundant", "4", "--json").out)
    hot, even = told["layers"]
    assert hot["before"] == pytest.approx(10 / 4) and hot["after"] < 1.3
    assert even["before"] == even["after"] == pytest.approx(1.0)
    assert sum(hot["replicas"]) == 12 and [len(row) for row in hot["experts_of_rank"]] == [3] * 4
    assert sorted(e for row in hot["experts_of_rank"] for e in row) == sorted(
        e for e, n in enumerate(hot["replicas"]) for _ in range(n)
    )


def test_hierarchical(run: Run) -> None:
    flags = ("--ranks", "4", "--policy", "hierarchical", "--groups", "4", "--nodes", "2", "--json")
    told = json.loads(run("eplb", "counts.csv", *flags).out)
    for row in told["layers"]:
        for first in (0, 2):
            groups = {e // 2 for rank in row["experts_of_rank"][first : first + 2] for e in rank}
            assert len(groups) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("counts.csv", "--ranks", "3"), "experts=8 cannot be shared evenly by ranks=3"),
        (("counts.csv", "--ranks", "4", "--redundant", "3"), "redundant_experts=3"),
        (("counts.csv", "--ranks", "4", "--policy", "globl"), "'global'"),
        (("counts.csv", "--ranks", "4", "--top-k", "3"), "not a multiple of top_k=3"),
        (("counts.csv", "--ranks", "4", "--policy", "hierarchical", "--groups", "3"), "groups=3"),
        (("absent.csv", "--ranks", "4"), "No such file"),
        (("bad.csv", "--ranks", "2"), "bad.csv: layer 1 sums to 3"),
    ],
)
def test_bad_input(run: Run, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "bad.csv").write_text("1,1\n2,1\n")
    outcome = run("eplb", *arguments)
    assert outcome.code == 2 and outcome.out == "" and words in outcome.err
    assert outcome.err.startswith("moesim: error: ") and outcome.err.count("\n") == 1
