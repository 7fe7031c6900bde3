"""Adds the copies of experts whose rows wait for the backward in a paged buffer (pure).

Megatron core copies what the experts keep to pages when their forward ends, and back before their backward,
each with one kernel that reads the number of rows on the device (NVIDIA/Megatron-LM@d98e8a64
megatron/core/transformer/moe/ops/paged_stash.py). The kernels run on a stream of their own; they are priced
as if no compute hid them.
"""

from __future__ import annotations

from collections.abc import Mapping

from moesim.simulator.model.operator import Direction, Operator, Phase
from moesim.simulator.model.primitives import move

TENSORS = 6
"""Tensors that are copied, each by a kernel: inputs of both projections with their scales, the output of the
first, and the routing weights (`GroupedTensor` saves of Transformer Engine's grouped MLP)."""


def with_stash(
    operators: Mapping[Phase, tuple[Operator, ...]], stashed_bytes: float
) -> dict[Phase, tuple[Operator, ...]]:
    """Return the operators of a block with its copies of `stashed_bytes`, behind F and before I."""
    out = dict(operators)
    if stashed_bytes > 0.0 and "mlp F" in out:
        out["mlp F"] = (*out["mlp F"], _copy("experts.stash", "F", stashed_bytes))
        out["mlp I"] = (_copy("experts.unstash", "I", stashed_bytes), *out["mlp I"])
    return out


def _copy(name: str, direction: Direction, size: float) -> Operator:
    return move(name, "copy", direction, size, size, variant="flat", launches=TENSORS, per_received_row=True)
