"""Precision recipes, which set the number format of every kind of tensor and GEMM."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, Self

from pydantic import model_validator

from moesim.hwmodels.frozen import Section

Format = Literal["fp8", "bf16", "fp32"]

BYTES_PER_ELEMENT: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
FP8_TILE = 128
"""Elements that share one FP32 scale (DeepSeek-V3 report, section 3.3: 1x128 tiles)."""

Blocks = Literal["", "mx", "nvfp4"]
"""Formats whose blocks of a few elements share a scale of one byte, which tensor cores of Blackwell apply."""
BLOCK_BYTES: dict[Blocks, float] = {"": 0.0, "mx": 1.0 + 1.0 / 32.0, "nvfp4": 0.5 + 1.0 / 16.0}
"""Bytes of an element with its share of the scale: 32 elements a scale in MXFP8, 16 in NVFP4."""


class Precision(Section):
    """A precision recipe; the presets `fp8` and `bf16` are in `PRECISIONS`."""

    linear: Literal["fp4", "fp8", "bf16"]
    """Format of the GEMMs of linear layers and experts. `fp4` is NVFP4 as Transformer Engine trains in it:
    all three GEMMs of a layer in FP4, with scales of its own."""
    scaling: Literal["tile", "tensor", "mx"] = "tile"
    """FP8 scales: one for 1x128 elements, cast anew for every GEMM (DeepSeek-V3); or one a tensor, casts
    fused into the kernels before and weights cast once a step (Transformer Engine); or `mx`, one for 1x32
    elements (MXFP8), with one cast of a tensor for all GEMMs that read it, and weights cast once a step."""
    head: Literal["fp8", "bf16", "fp32"] = "bf16"
    """Format of the GEMMs of the output head; `fp8` as `linear`, whose logits are BF16 (Megatron core's
    `fp8_output_proj`)."""
    attention: Literal["fp8", "bf16"] = "bf16"
    """Format of the operands of the core attention, forward and backward; `fp8` with the scales of `scaling`
    (Transformer Engine's `fp8_dpa`): queries, keys, values and the output's gradient are cast first, and the
    output and the gradients of the three are BF16. Its kernels know `mx` and `tensor`."""
    loss: Literal["bf16", "fp32"] = "bf16"
    """`fp32`: logits are copied to FP32 before the loss, and its gradient back. `software.loss: eager`, whose
    code does so, is always in FP32."""
    parameters: Literal["bf16", "fp8", "fp32"] = "bf16"
    """Format of the copy that forward and backward read."""
    master_weights: Format = "fp32"
    """Format of the copy that the optimizer updates."""
    gradients: Format = "fp32"
    """Format of the accumulated gradients."""
    gradients_twice: bool = False
    """A BF16 gradient of autograd stays beside the one that is accumulated (DeepSpeed's BF16 optimizer)."""
    moments: Format = "fp32"
    """Format of both Adam moments."""
    dispatch: Literal["fp8", "bf16"] = "bf16"
    """Payload of dispatch forward and of the gradient that the backward of combine sends."""
    combine: Literal["fp8", "bf16"] = "bf16"
    """Payload of combine forward and of the gradient that the backward of dispatch sends."""
    activation_cache: Literal["fp8", "bf16"] = "bf16"
    """Format of the activations kept for the backward of linear layers."""
    tensor_gather: Literal["fp8", "bf16"] = "bf16"
    """Format in which tensor parallelism with sequence parallelism gathers the inputs of linear layers and
    their gradients (Transformer Engine gathers what it has quantised); results are scattered in BF16."""
    gradient_reduce: Literal["fp32", "bf16"] = "fp32"
    """Format of the data-parallel reduce-scatter."""
    parameter_gather: Literal["fp32", "bf16", "fp8"] = "bf16"
    """Format of the parameters that are gathered after the optimizer (ZeRO)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.head == "fp8" and self.linear != "fp8":
            raise ValueError(
                f"head=fp8 needs linear=fp8, got linear={self.linear}: the head is cast as they are; "
                "set head=bf16, or linear=fp8"
            )
        if self.attention == "fp8" and (self.linear != "fp8" or self.scaling == "tile"):
            raise ValueError(
                f"attention=fp8 needs linear=fp8 with scaling=mx or tensor, got linear={self.linear} and "
                f"scaling={self.scaling}: kernels of attention have no other scales; set attention=bf16"
            )
        if self.linear == "fp4" and self.scaling != "tile":
            raise ValueError(f"scaling={self.scaling} scales FP8; leave it out, NVFP4 has scales of its own")
        if self.scaling == "mx" and self.linear != "fp8":
            raise ValueError(f"scaling=mx scales FP8, but linear is {self.linear}; write linear: fp8")
        return self

    @property
    def logits(self) -> Literal["bf16", "fp32"]:
        """Format of the logits in memory."""
        return "bf16" if self.head == "fp8" else self.head

    @property
    def blocks(self) -> Blocks:
        """The format of blocks that linear layers use; empty for tiles, one scale a tensor, and BF16."""
        if self.linear == "fp4":
            return "nvfp4"
        return "mx" if self.linear == "fp8" and self.scaling == "mx" else ""

    @property
    def attention_variant(self) -> str:
        """First part of the variant of the core attention's kernels; empty for BF16."""
        return {"": "", "mx": "mxfp8", "tensor": "fp8"}[self.scaling if self.attention == "fp8" else ""]

    def kept_operand_bytes(self, elements: float) -> float:
        """Bytes of queries, keys and values kept for the backward of the core attention.

        In MXFP8 they are kept along rows and columns, with one scale a tensor once.
        """
        if self.attention == "bf16":
            return elements * BYTES_PER_ELEMENT["bf16"]
        return elements * (2.0 * BLOCK_BYTES["mx"] if self.scaling == "mx" else BYTES_PER_ELEMENT["fp8"])

    @property
    def gradient_bytes(self) -> float:
        """Bytes of a parameter's gradients in memory."""
        return BYTES_PER_ELEMENT[self.gradients] + (
            BYTES_PER_ELEMENT["bf16"] if self.gradients_twice else 0.0
        )


PRECISIONS: dict[str, Precision] = {
    # DeepSeek-V3 report 3.3: FP8 GEMMs, BF16 moments, FP32 masters and gradients, FP8 dispatch and cache.
    "fp8": Precision(linear="fp8", moments="bf16", dispatch="fp8", activation_cache="fp8"),
    "bf16": Precision(linear="bf16"),
}


@lru_cache(maxsize=64)
def in_fp32_loss(recipe: Precision) -> Precision:
    """The recipe with logits that are copied to FP32 before the loss."""
    return recipe if recipe.loss == "fp32" else recipe.model_copy(update={"loss": "fp32"})


def row_bytes(elements: float, fmt: str) -> float:
    """Bytes of one row in a format, including FP8 scales (one in FP32 per 128 elements)."""
    scales = 4.0 * elements / FP8_TILE if fmt == "fp8" else 0.0
    return elements * BYTES_PER_ELEMENT[fmt] + scales
