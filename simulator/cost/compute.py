"""Seconds of one operator on one GPU: measured rates, SM partition and interference (pure functions).

Equations C4 to C8 of docs/model.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, Conditions, Law, LawGroup, MeasuredCurve, Prior
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.gemm import GemmLookup
from moesim.simulator.cost.memory_bound import TransferCurve
from moesim.simulator.model.operator import Operator

Bound = Literal["compute", "memory", "launch"]

ATTENTION_CLASSES = frozenset({"attention_forward", "attention_backward"})
GEMM_CLASSES = frozenset({"gemm", "grouped_gemm", "wgrad_gemm", "gate_gemm"})
_MAX_CACHED = 100_000


@dataclass(frozen=True, slots=True)
class SmContext:
    """What shares the GPU: `communication_sms` held by communication kernels while `overlapped`."""

    communication_sms: int = 0
    overlapped: bool = False


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Seconds of an operator and what they stand on.

    `best_seconds` <= `seconds` <= `worst_seconds`: alone on all SMs at the better end of the residual
    (never below the datasheet roofline), and beside communication at the worse end.
    """

    seconds: float
    bound: Bound
    curve_ids: tuple[str, ...]
    extrapolations: tuple[str, ...]
    """Shapes or sizes outside what was measured."""
    residual: float
    best_seconds: float
    worst_seconds: float
    interpolations: tuple[str, ...] = ()
    """Shapes priced from other measured shapes around them."""
    assumptions: tuple[str, ...] = ()
    """Priors and substitutions: nothing of this class was measured."""


def operator_seconds(
    op: Operator, accelerator: Accelerator, profile: CalibrationProfile, context: SmContext
) -> OperatorCost:
    """Time of an operator, its launch gaps included.

    Eq. C7: t = t_ref x S(n, overlapped) / S(n_ref, beside_ref) + launches x gap, with S the slow-down law
    of the operator's class (S = 1 alone on all SMs) and t_ref from eq. C4 to C6. Raises InputError when
    the profile has neither a measurement nor a prior for the class, when the accelerator lacks a needed
    figure, and when communication takes all SMs.
    """
    index = _index(accelerator, profile)
    key = (op, context)
    cost = index.cache.get(key)
    if cost is None:
        if len(index.cache) >= _MAX_CACHED:
            index.cache.clear()
        cost = index.cache[key] = index.price(op, context)
    return cost


def slow_down(
    group: LawGroup, accelerator: Accelerator, profile: CalibrationProfile, context: SmContext
) -> float:
    """Eq. C8: slow-down S of a group of operators against running alone on all SMs."""
    return _index(accelerator, profile).law(group, context.communication_sms, context.overlapped).factor


class _Base(NamedTuple):
    """Time under the conditions of its evidence."""

    seconds: float
    bound: Bound
    group: LawGroup
    conditions: Conditions
    residual: float
    curve_id: str
    best_rate_seconds: float
    """Alone at the best credible rate; 0 where the residual says it."""
    interpolated: str = ""
    extrapolated: str = ""
    assumed: str = ""


class _LawReading(NamedTuple):
    factor: float
    residual: float
    id: str
    note: str


