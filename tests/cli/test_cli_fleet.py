"""The command line on a scenario with a fleet: text, JSON, exit codes 2 and 3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesim.simulator.scenario import load_scenario

SPACE = "{tp: 1, pp: [2, 4], ep: 8, microbatch: 1, schedule: [1f1b, zbv], recompute: full, zero_stage: 1}"


def test_simulate_shows_every_pool(run: Callable[..., Any], mixed_file: Path) -> None:
    out = run("simulate", str(mixed_file))
    assert out.code == 0, out.err
    for text in ("16 x NVIDIA H100", "16 x NVIDIA A100", "h100-sxm    16", "ms a layer", "step time"):
        assert text in out.out, text
    told = run("explain", str(mixed_file))
    assert told.code == 0 and "a100-sxm" in told.out and "critical path" in told.out
    data = json.loads(run("simulate", str(mixed_file), "--json").out)
    assert [pool["accelerator"] for pool in data["pools"]] == ["h100-sxm", "a100-sxm"]


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["simulate", "--set", "parallel.pp=3"], 2, "multiple of 2"),
        (["simulate", "--set", "schedule=dualpipe"], 2, "dualpipev"),
        (["simulate", "--resolution", "full"], 2, "resolution=full"),
        (["simulate", "--uncertainty"], 2, "--uncertainty"),
        (["simulate", "--trace", "t.json"], 2, "--trace"),
        (["simulate", "--set", "cluster.nodes=2"], 2, "cluster"),
        (["simulate", "--set", "recompute=none", "--set", "batch.sequence_length=65536"], 3, "does not fit"),
        (["sensitivity"], 2, "fleet.pools"),
        (["run"], 2, "fleet.pools"),
        (["plan", "--objective", "memory"], 2, "objective=memory"),
        (["plan", "--deadline-days", "0.001", "--space", "space.yaml"], 3, "too slow"),
    ],
)
def test_refused_in_one_paragraph(
    run: Callable[..., Any], mixed_file: Path, arguments: list[str], code: int, named: str
) -> None:
    (mixed_file.parent / "space.yaml").write_text(SPACE)
    out = run(arguments[0], str(mixed_file), *arguments[1:])
    assert out.code == code, out.err
    assert named in out.err and "Traceback" not in out.err
    assert len(out.err.strip().splitlines()) == 1


def test_plan_prints_the_verdict_and_writes_the_fleet(run: Callable[..., Any], mixed_file: Path) -> None:
    (mixed_file.parent / "space.yaml").write_text(SPACE)
    out = run(
        "plan", str(mixed_file), "--space", "space.yaml", "--workers", "1", "--top", "1", "-o", "best.yaml"
    )
    assert out.code == 0, out.err
    for text in ("pools of the best plan", "is the mix worth it?", "h100-sxm alone takes", "refused"):
        assert text in out.out, text
    best = load_scenario(str(mixed_file.parent / "best.yaml"))
    assert best.fleet is not None and best.stages.layers is not None
    assert run("simulate", "best.yaml").code == 0
