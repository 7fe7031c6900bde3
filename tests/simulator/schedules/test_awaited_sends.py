"""Which sends a rank waits for, by the runtime of a schedule."""

from __future__ import annotations

from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import load_scenario
from moesim.simulator.schedules import awaiting, build, steady_steps


def test_the_steady_state_lies_between_warm_up_and_flush() -> None:
    """Rank 0 of 1F1B over two ranks with four micro-batches: F F B F B F B B."""
    one = build("1f1b", 2, 4)
    assert [str(step) for step in one.ranks[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]
    assert steady_steps(one.ranks[0]) == range(1, 7)
    assert steady_steps(build("gpipe", 2, 4).ranks[0]) == range(0)


def test_a_runtime_awaits_edges_or_all_or_what_the_schedule_says() -> None:
    posted = build("interleaved-1f1b", 2, 4, 2)
    edges = awaiting(posted, "edges").awaits(0)
    steady = steady_steps(posted.ranks[0])
    assert 0 < len(steady) < len(edges)
    assert [not waits for waits in edges] == [n in steady for n in range(len(edges))]
    assert not any(awaiting(posted, "schedule").awaits(0)) and all(awaiting(posted, "all").awaits(0))
    assert all(awaiting(build("1f1b", 2, 4), "schedule").awaits(1))


def test_with_as_many_micro_batches_as_ranks_everything_is_warm_up_or_flush() -> None:
    few = awaiting(build("interleaved-1f1b", 4, 4, 2), "edges")
    assert all(few.awaits(0))


def test_awaited_sends_of_the_edges_cost_less_than_all() -> None:
    """A dense model has no other transfers that sends could disturb."""
    plan = load_scenario(
        "deepseek-v3-2048xh800",
        [
            "cluster={node: hgx-h800, nodes: 4, network: mpft-ib-400g, name: 32xh800}", "model=llama-3-8b",
            "precision=bf16", "communication.sms=0", "recompute=none", "schedule=interleaved-1f1b",
            "parallel={tp: 1, pp: 4, vpp: 2, ep: 1, microbatch: 1}", "batch.sequences=64",
            "stages.blocks=[embedding dense, dense, dense, dense, dense, dense, dense, dense head]",
            "variation={clock_cv: 0, jitter_cv: 0}",
        ],
    )  # fmt: skip
    posted, edges, every = (
        run_step(plan.overridden(f"software.awaited_sends={which}")).time_s
        for which in ("schedule", "edges", "all")
    )
    assert posted < edges < every
