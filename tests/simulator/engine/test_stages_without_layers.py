"""Stages without layers: they only pass activations on, in the engine, in memory and in the search."""

from __future__ import annotations

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.engine.bounds import lower_bound_s, upper_bound_s
from moesim.simulator.engine.registry import engine_of
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario

QWEN_235B = [
    "model=qwen3-235b-a22b",
    "cluster={node: hgx-h800, nodes: 32, network: mpft-ib-400g}",
    "profile=generic-roofline",
    "precision=bf16",
    "parallel={pp: 32, vpp: 3, ep: 8, zero_stage: 1}",
    "schedule=interleaved-1f1b",
    "batch.sequences=512",
]


def job(*more: str) -> Scenario:
    """A job with four stages on 32 GPUs and no differences between ranks."""
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            "model=qwen3-30b-a3b", "precision=bf16", "profile=generic-roofline",
            "cluster={node: hgx-h800, nodes: 4, network: mpft-ib-400g}",
            "parallel={pp: 4, ep: 8, zero_stage: 1}", "schedule=1f1b", "batch.sequences=64",
            "routing.expert_load_cv=0", "variation={clock_cv: 0, jitter_cv: 0}", *more,
        ],
    )  # fmt: skip


def test_the_published_plan_of_ninety_six_stages_runs() -> None:
    """PP32 x VPP3 on 94 layers, with embedding and loss alone (NVIDIA's plan of Qwen3-235B)."""
    stated = load_scenario("deepseek-v3-2048xh800", [*QWEN_235B, f"stages.layers={[0, *[1] * 94, 0]}"])
    automatic = load_scenario("deepseek-v3-2048xh800", QWEN_235B)
    assert prepare(automatic).stages == prepare(stated).stages
    result = moesim.simulate(stated)
    assert result.step.lower_bound_s <= result.step.time_s <= result.step.upper_bound_s


def test_an_empty_stage_adds_its_hop_alone() -> None:
    """One micro-batch through 1F1B: each of the two passes crosses one more send and no more compute."""
    one = ("batch.sequences=8", "cluster.network.fabric.latency_cross_leaf=100 us")
    short = job(*one, "parallel.pp=2", "cluster.nodes=2", "stages.layers=[24, 24]")
    long = job(*one, "stages.layers=[24, 0, 0, 24]")
    costs, fewer = prepare(long).program.costs, prepare(short).program.costs
    assert costs.send_s > 100e-6
    added_s = 4 * costs.send_s + costs.sync[0].norm_s - fewer.sync[0].norm_s
    longer_s = moesim.simulate(long).step.time_s - moesim.simulate(short).step.time_s
    assert longer_s == pytest.approx(added_s, abs=1e-6)


@pytest.mark.parametrize(
    ("schedule", "zero", "resolution"),
    [
        *(("gpipe", 0, "folded"), ("1f1b", 3, "folded"), ("1f1b", 1, "full")),
        *(("zb-h1", 3, "full"), ("dualpipe", 1, "folded"), ("dualpipe", 0, "full")),
    ],
)
def test_empty_inner_stages_are_legal_everywhere(schedule: str, zero: int, resolution: str) -> None:
    own = job(
        f"schedule={schedule}", f"parallel.zero_stage={zero}", f"resolution={resolution}",
        "stages.layers=[16, 0, 32, 0]",
    )  # fmt: skip
    prepared = prepare(own)
    end_s = engine_of().execute(prepared.programs)[0].end_ns / 1e9
    assert lower_bound_s(prepared.programs) <= end_s <= upper_bound_s(prepared.programs)


def test_an_empty_stage_holds_buffers_only() -> None:
    ranks = prepare(job("stages.layers=[16, 0, 16, 16]")).pool.memory_by_rank.by_rank
    empty, full = ranks[1], ranks[2]
    assert empty.weights == empty.gradients == empty.optimizer == empty.activations == empty.workspace == 0
    assert 0 < empty.communication_buffers < full.communication_buffers


def test_too_many_stages_are_refused_unless_their_layers_are_stated() -> None:
    llama = ["model=llama-3-8b", "parallel={pp: 32, zero_stage: 1}", "batch.sequences=32"]
    prepare(job(*llama))
    deeper = [*llama, "parallel.vpp=2", "schedule=interleaved-1f1b"]
    with pytest.raises(
        InputError, match=r"64 pipeline stages .* use at most 34 stages, or give stages.layers"
    ):
        prepare(job(*deeper))
    prepare(job(*deeper, f"stages.layers={[1, 0] * 32}"))


def test_modules_of_mtp_alone_on_a_stage() -> None:
    """DeepSeek-V3 with the layout Et*3|(tt|)*29,m|L of NVIDIA's configurations."""
    layers = f"stages={{layers: {[3, *[2] * 29, 0, 0]}, mtp: -2}}"
    more = ["parallel.vpp=2", "schedule=interleaved-1f1b", "batch.sequences=2048"]
    own = load_scenario("deepseek-v3-2048xh800", [*more, layers])
    stages = prepare(own).stages.stages
    assert [[b.kind for b in stage] for stage in stages[-2:]] == [["mtp"], ["head", "head"]]
    # The head's stage alone decides less of the step than modules and heads together.
    together = load_scenario("deepseek-v3-2048xh800", [*more, layers.replace("-2", "-1")])
    assert moesim.simulate(own).step.time_s < moesim.simulate(together).step.time_s
    with pytest.raises(InputError, match=r"stages\.mtp needs stages\.layers"):
        load_scenario("deepseek-v3-2048xh800", ["stages.mtp=-2"])


def test_a_search_finds_plans_with_two_stages_more_than_layers() -> None:
    small = job(
        "model=llama-3-8b", "cluster.nodes=17", "parallel={pp: 34, zero_stage: 1}", "batch.sequences=68"
    )
    space = PlanSpace(
        tp=(1,), pp=(17, 34), cp=(1,), vpp=(1,), microbatch=(1,), zero_stage=(1,), schedule=("1f1b",),
        recompute=("none", "full"), precision=("bf16",),
    )  # fmt: skip
    found = plan(small, space, top=2, workers=1)
    most = next(row for row in found.ranked if row.pp == 34)
    assert most.layers == (0, *[1] * 32, 0)
    assert most.lower_bound_s is not None and most.closed_form_s is not None
    assert most.lower_bound_s <= most.time_s + 1e-6
    assert most.closed_form_s == pytest.approx(most.time_s, rel=0.03)


def test_a_search_keeps_stages_without_layers_that_the_scenario_states() -> None:
    space = PlanSpace(
        tp=(1,), pp=(4,), ep=(8,), cp=(1,), vpp=(1,), microbatch=(1,), zero_stage=(1,), schedule=("1f1b",),
        recompute=("full",), precision=("bf16",), sms=(20,), layout="scenario",
    )  # fmt: skip
    found = plan(job("stages.layers=[24, 0, 0, 24]"), space, top=1, workers=1)
    best = found.ranked[0]
    assert best.layers == (24, 0, 0, 24)
    assert best.lower_bound_s is not None and best.lower_bound_s <= best.time_s + 1e-6
