"""Derives a profile for a sibling accelerator: each measured entry carries over, scales or is left out.

Nothing here is fitted. Factors are ratios of the two accelerators' published figures, and every entry
states the assumption and by how much its error grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, Entry, GemmTable, Law, MeasuredCurve, Prior
from moesim.hwmodels.errors import InputError
from moesim.kernels.export import residual

Verdict = Literal["carries over", "scales", "cannot"]

SAME_DIE_ERROR = 0.05
"""Error added on the same die, because two boards under one power limit sustain different clocks."""
LINK_ERROR = 0.08
"""Error added to a share of the nominal link rate on a link of another width, whose switch may differ."""
MEMORY_ERROR = 0.10
"""Error added to a share of the nominal memory bandwidth on another memory generation."""
INTERFERENCE_ERROR = 0.10
"""Error added to slow-downs under communication that loads another memory and another link."""
CLOCK_TOLERANCE = 0.02


class Statement(Struct, frozen=True):
    """The transfer of one entry: `factor` multiplies its values, `error` adds to its stated error."""

    id: str
    verdict: Verdict
    factor: float
    error: float
    reason: str


def transfer(
    profile: CalibrationProfile, source: Accelerator, target: Accelerator, *, name: str | None = None
) -> CalibrationProfile:
    """A profile for `target` from one measured on `source`, its entries marked as derived.

    Raises InputError where the two do not share the SMs (number, peak and clock), where the profile is not
    of `source`, or where nothing is left to transfer.
    """
    judged = statements(profile, source, target)
    verdicts = {s.id: s for s in judged}
    kept = [_applied(entry, verdicts[entry.id], source, target) for entry in profile.entries()
            if verdicts[entry.id].verdict != "cannot"]  # fmt: skip
    if not kept:
        raise InputError(f"profile {profile.name!r} has no entry that carries over to {target.name}")
    dropped = ", ".join(s.id for s in judged if s.verdict == "cannot") or "none"
    fields: dict[str, Any] = {key: getattr(profile, key) for key in type(profile).model_fields}
    fields |= {
        "name": name or f"{target.name.split('-')[0]}-from-{source.name.split('-')[0]}",
        "accelerator": target.name,
        "also_for": (),
        "include": (),
        "description": f"{profile.description} Transferred from {source.title} to {target.title}.",
        "evidence": (
            f"Derived by rule from the profile {profile.name}: the compute die is the same, so rates per SM "
            f"and products carry over; link and memory rates keep their share of the nominal figure; each "
            f"entry's note says which. Left out because the source cannot show it: {dropped}. "
            f"{profile.evidence}"
        ),
        "gemm_tables": tuple(e for e in kept if isinstance(e, GemmTable)),
        "curves": tuple(e for e in kept if isinstance(e, MeasuredCurve)),
        "laws": tuple(e for e in kept if isinstance(e, Law)),
        "priors": tuple(e for e in kept if isinstance(e, Prior)),
    }
    return CalibrationProfile.model_validate(fields)


def statements(profile: CalibrationProfile, source: Accelerator, target: Accelerator) -> list[Statement]:
    """The transfer statement of every entry, in the profile's order; raises InputError as `transfer` does."""
    _same_die(source, target)
    if profile.accelerator not in (source.name, "any") and source.name not in profile.also_for:
        raise InputError(
            f"profile {profile.name!r} describes {profile.accelerator}, not {source.name}; "
            f"transfer from {profile.accelerator}, or give the profile that was measured on {source.name}"
        )
    return [_judge(entry, source, target) for entry in profile.entries()]


def _same_die(source: Accelerator, target: Accelerator) -> None:
    def differs(a: float, b: float) -> bool:
        return abs(a / b - 1.0) > CLOCK_TOLERANCE

    reasons = []
    if source.n_sms != target.n_sms:
        reasons.append(f"{source.n_sms} and {target.n_sms} SMs")
    if source.architecture != target.architecture:
        reasons.append(f"{source.architecture} and {target.architecture}")
    if differs(source.clock_hz, target.clock_hz):
        reasons.append(f"{source.clock_hz / 1e6:g} and {target.clock_hz / 1e6:g} MHz")
    if differs(source.peak_flop_per_s("bf16"), target.peak_flop_per_s("bf16")):
        reasons.append("different BF16 peaks")
    if reasons:
        raise InputError(
            f"{source.name} and {target.name} do not share their SMs ({'; '.join(reasons)}), so nothing "
            "measured on one stands for the other; measure the target, or use a generic profile"
        )


