"""Softmax attention over queries, keys and values: what MLA, grouped-query and similar kinds share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

from pydantic import PositiveInt

from moesim.simulator.model.attention.core import core_backward, core_forward
from moesim.simulator.model.attention.heads import HeadSizes
from moesim.simulator.model.attention.projections import (
    output_projection,
    output_projection_gradient,
    output_projection_weight_gradient,
)
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.cached import CachedTensor, GemmOutput
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision, row_bytes
from moesim.simulator.model.recompute import RecomputePolicy
from moesim.simulator.model.work import Work

E5M6_BYTES = 1.5


class SoftmaxAttention(Attention):
    """Causal softmax attention; a kind says how queries, keys and values come about, and their sizes."""

    heads: PositiveInt

    @property
    @abstractmethod
    def sizes(self) -> HeadSizes:
        """Sizes of the heads that the core attention reads."""

    @abstractmethod
    def inputs_forward(self, w: Work) -> list[Operator]:
        """From the normalised input to queries, keys and values."""

    def inputs_again(self, w: Work) -> list[Operator]:
        """What the policy `selective` forms of them again, before the core attention runs backward."""
        return []

    @abstractmethod
    def inputs_gradient(self, w: Work) -> list[Operator]:
        """From the gradients of queries, keys and values to that of the normalised input."""

    @abstractmethod
    def inputs_weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the projections into queries, keys and values."""

    @abstractmethod
    def inputs_cached(self, precision: Precision) -> Iterable[CachedTensor]:
        """What stays for the backward up to queries, keys and values."""

    @abstractmethod
    def inputs_gemm_outputs(self) -> Iterable[GemmOutput]:
        """Outputs of the GEMMs into queries, keys and values, in the order of their calls."""

    def flop_per_token(self, sequence: int, causal: bool) -> float:
        """GEMMs of scores and values, forward and twice backward (eq. F3)."""
        heads, _, qk_head_dim, v_head_dim = self.sizes
        forward = 2.0 * heads * sequence * (qk_head_dim + v_head_dim)
        return 3.0 * forward * (0.5 if causal else 1.0)

    def forward(self, w: Work) -> list[Operator]:
        """Projections, core attention, output projection."""
        return [*self.inputs_forward(w), *core_forward(w, self.sizes), *output_projection(w, self._width(w))]

    def input_gradient(self, w: Work) -> list[Operator]:
        """The same backwards."""
        return [
            *output_projection_gradient(w, self._width(w)),
            *self.inputs_again(w),
            *core_backward(w, self.sizes),
            *self.inputs_gradient(w),
        ]

    def weight_gradient(self, w: Work) -> list[Operator]:
        """Output projection first."""
        return [output_projection_weight_gradient(w, self._width(w)), *self.inputs_weight_gradient(w)]

    def _width(self, w: Work) -> int:
        """Elements of all heads' values on this rank."""
        return self.heads * self.sizes.v_head_dim // w.tp

    def cached_tensors(
        self, precision: Precision, policy: RecomputePolicy, unfused: bool
    ) -> Iterator[CachedTensor]:
        """Inputs of the core attention, its output and, of the flash kind, one FP32 log-sum-exp a head."""
        yield from self.inputs_cached(precision)
        out = self.heads * self.sizes.v_head_dim
        out_bytes = out * E5M6_BYTES if policy == "deepseek-v3" else row_bytes(out, "bf16")
        yield CachedTensor("attention output", out_bytes, "kept", "width", kept_by_op=True)
        if not unfused:
            lse = self.heads * BYTES_PER_ELEMENT["fp32"]
            yield CachedTensor("log-sum-exp", lse, "kept", "width", kept_by_op=True)

    def gemm_outputs(self, hidden: int) -> Iterator[GemmOutput]:
        """Those into queries, keys and values, then the output projection's."""
        yield from self.inputs_gemm_outputs()
        yield GemmOutput("o_proj", hidden, "tokens")

    def unfused_scores(self, sequence: int) -> float:
        """The whole row of every head."""
        return float(self.heads * sequence)

    def eager_elements(self) -> int:
        """Keys and values repeated for all heads."""
        heads, kv_heads, qk_head_dim, v_head_dim = self.sizes
        return (heads - kv_heads) * (qk_head_dim + v_head_dim)

    def tp_limits(self, tp: int) -> tuple[tuple[int, str], ...]:
        """Heads are not cut."""
        return ((self.heads, f"attention heads={self.heads}"),)

    def context_elements(self, sequence: int) -> float:
        """Keys and values."""
        _, kv_heads, qk_head_dim, v_head_dim = self.sizes
        return kv_heads * (qk_head_dim + v_head_dim)
