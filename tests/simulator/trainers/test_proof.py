"""The trainers' own readers have accepted exactly the exports that are written today."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from draw_plans import MODELS as DRAWN
from exports import PLANS, Export, all_exports, runnable
from judge_plans import CONTROLS, VERDICTS, digest, plans
from prove import PROOF, ROOT, main, readers
from sample import MODELS, build

from moesim.simulator.trainers.registry import trainer_of
from moesim.simulator.trainers.rules import facts_of
from moesim.simulator.trainers.trainer import description

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


VERSIONS = description("megatron").versions


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    verdicts: dict[str, Any] = json.loads(VERDICTS.read_text("utf-8"))
    return verdicts


@pytest.mark.parametrize("version", VERSIONS)
def test_every_plan_was_accepted(judged: dict[str, Any], version: str) -> None:
    verdicts = judged[version]["verdicts"]
    assert judged[version]["plans_a_model"] >= 200
    assert len(verdicts) == judged[version]["plans_a_model"] * len(DRAWN)
    assert {name: said for name, (_, said) in verdicts.items() if said != "accepted"} == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_spoilt_plans_were_refused(judged: dict[str, Any], version: str) -> None:
    controls = judged[version]["controls"]
    assert controls.keys() == CONTROLS.keys()
    assert [name for name, said in controls.items() if said == "accepted"] == []


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_todays_exports_are_those_that_were_judged(judged: dict[str, Any], version: str) -> None:
    verdicts, count = judged[version]["verdicts"], 5  # the first plans of each model; the draw is seeded
    exports = {name: export for name, (_, export) in plans(version, count).items()}
    changed = [name for name, export in exports.items() if verdicts[name][0] != digest(export)]
    assert changed == [], "judge the plans anew: python lab/proofs/trainers/judge_plans.py --help"


PAGE = (ROOT / "lab" / "proofs" / "trainers" / "README.md").read_text("utf-8")


def test_every_reader_has_its_script_its_verdicts_and_its_place_on_the_page(tmp_path: Path) -> None:
    for reader in readers(tmp_path, tmp_path / "exports"):
        scripts = [word for word in reader.command if word.endswith(".py")]
        assert len(scripts) == 1 and Path(scripts[0]).is_file()
        for path in reader.needs:
            assert f"`{path.relative_to(tmp_path).parts[0]}" in PAGE, path
    words = [Path(word) for reader in readers(tmp_path, tmp_path) for word in reader.command]
    assert {word for word in words if word.parent == PROOF} == set(PROOF.glob("trainers-*.json"))


def test_what_is_missing_is_said_and_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "megatron-0.14").mkdir()
    assert main(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all(": skipped; " in line for line in lines)
    assert "judge/bin/python" in lines[0] and "megatron-0.20" in lines[0]
    assert "megatron-0.14" not in lines[0]


def test_a_reader_that_fails_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "judge" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    for version in ("0.20", "0.14"):
        (tmp_path / f"megatron-{version}").mkdir()
    command = (sys.executable, "-c", "raise SystemExit(1)")
    first = readers(tmp_path, tmp_path)[0]
    assert first.missing == ()
    monkeypatch.setattr("prove.readers", lambda *_: (type(first)(first.title, command, first.needs),))
    assert main(tmp_path) == 1
