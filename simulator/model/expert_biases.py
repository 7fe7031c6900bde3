"""Adds the copies of frameworks that add the biases of routed experts outside the grouped GEMMs (pure).

Bytes per element were counted in the code: rows are split by expert, each part gets its bias, times the
weights of its tokens, and the parts are joined again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.primitives import move


@dataclass(frozen=True, slots=True)
class SplitBias:
    """Bytes per element of a projection's output and kernels per expert, forward and backward."""

    forward_bytes: float
    backward_bytes: float
    forward_kernels: int
    backward_kernels: int


SPLIT_BIASES: dict[str, dict[str, SplitBias]] = {
    # Megatron core adds the second projection's bias, all in BF16: forward writes bias times weight (2), adds
    # it (4 + 2) and joins (2 + 2); backward joins the parts' gradients (2 + 2), multiplies them by weights
    # and by biases and sums both products (2 x 6). NVIDIA/Megatron-LM@core_v0.15.0
    # megatron/core/transformer/moe/experts.py:823 `_apply_bias`.
    "split": {"down": SplitBias(12.0, 16.0, 2, 4)},
    # Automodel adds both, the second with FP32 weights: product (4), sum (6 + 4), join (4 + 4) and cast
    # (4 + 2) forward; backward casts to FP32 (2 + 4) and back (4 + 2), joins (2 + 2), one product and its sum
    # (12): the weights of its gate for benchmarks are constants without a gradient (`FakeBalancedGate`).
    # NVIDIA-NeMo/Automodel@2c236e081 nemo_automodel/components/moe/layers.py:356 `_apply_bias`.
    "split-fp32": {
        "gate_up": SplitBias(8.0, 6.0, 1, 1),
        "down": SplitBias(28.0, 28.0, 2, 3),
    },
    # torchtitan repeats both biases by row (2), joins them to rows of padding (2 + 2) and adds them (4 + 2);
    # the gradient of a bias is a sum over rows, which every framework has. torchtitan 0.2.2
    # torchtitan/models/gpt_oss/model/moe.py, `_run_experts_grouped_mm`.
    "repeated": {"gate_up": SplitBias(12.0, 0.0, 8, 0), "down": SplitBias(12.0, 0.0, 8, 0)},
}
"""Projections whose bias is added outside the GEMM, by `software.expert_biases`."""


CLAMPED_FORWARD, CLAMPED_BACKWARD = (22.0, 14.0), (58.0, 42.0)
"""Bytes read and written per element of the experts' intermediate rows by torchtitan's clamped SwiGLU (same
file, `swiglu`). Forward: two clamps of every second column (4 + 2 each), two scalings, a sigmoid (2 + 2
each) and two products (4 + 2 each). Backward: four products (16 + 8), gradients of sigmoid (4 + 2) and
scaling (2 + 2), comparisons and choices of both clamps (20 + 8), a sum (4 + 2), both slices into zeroed
buffers (4 + 16) and their sum (8 + 4)."""
CLAMPED_FORWARD_KERNELS, CLAMPED_BACKWARD_KERNELS = 7, 18
EAGER_FORWARD_BYTES, EAGER_BACKWARD_BYTES = 10.0, 18.0
"""Bytes per such element of eager SwiGLU (`simulator/model/eager.py`)."""


def clamped_activations(
    operators: Mapping[Phase, tuple[Operator, ...]],
) -> dict[Phase, tuple[Operator, ...]]:
    """Replace eager SwiGLU of routed experts by torchtitan's clamped one, a kernel for every operator."""
    return {phase: tuple(map(_clamped, ops)) for phase, ops in operators.items()}


def _clamped(op: Operator) -> Operator:
    base = op.name.removesuffix(".recompute")
    if base not in ("experts.swiglu", "experts.swiglu.backward"):
        return op
    backward = base.endswith("backward")
    elements = (op.bytes_read + op.bytes_written) / (
        EAGER_BACKWARD_BYTES if backward else EAGER_FORWARD_BYTES
    )
    read, written = CLAMPED_BACKWARD if backward else CLAMPED_FORWARD
    kernels = CLAMPED_BACKWARD_KERNELS if backward else CLAMPED_FORWARD_KERNELS
    return replace(
        op,
        bytes_read=elements * read,
        bytes_written=elements * written,
        launches=kernels,
        variant="clamped_backward" if backward else "clamped_forward",
    )


def split_biases(
    operators: Mapping[Phase, tuple[Operator, ...]], how: str
) -> dict[Phase, tuple[Operator, ...]]:
    """Add the biases of experts by `how`, a key of `SPLIT_BIASES`, to blocks that have such biases."""
    if not any(op.name == "experts.down.bias" for op in operators.get("mlp F", ())):
        return dict(operators)
    return {phase: tuple(one for op in ops for one in _split(op, how)) for phase, ops in operators.items()}


def _split(op: Operator, how: str) -> tuple[Operator, ...]:
    base = op.name.removesuffix(".recompute")
    if base == "experts.down.bias":
        return ()
    if base == "experts.bias.wgrad" and how == "repeated":
        return (replace(op, variant="index_add"),)
    for projection, bias in SPLIT_BIASES[how].items():
        if base == f"experts.{projection}":
            return op, _added(op, projection, bias.forward_bytes, bias.forward_kernels, how != "repeated")
        if not bias.backward_kernels:
            continue
        if base == f"experts.{projection}.dgrad":
            return _added(op, projection, bias.backward_bytes, bias.backward_kernels), op
    return (op,)


def _added(gemm: Operator, projection: str, size: float, kernels: int, by_expert: bool = True) -> Operator:
    """The kernels around a grouped GEMM; rows and columns are those of the projection's output."""
    assert gemm.gemm is not None
    shape = gemm.gemm
    columns = shape.n if gemm.direction == "F" or gemm.recompute else shape.k
    half = shape.m * columns * size / 2
    name = f"experts.{projection}.bias" + (".recompute" if gemm.recompute else "")
    if gemm.direction == "I" and not gemm.recompute:
        name = f"experts.{projection}.bias.backward"
    op = move(
        name, "elementwise", gemm.direction, half, half,
        variant="add", launches=kernels * (shape.groups if by_expert else 1), per_received_row=True,
    )  # fmt: skip
    return replace(op, recompute=gemm.recompute)
