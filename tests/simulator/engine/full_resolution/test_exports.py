"""What full resolution exports: traces of chosen GPUs, pictures, text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

HOME = "deepseek-v3-2048xh800"
SMALL = [
    "simulate", HOME,
    "--set", "cluster={node: hgx-h800, nodes: 16, network: mpft-ib-400g, name: 128xh800}",
    "--set", "parallel={tp: 1, pp: 4, ep: 16, cp: 1, microbatch: 1, zero_stage: 1}",
    "--set", "batch.sequences=256", "--set", "stages.layers=[16, 15, 15, 15]", "--set", "schedule=1f1b",
    "--resolution", "full",
]  # fmt: skip
"""Does not fit into memory: every run ends with code 3, after its answer."""


def shown_gpus(path: Path) -> set[int]:
    return {event["pid"] for event in json.loads(path.read_text())["traceEvents"]}


def test_a_trace_shows_the_gpus_that_were_named(run: Run, tmp_path: Path) -> None:
    outcome = run(*SMALL, "--trace", "some.json", "--ranks", "3,40-41,120")
    assert outcome.code == 3
    assert shown_gpus(tmp_path / "some.json") == {3, 40, 41, 120}


def test_a_trace_shows_one_pipeline_by_default(run: Run, tmp_path: Path) -> None:
    run(*SMALL, "--trace", "one.json")
    assert shown_gpus(tmp_path / "one.json") == {0, 32, 64, 96}


def test_gpus_and_members_that_are_not_there(run: Run) -> None:
    for more, words in (
        (["--ranks", "128"], "trace of ranks=128: give a GPU from 0 to 127"),
        (["--members", "1"], "in full resolution use --ranks"),
        (["--ranks", "some"], "write numbers such as"),
    ):
        outcome = run(*SMALL, "--trace", "x.json", *more)
        assert outcome.code == 2 and words in outcome.err


def test_the_text_names_stragglers_and_costs(run: Run) -> None:
    out = run(*SMALL, "--set", "faults=[{kind: slow-gpu, gpu: 37, speed: 0.5}]").out
    assert "every GPU for itself: 128 GPUs, 2 groups of 16" in out
    assert "GPU 37 (pipeline rank 1, group 0) kept its group waiting" in out
    assert "slow-gpu GPU 37 at 0.5 of its speed" in out


@pytest.mark.long
def test_a_picture_is_the_same_every_time(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'moesim[pictures]'")
    pictures = []
    for _ in range(2):
        run(*SMALL, "--picture", "map.svg")
        pictures.append((tmp_path / "map.svg").read_bytes())
    assert pictures[0] == pictures[1] and len(pictures[0]) > 10_000


def test_pictures_that_cannot_be_drawn(run: Run, tmp_path: Path) -> None:
    for more, words in (
        (["--picture", "map.gif"], "unknown ending; use .svg or .png"),
        (["--picture", "absent/map.svg"], "absent"),
    ):
        outcome = run(*SMALL, *more)
        assert outcome.code == 2 and words in outcome.err
    folded = run(*SMALL[:-2], "--picture", "map.svg")
    assert folded.code == 2 and "--resolution full" in folded.err
    assert not (tmp_path / "map.svg").exists()
