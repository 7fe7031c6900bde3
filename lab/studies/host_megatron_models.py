"""Small models of Megatron core whose Python host_megatron.py measures, without Transformer Engine and apex.

Layers, router, dispatcher, gradient buckets and schedule are Megatron core's own. Linear layers, norms,
attention and grouped experts are plain calls of PyTorch in the places of Transformer Engine's modules. Each
can run twice (`twice`), so that its own host time inside the layer is known and can be taken out.
"""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

HIDDEN, HEADS, GROUPS, CHANNELS, FFN, EXPERT_FFN = 256, 4, 2, 64, 512, 128
TOKENS, VOCABULARY = 128, 512
BF = torch.bfloat16
Kind = Literal["linear", "norm", "attention", "grouped"]
twice: set[Kind] = set()
"""Kinds of plain modules that run twice now."""


@dataclass(frozen=True)
class MegatronCase:
    """What a model has; `aux` is the balancing loss of the router, `fused` the compiled bias-dropout-add."""

    layers: int = 2
    experts: int = 0
    aux: str = "none"
    rope: bool = False
    fused: bool = True
    qk_norm: bool = False
    bias_routing: bool = False
    checkpoint: bool = False
    parameter_gather: bool = False

    @property
    def name(self) -> str:
        """Name of the case without its depth."""
        parts = [f"{self.experts} experts, aux {self.aux}" if self.experts else "dense"]
        parts += ["rope"] * self.rope + ["qk-norm"] * self.qk_norm + ["sigmoid and bias"] * self.bias_routing
        parts += ["bias-dropout-add not fused"] * (not self.fused) + ["full recompute"] * self.checkpoint
        return ", ".join(parts)


class PlainLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer in the place of a tensor-parallel one; returns its result and no bias."""

    def __init__(self, input_size: int, output_size: int, *_: Any, config: Any = None, **__: Any) -> None:
        """Make the weight."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(output_size, input_size, dtype=torch.bfloat16) * 0.02)

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """The product."""
        if "linear" in twice:
            F.linear(x, self.weight)
        return F.linear(x, self.weight), None


class PlainNorm(torch.nn.Module):  # type: ignore[misc]
    """An RMS norm in the place of Transformer Engine's."""

    def __init__(self, *_: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> None:
        """Make the weight."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=torch.bfloat16))
        self.shape = (hidden_size,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm."""
        if "norm" in twice:
            F.rms_norm(x, self.shape, self.weight)
        return F.rms_norm(x, self.shape, self.weight)


class PlainAttention(torch.nn.Module):  # type: ignore[misc]
    """Causal attention of [s, b, heads, channels] in the place of Transformer Engine's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing is kept."""
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The attention."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        if "attention" in twice:
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.permute(2, 0, 1, 3).reshape(y.shape[2], y.shape[0], -1)


class PlainExperts(torch.nn.Module):  # type: ignore[misc]
    """Experts as Megatron core's TEGroupedMLP runs them, with PyTorch's grouped products."""

    def __init__(self, num_local_experts: int, config: Any, **_: Any) -> None:
        """Make the weights."""
        super().__init__()
        self.config = config
        one = torch.randn(num_local_experts, 2 * EXPERT_FFN, HIDDEN, dtype=torch.bfloat16) * 0.02
        two = torch.randn(num_local_experts, HIDDEN, EXPERT_FFN, dtype=torch.bfloat16) * 0.02
        self.fc1, self.fc2 = torch.nn.Parameter(one), torch.nn.Parameter(two)
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1

    def forward(
        self, x: torch.Tensor, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Both projections with the weighted activation between them."""
        from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

        counts = tokens.tolist()
        ends = group_ends(x.shape[0], len(counts), x.device.type)
        probs = probs.unsqueeze(-1)
        if "grouped" in twice:
            grouped(x, self.fc1, ends)
        y = weighted_bias_swiglu_impl(grouped(x, self.fc1, ends), None, probs, False)
        if "grouped" in twice:
            grouped(y, self.fc2, ends)
        return grouped(y, self.fc2, ends), None


@cache
def group_ends(rows: int, groups: int, device: str) -> torch.Tensor:
    """Ends of equal groups, multiples of 8; the host's time does not depend on them."""
    ends = [rows * (i + 1) // groups // 8 * 8 for i in range(groups)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """PyTorch's grouped product; on a CPU, where it may be missing, one product of all rows."""
    if x.device.type == "cpu":
        return x @ weight[0].t()
    return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def layer_spec(case: MegatronCase) -> ModuleSpec:
    """Megatron core's transformer layer with plain modules."""
    mlp: Any = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=PlainLinear, linear_fc2=PlainLinear)
    )
    if case.experts:
        mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=ModuleSpec(module=PlainExperts)))
    return transformer_layer(PlainLinear, PlainLinear, PlainNorm if case.qk_norm else IdentityOp, mlp)