def _judge(entry: Entry, source: Accelerator, target: Accelerator) -> Statement:
    link = target.scale_up_bytes_per_s / source.scale_up_bytes_per_s
    memory = target.hbm_bytes_per_s / source.hbm_bytes_per_s

    def carries(error: float, reason: str) -> Statement:
        return Statement(entry.id, "carries over", 1.0, error, reason)

    def scales(factor: float, error: float, reason: str) -> Statement:
        return Statement(entry.id, "scales", factor, error, reason)

    def cannot(reason: str) -> Statement:
        return Statement(entry.id, "cannot", 1.0, 0.0, reason)

    device, family = (entry.conditions.device or "").upper(), source.name.split("-")[0].upper()
    if entry.kind in ("published", "assumed") or (device and family not in device):
        return carries(0.0, "not measured on the source: stands as it stood")
    if isinstance(entry, GemmTable):
        return carries(SAME_DIE_ERROR, "same SMs and clock; rows that memory bounds slow down with it")
    if isinstance(entry, Prior):
        return carries(0.0, "a share of the accelerator's own figure")
    if isinstance(entry, Law):
        return carries(INTERFERENCE_ERROR, "same SMs; the link and memory beside them differ")
    assert isinstance(entry, MeasuredCurve)
    if "nic_fraction" in entry.id:
        return cannot("a share of the source's own NICs; measure the target's network")
    if entry.y_unit == "1":
        share = f"a share of the nominal link, whose rate is {link:.3g} of the source's"
        return carries(LINK_ERROR, share)
    if any(use.startswith("attention_") and "pre_post" not in use for use in entry.used_for):
        return carries(SAME_DIE_ERROR, "same SMs and clock, bound by compute")
    if entry.used_for or entry.id.startswith("copy.local"):
        bound = f"bound by memory: the nominal bandwidth is {memory:.3g} of the source's"
        return scales(memory, MEMORY_ERROR, bound)
    if entry.id.endswith(".sm_rate") and entry.id.startswith(("ep.", "quantise", "dequantise")):
        return carries(SAME_DIE_ERROR, "rate an SM reaches by itself; the link share limits it on top")
    if entry.id.startswith(("copy.", "nccl.")) and entry.y_unit.endswith("B/s"):
        bound = f"bound by the link with enough SMs: {link:.3g} of the source's rate"
        return scales(link, LINK_ERROR, bound)
    if entry.y_unit in ("us", "s", "ms"):
        return carries(LINK_ERROR, "latency of the same links and switches, fewer of them")
    return cannot("no rule says what bounds it")


def _applied(entry: Entry, statement: Statement, source: Accelerator, target: Accelerator) -> Entry:
    if statement.error == 0.0 and statement.factor == 1.0:
        return entry
    worse = min(0.95, entry.residual.relative + statement.error)
    note = f"from {source.name}, {statement.verdict}: {statement.reason}"
    update: dict[str, Any] = {
        "kind": "derived",
        "residual": residual(worse, f"{entry.residual.meaning}, plus {statement.error:.0%} for the transfer"),
        "note": f"{entry.note}; {note}" if entry.note else note,
    }
    if isinstance(entry, GemmTable):
        update["points"] = tuple(_memory_bounded(entry, source, target))
    elif isinstance(entry, MeasuredCurve) and statement.factor != 1.0:
        # Over SMs only the limit scales, because few SMs limit their own rate.
        limit = max(p[1] for p in entry.points) * statement.factor
        by_sms = entry.id.endswith(".sm_rate")
        scaled = [min(p[1], limit) if by_sms else p[1] * statement.factor for p in entry.points]
        update["points"] = tuple(
            (p[0], float(f"{y:.5g}"), *p[2:]) for p, y in zip(entry.points, scaled, strict=True)
        )
    fields = {name: getattr(entry, name) for name in type(entry).model_fields}
    return type(entry).model_validate({**fields, **update})


def _memory_bounded(table: GemmTable, source: Accelerator, target: Accelerator) -> Iterator[tuple[Any, ...]]:
    """Rows at the source's rate, or slower where the target's memory limits them.

    The bytes are both operands once in the table's format and the result in BF16. A row that memory bound
    on the source keeps the share of nominal bandwidth that it reached there (at most 1).
    """
    size = {"fp8": 1.0, "bf16": 2.0, "fp32": 4.0}[table.dtype]
    for row in table.points:
        m, n, k, groups = row[:4]
        grouped = table.cls == "wgrad_gemm"
        moved = size * (m * k + (k * n if grouped else groups * k * n)) + 2.0 * m * n
        seconds = 2.0 * m * n * k / table.flop_per_s(row)
        share = moved / seconds / source.hbm_bytes_per_s  # share of the source bandwidth
        if share > 0.5:  # memory-bound, so the time grows with the ratio of the bandwidths
            seconds *= max(1.0, source.hbm_bytes_per_s / target.hbm_bytes_per_s)
            value = 2.0 * m * n * k / seconds / 1e12 if table.unit == "TFLOP/s" else seconds * 1e6
            yield (*row[:4], float(f"{value:.5g}"), *row[5:])
        else:
            yield row
