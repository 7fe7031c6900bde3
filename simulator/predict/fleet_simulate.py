"""One prediction of a job on a fleet: the result of a single cluster, and what each pool does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import fsum

from moesim.hwmodels.calibration import profile_hash
from moesim.hwmodels.confidence import LEVELS, confidence, peak_only_note, statement
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.engine.critical import critical_path, seconds_by_cause
from moesim.simulator.engine.simpy.execute import Execution, execute
from moesim.simulator.layout.pools import Part, usd_per_hour
from moesim.simulator.layout.stages import describe
from moesim.simulator.model.counts import flop_per_token
from moesim.simulator.predict.compile import Prepared
from moesim.simulator.predict.fleet_compile import PreparedFleet, prepare_fleet
from moesim.simulator.predict.placement import block_seconds
from moesim.simulator.predict.provenance import provenance
from moesim.simulator.predict.report import breakdowns, mean_breakdown, pair_phases, pair_seconds, utilisation
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import (
    CauseRow,
    MemoryResult,
    PoolResult,
    ProvenanceEntry,
    RunResult,
    StepResult,
)
from moesim.simulator.predict.step_result import fastest_flop_per_s, kept_rows, step_result
from moesim.simulator.scenario import Scenario
from moesim.version import __version__


def simulate_fleet(scenario: Scenario) -> Result:
    """Predict one training step of a scenario with a fleet, and the run made of it.

    Raises InputError, naming the pool, for an illegal scenario. A plan that does not fit into the memory of
    a pool is predicted all the same, with `memory.fits` false.
    """
    fleet = prepare_fleet(scenario)
    return fleet_result(fleet, execute(fleet.program))


def fleet_result(fleet: PreparedFleet, execution: Execution) -> Result:
    """The result object of a finished execution; rates and memory are counted pool by pool."""
    scenario, recipe = fleet.scenario, fleet.scenario.recipe
    by_rank, time_s = breakdowns(execution), execution.end_ns / 1e9
    pools = pool_results(fleet, execution)
    profiles = {p.profile.name: profile_hash(p.profile) for p in fleet.prepared}
    notes: set[str] = set(fleet.prepared[0].shape.not_modelled)
    for part, prepared in zip(fleet.parts, fleet.prepared, strict=True):
        notes |= {*prepared.pricer.evidence.extrapolated, *prepared.memory.notes, *prepared.load_notes}
        notes |= set(peak_only_note(part.cluster, prepared.profile, recipe.linear))
    ports = [
        [
            getattr(p.pricer.links, name)
            for part, p in zip(fleet.parts, fleet.prepared, strict=True)
            for _ in part.ranks
        ]
        for name in ("nic_bytes_per_s", "scale_up_bytes_per_s")
    ]
    nic, scale_up = (fsum(rates) / len(rates) for rates in ports)
    return Result(
        scenario=scenario.name,
        step=_step(fleet, time_s),
        breakdown_s=by_rank[0],
        breakdown_by_rank_s=tuple(by_rank),
        breakdown_split_w_s=mean_breakdown(breakdowns(execution, split_weight=True)),
        forward_backward_pair_s=pair_seconds([execution]),
        pair_phases=pair_phases([execution]),
        utilisation=utilisation([execution], nic, scale_up),
        critical_path_s=tuple(
            CauseRow(cause=c, seconds=s) for c, s in seconds_by_cause(critical_path(execution))
        ),
        memory=max((pool.memory for pool in pools), key=lambda m: m.total_bytes / m.capacity_bytes),
        run=_run(fleet, time_s),
        stages=tuple(describe(fleet.prepared[0].stages).splitlines()),
        profile=" + ".join(profiles),
        profile_hash=joined_hash(list(profiles.values())),
        confidence=max((pool.confidence for pool in pools), key=LEVELS.index),
        confidence_reason="; ".join(f"{pool.accelerator}: {pool.confidence_reason}" for pool in pools),
        warnings=(),
        provenance=tuple(_provenance(fleet)),
        extrapolated=tuple(sorted(notes)),
        seed=scenario.seed,
        version=__version__,
        defaults=scenario.defaults,
        pools=pools,
    )


def pool_results(fleet: PreparedFleet, execution: Execution) -> tuple[PoolResult, ...]:
    """What each pool does in a finished execution."""
    bubbles = [rank.bubble for rank in breakdowns(execution)]
    return tuple(_pool(part, p, bubbles) for part, p in zip(fleet.parts, fleet.prepared, strict=True))


def _pool(part: Part, prepared: Prepared, bubbles: Sequence[float]) -> PoolResult:
    ranks, linear = part.ranks, prepared.scenario.recipe.linear
    layers = prepared.stages.layers_per_stage
    held = {stage for rank in ranks for stage in prepared.schedule.stages_on_rank(rank)}
    return PoolResult(
        accelerator=part.cluster.accelerator.name,
        n_gpus=part.cluster.n_gpus,
        first_rank=ranks[0],
        last_rank=ranks[-1],
        layers=sum(layers[stage] for stage in held),
        layer_s=block_seconds(prepared.pricer, prepared.shape.main_layer_kind),
        bubble_s=fsum(bubbles[rank] for rank in ranks) / len(ranks),
        memory=pool_memory(part, prepared),
        profile=prepared.profile.name,
        confidence=confidence(part.cluster, prepared.profile, linear),
        confidence_reason=statement(part.cluster, prepared.profile, linear),
    )


def pool_memory(part: Part, prepared: Prepared) -> MemoryResult:
    """Bytes of the fullest GPU of a pool."""
    by_rank, capacity = prepared.memory.by_rank, part.cluster.accelerator.hbm_bytes
    fullest = max(part.ranks, key=lambda rank: (by_rank[rank].total, -rank))
    return MemoryResult(
        total_bytes=by_rank[fullest].total,
        range_bytes=by_rank[fullest].range,
        capacity_bytes=capacity,
        fits=by_rank[fullest].total <= capacity,
        by_kind_bytes=by_rank[fullest].by_kind(),
    )


def joined_hash(hashes: Sequence[str]) -> str:
    """One hash for the profiles of all pools; that of the only one where they share it."""
    different = list(dict.fromkeys(hashes))
    return different[0] if len(different) == 1 else hashlib.sha256("".join(different).encode()).hexdigest()


def _step(fleet: PreparedFleet, time_s: float) -> StepResult:
    batch, clusters = fleet.scenario.batch, [part.cluster for part in fleet.parts]
    recipe, shape = fleet.scenario.recipe, fleet.prepared[0].shape
    peaks = [c.n_gpus * c.accelerator.peak_flop_per_s("bf16") for c in clusters]
    fastest = [c.n_gpus * fastest_flop_per_s(c, recipe) for c in clusters]
    kept = kept_rows([fleet.program])
    causal, full = (flop_per_token(shape, batch.sequence_length, half, kept) for half in (True, False))
    return step_result(
        (causal, full),
        batch.sequences * batch.sequence_length,
        time_s,
        n_gpus=fleet.n_gpus,
        peak_flop_per_s=fsum(peaks) / fleet.n_gpus,
        fastest_flop_per_s=fsum(fastest) / fleet.n_gpus,
        programs=[fleet.program],
    )


def _run(fleet: PreparedFleet, time_s: float) -> RunResult:
    batch, tokens = fleet.scenario.batch, fleet.scenario.run.tokens
    steps = -(-tokens // (batch.sequences * batch.sequence_length))
    hours, price = steps * time_s / SECONDS_PER_HOUR, usd_per_hour([part.cluster for part in fleet.parts])
    return RunResult(
        tokens=tokens,
        steps=int(steps),
        days=steps * time_s / SECONDS_PER_DAY,
        gpu_hours=hours * fleet.n_gpus,
        cost_usd=None if price is None else hours * price,
    )


def _provenance(fleet: PreparedFleet) -> list[ProvenanceEntry]:
    """Entries of every pool under its number; those of the scenario and of the memory model once."""
    found: dict[str, ProvenanceEntry] = {}
    for number, prepared in enumerate(fleet.prepared):
        for entry in provenance(prepared):
            shared = entry.path.startswith(("scenario.", "memory.", "collectives."))
            path = entry.path if shared else f"pools.{number}.{entry.path}"
            found.setdefault(path, entry.model_copy(update={"path": path}))
    return list(found.values())
