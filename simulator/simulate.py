"""One prediction: scenario in, result out."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

import moesim
from moesim.hwmodels.calibration import profile_hash
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.confidence import confidence, peak_only_note, statement
from moesim.hwmodels.host import HostCall, InBlock, load_host
from moesim.hwmodels.provenance import SourcedFraction, provenance_rows, sourced_numbers
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, format_quantity
from moesim.simulator.bounds import lower_bound_s, upper_bound_s
from moesim.simulator.causes import fault_effects
from moesim.simulator.collectives.library import load_library
from moesim.simulator.engine.critical import critical_path, seconds_by_cause
from moesim.simulator.engine.execute import Execution, execute_all, last_end
from moesim.simulator.engine.program import Program
from moesim.simulator.full.result import FullResult
from moesim.simulator.full.summary import full_result
from moesim.simulator.launches import host_report
from moesim.simulator.layout.memory import ALLOCATOR_SLACK, FRAMEWORK_BYTES
from moesim.simulator.layout.stages import describe
from moesim.simulator.model.counts import (
    blocks_flop_per_token,
    flop_per_token,
    parameters_mtp,
    parameters_total,
)
from moesim.simulator.model.precision import Precision
from moesim.simulator.prepare import Prepared, prepare
from moesim.simulator.report import (
    breakdowns,
    mean_breakdown,
    mean_over_groups,
    pair_phases,
    pair_seconds,
    utilisation,
)
from moesim.simulator.result import (
    CauseRow,
    MemoryResult,
    ProvenanceEntry,
    Result,
    RunResult,
    StepResult,
)
from moesim.simulator.run.interruptions import interruptions
from moesim.simulator.run.report import RunReport
from moesim.simulator.run.simulate_run import FloatArray, simulate_run
from moesim.simulator.run.work import StepFigures, phase_works
from moesim.simulator.scenario import Scenario


def simulate(scenario: Scenario) -> Result:
    """Predict one training step and the run made of it.

    Raises InputError for an illegal scenario. A plan that does not fit into memory is predicted all the
    same, with `memory.fits` false.
    """
    if scenario.fleet is not None:
        from moesim.simulator.fleet.simulate import simulate_fleet

        return simulate_fleet(scenario)
    prepared = prepare(scenario)
    return summarise(prepared, execute_all(prepared.programs))


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
        breakdown_alternative_s=mean_breakdown(split),
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
                    *pricer.evidence.extrapolated,
                    *prepared.memory.notes,
                    *prepared.shape.not_modelled,
                    *prepared.load_notes,
                    *peak_only_note(prepared.cluster, prepared.profile, scenario.recipe.linear),
                }
            )
        ),
        seed=scenario.seed,
        version=moesim.__version__,
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


def kept_rows(programs: Sequence[Program]) -> float:
    """Share of the routed rows that no capacity dropped, mean over layers, micro-batches and groups."""
    loads = [program.variation.loads for program in programs]
    return fsum(float(load.mean()) for load in loads) / len(loads) if loads[0].size else 1.0


def fastest_flop_per_s(cluster: Cluster, recipe: Precision) -> float:
    """Datasheet peak of one GPU in the fastest format that a recipe computes in."""
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
    programs: Sequence[Program],
) -> StepResult:
    """Rates of a step of `tokens`, each with FLOPs (causal, all of attention); peaks are those of a mean GPU:
    in BF16, which MFU refers to, and in the fastest format of the recipe.

    Raises RuntimeError for a step outside its bounds or above the fastest peak: a fault of the program.
    """
    per_gpu = tokens / time_s / n_gpus
    causal, full = (flop * per_gpu for flop in flop_per_token)
    lower_s, upper_s = lower_bound_s(programs), upper_bound_s(programs)
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


def provenance(prepared: Prepared) -> list[ProvenanceEntry]:
    """Every number and curve that a prediction stands on."""
    rows = [
        *provenance_rows(prepared.cluster, "cluster"),
        # An inline cluster or profile is a part of the scenario too: it is listed once.
        *(
            r
            for r in provenance_rows(prepared.scenario, "scenario")
            if not r.path.startswith(("scenario.cluster.", "scenario.profile."))
        ),
        *provenance_rows(prepared.profile, "profile"),
        *provenance_rows(FRAMEWORK_BYTES, "memory.framework"),
        *provenance_rows(ALLOCATOR_SLACK, "memory.allocator_slack"),
    ]
    entries = [
        ProvenanceEntry(path=r.path, value=r.value, unit=r.unit, kind=r.kind, source=r.source, date=r.date)
        for r in rows
    ]
    entries += _host_provenance(prepared)
    if any(id_.startswith("collective.") for id_ in prepared.pricer.evidence.entries):
        entries += _library_provenance()
    for id_ in sorted(prepared.pricer.evidence.entries):
        entry = prepared.profile.entry(id_)
        entries.append(
            ProvenanceEntry(
                path=f"profile.{id_}",
                value=None,
                unit="see profile",
                kind=entry.kind,
                source=entry.source,
                date=entry.date,
            )
        )
    return entries


def _host_provenance(prepared: Prepared) -> list[ProvenanceEntry]:
    """Times of the host's calls, where the scenario names a host: forward seconds of one call, in a row."""
    name = prepared.scenario.software.host
    if name is None:
        return []
    host = load_host(prepared.scenario.path(name))
    rows: list[tuple[str, float, str, HostCall | InBlock | SourcedFraction]] = []
    if host.factor is not None:
        rows.append(("factor", host.factor.value, "1", host.factor))
    measured = host.measured()
    if measured.in_block is not None:
        rows.append(("in_block", measured.in_block.forward, "1", measured.in_block))
    rows += [(kind, call.forward, "s", call) for kind, call in measured.calls.items()]
    return [
        ProvenanceEntry(
            path=f"host.{host.name}.{part}",
            value=value,
            unit=unit,
            kind=entry.kind,
            source=entry.source,
            date=entry.date,
        )
        for part, value, unit, entry in rows
    ]


def _library_provenance() -> list[ProvenanceEntry]:
    """What the rings of the pricer take from the communication library."""
    library = load_library()
    path, table = f"collectives.{library.name}", library.latencies
    used = {"wire_shares": library.wire_shares, "network_post": library.network_post}
    rows = [
        ProvenanceEntry(path=at, value=n.value, unit=n.dimension, kind=n.kind, source=n.source, date=n.date)
        for at, n in sourced_numbers(used, path)
    ]
    latencies = ProvenanceEntry(
        path=f"{path}.latencies",
        value=None,
        unit="see file",
        kind=table.kind,
        source=table.source,
        date=table.date,
    )
    return [latencies, *rows]
