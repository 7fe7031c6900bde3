"""Operators of the attention half of a layer: two norms and the residual stream around any attention.

The order is that of the kernels in DeepSeek's published H800 training profile
(deepseek-ai/profile-data@449602428a1b, train.json).
"""

from __future__ import annotations

from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import add, norm, norm_backward, scale
from moesim.simulator.model.work import Work


def attention_forward(w: Work, attention: Attention) -> list[Operator]:
    """Operators from the attention norm to the FFN norm, without the gate."""
    h, m = w.hidden, w.norm_tokens
    return [
        norm("attn_norm", "F", m, h, residual=True),
        *attention.forward(w),
        scale("residual_scale", "F", m, h),
        norm("ffn_norm", "F", m, h, residual=True),
    ]


def attention_input_gradient(w: Work, attention: Attention) -> list[Operator]:
    """Operators from the gradient at the FFN norm's output to the gradient of the block's input."""
    h, m = w.hidden, w.norm_tokens
    return [
        add("ffn_norm.add_gradient", "I", m, h),
        norm_backward("ffn_norm.backward", m, h),
        scale("residual_scale.backward", "I", m, h),
        *attention.input_gradient(w),
        add("attn_norm.add_gradient", "I", m, h),
        norm_backward("attn_norm.backward", m, h),
    ]
