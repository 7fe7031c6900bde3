"""Prices compute at the clock that the load of its own block leaves (eq. C33 of docs/model.md).

Rates of a profile belong to kernels back to back at the board's power limit. Where a block also waits, or
runs kernels that need less power, its mean power would be below the limit, so the clock rises until it is at
it. The power control of a GPU looks at some 50 ms, longer than a block and shorter than a pipeline's bubble:
the waits of a block count, bubbles and the end of the step do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import fsum
from typing import NamedTuple

from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.calibration_entry import LoadClass, PowerLaw, load_clock
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.cost.compute import OperatorCost
from moesim.simulator.cost.evidence import Evidence
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import PAIR_MODES, Compute, Mode, PhaseCost, PhaseKey, Transfers
from moesim.simulator.model.operator import GEMM_CLASSES, BlockKind, Operator, Phase


class Share(NamedTuple):
    """A class of kernels and the clock at which their rates were measured; 0 where it is not known."""

    of: LoadClass
    measured_at: float


class Waits(NamedTuple):
    """Seconds of a block in which nothing computes: for the host, and for collectives.

    `beside`: seconds in which collectives run beside compute.
    """

    host: float = 0.0
    collective: float = 0.0
    beside: float = 0.0


def law_of(pricer: Pricer) -> PowerLaw | None:
    """The power law that a scenario's prices follow; None where they keep the clock of the measurements."""
    return pricer.profile.power if pricer.scenario.variation.power_clock == "load" else None


def at_load(
    pricer: Pricer,
    kind: BlockKind,
    compute: Compute,
    transfer: Transfers,
    modes: Collection[Mode],
    waits: Waits,
) -> dict[PhaseKey, PhaseCost]:
    """Compute of a block at the clock of its own load, alone and in pairs; empty without a law.

    `waits`: those that `compute` and `transfer` do not hold.
    """
    law = law_of(pricer)
    if law is None:
        return {}
    out: dict[PhaseKey, PhaseCost] = {}
    loads: tuple[tuple[Mode, tuple[Mode, ...]], ...] = (("alone", ("alone",)), ("overlapped", PAIR_MODES))
    for load, chosen in loads:
        if load in modes:
            cap, full = cap_of(pricer), _clock(pricer, law, kind, compute, transfer, load, waits, 1.0)
            own = full if cap == 1.0 else _clock(pricer, law, kind, compute, transfer, load, waits, cap)
            out |= at_clock(pricer, kind, compute, chosen, own, full)
    return out


LOWEST_CAP = 0.4
"""Least cap over the board's limit that is priced: the laws were measured from 0.43 of a limit on."""


def cap_of(pricer: Pricer) -> float:
    """The cap on a board's power over its limit; 1 where none is set.

    Raises InputError for a cap that is not priced: without a law, above the limit, or too low.
    """
    chip = pricer.cluster.accelerator
    if chip.power_limit is None:
        return 1.0
    key, cap, limit = "cluster.node.accelerator.power_limit", chip.power_limit, chip.tdp_w
    if law_of(pricer) is None:
        raise InputError(
            f"{key}={cap.text}: profile {pricer.profile.name} has no law of power against clock, so that no "
            "price in time is known for a cap; profiles of A100, H100, H200 and Blackwell have one, with "
            "variation.power_clock: load. Or leave the cap out",
            key=key,
        )
    if not LOWEST_CAP * limit <= cap.value <= limit:
        near = LOWEST_CAP * limit if cap.value < limit else limit
        lowest = f"{LOWEST_CAP * limit:g} W"
        raise InputError(
            f"{key}={cap.text} is outside {lowest} to {limit:g} W, the limit of {chip.title}; "
            f"nearest: {near:g} W",
            key=key,
            nearest=(f"{near:g} W",),
        )
    return cap.value / limit


def _clock(
    pricer: Pricer,
    law: PowerLaw,
    kind: BlockKind,
    compute: Compute,
    transfer: Transfers,
    mode: Mode,
    waits: Waits,
    cap: float,
) -> float:
    """Clock of a block in one mode; in pairs, transfers wait as far as compute is shorter."""
    seconds, alone_s, hidden = block_load(pricer, law, kind, compute, transfer, mode)
    alone_s += waits.collective
    return load_clock(
        law, seconds, wait=waits.host, collective=alone_s, beside=waits.beside + hidden, cap=cap
    )


def block_load(
    pricer: Pricer, law: PowerLaw, kind: BlockKind, compute: Compute, transfer: Transfers, mode: Mode
) -> tuple[Callable[[float], dict[LoadClass, float]], float, float]:
    """Seconds of a block by class at a clock, and those of collectives alone and beside compute."""
    own = {key: cost for key, cost in compute.items() if key[0] == kind and key[2] == mode}
    totals: dict[Share, float] = {}
    for _, phase, _ in own:
        for share, (fixed, row) in _shares(pricer, law, kind, phase, mode).items():
            totals[share] = totals.get(share, 0.0) + fixed + row
    moved = fsum(t.launch_s + t.payload_s for key, t in transfer.items() if key[0] == kind and key[2] == mode)
    hidden = 0.0 if mode == "alone" else min(moved, fsum(totals.values()))
    exposed = fsum(cost.exposed_s for cost in own.values())

    def seconds(clock: float) -> dict[LoadClass, float]:
        parts: dict[LoadClass, float] = {}
        for share, took in totals.items():
            parts[share.of] = parts.get(share.of, 0.0) + took * factor(law, share, clock)
        return parts

    return seconds, moved - hidden + exposed, hidden


