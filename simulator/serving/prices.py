"""Seconds of an operator of an inference step: a call, then its bytes or its FLOPs, whichever take longer.

Four figures of a family of kernels give the time of any shape on any card (eq. SV2): the time of a call, the shares of
the memory bandwidth and of the tensor peak, and the rows of a group (keys of a query) that tiles waste at the edge. A profile's own `serving.*` curves come before the shipped
ones, which were measured on Hopper.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve, load_profile
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.cost.compute import OperatorCost
from moesim.simulator.model.operator import GEMM_CLASSES, Operator

SHIPPED = "serving-hopper"
MEASURED_ON = ("h200-sxm", "h800-sxm")
"""Cards of the tables behind the shipped curves; on all others they are scaled, which the evidence says."""
WIDER = {"fp4": "fp8", "fp8": "bf16"}
"""Format in which a card multiplies that lacks one: weights are widened on the way."""
FIGURES = ("call_time", "bandwidth_fraction", "compute_fraction", "edge")


class Laws(NamedTuple):
    """Curves of the four figures by family of kernels."""

    call_time: dict[str, MeasuredCurve]
    bandwidth_fraction: dict[str, MeasuredCurve]
    compute_fraction: dict[str, MeasuredCurve]
    edge: dict[str, MeasuredCurve]


_LAWS: BoundedCache[Laws] = BoundedCache(64)


def laws(profile: CalibrationProfile | None = None) -> Laws:
    """The laws of a profile: its own `serving.*` curves, then the shipped ones."""
    return _shipped() if profile is None else _LAWS.get(Same(profile), lambda: _read(profile, _shipped()))


@lru_cache(maxsize=1)
def _shipped() -> Laws:
    return _read(load_profile(SHIPPED), Laws({}, {}, {}, {}))


def _read(profile: CalibrationProfile, base: Laws) -> Laws:
    found = Laws(*(dict(figure) for figure in base))
    for curve in profile.curves:
        first, _, rest = curve.id.partition(".")
        family, _, figure = rest.rpartition(".")
        if first == "serving" and figure in FIGURES:
            getattr(found, figure)[family] = curve
    return found


def families(op: Operator) -> tuple[str, ...]:
    """Families whose figures an operator may have, the nearest first."""
    if op.cls == "attention_forward":
        return (op.variant, "attention")
    if op.cls == "grouped_gemm":
        kind = op.variant.partition("-")[0]
        return (f"experts-{op.variant}", f"experts-{kind}", "experts", "gemm")
    if op.cls in GEMM_CLASSES:
        return (f"gemm-{op.variant or op.dtype}", "gemm")
    return (f"{op.cls}-{op.variant}", op.cls, "small")


def _find(curves: dict[str, MeasuredCurve], op: Operator, figure: str) -> MeasuredCurve:
    for name in families(op):
        if name in curves:
            return curves[name]
    raise InputError(
        f"no curve serving.*.{figure} for {op.cls} {op.variant!r}; add serving.{op.cls}.{figure}"
    )


def peak_flop_per_s(accelerator: Accelerator, op: Operator) -> tuple[float, str]:
    """Peak of the format in which a card multiplies an operator, and a note where that is a wider one."""
    dtype: str = op.dtype
    while dtype not in accelerator.peak and dtype in WIDER:
        dtype = WIDER[dtype]
    note = "" if dtype == op.dtype else f"{op.dtype} weights are multiplied in {dtype} on {accelerator.name}"
    return accelerator.peak_flop_per_s(dtype), note


def rows_a_group(op: Operator) -> float:
    """Rows of a group of a GEMM, keys of a query of attention."""
    assert op.gemm is not None
    return op.gemm.n if op.cls in ("attention_forward", "indexer") else op.gemm.m / op.gemm.groups


def price(op: Operator, accelerator: Accelerator, profile: CalibrationProfile | None = None) -> OperatorCost:
    """Time of an operator (eq. SV2) with its evidence.

    Raises InputError where neither the profile nor the shipped laws have a figure of its family, and for a card
    without a peak of its formats.
    """
    found = laws(profile)
    call = _find(found.call_time, op, "call_time")
    share = _find(found.bandwidth_fraction, op, "bandwidth_fraction")
    size = op.bytes_read + op.bytes_written
    call_s = op.launches * call.curve.ys[0]
    memory_s = size / (accelerator.hbm_bytes_per_s * share.curve.ys[0])
    compute_s, used, notes = 0.0, [call, share], []
    if op.flop:
        tensor, edge = (_find(getattr(found, name), op, name) for name in ("compute_fraction", "edge"))
        peak, note = peak_flop_per_s(accelerator, op)
        wasted = 1.0 + edge.curve.ys[0] / rows_a_group(op)
        compute_s = op.flop * wasted / (peak * tensor.curve.ys[0])
        used, notes = [call, share, edge, tensor], [note] if note else []
    if accelerator.name not in MEASURED_ON:
        notes.append(f"{SHIPPED}: scaled to {accelerator.name} by bandwidth and peak")
    seconds = call_s + max(memory_s, compute_s)
    main = used[-1] if compute_s > memory_s else share
    used.sort(key=lambda curve: curve is not main)
    residual = max(curve.residual.on(accelerator.architecture).relative for curve in used)
    least = max(size / accelerator.hbm_bytes_per_s, op.flop / peak if op.flop else 0.0)
    return OperatorCost(
        seconds=seconds,
        bound="launch" if call_s > seconds / 2 else "compute" if compute_s > memory_s else "memory",
        curve_ids=tuple(curve.id for curve in used),
        extrapolations=(),
        residual=residual,
        best_seconds=min(seconds, max(least, seconds * (1.0 - residual))),
        worst_seconds=seconds * (1.0 + residual),
        assumptions=tuple(notes),
        depends_on=frozenset(curve.id for curve in used),
    )


def eager_seconds(module: str, profile: CalibrationProfile | None = None) -> float:
    """Host seconds of a module (`mla`, `experts`, `dsa`) whose kernels Python launches one by one; 0 where unknown.

    A GPU that computes faster waits for it.
    """
    curve = laws(profile).call_time.get(f"eager-{module}")
    return curve.curve.ys[0] if curve else 0.0
