"""Prices one operator on one GPU from measured rates, the SM partition and interference (pure functions).

The equations are C4 to C8 of docs/model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, Law
from moesim.hwmodels.calibration_entry import LawGroup
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import format_quantity
from moesim.simulator.cost.evidence import EntryReading, Evidence
from moesim.simulator.cost.rate_tables import Basis, Bound, RateTables, operator_bytes
from moesim.simulator.model.operator import Operator

# -- laws --------------------------------------------------------------------------------------------
# Reads the slow-down of compute beside communication SMs from a profile's laws (eq. C8).

ASSUMED_RESIDUAL = 0.2
"""Relative error of the free-SM ratio where a profile has no law for a group."""


class SlowDown(NamedTuple):
    """Time over time alone on all SMs, with its evidence."""

    factor: float = 1.0
    residual: float = 0.0
    id: str = ""
    extrapolated: str = ""
    assumed: str = ""


NO_SLOW_DOWN = SlowDown()


class SmLaws:
    """The laws of one profile on one accelerator."""

    def __init__(self, accelerator: Accelerator, profile: CalibrationProfile) -> None:
        """Index the laws by group; the first one of a group wins."""
        self._accelerator, self._profile = accelerator, profile.name
        self._laws: dict[LawGroup, Law] = {}
        for law in profile.laws:
            self._laws.setdefault(law.group, law)
        self._known: dict[tuple[LawGroup, int, bool], SlowDown] = {}

    def at(self, group: LawGroup, sms: int, overlapped: bool) -> SlowDown:
        """S(n) of a group while `sms` communication SMs are busy (`overlapped`) or reserved but idle.

        Idle SMs slow only SM-aware GEMMs, which leave them free, by the free-SM ratio. Raises InputError when
        no SM is left.
        """
        known = self._known.get((group, sms, overlapped))
        if known is None:
            known = self._known[group, sms, overlapped] = self._at(group, sms, overlapped)
        return known

    def _at(self, group: LawGroup, sms: int, overlapped: bool) -> SlowDown:
        law = self._laws.get(group)
        if sms == 0:  # no SM is shared, which also holds on an accelerator whose compute units are not known
            return SlowDown(1.0, 0.0, law.id if law else "")
        total = self._accelerator.n_sms
        if not 0 < sms < total:
            raise InputError(
                f"communication.sms={sms} is not between 0 and {total - 1}: "
                f"{self._accelerator.name} has {total} SMs and compute needs at least one"
            )
        free = total / (total - sms)
        if not overlapped:
            return SlowDown(free if group == "gemm_sm_aware" else 1.0, 0.0, law.id if law else "")
        if law is None:
            note = (
                f"no slow-down law for {group} in profile {self._profile}: free-SM ratio {free:.2f} assumed"
            )
            return SlowDown(free, ASSUMED_RESIDUAL, "", "", note)
        if law.form == "free_sms":
            return SlowDown(free, law.residual.relative, law.id)
        reading = law.curve.at(sms)
        # Beyond the measured counts the end value is held constant, but never below the free-SM ratio.
        least = free if group == "gemm_sm_aware" and reading.extrapolated else 1.0
        return SlowDown(max(reading.value, least), law.residual.relative, law.id, reading.note)


_MAX_CACHED = 100_000
_MOST_TUPLES = 20_000

ANY = "any entry"
_NUMBERS = ("launch_gap", "kernel_floor")
"""Numbers of a profile that every operator's price depends on."""

PEAK_TOLERANCE = 1e-6
"""Relative tolerance above the peak for rounding errors of a rate."""


