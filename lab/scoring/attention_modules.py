"""Prices attention modules of inference: operators at measured shares of their roofline (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum

from lab.scoring.attention_calls import AttentionCall, compressed_operators, dsa_operators, runs_dense

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.rate_tables import RateTables, operator_bytes
from moesim.simulator.model.attention.compressed import Compressed
from moesim.simulator.model.attention.dsa import DSA
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.operator import Operator

# -- attention module --------------------------------------------------------------------------------
# Prices one attention module of inference: its operators at measured shares of their roofline (pure).
#
# t = max(host, fixed + sum over operators of roofline / share). The roofline of an operator is
# the larger of its FLOPs at the datasheet peak (GEMMs: at the best measured GEMM) and its bytes at the
# memory bandwidth. `fixed` is what kernels and gaps take at any size; `host` is the time in which the
# framework issues the kernels of an eager prefill. Constants are curves of a calibration profile, named
# by `used_for`.


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
    """Time of one module: max(host, fixed + sum of roofline / share).

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


# -- sparse attention module -------------------------------------------------------------------------
# Time of one call of DSA, of compressed attention or of hyper-connections in inference (pure).


def call_operators(attention: Attention, hidden: int, call: AttentionCall) -> list[Operator]:
    """Operators of one call; raises InputError for a kind of attention without an inference module."""
    if isinstance(attention, DSA):
        return dsa_operators(attention, hidden, call)
    if isinstance(attention, Compressed):
        return compressed_operators(attention, hidden, call)
    raise InputError(
        f"attention of kind {attention.kind!r} has no inference module; the kinds dsa and compressed have"
    )


def call_overheads(attention: Attention, call: AttentionCall) -> tuple[str, tuple[str, ...], str | None]:
    """Names of a call's constants: of the projections, of the fixed parts, and of the host's time."""
    if isinstance(attention, Compressed):
        kind = "window" if not attention.ratio else "csa" if attention.indexer is not None else "hca"
        return f"{call.stack}-compressed", (f"{call.stack}-{kind}",), None
    if call.phase == "prefill":
        dense = isinstance(attention, DSA) and runs_dense(attention, call)
        host = f"{call.stack}-dsa{'-dense' if dense else ''}-host"
        return call.stack, (f"{call.stack}-dsa-prefill",), host
    shared = isinstance(attention, DSA) and attention.indexer.shared
    names = [f"{call.stack}-dsa{'-shared' if shared else ''}-{call.kv}-decode"]
    if isinstance(attention, DSA) and not shared and call.length > attention.indexer.top_k:
        names.append(f"{call.stack}-dsa-selection")
    return call.stack, tuple(names), None


def call_seconds(
    attention: Attention,
    hidden: int,
    call: AttentionCall,
    accelerator: Accelerator,
    profile: CalibrationProfile,
) -> ModuleTime:
    """Seconds of one attention module of a layer on one GPU.

    Raises InputError for a kind without an inference module, a tensor parallelism that does not divide the
    heads, and a profile without the constants of the framework.
    """
    stack, overheads, host = call_overheads(attention, call)
    operators = call_operators(attention, hidden, call)
    return module_seconds(operators, stack, overheads, host, accelerator, profile)