class _Index:
    """Everything looked up per (accelerator, profile), built once."""

    def __init__(self, accelerator: Accelerator, profile: CalibrationProfile) -> None:
        self.accelerator, self.profile = accelerator, profile
        self.cache: dict[tuple[Operator, SmContext], OperatorCost] = {}
        self.total_sms = accelerator.n_sms
        self.hbm_bytes_per_s = accelerator.hbm_bytes_per_s
        self.gap_s = profile.launch_gap.value if profile.launch_gap else 0.0
        self.floor_s = profile.kernel_floor.value if profile.kernel_floor else 0.0
        self._gemm: dict[tuple[str, str], GemmLookup] = {}
        for table in profile.gemm_tables:
            self._gemm.setdefault((table.cls, table.dtype), GemmLookup(table))
        self._curves: dict[tuple[str, bool | None], MeasuredCurve] = {}
        for curve in profile.curves:
            for use in curve.used_for:
                self._curves.setdefault((use, curve.overlapped), curve)
        self._transfers = {c.id: TransferCurve(c) for c in profile.curves if c.used_for}
        self._laws: dict[str, Law] = {}
        for law in profile.laws:
            self._laws.setdefault(law.group, law)
        self._law_readings: dict[tuple[LawGroup, int, bool], _LawReading] = {}
        self._elsewhere = ""
        if accelerator.name not in (profile.accelerator, *profile.also_for) and profile.accelerator != "any":
            self._elsewhere = (
                f"profile {profile.name} describes {profile.accelerator}; "
                f"its rates are applied unchanged to {accelerator.name}"
            )

    # --- price ---

    def price(self, op: Operator, context: SmContext) -> OperatorCost:
        base = self._base(op, context)
        loaded = self.law(base.group, context.communication_sms, True)
        reference = self.law(
            base.group, base.conditions.communication_sms, base.conditions.beside_communication
        )
        alone = self.law(base.group, 0, False)
        now = loaded if context.overlapped else alone
        if not context.overlapped and base.group in self.profile.in_situ_groups:
            now = reference  # measured beside communication, and not believed to speed up without it
        launches_s = op.launches * self.gap_s
        floor_s = op.launches * self.floor_s
        seconds = max(base.seconds * now.factor / reference.factor, floor_s)
        best = base.best_rate_seconds or base.seconds * alone.factor / reference.factor * (
            1.0 - base.residual
        )
        best = min(seconds, max(best, self._roofline_seconds(op)))
        law_residual = loaded.residual if loaded.factor != reference.factor else 0.0
        worst = base.seconds * max(loaded.factor, now.factor) / reference.factor
        worst = max(seconds, worst * (1.0 + base.residual) * (1.0 + law_residual))
        ids = [base.curve_id]
        if now.factor != reference.factor:
            ids += [law.id for law in (now, reference) if law.id and law.id not in ids]
        return OperatorCost(
            seconds=seconds + launches_s,
            bound="launch" if seconds == floor_s else base.bound,
            curve_ids=tuple(ids),
            extrapolations=tuple(x for x in (base.extrapolated, now.note) if x),
            residual=base.residual,
            best_seconds=best,
            worst_seconds=worst + launches_s,
            interpolations=(base.interpolated,) if base.interpolated else (),
            assumptions=tuple(x for x in (base.assumed, self._elsewhere) if x),
        )

    def _base(self, op: Operator, context: SmContext) -> _Base:
        if op.cls in GEMM_CLASSES:
            return self._gemm_base(op)
        if op.cls in ATTENTION_CLASSES:
            return self._attention_base(op)
        return self._memory_base(op, context)

    def _roofline_seconds(self, op: Operator) -> float:
        return op.flop / self.accelerator.peak_flop_per_s(op.dtype) if op.flop else 0.0

    # --- products and attention ---

    def _gemm_base(self, op: Operator) -> _Base:
        assert op.gemm is not None
        lookup, assumed = self._gemm.get((op.cls, op.dtype)), ""
        fraction = 1.0
        if lookup is None and op.cls != "gemm":
            lookup = self._gemm.get(("gemm", op.dtype))
            if lookup is not None:
                prior = self._prior(op, "gemm_rate")
                fraction = prior.fraction if prior else 1.0
                assumed = f"{op.cls} {op.dtype} at {fraction:.0%} of the dense rates of {lookup.table.id}"
        if lookup is None:
            return self._prior_base(op, "gemm_told" if op.dtype == "fp8" else "gemm_untold")
        reading = lookup.read(op.gemm)
        table = lookup.table
        compute_s = op.flop / (reading.flop_per_s * fraction)
        # A rate taken from another shape cannot beat the memory that this shape must move.
        memory_s = _bytes(op) / self.hbm_bytes_per_s if reading.interpolated or reading.extrapolated else 0.0
        return _Base(
            max(compute_s, memory_s),
            "compute" if compute_s >= memory_s else "memory",
            "gemm_told" if table.told else "gemm_untold",
            table.conditions,
            reading.residual,
            table.id,
            0.0,
            reading.interpolated,
            reading.extrapolated,
            assumed,
        )

    def _attention_base(self, op: Operator) -> _Base:
        assert op.gemm is not None
        curve = self._find_curve(op.cls, op.variant, None)
        if curve is None:
            return self._prior_base(op, "attention")
        reading = curve.curve.at(op.gemm.n)
        return _Base(
            op.flop / reading.value,
            "compute",
            "attention",
            curve.conditions,
            curve.residual.relative,
            curve.id,
            0.0,
            extrapolated=reading.note,
        )

    # --- memory-bound ---

    def _memory_base(self, op: Operator, context: SmContext) -> _Base:
        curve = self._find_curve(op.cls, op.variant, context.overlapped)
        if curve is None:
            return self._prior_base(op, "memory_bound")
        reading = self._transfers[curve.id].read(_bytes(op))
        return _Base(
            reading.seconds,
            "memory",
            "memory_bound",
            curve.conditions,
            curve.residual.relative,
            curve.id,
            0.0,
            extrapolated=reading.extrapolated,
        )

    def _find_curve(self, cls: str, variant: str, overlapped: bool | None) -> MeasuredCurve | None:
        for use in (f"{cls}/{variant}", cls):
            for when in (overlapped, None):
                curve = self._curves.get((use, when))
                if curve is not None:
                    return curve
        return None

    # --- assumptions ---

    def _prior(self, op: Operator, *of: str) -> Prior | None:
        for prior in self.profile.priors:
            if op.cls in prior.used_for and prior.dtype in (None, op.dtype) and prior.of in of:
                return prior
        return None

    def _prior_base(self, op: Operator, group: LawGroup) -> _Base:
        prior = self._prior(op, "tensor_peak", "memory_bandwidth")
        if prior is None:
            raise InputError(
                f"calibration profile {self.profile.name!r} has neither a measurement nor a prior for "
                f"{op.cls} in {op.dtype} (operator {op.name!r}); include generic-priors or add a curve"
            )
        if prior.of == "tensor_peak":
            peak = self.accelerator.peak_flop_per_s(op.dtype)
            compute_s = op.flop / (peak * prior.fraction)
            memory_s = _bytes(op) / self.hbm_bytes_per_s
            best = max(op.flop / (peak * prior.high), memory_s)
        else:
            compute_s = 0.0
            memory_s = _bytes(op) / (self.hbm_bytes_per_s * prior.fraction)
            best = _bytes(op) / (self.hbm_bytes_per_s * prior.high)
        return _Base(
            max(compute_s, memory_s),
            "compute" if compute_s > memory_s else "memory",
            group,
            prior.conditions,
            prior.fraction / prior.low - 1.0,
            prior.id,
            best,
            assumed=f"{prior.id}: {op.cls} {op.dtype} at {prior.fraction:.0%} of {prior.of.replace('_', ' ')}",
        )

    # --- SM partition ---

    def law(self, group: LawGroup, n: int, beside: bool) -> _LawReading:
        key = (group, n, beside)
        reading = self._law_readings.get(key)
        if reading is None:
            reading = self._law_readings[key] = self._read_law(group, n, beside)
        return reading

    def _read_law(self, group: LawGroup, n: int, beside: bool) -> _LawReading:
        law = self._laws.get(group)
        if not beside or n == 0:
            return _LawReading(1.0, 0.0, law.id if law else "", "")
        if not 0 <= n < self.total_sms:
            raise InputError(
                f"communication.sms={n} leaves no SM for compute: {self.accelerator.name} has {self.total_sms}"
            )
        if law is None:
            note = f"no slow-down law for {group} in profile {self.profile.name}: free-SM ratio assumed"
            return _LawReading(self.total_sms / (self.total_sms - n), 0.2, "", note)
        if law.form == "free_sms":
            return _LawReading(self.total_sms / (self.total_sms - n), law.residual.relative, law.id, "")
        reading = law.curve.at(n)
        return _LawReading(reading.value, law.residual.relative, law.id, reading.note)


def _bytes(op: Operator) -> float:
    return op.bytes_read + op.bytes_written


_indexes: dict[tuple[int, int], _Index] = {}


def _index(accelerator: Accelerator, profile: CalibrationProfile) -> _Index:
    """Index of a pair of objects. The index holds both, so an id in the key cannot be reused."""
    key = (id(accelerator), id(profile))
    index = _indexes.get(key)
    if index is None:
        if len(_indexes) >= 32:
            _indexes.clear()
        index = _indexes[key] = _Index(accelerator, profile)
    return index
