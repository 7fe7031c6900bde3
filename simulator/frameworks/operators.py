"""Adapts the operators of a block to the kernels and copies of the training framework (pure).

One section a kind of work; what eager code and FSDP move stands in `eager.py`, what frameworks run around
norms and at the end of a step in `kernel_lists.py`.
"""

from __future__ import annotations

from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from moesim.simulator.frameworks.eager import (
    HALVES,
    HAS_SINKS,
    ONE_COPY_ROW_BYTES,
    ROW_BYTES,
    SCALED,
    Operators,
    accumulated_by_autograd,
    added_gradients,
    copied_parameters,
    copies_of_single_groups,
    each,
    eager,
    eager_rows,
    flat_gradients,
    in_halves,
    joined_by_cat,
    narrow,
    one_grouped_kernel,
    passes_of_loss,
    rotates_halves,
    with_sum,
)
from moesim.simulator.frameworks.software import Software
from moesim.simulator.model.feed_forward.moe import GATE_BACKWARD_PASSES, GATE_FORWARD_PASSES
from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.primitives import BF16, move


def apply_framework(
    operators: Operators,
    software: Software,
    recipe: Precision,
    zero_stage: int,
    parameters: float,
    sharded: float,
    *,
    whole_gradients: bool = False,
    microbatches: int = 1,
    own_kernels: bool = False,
    choices: float = 0.0,
) -> dict[Phase, tuple[Operator, ...]]:
    """Return the operators of a block with what `software` adds (docs/model.md, section 15).

    `parameters` counts the block's parameters on one GPU, `sharded` those of them that are split over
    replicas; the groups of the others have one member. `whole_gradients`: gradients of the `microbatches` of
    a step are added up before they are reduced. `own_kernels`: a dispatcher with kernels of its own sends a
    token once to a rank, adds up what comes back and takes FP32 routing weights (Megatron core
    token_dispatcher.py). `choices`: experts of a token.
    """
    adapted = _without_unsaved(operators) if software.recompute_stops_early else dict(operators)
    if software.weight_gradients != "accumulated":
        adapted = added_gradients(adapted, parameters, software.weight_gradients)
        if software.weight_gradients == "written" and not zero_stage:
            adapted = accumulated_by_autograd(adapted, parameters, microbatches)
    elif recipe.gradients == "bf16":
        adapted = each(adapted, narrow)
    if software.expert_kernels == "fused":
        adapted = each(adapted, fused_experts)
    if software.pad_expert_rows and recipe.linear != "bf16":
        adapted = each(adapted, padded_rows)
    if software.router != "chain":
        adapted = each(adapted, partial(routed_by, router=software.router))
    if software.expert_biases != "fused":
        adapted = biased_experts(adapted, software.expert_biases, own_kernels)
    if software.scaled_rotary == "halves" and rotates_halves(adapted, HAS_SINKS):
        adapted = each(adapted, partial(in_halves, halves=SCALED))
    if software.flat_parameters and zero_stage == 3:
        adapted = flat_gradients(
            adapted, sharded, BYTES_PER_ELEMENT[recipe.gradient_reduce], divided=software.gradients_divided
        )
    if software.loss != "fused":
        adapted = each(adapted, partial(passes_of_loss, how=software.loss))
    if software.kernels == "eager" or software.compiled_blocks:
        adapted = each(adapted, one_grouped_kernel)
    adapted = _in_eager_kernels(adapted, software, own_kernels, choices)
    if software.parameters_copied and zero_stage > 1:
        adapted = copied_parameters(adapted, sharded, zero_stage, whole_gradients=whole_gradients)
        if software.single_groups_copied and zero_stage == 3:
            adapted = copies_of_single_groups(adapted, parameters - sharded, recipe)
    return adapted


