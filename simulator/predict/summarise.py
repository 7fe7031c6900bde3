"""Builds the result object of a finished execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec.structs import replace

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.calibration import profile_hash
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.confidence import LEVELS, Confidence, confidence, confidence_statement, peak_only_note
from moesim.hwmodels.price import mixed_terms
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, format_quantity
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.transfers import domains_met, exchange_seconds, sends_over_tiers
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
    step_energy,
    step_result,
    utilisation,
)
from moesim.simulator.predict.result import SCHEMA_VERSION, Result
from moesim.simulator.predict.result_parts import (
    Breakdown,
    CauseRow,
    RunResult,
    StepEnergy,
    StepResult,
    TierCost,
    Utilisation,
    host_report,
)
from moesim.simulator.predict.step import ExecutedStep, Prepared, run_step
from moesim.simulator.run.bill import BoardPower
from moesim.simulator.run.report import RunReport
from moesim.simulator.run.simulate_run import (
    StepFigures,
    interruptions,
    phase_works,
    simulate_run,
)
from moesim.simulator.scenario.inputs import inputs_of
from moesim.version import __version__

# -- run report --------------------------------------------------------------------------------------
# Reports the whole run of a prepared scenario with its phases, interruptions and bill.


def run_report(
    prepared: Prepared,
    time_s: float,
    factors: FloatArray | None = None,
    energy: StepEnergy | None = None,
) -> RunReport:
    """The whole run of a prepared scenario whose step takes `time_s` seconds.

    Simulates the steps of other batches and phases. `factors`: see `simulate_run`. `energy`: of the
    step. Raises InputError for an
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
    power = gpu_power(job.cluster, energy)
    return simulate_run(plan, job.cluster, works, stops, scenario.seed, factors, power)


def gpu_power(cluster: Cluster, energy: StepEnergy | None) -> BoardPower | None:
    """Power of a GPU with its share of the node; None where the power of board or node is not known."""
    if energy is None or cluster.node.power is None or cluster.accelerator.tdp is None:
        return None
    rest_w = max(0.0, cluster.node.power_w_per_gpu - cluster.accelerator.tdp_w)
    return BoardPower(energy.board_w + rest_w, energy.waiting_w + rest_w)


def summarise(step: ExecutedStep) -> Result:
    """The result of an executed step; a cluster is treated as a fleet of one pool.

    What takes time is worked out when it is read, and for full resolution, whose arrays are large, at once.
    """
    prepared, executions, time_s = step.prepared, step.executions, step.time_s
    scenario, profiles = prepared.scenario, {p.job.profile.name: p.job.profile for p in prepared.pools}
    level, reason = _confidence(prepared)
    energy = cache(lambda: None if prepared.of_fleet else step_energy(prepared, executions, time_s))
    now: dict[str, Any] = {
        "scenario": scenario.name,
        "inputs": inputs_of(scenario, n_gpus=prepared.n_gpus),
        "step": _step(prepared, executions, time_s),
        "memory": prepared.memory,
        "run": _run(prepared, time_s, energy),
        "stages": tuple(describe(prepared.stages).splitlines()),
        "profile": " + ".join(profiles),
        "profile_hash": joined_hash([profile_hash(profile) for profile in profiles.values()]),
        "confidence": level,
        "confidence_reason": reason,
        "seed": scenario.seed,
        "version": __version__,
        "uncertainty": None,
        "schema_version": SCHEMA_VERSION,
    }
    result = Result.of(now, _later(step) | {"energy": energy})
    if prepared.whole is None:
        return result
    _ = result.full  # first: it reads durations, of which the other fields need only figures
    return result.completed()


def _later(step: ExecutedStep) -> dict[str, Callable[[], Any]]:
    """Functions that work out the fields of a result that take time."""
    prepared, executions, time_s = step.prepared, step.executions, step.time_s
    of_fleet, whole = prepared.of_fleet, prepared.whole

    @cache
    def by_rank() -> tuple[Breakdown, ...]:
        return tuple(mean_over_groups([breakdowns(execution) for execution in executions]))

    moved = cache(lambda: moved_bytes(executions))

    def busy() -> Utilisation:
        # Nominal rates of an average GPU's NICs and scale-up ports in bytes/s.
        nic, scale_up = (
            mean_per_rank(prepared, lambda pool: pool.pricer.links.nic_bytes_per_s),
            mean_per_rank(prepared, lambda pool: pool.pricer.links.scale_up_bytes_per_s),
        )
        return utilisation(executions, moved(), nic, scale_up)

    def path() -> tuple[CauseRow, ...]:
        causes = seconds_by_cause(critical_path(last_group(executions)))
        return tuple(CauseRow(cause=cause, seconds=seconds) for cause, seconds in causes)

    return {
        "breakdown_s": lambda: by_rank()[0],
        "breakdown_by_rank_s": by_rank,
        "breakdown_split_w_s": lambda: mean_breakdown(
            mean_over_groups([breakdowns(execution, split_weight=True) for execution in executions])
        ),
        "forward_backward_pair_s": lambda: pair_seconds(executions),
        "pair_phases": lambda: pair_phases(executions),
        "utilisation": busy,
        "moved_bytes": moved,
        "critical_path_s": path,
        "warnings": lambda: mixed_terms(_terms(prepared)) if of_fleet else tuple(_warnings(prepared)),
        "provenance": lambda: tuple(pools_provenance(prepared)),
        "extrapolated": lambda: tuple(sorted(_extrapolated(prepared))),
        "full": lambda: whole and full_result(whole, executions, fault_effects(prepared, time_s)),
        "network": lambda: () if of_fleet else tuple(_tier_costs(step)),
        "host": lambda: (
            None if of_fleet else host_report(prepared.scenario.software, executions[0].program, time_s)
        ),
        "defaults": lambda: prepared.scenario.defaults_on([pool.part.cluster for pool in prepared.pools]),
        "pools": lambda: pool_results(prepared, executions[0]) if of_fleet else (),
    }


