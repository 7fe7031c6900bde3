"""Adds the bytes that a framework moves without fused kernels, as PyTorch's eager operators do (pure).

Bytes were counted in torchtitan 0.2.2 and torch 2.11 (`models/llama3`, `models/moe`, FSDP2): each operator in
the Python code reads and writes every one of its tensors once. Elements are BF16 unless noted. A profile may
have measured the variants `eager_*` (`h100-eager` and `h200-eager` have); otherwise their time follows from
the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.primitives import BF16, FP32, move

Operators: TypeAlias = Mapping[Phase, tuple[Operator, ...]]


def each(
    operators: Operators, change: Callable[[Operator], Iterable[Operator]]
) -> dict[Phase, tuple[Operator, ...]]:
    """The operators of a block with what `change` makes of each."""
    return {phase: tuple(new for op in ops for new in change(op)) for phase, ops in operators.items()}


def behind(
    operators: Operators, extra: Mapping[Phase, Iterable[Operator]]
) -> dict[Phase, tuple[Operator, ...]]:
    """The operators of a block with further ones at the end of those of its phases that `extra` names."""
    return {phase: (*ops, *extra.get(phase, ())) for phase, ops in operators.items()}


SWIGLU_FORWARD, SWIGLU_BACKWARD = 5 / 3, 9 / 5
"""Bytes of eager SwiGLU over those of a fused kernel. Forward, silu(gate) * up takes two kernels that move 5
tensors instead of 3; backward, two multiplications and the gradient of silu move 9 instead of 5."""
ROPE = 20 / 4
"""Bytes of eager RoPE over those of a fused kernel: 20 bytes an element instead of 4, for a cast to FP32, a
complex multiplication and a cast back to BF16."""
ROW_BYTES = {
    # gathers tokens, appends a row of padding, gathers into groups
    "experts.expand": 12.0,
    # scatters back from groups and to tokens (each into a buffer), casts to FP32, sums with weights
    "experts.reduce": 20.0,
    # takes the gradient of the weighted sum in FP32, casts it to BF16, gathers it twice
    "experts.expand_gradient": 18.0,
    # sums over indices twice, each time into a zeroed buffer
    "experts.reduce_gradient": 16.0,
}
"""Bytes that eager operators move per element of a routed row; half of them are read."""

ONE_COPY_ROW_BYTES = {
    "experts.expand": 4.0,  # gathers received tokens into groups
    # multiplies rows by their scores, sums them by index into a zeroed buffer
    "experts.reduce": 12.0,
    # gathers twice: gradients of the rows, and with the kept rows those of the scores
    "experts.expand_gradient": 12.0,
    "experts.reduce_gradient": 8.0,  # sums over indices into a zeroed buffer
}
"""The same where a library, such as DeepEP, sends one copy of a token to a rank and adds up what comes back
(`distributed/deepep/deepep.py`, `_permute_tokens` and `_unpermute_tokens`); zeroed buffers hold as many rows
as are routed at most."""

PADDING, PADDING_ROWS, INDEX_BYTES = "eager_padding", 8, 8.0
"""Gradients of padding. Every expert of a rank adds eight rows of padding (torchtitan 0.2.2
`models/moe/utils.py`, TOKEN_GROUP_ALIGN_SIZE_M), which have one index, so that `index_put_` adds their
gradients one after the other; bytes are those of the indices."""

GATE_FORWARD_CALLS, GATE_BACKWARD_CALLS = 16, 5
"""Eager operators from the router's logits to sorted rows (cast to FP32, scores, bias, top-k, gather, scale,
two histograms, sort, its scores, token numbers, copy of the counts to the host), and of their backward."""

LOSS_CHAIN, LOSS_KERNELS = 8 / 2, 5
"""Bytes of Megatron-LM's loss over those of a fused one, and its kernels. Maximum, subtraction, exponential,
sum and division read the logits 5 times and write them 3 times, where a fused loss reads them twice
(NVIDIA/Megatron-LM@core_v0.10.0, bigscience-workshop/Megatron-DeepSpeed, `cross_entropy.py`)."""
LOSS_COMPILED, COMPILED_KERNELS = 4 / 2, 2
"""As above for the compiled loss (`fused_cross_entropy.py` of NVIDIA/Megatron-LM@ee6737da8). It finds the
maximum while it casts the logits to FP32; subtraction, exponential and sum are one kernel, the division is
another."""


NOT_RUN = frozenset({"experts.weight_gradient", "residual_scale", "residual_scale.backward"})
"""Kernels of DeepSeek's profile that torchtitan's code lacks. The weighted sum's backward has the gradients
of routing weights; residual branches are added without a factor."""


class Halves(Struct, frozen=True):
    """RoPE that rotates halves in BF16: bytes read and written per element, and kernels, each way."""

    forward: tuple[float, float]
    backward: tuple[float, float]
    kernels: tuple[int, int]
    variant: str


HALVES = Halves((11.0, 9.0), (15.0, 15.0), (5, 9), "eager_halves")
"""torchtitan 0.2.2 `models/qwen3/model/model.py` and `models/gpt_oss/model/model.py`, `apply_rotary_emb`.
Forward: two products (2 + 2 each), a negation of one half (1 + 1), a join of the halves (2 + 2) and a sum
(4 + 2). Backward: two products, the negation, each half copied into zeros (1 + 1 and 2 each), and two sums.
Llama 3, Llama 4 and DeepSeek-V3 multiply complex numbers instead (`ROPE`)."""
SCALED = Halves((13.0, 11.0), (15.0, 13.0), (12, 7), "scaled_halves")
"""NVIDIA/Megatron-LM@d7288711b megatron/core/models/common/embeddings/rope_utils.py
`_apply_rotary_pos_emb_bshd`: as above, then a join with the part that does not turn, which is empty, and six
kernels for the small tables. Backward: two products, the negation, a join of both halves, zeros for the empty
part, and two sums."""
HAS_SINKS = frozenset({"attention.sinks.backward"})
"""Operators by which gpt-oss is known."""


HEAD_NORMS = frozenset({"qk_norm", "qk_norm.backward"})
"""Norms over the elements of one head: their rows are so short that the number of rows sets the time, so that
they have rates of their own."""


def rotates_halves(operators: Operators, known_by: Collection[str]) -> bool:
    """Whether a framework's code rotates halves in the models that have one of the operators `known_by`.

    torchtitan's Qwen3, which norms queries and keys, and gpt_oss, which has sinks, do.
    """
    return not {op.name for ops in operators.values() for op in ops}.isdisjoint(known_by)


def in_halves(op: Operator, halves: Halves) -> tuple[Operator, ...]:
    """RoPE by halves in the place of a fused kernel."""
    if op.cls != "rope":
        return (op,)
    elements, back = op.bytes_written / BF16, op.name.endswith(".backward")
    read, written = halves.backward if back else halves.forward
    size = {"bytes_read": elements * read, "bytes_written": elements * written}
    variant = halves.variant + "_backward" * back
    return (replace(op, **size, launches=halves.kernels[back], variant=variant),)


def eager_rows(
    op: Operator, bytes_of_rows: Mapping[str, float] = ROW_BYTES, experts: int = 0, choices: float = 0.0
) -> tuple[Operator, ...]:
    """Eager kernels for the rows of experts alone, where the rest of a layer is compiled.

    torchtitan 0.2.2 compiles the router, the shared experts and the grouped GEMMs with their activation, but
    neither `MoE.forward` nor what permutes rows (`models/llama4/infra/parallelize.py:613`).
    """
    base = op.name.removesuffix(".recompute")
    outside = base in bytes_of_rows or base in ("experts.weight_gradient", "shared.down")
    return eager(op, bytes_of_rows, experts, choices) if outside else (op,)


def eager(
    op: Operator, bytes_of_rows: Mapping[str, float] = ROW_BYTES, experts: int = 0, choices: float = 0.0
) -> tuple[Operator, ...]:
    """An eager kernel in the place of a fused one: its bytes, launches and variant.

    `experts`: those of this rank with padded rows; `choices`: of a token.
    """
    base = op.name.removesuffix(".recompute")
    if base in NOT_RUN:
        return ()
    if base in bytes_of_rows:
        # A fused expand writes, and a fused reduce reads, every routed row once, in BF16.
        whole = op.bytes_written if "expand" in base else op.bytes_read
        half = whole / BF16 * bytes_of_rows[base] / 2
        variant = base.removeprefix("experts.")
        size = {"bytes_read": half, "bytes_written": half, "choices": choices}
        moved = replace(op, variant=f"eager_{variant}", **size)
        if base != "experts.reduce_gradient" or not experts:
            return (moved,)
        indices = INDEX_BYTES * PADDING_ROWS * experts
        return moved, move("experts.padding_gradient", "permute", "I", indices, 0.0, variant=PADDING)
    factor, variant, launches = 1.0, f"eager_{op.variant}", op.launches
    if op.variant.startswith("eager"):
        return (op,)  # what names the eager kernel itself
    if base == "shared.down":  # the output of the shared experts is added to that of the routed ones
        rows = op.bytes_written
        return op, replace(
            move("shared.add", "elementwise", op.direction, 2 * rows, rows, variant="add"),
            name=op.name.replace("down", "add"), recompute=op.recompute,
        )  # fmt: skip
    if base in HEAD_NORMS:
        variant = f"eager_head_{op.variant}"
    if op.cls == "swiglu":
        forward = base.endswith("swiglu")
        if op.bytes_read < 2.5 * op.bytes_written and op.bytes_read == op.bytes_written * (
            1 if forward else 2
        ):
            return (replace(op, variant="eager_forward" if forward else "eager_backward"),)  # without a gate
        factor = SWIGLU_FORWARD if forward else SWIGLU_BACKWARD
        if op.variant == "weighted_backward":  # it writes the output again; eager code has kept it
            factor *= 5 / 6
        variant = "eager_forward" if forward else "eager_backward"
    elif op.cls == "rope":
        factor, variant = ROPE, "eager"
    elif op.cls == "topk":
        launches = GATE_FORWARD_CALLS if op.variant == "forward" else GATE_BACKWARD_CALLS
    elif op.cls != "norm":
        return (op,)
    size = {"bytes_read": op.bytes_read * factor, "bytes_written": op.bytes_written * factor}
    return (replace(op, **size, variant=variant, launches=launches),)


def joined_by_cat(ops: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """What torchtitan's DeepSeek-V3 runs for the copies of MLA: `cat` and `split`, whose backward is a `cat`.

    Forward, queries and keys are joined from parts with and without rotation; the latent is made contiguous
    for its norm, the rotated key is a view. Backward, the gradients of queries, of keys with values and of
    the down-projection are joined, and that of the latent is made contiguous (torchtitan 0.2.2
    `models/deepseek_v3/model/model.py`, `Attention.forward`).
    """
    named = {op.name: op for op in ops}
    out: list[Operator] = []
    for op in ops:
        base = op.name.removesuffix(".recompute")
        again = op.name.removeprefix(base)
        if base == "k_nope_pack" and f"rope_q{again}" in named:
            part = named[f"k_rope_broadcast{again}"]
            size = op.bytes_written + part.bytes_written
            keys = {"bytes_read": op.bytes_read + part.bytes_read, "bytes_written": size}
            out.append(replace(op, name=f"k.cat{again}", variant=CAT, **keys))
            out.append(replace(op, name=f"q.cat{again}", variant=CAT, bytes_read=size, bytes_written=size))
        elif base == "k_nope_unpack" and "rope_q.backward" in named:
            both = op.bytes_written + named["v_unpack"].bytes_written
            size = op.bytes_written + named["rope_q.backward"].bytes_written
            out.append(replace(op, name="kv_up.cat", variant=CAT, bytes_read=both, bytes_written=both))
            out.append(replace(op, name="q.cat.backward", variant=CAT, bytes_read=size, bytes_written=size))
        elif base == "kv_latent.join" and "k_rope.sum_heads" in named:
            size = op.bytes_read / 3
            moved = 2 * size - named["k_rope.sum_heads"].bytes_written
            out.append(
                replace(op, cls="copy", variant=CAT_ROWS, bytes_read=moved, bytes_written=moved, launches=2)
            )
        elif base not in ("k_rope_broadcast", "k_rope_slice", "v_unpack"):
            out.append(op)
    return tuple(out)


CAT, CAT_ROWS = "eager_cat", "eager_cat_rows"
"""Variants of a join of two tensors along the elements of a head, one of them strided, and along contiguous
rows, which PyTorch joins with vector loads."""


GROUPED_MM = "grouped_mm"
"""Variant of the BF16 GEMMs of all experts that PyTorch's `_grouped_mm` runs as one kernel."""


