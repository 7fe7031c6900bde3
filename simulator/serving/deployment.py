"""A served model with everything loaded that its scenario names, one pool of replicas at a time (pure)."""

from __future__ import annotations

from functools import cached_property, lru_cache
from importlib import resources
from math import ceil, sqrt
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace
from pydantic import BeforeValidator, PositiveInt

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.cost.layer_collectives import expected_maximum
from moesim.simulator.model.attention.grouped_query import GroupedQueryAttention
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.block import MTP
from moesim.simulator.model.catalogue import shipped_models
from moesim.simulator.model.counts import block_parameters
from moesim.simulator.model.precision import BYTES_PER_ELEMENT
from moesim.simulator.model.shape import ModelShape, PublishedFormats
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.defaults import spread
from moesim.simulator.scenario.serving import Format, Serving, ServingPool
from moesim.simulator.serving.linear import ELEMENT_BYTES
from moesim.simulator.serving.operators import Split, cache_bytes_per_token
from moesim.simulator.serving.prices import WIDER
from moesim.simulator.serving.scheduler import Policy

CONTEXT_BYTES = 1.5e9
"""Memory of the driver's context, NCCL's and DeepEP's buffers and captured graphs: assumed, 1 to 3 GB."""


@lru_cache(maxsize=8)
def _table(name: str) -> dict[str, Any]:
    """A data file of serving."""
    text = (resources.files("moesim.simulator") / "data" / "serving" / f"{name}.yaml").read_text("utf-8")
    return parse_mapping(text, f"data/serving/{name}.yaml")


# -- engines ----------------------------------------------------------------------------------------
# What a release of an inference engine does: `data/serving/engines.yaml`, each answer with its source.


class EngineFigure(Section):
    """A figure of an engine, who says so, and its range where nobody measured it."""

    value: float
    source: str
    low: float
    high: float


def _expanded(buckets: Any) -> Any:
    """Batch sizes from a list whose entries may be [first, last, step]."""
    sizes: list[Any] = []
    for entry in buckets:
        sizes += range(entry[0], entry[1] + 1, entry[2]) if isinstance(entry, list) else [entry]
    return tuple(sizes)


class ServingEngine(Section):
    """Answers of one release."""

    mixed: bool
    """Whether a step has prompts beside decodes, else prompts go first and alone."""
    chunked: bool
    """Whether a prompt may be cut."""
    token_for_each: bool = False
    """Whether the release refuses fewer tokens a step than sequences (vLLM); others let sequences wait."""
    sends_chunks: bool = False
    """Whether keys and values of a chunk go to a decoding pool before later chunks are computed."""
    reserve: tuple[float, float] = (0.0, 0.0)
    """Shares of tokens yet to be written, by a new request and by others, that admission leaves room for."""
    block_tokens: PositiveInt
    """Tokens of a cache block."""
    memory: Literal["all", "static", "free"]
    """What its share of memory counts: weights, buffers, cache; no buffers; or what is left for the cache."""
    exchange: Literal["allgather", "deepep"]
    """How tokens reach experts by default where attention is data-parallel."""
    fused_norms: bool
    """Whether sums over TP in one node also norm, on Hopper and Blackwell and without data parallelism."""
    shared_beside: int
    """Most rows for which shared experts run on a stream beside router and routed experts in a graph."""
    graph_buckets: Annotated[tuple[PositiveInt, ...], BeforeValidator(_expanded)]
    """Batch sizes of captured decode graphs, in order."""
    graph_prefill: int
    """Most tokens of a step with prompts whose pieces between attentions are captured too; 0 for none."""
    host_overlapped: bool
    """Whether the host works on the next step while the GPU runs this one."""
    drafts_overlapped: bool = True
    """Whether it also does with drafts."""
    host_s: EngineFigure
    """Host time of a step: schedule, inputs, sampling, detokenisation."""
    exposed_host_s: EngineFigure
    """What the GPU waits for the host between steps although it works ahead."""
    launch_s: EngineFigure
    """Host time of a kernel in steps without a graph."""
    request_s: EngineFigure
    """What HTTP server and transport to the engine take of a request, one after another as its tokeniser."""
    source: str


