"""Base class of softmax attention, with what MLA, grouped-query attention and similar kinds share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

from pydantic import PositiveInt

from moesim.simulator.model.attention.core import core_backward, core_forward, recomputed_core
from moesim.simulator.model.attention.heads import HeadSizes
from moesim.simulator.model.attention.output_gate import (
    gate_backward,
    gate_forward,
    sink_backward,
    sink_forward,
)
from moesim.simulator.model.attention.projections import (
    output_projection,
    output_projection_gradient,
    output_projection_weight_gradient,
)
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.attention.reach import FULL, Reach
from moesim.simulator.model.cached import CachedTensor, GemmOutput
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision, row_bytes
from moesim.simulator.model.recompute import Module, Recompute
from moesim.simulator.model.work import Work

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
            *core_forward(w, self.sizes, self.reach),
            *sink_forward(w, self.sink_heads // w.tp, width),
            *gate_forward(w, self.gates // w.tp, width),
            *output_projection(w, width),
        ]

    def input_gradient(self, w: Work) -> list[Operator]:
        """Input gradients of output projection, gates, core attention and projections."""
        width = self._width(w)
        return [
            *output_projection_gradient(w, width),
            *gate_backward(w, self.gates // w.tp, width),
            *self.recomputed_inputs(w),
            *recomputed_core(w, self.sizes, self.reach),
            *sink_backward(w, self.sink_heads // w.tp, width),
            *core_backward(w, self.sizes, self.reach),
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
