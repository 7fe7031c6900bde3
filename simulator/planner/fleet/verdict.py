"""Compares the best plan of a mixed fleet with each pool alone, in figures and sentences (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from moesim.simulator.planner.result import FleetVerdict, PlanRow, PoolAlone
from moesim.simulator.planner.step_mechanisms import CAUSES


def verdict(best: PlanRow, alone: Sequence[PoolAlone]) -> FleetVerdict:
    """Compare the fleet's best plan with every pool alone."""
    rows = [row.plan for row in alone if row.plan is not None]
    wins = all(best.time_s < row.time_s for row in rows)
    ideal = ideal_s([row.time_s for row in rows]) if len(rows) == len(alone) else None
    return FleetVerdict(
        tuple(alone),
        wins,
        ideal,
        None if ideal is None else ideal / best.time_s,
        (*_steps(best, alone), *_shares(best), *_losses(best, rows, ideal), *_money(best, alone)),
    )


def ideal_s(alone_s: Sequence[float]) -> float:
    """Step time (s) of a fleet whose pools share the work without loss (docs/model.md, eq. S5)."""
    return 1.0 / fsum(1.0 / seconds for seconds in alone_s)


def _steps(best: PlanRow, alone: Sequence[PoolAlone]) -> list[str]:
    said = [f"The fleet's best plan takes {best.time_s:.2f} s a step ({best.label})."]
    for row in alone:
        who = f"{row.n_gpus:,} x {row.accelerator} alone"
        if row.plan is None:
            said.append(f"{who} cannot run it: {row.reason}")
            continue
        alone_s = row.plan.time_s
        what = (
            f"the fleet is {alone_s / best.time_s:.2f}x as fast"
            if alone_s > best.time_s
            else f"the other pools make it {best.time_s / alone_s - 1.0:.1%} slower"
        )
        said.append(f"{who} takes {alone_s:.2f} s ({row.plan.label}): {what}.")
    return said


def _shares(best: PlanRow) -> list[str]:
    parts = [
        f"{pool.accelerator} holds {pool.layers} layers on pipeline ranks {pool.first_rank} to "
        f"{pool.last_rank} at {1e3 * pool.layer_s:.1f} ms a layer, idle {pool.bubble_s:.2f} s, "
        f"{pool.memory.total_bytes / 2**30:.0f} of {pool.memory.capacity_bytes / 2**30:.0f} GiB"
        for pool in best.pools
    ]
    return ["; ".join(parts) + "."] if parts else []


def _losses(best: PlanRow, rows: Sequence[PlanRow], ideal: float | None) -> list[str]:
    if ideal is None or not best.causes_s:
        return []
    said = [
        f"If the pools shared the work without loss, each at the pace that it has alone, a step would take "
        f"{ideal:.2f} s: the fleet reaches {ideal / best.time_s:.0%} of that."
    ]
    fastest = min(rows, key=lambda row: row.time_s)
    gaps = [(best.causes_s[c] / best.time_s - fastest.causes_s[c] / fastest.time_s, c) for c in CAUSES]
    more = [f"{cause} {gap:+.1%}" for gap, cause in sorted(gaps, key=lambda g: -g[0]) if gap > 0.01]
    if more:
        said.append(
            f"Share of its step that goes elsewhere, against the fastest pool alone: {', '.join(more)}."
        )
    return said


def _money(best: PlanRow, alone: Sequence[PoolAlone]) -> list[str]:
    priced = [(row.accelerator, row.plan.cost_usd) for row in alone if row.plan is not None]
    if best.cost_usd is None or any(usd is None for _, usd in priced):
        return ["No cost: a pool has no price_per_gpu_hour."]
    others = ", ".join(f"{name} alone ${usd / 1e6:.3g} M" for name, usd in priced if usd is not None)
    return [f"The run costs ${best.cost_usd / 1e6:.3g} M on the fleet{f'; {others}' if others else ''}."]
