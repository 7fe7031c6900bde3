"""Plans a calibration: which measurements run in which order, for how long, and which cannot run here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.kernels.calibrate import (
    all_to_all,
    attention,
    barrier,
    copy,
    gemm,
    hbm,
    interference,
    nccl,
    quantise,
    two_hop,
)
from moesim.kernels.calibrate.protocol import Facts, Measurement, TimingTask

QUICK_BUDGET_S, BUDGET_S = 115.0, 350.0
"""Seconds after which a run begins no further task; it reports the rest, which a resumed run measures."""

MEASUREMENTS: tuple[Measurement, ...] = (
    copy.MEASUREMENT,
    all_to_all.MEASUREMENT,
    two_hop.MEASUREMENT,
    interference.MEASUREMENT,
    gemm.MEASUREMENT,
    attention.MEASUREMENT,
    hbm.MEASUREMENT,
    nccl.MEASUREMENT,
    quantise.MEASUREMENT,
    barrier.MEASUREMENT,
)
"""Measurements in order of importance, because a time budget cuts off the last ones."""


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """The measurements that can run here, and the reasons why others cannot."""

    measurements: tuple[Measurement, ...]
    facts: Facts
    quick: bool
    not_measured: tuple[str, ...]

    @property
    def tasks(self) -> tuple[TimingTask, ...]:
        """Every task, in order."""
        return tuple(t for m in self.measurements for t in m.tasks(self.facts, self.quick))

    @property
    def estimate_s(self) -> float:
        """Estimated seconds of the whole run."""
        return sum(m.estimate_s(self.facts, self.quick) for m in self.measurements)

    @property
    def task_s(self) -> dict[str, float]:
        """Estimated seconds of one task of each measurement, its share of the set-up included."""
        facts, quick = self.facts, self.quick
        return {m.name: m.estimate_s(facts, quick) / len(m.tasks(facts, quick)) for m in self.measurements}

    @property
    def budget_s(self) -> float:
        """Seconds after which no further task begins."""
        return QUICK_BUDGET_S if self.quick else BUDGET_S


def measurement_names() -> list[str]:
    """Names that `only` accepts."""
    return [m.name for m in MEASUREMENTS]


def build_plan(facts: Facts, *, quick: bool = False, only: Sequence[str] = ()) -> CalibrationPlan:
    """The plan for a machine. Raises InputError for an unknown name, or where nothing can be measured."""
    names = measurement_names()
    for word in only:
        if word not in names:
            raise InputError(
                f"unknown measurement {word!r}{nearest(word, names)}; choose among {', '.join(names)}"
            )
    chosen = [m for m in MEASUREMENTS if not only or m.name in only]
    missing = [(m, m.needs(facts)) for m in chosen]
    possible = tuple(m for m, reason in missing if not reason)
    if not possible:
        reasons = "; ".join(f"{m.name} {reason}" for m, reason in missing)
        raise InputError(f"nothing can be measured here: {reasons}")
    left_out = [f"{m.title} ({reason})" for m, reason in missing if reason]
    if 1 < facts.gpus < 8:
        left_out.append(f"collectives and exchanges over more than {facts.gpus} GPUs ({facts.gpus} usable)")
    left_out.append("transfers between nodes (one machine was measured)")
    return CalibrationPlan(possible, facts, quick, tuple(left_out))
