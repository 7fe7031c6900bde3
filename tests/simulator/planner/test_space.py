"""Spaces: list expressions, defaults, legal frames and the counts of what was refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.planner.frames import legal_frames
from moesim.simulator.planner.refusals import Refusals, reason_of
from moesim.simulator.planner.space import (
    PlanSpace,
    Space,
    kept_as_stated,
    load_space,
    varied,
    with_defaults,
)
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.registry import trainer_of


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


FIVE_LINES: dict[str, Any] = {
    "model": "mixtral-8x7b",
    "cluster": {"node": "hgx-h100", "nodes": 4, "network": "mrft-ib-400g"},
    "parallel": {"ep": 8},
    "batch": {"sequences": 512, "sequence_length": 4096},
}


def defaults_of(scenario: Scenario, wanted: PlanSpace | None = None) -> Space:
    return with_defaults(wanted or PlanSpace(), scenario, scenario.shape, scenario.machine)


def test_a_stated_precision_is_kept_and_one_by_rule_is_searched() -> None:
    left_open = Scenario.model_validate(FIVE_LINES)
    assert left_open.precision == "bf16" and set(defaults_of(left_open).precision) == {"bf16", "fp8"}
    assert not [text for text in kept_as_stated(PlanSpace(), left_open) if "precision" in text]
    stated = left_open.replace(precision="bf16")
    assert defaults_of(stated).precision == ("bf16",)
    (said,) = kept_as_stated(PlanSpace(), stated)
    assert "precision=bf16 is kept" in said and "--vary precision=bf16,fp8" in said
    wanted = varied(PlanSpace(), ["precision=bf16,fp8"])
    assert defaults_of(stated, wanted).precision == ("bf16", "fp8") and not kept_as_stated(wanted, stated)


def test_a_trainer_does_not_turn_a_precision_by_rule_into_a_stated_one() -> None:
    left_open = Scenario.model_validate(FIVE_LINES)
    adapted, replaced = trainer_of("megatron").adapted(left_open, any_plan=True)
    assert any("precision" in text for text in replaced)
    assert len(defaults_of(adapted).precision) > 1
    stated, _ = trainer_of("megatron").adapted(left_open.replace(precision="bf16"), any_plan=True)
    assert len(defaults_of(stated).precision) == 1


@pytest.mark.parametrize(
    ("key", "value"), [("microbatch", 8), ("cp", 3), ("vpp", 5), ("tp", 16), ("expert_tp", 2), ("pp", 48)]
)
def test_the_space_holds_the_scenario_s_own_degrees(key: str, value: int) -> None:
    scenario = Scenario.model_validate({**FIVE_LINES, "parallel": {"ep": 8, key: value}})
    space = defaults_of(scenario)
    assert value in getattr(space, key) and 1 in getattr(space, key)
    assert defaults_of(scenario, PlanSpace(**{key: (1,)})).sequence_parallel
    assert getattr(defaults_of(scenario, PlanSpace(**{key: (1,)})), key) == (1,)


@pytest.mark.parametrize(
    ("model", "plan", "cut"),
    [
        ("llama-3-8b", {"tp": 2, "sequence_parallel": False}, False),
        ("llama-3-8b", {"tp": 2}, True),
        ("llama-3-8b", {"tp": 1, "sequence_parallel": False}, True),
        ("llama-3-8b", {"tp": 2, "sequence_parallel": True}, True),
        ("mixtral-8x7b", {"tp": 1, "sequence_parallel": False}, True),
    ],
)
def test_stated_whole_sequences_of_a_dense_model_stay_whole(
    model: str, plan: dict[str, Any], cut: bool
) -> None:
    scenario = Scenario.model_validate({**FIVE_LINES, "model": model, "parallel": plan})
    space = replace(defaults_of(scenario, PlanSpace(pp=(1,), ep=(1,), cp=(1,), microbatch=(1,))), tp=(1, 2))
    frames, _ = legal_frames(space, scenario.shape, scenario.machine, 512, 4096, "nccl")
    assert {f.plan.sequence_parallel for f in frames if f.plan.tp == 2} == {cut}
    assert not any(f.plan.sequence_parallel for f in frames if f.plan.tp == 1)
    said = any("sequence_parallel" in text for text in kept_as_stated(PlanSpace(), scenario))
    assert said is not cut


def test_what_a_search_does_not_use_of_a_scenario_is_named() -> None:
    plan = {"zero_stage": 3, "shard_group": 8}
    scenario = Scenario.model_validate(
        {**FIVE_LINES, "model": "llama-3-8b", "parallel": plan, "stages": {"layers": [32]}}
    )
    said = " ".join(kept_as_stated(PlanSpace(), scenario))
    assert "parallel.shard_group=8 is not used" in said and "stages.layers is not used" in said
    assert "stages.layers" not in " ".join(kept_as_stated(PlanSpace(layout="scenario"), scenario))


def test_a_dotted_key_is_a_variant_with_its_values() -> None:
    space = varied(PlanSpace(variants={"seed": (1, 2)}), ["cluster.nodes=64..256:x2", "tp=1"])
    assert space.variants == {"seed": (1, 2), "cluster.nodes": (64, 128, 256)}
    assert PlanSpace(variants={"cluster.nodes": "64..256:x2"}).variants["cluster.nodes"] == (64, 128, 256)
    assert space.tp == (1,)


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["precison=fp8"], "precision"),
        (["cluster.nodes=2,4", "cluster.nodes=8"], "twice"),
        (["sms"], "KEY=VALUES"),
        (["sms=8", "sms=20"], "twice"),
        (["precision=fp9"], "fp9"),
        (["tp=1..x"], "tp"),
        (["schedule=1f1b,"], "schedule"),
    ],
)
def test_values_on_the_command_line_are_checked(texts: list[str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        varied(PlanSpace(), texts)


def test_values_on_the_command_line_are_those_of_a_file() -> None:
    texts = ["tp=1..4:2x", "schedule=1f1b,zbv", "recompute=[none, [layernorm, moe_act]]", "precision=fp8"]
    space = varied(PlanSpace(headroom=0.1), texts)
    assert space == PlanSpace(
        headroom=0.1, tp=(1, 2, 4), schedule=("1f1b", "zbv"), precision=("fp8",),
        recompute=("none", ("layernorm", "moe_act")),
    )  # fmt: skip
    with pytest.raises(InputError, match="beside the same key"):
        varied(PlanSpace(tp=(1,)), ["tp=2"])


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
    for frame in frames[:: max(1, len(frames) // 3)]:
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
