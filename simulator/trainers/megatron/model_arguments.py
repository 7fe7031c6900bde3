"""The model as Megatron-LM arguments."""

from __future__ import annotations

from itertools import pairwise

from moesim.simulator.model.attention import GQA
from moesim.simulator.model.attention.grouped_query import SlidingAttention
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.shape import ModelShape, Numerics
from moesim.simulator.trainers.export import Words
from moesim.simulator.trainers.megatron.layout import frequency_text

SWIGLU = ("silu", None)
"""Values of `numerics.activation` that `--swiglu` means."""

CLAMPED = "swigluoai"
"""The activation of gpt-oss, whose arguments are those of
NVIDIA/Megatron-LM@d98e8a64 examples/post_training/modelopt/conf/openai/gpt-oss-20b.sh."""


def attention_arguments(shape: ModelShape) -> dict[str, Words] | None:
    """Arguments of the attention of all layers; None where Megatron-LM does not have it.

    Layers may differ in a window alone: `--window-size LEFT,RIGHT` counts the tokens beside a query's own,
    and `--window-attn-skip-freq` says which layers have it (megatron/core/transformer/utils.py).
    """
    kinds = shape.attention_by_name
    windows = {one.window for one in kinds.values() if isinstance(one, SlidingAttention)}
    if not windows:
        attention = shape.attention
        spelled = None if attention is None else attention.megatron_arguments()
        return None if spelled is None else {**spelled, **_softmax(getattr(attention, "sinks", False))}
    rest = [one.model_dump(exclude={"kind", "window"}) for one in kinds.values()]
    known = all(type(one) in (GQA, SlidingAttention) for one in kinds.values())
    if not known or len(windows) > 1 or any(one != other for one, other in pairwise(rest)):
        return None
    plain = GQA.model_validate(rest[0])
    flags = [int(isinstance(one, SlidingAttention)) for one in (layer.attention for layer in shape.layers)]
    spelled = {**(plain.megatron_arguments() or {}), "--window-size": f"{windows.pop() - 1},0"}
    if not all(flags):
        every = flags.index(0) + 1
        regular = flags == [int(number % every != 0) for number in range(1, len(flags) + 1)]
        spelled["--window-attn-skip-freq"] = str(every) if regular else frequency_text(flags)
    return {**spelled, **_softmax(plain.sinks)}


def _softmax(sinks: bool) -> dict[str, Words]:
    return {"--softmax-type": "learnable"} if sinks else {}


def linear_biases(shape: ModelShape) -> bool | None:
    """Whether linear layers have biases, which Megatron-LM decides for all of them; None where some have.

    Biases of queries, keys and values alone have an argument of their own.
    """
    attentions = tuple(shape.attention_by_name.values())
    found = {bool(getattr(attention, "o_bias", False)) for attention in attentions}
    if shape.moe is not None:
        found |= {shape.moe.expert_bias, shape.moe.router_bias}
    if any(not shape.is_moe_layer(layer) for layer in range(shape.n_layers)):
        found.add(shape.ffn_bias)
    if True in found:
        found |= {bool(getattr(attention, "qkv_bias", False)) for attention in attentions}
    return found.pop() if len(found) == 1 else None


def model_arguments(shape: ModelShape) -> dict[str, Words]:
    """Arguments of the model apart from its experts; none for attention that Megatron-LM does not have."""
    numerics = shape.numerics or Numerics()
    moe, biases = shape.moe, linear_biases(shape)
    spelled: dict[str, Words] = {
        "--num-layers": str(shape.n_layers),
        "--hidden-size": str(shape.hidden),
        "--ffn-hidden-size": str(shape.dense_ffn or (moe.expert_ffn if moe else 4 * shape.hidden)),
        **(attention_arguments(shape) or {}),
        "--padded-vocab-size": str(shape.vocab),
        "--normalization": "RMSNorm",
    }
    if numerics.norm_epsilon is not None:
        spelled["--norm-epsilon"] = _number(numerics.norm_epsilon)
    spelled["--position-embedding-type"] = "rope"
    base = numerics.rope_theta
    spelled["--rotary-base"] = "$ROTARY_BASE" if base is None else _number(base)
    if shape.ffn_gated and numerics.activation == CLAMPED:
        spelled |= {"--quick-geglu": None, "--glu-linear-offset": "1.0"}
        spelled["--activation-func-clamp-value"] = "7.0"
    elif shape.ffn_gated:
        spelled["--swiglu"] = None
    if biases:
        spelled.pop("--add-qkv-bias", None)
    else:
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
