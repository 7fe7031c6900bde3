"""Prices of transfers as table entries, and compute with the collectives of ZeRO-3 beside it (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import fsum

from moesim.simulator.cost.communication import TransferTime
from moesim.simulator.cost.table import Mode, PhaseCost, TransferCost
from moesim.simulator.model.operator import BlockKind, Phase


def slowed_beside(
    kind: BlockKind,
    compute: Mapping[tuple[BlockKind, Phase, Mode], PhaseCost],
    alone_s: Mapping[Phase, float],
    lost: float,
) -> dict[tuple[BlockKind, Phase, Mode], PhaseCost]:
    """Compute of a block with ZeRO-3's collectives beside it, spread evenly over its phases (eq. O5).

    `alone_s`: seconds that each collective takes alone; `lost`: seconds by which compute falls behind for
    each of them.
    """
    out: dict[tuple[BlockKind, Phase, Mode], PhaseCost] = {}
    passes: tuple[tuple[bool, tuple[Phase, ...]], ...] = (
        (True, ("gather F",)), (False, ("gather B", "scatter W"))
    )  # fmt: skip
    for forward, collectives in passes:
        own = {
            key: cost for key, cost in compute.items() if key[0] == kind and key[1].endswith(" F") == forward
        }
        total = fsum(cost.fixed_s + cost.row_s for cost in own.values())
        hidden = min(total, fsum(alone_s[phase] for phase in collectives))
        factor = 1.0 + lost * hidden / total if total else 1.0
        for key, cost in own.items():
            out[key] = replace(cost, fixed_s=cost.fixed_s * factor, row_s=cost.row_s * factor,
                               worst_s=max(cost.worst_s, (cost.fixed_s + cost.row_s) * factor))  # fmt: skip
    return out


def transfer_cost(time: TransferTime, nic_bytes: float, scale_up_bytes: float) -> TransferCost:
    """A transfer's seconds and the bytes behind them as the table keeps them."""
    return TransferCost(
        launch_s=time.launch_s,
        nic_s=time.nic_s,
        scale_up_s=time.scale_up_s,
        nic_bytes=nic_bytes,
        scale_up_bytes=scale_up_bytes,
        best_s=time.best_s,
        worst_s=time.worst_s,
    )