def one_grouped_kernel(op: Operator) -> tuple[Operator, ...]:
    """GEMMs of experts as `torch._grouped_mm` runs them; a weight gradient is one kernel too."""
    if op.gemm is None or op.gemm.groups <= 1 or op.cls not in ("gemm", "grouped_gemm", "wgrad_gemm"):
        return (op,)
    launches = 1 if op.cls == "wgrad_gemm" else op.launches
    return (replace(op, launches=launches, variant=op.variant or GROUPED_MM * (op.dtype == "bf16")),)


def written(op: Operator) -> tuple[Operator, ...]:
    """A weight gradient written in BF16 instead of added into an FP32 buffer (PyTorch autograd, FSDP)."""
    if not op.accumulated_bytes:
        return (op,)
    half = op.accumulated_bytes / 2
    size = op.bytes_written - half + half * BF16 / FP32
    return (replace(op, accumulated_bytes=0.0, bytes_read=op.bytes_read - half, bytes_written=size),)


def flat_gradients(
    operators: Operators, parameters: float, reduce_bytes: float, *, divided: bool = False
) -> dict[Phase, tuple[Operator, ...]]:
    """Add FSDP1's copies of the gradients of `parameters`, the sharded parameters of a block.

    Autograd joins the gradients of a flat parameter's views (the backward of `split`); a cast follows if they
    are reduced in FP32, and, with `divided`, a division in place before the reduction (torch 2.1,
    `torch/distributed/fsdp/_flat_param.py` and `_runtime_utils.py`, `_reduce_grad` and `_div_if_needed`).
    """
    if not parameters:
        return dict(operators)
    wide = parameters * reduce_bytes
    copies = [move("fsdp.join", "copy", "W", parameters * BF16, parameters * BF16, variant="flat")]
    if reduce_bytes > BF16:
        copies.append(move("fsdp.cast", "copy", "W", parameters * BF16, wide, variant="widen"))
    if divided:
        copies.append(move("fsdp.divide", "copy", "W", wide, wide, variant="flat"))
    return behind(operators, {"mlp W": copies})