@lru_cache(maxsize=1)
def engines() -> dict[str, ServingEngine]:
    """All engines by release."""
    return {
        name: validate_model(ServingEngine, row, f"data/serving/engines.yaml: {name}")
        for name, row in _table("engines").items()
    }


def engine(name: str) -> ServingEngine:
    """The engine of that name; raises InputError with the nearest for an unknown one."""
    known = engines()
    if name not in known:
        raise InputError(
            f"serving.engine={name!r} is not known{nearest(name, list(known))}; known: {', '.join(known)}"
        )
    return known[name]


# -- formats and drafts ---------------------------------------------------------------------------------


def published_formats(shape: ModelShape) -> PublishedFormats:
    """Formats in which a model was published: those of its file, else of its shipped name, else BF16."""
    row = _table("formats").get(shape.name, {"linear": "bf16", "experts": "bf16"})
    row = {key: value for key, value in row.items() if key != "source"}
    return shape.published or PublishedFormats.model_validate(row)


def accepted_of(model: str) -> tuple[str, int]:
    """The model whose measured acceptance stands for a model's, and the drafts for which it was measured."""
    table = _table("acceptance")
    name = model if model in table["measured"] else table["as"].get(model, table["default"])
    return name, len(table["measured"][name])


def accepted_tokens(model: str, drafts: int) -> float:
    """Mean tokens of a decode step with so many drafts: measured, or those of the nearest measured model."""
    name, most = accepted_of(model)
    return 1.0 if not drafts else float(_table("acceptance")["measured"][name][min(drafts, most) - 1])


class Spreads(NamedTuple):
    """How ranks of a group differ: coefficients of variation of clocks, of kernels, of an expert's rows."""

    clock: float
    jitter: float
    expert_load: float

    @classmethod
    def of(cls, scenario: Scenario) -> Spreads:
        """Those of a scenario."""
        varied = scenario.variation
        return cls(varied.clock_cv.value, varied.jitter_cv.value, scenario.routing.expert_load_cv.value)

    @classmethod
    def usual(cls, architecture: str) -> Spreads:
        """Those of a scenario that says nothing."""
        keys = ("variation.clock_cv", "variation.jitter_cv", "routing.expert_load_cv")
        return cls(*(spread(key, architecture)[0].value for key in keys))


