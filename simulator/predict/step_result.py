"""Computes the rates of a step, and checks them against its bounds and the hardware's peak."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.units import SECONDS_PER_DAY
from moesim.simulator.engine.bounds import lower_bound_s, upper_bound_s
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.task_table import TaskTable
from moesim.simulator.model.precision import Precision
from moesim.simulator.predict.result_parts import (
    StepResult,
)


def kept_rows(programs: Sequence[Program]) -> float:
    """Share of routed rows that capacity did not drop, averaged over layers, micro-batches and groups."""
    loads = [program.variation.loads for program in programs]
    return fsum(float(load.mean()) for load in loads) / len(loads) if loads[0].size else 1.0


def fastest_flop_per_s(cluster: Cluster, recipe: Precision) -> float:
    """Datasheet peak of one GPU in the fastest format of a recipe."""
    peaks = [cluster.accelerator.peak_flop_per_s(name) for name in dict.fromkeys(("bf16", recipe.linear))]
    return max(peaks)


def step_result(
    flop_per_token: tuple[float, float],
    tokens: int,
    time_s: float,
    *,
    n_gpus: int,
    peak_flop_per_s: float,
    fastest_flop_per_s: float,
    tables: Sequence[TaskTable],
) -> StepResult:
    """Rates of a step of `tokens` tokens.

    `flop_per_token`: (causal, full attention). Both peaks are averages over GPUs: `peak_flop_per_s` in BF16,
    to which MFU refers, and `fastest_flop_per_s` in the fastest format of the recipe. `tables`: the tasks of
    all groups. Raises RuntimeError for a step outside its bounds or above the fastest peak, which is a fault
    of the program.
    """
    per_gpu = tokens / time_s / n_gpus
    causal, full = (flop * per_gpu for flop in flop_per_token)
    programs = [table.program for table in tables]
    lower_s, upper_s = lower_bound_s(programs, tables), upper_bound_s(programs, tables)
    if not lower_s <= time_s <= upper_s:
        raise RuntimeError(f"a step of {time_s:.9g} s is outside its bounds {lower_s:.9g} to {upper_s:.9g} s")
    if not causal <= fastest_flop_per_s:
        raise RuntimeError(f"{causal:.6g} FLOP/s a GPU are above the peak of {fastest_flop_per_s:.6g}")
    return StepResult(
        time_s=time_s,
        tokens=tokens,
        tokens_per_s=tokens / time_s,
        tokens_per_s_per_gpu=per_gpu,
        tokens_per_day=tokens / time_s * SECONDS_PER_DAY,
        tflops_per_gpu_causal=causal / 1e12,
        tflops_per_gpu_noncausal=full / 1e12,
        mfu_causal=causal / peak_flop_per_s,
        mfu_noncausal=full / peak_flop_per_s,
        lower_bound_s=lower_s,
        upper_bound_s=upper_s,
    )
