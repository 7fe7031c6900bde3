from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.hwmodels.calibration import LOST_BESIDE_NCCL
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.data_parallel import Pieces, data_parallel
from moesim.simulator.cost.end_of_step import pass_seconds, step_end
from moesim.simulator.cost.overlap import OverlapSlowDown, exposed_behind_window
from moesim.simulator.engine.program import LONGEST_PHASE_S, whole_ns
from moesim.simulator.layout.stages import blocks_of
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.counts import blocks_flop_per_token, flop_per_token
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.predict.driver import predict, simulate
from moesim.simulator.predict.placement import explicit_blocks
from moesim.simulator.predict.report import fastest_flop_per_s
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import load_scenario
from moesim.simulator.studies.effects import entry_effects

HOME = "deepseek-v3-2048xh800"
PAIR = "deepseek-v3-trace-pair"

SMALL = [
    "cluster={node: hgx-h800, nodes: 32, network: mpft-ib-400g, name: 256xh800}",
    "parallel={tp: 1, pp: 4, ep: 64, cp: 1, microbatch: 1, zero_stage: 1}",
    "batch.sequences=1024",
]
"""The home case on 256 GPUs: DualPipe over 4 ranks, 16 micro-batches."""


def small(*overrides: str) -> Any:
    return simulate(load_scenario(HOME, [*SMALL, *overrides]))


# -- same scenario, same bytes -----------------------------------------------------------------------

CHILD = """
import sys
from moesim.simulator.scenario import load_scenario
from moesim.simulator.predict.driver import simulate
print(simulate(load_scenario(sys.argv[1], sys.argv[2:])).model_dump_json())
"""