class Deployment(Struct, frozen=True, dict=True):
    """One pool of a served model: `role` says whether it works on prompts, on decodes, or on both."""

    shape: ModelShape
    cluster: Cluster
    profile: CalibrationProfile
    serving: Serving
    pool: ServingPool
    role: str = "both"
    spreads: Spreads | None = None
    """How ranks differ; absent: as in a scenario that says nothing."""

    @cached_property
    def engine(self) -> ServingEngine:
        """The engine's release."""
        return engine(self.serving.engine)

    @property
    def host_overlapped(self) -> bool:
        """Whether the host plans a step while the GPU runs the one before it."""
        return self.engine.host_overlapped and (not self.pool.draft_tokens or self.engine.drafts_overlapped)

    @property
    def exchange(self) -> str:
        """How tokens of data-parallel attention reach the experts: `allgather` or `deepep`."""
        return self.pool.exchange or self.engine.exchange

    @cached_property
    def slowest(self) -> float:
        """Time of the slowest of the GPUs that step together over the mean (eq. E1a)."""
        spreads = self._spreads
        return 1.0 + expected_maximum(self.pool.tp * self.pool.dp) * (spreads.clock + spreads.jitter)

    def expert_load(self, prefill: bool) -> float:
        """Coefficient of variation of an expert's rows: stated, or of prefills under EPLB, or training's."""
        load = self._spreads.expert_load
        usual = load == Spreads.usual(self.cluster.accelerator.architecture).expert_load
        if prefill and self.pool.redundant_experts and usual:
            return float(_table("expert-load")["eplb_prefill"]["value"])
        return load

    def fullest(self, tokens: float, prefill: bool = False) -> tuple[float, float]:
        """Rows of the fullest rank over the mean, and its experts with rows, for `tokens` of the group.

        Some experts are popular (`expert_load_cv`) and tokens are dealt at random; with few of them some rank
        has to read many more experts than the mean (eq. Q10).
        """
        pool, moe = self.pool, self.shape.moe
        if moe is None or not tokens:
            return 1.0, 0.0
        local = (moe.experts + pool.redundant_experts) / pool.ep
        touched = 1.0 - (1.0 - min(moe.top_k / moe.experts, 1.0)) ** tokens
        z, load = expected_maximum(pool.ep), self.expert_load(prefill)
        rows = sqrt(load**2 / local + pool.ep / (tokens * moe.routed_rows)) if load else 0.0
        active = local * touched + z * sqrt(local * touched * (1.0 - touched)) * bool(load)
        return 1.0 + z * rows, min(active, local)

    @property
    def expert_load_cv(self) -> float:
        """Coefficient of variation of an expert's rows."""
        return self._spreads.expert_load

    @property
    def _spreads(self) -> Spreads:
        return self.spreads or Spreads.usual(self.cluster.accelerator.architecture)

    @cached_property
    def formats(self) -> tuple[Format, Format]:
        """Formats of linear layers and of routed experts; raises InputError for one that is not priced."""
        published, stated = published_formats(self.shape), self.serving
        linear = stated.weights or published.linear
        experts = stated.experts or stated.weights or published.experts
        if linear is None or experts is None:
            raise InputError(
                f"{self.shape.name}: {published.note}; state serving.weights, and serving.experts where they "
                f"differ: {', '.join(ELEMENT_BYTES)}",
                key="serving.weights",
            )
        return linear, experts

    @cached_property
    def split(self) -> Split:
        """How the model is spread over a replica."""
        pool, (linear, experts) = self.pool, self.formats
        hopper = self.cluster.accelerator.architecture.lower() == "hopper"
        return Split(
            tp=pool.tp, ep=pool.ep, expert_tp=pool.expert_tp, weights=linear,
            experts=experts, cache=self.serving.cache, redundant_experts=pool.redundant_experts,
            kernels=self._kernels(experts),
            attention="fa3" if self.serving.engine.startswith("vllm") and hopper else "",
        )  # fmt: skip

    def _kernels(self, experts: Format) -> str:
        """Family of the experts' kernels; without FP4 units MXFP4 is widened in Marlin or OpenAI's Triton."""
        if experts == "mxfp4" and "fp4" not in self.cluster.accelerator.peak:
            return "marlin" if self.serving.engine.startswith("vllm") else "triton"
        return "deepgemm" if self.exchange == "deepep" and experts == "fp8" else "fused"

    @cached_property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gains in a decode step, above 1 with accepted drafts."""
        drafts, chances = self.pool.draft_tokens, self.serving.acceptance
        if chances is None:
            return accepted_tokens(self.shape.name, drafts)
        if len(chances) < drafts:
            raise InputError(
                f"serving.acceptance has {len(chances)} chances and draft_tokens is {drafts}; give one each"
            )
        total, kept = 1.0, 1.0
        for chance in chances[:drafts]:
            kept *= chance
            total += kept
        return total

    # -- memory -----------------------------------------------------------------------------------

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of weights on the fullest GPU."""
        return weight_bytes(self.shape, self.pool, *self.formats)

    @cached_property
    def buffer_bytes(self) -> float:
        """Bytes beside weights and cache: activations of the largest step, logits, context."""
        tokens, split, hidden = self.pool.max_num_batched_tokens, self.split, self.shape.hidden
        widest = 0.0
        for layer in dict.fromkeys(self.shape.layers):
            ffn = layer.feed_forward
            width = getattr(ffn, "width", 0) / split.tp
            if moe := (self.shape.moe if ffn.routed else None):
                rows = self.pool.dp * moe.top_k / self.pool.ep
                width = rows * (2 * moe.expert_ffn / split.expert_tp + 2 * hidden)
            widest = max(widest, 2 * width)
        activations = tokens * (4 * hidden + widest) * BYTES_PER_ELEMENT["bf16"]
        logits = self.pool.max_num_seqs * self.shape.vocab / split.tp * BYTES_PER_ELEMENT["fp32"]
        return CONTEXT_BYTES + activations + 2 * logits

    @property
    def cache_room_bytes(self) -> float:
        """Bytes for keys and values on a GPU; negative where the weights do not fit.

        vLLM's gpu_memory_utilization bounds weights, buffers and cache together; SGLang's mem_fraction_static
        weights and cache, with the buffers in the rest; TensorRT-LLM's free_gpu_memory_fraction is a share of
        what weights and buffers leave.
        """
        total, share = self.cluster.accelerator.hbm_bytes, self.pool.memory_fraction
        if self.engine.memory == "all":
            return total * share - self.weight_bytes - self.buffer_bytes
        if self.engine.memory == "static":
            return min(total * share, total - self.buffer_bytes) - self.weight_bytes
        return share * (total - self.weight_bytes - self.buffer_bytes)

    @cached_property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values one rank of `dp` holds; raises InfeasibleError where none fit."""
        size = cache_bytes_per_token(self.shape, self.split) / self.pool.pp
        if self.pool.draft_tokens:  # a layer that drafts keeps its own
            size *= 1.0 + 1.0 / len(self.shape.layers)
        tokens = int(self.cache_room_bytes / size)
        if tokens < self.engine.block_tokens:
            raise InfeasibleError(
                f"{self.shape.name}: {self.weight_bytes / 1e9:.1f} GB of weights and "
                f"{self.buffer_bytes / 1e9:.1f} GB of buffers a GPU leave no cache in "
                f"{self.pool.memory_fraction:.2f} of {self.cluster.accelerator.hbm_bytes / 1e9:.0f} GB on "
                f"{self.pool.gpus} GPUs; {self._remedy()}"
            )
        return tokens

    def _remedy(self) -> str:
        if self.buffer_bytes > max(self.weight_bytes, 0.2 * self.cluster.accelerator.hbm_bytes):
            return "lower max_num_batched_tokens or max_num_seqs, for which the buffers are"
        fewest = self._fewest_gpus()
        text = f"{fewest} GPUs a replica would do" if fewest else "no number of GPUs up to 1,024 would do"
        return f"{text} (raise serving.tp or serving.ep, or take a smaller format)"

    def _fewest_gpus(self) -> int:
        """GPUs of the smallest replica that has room for a cache, by doubling what splits the weights."""
        pool = self.pool
        while pool.gpus <= 512:
            wider = {"dp": 2 * pool.dp} if pool.dp > 1 and pool.ep > 1 else {"tp": 2 * pool.tp}
            pool = pool.model_copy(update={**wider, "ep": 2 * pool.ep if pool.ep > 1 else 1})
            other = replace(self, pool=pool)
            if other.cache_room_bytes > 0:
                return pool.gpus
        return 0

    def check_context(self, tokens: int, which: str = "a request") -> None:
        """Raises InputError for a sequence beyond the model's context, InfeasibleError beyond the cache."""
        limit = self.shape.numerics.context if self.shape.numerics else None
        if limit is not None and tokens > limit:
            raise InputError(
                f"serving.load: {which} of {tokens:,} tokens is longer than the context of "
                f"{self.shape.name}, {limit:,}; leave it out of the log, or draw shorter ones"
            )
        if tokens > self.cache_tokens:
            raise InfeasibleError(
                f"serving.load: {which} of {tokens:,} tokens does not fit the cache of a rank, "
                f"{self.cache_tokens:,} tokens; shorten it, or raise serving.tp or memory_fraction"
            )

    @cached_property
    def policy(self) -> Policy:
        """The scheduler of each rank."""
        block = self.engine.block_tokens
        return Policy(
            max_num_seqs=self.pool.max_num_seqs, max_num_batched_tokens=self.pool.max_num_batched_tokens,
            block_tokens=block, kv_blocks=self.cache_tokens // block, mixed=self.engine.mixed,
            chunked=self.engine.chunked, prefix_caching=self.serving.prefix_caching,
            reserve_new=self.engine.reserve[0], reserve_running=self.engine.reserve[1],
            gain=self.tokens_per_step, ahead=self.host_overlapped, prompts_only=self.role == "prefill",
            wait_steps=self.pool.wait_steps, wait_for_ranks=self.pool.wait_for_ranks,
            sends_chunks=self.role == "prefill" and self.engine.sends_chunks,
        )  # fmt: skip