ADDED_BYTES = {"added": 6.0, "added-fp32": 18.0}
"""Bytes per parameter and micro-batch of adding gradients with kernels of their own. `added` reads two 16-bit
gradients and writes one; `added-fp32` copies BF16 gradients to FP32 and adds the copy to an FP32 buffer
(microsoft/DeepSpeed@56c522386, `bf16_optimizer.py`: `clear_lp_grads` drops BF16 gradients, so that autograd
writes them without an addition)."""


def added_gradients(operators: Operators, parameters: float, how: str) -> dict[Phase, tuple[Operator, ...]]:
    """Let the GEMMs write weight gradients, and add kernels that accumulate those of `parameters`.

    `how` is a value of `software.weight_gradients`.
    """
    result = each(operators, written)
    if how not in ADDED_BYTES or not parameters:
        return result
    cast = (BF16 + FP32) * parameters if how == "added-fp32" else 0.0
    half = (parameters * ADDED_BYTES[how] - cast) / 2
    added = [move("gradients.add", "copy", "W", half, half, variant="flat")]
    if cast:
        added.insert(0, move("gradients.cast", "copy", "W", cast / 3, cast / 3 * 2, variant="widen"))
    return behind(result, {"mlp W": added})


def accumulated_by_autograd(
    operators: Operators, parameters: float, microbatches: int
) -> dict[Phase, tuple[Operator, ...]]:
    """Add what autograd adds to gradients that no FSDP takes: all micro-batches but the first (eq. O33).

    The first backward keeps the gradient that the GEMM wrote; every further one adds its own to it, reading
    two 16-bit gradients and writing one (torch 2.11 `accumulate_grad.h`, `accumulateGrad`).
    """
    share = parameters * (1.0 - 1.0 / microbatches)
    if not share:
        return dict(operators)
    added = move("gradients.accumulate", "elementwise", "W", 2 * share * BF16, share * BF16, variant="add")
    return behind(operators, {"mlp W": (added,)})


