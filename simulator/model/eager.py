"""What a framework without fused kernels moves on top: bytes of PyTorch's eager operators (pure).

Counted in torchtitan 0.2.2 and torch 2.11 (`models/llama3`, `models/moe`, FSDP2): one read and one write of
every tensor for each operator in the Python code. An element is BF16 unless said otherwise. The variants
`eager_*` are what a profile may have measured (`h200-eager`); elsewhere the bytes decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.primitives import BF16, FP32, move

SWIGLU_FORWARD, SWIGLU_BACKWARD = 5 / 3, 9 / 5
"""silu(gate) * up as two kernels: 5 tensors moved for 3; backward two multiplications and silu's, 9 for 5."""
ROPE = 20 / 4
"""To FP32, complex product, back to BF16: 20 bytes an element for 4."""
ROW_BYTES = {
    # tokens gathered, a row appended for the padding, gathered into groups
    "experts.expand": 12.0,
    # scattered back from groups, scattered to tokens (both into a buffer), to FP32, weighted sum
    "experts.reduce": 20.0,
    # gradient of the weighted sum in FP32, to BF16, gathered twice
    "experts.expand_gradient": 18.0,
    # two sums over indices, each into a zeroed buffer
    "experts.reduce_gradient": 16.0,
}
"""Bytes moved for an element of a routed row, half of them read."""

GATE_FORWARD_CALLS, GATE_BACKWARD_CALLS = 16, 5
"""Operators from the router's logits to sorted rows: to FP32, scores, bias, top-k, gather, scale, two
histograms, sort, its scores, token numbers, counts to the host; and of their backward."""

LOSS_CHAIN, LOSS_KERNELS = 8 / 2, 5
"""Maximum, subtraction, exponential, sum, division: 5 reads and 3 writes of the logits, for 2 reads of
a fused loss (NVIDIA/Megatron-LM@core_v0.10.0, bigscience-workshop/Megatron-DeepSpeed, `cross_entropy.py`)."""
LOSS_COMPILED, COMPILED_KERNELS = 4 / 2, 2
"""The same loss compiled (`fused_cross_entropy.py` of NVIDIA/Megatron-LM@ee6737da8): the maximum is found
while the logits are widened; subtraction, exponential and sum are one kernel, the division another."""


def eager_operators(
    operators: Mapping[Phase, tuple[Operator, ...]],
) -> dict[Phase, tuple[Operator, ...]]:
    """The same operators with the bytes of eager kernels."""
    return {phase: tuple(eager for op in ops for eager in _eager(op)) for phase, ops in operators.items()}


def _eager(op: Operator) -> tuple[Operator, ...]:
    base = op.name.removesuffix(".recompute")
    if base == "experts.weight_gradient":
        return ()  # inside the weighted sum's
    if base in ROW_BYTES:
        # A fused expand writes, and a fused reduce reads, every routed row once, in BF16.
        whole = op.bytes_written if "expand" in base else op.bytes_read
        half = whole / BF16 * ROW_BYTES[base] / 2
        variant = base.removeprefix("experts.")
        return (replace(op, bytes_read=half, bytes_written=half, variant=f"eager_{variant}"),)
    factor, variant, launches = 1.0, f"eager_{op.variant}", op.launches
    if op.cls == "swiglu":
        forward = base.endswith("swiglu")
        factor = SWIGLU_FORWARD if forward else SWIGLU_BACKWARD
        if op.variant == "weighted_backward":  # writes the output again, which eager code has kept
            factor *= 5 / 6
        variant = "eager_forward" if forward else "eager_backward"
    elif op.cls == "rope":
        factor, variant = ROPE, "eager"
    elif op.cls == "topk":
        launches = GATE_FORWARD_CALLS if op.variant == "forward" else GATE_BACKWARD_CALLS
    elif op.cls != "norm":
        return (op,)
    size = {"bytes_read": op.bytes_read * factor, "bytes_written": op.bytes_written * factor}
    return (replace(op, **size, variant=variant, launches=launches),)  # type: ignore[arg-type]


def written_gradients(operators: Mapping[Phase, tuple[Operator, ...]]) -> dict[Phase, tuple[Operator, ...]]:
    """Weight gradients written in BF16 instead of added into an FP32 buffer (PyTorch autograd, FSDP)."""
    return {phase: tuple(map(_written, ops)) for phase, ops in operators.items()}


def _written(op: Operator) -> Operator:
    if not op.accumulated_bytes:
        return op
    half = op.accumulated_bytes / 2
    written = op.bytes_written - half + half * BF16 / FP32
    return replace(op, accumulated_bytes=0.0, bytes_read=op.bytes_read - half, bytes_written=written)


