"""Says why torchtitan cannot run a plan, in one sentence for each reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.layout.parallel import nearest_divisors
from moesim.simulator.model.attention.grouped_query import GQA, GroupedQueryAttention
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.rules import PlanFacts
from moesim.simulator.trainers.trainer import unknown_features

# -- releases ----------------------------------------------------------------------------------------
# What the supported releases of torchtitan can run, as data.


class TitanRelease(Struct, frozen=True):
    """Abilities of one release; families are torchtitan's model packages (`llama3`, `deepseek_v3`)."""

    version: str
    pipelined: frozenset[str]
    """Families that can be cut into pipeline stages."""
    context_parallel: frozenset[str]
    """Families whose shipped flavors attend with a kernel that context parallelism supports."""
    deepep: frozenset[str]
    """Families whose experts can exchange tokens with DeepEP."""
    mtp: frozenset[str]
    """Families that have multi-token-prediction modules."""
    expert_tensor_parallel: bool
    """Experts may be split over the tensor-parallel group beside expert parallelism."""
    sequence_parallel_optional: bool
    """Tensor parallelism can run without sequence parallelism."""
    replicates_with_tensor_parallel: bool
    """Parameters may be replicated over data parallelism where tensor or pipeline parallelism is on."""
    experts_need_shards: bool
    """Expert parallelism needs at least two ranks that parameters are sharded over."""
    overlapped_pairs: bool
    """DualPipeV overlaps the exchange of tokens of one micro-batch with the compute of another."""
    fp8_scales: frozenset[str]
    """Values of `precision.scaling` that its FP8 linear layers have."""
    output_module: str
    """Name of the output head in lists of modules."""


# Read in torchtitan 0.2.2: models/*/__init__.py (pipelining_fn), models/*/infra/parallelize.py (attn_type,
# DeepEP, DDP), distributed/parallel_dims.py, distributed/dual_pipe_v.py, config/job_config.py.
_V0_2_2 = TitanRelease(
    version="0.2.2",
    pipelined=frozenset({"llama3", "llama4", "deepseek_v3"}),
    context_parallel=frozenset({"llama3", "llama4", "qwen3"}),
    deepep=frozenset({"llama4", "deepseek_v3"}),
    mtp=frozenset(),
    expert_tensor_parallel=True,
    sequence_parallel_optional=False,
    replicates_with_tensor_parallel=False,
    experts_need_shards=True,
    overlapped_pairs=True,
    fp8_scales=frozenset({"tensor"}),
    output_module="output",
)
# Read in torchtitan 0.3.0: models/*/__init__.py (model_registry), trainer.py, config/configs.py,
# distributed/parallel_dims.py, distributed/pipeline_parallel.py, components/quantization/float8.py.
_V0_3_0 = TitanRelease(
    version="0.3.0",
    pipelined=frozenset({"llama3", "deepseek_v3", "qwen3"}),
    context_parallel=frozenset({"llama3", "deepseek_v3", "qwen3"}),
    deepep=frozenset({"deepseek_v3", "qwen3"}),
    mtp=frozenset({"deepseek_v3"}),
    expert_tensor_parallel=False,
    sequence_parallel_optional=True,
    replicates_with_tensor_parallel=True,
    experts_need_shards=False,
    overlapped_pairs=False,
    fp8_scales=frozenset(),
    output_module="lm_head",
)

RELEASES: Mapping[str, TitanRelease] = {release.version: release for release in (_V0_2_2, _V0_3_0)}
"""Supported releases, oldest first."""
WITH_TOML = "0.2.2"
"""The last release that reads TOML files."""
NEWEST = "0.3.0"
"""The newest supported release, whose configurations are Python functions."""


def release_of(version: str) -> TitanRelease:
    """The release of this version; raises InputError, with the supported ones, for any other."""
    release = RELEASES.get(version)
    if release is None:
        hint = nearest(version, list(RELEASES))
        raise InputError(f"torchtitan {version!r} is not supported{hint}; supported: {', '.join(RELEASES)}")
    return release


