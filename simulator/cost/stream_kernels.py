"""Prices the kernels of a dispatcher that run on the stream of the transfers, beside compute (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.cost.compute import OperatorCost
from moesim.simulator.cost.rate_tables import operator_bytes
from moesim.simulator.model.operator import Operator

COPY, STATED = "copy.local.sm_rate", "permute/sm_rate"
"""Curve of bytes/s over SMs of a copy inside one GPU, and the use of one that stands in for it."""


def beside_compute(
    operators: Sequence[Operator],
    costs: Sequence[OperatorCost],
    profile: CalibrationProfile,
    sms: int,
) -> tuple[OperatorCost, ...]:
    """Costs of permutations in an overlapped pair: at least the time that `sms` SMs need for their bytes.

    Persistent GEMMs of the other micro-batch hold all other SMs (eq. C52). The rate of an SM is that of a
    copy inside the GPU, or the one that a profile states for it; without either the kernels keep their cost.
    """
    curve = next((c for c in profile.curves if c.id == COPY or STATED in c.used_for), None)
    if curve is None or not sms:
        return tuple(costs)
    rate, residual = curve.curve.at(sms).value, curve.residual.relative
    return tuple(
        _at_least(cost, operator_bytes(op) / rate, residual, curve.id) if op.cls == "permute" else cost
        for op, cost in zip(operators, costs, strict=True)
    )


def _at_least(cost: OperatorCost, seconds: float, residual: float, entry: str) -> OperatorCost:
    if seconds <= cost.seconds:
        return cost
    return replace(
        cost,
        seconds=seconds,
        residual=residual,
        worst_seconds=max(cost.worst_seconds, seconds * (1.0 + residual)),
        curve_ids=(entry, *cost.curve_ids),
        depends_on=cost.depends_on | {entry},
    )