def test_same_scenario_same_bytes_in_any_process() -> None:
    here, again = (simulate(load_scenario(HOME, [*SMALL, "parallel.ep=32"])).model_dump_json() for _ in "ab")
    assert here == again
    child = subprocess.run(
        [sys.executable, "-c", CHILD, HOME, *SMALL, "parallel.ep=32"],
        env={**os.environ, "PYTHONHASHSEED": "4242"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert child.stdout.splitlines() == [here]


def test_another_seed_another_draw_but_nearly_the_same_step() -> None:
    first, second = small("seed=0"), small("seed=1")
    assert first.step.time_s != second.step.time_s
    assert first.step.time_s == pytest.approx(second.step.time_s, rel=0.02)
    assert (first.seed, second.seed) == (0, 1)


def test_without_spread_the_seed_does_not_matter_and_one_member_stands_for_all() -> None:
    still = ["variation.clock_cv.value=0", "variation.jitter_cv.value=0", "routing.expert_load_cv.value=0"]
    assert prepare(load_scenario(HOME, [*SMALL, *still])).program.members == 1
    one, two = small(*still, "seed=1"), small(*still, "seed=2")
    own = {"seed", "inputs"}  # the inputs state the seed, and nothing else that differs
    assert one.model_dump(exclude=own) == two.model_dump(exclude=own)
    assert one.inputs.plan == two.inputs.plan
    assert (one.inputs.overrides[-1], two.inputs.overrides[-1]) == ("seed=1", "seed=2")
    assert one.step.time_s < small().step.time_s


def test_nearly_equal_members_agree_with_one() -> None:
    """Folding is exact where members are alike: 64 of them with a spread of 1e-9 tell the same time."""
    still = ["variation.jitter_cv.value=0", "routing.expert_load_cv.value=0"]
    folded = small(*still, "variation.clock_cv.value=0")
    carried = small(*still, "variation.clock_cv.value=1e-12")
    assert (
        prepare(load_scenario(HOME, [*SMALL, *still, "variation.clock_cv.value=1e-12"])).program.members == 64
    )
    assert carried.step.time_s == pytest.approx(folded.step.time_s, rel=1e-8)


# -- what moves the step -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["variation.clock_cv.value", "variation.jitter_cv.value", "routing.expert_load_cv.value"]
)
def test_more_spread_is_slower(key: str) -> None:
    times = [small(f"{key}={cv}").step.time_s for cv in (0.0, 0.2)]
    assert times[0] < times[1]


def with_nic(factor: float) -> float:
    """Step of the small case with every NIC `factor` times as fast."""
    scenario = load_scenario(HOME, SMALL)
    node = scenario.machine.node
    assert node.nic_bandwidth is not None
    rate = node.nic_bandwidth.model_copy(update={"value": node.nic_bandwidth.value * factor})
    cluster = scenario.machine.model_copy(update={"node": node.model_copy(update={"nic_bandwidth": rate})})
    return simulate(scenario.model_copy(update={"cluster": cluster})).step.time_s


def test_more_work_is_slower_and_more_bandwidth_is_not() -> None:
    assert small("batch.sequences=1152").step.time_s > small().step.time_s
    times = [with_nic(factor) for factor in (4.0, 1.0, 0.25)]
    assert times == sorted(times)
    assert times[1] == small().step.time_s < times[2]


def test_tokens_rates_and_run_follow_from_the_step(home_case: Any) -> None:
    result = small()
    step, run = result.step, result.run
    assert step.tokens == 1024 * 4096
    assert step.tokens_per_s == pytest.approx(step.tokens / step.time_s)
    assert step.tokens_per_s_per_gpu == pytest.approx(step.tokens_per_s / 256)
    assert step.tokens_per_day == pytest.approx(step.tokens_per_s * 86400)
    assert step.tflops_per_gpu_causal == pytest.approx(249.8e9 * step.tokens_per_s_per_gpu / 1e12, rel=1e-3)
    assert step.mfu_noncausal == pytest.approx(step.tflops_per_gpu_noncausal / 989, rel=1e-3)
    assert run.steps == -(-int(14.8e12) // step.tokens)
    assert run.gpu_hours == pytest.approx(run.steps * step.time_s * 256 / 3600)
    assert run.days == pytest.approx(run.steps * step.time_s / 86400)
    # A cluster of the user's own that says nothing of a price gets an offer, and says so.
    assert run.cost_usd == pytest.approx(2.25 * run.gpu_hours)
    assert [item.key for item in result.defaults] == ["cluster.price_per_gpu_hour"]
    priced = home_case[2].run
    assert priced.cost_usd == pytest.approx(2.0 * priced.gpu_hours)


def test_the_result_says_what_it_stands_on(home_case: Any) -> None:
    _, _, result = home_case
    assert result.scenario == HOME
    assert all(
        entry.kind in ("spec", "measured", "published", "derived", "assumed") for entry in result.provenance
    )
    assert all(entry.source.strip() and entry.date for entry in result.provenance)
    paths = [entry.path for entry in result.provenance]
    assert len(set(paths)) == len(paths)
    for start in (
        "cluster.",
        "scenario.routing.expert_load_cv",
        "profile.ep.dispatch.sm_rate",
        "profile.h800-trace.",
        "profile.launch_gap",
        "profile.kernel_floor",
        "memory.framework",
    ):
        assert any(path.startswith(start) for path in paths)
    assert list(result.extrapolated) == sorted(set(result.extrapolated))
    assert len(result.stages) == 16


# -- plans that do not work --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.ep=512"], ["parallel.ep=512", "nearest: 128"]),
        (["parallel.pp=17"], ["parallel.pp=17"]),
        (["batch.sequences=2048"], ["microbatches=16", "nearest legal: 32"]),
        (["schedule=dualpip"], ["dualpip", "dualpipe"]),
        (["schedule=1f1b", "parallel.vpp=3"], ["vpp=3", "nearest legal: 1"]),
        (["communication.sms=0"], ["communication.sms=0"]),
        (["communication.kernels=deepep"], ["communication.kernels=deepep", "deepep-2025-02"]),
        (["communication.overlap=deepseek"], ["communication.overlap='deepseek'", "deepseek-v3"]),
        (["precision=fp9"], ["precision='fp9'", "fp8"]),
        (["model=deepseek-v4"], ["deepseek-v4", "deepseek-v3"]),
        (["cluster=deepseek-h800"], ["deepseek-h800", "deepseek-h800-2048"]),
        (["profile=h800"], ["h800", "h800-trace"]),
        (["profile=h200-measured"], ["profile=h200-measured", "h800-sxm", "h800-trace"]),
        (["parallel.zero_stage=3"], ["parallel.zero_stage=3", "dualpipe", "1f1b"]),
        (["stages={layers: [4, 4]}"], ["stages.layers has 2 entries", "16"]),
        (["stages={blocks: [moe]}"], ["stages.blocks has 1 entries", "16"]),
    ],
)  # fmt: skip
def test_an_illegal_plan_is_one_paragraph_with_key_value_and_remedy(
    overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        prepare(load_scenario(HOME, overrides))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("moe*x", "'moe\\*x' is not a block"),
        ("mlp", "'mlp' is not a block"),
        ("moe*99999", "is not a block"),
        ("", "is empty"),
    ],
)
def test_block_texts(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        explicit_blocks([text], 1, load_model("deepseek-v3"))
    stages = explicit_blocks(["embedding dense*2 moe"], 1, load_model("deepseek-v3"))
    kinds = [block.kind for block in stages.stages[0]]
    assert kinds == ["embedding", "dense", "dense", "moe"]


def test_an_order_of_the_users_own(trace_pair: Any) -> None:
    order = (
        "communication.overlap={compute: [attn F, mlp F, mlp I, attn I, mlp W, attn W], "
        "communication: [dispatch F, combine B, combine F, dispatch B], source: a test}"
    )
    changed = simulate(load_scenario(PAIR, [order]))
    assert changed.forward_backward_pair_s != trace_pair[2].forward_backward_pair_s
    stuck = order.replace("[attn F, mlp F,", "[mlp F, attn F,")
    with pytest.raises(InputError, match=r"communication\.overlap deadlocks"):
        simulate(load_scenario(PAIR, [stuck]))


# -- one node ----------------------------------------------------------------------------------------

NODE = [
    "cluster=h200-8",
    "profile=generic-roofline",
    "precision=bf16",
    "recompute=selective",
    "batch={sequences: 64, sequence_length: 4096}",
]


def test_pipeline_neighbours_on_one_node_use_nvlink() -> None:
    plan = "parallel={tp: 1, pp: 4, ep: 1, microbatch: 1, zero_stage: 1}"
    for schedule in ("1f1b", "dualpipe", "zbv"):
        result = simulate(load_scenario(HOME, [*NODE, "model=llama-3-8b", plan, f"schedule={schedule}"]))
        assert result.utilisation.nic == 0.0
        assert 0.0 < result.utilisation.scale_up < 0.05
        assert result.step.lower_bound_s <= result.step.time_s <= result.step.upper_bound_s


def test_parameter_gathers_of_moe_blocks_do_not_follow_the_routing() -> None:
    plan = "parallel={tp: 1, pp: 1, ep: 2, microbatch: 1, zero_stage: 3}"
    overrides = [*NODE, "model=qwen3-30b-a3b", plan, "schedule=1f1b", "routing.expert_load_cv.value=0.5"]
    program = prepare(load_scenario(HOME, overrides)).program
    tasks = [task for step in program.ranks[0] for task in step.code.tasks if task.transfer is not None]
    sharded = [task.transfer for task in tasks if task.phase in ("gather F", "gather B", "scatter W")]
    assert sharded
    assert all((t.member_ns == t.member_ns[0, 0]).all() for t in sharded if t is not None)
    routed = [t.transfer for t in tasks if t.phase == "dispatch F"]
    assert any((t.member_ns != t.member_ns[0, 0]).any() for t in routed if t is not None)


def test_sharding_over_one_replica_moves_nothing() -> None:
    plan = "parallel={tp: 8, pp: 1, ep: 1, microbatch: 1, zero_stage: 3}"
    overrides = [*NODE, "model=llama-3-8b", plan, "schedule=1f1b", "batch.sequences=4"]
    result = simulate(load_scenario(HOME, overrides))
    zero = simulate(load_scenario(HOME, [*overrides, "parallel.zero_stage=1"]))
    assert result.step.time_s == pytest.approx(zero.step.time_s, rel=1e-6)


def test_an_all_reduce_hides_behind_the_backward_of_its_own_step_only() -> None:
    """Without ZeRO nothing of the gradients is left for the next forward to hide."""
    plan = "parallel={tp: 1, pp: 1, ep: 1, microbatch: 1, zero_stage: 0}"
    overrides = [*NODE, "model=llama-3-8b", plan, "schedule=1f1b", "precision.gradient_reduce=fp32"]
    open_, behind = (
        prepare(
            load_scenario(HOME, [*overrides, f"software={{framework: none, overlap_data_parallel: {flag}}}"])
        )
        for flag in ("false", "true")
    )
    gradients, hidden = (p.program.costs.sync[0] for p in (open_, behind))
    ring = prepare(load_scenario(HOME, [*overrides, "parallel.zero_stage=1"])).program.costs.sync[0].reduce_s
    assert gradients.reduce_s == pytest.approx(2 * ring)
    assert gradients.gather_s == hidden.gather_s == 0.0
    kinds = [block.kind for block in behind.stages.stages[0]]
    backward_s = sum(pass_seconds(behind.pricer, kind)[1] for kind in kinds)
    slow_down = OverlapSlowDown(LOST_BESIDE_NCCL.value)  # this profile has not measured how NCCL slows down
    held = [behind.pricer.block_parameters(kind)[0] for kind in kinds]
    pieces = Pieces(dense=len(held))  # one for each block, each with the latency of its ring
    cut_s = data_parallel(behind.pricer, "all_reduce", 4.0 * sum(held), 0.0, 1, pieces).seconds
    assert cut_s > 2 * ring
    assert hidden.reduce_s == pytest.approx(exposed_behind_window(cut_s, backward_s, len(kinds), slow_down))
    # The whole all-reduce has the backward alone to hide behind.
    assert hidden.reduce_s >= 2 * ring - backward_s


def test_collectives_of_data_parallelism_are_slow_beside_compute_where_that_was_measured() -> None:
    plan = "parallel={tp: 1, pp: 1, ep: 1, microbatch: 1, zero_stage: 1}"
    overrides = [
        "cluster={node: hgx-h200, nodes: 1, network: ft3-ib-400g, name: h200}", "profile=h200-8gpu",
        "precision=bf16", "recompute=selective", "batch={sequences: 8, sequence_length: 256}",
        "model=llama-3-8b", plan, "schedule=1f1b", "software={framework: none, overlap_data_parallel: true}",
    ]  # fmt: skip
    prepared, executions, result = predict(load_scenario(HOME, overrides))
    curves = {"nccl.reduce_scatter.beside_compute", "nccl.all_gather.beside_compute"}
    assert curves <= prepared.program.costs.evidence.entries
    assert curves <= {row.path.removeprefix("profile.") for row in result.provenance}
    kept = tuple(c for c in prepared.profile.curves if c.id not in curves)
    sms_reserved = prepared.profile.model_copy(update={"curves": kept})
    pricer = prepared.pricer.at_rates(profile=sms_reserved)
    (slow,), (fast,) = prepared.program.costs.sync, step_end(pricer, prepared.schedule, prepared.stages)
    assert slow.reduce_s > fast.reduce_s
    assert slow.gather_s > fast.gather_s
    assert "lost_beside_nccl" in {e.source.id for e in entry_effects(prepared, executions)}


def test_provenance_names_what_the_rings_stand_on(home_case: Any) -> None:
    entries = {entry.path: entry for entry in home_case[2].provenance}
    for path in ("profile.collective.scale_up_fraction", "profile.collective.nic_fraction"):
        assert path in entries
    assert "NVIDIA/nccl@" in entries["collectives.nccl.latencies"].source
    assert entries["collectives.nccl.wire_shares.LL128"].value == 0.9375


SCENARIO_SMALL = str(Path(__file__).parents[2] / "golden" / "scenario-small.yaml")


@pytest.mark.parametrize("per", ["expert", "rank"])
def test_dropped_rows_are_no_work_for_mfu(per: str) -> None:
    """FLOPs of a token without those of the routed rows that nobody computed (eq. F2)."""
    job = load_scenario(SCENARIO_SMALL, [f"routing.capacity={{factor: 0.1, per: {per}}}"])
    step, whole = simulate(job).step, simulate(load_scenario(SCENARIO_SMALL)).step
    dropped = 0.9  # of the rows, which are even on the mean
    routed = 6 * 56 * 2 * 3 * 6144 * 16384  # 56 layers, two experts a token, three products
    computed = flop_per_token(job.shape, 4096, causal=True) - dropped * routed
    assert step.tflops_per_gpu_causal * 1e12 == pytest.approx(step.tokens_per_s_per_gpu * computed, rel=1e-3)
    assert step.time_s < whole.time_s
    assert 0.0 < step.mfu_causal < whole.mfu_causal


def test_a_part_of_the_model_has_the_mfu_of_that_part(trace_pair: Any) -> None:
    """Every token passes the few MoE layers of the stages, and nothing else."""
    prepared, _, result = trace_pair
    held = [block.kind for stage in prepared.stages.stages for block in stage]
    assert 0.2 < result.step.mfu_causal < 0.6
    flop = blocks_flop_per_token(prepared.shape, held, 4096, causal=True)
    assert set(held) == {"moe"}
    assert flop == pytest.approx(len(held) / 58 * (249.8e9 - 6 * 7168 * 129280 - 3 * 4.03e9), rel=0.01)
    assert result.step.tflops_per_gpu_causal * 1e12 == pytest.approx(result.step.tokens_per_s_per_gpu * flop)


def test_blocks_have_the_flop_of_the_model() -> None:
    shape = load_scenario("deepseek-v3-2048xh800").shape
    for causal in (True, False):
        kinds = [block.kind for block in blocks_of(shape)]
        whole = flop_per_token(shape, 4096, causal, kept_rows=0.5)
        assert blocks_flop_per_token(shape, kinds, 4096, causal, 0.5) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("report.upper_bound_s", 0.1, "outside its bounds"),
        ("report.lower_bound_s", 100.0, "outside its bounds"),
        ("summarise.fastest_flop_per_s", 1e12, "above the peak"),
        ("summarise.flop_per_token", float("nan"), "above the peak"),
    ],
)
def test_a_figure_that_cannot_be_is_an_internal_error(
    name: str, value: float, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Any
) -> None:
    """Never a printed result: exit code 1 and no output."""
    monkeypatch.setenv("MOESIM_CACHE", str(tmp_path))  # no answer that another test has kept
    monkeypatch.setattr(f"moesim.simulator.predict.{name}", lambda *_: value)
    with pytest.raises(RuntimeError, match=words):
        simulate(load_scenario(SCENARIO_SMALL)).completed()
    outcome = run("simulate", SCENARIO_SMALL)
    assert outcome.code == 1 and not outcome.out and "internal error" in outcome.err


def test_steps_that_no_run_has_are_refused_and_no_duration_overflows() -> None:
    with pytest.raises(InputError, match=r"a single phase of a micro-batch takes 2e\+05 s.*at most 100000 s"):
        whole_ns(np.array([1.0, 2e5]))
    for impossible in (float("nan"), -1.0):
        with pytest.raises(OverflowError, match="are not durations"):
            whole_ns(np.array([1.0, impossible]))
    assert whole_ns(np.array([LONGEST_PHASE_S])).tolist() == [int(LONGEST_PHASE_S * 1e9)]


def test_fp8_may_be_faster_than_the_peak_that_mfu_refers_to() -> None:
    """MFU stays over the BF16 peak; only the peak of the fastest format is a limit."""
    cluster = load_scenario("deepseek-v3-2048xh800").machine
    assert fastest_flop_per_s(cluster, PRECISIONS["fp8"]) == pytest.approx(1979e12)
    assert fastest_flop_per_s(cluster, PRECISIONS["bf16"]) == pytest.approx(989e12)
