"""Spaces: list expressions, defaults, legal frames and the counts of what was refused."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.common.lists import parse_integers
from moesim.simulator.model.library import load_model
from moesim.simulator.planner.frames import legal_frames
from moesim.simulator.planner.refusals import Refusals, reason_of
from moesim.simulator.planner.space import PlanSpace, load_space, with_defaults
from moesim.simulator.predict.compile import prepare
from moesim.simulator.scenario import load_scenario
from moesim.simulator.schedules import SCHEDULES


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("7", (7,)),
        ("1..4", (1, 2, 3, 4)),
        ("1..16:2x", (1, 2, 4, 8, 16)),
        ("1..20:2x", (1, 2, 4, 8, 16)),
        ("8..24:+8", (8, 16, 24)),
        ("4, 1..3,2", (1, 2, 3, 4)),
        ("3..81:3x", (3, 9, 27, 81)),
    ],
)
def test_expressions(text: str, values: tuple[int, ...]) -> None:
    assert parse_integers(text, "tp") == values


@pytest.mark.parametrize(
    "text",
    ["", "a", "1..", "4..1", "1..8:1x", "0..8:2x", "1..8:+0", "-1", "1.5", "__import__('os')",
     "1..999999999", "1,,2", "1..8:2x3"],
)  # fmt: skip
def test_malformed_expressions_name_the_key(text: str) -> None:
    with pytest.raises(InputError, match="tp="):
        parse_integers(text, "tp")


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(InputError):
        assert all(isinstance(value, int) for value in parse_integers(text, "pp"))


def test_a_space_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        'tp: "1..4:2x"\npp: [2, 4]\nschedule: 1f1b\nprecision: bf16\nvariants: {cluster.nodes: [1, 2]}\n'
    )
    space = load_space(str(path))
    assert (space.tp, space.pp, space.schedule, space.precision) == ((1, 2, 4), (2, 4), ("1f1b",), ("bf16",))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("tp: []", "tp is an empty list"),
        ("tpp: [1]", "tpp"),
        ('tp: "1..x"', "1..x"),
        ("tp: [0]", "tp"),
        ("zero_stage: [4]", "zero_stage"),
        ("schedule: [1f2b]", "1f1b"),
        ("precision: [fp4]", "fp4"),
        ("headroom: 1.0", "headroom"),
        ("variants: {seed: []}", "seed is an empty list"),
    ],
)
def test_malformed_spaces_name_the_key(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=named):
        load_space(path)


def test_defaults_hold_the_scenario_s_own_plan() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800")
    space = with_defaults(PlanSpace(), scenario, load_model("deepseek-v3"), scenario.machine)
    plan = scenario.parallel
    assert plan.pp in space.pp and plan.ep in space.ep and plan.zero_stage in space.zero_stage
    assert scenario.communication.sms in space.sms and scenario.recompute in space.recompute
    assert set(space.schedule) == set(SCHEDULES)
    dense = load_model("llama-3-8b")
    assert with_defaults(PlanSpace(), scenario, dense, scenario.machine).ep == (1,)


def test_every_considered_plan_is_legal_or_refused_with_a_reason() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800")
    shape, cluster = load_model("deepseek-v3"), scenario.machine
    space = with_defaults(PlanSpace(tp=(1, 3), pp=(7, 8, 16), ep=(8, 64), cp=(1,)), scenario, shape, cluster)
    frames, refused = legal_frames(space, shape, cluster, 15360, 4096, "nccl")
    assert len(frames) * space.inner + refused.total == space.size
    reasons = {row.reason for row in refused.rows()}
    assert any(reason.startswith("parallel.tp=n does not divide") for reason in reasons)
    assert any(reason.startswith("parallel.pp=n does not divide") for reason in reasons)
    assert all(row.example and row.count > 0 for row in refused.rows())


def test_legal_frames_are_those_that_prepare_accepts() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800", ["batch.sequences=2048", "stages.layers=null"])
    shape, cluster = load_model("deepseek-v3"), scenario.machine
    wanted = PlanSpace(tp=(1, 2), pp=(4, 8), ep=(8, 128, 256), cp=(1, 2), vpp=(2, 4), microbatch=(1,))
    space = with_defaults(wanted, scenario, shape, cluster)
    kernels = scenario.communication.kernels
    frames, refused = legal_frames(space, shape, cluster, 2048, 4096, kernels)
    assert {f.schedule for f in frames} == set(SCHEDULES)
    assert any("at most 20 NVLink domains" in row.example for row in refused.rows())
    for frame in frames[:: max(1, len(frames) // 6)]:
        prepare(scenario.model_copy(update={"parallel": frame.plan, "schedule": frame.schedule}))


def test_groups_that_fill_a_node_in_part_are_refused_before_the_engine() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800", ["cluster.nodes=3"])
    space = with_defaults(
        PlanSpace(tp=1, pp=1, ep=(4, 12, 24), cp=1), scenario, scenario.shape, scenario.machine
    )
    thirds = scenario.shape.model_copy(
        update={"moe": scenario.shape.moe.model_copy(update={"experts": 192})}  # type: ignore[union-attr]
    )
    frames, refused = legal_frames(space, thirds, scenario.machine, 96, 4096, "nccl")
    assert {frame.plan.ep for frame in frames} == {4, 24}
    assert any("does not divide an NVLink domain of 8 GPUs" in row.example for row in refused.rows())


def test_reasons_leave_numbers_and_details_out() -> None:
    assert reason_of("parallel.ep=64 does not divide experts=100; nearest: 50") == (
        "parallel.ep=n does not divide experts=n"
    )
    assert "1f1b" in reason_of("schedule 1f1b: vpp=2 is illegal, since it always holds 1 stage(s)")
    tally = Refusals()
    tally.add("a", 2, "first")
    tally.add("a", 3, "second")
    tally.add("b", 9, "third")
    assert [(row.reason, row.count, row.example) for row in tally.rows()] == [
        ("b", 9, "third"),
        ("a", 5, "first"),
    ]
