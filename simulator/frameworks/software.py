"""What a training framework does in a step, as one value: the answers of a release, and single switches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PositiveInt,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from moesim.hwmodels.frozen import Section
from moesim.simulator.frameworks.registry import NONE, release_of

GraphPart: TypeAlias = Literal["attention", "router", "experts", "all"]
"""Part of a layer that replays from a CUDA graph, or the whole step."""

TensorOverlap: TypeAlias = Literal["none", "weight-gradient", "full", "userbuffers", "async"]
"""Way in which collectives of tensor parallelism run beside GEMMs."""


class StaticExperts(Section):
    """Fixed sizes of the experts' buffers, so that a graph holds dropless experts (docs/model.md, eq. O20).

    The kernels read the numbers of rows on the device and compute no padding; no count goes to the host.
    Source: NVIDIA/Megatron-LM@d98e8a64 megatron/core/transformer/moe/token_dispatcher.py (rank budget of
    HybridEP) and paged_stash.py.
    """

    capacity: float = Field(ge=1.0, le=1e4)
    """Rows that the buffers of a rank hold, over the mean (`moe_expert_rank_capacity_factor`)."""
    stash: float = Field(0.0, ge=0.0, le=1e4)
    """Size of the paged buffer to which rows are copied until their backward, over what they take at the
    mean (`moe_paged_stash_buffer_size_factor_cuda`); 0 keeps the buffers themselves."""

    @property
    def kept(self) -> float:
        """Bytes that wait for the backward, over those of the mean number of rows."""
        return self.stash or self.capacity


class Software(Section):
    """Framework behaviour that changes a step (docs/model.md, section 15).

    The `framework` answers all switches that are left out or null; a stated switch overrides its answer.
    Dumps have the stated switches only.
    """

    framework: str = Field(
        NONE,
        description="Trainer release whose behaviour the other keys of this section override, such as "
        "`megatron-core-0.17` (`simulator/frameworks`); `none`: an ideal host, and every option that is not "
        "stated is off. Absent: the accelerator's usual trainer that can run the plan.",
    )
    attention: Literal["flash", "flex", "unfused"] = "flash"
    """`flash`: a fused kernel of a library; `flex`: PyTorch's compiled flex_attention, which is slower;
    `unfused`: two batched GEMMs and a softmax kernel, whose scores go through memory."""
    op_keeps_transfers: bool = True
    """The recompute policy `op` keeps what came through dispatch and combine (torchtitan's lists for Llama 4,
    DeepSeek-V3 and gpt-oss); false: the backward repeats both transfers (its list for Qwen3)."""
    dropout: bool = False
    """The model trains with dropout: a mask of one byte for every element of the embedding's output and of
    both outputs of a layer, and with `unfused` attention a kernel of its own and a mask for every score."""
    fp8_scales: Literal["delayed", "current"] = "delayed"
    """Where the one scale of a tensor comes from (`precision.scaling` is `tensor`): `delayed`, from its
    largest elements in earlier steps; `current`, from the tensor itself, which a kernel of its own reads
    before the cast, also behind a norm."""
    amax_reduction: Literal["none", "tensor-parallel", "data-parallel"] = "none"
    """Ranks over which delayed scaling reduces the largest elements, once a chunk, micro-batch and direction:
    `data-parallel`, all that hold the chunk (Transformer Engine's `reduce_amax` in Megatron core);
    `tensor-parallel`, those of a replica's tensor parallelism (`tp_only_amax_red`)."""
    fp8_activations: Literal["fused", "separate"] = "fused"
    """`fused`: activation kernels of a dense FFN write FP8 themselves (Transformer Engine's LayerNormMLP);
    `separate`: they write BF16 that the linear layers cast (Megatron core). Experts always cast apart."""
    router: Literal["chain", "fused", "constant"] = "chain"
    """`chain`: scores, choice and balance loss with a kernel for every operation (DeepSeek's trace);
    `fused`: Transformer Engine's fused router (`moe_router_fusion`); `constant`: a benchmark's fixed choice
    of experts, without a GEMM."""
    expert_reads: Literal["counts", "selection", "none"] = "counts"
    """What the host reads from the device in the forward of routed experts: `counts`, of rows, behind the
    router; `selection`, sizes of PyTorch's `masked_select` there and behind the combine (Megatron core
    without `moe_permute_fusion`); `none`, rows are padded to a capacity (Megatron core from 0.11)."""
    pad_expert_rows: bool = False
    """In FP8, rows of experts are copied to pad every expert's to a multiple of 16 or 32, and back (Megatron
    core without `moe_router_padding_for_fp8`)."""
    expert_kernels: Literal["separate", "fused"] = "separate"
    """Kernels between the grouped GEMMs of experts: `separate`; `fused`, activation, routing weights and the
    quantisation by rows and columns run in the GEMMs' epilogues (Transformer Engine's fused grouped MLP,
    `use_transformer_engine_op_fuser`), for block-scaled FP8 on Blackwell."""
    expert_biases: Literal["fused", "split", "split-fp32", "repeated"] = "fused"
    """Biases of routed experts, where a model has them: `fused`, in the kernels beside the grouped GEMMs;
    `split`, rows are split by expert for the bias of the second projection and joined again, the activation
    is clamped in single operators, and its offset, a new tensor, holds the host (Megatron core);
    `split-fp32`, for both projections, and with weights in FP32 (NeMo Automodel); `repeated`, biases are
    repeated by row, and with `kernels: eager` the activation between them is clamped in single operators
    (torchtitan's gpt_oss)."""
    scaled_rotary: Literal["fused", "halves"] = "fused"
    """Rotary embedding that YaRN scales (gpt-oss): one kernel, or `halves`, in single operators (Megatron
    core, whose fused kernel takes no scale)."""
    kernels: Literal["fused", "eager"] = "fused"
    """`eager`: pointwise and permuting work runs as separate operators of PyTorch."""
    expert_rows: Literal["fused", "eager"] = "fused"
    """With `kernels: fused`, those that gather, group and sum the rows of experts: `eager`, PyTorch's
    operators, and the rows of the weighted sum are kept (torchtitan compiles all of a layer but them)."""
    padded_experts: bool = False
    """With eager rows of experts: every expert of a rank has eight rows of padding, whose gradients are added
    one after the other (torchtitan 0.2; 0.3 pads rows in FP8 and MX alone)."""
    gradient_sums: bool = False
    """With `kernels: eager`: queries, keys and values, and gate and up, are linear layers of their own, whose
    input gradients autograd adds (torchtitan)."""
    parameters_copied: bool = False
    """FSDP2: gathered parameters are copied out of a buffer and gradients into one."""
    shards_cast: bool = True
    """With `parameters_copied`, FSDP2 casts shards of a wider format into a tensor of their own before it
    copies them into the buffer of a gather (eq. O34); false: one copy does both."""
    single_groups_copied: bool = False
    """With `parameters_copied` and ZeRO-3, FSDP2 also wraps parameters whose sharding group has one member
    (torchtitan's experts where expert parallelism takes all ranks): it casts and copies them before each
    pass, and packs, divides and copies their gradients."""
    allocator: Literal["none", "segments", "expandable"] = "none"
    """What replays the step's allocations, for the peaks of active and reserved memory: `none`; PyTorch's
    caching allocator with `segments` of fixed size, its default; or `expandable` ones
    (`expandable_segments:True`, which torchtitan's `run_train.sh` sets). It needs eager kernels and FSDP2."""
    flat_parameters: bool = False
    """FSDP1: gradients of a unit are joined into one flat tensor, and cast where they are reduced in FP32."""
    recompute_stops_early: bool = False
    """With the recompute policy `full`, a dense layer that runs again stops when all that its backward needs
    is there, before its last GEMM (`torch.utils.checkpoint` without re-entry from torch 2.1 on, unless
    `set_checkpoint_early_stop(False)`, which torchtitan says; Megatron's and DeepSpeed's run it whole)."""
    parameter_gathers: Literal["block", "matrix", "matrix-ahead"] = "block"
    """With ZeRO-3: `block`, collectives of whole blocks beside the compute of others; `matrix`, DeepSpeed's
    before 0.6: compute waits for the gather of each matrix and for the scatter of each gradient, as lists of
    one view a rank, which torch copies one by one; `matrix-ahead`: matrices of at most a billion parameters,
    which it gathers beside the matrix before (`stage3_max_live_parameters`)."""
    gradients_divided: bool = False
    """FSDP1 divides the gradients of a unit by a part of the number of ranks before it reduces them."""
    layer_kernels: str = "plain"
    """Kernels around norms, residuals and heads: `plain`, or a framework's list (eq. O30): `megatron-te`,
    `megatron-torch`, `megatron-torch-alibi`, `torch` or `torch-unpadded`."""
    step_kernels: str = "plain"
    """Kernels at the end of a step beside norm and Adam: `plain`, or a framework's list (eq. C50):
    `megatron-ddp`, `megatron-ddp-average`, `megatron-fp16`, `apex-distributed`, `deepspeed-fp16`,
    `deepspeed-bf16`, `composer` or `torch`."""
    gradients_all_reduced: bool = False
    """With ZeRO-1 or 2, gradients are all-reduced although each GPU updates only its part (DeepSpeed's BF16
    optimizer)."""
    tied_tables_reduced: bool = False
    """First and last pipeline rank add up the gradients of a table that embedding and head share
    (eq. E30)."""
    weight_gradients: Literal["accumulated", "written", "added", "added-fp32"] = "accumulated"
    """`accumulated`: the GEMM adds into a buffer of the format `precision.gradients` (Megatron-LM);
    `written`: it writes 16-bit gradients anew (PyTorch autograd); `added`: a further kernel adds these to
    16-bit gradients after every micro-batch; `added-fp32`: it adds them to FP32 gradients, as DeepSpeed's
    BF16 optimizer does."""
    placeholder_gradients: bool = False
    """Transformer Engine from 2.3 on: autograd receives a 16-bit placeholder for every weight gradient that a
    GEMM added into a buffer, and one of each shape stays in memory (eq. M31)."""
    loss: Literal["fused", "compiled", "chain", "eager"] = "fused"
    """`chain`: Megatron-LM's vocabulary-parallel loss, with a kernel for every pass over the logits;
    `compiled`: the same compiled (`cross_entropy_loss_fusion`), with half the passes; `eager`: PyTorch's
    `cross_entropy` of logits cast to FP32; `fused`: one kernel (Transformer Engine)."""
    overlap_tensor_parallel: TensorOverlap = "none"
    """Tensor-parallel collectives: `none` exposes all; `weight-gradient` hides the backward's behind the
    weight gradients; `full` cuts all of them into pieces beside the GEMM that makes or needs them, at no cost
    to it; `userbuffers` and `async` do so as Transformer Engine's user buffers (`tp_comm_overlap`) and
    torchtitan's asynchronous tensor parallelism, with what cutting and SMs cost the GEMMs."""
    end_collectives: bool = False
    """Tensor-parallel ranks also run the collectives of embedding, head and loss (eq. X30)."""
    overlap_context_parallel: bool = False
    """Ring attention: keys and values travel beside the attention over those that have arrived."""
    ring_attention: Literal["whole", "pieces"] = "whole"
    """Core attention under context parallelism: `whole`, one kernel over the sequence; `pieces`, one for each
    part of keys and values that arrives, whose outputs and gradients kernels of their own join (eq. A9)."""
    overlap_data_parallel: bool = False
    """Gradients are reduced behind the backward that completes them and parameters gathered behind the first
    forward. ZeRO-3 needs no such key inside the step: its collectives always run beside the compute of other
    blocks."""
    gradient_sync: Literal["every-microbatch", "last-microbatch"] | None = None
    """With ZeRO-2 and 3, micro-batches whose backward reduces the gradients: `every-microbatch` scatters them
    in every backward and keeps sums of shards; `last-microbatch` keeps whole sums and reduces them once a
    step (`no_sync`, `set_requires_gradient_sync`). Absent: every one, and with FSDP2 in a pipeline the last.
    ZeRO-0 and 1 always reduce once a step."""
    data_parallel_buckets: Literal["layer", "megatron"] = "layer"
    """With `overlap_data_parallel`: `layer` hides both collectives of a rank by block behind one pass over
    its blocks; `megatron` by model chunk and rank, as Megatron core does: buckets on the first pipeline
    rank's first chunk, one bucket a chunk elsewhere, and aligned gathers (`align_param_gather`)."""
    bucket_parameters: PositiveInt | None = None
    """Parameters in a bucket of overlapped gradients; absent: one block with `layer`, and with `megatron` 40
    million or 1 million for each data-parallel rank, whichever is more."""
    overlap_optimizer: bool = False
    """With `data_parallel_buckets: megatron`: parameters of a rank's first chunk are gathered while the
    optimizer updates its other chunks (`overlap_param_gather_with_optimizer_step`)."""
    awaited_sends: Literal["schedule", "edges", "all"] = "schedule"
    """Pipeline sends that a rank waits for before it goes on: `schedule`, as the code of the schedule does;
    `edges`, also those of warm-up and flush (interleaved stages of Megatron core without
    `overlap_p2p_comm_warmup_flush`); `all`, every one (Megatron-LM before `overlap_p2p_comm`)."""
    host: Annotated[str | None, BeforeValidator(lambda name: None if name == NONE else name)] = None
    """Host (`hwmodels/data/hosts`, or a file) whose launches the GPU may have to wait for; `none`: never.
    Absent: with a framework that of the node, else none."""
    launch_blocking: bool = False
    """`CUDA_LAUNCH_BLOCKING=1`: the host waits for each kernel before it launches the next, so that its time
    adds to that of every kernel and nothing runs beside anything else."""
    host_slowness: float = Field(1.0, ge=0.01, le=100.0)
    """Factor on all times of the host; the range of the host's file is spread around it."""
    modules: Literal["torch", "transformer-engine", "megatron-core"] = "torch"
    """What the host calls: PyTorch's own operators, modules of Transformer Engine, or these with Megatron
    core's own Python around them."""
    compiled_blocks: bool = False
    """`torch.compile` compiles each block as torchtitan does, so that the host runs generated code in the
    place of single operators. It needs fused kernels and PyTorch's own modules."""
    dtensor: bool = False
    """Tensor parallelism runs through PyTorch's DTensor (torchtitan), which takes the host longer and keeps
    the gathered inputs of column-parallel GEMMs."""
    garbage_collection: Literal["fixed", "automatic"] = "fixed"
    """Python's garbage collection: `fixed`, at chosen steps only (`gc_freq` of torchtitan, `manual_gc` of
    Megatron-LM); `automatic`, whenever Python starts one, which takes the host longer."""
    cuda_graphs: tuple[GraphPart, ...] = ()
    """Parts of a layer that replay from a graph, which the host only starts: the attention half, the router
    with what prepares the dispatch, the experts, or the whole step."""
    static_experts: StaticExperts | None = None
    """Buffers of routed experts have a fixed size; absent: as many rows as arrive, which the host reads."""

    @model_validator(mode="wrap")
    @classmethod
    def _answered_by_framework(cls, data: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return build(data)
        stated = {switch: value for switch, value in data.items() if value is not None}
        if stated.get("framework", NONE) == NONE:
            return build(stated)
        answers = release_of(stated.get("framework")).switches
        if not _is_replayed({**answers, **stated}):
            answers.pop("allocator", None)
        software = build({**answers, **stated})
        software.model_fields_set.intersection_update(stated)
        return software

    @model_serializer(mode="wrap")
    def _as_stated(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        data: dict[str, Any] = dump(self)
        if (info.context or {}).get("resolved"):
            return data
        if "host" in self.model_fields_set and self.host is None:
            data["host"] = NONE
        return {switch: value for switch, value in data.items() if switch in self.model_fields_set}

    @model_validator(mode="after")
    def _compiled_blocks_are_fused(self) -> Self:
        if self.compiled_blocks and (self.kernels != "fused" or self.modules != "torch"):
            raise ValueError(
                f"compiled_blocks with kernels={self.kernels} and modules={self.modules} is not what "
                "torch.compile makes; set kernels: fused and modules: torch, or compiled_blocks: false"
            )
        return self

    @model_validator(mode="after")
    def _blocked_launches_hide_nothing(self) -> Self:
        beside = [key for key in HIDING if getattr(self, key) not in (False, "none", ())]
        if self.launch_blocking and beside:
            raise ValueError(
                f"launch_blocking=true with {beside[0]}={getattr(self, beside[0])}: kernels run one by "
                f"one, and nothing beside them; turn {', '.join(beside)} off, or set launch_blocking: false"
            )
        return self

    @model_validator(mode="after")
    def _allocations_are_described(self) -> Self:
        if self.allocator != "none" and not _is_replayed(dict(self)):
            raise ValueError(
                f"allocator={self.allocator} replays eager kernels under FSDP2; set kernels: eager, "
                "parameters_copied: true and attention: flash, without dropout and static_experts, or "
                "allocator: none"
            )
        return self

    @property
    def hides_zero_3(self) -> bool:
        """Whether all collectives of ZeRO-3 run beside the compute of other blocks."""
        return self.parameter_gathers == "block" and not self.launch_blocking

    @property
    def gathers_wait(self) -> bool:
        """Whether a gather of ZeRO-3 begins when the compute before it has ended."""
        return self.parameter_gathers == "matrix" or self.launch_blocking

    @property
    def fsdp(self) -> bool:
        """Whether PyTorch's FSDP, 1 or 2, holds parameters and gradients, which come and go."""
        return self.parameters_copied or self.flat_parameters

    @property
    def makes_gradients_in_backward(self) -> bool:
        """Whether the first backward of a step makes gradients; else they have buffers all along (eq. M47).

        PyTorch's autograd makes a parameter's gradient in the backward after `zero_grad(set_to_none=True)`,
        and so does FSDP. GEMMs that accumulate need a buffer (Megatron core's and Megatron-FSDP's), and
        DeepSpeed's BF16 optimizer has one in FP32 (`deepspeed/runtime/bf16_optimizer.py`,
        `fp32_groups_gradients_flat`).
        """
        return self.fsdp or self.weight_gradients in ("written", "added")

    def keeps_whole_gradients(self, pp: int) -> bool:
        """Whether micro-batches add into whole gradients, which are reduced after the last, in ZeRO-2 and 3.

        Stages 0 and 1 do so anyway. Where `gradient_sync` does not say it, torch's pipelines with FSDP2 do
        (eq. M45).
        """
        if self.gradient_sync is None:
            return pp > 1 and self.parameters_copied
        return self.gradient_sync == "last-microbatch"

    @property
    def loss_of_torch(self) -> bool:
        """Whether the loss is PyTorch's own, eager or compiled with eager layers (eq. M44)."""
        return "eager" in (self.kernels, self.loss)

    @property
    def buckets_by_chunk(self) -> bool:
        """Whether gradients overlap by model chunk and rank, so that ranks with equal blocks may differ."""
        return self.overlap_data_parallel and self.data_parallel_buckets == "megatron"

    def bucket_size(self, ranks: int) -> int | None:
        """Parameters in a bucket over `ranks` data-parallel ranks; None for one block.

        Source of Megatron core's: NVIDIA/Megatron-LM@d98e8a64ddf3
        megatron/core/distributed/distributed_data_parallel.py:134.
        """
        if self.bucket_parameters is not None:
            return self.bucket_parameters
        return max(40_000_000, 1_000_000 * ranks) if self.data_parallel_buckets == "megatron" else None


def _is_replayed(switches: Mapping[str, Any]) -> bool:
    """Whether the allocations of a step with these switches can be replayed."""
    eager = switches.get("kernels") == "eager" and switches.get("parameters_copied")
    plain = switches.get("attention", "flash") == "flash" and not switches.get("dropout")
    return bool(eager and plain and switches.get("static_experts") is None)


HIDING = ("overlap_data_parallel", "overlap_tensor_parallel", "overlap_context_parallel", "cuda_graphs")
"""Switches that hide transfers or launches behind kernels."""
PLAIN = Software()
"""Fused kernels, and no overlap of collectives."""
