"""Softmax attention: what MLA, grouped-query attention and the like share, and operators of its core."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from pydantic import PositiveInt

from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.operator import Direction, GemmShape, Operator, Work
from moesim.simulator.model.precision import BLOCK_BYTES, BYTES_PER_ELEMENT, Precision, row_bytes
from moesim.simulator.model.primitives import (
    BF16,
    FP32,
    cast,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    recomputed,
    weight_gradient,
)
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Module, Recompute


class HeadSizes(NamedTuple):
    """Numbers of query heads and of key-value heads, and elements of one query or key and of one value."""

    heads: int
    kv_heads: int
    qk_head_dim: int
    v_head_dim: int


def mean_keys(sequence: float, most: float) -> float:
    """Mean over a causal sequence of the keys that one query reads, at most `most` (eq. A1, C2).

    The query at position i of a sequence reads i keys, so s / 2 on average over s tokens; a window of w or a
    choice of w keys leaves w - w^2 / (2 s). A position itself counts half, as in published FLOP counts.
    """
    if sequence <= most:
        return sequence / 2.0
    return most - most * most / (2.0 * sequence)


class Reach(NamedTuple):
    """Keys that a causal query attends to: all, a window or a chunk of `size`, or `size` chosen ones."""

    kind: Literal["full", "window", "chunk", "chosen"] = "full"
    size: int = 0

    def limits(self, sequence: int) -> bool:
        """Whether any query of a sequence sees fewer keys than full causal attention gives it."""
        return self.kind != "full" and self.size < sequence

    def mean_keys(self, sequence: int) -> float:
        """Keys of a query on average (eq. C2): `mean_keys`, and c / 2 in chunks of c."""
        if self.kind == "chunk" and self.limits(sequence):
            whole, rest = divmod(sequence, self.size)
            return (whole * self.size**2 + rest**2) / (2.0 * sequence)
        return mean_keys(sequence, self.widest(sequence))

    def widest(self, sequence: int) -> int:
        """Most keys of any query, which counts without the causal half take for all of them."""
        return self.size if self.limits(sequence) else sequence


FULL = Reach()
"""Full causal attention."""


# -- unfused core attention, whose scores, softmax and dropout go through memory -----------------------
# The kernels are those of Megatron-LM's core attention (NVIDIA/Megatron-LM@2e90a342f5, `CoreAttention`):
# two batched GEMMs, a fused scale-mask-softmax and a dropout, over the whole square of scores. A window
# or chunk masks the square and saves nothing.

ALIGNED_ELEMENTS = 8
"""Elements of 16 bits in the 16 bytes to which rows must be aligned for a library's fast kernels."""
MASK_BYTES = 1.0
"""Bytes of one element's dropout mask."""


def unfused_forward(w: Work, sizes: HeadSizes, reach: Reach = FULL) -> list[Operator]:
    """Scores, softmax, any dropout, and values; each GEMM takes 2 T a s d FLOPs, without halving (eq. O7)."""
    scores, counted = _scores(w, sizes), reach.mean_keys(w.sequence) / w.sequence
    return [
        _gemm(w, sizes, "attention.scores", "F", sizes.qk_head_dim, counted, writes=scores),
        move("attention.softmax", "elementwise", "F", scores * BF16, scores * BF16, variant="softmax"),
        *([_dropout(scores, "attention.dropout", "F")] if w.dropout else []),
        _gemm(w, sizes, "attention.values", "F", sizes.v_head_dim, counted, reads=scores),
    ]


def unfused_backward(w: Work, sizes: HeadSizes, reach: Reach = FULL) -> list[Operator]:
    """Four GEMMs and the backward of dropout and softmax."""
    qk, v = sizes.qk_head_dim, sizes.v_head_dim
    scores, counted = _scores(w, sizes), reach.mean_keys(w.sequence) / w.sequence
    return [
        _gemm(w, sizes, "attention.values.dscores", "I", v, counted, writes=scores),
        _gemm(w, sizes, "attention.values.dv", "I", v, counted, reads=scores),
        *([_dropout(scores, "attention.dropout.backward", "I")] if w.dropout else []),
        move(
            "attention.softmax.backward", "elementwise", "I", 2 * scores * BF16, scores * BF16,
            variant="softmax",
        ),
        _gemm(w, sizes, "attention.scores.dq", "I", qk, counted, reads=scores),
        _gemm(w, sizes, "attention.scores.dk", "I", qk, counted, reads=scores),
    ]  # fmt: skip