def _in_eager_kernels(
    adapted: dict[Phase, tuple[Operator, ...]], software: Software, own_kernels: bool, choices: float
) -> dict[Phase, tuple[Operator, ...]]:
    """Eager kernels in the place of fused ones: for all of a block, the rows of its experts, or nothing."""
    rows = ONE_COPY_ROW_BYTES if own_kernels else ROW_BYTES
    padded = _local_experts(adapted) if software.padded_experts and not own_kernels else 0
    if software.kernels == "fused" and software.expert_rows == "eager":
        return each(adapted, partial(eager_rows, bytes_of_rows=rows, experts=padded, choices=choices))
    if software.kernels != "eager":
        return adapted
    if rotates_halves(adapted, {"qk_norm", *HAS_SINKS}):
        adapted = each(adapted, partial(in_halves, halves=HALVES))
    adapted = {phase: joined_by_cat(ops) for phase, ops in adapted.items()}
    adapted = each(adapted, partial(eager, bytes_of_rows=rows, experts=padded, choices=choices))
    if software.gradient_sums:
        joined = software.expert_biases == "repeated"
        adapted = each(adapted, partial(with_sum, joined_experts=joined))
    if software.expert_biases == "repeated":
        adapted = each(adapted, partial(clamped_activation, clamped=CLAMPED["repeated"]))
    return adapted


UNSAVED = "ffn.down.recompute"
"""The last GEMM of a recomputed layer, whose result no backward needs."""


def _without_unsaved(operators: Operators) -> dict[Phase, tuple[Operator, ...]]:
    return {phase: tuple(op for op in ops if op.name != UNSAVED) for phase, ops in operators.items()}


def _local_experts(operators: Operators) -> int:
    """Experts of a rank, the groups of its grouped GEMMs; 0 in a block without them."""
    found = (op.gemm.groups for op in operators.get("mlp F", ()) if op.name == "experts.gate_up" and op.gemm)
    return next(found, 0)


# -- the router ----------------------------------------------------------------------------------------

FUSED_KERNELS = 3
"""Kernels of a fused router, forward and backward: choice, scores of the balance loss, and the loss
(NVIDIA/TransformerEngine `pytorch/router.py`: `fused_topk_with_score_function`,
`fused_compute_score_for_moe_aux_loss`, `fused_moe_aux_loss`)."""
FUSED_PASSES = 7
"""Reads and writes of a [tokens, experts] FP32 tensor by these kernels: logits, weights and saved scores of
the first, logits, scores and saved scores of the second, scores of the third; maps of choices are small."""
_CHAIN = {"gate.select": GATE_FORWARD_PASSES, "gate.select.backward": GATE_BACKWARD_PASSES}
_ROUTER = frozenset({"gate", "gate.dgrad", "gate.wgrad", *_CHAIN})


def routed_by(op: Operator, router: str) -> tuple[Operator, ...]:
    """What `router`, `fused` or `constant`, runs in the place of a kernel of the router."""
    base = op.name.removesuffix(".recompute")
    if router == "constant":
        return () if base in _ROUTER else (op,)
    if base not in _CHAIN:
        return (op,)
    share = FUSED_PASSES / _CHAIN[base]
    size = {"bytes_read": op.bytes_read * share, "bytes_written": op.bytes_written * share}
    return (replace(op, **size, launches=FUSED_KERNELS),)


# -- rows of experts padded for FP8 --------------------------------------------------------------------

_BEFORE = {"experts.gate_up": "experts.pad", "experts.down.dgrad": "experts.pad_gradient"}
_AFTER = {"experts.down": "experts.unpad", "experts.gate_up.dgrad": "experts.unpad_gradient"}


def padded_rows(op: Operator) -> tuple[Operator, ...]:
    """Pad the rows of every expert to a multiple of 16 or 32 for FP8 GEMMs, and take the padding out again.

    Megatron core pads before the first projection and unpads behind the second; the backward does the reverse
    (NVIDIA/Megatron-LM@core_v0.15.0 megatron/core/transformer/moe/experts.py:862 and 958,
    NVIDIA/TransformerEngine@001b2b1e8 transformer_engine/pytorch/module/fp8_padding.py). Each copy reads and
    writes all rows in BF16; the rows that are added are left out.
    """
    base = op.name.removesuffix(".recompute")
    name = _BEFORE.get(base) or _AFTER.get(base)
    if name is None or op.gemm is None:
        return (op,)
    columns = op.gemm.k if base in _BEFORE else op.gemm.n
    size = op.gemm.m * columns * BF16
    suffix = op.name.removeprefix(base)
    copy = move(name + suffix, "copy", op.direction, size, size, variant="flat", per_received_row=True)
    return (copy, op) if base in _BEFORE else (op, copy)


# -- kernels inside the grouped GEMMs of experts -------------------------------------------------------