def transformer_layer(qkv: type, projection: type, qk_norm: type, mlp: ModuleSpec) -> ModuleSpec:
    """Megatron core's transformer layer around plain norms and plain attention."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=qkv,
            core_attention=PlainAttention,
            linear_proj=projection,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=PlainNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=PlainNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def configuration(case: MegatronCase, device: str) -> TransformerConfig:
    """The configuration of a case, with sizes for which the device never limits."""
    more: dict[str, Any] = {}
    if case.experts:
        more = {
            "num_moe_experts": case.experts,
            "moe_router_topk": 4,
            "moe_router_load_balancing_type": case.aux,
            "moe_aux_loss_coeff": 0.0 if case.aux == "none" else 1e-3,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_dtype": "fp32",
            "moe_ffn_hidden_size": EXPERT_FFN,
            "expert_model_parallel_size": dist.get_world_size(),
        }
        if case.bias_routing:
            more |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    if case.checkpoint:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return base_configuration(
        device,
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=CHANNELS,
        ffn_hidden_size=FFN,
        bias_dropout_fusion=case.fused,
        **more,
    )


def base_configuration(
    device: str, kind: type[TransformerConfig] = TransformerConfig, **settings: Any
) -> TransformerConfig:
    """A configuration with what all cases share (gated SiLU without biases, RMSNorm, BF16, no dropout)."""
    return kind(
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        bias_activation_fusion=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=device == "cpu",
        **settings,
    )


def build(case: MegatronCase, device: str) -> GPTModel:
    """A model of a case in training mode; losses noted for a model of other depth are forgotten."""
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    return training_model(
        configuration(case, device), layer_spec(case), TOKENS, "rope" if case.rope else "none", device
    )


def training_model(
    config: TransformerConfig, layer: ModuleSpec, tokens: int, positions: str, device: str
) -> GPTModel:
    """A model in training mode whose layers are all alike."""
    block = TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=PlainNorm)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=VOCABULARY,
        max_sequence_length=tokens,
        position_embedding_type=positions,
    )
    return model.to(device).train()


@cache
def inputs(device: str) -> dict[str, Any]:
    """Arguments of a model's forward."""
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), device=device)
    places = torch.arange(TOKENS, device=device)[None]
    return {"input_ids": tokens, "position_ids": places, "attention_mask": None, "labels": tokens}


def start(device: str, tensor_parallel: int = 1, pipeline: int = 1) -> tuple[int, int]:
    """Start the process group and Megatron core's groups with expert parallelism over all ranks."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = (
            None  # a name that Megatron core 0.16.1 asks for and sets only with the engine
        )
    if not hasattr(random, "FP8GlobalStateManager"):  # asked by the recompute of modules, also without FP8
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = lambda *_, **__: nullcontext()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=world // pipeline,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    if device == "cuda":
        random.model_parallel_cuda_manual_seed(1)
    return rank, world
