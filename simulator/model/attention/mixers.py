"""Kinds of recurrent mixers: gated delta rules, lightning attention and state-space models.

Gated delta net: arXiv 2412.06464; Kimi delta attention: 2510.26692; lightning attention, which is linear
attention with a fixed decay per head: 2401.04658, 2501.08313; Mamba, which scans by token, and Mamba-2, in
chunks: 2312.00752, 2405.21060.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from moesim.simulator.model.attention.recurrent import (
    Convolution,
    MixerParts,
    Projection,
    RecurrentMixer,
    Saved,
    Scan,
)
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.primitives import BF16, FP32, move, norm, norm_backward

CHUNK = 64
"""Tokens of a chunk in the kernels of flash-linear-attention (`chunk_size` of fla-core 0.6.0)."""


def delta_rule_scan(
    variant: str, *, heads: int, key_heads: int, key_dim: int, value_dim: int, gates: int
) -> Scan:
    """Scan of a gated delta rule (eq. C22): the WY form of arXiv 2412.06464, section 3.3, in chunks of 64.

    Per token and head, with C tokens a chunk: scores of keys with keys and of queries with keys, C d_k each;
    the inverse of a unit triangle, C^2 / 6; the two products with it, C (d_k + d_v); the scores times the new
    values, C d_v; the state read twice and updated once, d_k d_v each: all times 2. The backward computes the
    products with the inverse and the states again. `gates` counts the decays of one token.
    """
    square, state = CHUNK * CHUNK / 6.0, key_dim * value_dim
    inverse = CHUNK * (key_dim + value_dim)
    products = CHUNK * (2 * key_dim + value_dim) + inverse + square + 3 * state
    return Scan(
        variant=variant,
        heads=heads,
        flop=2.0 * heads * products,
        repeated_flop=2.0 * heads * (inverse + 2 * state),
        inputs=2 * key_heads * key_dim + heads * value_dim + gates + heads,
        outputs=heads * value_dim,
        state_elements=heads * state,
        chunk=CHUNK,
        transition_elements=heads * key_dim * key_dim,
    )


class GatedDelta(RecurrentMixer):
    """Gated delta net; every key head serves the value heads of its group."""

    kind: Literal["gated_delta"] = "gated_delta"
    conv: PositiveInt = 4
    """Tokens that the short convolution reads."""
    key_heads: PositiveInt
    value_heads: PositiveInt
    key_dim: PositiveInt
    """Elements of one head's query or key."""
    value_dim: PositiveInt
    """Elements of one head's value."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.value_heads % self.key_heads:
            raise ValueError(f"key_heads={self.key_heads} does not divide value_heads={self.value_heads}")
        return self

    @property
    def scan(self) -> Scan:
        """The gated delta rule, whose gates are one number per value head."""
        return delta_rule_scan(
            self.kind,
            heads=self.value_heads,
            key_heads=self.key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            gates=self.value_heads,
        )

    @property
    def parts(self) -> MixerParts:
        """Queries, keys, values and gate in one GEMM; learning rate and decay per head in another.

        Tensors of `save_for_backward` in fla-core 0.6.0, `fla/ops/gated_delta_rule/chunk.py`.
        """
        heads, keys, width = (
            self.value_heads,
            self.key_heads * self.key_dim,
            self.value_heads * self.value_dim,
        )
        return MixerParts(
            projections=(Projection("qkvz_proj", 2 * keys + 2 * width), Projection("ba_proj", 2 * heads)),
            width=width,
            gate_width=width,
            # A decay and a step bias per value head, and the weight of the gated norm, which heads share.
            vectors=2 * heads + self.value_dim,
            heads=((self.key_heads, f"key_heads={self.key_heads}"), (heads, f"value_heads={heads}")),
            saved=(
                Saved("q, k, v", (2 * keys + width) * BF16),
                Saved("decay and learning rate", 2 * heads * BF16),
                Saved("norms of q and k", 2 * self.key_heads * FP32, inside_scan=True),
                Saved("summed decays and rates", 2 * heads * FP32, inside_scan=True),
                Saved("inverse in each chunk", heads * CHUNK * BF16, inside_scan=True),
            ),
            convolution=Convolution(2 * keys + width, self.conv),
        )


class KDA(RecurrentMixer):
    """Kimi delta attention; its gates go through a projection as narrow as one head, or are of full rank."""

    kind: Literal["kda"] = "kda"
    conv: PositiveInt = 4
    """Tokens that the short convolution reads."""
    heads: PositiveInt
    head_dim: PositiveInt
    full_rank_gate: bool = False
    """Whether the output gate is one full projection (Kimi K3) instead of two narrow ones."""
    full_rank_decay: bool = False
    """Whether the decay is one full projection (Ling 3.0) instead of two narrow ones."""

    @property
    def scan(self) -> Scan:
        """The gated delta rule with a decay per channel of a key."""
        return delta_rule_scan(
            self.kind,
            heads=self.heads,
            key_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            gates=self.heads * self.head_dim,
        )

    @property
    def parts(self) -> MixerParts:
        """Queries, keys and values; then decay, learning rate and output gate.

        Tensors of `save_for_backward` in fla-core 0.6.0, `fla/ops/kda/chunk.py`.
        """
        heads, width = self.heads, self.heads * self.head_dim
        return MixerParts(
            projections=(
                Projection("qkv_proj", 3 * width),
                *self._gate("decay", self.full_rank_decay),
                Projection("beta_proj", heads),
                *self._gate("gate", self.full_rank_gate),
            ),
            width=width,
            gate_width=width,
            # A decay per head, a step bias per channel, and the weight of the gated norm, which heads share.
            vectors=heads + width + self.head_dim,
            heads=((heads, f"heads={heads}"),),
            saved=(
                Saved("q, k, v", 3 * width * BF16),
                Saved("decay and learning rate", (width + heads) * BF16),
                Saved("norms of q and k", 2 * heads * FP32, inside_scan=True),
                Saved("learning rate after its sigmoid", heads * FP32, inside_scan=True),
                Saved("scores and inverse in each chunk", 2 * heads * CHUNK * BF16, inside_scan=True),
            ),
            convolution=Convolution(3 * width, self.conv),
        )

    def _gate(self, name: str, full_rank: bool) -> tuple[Projection, ...]:
        width = self.heads * self.head_dim
        if full_rank:
            return (Projection(f"{name}_proj", width),)
        narrow = Projection(f"{name}_down", self.head_dim, sharding="none")
        return narrow, Projection(f"{name}_up", width, self.head_dim)


KERNEL_CHUNK = 64
"""Tokens of a chunk in the kernels that were measured (fla-core 0.6.0, `chunk_simple_gla`)."""


class Lightning(RecurrentMixer):
    """Lightning attention with a norm over all heads and an output gate, as in MiniMax-Text-01 and M1."""

    kind: Literal["lightning"] = "lightning"
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    chunk: PositiveInt = 256
    """Block of the published code, for other programs; prices are those of kernels with chunks of 64."""
    output_gate: bool = True
    qk_norm: bool = False
    """Norms of queries and keys, with one weight per element of a head (Ling 2.5)."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        return self

    @property
    def _activated(self) -> int:
        """Queries, keys and values, which have an activation."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def preparation(self, w: Work) -> list[Operator]:
        """Activation of queries, keys and values, after any norm of queries and keys."""
        values = w.tokens * self._activated / w.tp
        rows = w.tokens * (self.heads + self.kv_heads) / w.tp
        norms = [norm("qk_norm", "F", rows, self.head_dim)] if self.qk_norm else []
        size = values * BF16
        return [*norms, move("qkv_activation", "elementwise", "F", size, size, variant="scale")]

    def preparation_gradient(self, w: Work) -> list[Operator]:
        """Gradients of the activation and the norms."""
        size = w.tokens * self._activated / w.tp * BF16
        rows = w.tokens * (self.heads + self.kv_heads) / w.tp
        out = [move("qkv_activation.backward", "elementwise", "I", 2.0 * size, size, variant="add")]
        return [*out, norm_backward("qk_norm.backward", rows, self.head_dim)] if self.qk_norm else out

    @property
    def scan(self) -> Scan:
        """The chunked linear attention (eq. C23), with C tokens a chunk.

        Scores within a chunk and their product with the values, C d each; the state's update and use, d^2
        each: all times 2. The backward computes the states again.
        """
        state = self.head_dim * self.head_dim
        inside = KERNEL_CHUNK * self.head_dim
        return Scan(
            variant=self.kind,
            heads=self.heads,
            flop=4.0 * self.heads * (inside + state),
            repeated_flop=2.0 * self.heads * state,
            inputs=self._activated,
            outputs=self.heads * self.head_dim,
            state_elements=self.heads * state,
            chunk=KERNEL_CHUNK,
        )

    @property
    def parts(self) -> MixerParts:
        """Queries, keys and values in one GEMM, then the output gate.

        The backward keeps the inputs of the activation, then what `fla/ops/simple_gla/chunk.py` of fla-core
        0.6.0 saves.
        """
        width, size = self.heads * self.head_dim, self._activated * BF16
        keys = (self.heads + self.kv_heads) * self.head_dim * self.qk_norm * BF16
        gate = (Projection("gate_proj", width),) if self.output_gate else ()
        return MixerParts(
            projections=(Projection("qkv_proj", self._activated), *gate),
            width=width,
            gate_width=width if self.output_gate else 0,
            # The weight of the norm behind the scan, and those of queries and keys.
            vectors=width + 2 * self.head_dim * self.qk_norm,
            heads=((self.heads, f"heads={self.heads}"), (self.kv_heads, f"kv_heads={self.kv_heads}")),
            saved=(Saved("inputs of activation and norms", size + keys), Saved("q, k, v", size)),
        )


FLOP_PER_STATE = 7.0
"""FLOPs per element of the state and token: step times decay, its exponential, step times input matrix, and
multiply-adds of state and output (arXiv 2312.00752, algorithm 2)."""
SAVED_CHUNK = 2048
"""Tokens after which the kernel of mamba-ssm writes its state for the backward."""


class StateSpaceMixer(RecurrentMixer):
    """What Mamba and Mamba-2 share: the convolution, and biases of it and of the projections."""

    conv: PositiveInt = 4
    """Tokens that the short convolution reads."""
    conv_bias: bool = True
    proj_bias: bool = False
    """Biases of the input and the output projection."""


class Mamba(StateSpaceMixer):
    """Mamba-1 mixer; `inner_norms` are Jamba's norms of step size, B and C."""

    kind: Literal["mamba"] = "mamba"
    inner: PositiveInt
    """Channels, which Jamba gives as `mamba_expand` times the hidden size."""
    state: PositiveInt
    dt_rank: PositiveInt
    inner_norms: bool = False

    def preparation(self, w: Work) -> list[Operator]:
        """Jamba's norms of step size, B and C."""
        narrow = self.dt_rank + 2 * self.state
        return [norm("inner_norms", "F", w.tokens, narrow)] if self.inner_norms else []

    def preparation_gradient(self, w: Work) -> list[Operator]:
        """Gradients of these norms."""
        narrow = self.dt_rank + 2 * self.state
        return [norm_backward("inner_norms.backward", w.tokens, narrow)] if self.inner_norms else []

    @property
    def scan(self) -> Scan:
        """The selective scan by token (eq. C23), which keeps the state on the chip."""
        return Scan(
            variant=self.kind,
            heads=self.inner,
            flop=FLOP_PER_STATE * self.inner * self.state,
            repeated_flop=5.0 * self.inner * self.state,
            inputs=3 * self.inner + 2 * self.state,
            outputs=self.inner,
            state_elements=self.inner * self.state,
            chunk=1,
        )

    @property
    def parts(self) -> MixerParts:
        """Input and gate, then step size, B and C from the convolution, then the step's expansion.

        Tensors of `save_for_backward` of `SelectiveScanFn` in mamba-ssm 2.3.2; the kernel of the scan applies
        the gate, and no norm is behind it.
        """
        inner, state, narrow = self.inner, self.state, self.dt_rank + 2 * self.state
        return MixerParts(
            projections=(
                Projection("in_proj", 2 * inner, bias=self.proj_bias),
                Projection("x_proj", narrow, inner, "inputs"),
                Projection("dt_proj", inner, self.dt_rank, bias=True),
            ),
            width=inner,
            gate_width=inner,
            # A decay per channel and element of its state, a skip per channel, and the inner norms.
            vectors=inner * state + inner + narrow * self.inner_norms,
            heads=((inner, f"inner={inner}"),),
            saved=(
                Saved("inputs and step sizes", 2 * inner * BF16),
                Saved("B and C", 2 * state * BF16),
                Saved("states of chunks", inner * state / SAVED_CHUNK * 2 * FP32, inside_scan=True),
            ),
            convolution=Convolution(inner, self.conv, self.conv_bias),
            normalised=False,
            output_bias=self.proj_bias,
        )


