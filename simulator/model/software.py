"""Behaviour of the training framework, such as its attention kernels and the collectives that it overlaps."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

GraphPart: TypeAlias = Literal["attention", "router", "experts", "all"]
"""Part of a layer that replays from a CUDA graph, or the whole step."""


class Software(BaseModel):
    """Framework behaviour that changes a step; every option is off by default (docs/model.md, section 15)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    attention: Literal["flash", "flex", "unfused"] = "flash"
    """`flash`: a fused kernel of a library; `flex`: PyTorch's compiled flex_attention, which is slower;
    `unfused`: two batched GEMMs and a softmax kernel, whose scores go through memory."""
    dropout: bool = False
    """The model trains with dropout: a mask of one byte for every element of the embedding's output and of
    both outputs of a layer, and with `unfused` attention a kernel of its own and a mask for every score."""
    fp8_scales: Literal["delayed", "current"] = "delayed"
    """Where the one scale of a tensor comes from (`precision.scaling` is `tensor`): `delayed`, from its
    largest elements in earlier steps; `current`, from the tensor itself, which a kernel of its own reads
    before the cast, also behind a norm."""
    fp8_activations: Literal["fused", "separate"] = "fused"
    """`fused`: activation kernels of a dense FFN write FP8 themselves (Transformer Engine's LayerNormMLP);
    `separate`: they write BF16 that the linear layers cast (Megatron core). Experts always cast apart."""
    router: Literal["chain", "fused", "constant"] = "chain"
    """`chain`: scores, choice and balance loss with a kernel for every operation (DeepSeek's trace);
    `fused`: Transformer Engine's fused router (`moe_router_fusion`); `constant`: a benchmark's fixed choice
    of experts, without a GEMM."""
    pad_expert_rows: bool = False
    """In FP8, rows of experts are copied to pad every expert's to a multiple of 16 or 32, and back (Megatron
    core without `moe_router_padding_for_fp8`)."""
    expert_biases: Literal["fused", "split", "split-fp32"] = "fused"
    """Biases of routed experts, where a model has them: `fused`, in the kernels beside the grouped GEMMs;
    `split`, rows are split by expert for the bias of the second projection and joined again (Megatron core);
    `split-fp32`, for both projections, and with weights in FP32 (NeMo Automodel)."""
    kernels: Literal["fused", "eager"] = "fused"
    """`eager`: pointwise and permuting work runs as separate operators of PyTorch."""
    parameters_copied: bool = False
    """FSDP2: gathered parameters are copied out of a buffer and gradients into one."""
    flat_parameters: bool = False
    """FSDP1: gradients of a unit are joined into one flat tensor, and cast where they are reduced in FP32."""
    gradients_divided: bool = False
    """FSDP1 divides the gradients of a unit by a part of the number of ranks before it reduces them."""
    layer_kernels: str = "plain"
    """Kernels around norms, residuals and heads: `plain`, or a framework's list (eq. O30): `megatron-te`,
    `megatron-torch`, `megatron-torch-alibi` or `torch`."""
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
    loss: Literal["fused", "compiled", "chain"] = "fused"
    """`chain`: Megatron-LM's vocabulary-parallel loss, with a kernel for every pass over the logits;
    `compiled`: the same compiled (`cross_entropy_loss_fusion`), with half the passes; `fused`: one kernel
    (Transformer Engine)."""
    overlap_tensor_parallel: Literal["none", "weight-gradient", "full"] = "none"
    """Tensor-parallel collectives: `none` exposes all; `weight-gradient` hides the backward's behind the
    weight gradients; `full` cuts all of them into pieces beside the GEMM that makes or needs them."""
    end_collectives: bool = False
    """Tensor-parallel ranks also run the collectives of embedding, head and loss (eq. X30)."""
    overlap_context_parallel: bool = False
    """Ring attention: keys and values travel beside the attention over those that have arrived."""
    overlap_data_parallel: bool = False
    """Gradients are reduced behind the last backward and parameters gathered behind the first forward. ZeRO-3
    needs no such key: its collectives always run beside the compute of other blocks."""
    host: str | None = None
    """Host (`hwmodels/data/hosts`, or a file) whose launches the GPU may have to wait for; none: never."""
    modules: Literal["torch", "transformer-engine"] = "torch"
    """What the host calls: PyTorch's own operators, or modules of Transformer Engine."""
    cuda_graphs: tuple[GraphPart, ...] = ()
    """Parts of a layer that replay from a graph and cost the host nothing: the attention half, the router
    with what prepares the dispatch, the experts, or the whole step."""


PLAIN = Software()
"""Fused kernels, and no overlap of collectives."""
