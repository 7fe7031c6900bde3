"""Grouped-query attention: several query heads share one head of keys and values (arXiv 2305.13245)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from moesim.simulator.model.attention.heads import HeadSizes
from moesim.simulator.model.attention.projections import recomputed_attention_norm, rope
from moesim.simulator.model.attention.softmax import SoftmaxAttention
from moesim.simulator.model.cached import CachedTensor, GemmOutput
from moesim.simulator.model.operator import Direction, Operator
from moesim.simulator.model.precision import Precision, row_bytes
from moesim.simulator.model.primitives import (
    cast,
    linear_forward,
    linear_input_gradient,
    norm,
    norm_backward,
    weight_gradient,
)
from moesim.simulator.model.work import Work


class GQA(SoftmaxAttention):
    """Grouped-query attention; with `kv_heads` equal to `heads` it is multi-head attention."""

    kind: Literal["gqa"] = "gqa"
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    rotary: bool = True
    """Rotary position embedding of queries and keys; false for learned positions and ALiBi."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        return self

    @property
    def sizes(self) -> HeadSizes:
        """Head sizes; queries, keys and values all have heads of `head_dim` elements."""
        return HeadSizes(self.heads, self.kv_heads, self.head_dim, self.head_dim)

    @property
    def _qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def parameters(self, hidden: int) -> int:
        """Parameters of the projections of queries, keys, values and output, with their biases."""
        q, kv = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        biases = (q + kv) * self.qkv_bias + hidden * self.o_bias
        return hidden * (q + kv) + q * hidden + biases

    def norm_parameters(self) -> int:
        """One weight for every element of a query head and of a key head, if these are normalised."""
        return 2 * self.head_dim * self.qk_norm

    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes of the keys and values of every token."""
        return 2.0 * self.kv_heads * self.head_dim * tokens * element_bytes

    def inputs_forward(self, w: Work) -> list[Operator]:
        """One GEMM for queries, keys and values, then norm and rotation of queries and keys."""
        qkv = linear_forward(w, "qkv_proj", w.tokens, self._qkv_width // w.tp, w.hidden)
        return [*qkv, *self._rotary(w, "F")]

    def _rotary(self, w: Work, d: Direction) -> list[Operator]:
        q = w.tokens * self.heads * self.head_dim / w.tp
        k = w.tokens * self.kv_heads * self.head_dim / w.tp
        suffix = "" if d == "F" else ".backward"
        out: list[Operator] = []
        if self.qk_norm:
            rows = (q + k) / self.head_dim
            out.append(
                norm("qk_norm", "F", rows, self.head_dim)
                if d == "F"
                else norm_backward("qk_norm.backward", rows, self.head_dim)
            )
        if self.rotary:
            out += [rope(f"rope_q{suffix}", d, q), rope(f"rope_k{suffix}", d, k)]
        return out

    def inputs_gradient(self, w: Work) -> list[Operator]:
        """Backward of rotation and norm, then the input gradient of the GEMM."""
        t, h, width = w.tokens, w.hidden, self._qkv_width // w.tp
        out = [*self._rotary(w, "I"), *recomputed_attention_norm(w)]
        out += linear_input_gradient(w, "qkv_proj", t, width, h)
        if w.fp8:
            out.append(cast("qkv_proj.input_cast_channel", "I", t, h, "channel"))
            out.append(cast("qkv_proj.gradient_cast_channel", "I", t, width, "channel"))
        return out

    def inputs_weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradient of the one GEMM for queries, keys and values."""
        return [weight_gradient(w, "qkv_proj", w.tokens, self._qkv_width // w.tp, w.hidden)]

    def inputs_cached(self, precision: Precision) -> Iterator[CachedTensor]:
        """Queries, keys and values, and the output of any norm of queries and keys."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.qk_norm:
            yield CachedTensor("normalised q, k", row_bytes(q + kv, "bf16"), "norm output", "width")
        yield CachedTensor("q, k, v", row_bytes(q + 2 * kv, "bf16"), "kept", "width")

    def inputs_gemm_outputs(self) -> Iterator[GemmOutput]:
        """Outputs of the three GEMMs that PyTorch runs for queries, keys and values."""
        yield GemmOutput("q", self.heads * self.head_dim, "width")
        yield GemmOutput("k", self.kv_heads * self.head_dim, "width")
        yield GemmOutput("v", self.kv_heads * self.head_dim, "width")

    def tp_limits(self, tp: int) -> tuple[tuple[int, str], ...]:
        """Limits of the heads; ranks beyond the number of key-value heads hold copies of these."""
        limits = super().tp_limits(tp)
        return (*limits, (self.kv_heads, f"kv_heads={self.kv_heads}")) if tp < self.kv_heads else limits

    def megatron_arguments(self) -> dict[str, str | None] | None:
        """Megatron-LM's flags for grouped-query attention."""
        return {
            "--num-attention-heads": str(self.heads),
            "--group-query-attention": None,
            "--num-query-groups": str(self.kv_heads),
            "--kv-channels": str(self.head_dim),
            **({"--add-qkv-bias": None} if self.qkv_bias else {}),
            **({"--qk-layernorm": None} if self.qk_norm else {}),
        }
