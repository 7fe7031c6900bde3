"""One prediction: scenario in, result out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import moesim
from moesim.hwmodels.calibration import CalibrationProfile, load_profile, profile_hash
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import provenance_rows
from moesim.simulator.bounds import lower_bound_s, upper_bound_s
from moesim.simulator.engine.critical import critical_path, seconds_by_cause
from moesim.simulator.engine.execute import Execution, execute
from moesim.simulator.engine.program import Program, Variation, compile_program
from moesim.simulator.layout.in_flight import rank_stages
from moesim.simulator.layout.loads import sampled_loads
from moesim.simulator.layout.memory import MemoryReport, memory_by_kind
from moesim.simulator.layout.parallel import Layout, check_against_model, microbatches
from moesim.simulator.layout.stages import (
    Block,
    StageAssignment,
    balanced,
    blocks_of,
    describe,
    from_layers_per_stage,
)
from moesim.simulator.model.counts import flop_per_token
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape, load_model
from moesim.simulator.pricing import Pricer, check_profile
from moesim.simulator.report import breakdowns, mean_breakdown, pair_phases, pair_seconds, utilisation
from moesim.simulator.result import (
    CauseRow,
    MemoryResult,
    ProvenanceEntry,
    Result,
    RunResult,
    StepResult,
)
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Overlap, Schedule, build, from_csv, validate

MOST_MEMBERS = 256
"""Data-parallel ranks that the folded engine carries for a model without expert parallelism."""

SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario with everything resolved, before any time is simulated."""

    scenario: Scenario
    shape: ModelShape
    cluster: Cluster
    profile: CalibrationProfile
    layout: Layout
    schedule: Schedule
    stages: StageAssignment
    pricer: Pricer
    program: Program
    memory: MemoryReport


def prepare(scenario: Scenario) -> Prepared:
    """Resolve names, check the plan, assign stages, price and compile.

    Raises InputError for anything that does not fit together, naming key, value and nearest legal values.
    """
    shape = load_model(scenario.path(scenario.model))
    cluster, plan = scenario.machine, scenario.parallel
    profile = load_profile(scenario.path(scenario.profile))
    check_profile(profile, cluster)
    _check_sms(scenario, cluster)
    layout = Layout(plan, cluster.n_gpus, cluster.node.n_gpus)
    count = microbatches(layout, scenario.batch.sequences)
    schedule = load_schedule(scenario, count)
    partial = scenario.stages.blocks is not None
    check_against_model(plan, shape, scenario.batch.sequence_length, 1 if partial else schedule.n_stages)
    _check_combination(scenario, schedule)
    pricer = Pricer(scenario, shape, cluster, profile, layout)
    stages = assign_stages(scenario, pricer, schedule)
    costs = pricer.table(schedule, stages)
    kinds = [[block.kind for block in stage] for stage in stages.stages]
    variation = draw_variation(scenario, shape, layout, schedule, kinds, pricer.received_rows)
    links = pricer.links
    program = compile_program(
        schedule,
        kinds,
        costs,
        scenario.communication.order,
        variation,
        links.nic_bytes_per_s or 1.0,  # a single node has no NIC traffic; its links still need a rate
        links.scale_up_bytes_per_s,
    )
    report = memory_by_kind(
        shape,
        layout,
        scenario.recipe,
        stages,
        rank_stages(schedule),
        sequence=scenario.batch.sequence_length,
        recompute=scenario.recompute,
        communication_sms=scenario.communication.sms,
        capacity_bytes=cluster.accelerator.hbm_bytes,
    )
    return Prepared(scenario, shape, cluster, profile, layout, schedule, stages, pricer, program, report)


def simulate(scenario: Scenario) -> Result:
    """Predict one training step and the run made of it.

    Raises InputError for an illegal scenario. A plan that does not fit into memory is predicted all the
    same, with `memory.fits` false.
    """
    prepared = prepare(scenario)
    return summarise(prepared, execute(prepared.program))


def load_schedule(scenario: Scenario, count: int) -> Schedule:
    """The named schedule, or the CSV file that the scenario names, for `count` micro-batches."""
    plan = scenario.parallel
    if not scenario.schedule.lower().endswith(".csv"):
        return build(scenario.schedule, plan.pp, count, plan.vpp)
    path = Path(scenario.path(scenario.schedule))
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"schedule: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"schedule: {path} is not a text file") from None
    schedule = from_csv(text, name=path.stem, source=str(path))
    for key, have, want in (
        ("parallel.pp", schedule.pp, plan.pp),
        ("micro-batches", schedule.microbatches, count),
    ):
        if have != want:
            raise InputError(f"schedule: {path} is for {key}={have}, but the scenario has {want}")
    validate(schedule)
    return schedule


def _check_sms(scenario: Scenario, cluster: Cluster) -> None:
    sms, total = scenario.communication.sms, cluster.accelerator.n_sms
    if sms >= total:
        raise InputError(
            f"communication.sms={sms} leaves no SM for compute: {cluster.accelerator.name} has {total}; "
            f"use at most {total - 1} (DeepEP uses 20 to 24)"
        )


