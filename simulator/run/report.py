"""What a simulated run returns; plain numbers that `moesim run --json` prints."""

from __future__ import annotations

from moesim.hwmodels.frozen import Frozen
from moesim.simulator.common.tables import Row, TableResult


class RunSpread(Frozen):
    """A figure as predicted, and the 10 %, 50 % and 90 % points of its distribution.

    `predicted`: every input at its stated value, the mean over random stops; the tables of GPU-hours and the
    parts of the bill add up to it. The percentiles are over the replicas and contain the stops and, where it
    is uncertain, the step time.
    """

    predicted: float
    p10: float
    p50: float
    p90: float


class PhaseReport(Frozen):
    """One phase, predicted: `gpu_hours` and `days` of training alone, `gpu_hours_with_stops` with stops."""

    phase: str
    stated: bool
    """True: GPU-hours as given; nothing of it was simulated."""
    steps: int
    tokens: float
    sequences: int
    """The full batch."""
    sequence_length: int
    step_time_s: float
    """At the full batch."""
    days: float
    gpu_hours: float
    gpu_hours_with_stops: float
    cost_usd: float | None
    """With stops, spares included."""
    interpolation_error: float
    """Largest relative miss of the interpolated step times of a ramp."""


class CauseReport(Frozen):
    """What one cause of interruption costs, as predicted; GPU-hours of the job's own GPUs."""

    cause: str
    interruptions: float
    lost_gpu_hours: float
    detection_gpu_hours: float
    restart_gpu_hours: float


class CheckpointReport(Frozen):
    """Checkpoints, and how often they are best taken (docs/model.md, eqs. J2, J3 and J6)."""

    bytes: float
    interval_s: float
    stall_s: float
    write_s: float
    mean_time_between_interruptions_s: float | None
    young_s: float | None
    daly_s: float | None
    optimal_s: float | None
    """Minimum of the exact expectation, no shorter than one write."""


class FinishDates(Frozen):
    """Dates (YYYY-MM-DD): as predicted, and those that a tenth, half and nine tenths of the replicas meet."""

    predicted: str
    p10: str
    p50: str
    p90: str


class OutlookRow(Frozen):
    """By when and at what cost a share of the replicas is done."""

    share: float
    days: float
    finish: str | None
    """Date (YYYY-MM-DD), where the plan has a start."""
    cost_usd: float | None


class GpuHours(Frozen):
    """Where the job's GPU-hours go, as predicted; the parts sum to `total`.

    `billed` adds the spare nodes.
    """

    productive: float
    checkpoints: float
    lost: float
    detection: float
    restart: float
    waiting_for_spares: float
    total: float
    billed: float


class RunReport(TableResult):
    """The whole run, phase by phase and all together; as a table its outlook."""

    phases: tuple[PhaseReport, ...]
    days: RunSpread
    finish: FinishDates | None
    gpu_hours: GpuHours
    goodput: RunSpread
    """Training that counted over time on the clock; stated phases left out."""
    goodput_expected: float
    """The same from the closed form of eq. J5; without asynchronous writes and spares the two agree."""
    interruptions: RunSpread
    causes: tuple[CauseReport, ...]
    checkpoint: CheckpointReport | None
    cost_usd: RunSpread | None
    cost_parts_usd: dict[str, float]
    """As predicted, by part."""
    price: str
    energy_kwh: RunSpread | None
    electricity_usd: float | None
    """As predicted; a part of the cost where the cluster is bought, inside the price where it is rented."""
    co2_kg: RunSpread | None
    assumptions: tuple[str, ...]
    replicas: int
    seed: int
    step_factor: RunSpread | None = None
    """Step time over the predicted one, as it was drawn for the replicas; None: only stops are uncertain."""
    outlook: tuple[OutlookRow, ...] = ()
    """21 points of the distribution of the end and of the bill, from 1 to 99 %."""

    def rows(self) -> list[Row]:
        """One row a point of the outlook."""
        return [row.model_dump() for row in self.outlook]
