"""The trainers' own readers have accepted exactly the exports that are written today."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from exports import PLANS, Export, all_exports, runnable
from sample import MODELS, build

from moesim.simulator.trainers.registry import trainer_of
from moesim.simulator.trainers.rules import facts_of

PROOF = Path(__file__).parents[3] / "lab" / "docs" / "proof"
READERS = {
    "trainers-torchtitan-0.2.2.json": lambda file: file.endswith(".toml"),
    "trainers-torchtitan-0.3.0.json": lambda file: file.startswith("plan_"),
    "trainers-bridge.json": lambda file: file.startswith("bridge_"),
    "trainers-deepspeed.json": lambda file: file.startswith("deepspeed_"),
    "trainers-jobs.json": lambda file: file.startswith("job_"),
}


@cache
def exports() -> dict[str, Export]:
    return {export.file: export for export in all_exports()}


def verdicts(name: str) -> dict[str, dict[str, Any]]:
    return {row["file"]: row for row in json.loads((PROOF / name).read_text("utf-8"))["exports"]}


@pytest.mark.parametrize("name", list(READERS))
def test_every_export_was_accepted_by_its_reader_as_it_is_written_now(name: str) -> None:
    rows = verdicts(name)
    written = {file: export.sha256 for file, export in exports().items() if READERS[name](file)}
    again = "run the reader again (docs/trainers.md)"
    assert {file: row["sha256"] for file, row in rows.items()} == written, again
    assert [file for file, row in rows.items() if row["verdict"] != "accepted"] == []


def test_the_sample_is_large_and_has_every_model_and_schedule() -> None:
    toml = [export for file, export in exports().items() if file.endswith(".toml")]
    assert len(toml) >= 60
    assert {export.file.rpartition("-")[0] for export in toml} == set(MODELS)
    names = {"GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}
    assert {export.expected["schedule"] for export in toml} >= names
    assert {export.expected["zero"] for export in toml} == {0, 1, 2, 3}


@pytest.mark.parametrize("trainer", list(json.loads(PLANS.read_text("utf-8"))))
def test_the_plans_of_the_sample_have_no_problem(trainer: str) -> None:
    rules = {
        "torchtitan 0.2.2": runnable("0.2.2"),
        "torchtitan 0.3.0": runnable("0.3.0"),
        "Megatron-Bridge": trainer_of("bridge").problems,
        "DeepSpeed": trainer_of("deepspeed").problems,
    }
    for name, data in json.loads(PLANS.read_text("utf-8"))[trainer].items():
        assert rules[trainer](facts_of(build(name, data))) == (), name
