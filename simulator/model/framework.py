"""The operators of a block as the training framework runs them: its own kernels and copies (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.simulator.model.eager import (
    added_gradients,
    chained_loss,
    copied_parameters,
    eager_operators,
    flat_gradients,
    narrow_accumulators,
)
from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.software import Software


def apply_framework(
    operators: Mapping[Phase, tuple[Operator, ...]],
    software: Software,
    recipe: Precision,
    zero_stage: int,
    parameters: float,
    sharded: float,
) -> dict[Phase, tuple[Operator, ...]]:
    """Operators with what `software` adds (docs/model.md, section 15).

    `parameters` of the block on one GPU, `sharded` those of them that are split over replicas.
    """
    found = dict(operators)
    if software.weight_gradients != "accumulated":
        found = added_gradients(found, parameters, software.weight_gradients)
    elif recipe.gradients == "bf16":
        found = narrow_accumulators(found)
    if software.flat_parameters and zero_stage == 3:
        found = flat_gradients(found, sharded, BYTES_PER_ELEMENT[recipe.gradient_reduce])
    if software.loss != "fused":
        found = chained_loss(found, compiled=software.loss == "compiled")
    if software.kernels == "eager":
        found = eager_operators(found)
    if software.parameters_copied and zero_stage > 1:
        found = copied_parameters(found, sharded, zero_stage)
    return found
