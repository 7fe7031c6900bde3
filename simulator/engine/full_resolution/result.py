"""What full resolution adds to a result."""

from __future__ import annotations

from moesim.hwmodels.frozen import Frozen


class GpuTimes(Frozen):
    """Seconds of every GPU that ran, in order of `gpu` (docs/model.md, eq. G4).

    `compute_s`: its SMs worked; `wait_s`: it waited at barriers for members that came later; `held_up_s`:
    its group waited for it alone.
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
    """Mean wait at the barrier of a transfer inside overlapped pairs, percentiles over all GPUs.

    `layer`: how many transfers of the phase came before it in the pair.
    """

    phase: str
    layer: int
    p10_s: float
    p50_s: float
    p90_s: float


class LinkKindLoad(Frozen):
    """Utilisation of the links of one kind over the step: carried over nominal bytes, a direction."""

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
    """A table of figures as people draw it; `values[row][column]`, None where there is nothing."""

    title: str
    unit: str
    row_label: str
    column_label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]


class FaultEffect(Frozen):
    """Step time with one cause alone, and how much longer than without any."""

    cause: str
    step_s: float | None
    """None: no step ends with it."""
    effect_s: float | None
    note: str = ""


class FullResult(Frozen):
    """Every GPU for itself."""

    gpus: int
    groups: int
    """Groups that ran on each pipeline rank."""
    members: int
    lost_groups: tuple[int, ...]
    """Groups that a lost node stopped; the step is done without their sequences."""
    group_end_s: tuple[float, ...]
    """When the last action of each group ended."""
    gpu_times: GpuTimes
    stragglers: tuple[Straggler, ...]
    skew: tuple[SkewRow, ...]
    link_kinds: tuple[LinkKindLoad, ...]
    busiest_links: tuple[LinkLoad, ...]
    heat_maps: tuple[HeatMap, ...]
    causes: tuple[FaultEffect, ...]