class Mamba2(StateSpaceMixer):
    """Mamba-2 mixer with a gated norm per group, as in Nemotron-H and Nemotron 3."""

    kind: Literal["mamba2"] = "mamba2"
    heads: PositiveInt
    head_dim: PositiveInt
    groups: PositiveInt
    """Groups of heads that share an input and an output matrix, B and C."""
    state: PositiveInt
    """Elements of the state for each element of a head."""
    chunk: PositiveInt = 128
    """Tokens of a chunk."""

    @model_validator(mode="after")
    def _groups_divide(self) -> Self:
        if self.heads % self.groups:
            raise ValueError(f"groups={self.groups} does not divide heads={self.heads}")
        return self

    @property
    def _convolved(self) -> int:
        """Inputs of the heads, and B and C of every group."""
        return self.heads * self.head_dim + 2 * self.groups * self.state

    @property
    def scan(self) -> Scan:
        """The chunked scan (eq. C23): arXiv 2405.21060, section 6, with Q tokens a chunk.

        C B^T within a chunk for every group, Q N; these scores times the inputs of a head, Q P; the state of
        a chunk and its use in the next, N P each: all times 2. The backward computes C B^T and the states
        again.
        """
        scores = 2.0 * self.groups * self.chunk * self.state
        states = 2.0 * self.heads * self.state * self.head_dim
        return Scan(
            variant=self.kind,
            heads=self.heads,
            flop=scores + 2.0 * self.heads * self.chunk * self.head_dim + 2.0 * states,
            repeated_flop=scores + states,
            inputs=self._convolved + self.heads,
            outputs=self.heads * self.head_dim,
            state_elements=self.heads * self.head_dim * self.state,
            chunk=self.chunk,
        )

    @property
    def parts(self) -> MixerParts:
        """Gate, inputs, B, C and step sizes in one GEMM.

        Tensors of `save_for_backward` of `mamba_split_conv1d_scan_combined` in mamba-ssm 2.3.2, a fused
        function that saves the convolution's input only.
        """
        heads, width, convolved = self.heads, self.heads * self.head_dim, self._convolved
        return MixerParts(
            projections=(Projection("in_proj", width + convolved + heads, bias=self.proj_bias),),
            width=width,
            gate_width=width,
            # A decay, a step bias and a skip per head, and the weight of the gated norm.
            vectors=3 * heads + width,
            heads=((heads, f"heads={heads}"), (self.groups, f"groups={self.groups}")),
            saved=(Saved("step sizes", heads * BF16), Saved("norm", self.groups * FP32)),
            convolution=Convolution(convolved, self.conv, self.conv_bias, again=True),
            output_bias=self.proj_bias,
        )
