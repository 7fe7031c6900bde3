"""Computes the breakdown, the pairs and the utilisation of a finished execution (pure)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, product
from math import fsum

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.calibration_entry import LoadClass, PowerLaw
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.units import SECONDS_PER_DAY
from moesim.simulator.cost.evidence import summed
from moesim.simulator.cost.load_clock import block_power, power_law
from moesim.simulator.cost.table import Mode
from moesim.simulator.engine.bounds import lower_bound_s, moved_by_rank, upper_bound_s
from moesim.simulator.engine.program import NS, ActionTable, CompiledTemplate, Program
from moesim.simulator.engine.records import Execution, barriers
from moesim.simulator.engine.task_table import TaskTable
from moesim.simulator.model.block import is_routed_layer
from moesim.simulator.model.precision import Precision
from moesim.simulator.predict.result_parts import (
    Breakdown,
    MovedBytes,
    PhaseSpan,
    StepEnergy,
    StepResult,
    UseOfPower,
    Utilisation,
)
from moesim.simulator.predict.step import Prepared
from moesim.simulator.schedules.template import EP_PHASES

CATEGORY = {
    "F": "forward",
    "B": "backward_input",
    "I": "backward_input",
    "W": "backward_weight",
    "F&B": "forward_backward",
    "F&I": "forward_backward",
}
"""Category of each kind of action. The W of a full backward chunk counts in backward_input, a choice fixed
before any comparison."""

CATEGORIES = ("forward", "backward_input", "backward_weight", "forward_backward")
"""The categories of actions."""


def breakdowns(execution: Execution, split_weight: bool = False) -> list[Breakdown]:
    """Seconds by category for every pipeline rank, averaged over members (docs/model.md, eq. T1, eq. T2).

    With `split_weight` the weight-gradient phases of a full backward chunk count in backward_weight. The
    bubble is the time in which no action runs. Exposed communication is the time of actions in which the
    compute SMs wait, the wait of a rank for its own sends after an action, and the gradient traffic at the
    end of the step.
    """
    table, times, ranks = execution.table, execution.times, len(execution.program.ranks)
    span = spans_ns(execution)
    moved = np.zeros(len(span))
    if split_weight:
        full = np.array([code.kind == "B" for code in table.codes], dtype=bool)
        weights = _at_microbatch(table, [code.part.weight_ns for code in table.codes], 1)
        moved = np.where(full[table.code], weights, 0.0)
    category = np.array([CATEGORIES.index(CATEGORY[code.kind]) for code in table.codes], dtype=np.int64)
    # Every action adds to its own category and then to that of the weight gradients, in the order of actions.
    places = np.full((len(span), 2), CATEGORIES.index("backward_weight"))
    places[:, 0] = category[table.code]
    places += len(CATEGORIES) * table.rank[:, None]
    parts = np.stack([span - moved, moved], axis=1)
    seconds = np.bincount(places.ravel(), parts.ravel(), ranks * len(CATEGORIES)).reshape(ranks, -1)
    waits = span - compute_ns(table) + _member_mean(times.free - times.end)
    exposed = np.bincount(table.rank, waits, ranks)
    rows = []
    for by_category, wait, sync in zip(seconds.tolist(), exposed.tolist(), execution.syncs, strict=True):
        optimizer = sum(end - begin for begin, end in (sync.reduce, sync.norm, sync.optimizer, sync.gather))
        row = Breakdown(
            **{name: ns / NS for name, ns in zip(CATEGORIES, by_category, strict=True)},
            bubble=(execution.end_ns - fsum(by_category) - optimizer) / NS,
            optimizer=optimizer / NS,
            exposed_communication=(wait + (optimizer - (sync.optimizer[1] - sync.optimizer[0]))) / NS,
        )
        rows.append(row)
    return rows


def spans_ns(execution: Execution) -> FloatArray:
    """Nanoseconds of every action, averaged over members."""
    return _member_mean(execution.times.end - execution.times.start)


def _member_mean(values: IntArray) -> FloatArray:
    return np.asarray(values.sum(axis=1) / values.shape[1])


def compute_ns(table: ActionTable) -> FloatArray:
    """Nanoseconds in which the compute SMs work inside every action, averaged over members."""
    forward, backward = (
        _at_microbatch(table, [c.part.compute_ns[n] for c in table.codes], n) for n in (0, 1)
    )
    return forward + backward


def _at_microbatch(table: ActionTable, of_code: Sequence[FloatArray], side: int) -> FloatArray:
    """A value of every action from vectors over micro-batches, one a template; 0 where the side is absent."""
    micro = table.microbatches[:, side]
    if not of_code:
        return np.zeros(0)
    return np.where(micro >= 0, np.array(of_code)[table.code, micro], 0.0)


def mean_breakdown(rows: list[Breakdown]) -> Breakdown:
    """Mean of the breakdowns of several ranks or groups."""
    return Breakdown(
        **{name: fsum(getattr(r, name) for r in rows) / len(rows) for name in Breakdown.model_fields}
    )


def mean_over_groups(groups: list[list[Breakdown]]) -> list[Breakdown]:
    """Mean breakdown over the groups, for every pipeline rank."""
    return (
        groups[0] if len(groups) == 1 else [mean_breakdown(list(rank)) for rank in zip(*groups, strict=True)]
    )


def pair_seconds(executions: Sequence[Execution]) -> float | None:
    """Mean seconds of the overlapped pairs; None where the schedule has no pairs."""
    spans: list[float] = []
    for execution in executions:
        paired = np.array([code.kind == "F&B" for code in execution.table.codes], dtype=bool)
        spans += spans_ns(execution)[paired[execution.table.code]].tolist()
    return fsum(spans) / len(spans) / NS if spans else None


def pair_phases(executions: Sequence[Execution]) -> tuple[PhaseSpan, ...]:
    """Mean duration of each phase of MoE blocks inside overlapped pairs.

    Compute is averaged over members. A transfer has the payload of its slowest member, and the wait at the
    barrier including the launch, averaged over members.
    """
    total: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for execution in executions:
        ready = barriers(execution).ready_total_ns
        for _, code, actions in execution.tasks.groups:
            if execution.table.codes[code].kind == "F&B":
                _add_phases(execution, execution.table.codes[code], actions, ready, total)
    return tuple(
        PhaseSpan(phase=phase, seconds=span / n / NS, wait_s=wait / n / NS)
        for phase, (span, wait, n) in sorted(total.items())
    )


def _add_phases(
    execution: Execution,
    code: CompiledTemplate,
    actions: IntArray,
    ready_ns: IntArray,
    total: dict[str, list[float]],
) -> None:
    """Add the MoE phases of the actions of one template; `ready_ns`: `Barriers.ready_total_ns`."""
    numbers = [n for n, task in enumerate(code.tasks) if is_routed_layer(task.kind)]
    moved = [n for n in numbers if code.tasks[n].transfer is not None]
    micro, members = execution.table.microbatches[actions], execution.program.members
    if not numbers:
        return
    spans: dict[int, float] = {}
    waits: dict[int, float] = {}
    computed = [n for n in numbers if code.tasks[n].transfer is None]
    if computed:
        # Rows are tasks and columns are actions; a row is summed as a vector of its own would be.
        totals = np.array([code.tasks[n].compute.total_ns for n in computed])
        sides = micro.T[[code.tasks[n].side for n in computed]]
        sums = (np.take_along_axis(totals, sides, axis=1) / members).sum(axis=1)
        spans.update(zip(computed, sums.tolist(), strict=True))
    if moved:
        at = execution.table.first_task[actions] + np.array(moved)[:, None]
        launches = [transfer.launch_ns for n in moved if (transfer := code.tasks[n].transfer)]
        launch = execution.times.begins[at] + np.array(launches)[:, None]
        spans.update(zip(moved, (execution.times.finishes[at] - launch).sum(axis=1).tolist(), strict=True))
        waits.update(zip(moved, (launch - ready_ns[at] / members).sum(axis=1).tolist(), strict=True))
    for number in numbers:
        entry = total[code.tasks[number].phase]
        entry[0] += spans[number]
        entry[1] += waits.get(number, 0.0)
        entry[2] += len(actions)


def utilisation(
    executions: Sequence[Execution],
    rows: Sequence[MovedBytes],
    nic_bytes_per_s: float,
    scale_up_bytes_per_s: float,
) -> Utilisation:
    """Busy fractions over the step, averaged over ranks and groups; link rates are nominal and per GPU.

    Links count all bytes of `rows`, which are the `moved_bytes` (docs/model.md, eq. T4).
    """
    end, ranks = max(executions[0].end_ns, 1), len(executions[0].program.ranks) * len(executions)
    compute = fsum(chain.from_iterable(compute_ns(execution.table).tolist() for execution in executions))
    transfers = 0  # that communication SMs work on; shards inside the step travel on SMs of a library
    for table, times in ((execution.tasks, execution.times) for execution in executions):
        experts = np.array([task.phase in EP_PHASES for task in table.of_template], dtype=bool)
        transfers += int((times.finishes - times.begins)[experts[table.template_task]].sum())
    pp = len(executions[0].program.ranks)
    nic, scale_up = (
        fsum(getattr(row, name) for row in rows) / pp for name in ("nic_bytes", "scale_up_bytes")
    )
    return Utilisation(
        compute_partition=compute / ranks / end,
        communication_partition=transfers / ranks / end,
        scale_up=scale_up / (scale_up_bytes_per_s * end / NS) if scale_up_bytes_per_s else 0.0,
        nic=nic / (nic_bytes_per_s * end / NS) if nic_bytes_per_s else 0.0,
    )


def moved_bytes(executions: Sequence[Execution]) -> tuple[MovedBytes, ...]:
    """Bytes that an average GPU of each pipeline rank sends in the step, by what moves them (eq. T4)."""
    groups = [moved_by_rank(execution.tasks) for execution in executions]
    each = 1.0 / len(groups)
    return tuple(
        MovedBytes(rank=rank, what=what, nic_bytes=nic, scale_up_bytes=scale_up)
        for rank, of_groups in enumerate(zip(*groups, strict=True))
        for what, nic, scale_up in summed((row, each) for rows in of_groups for row in rows)
    )


# -- step result -------------------------------------------------------------------------------------
# Computes the rates of a step, and checks them against its bounds and the hardware's peak.


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
    tables: Callable[[], Sequence[TaskTable]],
) -> StepResult:
    """Rates of a step of `tokens` tokens.

    `flop_per_token`: (causal, full attention). Both peaks are averages over GPUs: `peak_flop_per_s` in BF16,
    to which MFU refers, and `fastest_flop_per_s` in the fastest format of the recipe. `tables` gives the
    tasks of all groups. Raises RuntimeError for a step above the fastest peak, and where its bounds are read
    for one outside them, which is a fault of the program.
    """
    per_gpu = tokens / time_s / n_gpus
    causal, full = (flop * per_gpu for flop in flop_per_token)
    if not causal <= fastest_flop_per_s:
        raise RuntimeError(f"{causal:.6g} FLOP/s a GPU are above the peak of {fastest_flop_per_s:.6g}")

    @cache
    def bounds() -> tuple[float, float]:
        of_groups = tables()
        programs = [table.program for table in of_groups]
        lower_s, upper_s = lower_bound_s(programs, of_groups), upper_bound_s(programs, of_groups)
        if not lower_s <= time_s <= upper_s:
            raise RuntimeError(
                f"a step of {time_s:.9g} s is outside its bounds {lower_s:.9g} to {upper_s:.9g} s"
            )
        return lower_s, upper_s

    return StepResult.of(
        {
            "time_s": time_s,
            "tokens": tokens,
            "tokens_per_s": tokens / time_s,
            "tokens_per_s_per_gpu": per_gpu,
            "tokens_per_day": tokens / time_s * SECONDS_PER_DAY,
            "tflops_per_gpu_causal": causal / 1e12,
            "tflops_per_gpu_noncausal": full / 1e12,
            "mfu_causal": causal / peak_flop_per_s,
            "mfu_noncausal": full / peak_flop_per_s,
        },
        {"lower_bound_s": lambda: bounds()[0], "upper_bound_s": lambda: bounds()[1]},
    )


# -- energy ------------------------------------------------------------------------------------------
# Power of a board by what runs, from the law of the profile (eq. C34).


def step_energy(prepared: Prepared, executions: Sequence[Execution], time_s: float) -> StepEnergy | None:
    """Energy of a step; None where nobody published the board's power limit."""
    cluster, pricer = prepared.cluster, prepared.pricer
    chip, node, site = cluster.accelerator, cluster.node, cluster.energy
    if chip.tdp is None:
        return None
    law, own = power_law(pricer)
    limit_w, uses, waiting_w = chip.tdp_w, [("taken at its limit", time_s, 1.0)], chip.tdp_w
    if law is not None:
        uses, waiting_w = _uses(prepared, executions, time_s, law), law.wait * limit_w
    by_use = tuple(UseOfPower(use=u, seconds=s, board_w=p * limit_w) for u, s, p in uses if s > 0.0)
    board_w = min(fsum(u.seconds * u.board_w for u in by_use) / time_s, chip.limit_w)
    batch = prepared.scenario.batch
    tokens = batch.sequences * batch.sequence_length
    boards_j = board_w * time_s * cluster.n_gpus
    rest_w = None if node.power is None else max(0.0, node.power.value - node.n_gpus * limit_w)
    node_j = None if rest_w is None else boards_j + rest_w * cluster.nodes * time_s
    borrowed = "every board draws its limit; no law of its power is known"
    if law is not None and not own:
        borrowed = f"power by use as in {law.id}"
    return StepEnergy(
        board_w=board_w,
        limit_w=chip.limit_w,
        capped=chip.power_limit is not None,
        by_use=by_use,
        joules_per_token=boards_j / tokens,
        joules_per_token_node=None if node_j is None else node_j / tokens,
        joules_per_token_site=None if node_j is None or site is None else node_j * site.pue.value / tokens,
        pue=None if site is None else site.pue.value,
        waiting_w=waiting_w,
        law=law.id if law is not None and own else borrowed,
        assumed=not own,
    )


