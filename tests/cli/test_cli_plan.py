"""The command `plan`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesim.simulator.scenario import load_scenario

SPACE = """tp: 1
pp: [2, 4]
ep: 8
cp: 1
microbatch: 1
schedule: [1f1b, zbv]
recompute: [full, selective]
precision: bf16
sms: 20
zero_stage: 1
"""


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, str]:
    """A small scenario and a small space."""
    scenario, space = tmp_path / "small.yaml", tmp_path / "space.yaml"
    golden = Path(__file__).parents[1] / "golden" / "scenario-small.yaml"
    text = golden.read_text().replace("mixtral-8x22b", "qwen3-30b-a3b")
    scenario.write_text(text)
    space.write_text(SPACE)
    return str(scenario), str(space)


def test_plan_prints_counts_plans_reasons_and_arguments(
    run: Callable[..., Any], small: tuple[str, str]
) -> None:
    scenario, space = small
    out = run("plan", scenario, "--space", space, "--top", "2", "--workers", "1")
    assert out.code == 0, out.err
    for text in ("8 plans", "own plan", "by mechanism", "refused", "PP2"):
        assert text in out.out, text
    out = run("plan", scenario, "--space", space, "--top", "2", "--workers", "1", "--arguments", "megatron")
    for text in ("2 plans", "recompute=selective is not searched", "--pipeline-model-parallel-size"):
        assert text in out.out, text


def test_a_plan_for_a_trainer_has_its_arguments_and_a_job_file(
    run: Callable[..., Any], small: tuple[str, str], tmp_path: Path
) -> None:
    scenario, space = small
    common = ("plan", scenario, "--space", space, "--top", "1", "--workers", "1")
    out = run(*common, "--trainer", "megatron@0.14", "--job", "slurm", "--job-file", "job.sh")
    assert out.code == 0, out.err
    for text in ("searched what Megatron-LM 0.14 can run", "schedule=zbv is not searched", "the best of all"):
        assert text in out.out, text
    job = (tmp_path / "job.sh").read_text()
    assert "#SBATCH --nodes=" in job and "--moe-enable-deepep" in job and "pretrain_gpt.py" in job
    out = run(*common, "--arguments", "megatron", "--job", "k8s", "--json")
    data = json.loads(out.out)
    assert data["trainer"]["trainer"] == "Megatron-LM 0.20" and data["arguments"]["unspelled"] == []
    assert "PyTorchJob" in data["job"]


def test_plan_writes_json_and_a_scenario_that_simulates(
    run: Callable[..., Any], small: tuple[str, str], tmp_path: Path
) -> None:
    scenario, space = small
    out = run("plan", scenario, "--space", space, "--top", "1", "--workers", "1", "--json", "-o", "best.yaml")
    assert out.code == 0, out.err
    data = json.loads(out.out)
    assert data["considered"] == 8 and len(data["ranked"]) == 1
    best = load_scenario(str(tmp_path / "best.yaml"))
    assert best.parallel.pp == data["ranked"][0]["pp"]
    again = run("simulate", "best.yaml", "--json")
    assert json.loads(again.out)["step"]["time_s"] == data["ranked"][0]["time_s"]


@pytest.mark.parametrize(
    ("extra", "code", "named"),
    [
        (["--objective", "speed"], 2, "speed"),
        (["--arguments", "megatorn"], 2, "megatron"),
        (["--trainer", "megatron@0.3"], 2, "0.14"),
        (["--trainer", "megatron", "--arguments", "torchtitan"], 2, "differ"),
        (["--job", "slurm"], 2, "--trainer"),
        (["--job", "pbs", "--trainer", "megatron"], 2, "pbs"),
        (["--job-file", "job.sh"], 2, "--job slurm"),
        (["--trainer", "megatron", "--job", "slurm", "--job-template", "missing.yaml"], 2, "missing.yaml"),
        (["--space", "missing.yaml"], 2, "missing.yaml"),
        (["--deadline-days", "-3"], 2, "deadline_days"),
        (["--deadline-days", "1e-6"], 3, "too slow"),
        (["-o", "no/such/folder.yaml"], 2, "no/such"),
    ],
)
def test_plan_refuses_in_one_paragraph(
    run: Callable[..., Any], small: tuple[str, str], extra: list[str], code: int, named: str
) -> None:
    scenario, space = small
    chosen = extra if "--space" in extra else ["--space", space, *extra]
    out = run("plan", scenario, "--workers", "1", *chosen)
    assert out.code == code
    assert named in out.err and "Traceback" not in out.err
    assert len(out.err.strip().splitlines()) == 1
