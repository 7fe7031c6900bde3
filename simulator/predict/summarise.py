"""Builds the result object of a finished execution."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.calibration import profile_hash
from moesim.hwmodels.confidence import LEVELS, Confidence, confidence, confidence_statement, peak_only_note
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, format_quantity
from moesim.simulator.engine.critical import critical_path, seconds_by_cause
from moesim.simulator.engine.full_resolution.groups import full_result
from moesim.simulator.engine.records import Execution, last_group
from moesim.simulator.layout.job import ResolvedJob, usd_per_hour
from moesim.simulator.layout.stages import describe
from moesim.simulator.model.counts import (
    blocks_flop_per_token,
    flop_per_token,
    parameters_mtp,
    parameters_total,
)
from moesim.simulator.predict.figures import fault_effects
from moesim.simulator.predict.plan_checks import unread_figures
from moesim.simulator.predict.pools import (
    joined_hash,
    mean_per_gpu,
    mean_per_rank,
    pool_results,
    pools_provenance,
)
from moesim.simulator.predict.provenance import unread_curves
from moesim.simulator.predict.report import (
    breakdowns,
    fastest_flop_per_s,
    kept_rows,
    mean_breakdown,
    mean_over_groups,
    moved_bytes,
    pair_phases,
    pair_seconds,
    step_result,
    utilisation,
)
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import CauseRow, RunResult, StepResult, host_report
from moesim.simulator.predict.step import ExecutedStep, Prepared, run_step
from moesim.simulator.run.report import RunReport
from moesim.simulator.run.simulate_run import StepFigures, interruptions, phase_works, simulate_run
from moesim.simulator.scenario.inputs import inputs_of
from moesim.version import __version__

# -- run report --------------------------------------------------------------------------------------
# Reports the whole run of a prepared scenario with its phases, interruptions and bill.


def run_report(prepared: Prepared, time_s: float, factors: FloatArray | None = None) -> RunReport:
    """The whole run of a prepared scenario whose step takes `time_s` seconds.

    Simulates the steps of other batches and phases. `factors`: see `simulate_run`. Raises InputError for an
    illegal phase and for a fleet, InfeasibleError for a run that practically never ends.
    """
    scenario, plan, job = prepared.scenario, prepared.scenario.run, prepared.job

    def measure(of: ResolvedJob) -> StepFigures:
        if of is job:
            memory, seconds = prepared.memory, time_s
        else:
            step = run_step(of, engine=prepared.engine.name)
            memory, seconds = step.prepared.memory, step.time_s
        return StepFigures(seconds, memory.total_bytes, memory.capacity_bytes)

    trained = parameters_total(job.shape) + parameters_mtp(job.shape)
    microbatches = scenario.batch.sequences // scenario.parallel.microbatch
    stops = interruptions(plan, job.cluster, trained, scenario.recipe, microbatches)
    works = phase_works(job, measure)
    return simulate_run(plan, job.cluster, works, stops, scenario.seed, factors)


def summarise(step: ExecutedStep) -> Result:
    """The result of an executed step; a cluster is treated as a fleet of one pool."""
    prepared, executions, time_s = step.prepared, step.executions, step.time_s
    scenario, profiles = prepared.scenario, {p.job.profile.name: p.job.profile for p in prepared.pools}
    by_rank = mean_over_groups([breakdowns(execution) for execution in executions])
    split = mean_over_groups([breakdowns(execution, split_weight=True) for execution in executions])
    # Nominal rates of an average GPU's NICs and scale-up ports in bytes/s.
    nic, scale_up = (
        mean_per_rank(prepared, lambda pool: pool.pricer.links.nic_bytes_per_s),
        mean_per_rank(prepared, lambda pool: pool.pricer.links.scale_up_bytes_per_s),
    )
    path = seconds_by_cause(critical_path(last_group(executions)))
    level, reason = _confidence(prepared)
    return Result(
        scenario=scenario.name,
        inputs=inputs_of(scenario, n_gpus=prepared.n_gpus),
        step=_step(prepared, executions, time_s),
        breakdown_s=by_rank[0],
        breakdown_by_rank_s=tuple(by_rank),
        breakdown_split_w_s=mean_breakdown(split),
        forward_backward_pair_s=pair_seconds(executions),
        pair_phases=pair_phases(executions),
        utilisation=utilisation(executions, nic, scale_up),
        moved_bytes=moved_bytes(executions),
        critical_path_s=tuple(CauseRow(cause=c, seconds=s) for c, s in path),
        memory=prepared.memory,
        run=_run(prepared, time_s),
        stages=tuple(describe(prepared.stages).splitlines()),
        profile=" + ".join(profiles),
        profile_hash=joined_hash([profile_hash(profile) for profile in profiles.values()]),
        confidence=level,
        confidence_reason=reason,
        warnings=() if prepared.of_fleet else tuple(_warnings(prepared)),
        provenance=tuple(pools_provenance(prepared)),
        extrapolated=tuple(sorted(_extrapolated(prepared))),
        seed=scenario.seed,
        version=__version__,
        full=None
        if prepared.whole is None
        else full_result(prepared.whole, executions, fault_effects(prepared, time_s)),
        host=None if prepared.of_fleet else host_report(scenario.software, executions[0].program, time_s),
        defaults=scenario.defaults_on([pool.part.cluster for pool in prepared.pools]),
        pools=pool_results(prepared, executions[0]) if prepared.of_fleet else (),
    )


def _confidence(prepared: Prepared) -> tuple[Confidence, str]:
    """The lowest confidence level of all pools, and the reason of each pool."""
    linear = prepared.scenario.recipe.linear
    rows = [
        (
            confidence(pool.part.cluster, pool.job.profile, linear),
            confidence_statement(pool.part.cluster, pool.job.profile, linear),
            pool.part.cluster.accelerator.name,
        )
        for pool in prepared.pools
    ]
    lowest = max((level for level, _, _ in rows), key=LEVELS.index)
    reasons = [f"{name}: {reason}" if prepared.of_fleet else reason for _, reason, name in rows]
    return lowest, "; ".join(reasons)


def _extrapolated(prepared: Prepared) -> set[str]:
    """Notes on readings beyond the measured range, and on parts that are not modelled."""
    notes, linear = set(prepared.shape.not_modelled), prepared.scenario.recipe.linear
    for pool in prepared.pools:
        notes |= {*pool.programs[0].costs.evidence.notes, *pool.memory_by_rank.notes, *pool.draws.spec.notes}
        notes |= set(peak_only_note(pool.part.cluster, pool.job.profile, linear))
    return notes


def _step(prepared: Prepared, executions: Sequence[Execution], time_s: float) -> StepResult:
    recipe, shape = prepared.scenario.recipe, prepared.shape
    length, kept = prepared.scenario.batch.sequence_length, kept_rows(prepared.programs)
    if prepared.scenario.stages.blocks is None:
        flop = [flop_per_token(shape, length, causal, kept) for causal in (True, False)]
    else:  # a part of the model: only simulated blocks count
        kinds = [block.kind for stage in prepared.stages.stages for block in stage]
        flop = [blocks_flop_per_token(shape, kinds, length, causal, kept) for causal in (True, False)]
    return step_result(
        (flop[0], flop[1]),
        _tokens(prepared),
        time_s,
        n_gpus=prepared.n_gpus,
        peak_flop_per_s=mean_per_gpu(prepared, lambda p: p.part.cluster.accelerator.peak_flop_per_s("bf16")),
        fastest_flop_per_s=mean_per_gpu(prepared, lambda p: fastest_flop_per_s(p.part.cluster, recipe)),
        tables=[execution.tasks for execution in executions],
    )


def _tokens(prepared: Prepared) -> int:
    """Tokens of a step, without those of groups that a lost node stopped."""
    batch, whole = prepared.scenario.batch, prepared.whole
    tokens = batch.sequences * batch.sequence_length
    return tokens if whole is None else tokens * len(whole.running) // whole.gpus.shape[1]


def _run(prepared: Prepared, time_s: float) -> RunResult:
    plan = prepared.scenario.run
    steps = -(-plan.tokens // _tokens(prepared))
    hours = steps * time_s / SECONDS_PER_HOUR
    if prepared.of_fleet:
        price = usd_per_hour([pool.part.cluster for pool in prepared.pools])
    else:
        per_gpu = prepared.cluster.price_per_gpu_hour
        price = None if per_gpu is None else prepared.n_gpus * per_gpu.value
    return RunResult(
        tokens=plan.tokens,
        steps=int(steps),
        days=steps * time_s / SECONDS_PER_DAY,
        gpu_hours=hours * prepared.n_gpus,
        cost_usd=None if price is None else hours * price,
        report=run_report(prepared, time_s) if plan.asks_for_more else None,
    )


def _warnings(prepared: Prepared) -> list[str]:
    warnings = []
    if prepared.scenario.stages.blocks is not None:
        count = sum(len(stage) for stage in prepared.stages.stages)
        warnings.append(
            f"stages.blocks is given: {count} blocks are simulated, and FLOPs and MFU count these alone"
        )
    node, fabric = prepared.cluster.node, prepared.cluster.network.fabric
    if fabric is not None and prepared.pricer.cluster.nic_bytes_per_s < node.scale_out_bytes_per_s:
        warnings.append(
            f"the network's ports ({fabric.link_bandwidth.text}) are slower than the node's NICs "
            f"({format_quantity(node.scale_out_bytes_per_s, 'bytes_per_s')}): transfers go at the ports' rate"
        )
    if prepared.loads is not None and prepared.loads.dropped > 0.0:
        warnings.append(
            f"routing.capacity drops {prepared.loads.dropped:.2%} of the expert rows: those tokens skip an "
            "expert, which the step time does not charge and the loss may"
        )
    warnings += unread_figures(prepared.cluster)
    unread = unread_curves(prepared)
    if unread:
        warnings.append(f"imported curves that no price of this plan reads: {'; '.join(unread)}")
    return warnings
