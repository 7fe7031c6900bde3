"""Which GPUs form the groups of a pipeline rank, and how its sends crowd the links of a torus (pure)."""

from __future__ import annotations

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.scale_up_shares import SWITCHED, ScaleUpShares
from moesim.simulator.layout.parallel import Layout

MOST_MEMBERS = 256
"""GPUs that one program carries where no expert-parallel group says how many."""


def members_of(layout: Layout) -> int:
    """GPUs that a program carries for each pipeline rank: one expert-parallel group, or replicas."""
    return layout.plan.ep if layout.plan.ep > 1 else min(layout.dp, MOST_MEMBERS)


def grouped_gpus(layout: Layout, wiring: ScaleUpShares = SWITCHED) -> IntArray:
    """Global GPU numbers [pipeline rank, group, member]: expert-parallel groups, or runs of neighbours.

    Where the wiring has blocks (a torus), a group is the one that its exchange is priced for (docs/model.md,
    eq. H3).
    """
    plan, inner = layout.plan, layout.gpus_per_pipeline_rank
    numbers = np.arange(layout.n_gpus, dtype=np.int64).reshape(plan.pp, inner)
    if 1 < plan.ep <= layout.gpus_per_node:
        blocks = wiring.groups(plan.ep, layout.n_gpus)
        if blocks is not None:
            return blocks.reshape(plan.pp, -1, plan.ep)
    if plan.ep > 1:
        folded = numbers.reshape(plan.pp, layout.expert_dp, plan.ep, plan.expert_tp)
        return folded.transpose(0, 1, 3, 2).reshape(plan.pp, -1, plan.ep)
    members = max(m for m in range(1, min(inner, MOST_MEMBERS) + 1) if inner % m == 0)
    return numbers.reshape(plan.pp, -1, members)


def sends_on_a_link(layout: Layout, wiring: ScaleUpShares) -> int:
    """Sends of a pipeline rank that the busiest link carries when all its GPUs send to the next rank at once.

    One where every GPU has a way of its own; on a torus the next rank is several chips away (eq. X4).
    """
    if not wiring.links_are_shared:
        return 1
    gpus = grouped_gpus(layout, wiring).reshape(layout.plan.pp, -1)
    pairs = [(gpus[rank], gpus[rank + 1]) for rank in range(layout.plan.pp - 1)]
    return max((wiring.busiest_link(*way) for a, b in pairs for way in ((a, b), (b, a))), default=1)
