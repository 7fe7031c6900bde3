"""The settings of a plan that all releases of torchtitan share, before they are written in a language."""

from __future__ import annotations

from itertools import accumulate

from msgspec import Struct

from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.export import unwritten
from moesim.simulator.trainers.rules import PlanFacts, facts_of
from moesim.simulator.trainers.torchtitan.rules import (
    TitanRelease,
    flavor_of,
    problems,
    release_of,
    torch_name,
)

UNCOMPILED = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})
"""Schedules of torch 2.13 that refuse compiled stages, because they split the backward."""

Setting = bool | int | str | list[list[str]]
"""Value of one field."""


def parallelism(plan: PlanFacts, release: TitanRelease) -> dict[str, Setting]:
    """Fields of the section `parallelism`; the pipeline's only where there is one and torch has it.

    The data-parallel degrees leave context parallelism out; torchtitan shards over both.
    """
    p = plan.parallel
    shards = p.zero_stage > 0
    fields: dict[str, Setting] = {
        "data_parallel_replicate_degree": 1 if shards else plan.replicas,
        "data_parallel_shard_degree": plan.replicas if shards else 1,
        "fsdp_reshard_after_forward": "always" if p.zero_stage == 3 else "never",
        "tensor_parallel_degree": p.tp,
        "context_parallel_degree": p.cp,
        "expert_parallel_degree": p.ep,
        "pipeline_parallel_degree": p.pp,
    }
    if release.sequence_parallel_optional:
        fields["enable_sequence_parallel"] = p.tp > 1 and p.sequence_parallel
    name = torch_name(plan.schedule)
    if p.pp == 1 or name is None:
        return fields
    fields["pipeline_parallel_schedule"] = name
    fields["pipeline_parallel_microbatch_size"] = p.microbatch
    if plan.layers is not None:
        ends = [*accumulate(plan.layers)]
        parts = [
            [f"layers.{n}" for n in range(end - count, end)]
            for count, end in zip(plan.layers, ends, strict=True)
        ]
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", release.output_module]
        fields["module_fqns_per_model_part"] = parts
    return fields


def uses_deepep(plan: PlanFacts, family: str | None, release: TitanRelease) -> bool:
    """Whether the experts exchange their tokens with DeepEP, as the plan says and the release can."""
    wanted = plan.parallel.ep > 1 and dispatcher(plan.kernels).words.get("torchtitan") == "deepep"
    return wanted and plan.parallel.expert_tp == 1 and family in release.deepep


def compiles_layers(plan: PlanFacts) -> bool:
    """Whether torch.compile fuses the kernels of the layers, as the prediction assumes where it can."""
    split = plan.parallel.pp > 1 and torch_name(plan.schedule) in UNCOMPILED
    return plan.software.kernels == "fused" and not split


def unspelled(plan: PlanFacts, release: TitanRelease, family: str | None) -> list[str]:
    """Sentences on what no field expresses, besides the problems of the plan."""
    p = plan.parallel
    found = []
    if family is None:
        found.append(
            f"model {plan.shape.name}: torchtitan {release.version} ships no flavor of these sizes; add one, "
            "and name it in place of the one that is missing"
        )
    if p.pp > 1 and plan.layers is None:
        found.append(
            "stage layout: the scenario leaves it to moesim's balance, and torchtitan balances in its own way"
            + (f", with 2 stages a rank in place of {p.vpp}" if p.vpp > 2 else "")
            + "; state stages.layers"
        )
    if p.ep > 1 and not uses_deepep(plan, family, release):
        word = dispatcher(plan.kernels).words.get("torchtitan")
        if word != "standard":
            name = "DeepEP" if word == "deepep" else plan.kernels
            found.append(
                f"exchange of tokens with {name}: this model of torchtitan exchanges them with NCCL's "
                "all-to-all"
            )
    elif p.ep > 1:
        found.append(f"{plan.sms} communication SMs: DeepEP chooses their number inside torchtitan")
    if p.pp > 1 and p.zero_stage > 0:
        found.append(
            "ZeRO stage 1: FSDP with parameters kept gathered comes to the same under torch's pipeline stages"
        )
    if plan.software.kernels == "fused" and not compiles_layers(plan):
        found.append(
            f"fused kernels: torch's {torch_name(plan.schedule)} refuses stages that torch.compile made, so "
            "pointwise kernels run one by one"
        )
    return found


# -- subject -----------------------------------------------------------------------------------------
# A scenario as torchtitan sees it: facts of the plan, release, flavor, and what it cannot express.

WRITTEN = (
    "software.attention", "software.compiled_blocks", "software.dropout", "software.kernels",
    "software.overlap_data_parallel",
)  # fmt: skip
"""Keys of `export.SETTINGS` that the configuration holds, that the rules judge, or that FSDP always does."""

LOSSES = ("compiled", "eager")
"""Values of `software.loss` that the section `compile` of torchtitan makes."""


class TitanPlan(Struct, frozen=True):
    """A plan for one release; `family` and `flavor` are None for a model that torchtitan does not ship."""

    plan: PlanFacts
    release: TitanRelease
    family: str | None
    flavor: str | None
    missing: tuple[str, ...]
    """What the release cannot run, and what no field expresses."""


def titan_plan(scenario: Scenario, version: str) -> TitanPlan:
    """The plan of a scenario for a release of torchtitan.

    Raises InputError for a model or cluster that cannot be loaded, a fleet and an unknown release.
    """
    if scenario.fleet is not None:
        raise scenario.needs_one_cluster()
    plan, release = facts_of(scenario), release_of(version)
    flavor = flavor_of(plan.shape, version)
    family = None if flavor is None else flavor.family
    written = (*WRITTEN, "software.loss") if plan.software.loss in LOSSES else WRITTEN
    further = unwritten(scenario, written, f"torchtitan {version}")
    missing = (*problems(plan, version), *unspelled(plan, release, family), *further)
    return TitanPlan(plan, release, family, None if flavor is None else flavor.name, missing)
