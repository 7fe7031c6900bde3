"""The search end to end on a small cluster: objectives, limits, determinism, errors."""

from __future__ import annotations

import json
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from math import fsum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_jobs import small_job
from prove_plans import faults_of

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.common.processes import engine_processes
from moesim.simulator.planner import candidate_search, closed_form, engine_stage
from moesim.simulator.planner import result as rows
from moesim.simulator.planner.goal import dominated, front, staircase
from moesim.simulator.planner.result import CAUSES, PlanResult, difference, step_text
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace, with_defaults
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.studies.compare import band_of_margin, relative_draws

SPACE: dict[str, Any] = {
    "tp": (1, 2), "pp": (2, 4), "ep": (4, 8), "cp": (1,), "vpp": (2,), "microbatch": (1,),
    "schedule": ("1f1b", "zbv", "dualpipev"), "recompute": ("selective", "full"), "precision": ("bf16",),
    "sms": (8, 20), "zero_stage": (1, 2),
}  # fmt: skip
SMALLER: dict[str, Any] = SPACE | {"recompute": ("full",), "sms": (20,), "zero_stage": (1,)}


@pytest.fixture(scope="module")
def found() -> PlanResult:
    """Two ranked plans have intervals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_stage, "MOST_COMPARED", 2)
        return plan(small_job(), PlanSpace(**SPACE), top=4, workers=1)


@pytest.fixture(scope="module")
def everything() -> PlanResult:
    """Every family simulated, by asking for more than there are."""
    return plan(small_job(), PlanSpace(**SPACE), top=100, workers=1)


def test_the_counts_add_up(found: PlanResult) -> None:
    assert found.considered == 2 * 2 * 2 * 3 * 2 * 2 * 2
    assert found.considered == found.fitting + sum(row.count for row in found.refused)
    assert found.simulated == len(found.ranked) == 4 <= found.estimated <= found.fitting <= found.legal


def test_the_best_is_a_scenario_that_simulate_repeats(found: PlanResult) -> None:
    best = found.best
    result = simulate(best.scenario)
    assert result.step.time_s == best.time_s
    assert result.memory.total_bytes == best.memory_bytes <= best.capacity_bytes
    assert best.memory_by_kind_bytes == result.memory.by_kind_bytes
    assert best.cost_usd == pytest.approx(result.run.cost_usd)
    assert best.days == pytest.approx(result.run.days)
    assert [row.margin for row in found.ranked] == sorted(row.margin for row in found.ranked)
    assert found.best.margin == 0.0


def test_places_and_intervals_follow_from_the_draws_of_the_steps(found: PlanResult) -> None:
    first, second, *others = found.ranked
    drawn = [relative_draws(row.scenario) for row in (first, second)]
    behind = band_of_margin(second.margin, *drawn)
    assert (first.spread, first.behind) == (Band.of(1.0, drawn[0]), None)
    assert (second.spread, second.behind) == (Band.of(1.0, drawn[1]), behind)
    assert (first.place, second.place) == (1, 2 if behind.has_sign else 1)
    assert others and all((row.spread, row.behind) == (None, None) for row in others)


def test_no_plan_of_the_space_is_faster_than_the_best(found: PlanResult, everything: PlanResult) -> None:
    assert everything.rivals == 0
    fastest = everything.best.time_s
    assert found.best.time_s <= fastest * 1.005
    assert found.proven_s is None or found.proven_s >= found.best.closed_form_s  # type: ignore[operator]


def test_the_own_plan_is_ranked_and_explained(found: PlanResult) -> None:
    assert found.own is not None and found.own_rank is not None and found.own_rank >= 1
    for row in (found.own, found.best):
        assert list(row.causes_s) == list(CAUSES)
        assert fsum(row.causes_s.values()) == pytest.approx(row.time_s, rel=1e-6)
    gaps = difference(found.own.causes_s, found.best.causes_s)
    assert fsum(gaps.values()) == pytest.approx(found.own.time_s - found.best.time_s, rel=1e-6)


def test_the_front_trades_time_for_memory(found: PlanResult) -> None:
    times = [row.time_s for row in found.pareto]
    memory = [row.memory_bytes for row in found.pareto]
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)
    assert len(found.pareto) >= 2


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_nothing_on_the_front_beats_the_best_by_closed_form_alone(
    monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    """A closed form that is a tenth too fast makes many such claims; the engine decides about each."""
    exact = closed_form.step_seconds
    monkeypatch.setattr(candidate_search, "step_seconds", lambda *of: 0.9 * exact(*of))
    front = plan(small_job(), PlanSpace(**SPACE), objective=objective, top=1)
    assert [row for row in front.pareto if row.source == "closed form" and row.margin < 0.0] == []
    assert front.simulated > 1  # of which one was ranked by its closed form
    assert front.best.time_s == min(row.time_s for row in front.pareto if row.source == "simulated")


def test_a_plan_that_the_engine_refuses_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = rows.simulate_plan

    def picky(scenario: Scenario, *, draws: bool) -> Any:
        if scenario.schedule == "zbv":
            raise InputError("schedule zbv cannot run here")
        return exact(scenario, draws=draws)

    monkeypatch.setattr(engine_stage, "simulate_plan", picky)
    left = plan(small_job(), PlanSpace(**SMALLER), top=12)
    assert {row.schedule for row in left.ranked} == {"1f1b", "dualpipev"}
    assert any("is left out: schedule zbv cannot run here" in note for note in left.notes)
    with pytest.raises(InfeasibleError, match="schedule zbv cannot run here"):
        plan(small_job(), PlanSpace(**{**SMALLER, "schedule": ("zbv",)}), top=2)


def test_the_same_bytes_with_any_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stage, "MOST_COMPARED", 2)
    results = [plan(small_job(), PlanSpace(**SMALLER), top=4, workers=n) for n in (1, 2)]
    texts = [json.dumps(result.to_dict(), allow_nan=False) for result in results]
    assert texts[0] == texts[1]


def test_memory_objective_takes_the_leanest(everything: PlanResult) -> None:
    lean = plan(small_job(), PlanSpace(**SPACE), objective="memory", top=2, workers=1)
    assert lean.best.memory_bytes <= min(row.memory_bytes for row in (*everything.ranked, *everything.pareto))


def test_fewer_nodes_meet_a_loose_deadline_for_less() -> None:
    wanted = PlanSpace(
        **{**SMALLER, "schedule": ("1f1b",), "ep": (8,), "variants": {"cluster.nodes": [2, 4]}}
    )
    quick = plan(small_job(), wanted, top=3, workers=1)
    assert quick.best.changed == {"cluster.nodes": 4}
    loose = plan(small_job(), wanted, objective="deadline", top=3, deadline_days=1000.0, workers=1)
    assert loose.best.cost_usd == min(row.cost_usd for row in loose.ranked)  # type: ignore[type-var]
    tight = (quick.best.days + loose.best.days) / 2
    if loose.best.changed != quick.best.changed:
        kept = plan(small_job(), wanted, objective="deadline", top=3, deadline_days=tight, workers=1)
        assert kept.best.days <= tight
        assert any("deadline" in row.reason for row in kept.refused)
    energy = plan(small_job(), wanted, objective="energy", top=3, workers=1)
    assert energy.best.energy_j == min(row.energy_j or 0.0 for row in energy.ranked) > 0.0
    assert energy.notes


def test_impossible_wishes_say_why() -> None:
    with pytest.raises(InfeasibleError, match="too slow"):
        plan(small_job(), PlanSpace(**SPACE), deadline_days=1e-6, workers=1)
    with pytest.raises(InfeasibleError, match="too slow"):
        plan(small_job(), PlanSpace(**SPACE), budget_usd=1e-3, workers=1)
    with pytest.raises(InfeasibleError, match="less head-room"):
        plan(small_job(), PlanSpace(**{**SPACE, "headroom": 0.999}), workers=1)
    with pytest.raises(InfeasibleError, match="does not divide"):
        plan(small_job(), PlanSpace(**{**SPACE, "tp": (3,)}), workers=1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"objective": "speed"}, "objective='speed'"),
        ({"objective": "deadline"}, "deadline_days"),
        ({"deadline_days": -1.0}, "deadline_days=-1"),
        ({"budget_usd": float("nan")}, "budget_usd=nan"),
        ({"top": 0}, "top=0"),
        ({"workers": 0}, "workers=0"),
        ({"workers": 2, "scheduler": "tcp://h:1"}, "workers=2 beside the Dask scheduler tcp://h:1"),
        ({"space": PlanSpace(**{**SPACE, "sms": (132,)})}, "sms=132"),
    ],
)
def test_malformed_wishes(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        plan(small_job(), **{"space": PlanSpace(**SPACE), "workers": 1, **arguments})


def test_a_price_is_needed_for_cost() -> None:
    cheap = load_scenario(
        "deepseek-v3-2048xh800",
        ["cluster={node: hgx-h800, nodes: 8, network: mpft-ib-400g, price_per_gpu_hour: null}"],
    )
    with pytest.raises(InputError, match="price_per_gpu_hour"):
        plan(cheap, PlanSpace(**SPACE), objective="cost", workers=1)


def test_engines_take_no_sms_and_power_is_asked_for_where_it_matters() -> None:
    tpu = load_scenario(
        "deepseek-v3-2048xh800",
        ["cluster=tpu-v5p-2048-slice", "profile=generic-roofline", "precision=bf16", "batch.sequences=2048"],
    )
    assert with_defaults(PlanSpace(), tpu, tpu.shape, tpu.machine).sms == (0,)
    with pytest.raises(InputError, match="sms=8: on tpu-v5p"):
        with_defaults(PlanSpace(sms=(8,)), tpu, tpu.shape, tpu.machine)
    wanted = PlanSpace(
        tp=(1,),
        pp=(16,),
        ep=(8,),
        cp=(1,),
        microbatch=(1,),
        schedule=("1f1b",),
        recompute=("full",),
        zero_stage=(1,),
    )
    found = plan(tpu, wanted, top=1)
    assert found.best.sms == 0 and found.best.energy_j is None and found.best.cost_usd is None
    # The move to another accelerator left the SMs to the rules; stated ones are refused before the search.
    assert tpu.communication.sms == 0
    with pytest.raises(InputError, match="dedicated engine"):
        plan(tpu.overridden("communication.sms=20"), wanted, top=1)
    # 2,048 sequences over 128 replicas are 16 micro-batches, and DualPipe over 16 ranks needs 32.
    assert found.own is None and "microbatches=16 is illegal" in found.notes[0]
    with pytest.raises(InputError, match="no figure tdp"):
        plan(tpu, wanted, objective="energy", top=1)


def test_a_process_of_the_engine_that_dies_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr(engine_stage, "simulate_own", broken)
    with pytest.raises(InputError, match="workers=1 computes"), engine_processes(2):
        engine_stage.simulate_own(small_job())


def test_fixed_layouts_and_parts_of_a_model() -> None:
    layers = [13, 12, 12, 11]
    fixed = small_job().model_copy(
        update={"stages": small_job().stages.model_copy(update={"layers": tuple(layers)})}
    )
    kept = plan(fixed, PlanSpace(**SPACE, layout="scenario"), top=2, workers=1)
    assert all(row.layers == tuple(layers) for row in kept.ranked)
    with pytest.raises(InputError, match=r"no stages\.layers"):
        plan(small_job(), PlanSpace(**SPACE, layout="scenario"), workers=1)
    part = load_scenario("deepseek-v3-trace-pair")
    with pytest.raises(InputError, match=r"stages\.blocks"):
        plan(part, workers=1)


def test_pandas_is_wanted_only_for_tables(found: PlanResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        found.to_pandas()


def test_printed_steps_are_exact_to_a_thousandth() -> None:
    for seconds in (0.0123456, 0.74449, 9.99951, 18.4049, 123.456, 1234.56, 98765.4):
        assert float(step_text(seconds)) == pytest.approx(seconds, rel=5.1e-4)
    assert [step_text(s) for s in (0.7, 18.4, 1234.5)] == ["0.7000", "18.40", "1234"]


def test_the_best_plans_simulate_again_from_their_files_as_printed(found: PlanResult) -> None:
    """Within 0.1 %, with the verdict of their row, and with no link busy for longer than the step."""
    assert faults_of(found) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=llama-3-8b", "parallel={pp: 2, zero_stage: 1}", "communication.kernels=nccl"],
        ["model=olmoe-1b-7b", "routing.load={kind: zipf, exponent: 0.5}"],
    ],
)
def test_so_do_those_of_other_models(overrides: list[str]) -> None:
    scenario = small_job().overridden("batch.sequences=64", *overrides)
    experts = (1,) if scenario.shape.moe is None else (8,)
    wanted = PlanSpace(
        tp=(1,), pp=(2, 4), ep=experts, cp=(1,), microbatch=(1,), vpp=(2,), schedule=("1f1b", "zbv"),
        zero_stage=(1, 2, 3), recompute=("full",), sms=(20,), placement=("in order", "hierarchical"),
    )  # fmt: skip
    again = plan(scenario, wanted, top=10, workers=1)
    assert len(again.ranked) == 4
    assert faults_of(again) == []


def test_the_proof_finds_a_plan_that_is_printed_wrongly(found: PlanResult) -> None:
    best = found.best
    wrong = replace(best, time_s=best.time_s * 1.002)
    assert "are printed" in faults_of(replace(found, ranked=(wrong,)))[0]
    risky = replace(best, reserved_bytes=2.0 * best.capacity_bytes)
    assert "is said to be at risk" in faults_of(replace(found, ranked=(risky,)))[0]


# -- fronts: what no other plan beats --------------------------------------------------------------


POINTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=25)


@given(POINTS)
def test_the_front_is_what_nothing_else_beats(points: list[tuple[int, int, int]]) -> None:
    kept = front(points)
    values = {points[n] for n in kept}
    assert len(values) == len(kept)
    for point in points:
        beats = any(
            other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points
        )
        assert (point in values) != beats


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_beaten_by_the_staircase(known: list[tuple[int, int]], memory: int, bound: int) -> None:
    steps = staircase(np.array([float(m) for m, _ in known]), np.array([float(t) for _, t in known]))
    mine = dominated(np.array([float(memory)]), np.array([float(bound)]), steps)[0]
    assert mine == any(m <= memory and t <= bound for m, t in known)
