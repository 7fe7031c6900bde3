"""Replaces the router's chain of small kernels by a fused router or by a fixed choice (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moesim.simulator.model.feed_forward.router import GATE_BACKWARD_PASSES, GATE_FORWARD_PASSES
from moesim.simulator.model.operator import Operator, Phase

FUSED_KERNELS = 3
"""Kernels of a fused router, forward and backward: choice, scores of the balance loss, and the loss
(NVIDIA/TransformerEngine `pytorch/router.py`: `fused_topk_with_score_function`,
`fused_compute_score_for_moe_aux_loss`, `fused_moe_aux_loss`)."""
FUSED_PASSES = 7
"""Reads and writes of a [tokens, experts] FP32 tensor by these kernels: logits, weights and saved scores of
the first, logits, scores and saved scores of the second, scores of the third; maps of choices are small."""
_CHAIN = {"gate.select": GATE_FORWARD_PASSES, "gate.select.backward": GATE_BACKWARD_PASSES}
_ROUTER = frozenset({"gate", "gate.dgrad", "gate.wgrad", *_CHAIN})


def routed_by(
    operators: Mapping[Phase, tuple[Operator, ...]], router: str
) -> dict[Phase, tuple[Operator, ...]]:
    """Replace the router's kernels; `router` is `fused` or `constant`."""
    return {
        phase: tuple(one for op in ops for one in _routed(op, router)) for phase, ops in operators.items()
    }


def _routed(op: Operator, router: str) -> tuple[Operator, ...]:
    base = op.name.removesuffix(".recompute")
    if router == "constant":
        return () if base in _ROUTER else (op,)
    if base not in _CHAIN:
        return (op,)
    share = FUSED_PASSES / _CHAIN[base]
    size = {"bytes_read": op.bytes_read * share, "bytes_written": op.bytes_written * share}
    return (replace(op, **size, launches=FUSED_KERNELS),)  # type: ignore[arg-type]
