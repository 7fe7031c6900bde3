"""Prices one attention module of inference: its operators at measured shares of their roofline (pure).

Eq. A6: t = max(host, fixed + sum over operators of roofline / share). The roofline of an operator is the
larger of its FLOPs at the datasheet peak (GEMMs: at the best measured GEMM) and its bytes at the memory
bandwidth. `fixed` is what kernels and gaps take at any size; `host` is the time in which the framework issues
the kernels of an eager prefill. Constants are curves of a calibration profile, named by `used_for`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.rate_tables import RateTables, operator_bytes
from moesim.simulator.model.operator import Operator


@dataclass(frozen=True, slots=True)
class ModuleTime:
    """Seconds of one module, and where they come from."""

    seconds: float
    fixed_s: float
    host_s: float
    by_operator: tuple[tuple[str, float], ...]
    """Seconds by name of the operator, without `fixed_s`."""
    entries: tuple[str, ...]
    """Calibration entries that the time stands on."""
    assumptions: tuple[str, ...]
    """Operators that no entry covers and that a prior prices."""

    @property
    def host_bound(self) -> bool:
        """Whether the host issues kernels more slowly than the GPU runs them."""
        return self.host_s > self.fixed_s + fsum(s for _, s in self.by_operator)


def operator_key(op: Operator, stack: str) -> str:
    """Name of an operator's constant: `class/kernel`, or `module_projections/stack` and the like."""
    if op.cls == "gemm":
        return f"module_{'absorbed' if op.variant == 'absorbed' else 'projections'}/{stack}"
    if op.cls == "elementwise":
        return f"module_pointwise/{stack}"
    return f"{op.cls}/{op.variant}"


def roofline_seconds(op: Operator, accelerator: Accelerator) -> float:
    """Least seconds of an operator: its FLOPs at the peak or its bytes at the memory bandwidth."""
    memory_s = operator_bytes(op) / accelerator.hbm_bytes_per_s
    if not op.flop:
        return memory_s
    known = op.cls == "gemm" and op.dtype in accelerator.gemm_achievable
    peak = (accelerator.gemm_achievable_flop_per_s if known else accelerator.peak_flop_per_s)(op.dtype)
    return max(op.flop / peak, memory_s)


def module_seconds(
    operators: Iterable[Operator],
    stack: str,
    overheads: Iterable[str],
    host: str | None,
    accelerator: Accelerator,
    profile: CalibrationProfile,
) -> ModuleTime:
    """Time of one module by eq. A6.

    `stack` names the projections' constants, `overheads` those of `fixed`, and `host` that of the host's
    time (None where a CUDA graph issues the kernels). Raises InputError where the profile has neither a
    constant nor a prior for an operator, and for an overhead that it lacks.
    """
    curves = _by_use(profile)
    tables = RateTables(accelerator, profile)
    times: list[tuple[str, float]] = []
    entries: dict[str, None] = {}
    assumptions: list[str] = []
    for op in operators:
        curve = curves.get(operator_key(op, stack))
        if curve is None:
            basis = tables.basis(op, False)
            times.append((op.name, basis.seconds))
            entries[basis.curve_id] = None
            assumptions.append(basis.assumed or f"{basis.curve_id}: {op.name}")
            continue
        share = curve.curve.ys[0]
        times.append((op.name, roofline_seconds(op, accelerator) / share))
        entries[curve.id] = None
    fixed_s = 0.0
    for name in (*overheads, *((host,) if host else ())):
        curve = curves.get(f"module_overhead/{name}")
        if curve is None:
            raise InputError(
                f"calibration profile {profile.name!r} has no module overhead {name!r}; it describes other "
                "frameworks or kinds of attention"
            )
        entries[curve.id] = None
        if name != host:
            fixed_s += curve.curve.ys[0]
    host_s = curves[f"module_overhead/{host}"].curve.ys[0] if host else 0.0
    seconds = max(host_s, fixed_s + fsum(s for _, s in times))
    return ModuleTime(seconds, fixed_s, host_s, tuple(times), tuple(entries), tuple(assumptions))


def _by_use(profile: CalibrationProfile) -> dict[str, MeasuredCurve]:
    out: dict[str, MeasuredCurve] = {}
    for curve in profile.curves:
        for use in curve.used_for:
            out.setdefault(use, curve)
    return out