EPILOGUES = frozenset(
    {
        "experts.scale_weights",
        "experts.swiglu",
        "experts.down.cast",
        "experts.down.scales",
        "experts.cache",
        "experts.restore",
        "experts.swiglu.backward",
        "experts.weight_gradient",
        "experts.scale_weights.backward",
        "experts.down.input_cast_channel",
        "experts.gate_up.cast_gradient",
        "experts.gate_up.scales",
        "experts.gate_up.gradient_cast_channel",
    }
)
"""Operators that run in the epilogue of a grouped GEMM, or whose output it has written already."""


def fused_experts(op: Operator) -> tuple[Operator, ...]:
    """No kernels between the grouped GEMMs of experts; recomputed ones stay.

    Transformer Engine's fused grouped MLP writes activations and their gradients from the epilogue of the
    GEMM before them: the activation times the routing weight, quantised by rows and by columns, behind the
    first projection, and its backward, with the gradient of the weight, behind the input gradient of the
    second (NVIDIA/TransformerEngine@d0067d0da transformer_engine/pytorch/ops/fused/grouped_mlp.py). The
    epilogue's bytes move while tensor cores compute and add no time; pre-activations stay in BF16.
    """
    return (op,) if op.recompute or op.name not in EPILOGUES else ()


# -- biases of experts outside of their GEMMs ----------------------------------------------------------


class SplitBias(Struct, frozen=True):
    """Bytes per element of a projection's output and kernels per expert, forward and backward."""

    forward_bytes: float
    backward_bytes: float
    forward_kernels: int
    backward_kernels: int
    variant: str = "add"