EAGER_LOSS, EAGER_BACKWARD = 3 / 2, 4 / 2
"""As above for PyTorch's `cross_entropy`: its log-softmax reads the logits twice and writes them; backward, a
gradient of zeros is written, then read with the softmax, and the result is written."""


PASSES = {
    "compiled": (LOSS_COMPILED, COMPILED_KERNELS),
    "chain": (LOSS_CHAIN, LOSS_KERNELS),
    "eager": (EAGER_LOSS, 2),
}


def passes_of_loss(op: Operator, how: str) -> tuple[Operator, ...]:
    """Another value of `software.loss` in the place of a fused loss, with more passes over the logits."""
    if op.cls != "loss":
        return (op,)
    forward, kernels = PASSES[how]
    variant = op.variant if how == "compiled" else f"{how}_{op.variant}"
    if op.direction == "F":
        return (replace(op, bytes_read=op.bytes_read * forward, launches=kernels, variant=variant),)
    more = EAGER_BACKWARD if how == "eager" else 1.0
    size = {"bytes_read": op.bytes_read * more, "bytes_written": op.bytes_written * more}
    return (replace(op, **size, variant=variant),)


def narrow(op: Operator) -> tuple[Operator, ...]:
    """A weight gradient accumulated in BF16, which takes half the bytes of an FP32 buffer."""
    saved = op.accumulated_bytes / 2 * (1.0 - BF16 / FP32)
    read, size = op.bytes_read - saved, op.bytes_written - saved
    left = op.accumulated_bytes - 2 * saved
    return (replace(op, accumulated_bytes=left, bytes_read=read, bytes_written=size),)