def _terms(prepared: Prepared) -> dict[str, str]:
    """The label of each pool's price."""
    return {
        pool.part.label: pool.part.cluster.price_per_gpu_hour.label
        for pool in prepared.pools
        if pool.part.cluster.price_per_gpu_hour is not None
    }


def _tier_costs(step: ExecutedStep) -> Iterator[TierCost]:
    """The cost of each level that limits the network, by the same step without it.

    In full resolution switches are simulated and only the link between buildings can be taken away.
    """
    prepared, pricer = step.prepared, step.prepared.pricer
    whole, execution, plan = prepared.whole is not None, step.executions[0], prepared.scenario.parallel
    costs, layout = prepared.program.costs, prepared.layout
    for tier in pricer.tiers:
        cluster, buildings = prepared.cluster, prepared.cluster.network.buildings
        if tier.to_each and buildings is not None:
            network = cluster.network.model_copy(update={"buildings": buildings.without_limit()})
            cluster = cluster.model_copy(update={"network": network})
        elif whole:
            continue
        others = tuple(other for other in pricer.tiers if other is not tier)
        job = replace(prepared.job.with_rates(cluster=cluster), tiers=others)
        without_s = run_step(job, engine=prepared.engine.name).time_s
        alone = Pricer(replace(prepared.job, tiers=(tier,)))
        sends = sends_over_tiers(alone, costs.send_s, costs.send_bytes)
        mirrored = len(prepared.schedule.routes) > 1
        crossed = {
            "pipeline sends": bool(sends.crossing),
            "rings of gradients and parameters": layout.dp * plan.cp > 1
            and domains_met(tier, layout, layout.gpus_per_pipeline_rank, mirrored=mirrored) > 1,
            "expert-parallel exchanges": plan.ep > 1
            and exchange_seconds(tier, plan.ep * plan.expert_tp, layout.gpus_per_node, 1.0) is not None,
        }
        busy = None
        if len(pricer.tiers) == 1 and not whole and sends.crossing:
            carried = execution.carried_bytes[-len(sends.bytes_per_s) :] / np.array(sends.bytes_per_s)
            busy = float(carried.max()) / step.time_s
        yield TierCost(
            tier=tier.name,
            gpus=tier.gpus,
            bytes_per_s=tier.bytes_per_s,
            latency_s=tier.latency_s,
            crossed_by=tuple(name for name, does in crossed.items() if does),
            busy=busy,
            step_without_s=without_s,
            cost_s=step.time_s - without_s,
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
        tables=lambda: [execution.tasks for execution in executions],
    )


def _tokens(prepared: Prepared) -> int:
    """Tokens of a step, without those of groups that a lost node stopped."""
    batch, whole = prepared.scenario.batch, prepared.whole
    tokens = batch.sequences * batch.sequence_length
    return tokens if whole is None else tokens * len(whole.running) // whole.gpus.shape[1]


def _run(prepared: Prepared, time_s: float, energy: Callable[[], StepEnergy | None]) -> RunResult:
    plan = prepared.scenario.run
    steps = -(-plan.tokens // _tokens(prepared))
    hours = steps * time_s / SECONDS_PER_HOUR
    if prepared.of_fleet:
        price = usd_per_hour([pool.part.cluster for pool in prepared.pools])
    else:
        per_gpu = prepared.cluster.price_per_gpu_hour
        price = None if per_gpu is None else prepared.n_gpus * per_gpu.value
    labels = set() if price is None else set(_terms(prepared).values())
    return RunResult(
        tokens=plan.tokens,
        steps=int(steps),
        days=steps * time_s / SECONDS_PER_DAY,
        gpu_hours=hours * prepared.n_gpus,
        cost_usd=None if price is None else hours * price,
        price_term=" and ".join(sorted(labels)),
        report=run_report(prepared, time_s, energy=energy()) if plan.asks_for_more else None,
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