def _check_combination(scenario: Scenario, schedule: Schedule) -> None:
    overlapped = any(isinstance(step, Overlap) for rank in schedule.ranks for step in rank)
    if scenario.parallel.zero_stage == 3 and overlapped:
        raise InputError(
            f"parallel.zero_stage=3 with schedule={schedule.name}: parameter gathers have no slot in an "
            "overlapped pair; use zero_stage 0 to 2, or a schedule without pairs such as 1f1b"
        )


def assign_stages(scenario: Scenario, pricer: Pricer, schedule: Schedule) -> StageAssignment:
    """Stages as the scenario says; otherwise balanced by the compute of one micro-batch on all SMs (eq. S1).

    The principle is fixed beforehand: the heaviest stage is as light as it can be, embedding on the
    first stage, MTP module and head passes on the last (docs/decisions/0003-stage-balance.md).
    """
    if scenario.stages.blocks is not None:
        stages = explicit_blocks(scenario.stages.blocks, schedule.n_stages)
        _check_blocks(stages, pricer.shape)
        return stages
    blocks = blocks_of(pricer.shape)
    if scenario.stages.layers is not None:
        if len(scenario.stages.layers) != schedule.n_stages:
            raise InputError(
                f"stages.layers has {len(scenario.stages.layers)} entries, but {schedule.name} with "
                f"parallel.pp={scenario.parallel.pp} has {schedule.n_stages} stages"
            )
        return from_layers_per_stage(blocks, scenario.stages.layers)
    weight = {kind: _compute_s(pricer, kind) for kind in sorted({block.kind for block in blocks})}
    return balanced(blocks, [weight[block.kind] for block in blocks], schedule.n_stages)


def _check_blocks(stages: StageAssignment, shape: ModelShape) -> None:
    """Explicit blocks must be of kinds that the model has."""
    missing = {"moe": shape.moe is None, "dense": shape.dense_ffn is None, "mtp": shape.mtp_layers == 0}
    for number, stage in enumerate(stages.stages):
        for block in stage:
            if missing.get(block.kind, False):
                has = ", ".join(kind for kind in ("dense", "moe", "mtp") if not missing[kind])
                raise InputError(
                    f"stages.blocks.{number} names a {block.kind} block, but model {shape.name} has none; it "
                    f"has {has}, embedding and head"
                )


def _compute_s(pricer: Pricer, kind: BlockKind) -> float:
    costs = [pricer.phase(ops, "alone") for ops in pricer.operators(kind).values()]
    return sum(cost.fixed_s + cost.row_s for cost in costs)


def explicit_blocks(texts: Sequence[str], n_stages: int) -> StageAssignment:
    """Stages from texts such as "embedding dense*3 moe" (kinds with a count)."""
    kinds: tuple[BlockKind, ...] = ("embedding", "dense", "moe", "mtp", "head")
    if len(texts) != n_stages:
        raise InputError(f"stages.blocks has {len(texts)} entries, but the schedule has {n_stages} stages")
    stages = []
    for number, text in enumerate(texts):
        stage: list[Block] = []
        for word in text.split():
            name, _, times = word.partition("*")
            kind = next((k for k in kinds if k == name), None)
            if kind is None or not (times.isdigit() or not times) or len(times) > 4:
                raise InputError(
                    f"stages.blocks.{number}={text!r}: {word!r} is not a block; write {', '.join(kinds)}, "
                    "with a count such as moe*4"
                )
            stage.extend([Block(kind)] * int(times or 1))
        if not stage:
            raise InputError(f"stages.blocks.{number} is empty: every stage needs a block")
        stages.append(tuple(stage))
    return StageAssignment(tuple(stages))


