"""The part of a result that full resolution adds."""

from __future__ import annotations

from moesim.hwmodels.frozen import Frozen


class GpuTimes(Frozen):
    """Seconds of every GPU that ran, in order of `gpu` (docs/model.md, eq. G4).

    `compute_s`: time in which its SMs worked. `wait_s`: time in which it waited at barriers for later
    members. `held_up_s`: time in which its group waited for it alone.
    """

    gpu: tuple[int, ...]
    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    held_up_s: tuple[float, ...]


class Straggler(Frozen):
    """A GPU that kept its group waiting; `compute_over_group`: its compute time over the group's mean."""

    gpu: int
    pipeline_rank: int
    group: int
    member: int
    held_up_s: float
    compute_over_group: float


class SkewRow(Frozen):
    """Percentiles over all GPUs of the mean wait at the barrier of a transfer inside overlapped pairs.

    `layer`: number of earlier transfers of the same phase in the pair.
    """

    phase: str
    layer: int
    p10_s: float
    p50_s: float
    p90_s: float


class LinkKindLoad(Frozen):
    """Utilisation of the links of one kind, per direction: carried over nominal bytes in the step.

    It counts what an engine routes over links: dispatch, combine, shards inside the step and sends. The other
    collectives count in `Result.utilisation`.
    """

    kind: str
    links: int
    used: int
    mean: float
    most: float


class LinkLoad(Frozen):
    """Utilisation of one link."""

    link: str
    kind: str
    utilisation: float


class HeatMap(Frozen):
    """A heat map; `values[row][column]` is None where there is no figure."""

    title: str
    unit: str
    row_label: str
    column_label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]


class FaultEffect(Frozen):
    """Step time with one cause alone, and how much longer it is than without any cause."""

    cause: str
    step_s: float | None
    """None where the step cannot end with this cause."""
    effect_s: float | None
    note: str = ""


class FullResult(Frozen):
    """Result of full resolution, which simulates every GPU of the cluster."""

    gpus: int
    groups: int
    """Groups that ran on each pipeline rank."""
    members: int
    lost_groups: tuple[int, ...]
    """Groups that a lost node stopped; the step runs without their sequences."""
    group_end_s: tuple[float, ...]
    """When the last action of each group ended."""
    gpu_times: GpuTimes
    stragglers: tuple[Straggler, ...]
    skew: tuple[SkewRow, ...]
    link_kinds: tuple[LinkKindLoad, ...]
    busiest_links: tuple[LinkLoad, ...]
    heat_maps: tuple[HeatMap, ...]
    causes: tuple[FaultEffect, ...]