def _dropout(scores: float, name: str, d: Direction) -> Operator:
    """Dropout kernel; forward it writes a mask with the scores, backward it reads it with their gradient."""
    narrow, wide = scores * BF16, scores * (BF16 + MASK_BYTES)
    reads, writes = (narrow, wide) if d == "F" else (wide, narrow)
    return move(name, "elementwise", d, reads, writes, variant="mask")


def _scores(w: Work, sizes: HeadSizes) -> float:
    """Elements of all score matrices of this rank."""
    return w.tokens * (sizes.heads // w.tp) * w.sequence


def _gemm(
    w: Work,
    sizes: HeadSizes,
    name: str,
    d: Direction,
    width: int,
    counted: float,
    *,
    reads: float = 0.0,
    writes: float = 0.0,
) -> Operator:
    """One batched GEMM between the scores and a [tokens, width] tensor of every head.

    Model FLOPs count the share `counted` of the square only: the causal half, or the keys of a window.
    """
    rows = w.tokens * (sizes.heads // w.tp)
    thin = rows * width * BF16
    flop = 2.0 * _scores(w, sizes) * width
    n, k = (w.sequence, width) if writes else (width, w.sequence)
    aligned = width % ALIGNED_ELEMENTS == 0
    return Operator(
        name,
        "gemm",
        d,
        "bf16",
        flop=flop,
        uncounted_flop=(1.0 - counted) * flop,
        bytes_read=(2 * thin if writes else thin) + reads * BF16,
        bytes_written=writes * BF16 if writes else thin,
        gemm=GemmShape(rows, n, k, max(1, round(rows / w.sequence))),
        variant="" if aligned else "unaligned_sum" if writes else "unaligned_width",
    )


# -- causal core attention; flash attention keeps the scores inside the kernel -------------------------
# A core kernel's variant says what its rate depends on besides the sequence: `fp8` or `mxfp8` for
# operands in FP8, `flex` for PyTorch's compiled flex_attention, `window` for a sliding window, `64`,
# `256` or `512` for narrow or wide heads, joined by `_`. Rates of a window are read at its size. A chunk
# is a sequence of its own to the kernels: Llama 4's recipes cut the sequence into chunks before they
# call one, and flex_attention over 4 chunks of 8,192 tokens runs within 5 % (forward) and 10 %
# (backward) of its rate at 8,192 tokens (lab/results/2026-11-22-h200-windowed-attention.json.xz).

HEADS = ((80, "64"), (192, ""), (256, "256"))
"""Widest head of each variant by width; still wider heads are `512`, which nothing measured."""


def kernel_variant(w: Work, sizes: HeadSizes, reach: Reach) -> str:
    """Variant of the core kernels, by which profiles distinguish their rates."""
    wide = next((name for most, name in HEADS if sizes.qk_head_dim <= most), "512")
    window = "window" if reach.kind == "window" and reach.limits(w.sequence) else ""
    return "_".join(part for part in (w.attention, "flex" if w.flex else "", window, wide) if part)


def _shape(w: Work, sizes: HeadSizes, reach: Reach, heads: int) -> GemmShape:
    """Shape of the scores; its columns are the most keys of a query, at which the rate is read.

    A piece of ring attention has the keys of one rank.
    """
    keys = min(reach.widest(w.sequence), max(1, w.sequence // w.pieces))
    return GemmShape(w.tokens, keys, sizes.qk_head_dim, heads)


def joined_pieces(w: Work, name: str, d: Direction, elements: float) -> list[Operator]:
    """Kernels that join what the pieces of ring attention computed (eq. A9); none without pieces.

    The first piece is copied and every other one added in BF16; the last rank adds whole tensors. Read in
    NVIDIA/TransformerEngine@d0067d0d `pytorch/attention/dot_product_attention/context_parallel.py`
    (`flash_attn_fwd_out_correction`, with one kernel for its log-sum-exp; `dq.copy_`, `dq.add_`).
    """
    if w.pieces == 1:
        return []
    more, own = w.pieces - 1, elements * BF16
    launches = 1 + 2 * more if d == "F" else 3 * w.pieces  # backward: queries, keys and values
    return [
        move(name, "elementwise", d, own * (1 + 2 * more), own * w.pieces, variant="add", launches=launches)
    ]


def core_forward(w: Work, sizes: HeadSizes, reach: Reach = FULL) -> list[Operator]:
    """Causal core attention, with flop = 2 x tokens x heads x mean keys x (d_qk + d_v) (eq. C2).

    Operands in FP8 are cast first (eq. C51).
    """
    if w.unfused:
        return unfused_forward(w, sizes, reach)
    heads, kv_heads = sizes.heads // w.tp, max(1, sizes.kv_heads // w.tp)
    qk, v = sizes.qk_head_dim, sizes.v_head_dim
    queries = w.tokens * heads * qk
    keys_values = w.tokens * kv_heads * (qk + v)
    element = 1.0 if w.attention else BF16
    core = Operator(
        "attention",
        "attention_forward",
        "F",
        "fp8" if w.attention else "bf16",
        flop=w.tokens * heads * 2.0 * reach.mean_keys(w.sequence) * (qk + v),
        bytes_read=(queries + keys_values) * element,
        bytes_written=w.tokens * heads * v * BF16,
        gemm=_shape(w, sizes, reach, heads),
        variant=kernel_variant(w, sizes, reach),
        launches=w.pieces,
    )
    joined = joined_pieces(w, "attention.join", "F", w.tokens * heads * v)
    return [*operand_casts(w, "attention.cast", "F", queries + keys_values), core, *joined]


def operand_casts(w: Work, name: str, d: Direction, elements: float) -> list[Operator]:
    """Cast of operands of the core attention to FP8 (eq. C51); none in BF16.

    MXFP8 writes them along rows and columns. With one scale a tensor, queries, keys and values are joined
    before one cast, and a current scale reads the joined tensor first. Read in NVIDIA/TransformerEngine@v2.15
    `pytorch/attention/dot_product_attention/utils.py` (`mxfp8_quantize_fast_path`, `combine_and_quantize`).
    """
    if not w.attention:
        return []
    if w.attention == "mxfp8":
        written = 2.0 * BLOCK_BYTES["mx"] * elements
        return [move(name, "cast", d, BF16 * elements, written, variant="mx", dtype="fp8")]
    out = [move(name, "cast", d, BF16 * elements, elements, variant="row", dtype="fp8")]
    if w.current_scales:
        out.insert(0, move(f"{name}.amax", "cast", d, BF16 * elements, 0.0, variant="amax", launches=2))
    if d == "F":
        out.insert(0, move(f"{name}.join", "copy", d, BF16 * elements, BF16 * elements, variant="pack"))
    return out


def core_backward(w: Work, sizes: HeadSizes, reach: Reach = FULL) -> list[Operator]:
    """Backward of the core attention: preparation, the core itself, and conversion of dQ to BF16.

    The core runs five GEMMs; the one that computes the scores again does not count as model FLOPs. In FP8 the
    gradient of the output is cast first, and kernels compute the scores outside of a window too: cuDNN 9.22
    takes as long for a window of 128 tokens as its FLOPs over the whole sequence say.
    """
    if w.unfused:
        return unfused_backward(w, sizes, reach)
    heads, kv_heads = sizes.heads // w.tp, max(1, sizes.kv_heads // w.tp)
    qk_dim, v_dim = sizes.qk_head_dim, sizes.v_head_dim
    q, v = w.tokens * heads * qk_dim, w.tokens * heads * v_dim
    kv = w.tokens * kv_heads * (qk_dim + v_dim)
    scores = w.tokens * heads * 2.0 * reach.mean_keys(w.sequence)
    uncounted = scores * qk_dim
    if w.attention:
        whole = w.tokens * heads * 2.0 * FULL.mean_keys(w.sequence)
        uncounted = whole * (3 * qk_dim + 2 * v_dim) - scores * (2 * qk_dim + 2 * v_dim)
        scores, reach = whole, FULL
    element = 1.0 if w.attention else BF16
    core = Operator(
        "attention.backward",
        "attention_backward",
        "I",
        "fp8" if w.attention else "bf16",
        flop=scores * (3 * qk_dim + 2 * v_dim),
        uncounted_flop=uncounted,
        bytes_read=(q + v) * element + kv * element + q * FP32,
        bytes_written=q * FP32 + kv * BF16,
        gemm=_shape(w, sizes, reach, heads),
        variant=kernel_variant(w, sizes, reach),
        launches=w.pieces,
    )
    return [
        *operand_casts(w, "attention.cast_gradient", "I", v),
        move("attention.backward_pre", "attention_pre_post", "I", 2 * v * BF16, q * FP32, variant="pre"),
        core,
        move("attention.backward_post", "attention_pre_post", "I", q * FP32, q * BF16, variant="post"),
        *joined_pieces(w, "attention.join_gradients", "I", q + kv),
    ]


# -- gates and sinks, which change the output of the core attention before its projection --------------
# A gate is a sigmoid for every element of the heads, or one for every head. A sink is a learned logit of
# a head that takes a share of its softmax.
#
# Sources: Qwen3-Next projects the gates of all elements with the queries, Step 3.5 one gate a head
# (`modeling_qwen3_next.py` of Hugging Face transformers, `modeling_step3p5.py` of
# stepfun-ai/Step-3.5-Flash).

OutputGate = Literal["none", "element", "head"]
"""Gates of the attention's output before its projection."""


def gate_columns(gate: OutputGate, heads: int, v_head_dim: int) -> int:
    """Columns that the gates add to the projections of the input."""
    return {"none": 0, "element": heads * v_head_dim, "head": heads}[gate]


def gate(w: Work, name: str, d: Direction, columns: int, width: int) -> list[Operator]:
    """Multiplication of `width` elements of this rank's heads by the sigmoids of `columns` gates.

    Its backward reads the elements' gradients too, and writes gradients of the gates beside theirs.
    """
    own, gates = w.tokens * width * BF16, w.tokens * columns * BF16
    read, written = (own + gates, own) if d == "F" else (2 * own + gates, own + gates)
    return [move(name, "elementwise", d, read, written, variant="add")] if columns else []


def sink_forward(w: Work, heads: int, width: int) -> list[Operator]:
    """Kernel that scales the output by the sinks' share, where flex_attention cannot do it (none: 0 heads).

    Fused kernels add a head's sink to its softmax, which costs nothing.
    """
    if not heads or not w.flex:
        return []
    read = w.tokens * (width * BF16 + heads * FP32)
    return [move("attention.sinks", "elementwise", "F", read, w.tokens * width * BF16, variant="add")]


def sink_backward(w: Work, heads: int, width: int) -> list[Operator]:
    """Sums over tokens, the sinks' gradients; with flex_attention also the gradient of the scaling."""
    if not heads:
        return []
    # Compiled, the scaling shares its reads with the kernel that prepares the backward.
    scaled = w.tokens * width * BF16 if w.flex else 0.0
    read = 2.0 * w.tokens * heads * FP32
    return [move("attention.sinks.backward", "elementwise", "I", read, scaled, variant="reduce")]


# -- output projection, which most kinds of attention share, copies and rotations ----------------------


def output_projection(w: Work, width: int) -> list[Operator]:
    """Projection of `width` elements of heads on this rank; FP8 recipes cache its input in 12 bits."""
    cache = [cast("attention_output.cache", "F", w.tokens, width, "special")] if w.fp8 else []
    return [*cache, *linear_forward(w, "o_proj", w.tokens, w.hidden, width)]


def output_projection_gradient(w: Work, width: int) -> list[Operator]:
    """Input gradient of the output projection and, in FP8, casts of the operands of its weight gradient."""
    h, t = w.hidden, w.tokens
    if not w.fp8:
        return linear_input_gradient(w, "o_proj", t, h, width)
    return [
        cast("attention_output.restore", "I", t, width, "special_back"),
        *linear_input_gradient(w, "o_proj", t, h, width, cast_first=True),
        cast("attention_output.cast_channel", "I", t, width, "channel"),
        cast("o_proj.gradient_cast_channel", "I", t, h, "channel"),
    ]


def output_projection_weight_gradient(w: Work, width: int) -> Operator:
    """Weight gradient of the output projection."""
    return weight_gradient(w, "o_proj", w.tokens, w.hidden, width)


def recomputed_attention_norm(w: Work) -> list[Operator]:
    """Recompute the norm before the attention, where the policy does not keep its output."""
    if not w.repeats("layernorm"):
        return []
    return recomputed([norm("attn_norm", "F", w.norm_tokens, w.hidden, residual=True)])


def copy(name: str, direction: Direction, elements: float, variant: str) -> Operator:
    """Copy of BF16 elements."""
    return move(name, "copy", direction, elements * BF16, elements * BF16, variant=variant)


def rope(name: str, direction: Direction, elements: float) -> Operator:
    """Rotary position embedding of BF16 elements."""
    return move(name, "rope", direction, elements * BF16, elements * BF16)


E5M6_BYTES = 1.5
"""Bytes of one element in the 12-bit format E5M6."""


class SoftmaxAttention(Attention):
    """Causal softmax attention; a subclass defines the projections into queries, keys and values."""

    heads: PositiveInt

    @property
    @abstractmethod
    def sizes(self) -> HeadSizes:
        """Sizes of the heads that the core attention reads."""

    @property
    def reach(self) -> Reach:
        """Keys that a query may attend to: all before it, unless a subclass says otherwise."""
        return FULL

    @property
    def gates(self) -> int:
        """Columns of gates of the output; 0 without any."""
        return 0

    @property
    def sink_heads(self) -> int:
        """Heads whose softmax has a sink; 0 without any."""
        return 0

    @abstractmethod
    def inputs_forward(self, w: Work) -> list[Operator]:
        """Operators from the normalised input to queries, keys and values."""

    def core_forward(self, w: Work) -> list[Operator]:
        """The core attention."""
        return core_forward(w, self.sizes, self.reach)

    def core_again(self, w: Work) -> list[Operator]:
        """The core attention run again before its backward, where a checkpoint dropped what it computed.

        Policies repeat it only where the scores go through memory.
        """
        by_policy = w.unfused and w.recompute in ("attention", "selective")
        return recomputed(self.core_forward(w)) if by_policy or w.repeats("core_attn") else []

    def core_backward(self, w: Work) -> list[Operator]:
        """Input gradients of the core attention."""
        return core_backward(w, self.sizes, self.reach)

    def recomputed_inputs(self, w: Work) -> list[Operator]:
        """Operators that the policy `selective` runs again before the backward of the core attention."""
        return []

    @abstractmethod
    def inputs_gradient(self, w: Work) -> list[Operator]:
        """Operators from the gradients of queries, keys and values to that of the normalised input."""

    @abstractmethod
    def inputs_weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the projections into queries, keys and values."""

    @abstractmethod
    def inputs_cached(self, precision: Precision) -> Iterable[CachedTensor]:
        """Tensors kept for the backward, up to and including queries, keys and values."""

    @abstractmethod
    def inputs_gemm_outputs(self) -> Iterable[GemmOutput]:
        """Outputs of the GEMMs into queries, keys and values, in the order of their calls."""

    def flop_per_token(self, sequence: int, causal: bool) -> float:
        """Model FLOPs of the GEMMs of scores and values; the backward takes twice the forward (eq. F3).

        With `causal` a query counts the keys that it attends to on average; otherwise all of them count the
        most that any query of the sequence has: the sequence, the window or the chunk.
        """
        heads, _, qk_head_dim, v_head_dim = self.sizes
        keys = self.reach.mean_keys(sequence) if causal else self.reach.widest(sequence)
        return 3.0 * 2.0 * heads * keys * (qk_head_dim + v_head_dim)

    def forward(self, w: Work) -> list[Operator]:
        """Projections, core attention with any sinks and gates, output projection."""
        width = self._width(w)
        return [
            *self.inputs_forward(w),
            *self.core_forward(w),
            *sink_forward(w, self.sink_heads // w.tp, width),
            *gate(w, "attention.gate", "F", self.gates // w.tp, width),
            *output_projection(w, width),
        ]

    def input_gradient(self, w: Work) -> list[Operator]:
        """Input gradients of output projection, gates, core attention and projections."""
        width = self._width(w)
        return [
            *output_projection_gradient(w, width),
            *gate(w, "attention.gate.backward", "I", self.gates // w.tp, width),
            *self.recomputed_inputs(w),
            *self.core_again(w),
            *sink_backward(w, self.sink_heads // w.tp, width),
            *self.core_backward(w),
            *self.inputs_gradient(w),
        ]

    def weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the output projection, then of the other projections."""
        return [output_projection_weight_gradient(w, self._width(w)), *self.inputs_weight_gradient(w)]

    def _width(self, w: Work) -> int:
        """Elements of all heads' values on this rank."""
        return self.heads * self.sizes.v_head_dim // w.tp

    def cached_tensors(
        self, precision: Precision, policy: Recompute, unfused: bool
    ) -> Iterator[CachedTensor]:
        """Inputs and output of the core attention, and an FP32 log-sum-exp per head in a fused kernel.

        Gates are kept with the core's output, which is then not the input of the output projection.
        """
        yield from self.inputs_cached(precision)
        out = self.heads * self.sizes.v_head_dim
        out_bytes = out * E5M6_BYTES if policy == "deepseek-v3" else row_bytes(out, "bf16")
        yield CachedTensor("attention output", out_bytes, "kept", "width", kept_by_op=True)
        if self.gates:
            yield CachedTensor("output gates", row_bytes(self.gates, "bf16"), "kept", "width")
            yield CachedTensor("gated output", row_bytes(out, "bf16"), "kept", "width")
        if not unfused:
            lse = self.heads * BYTES_PER_ELEMENT["fp32"]
            inside: frozenset[Module] = frozenset({"core_attn"})
            yield CachedTensor("log-sum-exp", lse, "kept", "width", kept_by_op=True, modules=inside)

    def gemm_outputs(self, hidden: int) -> Iterator[GemmOutput]:
        """Outputs of the projections into queries, keys and values, then of the output projection."""
        yield from self.inputs_gemm_outputs()
        yield GemmOutput("o_proj", hidden, "tokens", row_parallel=True)

    def unfused_scores(self, sequence: int) -> float:
        """Scores over the whole sequence, for every head."""
        return float(self.heads * sequence)

    @property
    def modules(self) -> frozenset[Module]:
        """The core attention."""
        return frozenset({"core_attn"})

    @property
    def context_modules(self) -> frozenset[Module]:
        """The core attention, which reads the keys and values of all ranks."""
        return frozenset({"core_attn"})

    def tp_limits(self, tp: int) -> tuple[tuple[int, str], ...]:
        """Limit of the heads, each of which stays on one rank."""
        return ((self.heads, f"attention heads={self.heads}"),)

    def context_elements(self, sequence: int) -> float:
        """Elements of keys and values; a rank needs those of a window or chunk before its own tokens only.

        They are spread over the tokens of the sequence, as all of them travel with full attention.
        """
        _, kv_heads, qk_head_dim, v_head_dim = self.sizes
        return kv_heads * (qk_head_dim + v_head_dim) * self.reach.widest(sequence) / sequence
