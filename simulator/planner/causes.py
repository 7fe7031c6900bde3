"""Splits a simulated step into mechanisms, by which two plans can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum

from moesim.simulator.engine.program import NS, CompiledTemplate
from moesim.simulator.engine.records import Execution
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.predict.report import breakdowns, compute_ns, spans_ns
from moesim.simulator.predict.step import Prepared, PreparedPool
from moesim.simulator.schedules.template import EP_PHASES

CAUSES = (
    "arithmetic, alone on all SMs",
    "recompute",
    "SMs and bandwidth left to communication, uneven ranks",
    "waiting for communication",
    "bubble",
    "gradients and parameters over the network",
    "optimizer",
)
"""Mechanisms in the order of `step_causes`; their seconds add up to the step."""


def step_causes(prepared: Prepared, execution: Execution) -> dict[str, float]:
    """Seconds of a step by mechanism, mean over pipeline ranks (docs/model.md, eq. P4).

    Every pipeline rank pays the prices of its own pool.
    """
    owners, table = prepared.owners, execution.table
    ranks = len(execution.program.ranks)
    repeated = {number: _recompute(p) for number, p in {id(p): p for p in owners}.items()}
    alone: dict[int, tuple[float, float]] = {}
    totals = [0.0, 0.0]
    for rank, code, actions in execution.tasks.groups:
        if code not in alone:
            alone[code] = _alone(owners[rank], table.codes[code], repeated[id(owners[rank])])
        totals = [total + len(actions) * part for total, part in zip(totals, alone[code], strict=True)]
    arithmetic, again = (total / ranks for total in totals)
    compute = fsum(compute_ns(table).tolist()) / NS / ranks
    span = fsum(spans_ns(execution).tolist()) / NS / ranks
    update = fsum(s.optimizer[1] - s.optimizer[0] for s in execution.syncs) / NS / ranks
    rows = breakdowns(execution)
    end = fsum(row.optimizer for row in rows) / ranks
    bubble = fsum(row.bubble for row in rows) / ranks
    values = (arithmetic, again, compute - arithmetic - again, span - compute, bubble, end - update, update)
    return dict(zip(CAUSES, values, strict=True))


def difference(plan: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Extra seconds of `plan` over `other` by mechanism, largest difference first."""
    gaps = {cause: plan[cause] - other[cause] for cause in CAUSES}
    return dict(sorted(gaps.items(), key=lambda item: -abs(item[1])))


def _alone(
    pool: PreparedPool, code: CompiledTemplate, recompute: Mapping[tuple[BlockKind, Phase], float]
) -> tuple[float, float]:
    """Seconds of (first-time work, recomputation) of an action that runs alone on all SMs."""
    costs = pool.programs[0].costs
    work = again = 0.0
    for task in code.tasks:
        if task.phase in EP_PHASES or task.transfer is not None:
            continue
        price = costs.compute.get((task.kind, task.phase, "alone"))
        if price is not None:
            repeated = recompute.get((task.kind, task.phase), 0.0)
            work += price.fixed_s + price.row_s - price.exposed_s - price.host_s - repeated
            again += repeated
    return work, again


def _recompute(pool: PreparedPool) -> dict[tuple[BlockKind, Phase], float]:
    """Seconds of the recomputed operators, by block kind and phase."""
    pricer, seconds = pool.pricer, {}
    for kind in sorted({block.kind for stage in pool.stages.stages for block in stage}):
        for phase, operators in pricer.operators(kind).items():
            costs = pricer.operator_costs(kind, phase, "alone")
            seconds[kind, phase] = fsum(
                cost.seconds for op, cost in zip(operators, costs, strict=True) if op.recompute
            )
    return seconds
