"""Estimates the memory and time of simulating a scenario before doing so (pure).

The counts do not depend on the machine. The figures that turn them into memory and time were measured on the
home case (lab/docs/performance-notes.md, "How large a job is"); they only limit jobs, and no prediction uses
them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import ceil
from typing import Self

import numpy as np
from msgspec import Struct
from pydantic import Field

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.layout.parallel import MOST_MEMBERS
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario

TASKS_PER_BLOCK = 19
"""Engine tasks of one block and one micro-batch, forward and backward; the home case has 18.6."""
BYTES_PER_NUMBER = 8
BYTES_PER_TASK = 200
"""Bytes that the engine stores for a finished task."""
BYTES_PER_PART = 140
"""Bytes of a GPU, switch or cable in the tables of a topology."""
BASE_BYTES = 120_000_000
"""Bytes of a process that has imported the simulator."""
TRACE_BYTES_PER_TASK = 1_200
"""Bytes of an event while a trace is written."""
SECONDS_PER_TASK = 1e-5
"""Seconds to prepare and execute a task on one core of a small server."""


class WorkSize(Struct, frozen=True):
    """Counts of the work of simulating a scenario.

    `microbatches`: number in one pipeline. `tasks`: tasks that the engine executes. `numbers`: entries of the
    vectors of all simulated GPUs. `parts`: GPUs, switches and cables. `simulations`: engine runs, of which
    faults and phases of a run need more than one.
    """

    gpus: int
    blocks: int
    microbatches: int
    tasks: int
    numbers: int
    parts: int
    simulations: int = 1

    @property
    def bytes(self) -> int:
        """Upper estimate of the memory of simulating the scenario, in bytes."""
        records = self.numbers * BYTES_PER_NUMBER + self.tasks * BYTES_PER_TASK + self.parts * BYTES_PER_PART
        return BASE_BYTES + records

    @property
    def trace_bytes(self) -> int:
        """Upper estimate of the memory of writing its trace, in bytes."""
        return self.bytes + self.tasks * TRACE_BYTES_PER_TASK

    @property
    def seconds(self) -> float:
        """Rough time on one core, in seconds."""
        return self.simulations * self.tasks * SECONDS_PER_TASK


def work_size(scenario: Scenario, shape: ModelShape, machines: Sequence[Cluster]) -> WorkSize:
    """Counts for a scenario, legal or not, without building anything whose size grows with its numbers.

    `shape` and `machines`: its loaded model, and its cluster or the clusters of its fleet.
    """
    total = sum(machine.n_gpus for machine in machines)
    sizes = [_on(scenario, shape, machine, total) for machine in machines]
    return WorkSize(
        gpus=total,
        blocks=sizes[0].blocks,
        microbatches=max(size.microbatches for size in sizes),
        tasks=sum(size.tasks for size in sizes),
        numbers=sum(size.numbers for size in sizes),
        parts=sum(size.parts for size in sizes),
        simulations=max(size.simulations for size in sizes),
    )


def _on(scenario: Scenario, shape: ModelShape, machine: Cluster, n_gpus: int) -> WorkSize:
    plan, whole = scenario.parallel, scenario.resolution == "full"
    per_rank = max(1, n_gpus // plan.pp)
    dp = max(1, per_rank // (plan.tp * plan.cp))
    microbatches = max(1, ceil(scenario.batch.sequences / (dp * plan.microbatch)))
    members = plan.ep if plan.ep > 1 else min(per_rank if whole else dp, MOST_MEMBERS)
    groups = max(1, per_rank // members) if whole else 1
    blocks = _blocks(scenario, shape)
    tasks = TASKS_PER_BLOCK * blocks * microbatches * groups
    experts = 0 if shape.moe is None or plan.ep == 1 else shape.moe.experts
    # Every task has a duration and a noise for every member; loads are first drawn for each expert.
    numbers = 2 * tasks * members + 2 * blocks * microbatches * experts
    if whole:  # routes of all pairs of a group in both directions, for every pipeline rank
        per_node = min(members, machine.node.n_gpus)
        pairs = members * (per_node + ceil(members / per_node))
        numbers += groups * plan.pp * 2 * (pairs * 8 + members * members // 4)
    switches, cables = machine.topology().size() if whole else (0, 0)
    simulations = 1 + len(scenario.run.phases) + (2 * len(scenario.faults) if len(scenario.faults) > 1 else 0)
    return WorkSize(
        n_gpus,
        blocks,
        microbatches,
        tasks,
        numbers,
        (n_gpus + switches + cables) if whole else 0,
        simulations,
    )


def _blocks(scenario: Scenario, shape: ModelShape) -> int:
    """Number of blocks of the model, or of the part that the scenario states; "moe*4" counts as four.

    A stage without blocks counts as one, as its actions are simulated too.
    """
    stated = scenario.stages.blocks
    if stated is None:
        return max(shape.n_layers + shape.mtp_layers + 2, len(scenario.stages.layers or ()))
    count = 0
    for text in stated:
        for word in text.split():
            _, _, times = word.partition("*")
            count += int(times) if times.isdecimal() and len(times) < 12 else 1
    return count


class WorkLimits(Struct, frozen=True):
    """Largest work that a machine accepts; messages name it by `where` and recommend `instead`."""

    most_bytes: int
    most_seconds: float
    most_parts: int
    where: str
    instead: str


def own_machine() -> WorkLimits:
    """Limits beyond which a job cannot end on this machine: its memory, and a day of one core."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        memory = 64_000_000_000
    return WorkLimits(memory, 86_400.0, 20_000_000, "this machine", "use a machine with more memory")


