"""What a price carries: its evidence, and the bytes that it moves over the links of a GPU (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, get_args

from msgspec import Struct

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.errors import MoesimError
from moesim.hwmodels.provenance import Kind
from moesim.simulator.cost.rate_tables import RateTables
from moesim.simulator.model.operator import GEMM_CLASSES, Operator
from moesim.simulator.model.operators import block_operators
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.model.shape import ModelShape

# -- bytes on links ----------------------------------------------------------------------------------

EXPERTS = "dispatch and combine"
REPEATED_EXPERTS = "dispatch and combine again for recompute"
SENDS = "pipeline sends"
TENSOR = "tensor parallelism"
CONTEXT = "context parallelism"
SPLIT_EXPERTS = "rows of split experts"
SHARDS = "parameter and gradient shards inside the step"
REDUCTION = "gradient reduction"
GATHER = "parameter gather"
TIED = "gradient of a tied table"
NORM = "gradient norm"


class Moved(NamedTuple):
    """Bytes that an average GPU sends, and as many that it receives, over its NICs and scale-up ports.

    They cross the links whether compute hides them or not. `what`: one of the names above.
    """

    what: str
    nic_bytes: float
    scale_up_bytes: float


def summed(rows: Iterable[tuple[Moved, float]]) -> tuple[Moved, ...]:
    """(moved, times) rows added by what moves them, in the order of their first row; empty ones left out."""
    totals: dict[str, tuple[float, float]] = {}
    for (what, nic, scale_up), times in rows:
        known = totals.get(what, (0.0, 0.0))
        totals[what] = known[0] + times * nic, known[1] + times * scale_up
    return tuple(Moved(what, *both) for what, both in totals.items() if any(both))


# -- evidence ----------------------------------------------------------------------------------------


class EntryReading(NamedTuple):
    """Seconds of compute that one calibration entry priced, and their sum weighted by relative error."""

    entry: str
    seconds: float
    error_s: float


class Evidence(Struct, frozen=True):
    """Calibration entries behind a price, notes on assumptions and extrapolations, and readings of compute.

    Each entry has at most one reading. `combined` adds the evidence of several prices.
    """

    entries: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()
    """Assumptions, and readings outside the measured range."""
    readings: tuple[EntryReading, ...] = ()
    reads: frozenset[tuple[str, float]] = frozenset()
    """(entry, x in SI units) at which curves of transfers were read."""

    @classmethod
    def of(
        cls, entries: Iterable[str], notes: Iterable[str] = (), reads: Iterable[tuple[str, float]] = ()
    ) -> Evidence:
        """Evidence without readings of compute; empty texts are left out."""
        return cls(
            frozenset(e for e in entries if e), frozenset(n for n in notes if n), reads=frozenset(reads)
        )

    def __or__(self, other: Evidence) -> Evidence:
        """The evidence of the sum of two prices."""
        if other is NO_EVIDENCE:
            return self
        if self is NO_EVIDENCE:
            return other
        return combined(((self, 1.0), (other, 1.0)))

    def mean_errors(self) -> dict[str, float]:
        """Relative error of every entry that priced compute, the mean of its readings weighted by seconds."""
        return {r.entry: r.error_s / r.seconds for r in self.readings if r.seconds > 0.0}


NO_EVIDENCE = Evidence()


def combined(parts: Iterable[tuple[Evidence, float]]) -> Evidence:
    """The evidence of a sum of (evidence, times) prices; a share of a price is a fraction of one time.

    The times weight the readings; all entries and notes are included, however rarely a price was used.
    """
    entries: set[str] = set()
    notes: set[str] = set()
    reads: set[tuple[str, float]] = set()
    sums: dict[str, tuple[float, float]] = {}
    for part, times in parts:
        entries |= part.entries
        if part.notes:
            notes |= part.notes
        if part.reads:
            reads |= part.reads
        for entry, seconds, error_s in part.readings:
            known = sums.get(entry)
            if known is None:
                sums[entry] = times * seconds, times * error_s
            else:
                sums[entry] = known[0] + times * seconds, known[1] + times * error_s
    readings = tuple([EntryReading(entry, *both) for entry, both in sums.items()])
    return Evidence(frozenset(entries), frozenset(notes), readings, frozenset(reads))


class CostedSeconds(Struct, frozen=True):
    """A duration and its evidence, with the bytes that a GPU sends meanwhile over NICs and scale-up ports.

    Where compute hides a part of the duration, all bytes are still sent.
    """

    seconds: float = 0.0
    evidence: Evidence = NO_EVIDENCE
    nic_bytes: float = 0.0
    scale_up_bytes: float = 0.0

    def __add__(self, then: CostedSeconds) -> CostedSeconds:
        """Both, one after the other."""
        return CostedSeconds(
            self.seconds + then.seconds,
            self.evidence | then.evidence,
            self.nic_bytes + then.nic_bytes,
            self.scale_up_bytes + then.scale_up_bytes,
        )

    def __mul__(self, times: float) -> CostedSeconds:
        """The same several times, or a part of it."""
        return CostedSeconds(
            times * self.seconds, self.evidence, times * self.nic_bytes, times * self.scale_up_bytes
        )

    def moved(self, what: str) -> Moved:
        """Its bytes under a name."""
        return Moved(what, self.nic_bytes, self.scale_up_bytes)


# -- model evidence ----------------------------------------------------------------------------------
# Says what prices the parts of a model in a profile: measured rates, derived ones or assumptions (pure).

NOT_PRICED = "not priced"
"""Evidence of a part for which the profile has neither a rate nor a prior."""

TOKENS = 4096
"""Tokens of the sequence whose operators are priced."""

_ORDER = (*get_args(Kind), NOT_PRICED)


class PartEvidence(Struct, frozen=True):
    """What prices one part of a model."""

    part: str
    """A kind of attention without its projections, `projections`, `experts`, `dense` or `router`."""
    evidence: str
    """Kind of the evidence behind most of the part's time (docs/profiles.md), or `NOT_PRICED`."""
    share: float
    """Share of the part's time that has this evidence, 0 to 1."""
    entries: tuple[str, ...]
    """Entries of the profile behind it, most time first; a message where the part is not priced."""


