"""From a finished execution to the result object."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.hwmodels.calibration import profile_hash
from moesim.hwmodels.confidence import confidence, peak_only_note, statement
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, format_quantity
from moesim.simulator.engine.critical import critical_path, seconds_by_cause
from moesim.simulator.engine.full_resolution.result import FullResult
from moesim.simulator.engine.full_resolution.summary import full_result
from moesim.simulator.engine.simpy.execute import Execution, execute_all, last_end
from moesim.simulator.layout.stages import describe
from moesim.simulator.model.counts import (
    blocks_flop_per_token,
    flop_per_token,
    parameters_mtp,
    parameters_total,
)
from moesim.simulator.predict.compile import Prepared, prepare
from moesim.simulator.predict.fault_effects import fault_effects
from moesim.simulator.predict.host_report import host_report
from moesim.simulator.predict.provenance import provenance
from moesim.simulator.predict.report import (
    breakdowns,
    mean_breakdown,
    mean_over_groups,
    pair_phases,
    pair_seconds,
    utilisation,
)
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import (
    CauseRow,
    MemoryResult,
    RunResult,
    StepResult,
)
from moesim.simulator.predict.step_result import fastest_flop_per_s, kept_rows, step_result
from moesim.simulator.run.interruptions import interruptions
from moesim.simulator.run.report import RunReport
from moesim.simulator.run.simulate_run import FloatArray, simulate_run
from moesim.simulator.run.work import StepFigures, phase_works
from moesim.simulator.scenario import Scenario
from moesim.version import __version__


def step_of(executions: Sequence[Execution]) -> float:
    """Seconds of the step."""
    return executions[0].end_ns / 1e9


def summarise(prepared: Prepared, executions: Sequence[Execution]) -> Result:
    """The result object of a finished execution of every program."""
    scenario, pricer = prepared.scenario, prepared.pricer
    time_s = step_of(executions)
    by_rank = mean_over_groups([breakdowns(execution) for execution in executions])
    split = mean_over_groups([breakdowns(execution, split_weight=True) for execution in executions])
    last = max(executions, key=lambda e: last_end(e.ranks))
    path = seconds_by_cause(critical_path(last))
    return Result(
        scenario=scenario.name,
        step=_step(prepared, time_s),
        breakdown_s=by_rank[0],
        breakdown_by_rank_s=tuple(by_rank),
        breakdown_split_w_s=mean_breakdown(split),
        forward_backward_pair_s=pair_seconds(executions),
        pair_phases=pair_phases(executions),
        utilisation=utilisation(executions, pricer.links.nic_bytes_per_s, pricer.links.scale_up_bytes_per_s),
        critical_path_s=tuple(CauseRow(cause=c, seconds=s) for c, s in path),
        memory=memory(prepared),
        run=_run(prepared, time_s),
        stages=tuple(describe(prepared.stages).splitlines()),
        profile=prepared.profile.name,
        profile_hash=profile_hash(prepared.profile),
        confidence=confidence(prepared.cluster, prepared.profile, scenario.recipe.linear),
        confidence_reason=statement(prepared.cluster, prepared.profile, scenario.recipe.linear),
        warnings=tuple(_warnings(prepared)),
        provenance=tuple(provenance(prepared)),
        extrapolated=tuple(
            sorted(
                {
                    *prepared.program.costs.evidence.notes,
                    *prepared.memory.notes,
                    *prepared.shape.not_modelled,
                    *prepared.load_notes,
                    *peak_only_note(prepared.cluster, prepared.profile, scenario.recipe.linear),
                }
            )
        ),
        seed=scenario.seed,
        version=__version__,
        full=_full(prepared, executions),
        host=host_report(scenario.software, executions[0].program, time_s),
        defaults=scenario.defaults,
    )


def _step(prepared: Prepared, time_s: float) -> StepResult:
    cluster, shape, programs = prepared.cluster, prepared.shape, prepared.programs
    length, kept = prepared.scenario.batch.sequence_length, kept_rows(programs)
    if prepared.scenario.stages.blocks is None:
        flop = [flop_per_token(shape, length, causal, kept) for causal in (True, False)]
    else:  # a part of the model: only what is simulated counts
        held = [block.kind for stage in prepared.stages.stages for block in stage]
        flop = [blocks_flop_per_token(shape, held, length, causal, kept) for causal in (True, False)]
    return step_result(
        (flop[0], flop[1]),
        _tokens(prepared),
        time_s,
        n_gpus=cluster.n_gpus,
        peak_flop_per_s=cluster.accelerator.peak_flop_per_s("bf16"),
        fastest_flop_per_s=fastest_flop_per_s(cluster, prepared.scenario.recipe),
        programs=programs,
    )


def _full(prepared: Prepared, executions: Sequence[Execution]) -> FullResult | None:
    if prepared.whole is None:
        return None
    causes = fault_effects(prepared.scenario, executions[0].end_ns / 1e9)
    return full_result(prepared.whole, executions, causes)


def _tokens(prepared: Prepared) -> int:
    """Tokens of a step; groups that a lost node stopped do not train theirs."""
    batch, whole = prepared.scenario.batch, prepared.whole
    tokens = batch.sequences * batch.sequence_length
    return tokens if whole is None else tokens * len(whole.running) // whole.gpus.shape[1]


def _run(prepared: Prepared, time_s: float) -> RunResult:
    scenario, cluster = prepared.scenario, prepared.cluster
    tokens = _tokens(prepared)
    steps = -(-scenario.run.tokens // tokens)
    gpu_hours = steps * time_s / SECONDS_PER_HOUR * cluster.n_gpus
    price = cluster.price_per_gpu_hour
    return RunResult(
        tokens=scenario.run.tokens,
        steps=int(steps),
        days=steps * time_s / SECONDS_PER_DAY,
        gpu_hours=gpu_hours,
        cost_usd=gpu_hours * price.value if price else None,
        report=run_report(prepared, time_s) if scenario.run.asks_for_more else None,
    )


def run_report(prepared: Prepared, time_s: float, factors: FloatArray | None = None) -> RunReport:
    """The whole run of a prepared scenario whose step takes `time_s` s: phases, stops, bill.

    Steps of other batches and phases are simulated here. `factors`: see `simulate_run`. Raises InputError
    for an illegal phase, InfeasibleError for a run that practically never ends.
    """
    scenario, plan = prepared.scenario, prepared.scenario.run

    def measure(of: Scenario) -> StepFigures:
        if of is scenario:
            return StepFigures(time_s, prepared.memory.total_bytes, prepared.memory.capacity_bytes)
        other = prepare(of)
        seconds = execute_all(other.programs)[0].end_ns / 1e9
        return StepFigures(seconds, other.memory.total_bytes, other.memory.capacity_bytes)

    trained = parameters_total(prepared.shape) + parameters_mtp(prepared.shape)
    stops = interruptions(plan, prepared.cluster, trained, scenario.recipe)
    works = phase_works(scenario, measure)
    return simulate_run(plan, prepared.cluster, works, stops, scenario.seed, factors)


def memory(prepared: Prepared) -> MemoryResult:
    """Bytes of the fullest GPU."""
    report = prepared.memory
    return MemoryResult(
        total_bytes=report.total_bytes,
        range_bytes=report.by_rank[report.fullest_rank].range,
        capacity_bytes=report.capacity_bytes,
        fits=report.fits,
        by_kind_bytes=report.by_kind_bytes,
    )


def _warnings(prepared: Prepared) -> list[str]:
    found = []
    if prepared.scenario.stages.blocks is not None:
        count = sum(len(stage) for stage in prepared.stages.stages)
        found.append(
            f"stages.blocks is given: {count} blocks are simulated, and FLOPs and MFU count these alone"
        )
    node, fabric = prepared.cluster.node, prepared.cluster.network.fabric
    if fabric is not None and prepared.pricer.nic_bytes_per_s < node.scale_out_bytes_per_s:
        found.append(
            f"the network's ports ({fabric.link_bandwidth.text}) are slower than the node's NICs "
            f"({format_quantity(node.scale_out_bytes_per_s, 'bytes_per_s')}): transfers go at the ports' rate"
        )
    if prepared.loads is not None and prepared.loads.dropped > 0.0:
        found.append(
            f"routing.capacity drops {prepared.loads.dropped:.2%} of the expert rows: those tokens skip an "
            "expert, which the step time does not charge and the loss may"
        )
    return found
