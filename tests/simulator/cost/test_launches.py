"""Runs that wait for the host's launches: by hand, recognised in a scenario, the same in the plan search."""

from __future__ import annotations

import pytest

import moesim
from moesim.hwmodels import InputError
from moesim.simulator.cost.host import Launch, PassLaunches, launch_stall_s
from moesim.simulator.cost.price_table import cost_table
from moesim.simulator.model.calls import calls_of
from moesim.simulator.model.primitives import gemm, move
from moesim.simulator.planner.prices import PriceBook
from moesim.simulator.predict.compile import prepare
from moesim.simulator.scenario import Scenario
from moesim.simulator.scoring.scoreboard import open_rows
from moesim.simulator.scoring.scoreboard.launching import launching_of
from moesim.simulator.scoring.scoreboard.runs import runs, scenario_of_run

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
    assert 0.0 < result.host.share < 0.03  # only where the queue is drained for the token counts
    assert "is not bound by the host's launch rate" in str(moesim.explain(result))


def test_graphs_take_the_host_away_part_by_part() -> None:
    steps = [
        moesim.simulate(small_experts(128, 1, cuda_graphs=graphs)).step.time_s
        for graphs in ((), ("router",), ("attention", "router"), ("all",))
    ]
    assert steps == sorted(steps, reverse=True) and steps[-1] < steps[0] / 2
    assert steps[-1] == moesim.simulate(small_experts(128, 1, host=None)).step.time_s


def test_without_a_host_a_result_has_no_such_field() -> None:
    result = moesim.simulate(small_experts(128, 1, host=None))
    assert result.host is None and "host" not in result.model_dump()
    with pytest.raises(InputError, match="unknown host"):
        moesim.simulate(small_experts(128, 1, host="abacus"))


def test_plan_search_prices_the_same_waits() -> None:
    prepared = prepare(small_experts(128, 1))
    pricer = prepared.pricer
    book = PriceBook(prepared.scenario, prepared.shape, prepared.cluster, prepared.profile)
    scenario = prepared.scenario
    found = book.table(
        scenario.parallel, scenario.recipe, scenario.recompute, scenario.communication.sms, False
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