def _uses(
    prepared: Prepared, executions: Sequence[Execution], time_s: float, law: PowerLaw
) -> list[tuple[str, float, float]]:
    """(use, mean seconds of a board, power over the limit), whose seconds add up to the step."""
    groups = [breakdowns(execution) for execution in executions]
    mean = mean_breakdown(mean_over_groups(groups))
    pp = len(executions[0].program.ranks) * len(executions)
    busy = fsum(chain.from_iterable(compute_ns(e.table).tolist() for e in executions)) / NS / pp
    optimizer = fsum(s.optimizer[1] - s.optimizer[0] for e in executions for s in e.syncs) / NS / pp
    paired = mean.forward_backward / max(1e-300, time_s - mean.bubble - mean.optimizer)
    costs, counts = prepared.program.costs, Counter(b.kind for st in prepared.stages.stages for b in st)
    spent: defaultdict[LoadClass, list[float]] = defaultdict(lambda: [0.0, 0.0])
    modes: tuple[tuple[Mode, float], ...] = (("alone", 1.0 - paired), ("overlapped", paired))
    for (kind, count), (mode, share) in product(sorted(counts.items()), modes):
        block = (
            block_power(prepared.pricer, law, kind, costs.compute, costs.transfer, mode) if share else None
        )
        for of, seconds in block.seconds.items() if block else ():
            spent[of][0] += count * share * seconds
            spent[of][1] += count * share * seconds * law.power(of, block.clock if block else 1.0)
    total = fsum(seconds for seconds, _ in spent.values())
    names: dict[LoadClass, str] = {"gemm": "GEMMs", "attention": "attention", "memory": "other kernels"}
    uses = [
        (name, busy * spent[of][0] / total, spent[of][1] / spent[of][0])
        for of, name in names.items()
        if total and spent[of][0]
    ]
    exposed = min(mean.exposed_communication, max(0.0, time_s - busy - optimizer))
    waiting = max(0.0, time_s - busy - optimizer - exposed)
    return [
        *uses,
        ("optimizer", optimizer, law.power("memory", 1.0)),
        ("collectives", exposed, law.collective),
        ("waiting", waiting, law.wait),
    ]