def flat_gradients(
    operators: Mapping[Phase, tuple[Operator, ...]], parameters: float, reduce_bytes: float
) -> dict[Phase, tuple[Operator, ...]]:
    """FSDP1's copies of gradients, for `parameters` of a block that are sharded.

    Autograd joins those of a flat parameter's views (the backward of `split`), and a cast follows where they
    travel in FP32 (torch 2.1, `torch/distributed/fsdp/_flat_param.py` and `_runtime_utils.py`).
    """
    result = dict(operators)
    if parameters and "mlp W" in result:
        copies = [move("fsdp.join", "copy", "W", parameters * BF16, parameters * BF16, variant="flat")]
        if reduce_bytes > BF16:
            wide = parameters * reduce_bytes
            copies.append(move("fsdp.cast", "copy", "W", parameters * BF16, wide, variant="flat"))
        result["mlp W"] = (*result["mlp W"], *copies)
    return result


ADDED_BYTES = {"added": 6.0, "added-fp32": 26.0}
"""A parameter and micro-batch: two 16-bit gradients read, one written; or (microsoft/DeepSpeed@56c522386,
`bf16_optimizer.py`) BF16 ones set to zero, added to, copied to FP32, and those added to an FP32 buffer."""


def added_gradients(
    operators: Mapping[Phase, tuple[Operator, ...]], parameters: float, how: str
) -> dict[Phase, tuple[Operator, ...]]:
    """Weight gradients written by the GEMMs, then added by kernels for `parameters` of a block."""
    result = written_gradients(operators)
    if how in ADDED_BYTES and parameters and "mlp W" in result:
        half = parameters * ADDED_BYTES[how] / 2
        result["mlp W"] = (*result["mlp W"], move("gradients.add", "copy", "W", half, half, variant="flat"))
    return result


def chained_loss(
    operators: Mapping[Phase, tuple[Operator, ...]], compiled: bool = False
) -> dict[Phase, tuple[Operator, ...]]:
    """Megatron-LM's vocabulary-parallel loss: passes over logits in several kernels, not a fused one."""
    passes, kernels = (LOSS_COMPILED, COMPILED_KERNELS) if compiled else (LOSS_CHAIN, LOSS_KERNELS)

    def chained(op: Operator) -> Operator:
        if op.cls != "loss" or op.direction != "F":
            return op
        return replace(op, bytes_read=op.bytes_read * passes, launches=kernels)

    return {phase: tuple(map(chained, ops)) for phase, ops in operators.items()}


def narrow_accumulators(
    operators: Mapping[Phase, tuple[Operator, ...]],
) -> dict[Phase, tuple[Operator, ...]]:
    """Weight gradients added into a BF16 buffer, half as many bytes as into an FP32 one."""
    return {phase: tuple(map(_narrow, ops)) for phase, ops in operators.items()}


def _narrow(op: Operator) -> Operator:
    saved = op.accumulated_bytes / 2 * (1.0 - BF16 / FP32)
    return replace(
        op,
        accumulated_bytes=op.accumulated_bytes - 2 * saved,
        bytes_read=op.bytes_read - saved,
        bytes_written=op.bytes_written - saved,
    )


def copied_parameters(
    operators: Mapping[Phase, tuple[Operator, ...]], parameters: float, zero_stage: int
) -> dict[Phase, tuple[Operator, ...]]:
    """FSDP2's copies around its collectives, for `parameters` of a block on one GPU before sharding.

    ZeRO-3: gathered parameters are copied out of the buffer in both passes, gradients copied into an FP32
    one. With parameters kept (stage 2) gradients are added to FP32 ones after every micro-batch.
    """
    if not parameters:
        return dict(operators)
    out = move("fsdp.copy_out", "copy", "F", parameters * BF16, parameters * BF16, variant="flat")
    into = move("fsdp.copy_in", "copy", "W", parameters * BF16, parameters * FP32, variant="flat")
    added = move(
        "fsdp.accumulate", "copy", "W", parameters * (BF16 + FP32), parameters * FP32, variant="flat"
    )
    result = dict(operators)
    extra: dict[Phase, Operator] = (
        {"mlp F": out, "mlp I": replace(out, direction="I"), "mlp W": into}
        if zero_stage == 3
        else {"mlp W": added}
    )
    for phase, op in extra.items():
        if phase in result:
            result[phase] = (*result[phase], op)
    return result
