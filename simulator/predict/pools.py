"""Summarises each pool of a fleet after an execution, and averages figures over all pools (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from math import fsum

from moesim.hwmodels.confidence import confidence, confidence_statement
from moesim.simulator.engine.records import Execution
from moesim.simulator.predict.placement import block_seconds
from moesim.simulator.predict.provenance import provenance
from moesim.simulator.predict.report import breakdowns
from moesim.simulator.predict.result_parts import PoolResult, ProvenanceEntry
from moesim.simulator.predict.step import Prepared, PreparedPool


def pool_results(prepared: Prepared, execution: Execution) -> tuple[PoolResult, ...]:
    """Layers, bubble, memory and confidence of each pool in a finished execution."""
    bubbles, results = [rank.bubble for rank in breakdowns(execution)], []
    for pool in prepared.pools:
        ranks, cluster, job = pool.part.ranks, pool.part.cluster, pool.job
        linear, layers = job.scenario.recipe.linear, pool.stages.layers_per_stage
        stages = {stage for rank in ranks for stage in pool.schedule.stages_on_rank(rank)}
        results.append(
            PoolResult(
                accelerator=cluster.accelerator.name,
                n_gpus=cluster.n_gpus,
                first_rank=ranks[0],
                last_rank=ranks[-1],
                layers=sum(layers[stage] for stage in stages),
                layer_s=block_seconds(pool.pricer, job.shape.main_layer_kind),
                bubble_s=fsum(bubbles[rank] for rank in ranks) / len(ranks),
                memory=pool.memory,
                profile=job.profile.name,
                confidence=confidence(cluster, job.profile, linear),
                confidence_reason=confidence_statement(cluster, job.profile, linear),
            )
        )
    return tuple(results)


def mean_per_gpu(prepared: Prepared, figure: Callable[[PreparedPool], float]) -> float:
    """Mean over all GPUs of a figure that the GPUs of a pool share."""
    if len(prepared.pools) == 1:
        return figure(prepared.pools[0])
    return fsum(pool.part.cluster.n_gpus * figure(pool) for pool in prepared.pools) / prepared.n_gpus


def mean_per_rank(prepared: Prepared, figure: Callable[[PreparedPool], float]) -> float:
    """Mean over all pipeline ranks of a figure that the ranks of a pool share."""
    if len(prepared.pools) == 1:
        return figure(prepared.pools[0])
    return fsum(figure(pool) for pool in prepared.owners) / len(prepared.owners)


def joined_hash(hashes: Sequence[str]) -> str:
    """One hash for the profiles of all pools; a shared profile keeps its own hash."""
    different = list(dict.fromkeys(hashes))
    return different[0] if len(different) == 1 else hashlib.sha256("".join(different).encode()).hexdigest()


def pools_provenance(prepared: Prepared) -> list[ProvenanceEntry]:
    """Entries of every pool under its number; those that pools share, such as the scenario's, appear once."""
    if len(prepared.pools) == 1:
        return provenance(prepared.pools[0])
    entries: dict[str, ProvenanceEntry] = {}
    for number, pool in enumerate(prepared.pools):
        for entry in provenance(pool):
            shared = entry.path.startswith(("scenario.", "memory.", "collectives."))
            path = entry.path if shared else f"pools.{number}.{entry.path}"
            entries.setdefault(path, entry.model_copy(update={"path": path}))
    return list(entries.values())