def copied_parameters(
    operators: Operators, parameters: float, zero_stage: int, *, whole_gradients: bool = False
) -> dict[Phase, tuple[Operator, ...]]:
    """Add FSDP2's copies around its collectives, for `parameters` of a block on one GPU before sharding.

    With ZeRO-3, gathered parameters are copied out of a buffer in both passes. Gradients are copied into an
    FP32 buffer that every backward scatters, or with `whole_gradients` added to whole FP32 gradients after
    every micro-batch.
    """
    if not parameters:
        return dict(operators)
    out = move("fsdp.copy_out", "copy", "F", parameters * BF16, parameters * BF16, variant="flat")
    into = move("fsdp.copy_in", "copy", "W", parameters * BF16, parameters * FP32, variant="pack")
    added = move(
        "fsdp.accumulate", "copy", "W", parameters * (BF16 + FP32), parameters * FP32, variant="add_widened"
    )
    extra: dict[Phase, tuple[Operator, ...]] = {"mlp W": (added if whole_gradients else into,)}
    if zero_stage == 3:
        extra |= {"mlp F": (out,), "mlp I": (replace(out, direction="I"),)}
    return behind(operators, extra)


def copies_of_single_groups(
    operators: Operators, parameters: float, recipe: Precision
) -> dict[Phase, tuple[Operator, ...]]:
    """Add what FSDP2 runs for `parameters` of a block whose sharding group has one member (eq. O31).

    There is no collective, but before each pass the parameters are cast (where they are kept in a wider
    format) and copied; the gradients are packed into a buffer, divided into a second and copied into a third
    (torch 2.11 `_fsdp_param_group.py`, `wait_for_unshard`, and `_fsdp_collectives.py`, `foreach_reduce`).
    """
    held, gathered, reduced = (
        BYTES_PER_ELEMENT[of] for of in (recipe.parameters, recipe.parameter_gather, recipe.gradient_reduce)
    )
    cast = held != gathered
    out = move(
        "fsdp.single_copy", "copy", "F", parameters * (held * cast + gathered),
        parameters * gathered * (1 + cast), variant="flat",
    )  # fmt: skip
    pack = move("fsdp.single_pack", "copy", "W", parameters * BF16, parameters * reduced, variant="pack")
    divide = move(
        "fsdp.single_divide", "copy", "W", parameters * 2 * reduced, parameters * 2 * reduced, variant="flat"
    )
    extra: dict[Phase, tuple[Operator, ...]] = {
        "mlp F": (out,), "mlp I": (replace(out, direction="I"),), "mlp W": (pack, divide),
    }  # fmt: skip
    return behind(operators, extra if parameters else {})


SUMS: dict[str, int] = {
    "qkv_proj.dgrad": 2,
    "kv_down.dgrad": 1,  # with the queries' projection
    "ffn.gate_up.dgrad": 1,
    "experts.gate_up.dgrad": 1,
    "shared.gate_up.dgrad": 2,  # with each other, and with the routed rows' gradient
    "gate.dgrad": 1,  # with the routed rows' gradient
}
"""Sums behind an input gradient, by the operator that computes it."""


def with_sum(op: Operator, joined_experts: bool) -> tuple[Operator, ...]:
    """An input gradient that autograd gets in parts, with the sum behind it.

    The operators of a block join linear layers that read one tensor: queries, keys and values, or gate and
    up. torchtitan has a linear layer, or a grouped GEMM, for each, and autograd adds their input gradients
    one by one, with 4 B read and 2 B written an element (torchtitan 0.2.2
    `torchtitan/models/{llama3,qwen3,deepseek_v3}/model/model.py` and `torchtitan/models/moe/moe.py`).
    `joined_experts`: gate and up of an expert are one GEMM, as in torchtitan's gpt_oss.
    """
    count = SUMS.get(op.name, 0)
    if not count or op.gemm is None or (joined_experts and op.name.startswith("experts.")):
        return (op,)
    size = count * op.gemm.m * op.gemm.n * BF16
    added = move(
        f"{op.name.removesuffix('.dgrad')}.sum_gradients", "elementwise", "I", 2 * size, size,
        variant="add", launches=count, per_received_row=op.per_received_row,
    )  # fmt: skip
    return op, replace(added, stream=op.stream)
