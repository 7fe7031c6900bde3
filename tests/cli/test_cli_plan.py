"""The command `plan`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
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
    out = run("plan", scenario, "--space", space, "--top", "1", "--workers", "1", "--arguments", "megatron")
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


GB200 = "deepseek-v3-256xgb200"
FOR_MEGATRON = ("--trainer", "megatron")


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that starts fails the test."""

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the search began before the options were checked")

    monkeypatch.setattr("moesim.simulator.planner.search.plan", never)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([GB200, *FOR_MEGATRON, "--job", "slurm"], "gpus_per_host"),
        ([GB200, *FOR_MEGATRON, "--job", "k8s"], "gpus_per_host"),
        ([GB200, "--trainer", "deepspeed", "--job", "slurm"], "gpus_per_host"),
        (["small.yaml", "--trainer", "deepspeed", "--job", "slurm"], "script of your own"),
        (["small.yaml", *FOR_MEGATRON, "--job", "k8s", "--job-template", "site.yaml"], "image is missing"),
        (["small.yaml", *FOR_MEGATRON, "--job", "slurm", "--job-file", "a", "-o", "./a"], "its own file"),
        (["small.yaml", "--headroom", "1.5"], "below 1"),
        (["small.yaml", "--headroom", "nan"], "below 1"),
        (["small.yaml", "--vary", "precison=fp8"], "precision"),
        (["small.yaml", "--vary", "precision=fp9"], "fp9"),
        (["small.yaml", "--space", "space.yaml", "--vary", "tp=2"], "beside the same key"),
        (["small.yaml", "--curve", "strong"], "--curve belongs to sizes"),
        (["small.yaml", "--vary", "cluster.nodes=0..4"], "is no size"),
        (["small.yaml", "--vary", "cluster.nodes=2..1"], "cluster.nodes"),
        (["small.yaml", "--vary", "cluster.nodes=1,2", "--top", "3"], "--top is for one size"),
        (["small.yaml", "--accelerators", "h100,h20x"], "h20x"),
        (["small.yaml", "--accelerators", "h100,"], "empty name"),
        (["small.yaml", "--accelerators", "h100", "--deadline-days", "0"], "above 0"),
    ],
)
@pytest.mark.usefixtures("small", "no_search")
def test_what_cannot_be_written_is_refused_before_the_search(
    run: Callable[..., Any], tmp_path: Path, arguments: list[str], named: str
) -> None:
    (tmp_path / "site.yaml").write_text("partition: big\n")
    out = run("plan", *arguments)
    assert out.code == 2 and named in out.err and "Traceback" not in out.err
    assert not out.out and not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("error", "as_json"), [(InputError("the plan has no words"), False), (KeyError("a fault"), True)]
)
def test_an_export_that_fails_late_does_not_lose_the_plan(
    run: Callable[..., Any],
    small: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    as_json: bool,
) -> None:
    scenario, space = small

    def fails(*args: object) -> str:
        raise error

    monkeypatch.setattr("moesim.cli.plan.Wanted._job_text", fails)
    extra = ["--json"] if as_json else []
    out = run(
        "plan", scenario, "--space", space, "--top", "1", "--workers", "1", *extra, "-o", "best.yaml",
        "--arguments", "megatron", "--job", "slurm",
    )  # fmt: skip
    assert out.code == (2 if isinstance(error, InputError) else 1)
    assert str(error) in out.err
    assert load_scenario(str(tmp_path / "best.yaml")).parallel.pp in (2, 4)
    if as_json:
        assert json.loads(out.out)["ranked"] and "job" not in json.loads(out.out)
    else:
        assert "2 plans" in out.out and "--pipeline-model-parallel-size" in out.out


def test_plan_says_its_head_room_and_what_it_keeps(run: Callable[..., Any], small: tuple[str, str]) -> None:
    scenario, _ = small
    narrow = [
        f"--vary={text}" for text in ("pp=4", "ep=8", "cp=1", "tp=1", "microbatch=1", "vpp=2", "sms=20")
    ]
    common = ("plan", scenario, "--top", "1", "--workers", "1", *narrow, "--vary", "schedule=1f1b")
    out = run(*common)
    assert "head-room: no plan is at risk" in out.out
    assert "precision=bf16 is kept, as the scenario states it" in out.out
    best = json.loads(run(*common, "--json").out)
    assert best["ranked"][0]["precision"] == "bf16" and best["ranked"][0]["verdict"] == "fits"
    assert best["headroom"] is None and len(best["kept"]) == 2
    other = json.loads(run(*common, "--json", "--vary", "precision=bf16,fp8", "--headroom", "0").out)
    assert other["ranked"][0]["precision"] == "fp8" and other["headroom"] == 0.0


SIZES = ("--vary", "cluster.nodes=4,6,8", "--search", "own", "--workers", "1", "--headroom", "0")


def test_a_space_file_and_vary_size_alike_and_the_best_is_written(
    run: Callable[..., Any], small: tuple[str, str], tmp_path: Path
) -> None:
    scenario, _ = small
    by_option = run("plan", scenario, *SIZES, "--objective", "gpus", "--json", "-o", "best.yaml")
    assert by_option.code == 0, by_option.err
    sizing = json.loads(by_option.out)
    (tmp_path / "sizes.yaml").write_text("variants: {cluster.nodes: '4..8:2'}\n")
    by_file = run("plan", scenario, "--space", "sizes.yaml", *SIZES[2:], "--objective", "gpus", "--json")
    assert json.loads(by_file.out) == sizing
    assert load_scenario("best.yaml").machine.n_gpus == sizing["winners"]["gpus"]["n_gpus"]


def test_limits_that_no_size_keeps_end_with_code_3_and_the_nearest(
    run: Callable[..., Any], small: tuple[str, str]
) -> None:
    scenario, _ = small
    out = run("plan", scenario, *SIZES, "--budget-usd", "1")
    assert out.code == 3
    assert "no size keeps $1; nearest: " in out.err.replace("\n", " ")
    assert "all sizes" in out.out
