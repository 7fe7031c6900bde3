"""Grouped-query attention (arXiv 2305.13245), over all tokens, a sliding window (2004.05150) or chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from moesim.simulator.model.attention.softmax import (
    HeadSizes,
    OutputGate,
    Reach,
    SoftmaxAttention,
    gate_columns,
    recomputed_attention_norm,
    rope,
)
from moesim.simulator.model.operator import Direction, Operator, Work
from moesim.simulator.model.precision import Precision, row_bytes
from moesim.simulator.model.primitives import (
    linear_backward,
    linear_forward,
    norm,
    norm_backward,
    weight_gradient,
)
from moesim.simulator.model.recompute import CachedTensor, GemmOutput


class GroupedQueryAttention(SoftmaxAttention):
    """Several query heads share one head of keys and values; a subclass says how far a query reaches."""

    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    v_head_dim: PositiveInt | None = None
    """Elements of one value head; None: as many as of a key head."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool | Literal["all-heads"] = False
    """Norms of queries and keys: true has one weight for every element of a head, which all heads share;
    `all-heads` norms all heads together, with a weight for every element of them (OLMoE, MiniMax-M2)."""
    rotary: bool = True
    """Rotary position embedding of queries and keys; false for learned positions, ALiBi and none."""
    sinks: bool = False
    """One learned logit a head that joins every softmax and has no value (gpt-oss)."""
    output_gate: OutputGate = "none"
    """Sigmoid gates of the output before its projection: one an `element`, projected with the queries
    (Qwen3-Next), or one a `head` (Step 3.5)."""
    key_is_value: bool = False
    """Values are the keys before norm and rotation, without a projection of their own (Gemma 4)."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        if self.key_is_value and self.v_head_dim not in (None, self.head_dim):
            raise ValueError(
                f"key_is_value takes values from the keys, so v_head_dim={self.v_head_dim} must be left out"
            )
        return self

    @property
    def sizes(self) -> HeadSizes:
        """Head sizes; queries and keys have heads of `head_dim` elements, values of `v_head_dim`."""
        return HeadSizes(self.heads, self.kv_heads, self.head_dim, self.v_head_dim or self.head_dim)

    @property
    def features(self) -> frozenset[str]:
        """The kind, and what its fields ask for beyond plain grouped-query attention."""
        asked = {
            "attention-sinks": self.sinks,
            "attention-output-gate": self.output_gate != "none",
            "attention-without-rotation": not self.rotary,
            "keys-as-values": self.key_is_value,
            "norm-of-all-heads": self.qk_norm == "all-heads",
            "value-head-size": self.sizes.v_head_dim != self.head_dim,
        }
        return super().features.union(name for name, is_so in asked.items() if is_so)

    @property
    def gates(self) -> int:
        """Columns of the gates, by `output_gate`."""
        return gate_columns(self.output_gate, self.heads, self.sizes.v_head_dim)

    @property
    def sink_heads(self) -> int:
        """All heads, or none."""
        return self.heads * self.sinks

    @property
    def _v_columns(self) -> int:
        """Columns of the projection of values."""
        return 0 if self.key_is_value else self.kv_heads * self.sizes.v_head_dim

    @property
    def _qkv_width(self) -> int:
        """Columns of the projections of queries, keys, values and gates."""
        return (self.heads + self.kv_heads) * self.head_dim + self._v_columns + self.gates

    # -- counts --------------------------------------------------------------------------------------

    def parameters(self, hidden: int) -> int:
        """Parameters of the projections of queries, keys, values, gates and output, with their biases."""
        gate = self.gates if self.output_gate == "element" else 0
        biased = self._qkv_width - self.gates + gate
        biases = biased * self.qkv_bias + hidden * self.o_bias
        return hidden * (self._qkv_width + self.heads * self.sizes.v_head_dim) + biases

    def norm_parameters(self) -> int:
        """Weights of the norms of queries and keys, and the sinks: vectors that are part of no GEMM."""
        normed_heads = self.heads + self.kv_heads if self.qk_norm == "all-heads" else 2 * bool(self.qk_norm)
        return normed_heads * self.head_dim + self.sink_heads

    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes of the keys and values of every token that a query of the next token may attend to."""
        _, kv_heads, qk_head_dim, v_head_dim = self.sizes
        return float(kv_heads * (qk_head_dim + v_head_dim)) * self.reach.widest(tokens) * element_bytes

    # -- operators -----------------------------------------------------------------------------------

    def inputs_forward(self, w: Work) -> list[Operator]:
        """One GEMM for queries, keys, values and gates, then norm and rotation of queries and keys."""
        qkv = linear_forward(w, "qkv_proj", w.tokens, self._qkv_width // w.tp, w.hidden)
        return [*qkv, *self._rotary(w, "F")]

    def _rotary(self, w: Work, d: Direction) -> list[Operator]:
        q = w.tokens * self.heads * self.head_dim / w.tp
        k = w.tokens * self.kv_heads * self.head_dim / w.tp
        suffix = "" if d == "F" else ".backward"
        out: list[Operator] = []
        if self.qk_norm:
            rows = (q + k) / self.head_dim
            backward = norm_backward("qk_norm.backward", rows, self.head_dim)
            out.append(norm("qk_norm", "F", rows, self.head_dim) if d == "F" else backward)
        if self.rotary:
            out += [rope(f"rope_q{suffix}", d, q), rope(f"rope_k{suffix}", d, k)]
        return out

    def inputs_gradient(self, w: Work) -> list[Operator]:
        """Backward of rotation and norm, then the input gradient of the GEMM."""
        t, h, width = w.tokens, w.hidden, self._qkv_width // w.tp
        norm_again = recomputed_attention_norm(w)
        return [*self._rotary(w, "I"), *norm_again, *linear_backward(w, "qkv_proj", t, width, h)]

    def inputs_weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradient of the one GEMM for queries, keys, values and gates."""
        return [weight_gradient(w, "qkv_proj", w.tokens, self._qkv_width // w.tp, w.hidden)]

    # -- memory --------------------------------------------------------------------------------------

    def inputs_cached(self, precision: Precision) -> Iterator[CachedTensor]:
        """Queries, keys and values, and the output of any norm of queries and keys."""
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        v = self.kv_heads * self.sizes.v_head_dim
        if self.qk_norm:
            yield CachedTensor("normalised q, k", row_bytes(q + k, "bf16"), "norm output", "width")
        yield CachedTensor("q, k, v", precision.kept_operand_bytes(q + k + v), "kept", "width")

    def inputs_gemm_outputs(self) -> Iterator[GemmOutput]:
        """Outputs of the GEMMs that PyTorch runs for queries, keys, values and gates."""
        gate = self.gates
        with_queries = gate if self.output_gate == "element" else 0
        yield GemmOutput("q", self.heads * self.head_dim + with_queries, "width")
        yield GemmOutput("k", self.kv_heads * self.head_dim, "width")
        if self._v_columns:
            yield GemmOutput("v", self._v_columns, "width")
        if gate and not with_queries:
            yield GemmOutput("gate", gate, "width")

    def tp_limits(self, tp: int) -> tuple[tuple[int, str], ...]:
        """Limits of the heads; ranks beyond the number of key-value heads hold copies of these."""
        limits = super().tp_limits(tp)
        return (*limits, (self.kv_heads, f"kv_heads={self.kv_heads}")) if tp < self.kv_heads else limits


class GQA(GroupedQueryAttention):
    """Grouped-query attention; with `kv_heads` equal to `heads` it is multi-head attention."""

    kind: Literal["gqa"] = "gqa"

    def megatron_arguments(self) -> dict[str, str | None] | None:
        """Megatron-LM's flags for grouped-query attention; None for a subclass, another attention."""
        if type(self) is not GQA:
            return None
        return {
            "--num-attention-heads": str(self.heads),
            "--group-query-attention": None,
            "--num-query-groups": str(self.kv_heads),
            "--kv-channels": str(self.head_dim),
            **({"--add-qkv-bias": None} if self.qkv_bias else {}),
            **({"--qk-layernorm": None} if self.qk_norm else {}),
        }


class SlidingAttention(GroupedQueryAttention):
    """Grouped-query attention whose queries attend to the last `window` tokens, their own included."""

    kind: Literal["sliding"] = "sliding"
    window: PositiveInt

    @property
    def reach(self) -> Reach:
        """The last `window` tokens."""
        return Reach("window", self.window)


class ChunkedAttention(GroupedQueryAttention):
    """Grouped-query attention whose queries attend to earlier tokens of their own chunk only."""

    kind: Literal["chunked"] = "chunked"
    chunk: PositiveInt
    """Tokens of one chunk; the sequence is cut at its multiples."""

    @property
    def reach(self) -> Reach:
        """The tokens of the query's chunk."""
        return Reach("chunk", self.chunk)