# -- flavors -----------------------------------------------------------------------------------------
# The models that torchtitan ships, as sizes that a model of ours can be compared with.


class Sizes(Struct, frozen=True):
    """Sizes that identify a model; `latent` is the rank of MLA's keys and values, 0 for grouped queries."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    latent: int
    dense_ffn: int
    """0 where every layer has experts."""
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_width: int = 0


class Flavor(Struct, frozen=True):
    """One model of torchtitan: `family` is its package, `name` the flavor."""

    family: str
    name: str
    sizes: Sizes
    releases: frozenset[str] = frozenset({"0.2.2", "0.3.0"})


_OLD = frozenset({"0.2.2"})

# pytorch/torchtitan 0.2.2 and 0.3.0, torchtitan/models/*/__init__.py; the proof compares the parameters.
FLAVORS: Sequence[Flavor] = (
    Flavor("llama3", "8B", Sizes(32, 4096, 128256, 32, 8, 0, 14336)),
    Flavor("llama3", "70B", Sizes(80, 8192, 128256, 64, 8, 0, 28672)),
    Flavor("llama3", "405B", Sizes(126, 16384, 128256, 128, 8, 0, 53248)),
    Flavor("llama4", "17bx16e", Sizes(48, 5120, 202048, 40, 8, 0, 0, 16, 1, 8192, 8192), _OLD),
    Flavor("llama4", "17bx128e", Sizes(48, 5120, 202048, 40, 8, 0, 16384, 128, 1, 8192, 8192), _OLD),
    Flavor("deepseek_v3", "16B", Sizes(27, 2048, 102400, 16, 16, 512, 10944, 64, 6, 1408, 2816)),
    Flavor("deepseek_v3", "236B", Sizes(60, 5120, 102400, 128, 128, 512, 12288, 160, 6, 1536, 3072)),
    Flavor("deepseek_v3", "671B", Sizes(61, 7168, 129280, 128, 128, 512, 18432, 256, 8, 2048, 2048)),
    Flavor("qwen3", "8B", Sizes(36, 4096, 151936, 32, 8, 0, 12288)),
    Flavor("qwen3", "14B", Sizes(40, 5120, 151936, 40, 8, 0, 17408)),
    Flavor("qwen3", "32B", Sizes(64, 5120, 151936, 64, 8, 0, 25600)),
    Flavor("qwen3", "30B-A3B", Sizes(48, 2048, 151936, 32, 4, 0, 0, 128, 8, 768)),
    Flavor("qwen3", "235B-A22B", Sizes(94, 4096, 151936, 64, 4, 0, 0, 128, 8, 1536)),
)
"""The flavors of decoder-only language models that the simulator can describe."""


def flavor_of(shape: ModelShape, version: str) -> Flavor | None:
    """The flavor with the sizes of a model in one release, MTP modules left out; None if none is equal."""
    sizes = sizes_of(shape)
    return next((f for f in FLAVORS if f.sizes == sizes and version in f.releases), None)


def sizes_of(shape: ModelShape) -> Sizes | None:
    """Sizes of a model; None where it has features that no flavor has."""
    attention, moe = shape.attention, shape.moe
    if not shape.features <= {"gqa", "mla"}:
        return None
    if isinstance(attention, GQA):
        heads, latent = (attention.heads, attention.kv_heads), 0
    elif type(attention) is MLA:
        heads, latent = (attention.heads, attention.heads), attention.kv_lora_rank
    else:
        return None
    dense = 0 if moe is not None and not moe.dense_layers else shape.dense_ffn or 0
    experts = () if moe is None else (moe.experts, moe.top_k, moe.expert_ffn, moe.shared_width)
    return Sizes(shape.n_layers, shape.hidden, shape.vocab, *heads, latent, dense, *experts)


def problems(plan: PlanFacts, version: str = NEWEST) -> tuple[str, ...]:
    """Reasons why a release of torchtitan cannot run the plan as predicted; none where it can.

    A model that torchtitan does not ship is no reason by itself, since a flavor can be added. Raises
    InputError for a release that is not supported.
    """
    release = release_of(version)
    rules = (
        _schedule, _stages, _sharding, _expert_shards, _experts, _tensor_parallel, _sequence, _recompute,
        _formats, _model,
    )  # fmt: skip
    return tuple(sentence for rule in rules for sentence in rule(plan, release))


def torch_name(schedule: str) -> str | None:
    """The schedule's name in torch.distributed.pipelining (2.13); None where torch has it not."""
    spec = SCHEDULES.get(schedule)
    return None if spec is None else spec.names_elsewhere.get("torch")


