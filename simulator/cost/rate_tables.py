"""Looks up an operator's time in one profile, under the conditions of the table, curve or prior used."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from msgspec.structs import replace

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, Conditions, MeasuredCurve, Prior
from moesim.hwmodels.calibration_entry import LawGroup
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.measured_rates import (
    GemmLookup,
    SustainedRates,
    TransferCurve,
    attention_curve,
    exact_curve,
    in_bf16,
    low_format,
)
from moesim.simulator.model.operator import (
    GEMM_CLASSES,
    ONE_SCALE,
    SCAN_CLASSES,
    SPARSE_CLASSES,
    GemmShape,
    Operator,
)

Bound = Literal["compute", "memory", "launch"]

ATTENTION_CLASSES = frozenset({"attention_forward", "attention_backward"})


class Basis(NamedTuple):
    """Time of an operator under the conditions of the measurement or prior behind it."""

    seconds: float
    bound: Bound
    group: LawGroup
    conditions: Conditions
    residual: float
    curve_id: str
    best_seconds: float
    """Time alone at the best credible rate; 0 where the residual gives it."""
    interpolated: str = ""
    extrapolated: str = ""
    assumed: str = ""
    corrected_by: str = ""
    """Entry whose ratio carried the rates of a burst to those of a training step."""
    also_reads: tuple[str, ...] = ()
    """Entries besides `curve_id` whose numbers the time depends on."""


class _Transfers(dict[str, TransferCurve]):
    """Curves of effective bandwidth by id, which are made when one is first read."""

    def __init__(self, profile: CalibrationProfile) -> None:
        super().__init__()
        self.measured = {curve.id: curve for curve in profile.curves if curve.used_for}

    def __missing__(self, id_: str) -> TransferCurve:
        made = self[id_] = TransferCurve(self.measured[id_])
        return made


class RateTables:
    """Look-up tables of one profile for one accelerator."""

    def __init__(self, accelerator: Accelerator, profile: CalibrationProfile) -> None:
        """Index the profile; the first matching entry is used."""
        self.accelerator, self.profile = accelerator, profile
        self._hbm_bytes_per_s = accelerator.hbm_bytes_per_s
        self._sustained = SustainedRates(profile)
        self._gemm: dict[tuple[str, str, str], GemmLookup] = {}
        for table in profile.gemm_tables:
            if (table.cls, table.variant, table.dtype) not in self._gemm:
                self._gemm[table.cls, table.variant, table.dtype] = GemmLookup(table, self._sustained)
        self._curves: dict[tuple[str, bool | None], MeasuredCurve] = {}
        self._by_choices: dict[str, dict[float, MeasuredCurve]] = {}
        for curve in profile.curves:
            for use in curve.used_for:
                choices = curve.conditions.rows_a_token
                if choices is not None and (use, None) not in self._curves:
                    self._by_choices.setdefault(use, {}).setdefault(choices, curve)
                elif choices is None:
                    self._curves.setdefault((use, curve.overlapped), curve)
        self._transfers = _Transfers(profile)

    def basis(self, op: Operator, overlapped: bool) -> Basis:
        """Time of an operator; raises InputError without a measurement or prior."""
        if op.cls in GEMM_CLASSES:
            return self._gemm_base(op)
        if op.cls in ATTENTION_CLASSES:
            return self._attention_base(op)
        if op.cls in (*SPARSE_CLASSES, *SCAN_CLASSES):
            return self._measured_base(op)
        return self._memory_base(op, overlapped)

    def timed(self, op: Operator, before: Basis, overlapped: bool) -> tuple[float, Bound]:
        """(seconds, bound) of `basis`, given that of a profile with other numbers in the same entries."""
        by_choices = f"{op.cls}/{op.variant}" in self._by_choices
        if before.group == "memory_bound" and before.curve_id in self._transfers.measured and not by_choices:
            return self._transfers[before.curve_id].read(operator_bytes(op)).seconds, "memory"
        return self.basis(op, overlapped)[:2]

    # --- GEMMs and attention ---

    def _gemm_base(self, op: Operator) -> Basis:
        assert op.gemm is not None
        fraction, shape, assumed = 1.0, op.gemm, ""
        also_reads: tuple[str, ...] = ()
        # The table of the GEMM's class, or of its kernel family where the profile distinguishes families.
        lookup = self._family(op)
        if lookup is None and (op.cls, op.variant) != ("wgrad_gemm", ONE_SCALE):
            lookup = self._gemm.get((op.cls, "", op.dtype))
        if op.cls == "grouped_gemm" and self._family(op) is None and self._family(op, "gemm") is not None:
            lookup, shape = self._family(op, "gemm"), _one_group(op.gemm, op.cls)  # runs by group
        if lookup is None and op.cls == "wgrad_gemm" and op.variant == ONE_SCALE:
            # Without a measurement, it is priced like the forward GEMM (one scale a tensor).
            return self._gemm_base(replace(op, cls="grouped_gemm" if op.per_received_row else "gemm"))
        if lookup is None and op.cls != "gemm":
            lookup = self._gemm.get(("gemm", "", op.dtype))
            if lookup is not None:
                prior = self._prior(op, "gemm_rate")
                fraction = prior.fraction if prior else 1.0
                also_reads = (prior.id,) if prior else ()
                shape = _one_group(op.gemm, op.cls)
                by_rows = self._curves.get(("grouped_gemm/rows", None)) if op.cls == "grouped_gemm" else None
                if by_rows is not None:  # eq. C31
                    fraction *= by_rows.curve.at(shape.m).value
                    also_reads = (*also_reads, by_rows.id)
                    shape = replace(shape, m=max(shape.m, by_rows.curve.xs[-1]))
                at = f"{fraction:.0%}" + (f" ({by_rows.id})" if by_rows else "")
                assumed = f"{op.cls} {op.dtype} at {at} of the dense rates of {lookup.table.id}"
        if lookup is None:
            return self._prior_base(op, "gemm_sm_aware" if op.dtype == "fp8" else "gemm_sm_unaware")
        reading = lookup.read(shape)
        table = lookup.table
        ratio = self._sustained.ratio_of(table, "gemm", table.dtype)
        unaligned = None if self._family(op) else self._variant_prior(op, "gemm_rate")
        if unaligned is not None:  # eq. C53
            fraction, also_reads = fraction * unaligned.fraction, (*also_reads, unaligned.id)
            assumed = f"{op.variant}: {unaligned.fraction:.0%} of the rates of {table.id}"
        assumed = "; ".join(filter(None, (assumed, self._sustained.missing(table, "gemm", table.dtype))))
        compute_s = op.flop / (reading.flop_per_s * fraction)
        adds = self._find_curve("wgrad_gemm", "accumulate", None) if op.accumulated_bytes else None
        if adds is not None and table.cls == "wgrad_gemm":  # eq. C10: into an FP32 buffer
            compute_s += self._transfers[adds.id].read(op.accumulated_bytes).seconds
            also_reads = (*also_reads, adds.id)
        # A rate from another shape must not be faster than the memory traffic of this shape.
        own_shape = not (reading.interpolated or reading.extrapolated)
        memory_s = 0.0 if own_shape else operator_bytes(op) / self._hbm_bytes_per_s
        return Basis(
            max(compute_s, memory_s),
            "compute" if compute_s >= memory_s else "memory",
            "gemm_sm_aware" if table.sm_aware else "gemm_sm_unaware",
            table.conditions,
            reading.residual,
            table.id,
            0.0,
            reading.interpolated,
            reading.extrapolated,
            assumed,
            ratio.id if ratio else "",
            also_reads,
        )

    def _family(self, op: Operator, cls: str = "") -> GemmLookup | None:
        """The table of a GEMM's own kernel family, in its own class or in `cls`."""
        return self._gemm.get((cls or op.cls, op.variant, op.dtype)) if op.variant else None

    def _attention_base(self, op: Operator) -> Basis:
        assert op.gemm is not None
        if low_format(op) and exact_curve(self._curves, op) is None:
            return self._as_in_bf16(op)
        chosen = attention_curve(self._curves, op, self._variant_prior(op) is not None)
        if chosen is None:
            return self._prior_base(op, "attention")
        curve, assumed = chosen
        reading = curve.curve.at(op.gemm.n)
        ratio = self._sustained.ratio_of(curve, "attention", op.dtype)
        missing = self._sustained.missing(curve, "attention", op.dtype)
        return Basis(
            op.flop / self._sustained.attention_rate(curve, op.dtype, reading.value),
            "compute",
            "attention",
            curve.conditions,
            curve.residual.relative,
            curve.id,
            0.0,
            extrapolated=reading.note,
            assumed="; ".join(filter(None, (assumed, missing))),
            corrected_by=ratio.id if ratio else "",
        )

    def _as_in_bf16(self, op: Operator) -> Basis:
        """A core attention in FP8 without a curve of its own: BF16's time, over a measured ratio of rates."""
        assert op.gemm is not None
        basis = self._attention_base(replace(op, dtype="bf16", variant=in_bf16(op.variant)))
        ratio = self._curves.get((f"over_bf16/{op.cls}/{low_format(op)}", None))
        if ratio is None or low_format(op) != op.variant:
            note = f"{op.cls} with variant {op.variant} at the rates of BF16"
            return basis._replace(assumed="; ".join(filter(None, (basis.assumed, note))))
        return basis._replace(
            seconds=basis.seconds / ratio.curve.at(op.gemm.n).value,
            residual=basis.residual + ratio.residual.relative,
            best_seconds=0.0,
            also_reads=(*basis.also_reads, ratio.id),
        )

    def whole_backward(self, op: Operator) -> bool:
        """Whether the rate of a core attention's backward holds the kernels before and after it."""
        if low_format(op) and exact_curve(self._curves, op) is None:
            op = replace(op, dtype="bf16", variant=in_bf16(op.variant))
        chosen = attention_curve(self._curves, op, self._variant_prior(op) is not None)
        return chosen is not None and chosen.curve.conditions.whole_backward

    def _measured_base(self, op: Operator) -> Basis:
        """The time of sparse attention (eq. A8) or of a scan (eq. C24) by its own kernels, else a prior's.

        Sparse attention takes its roofline over the measured share of it; a scan takes its FLOPs at a rate by
        the heads that run side by side, or its bytes. Rates of another kernel family or of dense attention
        never stand in.
        """
        sparse = op.cls in SPARSE_CLASSES
        curve = self._curves.get((op.cls if sparse and not op.variant else f"{op.cls}/{op.variant}", None))
        if curve is None:
            return self._prior_base(op, "attention")
        assert op.gemm is not None
        reading = curve.curve.at(op.gemm.n if sparse else op.gemm.groups)
        memory_s = operator_bytes(op) / self._hbm_bytes_per_s
        if sparse:
            compute_s = op.flop / self.accelerator.peak_flop_per_s(op.dtype) / reading.value
            memory_s = memory_s / reading.value
        else:
            compute_s = op.flop / reading.value
        return Basis(
            max(compute_s, memory_s),
            "compute" if compute_s >= memory_s else "memory",
            "attention",
            curve.conditions,
            curve.residual.relative,
            curve.id,
            0.0,
            extrapolated=reading.note,
        )

    # --- memory-bound ---

    def _memory_base(self, op: Operator, overlapped: bool) -> Basis:
        measured = self._by_choices.get(f"{op.cls}/{op.variant}")
        if measured:
            return self._by_choices_base(op, measured)
        curve = self._find_curve(op.cls, op.variant, overlapped)
        if curve is None:
            return self._prior_base(op, "memory_bound")
        reading = self._transfers[curve.id].read(operator_bytes(op))
        return Basis(
            reading.seconds,
            "memory",
            "memory_bound",
            curve.conditions,
            curve.residual.relative,
            curve.id,
            0.0,
            extrapolated=reading.extrapolated,
        )

    def _by_choices_base(self, op: Operator, measured: dict[float, MeasuredCurve]) -> Basis:
        """Eq. C43: between two measured numbers of choices the rate is linear in their logarithm."""
        known = sorted(measured)
        wanted = min(max(op.choices or known[-1], known[0]), known[-1])
        above = next(k for k in known if k >= wanted)
        below = max((k for k in known if k <= wanted), default=above)
        size = operator_bytes(op)
        readings = [self._transfers[measured[k].id].read(size) for k in (below, above)]
        share = 0.0 if above == below else math.log(wanted / below) / math.log(above / below)
        rate = sum(size / r.seconds * w for r, w in zip(readings, (1.0 - share, share), strict=True))
        nearest = measured[above if share >= 0.5 else below]
        between = f"{nearest.id}: {op.choices:g} choices of a token, between {below:g} and {above:g}"
        outside = f"{nearest.id}: measured for {wanted:g} choices of a token, not {op.choices:g}"
        return Basis(
            size / rate,
            "memory",
            "memory_bound",
            nearest.conditions,
            nearest.residual.relative,
            nearest.id,
            0.0,
            interpolated=between if 0.0 < share < 1.0 else "",
            extrapolated=readings[0].extrapolated or (outside if op.choices > wanted else ""),
            also_reads=tuple(measured[k].id for k in (below, above) if measured[k] is not nearest),
        )

    def _find_curve(self, cls: str, variant: str, overlapped: bool | None) -> MeasuredCurve | None:
        for use in (f"{cls}/{variant}", cls):
            for when in (overlapped, None):
                curve = self._curves.get((use, when))
                if curve is not None:
                    return curve
        return None

    # --- assumptions ---

    def _variant_prior(self, op: Operator, of: str = "tensor_peak") -> Prior | None:
        """The prior of a variant's own kernels, whatever the heads of a core attention."""
        base = "_".join(part for part in op.variant.split("_") if not part.isdigit())
        return self._prior_for(f"{op.cls}/{base}", op, of) if base else None

    def _prior(self, op: Operator, *of: str) -> Prior | None:
        if op.cls in ATTENTION_CLASSES:
            own = self._variant_prior(op)
            if own is not None:
                return own
        if op.variant:
            own = self._prior_for(f"{op.cls}/{op.variant}", op, *of)
            if own is not None:
                return own
        return self._prior_for(op.cls, op, *of)

    def _prior_for(self, use: str, op: Operator, *of: str) -> Prior | None:
        for prior in self.profile.priors:
            if use in prior.used_for and prior.dtype in (None, op.dtype) and prior.of in of:
                if prior.of == "gemm_achievable" and op.dtype not in self.accelerator.gemm_achievable:
                    continue
                return prior
        return None

    def _prior_base(self, op: Operator, group: LawGroup) -> Basis:
        """Eq. H2: time at a fraction of the best measured GEMM, the tensor peak or the memory bandwidth."""
        prior = self._prior(op, "gemm_achievable", "tensor_peak", "memory_bandwidth")
        if prior is None:
            raise InputError(
                f"calibration profile {self.profile.name!r} has neither a measurement nor a prior for "
                f"{op.cls} in {op.dtype} (operator {op.name!r}); include generic-priors or add a curve"
            )
        of = prior.of.replace("_", " ")
        if prior.of != "memory_bandwidth":
            peak = self.accelerator.peak_flop_per_s(op.dtype)
            if prior.of == "gemm_achievable":
                peak = self.accelerator.gemm_achievable_flop_per_s(op.dtype)
            compute_s = op.flop / (peak * prior.fraction)
            memory_s = operator_bytes(op) / self._hbm_bytes_per_s
            best = max(op.flop / (peak * prior.high), memory_s)
        else:
            compute_s = 0.0
            memory_s = operator_bytes(op) / (self._hbm_bytes_per_s * prior.fraction)
            best = operator_bytes(op) / (self._hbm_bytes_per_s * prior.high)
        return Basis(
            max(compute_s, memory_s),
            "compute" if compute_s > memory_s else "memory",
            group,
            prior.conditions,
            prior.fraction / prior.low - 1.0,
            prior.id,
            best,
            assumed=f"{prior.id}: {op.cls} {op.dtype} at {prior.fraction:.0%} of {of}",
        )


def _one_group(shape: GemmShape, cls: str) -> GemmShape:
    """The dense GEMM of one group of a grouped GEMM."""
    if cls == "wgrad_gemm":
        return GemmShape(shape.m, shape.n, shape.k / shape.groups)
    return GemmShape(shape.m / shape.groups, shape.n, shape.k)


def operator_bytes(op: Operator) -> float:
    """Bytes that an operator reads and writes."""
    return op.bytes_read + op.bytes_written