def at_clock(
    pricer: Pricer, kind: BlockKind, compute: Compute, modes: Collection[Mode], clock: float, full: float
) -> dict[PhaseKey, PhaseCost]:
    """Compute of a block at a clock over the reference; `full`: that without a cap.

    Rates of unknown clocks are taken as those without a cap.
    """
    law = law_of(pricer)
    if law is None:
        return {}
    note = f"clock by the load of each block ({law.id}); collectives draw what they drew inside a node"
    evidence, out = Evidence.of([], [note]), {}
    for key, cost in compute.items():
        if key[0] != kind or key[2] not in modes:
            continue
        fixed = row = 0.0
        for share, parts in _shares(pricer, law, *key).items():
            known = share if share.measured_at or clock == full else share._replace(measured_at=full)
            more = factor(law, known, clock) - 1.0
            fixed, row = fixed + parts[0] * more, row + parts[1] * more
        before = cost.seconds - cost.exposed_s - cost.host_s
        ratio = 1.0 + (fixed + row) / before if before > 0.0 else 1.0
        out[key] = replace(
            cost,
            fixed_s=cost.fixed_s + fixed,
            row_s=cost.row_s + row,
            best_s=cost.best_s * min(1.0, ratio),
            worst_s=max(cost.worst_s, cost.fixed_s + fixed + cost.row_s + row),
            evidence=cost.evidence | evidence if fixed + row else cost.evidence,
        )
    return out


def factor(law: PowerLaw, share: Share, clock: float) -> float:
    """Time at a clock over the time as measured."""
    if share.measured_at == 0.0:
        return 1.0
    return float((share.measured_at / clock) ** law.classes[share.of].rate_exponent)


def _shares(
    pricer: Pricer, law: PowerLaw, kind: BlockKind, phase: Phase, mode: Mode
) -> Mapping[Share, tuple[float, float]]:
    """(fixed, by received rows) seconds of a phase by class and clock of the measurement."""
    return pricer.loads((kind, phase, mode), partial(_read_shares, pricer.profile, law))


def _read_shares(
    profile: CalibrationProfile,
    law: PowerLaw,
    operators: tuple[Operator, ...],
    costs: tuple[OperatorCost, ...],
) -> dict[Share, tuple[float, float]]:
    duties = _DUTIES.get(
        Same(profile),
        lambda: {
            entry.id: entry.conditions.duty or ""
            for entry in (*profile.gemm_tables, *profile.curves)
            if not entry.conditions.beside_communication
        },
    )
    out: dict[Share, tuple[float, float]] = {}
    for op, cost in zip(operators, costs, strict=True):
        share = Share("memory", 0.0)
        if cost.bound == "compute":
            of: LoadClass = "gemm" if op.cls in GEMM_CLASSES else "attention"
            duty = duties.get(cost.curve_ids[0], "")
            share = Share(of, law.most_clock if duty == "burst" else 0.0)
            if duty == "sustained" or (duty == "burst" and len(cost.curve_ids) > 1):
                share = Share(of, law.classes[of].alone_clock)
        fixed, row = out.get(share, (0.0, 0.0))
        if op.per_received_row:
            row += cost.seconds
        else:
            fixed += cost.seconds
        out[share] = fixed, row
    return out


# -- energy ------------------------------------------------------------------------------------------

NEAREST_LAW = {"Ampere": "a100-power", "Hopper": "h100-power", "Blackwell": "blackwell-power"}
"""Profile whose law gives the power, but no clock, of an architecture where the own profile has none."""


@lru_cache(maxsize=8)
def _shipped_law(profile: str) -> PowerLaw | None:
    return load_profile(profile).power


def power_law(pricer: Pricer) -> tuple[PowerLaw | None, bool]:
    """The law that power is read from, and whether it is the profile's own."""
    own = pricer.profile.power
    if own is not None:
        return own, True
    name = NEAREST_LAW.get(pricer.cluster.accelerator.architecture)
    return (None if name is None else _shipped_law(name)), False


class BlockPower(NamedTuple):
    """Mean power of a block's compute over the board's limit, its clock over the reference, its seconds."""

    power: float
    clock: float
    seconds: Mapping[LoadClass, float]


def block_power(
    pricer: Pricer, law: PowerLaw, kind: BlockKind, compute: Compute, transfer: Transfers, mode: Mode
) -> BlockPower | None:
    """Power of the compute of a block, whose clock leaves its mean at the limit or the cap (eq. C34).

    None for a block without compute in this mode.
    """
    seconds, alone_s, hidden = block_load(pricer, law, kind, compute, transfer, mode)
    cap = cap_of(pricer) if law_of(pricer) is not None else 1.0
    clock = load_clock(law, seconds, collective=alone_s, beside=hidden, cap=cap)
    parts = seconds(clock)
    total = fsum(parts.values())
    if not total:
        return None
    return BlockPower(fsum(law.power(of, clock) * s for of, s in parts.items()) / total, clock, parts)


_DUTIES: BoundedCache[dict[str, str]] = BoundedCache(32)
"""By profile, the duty of every rate of GEMMs and attention that was not measured beside communication."""
