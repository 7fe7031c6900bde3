"""A served model with everything loaded that its scenario names, one pool of replicas at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.serving import Serving, ServingPool
from moesim.simulator.serving.engines.registry import Engine, engine
from moesim.simulator.serving.operators import Split, cache_bytes_per_token
from moesim.simulator.serving.scheduler import Policy


@dataclass(frozen=True)
class Deployment:
    """One pool of a served model: `role` says whether it works on prompts, on decodes, or on both."""

    shape: ModelShape
    cluster: Cluster
    profile: CalibrationProfile
    serving: Serving
    pool: ServingPool
    role: str = "both"

    @cached_property
    def engine(self) -> Engine:
        """The engine's release."""
        return engine(self.serving.engine)

    @cached_property
    def split(self) -> Split:
        """How the model is spread over a replica."""
        pool, serving = self.pool, self.serving
        weights = serving.weights or "bf16"
        return Split(
            tp=pool.tp, ep=pool.ep, expert_tp=pool.expert_tp, weights=weights,
            experts=serving.experts or weights, cache=serving.cache, redundant_experts=pool.redundant_experts,
        )  # fmt: skip

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of weights on the fullest GPU."""
        raise NotImplementedError

    @cached_property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values one rank of `dp` holds; raises InfeasibleError where none fit."""
        room = self.cluster.accelerator.hbm_bytes * self.pool.memory_fraction - self.weight_bytes
        tokens = int(room / (cache_bytes_per_token(self.shape, self.split) / self.pool.pp))
        if tokens < self.engine.block_tokens:
            raise InfeasibleError(f"the weights leave no room for a cache: {room / 1e9:.1f} GB")
        return tokens

    @cached_property
    def policy(self) -> Policy:
        """The scheduler of each rank."""
        block = self.engine.block_tokens
        return Policy(
            max_num_seqs=self.pool.max_num_seqs, max_num_batched_tokens=self.pool.max_num_batched_tokens,
            block_tokens=block, kv_blocks=self.cache_tokens // block, mixed=self.engine.mixed,
            chunked=self.engine.chunked, prefix_caching=self.serving.prefix_caching,
        )  # fmt: skip


def deployments(scenario: Scenario) -> tuple[Deployment, ...]:
    """The pools of a scenario: one that does both, or that of prompts and that of decodes.

    Raises InputError for a scenario without `serving`, and for pools that need more GPUs than the cluster has.
    """
    serving = scenario.serving
    if serving is None:
        raise InputError(
            f"scenario {scenario.name} has no section `serving`; add one, such as serving: {{tp: 8}}"
        )
    cluster, pools = scenario.machine, [serving, *([serving.prefill] if serving.prefill else [])]
    needed = sum(pool.gpus * pool.replicas for pool in pools)
    if needed > cluster.n_gpus:
        raise InputError(
            f"the pools of `serving` need {needed} GPUs and {cluster.name} has {cluster.n_gpus}; "
            "lower serving.replicas, or take a larger cluster"
        )
    shape, profile = scenario.shape, scenario.calibration
    roles = ("decode", "prefill") if serving.prefill else ("both",)
    return tuple(
        Deployment(shape, cluster, profile, serving, pool, role)
        for pool, role in zip(pools, roles, strict=True)
    )