def recompute_mode(plan: PlanFacts) -> str | None:
    """Torchtitan's word for the recompute policy ("none", "op", "full"); None where it has none.

    Flash attention recomputes its scores in any case, so the policy `attention` adds nothing to it.
    """
    if plan.flash_recomputes_alone:
        return "none"
    return plan.recompute if plan.recompute in ("none", "full", "op") else None


def _schedule(plan: PlanFacts, release: TitanRelease) -> Iterator[str]:
    pp, microbatches = plan.parallel.pp, plan.microbatches
    if pp == 1:
        return
    name = torch_name(plan.schedule)
    if name is None:
        known = sorted(n for spec in SCHEDULES.values() if (n := spec.names_elsewhere.get("torch")))
        yield (
            f"schedule {plan.schedule}: torch.distributed.pipelining has none of this name; it has "
            f"{', '.join(known)}"
        )
        return
    rounds = max(1, microbatches // pp)
    if name in ("Interleaved1F1B", "InterleavedZeroBubble") and microbatches % rounds:
        yield (
            f"{microbatches} micro-batches: torch's {name} needs a multiple of its {rounds} rounds of "
            f"micro-batches on {pp} pipeline ranks"
        )
    if name == "DualPipeV" and microbatches < 2 * pp:
        yield f"{microbatches} micro-batches: torch's DualPipeV needs one for each of its {2 * pp} stages"
    if SCHEDULES[plan.schedule].overlapped_pairs and plan.parallel.ep > 1 and not release.overlapped_pairs:
        yield (
            f"schedule {plan.schedule}: torchtitan {release.version} no longer overlaps the exchange of "
            "tokens inside its pairs; 0.2.2 does"
        )


def _stages(plan: PlanFacts, release: TitanRelease) -> Iterator[str]:
    if plan.parallel.pp == 1:
        return
    flavor = flavor_of(plan.shape, release.version)
    if flavor is not None and flavor.family not in release.pipelined:
        yield f"pipeline parallelism: torchtitan {release.version} cannot cut {flavor.family} into stages"
    if plan.shape.tied_embeddings:
        yield "tied embeddings: the first and the last pipeline stage of torchtitan would each train a copy"
    inner = () if plan.layers is None else plan.layers[1:-1]
    if 0 in inner:
        number = inner.index(0) + 1
        yield f"pipeline stage {number} has no layer: stages of torchtitan hold at least one module"


def _sharding(plan: PlanFacts, release: TitanRelease) -> Iterator[str]:
    """Torchtitan shards with FSDP (parameters, gradients and optimizer alike) or replicates with DDP.

    Under a pipeline, torch's stages reduce gradients and free parameters once, after the last micro-batch
    (torch 2.13, distributed/pipelining/stage.py): this is ZeRO stage 1.
    """
    p, stage = plan.parallel, plan.parallel.zero_stage
    if stage == 0:
        yield from _replicated(plan, release)
    elif plan.replicas == 1 and p.cp == 1 and p.ep == 1:
        return
    elif p.pp > 1 and stage > 1:
        yield (
            f"ZeRO stage {stage} with pipeline parallelism: torch's pipeline stages keep gathered parameters "
            "and whole gradients until the last micro-batch, as ZeRO stage 1 does; use parallel.zero_stage: 1"
        )
    elif p.pp == 1 and stage == 1:
        yield (
            "ZeRO stage 1 without pipeline parallelism: FSDP shards gradients as well; nearest: "
            f"parallel.zero_stage: {2 if plan.microbatches == 1 else 3}"
        )
    elif stage == 2 and plan.microbatches > 1:
        yield (
            f"ZeRO stage 2 with {plan.microbatches} micro-batches: FSDP gathers the parameters again for "
            "every micro-batch; nearest: parallel.zero_stage: 3, or one micro-batch"
        )


def _expert_shards(plan: PlanFacts, release: TitanRelease) -> Iterator[str]:
    """FSDP cuts experts by their number, or by their width where there are fewer experts than ranks."""
    p, moe = plan.parallel, plan.shape.moe
    if moe is None or p.zero_stage == 0:
        return
    ranks = plan.replicas * p.cp if p.ep == 1 else plan.replicas * p.cp * p.tp // (p.ep * p.expert_tp)
    split = p.tp if p.ep == 1 else p.expert_tp
    for width, what in ((moe.expert_ffn // split, "expert_ffn"), (plan.shape.hidden, "hidden")):
        if ranks * p.ep > moe.experts and width % ranks:
            yield (
                f"experts of {what}={width} on {ranks} data-parallel ranks: FSDP cuts them evenly only; "
                "choose parallel.ep so that the ranks divide it"
            )


def _replicated(plan: PlanFacts, release: TitanRelease) -> Iterator[str]:
    p = plan.parallel
    if p.cp > 1:
        yield "ZeRO stage 0 with context parallelism: FSDP shards parameters over the context-parallel ranks"
    if p.ep > 1 and p.ep != p.tp * p.cp:
        yield (
            f"ZeRO stage 0 with parallel.ep={p.ep}: expert parallelism takes its ranks from those that FSDP "
            "shards over; use parallel.zero_stage: 1 or 3"
        )
    several = p.tp > 1 or p.pp > 1 or p.ep > 1
    if plan.replicas > 1 and several and not release.replicates_with_tensor_parallel:
        yield (
            f"ZeRO stage 0: DDP of torchtitan {release.version} goes with no other parallelism; use "
            f"parallel.zero_stage: {1 if p.pp > 1 else 3}"
        )


def _experts(plan: PlanFacts, release: TitanRelease) -> Iterator[str]:
    p, moe = plan.parallel, plan.shape.moe
    if not plan.placement_in_order:
        yield "placement of experts and their replicas: torchtitan trains with experts in order"
    if moe is None:
        return
    if p.ep == 1 and p.expert_tp != p.tp:
        yield (
            f"parallel.expert_tp={p.expert_tp}: without expert parallelism torchtitan splits experts over "
            f"the {p.tp} tensor-parallel ranks; use parallel.expert_tp: {p.tp}"
        )
    shards = p.cp * (plan.replicas if p.zero_stage > 0 else 1)
    if p.ep > 1 and shards == 1 and release.experts_need_shards:
        yield (
            f"parallel.ep={p.ep} on one data-parallel rank: torchtitan {release.version} wraps experts in "
            "FSDP, which then has no ranks to shard over"
        )
    if p.ep > 1 and p.expert_tp > 1 and not release.expert_tensor_parallel:
        yield f"parallel.expert_tp={p.expert_tp}: torchtitan {release.version} does not split experts; use 1"
    elif p.ep > 1 and p.expert_tp not in (1, p.tp):
        yield f"parallel.expert_tp={p.expert_tp}: torchtitan allows 1 and parallel.tp={p.tp} only"
    if p.ep > 1 and p.expert_tp == 1 and release.expert_tensor_parallel and p.ep % p.tp:
        yield (
            f"parallel.ep={p.ep} with parallel.tp={p.tp}: expert parallelism takes all tensor-parallel "
            f"ranks, so ep must be a multiple of {p.tp}"
        )


def _tensor_parallel(plan: PlanFacts, release: TitanRelease) -> Iterator[str]:
    p = plan.parallel
    if p.tp > 1 and not p.sequence_parallel and not release.sequence_parallel_optional:
        yield "tensor parallelism without sequence parallelism: torchtitan always runs both together"
    for attention in plan.shape.attention_by_name.values():
        if isinstance(attention, GroupedQueryAttention) and attention.kv_heads % p.tp:
            near = ", ".join(map(str, nearest_divisors(p.tp, attention.kv_heads)))
            yield (
                f"parallel.tp={p.tp}: torchtitan gives every rank whole key and value heads, of which there "
                f"are {attention.kv_heads}; nearest: {near}"
            )


def _sequence(plan: PlanFacts, release: TitanRelease) -> Iterator[str]:
    p = plan.parallel
    unit = 2 * p.cp * p.tp
    if plan.sequence_length % unit:
        near = nearest_divisors(p.tp, plan.sequence_length // (2 * p.cp) or 1)
        yield (
            f"sequence length {plan.sequence_length}: torchtitan needs a multiple of 2 x cp x tp = {unit}; "
            f"nearest parallel.tp: {', '.join(map(str, near))}"
        )
    flavor = flavor_of(plan.shape, release.version)
    if p.cp > 1 and flavor is not None and flavor.family not in release.context_parallel:
        yield (
            f"context parallelism: {flavor.family} of torchtitan {release.version} attends with "
            "FlexAttention, which context parallelism does not support"
        )


def _recompute(plan: PlanFacts, release: TitanRelease) -> Iterator[str]:
    mode = recompute_mode(plan)
    if mode is None:
        yield (
            f"recompute={recompute_label(plan.recompute)}: torchtitan checkpoints whole layers (full) or by "
            "operator (op); it has no list of modules"
        )
        return
    overlapped = torch_name(plan.schedule) == "DualPipeV" and release.overlapped_pairs
    if mode != "none" and overlapped and plan.parallel.pp > 1 and plan.parallel.ep > 1:
        yield (
            f"recompute={recompute_label(plan.recompute)} with DualPipeV and experts: torchtitan refuses the "
            "two together"
        )


def _formats(plan: PlanFacts, release: TitanRelease) -> Iterator[str]:
    recipe = plan.recipe
    if recipe.linear == "fp4":
        yield f"FP4 GEMMs: torchtitan {release.version} trains in BF16 or FP8; nearest: precision.linear fp8"
    if recipe.linear == "fp8" and recipe.scaling not in release.fp8_scales:
        known = " and ".join(sorted(release.fp8_scales)) or "rows, which no recipe of ours has"
        yield (
            f"FP8 GEMMs with scales by {recipe.scaling}: FP8 layers of torchtitan {release.version} have "
            f"scales by {known}"
        )
    elif recipe.linear == "fp8" and plan.parallel.tp > 1 and plan.shape.moe is not None:
        yield "FP8 GEMMs with scales by tensor and tensor parallelism: not available for models with experts"
    wanted = {
        "head": "bf16", "parameters": "bf16", "master_weights": "fp32", "gradients": "fp32",
        "gradient_reduce": "fp32", "moments": "fp32", "dispatch": "bf16", "combine": "bf16",
        "activation_cache": "bf16", "parameter_gather": "bf16",
    }  # fmt: skip
    if recipe.linear == "fp8" and release.fp8_scales:
        del wanted["parameter_gather"]  # FSDP of FP8 layers can gather in FP8
    for key, only in wanted.items():
        if getattr(recipe, key) != only:
            yield f"precision.{key}={getattr(recipe, key)}: torchtitan has {only} only"


def _model(plan: PlanFacts, release: TitanRelease) -> Iterator[str]:
    yield from unknown_features("torchtitan", plan.shape)
    if plan.shape.mtp_layers:
        flavor = flavor_of(plan.shape, release.version)
        if flavor is None or flavor.family not in release.mtp:
            yield f"MTP modules: the models of torchtitan {release.version} have none; use mtp_layers: 0"
        elif plan.parallel.pp > 1:
            yield "MTP modules with pipeline parallelism: torchtitan supports them without it only"
    if plan.software.dropout:
        yield "dropout: the models of torchtitan have none"
    if plan.software.attention == "unfused":
        yield "unfused attention: torchtitan attends with fused kernels only"