SPLIT_BIASES: dict[str, dict[str, SplitBias]] = {
    # Megatron core adds the second projection's bias, all in BF16: forward writes bias times weight (2), adds
    # it (4 + 2) and joins (2 + 2); backward joins the parts' gradients (2 + 2), multiplies them by weights
    # and by biases and sums both products (2 x 6). NVIDIA/Megatron-LM@core_v0.15.0
    # megatron/core/transformer/moe/experts.py:823 `_apply_bias`.
    "split": {"down": SplitBias(12.0, 16.0, 2, 5, "split")},
    # With FP32 weights forward writes and adds FP32 (4, 2 + 4 + 4), joins (4 + 4) and casts (4 + 2); backward
    # casts (2 + 4), casts the rows' gradient (4 + 2) and joins it (2 + 2), and multiplies and sums twice
    # (4 + 4 + 4 each).
    "split-wide": {"down": SplitBias(28.0, 40.0, 2, 7, "split_wide")},
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


class Clamped(Struct, frozen=True):
    """A clamped SwiGLU in single operators: bytes read and written per element of the experts' intermediate
    rows, kernels, variants of the measured rates, and bytes that the operator in its place moves, forward and
    backward; with `weights`, its backward also sums the gradients of routing weights."""

    forward: tuple[float, float]
    backward: tuple[float, float]
    kernels: tuple[int, int]
    variants: tuple[str, str]
    instead_of: tuple[float, float]
    weights: bool = False


CLAMPED: dict[str, Clamped] = {
    # torchtitan 0.2.2 `models/gpt_oss/model/moe.py`, `swiglu`. Forward: two clamps of every second column
    # (4 + 2 each), two scalings, a sigmoid (2 + 2 each), two products (4 + 2 each). Backward: four products
    # (16 + 8), gradients of sigmoid (4 + 2) and scaling (2 + 2), comparisons and choices of both clamps
    # (20 + 8), a sum (4 + 2), both slices into zeroed buffers (4 + 16) and their sum (8 + 4). It stands in
    # the place of eager SwiGLU (`eager.py`).
    "repeated": Clamped(
        (22.0, 14.0), (58.0, 42.0), (7, 18), ("clamped_forward", "clamped_backward"), (10.0, 18.0)
    ),
    # NVIDIA/Megatron-LM@d7288711b megatron/core/fusions/fused_bias_geglu.py `weighted_bias_quick_geglu_impl`
    # (the same in 0d8e0714c and 458c8d0ec): two clamps and a join (4 + 4 each), and the compiled activation
    # (4 + 2). Backward: the compiled kernels (6 + 4 and 6), comparisons and choices of both clamps (14 + 8),
    # and the join of both gradients (4 + 4). Both fused kernels in its place move 6 and 12.
    "split": Clamped(
        (12.0, 10.0), (30.0, 16.0), (4, 11), ("clamps_forward", "clamps_backward"), (6.0, 12.0), weights=True
    ),
}  # fmt: skip
"""The activation of models with biases of experts (gpt_oss alone), by `software.expert_biases`."""


def clamped_activation(op: Operator, clamped: Clamped) -> tuple[Operator, ...]:
    """Return what runs in the place of the activation of routed experts."""
    base = op.name.removesuffix(".recompute")
    if base == "experts.weight_gradient" and clamped.weights:
        return ()
    if base not in ("experts.swiglu", "experts.swiglu.backward"):
        return (op,)
    back = base.endswith("backward")
    read, written = clamped.backward if back else clamped.forward
    elements = (op.bytes_read + op.bytes_written) / clamped.instead_of[back]
    size = {"bytes_read": elements * read, "bytes_written": elements * written}
    kernels, variant = clamped.kernels[back], clamped.variants[back]
    return (replace(op, **size, launches=kernels, variant=variant),)


def biased_experts(operators: Operators, how: str, own_kernels: bool) -> dict[Phase, tuple[Operator, ...]]:
    """What a framework runs around experts with biases; blocks without such experts stay as they are."""
    widths = {op.name: op.gemm.n for op in operators.get("mlp F", ()) if op.gemm}
    if not any(op.name == "experts.down.bias" for op in operators.get("mlp F", ())):
        return dict(operators)
    if how == "split":
        operators = each(operators, partial(clamped_activation, clamped=CLAMPED[how]))
        how = "split-wide" if own_kernels else how
    first = widths["experts.gate_up"] / (widths["experts.gate_up"] + widths["experts.down"])
    return each(operators, partial(split_biases, how=how, first=first))


def split_biases(op: Operator, how: str, first: float = 1.0) -> tuple[Operator, ...]:
    """Add the biases of experts by `how`, a key of `SPLIT_BIASES`, in a block that has such biases.

    Bytes per element were counted in the code: rows are split by expert, each part gets its bias, times the
    weights of its tokens, and the parts are joined again. `first`: share of the first projection in the sums
    that are the biases' gradients; Megatron core's bytes hold the second's.
    """
    base = op.name.removesuffix(".recompute")
    if base == "experts.down.bias":
        return ()
    if base == "experts.bias.wgrad" and how == "repeated":
        return (replace(op, variant="index_add"),)
    if base == "experts.bias.wgrad" and how.removesuffix("-wide") == "split":
        return (replace(op, bytes_read=op.bytes_read * first),)
    for projection, bias in SPLIT_BIASES[how].items():
        if base == f"experts.{projection}":
            by_expert = how != "repeated"
            return op, _added(
                op, projection, bias.forward_bytes, bias.forward_kernels, bias.variant, by_expert
            )
        if not bias.backward_kernels:
            continue
        if base == f"experts.{projection}.dgrad":
            variant = bias.variant + ("_backward" if bias.variant != "add" else "")
            return _added(op, projection, bias.backward_bytes, bias.backward_kernels, variant), op
    return (op,)


def _added(
    gemm: Operator, projection: str, size: float, kernels: int, variant: str, by_expert: bool = True
) -> Operator:
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
        variant=variant, launches=kernels * (shape.groups if by_expert else 1), per_received_row=True,
    )  # fmt: skip
    return replace(op, recompute=gemm.recompute)


# -- experts with buffers of a fixed size --------------------------------------------------------------

TENSORS = 6
"""Tensors that are copied, each by a kernel: inputs of both projections with their scales, the output of the
first, and the routing weights (`GroupedTensor` saves of Transformer Engine's grouped MLP)."""


def with_stash(operators: Operators, stashed_bytes: float) -> dict[Phase, tuple[Operator, ...]]:
    """Return the operators of a block with its copies of `stashed_bytes`, behind F and before I.

    Megatron core copies what the experts keep to pages when their forward ends, and back before their
    backward, each with one kernel that reads the number of rows on the device (NVIDIA/Megatron-LM@d98e8a64
    megatron/core/transformer/moe/ops/paged_stash.py). The kernels run on a stream of their own; they are
    priced as if no compute hid them.
    """
    out = dict(operators)
    if stashed_bytes > 0.0 and "mlp F" in out:
        there = move(
            "experts.stash", "copy", "F", stashed_bytes, stashed_bytes,
            variant="flat", launches=TENSORS, per_received_row=True,
        )  # fmt: skip
        out["mlp F"] = (*out["mlp F"], there)
        out["mlp I"] = (replace(there, name="experts.unstash", direction="I"), *out["mlp I"])
    return out