class SmContext(Struct, frozen=True):
    """SMs reserved for communication kernels while an operator runs, which are busy if `overlapped`."""

    sms: int = 0
    overlapped: bool = False
    gemms_leave_sms: bool | None = None
    """Whether GEMMs leave these SMs free; None: as the table of their rates says."""

    def group(self, measured: LawGroup) -> LawGroup:
        """The law group of an operator here, given the one of its evidence."""
        if self.gemms_leave_sms is None or measured not in ("gemm_sm_aware", "gemm_sm_unaware"):
            return measured
        return "gemm_sm_aware" if self.gemms_leave_sms else "gemm_sm_unaware"


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Seconds of an operator, and the evidence for them.

    `best_seconds` <= `seconds` <= `worst_seconds`: the best is alone on all SMs at the better end of the
    residual (never below the datasheet roofline), the worst beside communication at the worse end.
    """

    seconds: float
    bound: Bound
    curve_ids: tuple[str, ...]
    extrapolations: tuple[str, ...]
    """Notes on shapes or sizes outside the measured range."""
    residual: float
    best_seconds: float
    worst_seconds: float
    interpolations: tuple[str, ...] = ()
    """Notes on shapes priced from neighbouring measured shapes."""
    assumptions: tuple[str, ...] = ()
    """Notes on priors and substitutions for classes that were not measured."""
    depends_on: frozenset[str] = frozenset()
    """Entries and numbers of the profile that change the price when they change; `ANY` means all of them."""

    _evidence: Evidence | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def evidence(self) -> Evidence:
        """The same as a price carries it; the error is that of the entry which gives the time."""
        if self._evidence is None:
            reading = EntryReading(self.curve_ids[0], self.seconds, self.seconds * self.residual)
            notes = (*self.extrapolations, *self.assumptions)
            evidence = Evidence(frozenset(self.curve_ids), frozenset(notes), (reading,))
            object.__setattr__(self, "_evidence", evidence)
            return evidence
        return self._evidence


def operator_seconds(
    op: Operator, accelerator: Accelerator, profile: CalibrationProfile, context: SmContext
) -> OperatorCost:
    """Time of an operator, including its launch gaps.

    Eq. C7: t = t_ref x S(n, overlapped) / S(n_ref, overlapped_ref) + launches x gap, with S the slow-down law
    of the operator's class (S = 1 alone on all SMs) and t_ref from eq. C4 to C6. Raises InputError when
    the profile has neither a measurement nor a prior for the class, when the accelerator lacks a needed
    figure, and when communication takes all SMs.
    """
    return _seconds_on(_index(accelerator, profile), op, context)


def operators_seconds(
    operators: tuple[Operator, ...], accelerator: Accelerator, profile: CalibrationProfile, context: SmContext
) -> tuple[OperatorCost, ...]:
    """Times of several operators, each as `operator_seconds` gives it; raises its errors.

    The same operators in the same context give the same tuple as long as it is kept.
    """
    index = _index(accelerator, profile)
    key = (id(operators), context)
    known = index.together.get(key)
    if known is None:
        if len(index.together) >= _MOST_TUPLES:
            index.together.clear()
        known = index.together[key] = operators, _seconds_of_each(index, operators, context)
    return known[1]


def _seconds_of_each(
    index: _Index, operators: tuple[Operator, ...], context: SmContext
) -> tuple[OperatorCost, ...]:
    """Prices in order; where entries of the profile were shifted, only those that depend on them are new."""
    if index.shifted_from is None:
        return tuple([_seconds_on(index, op, context) for op in operators])
    profile, entries = index.shifted_from
    before = operators_seconds(operators, index.accelerator, profile, context)
    if len(entries) > 1:
        index.before = index.before or _index(index.accelerator, profile)
        each = zip(operators, before, strict=True)
        return tuple([index.drawn.get(id(cost)) or index.redrawn(op, context, cost) for op, cost in each])
    return tuple(
        [
            cost if unaffected(cost.depends_on, entries) else _seconds_on(index, op, context)
            for op, cost in zip(operators, before, strict=True)
        ]
    )


def _seconds_on(index: _Index, op: Operator, context: SmContext) -> OperatorCost:
    key = (op, context)
    cost = index.cache.get(key)
    if cost is None:
        if len(index.cache) >= _MAX_CACHED:
            index.cache.clear()
        cost = index.cache[key] = index.price(op, context)
    return cost


def without_timed_parts(
    operators: tuple[Operator, ...], accelerator: Accelerator, profile: CalibrationProfile
) -> tuple[Operator, ...]:
    """Operators without the kernels around attention's backward whose time its measured rate holds."""
    tables = _index(accelerator, profile).tables
    if not any(op.cls == "attention_backward" and tables.whole_backward(op) for op in operators):
        return operators
    return tuple(op for op in operators if op.cls != "attention_pre_post")


