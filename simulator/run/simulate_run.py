"""Simulates a run from start to end and reports its phases, interruptions, finish date and bill."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.run.failures import RunOutcome, simulate_failures
from moesim.simulator.run.interruptions import Interruptions
from moesim.simulator.run.money import Rates, rates
from moesim.simulator.run.report import (
    HOURS_PER_DAY,
    CauseReport,
    FinishDates,
    GpuHours,
    OutlookRow,
    PhaseReport,
    RunReport,
    RunSpread,
    per_hour,
)
from moesim.simulator.run.work import PhaseWork
from moesim.simulator.scenario.run_plan import RunPlan

OUTLOOK_SHARES = (0.01, *(round(0.05 * n, 2) for n in range(1, 20)), 0.99)
"""Shares of replicas at the points of the outlook."""


def simulate_run(
    plan: RunPlan,
    cluster: Cluster,
    phases: Sequence[PhaseWork],
    interruptions: Interruptions,
    seed: int,
    factors: FloatArray | None = None,
) -> RunReport:
    """Simulate a run and report it; `phases` comes from `run.work.phase_works`.

    `factors`: relative step times of the replicas where the step time is uncertain ([replicas], about 1). A
    factor scales all phases of its replica, with the same random interruptions (docs/model.md, eq. J9).
    Percentiles and outlook use the factors; predicted figures and tables use the predicted step. Raises
    InfeasibleError where the run practically never ends, InputError for illegal prices and plans.
    """
    work = [phase.seconds for phase in phases if not phase.stated]
    interruptions.check_feasible(work)
    replicas = len(factors) if factors is not None else plan.replicas
    alike = 1 if interruptions.certain else replicas  # without interruptions all replicas are equal
    outcome = simulate_failures(work, interruptions.model, alike, seed)
    interruptions.check_waiting(mean(outcome.work.sum(axis=0)), mean(outcome.waiting.sum(axis=0)))
    spare_nodes = plan.spares.count if plan.spares else 0
    bill = rates(cluster, plan.price, spare_nodes)
    start_s = plan.start_s(cluster.n_gpus)
    book = wide = _Book(phases, outcome, cluster.n_gpus, bill, start_s)
    if factors is not None:
        drawn = simulate_failures(work, interruptions.model, replicas, seed, factors)
        wide = _Book(phases, drawn, cluster.n_gpus, bill, start_s)
    days = _spread(wide.wall_s / SECONDS_PER_DAY, mean(book.wall_s / SECONDS_PER_DAY))
    hours = days.predicted * HOURS_PER_DAY
    return RunReport(
        phases=tuple(book.rows()),
        days=days,
        finish=_finish(plan.start, wide.wall_s, mean(book.wall_s)),
        gpu_hours=book.gpu_hours(),
        goodput=_spread(wide.goodput(), mean(book.goodput())),
        goodput_expected=math.fsum(work) / (interruptions.expected_seconds(work) + book.startup_s)
        if work
        else 1.0,
        interruptions=_spread(wide.interruptions(), mean(book.interruptions())),
        causes=tuple(book.causes(interruptions.causes)),
        checkpoint=interruptions.checkpoint,
        cost_usd=per_hour(days, bill.usd(1.0)),
        cost_parts_usd={k: v * hours for k, v in (bill.usd_per_hour or {}).items()},
        price=bill.described,
        energy_kwh=per_hour(days, bill.kwh_per_hour),
        electricity_usd=None
        if bill.electricity_usd_per_hour is None
        else bill.electricity_usd_per_hour * hours,
        co2_kg=per_hour(days, bill.kg_co2_per_hour),
        assumptions=(*(n for p in phases for n in p.notes), *interruptions.notes, *bill.notes),
        replicas=alike if factors is None else replicas,
        seed=seed,
        step_factor=None if factors is None else _spread(factors, 1.0),
        outlook=tuple(_outlook(plan.start, wide.wall_s, bill)),
    )


def mean(values: FloatArray) -> float:
    """Mean with an exact sum, so that all platforms give the same digits."""
    return math.fsum(values.ravel().tolist()) / values.size


def _spread(values: FloatArray, predicted: float) -> RunSpread:
    """Percentiles of `values` beside the predicted value."""
    ordered = sorted(values.tolist())
    p10, p50, p90 = (_percentile(ordered, share) for share in (0.1, 0.5, 0.9))
    return RunSpread(predicted=predicted, p10=p10, p50=p50, p90=p90)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Percentile, linear between neighbours and written out so that every NumPy gives the same bytes."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _finish(start: datetime.date | None, wall_s: FloatArray, predicted_s: float) -> FinishDates | None:
    if start is None:
        return None
    points = _spread(wall_s, predicted_s).model_dump()
    return FinishDates(**{name: _date(start, seconds) for name, seconds in points.items()})


def _date(start: datetime.date, seconds: float) -> str:
    latest = (datetime.date.max - start).days
    return (start + datetime.timedelta(days=min(int(seconds / SECONDS_PER_DAY), latest))).isoformat()


def _outlook(start: datetime.date | None, wall_s: FloatArray, bill: Rates) -> Iterator[OutlookRow]:
    ordered = sorted(wall_s.tolist())
    for share in OUTLOOK_SHARES:
        seconds = _percentile(ordered, share)
        yield OutlookRow(
            share=share,
            days=seconds / SECONDS_PER_DAY,
            finish=None if start is None else _date(start, seconds),
            cost_usd=bill.usd(seconds / SECONDS_PER_DAY * HOURS_PER_DAY),
        )


@dataclass(frozen=True, slots=True)
class _Book:
    """Sums over phases, causes and replicas in GPU-hours and dollars."""

    phases: Sequence[PhaseWork]
    outcome: RunOutcome
    gpus: int
    bill: Rates
    start_s: float
    """Seconds of one start of the job."""

    @property
    def startup_s(self) -> float:
        """Seconds of all starts that no interruption causes (eq. J10)."""
        return self.start_s * sum(phase.starts for phase in self.phases)

    @property
    def stated_s(self) -> float:
        return math.fsum(phase.seconds for phase in self.phases if phase.stated)

    @property
    def wall_s(self) -> FloatArray:
        """Seconds of the whole run, [replicas]."""
        return np.asarray(self.outcome.wall.sum(axis=0) + self.stated_s + self.startup_s)

    @property
    def hours(self) -> FloatArray:
        """Hours of the whole run, [replicas]."""
        return self.wall_s / SECONDS_PER_HOUR

    def interruptions(self) -> FloatArray:
        """Number of interruptions [replicas]."""
        return np.asarray(self.outcome.interruptions.sum(axis=(0, 1)), dtype=np.float64)

    def goodput(self) -> FloatArray:
        wall = self.outcome.wall.sum(axis=0) + self.startup_s
        return np.asarray(
            np.where(wall > 0.0, self.outcome.work.sum(axis=0) / np.where(wall > 0, wall, 1.0), 1.0)
        )

    def _hours(self, seconds: FloatArray) -> float:
        """GPU-hours of `seconds` [..., replicas], averaged over replicas and summed over other axes."""
        return mean(seconds.reshape(-1, seconds.shape[-1]).sum(axis=0)) * self.gpus / SECONDS_PER_HOUR

    def rows(self) -> list[PhaseReport]:
        reports, simulated = [], 0
        for phase in self.phases:
            if phase.stated:
                wall_s = work_s = phase.seconds
            else:
                wall_s, work_s = mean(self.outcome.wall[simulated]), mean(self.outcome.work[simulated])
                wall_s += self.start_s * phase.starts
                simulated += 1
            reports.append(
                PhaseReport(
                    phase=phase.name,
                    stated=phase.stated,
                    steps=phase.steps,
                    tokens=phase.tokens,
                    sequences=phase.sequences,
                    sequence_length=phase.sequence_length,
                    step_time_s=phase.step_time_s,
                    days=work_s / SECONDS_PER_DAY,
                    gpu_hours=work_s * self.gpus / SECONDS_PER_HOUR,
                    gpu_hours_with_stops=wall_s * self.gpus / SECONDS_PER_HOUR,
                    cost_usd=self.bill.usd(wall_s / SECONDS_PER_HOUR),
                    interpolation_error=phase.interpolation_error,
                )
            )
        return reports

    def gpu_hours(self) -> GpuHours:
        o = self.outcome
        stated = self.stated_s * self.gpus / SECONDS_PER_HOUR
        total = mean(self.wall_s) * self.gpus / SECONDS_PER_HOUR
        return GpuHours(
            productive=self._hours(o.work) + stated,
            startup=self.startup_s * self.gpus / SECONDS_PER_HOUR,
            checkpoints=self._hours(o.checkpoints),
            lost=self._hours(o.lost),
            detection=self._hours(o.detection),
            restart=self._hours(o.restart),
            waiting_for_spares=self._hours(o.waiting),
            total=total,
            billed=total / self.gpus * self.bill.gpus,
        )

    def causes(self, names: Sequence[str]) -> list[CauseReport]:
        o = self.outcome
        return [
            CauseReport(
                cause=name,
                interruptions=mean(o.interruptions[:, i].sum(axis=0).astype(np.float64)),
                lost_gpu_hours=self._hours(o.lost[:, i]),
                detection_gpu_hours=self._hours(o.detection[:, i]),
                restart_gpu_hours=self._hours(o.restart[:, i]),
            )
            for i, name in enumerate(names)
        ]
