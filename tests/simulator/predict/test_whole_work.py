"""Every micro-batch is computed once, in every schedule and with every number of micro-batches."""

from __future__ import annotations

import pytest

from moesim.simulator.planner.estimate import estimate
from moesim.simulator.predict.report import compute_ns
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import load_scenario
from moesim.simulator.schedules import SCHEDULES

SMALL = "tests/golden/scenario-small.yaml"
EVEN = ("routing.expert_load_cv=0 %", "variation.clock_cv=0 %", "variation.jitter_cv=0 %")
PLAIN = ("parallel.pp=1", "schedule=1f1b")


def plan_of(name: str, microbatches: int) -> tuple[str, ...]:
    """The smallest plan of a schedule for 32 GPUs with so many micro-batches, in overrides."""
    spec = SCHEDULES[name]
    pp = 1 if name in ("gpipe", "1f1b") or "interleaved" in name else 2
    vpp = 2 if spec.stages_per_rank is None else 1
    sequences = 32 // pp * microbatches
    return (
        f"schedule={name}", f"parallel.pp={pp}", f"parallel.vpp={vpp}", f"batch.sequences={sequences}",
        "recompute=none", "parallel.ep=8",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        ("interleaved-1f1b-overlapped", 1),
        ("interleaved-1f1b-overlapped", 2),
        ("interleaved-1f1b", 1),
        ("dualpipe", 4),
        ("dualpipev", 4),
        ("zbv", 4),
        ("gpipe", 1),
    ],
)
def test_a_step_computes_what_its_micro_batches_need(name: str, microbatches: int) -> None:
    """As much as 1F1B on one rank, or more where communication takes SMs away; also in closed form."""
    overrides = plan_of(name, microbatches)
    step = run_step(load_scenario(SMALL, (*EVEN, *overrides)))
    pp = step.prepared.scenario.parallel.pp
    sequences = f"batch.sequences={32 * microbatches}"
    plain = run_step(load_scenario(SMALL, (*EVEN, *PLAIN, sequences, "recompute=none", "parallel.ep=8")))
    own, alone = (float(compute_ns(each.executions[0].table).sum()) for each in (step, plain))
    assert alone * 0.99 <= own <= alone * 1.6
    assert step.time_s * pp * 1e9 >= alone * 0.99
    assert estimate(step.prepared.scenario).step_time_s * pp * 1e9 >= alone * 0.99


def test_an_order_of_pairs_leaves_a_schedule_without_pairs_alone() -> None:
    scenario = load_scenario(SMALL)
    plain = run_step(scenario)
    for order in ("megatron", "megatron-early-attention"):
        assert run_step(scenario.replace(communication={"overlap": order})).time_s == plain.time_s
