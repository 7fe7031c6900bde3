"""Runs that wait for the host's launches: by hand, recognised in a scenario, the same in the plan search."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

import moesim
from moesim.hwmodels import InputError, load_host
from moesim.hwmodels.host import CallKind
from moesim.hwmodels.units import DIMENSIONS
from moesim.hwmodels.validation import validate_model
from moesim.simulator.cost.cost_table import block_prices, cost_table
from moesim.simulator.cost.launches import (
    BESIDE_POLLING,
    HostTimes,
    Launch,
    PassLaunches,
    action_of,
    around_block_s,
    block_family,
    device_reads,
    launch_stall_s,
    pair_launches,
    pass_launches,
    polled_share,
)
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.frameworks.software import Software
from moesim.simulator.layout.job import resolve
from moesim.simulator.model.block import BlockShape
from moesim.simulator.model.calls import calls_of
from moesim.simulator.model.feed_forward.dense import DenseFFN
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.primitives import gemm, move, one_scale_cast
from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.result_parts import BOUND_SHARE
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario
from moesim.simulator.scoring.dispatcher_rows import dispatcher_rows, scenario_of
from moesim.simulator.scoring.scoreboard import open_rows
from moesim.simulator.scoring.scoreboard.plan import launching_of
from moesim.simulator.scoring.scoreboard.plan import scenario_of as scenario_of_row
from moesim.simulator.scoring.scoreboard.runs import runs, scenario_of_run
from moesim.simulator.studies.effects import entry_effects, host_sources
from moesim.simulator.studies.sources import HOST, POLLING, polling_source

US = 1e-6


def small_experts(sequence: int, microbatch: int, **software: object) -> Scenario:
    """The 16B model of the five runs with other sequences."""
    run = next(r for r in runs() if r.name == "ds16b_fsdp8_ep8_sac")
    scenario = scenario_of_run(
        run.model_copy(update={"sequence": sequence, "microbatch": microbatch, "sequences": 8 * microbatch})
    )
    return scenario.model_copy(update={"software": scenario.software.model_copy(update=software)})


# -- by hand ------------------------------------------------------------------------------------------


def test_a_full_queue_waits_for_nothing_and_an_empty_one_for_the_difference() -> None:
    fast = PassLaunches((Launch(3 * US, 10 * US), Launch(3 * US, 1 * US)))
    slow = PassLaunches((Launch(3 * US, 1 * US), Launch(5 * US, 1 * US)))
    assert launch_stall_s(fast) == 0.0
    assert launch_stall_s(slow) == pytest.approx(6 * US)


def test_a_drained_queue_cannot_hide_a_slow_start() -> None:
    launches = (Launch(8 * US, 1 * US), Launch(8 * US, 1 * US), Launch(1 * US, 30 * US))
    assert launch_stall_s(PassLaunches(launches)) == 0.0
    # Launched at 8, 16 and 17 us: the device ends at 47 and was busy for 32.
    assert launch_stall_s(PassLaunches(launches, drains=True)) == pytest.approx(15 * US)


def test_products_count_their_calls() -> None:
    up = gemm("ffn.gate_up", "F", 64, 128, 64, "bf16")
    experts = gemm("experts.gate_up.dgrad", "I", 64, 64, 128, "bf16", cls="grouped_gemm", groups=16)
    assert [(c.kind, c.times, c.forward) for c in calls_of(up, "torch")] == [("product", 2.0, True)]
    assert [(c.kind, c.times) for c in calls_of(experts, "torch")] == [("grouped product", 1.0)]
    assert [(c.kind, c.times) for c in calls_of(experts, "transformer-engine")] == [
        ("module product", 0.5),
        ("module expert", 8.0),
    ]
    chain = move("gate.select", "topk", "F", 8.0, 8.0, launches=16)
    assert [(c.kind, c.times) for c in calls_of(chain, "torch")] == [("gate", 16.0)]


def test_megatron_core_hooks_the_gradient_of_every_expert_and_runs_its_own_python_once_a_layer() -> None:
    gradient = gemm("experts.down.wgrad", "W", 64, 64, 128, "bf16", cls="wgrad_gemm", groups=16)
    norm = move("attn_norm", "norm", "F", 8.0, 8.0)
    for op, own in ((gradient, [("megatron parameter", 16.0)]), (norm, [("megatron layer", 1.0)])):
        engine = calls_of(op, "transformer-engine")
        both = calls_of(op, "megatron-core")
        assert both[1:] == engine and [(c.kind, c.times) for c in both[:1]] == own


# -- recognised ---------------------------------------------------------------------------------------


def test_a_run_of_tiny_micro_batches_is_bound_by_the_host_and_says_so() -> None:
    result = moesim.simulate(small_experts(128, 1))
    assert result.host is not None and result.host.bound and result.host.share > 0.5
    assert result.step.lower_bound_s <= result.step.time_s <= result.step.upper_bound_s
    sources = {entry.path: entry for entry in result.provenance if entry.path.startswith("host.")}
    assert sources["host.emerald-rapids-vm.norm"].kind == "measured"
    text = str(moesim.explain(result))
    assert "is bound by the host's launch rate" in text and "CUDA graphs" in text


def test_the_measured_run_of_large_micro_batches_is_not() -> None:
    result = moesim.simulate(small_experts(4096, 4))
    assert result.host is not None and not result.host.bound
    # It waits where the queue is drained for the token counts: a layer's calls, hooks and checkpoints then
    # take the host about as long as the forward takes the device.
    assert 0.03 < result.host.share < BOUND_SHARE
    assert "is not bound by the host's launch rate" in str(moesim.explain(result))


def test_graphs_take_the_host_away_part_by_part() -> None:
    steps = [
        moesim.simulate(small_experts(128, 1, cuda_graphs=graphs)).step.time_s
        for graphs in ((), ("router",), ("attention", "router"), ("all",))
    ]
    assert steps == sorted(steps, reverse=True) and steps[-1] < steps[0] / 2
    assert steps[-1] == moesim.simulate(small_experts(128, 1, host=None)).step.time_s


@pytest.mark.parametrize(
    ("longer", "shorter"),
    [
        ({"modules": "megatron-core"}, {"modules": "transformer-engine"}),
        ({"parameters_copied": True}, {"parameters_copied": False}),
        ({"garbage_collection": "automatic"}, {"garbage_collection": "fixed"}),
    ],
)
def test_what_takes_the_host_longer(longer: dict[str, object], shorter: dict[str, object]) -> None:
    """Megatron core's own Python, FSDP2's hooks, and automatic garbage collection."""
    host = load_host("emerald-rapids-vm")
    seconds = []
    for software in (longer, shorter):
        pricer = Pricer(resolve(small_experts(128, 1, **software)))
        passes = pass_launches(pricer, host, "moe", {}, {})
        seconds.append(sum(launch.host_s for one in passes for launch in one.launches))
    assert seconds[0] > seconds[1] > 0.0


def test_a_compiled_block_has_its_ratio_and_traces_the_checkpoint_of_dense_layers_alone() -> None:
    latent = small_experts(128, 1, kernels="fused", compiled_blocks=True)
    prepared = prepare(latent)
    host, block = load_host("emerald-rapids-vm"), prepared.shape.block("moe")
    assert block_family(block, latent.software) == "latent routed"
    times = HostTimes(host, "latent routed", compiled=True)
    assert times.call_s("product", True) == pytest.approx(
        1.518 * HostTimes(host, "latent routed").call_s("product", True)
    )
    assert latent.recompute == "op"
    policy = host.calls["policy"].forward
    assert around_block_s(prepared.pricer, block, times, True) == pytest.approx(
        2 * host.calls["fsdp"].forward + policy
    )
    assert block.layer is not None
    dense = BlockShape(block.kind, block.layer._replace(feed_forward=DenseFFN(1024, gated=True)))
    assert around_block_s(prepared.pricer, dense, times, True) == pytest.approx(host.calls["fsdp"].forward)


@pytest.mark.parametrize("other", [{"kernels": "eager"}, {"modules": "transformer-engine"}])
def test_only_fused_kernels_of_pytorch_are_compiled(other: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"is not what torch\.compile makes; set kernels: fused"):
        validate_model(Software, {"compiled_blocks": True, **other}, "software")


def test_hooks_of_the_next_block_come_behind_the_experts() -> None:
    prepared = prepare(small_experts(4096, 4))
    pricer, host = prepared.pricer, load_host("emerald-rapids-vm")
    forward, _ = pass_launches(pricer, host, "moe", prepared.program.costs.compute, {})
    times = HostTimes(host, "latent routed")
    assert forward.drains and forward.launches[0] == Launch(times.call_s("counts", True), 0.0)
    around = Launch(around_block_s(pricer, prepared.shape.block("moe"), times, True), 0.0)
    units, policy = 2 * host.calls["fsdp"].forward, host.calls["policy"].forward
    assert around.host_s == pytest.approx(units + policy)
    place = forward.launches.index(around)
    experts = sum(launch.device_s for launch in forward.launches[:place])
    assert 0.0 < experts < sum(launch.device_s for launch in forward.launches)


def test_the_range_of_a_host_enters_the_interval() -> None:
    prepared, executions, result = predict(small_experts(128, 1, host="grace-gb200"))
    effect = next(e for e in entry_effects(prepared, executions) if e.source.id == HOST)
    assert effect.seconds[0] < 0.0 < effect.seconds[1]
    slower = moesim.simulate(small_experts(128, 1, host="grace-gb200", host_slowness=1.0 + effect.at[1]))
    assert slower.step.time_s - result.step.time_s == pytest.approx(effect.seconds[1], rel=0.05)


def test_shared_cores_enter_the_interval_from_never_to_always() -> None:
    row = next(r for r in dispatcher_rows() if r.dispatcher == "deepep-uccl")
    prepared = prepare(scenario_of(row))
    mode = 1.0 + polled_share(prepared.pricer) * BESIDE_POLLING
    [source] = [source for source in host_sources(prepared) if source.id == POLLING]
    assert (source.low, source.high) == pytest.approx((1.0 / mode - 1.0, 1.6 / mode - 1.0))
    assert mode > 1.0 and polling_source(0.0, BESIDE_POLLING) is None


def test_without_a_host_a_result_has_no_such_field() -> None:
    result = moesim.simulate(small_experts(128, 1, host=None))
    assert result.host is None and "host" not in result.model_dump()
    with pytest.raises(InputError, match="unknown host"):
        moesim.simulate(small_experts(128, 1, host="abacus"))


def test_plan_search_prices_the_same_waits() -> None:
    prepared = prepare(small_experts(128, 1))
    pricer = prepared.pricer
    book = PlanCosts(prepared.pricer.job)
    scenario = prepared.scenario
    found = book.table(
        scenario.parallel, scenario.recipe, scenario.recompute, scenario.communication.sms, prepared.schedule
    )
    own = cost_table(pricer, prepared.schedule, prepared.stages)
    assert dict(found.compute) == dict(own.compute)
    assert any(cost.host_s > 0.0 for cost in found.compute.values())


def test_published_configurations_say_what_replays_from_graphs() -> None:
    rows = {row.id: row for row in open_rows()}
    expected: dict[str, tuple[str, ...]] = {
        "mbridge-007": ("all",),  # mxfp8, 26.08
        "mbridge-070": ("router",),  # B200, 26.02
        "mbridge-051": ("attention", "router"),  # B200, 26.04
        "mbridge-031": (),  # H100, FP8
        "mbridge-103": (),  # GB200, 25.09: cuda_graphs false for FP8 with current scaling
        "kort-a100-001": (),
    }
    assert {id_: launching_of(rows[id_])["cuda_graphs"] for id_ in expected} == expected


# -- Reads of the device inside a block empty the queue of launches again -----------------------


def test_a_read_holds_the_host_until_the_device_is_done() -> None:
    long, short = Launch(1.0, 10.0), Launch(2.0, 1.0)
    ahead = PassLaunches((long, short), drains=True)
    assert launch_stall_s(ahead) == pytest.approx(1.0)  # the second launch comes while the first runs
    read = PassLaunches((long, Launch(0.0, 0.0, reads=True), short), drains=True)
    assert launch_stall_s(read) == pytest.approx(1.0 + 2.0)  # it comes 2 s after the first has ended


def test_blocked_launches_add_the_host_to_every_kernel() -> None:
    launches = (Launch(3 * US, 10 * US), Launch(8 * US, 1 * US))
    assert launch_stall_s(PassLaunches(launches)) == 0.0  # a full queue hides both
    assert launch_stall_s(PassLaunches(launches, blocking=True)) == pytest.approx(11 * US)


def test_a_blocked_step_takes_the_calls_and_returns_of_its_host() -> None:
    row = next(r for r in open_rows() if r.id == "bloom-088")
    scenario = scenario_of_row(row, "full")
    assert scenario.software.launch_blocking
    queued = scenario.software.model_copy(update={"launch_blocking": False})
    steps = [prepare(s) for s in (scenario, scenario.model_copy(update={"software": queued}))]
    blocked, free = (
        block_prices(p.pricer, {"dense"}, ("alone",))[0]["dense", "mlp F", "alone"] for p in steps
    )
    assert free.host_s == 0.0
    calls = [c for op in steps[0].pricer.operators("dense")["mlp F"] for c in calls_of(op, "torch")]
    assert blocked.host_s > len(calls) * load_host("epyc-7742").call_s("blocked", True)
    # The waits leave power for a higher clock, which gives a part of them back.
    assert 0.5 * blocked.host_s < blocked.seconds - free.seconds < blocked.host_s


def test_blocked_launches_hide_nothing_and_need_a_host() -> None:
    with pytest.raises(ValidationError, match="launch_blocking=true with overlap_data_parallel=True"):
        Software(launch_blocking=True, overlap_data_parallel=True)
    scenario = small_experts(4096, 1, host=None, launch_blocking=True)
    with pytest.raises(InputError, match=r"launch_blocking=true without a host: .* name one"):
        prepare(scenario)


def test_repeated_biases_and_megatrons_clamped_activation_read_the_device() -> None:
    bias = Operator("experts.down.bias", "elementwise", "F", "bf16", variant="add")
    assert [one.reads for one in device_reads(bias, Software(expert_biases="repeated"))] == [True]
    assert device_reads(bias, Software(expert_biases="split")) == []
    clamps = Operator("experts.swiglu", "swiglu", "F", "bf16", variant="clamps_forward")
    assert [one.reads for one in device_reads(clamps, Software(expert_biases="split"))] == [True]
    norm = Operator("ffn_norm", "norm", "F", "bf16")
    assert device_reads(norm, Software(expert_biases="repeated")) == []


def test_a_read_in_a_backward_that_repeats_the_activation_drains_the_queue() -> None:
    def backward(*changes: str) -> PassLaunches:
        pricer = prepare(
            moesim.load(
                {
                    "model": "gpt-oss-20b",
                    "cluster": {"accelerator": "h100-sxm", "nodes": 1},
                    "parallel": {"ep": 8, "zero_stage": 1},
                    "batch": {"sequences": 8, "sequence_length": 4096},
                    "software": {"framework": "megatron-core-0.17"},
                },
                *changes,
            )
        ).pricer
        return pass_launches(pricer, load_host("xeon-8480c"), pricer.shape.main_layer_kind, {}, {})[1]

    assert not backward("recompute=none").drains
    again = backward("recompute=[moe_act]")
    assert again.drains and not any(one.reads for one in again.launches)
    assert not backward("recompute=[moe_act]", "software.expert_biases=fused").drains


def test_padded_rows_are_not_read_and_selections_are_read_twice() -> None:
    reads = {}
    for how in ("counts", "selection", "none"):
        scenario = small_experts(128, 1, modules="megatron-core", expert_reads=how)
        reads[how] = pass_launches(Pricer(resolve(scenario)), HOST_OF_RUNS, "moe", {}, {})[0]
    assert [one.drains for one in reads.values()] == [True, True, False]
    twice = [launch for launch in reads["selection"].launches if launch.reads]
    assert twice == [Launch(HOST_OF_RUNS.call_s("index", True, "other"), 0.0, reads=True)]
    assert len(reads["selection"].launches) == len(reads["counts"].launches) + 1


def test_a_pair_waits_for_what_it_reads_while_the_device_goes_on() -> None:
    first, other, read, last = Launch(1.0, 4.0), Launch(1.0, 4.0), Launch(1.0, 0.0, after=0), Launch(1.0, 1.0)
    ahead = PassLaunches((first, other, read, last), part="FB")
    assert launch_stall_s(ahead) == 0.0  # the device has `other` to run while the host reads
    assert launch_stall_s(replace(ahead, launches=(first, read, last))) == pytest.approx(2.0)
    slow = replace(ahead, launches=(Launch(6.0, 4.0), Launch(6.0, 4.0)))
    assert launch_stall_s(slow) == pytest.approx(4.0)  # bound by the host, as eq. L2


def test_a_pair_of_megatron_reads_behind_the_router_and_has_both_passes() -> None:
    scenario = small_experts(128, 1, modules="megatron-core").replace(recompute="none")
    pricer = Pricer(resolve(scenario))
    pair = pair_launches(pricer, HOST_OF_RUNS, "moe", {})
    apart = pass_launches(pricer, HOST_OF_RUNS, "moe", {}, {})
    assert host_s(pair) == pytest.approx(sum(map(host_s, apart)))
    (read,) = [launch for launch in pair.launches if launch.after is not None]
    assert 0 < read.after < pair.launches.index(read)  # type: ignore[operator]
    dense = pair_launches(pricer, HOST_OF_RUNS, "dense", {})
    assert all(launch.after is None for launch in dense.launches)


# -- pipelines, and what Megatron core adds by module ---------------------------------------------


def stage(schedule: str, vpp: int = 1, **software: object) -> tuple[Pricer, tuple[PassLaunches, ...]]:
    """Passes of a Llama block of the measured pipeline run, with four blocks a stage and rank."""
    run = next(r for r in runs() if r.name == "l8b_pp4_fsdp2_1f1b")
    scenario = scenario_of_run(run)
    plan = scenario.parallel.model_copy(update={"vpp": vpp})
    own = scenario.software.model_copy(update=software)
    changed = scenario.model_copy(update={"schedule": schedule, "parallel": plan, "software": own})
    pricer = Pricer(resolve(changed))
    return pricer, pass_launches(pricer, HOST_OF_RUNS, "dense", {}, {})


HOST_OF_RUNS = load_host("emerald-rapids-vm")


def host_s(one: PassLaunches) -> float:
    """Host seconds of a pass."""
    return one.waits_s + sum(launch.host_s for launch in one.launches)


def test_an_action_of_pytorchs_pipelines_is_shared_by_the_blocks_of_its_stage() -> None:
    (_, single), (pricer, several) = stage("1f1b"), stage("interleaved-1f1b", 2)
    block = pricer.shape.block("dense")
    action = action_of(pricer, block)
    assert action is not None and action.per_block == pytest.approx(4 * 2 / 32)
    calls = HOST_OF_RUNS.calls
    runtime, plain = (calls[k].forward for k in ("runtime action", "pipeline action"))
    assert host_s(several[0]) - host_s(single[0]) == pytest.approx((2 * runtime - plain) / 8)
    alone = pricer.scenario.model_copy(
        update={"parallel": pricer.scenario.parallel.model_copy(update={"pp": 1})}
    )
    assert action_of(Pricer(replace(pricer.job, scenario=alone)), block) is None


def test_a_split_backward_walks_the_graph_once_and_again_for_every_parameter() -> None:
    _, whole = stage("interleaved-1f1b", 2)
    _, split = stage("zbv")
    assert [one.part for one in whole] == ["F", "B"] and [one.part for one in split] == ["F", "I", "W"]
    assert host_s(split[1]) == pytest.approx(host_s(whole[1]))
    # Seven weights of a Llama block and two norms.
    assert host_s(split[2]) == pytest.approx(9 * HOST_OF_RUNS.calls["split weights"].backward)


def test_fsdp_that_keeps_its_parameters_still_runs_its_hooks() -> None:
    pricer, kept = stage("1f1b")
    assert pricer.scenario.parallel.zero_stage == 2
    _, without = stage("1f1b", parameters_copied=False)
    assert host_s(kept[0]) - host_s(without[0]) == pytest.approx(HOST_OF_RUNS.calls["fsdp kept"].forward)


def test_megatrons_plain_pipeline_waits_for_the_device_and_its_interleaved_one_does_not() -> None:
    (_, plain), (_, several) = (
        stage(s, v, modules="megatron-core") for s, v in (("1f1b", 1), ("interleaved-1f1b", 2))
    )
    assert plain[0].waits_s == pytest.approx(HOST_OF_RUNS.calls["megatron action"].forward / 8)
    assert several[0].waits_s == 0.0
    assert launch_stall_s(PassLaunches((Launch(1.0, 9.0),), waits_s=2.0)) == 2.0


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"communication.kernels": "deepep-2025-04"}, ("megatron dispatcher", "megatron flex")),
        ({"recompute": "full"}, (None, "megatron checkpoint")),
        ({"recompute": "[moe_act]"}, (None, "megatron module")),
    ],
)
def test_megatrons_dispatcher_and_checkpoint_have_their_own_times(
    change: dict[str, str], kinds: tuple[CallKind | None, CallKind]
) -> None:
    scenario = small_experts(128, 1, modules="megatron-core", garbage_collection="fixed").replace(
        recompute="none", communication={"kernels": "nccl"}
    )
    other = scenario.overridden(*(f"{key}={value}" for key, value in change.items()))
    before, after = (
        host_s(pass_launches(Pricer(resolve(s)), HOST_OF_RUNS, "moe", {}, {})[0]) for s in (scenario, other)
    )
    old, new = (0.0 if kind is None else HostTimes(HOST_OF_RUNS).call_s(kind, True) for kind in kinds)
    assert after - before == pytest.approx(new - old)


def test_a_layer_that_runs_again_reads_its_counts_again_behind_its_router() -> None:
    scenario = small_experts(128, 1)
    plain, again = (
        pass_launches(Pricer(resolve(scenario.replace(recompute=how))), HOST_OF_RUNS, "moe", {}, {})[1]
        for how in ("none", "full")
    )
    assert not plain.drains and again.drains
    times = HostTimes(HOST_OF_RUNS, "latent routed")
    assert again.launches[0] == Launch(times.call_s("counts", True), 0.0)
    hooks = 2 * HOST_OF_RUNS.calls["fsdp"].backward  # of the block, in front of the router's own calls
    assert again.launches.index(Launch(pytest.approx(hooks), 0.0)) > len(again.launches) // 2  # type: ignore[arg-type]


def test_megatron_counts_latent_attention_and_shared_experts() -> None:
    norm, activation = move("kv_norm", "norm", "F", 8.0, 8.0), move("shared.swiglu", "swiglu", "F", 8.0, 8.0)
    for op, kind in ((norm, "megatron latent attention"), (activation, "megatron shared expert")):
        assert calls_of(op, "megatron-core")[0] == (kind, 1.0, True)
        assert kind not in {call.kind for call in calls_of(op, "transformer-engine")}


def test_the_evidence_of_a_host_has_units_that_can_be_written() -> None:
    result = moesim.simulate(small_experts(128, 1, host="epyc-7742"))
    hosts = [entry for entry in result.provenance if entry.path.startswith("host.epyc-7742")]
    assert {entry.unit for entry in hosts} <= DIMENSIONS.keys()
    assert any(entry.path.endswith(".factor") for entry in hosts)


def test_each_expert_casts_its_rows_with_a_current_scale_of_its_own() -> None:
    """Four experts: twelve kernels for their scales and four casts; with delayed scales one cast."""
    work = Work(8, False, 4.0, 4, 1, 1, 4.0, 4.0, "none", fp8_tensor=True, current_scales=True)
    largest, cast = one_scale_cast(work, "experts.down.cast", "F", 4.0, 8.0, groups=4)
    assert (largest.launches, cast.launches) == (12, 4)
    assert calls_of(largest, "megatron-core") == (("module cast", 4.0, True),)
    assert calls_of(cast, "megatron-core") == ()
    delayed = one_scale_cast(
        replace(work, current_scales=False), "experts.down.cast", "F", 4.0, 8.0, groups=4
    )
    assert [op.launches for op in delayed] == [1]