def weight_bytes(shape: ModelShape, pool: ServingPool, linear: Format, experts: Format) -> float:
    """Bytes of weights on the fullest GPU of a replica.

    Attention and dense FFNs are split over `tp` and copied over `dp`, latent down-projections are on every
    rank; routed experts and redundant ones over `ep` x `expert_tp`; router, norms and tables are BF16. A
    model without layers for drafts (MTP) has one more of its last kind, with a projection (EAGLE).
    """
    element, bf16 = ELEMENT_BYTES[linear], ELEMENT_BYTES["bf16"]
    drafting = [MTP] * shape.mtp_layers or [shape.layer_kinds[-1]]
    layers = [*shape.layer_kinds, *(drafting if pool.draft_tokens else ())]
    stage = ceil(len(layers) / pool.pp)
    size_of = {}
    for kind in dict.fromkeys(layers):
        p, layer = block_parameters(shape, kind), shape.block(kind).layer
        assert layer is not None
        attention = layer.attention
        whole, extra = 0, 0.0
        if isinstance(attention, MLA):
            whole = shape.hidden * (
                (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_dim
            )
        elif isinstance(attention, GroupedQueryAttention) and attention.kv_heads < pool.tp:
            head = shape.hidden * sum(attention.sizes[2:])
            extra = head * (1 - attention.kv_heads / pool.tp)  # one head a rank
        size = element * (extra + whole + (p.attention - whole + p.dense_ffn + p.shared_experts) / pool.tp)
        size += bf16 * (p.router + p.norms + p.mtp_projection)
        if p.routed_experts and shape.moe:
            share = (1 + pool.redundant_experts / shape.moe.experts) / (pool.ep * pool.expert_tp)
            size += ELEMENT_BYTES[experts] * p.routed_experts * share
        size_of[kind] = size
    sizes = [size_of[kind] for kind in layers]
    if pool.draft_tokens and not shape.mtp_layers:
        sizes[-1] += 2 * shape.hidden**2 * bf16
    table = shape.vocab * shape.hidden * bf16 / pool.tp
    tables = table if shape.tied_embeddings and pool.pp == 1 else 2 * table
    if pool.pp == 1:
        return sum(sizes) + tables
    stages = [sum(sizes[at : at + stage]) for at in range(0, len(sizes), stage)]
    return max([stages[0] + table, *stages[1:-1], stages[-1] + table])


def _check_split(shape: ModelShape, pool: ServingPool) -> None:
    """Raises InputError for degrees that do not divide the model, and keys that a dense one does not read."""
    heads = [getattr(attention, "heads", pool.tp) for attention in shape.attention_by_name.values()]
    if bad := [count for count in heads if count % pool.tp]:
        fits = [n for n in range(pool.tp, 0, -1) if not any(count % n for count in heads)]
        raise InputError(
            f"serving.tp={pool.tp} does not divide the {bad[0]} query heads of {shape.name}; the nearest "
            f"that does is {fits[0]}"
        )
    if shape.moe is None and (pool.ep > 1 or pool.redundant_experts):
        raise InputError(
            f"{shape.name} has no routed experts, so that ep={pool.ep} and redundant_experts="
            f"{pool.redundant_experts} say nothing; leave them out"
        )
    if shape.moe is not None and (experts := shape.moe.experts + pool.redundant_experts) % pool.ep:
        raise InputError(
            f"ep={pool.ep} does not divide {experts} experts ({pool.redundant_experts} redundant); "
            f"{-experts % pool.ep} more redundant experts would fill the ranks up"
        )


def _check_stages(shape: ModelShape, pool: ServingPool) -> None:
    if pool.pp > len(shape.layers):
        raise InputError(
            f"pp={pool.pp} is more than the {len(shape.layers)} layers of {shape.name}; a stage has one at "
            "least"
        )


def deployments(scenario: Scenario) -> tuple[Deployment, ...]:
    """The pools of a scenario: one that does both, or that of decodes and that of prompts.

    Raises InputError for a scenario without `serving`, for pools that need more GPUs than the cluster
    has, and for a load whose requests are longer than the model's context.
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
    for pool in pools:
        _check_split(shape, pool)
        _check_stages(shape, pool)
    if engine(serving.engine).token_for_each and serving.max_num_batched_tokens < serving.max_num_seqs:
        raise InputError(
            f"serving.max_num_batched_tokens={serving.max_num_batched_tokens} is no step with a token of "
            f"each of max_num_seqs={serving.max_num_seqs}; raise it to that, or lower max_num_seqs"
        )
    roles = ("decode", "prefill") if serving.prefill else ("both",)
    found = tuple(
        Deployment(shape, cluster, profile, serving, pool, role, Spreads.of(scenario))
        for pool, role in zip(pools, roles, strict=True)
    )
    if serving.load.log is None:
        for deployment in found:
            deployment.check_context(serving.load.input_tokens + serving.load.output_tokens)
    return found


# -- notes -------------------------------------------------------------------------------------------
# What a plan takes without evidence, in sentences that travel with its result.

_DTYPES = {"fp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}


def notes_of(one: Deployment) -> tuple[str, ...]:
    """Assumed formats, formats that the card does not multiply, and drafts that nobody measured."""
    shape, serving, card = one.shape, one.serving, one.cluster.accelerator
    notes = []
    published = published_formats(shape)
    if serving.weights is None and published.note:
        notes.append(f"{shape.name}: {published.note}")
    if serving.weights is None and shape.name not in shipped_models() and shape.published is None:
        notes.append(
            f"weights are taken as BF16, because the file of {shape.name} states no quantization_config: "
            "state serving.weights, and serving.experts where they differ"
        )
    for key, fmt in zip(("weights", "experts"), one.formats, strict=True):
        if key == "experts" and (shape.moe is None or fmt == one.formats[0]):
            continue
        dtype = _DTYPES.get(fmt, "bf16")
        if dtype not in card.peak and dtype in WIDER and fmt != "mxfp4":
            notes.append(f"{card.name} does not multiply {fmt}: {key} count at the rate of a wider format")
    if card.power_limit is not None:
        notes.append(f"power_limit of {card.name} is not used: a served step keeps its kernels' clocks")
    if serving.cache in ("nvfp4", "mxfp4"):
        notes.append(f"no measured kernel reads keys and values in {serving.cache}")
    if one.role != "decode" and one.expert_load(True) != one.expert_load(False):
        notes.append(
            f"prompts: an expert's rows vary by {one.expert_load(True):g} of their mean although EPLB places "
            "them (assumed, as by AIConfigurator): state routing.expert_load_cv for your own"
        )
    if drafts := one.pool.draft_tokens:
        measured, longest = accepted_of(shape.name)
        if not shape.mtp_layers:
            notes.append(
                f"{shape.name} has no layer that drafts tokens: one of its own stands for a draft model"
            )
        if serving.acceptance is None and measured != shape.name:
            notes.append(
                f"accepted drafts of {shape.name} were not measured: those of {measured}; "
                "state serving.acceptance"
            )
        if serving.acceptance is None and drafts > longest:
            notes.append(f"acceptance was measured for {longest} drafts: those after them count as refused")
    return tuple(notes)