def model_evidence(
    shape: ModelShape, accelerator: Accelerator, profile: CalibrationProfile
) -> tuple[PartEvidence, ...]:
    """What prices every kind of attention of a shape, its GEMMs and its experts, alone on one GPU in BF16."""
    tables, kinds = RateTables(accelerator, profile), {entry.id: entry.kind for entry in profile.entries()}
    precision = PRECISIONS["bf16"]
    seconds: dict[str, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    refused: dict[str, str] = {}
    for block in shape.layer_counts:
        layer = shape.block(block).layer
        assert layer is not None
        for part, op in _operators_by_part(shape, block, precision, layer.attention.kind):
            try:
                basis = tables.basis(op, False)
            except MoesimError as error:
                refused.setdefault(part, str(error))
                continue
            evidence = "assumed" if basis.assumed else kinds[basis.curve_id]
            seconds[part][evidence, basis.curve_id] += basis.seconds
    parts = []
    for part in dict.fromkeys([*seconds, *refused]):
        if part in refused:
            parts.append(PartEvidence(part, NOT_PRICED, 0.0, (refused[part],)))
            continue
        kinds_s: dict[str, float] = defaultdict(float)
        entries_s: dict[str, float] = defaultdict(float)
        for (kind, entry), time in seconds[part].items():
            kinds_s[kind] += time
            entries_s[entry] += time
        total, most = sum(seconds[part].values()), max(kinds_s, key=kinds_s.__getitem__)
        by_time = tuple(sorted(entries_s, key=entries_s.__getitem__, reverse=True))
        parts.append(PartEvidence(part, most, kinds_s[most] / total if total else 1.0, by_time))
    return tuple(parts)


def evidence_text(parts: Iterable[PartEvidence]) -> str:
    """One line, such as "measured: gqa, experts; assumed: mamba2"."""
    by_evidence: dict[str, list[str]] = defaultdict(list)
    for part in parts:
        by_evidence[part.evidence].append(part.part)
    return "; ".join(f"{name}: {', '.join(by_evidence[name])}" for name in _ORDER if by_evidence[name])


def _operators_by_part(
    shape: ModelShape, block: str, precision: Precision, attention: str
) -> Iterable[tuple[str, Operator]]:
    rows = float(TOKENS * shape.moe.top_k) if shape.moe else 0.0
    phases = block_operators(
        shape, block, precision, tokens=TOKENS, sequence=TOKENS, received_rows=rows, recompute="none"
    )
    for phase, operators in phases.items():
        for op in operators:
            if op.cls == "grouped_gemm" or (op.cls == "wgrad_gemm" and op.per_received_row):
                yield "experts", op
            elif op.cls == "gate_gemm" or op.name.startswith("gate."):
                yield "router", op
            elif op.cls in GEMM_CLASSES:
                yield "projections", op
            elif phase.startswith("attn") and op.cls not in ("norm", "elementwise", "embedding"):
                yield attention, op