def unaffected(depends_on: frozenset[str], shifted: frozenset[str]) -> bool:
    """Whether a price stays the same when the entries `shifted` of its profile change."""
    return not shifted or (ANY not in depends_on and shifted.isdisjoint(depends_on))


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
    slowed = []
    for op, cost in zip(operators, costs, strict=True):
        seconds = operator_bytes(op) / rate
        if op.cls == "permute" and seconds > cost.seconds:
            cost = replace(
                cost,
                seconds=seconds,
                residual=residual,
                worst_seconds=max(cost.worst_seconds, seconds * (1.0 + residual)),
                curve_ids=(curve.id, *cost.curve_ids),
                depends_on=cost.depends_on | {curve.id},
            )
        slowed.append(cost)
    return tuple(slowed)


class _Index:
    """Look-up tables and cached prices of one accelerator with one profile."""

    def __init__(self, accelerator: Accelerator, profile: CalibrationProfile) -> None:
        self.accelerator, self.profile = accelerator, profile
        self.shifted_from = profile._shifted_from
        self.cache: dict[tuple[Operator, SmContext], OperatorCost] = {}
        self.together: dict[tuple[int, SmContext], tuple[tuple[Operator, ...], tuple[OperatorCost, ...]]] = {}
        """Prices of several operators by their identity, which the entry keeps."""
        self.tables = RateTables(accelerator, profile)
        self._bases: dict[tuple[Operator, bool], Basis] = {}
        self.before: _Index | None = None
        """Index of the profile before several of its entries were shifted."""
        self.drawn: dict[int, OperatorCost] = {}
        """Prices by the identity of those before, which operators with one price share."""
        self._timed: dict[int, tuple[float, Bound]] = {}
        """(seconds, bound) by the identity of the basis before."""
        self._kept: list[object] = []
        """Prices and bases before, whose identities so stay theirs."""
        self.laws = SmLaws(accelerator, profile)
        self._gap_s = profile.launch_gap.value if profile.launch_gap else 0.0
        self._floor_s = profile.kernel_floor.value if profile.kernel_floor else 0.0
        self._assumed: list[str] = []
        for name in _NUMBERS:
            if getattr(profile, name) is None:
                self._assumed.append(f"profile {profile.name} states no {name}: taken as 0 s")
        if accelerator.name not in (profile.accelerator, *profile.also_for) and profile.accelerator != "any":
            self._assumed.append(
                f"profile {profile.name} describes {profile.accelerator}; "
                f"its rates are applied unchanged to {accelerator.name}"
            )

    def price(self, op: Operator, context: SmContext) -> OperatorCost:
        """Price of an operator by eq. C7, with its bounds."""
        basis = self._basis(op, context.overlapped)
        now, loaded, reference = self._slow_downs(basis, context)
        gaps_s = op.launches * self._gap_s
        floor_s = op.launches * self._floor_s
        seconds = max(basis.seconds * now.factor / reference.factor, floor_s)
        seconds = self._below_peak(op, seconds, basis.curve_id)
        best = basis.best_seconds or basis.seconds / reference.factor * (1.0 - basis.residual)
        best = min(seconds, max(best, self._roofline_seconds(op)))
        law_residual = loaded.residual if loaded.factor != reference.factor else 0.0
        worst = basis.seconds * max(loaded.factor, now.factor) / reference.factor
        worst = max(seconds, worst * (1.0 + basis.residual) * (1.0 + law_residual))
        launch_bound = seconds == floor_s
        laws = (now, reference) if now.factor != reference.factor else ()
        depends_on = {
            basis.curve_id,
            basis.corrected_by,
            *basis.also_reads,
            now.id,
            loaded.id,
            reference.id,
            *_NUMBERS,
        }
        if seconds <= self._roofline_seconds(op):  # shifted profiles are not held to the peak's tolerance
            depends_on.add(ANY)
        return OperatorCost(
            seconds=seconds + gaps_s,
            bound="launch" if launch_bound else basis.bound,
            curve_ids=tuple(
                id_
                for id_ in dict.fromkeys([basis.curve_id, basis.corrected_by, *(law.id for law in laws)])
                if id_
            ),
            extrapolations=tuple(
                note for note in (basis.extrapolated, now.extrapolated) if note and not launch_bound
            ),
            residual=basis.residual,
            best_seconds=best,
            worst_seconds=worst + gaps_s,
            interpolations=(basis.interpolated,) if basis.interpolated else (),
            assumptions=tuple(note for note in (basis.assumed, now.assumed, *self._assumed) if note),
            depends_on=frozenset(depends_on),
        )

    def redrawn(self, op: Operator, context: SmContext, before: OperatorCost) -> OperatorCost:
        """Price of an operator by eq. C7, where entries were shifted since the price `before`.

        Only its seconds and what bounds them are new: a draw needs neither evidence nor a range.
        """
        assert self.before is not None and self.shifted_from is not None
        if unaffected(before.depends_on, self.shifted_from[1]):
            return before
        basis = self.before._basis(op, context.overlapped)
        self._kept += before, basis
        timed = self._timed.get(id(basis))
        if timed is None:
            timed = self._timed[id(basis)] = self.tables.timed(op, basis, context.overlapped)
        now, _, reference = self._slow_downs(basis, context)
        floor_s = op.launches * self._floor_s
        seconds = max(timed[0] * now.factor / reference.factor, floor_s)
        seconds = self._below_peak(op, seconds, basis.curve_id)
        cost = self.drawn[id(before)] = OperatorCost(
            seconds + op.launches * self._gap_s,
            "launch" if seconds == floor_s else timed[1],
            before.curve_ids,
            (),
            before.residual,
            before.best_seconds,
            before.worst_seconds,
        )
        return cost

    def _basis(self, op: Operator, overlapped: bool) -> Basis:
        """Cached time under the conditions of the evidence, which the number of SMs does not change."""
        key = (op, overlapped)
        basis = self._bases.get(key)
        if basis is None:
            if len(self._bases) >= _MAX_CACHED:
                self._bases.clear()
            basis = self._bases[key] = self.tables.basis(op, overlapped)
        return basis

    def _slow_downs(self, basis: Basis, context: SmContext) -> tuple[SlowDown, SlowDown, SlowDown]:
        """Slow-downs in this context, with busy communication SMs, and as the evidence was measured."""
        where = basis.conditions
        group = context.group(basis.group)
        loaded = self.laws.at(group, context.sms, True)
        reference = self.laws.at(basis.group, where.communication_sms, where.beside_communication)
        now = self.laws.at(group, context.sms, context.overlapped)
        # Rates measured beside communication are not raised where less or no communication runs.
        if basis.group in self.profile.in_situ_groups and now.factor < reference.factor:
            now = reference
        return now, loaded, reference

    def _below_peak(self, op: Operator, seconds: float, entry: str) -> float:
        """Seconds at a rate of at most the datasheet peak; a measured rate above it is an InputError.

        The high end of a measurement's error may lie above the peak; the peak is then the limit.
        """
        least = self._roofline_seconds(op)
        if seconds < least and self.shifted_from is not None:
            return least
        if seconds < least * (1.0 - PEAK_TOLERANCE):
            rate, peak = (
                format_quantity(value, "flop_per_s")
                for value in (op.flop / seconds, self.accelerator.peak_flop_per_s(op.dtype))
            )
            raise InputError(
                f"profile {self.profile.name}: {entry} gives {op.name} {rate} on {self.accelerator.name}, "
                f"whose {op.dtype} peak is {peak}; correct the entry, or the accelerator's peak"
            )
        return seconds

    def _roofline_seconds(self, op: Operator) -> float:
        return op.flop / self.accelerator.peak_flop_per_s(op.dtype) if op.flop else 0.0


_Indexes: TypeAlias = dict[tuple[int, int], tuple["_Index", Accelerator]]
_indexes: tuple[_Indexes, _Indexes] = ({}, {})
"""Those of profiles with at most one shifted entry, and those of profiles that are drawn and priced once."""
_MOST_INDEXES = (512, 4)


def _index(accelerator: Accelerator, profile: CalibrationProfile) -> _Index:
    """Index of a pair of objects, shared by equal accelerators.

    The entry refers to both objects, so that an id in the key cannot be reused.
    """
    key = (id(accelerator), id(profile))
    entry = _indexes[0].get(key) or _indexes[1].get(key)
    if entry is None:
        drawn = profile._shifted_from is not None and len(profile._shifted_from[1]) > 1
        known, most = _indexes[drawn], _MOST_INDEXES[drawn]
        if len(known) >= most:  # shifted profiles are priced from the others
            for old in [k for k, e in known.items() if e[0].shifted_from] or list(known):
                del known[old]
        equal = (i for i, _ in known.values() if i.profile is profile and i.accelerator == accelerator)
        entry = known[key] = next(equal, None) or _Index(accelerator, profile), accelerator
    return entry[0]
