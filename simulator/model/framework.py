"""Adapts the operators of a block to the kernels and copies of the training framework (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.simulator.model.eager import (
    added_gradients,
    copied_parameters,
    copies_of_single_groups,
    eager_operators,
    flat_gradients,
    narrow_accumulators,
    passes_of_loss,
)
from moesim.simulator.model.expert_biases import clamped_activations, split_biases
from moesim.simulator.model.fused_experts import fused_experts
from moesim.simulator.model.gradient_sums import summed_gradients
from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.padded_rows import padded_rows
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.router_variants import routed_by
from moesim.simulator.model.software import Software


def apply_framework(
    operators: Mapping[Phase, tuple[Operator, ...]],
    software: Software,
    recipe: Precision,
    zero_stage: int,
    parameters: float,
    sharded: float,
    *,
    whole_gradients: bool = False,
) -> dict[Phase, tuple[Operator, ...]]:
    """Return the operators of a block with what `software` adds (docs/model.md, section 15).

    `parameters` counts the block's parameters on one GPU, `sharded` those of them that are split over
    replicas; the groups of the others have one member. `whole_gradients`: gradients of the micro-batches are
    added up before they are reduced.
    """
    adapted = dict(operators)
    if software.weight_gradients != "accumulated":
        adapted = added_gradients(adapted, parameters, software.weight_gradients)
    elif recipe.gradients == "bf16":
        adapted = narrow_accumulators(adapted)
    if software.expert_kernels == "fused":
        adapted = fused_experts(adapted)
    if software.pad_expert_rows and recipe.linear != "bf16":
        adapted = padded_rows(adapted)
    if software.router != "chain":
        adapted = routed_by(adapted, software.router)
    if software.expert_biases != "fused":
        adapted = split_biases(adapted, software.expert_biases)
    if software.flat_parameters and zero_stage == 3:
        adapted = flat_gradients(
            adapted, sharded, BYTES_PER_ELEMENT[recipe.gradient_reduce], divided=software.gradients_divided
        )
    if software.loss != "fused":
        adapted = passes_of_loss(adapted, software.loss)
    if software.kernels == "eager":
        adapted = eager_operators(adapted)
        if software.gradient_sums:
            adapted = summed_gradients(adapted, software.expert_biases == "repeated")
        if software.expert_biases == "repeated":
            adapted = clamped_activations(adapted)
    if software.parameters_copied and zero_stage > 1:
        adapted = copied_parameters(adapted, sharded, zero_stage, whole_gradients=whole_gradients)
        if software.single_groups_copied and zero_stage == 3:
            adapted = copies_of_single_groups(adapted, parameters - sharded, recipe)
    return adapted
