from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.simulator.bounds import lower_bound_s, upper_bound_s
from moesim.simulator.cost.table import SyncCost
from moesim.simulator.engine.execute import execute
from moesim.simulator.engine.program import Program
from moesim.simulator.scenario import load_scenario
from moesim.simulator.schedules import BUILDERS, build
from moesim.simulator.simulate import simulate

Toy = Callable[..., Program]

EXPERTS = {"deepseek-v3": 256, "qwen3-30b-a3b": 128, "mixtral-8x22b": 8, "llama-3-8b": 1}


@st.composite
def scenarios(draw: st.DrawFn) -> list[str]:
    """Overrides of the home case: small clusters, every schedule, profile, kernel generation and spread."""
    model = draw(
        st.sampled_from(["deepseek-v3", "deepseek-v3", "qwen3-30b-a3b", "mixtral-8x22b", "llama-3-8b"])
    )
    schedule = draw(st.sampled_from(sorted(BUILDERS)))
    paired = schedule.startswith("dualpipe")
    pp = draw(st.sampled_from([2, 4]))
    vpp = 2 if schedule.startswith("interleaved") else 1
    tp = draw(st.sampled_from([1, 1, 2]))
    ep = min(draw(st.sampled_from([8, 16, 32])), EXPERTS[model])
    replicas = max(ep, 8) // tp * draw(st.sampled_from([1, 2]))
    nodes = max(1, pp * replicas * tp // 8)
    zero = draw(st.sampled_from([0, 1, 2] if paired else [0, 1, 2, 3]))
    generic = draw(st.booleans()) or model != "deepseek-v3"
    profile = "generic-roofline" if generic else draw(st.sampled_from(["h800-trace", "h800-published"]))
    sequences = 2 * pp * draw(st.integers(1, 3)) * replicas
    length = draw(st.sampled_from([2048, 4096]))
    plan = f"tp: {tp}, pp: {pp}, ep: {ep}, cp: 1, vpp: {vpp}"
    more = ", sequence_parallel: true" if tp > 1 else ""
    spread = st.sampled_from([0.0, 0.01, 0.1])
    return [
        f"model={model}",
        f"cluster={{node: hgx-h800, nodes: {nodes}, network: mpft-ib-400g, name: small}}",
        f"parallel={{{plan}, microbatch: 1, zero_stage: {zero}{more}}}",
        f"schedule={schedule}",
        f"profile={profile}",
        f"precision={draw(st.sampled_from(['fp8', 'bf16']))}",
        f"recompute={draw(st.sampled_from(['none', 'selective', 'full']))}",
        f"batch={{sequences: {sequences}, sequence_length: {length}}}",
        f"communication.sms={draw(st.sampled_from([4, 16, 20, 24, 40]))}",
        f"communication.kernels={draw(st.sampled_from(['deepep-2025-02', 'deepep-2025-04']))}",
        f"routing.expert_load_cv.value={draw(st.sampled_from([0.0, 0.16, 0.5]))}",
        f"variation.clock_cv.value={draw(spread)}",
        f"variation.jitter_cv.value={draw(spread)}",
        f"seed={draw(st.integers(0, 5))}",
    ]


@settings(max_examples=25)
@given(scenarios())
def test_every_prediction_lies_between_its_bounds_and_adds_up(overrides: list[str]) -> None:
    result = simulate(load_scenario("deepseek-v3-2048xh800", overrides))
    step = result.step
    assert 0.0 < step.lower_bound_s <= step.time_s <= step.upper_bound_s
    for row in result.breakdown_by_rank_s:
        parts = row.model_dump(exclude={"exposed_communication"})
        assert all(seconds >= -1e-9 for seconds in parts.values())
        assert abs(sum(parts.values()) - step.time_s) < 1e-9
        assert -1e-9 <= row.exposed_communication <= step.time_s - row.bubble + 1e-9


def test_the_presets_lie_between_their_bounds(home_case: Any, trace_pair: Any) -> None:
    for _, _, result in (home_case, trace_pair):
        assert result.step.lower_bound_s < result.step.time_s < result.step.upper_bound_s


@given(st.data())
def test_the_end_of_the_step_may_be_long_on_different_ranks(toy: Toy, data: st.DataObject) -> None:
    """One rank's reduction and another's optimizer are in series, because the norm is a barrier."""
    seconds = st.floats(0.0, 1.0)

    def sync() -> SyncCost:
        reduce_s, optimizer_s, gather_s = (data.draw(seconds) for _ in range(3))
        total = reduce_s + optimizer_s + gather_s
        return SyncCost(reduce_s, 0.0, optimizer_s, gather_s, best_s=0.0, worst_s=total)

    schedule = build(data.draw(st.sampled_from(["1f1b", "dualpipe"])), 2, 4)
    program = toy(schedule, [["dense"], ["dense"]], lambda k, p, o: 1000, sync=[sync(), sync()])
    end_s = execute(program).end_ns / 1e9
    assert lower_bound_s(program) <= end_s <= upper_bound_s(program) + 1e-8


def test_the_lower_bound_is_the_busiest_resource(home_case: Any) -> None:
    program = home_case[0].program
    bound = lower_bound_s(program)
    for rank, steps in enumerate(program.ranks):
        for resource in (0, 1):
            assert sum(step.code.best_s[resource] for step in steps) <= bound
        assert program.costs.sync[rank].best_s <= bound


@given(st.data())
def test_sends_that_crowd_the_links_stay_below_the_upper_bound(toy: Toy, data: st.DataObject) -> None:
    """Certain prices, so nothing but the bound's own allowance covers sends and what they delay."""
    name = data.draw(st.sampled_from(sorted(BUILDERS)))
    pp = data.draw(st.sampled_from([2, 4]))
    schedule = build(name, pp, 2 * pp * data.draw(st.integers(1, 2)))
    compute, payload, send = (data.draw(st.integers(1000, 9000)) for _ in range(3))
    program = toy(
        schedule, [["moe"]] * schedule.n_stages, lambda k, p, o: compute, lambda p, o: float(payload),
        send_ns=float(send), bytes_=1000.0, rate=1e9, clock=[[1.0, 1.3]] * pp,
    )  # fmt: skip
    end_s = execute(program).end_ns / 1e9
    assert lower_bound_s(program) <= end_s <= upper_bound_s(program)
