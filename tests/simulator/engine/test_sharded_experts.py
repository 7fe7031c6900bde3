"""ZeRO-3 of a MoE: parameters travel beside the experts' transfers, on the same links."""

from __future__ import annotations

import pytest
from step_records import records_of

from moesim.simulator.engine.bounds import lower_bound_s, upper_bound_s
from moesim.simulator.engine.records import Execution
from moesim.simulator.engine.registry import engine_of
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.schedules.template import EP_PHASES, SHARDING_PHASES


def job(*more: str) -> Scenario:
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            "model=qwen3-30b-a3b", "precision=bf16", "profile=generic-roofline",
            "cluster={node: hgx-h800, nodes: 8, network: mpft-ib-400g}",
            "parallel={pp: 1, ep: 8, zero_stage: 3}", "schedule=1f1b", "batch.sequences=64",
            "routing.expert_load_cv=0", "variation={clock_cv: 0, jitter_cv: 0}", *more,
        ],
    )  # fmt: skip


def run(*more: str) -> Execution:
    return engine_of().execute(prepare(job(*more)).programs)[0]


def spans(execution: Execution, phases: frozenset[str]) -> list[tuple[int, int]]:
    return [
        (record.begins[n], record.finishes[n])
        for record in records_of(execution)[0]
        for n in record.step.code.transfers
        if record.step.code.tasks[n].phase in phases and record.finishes[n] > record.begins[n]
    ]


@pytest.mark.parametrize("resolution", ["folded", "full"])
def test_parameters_travel_while_tokens_do(resolution: str) -> None:
    execution = run(f"resolution={resolution}")
    tokens, parameters = spans(execution, EP_PHASES), spans(execution, SHARDING_PHASES)
    assert len(parameters) == 3 * (48 + 2) and len(tokens) == 4 * 48
    together = [1 for a, b in tokens for c, d in parameters if a < d and c < b]
    assert len(together) > len(tokens) // 2
    for own in (tokens, parameters):  # each stream runs in order
        assert all(before[1] <= after[0] for before, after in zip(sorted(own), sorted(own)[1:], strict=False))


def test_a_step_takes_less_than_all_its_transfers_and_compute_in_a_row() -> None:
    prepared = prepare(job())
    execution = engine_of().execute(prepared.programs)[0]
    compute_ns = sum(
        int(task.rows_ns[0].max())
        for record in records_of(execution)[0]
        for task in record.step.code.tasks
        if task.transfer is None
    )
    moved = {
        name: sum(end - begin for begin, end in spans(execution, phases))
        for name, phases in (("tokens", EP_PHASES), ("parameters", SHARDING_PHASES))
    }
    longest = max(compute_ns + moved["tokens"], moved["parameters"])
    assert longest <= execution.end_ns < 0.9 * (compute_ns + sum(moved.values()))
    assert lower_bound_s(prepared.programs) <= execution.end_ns / 1e9 <= upper_bound_s(prepared.programs)


def test_transfers_of_both_kinds_share_the_links() -> None:
    """Tokens that leave their node need longer while parameters travel than without them."""

    def tokens_ns(zero: int) -> int:
        return sum(
            end - begin
            for begin, end in spans(run("parallel.ep=16", f"parallel.zero_stage={zero}"), EP_PHASES)
        )

    assert tokens_ns(3) > 1.2 * tokens_ns(1)
