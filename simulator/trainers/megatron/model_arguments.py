"""The model as Megatron-LM arguments."""

from __future__ import annotations

from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.numerics import Numerics
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.trainers.export import Words
from moesim.simulator.trainers.megatron.layout import frequency_text


def model_arguments(shape: ModelShape) -> dict[str, Words]:
    """Arguments of the model apart from its experts; none for attention that Megatron-LM does not have."""
    attention, numerics = shape.attention, shape.numerics or Numerics()
    moe = shape.moe
    spelled: dict[str, Words] = {
        "--num-layers": str(shape.n_layers),
        "--hidden-size": str(shape.hidden),
        "--ffn-hidden-size": str(shape.dense_ffn or (moe.expert_ffn if moe else 4 * shape.hidden)),
        **((attention.megatron_arguments() if attention is not None else None) or {}),
        "--padded-vocab-size": str(shape.vocab),
        "--normalization": "RMSNorm",
    }
    if numerics.norm_epsilon is not None:
        spelled["--norm-epsilon"] = _number(numerics.norm_epsilon)
    spelled["--position-embedding-type"] = "rope"
    base = numerics.rope_theta
    spelled["--rotary-base"] = "$ROTARY_BASE" if base is None else _number(base)
    if shape.ffn_gated:
        spelled["--swiglu"] = None
    spelled["--disable-bias-linear"] = None
    if not shape.tied_embeddings:
        spelled["--untie-embeddings-and-output-weights"] = None
    if shape.mtp_layers:
        spelled["--mtp-num-layers"] = str(shape.mtp_layers)
    return spelled


def expert_arguments(shape: ModelShape, moe: MoE) -> dict[str, Words]:
    """Arguments of the experts and of their router."""
    layers = [int(shape.is_moe_layer(layer)) for layer in range(shape.n_layers)]
    spelled: dict[str, Words] = {
        "--num-experts": str(moe.experts),
        "--moe-router-topk": str(moe.top_k),
        "--moe-ffn-hidden-size": str(moe.expert_ffn),
        "--moe-layer-freq": frequency_text(layers),
        "--moe-grouped-gemm": None,
        "--moe-router-score-function": moe.scoring,
        "--moe-router-dtype": "fp32",
    }
    if moe.top_k == 1 and moe.scoring == "softmax":
        spelled["--moe-router-pre-softmax"] = None
    if moe.score_bias:
        spelled["--moe-router-enable-expert-bias"] = None
    spelled["--moe-router-load-balancing-type"] = "seq_aux_loss" if moe.score_bias else "aux_loss"
    spelled["--moe-aux-loss-coeff"] = "0.0001" if moe.score_bias else "0.001"
    if moe.group_limited:
        spelled["--moe-router-num-groups"] = str(moe.groups)
        spelled["--moe-router-group-topk"] = str(moe.groups_per_token)
    scale = None if shape.numerics is None else shape.numerics.router_scale
    if scale is not None and scale != 1.0:
        spelled["--moe-router-topk-scaling-factor"] = _number(scale)
    if moe.shared_experts:
        spelled["--moe-shared-expert-intermediate-size"] = str(moe.shared_width)
    return spelled


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
