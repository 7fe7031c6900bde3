"""What a choice of recompute runs again in one layer, beside the operators: collectives and transfers."""

from __future__ import annotations

from typing import NamedTuple

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.block import BlockShape, Layer
from moesim.simulator.model.recompute import MODULES, Module, Recompute
from moesim.simulator.model.shape import ModelShape


class RepeatedCommunication(NamedTuple):
    """Communication of a layer's forward that its backward runs again."""

    layer: bool = False
    """Tensor- and context-parallel collectives of both halves."""
    context: bool = False
    """The exchange of keys and values between context-parallel ranks."""
    feed_forward: bool = False
    """Tensor-parallel collectives around the FFN, or around the shared experts."""
    experts: bool = False
    """Dispatch and combine, and the collectives of ranks that split an expert."""


def repeated_communication(block: BlockShape, recompute: Recompute) -> RepeatedCommunication:
    """Communication that the backward of a block runs again; blocks without a layer repeat none."""
    if block.layer is None or recompute == "full":
        return RepeatedCommunication(layer=block.layer is not None, experts=block.routed)
    if isinstance(recompute, str):
        return RepeatedCommunication()
    attention, feed_forward = block.layer.attention, block.layer.feed_forward
    chosen = frozenset(recompute)
    return RepeatedCommunication(
        context=bool(chosen & attention.context_modules),
        feed_forward=bool(chosen & feed_forward.collective_modules),
        experts=bool(chosen & feed_forward.transfer_modules),
    )


def checkpoints(block: BlockShape, recompute: Recompute) -> int:
    """Number of checkpointed functions in a block; each norm of a layer is one."""
    if block.layer is None:
        return 0
    if isinstance(recompute, str):
        return int(recompute == "full")
    modules = modules_of_layer(block.layer) & frozenset(recompute)
    return len(modules) + (block.layer.norms - 1 if "layernorm" in modules else 0)


def feed_forward_checkpoints(block: BlockShape, recompute: Recompute) -> int:
    """Number of checkpointed functions in the feed-forward half of a block."""
    if block.layer is None or isinstance(recompute, str):
        return 0
    return len(block.layer.feed_forward.modules & frozenset(recompute))


def modules_of_layer(layer: Layer) -> frozenset[Module]:
    """Modules that a layer has and that can be recomputed."""
    norms: frozenset[Module] = frozenset({"layernorm"})
    return norms | layer.attention.modules | layer.feed_forward.modules


def modules_of_model(shape: ModelShape) -> frozenset[Module]:
    """Modules that some layer of the model has and that can be recomputed."""
    layers = (shape.block(kind).layer for kind in shape.block_kinds)
    return frozenset[Module]().union(*(modules_of_layer(layer) for layer in layers if layer is not None))


def check_recompute(shape: ModelShape, recompute: Recompute) -> None:
    """Raise InputError for a module that no layer of the model has."""
    if isinstance(recompute, str):
        return
    have = modules_of_model(shape)
    known = [module for module in MODULES if module in have]
    for module in recompute:
        if module not in have:
            raise InputError(
                f"recompute: {shape.name} has no module {module}; it has {', '.join(known)}",
                key="recompute",
                nearest=tuple(known),
            )
