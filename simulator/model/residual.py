"""Operators of the attention half of a layer: the layer's norms and the residual stream around any attention.

The order is that of the kernels in DeepSeek's published H800 training profile
(deepseek-ai/profile-data@449602428a1b, train.json).
"""

from __future__ import annotations

from moesim.simulator.model.block import Layer
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import add, norm, norm_backward, scale
from moesim.simulator.model.work import Work


def attention_forward(w: Work, layer: Layer) -> list[Operator]:
    """Operators from the attention norm to the FFN norm, without the gate; a missing half has no norm.

    The norm behind the FFN of a layer with sandwich norms is listed here too.
    """
    h, m = w.hidden, w.norm_tokens
    out: list[Operator] = []
    if not layer.attention.empty:
        out = [norm("attn_norm", "F", m, h, residual=True), *layer.attention.forward(w)]
        if layer.sandwich_norms:
            out.append(norm("attn_post_norm", "F", m, h))
        out.append(scale("residual_scale", "F", m, h))
    if not layer.feed_forward.empty:
        out.append(norm("ffn_norm", "F", m, h, residual=True))
        if layer.sandwich_norms:
            out.append(norm("ffn_post_norm", "F", m, h))
    return out


def attention_input_gradient(w: Work, layer: Layer) -> list[Operator]:
    """Operators from the gradient at the FFN norm's output to the gradient of the block's input."""
    h, m = w.hidden, w.norm_tokens
    out: list[Operator] = []
    if not layer.feed_forward.empty:
        if layer.sandwich_norms:
            out.append(norm_backward("ffn_post_norm.backward", m, h))
        out += [add("ffn_norm.add_gradient", "I", m, h), norm_backward("ffn_norm.backward", m, h)]
    if layer.attention.empty:
        return out
    out.append(scale("residual_scale.backward", "I", m, h))
    if layer.sandwich_norms:
        out.append(norm_backward("attn_post_norm.backward", m, h))
    return [
        *out,
        *layer.attention.input_gradient(w),
        add("attn_norm.add_gradient", "I", m, h),
        norm_backward("attn_norm.backward", m, h),
    ]
