"""Seconds of an operator of an inference step: a call, then its bytes or its FLOPs, whichever take longer.

A law of few numbers a family of kernels gives the time of any shape on any card (eq. Q2). A profile's own
`kernel_laws` come before the shipped ones, which were fitted to tables of Hopper.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, KernelLaw, load_profile
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.cost.compute import OperatorCost
from moesim.simulator.model.operator import GEMM_CLASSES, Operator

SHIPPED = "serving-hopper"
MEASURED_ON = ("h200-sxm", "h800-sxm")
"""Cards of the tables behind the shipped laws; on all others they are scaled, which the evidence says."""
WIDER = {"fp4": "fp8", "fp8": "bf16"}
"""Format in which a card multiplies that lacks one: weights are widened on the way."""
PREFIX = "serving."

Laws = Mapping[str, KernelLaw]
"""Laws by family of kernels."""

_LAWS: BoundedCache[Laws] = BoundedCache(64)


def laws(profile: CalibrationProfile | None = None) -> Laws:
    """The laws of a profile: its own, then the shipped ones."""
    if profile is None or not profile.kernel_laws:
        return _shipped()
    return _LAWS.get(Same(profile), lambda: {**_shipped(), **_by_family(profile)})


@lru_cache(maxsize=1)
def _shipped() -> Laws:
    return _by_family(load_profile(SHIPPED))


def _by_family(profile: CalibrationProfile) -> Laws:
    return {law.id.removeprefix(PREFIX): law for law in profile.kernel_laws}


def families(op: Operator) -> tuple[str, ...]:
    """Families whose law an operator may have, the nearest first: its variant, shortened from the end."""
    kind = {"attention_forward": "", "grouped_gemm": "experts", "gate_gemm": "gemm"}.get(op.cls, op.cls)
    variant = op.variant or (op.dtype if kind == "gemm" else "")
    parts = [part for part in (kind, *variant.split("-")) if part]
    names = ["-".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return (*names, "attention" if op.cls == "attention_forward" else "gemm" if op.gemm else "small")


def measured_on(law: KernelLaw) -> tuple[str, ...]:
    """Cards of the tables behind a shipped law: `MEASURED_ON`, or an H100, or both, as its source says."""
    if "H100" not in law.source:
        return MEASURED_ON
    both = any(name in law.source.lower() for name in ("h200", "h800"))
    return ("h100-sxm", *(MEASURED_ON if both else ()))


def law_of(op: Operator, found: Laws) -> KernelLaw:
    """The law of an operator's nearest family; raises InputError where there is none."""
    for name in families(op):
        if name in found:
            return found[name]
    raise InputError(f"no kernel law for {op.cls} {op.variant!r}; add one with id {PREFIX}{families(op)[0]}")


def peak_flop_per_s(accelerator: Accelerator, op: Operator) -> tuple[float, str]:
    """Peak of the format in which a card multiplies an operator, and a note where that is a wider one."""
    dtype: str = op.dtype
    if op.variant.endswith("mxfp4"):  # weights alone are narrow: beside MXFP8 where FP4 is known, else BF16
        dtype = "fp8" if "fp4" in accelerator.peak else "bf16"
    while dtype not in accelerator.peak and dtype in WIDER:
        dtype = WIDER[dtype]
    note = "" if dtype == op.dtype else f"{op.dtype} weights are multiplied in {dtype} on {accelerator.name}"
    return accelerator.peak_flop_per_s(dtype), note


def rows_a_group(op: Operator) -> float:
    """Rows of a group of a GEMM, keys of a query of attention."""
    assert op.gemm is not None
    return op.gemm.n if op.cls in ("attention_forward", "indexer") else op.gemm.m / op.gemm.groups


def price(op: Operator, accelerator: Accelerator, profile: CalibrationProfile | None = None) -> OperatorCost:
    """Time of an operator (eq. Q2) with its evidence.

    Raises InputError where neither the profile nor the shipped laws know its family, and for a card without a
    peak of its formats.
    """
    law, notes = law_of(op, laws(profile)), []
    size = op.bytes_read + op.bytes_written
    call_s = op.launches * law.call_us * 1e-6
    if op.gemm is not None and op.cls in GEMM_CLASSES:
        call_s += op.gemm.k * law.depth_ns * 1e-9
    least_s = size / accelerator.hbm_bytes_per_s
    memory_s, compute_s = least_s / law.bandwidth, 0.0
    if op.flop:
        peak, note = peak_flop_per_s(accelerator, op)
        notes = [note] if note else []
        compute_s = op.flop * (1.0 + law.edge / rows_a_group(op)) / (peak * law.peak)
        least_s = max(least_s, op.flop / peak)
    if accelerator.name not in measured_on(law) and law.kind != "measured":
        notes.append(f"{law.id}: scaled to {accelerator.name} by bandwidth and peak")
    if law.kind == "assumed":
        notes.append(f"{law.id}: assumed")
    seconds = call_s + max(memory_s, compute_s)
    residual = law.residual.on(accelerator.architecture).relative
    return OperatorCost(
        seconds=seconds,
        bound="launch" if call_s > seconds / 2 else "compute" if compute_s > memory_s else "memory",
        curve_ids=(law.id,),
        extrapolations=(),
        residual=residual,
        best_seconds=min(seconds, max(least_s, seconds * (1.0 - residual))),
        worst_seconds=seconds * (1.0 + residual),
        assumptions=tuple(notes),
        depends_on=frozenset({law.id}),
    )


def eager_seconds(module: str, device_s: float, profile: CalibrationProfile | None = None) -> float:
    """Seconds of a module (`mla`, `experts`, `dsa`) alone whose kernels Python launches one by one (eq. Q6).

    The host's time bounds it; a part of that passes before the main kernels. In a step the host runs ahead,
    so that its time alone is the bound.
    """
    law = laws(profile)[f"eager-{module}"]
    host_s = law.call_us * 1e-6
    return max(host_s, law.lead * host_s + device_s)
