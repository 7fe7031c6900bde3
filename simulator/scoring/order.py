"""Scores the order of predictions: pairs of plans right, the best plan picked, and what a wrong pick costs.

A family holds measured plans of one task: the same model, hardware, GPUs, sequence length, global batch and
precision. A choice between plans needs their order, which a small error of every step does not give.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median

import numpy as np
from msgspec import Struct

from moesim.hwmodels.frozen import Frozen
from moesim.simulator.scoring.scoreboard.rows import OpenRow
from moesim.simulator.scoring.scoreboard.score import ScoredRow
from moesim.simulator.studies.compare import band_of_margin

APART = 0.05
"""Two plans are a pair where their measured steps differ by more than this share of the shorter one."""


class TimedPlan(Struct, frozen=True):
    """One measured plan: its family, what tells it from the others there, and both steps in seconds."""

    id: str
    family: Hashable
    plan: Hashable
    measured_s: float
    predicted_s: float
    draws: tuple[float, ...] = ()
    """Draws of the predicted step over it (`ScoredRow.draws`); empty where nobody drew."""

    def is_tied_with(self, other: TimedPlan) -> bool:
        """Whether the two predicted steps cannot be told apart (docs/model.md, eq. U8)."""
        if not (self.draws and other.draws):
            return self.predicted_s == other.predicted_s
        drawn = np.array(other.draws), np.array(self.draws)
        return not band_of_margin(self.predicted_s / other.predicted_s - 1.0, *drawn).has_sign


class FamilyOrder(Frozen):
    """The order of one family's plans.

    `pairs_tied`: pairs whose predicted steps cannot be told apart, and `tied_right` those of them that are in
    the right order nevertheless, so that of the other pairs pairs_right - tied_right are right.
    `picked` is the plan with the shortest predicted step; `regret` is its measured step over that of `best`,
    the fastest, minus 1.
    """

    name: str
    plans: int
    pairs: int
    pairs_right: int
    pairs_tied: int
    tied_right: int
    picked: str
    best: str
    regret: float


class OrderScore(Frozen):
    """The order of several families; `best_picked` counts those whose regret is at most `APART`."""

    name: str
    families: tuple[FamilyOrder, ...]
    pairs: int
    pairs_right: int
    pairs_tied: int
    tied_right: int
    best_picked: int
    regret_median: float
    regret_worst: float


def family_order(plans: Sequence[TimedPlan]) -> FamilyOrder | None:
    """The order of the plans of one family; None where no two of them differ by more than `APART`.

    Of runs of one plan (other software, repeats) the fastest measured one counts.
    """
    fastest: dict[Hashable, TimedPlan] = {}
    for plan in sorted(plans, key=lambda p: (p.measured_s, p.id)):
        fastest.setdefault(plan.plan, plan)
    kept = list(fastest.values())
    pairs = [(a, b) for a, b in combinations(kept, 2) if b.measured_s / a.measured_s - 1.0 > APART]
    if not pairs:
        return None
    picked = min(kept, key=lambda p: (p.predicted_s, p.id))
    tied = [a.predicted_s < b.predicted_s for a, b in pairs if b.is_tied_with(a)]
    return FamilyOrder(
        name=" ".join(map(str, kept[0].family)) if isinstance(kept[0].family, tuple) else str(kept[0].family),
        plans=len(kept),
        pairs=len(pairs),
        pairs_right=sum(a.predicted_s < b.predicted_s for a, b in pairs),
        pairs_tied=len(tied),
        tied_right=sum(tied),
        picked=picked.id,
        best=kept[0].id,
        regret=picked.measured_s / kept[0].measured_s - 1.0,
    )


def order_score(name: str, plans: Iterable[TimedPlan]) -> OrderScore | None:
    """The order of all families among the plans; None without a pair."""
    grouped: dict[Hashable, list[TimedPlan]] = {}
    for plan in plans:
        grouped.setdefault(plan.family, []).append(plan)
    families = tuple(order for order in map(family_order, grouped.values()) if order is not None)
    if not families:
        return None
    return OrderScore(
        name=name,
        families=families,
        pairs=sum(f.pairs for f in families),
        pairs_right=sum(f.pairs_right for f in families),
        pairs_tied=sum(f.pairs_tied for f in families),
        tied_right=sum(f.tied_right for f in families),
        best_picked=sum(f.regret <= APART for f in families),
        regret_median=median(f.regret for f in families),
        regret_worst=max(f.regret for f in families),
    )


def timed_plan(row: OpenRow, scored: ScoredRow) -> TimedPlan | None:
    """A published row as a plan of its family; None for a row that was not predicted."""
    if scored.predicted_step_s is None or scored.published_step_s is None:
        return None
    family = (
        row.model, f"{row.layers} x {row.hidden}/{row.ffn}/{row.heads}", row.hardware, f"{row.n_gpus} GPUs",
        f"sequence {row.seq}", f"batch {row.gbs_seqs}", row.precision,
    )  # fmt: skip
    plan = (
        row.tp, row.pp, row.vpp, row.cp, row.ep, row.mbs, row.zero_or_fsdp, row.recompute, row.schedule,
        scored.predicted_step_s,
    )  # fmt: skip
    return TimedPlan(row.id, family, plan, scored.published_step_s, scored.predicted_step_s, scored.draws)


ORDER_SETS: Mapping[str, Callable[[OpenRow], bool]] = {
    "published, MoE": lambda row: row.arch == "moe",
    "published, dense": lambda row: row.arch == "dense",
}
"""Sets of published rows whose order is scored."""


def published_order(rows: Sequence[OpenRow], scored: Sequence[ScoredRow]) -> list[OrderScore]:
    """The order of the published rows by set; models of one name and other sizes are other families."""
    plans = [
        (row, plan)
        for row, one in zip(rows, scored, strict=True)
        if (plan := timed_plan(row, one)) is not None
    ]
    scores = [order_score(name, [p for row, p in plans if is_in(row)]) for name, is_in in ORDER_SETS.items()]
    return [score for score in scores if score is not None]
