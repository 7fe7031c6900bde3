"""Projections of routed rows into a narrow latent space and back (LatentMoE: NVIDIA-Nemotron-3-Super).

Every rank projects its own tokens before the dispatch and after the combine, so that both transfers and the
experts work on latent rows; router and shared experts see the hidden state (Megatron-LM core_v0.16,
`--moe-latent-size`).
"""

from __future__ import annotations

from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import (
    cast,
    linear_forward,
    linear_input_gradient,
    norm,
    norm_backward,
    weight_gradient,
)
from moesim.simulator.model.work import Work


def into_latent(w: Work, latent: int) -> list[Operator]:
    """Projection of the tokens into latent rows and, in FP8, the cast of the rows that are sent."""
    send = [cast("latent.cast", "F", w.norm_tokens, latent, "token")] if w.fp8 else []
    return [*linear_forward(w, "latent_down", w.norm_tokens, latent, w.hidden, cast_input=False), *send]


def out_of_latent(w: Work, latent: int, normed: bool) -> list[Operator]:
    """Projection of the combined latent rows into the hidden state, behind their norm if they have one."""
    before = [norm("latent_norm", "F", w.norm_tokens, latent)] if normed else []
    return [*before, *linear_forward(w, "latent_up", w.norm_tokens, w.hidden, latent)]


def out_of_latent_gradient(w: Work, latent: int, normed: bool) -> list[Operator]:
    """Gradient of the combined latent rows from that of the hidden state."""
    out = linear_input_gradient(w, "latent_up", w.norm_tokens, w.hidden, latent)
    out += _channel_casts(w, "latent_up", w.hidden, latent)
    return [*out, norm_backward("latent_norm.backward", w.norm_tokens, latent)] if normed else out


def into_latent_gradient(w: Work, latent: int) -> list[Operator]:
    """Gradient of the hidden state from that of the latent rows that were sent."""
    out = linear_input_gradient(w, "latent_down", w.norm_tokens, latent, w.hidden)
    return [*out, *_channel_casts(w, "latent_down", latent, w.hidden)]


def latent_weight_gradient(w: Work, latent: int) -> list[Operator]:
    """Weight gradients of both projections."""
    t = w.norm_tokens
    return [
        weight_gradient(w, "latent_up", t, w.hidden, latent),
        weight_gradient(w, "latent_down", t, latent, w.hidden),
    ]


def _channel_casts(w: Work, name: str, n: int, k: int) -> list[Operator]:
    """Casts of both operands of a weight gradient, in FP8 by tiles."""
    if not w.fp8:
        return []
    return [
        cast(f"{name}.gradient_cast_channel", "I", w.norm_tokens, n, "channel"),
        cast(f"{name}.input_cast_channel", "I", w.norm_tokens, k, "channel"),
    ]
