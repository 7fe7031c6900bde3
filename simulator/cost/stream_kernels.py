"""Prices the kernels of a dispatcher that run on the stream of the transfers, beside compute (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.cost.communication import CurveReader
from moesim.simulator.cost.compute import OperatorCost
from moesim.simulator.cost.rate_tables import operator_bytes
from moesim.simulator.model.operator import Operator


def beside_compute(
    operators: Sequence[Operator],
    costs: Sequence[OperatorCost],
    profile: CalibrationProfile,
    kernels: str,
    sms: int,
) -> tuple[OperatorCost, ...]:
    """Costs of permutations in an overlapped pair: at least the time that `sms` SMs need for their bytes.

    Persistent GEMMs of the other micro-batch hold all other SMs (eq. C52). Kernels without a measured rate of
    an SM keep their cost.
    """
    curves = CurveReader(profile, kernels)
    if not curves.has("ep.permute.sm_rate") or not sms:
        return tuple(costs)
    rate, residual = curves.read("ep.permute.sm_rate", sms)
    entry = curves.used[-1]
    return tuple(
        _at_least(cost, operator_bytes(op) / rate, residual, entry) if op.cls == "permute" else cost
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