def draw_variation(
    scenario: Scenario,
    shape: ModelShape,
    layout: Layout,
    schedule: Schedule,
    kinds: Sequence[Sequence[BlockKind]],
    received_rows: float,
) -> Variation:
    """Seeded vectors of one value a member: GPU speed, expert load, and the node average of the load."""
    plan = scenario.parallel
    members = plan.ep if plan.ep > 1 else min(layout.dp, MOST_MEMBERS)
    clock_cv = scenario.variation.clock_cv.value
    rng = np.random.default_rng([scenario.seed, 1])
    clock = 1.0 / np.maximum(1.0 + clock_cv * rng.standard_normal((schedule.pp, members)), 0.1)
    routed = sum(kind in ("moe", "mtp") for stage in kinds for kind in stage)
    cv = scenario.routing.expert_load_cv.value
    if shape.moe is None or not routed or plan.ep == 1 or cv == 0.0:
        flat = np.ones((routed, schedule.microbatches, members))
        if clock_cv == 0.0 and scenario.variation.jitter_cv.value == 0.0:
            clock, flat = clock[:, :1], flat[:, :, :1]  # every member is the same: one stands for all
        return Variation(clock, flat, flat, scenario.variation.jitter_cv.value, scenario.seed)
    samples = routed * schedule.microbatches
    loads = sampled_loads(scenario.seed, samples, plan.ep, shape.moe.experts, cv, received_rows)
    per_node = min(plan.ep, layout.gpus_per_node)
    nodes = loads.reshape(samples, plan.ep // per_node, per_node).mean(axis=2).repeat(per_node, axis=1)
    full = (routed, schedule.microbatches, members)
    return Variation(
        clock, loads.reshape(full), nodes.reshape(full), scenario.variation.jitter_cv.value, scenario.seed
    )


def summarise(prepared: Prepared, execution: Execution) -> Result:
    """The result object of a finished execution."""
    scenario, pricer = prepared.scenario, prepared.pricer
    time_s = execution.end_ns / 1e9
    by_rank = breakdowns(execution)
    path = seconds_by_cause(critical_path(execution))
    links = pricer.links
    return Result(
        scenario=scenario.name,
        step=_step(prepared, time_s),
        breakdown_s=by_rank[0],
        breakdown_by_rank_s=tuple(by_rank),
        breakdown_alternative_s=mean_breakdown(breakdowns(execution, split_weight=True)),
        forward_backward_pair_s=pair_seconds(execution),
        pair_phases=pair_phases(execution),
        utilisation=utilisation(execution, links.nic_bytes_per_s, links.scale_up_bytes_per_s),
        critical_path_s=tuple(CauseRow(cause=c, seconds=s) for c, s in path),
        memory=memory(prepared),
        run=_run(prepared, time_s),
        stages=tuple(describe(prepared.stages).splitlines()),
        profile=prepared.profile.name,
        profile_hash=profile_hash(prepared.profile),
        warnings=tuple(_warnings(prepared)),
        provenance=tuple(_provenance(prepared)),
        extrapolated=tuple(
            sorted({*pricer.evidence.extrapolated, *prepared.memory.notes, *prepared.shape.not_modelled})
        ),
        seed=scenario.seed,
        version=moesim.__version__,
    )


def _step(prepared: Prepared, time_s: float) -> StepResult:
    scenario, cluster = prepared.scenario, prepared.cluster
    tokens = scenario.batch.sequences * scenario.batch.sequence_length
    per_gpu = tokens / time_s / cluster.n_gpus
    length = scenario.batch.sequence_length
    causal, full = (flop_per_token(prepared.shape, length, causal) * per_gpu for causal in (True, False))
    peak = cluster.accelerator.peak_flop_per_s("bf16")
    return StepResult(
        time_s=time_s,
        tokens=tokens,
        tokens_per_s=tokens / time_s,
        tokens_per_s_per_gpu=per_gpu,
        tokens_per_day=tokens / time_s * SECONDS_PER_DAY,
        tflops_per_gpu_causal=causal / 1e12,
        tflops_per_gpu_noncausal=full / 1e12,
        mfu_causal=causal / peak,
        mfu_noncausal=full / peak,
        lower_bound_s=lower_bound_s(prepared.program),
        upper_bound_s=upper_bound_s(prepared.program),
    )


def _run(prepared: Prepared, time_s: float) -> RunResult:
    scenario, cluster = prepared.scenario, prepared.cluster
    tokens = scenario.batch.sequences * scenario.batch.sequence_length
    steps = -(-scenario.run.tokens // tokens)
    gpu_hours = steps * time_s / 3600.0 * cluster.n_gpus
    price = cluster.price_per_gpu_hour
    return RunResult(
        tokens=scenario.run.tokens,
        steps=int(steps),
        days=steps * time_s / SECONDS_PER_DAY,
        gpu_hours=gpu_hours,
        cost_usd=gpu_hours * price.value if price else None,
    )


def memory(prepared: Prepared) -> MemoryResult:
    """Bytes of the fullest GPU."""
    report = prepared.memory
    return MemoryResult(
        total_bytes=report.total_bytes,
        capacity_bytes=report.capacity_bytes,
        fits=report.fits,
        by_kind_bytes=report.by_kind_bytes,
    )


def _warnings(prepared: Prepared) -> list[str]:
    found = []
    if prepared.scenario.stages.blocks is not None:
        count = sum(len(stage) for stage in prepared.stages.stages)
        found.append(
            f"stages.blocks is given: {count} blocks are simulated, FLOPs and MFU count the whole model"
        )
    return found


def _provenance(prepared: Prepared) -> list[ProvenanceEntry]:
    rows = [
        *provenance_rows(prepared.cluster, "cluster"),
        # An inline cluster is a part of the scenario too: it is listed once.
        *(
            r
            for r in provenance_rows(prepared.scenario, "scenario")
            if not r.path.startswith("scenario.cluster.")
        ),
    ]
    entries = [
        ProvenanceEntry(path=r.path, value=r.value, unit=r.unit, kind=r.kind, source=r.source, date=r.date)
        for r in rows
    ]
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