def check_size(
    scenario: Scenario,
    shape: ModelShape,
    machines: Sequence[Cluster],
    limits: WorkLimits,
    *,
    trace: bool = False,
) -> WorkSize:
    """The size of a scenario's work; raises InputError with a remedy where it exceeds `limits`."""
    size = work_size(scenario, shape, machines)
    needed, most = size.trace_bytes if trace else size.bytes, limits.most_bytes
    share = max(needed / most, size.seconds / limits.most_seconds)
    if share > 1.0:
        batch, unit = scenario.batch.sequences, max(1, ceil(scenario.batch.sequences / size.microbatches))
        left = int(size.microbatches / share * 0.9)
        near = left * unit
        fewer = f"batch.sequences of about {near:,}" if left else "fewer layers (model, stages.blocks)"
        folded = "resolution: folded, " if scenario.resolution == "full" else ""
        raise InputError(
            f"batch.sequences={batch:,} on {size.gpus:,} GPUs is {size.microbatches:,} micro-batches of "
            f"{size.blocks:,} blocks, {size.tasks:,} tasks to simulate and about {needed / 1e9:,.1f} GB, "
            f"more than the {most / 1e9:,.1f} GB and {int(limits.most_seconds / SECONDS_PER_TASK):,} tasks "
            f"of {limits.where}: take {fewer}, a larger parallel.microbatch, {folded}or {limits.instead}",
            key="batch.sequences" if left else None,
            nearest=(near,) if left else (),
        )
    if size.parts > limits.most_parts:
        raise InputError(
            f"{size.gpus:,} GPUs with their switches and cables are {size.parts:,} parts, more than the "
            f"{limits.most_parts:,} of {limits.where}: take fewer nodes (cluster.nodes), "
            f"resolution: folded, or {limits.instead}",
            key="cluster.nodes",
        )
    return size


# -- band --------------------------------------------------------------------------------------------
# Intervals of a prediction and the sources of its uncertainty (plain data).


class Band(Frozen):
    """A figure as predicted, with the 10 %, 50 % and 90 % points of its distribution."""

    predicted: float
    p10: float
    p50: float
    p90: float

    @classmethod
    def of(cls, predicted: float, drawn: FloatArray) -> Self:
        """The band of a figure from draws of it."""
        p10, p50, p90 = (float(value) for value in np.quantile(drawn, [0.1, 0.5, 0.9]))
        return cls(predicted=predicted, p10=p10, p50=p50, p90=p90)

    @property
    def has_sign(self) -> bool:
        """Whether P10 and P90 of a difference lie on the same side of zero."""
        return self.p10 > 0.0 or self.p90 < 0.0


class Effect(Frozen):
    """Step times with one source of uncertainty alone at its 10 % point and at its 90 % point.

    `low` and `high` state the source's points, as a relative change of its times or as the value of a key.
    `exact`: the engine computed the step times; otherwise they are first-order along the critical path.
    """

    source: str
    meaning: str
    low: str
    high: str
    low_s: float
    high_s: float
    exact: bool = False

    @property
    def swing_s(self) -> float:
        """Distance between the two step times."""
        return abs(self.high_s - self.low_s)


class EngineBands(Frozen):
    """Bands from engine runs with all sources off together, one run a draw.

    `first_order_mean` and `first_order_rms`: mean and root mean square of the relative error of the
    first-order step time over the same draws.
    """

    bands: dict[str, Band]
    draws: int
    seed: int
    first_order_mean: float
    first_order_rms: float


class Uncertainty(TableResult):
    """Bands of the figures of one prediction, and its sources of uncertainty, largest first."""

    bands: dict[str, Band]
    sources: tuple[Effect, ...]
    samples: int
    seed: int
    note: str = ""
    """Names the resolution of the critical path along which the effects were computed."""
    by_engine: EngineBands | None = Field(None, exclude_if=lambda value: value is None)
    """Bands by the engine itself, where they were asked for."""

    def rows(self) -> list[Row]:
        """One row a figure."""
        return [{"figure": name, **band.model_dump()} for name, band in self.bands.items()]
