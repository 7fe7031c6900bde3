"""Operators of the output projection, which most kinds of attention share, and of copies and rotations."""

from __future__ import annotations

from moesim.simulator.model.operator import Direction, Operator
from moesim.simulator.model.primitives import (
    BF16,
    cast,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    recomputed,
    weight_gradient,
)
from moesim.simulator.model.work import Work


def output_projection(w: Work, width: int) -> list[Operator]:
    """Projection of `width` elements of heads on this rank; FP8 recipes cache its input in 12 bits."""
    cache = [cast("attention_output.cache", "F", w.tokens, width, "special")] if w.fp8 else []
    return [*cache, *linear_forward(w, "o_proj", w.tokens, w.hidden, width)]


def output_projection_gradient(w: Work, width: int) -> list[Operator]:
    """Input gradient of the output projection and, in FP8, casts of the operands of its weight gradient."""
    h, t = w.hidden, w.tokens
    if not w.fp8:
        return linear_input_gradient(w, "o_proj", t, h, width)
    return [
        cast("attention_output.restore", "I", t, width, "special_back"),
        *linear_input_gradient(w, "o_proj", t, h, width, cast_first=True),
        cast("attention_output.cast_channel", "I", t, width, "channel"),
        cast("o_proj.gradient_cast_channel", "I", t, h, "channel"),
    ]


def output_projection_weight_gradient(w: Work, width: int) -> Operator:
    """Weight gradient of the output projection."""
    return weight_gradient(w, "o_proj", w.tokens, w.hidden, width)


def recomputed_attention_norm(w: Work) -> list[Operator]:
    """Recompute the norm before the attention, where the policy does not keep its output."""
    if not w.repeats("layernorm"):
        return []
    return recomputed([norm("attn_norm", "F", w.norm_tokens, w.hidden, residual=True)])


def copy(name: str, direction: Direction, elements: float, variant: str) -> Operator:
    """Copy of BF16 elements."""
    return move(name, "copy", direction, elements * BF16, elements * BF16, variant=variant)


def rope(name: str, direction: Direction, elements: float) -> Operator:
    """Rotary position embedding of BF16 elements."""
    return move(name, "rope", direction, elements * BF16, elements * BF16)
